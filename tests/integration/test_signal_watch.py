"""The end of a grace waits for the checkpoint that is being written, up to a limit."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from page_blocks import ROOT

from integration.run import signal_watch
from rollouts.training.saving.checkpoints import watch_saves


@pytest.mark.parametrize(("limit_s", "expected_s"), [(300.0, 0.6), (0.2, 0.4)])
def test_the_time_of_a_checkpoint_does_not_count_up_to_a_limit(monkeypatch: pytest.MonkeyPatch, limit_s: float, expected_s: float):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(signal_watch, "SAVE_S", limit_s)
    monkeypatch.setattr(signal_watch, "_TICK_S", 0.01)
    ours, theirs = socket.socketpair()
    started = time.monotonic()
    watch = signal_watch._Watch(ours, -1, None, None, 0.2, lambda: time.monotonic() < started + 0.4)
    watch._num_stops = 1
    watch._stop_after(0.2)
    took_s = time.monotonic() - started
    ours.close()
    theirs.close()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert expected_s - 0.05 < took_s < expected_s + 0.19


def test_only_a_checkpoint_that_this_process_writes_counts(tmp_path: Path):
    left_over = tmp_path / f".tmp_step_0001_{os.getpid()}"
    left_over.mkdir()
    is_saving = watch_saves([tmp_path, tmp_path / "none"])
    (tmp_path / f".tmp_step_0002_{os.getpid()}1").mkdir()  # of another process
    (tmp_path / "step_0002").mkdir()
    assert not is_saving()
    own = tmp_path / f".tmp_step_0001_{os.getpid()}_2"
    own.mkdir()
    assert is_saving()
    own.rmdir()
    assert not is_saving()


BLOCKED = """
import sys, time
from functools import partial
import trio
from integration.run.directory import StopRequest, watch_ranks, watch_signals
from integration.run.signal_watch import Patience, watch_beside

async def main():
    stop = StopRequest()
    cause = lambda: "the process that started this one is gone"
    with watch_beside(Patience(grace_s=0.2), find_cause=cause):
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(watch_signals, stop, print, nursery.cancel_scope.cancel, 0.2))
            nursery.start_soon(watch_ranks, stop, cause, print, 0.2)
            if sys.argv[1] == "blocks":
                time.sleep(60)
            await trio.sleep(60)
    print("cleaned up")

trio.run(main)
"""


@pytest.mark.parametrize(("how", "status"), [("blocks", 130), ("waits", 0)])
def test_a_cause_to_end_without_a_signal_ends_a_run_when_its_grace_is_over(how: str, status: int):
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", BLOCKED, how], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == status and time.monotonic() - started < 55, done.stderr
    assert "has not ended within 0.2 s (--grace-s)" in done.stderr
    assert ("cleaned up" in done.stdout) == (how == "waits")

"""The end of a grace waits for the checkpoint that is being written, up to a limit."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

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

"""Directories of runs: used by two runs at a time, left by one that was killed, resumed with other settings."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

from benchmarks.reliability.commands import SFT, run_train
from benchmarks.reliability.experiment import Amount, Outcome
from rollouts.errors import ConfigError
from rollouts.training.saving.run_lock import lock_run_directory


def _hold(directory: Path) -> int:
    """Fork a process that holds the lock of a directory. Returns its number once it does."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        with lock_run_directory(directory):
            os.write(writes, b"x")
            signal.pause()
        os._exit(0)
    os.read(reads, 1)
    os.close(reads)
    os.close(writes)
    return pid


def _lock_naively(directory: Path) -> bool:
    """Lock by a file that exists, as many programs do. Returns whether the directory was free."""
    try:
        os.close(os.open(directory / "naive.lock", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def share_directory(amount: Amount) -> Outcome:
    """Use one directory twice, kill the first, and resume with other settings."""
    kills, found, naive, slowest = amount.count(5, 20), Counter[str](), 0, 0.0
    for number in range(kills):
        directory = amount.folder / f"held-{number}"
        pid = _hold(directory)
        naive_pid = _lock_naively(directory)  # of the first run, whose end does not remove the file
        started = time.monotonic()
        try:
            with lock_run_directory(directory):
                found["second runs let in"] += 1
        except ConfigError as error:
            found["second runs let in"] += 0
            found["refusals without process and start"] += not (f"process {pid}" in str(error) and "started" in str(error))
        slowest = max(slowest, time.monotonic() - started)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        try:
            with lock_run_directory(directory):
                found["locks left by a kill"] += 0
        except ConfigError:
            found["locks left by a kill"] += 1
        naive += naive_pid and not _lock_naively(directory)
    run = amount.folder / "run"
    argv = [*SFT, "--output-dir", run]
    assert run_train([*argv, "--sft.num-steps", 1], amount.folder / "streams").status == 0
    refusals = {
        "--sft.batch-size": ([*argv, "--sft.num-steps", 2, "--resume", "--sft.batch-size", 4], "batch-size: 8 -> 4"),
        "--seed": ([*argv, "--sft.num-steps", 2, "--resume", "--seed", 5], "seed: 0 -> 5"),
        "without --resume": ([*argv, "--sft.num-steps", 2], "already holds a run"),
    }
    for options, expected in refusals.values():
        ended = run_train(options, amount.folder / "streams")
        found["changed settings let in, or not named"] += ended.status != 2 or expected not in ended.error
    return Outcome(
        size=f"{kills} kills, {len(refusals)} resumes with other settings",
        measured={**found, "seconds to a refusal, at most": round(slowest, 2)}, holds=not any(found.values()) and slowest < 1.0,
        control={"locks left by a kill": naive}, control_fails=naive == kills,
    )  # fmt: skip

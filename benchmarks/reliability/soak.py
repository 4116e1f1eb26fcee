"""Long runs of the loops with fakes: memory, files and threads stay as they are, whatever the number of steps."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.fakes import FakeRun, Loop, in_memory

LOOPS: tuple[Loop, ...] = ("sft", "rl", "async", "dpo")
LOOKS = 12  # in the last half
MOST_BLOCKS = {True: 0.1, False: 10.0}  # of Python's memory, more with each step; few steps cannot tell growth from chance


class Look:
    """Logger that looks at the process at even distances in the last half of a run."""

    def __init__(self, num_steps: int) -> None:
        self.steps = [round(num_steps / 2 + (num_steps / 2 - 1) * i / (LOOKS - 1)) for i in range(LOOKS)]
        self.resident: list[int] = []  # bytes of the process
        self.blocks: list[int] = []  # of memory that Python has allocated
        self.files: list[int] = []
        self.threads: list[int] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Look, if it is time."""
        if step in self.steps:
            gc.collect()
            self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            self.blocks.append(sys.getallocatedblocks())
            self.files.append(len(os.listdir("/proc/self/fd")))
            self.threads.append(threading.active_count())

    def finish(self) -> None:
        """Do nothing."""

    def measure(self) -> dict[str, float]:
        """Return what has grown from the first third of the looks to the last, which are medians."""
        third = LOOKS // 3

        def grown(values: list[int]) -> float:
            return statistics.median(values[-third:]) - statistics.median(values[:third])

        distance = statistics.median(self.steps[-third:]) - statistics.median(self.steps[:third])
        return {
            "% of memory more": round(100 * grown(self.resident) / statistics.median(self.resident[:third]), 2),
            "blocks more a step": round(grown(self.blocks) / distance, 3), "files more": grown(self.files),
            "threads more": grown(self.threads),
        }  # fmt: skip


def soak(loop: Loop, folder: Path, num_steps: int, *, keeps_all: bool = False) -> dict[str, float]:
    """Run a loop, and measure what grows in its last half. keeps_all: with all metrics and all calls of the fakes in memory."""
    look = Look(num_steps)
    config = in_memory(num_steps, checkpoint_every=max(1, num_steps // 40))
    run = FakeRun(loop=loop, folder=folder, config=config, seconds_per_token=0.0, seconds_per_job=0.0, batch_size=1, logger=look)
    run.batches = type(run.batches)(maxlen=10)
    if keeps_all:
        run.config, run.calls = replace(config, history_steps=None), []
    elif num_steps < 2 * config.history_steps:  # type: ignore[operator]
        run.config = replace(config, history_steps=num_steps // 4)  # full before the last half, as that of a long run
    trio.run(run.go_on)
    return look.measure()


def _is_flat(grown: Mapping[str, float], *, is_long: bool) -> bool:
    flat = grown["blocks more a step"] <= MOST_BLOCKS[is_long] and grown["files more"] <= 1 and grown["threads more"] <= 1
    return flat and (not is_long or grown["% of memory more"] < 1.0)


def soak_loops(amount: Amount) -> Outcome:
    """Run the loops for many steps."""
    steps = amount.count(120, 20_000)
    is_long = steps >= 2000
    grown = {loop: soak(loop, amount.folder / loop, steps) for loop in LOOPS}
    naive = soak("rl", amount.folder / "naive", min(steps, 4000), keeps_all=True)
    measured = {f"{name}, {loop}": figure for loop, figures in grown.items() for name, figure in figures.items()}
    return Outcome(
        size=f"{steps} steps each of SFT, RL, asynchronous RL and DPO", measured=measured,
        holds=all(_is_flat(figures, is_long=is_long) for figures in grown.values()),
        control=naive, control_fails=not _is_flat(naive, is_long=is_long),
    )  # fmt: skip

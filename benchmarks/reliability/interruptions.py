"""Loops with fakes, killed at moments of a virtual clock or cancelled at scheduling points, and continued."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
import trio.testing

from benchmarks.reliability.cancellation import cancel_at_step
from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.fakes import STALENESS, FakeRun, Loop, find_prompts, in_memory, trained
from benchmarks.reliability.listeners import find_family
from rollouts.training.checkpoints import latest_checkpoint, list_checkpoints

LOOPS: tuple[Loop, ...] = ("sft", "rl", "async")


def run_virtual(function: Callable[[], Awaitable[Any]]) -> None:
    """Run on a clock that jumps once nothing has happened for 30 ms, in which the disk is written."""
    trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0.03))


def _create(folder: Path, steps: int, in_flight: str) -> FakeRun:
    run = FakeRun(loop="async", folder=folder, config=in_memory(steps))
    run.asynchronous = replace(run.asynchronous, checkpoint_in_flight=in_flight)  # type: ignore[arg-type]
    return run


def _kill_and_go_on(folder: Path, steps: int, moments: list[float], in_flight: str) -> list[FakeRun]:
    """Cancel a run at virtual seconds after each start, which saves nothing more, and go on with it."""
    runs: list[FakeRun] = []
    for moment in (*moments, None):
        run = _create(folder, steps, in_flight)
        runs.append(run)

        async def go_on(run: FakeRun = run, moment: float | None = moment) -> None:
            with trio.move_on_after(math.inf if moment is None else moment):
                await run.go_on()

        run_virtual(go_on)
    return runs


def resume_asynchronously(amount: Amount) -> Outcome:
    """Kill asynchronous runs at staleness 2 on a virtual clock, and compare them with one that nothing happened to."""
    steps, kills, draw = 6, amount.count(3, 100), amount.draw
    found, control = Counter[str](), Counter[str]()
    for in_flight, counts, number in (("interrupt", found, kills), ("restart", control, max(3, kills // 10))):
        straight = _create(amount.folder / in_flight, steps, in_flight)
        run_virtual(straight.go_on)
        for kill in range(number):
            runs = _kill_and_go_on(amount.folder / f"{in_flight}-{kill}", steps, [draw.uniform(15.0, 70.0)], in_flight)
            counts["runs that differ"] += runs[-1].lines() != straight.lines() or trained(runs) != trained([straight])
            used = [index for prompts in trained(runs).values() for index in prompts]
            counts["prompts trained on twice"] += len(used) - len(set(used))
            counts["runs that did not end"] += len(trained(runs)) != steps
            executor = runs[-1].executor
            assert executor is not None
            known = sorted({*used, *find_prompts(executor.state_dict())})
            counts["prompts lost"] += len(set(range(known[-1] + 1)) - set(known))
    return Outcome(
        size=f"{kills} kills of runs of {steps} steps at staleness {STALENESS}", measured=dict(found), holds=not any(found.values()),
        control=dict(control), control_fails=control["runs that differ"] > 0,
    )  # fmt: skip


def _is_quiet() -> bool:
    """Whether no thread works and no process is left; trio keeps idle threads for some seconds."""
    return trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0


async def _cancel_at(run: FakeRun, point: int) -> tuple[bool, bool]:
    """Cancel a run at its n-th scheduling point. Returns whether that was before its end, and whether all threads are done."""
    with cancel_at_step(point, any_task=True) as scope:
        await run.go_on()
    return scope.cancelled_caught, _is_quiet()


def _cancel_and_go_on(loop: Loop, folder: Path, point: int, cuts_log: bool = True) -> Counter[str]:
    """Cancel a run at a scheduling point, and go on in its directory. Returns what is wrong, and whether the point was before the end."""
    run, again = (
        FakeRun(loop=loop, folder=folder, config=in_memory(3), seconds_per_token=0.0, seconds_per_job=0.0, cuts_log=cuts_log) for _ in "ab"
    )
    cancelled, quiet = trio.run(_cancel_at, run, point)
    found = Counter({"points": int(cancelled), "threads left": int(not quiet), "processes left": len(find_family(os.getpid())) - 1})
    if list_checkpoints(run.checkpoints):
        found["directories without a checkpoint that loads"] = int(latest_checkpoint(run.checkpoints) is None)
    if cancelled:
        trio.run(again.go_on)
        found["runs with lines of metrics lost or repeated"] = int(len(again.lines()) != 3)
    return found


def cancel_everywhere(amount: Amount) -> Outcome:
    """Cancel each loop at scheduling points of any task, and go on in the same directory."""
    points, distance = amount.count(12, 2000), 1 if amount.is_full and amount.share == 1.0 else 17
    found, control = Counter[str](), Counter[str]()
    for loop in LOOPS:
        for number in range(points):
            one = _cancel_and_go_on(loop, amount.folder / f"{loop}-{number}", 1 + distance * number)
            found.update(one)
            if not one["points"]:
                break
    for number in range(12):
        control.update(_cancel_and_go_on("rl", amount.folder / f"naive-{number}", 1 + 17 * number, cuts_log=False))
    rest: Mapping[str, int] = {name: count for name, count in found.items() if name != "points"}
    repeated = "runs with lines of metrics lost or repeated"
    return Outcome(
        size=f"{found['points']} scheduling points, {distance} apart, of SFT, RL and asynchronous RL", measured=rest,
        holds=not any(rest.values()), control={repeated: control[repeated]}, control_fails=control[repeated] > 0,
    )  # fmt: skip

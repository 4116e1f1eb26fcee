"""Loops with fakes, killed at moments of a virtual clock or cancelled at scheduling points, and continued."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import trio
import trio.testing
from safetensors.torch import save_file

from benchmarks.reliability.cancellation import cancel_at_step
from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.fakes import STALENESS, FakeRun, Loop, find_prompts, in_memory, trained
from benchmarks.reliability.fleet_syncs import Telling, write_weights
from benchmarks.reliability.listeners import find_family
from rollouts.backends.protocol import Future
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.http.endpoint import RetryPolicy
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.testing import FakeBackend, FakeSGLangServer, FakeVLLMServer
from rollouts.training.saving.checkpoints import latest_checkpoint, list_checkpoints
from rollouts.types import TokenOutputs, TrainBatch


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


class _WithWeights(FakeBackend):
    """A backend in whose directories servers find weights."""

    def save_checkpoint(self, directory: Path | str) -> Future[None]:
        self._put(Path(directory))
        return super().save_checkpoint(directory)

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> Future[None]:
        self._put(Path(directory))
        return super().export_weights(directory, dtype=dtype)

    def _put(self, directory: Path) -> None:
        save_file({"w": torch.tensor([float(self.num_updates)])}, directory / "model.safetensors")


class _WithScores(FakeBackend):
    """A backend that scores rows, each by its tokens."""

    def _outputs(self, batch: TrainBatch, with_entropy: bool) -> TokenOutputs:
        return replace(super()._outputs(batch, with_entropy), values=batch.tokens.float() / 10)


@asynccontextmanager
async def _open_servers(folder: Path) -> AsyncGenerator[EngineFleet]:
    """Serve as a vLLM and as an SGLang server, and open a fleet of the two."""
    served, retry = write_weights(folder, 0), RetryPolicy(attempts=2, first_wait_s=0.01, longest_wait_s=0.02, budget_s=1.0)
    async with AsyncExitStack() as stack:
        engines: list[Any] = []
        for create, connect in ((FakeVLLMServer, VLLMEngine), (FakeSGLangServer, SGLangEngine)):
            server = await stack.enter_async_context(create(Telling(served)))
            engines.append(await stack.enter_async_context(connect(server.url, retry=retry, vocab_size=128)))
        yield await stack.enter_async_context(EngineFleet(engines, initial_weights=served, say=lambda text: None))


@dataclass(frozen=True)
class Place:
    """What is cancelled: a loop, the steps that have 2,000 scheduling points, and whether its engines are servers."""

    name: str
    loop: Loop
    steps: int  # of a full run
    short_steps: int = 3
    has_servers: bool = False

    def create(self, folder: Path, steps: int, **changes: Any) -> FakeRun:
        """Create a run."""
        config = in_memory(steps)
        if self.loop == "reward_model":
            changes |= {"create_backend": _WithScores}
        if self.has_servers:
            config = replace(config, weight_sync="checkpoint")
            changes |= {"create_backend": _WithWeights, "batch_size": 1}
        return FakeRun(loop=self.loop, folder=folder / "run", config=config, seconds_per_token=0.0, seconds_per_job=0.0, **changes)


PLACES = (
    Place("SFT", "sft", 184, 20),
    Place("DPO", "dpo", 184, 20),
    Place("reward model", "reward_model", 184, 20),
    Place("RL", "rl", 14),
    Place("asynchronous RL", "async", 14),
    Place("weight sync with servers", "rl", 8, has_servers=True),
)
SPAN = 2000  # scheduling points from the beginning


def _is_quiet() -> bool:
    """Whether no thread works and no process is left; trio keeps idle threads for some seconds."""
    return trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0


async def _cancel_at(place: Place, run: FakeRun, point: int | None) -> tuple[bool, bool]:
    """Cancel a run at its n-th scheduling point. Returns whether that was before its end, and whether all threads are done."""
    async with AsyncExitStack() as stack:
        if place.has_servers:
            folder = run.folder.with_name(f"served-{point}")
            folder.mkdir(parents=True)
            run.engines = [await stack.enter_async_context(_open_servers(folder))]
        with cancel_at_step(-1 if point is None else point, any_task=True) as scope:
            await run.go_on()
        return scope.cancelled_caught, _is_quiet()


def cancel_and_go_on(place: Place, folder: Path, point: int, steps: int, *, cuts_log: bool = True) -> Counter[str]:
    """Cancel a run at a scheduling point, and go on in its directory. Returns what is wrong, and whether the point was before the end."""
    run, before = place.create(folder, steps, cuts_log=cuts_log), find_family(os.getpid())
    cancelled, quiet = trio.run(_cancel_at, place, run, point)
    left = find_family(os.getpid()) - before
    found = Counter({"points": int(cancelled), "threads left": int(not quiet), "processes left": len(left)})
    saved = list_checkpoints(run.checkpoints)
    newest = latest_checkpoint(run.checkpoints) if saved else None
    found["directories without a checkpoint that loads"] = int(bool(saved) and newest is None)
    if cancelled:
        end = min(steps, 2 + (0 if newest is None else int(newest.name.removeprefix("step_"))))
        again = place.create(folder, end, cuts_log=cuts_log)
        trio.run(_cancel_at, place, again, None)
        told = [json.loads(line)["step"] for line in again.lines()]
        found[LINES] = int(told != list(range(1, end + 1)))
    shutil.rmtree(folder)
    return found


LINES = "runs with lines of metrics lost or repeated"


STRETCH = 100  # points that a process takes at once


def _cancel_stretch(place: Place, folder: Path, points: range, steps: int) -> Counter[str]:
    """Cancel a run at these points, or until it ends before one. Returns what is wrong."""
    found = Counter[str]()
    for point in points:
        one = cancel_and_go_on(place, folder, point, steps)
        found.update(one)
        if not one["points"]:
            break
    return found


def _cancel_stretches(stretches: Sequence[tuple[Place, Path, range, int]]) -> list[Counter[str]]:
    """Cancel at all points: those of a full run in two processes for each core, as runs wait for their files half of the time."""
    if len(stretches) == len(PLACES):  # a short run
        return [_cancel_stretch(*stretch) for stretch in stretches]
    with ProcessPoolExecutor(2 * len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        return list(processes.map(_cancel_stretch, *zip(*stretches, strict=True)))


def cancel_everywhere(amount: Amount) -> Outcome:
    """Cancel each loop at scheduling points of any task, and go on in the same directory for some steps."""
    points = amount.count(8, SPAN)
    span = SPAN if amount.is_full else 200
    distance, found, control, tried = span // points, Counter[str](), Counter[str](), dict[str, int]()
    stretches: list[tuple[Place, Path, range, int]] = []
    for place in PLACES:
        steps = place.steps if amount.is_full else place.short_steps
        numbers = [range(first, min(first + STRETCH, points)) for first in range(0, points, STRETCH)]
        moments = [range(1 + distance * part.start, 1 + distance * part.stop, distance) for part in numbers]
        stretches += [(place, amount.folder / f"{place.name}-{part.start}", part, steps) for part in moments]
    for (place, *_), one in zip(stretches, _cancel_stretches(stretches), strict=True):
        found.update(one)
        tried[place.name] = tried.get(place.name, 0) + one["points"]
    for number in range(12):
        control.update(cancel_and_go_on(PLACES[3], amount.folder / "naive", 1 + 17 * number, 3, cuts_log=False))
    rest: Mapping[str, int] = {name: count for name, count in found.items() if name != "points"}
    told = ", ".join(f"{count} of {name}" for name, count in tried.items())
    return Outcome(
        size=f"{found['points']} scheduling points, {distance} apart: {told}", measured=rest, holds=not any(rest.values()),
        control={LINES: control[LINES]}, control_fails=control[LINES] > 0,
    )  # fmt: skip

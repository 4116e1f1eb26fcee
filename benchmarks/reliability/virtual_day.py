"""A day of asynchronous training on a virtual clock, in which engines die, rewards are slow, and the machine is taken away."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import trio
import trio.testing

from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.fakes import STALENESS, FakeRun, find_prompts, in_memory, trained
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig
from rollouts.errors import EngineError, RolloutsError
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, random_answer
from rollouts.training.abandonment import Abandonment
from rollouts.types import Sample

HOUR = 3600.0
PATIENCE_S = 2 * HOUR  # without a finished step: the run hangs
FLEET = FleetConfig(exclude_failed=True, first_wait_s=5.0, max_retries=100, patience_s=HOUR)


async def slow_reward(sample: Sample) -> float:
    """Return 0 or 1 after some seconds, in one of 25 cases after ten minutes; a pure function of the tokens."""
    drawn = derive_seed(*sample.tokens)
    await trio.sleep(600.0 if drawn % 25 == 0 else 1.0 + drawn % 997 / 100)
    return float(drawn % 2)


def seconds_per_token(prompt: tuple[int, ...], seed: int | None) -> float:
    """Return 5 to 25 s."""
    return 5.0 + derive_seed(0 if seed is None else seed, *prompt) % 1999 / 100


async def _run_here(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@contextmanager
def deterministic(seed: int) -> Generator[None]:
    """Let trio run tasks in an order drawn from the seed, and what would run in threads at once: nothing depends on real time."""
    scheduler: Any = importlib.import_module("trio._core._run")
    before, run_sync = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, trio.to_thread.run_sync
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, trio.to_thread.run_sync = True, _run_here
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, trio.to_thread.run_sync = before, run_sync
        scheduler._r.seed()


@dataclass
class Day:
    """A run that is begun and taken away again and again until its time is over."""

    folder: Path
    seconds: float
    draw: Random
    keeps_pending: bool = True

    def __post_init__(self) -> None:
        self.now, self.runs, self.found, self.dead = 0.0, list[FakeRun](), Counter[str](), set[str]()

    def live(self) -> None:
        """Live through the day."""
        while self.now < self.seconds:
            run = FakeRun(
                loop="async", folder=self.folder, config=in_memory(10**6), reward=slow_reward, reward_timeout_s=HOUR, seconds_per_job=20.0,
                keeps_pending=self.keeps_pending, num_prompts=20_000,
            )  # fmt: skip
            run.asynchronous = replace(run.asynchronous, patience_s=PATIENCE_S)
            self.runs.append(run)
            trio.run(self._run, run, clock=trio.testing.MockClock(autojump_threshold=0.0))

    async def _run(self, run: FakeRun) -> None:
        """Run until the machine is taken away, at once and with a request to end in turn, or until the end of the day."""
        begun, last = trio.current_time(), self.seconds - self.now
        taken, is_told = min(self.draw.expovariate(1 / HOUR), self.seconds / 3), len(self.runs) % 2 == 0
        abandonment = Abandonment()
        self.dead.clear()
        engines = [FakeEngine(random_answer(), seconds_per_token=seconds_per_token, calls=run.calls, name=f"{i}") for i in range(3)]
        try:
            async with EngineFleet(engines, config=FLEET, say=lambda text: None) as fleet, trio.open_nursery() as nursery:
                run.engines = [fleet]
                for engine in engines:
                    nursery.start_soon(self._lose, engine, Random(self.draw.random()))

                async def take() -> None:
                    await trio.sleep(taken)
                    self.found["preemptions"] += 1
                    if not is_told:
                        nursery.cancel_scope.cancel()
                    abandonment.request()

                if taken < last:
                    nursery.start_soon(take)
                with trio.move_on_after(last + 2 * PATIENCE_S) as limit:
                    await run.go_on(should_stop=lambda: trio.current_time() - begun >= last, abandonment=abandonment)
                self.found["deadlocks"] += limit.cancelled_caught
                nursery.cancel_scope.cancel()
        except* EngineError as errors:  # as it must where no engine is left to take new weights
            self.found["ends without any engine" if len(self.dead) == len(engines) else "runs ended by an error"] += 1
            print(f"{self.now:.0f} s: {errors.exceptions}", file=sys.stderr)
        except* RolloutsError as errors:
            self.found["runs ended by an error"] += 1
            print(f"{self.now:.0f} s: {errors.exceptions}", file=sys.stderr)
        self.now += max(trio.current_time() - begun, 1.0)

    async def _lose(self, engine: FakeEngine, draw: Random) -> None:
        """Kill an engine and start it again, as a server that has the weights of the beginning."""
        while True:
            await trio.sleep(draw.expovariate(1 / HOUR))
            engine.kill()
            self.dead.add(engine.name)
            self.found["deaths of engines"] += 1
            await trio.sleep(draw.uniform(30.0, 900.0))
            engine.revive(0)
            self.dead.remove(engine.name)

    def count(self) -> Counter[str]:
        """Count what was done and what went wrong."""
        steps = trained(self.runs)
        used = [index for prompts in steps.values() for index in prompts]
        executor = self.runs[-1].executor
        assert executor is not None, "no run has begun"
        known = {*used, *find_prompts(executor.state_dict())}
        ages = [
            step - 1 - version
            for run in self.runs
            for step, batch in run.batches
            for sample in batch.samples
            for version, mask in zip(sample.weight_versions or (-1,) * len(sample.tokens), sample.loss_mask, strict=True)
            if mask
        ]
        self.found.update({
            "steps": len(steps), "tokens too old": sum(not 0 <= age <= STALENESS for age in ages),
            "prompts lost": max(known) + 1 - len(known),
            "prompts trained on twice": len(used) - len(set(used)), "steps missing": max(steps) - len(steps),
        })  # fmt: skip
        return self.found

    def digest(self) -> str:
        """Return a hash of all that the day has left."""
        told = [self.runs[-1].lines(), sorted(trained(self.runs).items()), sorted(self.found.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


WRONG = (
    "deadlocks", "runs ended by an error", "tokens too old", "prompts lost", "prompts trained on twice", "steps missing",
    "differences of a second day",
)  # fmt: skip


def live_a_day(amount: Amount) -> Outcome:
    """Live through the day twice, and once with the naive variant."""
    hours = amount.count(1, 24)

    def live(name: str, **options: Any) -> Day:
        with deterministic(amount.seed):
            day = Day(amount.folder / name, hours * HOUR, amount.draw, **options)
            day.live()
        day.count()
        return day

    day, again, naive = live("day"), live("again"), live("naive", keeps_pending=False)
    found = day.found
    found["differences of a second day"] = int(day.digest() != again.digest())
    measured = {name: found[name] for name in WRONG}
    done = ", ".join(f"{found[name]} {name}" for name in ("steps", "preemptions", "deaths of engines", "ends without any engine"))
    return Outcome(
        size=f"{hours} virtual hours at staleness {STALENESS}: {done}", measured=measured, holds=not any(measured.values()),
        control={name: naive.found[name] for name in WRONG[:-1]}, control_fails=naive.found["prompts lost"] > 0,
    )  # fmt: skip

"""A simulated run: the real executor and loops over simulated engines and a simulated trainer, on trio's mock clock."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
import trio.testing

from integration.simulate.engine import GroupRequest, SimulatedFleet
from integration.simulate.lengths import ResponseLengths
from integration.simulate.report import Recorder, Report
from integration.simulate.settings import LengthSection, Simulation
from integration.simulate.trainer import SimulatedBackend, create_idle_algorithm
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import EngineError, raise_single_errors
from rollouts.generation.contract import OnEnd
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.rl_loop import run_rl_training
from rollouts.types import Group, Prompt

_NUM_MOMENTS = 256  # samples of the slots in a run
_NUM_PROMPTS = 64  # their text does not matter; drawing from a short list is faster


def mean_length(section: LengthSection, num_samples: int, seed: int) -> float:
    """Return the mean tokens of a response, rounded and truncated, over more than ten thousand responses."""
    lengths = ResponseLengths(section, num_samples, seed + 1)
    drawn = [length for index in range(-(-16384 // num_samples)) for length in lengths.of_group(index)]
    return sum(drawn) / len(drawn)


def bound_throughput(simulation: Simulation) -> float:
    """Return the throughput of the slower stage alone, in samples per second: full slots, or a trainer that never waits."""
    engine, trainer = simulation.engine, simulation.trainer
    samples = simulation.batch_size * trainer.samples_per_prompt
    tokens = samples * mean_length(simulation.length, trainer.samples_per_prompt, simulation.seed)
    generate_s = tokens / (engine.engines * engine.slots * engine.token_rate) / (1 - simulation.refused_fraction)
    train_s = trainer.train_s + (0.0 if trainer.train_rate is None else tokens / trainer.train_rate)
    return samples / (max(generate_s, train_s) + engine.sync_s / trainer.sync_every)


async def run_simulation(simulation: Simulation, *, by_tasks: bool = False) -> Report:
    """Simulate a run. Call it under trio's MockClock(autojump_threshold=0).

    Args:
        by_tasks: generate each group of the asynchronous loop in a task of its own, as engines do; equal figures, at a higher cost.

    Raises: ConfigError for contradictory settings; errors of the executor and the loops.
    """
    engine, trainer = simulation.engine, simulation.trainer
    lengths = ResponseLengths(simulation.length, trainer.samples_per_prompt, simulation.seed)
    fleet = SimulatedFleet(engine, lengths, simulation.seed, simulation.refused_fraction)
    backend = SimulatedBackend(trainer)
    group_fn = GroupFn(fleet, continues=engine.keep_partial)
    buffer = DataBuffer(["simulated"] * _NUM_PROMPTS, seed=simulation.seed)
    rollout = RolloutConfig(
        batch_size=simulation.batch_size,
        over_sampling_factor=simulation.over_sampling_factor,
        generate_fn=group_fn.__call__ if by_tasks else group_fn,
        filter_fn=has_reward if simulation.refused_fraction else None,
        segment_log_probs=simulation.asynchronous.segment_wise,
    )
    training = RLTrainingConfig(
        num_steps=10**9,
        sync_every=trainer.sync_every,
        algorithm=create_idle_algorithm(segment_wise=simulation.asynchronous.segment_wise),
        log_every=10**9,
        history_steps=1,
        weight_sync="memory",
    )
    end_s = simulation.hours * 3600
    max_running = simulation.asynchronous.concurrent_groups(simulation.batch_size * trainer.sync_every)
    recorder = Recorder(fleet, backend, every_s=end_s / _NUM_MOMENTS, max_running=max_running, is_async=not simulation.synchronous)

    def is_over() -> bool:
        return trio.current_time() >= end_s

    observe: dict[str, Any] = {"should_stop": is_over, "on_rollouts": recorder.take, "clock": trio.current_time}
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.run)
            nursery.start_soon(recorder.run)
            if simulation.synchronous:
                async with AsyncRolloutManager(buffer, rollout, engines=[fleet]) as manager:
                    await run_rl_training(backend, buffer, manager, [fleet], training, **observe)
                    report = create_report(simulation, recorder, fleet)
            else:
                executor = create_workflow_executor(
                    buffer, rollout, simulation.asynchronous, engines=[fleet], batches_per_version=trainer.sync_every
                )
                async with executor:
                    await run_async_rl_training(backend, buffer, executor, [fleet], training, **observe)
                    report = create_report(simulation, recorder, fleet)
            nursery.cancel_scope.cancel()
    return report


def create_report(simulation: Simulation, recorder: Recorder, fleet: SimulatedFleet) -> Report:
    """Return the figures of a run that has just ended."""
    oldest_kept = -1 if simulation.synchronous else fleet.version - simulation.asynchronous.max_staleness
    return recorder.report(
        samples_per_prompt=simulation.trainer.samples_per_prompt,
        bound_samples_per_s=bound_throughput(simulation),
        oldest_kept=oldest_kept,
    )


@dataclass(frozen=True)
class GroupFn:
    """Generate function over the fleet, which needs no task for a group."""

    fleet: SimulatedFleet
    continues: bool  # whether interrupted groups are resumed

    async def __call__(self, prompt: Prompt, n: int, partial: Group) -> Group:
        """Return the group of a prompt."""
        return await self.fleet.generate_group(prompt, partial if self.continues else ())

    def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:
        """Begin the group of a prompt; give it to on_end."""

        def end(request: GroupRequest) -> None:
            try:
                group = self.fleet.take_group(request)
            except EngineError as error:
                on_end(error)
            else:
                on_end(group)

        self.fleet.submit(prompt, partial if self.continues else (), end)


def has_reward(group: Group) -> bool:
    """Whether a group has a reward other than 0: the filter of simulations with refused groups."""
    return bool(group[0].reward)


@contextmanager
def collect_rarely() -> Generator[None]:
    """Run the garbage collector rarely in the block: with ten thousand groups in flight it would visit all of them again and again."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(simulation: Simulation, *, by_tasks: bool = False) -> Report:
    """Simulate a run; by_tasks: as for run_simulation."""
    with collect_rarely():
        return trio.run(partial(run_simulation, simulation, by_tasks=by_tasks), clock=trio.testing.MockClock(autojump_threshold=0))


def describe_simulation(simulation: Simulation) -> str:
    """Describe the settings of a simulation on one line."""
    engine, trainer, asynchronous = simulation.engine, simulation.trainer, simulation.asynchronous
    loop = "synchronous" if simulation.synchronous else f"asynchronous, max_staleness {asynchronous.max_staleness}"
    what = simulation.length.file or f"{simulation.length.distribution}, mean {simulation.length.mean_tokens:,.0f}"
    return (
        f"{engine.engines} engines x {engine.slots} slots, {simulation.batch_size} groups x {trainer.samples_per_prompt} in a step of "
        f"{trainer.train_s:g} s; lengths {what}; {loop}"
    )

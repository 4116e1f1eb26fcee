"""Simulate hours of a training run in seconds: the real executor and loops over engines and a trainer that only take virtual time.

    python -m integration.simulate [--engines 8] [--slots 64] [--hours 1] [--train-s 30] [--mean-tokens 8000] [--max-staleness 2] ...
                                   [--synchronous] [--json] [--picture FILE.png]

Prints throughput, utilization of engines and trainer, staleness of trained tokens, wasted tokens, and the limit of the run.
Time is trio's MockClock. Equal settings give equal figures: simultaneous events are ordered by prompt.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import trio
import trio.testing
import tyro

from integration.settings.closed_stdout import ignore_closed_stdout
from integration.simulate.engine import EngineSection, SimulatedFleet
from integration.simulate.lengths import LengthSection, ResponseLengths
from integration.simulate.report import Recorder, Report, describe_report, draw_report
from integration.simulate.trainer import SimulatedBackend, TrainerSection, create_idle_algorithm
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.config import RLTrainingConfig, RolloutConfig, check_setting
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError, DataError, RolloutsError, make_safe, raise_single_errors
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.rl_loop import run_rl_training
from rollouts.types import Group, Prompt

_NUM_MOMENTS = 256  # samples of the slots in a run
_NUM_PROMPTS = 64  # their text does not matter; drawing from a short list is faster


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The settings of a simulated run."""

    engine: Annotated[EngineSection, tyro.conf.arg(name="")] = field(default_factory=EngineSection)
    length: Annotated[LengthSection, tyro.conf.arg(name="")] = field(default_factory=LengthSection)
    trainer: Annotated[TrainerSection, tyro.conf.arg(name="")] = field(default_factory=TrainerSection)
    asynchronous: Annotated[AsyncConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: AsyncConfig(enabled=True))
    hours: float = 1.0  # hours of virtual time; the run ends with the step in progress
    synchronous: bool = False  # use the synchronous loop: generate, train, generate, ...
    over_sampling_factor: float = 1.0  # synchronous loop: groups in flight per group wanted; surplus groups are carried over
    refused_fraction: float = 0.0  # fraction of finished groups that a filter refuses, 0 to less than 1
    seed: int = 0  # seed of lengths, failures and rewards

    def __post_init__(self) -> None:
        check_setting(0 < self.hours < math.inf, "hours", self.hours, "a finite number above 0")
        check_setting(0 <= self.refused_fraction < 1, "refused_fraction", self.refused_fraction, "at least 0 and less than 1")

    @property
    def batch_size(self) -> int:
        """The number of groups per step."""
        slots = self.engine.engines * self.engine.slots
        return self.trainer.batch_size or max(1, slots // self.trainer.samples_per_prompt)

    @property
    def bound_samples_per_s(self) -> float:
        """The throughput of the slower stage alone, in samples per second: full slots, or a trainer that never waits."""
        lengths, samples = self.engine, self.batch_size * self.trainer.samples_per_prompt
        mean = mean_length(self.length, self.trainer.samples_per_prompt, self.seed)
        tokens = samples * mean
        generate_s = tokens / (lengths.engines * lengths.slots * lengths.token_rate) / (1 - self.refused_fraction)
        train_s = self.trainer.train_s + (0.0 if self.trainer.train_rate is None else tokens / self.trainer.train_rate)
        return samples / (max(generate_s, train_s) + lengths.sync_s / self.trainer.sync_every)


def mean_length(section: LengthSection, num_samples: int, seed: int) -> float:
    """Return the mean tokens of a response, rounded and truncated, over more than ten thousand responses."""
    lengths = ResponseLengths(section, num_samples, seed + 1)
    drawn = [length for index in range(-(-16384 // num_samples)) for length in lengths.of_group(index)]
    return sum(drawn) / len(drawn)


async def run_simulation(simulation: Simulation) -> Report:
    """Simulate a run. Call it under trio's MockClock(autojump_threshold=0).

    Raises: ConfigError for contradictory settings; errors of the executor and the loops.
    """
    engine, trainer = simulation.engine, simulation.trainer
    lengths = ResponseLengths(simulation.length, trainer.samples_per_prompt, simulation.seed)
    fleet = SimulatedFleet(engine, lengths, simulation.seed, simulation.refused_fraction)
    backend = SimulatedBackend(trainer)
    buffer = DataBuffer(["simulated"] * _NUM_PROMPTS, seed=simulation.seed)
    rollout = RolloutConfig(
        batch_size=simulation.batch_size,
        over_sampling_factor=simulation.over_sampling_factor,
        generate_fn=create_group_fn(fleet, continues=engine.keep_partial),
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
        bound_samples_per_s=simulation.bound_samples_per_s,
        oldest_kept=oldest_kept,
    )


def create_group_fn(fleet: SimulatedFleet, *, continues: bool) -> Callable[..., Any]:
    """Return a generate_fn over the fleet. continues: it resumes interrupted groups."""

    async def generate(prompt: Prompt, n: int) -> Group:
        return await fleet.generate_group(prompt)

    async def go_on(prompt: Prompt, n: int, partial: Group) -> Group:
        return await fleet.generate_group(prompt, partial)

    return go_on if continues else generate


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


def simulate(simulation: Simulation) -> Report:
    """Simulate a run."""
    with collect_rarely():
        return trio.run(partial(run_simulation, simulation), clock=trio.testing.MockClock(autojump_threshold=0))


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Simulate hours of a training run in seconds."""

    simulation: Annotated[Simulation, tyro.conf.arg(name="")] = field(default_factory=Simulation)
    json: bool = False
    """print the figures as JSON"""
    picture: str | None = None
    """PNG file for a picture of the run; None = no picture"""


def parse_arguments(argv: Sequence[str]) -> _Arguments:
    """Parse the arguments of the command. Raises ConfigError for refused settings, SystemExit for unknown flags and for --help."""
    with ignore_closed_stdout():
        return tyro.cli(_Arguments, prog="python -m integration.simulate", args=list(argv))
    raise SystemExit(0)  # the reader of the help closed stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        simulation = arguments.simulation
        start = time.perf_counter()
        report = simulate(simulation)
        seconds = time.perf_counter() - start
        title = describe_simulation(simulation)
        if arguments.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print(describe_report(report, f"{title}\n  simulated in {seconds:.1f} s"))
        if arguments.picture is not None and not draw_report(report, Path(arguments.picture), title):
            raise ConfigError("--picture needs matplotlib: pip install 'rollouts-rl[plots]'")
    except (ConfigError, DataError) as error:
        print(make_safe(f"error: {error}"), file=sys.stderr)
        return 2
    except RolloutsError as error:
        print(make_safe(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


def describe_simulation(simulation: Simulation) -> str:
    """Describe the settings of a simulation on one line."""
    engine, trainer, asynchronous = simulation.engine, simulation.trainer, simulation.asynchronous
    loop = "synchronous" if simulation.synchronous else f"asynchronous, max_staleness {asynchronous.max_staleness}"
    what = simulation.length.file or f"{simulation.length.distribution}, mean {simulation.length.mean_tokens:,.0f}"
    return (
        f"{engine.engines} engines x {engine.slots} slots, {simulation.batch_size} groups x {trainer.samples_per_prompt} in a step of "
        f"{trainer.train_s:g} s; lengths {what}; {loop}"
    )


if __name__ == "__main__":
    sys.exit(main())

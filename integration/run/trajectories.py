"""Trajectory files of a run: selected rollouts of each step, written once their advantages are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import Tensor

from integration.settings.sections import TrajectorySection
from rollouts.checks import require_flag
from rollouts.data.records import attach_estimates, derive_steps, shorten_log_probs
from rollouts.data.samples import describe_sample
from rollouts.data.trajectories import select_groups, select_samples, write_records
from rollouts.errors import ConfigError, DataError, OutputError
from rollouts.rewards.answers import load_function
from rollouts.types import RolloutBatch, Sample, TrainBatch


class TrajectoryWriter:
    """Writer of directory/step_NNNN.jsonl, one file per step, which a resumed run replaces. A context manager: its exit writes the rollouts
    of a step that failed before advantages were computed, to help find the cause."""

    def __init__(self, directory: Path, section: TrajectorySection, weigh: Callable[[TrainBatch], Tensor] | None = None) -> None:
        """Load the condition.

        Args:
            weigh: Algorithm.weigh where one optimizer step trains on the whole batch, so that loss weights are known; None = they are not.

        Raises: ConfigError if the condition does not exist.
        """
        self._directory, self._section, self._weigh = directory, section, weigh
        self._condition = load_condition(section)
        self._held: tuple[int, RolloutBatch] | None = None

    def hold(self, step: int, rollouts: RolloutBatch) -> None:
        """Begin a step. Rollouts of an earlier step that was not trained on are written without advantages."""
        self._write_held()
        self._held = (step, rollouts)

    def write(self, step: int, rollouts: RolloutBatch, batch: TrainBatch | None) -> None:
        """Write the selected rollouts of a step. batch: the estimates of the algorithm, row by row; None = write no estimates.

        Raises: DataError if the condition fails.
        """
        self._held = None
        if self._section.writes:
            if batch is not None and self._weigh is not None:
                batch = replace(batch, loss_weights=self._weigh(batch))
            records = attach_estimates(rollouts.samples, self._select(rollouts.samples), batch)
            records = tuple(replace(record, sample=shorten_log_probs(record.sample)) for record in records)
            if self._section.steps:
                records = tuple(replace(record, steps=derive_steps(record)) for record in records)
            write_records(self._directory / f"step_{step:04d}.jsonl", records)

    def _select(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        if self._section.every is None:
            return select_groups(samples, count=self._section.groups, condition=self._condition)
        return select_samples(samples, every=self._section.every, condition=self._condition)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._write_held()
        except (DataError, OutputError) as problem:
            if error is None:
                raise
            error.add_note(f"the rollouts of its step could not be written: {problem}")

    def _write_held(self) -> None:
        if self._held is not None:
            self.write(*self._held, None)


def load_condition(section: TrajectorySection) -> Callable[[Sample], bool] | None:
    """Load the function that trajectories.condition names; None = keep all samples. Raises ConfigError if it does not exist."""
    if section.condition is None:
        return None
    if not section.writes:
        zero = "groups" if section.every is None else "every"
        raise ConfigError(
            f"trajectories.condition is {section.condition!r}, but trajectories.{zero} is 0, so nothing is written: set it to 1"
        )
    name, function = section.condition, load_function(section.condition)

    def holds(sample: Sample) -> bool:
        try:
            return require_flag(function(sample), name)
        except (Exception, SystemExit) as error:  # the error must name the user's function, whatever it raises
            what = f"trajectories.condition {name!r} failed on {describe_sample(sample)}: {type(error).__name__}: {error}"
            raise DataError(f"{what}. Repair it, or leave it out") from error

    return holds

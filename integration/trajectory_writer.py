"""Which rollouts of a run are written to its trajectory files, and when: once it is known what their training step makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from integration.sections import TrajectorySection
from rollouts.errors import ConfigError, DataError
from rollouts.rewards.answers import load_function
from rollouts.samples import describe_sample
from rollouts.trajectories import select_samples, write_records
from rollouts.trajectory_records import attach_estimates
from rollouts.types import RolloutBatch, Sample, TrainBatch


class TrajectoryWriter:
    """Writes directory/step_NNNN.jsonl, one file a step, so that a resumed run replaces its own. A context manager: at its end the rollouts
    of a step are written that was begun and failed before there were advantages, for whoever looks for the reason."""

    def __init__(self, directory: Path, section: TrajectorySection) -> None:
        """Raises: ConfigError if there is no such condition."""
        self._directory, self._every = directory, section.every
        self._condition = load_condition(section)
        self._held: tuple[int, RolloutBatch] | None = None

    def hold(self, step: int, rollouts: RolloutBatch) -> None:
        """A step begins. Rollouts of one before that was not trained on are written without advantages."""
        self._write_held()
        self._held = (step, rollouts)

    def write(self, step: int, rollouts: RolloutBatch, batch: TrainBatch | None) -> None:
        """Write the chosen ones of a step. batch: as the algorithm's estimate returned it, row by row; None = without.

        Raises: DataError if the condition fails.
        """
        self._held = None
        if self._every > 0:
            chosen = select_samples(rollouts.samples, every=self._every, condition=self._condition)
            write_records(self._directory / f"step_{step:04d}.jsonl", attach_estimates(rollouts.samples, chosen, batch))

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._write_held()
        except (DataError, OSError) as problem:
            if error is None:
                raise
            error.add_note(f"the rollouts of its step could not be written: {problem}")

    def _write_held(self) -> None:
        if self._held is not None:
            self.write(*self._held, None)


def load_condition(section: TrajectorySection) -> Callable[[Sample], bool] | None:
    """The function that trajectories.condition names; None = keep all. Raises ConfigError if there is none of that name."""
    if section.condition is None:
        return None
    if section.every == 0:
        raise ConfigError(
            f"trajectories.condition is {section.condition!r}, but trajectories.every is 0, so nothing is written: set it to 1"
        )
    name, function = section.condition, load_function(section.condition)

    def holds(sample: Sample) -> bool:
        try:
            return bool(function(sample))
        except Exception as error:  # whatever the user's code raises: the run has to say whose it is
            what = f"trajectories.condition {name!r} failed on {describe_sample(sample)}: {type(error).__name__}: {error}"
            raise DataError(f"{what}. Repair it, or leave it out") from error

    return holds

"""Files that the RL stage writes step by step: selected rollouts, once the update has seen them, and the ledger of its prompts.

The ledger is one JSON line per step:

    {"step": 3, "prompts": [128, 130, 131]}

A prompt's number is its position in the stream of prompts, epochs included: with n training problems, number i belongs to epoch i // n.
Each number occurs once, however often a run is interrupted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import trio
from torch import Tensor

from integration.settings.sections.records import TrajectorySection
from rollouts.checks import parse_json, require_flag
from rollouts.data.records import attach_estimates, derive_steps, describe_update, shorten_log_probs
from rollouts.data.samples import describe_sample
from rollouts.data.trajectories import add_update, encode_record, select_groups, select_samples, write_lines
from rollouts.errors import ConfigError, DataError, OutputError, raise_single_errors
from rollouts.output_files import append_text, replace_file
from rollouts.rewards.answers import load_function
from rollouts.training.metrics import log_samples
from rollouts.training.rl_parts import RecordUpdates, RLParts
from rollouts.training.rollout_batch import RecordedColumns
from rollouts.training.saving.run_checkpoints import is_cancelled
from rollouts.types import RolloutBatch, Sample, TrainBatch

_logger = logging.getLogger(__name__)
NUM_TABLED = 8  # samples of each step in the tables of loggers


@dataclass(frozen=True)
class _Prepared:
    """Encoded lines of a step, without what its updates will see."""

    step: int
    samples: tuple[Sample, ...]
    lines: tuple[str, ...]


class TrajectoryWriter:
    """Writer of directory/step_NNNN.jsonl, one file per step, which a resumed run replaces.

    Beside the update of a step the lines are prepared; after it they get what the update saw of each token, and are written. A context
    manager: its exit writes the rollouts of a step that failed before, to help find the cause. Not to be called by two threads at once.
    """

    def __init__(self, directory: Path, section: TrajectorySection, weigh: Callable[[TrainBatch], Tensor] | None = None) -> None:
        """Load the condition.

        Args:
            weigh: Algorithm.weigh where one optimizer step trains on the whole batch, so that loss weights are known; None = they are not,
                or the record of the update has them.

        Raises: ConfigError if the condition does not exist.
        """
        self._directory, self._section, self._weigh = directory, section, weigh
        self._condition = load_condition(section)
        self._held: tuple[int, RolloutBatch] | None = None
        self._chosen: tuple[int, tuple[Sample, ...]] | None = None  # step, and its selected samples
        self._prepared: _Prepared | None = None

    def hold(self, step: int, rollouts: RolloutBatch) -> None:
        """Begin a step. Rollouts of an earlier step that did not end are written with what is known of them."""
        self.write_held()
        self._held = (step, rollouts)

    def choose(self, step: int, rollouts: RolloutBatch) -> None:
        """Select the samples of a step, for list_chosen and prepare. Raises DataError if the condition fails; nothing is held then."""
        held, self._held = self._held, None
        self._chosen = (step, self._select(rollouts.samples) if self._section.writes else ())
        self._held = held

    def list_chosen(self, step: int, rollouts: RolloutBatch) -> tuple[int, ...]:
        """Return the positions of the selected samples in the rollouts of a step."""
        wanted = {id(sample) for sample in self._find_chosen(step, rollouts)}
        return tuple(k for k, sample in enumerate(rollouts.samples) if id(sample) in wanted)

    def prepare(self, step: int, rollouts: RolloutBatch, batch: TrainBatch | None) -> None:
        """Encode the selected rollouts of a step. batch: the estimates of the algorithm, row by row; None = no estimates.

        Raises: DataError if the condition fails, or for a sample that JSON cannot hold.
        """
        self._held = None
        if self._section.writes:
            if batch is not None and self._weigh is not None:
                batch = replace(batch, loss_weights=self._weigh(batch))
            chosen = self._find_chosen(step, rollouts)
            records = attach_estimates(rollouts.samples, chosen, batch)
            records = tuple(replace(record, sample=shorten_log_probs(record.sample)) for record in records)
            if self._section.steps:
                records = tuple(replace(record, steps=derive_steps(record)) for record in records)
            self._prepared = _Prepared(step, chosen, tuple(encode_record(record) for record in records))

    def finish(self, step: int, seen: Mapping[int, Mapping[str, Tensor]], rollouts: RolloutBatch) -> None:
        """Write the prepared rollouts of a step with what its updates saw of their tokens.

        Args:
            seen: columns of tokens by position in the rollouts, see RecordRequest; samples without any are written without.
        """
        prepared, self._prepared, self._chosen = self._prepared, None, None
        if prepared is not None:
            columns = {id(rollouts.samples[position]): of_row for position, of_row in seen.items()}
            lines = [
                line if id(sample) not in columns else add_update(line, describe_update(sample, columns[id(sample)]))
                for sample, line in zip(prepared.samples, prepared.lines, strict=True)
            ]
            write_lines(self._directory / f"step_{prepared.step:04d}.jsonl", lines)

    def write(self, step: int, rollouts: RolloutBatch, batch: TrainBatch | None) -> None:
        """Prepare and finish a step of which no update is known."""
        self.prepare(step, rollouts, batch)
        self.finish(step, {}, rollouts)

    def write_held(self) -> None:
        """Write the rollouts of a step that has no update, such as one that was left out, with what is known of them."""
        if self._held is not None:
            self.prepare(*self._held, None)
        if self._prepared is not None:
            self.finish(self._prepared.step, {}, RolloutBatch(samples=()))

    def _find_chosen(self, step: int, rollouts: RolloutBatch) -> tuple[Sample, ...]:
        """Return the samples of choose, or select them."""
        known = self._chosen is not None and self._chosen[0] == step
        return self._chosen[1] if known and self._chosen is not None else self._select(rollouts.samples)

    def _select(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        if self._section.every is None:
            return select_groups(samples, count=self._section.groups, condition=self._condition)
        return select_samples(samples, every=self._section.every, condition=self._condition)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write_held()
        except (DataError, OutputError) as problem:
            if error is None:
                raise
            error.add_note(f"the rollouts of its step could not be written: {problem}")


class _LastWrite:
    """Write of the record of the last step, in a thread beside what follows its update."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery, self._ended = nursery, trio.Event()
        self._error: Exception | None = None
        self._ended.set()

    def begin(self, write: Callable[[], None]) -> None:
        """Begin a write. The one before has ended."""
        assert self._ended.is_set(), "two writes at once"
        self._ended = trio.Event()
        self._nursery.start_soon(self._run, write)

    async def wait(self) -> None:
        """Wait until the write has ended. Raises its error, every time: no checkpoint may count a step whose record is lost."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def set_error(self, error: Exception) -> None:
        """Keep the error of a write for every further wait()."""
        self._error = error

    async def _run(self, write: Callable[[], None]) -> None:
        try:
            with trio.CancelScope(shield=True):  # begun, it is completed whatever ends the run
                await trio.to_thread.run_sync(write)
        except Exception as error:  # it is raised where the run waits, so that the step under way ends first
            self.set_error(error)
        finally:
            self._ended.set()


@asynccontextmanager
async def open_files(parts: RLParts, trajectories: TrajectoryWriter, ledger: Ledger) -> AsyncGenerator[RLParts]:
    """Write each step's rollouts to the files of the run by hooks of the parts that are yielded.

    The record of a step is written beside the sync, the evaluation and the next rollouts. A checkpoint of the step waits for it, so does
    the training of the next step.

    Raises: at the end of the block the error of the last record; it is a note on the error that ended the block, if one did.
    """
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            last = _LastWrite(nursery)
            try:
                yield _add_hooks(parts, trajectories, ledger, last)
            except BaseException as ended:
                try:
                    with trio.CancelScope(shield=True):
                        await last.wait()
                except Exception as error:
                    if is_cancelled(ended):  # trio drops it, and would drop its notes
                        raise error from ended
                    if error is not ended:
                        ended.add_note(f"beside it, the record of a step could not be written: {error}")
                raise
            await last.wait()


def _add_hooks(parts: RLParts, trajectories: TrajectoryWriter, ledger: Ledger, last: _LastWrite) -> RLParts:
    async def keep(step: int, batch: RolloutBatch) -> None:
        await settle()  # in a thread, so that hold has nothing left to write
        trajectories.hold(step, batch)
        log_samples(parts.metrics_logger, batch.samples[:NUM_TABLED], step)
        await trio.to_thread.run_sync(ledger.add, step, batch)
        await trio.to_thread.run_sync(trajectories.choose, step, batch)

    async def keep_estimates(step: int, rollouts: RolloutBatch, batch: TrainBatch) -> None:
        await trio.to_thread.run_sync(trajectories.prepare, step, rollouts, batch)

    def keep_update(step: int, rollouts: RolloutBatch, seen: Mapping[int, RecordedColumns]) -> None:
        last.begin(partial(trajectories.finish, step, seen, rollouts))

    async def settle() -> None:
        await last.wait()
        await trio.to_thread.run_sync(trajectories.write_held)

    return replace(
        parts,
        on_rollouts=keep,
        on_estimates=keep_estimates,
        record=RecordUpdates(trajectories.list_chosen, keep_update),
        before_save=settle,
    )


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


# -- the ledger


class Ledger:
    """Writer of the ledger of a new or resumed run."""

    def __init__(self, path: Path, *, finished_steps: int) -> None:
        """Truncate the file to the lines of the finished steps: an interrupted run may have written more, the last one incomplete.

        Finished steps without a line are a warning: training does not need them.

        Raises: DataError for a damaged line among those of the finished steps.
        """
        self._path = path
        kept = _read_finished(path, finished_steps) if path.exists() else []
        lost = finished_steps - len({entry["step"] for entry in kept})
        if lost > 0:
            of = f"{lost} of the {finished_steps} finished steps"
            _logger.warning("%s has no line for %s: which prompts they had is lost, no training; the run goes on", path, of)
        replace_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def add(self, step: int, rollouts: RolloutBatch) -> None:
        """Append the prompts of a step. Raises OutputError if the disk refuses the line."""
        prompts = sorted({sample.group_index for sample in rollouts.samples})
        append_text(self._path, json.dumps({"step": step, "prompts": prompts}) + "\n", flush=True)  # checkpoints rely on it


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ledger, without an incomplete last line. Raises DataError with file and line."""
    return list(_iterate(path))


def _read_finished(path: Path, finished_steps: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    try:
        for entry in _iterate(path):
            if entry["step"] > finished_steps:
                break
            kept.append(entry)
    except DataError:  # after a power loss a file may end in arbitrary bytes
        if [entry["step"] for entry in kept] != list(range(1, finished_steps + 1)):
            raise
    return kept


def _iterate(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = parse_json(line)
            yield {"step": int(entry["step"]), "prompts": [int(prompt) for prompt in entry["prompts"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is not a line of a ledger: {error!r}") from error

"""Samples and steps to and from JSON Lines: for people to read, for other programs, and for training on them again.

A line is one of two things. A sample, with what a training step made of it where that is known, and its steps where they were given:

    {"prompt": ..., "tokens": [...], ..., "estimate": {"advantages": [...], ...}, "steps": [{"system_step_index": 0, ...}, ...]}

Or a step by itself, which says by sample_index and group_index whose it is: {"system_step_index": 0, "observation_data": ..., ...}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from rollouts.errors import DataError
from rollouts.samples import describe_sample
from rollouts.steps import StepData, Steps
from rollouts.trajectory_records import TrajectoryRecord, group_steps
from rollouts.types import Sample

_STEP_KEY = "system_step_index"  # what a line has that is a step
Parsed = TypeVar("Parsed")


def write_samples(path: Path, samples: Iterable[Sample], *, append: bool = False) -> int:
    """Write one line a sample; the directory is made if it is not there. Returns the number of lines.

    Raises: DataError for a sample that JSON cannot hold, such as one with an array or a NaN in its metadata.
    """
    return write_records(path, (TrajectoryRecord(sample=sample) for sample in samples), append=append)


def write_records(path: Path, records: Iterable[TrajectoryRecord], *, append: bool = False) -> int:
    """Write one line a record, as write_samples; a new file is there whole or not at all, for those who read while a run goes on."""
    lines = [_to_line(record.to_dict(), describe_sample(record.sample), "its metadata") for record in records]
    return _write_lines(path, lines, append=append)


def write_steps(path: Path, steps: Iterable[StepData], *, append: bool = False) -> int:
    """Write one line a step, as write_samples; the steps of several episodes may stand in one file."""
    lines = [_to_line(step.to_dict(), _describe_step(step), "its observation, action and step_info") for step in steps]
    return _write_lines(path, lines, append=append)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file; empty lines are passed over. Raises DataError naming file and line."""
    return [_parse(path, number, lambda row: TrajectoryRecord.from_dict(row).sample, row, "a sample") for number, row in _rows(path)]


def read_steps(path: Path) -> list[StepData]:
    """The steps of a file: lines that are steps, and those inside of lines that are samples. Raises DataError naming file and line."""
    found: list[StepData] = []
    for number, row in _rows(path):
        if _STEP_KEY in row:
            found.append(_parse(path, number, StepData.from_dict, row, "a step"))
        else:
            found += _parse(path, number, TrajectoryRecord.from_dict, row, "a sample").steps
    return found


def read_records(path: Path) -> list[TrajectoryRecord]:
    """Everything in a file, in its order; steps that are lines become one record for each of their episodes, behind the others.

    Raises: DataError naming file and line.
    """
    records: list[TrajectoryRecord] = []
    single: list[StepData] = []
    for number, row in _rows(path):
        if _STEP_KEY in row:
            single.append(_parse(path, number, StepData.from_dict, row, "a step"))
        else:
            records.append(_parse(path, number, TrajectoryRecord.from_dict, row, "a sample"))
    for steps in group_steps(single):
        owner = Sample(index=steps[0].sample_index, group_index=steps[0].group_index)
        records.append(TrajectoryRecord(sample=owner, steps=steps))
    return records


def _to_line(row: Mapping[str, Any], who: str, what: str) -> str:
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"{who} cannot be written as JSON: {error}. Keep {what} to JSON values.") from error


def _write_lines(path: Path, lines: Sequence[str], *, append: bool) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    if append:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    else:
        temporary = path.with_name(f".tmp_{path.name}")
        temporary.write_text("".join(lines), encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    return len(lines)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file, with the numbers of their lines."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read samples from {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is not a sample: {type(error).__name__}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is not a sample: found a JSON {type(row).__name__}, expected an object")
        yield number, cast("dict[str, Any]", row)


def _parse(path: Path, number: int, parse: Callable[[dict[str, Any]], Parsed], row: dict[str, Any], what: str) -> Parsed:
    try:
        return parse(row)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise DataError(f"{path}:{number} is not {what}: {type(error).__name__}: {error}") from error


def _describe_step(step: StepData) -> str:
    return f"step {step.system_step_index} of sample {step.sample_index} (group {step.group_index})"


# -- what to keep


def select_samples(samples: Sequence[Sample], *, every: int = 1, condition: Callable[[Sample], bool] | None = None) -> tuple[Sample, ...]:
    """The samples that are worth keeping.

    Args:
        every: keep each sample whose index is a multiple of it, so the choice does not depend on how samples came into batches.
        condition: keep of these only the ones for which it is true; None = all.
    """
    assert every >= 1, f"every is {every}, expected at least 1"
    return tuple(s for s in samples if s.index % every == 0 and (condition is None or condition(s)))


def select_steps(steps: Iterable[StepData], *, every: int = 1, condition: Callable[[Steps], bool] | None = None) -> Steps:
    """The steps of the episodes that are worth keeping, as select_samples: every n-th by sample_index, of these where condition is true.

    Args:
        condition: is given all steps of an episode, in order.
    """
    assert every >= 1, f"every is {every}, expected at least 1"
    chosen = (e for e in group_steps(steps) if e[0].sample_index % every == 0 and (condition is None or condition(e)))
    return tuple(step for episode in chosen for step in episode)

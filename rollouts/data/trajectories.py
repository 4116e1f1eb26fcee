"""Files of samples and steps as JSON Lines: for people, for other programs, and for training on them again.

A line is one of two things. A sample, with its estimate of a training step where that is known, and its steps where they were given:

    {"prompt": ..., "tokens": [...], ..., "estimate": {"advantages": [...], ...}, "steps": [{"system_step_index": 0, ...}, ...],
     "update": {"log_probs": [...], ...}}

Or a step by itself, with the sample_index and group_index of its episode: {"system_step_index": 0, "observation_data": ..., ...}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from rollouts.checks import describe_function, parse_json, require_flag
from rollouts.data.records import TrajectoryRecord, UpdateRecord, derive_steps, group_steps
from rollouts.data.samples import describe_sample
from rollouts.errors import DataError
from rollouts.output_files import append_text, explain_writes, replace_file
from rollouts.steps import StepData, Steps
from rollouts.types import Sample

_STEP_KEY = "system_step_index"  # key that marks a line as a step
Parsed = TypeVar("Parsed")


def write_samples(path: Path | str, samples: Iterable[Sample], *, append: bool = False) -> int:
    """Write one line a sample; a missing directory is made. Returns the number of lines.

    Raises: DataError for a sample that JSON cannot hold, such as one with an array or a NaN in its metadata; OutputError if the disk
        refuses the file.
    """
    return write_records(path, (TrajectoryRecord(sample=sample) for sample in samples), append=append)


def write_records(path: Path | str, records: Iterable[TrajectoryRecord], *, append: bool = False) -> int:
    """Write one line a record, as write_samples. A new file appears whole or not at all, so that it can be read while a run goes on."""
    return write_lines(path, [encode_record(record) for record in records], append=append)


def encode_record(record: TrajectoryRecord) -> str:
    """Return the line of a record in a file. Raises DataError as write_samples."""
    return _to_line(record.to_dict(), describe_sample(record.sample), "its metadata")


def add_update(line: str, update: UpdateRecord) -> str:
    """Return the line of a record without an update with this one: what is known early can be encoded early."""
    return f'{line.rstrip()[:-1]},"update":{json.dumps(update.to_dict(), allow_nan=False, separators=(",", ":"))}}}\n'


def write_steps(path: Path | str, steps: Iterable[StepData], *, append: bool = False) -> int:
    """Write one line a step, as write_samples; the steps of several episodes may stand in one file."""
    lines = [_to_line(step.to_dict(), _describe_step(step), "its observation, action and step_info") for step in steps]
    return write_lines(path, lines, append=append)


def read_samples(path: Path | str) -> list[Sample]:
    """Return the samples of a file; empty lines are skipped. Raises DataError naming file and line."""
    return [_parse(path, number, lambda row: TrajectoryRecord.from_dict(row).sample, row, "a sample") for number, row in _rows(path)]


def read_steps(path: Path | str) -> list[StepData]:
    """Return the steps of a file: lines that are steps, and the steps of samples, derived from the episode where they are not written.

    Raises: DataError naming file and line.
    """
    found: list[StepData] = []
    for number, row in _rows(path):
        if _STEP_KEY in row:
            found.append(_parse(path, number, StepData.from_dict, row, "a step"))
        else:
            found += _parse(path, number, lambda row: derive_steps(TrajectoryRecord.from_dict(row)), row, "a sample")
    return found


def read_records(path: Path | str) -> list[TrajectoryRecord]:
    """Return all records of a file, in its order; lines that are steps become one record for each episode, after the others.

    Raises: DataError naming file and line.
    """
    return list(iterate_records(path))


def iterate_records(path: Path | str, groups: Collection[int] | None = None) -> Iterator[TrajectoryRecord]:
    """Yield the records of read_records one after the other: a file of samples of any size takes the memory of one of them.

    Args:
        groups: yield the records of these groups only; None = all.

    Raises: DataError naming file and line.
    """
    single: list[StepData] = []
    for number, row in _rows(path):
        if groups is not None and _parse(path, number, _find_group, row, "a sample") not in groups:
            continue
        if _STEP_KEY in row:
            single.append(_parse(path, number, StepData.from_dict, row, "a step"))
        else:
            yield _parse(path, number, TrajectoryRecord.from_dict, row, "a sample")
    for steps in group_steps(single):
        owner = Sample(index=steps[0].sample_index, group_index=steps[0].group_index)
        yield TrajectoryRecord(sample=owner, steps=steps)


def measure_groups(path: Path | str) -> dict[int, tuple[int, int]]:
    """Return the number of samples of each group of a file, and of their tokens, without reading more of a line than that.

    Raises: DataError naming file and line.
    """
    episodes: set[tuple[int, int]] = set()
    found: dict[int, tuple[int, int]] = {}
    for number, row in _rows(path):
        group = _parse(path, number, _find_group, row, "a sample")
        count, tokens = found.get(group, (0, 0))
        if _STEP_KEY not in row:
            found[group] = (count + 1, tokens + _parse(path, number, lambda row: len(row.get("tokens") or ()), row, "a sample"))
        elif (group, episode := _parse(path, number, lambda row: int(row.get("sample_index", 0)), row, "a step")) not in episodes:
            episodes.add((group, episode))
            found[group] = (count + 1, tokens)
    return found


def _find_group(row: Mapping[str, Any]) -> int:
    return int(row.get("group_index", 0))


def _to_line(row: Mapping[str, Any], who: str, what: str) -> str:
    try:
        return json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"{who} cannot be written as JSON: {error}. Keep {what} to JSON values.") from error


def write_lines(path: Path | str, lines: Sequence[str], *, append: bool = False) -> int:
    """Write encoded lines, as write_records. Returns their number."""
    path = Path(path)
    if append:
        with explain_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, "".join(lines))
    else:
        replace_file(path, "".join(lines))
    return len(lines)


def _rows(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file, with the numbers of their lines, read one after the other."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a sample: {type(error).__name__}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is not a sample: found a JSON {type(row).__name__}, expected an object")
        yield number, cast("dict[str, Any]", row)


def _lines(path: Path | str) -> Iterator[str]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read samples from {path}: {error}") from error


def _parse(path: Path | str, number: int, parse: Callable[[dict[str, Any]], Parsed], row: dict[str, Any], what: str) -> Parsed:
    try:
        return parse(row)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, OverflowError) as error:
        raise DataError(f"{path}:{number} is not {what}: {type(error).__name__}: {error}") from error


def _describe_step(step: StepData) -> str:
    return f"step {step.system_step_index} of sample {step.sample_index} (group {step.group_index})"


# -- selection


def select_samples(samples: Sequence[Sample], *, every: int = 1, condition: Callable[[Sample], bool] | None = None) -> tuple[Sample, ...]:
    """Select the samples to keep.

    Args:
        every: keep each sample whose index is a multiple of it, so the choice does not depend on the order of batches.
        condition: keep of these only the samples for which it returns True; None = all.

    Raises: DataError if condition returns neither True nor False.
    """
    assert every >= 1, f"every is {every}, expected at least 1"
    chosen = (s for s in samples if s.index % every == 0)
    return tuple(s for s in chosen if condition is None or _holds(condition, s, describe_sample(s)))


def select_groups(samples: Sequence[Sample], *, count: int, condition: Callable[[Sample], bool] | None = None) -> tuple[Sample, ...]:
    """Select whole groups, evenly spaced by their numbers, so that the choice does not depend on the order of the samples.

    Args:
        count: maximum number of groups.
        condition: choose among the groups in which it returns True for at least one sample; None = among all.

    Returns: all samples of these groups, by group_index and index.
    Raises: DataError if condition returns neither True nor False.
    """
    assert count >= 1, f"count is {count}, expected at least 1"
    held = {s.group_index for s in samples if condition is None or _holds(condition, s, describe_sample(s))}
    groups, count = sorted(held), min(count, len(held))
    taken = {groups[k * len(groups) // count] for k in range(count)}
    return tuple(sorted((s for s in samples if s.group_index in taken), key=lambda s: (s.group_index, s.index)))


def select_steps(steps: Iterable[StepData], *, every: int = 1, condition: Callable[[Steps], bool] | None = None) -> Steps:
    """Select the steps of the episodes to keep, as select_samples: every n-th by sample_index, of these where condition is true.

    Args:
        condition: function of all steps of an episode, in order.

    Raises: DataError if condition says neither True nor False.
    """
    assert every >= 1, f"every is {every}, expected at least 1"
    episodes = (e for e in group_steps(steps) if e[0].sample_index % every == 0)
    chosen = (e for e in episodes if condition is None or _holds(condition, e, f"sample {e[0].sample_index} (group {e[0].group_index})"))
    return tuple(step for episode in chosen for step in episode)


def _holds(condition: Callable[[Any], bool], of: Any, who: str) -> bool:
    return require_flag(condition(of), f"condition {describe_function(condition)}", f" for {who}", error=DataError)

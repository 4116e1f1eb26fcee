"""Samples to and from JSON Lines: for people to read, for other programs, and for training on them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from rollouts.errors import DataError
from rollouts.samples import describe_sample
from rollouts.types import Sample


def write_samples(path: Path, samples: Iterable[Sample], *, append: bool = False) -> int:
    """Write one line a sample; the directory is made if it is not there. Returns the number of lines.

    Raises: DataError for a sample that JSON cannot hold, such as one with an array or a NaN in its metadata.
    """
    lines: list[str] = []
    for sample in samples:
        try:
            lines.append(json.dumps(sample.to_dict(), allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(f"{describe_sample(sample)} cannot be written as JSON: {error}. Keep its metadata to JSON values.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)


def read_samples(path: Path) -> list[Sample]:
    """Read what write_samples wrote; empty lines are passed over. Raises DataError naming file and line."""
    samples: list[Sample] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read samples from {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"found a JSON {type(row).__name__}, expected an object")
            samples.append(Sample.from_dict(cast("dict[str, Any]", row)))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise DataError(f"{path}:{number} is not a sample: {type(error).__name__}: {error}") from error
    return samples


def select_samples(samples: Sequence[Sample], *, every: int = 1, condition: Callable[[Sample], bool] | None = None) -> tuple[Sample, ...]:
    """The samples that are worth keeping.

    Args:
        every: keep each sample whose index is a multiple of it, so the choice does not depend on how samples came into batches.
        condition: keep of these only the ones for which it is true; None = all.
    """
    assert every >= 1, f"every is {every}, expected at least 1"
    return tuple(s for s in samples if s.index % every == 0 and (condition is None or condition(s)))

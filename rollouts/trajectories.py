"""Samples to and from JSON Lines: for people to read, for other programs, and for training on them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rollouts.errors import DataError
from rollouts.types import Sample


def write_samples(path: Path, samples: Iterable[Sample], *, append: bool = False) -> int:
    """Write one line a sample. Returns the number of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("a" if append else "w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample.to_dict(), ensure_ascii=True) + "\n")
            count += 1
    return count


def read_samples(path: Path) -> list[Sample]:
    """Read what write_samples wrote. Raises DataError naming file and line."""
    samples: list[Sample] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read samples from {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            samples.append(Sample.from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise DataError(f"{path}:{number} is not a sample: {error}") from error
    return samples


def select_samples(samples: Sequence[Sample], *, every: int = 1, condition: Callable[[Sample], bool] | None = None) -> tuple[Sample, ...]:
    """Every `every`-th sample (by its index) that fulfils the condition."""
    assert every >= 1, f"every is {every}, expected at least 1"
    return tuple(s for s in samples if s.index % every == 0 and (condition is None or condition(s)))

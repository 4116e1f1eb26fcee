"""Lengths of simulated responses: lognormal, Pareto, constant, or drawn from a file of measured lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from integration.simulate.settings import LengthSection
from rollouts.checks import parse_json
from rollouts.errors import ConfigError, DataError
from rollouts.seeds import derive_seed

Draw: TypeAlias = Callable[[np.random.Generator, int], "NDArray[np.float64]"]
"""f(generator, count) -> `count` lengths in tokens, before rounding and truncation."""

_BLOCK = 1024  # prompts per block of drawn lengths


def create_draw(section: LengthSection) -> Draw:
    """Return the distribution as a function."""
    mean = section.mean_tokens
    if section.file is not None:
        measured = read_lengths(Path(section.file))
        return lambda generator, count: generator.choice(measured, count)
    if section.distribution == "constant":
        return lambda generator, count: np.full(count, mean)
    if section.distribution == "pareto":  # the smallest value x_m has the mean x_m * tail / (tail - 1)
        smallest = mean * (section.tail - 1) / section.tail
        return lambda generator, count: smallest * (1 + generator.pareto(section.tail, count))
    center = math.log(mean) - section.sigma**2 / 2
    return lambda generator, count: generator.lognormal(center, section.sigma, count)


def read_lengths(path: Path) -> NDArray[np.float64]:
    """Read measured lengths, one per line: a number, or a sample, whose trained tokens count.

    Raises: ConfigError if the file cannot be read; DataError with the line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the lengths in {path}: {error}") from error
    lengths = [_parse_length(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not lengths:
        raise DataError(f"{path} holds no lengths (found 0 lines): write one number a line")
    return np.array(lengths, dtype=np.float64)


def _parse_length(line: str, where: str) -> float:
    try:
        value: Any = parse_json(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and isinstance(mask := cast("dict[str, Any]", value).get("loss_mask"), list):
        value = sum(entry > 0 for entry in cast("list[float]", mask))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{where} is {line[:80]!r}, expected a number of tokens above 0, or a sample with a loss_mask")
    return float(value)


class ResponseLengths:
    """The lengths of each group's responses: a pure function of seed, prompt index and attempt, drawn in blocks for speed."""

    def __init__(self, section: LengthSection, num_samples: int, seed: int) -> None:
        """
        Args:
            num_samples: responses in a group.
            seed: seed of the lengths.
        """
        self._draw, self._max_tokens, self._num_samples, self._seed = create_draw(section), section.max_tokens, num_samples, seed
        self._blocks: dict[int, list[list[int]]] = {}

    def of_group(self, index: int, attempt: int = 0) -> list[int]:
        """Return the tokens of each response to prompt `index`; another attempt has other lengths."""
        if attempt:
            return self._draw_groups(1, 1, index, attempt)[0]
        block, offset = divmod(index, _BLOCK)
        if block not in self._blocks:
            self._blocks = {b: lengths for b, lengths in self._blocks.items() if b >= block - 1}  # prompts come in order
            self._blocks[block] = self._draw_groups(_BLOCK, 0, block)
        return self._blocks[block][offset]

    def _draw_groups(self, count: int, *key: int) -> list[list[int]]:
        generator = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, *key)))
        lengths = self._draw(generator, count * self._num_samples)
        whole = np.clip(np.rint(lengths), 1, self._max_tokens).astype(np.int64)
        return whole.reshape(count, self._num_samples).tolist()

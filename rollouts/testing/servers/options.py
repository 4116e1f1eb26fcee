"""Checks of the options that a fake server is started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollouts.errors import ConfigError

ChooseExperts: TypeAlias = Callable[[Sequence[int]], NDArray[np.integer[Any]]]
"""f(tokens) -> the experts that the routers of a mixture of experts choose for each # [tokens, layers, k]."""


def check_options(settings: object, at_least: Mapping[str, int], above_zero: Sequence[str]) -> None:
    """Raise ConfigError if a field is too small; None is no number and passes.

    Args:
        at_least: field -> its smallest value.
        above_zero: fields in seconds that must be more than 0.
    """
    for name, smallest in at_least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            raise ConfigError(f"{type(settings).__name__}.{name} is {value!r}, expected at least {smallest}")
    for name in above_zero:
        value = getattr(settings, name)
        if not value > 0:
            raise ConfigError(f"{type(settings).__name__}.{name} is {value!r}, expected more than 0 seconds")

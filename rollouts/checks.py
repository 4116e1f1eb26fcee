"""Assertion helpers whose messages carry the field name and the offending value; and how a user's function is to be called.

Assertions are for programmer errors at module boundaries; what a user or the world can cause raises an exception instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor


def check_shapes(**named: tuple[Tensor | None, tuple[int | None, ...]]) -> None:
    """Assert that each tensor has the expected shape; None in a shape admits any size, a None tensor is skipped.

    Example: check_shapes(loss_mask=(batch.loss_mask, (8, None)))
    """
    for name, (tensor, expected) in named.items():
        if tensor is None:
            continue
        found = tuple(tensor.shape)
        matches = len(found) == len(expected) and all(e is None or e == f for e, f in zip(expected, found, strict=True))
        assert matches, f"{name} has shape {found}, expected {expected} (None admits any size)"


def check_mask(name: str, mask: Tensor) -> None:
    """Assert that a loss mask is floating point, finite and not negative (0 = ignored; fractional weights allowed)."""
    assert mask.is_floating_point(), f"{name} has dtype {mask.dtype}, expected a floating-point mask"
    assert bool((mask >= 0).all()), f"{name} holds negative or NaN entries (smallest: {mask.min().item()})"
    assert bool(mask.isfinite().all()), f"{name} holds infinite entries"


def check_finite(name: str, tensor: Tensor, where: Tensor | None = None) -> None:
    """Assert that a tensor is finite, everywhere or only where `where` is non-zero."""
    bad = ~tensor.isfinite()
    if where is not None:
        bad = bad & (where != 0)
    count = int(bad.sum())
    assert count == 0, f"{name} holds {count} non-finite entries, the first at index {bad.nonzero()[0].tolist()}"


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine: an `async def`, a functools.partial of one, or an object with an async __call__."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

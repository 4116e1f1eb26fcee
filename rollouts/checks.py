"""Assertion helpers with the field's name and value in their messages; conversion of users' values; inspection of users' functions; JSON.

Assertions are for programmer errors at module boundaries; anything that a user or the world can cause raises an exception instead.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import numbers
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

from rollouts.errors import ConfigError, DataError

T = TypeVar("T")


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
    """Assert that a tensor is finite, everywhere or only at the places where `where` is non-zero."""
    bad = ~tensor.isfinite()
    if where is not None:
        bad = bad & (where != 0)
    count = int(bad.sum())
    assert count == 0, f"{name} holds {count} non-finite entries, the first at index {bad.nonzero()[0].tolist()}"


def take_tuple(where: str, value: Any, of: Callable[[Any], Any], expected: str) -> tuple[Any, ...]:
    """Return a column of a value as a tuple of plain Python values, so that nothing in it changes afterwards.

    Args:
        where: name of the column in the message.
        value: a tuple, list, numpy array or tensor of one dimension.
        of: take_int, take_number or take_text, with `where` and the item.
        expected: description of a good value, for the message.

    Raises: DataError for anything else; a str does not count as a sequence of characters.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is {value!r}, expected {expected}")
    return tuple(of(item) for item in cast("Sequence[Any]", value))


def take_int(where: str, value: Any) -> int:
    """Return a whole number as an int, also from numpy or a tensor of one element, but not from a bool. Raises DataError."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    if hasattr(value, "item") and isinstance(found := _unpack(value), int) and not isinstance(found, bool):
        return found
    raise DataError(f"{where} is {value!r} ({type(value).__name__}), expected a whole number")


def take_number(where: str, value: Any, *, finite: bool = True) -> float:
    """Return a number as it is, or as a plain one if it is numpy's or a tensor of one element.

    Args:
        finite: refuse NaN, infinities and integers beyond the range of floats.

    Raises: DataError, also for a bool.
    """
    found: Any = value if type(value) in (int, float) or not hasattr(value, "item") else _unpack(value)
    is_real = not isinstance(found, bool) and isinstance(found, numbers.Real)
    if is_real and (not finite or bool(abs(cast("Any", found)) <= sys.float_info.max)):  # NaN is not
        return found if isinstance(found, int | float) else float(cast("Any", found))
    raise DataError(f"{where} is {value!r} ({type(value).__name__}), expected a {'finite ' if finite else ''}number")


def take_text(where: str, value: Any) -> str:
    """Return a str as it is. Raises DataError for anything else."""
    if isinstance(value, str):
        return value
    raise DataError(f"{where} is {value!r} ({type(value).__name__}), expected a text")


def _unpack(value: Any) -> Any:
    try:
        return value.item()
    except (ValueError, RuntimeError):  # several elements
        return None


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine: an `async def`, a functools.partial of one, or an object with an async __call__."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def iterate_awaitable(awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    """Return the iterator of an awaitable's steps. A generator-based coroutine (types.coroutine) is its own: it has no __await__."""
    return awaitable.__await__() if hasattr(awaitable, "__await__") else cast("Generator[Any, Any, T]", awaitable)


def describe_function(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return getattr(function, "__name__", type(function).__name__)


def read_flag(answer: Any) -> bool | None:
    """Return True or False from a bool, also NumPy's or one in a tensor or array without dimensions; None for anything else.

    1, 0, "no", [] and None are refused as well: a yes-or-no question answered like that was misunderstood.
    """
    if getattr(answer, "shape", None) == () and hasattr(answer, "item"):
        answer = answer.item()
    return answer if isinstance(answer, bool) else None


def require_flag(answer: Any, name: str, about: str = "", *, error: type[Exception] = ConfigError) -> bool:
    """Return the answer of a user's function to a yes-or-no question.

    Args:
        name: the function's name, for the message.
        about: subject of the question, such as " for group 3".
        error: class of the exception to raise.

    Raises: `error` for anything that read_flag refuses, naming the function and its answer. The message explains an awaitable (the function
        is async and nobody waits here), a function (a factory was passed) and None (a missing `return`).
    """
    flag = read_flag(answer)
    if flag is not None:
        return flag
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()  # nobody will await it, and Python would warn of that
        hint = "it is async, and is asked where nothing can be awaited: give a plain function"
    elif callable(answer):
        hint = f"it makes functions: call {name} with its arguments, and pass the result"
    elif answer is None:
        hint = "does a return statement miss?"
    else:
        hint = "write a comparison, or bool(...) where every value is meant to count as one of the two"
    raise error(f"{name} returned {answer!r:.100} ({type(answer).__name__}){about}, expected True or False: {hint}")


def is_finite(number: Any) -> bool:
    """Tell whether a number (or a scalar of numpy or torch) is finite as a float; an integer beyond the range of floats is not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Tell whether a value of any type, such as one from JSON, is an int or float that is finite as a float. A bool is not."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and is_finite(value)


def parse_json(
    text: str | bytes | bytearray,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON of a user or the world. The arguments are those of json.loads.

    Raises: ValueError for whatever is wrong with it: json.JSONDecodeError, UnicodeDecodeError, and a plain one where json.loads raises
        RecursionError.
    """
    try:
        return json.loads(text, parse_constant=parse_constant, parse_float=parse_float, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinities: the parse_constant of parse_json where they are not taken."""
    raise ValueError(f"{name} is no JSON number")


def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a name that it has twice: the object_pairs_hook of parse_json where that is a mistake."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(name for name, count in counts.items() if count > 1)!r} stands twice in one object")
    return found


def check_encodable(value: Any) -> None:
    """Raise ValueError if a JSON value is nested too deeply to be written; UnicodeError, one of them, for half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


_TOO_DEEP = "lists or objects are nested too deeply"


def show_value(value: Any, max_length: int = 200) -> str:
    """Return the repr of a value of any type for messages, cut to max_length characters."""
    try:
        return repr(value)[:max_length]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # integers of 5,000 digits, too
        return f"a value of the type {type(value).__name__} whose repr raises {type(error).__name__}"


def find_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity; for a DTensor this rank's part is looked at.

    Integers, empty tensors and 8-bit tensors are skipped. Waits for the device once.
    """
    import torch  # not at the top: code in a sandbox has these checks without torch

    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    names: list[str] = []
    sums: list[Tensor] = []
    for name, tensor in tensors:
        local = getattr(tensor.detach(), "to_local", tensor.detach)()
        if local.dtype in floats and local.numel() > 0 and not local.is_meta:
            names.append(name)
            sums.append(_mark_non_finite(local).float())
    if not sums:
        return None
    good = torch.stack([value.to(sums[0].device) for value in sums]).isfinite().tolist()
    return next((name for name, is_good in zip(names, good, strict=True) if not is_good), None)


def _mark_non_finite(tensor: Tensor) -> Tensor:
    """Return 0, or NaN if a number of the tensor is not finite; without a copy."""
    if tensor.device.type == "cpu" and tensor.itemsize >= 4:
        total = tensor.sum()  # the fastest pass: never finite if a number is not, and rarely not finite otherwise
        if bool(total.isfinite()):
            return total * 0
    low, high = tensor.aminmax()  # both pass a NaN on
    return low * 0 + high * 0

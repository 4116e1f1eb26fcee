"""Values of tests and programs as JSON: plain data by value, with their exact types; everything else by a name.

Nothing else passes between the process of the tests and that of the program, so an object with an `__eq__` of its own never reaches a
comparison. Loaded inside of sandboxes only; standard library only.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

SEQUENCES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("tuple", tuple), ("set", set), ("frozenset", frozenset), ("deque", collections.deque),
)  # fmt: skip


def _make_counter(items: Any) -> Any:
    return collections.Counter(dict(items))


def _make_defaultdict(items: Any) -> Any:
    return collections.defaultdict(None, items)


MAPPINGS: tuple[tuple[str, type[Any], Callable[..., Any]], ...] = (
    ("dict", dict, dict), ("counter", collections.Counter, _make_counter), ("ordered", collections.OrderedDict, collections.OrderedDict),
    ("defaultdict", collections.defaultdict, _make_defaultdict),
)  # fmt: skip
SCALARS: tuple[tuple[str, type[Any], Callable[[Any], Any], Callable[[Any], Any]], ...] = (  # (key, type, to JSON, from JSON)
    ("bytes", bytes, bytes.hex, bytes.fromhex),
    ("bytearray", bytearray, bytearray.hex, bytearray.fromhex),
    ("complex", complex, lambda value: [repr(value.real), repr(value.imag)], lambda data: complex(float(data[0]), float(data[1]))),
    ("range", range, lambda value: [value.start, value.stop, value.step], lambda data: range(*data)),
    ("fraction", fractions.Fraction, lambda value: [str(value.numerator), str(value.denominator)],
     lambda data: fractions.Fraction(int(data[0]), int(data[1]))),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    ("timedelta", datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds],
     lambda data: datetime.timedelta(*data)),
)  # fmt: skip


def encode(value: Any, name: Callable[[Any], Mapping[str, Any]]) -> Any:
    """Encode a value as JSON: None, booleans, texts, finite numbers and lists as they are, other data as {type: content}.

    Args:
        name: object that is no data -> its name.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value) else {"text": [*map(ord, value)]}
    if kind is int:
        return value if value.bit_length() < 10_000 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [encode(item, name) for item in value]
    for key, sequence in SEQUENCES:
        if kind is sequence:
            return {key: [encode(item, name) for item in value]}
    for key, mapping, _ in MAPPINGS:
        if kind is mapping:
            return {key: [[encode(inner, name), encode(value[inner], name)] for inner in value]}
    for key, scalar, write, _ in SCALARS:
        if kind is scalar:
            return {key: write(value)}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        if getattr(value, "shape", None) == ():
            return encode(value.item(), name)
        if value.dtype.kind in "biufc":
            return {"array": [value.dtype.str, list(value.shape), encode(value.ravel().tolist(), name)]}
    plain = _as_plain(value)
    return dict(name(value)) if plain is value else encode(plain, name)


def _as_plain(value: Any) -> Any:
    """Return the plain value of one whose type derives from a plain one (a program may have made it); otherwise the value itself."""
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return dict(dict.items(cast("dict[Any, Any]", value)))
    for base in (set, frozenset, list, tuple):
        if isinstance(value, base):
            iterate: Any = base.__iter__
            return base(iterate(value))
    return value


def decode(data: Any, find: Callable[[str, Any], Any]) -> Any:
    """Decode what encode wrote.

    Args:
        find: (key, content) of a name -> its object.

    Raises: ValueError, TypeError, KeyError or the like for data that encode does not write.
    """
    if isinstance(data, list):
        return [decode(item, find) for item in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    ((key, content),) = cast("dict[str, Any]", data).items()
    if key == "text":
        return "".join(map(chr, content))
    if key == "int":
        return int(content, 16)
    if key == "float":
        return float(content)
    if key == "array":
        numpy: Any = sys.modules.get("numpy") or __import__("numpy")
        return numpy.array(decode(content[2], find), dtype=content[0]).reshape(content[1])
    for other, sequence in SEQUENCES:
        if key == other:
            return sequence(decode(item, find) for item in content)
    for other, _, make in MAPPINGS:
        if key == other:
            return make([(decode(inner, find), decode(item, find)) for inner, item in content])
    for other, _, _, read in SCALARS:
        if key == other:
            return read(content)
    return find(key, content)

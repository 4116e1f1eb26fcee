"""Damage of bytes that are JSON or lines of it: another value at one place, or other bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, cast

from rollouts.checks import parse_json

Place: TypeAlias = tuple[Any, ...]

RAW = "\x00raw:"  # a value that JSON's encoder would not write, by its text
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, -(10**400), 0.5, 1e308, "", "a", "7", "NaN", "\ud800", "\x00", "/etc/passwd", "../x",
    "é\u2028\r\n", [], {}, [None], [[]], {"": None}, [1, "a"], {"a": 1}, "x" * 5000,
    *(RAW + text for text in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 700 + "]" * 700, "[" * 100_000, '{"a":' * 900)),
)  # fmt: skip


class Draw(Protocol):
    """Source of choices."""

    def below(self, number: int) -> int:
        """Return a number from 0 to number - 1."""
        ...


def list_places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Return the paths of all values in a JSON value, its own left out."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(cast("list[Any]", value)) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from list_places(inner, (*path, key))


def change(value: Any, path: Place, edit: Callable[[Any], Any]) -> Any:
    """Return a copy of a JSON value with one of its values edited."""
    if not path:
        return edit(value)
    copied: Any = dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else list(value)
    copied[path[0]] = change(value[path[0]], path[1:], edit)
    return copied


def drop(value: Any, path: Place) -> Any:
    """Return a copy of a JSON value without one of its values."""

    def without(inner: Any) -> Any:
        copied: Any = dict(inner) if isinstance(inner, dict) else list(inner)
        del copied[path[-1]]
        return copied

    return change(value, path[:-1], without)


def write(value: Any) -> bytes:
    """Write JSON, with the texts of RAW values as they are."""
    text = json.dumps(value)
    if json.dumps(RAW)[1:-1] in text:
        for nasty in NASTY:
            if isinstance(nasty, str) and nasty.startswith(RAW):
                text = text.replace(json.dumps(nasty), nasty.removeprefix(RAW))
    return text.encode()


def damage(example: bytes, draw: Draw) -> bytes:
    """Return an example with one to three places changed; of several lines, in one of them."""
    lines = example.splitlines(keepends=True)
    if len(lines) > 1 and draw.below(4):
        at = draw.below(len(lines))
        end = b"\n" if lines[at].endswith(b"\n") else b""
        lines[at] = damage(lines[at].rstrip(b"\n"), draw).rstrip(b"\n") + end
        return b"".join(lines)
    try:
        value = parse_json(example)
    except ValueError:
        return _damage_bytes(example, draw)
    if draw.below(5) == 0:
        return _damage_bytes(example, draw)
    for _ in range(1 + draw.below(3)):
        places = [(), *list_places(value)]
        place = places[draw.below(len(places))]
        if place and draw.below(4) == 0:
            value = drop(value, place)
        else:
            value = change(value, place, lambda old: NASTY[draw.below(len(NASTY))] if draw.below(4) else [old])
    return write(value)


def _damage_bytes(example: bytes, draw: Draw) -> bytes:
    data = bytearray(example)
    for _ in range(1 + draw.below(4)):
        at, kind = draw.below(len(data) + 1), draw.below(4)
        if kind == 0:
            del data[at : at + 1 + draw.below(8)]
        elif kind == 1:
            data[at:at] = bytes(draw.below(256) for _ in range(1 + draw.below(4)))
        elif kind == 2:
            data[at:at] = data[draw.below(len(data) + 1) :]
        elif at < len(data):
            data[at] = draw.below(256)
    return bytes(data)

"""The text of values that are compared outside of the sandbox in which a program computed them."""

from __future__ import annotations

from typing import Any


def write_literal(value: Any, hashable: bool = False) -> str:
    """A value as a literal for ast.literal_eval; what is none, as its repr.

    Values of subclasses, such as a Counter or an IntEnum, are written as those of the base type, which they equal; a frozenset as a set,
    scalars of numpy as those of Python, tuples as lists (but not inside of sets and keys), very large integers as hexadecimal ones.
    Its source is also what runs behind a program, so it uses nothing but builtins, and not by names that the program may have changed.

    Args:
        hashable: whether the value is inside of a set or a key.
    """
    import builtins as b

    def write_all(values: Any, inner: bool) -> str:
        return ", ".join([write_literal(item, inner) for item in values])

    if b.type(value).__module__ == "numpy" and b.getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or b.isinstance(value, b.bool):
        return b.repr(value)
    if b.isinstance(value, b.int):
        number = b.int.__int__(value)
        return b.hex(number) if b.int.bit_length(number) > 10_000 else b.repr(number)
    if b.isinstance(value, b.float):
        return b.repr(b.float.__float__(value))
    if b.isinstance(value, b.str):
        return b.repr(b.str.__str__(value))
    if b.isinstance(value, b.dict):
        return "{" + ", ".join([write_literal(key, True) + ": " + write_literal(item) for key, item in b.dict.items(value)]) + "}"
    if b.isinstance(value, (b.set, b.frozenset)):
        return "{" + write_all(value, True) + "}" if b.len(value) else "set()"
    if b.isinstance(value, b.list) or (b.isinstance(value, b.tuple) and not hashable):
        return "[" + write_all(value, False) + "]"
    if b.isinstance(value, b.tuple):
        return "(" + write_all(value, True) + ("," if b.len(value) == 1 else "") + ")"
    return b.repr(value)

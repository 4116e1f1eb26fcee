"""Arguments without the sections that a command line names no option of: tyro reads the fields of these in a fraction of the time.

The parser of all sections takes longer than the rest of a command line's way to its settings, and a command names few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field as dataclass_field
from dataclasses import fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

T = TypeVar("T")


def narrow(arguments: object, argv: Sequence[str]) -> Any:
    """Return arguments as an instance of a dataclass that has, of their fields, those that the flags may name.

    Args:
        arguments: instance of a dataclass. Its plain fields stay; those of the dataclasses in it, such as a configuration, stay if their
            name is a part of a flag: rl, asynchronous and enabled of --rl.asynchronous.no-enabled.
        argv: arguments of the command line.
    """
    parts = {part for argument in argv for part in argument.partition("=")[0].lstrip("-").replace("-", "_").split(".")}
    return _narrow(arguments, frozenset({*parts, *(part.removeprefix("no_") for part in parts)}), is_outermost=True)


def _narrow(whole: Any, names: frozenset[str], *, is_outermost: bool = False) -> Any:
    hints = get_type_hints(type(whole), include_extras=True)
    kept: list[tuple[str, Any, Any]] = []
    values: dict[str, Any] = {}
    for field in fields(whole):
        if not is_outermost and field.name not in names:
            continue
        value, kind = getattr(whole, field.name), hints[field.name]
        if is_dataclass(value):
            value = _narrow(value, names)
            if not fields(value):
                continue
            kind = Annotated[type(value), *getattr(kind, "__metadata__", ())] if get_origin(kind) is Annotated else type(value)
        kept.append((field.name, kind, dataclass_field(metadata={"help": "-"})))  # tyro would look for one in the source
        values[field.name] = value
    return make_dataclass(type(whole).__name__, kept, frozen=True, kw_only=True)(**values)


def widen(arguments: T, narrowed: Any) -> T:
    """Return arguments with the values of the fields that narrowed ones have. Raises what the checks of their classes raise."""
    changed = {field.name: getattr(narrowed, field.name) for field in fields(narrowed)}
    for name, value in changed.items():
        whole = getattr(arguments, name)
        if is_dataclass(whole):
            changed[name] = widen(whole, value)
    return replace(arguments, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]

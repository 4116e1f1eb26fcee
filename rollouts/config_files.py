"""Conversion of trees of frozen dataclasses to and from JSON: a library's configuration and an application's own.

Functions in a configuration (a generate_fn, a reward_fn, an Algorithm) are not data: to_dict leaves them out and lists the names of those
that were set, and from_dict demands these again, so that none is lost unnoticed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rollouts.checks import parse_json, refuse_repeats
from rollouts.errors import ConfigError
from rollouts.output_files import replace_file
from rollouts.types import Algorithm

C = TypeVar("C")

FUNCTIONS_KEY = "functions"
"""Key under which to_dict lists the fields that held functions."""

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a tree of dataclasses to JSON values.

    Fields that hold functions are left out; the names of those that are not None stand in a list under FUNCTIONS_KEY. Infinities and NaN,
    which JSON does not have, become strings.

    Raises: ConfigError for a value that JSON cannot hold.
    """
    return _section_to_plain(config, "")


def from_dict(cls: type[C], data: Mapping[str, Any], **functions: Any) -> C:
    """Build a dataclass from what to_dict returned.

    Args:
        cls: a dataclass.
        data: nested mappings; missing keys take their defaults.
        functions: values of fields that hold functions, by name; in an inner section by dotted name, as in **{"rl.algorithm": grpo()}.

    Raises: ConfigError naming the dotted path of an unknown key (with a suggestion), of a missing field or function, or of a value of
        the wrong type.
    """
    return _build(cls, data, "", functions)


def save_config(config: Any, path: Path | str) -> None:
    """Write a configuration as indented JSON, whole or not at all. Raises OutputError if the disk refuses it."""
    replace_file(Path(path), json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n")


def load_config(cls: type[C], path: Path | str, **functions: Any) -> C:
    """Read a file of save_config. Raises ConfigError naming the file."""
    return from_dict(cls, read_json(path), **functions)


def read_json(path: Path | str) -> dict[str, Any]:
    """Read the settings of a JSON file. Raises ConfigError naming the file."""
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=refuse_repeats)
    except (OSError, ValueError) as error:
        advice = "" if isinstance(error, OSError) else ": mend the file there"
        raise ConfigError(f"cannot read the configuration {path}: {error}{advice}") from error
    if not isinstance(data, dict):
        example = '{"rl": {"num_steps": 10}}'
        raise ConfigError(f"the configuration {path} holds a {type(data).__name__}, expected an object of sections, such as {example}")
    return typing.cast("dict[str, Any]", data)


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def suggest(name: str, known: collections.abc.Iterable[str]) -> str:
    """Return the hint "did you mean ...?" with the most similar known name, or a list of all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def _build(cls: type[C], data: object, where: str, functions: Mapping[str, Any]) -> C:
    assert is_dataclass(cls), f"{cls} is not a dataclass"
    if not isinstance(data, Mapping):
        names = ", ".join([f.name for f in fields(cls) if f.init][:3])
        raise ConfigError(f"{where.rstrip('.') or cls.__name__} is {data!r}, expected a section with settings such as {names}")
    section = dict(typing.cast("Mapping[str, Any]", data))
    demanded = section.pop(FUNCTIONS_KEY, ())
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.init]
    plain = [name for name in names if not _is_function_type(hints[name])]
    fields_of_functions = [name for name in names if name not in plain]
    for key in section:
        if key in fields_of_functions:
            raise ConfigError(f"{where + key} is a function, which a file cannot hold: pass it as an argument")
        if key not in plain:
            raise ConfigError(f"unknown setting {where + str(key)!r}: {suggest(str(key), plain)}")
    inner = tuple(f"{name}." for name in plain if is_dataclass(hints[name]))
    for name in functions:
        if name not in fields_of_functions and not name.startswith(inner):
            raise ConfigError(f"unknown function {where + name!r}: {suggest(name, fields_of_functions)}")
    values: dict[str, Any] = {name: value for name, value in functions.items() if name in fields_of_functions}
    for name in plain:
        passed = {key.removeprefix(name + "."): function for key, function in functions.items() if key.startswith(name + ".")}
        if passed:
            values[name] = _build(hints[name], section.get(name, {}), f"{where}{name}.", passed)
        elif name in section:
            values[name] = _convert(hints[name], section[name], where + name)
    for f in fields(cls):
        if f.name in values or not f.init:
            continue
        if f.name in demanded:
            raise ConfigError(f"{where + f.name} was set when this was saved, but is a function, which is not saved: pass it again")
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where + f.name} is missing: {cls.__name__} has no default for it")
    return cls(**values)


_KINDS: Mapping[Any, str] = types.MappingProxyType(
    {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
)
"""Types of values, for messages."""


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert_union([a for a in args if a is not type(None)], value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}: {suggest(str(value), map(str, args))}")
        return value
    if is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where + ".", {})
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin in (collections.abc.Mapping, dict):
        if isinstance(value, Mapping):
            items = typing.cast("Mapping[str, Any]", value).items()
            return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in items}
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is float and (is_number(value) or value in _NON_FINITE):
        try:
            return float(value)
        except OverflowError as error:  # a whole number of more than 308 digits
            raise ConfigError(f"{where} is {str(value)[:20]}..., expected a number below 1.8e308") from error
    elif hint is Any or (isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
        return value
    expected = _KINDS.get(hint) or (getattr(hint, "__name__", str(hint)) if origin is None else hint)
    raise ConfigError(f"{where} is {value!r}, expected {expected}")


def _convert_union(options: list[Any], value: Any, where: str) -> Any:
    problems: list[ConfigError] = []
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigError as problem:
            problems.append(problem)
    raise problems[0]


def _convert_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is {value!r}, expected a list")
    items = list(typing.cast("collections.abc.Iterable[Any]", value))
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(items) != len(args):
        raise ConfigError(f"{where} has {len(items)} entries, expected {len(args)}")
    return tuple(_convert(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, items, strict=True)))


def _is_function_type(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_function_type(arg) for arg in get_args(hint))
    return hint is Algorithm or get_origin(hint) is collections.abc.Callable


def _section_to_plain(config: Any, where: str) -> dict[str, Any]:
    assert is_dataclass(config) and not isinstance(config, type), f"expected a dataclass instance, found {config!r}"
    hints = typing.get_type_hints(type(config))
    names = [f.name for f in fields(config) if f.init]
    assert FUNCTIONS_KEY not in names, f"{type(config).__name__} has a field {FUNCTIONS_KEY!r}, a name that is reserved"
    plain = {name: _to_plain(getattr(config, name), where + name) for name in names if not _is_function_type(hints[name])}
    set_functions = [name for name in names if name not in plain and getattr(config, name) is not None]
    return plain | ({FUNCTIONS_KEY: set_functions} if set_functions else {})


def _to_plain(value: Any, where: str) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _section_to_plain(value, where + ".")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, f"{where}[{i}]") for i, item in enumerate(typing.cast("list[Any]", value))]
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v, f"{where}.{k}") for k, v in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"{where} is a {type(value).__name__}, which a configuration file cannot hold")

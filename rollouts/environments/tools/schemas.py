"""JSON schemas of typed functions, and arguments that fit them. Pure; a small part of JSON Schema, known to all models."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, Union, cast, get_args, get_origin

from rollouts.checks import parse_json
from rollouts.errors import ConfigError

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema: type, properties, required, additionalProperties, items, enum, anyOf, default, description."""

_SIMPLE = types.MappingProxyType({str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"})


def create_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Create the schema of a function's arguments from its annotations, defaults and docstring.

    Args:
        function: every parameter must be annotated with str, int, float, bool, None, Any, Literal, a list, a dict with text keys, or a
            union of these. Annotated[X, "text"], or a line "name: text" under "Args:" in the docstring, describes a parameter.

    Returns: {"type": "object", "properties": ..., "required": ..., "additionalProperties": False}.
    Raises: ConfigError naming the parameter.
    """
    name = getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    try:
        hints = typing.get_type_hints(_find_annotated(function), include_extras=True)
    except NameError as error:
        raise ConfigError(f"tool {name}: an annotation cannot be found ({error}): define its type at the top of the module") from error
    texts = _read_argument_lines(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    for parameter in parameters.values():
        where = f"parameter {parameter.name} of tool {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where} is {parameter}: give every argument of a tool a name of its own, or write its schema by hand")
        if parameter.name not in hints:
            raise ConfigError(
                f"{where} has no annotation, so a model cannot be told what it is: write {parameter.name}: str, or another type"
            )
        schema = _create_type_schema(hints[parameter.name], where)
        if parameter.name in texts:
            schema = {"description": texts[parameter.name], **schema}
        properties[parameter.name] = schema
    required = [p.name for p in parameters.values() if p.default is inspect.Parameter.empty]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def fit_value(value: Any, schema: Schema, where: str) -> Any:
    """Convert a value to fit a schema. A text is parsed if the schema wants a number, a boolean or null.

    Args:
        where: name of the value, for messages.

    Raises: ValueError with the found and the expected value.
    """
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if _fits_exactly(value, option)] or list(schema["anyOf"])
        failures: list[str] = []
        for option in options:
            try:
                return fit_value(value, option, where)
            except ValueError as error:
                failures.append(str(error))
        raise ValueError("; or ".join(failures))
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} is {_show(value)}, expected one of {', '.join(map(_show, schema['enum']))}")
    kind = schema.get("type")
    if kind == "object" and isinstance(value, Mapping):
        return _fit_object(cast("Mapping[str, Any]", value), schema, where)
    if kind == "array" and isinstance(value, Sequence) and not isinstance(value, str):
        return [fit_value(entry, schema.get("items", {}), f"{where}[{i}]") for i, entry in enumerate(cast("Sequence[Any]", value))]
    if kind is None or _fits_exactly(value, schema):
        return value
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "null"):
        try:
            spelled = parse_json(value.strip().lower())
        except ValueError:
            spelled = value
        if not isinstance(spelled, str):
            return fit_value(spelled, schema, where)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"{where} is {_show(value)}, expected {_NAMES.get(str(kind), kind)}")


_NAMES = types.MappingProxyType(
    {"string": "a text", "integer": "an integer", "number": "a number", "boolean": "true or false", "null": "null", "array": "a list",
     "object": "an object"}
)  # fmt: skip


def _fits_exactly(value: Any, schema: Schema) -> bool:
    match schema.get("type"):
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value))
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, (list, tuple))
        case "object":
            return isinstance(value, Mapping)
        case _:
            return True


def _fit_object(value: Mapping[str, Any], schema: Schema, where: str) -> dict[str, Any]:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    missing = [name for name in schema.get("required", ()) if name not in value]
    unknown = [name for name in value if name not in properties]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    if unknown and others is False:
        raise ValueError(f"{where} has {', '.join(unknown)}, which is not known: known are {', '.join(properties) or 'none'}")
    rest: Schema = cast("Schema", others) if isinstance(others, Mapping) else {}
    return {name: fit_value(entry, properties.get(name, rest), f"{where}.{name}") for name, entry in value.items()}


def _create_type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text = next((extra for extra in arguments[1:] if isinstance(extra, str)), None)
        return {**({} if text is None else {"description": text}), **_create_type_schema(arguments[0], where)}
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_create_type_schema(argument, where) for argument in arguments]}
    if hint is list or (origin in (list, Sequence) and arguments):
        return {"type": "array", **({"items": _create_type_schema(arguments[0], where)} if arguments else {})}
    if hint is dict or (origin in (dict, Mapping) and arguments[0] is str):
        return {"type": "object", **({"additionalProperties": _create_type_schema(arguments[1], where)} if arguments else {})}
    raise ConfigError(
        f"{where} is annotated with {hint!r}, which has no JSON schema here: use str, int, float, bool, list, dict, Literal or a "
        "union of these, or give Tool a schema written by hand"
    )


def _find_annotated(function: Callable[..., Any]) -> Any:
    """Return the holder of the annotations: the function itself, or an object's __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _read_argument_lines(text: str) -> dict[str, str]:
    """Parse argument descriptions from a docstring of Google's form: indented "name: text" or "name (type): text" under "Args:"."""
    block = re.search(r"^Args:\s*\n((?:[ \t]+.*\n?|\s*\n)+)", text, re.MULTILINE)
    if block is None:
        return {}
    lines = [line for line in block.group(1).splitlines() if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip())
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.match(r"(\w+)(?: *\([^)]*\))?: *(.*)", line[indent:])
        if start is not None and not line[:indent].strip():
            name = start.group(1)
            found[name] = start.group(2).strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _show(value: Any) -> str:
    try:
        return f"{json.dumps(value, ensure_ascii=False):.100}"
    except (TypeError, ValueError):
        return f"{value!r:.100}"

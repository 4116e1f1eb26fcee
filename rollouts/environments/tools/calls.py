"""Parsers of tool calls in a model's text. They are pure: text in, calls out; a malformed call is a value that says why.

    parse_hermes_calls     <tool_call>{"name": "calc", "arguments": {"e": "12*7"}}</tool_call>, any number of them in one text
    parse_json_calls       a text that is a JSON call, or a list of them; in a ```json fence or not
    create_compact_parser  calc(12*7): for models with one token per character

A parser of your own is any function of this signature. A text without a call, and without the beginning of one, is an answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

from rollouts.checks import check_encodable, parse_json, refuse_constant, refuse_repeats
from rollouts.environments.tools.tool import Tool


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # JSON values by name; not checked against any tool
    id: str | None = None  # id from the model; None = it gave none

    def to_dict(self) -> dict[str, Any]:
        """Return the call as in an assistant message of OpenAI's format, arguments as a JSON text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class ToolCallError:
    """A malformed call."""

    message: str  # fault of the call, in words for the model
    text: str  # the model's text
    id: str | None = None


ParsedCalls: TypeAlias = "tuple[ToolCall | ToolCallError, ...]"
"""Calls in the order of the text; () = the text is an answer."""

ToolParser: TypeAlias = Callable[[str], ParsedCalls]


def strip_thinking(text: str) -> str:
    """Remove the text between <think> and </think>, or up to a </think> without a beginning.

    Unfinished thoughts are removed to the end of the text: they are neither a call nor an answer.
    """
    text = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)
    return text.rpartition("</think>")[2]


def parse_hermes_calls(text: str) -> ParsedCalls:
    """Parse calls between <tool_call> and </tool_call>, each a JSON object with name and arguments. Thoughts are skipped."""
    found: list[ToolCall | ToolCallError] = []
    for part in strip_thinking(text).split("<tool_call>")[1:]:
        inside, end, _ = part.partition("</tool_call>")
        if end:
            found.append(_parse_json_call(inside))
        else:
            found.append(ToolCallError(message="<tool_call> without </tool_call>", text=inside))
    return tuple(found)


def parse_json_calls(text: str) -> ParsedCalls:
    """Parse a text that is nothing but JSON: an object with name and arguments, a list of those, or {"tool_calls": [...]}.

    JSON without a name in it is an answer. Thoughts and a fence around the text are skipped.
    """
    text = strip_thinking(text).strip()
    fence = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
    inside = text if fence is None else fence.group(1)
    if not inside.startswith(("{", "[")):
        return ()
    try:
        value = _load_json(inside)
    except ValueError as error:
        is_call = re.search(r'"(name|arguments|tool_calls|function)"', inside) is not None
        return (ToolCallError(message=f"no JSON: {error}", text=inside),) if is_call else ()
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    entries = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, dict) and ("name" in entry or "function" in entry) for entry in entries):
        return ()
    return tuple(_read_call(entry, json.dumps(entry, ensure_ascii=False)) for entry in entries)


def create_compact_parser(tools: Sequence[Tool]) -> ToolParser:
    """Create a parser of calls such as calc(12*7) and add(1, 2): the name of a tool, and its arguments in order.

    A tool with one argument gets the whole text in the parentheses; for a tool with several the text is split at commas outside of brackets
    and quotes. Arguments are texts, without quotes around them; a schema converts them to numbers (fit_arguments).
    """
    parameters = {tool.name: tuple(tool.parameters.get("properties", {})) for tool in tools}
    return partial(_parse_compact_calls, parameters=parameters)


def _parse_compact_calls(text: str, parameters: Mapping[str, tuple[str, ...]]) -> ParsedCalls:
    text = strip_thinking(text)
    found: list[ToolCall | ToolCallError] = []
    position = 0
    names = "|".join(re.escape(name) for name in sorted(parameters, key=len, reverse=True))
    while (start := re.compile(rf"(?<!\w)({names})\(").search(text, position)) is not None:
        name = start.group(1)
        end = _find_end(text, start.end())
        inside = text[start.end() : end]
        position = len(text) if end is None else end + 1
        if end is None:
            found.append(ToolCallError(message=f"{name}( without )", text=text[start.start() :]))
            continue
        known = parameters[name]
        values = [inside] if len(known) == 1 else _split_arguments(inside)
        if len(values) > len(known):
            message = f"{name} has {len(known)} arguments, found {len(values)}"
            found.append(ToolCallError(message=message, text=text[start.start() : position]))
        else:
            found.append(ToolCall(name=name, arguments={key: _unquote(value.strip()) for key, value in zip(known, values, strict=False)}))
    return tuple(found)


def _find_end(text: str, position: int) -> int | None:
    """Return the position that closes the parenthesis before this position; None if there is none."""
    depth = 1
    for i in range(position, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return None


def _split_arguments(text: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes; [] for an empty text."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts if text.strip() else []


def _unquote(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] in "\"'" and text[-1] == text[0] and text[0] not in text[1:-1]
    return text[1:-1] if is_quoted else text


def _load_json(text: str) -> Any:
    """Parse JSON. Raises ValueError with the fault, also for NaN, infinity, a repeated name, half a surrogate pair, too deep nesting."""
    try:
        value = parse_json(text, parse_constant=refuse_constant, parse_float=_parse_float, object_pairs_hook=refuse_repeats)
        check_encodable(value)
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in it") from None


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else refuse_constant(text)


def _parse_json_call(text: str) -> ToolCall | ToolCallError:
    try:
        value = _load_json(text.strip())
    except ValueError as error:
        return ToolCallError(message=f"no JSON: {error}", text=text)
    return _read_call(value, text)


def _read_call(value: Any, text: str) -> ToolCall | ToolCallError:
    """Read a call from {"name", "arguments"}, also inside {"function": ...}; arguments may be a JSON text, as in OpenAI's format."""
    if not isinstance(value, dict):
        return ToolCallError(message="not an object with name and arguments", text=text)
    outer = cast("dict[str, Any]", value)
    inner = cast("dict[str, Any]", outer["function"]) if isinstance(outer.get("function"), dict) else outer
    given = outer.get("id")
    call_id = given if isinstance(given, str) else None
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ToolCallError(message="no name of a tool in it", text=text, id=call_id)
    if isinstance(arguments, str):
        try:
            arguments = _load_json(arguments)
        except ValueError as error:
            return ToolCallError(message=f"arguments are no JSON: {error}", text=text, id=call_id)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCallError(message="arguments are no object", text=text, id=call_id)
    return ToolCall(name=name, arguments=cast("dict[str, Any]", arguments), id=call_id)

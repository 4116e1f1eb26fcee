"""Refusals of a gateway's requests, and readers of the fields of their JSON that refuse what they cannot use, naming the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from rollouts.errors import RolloutsError

Body: TypeAlias = "Mapping[str, Any]"
Value = TypeVar("Value")

MAX_INT = 2**63 - 1


class Refusal(RolloutsError):
    """A request that gets an error status instead of an answer. Its message is for the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """
        Args:
            status: HTTP status, from 400.
            param: field of the request that is at fault, such as "messages[2].content"; None = no single one.
            code: reason in one word; None = the status says it.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def refuse(param: str, found: Any, expected: str) -> Refusal:
    """Return the refusal (400) of a field's value."""
    return Refusal(400, f"{param} is {_show(found)}, expected {expected}", param=param, code="invalid_value")


def refuse_unsupported(param: str, found: Any, advice: str) -> Refusal:
    """Return the refusal (400) of a field that this gateway does not support."""
    return Refusal(400, f"{param} = {_show(found)} is not supported: {advice}", param=param, code="unsupported_parameter")


def parse_body(data: bytes) -> Body:
    """Return the JSON object of a request. Raises Refusal (400) for anything else."""
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in data:
            check_encodable(body)
    except RecursionError:
        raise Refusal(400, "the body is JSON that is nested too deeply", code="invalid_json") from None
    except UnicodeError:
        raise Refusal(400, "the body is not UTF-8, or has half of a surrogate pair in it", code="invalid_json") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is {_show(body)}, expected a JSON object", code="invalid_json")
    return cast("dict[str, Any]", body)


def check_encodable(value: Any) -> None:
    """Raise UnicodeError if a JSON value has half of a surrogate pair in it, which has no bytes; RecursionError if it is too deep."""
    json.dumps(value, ensure_ascii=False).encode()


def check_known(body: Body, known: Mapping[str, str | None], where: str = "") -> None:
    """Refuse fields that are not known.

    Args:
        known: name -> None for a field that is read or has no effect on the answer; or advice: why another value than null, false, 0
            or an empty one is not supported.
    """
    for name, value in body.items():
        if name not in known:
            if value is None:
                continue
            raise Refusal(400, f"{where}{name} is no field that this gateway knows", param=f"{where}{name}", code="unknown_parameter")
        advice = known[name]
        if advice is not None and value not in (None, False, 0, "", [], {}):
            raise refuse_unsupported(f"{where}{name}", value, advice)


def read_text(body: Body, name: str, default: str | None = None, *, where: str = "") -> str | None:
    """Return a text, or the default for null or no field."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise refuse(f"{where}{name}", value, "a text")
    return value


def read_int(body: Body, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_INT) -> int | None:
    """Return an integer, or the default for null or no field."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise refuse(name, value, f"an integer from {least} to {most}" if most < MAX_INT else f"an integer, at least {least}")
    return value


def read_number(body: Body, name: str, *, least: float, most: float, above: bool = False) -> float | None:
    """Return a number, or None for null or no field. above: whether `least` itself is refused."""
    value = body.get(name)
    if value is None:
        return None
    is_finite = type(value) is int or (type(value) is float and math.isfinite(value))
    good = is_finite and least <= value <= most and not (above and value == least)
    if not good:
        raise refuse(name, value, f"a number {'above' if above else 'from'} {least:g} to {most:g}")
    return float(value)


def read_flag(body: Body, name: str, *, default: bool = False, where: str = "") -> bool:
    """Return true or false, or the default for null or no field."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(f"{where}{name}", value, "true or false")
    return value


def read_stop(body: Body, name: str, *, most: int = 16) -> tuple[str, ...]:
    """Return stop strings: one text, or a list of them; () for null or no field."""
    value = body.get(name)
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and len(cast("list[Any]", texts)) <= most
    if not good or not all(isinstance(text, str) and text for text in cast("list[Any]", texts)):
        raise refuse(name, value, f"a text that is not empty, or a list of at most {most} of them")
    return tuple(cast("list[str]", texts))


def read_object(value: Any, where: str, expected: str) -> Body:
    """Return a JSON object as it is."""
    if not isinstance(value, dict):
        raise refuse(where, value, expected)
    return cast("dict[str, Any]", value)


def read_list(value: Any, where: str, expected: str, of: Callable[[Any, str], Value]) -> tuple[Value, ...]:
    """Return the values of a list, each read by `of`(value, place)."""
    if not isinstance(value, list):
        raise refuse(where, value, expected)
    return tuple(of(item, f"{where}[{k}]") for k, item in enumerate(cast("list[Any]", value)))


def read_parts(content: Any, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a message's content: a text, null (""), or a list of parts of these types, whose texts are joined.

    Raises: Refusal for other parts, such as pictures.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content

    def read(part: Any, place: str) -> str:
        found = read_object(part, place, "an object with a type and a text")
        if found.get("type") not in kinds:
            raise refuse_unsupported(f"{place}.type", found.get("type"), f"this gateway reads texts ({', '.join(kinds)})")
        text = found.get("text")
        if not isinstance(text, str):
            raise refuse(f"{place}.text", text, "a text")
        return text

    return "".join(read_list(content, where, "a text, or a list of parts", read))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:100] + "..."

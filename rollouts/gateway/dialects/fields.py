"""Fields of a request's JSON: an object with its place, whose readers refuse what they cannot use and name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rollouts.gateway.refusals import Refusal

Value = TypeVar("Value")

MAX_INT = 2**63 - 1
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Fields:
    """A JSON object of a request, and its place in the body. Every reader raises Refusal (400) for what it cannot use."""

    values: Mapping[str, Any]
    place: str = ""  # such as "messages[2]"; "" = the body itself

    @classmethod
    def of(cls, value: Any, place: str, expected: str) -> Fields:
        """Return the fields of a value that must be an object."""
        if not isinstance(value, dict):
            raise refuse(place, value, expected)
        return cls(cast("dict[str, Any]", value), place)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value as it is."""
        return self.values.get(name, default)

    def name(self, name: str) -> str:
        """Return the whole name of a field."""
        return f"{self.place}.{name}" if self.place else name

    def refuse(self, name: str, expected: str) -> Refusal:
        """Return the refusal of a field's value."""
        return refuse(self.name(name), self.get(name), expected)

    def refuse_unsupported(self, name: str, advice: str) -> Refusal:
        """Return the refusal of a field that this gateway does not support."""
        return refuse_unsupported(self.name(name), self.get(name), advice)

    def check_known(self, known: Mapping[str, str | None]) -> None:
        """Refuse fields that are not known.

        Args:
            known: name -> None for a field that is read or has no effect on the answer; or advice: why another value than null, false, 0
                or an empty one is not supported.
        """
        for name, value in self.values.items():
            if name not in known:
                if value is None:
                    continue
                where = self.name(name)
                raise Refusal(400, f"{where} is no field that this gateway knows", param=where, code="unknown_parameter")
            advice = known[name]
            if advice is not None and value not in (None, False, 0, "", [], {}):
                raise self.refuse_unsupported(name, advice)

    def read_text(self, name: str, default: str | None = None) -> str | None:
        """Return a text, or the default for null or no field."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a text")
        return value

    def need_text(self, name: str, expected: str = "a text that is not empty") -> str:
        """Return a text that must be there."""
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.refuse(name, expected)
        return value

    def read_int(self, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_INT) -> int | None:
        """Return an integer, or the default for null or no field."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"an integer from {least} to {most}" if most < MAX_INT else f"an integer, at least {least}")
        return value

    def read_number(self, name: str, *, least: float, most: float, above: bool = False) -> float | None:
        """Return a number, or None for null or no field. above: whether `least` itself is refused."""
        value = self.get(name)
        if value is None:
            return None
        is_finite = type(value) is int or (type(value) is float and math.isfinite(value))
        if not (is_finite and least <= value <= most and not (above and value == least)):
            raise self.refuse(name, f"a number {'above' if above else 'from'} {least:g} to {most:g}")
        return float(value)

    def read_flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false, or the default for null or no field."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def read_stop(self, name: str, *, most: int = 16) -> tuple[str, ...]:
        """Return stop strings: one text, or a list of them; () for null or no field."""
        value = self.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list) and len(cast("list[Any]", texts)) <= most
        if not good or not all(isinstance(text, str) and text for text in cast("list[Any]", texts)):
            raise self.refuse(name, f"a text that is not empty, or a list of at most {most} of them")
        return tuple(cast("list[str]", texts))

    def read_object(self, name: str, expected: str = "an object") -> Fields:
        """Return an object; an empty one for null or no field."""
        value = self.get(name)
        return Fields({}, self.name(name)) if value is None else Fields.of(value, self.name(name), expected)

    def read_list(self, name: str, expected: str, of: Callable[[Any, str], Value]) -> tuple[Value, ...]:
        """Return the values of a list, each read by `of`(value, place)."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.refuse(name, expected)
        return tuple(of(item, f"{self.name(name)}[{k}]") for k, item in enumerate(cast("list[Any]", value)))

    def read_objects(self, name: str, expected: str, item: str) -> tuple[Fields, ...]:
        """Return the objects of a list. item: what each of them must be."""
        return self.read_list(name, expected, lambda value, place: Fields.of(value, place, item))

    def read_parts(self, name: str, kinds: Sequence[str]) -> str:
        """Return the text of a message's content: a text, null (""), or a list of parts of these types, whose texts are joined.

        Raises: Refusal for other parts, such as pictures.
        """
        content = self.get(name)
        if content is None or isinstance(content, str):
            return content or ""
        texts: list[str] = []
        for part in self.read_objects(name, "a text, or a list of parts", "an object with a type and a text"):
            if part.get("type") not in kinds:
                raise part.refuse_unsupported("type", f"this gateway reads texts ({', '.join(kinds)})")
            field = "refusal" if part.get("type") == "refusal" else "text"
            if not isinstance(part.get(field), str):
                raise part.refuse(field, "a text")
            texts.append(part.get(field))
        return "".join(texts)


def refuse(param: str, found: Any, expected: str) -> Refusal:
    """Return the refusal (400) of a field's value."""
    return Refusal(400, f"{param} is {_show(found)}, expected {expected}", param=param, code="invalid_value")


def refuse_unsupported(param: str, found: Any, advice: str) -> Refusal:
    """Return the refusal (400) of a field that this gateway does not support."""
    return Refusal(400, f"{param} = {_show(found)} is not supported: {advice}", param=param, code="unsupported_parameter")


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:100] + "..."

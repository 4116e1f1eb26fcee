"""Process of a program under test: it executes the program and answers the tests' requests, one after the other.

It gets names, arguments and operations, never expected values, and answers with data. The process is in the hands of the program, which
may have changed everything in it: nothing here is relied upon. Loaded inside of sandboxes only.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any, cast

from rollouts.rewards.code.values import decode, encode
from rollouts.sandbox.inside.worker import load_source

_UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType({
    "len": len, "str": str, "repr": repr, "int": int, "float": float, "index": operator.index, "iter": iter, "reversed": reversed,
    "neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert, "round": round, "next": next,
})  # fmt: skip


def answer_requests(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute payload["code"], then payload["requests"], lists of an operation and its operands.

    Returns: for each request {"value": data} and "changed", data of the arguments that it changed, by their place; or {"error": ...}.
    """
    module = load_source(payload["code"], "user_code", "program.py")
    program = _Program(vars(module))
    return [program.answer(*request) for request in payload["requests"]]


class _Program:
    """Values of the requests so far, and objects that are no data, by their names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.values: list[Any] = []
        self.objects: list[Any] = []

    def answer(self, kind: str, *parts: Any) -> dict[str, Any]:
        """Carry out one request and return its answer."""
        answer = _Answer()
        try:
            value, changed = self._do(kind, parts)
            answer.content = {"value": encode(value, self._name), **({"changed": changed} if changed else {})}
            self.values.append(value)
        except BaseException as error:  # SystemExit, too
            answer.set_error(error)
            self.values.append(_Missing())
        return answer.content

    def _do(self, kind: str, parts: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        if kind == "name":
            if parts[0] not in self.names:
                raise NameError(f"name {parts[0]!r} is not defined")
            return self.names[parts[0]], []
        if kind == "call":
            function, given = self._find(parts[0]), self._find(parts[1])
            named = {key: self._find(value) for key, value in parts[2].items()}
            value = function(*given, **named)
            after = [*enumerate(given), *named.items()]
            before = [*enumerate(parts[1]), *parts[2].items()]
            states = [(place, encode(argument, self._name), old) for (place, argument), (_, old) in zip(after, before, strict=True)]
            return value, [[place, new] for place, new, old in states if new != old and not _is_reference(old)]
        values = [self._find(part) for part in parts]
        if kind == "getattr":
            return getattr(values[0], values[1]), []
        if kind == "setattr":
            return setattr(values[0], values[1], values[2]), []
        if kind == "take":
            return list(islice(values[0], values[1])), []
        function = _UNARY.get(kind) or getattr(operator, kind)
        return function(*values), []

    def _find(self, data: Any) -> Any:
        return decode(data, self._look_up)

    def _look_up(self, key: str, content: Any) -> Any:
        if key == "object":
            return self.objects[content]
        if key == "result":
            value = self.values[content]
            if isinstance(value, _Missing):
                raise LookupError("the value that this needs is missing")
            return value
        if key == "global":
            module, _, name = content.rpartition(".")
            return getattr(importlib.import_module(module), name)
        if key == "code":
            return vars(load_source(content, "test_code"))["value"]
        raise ValueError(f"{key} names nothing")

    def _name(self, value: Any) -> dict[str, Any]:
        number = next((k for k, other in enumerate(self.objects) if other is value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return {"object": number}


class _Missing:
    """Placeholder for the value of a request that raised."""


def _is_reference(data: Any) -> bool:
    return isinstance(data, dict) and set(cast("dict[str, Any]", data)) <= {"object", "result"}


class _Answer:
    """Answer to a request."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def set_error(self, error: BaseException) -> None:
        """Record the request's exception."""
        text = ""
        with suppress(Exception):  # __str__ may be the program's
            text = str(error.args[0] if len(error.args) == 1 else error)[:2000]
        self.content = {"error": {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": text}}

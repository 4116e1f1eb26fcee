"""Function of a SandboxPool whose code comes with each call. Loaded inside of sandboxes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from rollouts.sandbox.inside.worker import load_source


def call_source(payload: dict[str, Any]) -> Any:
    """Execute payload["code"] and call its function payload["function"] with payload["arguments"] as keywords.

    Returns: the function's value; values with to_dict, such as an EvaluateResult, or a list of them, as dicts.
    """
    value = load_function(payload)(**payload["arguments"])
    return [_as_dict(item) for item in cast("list[Any]", value)] if isinstance(value, (list, tuple)) else _as_dict(value)


def load_function(payload: dict[str, Any]) -> Callable[..., Any]:
    """Return the function. Tracebacks call the code payload["file"], if given."""
    module = load_source(payload["code"], "user_code", payload.get("file"))
    function = getattr(module, payload["function"], None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise TypeError(f"the code defines no function {payload['function']!r}, but {', '.join(names) or 'none'}")
    return function


def _as_dict(value: Any) -> Any:
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else value

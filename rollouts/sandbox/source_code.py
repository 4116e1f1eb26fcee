"""A function of a SandboxPool whose code comes with each call. Loaded inside of sandboxes only."""

from __future__ import annotations

from typing import Any

from rollouts.sandbox.worker import load_source


def call_source(payload: dict[str, Any]) -> Any:
    """Execute payload["code"], then call the function in it that payload["function"] names, with payload["arguments"] as keywords."""
    module = load_source(payload["code"], "user_code")
    function = getattr(module, payload["function"], None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise TypeError(f"the code defines no function {payload['function']!r}, but {', '.join(names) or 'none'}")
    return function(**payload["arguments"])

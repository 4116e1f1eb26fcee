"""A user's reward function whose code comes with each call. Loaded inside of sandboxes only, with the types that such code imports."""

from __future__ import annotations

import inspect
from typing import Any

from rollouts.rewards.reward_functions import BatchRewardFunction, RewardFunction
from rollouts.sandbox.inside.source_code import call_source, load_function


def call_reward(payload: dict[str, Any]) -> Any:
    """Call a function, see call_source; without payload["arguments"] describe it.

    Returns: the function's value; or its description: "is_batch", "is_async" and the keys of describe.
    """
    return call_source(payload) if "arguments" in payload else describe(load_function(payload))


def describe(function: Any) -> dict[str, Any]:
    """Describe a function's parameters: "parameters", names of metadata; "takes_all"; "takes_messages", as a keyword."""
    decorated = isinstance(function, RewardFunction)
    parameters = list(inspect.signature(inspect.unwrap(function) if decorated else function).parameters.values())
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in (parameters[1:] if decorated else parameters)]
    return {
        "is_batch": isinstance(function, BatchRewardFunction),
        "is_async": inspect.iscoroutinefunction(inspect.unwrap(function)),
        "parameters": names,
        "takes_all": takes_all,
        "takes_messages": decorated or takes_all or "messages" in names,
    }

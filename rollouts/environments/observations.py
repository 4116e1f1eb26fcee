"""Observations of environments (a text, messages, or JSON values), and their forms for models and logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from rollouts.types import Message

Observation: TypeAlias = Any
"""A text; a Message or a sequence of them (tool results); or a JSON value. None and "" = nothing to show."""


def find_non_json(value: Any, where: str = "") -> str | None:
    """Describe the first place in a value that JSON cannot hold; None = there is none. Tuples count as lists.

    Args:
        where: name of the value in the description.
    """
    try:
        return _find_non_json(value, where)
    except RecursionError:
        return f"{where} is nested too deep, or holds itself"


def _find_non_json(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, (bool, int)):
        return None
    if isinstance(value, str):
        return None if is_text(value) else f"{where} is {value!r:.100}, with half of a surrogate pair in it"
    if isinstance(value, float):
        return f"{where} is {value}" if value != value or value in (float("inf"), float("-inf")) else None
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        for key in items:
            if not isinstance(key, str):
                return f"{where} has the key {key!r:.100} ({type(key).__name__}), not a text"
        return next((found for key, x in items.items() if (found := _find_non_json(x, f"{where}[{key!r}]")) is not None), None)
    if isinstance(value, (list, tuple)):
        entries = cast("Sequence[Any]", value)
        return next((found for i, x in enumerate(entries) if (found := _find_non_json(x, f"{where}[{i}]")) is not None), None)
    return f"{where} is {value!r:.100} ({type(value).__name__})"


def is_text(value: str) -> bool:
    """Whether a str can be encoded; half of a surrogate pair breaks tokenizers and files."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_observation_fault(observation: Observation) -> str | None:
    """Describe the fault of an observation; None = it has none."""
    messages: tuple[Message, ...] = observation_to_messages(observation) if are_messages(observation) else ()
    for number, message in enumerate(messages):
        fault = _find_message_fault(message, f"message {number} of the observation")
        if fault is not None:
            return fault
    return find_non_json(observation_to_json(observation), "the observation")


def copy_json(value: Any) -> Any:
    """Copy JSON values or an observation, independent of later changes of the original. Mappings become dicts."""
    if isinstance(value, Mapping):
        return {key: copy_json(x) for key, x in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list):
        return [copy_json(x) for x in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple([copy_json(x) for x in cast("tuple[Any, ...]", value)])
    if isinstance(value, Message) and value.tool_calls is not None:
        return replace(value, tool_calls=copy_json(value.tool_calls))
    return value


def _find_message_fault(message: Any, where: str) -> str | None:
    """Describe the fault in the fields of an environment's message; None = it has none."""
    if not isinstance(message.role, str) or not message.role:
        return f"the role of {where} is {message.role!r:.100} ({type(message.role).__name__}), not the name of a role"
    calls = message.tool_calls
    if calls is not None and not (isinstance(calls, (list, tuple)) and all(isinstance(x, Mapping) for x in cast("Sequence[Any]", calls))):
        return f"tool_calls of {where} is {calls!r:.100} ({type(calls).__name__}), not a sequence of mappings"
    if not isinstance(message.content, str) and not (message.content is None and calls):
        return f"the content of {where} is {message.content!r:.100} ({type(message.content).__name__}), not a text"
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None and not isinstance(value, str):
            return f"{name} of {where} is {value!r:.100} ({type(value).__name__}), not a text"
    return None


def observation_to_json(observation: Observation) -> Any:
    """Return an observation as plain JSON values, messages as dicts; for logs, StepData and keys of states."""
    if isinstance(observation, Message):
        return observation.to_dict()
    if are_messages(observation):
        return [message.to_dict() for message in observation]
    return observation


def observation_to_text(observation: Observation, description: str = "") -> str:
    """Return an observation for a model that reads plain text.

    Args:
        description: the environment's state (get_state_description), shown in place of an observation that is no text.

    Returns: the text itself; the contents of messages, each on a line; otherwise the description, or compact JSON without one.
    """
    if observation is None:
        return description
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Message):
        return observation.content or ""
    if are_messages(observation):
        return "\n".join(message.content or "" for message in observation)
    return description or json.dumps(observation, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def observation_to_messages(observation: Observation, *, role: str = "user", description: str = "") -> tuple[Message, ...]:
    """Return an observation for a model in a conversation: messages as they are, everything else as one message of this role.

    Args:
        role: role of that message.
        description: see observation_to_text.

    Returns: () if there is nothing to show.
    """
    if isinstance(observation, Message):
        return (observation,)
    if are_messages(observation):
        return tuple(observation)
    text = observation_to_text(observation, description)
    return (Message(role=role, content=text),) if text else ()


def are_messages(value: Any) -> bool:
    """Whether an observation is a Message, or a sequence of at least one."""
    if isinstance(value, (list, tuple)):
        entries = cast("Sequence[Any]", value)
        return bool(entries) and all(isinstance(entry, Message) for entry in entries)
    return isinstance(value, Message)

"""What an environment shows: a text, messages, or JSON values; and how a model and a log are given them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from rollouts.types import Message

Observation: TypeAlias = Any
"""A text; a Message or a sequence of them (tool results); or a JSON value. None and "" = nothing to show."""


def find_non_json(value: Any, where: str = "") -> str | None:
    """The first place in a value that JSON cannot hold, in words; None = there is none. Tuples count as lists.

    Args:
        where: name of the value, for the words.
    """
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
        return next((found for key, x in items.items() if (found := find_non_json(x, f"{where}[{key!r}]")) is not None), None)
    if isinstance(value, (list, tuple)):
        entries = cast("Sequence[Any]", value)
        return next((found for i, x in enumerate(entries) if (found := find_non_json(x, f"{where}[{i}]")) is not None), None)
    return f"{where} is {value!r:.100} ({type(value).__name__})"


def is_text(value: str) -> bool:
    """Whether a str can be encoded: one with half of a surrogate pair breaks tokenizers and files."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_observation_fault(observation: Observation) -> str | None:
    """What is wrong with an observation, in words; None = nothing."""
    return find_non_json(observation_to_json(observation), "the observation")


def observation_to_json(observation: Observation) -> Any:
    """An observation as plain JSON values: messages become dicts. For logs, StepData and keys of states."""
    if isinstance(observation, Message):
        return observation.to_dict()
    if _are_messages(observation):
        return [message.to_dict() for message in observation]
    return observation


def observation_to_text(observation: Observation, description: str = "") -> str:
    """An observation for a model that reads plain text.

    Args:
        description: of the environment's state (get_state_description), which is shown in place of an observation that is no text.

    Returns: the text itself; the contents of messages, each on a line; else the description, or compact JSON where there is none.
    """
    if observation is None:
        return description
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Message):
        return observation.content or ""
    if _are_messages(observation):
        return "\n".join(message.content or "" for message in observation)
    return description or json.dumps(observation, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def observation_to_messages(observation: Observation, *, role: str = "user", description: str = "") -> tuple[Message, ...]:
    """An observation for a model that is given a conversation: messages as they are, everything else as one message of this role.

    Args:
        role: of that message.
        description: see observation_to_text.

    Returns: () if there is nothing to show.
    """
    if isinstance(observation, Message):
        return (observation,)
    if _are_messages(observation):
        return tuple(observation)
    text = observation_to_text(observation, description)
    return (Message(role=role, content=text),) if text else ()


def _are_messages(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        entries = cast("Sequence[Any]", value)
        return bool(entries) and all(isinstance(entry, Message) for entry in entries)
    return isinstance(value, Message)

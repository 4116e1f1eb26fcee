"""Differences between a request and the recorded one that it resembles most, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.gateway.cassettes.exchanges import Asked, Exchange
from rollouts.types import Message

_AROUND = 20  # characters shown on each side of the first one that differs


def describe_difference(asked: Asked, unplayed: Sequence[Exchange]) -> str:
    """Return the first difference between a request and the unplayed one that has the most of its messages."""
    if not unplayed:
        return f"the recording has no further request, and this one ends with {_show_end(asked)}"
    path = asked.find_path()
    nearest = max(unplayed, key=lambda exchange: (_count_equal(path, exchange.asked.find_path()), -exchange.answers[0].number))
    recorded = nearest.asked
    if (recorded.prompt is None) != (asked.prompt is None):
        return f"the request has {'messages' if asked.prompt is None else 'a plain prompt'}, the recorded one not"
    if recorded.prompt is not None and recorded.prompt != asked.prompt:
        return f"prompt{_compare(asked.prompt or '', recorded.prompt)}"
    for k, (message, other) in enumerate(zip(asked.messages, recorded.messages, strict=False)):
        if path[k] != recorded.find_path()[k]:
            return f"messages[{k}]{_compare_messages(message, other)}"
    found, told = len(asked.messages), len(recorded.messages)
    if found != told:
        more, of = (asked, "the recorded request has not") if found > told else (recorded, "the recorded request has in addition")
        return f"messages[{min(found, told)}] is {_show(more.messages[min(found, told)])}, which {of}"
    for name in {**recorded.sampling, **asked.sampling}:
        wanted, wrote = asked.sampling.get(name), recorded.sampling.get(name)
        if json.dumps(wanted) != json.dumps(wrote):  # as find_key compares them: 1 and true are two values
            return f"{name} is {wanted!r}, in the recording {wrote!r}"
    return f"tools are {list(asked.tools)!r:.300}, in the recording {list(recorded.tools)!r:.300}"


def describe_tokens(found: Sequence[int], recorded: Sequence[int]) -> str:
    """Return the first difference between the tokens of an equal request and the recorded ones: of another tokenizer or template."""
    place = _count_equal(found, recorded)
    shown = [str(tokens[place]) if place < len(tokens) else "missing" for tokens in (found, recorded)]
    return (
        f"the messages are the recorded ones, but token {place} of what is new is {shown[0]}, in the recording {shown[1]}: the "
        "tokenizer, the chat template or its settings are others"
    )


def _compare_messages(message: Message, other: Message) -> str:
    if message.role != other.role:
        return f".role is {message.role!r}, in the recording {other.role!r}"
    if (message.content or "") != (other.content or ""):
        return f".content{_compare(message.content or '', other.content or '')}"
    for name in ("name", "tool_call_id", "tool_calls"):
        if getattr(message, name) != getattr(other, name):
            return f".{name} is {getattr(message, name)!r:.200}, in the recording {getattr(other, name)!r:.200}"
    return f" is {_show(message)}, in the recording {_show(other)}"


def _compare(found: Sequence[object], recorded: Sequence[object]) -> str:
    place = _count_equal(found, recorded)
    around = slice(max(0, place - _AROUND), place + _AROUND)
    return f" differs at place {place}: {found[around]!r}, in the recording {recorded[around]!r}"


def _count_equal(found: Sequence[object], recorded: Sequence[object]) -> int:
    """Return the number of equal items at the beginning."""
    pairs = enumerate(zip(found, recorded, strict=False))
    return next((k for k, (one, other) in pairs if one != other), min(len(found), len(recorded)))


def _show(message: Message) -> str:
    return f"{message.role}: {message.content or list(message.tool_calls or ())!r:.200}"


def _show_end(asked: Asked) -> str:
    return _show(asked.messages[-1]) if asked.messages else f"{asked.prompt[-_AROUND:] if asked.prompt else ''!r}"

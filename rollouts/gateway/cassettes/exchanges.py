"""Exchanges of a cassette: a request of a session with its answers, as a value and as a line of JSON.

A line has the messages behind the answer that its request goes on from, and the tokens behind that answer's own, so a file grows with
what is new and not with the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from rollouts.gateway.requests import MessageKey, drop_prompt, make_key
from rollouts.types import Completion, Message, RoutedExperts, SamplingParams

FORMAT, VERSION = "rollouts.gateway.cassette", 1
"""Entries of the first line."""

Plain: TypeAlias = "str | tuple[int, ...]"
"""Prompt without messages: a text, or tokens."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, as far as its answers depend on it."""

    messages: tuple[Message, ...] = ()  # whole history in the client's form; () for a plain prompt
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: Plain | None = None  # plain prompt instead of messages
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])  # see describe_sampling

    def find_path(self) -> tuple[MessageKey, ...]:
        """Return the messages as keys, which are equal for messages that clients mean to be the same."""
        return tuple(map(make_key, self.messages))

    def find_key(self) -> tuple[Any, ...]:
        """Return a value that is equal for requests that get the same answers."""
        return (json.dumps(self.tools, sort_keys=True), self.find_path(), self.prompt, json.dumps(self.sampling, sort_keys=True))


@dataclass(frozen=True, kw_only=True)
class RecordedAnswer:
    """One answer, exactly as it was sampled, and as its client got it."""

    number: int  # place among the session's answers
    message: Message  # as the client got it
    text: str  # as sampled, without its ending
    completion: Completion  # without its prompt, which the exchanges before have
    routed_experts: RoutedExperts | None = None  # experts of the prompt's and the answer's tokens

    @classmethod
    def create(cls, number: int, message: Message, text: str, completion: Completion) -> RecordedAnswer:
        """Return the answer of a completion."""
        alone, experts = drop_prompt(completion), completion.routed_experts
        return cls(number=number, message=message, text=text, completion=alone, routed_experts=experts)

    def complete(self, prompt: tuple[int, ...], request_id: str) -> Completion:
        """Return the completion of this answer to its prompt."""
        return replace(self.completion, request_id=request_id, input_tokens=prompt, routed_experts=self.routed_experts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found = self.completion
        records = {"routed_experts": self.routed_experts, "kept_tokens": found.kept_tokens}
        return {
            "number": self.number,
            "message": self.message.to_dict(),
            "text": self.text,
            "tokens": found.output_tokens,
            "log_probs": found.output_log_probs,
            "versions": found.output_versions,
            "finish_reason": found.finish_reason,
            "temperature": found.temperature,
            "truncated_sampling": found.truncated_sampling,
            "log_prob_kind": found.log_prob_kind,
            **{name: record.to_dict() for name, record in records.items() if record is not None},
        }


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request with its answers, and the way in which its prompt came about."""

    asked: Asked
    extends: int | None  # number of the answer whose history it extends; None = none
    begins_context: bool  # whether its prompt does not begin with the tokens of that answer's context
    given: tuple[int, ...]  # tokens of the prompt, behind that context if it goes on from there
    answers: tuple[RecordedAnswer, ...]

    def to_line(self, session: str, take: int, num_known: int) -> str:
        """Return the line.

        Args:
            session: name of the session.
            take: number among the sessions of this name, from 0.
            num_known: messages, or characters or tokens of a plain prompt, that stand in the exchange that it extends.
        """
        asked, request = self.asked, dict[str, Any]()
        if asked.prompt is None:
            request["messages"] = [message.to_dict() for message in asked.messages[num_known:]]
        else:
            request["text" if isinstance(asked.prompt, str) else "tokens"] = asked.prompt[num_known:]
        if self.extends is None and asked.tools:
            request["tools"] = asked.tools
        request["sampling"] = {name: value for name, value in asked.sampling.items() if value != USUAL.get(name)}
        values = {
            "session": session,
            "take": take,
            "extends": self.extends,
            "begins_context": self.begins_context,
            "request": request,
            "given": self.given,
            "answers": [answer.to_dict() for answer in self.answers],
        }
        return f"{json.dumps(values)}\n"


def describe_sampling(params: SamplingParams, seed: int | None, n: int) -> Mapping[str, Any]:
    """Return the sampling of a request as plain JSON values: parameters by name, the seed that it asks for, and its number of answers."""
    return normalise_sampling(asdict(params)) | {"seed": seed, "n": n}


def normalise_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling in plain JSON values of the types of its fields: a temperature of 1 is 1.0, whoever wrote it."""
    plain = {name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value for name, value in values.items()}
    return plain | {name: float(value) for name, value in plain.items() if name in _REALS and type(value) is int}


_REALS = frozenset(name for name, value in asdict(SamplingParams()).items() if isinstance(value, float))


USUAL: Mapping[str, Any] = MappingProxyType(dict(describe_sampling(SamplingParams(), None, 1)))
"""Sampling where a line says nothing."""


def write_header() -> str:
    """Return the first line of a cassette."""
    return f"{json.dumps({'format': FORMAT, 'version': VERSION})}\n"


def write_forgotten(session: str, take: int, numbers: list[int]) -> str:
    """Return the line of answers that their clients did not get: they are no part of the session."""
    return f"{json.dumps({'session': session, 'take': take, 'forgotten': numbers})}\n"

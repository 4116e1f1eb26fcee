"""Requests and replies of a gateway, in one form for all dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from rollouts.checks import parse_json
from rollouts.environments.tools.calls import ToolCall
from rollouts.types import Completion, Message

Finish: TypeAlias = Literal["stop", "length", "calls"]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Sampling that a request asks for; None = not said."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1  # number of answers


@dataclass(frozen=True, kw_only=True)
class GatewayRequest:
    """One request, read from any dialect."""

    model: str = ""  # as asked for, to be repeated in the answer
    messages: tuple[Message, ...] = ()  # history in the client's form; () for a plain text
    tools: tuple[Mapping[str, Any], ...] = ()  # as OpenAI's functions
    prompt: str | tuple[int, ...] | None = None  # plain text or tokens instead of messages; None = messages
    given_as: str = "messages"  # name of the history, or of the plain text, in the client's form
    wishes: Wishes = Wishes()
    stream: bool = False
    include_usage: bool = False  # whether a stream ends with the numbers of tokens
    log_probs: bool = False  # whether the answer has the log-probs of its tokens
    token_ids: bool = False  # whether the answer has token ids, as vLLM's return_token_ids
    is_dry: bool = False  # whether only the tokens of the prompt are counted
    instructions: str | None = None  # text of a system message before all others; it is no part of a stored history
    previous: str | None = None  # id of the stored answer whose history comes before the messages
    answered_calls: Mapping[str, str] = field(default_factory=dict[str, str])  # ids of calls that are not in it -> fields that answer them
    is_stored: bool = False  # whether the session keeps the answer with its history, for requests that name it
    repeated: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of the request that its answer repeats


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer, for the writers of the dialects."""

    number: int  # place among the session's answers
    text: str  # without special tokens, stop string and tool calls
    calls: tuple[ToolCall, ...] = ()  # each with an id
    finish: Finish
    stop_string: str | None = None  # stop string that ended it
    completion: Completion  # as the engine returned it
    token_texts: tuple[str, ...] | None = None  # text of each token, where log-probs were asked for


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The replies to one request."""

    id: str  # unique in the gateway
    created: int  # seconds since 1970, when the request arrived
    completed: int  # seconds since 1970
    replies: tuple[Reply, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Places of the replies among the session's answers."""
        return tuple(reply.number for reply in self.replies)

    @property
    def num_input_tokens(self) -> int:
        """Number of prompt tokens."""
        return self.replies[0].completion.input_len

    @property
    def num_output_tokens(self) -> int:
        """Number of sampled tokens of all replies."""
        return sum(reply.completion.output_len for reply in self.replies)


MessageKey: TypeAlias = "tuple[Any, ...]"


def make_key(message: Message) -> MessageKey:
    """Return a value that is equal for messages that clients mean to be the same: null and "" are one, arguments count as JSON."""
    calls = tuple(_call_key(call) for call in message.tool_calls or ())
    return (message.role, message.content or "", message.name, message.tool_call_id, calls)


def _call_key(call: Mapping[str, Any]) -> MessageKey:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return (call.get("id"), function.get("name"), arguments)
    return (call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True))


def reply_message(reply: Reply) -> Message:
    """Return a reply as the message that a client keeps in its history."""
    calls = tuple(call.to_dict() for call in reply.calls) or None
    return Message(role="assistant", content=reply.text or None, tool_calls=calls)


def insert_history(request: GatewayRequest, history: tuple[Message, ...]) -> GatewayRequest:
    """Return a request with all its messages: its instructions, the history that it names, and its own."""
    system = () if request.instructions is None else (Message(role="system", content=request.instructions),)
    return replace(request, messages=(*system, *history, *request.messages))


def drop_prompt(completion: Completion) -> Completion:
    """Return what the engine sampled alone, for those who keep the prompt and the experts of its tokens elsewhere."""
    return replace(completion, request_id="", input_tokens=(), untempered_log_probs=None, routed_experts=None)

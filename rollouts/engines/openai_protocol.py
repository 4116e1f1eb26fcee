"""What OpenAI-like servers read and write on /v1/chat/completions and /v1/models, as pure functions. Text only, no token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rollouts.chat import Messages, parse_messages
from rollouts.errors import ConfigError, EngineError, EngineProtocolError
from rollouts.types import Message

CHAT = "/chat/completions"
MODELS = "/models"
OWNED_FIELDS = ("model", "messages", "stream", "stream_options", "n")
"""Fields of a request that are not the caller's: one answer is asked for and read, in the way that the method says."""


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    """What the server counted."""

    prompt_tokens: int
    completion_tokens: int  # reasoning included


@dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """One answer as text. Never trained on: it does not say which tokens were sampled, and text tokenized again may be other tokens.

    Servers even write parts of it anew, such as the arguments of tool calls.
    """

    text: str  # "" where the answer is tool calls only
    finish_reason: str  # as the server says: "stop", "length", "tool_calls", "content_filter", "abort" or another
    model: str  # that the server says it used
    reasoning: str | None = None  # where the server takes it out of the text
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # {"id", "type": "function", "function": {"name", "arguments": JSON as text}}
    usage: TokenUsage | None = None  # None = the server does not count

    @property
    def message(self) -> Message:
        """The answer as a message, to go on with the conversation; without its reasoning."""
        return Message(role="assistant", content=self.text or (None if self.tool_calls else ""), tool_calls=self.tool_calls or None)


@dataclass(frozen=True)
class ServedModel:
    """One entry of /v1/models."""

    name: str
    owner: str = ""  # "vllm" and "sglang" say so here


def resolve_routes(base_url: str) -> str:
    """Where /chat/completions lies below: the address as given if it has a path, else its /v1.

    Raises: ConfigError if it is no URL.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"the server's address {base_url!r} is no URL ({error}): expected http://host:port or http://host:port/v1"
        ) from error
    return base_url if url.path.strip("/") else base_url.rstrip("/") + "/v1"


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that is not the caller's."""
    owned = sorted(extra.keys() & set(OWNED_FIELDS))
    if owned:
        raise ConfigError(f"extra has the fields {owned}, which the engine sets itself: remove them")


def neutral_fields(owner: str) -> dict[str, Any]:
    """What keeps a server from cutting the distribution by the generation_config.json of its model, where it knows such fields."""
    return {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} if owner in ("vllm", "sglang") else {}


def chat_payload(
    model: str,
    messages: Messages,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    stream: bool = False,
) -> dict[str, Any]:
    """The body of a request for one answer; what is None is left to the server.

    Args:
        extra: further fields, which win over those named here.

    Raises: EngineError for what a server would refuse, or take for something else; DataError for messages that are none.
    """
    stop = [stop] if isinstance(stop, str) else list(stop)
    _check(max_tokens is None or max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
    _check(temperature is None or 0 <= temperature < math.inf, "temperature", temperature, "at least 0")
    _check(top_p is None or 0 < top_p <= 1, "top_p", top_p, "more than 0, at most 1")
    _check(seed is None or 0 <= seed < 2**63, "seed", seed, "0 to 2**63 - 1")
    _check(all(isinstance(text, str) and text for text in stop), "stop", stop, "strings that are not empty")  # pyright: ignore[reportUnnecessaryIsInstance]
    body: dict[str, Any] = {"model": model, "messages": [_to_wire(message) for message in parse_messages(messages)]}
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    body |= {name: value for name, value in options.items() if value is not None}
    if stop:
        body["stop"] = stop
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    check_extra(extra or {})
    body |= extra or {}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _check(is_fine: bool, name: str, value: Any, expected: str) -> None:
    if not is_fine:
        raise EngineError(f"{name} of a chat completion is {value!r}, expected {expected}")


def _to_wire(message: Message) -> dict[str, Any]:
    """As OpenAI's format wants it: arguments of tool calls as text, which chat templates and data sets may have as an object."""
    out = message.to_dict()
    for call in out.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            call["function"] = {**function, "arguments": json.dumps(function["arguments"])}
    return out


def parse_models(data: Any) -> tuple[ServedModel, ...]:
    """The answer of /v1/models. Raises EngineProtocolError for anything else."""
    try:
        return tuple(ServedModel(str(entry["id"]), str(entry.get("owned_by") or "")) for entry in data["data"])
    except (TypeError, KeyError, AttributeError) as error:
        raise _surprise("a list of models", data) from error


def parse_chat_response(data: Any) -> ChatCompletion:
    """The answer of /v1/chat/completions. Raises EngineProtocolError unless it holds one complete answer."""
    try:
        (choice,) = data["choices"]
        message = choice["message"]
        finish_reason = choice["finish_reason"]
        text, refusal = message.get("content"), message.get("refusal")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = tuple(_parse_tool_call(call) for call in message.get("tool_calls") or ())
        usage = data.get("usage") and TokenUsage(
            prompt_tokens=int(data["usage"]["prompt_tokens"]), completion_tokens=int(data["usage"]["completion_tokens"])
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _surprise("one answer", data) from error
    if not (isinstance(finish_reason, str) and finish_reason):
        raise _surprise("an answer with the reason why it ended", data)
    if not all(value is None or isinstance(value, str) for value in (text, refusal, reasoning)):
        raise _surprise("a text", data)
    return ChatCompletion(
        text=text or refusal or "",
        finish_reason=finish_reason,
        model=str(data.get("model") or ""),
        reasoning=reasoning,
        tool_calls=calls,
        usage=usage or None,
    )


def _parse_tool_call(call: Any) -> dict[str, Any]:
    """Without the fields that some servers add and others refuse to get back."""
    function = call["function"]
    identity, name, arguments = call["id"], function["name"], function["arguments"]
    if not all(isinstance(value, str) for value in (identity, name, arguments)):
        raise TypeError("id, name and arguments of a tool call are text")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _surprise(expected: str, data: Any) -> EngineProtocolError:
    return EngineProtocolError(f"the server answered {str(data)[:500]}, expected {expected}")


# -- streams


def parse_text_delta(chunk: Any) -> str:
    """The text that a chunk of a stream adds, often none. Raises EngineProtocolError for what is no chunk."""
    try:
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except (TypeError, KeyError, AttributeError) as error:
        raise _surprise("a part of an answer", chunk) from error


def join_chunks(chunks: Sequence[Any]) -> dict[str, Any]:
    """The answer that a stream tells in parts, as it would have come in one piece.

    Raises: EngineProtocolError for what are no chunks.
    """
    texts: dict[str, list[str]] = {"content": [], "refusal": [], "reasoning": []}
    calls: dict[int, dict[str, Any]] = {}
    model, finish_reason, usage = "", None, None
    for chunk in chunks:
        try:
            model, usage = chunk.get("model") or model, chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice.get("delta") or {}
                finish_reason = choice.get("finish_reason") or finish_reason
                for name, parts in texts.items():
                    parts.append(delta.get(name) or "")
                texts["reasoning"].append(delta.get("reasoning_content") or "" if not delta.get("reasoning") else "")
                for part in delta.get("tool_calls") or ():
                    _add_tool_call(calls.setdefault(part["index"], {}), part)
        except (TypeError, KeyError, AttributeError) as error:
            raise _surprise("a part of an answer", chunk) from error
    message: dict[str, Any] = {name: "".join(parts) or None for name, parts in texts.items()}
    message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"model": model, "usage": usage, "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]}


def _add_tool_call(call: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Id and name come once, arguments piece by piece."""
    function = part.get("function") or {}
    own = call.setdefault("function", {"name": "", "arguments": ""})
    call["id"] = part.get("id") or call.get("id")
    own["name"] = function.get("name") or own["name"]
    own["arguments"] += function.get("arguments") or ""

"""Requests and answers of OpenAI-like servers on /v1/chat/completions and /v1/models, as pure functions. Text only, no token ids."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rollouts.chat.tokenize import Messages, parse_messages
from rollouts.errors import ConfigError, EngineError, EngineProtocolError, redact
from rollouts.types import Message

CHAT = "/chat/completions"
MODELS = "/models"
OWNED_FIELDS = ("model", "messages", "stream", "stream_options", "n")
"""Fields of a request that the engine sets itself: one answer is requested and read, streamed or not depending on the method."""


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    """The server's counts of tokens."""

    prompt_tokens: int
    completion_tokens: int  # reasoning included


@dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """One answer as text. Never trained on: the sampled tokens are unknown, and text tokenized again may give other tokens.

    Servers even rewrite parts of it, such as the arguments of tool calls.
    """

    text: str  # "" if the answer consists of tool calls only
    finish_reason: str  # reason from the server: "stop", "length", "tool_calls", "content_filter", "abort" or another
    model: str  # model that the server reports
    reasoning: str | None = None  # reasoning, if the server separates it from the text
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # {"id", "type": "function", "function": {"name", "arguments": JSON as text}}
    usage: TokenUsage | None = None  # None = the server does not count

    @property
    def message(self) -> Message:
        """The answer as a message for the next request of the conversation, without its reasoning."""
        return Message(role="assistant", content=self.text or (None if self.tool_calls else ""), tool_calls=self.tool_calls or None)


@dataclass(frozen=True)
class ServedModel:
    """One entry of /v1/models."""

    name: str
    owner: str = ""  # reported by "vllm" and "sglang"


def resolve_routes(base_url: str) -> str:
    """Return the address above /chat/completions: as given if it has a path, else its /v1.

    Raises: ConfigError if it is not a URL.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"the server's address {redact(base_url)!r} is no URL ({redact(str(error))}): expected http://host:port or http://host:port/v1"
        ) from error
    return base_url if url.path.strip("/") else base_url.rstrip("/") + "/v1"


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that the engine sets itself."""
    owned = sorted(extra.keys() & set(OWNED_FIELDS))
    if owned:
        raise ConfigError(f"extra has the fields {owned}, which the engine sets itself: remove them")


def neutral_fields(owner: str) -> dict[str, Any]:
    """Return the fields that keep a model's generation_config.json from cutting the distribution, for servers that know them."""
    return {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} if owner in ("vllm", "sglang") else {}


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings of one answer; None = the server's."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


def chat_payload(
    model: str, messages: Messages, settings: ChatSettings, extra: Mapping[str, Any] | None = None, *, stream: bool = False
) -> dict[str, Any]:
    """Return the body of a request for one answer.

    Args:
        extra: further fields, which win over the settings.

    Raises: EngineError for settings that a server would refuse or misunderstand; DataError for invalid messages.
    """
    max_tokens, temperature, top_p, seed = settings.max_tokens, settings.temperature, settings.top_p, settings.seed
    stop = [settings.stop] if isinstance(settings.stop, str) else list(settings.stop)
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
    if settings.tools:
        body["tools"] = [dict(tool) for tool in settings.tools]
    check_extra(extra or {})
    body |= extra or {}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _check(is_fine: bool, name: str, value: Any, expected: str) -> None:
    if not is_fine:
        raise EngineError(f"{name} of a chat completion is {value!r}, expected {expected}")


def _to_wire(message: Message) -> dict[str, Any]:
    """Write a message in OpenAI's format: arguments of tool calls as text; chat templates and data sets may have an object."""
    out = message.to_dict()
    for call in out.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            call["function"] = {**function, "arguments": json.dumps(function["arguments"])}
    return out


def parse_models(data: Any) -> tuple[ServedModel, ...]:
    """Parse the answer of /v1/models. Raises EngineProtocolError for anything else."""
    try:
        return tuple(ServedModel(str(entry["id"]), str(entry.get("owned_by") or "")) for entry in data["data"])
    except (TypeError, KeyError, AttributeError) as error:
        raise _surprise("a list of models", data) from error


def parse_chat_response(data: Any) -> ChatCompletion:
    """Parse the answer of /v1/chat/completions. Raises EngineProtocolError unless it holds one complete answer."""
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
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
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
    """Keep the standard fields of a tool call; some servers add others, which some servers refuse in later requests."""
    function = call["function"]
    identity, name, arguments = call["id"], function["name"], function["arguments"]
    if not all(isinstance(value, str) for value in (identity, name, arguments)):
        raise TypeError("id, name and arguments of a tool call are text")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _surprise(expected: str, data: Any) -> EngineProtocolError:
    return EngineProtocolError(f"the server answered {str(data)[:500]}, expected {expected}")


# -- streams


def parse_text_delta(chunk: Any) -> str:
    """Return the text that a chunk of a stream adds, often "". Raises EngineProtocolError if it is no chunk."""
    try:
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except (TypeError, KeyError, AttributeError) as error:
        raise _surprise("a part of an answer", chunk) from error


def join_chunks(chunks: Sequence[Any]) -> dict[str, Any]:
    """Join the chunks of a stream into an answer in one piece.

    Raises: EngineProtocolError for invalid chunks.
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
                    parts.append(_read_text(delta.get(name)))
                texts["reasoning"].append("" if delta.get("reasoning") else _read_text(delta.get("reasoning_content")))
                for part in delta.get("tool_calls") or ():
                    _add_tool_call(calls.setdefault(operator.index(part["index"]), {}), part)
        except (TypeError, KeyError, AttributeError) as error:
            raise _surprise("a part of an answer", chunk) from error
    message: dict[str, Any] = {name: "".join(parts) or None for name, parts in texts.items()}
    message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"model": model, "usage": usage, "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]}


def _read_text(value: Any) -> str:
    """Return a text, "" for none. Raises TypeError for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"found {value!r:.80}, expected a text")
    return value or ""


def _add_tool_call(call: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part to a call: id and name come once, arguments piece by piece."""
    function = part.get("function") or {}
    own = call.setdefault("function", {"name": "", "arguments": ""})
    call["id"] = part.get("id") or call.get("id")
    own["name"] = function.get("name") or own["name"]
    own["arguments"] += function.get("arguments") or ""

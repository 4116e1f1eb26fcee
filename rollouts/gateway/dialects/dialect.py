"""A dialect: how requests are read from JSON, and answers written as JSON and as events. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollouts.gateway.refusals import Body, Refusal
from rollouts.gateway.requests import Answered, GatewayRequest, Reply

JSON: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Functions of one API."""

    name: str
    read: Callable[[Body], GatewayRequest]  # raises Refusal
    write: Callable[[GatewayRequest, Answered], JSON]
    write_events: Callable[[GatewayRequest, Answered], Iterator[str]]  # whole events, without the empty line
    write_refusal: Callable[[Refusal], JSON]
    write_late_refusal: Callable[[Refusal], str]  # event for a refusal in the middle of a stream


def dump(value: Any) -> str:
    """Return JSON without spaces; in ASCII if half of a surrogate pair is in it, as a call of the model may have, which has no bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def count_usage(answered: Answered) -> JSON:
    """Return the numbers of tokens in OpenAI's form."""
    given, sampled = answered.num_input_tokens, answered.num_output_tokens
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def write_openai_refusal(refusal: Refusal) -> JSON:
    """Return OpenAI's error object."""
    kinds: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def token_bytes(text: str) -> list[int]:
    """Return the bytes of a token's text."""
    return list(text.encode("utf-8", errors="replace"))


def list_log_probs(reply: Reply) -> list[tuple[str, float]]:
    """Return text and log-prob of each token."""
    assert reply.token_texts is not None, "texts of tokens were not asked for"
    return list(zip(reply.token_texts, reply.completion.output_log_probs, strict=True))

"""A dialect: how requests are read from JSON, and answers written as JSON and as events. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollouts.gateway.dialects.fields import Fields
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
    name_stored: Callable[[Answered], str] | None = None  # id under which a session keeps an answer; None = it keeps none


def read_head(body: Body, known: Mapping[str, str | None]) -> tuple[Fields, GatewayRequest]:
    """Return the fields of a request, and a request with its model, and whether it is to be streamed.

    Args:
        known: see Fields.check_known.

    Raises: Refusal for a field that is not known.
    """
    fields = Fields(body)
    fields.check_known(known)
    return fields, GatewayRequest(model=fields.read_text("model") or "", stream=fields.read_flag("stream"))


def make_tool(fields: Fields, schema: str) -> Mapping[str, Any]:
    """Return the tool that an object with name, description and a JSON schema describes, in OpenAI's form.

    Args:
        schema: name of the field of the schema.
    """
    name = fields.need_text("name", "the name of a function")
    parameters = fields.read_object(schema, "a JSON schema").values
    return {"type": "function", "function": {"name": name, "description": fields.read_text("description") or "", "parameters": parameters}}


def choose_tools(choice: Any, fields: Fields, tools: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that a choice leaves: "auto" and none (the default) all, "none" none. Raises Refusal for others."""
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    raise fields.refuse_unsupported("tool_choice", "engines sample freely, so that log-probs are the policy's; use auto or none")


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

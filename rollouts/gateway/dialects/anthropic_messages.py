"""Anthropic's messages (POST /v1/messages, /v1/messages/count_tokens). Source: Anthropic's API reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rollouts.gateway.dialects.dialect import JSON, Dialect, choose_tools, dump, make_tool, read_head
from rollouts.gateway.dialects.fields import MAX_TOKENS, Fields, refuse
from rollouts.gateway.refusals import Body, Refusal
from rollouts.gateway.requests import Answered, GatewayRequest, Reply, Wishes
from rollouts.types import Message

_KNOWN: Mapping[str, str | None] = MappingProxyType({
    "model": None, "messages": None, "max_tokens": None, "system": None, "tools": None, "tool_choice": None, "stop_sequences": None,
    "temperature": None, "top_p": None, "top_k": None, "stream": None, "metadata": None, "service_tier": None, "thinking": None,
    "cache_control": None, "mcp_servers": "the policy has no servers; give it tools", "container": "the policy runs no code",
    "output_config": "engines sample freely", "context_management": "edit the messages, which begins a context",
})  # fmt: skip
_BLOCKS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "text": ("type", "text", "cache_control", "citations"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
})  # fmt: skip


def read_messages(body: Body) -> GatewayRequest:
    """Read a request. Raises Refusal."""
    request = _read(body)
    if request.wishes.max_tokens is None:
        raise refuse("max_tokens", None, "the most tokens of the answer")
    return request


def read_count(body: Body) -> GatewayRequest:
    """Read a request for the number of tokens of a prompt. Raises Refusal."""
    return replace(_read(body), is_dry=True, stream=False)


def _read(body: Body) -> GatewayRequest:
    fields, request = read_head(body, _KNOWN)
    if fields.get("thinking") is not None and fields.read_object("thinking").get("type") != "disabled":
        raise fields.refuse_unsupported("thinking", "thoughts are part of the text that the policy writes")
    system = fields.read_parts("system", ("text",))
    messages = [Message(role="system", content=system)] if system else []
    for turn in fields.read_list("messages", "a list of messages", _read_turn):
        messages += turn
    if not messages or messages[-1].role in ("assistant", "system"):
        raise refuse("messages", "...", "a last message of the user: an assistant message is not continued here")
    given = None if fields.get("tools") is None else fields.read_objects("tools", "a list of tools", "a tool")
    choice = fields.read_object("tool_choice", "an object with a type")
    kind = choice.get("type", "") if fields.get("tool_choice") is not None else None
    wishes = Wishes(
        max_tokens=fields.read_int("max_tokens", least=1, most=MAX_TOKENS),
        temperature=fields.read_number("temperature", least=0, most=1),
        top_p=fields.read_number("top_p", least=0, most=1, above=True),
        top_k=fields.read_int("top_k", most=MAX_TOKENS),
        stop=fields.read_stop("stop_sequences"),
    )
    tools = choose_tools(kind, fields, tuple(map(_read_tool, given or ())))
    return replace(request, messages=tuple(messages), tools=tools, wishes=wishes)


def _read_turn(value: Any, place: str) -> tuple[Message, ...]:
    """Read a message: results of tools become messages of their own, before the text beside them."""
    fields = Fields.of(value, place, "a message: an object with role and content")
    fields.check_known({"role": None, "content": None})
    role, content = fields.get("role"), fields.get("content")
    if role not in ("user", "assistant"):
        raise fields.refuse("role", "user or assistant")
    if isinstance(content, str):
        return (Message(role=role, content=content),)
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    results: list[Message] = []
    for block in fields.read_objects("content", "a text, or a list of blocks", "a block: an object with a type"):
        kind = block.get("type")
        known = _BLOCKS.get(kind) if isinstance(kind, str) else None
        if known is None or (kind == "tool_use") != (role == "assistant" and kind != "text"):
            raise block.refuse_unsupported("type", f"this gateway reads {', '.join(_BLOCKS)}, calls from the assistant alone")
        block.check_known(dict.fromkeys(known))
        if kind == "text":
            if not isinstance(block.get("text"), str):
                raise block.refuse("text", "a text")
            texts.append(block.get("text"))
        elif kind == "tool_use":
            calls.append(_read_call(block))
        else:
            text = block.read_parts("content", ("text",))
            results.append(Message(role="tool", content=text, tool_call_id=block.need_text("tool_use_id")))
    if role == "assistant":
        return (Message(role=role, content="".join(texts), tool_calls=tuple(calls) or None),)
    return (*results, *([Message(role=role, content="".join(texts))] if texts or not results else []))


def _read_call(block: Fields) -> Mapping[str, Any]:
    arguments = Fields.of(block.get("input"), block.name("input"), "an object").values
    function = {"name": block.need_text("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.need_text("id"), "type": "function", "function": function}


def _read_tool(fields: Fields) -> Mapping[str, Any]:
    if fields.get("type") not in (None, "custom"):
        raise fields.refuse_unsupported("type", "the policy has no tools of a server; describe them with input_schema")
    return make_tool(fields, "input_schema")


def write_message(request: GatewayRequest, answered: Answered) -> JSON:
    """Return the whole answer."""
    reply = answered.replies[0]
    return _frame(request, answered) | {
        "content": _write_blocks(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": _usage(answered),
    }


def write_message_events(request: GatewayRequest, answered: Answered) -> Iterator[str]:
    """Return the events of a stream: the beginning, each block with its whole content, and the end."""
    reply = answered.replies[0]
    usage = {**_usage(answered), "output_tokens": 0}
    start = _frame(request, answered) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for index, block in enumerate(_write_blocks(reply)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": dump(block["input"])}
        yield _event("content_block_start", index=index, content_block=empty)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_string}
    yield _event("message_delta", delta=end, usage=_usage(answered))
    yield _event("message_stop")


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {dump({'type': kind, **values})}"


def _frame(request: GatewayRequest, answered: Answered) -> JSON:
    return {"id": f"msg_{answered.id}", "type": "message", "role": "assistant", "model": request.model}


def _write_blocks(reply: Reply) -> list[JSON]:
    blocks: list[JSON] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in reply.calls]


def _stop_reason(reply: Reply) -> str:
    if reply.stop_string is not None and not reply.calls:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}[reply.finish]


def _usage(answered: Answered) -> JSON:
    return {"input_tokens": answered.num_input_tokens, "output_tokens": answered.num_output_tokens}


def write_anthropic_refusal(refusal: Refusal) -> JSON:
    """Return Anthropic's error object."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
    }
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _write_late_refusal(refusal: Refusal) -> str:
    return f"event: error\ndata: {json.dumps(write_anthropic_refusal(refusal))}"


ANTHROPIC_MESSAGES = Dialect(
    name="messages",
    read=read_messages,
    write=write_message,
    write_events=write_message_events,
    write_refusal=write_anthropic_refusal,
    write_late_refusal=_write_late_refusal,
)
ANTHROPIC_COUNT = replace(ANTHROPIC_MESSAGES, name="count of tokens", read=read_count)

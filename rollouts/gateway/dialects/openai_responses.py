"""OpenAI's responses (POST /v1/responses). Source: OpenAI's API reference, and the types of its package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any, cast

from rollouts.gateway.dialects.dialect import (
    JSON,
    Dialect,
    choose_tools,
    dump,
    list_log_probs,
    make_tool,
    read_head,
    token_bytes,
    write_openai_refusal,
)
from rollouts.gateway.dialects.fields import MAX_TOKENS, Fields, refuse
from rollouts.gateway.refusals import Body, Refusal
from rollouts.gateway.requests import Answered, GatewayRequest, Reply, Wishes
from rollouts.types import Message

_LOG_PROBS = "message.output_text.logprobs"
_REPEATED: Mapping[str, Any] = MappingProxyType({
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "prompt_cache_key": None, "reasoning": None, "safety_identifier": None, "service_tier": None,
    "temperature": None, "tool_choice": "auto", "tools": [], "top_p": None, "truncation": "disabled", "user": None,
})  # fmt: skip
"""Fields of a request that its response repeats, with their defaults."""
_KNOWN: Mapping[str, str | None] = MappingProxyType({
    **dict.fromkeys(_REPEATED), "model": None, "input": None, "include": None, "stream": None, "stream_options": None, "text": None,
    "store": None, "prompt_cache_retention": None, "prompt_cache_options": None,
    "background": "a request is answered while its client waits",
    "conversation": "send the items, or name the response before with previous_response_id",
    "context_management": "edit the items, which begins a context",
    "moderation": "the policy has no moderator",
    "prompt": "there are no templates here: send the items",
    "top_logprobs": "engines return the log-prob of the sampled token alone",
})  # fmt: skip
_ITEMS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status", "caller", "namespace", "parsed_arguments"),
    "function_call_output": ("type", "call_id", "output", "id", "status", "caller"),
})  # fmt: skip
_REFUSED_ITEMS: Mapping[str, str] = MappingProxyType({
    "reasoning": "thoughts are part of the text that the policy writes, so its responses have no such items; leave them out",
    "item_reference": "a session keeps responses, not single items: send the item itself, or name the response with previous_response_id",
})  # fmt: skip
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_ROLES = ("user", "system", "developer", "assistant")


def read_response(body: Body) -> GatewayRequest:
    """Read a request. Raises Refusal."""
    fields, request = read_head(body, _KNOWN)
    form = fields.read_object("text")
    form.check_known({"format": None, "verbosity": None})
    form.read_text("verbosity")
    if form.read_object("format").get("type", "text") != "text":
        raise form.refuse_unsupported("format", "engines sample freely, so that log-probs are the policy's; ask for it in words")
    form.read_object("format").check_known({"type": None})
    if fields.get("truncation") not in (None, "disabled"):
        raise fields.refuse_unsupported("truncation", "a prompt that is too long is refused; edit the items")
    included = fields.read_list("include", "a list of texts", lambda value, _: value) if fields.get("include") is not None else ()
    if not set(map(str, included)) <= {_LOG_PROBS, "reasoning.encrypted_content"}:
        raise fields.refuse_unsupported("include", f"this gateway includes {_LOG_PROBS}")
    given = fields.read_objects("tools", "a list of tools", "a tool") if fields.get("tools") is not None else ()
    wishes = Wishes(
        max_tokens=fields.read_int("max_output_tokens", least=1, most=MAX_TOKENS),
        temperature=fields.read_number("temperature", least=0, most=2),
        top_p=fields.read_number("top_p", least=0, most=1, above=True),
    )
    messages, answered_calls = _read_input(fields)
    return replace(
        request,
        messages=messages,
        given_as="input",
        answered_calls=answered_calls,
        tools=choose_tools(fields.get("tool_choice"), fields, tuple(map(_read_tool, given))),
        wishes=wishes,
        log_probs=_LOG_PROBS in included,
        instructions=fields.read_text("instructions") or None,
        previous=fields.read_text("previous_response_id"),
        is_stored=fields.read_flag("store", default=True),
        repeated=_read_repeated(fields),
    )


def _read_repeated(fields: Fields) -> Mapping[str, Any]:
    """Return the fields that the response repeats. Raises Refusal for one of another type, of those that nothing else reads."""
    metadata, reasoning = fields.read_object("metadata"), fields.read_object("reasoning")
    for name, value in metadata.values.items():
        if not isinstance(value, str):
            raise metadata.refuse(name, "a text")
    reasoning.check_known(dict.fromkeys(_REASONING))
    for name in _REASONING:
        reasoning.read_text(name)
    for name in ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"):
        fields.read_text(name)
    for name in ("prompt_cache_options", "stream_options"):
        fields.read_object(name)
    fields.read_flag("parallel_tool_calls")
    fields.read_int("max_tool_calls")
    return {name: usual if fields.get(name) is None else fields.get(name) for name, usual in _REPEATED.items()}


def _read_input(fields: Fields) -> tuple[tuple[Message, ...], Mapping[str, str]]:
    """Return the messages of the input, and the calls whose outputs it has and which are not in it themselves (GatewayRequest).

    Calls that follow a message of the assistant, or one another, are of one message.
    """
    given = fields.get("input")
    if isinstance(given, str):
        return (Message(role="user", content=given),), {}
    messages: list[Message] = []
    items = fields.read_objects("input", "a text, or a list of items", "an item: an object with a type")
    answered: dict[str, str] = {}
    for item in items:
        kind = item.get("type", "message")
        known = _ITEMS.get(kind) if isinstance(kind, str) else None
        if known is None:
            advice = _REFUSED_ITEMS.get(kind) if isinstance(kind, str) else None
            raise item.refuse_unsupported("type", advice or f"this gateway reads {', '.join(_ITEMS)}")
        item.check_known(dict.fromkeys(known))
        if kind == "message":
            messages.append(_read_message(item))
        elif kind == "function_call_output":
            text = item.read_parts("output", ("input_text", "output_text"))
            call_id = item.need_text("call_id", "the id of the call")
            answered.setdefault(call_id, item.name("call_id"))
            messages.append(Message(role="tool", content=text, tool_call_id=call_id))
        else:
            last = messages.pop() if messages and messages[-1].role == "assistant" else Message(role="assistant", content="")
            messages.append(replace(last, tool_calls=(*(last.tool_calls or ()), _read_call(item))))
    if not messages:
        raise fields.refuse("input", "at least one item")
    if messages[-1].role == "assistant":
        last = items[-1]
        raise refuse(last.place, last.values, "a last item of another role: an item of the assistant is not continued here")
    made = {call["id"] for message in messages for call in message.tool_calls or ()}
    return tuple(messages), {call_id: where for call_id, where in answered.items() if call_id not in made}


def _read_message(item: Fields) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise item.refuse("role", f"one of {', '.join(_ROLES)}")
    kinds = ("input_text", "output_text", "text", *(("refusal",) if role == "assistant" else ()))
    content = item.read_parts("content", kinds)
    return Message(role="system" if role == "developer" else role, content=content)


def _read_call(item: Fields) -> Mapping[str, Any]:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise item.refuse("arguments", "a text of JSON")
    function = {"name": item.need_text("name", "the name of a function"), "arguments": arguments}
    return {"id": item.need_text("call_id", "the id of the call"), "type": "function", "function": function}


def _read_tool(fields: Fields) -> Mapping[str, Any]:
    if fields.get("type") != "function":
        raise fields.refuse_unsupported("type", "tools are functions; the policy has no tools of a server")
    fields.read_flag("strict")
    return make_tool(fields, "parameters")


def name_response(answered: Answered) -> str:
    """Return the id of a response."""
    return f"resp_{answered.id}"


def write_response(request: GatewayRequest, answered: Answered) -> JSON:
    """Return the whole response."""
    reply = answered.replies[0]
    given, sampled = answered.num_input_tokens, answered.num_output_tokens
    usage = {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + sampled,
    }
    is_cut = reply.finish == "length"
    return _frame(request, answered) | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else float(answered.completed),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _write_items(request, answered, reply),
        "usage": usage,
    }


def write_response_events(request: GatewayRequest, answered: Answered) -> Iterator[str]:
    """Return the events of a stream: the beginning, each item with its whole content, and the end."""
    numbers = count()

    def event(kind: str, **values: Any) -> str:
        return f"event: {kind}\ndata: {dump({'type': kind, 'sequence_number': next(numbers), **values})}"

    begun = _frame(request, answered)
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    whole = write_response(request, answered)
    for index, item in enumerate(cast("list[JSON]", whole["output"])):
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            text, log_probs = part["text"], [{name: entry[name] for name in ("token", "logprob")} for entry in part["logprobs"]]
            yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []})
            where |= {"content_index": 0}
            yield event("response.content_part.added", **where, part={**part, "text": "", "logprobs": []})
            yield event("response.output_text.delta", **where, delta=text, logprobs=log_probs)
            yield event("response.output_text.done", **where, text=text, logprobs=log_probs)
            yield event("response.content_part.done", **where, part=part)
        else:
            arguments = item["arguments"]
            yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress", "arguments": ""})
            yield event("response.function_call_arguments.delta", **where, delta=arguments)
            yield event("response.function_call_arguments.done", **where, name=item["name"], arguments=arguments)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def _frame(request: GatewayRequest, answered: Answered) -> JSON:
    """Return a response that has just begun."""
    return {
        "id": name_response(answered),
        "object": "response",
        "created_at": float(answered.created),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
        "usage": None,
        **request.repeated,
        "tools": [_repeat_tool(tool) for tool in request.repeated["tools"]],
    }


def _repeat_tool(tool: Mapping[str, Any]) -> JSON:
    """Return a tool with the fields that the API's own answers have."""
    return {"description": None, "parameters": None, "strict": False, **tool}


def _write_items(request: GatewayRequest, answered: Answered, reply: Reply) -> list[JSON]:
    items: list[JSON] = []
    status = "incomplete" if reply.finish == "length" else "completed"
    if reply.text or not reply.calls:
        log_probs: list[JSON] = []
        if request.log_probs:
            pairs = list_log_probs(reply)
            log_probs = [
                {"token": text, "logprob": log_prob, "bytes": token_bytes(text), "top_logprobs": cast("list[Any]", [])}
                for text, log_prob in pairs
            ]
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": log_probs}
        items.append({"id": f"msg_{answered.id}", "type": "message", "role": "assistant", "status": status, "content": [part]})
    for k, call in enumerate(reply.calls):
        function = call.to_dict()["function"]
        items.append({
            "id": f"fc_{answered.id}_{k}", "type": "function_call", "call_id": call.id, "name": function["name"],
            "arguments": function["arguments"], "status": status,
        })  # fmt: skip
    return items


def _write_late_refusal(refusal: Refusal) -> str:
    """Return the event of a refusal before the first event of a response: nothing else comes before one."""
    values = {"type": "error", "sequence_number": 0, "code": refusal.code, "message": refusal.message, "param": refusal.param}
    return f"event: error\ndata: {dump(values)}"


OPENAI_RESPONSES = Dialect(
    name="responses",
    read=read_response,
    write=write_response,
    write_events=write_response_events,
    write_refusal=write_openai_refusal,
    write_late_refusal=_write_late_refusal,
    name_stored=name_response,
)

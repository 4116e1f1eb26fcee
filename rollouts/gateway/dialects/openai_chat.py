"""OpenAI's chat completions (POST /v1/chat/completions). Sources: OpenAI's API reference; return_token_ids is vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from rollouts.gateway.dialects.dialect import (
    JSON,
    Dialect,
    choose_tools,
    count_usage,
    dump,
    list_log_probs,
    make_tool,
    read_head,
    token_bytes,
    write_openai_refusal,
)
from rollouts.gateway.dialects.fields import MAX_TOKENS, Fields, refuse
from rollouts.gateway.refusals import Body, Refusal
from rollouts.gateway.requests import Answered, Finish, GatewayRequest, Reply, Wishes
from rollouts.types import Message, change

MAX_ANSWERS = 128

_NO_PENALTIES = "the trained policy has no penalties; leave it out, or send 0"
SAMPLING: Mapping[str, str | None] = MappingProxyType({
    "temperature": None, "top_p": None, "top_k": None, "min_p": None, "n": None, "stop": None, "seed": None, "max_tokens": None,
    "stream": None, "stream_options": None, "model": None, "user": None, "metadata": None, "return_token_ids": None,
    "frequency_penalty": _NO_PENALTIES, "presence_penalty": _NO_PENALTIES, "logit_bias": "log-probs would not be the policy's",
})  # fmt: skip
_KNOWN: Mapping[str, str | None] = MappingProxyType({
    **SAMPLING, "messages": None, "tools": None, "tool_choice": None, "max_completion_tokens": None, "logprobs": None,
    "parallel_tool_calls": None, "store": None, "safety_identifier": None, "prompt_cache_key": None, "service_tier": None,
    "prompt_cache_retention": None, "reasoning_effort": None, "verbosity": None, "prediction": None,
    "response_format": None, "modalities": None,
    "top_logprobs": "engines return the log-prob of the sampled token alone",
    "functions": "use tools", "function_call": "use tools", "audio": "the policy writes text",
    "web_search_options": "the policy has no search",
})  # fmt: skip

_ROLES: Mapping[str, str] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
)
_MESSAGE_KNOWN: Mapping[str, str | None] = MappingProxyType({
    "role": None, "content": None, "name": None, "tool_calls": None, "tool_call_id": None, "annotations": None,
    "refusal": "a policy does not refuse", "audio": "the policy reads text", "function_call": "use tool_calls",
})  # fmt: skip


def read_chat(body: Body) -> GatewayRequest:
    """Read a request. Raises Refusal."""
    fields, request = read_head(body, _KNOWN)
    form = fields.read_object("response_format")
    if form.get("type", "text") != "text":
        raise fields.refuse_unsupported("response_format", "engines sample freely, so that log-probs are the policy's; ask for it in words")
    if fields.get("modalities") not in (None, ["text"]):
        raise fields.refuse_unsupported("modalities", "the policy writes text")
    messages = fields.read_list("messages", "a list of messages", _read_message)
    if not messages:
        raise fields.refuse("messages", "at least one message")
    if messages[-1].role == "assistant":
        raise refuse("messages", "...", "a last message of another role: an assistant message is not continued here")
    most = fields.read_int("max_completion_tokens", least=1, most=MAX_TOKENS)
    request = read_sampling(fields, request)
    if most is not None:
        request = change(request, wishes=change(request.wishes, max_tokens=most))
    given = None if fields.get("tools") is None else fields.read_objects("tools", "a list of tools", "a tool")
    tools = choose_tools(fields.get("tool_choice"), fields, tuple(map(_read_tool, given or ())))
    return change(request, messages=messages, tools=tools, log_probs=fields.read_flag("logprobs"))


def read_sampling(fields: Fields, request: GatewayRequest) -> GatewayRequest:
    """Return a request with what chat completions and completions have in common."""
    options = fields.read_object("stream_options")
    options.check_known({"include_usage": None, "include_obfuscation": None, "continuous_usage_stats": None})
    wishes = Wishes(
        max_tokens=fields.read_int("max_tokens", least=1, most=MAX_TOKENS),
        temperature=fields.read_number("temperature", least=0, most=2),
        top_p=fields.read_number("top_p", least=0, most=1, above=True),
        top_k=fields.read_int("top_k", least=-1, most=MAX_TOKENS),
        min_p=fields.read_number("min_p", least=0, most=1),
        stop=fields.read_stop("stop"),
        seed=fields.read_int("seed"),
        n=fields.read_int("n", 1, least=1, most=MAX_ANSWERS) or 1,
    )
    return change(request, wishes=wishes, include_usage=options.read_flag("include_usage"), token_ids=fields.read_flag("return_token_ids"))


def _read_message(value: Any, place: str) -> Message:
    fields = Fields.of(value, place, "a message: an object with role and content")
    fields.check_known(_MESSAGE_KNOWN)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.refuse("role", f"one of {', '.join(_ROLES)}")
    calls = (
        tuple(map(_read_call, fields.read_objects("tool_calls", "a list of tool calls", "a tool call")))
        if fields.get("tool_calls")
        else None
    )
    if calls and role != "assistant":
        raise refuse(fields.name("tool_calls"), "...", "none: only the assistant calls tools")
    content = fields.read_parts("content", ("text",))
    if role == "tool" and fields.get("tool_call_id") is None:
        raise fields.refuse("tool_call_id", "the id of the call that the message answers")
    return Message(
        role=_ROLES[role],
        content=content,
        name=fields.read_text("name"),
        tool_calls=calls,
        tool_call_id=fields.read_text("tool_call_id"),
    )


def _read_call(fields: Fields) -> Mapping[str, Any]:
    if fields.get("type", "function") != "function":
        raise fields.refuse_unsupported("type", "calls are of functions")
    function = Fields.of(fields.get("function"), fields.name("function"), "an object with name and arguments")
    name, arguments = function.need_text("name", "the name of a function"), function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise function.refuse("arguments", "a text of JSON")
    return {"id": fields.read_text("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tool(fields: Fields) -> Mapping[str, Any]:
    if fields.get("type") != "function":
        raise fields.refuse_unsupported("type", "tools are functions")
    return make_tool(Fields.of(fields.get("function"), fields.name("function"), "an object with a name"), "parameters")


_FINISH: Mapping[Finish, str] = MappingProxyType({"stop": "stop", "length": "length", "calls": "tool_calls"})


def write_chat(request: GatewayRequest, answered: Answered) -> JSON:
    """Return the whole answer."""
    choices: list[JSON] = []
    for index, reply in enumerate(answered.replies):
        message: JSON = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if not reply.calls:
            message["content"] = reply.text
        if reply.calls:
            message["tool_calls"] = [call.to_dict() for call in reply.calls]
        log_probs = _write_log_probs(reply) if request.log_probs else None
        choice: JSON = {"index": index, "message": message, "logprobs": log_probs, "finish_reason": _FINISH[reply.finish]}
        if request.token_ids:
            choice["token_ids"] = list(reply.completion.output_tokens)
        choices.append(choice)
    out = _frame(request, answered, "chat.completion") | {"choices": choices, "usage": count_usage(answered)}
    return out | _prompt_ids(request, answered)


def write_chat_events(request: GatewayRequest, answered: Answered) -> Iterator[str]:
    """Return the events of a stream: of each choice its role, its text, its calls and its end."""
    frame = _frame(request, answered, "chat.completion.chunk") | ({"usage": None} if request.include_usage else {})

    def event(index: int, delta: JSON, finish: str | None = None, **more: Any) -> str:
        return f"data: {dump(frame | {'choices': [{'index': index, 'delta': delta, 'finish_reason': finish, **more}]})}"

    for index, reply in enumerate(answered.replies):
        yield event(index, {"role": "assistant", "content": ""}, **_prompt_ids(request, answered))
        more: JSON = {"logprobs": _write_log_probs(reply)} if request.log_probs else {}
        more |= {"token_ids": list(reply.completion.output_tokens)} if request.token_ids else {}
        if reply.text or more:
            yield event(index, {"content": reply.text}, **more)
        for k, call in enumerate(reply.calls):
            yield event(index, {"tool_calls": [{"index": k, **call.to_dict()}]})
        yield event(index, {}, _FINISH[reply.finish])
    if request.include_usage:
        yield f"data: {dump(frame | {'choices': [], 'usage': count_usage(answered)})}"
    yield "data: [DONE]"


def _frame(request: GatewayRequest, answered: Answered, kind: str) -> JSON:
    return {"id": f"chatcmpl-{answered.id}", "object": kind, "created": answered.created, "model": request.model}


def _prompt_ids(request: GatewayRequest, answered: Answered) -> JSON:
    return {"prompt_token_ids": list(answered.replies[0].completion.input_tokens)} if request.token_ids else {}


def _write_log_probs(reply: Reply) -> JSON:
    content: list[JSON] = [
        {"token": text, "logprob": log_prob, "bytes": token_bytes(text), "top_logprobs": cast("list[Any]", [])}
        for text, log_prob in list_log_probs(reply)
    ]
    return {"content": content, "refusal": None}


def write_late_refusal(refusal: Refusal) -> str:
    """Return the event of a refusal in the middle of a stream."""
    return f"data: {json.dumps(write_openai_refusal(refusal))}"


OPENAI_CHAT = Dialect(
    name="chat completions",
    read=read_chat,
    write=write_chat,
    write_events=write_chat_events,
    write_refusal=write_openai_refusal,
    write_late_refusal=write_late_refusal,
)

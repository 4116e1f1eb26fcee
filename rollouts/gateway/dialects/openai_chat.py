"""OpenAI's chat completions (POST /v1/chat/completions). Sources: OpenAI's API reference; return_token_ids is vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from rollouts.gateway.dialects.dialect import JSON, Dialect, count_usage, dump, list_log_probs, token_bytes, write_openai_refusal
from rollouts.gateway.refusals import (
    Body,
    Refusal,
    check_known,
    read_flag,
    read_int,
    read_list,
    read_number,
    read_object,
    read_parts,
    read_stop,
    read_text,
    refuse,
    refuse_unsupported,
)
from rollouts.gateway.requests import Answered, Finish, GatewayRequest, Reply, Wishes
from rollouts.types import Message

MAX_ANSWERS = 128
MAX_TOKENS = 2**31 - 1

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
    check_known(body, _KNOWN)
    _check_format(body)
    messages = read_list(body.get("messages"), "messages", "a list of messages", read_message)
    if not messages:
        raise refuse("messages", [], "at least one message")
    if messages[-1].role == "assistant":
        raise refuse("messages", "...", "a last message of another role: an assistant message is not continued here")
    tools = read_tools(body.get("tools"))
    most = read_int(body, "max_completion_tokens", least=1, most=MAX_TOKENS)
    request = read_sampling(body)
    if most is not None:
        request = replace(request, wishes=replace(request.wishes, max_tokens=most))
    return replace(request, messages=messages, tools=choose_tools(body.get("tool_choice"), tools), log_probs=read_flag(body, "logprobs"))


def read_sampling(body: Body) -> GatewayRequest:
    """Return a request with what chat completions and completions have in common."""
    given = body.get("stream_options")
    options: Body = {} if given is None else read_object(given, "stream_options", "an object")
    check_known(options, {"include_usage": None, "include_obfuscation": None, "continuous_usage_stats": None}, "stream_options.")
    wishes = Wishes(
        max_tokens=read_int(body, "max_tokens", least=1, most=MAX_TOKENS),
        temperature=read_number(body, "temperature", least=0, most=2),
        top_p=read_number(body, "top_p", least=0, most=1, above=True),
        top_k=read_int(body, "top_k", least=-1, most=MAX_TOKENS),
        min_p=read_number(body, "min_p", least=0, most=1),
        stop=read_stop(body, "stop"),
        seed=read_int(body, "seed"),
        n=read_int(body, "n", 1, least=1, most=MAX_ANSWERS) or 1,
    )
    return GatewayRequest(
        model=read_text(body, "model", "") or "",
        wishes=wishes,
        stream=read_flag(body, "stream"),
        include_usage=read_flag(options, "include_usage", where="stream_options."),
        token_ids=read_flag(body, "return_token_ids"),
    )


def _check_format(body: Body) -> None:
    form = body.get("response_format")
    if form is not None and read_object(form, "response_format", "an object").get("type") != "text":
        raise refuse_unsupported("response_format", form, "engines sample freely, so that log-probs are the policy's; ask for it in words")
    if body.get("modalities") not in (None, ["text"]):
        raise refuse_unsupported("modalities", body.get("modalities"), "the policy writes text")


def read_message(value: Any, where: str) -> Message:
    """Read one message of a history."""
    data = read_object(value, where, "a message: an object with role and content")
    check_known(data, _MESSAGE_KNOWN, f"{where}.")
    role = data.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    calls = data.get("tool_calls")
    tool_calls = None if not calls else read_list(calls, f"{where}.tool_calls", "a list of tool calls", _read_call)
    if tool_calls and role != "assistant":
        raise refuse(f"{where}.tool_calls", "...", "none: only the assistant calls tools")
    content = read_parts(data.get("content"), f"{where}.content", ("text",))
    if role == "tool" and data.get("tool_call_id") is None:
        raise refuse(f"{where}.tool_call_id", None, "the id of the call that the message answers")
    return Message(
        role=_ROLES[role],
        content=content,
        name=read_text(data, "name", where=f"{where}."),
        tool_calls=tool_calls,
        tool_call_id=read_text(data, "tool_call_id", where=f"{where}."),
    )


def _read_call(value: Any, where: str) -> Mapping[str, Any]:
    data = read_object(value, where, "a tool call")
    if data.get("type", "function") != "function":
        raise refuse_unsupported(f"{where}.type", data.get("type"), "calls are of functions")
    function = read_object(data.get("function"), f"{where}.function", "an object with name and arguments")
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise refuse(f"{where}.function.name", name, "the name of a function")
    if not isinstance(arguments, str):
        raise refuse(f"{where}.function.arguments", arguments, "a text of JSON")
    given = read_text(data, "id", where=f"{where}.")
    return {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Read the tools of a request; () for none."""
    return () if value is None else read_list(value, "tools", "a list of tools", _read_tool)


def _read_tool(value: Any, where: str) -> Mapping[str, Any]:
    data = read_object(value, where, "a tool")
    if data.get("type") != "function":
        raise refuse_unsupported(f"{where}.type", data.get("type"), "tools are functions")
    function = read_object(data.get("function"), f"{where}.function", "an object with a name")
    return make_tool(function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function")


def make_tool(name: Any, description: Any, parameters: Any, where: str) -> Mapping[str, Any]:
    """Return a tool in OpenAI's form, its parts checked."""
    if not isinstance(name, str) or not name:
        raise refuse(f"{where}.name", name, "the name of a function")
    if description is not None and not isinstance(description, str):
        raise refuse(f"{where}.description", description, "a text")
    schema: Any = {} if parameters is None else read_object(parameters, f"{where}.parameters", "a JSON schema")
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def choose_tools(choice: Any, tools: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that a tool_choice leaves: "auto" (the default) all, "none" none."""
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return ()
    raise refuse_unsupported("tool_choice", choice, 'engines sample freely, so that log-probs are the policy\'s; use "auto" or "none"')


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

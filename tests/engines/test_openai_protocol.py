"""Requests and answers of OpenAI-like servers, against what real ones were recorded to say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from engine_recordings import read_events

from rollouts.engines.text.protocol import (
    ChatCompletion,
    ChatSettings,
    ServedModel,
    TokenUsage,
    chat_payload,
    check_extra,
    join_chunks,
    neutral_fields,
    parse_chat_response,
    parse_models,
    parse_text_delta,
    resolve_routes,
)
from rollouts.errors import ConfigError, DataError, EngineError, EngineProtocolError
from rollouts.types import Message

DATA = Path(__file__).parents[1] / "data" / "engines"
RECORDINGS = {kind: json.loads((DATA / f"chat_{kind}.json").read_text()) for kind in ("vllm", "sglang")}
USER = [{"role": "user", "content": "1+2="}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

both = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def read(kind: str, name: str) -> ChatCompletion:
    """Parse a recorded answer, streamed or not."""
    recording = RECORDINGS[kind][name]
    assert recording["status"] == 200, recording
    answer = recording["response"]
    if isinstance(answer, str):
        answer = join_chunks([event for event in read_events(answer) if event != "[DONE]"])
    return parse_chat_response(answer)


@both
def test_a_recorded_answer_is_read(kind: str) -> None:
    answer = read(kind, "chat_sampled_neutral")
    assert answer.finish_reason == "length"
    assert answer.usage == TokenUsage(prompt_tokens=22, completion_tokens=8)
    assert answer.model == "/models/m"
    assert answer.text
    assert (answer.reasoning, answer.tool_calls) == (None, ())
    assert answer.message == Message(role="assistant", content=answer.text)


@both
def test_an_answer_that_ends_by_itself_at_once_is_an_empty_text(kind: str) -> None:
    answer = read(kind, "chat_eos")
    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.usage == TokenUsage(prompt_tokens=22, completion_tokens=1)
    assert answer.message == Message(role="assistant", content="")


@both
def test_a_stop_string_is_not_part_of_the_text(kind: str) -> None:
    answer = read(kind, "chat_neutral_stop")
    assert answer.finish_reason == "stop"
    assert not set(answer.text) & {"a", "7"}


@both
def test_reasoning_is_kept_apart_under_either_name(kind: str) -> None:
    answer = read(kind, "chat_reasoning")
    assert answer.text == ""
    assert answer.reasoning
    assert answer.message.content == ""
    if kind == "vllm":
        done = read(kind, "chat_reasoning_done")
        assert (done.text, done.reasoning) == (" f", "p")


@both
@pytest.mark.parametrize("name", ["chat_tool_named", "chat_tool_required"])
def test_tool_calls_become_a_message_that_can_be_sent_back(kind: str, name: str) -> None:
    answer = read(kind, name)
    assert answer.text == ""
    for call in answer.tool_calls:
        assert set(call) == {"id", "type", "function"}
        assert (call["type"], call["function"]["name"]) == ("function", "move")
        assert json.loads(call["function"]["arguments"]) in ({"to": "left"}, {"to": "right"})
    assert len(answer.tool_calls) >= 1
    assert Message.from_dict(answer.message.to_dict()) == answer.message
    sent = chat_payload(
        "m", [*USER, answer.message.to_dict(), {"role": "tool", "content": "3", "tool_call_id": answer.tool_calls[0]["id"]}], ChatSettings()
    )
    assert sent["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [dict(call) for call in answer.tool_calls]}


@pytest.mark.parametrize(
    ("kind", "whole", "streamed"),
    [  # requests whose answers are the same each time: SGLang was recorded without seeds
        ("vllm", "chat_sampled_neutral", "chat_stream"),
        ("vllm", "chat_reasoning", "chat_reasoning_stream"),
        ("vllm", "chat_tool_named", "chat_tool_named_stream"),
        ("vllm", "chat_tool_required", "chat_tool_required_stream"),
        ("sglang", "chat_reasoning", "chat_reasoning_stream"),
    ],
)
def test_a_stream_tells_what_one_answer_tells(kind: str, whole: str, streamed: str) -> None:
    one, other = read(kind, whole), read(kind, streamed)
    assert (one.text, one.reasoning, one.usage, one.model) == (other.text, other.reasoning, other.usage, other.model)
    assert one.finish_reason == other.finish_reason
    # vLLM formats arguments again if it does not stream them
    arguments = [[json.loads(call["function"]["arguments"]) for call in answer.tool_calls] for answer in (one, other)]
    assert arguments[0] == arguments[1]


@both
@pytest.mark.parametrize("name", ["chat_tool_named_stream", "chat_tool_required_stream"])
def test_tool_calls_of_a_stream_are_put_together(kind: str, name: str) -> None:
    answer = read(kind, name)
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call["id"]
        assert call["function"]["name"] == "move"
        assert json.loads(call["function"]["arguments"]) in ({"to": "left"}, {"to": "right"})


@both
def test_the_pieces_of_a_stream_are_its_text(kind: str) -> None:
    chunks = [event for event in read_events(RECORDINGS[kind]["chat_stream"]["response"]) if event != "[DONE]"]
    pieces = [parse_text_delta(chunk) for chunk in chunks]
    assert sum(map(bool, pieces)) > 1
    assert "".join(pieces) == read(kind, "chat_stream").text
    assert read(kind, "chat_stream").usage == TokenUsage(prompt_tokens=22, completion_tokens=8)


def test_an_aborted_answer_has_what_there_was() -> None:
    answer = read("sglang", "chat_aborted")
    assert (answer.finish_reason, bool(answer.text)) == ("abort", True)


@both
def test_models_are_read(kind: str) -> None:
    assert parse_models(RECORDINGS[kind]["models"]["response"]) == (ServedModel("/models/m", kind),)
    assert neutral_fields(kind)["top_k"] == -1
    assert neutral_fields("openai") == {}


@both
def test_without_the_neutral_fields_the_distribution_is_cut_by_the_checkpoint(kind: str) -> None:
    """Recorded with {"top_k": 1} in generation_config.json: temperature 1 and top_p 1 alone gave the greedy answer."""
    assert len(set(read(kind, "chat_sampled").text)) == 1
    assert len(set(read(kind, "chat_sampled_neutral").text)) > 1


def test_sglang_answers_whatever_model_it_is_asked_for() -> None:
    """For this reason the engine checks the list of models first."""
    assert read("sglang", "err_unknown_model").model == "nope"
    assert RECORDINGS["vllm"]["err_unknown_model"]["status"] == 404


def test_a_payload_says_what_was_asked_and_nothing_else() -> None:
    assert chat_payload("m", USER, ChatSettings()) == {"model": "m", "messages": USER}
    body = chat_payload(
        "m",
        [Message(role="system", content="Judge."), *USER],
        ChatSettings(
            max_tokens=8, temperature=0.0, top_p=0.9, stop="\n", seed=3, tools=[{"type": "function", "function": {"name": "add"}}]
        ),
        {"top_k": -1, "tool_choice": "required"},
        stream=True,
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Judge."}, *USER],
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.9,
        "stop": ["\n"],
        "seed": 3,
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "top_k": -1,
        "tool_choice": "required",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat_payload("m", USER, ChatSettings(temperature=0.5), {"temperature": 0.7})["temperature"] == 0.7


def test_arguments_of_tool_calls_are_sent_as_text_and_the_message_is_left_as_it_was() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = Message(role="assistant", tool_calls=(call,))
    (sent,) = chat_payload("m", [message], ChatSettings())["messages"]
    assert sent["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert message.tool_calls == ({"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens of a chat completion is 0"),
        ({"temperature": -1.0}, "temperature of a chat completion is -1.0"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_settings_that_a_server_would_refuse_are_not_sent(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        chat_payload("m", USER, ChatSettings(**settings))


@pytest.mark.parametrize("messages", [[], "1+2=", [{"content": "1"}], [{"role": "user", "content": [{"type": "text", "text": "1"}]}]])
def test_messages_that_are_none_or_not_text_are_refused(messages: Any) -> None:
    with pytest.raises(DataError):
        chat_payload("m", messages, ChatSettings())


@pytest.mark.parametrize("field", ["model", "messages", "stream", "n"])
def test_fields_of_the_engine_are_not_the_callers(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_extra({field: 1})
    with pytest.raises(ConfigError, match=field):
        chat_payload("m", USER, ChatSettings(), {field: 1})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://host/api/v1beta/openai/", "https://host/api/v1beta/openai/"),
    ],
)
def test_the_routes_lie_below_v1_unless_the_address_says_where(given: str, expected: str) -> None:
    assert resolve_routes(given) == expected


def answer(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "3", **changes.pop("message", {})}
    return {"model": "m", "choices": [{"index": 0, "finish_reason": "stop", "message": message, **changes.pop("choice", {})}], **changes}


def test_the_least_that_an_answer_has_is_enough() -> None:
    assert parse_chat_response(answer()) == ChatCompletion(text="3", finish_reason="stop", model="m")
    assert parse_chat_response(answer(message={"content": None, "tool_calls": [{**CALL, "index": 0}]})).message == Message(
        role="assistant", tool_calls=(CALL,)
    )
    assert parse_chat_response(answer(message={"content": None, "refusal": "No."})).text == "No."
    assert parse_chat_response(answer(message={"reasoning_content": "so"})).reasoning == "so"


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {"error": {"message": "overloaded", "code": 503}},
        {"choices": []},
        {"choices": [answer()["choices"][0]] * 2},
        {"choices": [{"index": 0, "finish_reason": "stop", "text": "3"}]},
        answer(choice={"finish_reason": None}),
        answer(message={"content": [{"type": "text", "text": "3"}]}),
        answer(message={"content": 3}),
        answer(message={"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}]}),
        answer(message={"tool_calls": [{"id": None, "function": {"name": "add", "arguments": "{}"}}]}),
        answer(message={"tool_calls": ["add"]}),
        answer(usage={"prompt_tokens": None, "completion_tokens": 1}),
    ],
)
def test_answers_that_are_none_are_refused_with_what_came(data: Any) -> None:
    with pytest.raises(EngineProtocolError, match="the server answered"):
        parse_chat_response(data)


@pytest.mark.parametrize("data", [None, {}, {"data": None}, {"data": ["m"]}, {"data": [{"name": "m"}]}])
def test_lists_of_models_that_are_none_are_refused(data: Any) -> None:
    with pytest.raises(EngineProtocolError, match="list of models"):
        parse_models(data)


@pytest.mark.parametrize("chunk", [None, "text", {}, {"choices": [None]}, {"choices": [{"delta": {"tool_calls": [{"id": "c"}]}}]}])
def test_chunks_that_are_none_are_refused(chunk: Any) -> None:
    with pytest.raises(EngineProtocolError, match="part of an answer"):
        join_chunks([chunk])


def test_usage_may_come_with_any_chunk() -> None:
    """Some servers count as they go and send null at the end."""
    counts = {"prompt_tokens": 2, "completion_tokens": 1}
    chunks = [
        {"model": "m", "usage": counts, "choices": [{"index": 0, "delta": {"content": "3"}, "finish_reason": "stop"}]},
        {"model": "m", "usage": None, "choices": []},
    ]
    assert parse_chat_response(join_chunks(chunks)) == ChatCompletion(
        text="3", finish_reason="stop", model="m", usage=TokenUsage(prompt_tokens=2, completion_tokens=1)
    )


def test_a_stream_without_an_end_is_no_answer() -> None:
    chunk = {"model": "m", "choices": [{"index": 0, "delta": {"content": "3"}, "finish_reason": None}]}
    with pytest.raises(EngineProtocolError, match="reason why it ended"):
        parse_chat_response(join_chunks([chunk]))
    with pytest.raises(EngineProtocolError):
        parse_chat_response(join_chunks([]))

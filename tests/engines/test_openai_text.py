"""The text engine against both fake servers, and against what real ones were recorded to stream, on loopback sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio
from test_openai_protocol import RECORDINGS, USER

from benchmarks.reliability.loopback import Exchange, serve, settle
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.http.endpoint import Deadlines, RetryPolicy
from rollouts.engines.text import openai
from rollouts.engines.text.openai import OpenAITextEngine
from rollouts.errors import ConfigError, DataError, EngineError, EngineProtocolError, EngineStatusError, EngineTimeout
from rollouts.testing import FakeSGLangServer, FakeVLLMServer, Fault, SGLangSettings, VLLMSettings
from rollouts.types import Message

CHAT = "/v1/chat/completions"
KINDS = {"sglang": FakeSGLangServer, "vllm": FakeVLLMServer}
SETTINGS = {"sglang": SGLangSettings, "vllm": VLLMSettings}
NAMES = {"sglang": "fake-model", "vllm": "m"}
both = pytest.mark.parametrize("kind", ["sglang", "vllm"])


def script(prompt: tuple[int, ...], index: int, num_loads: int, seed: int | None) -> tuple[int, float]:
    """The digits from the last one of the prompt on, then the end."""
    first = prompt[-1] % 5
    return (3 + first + index, -0.5) if index < 6 else (1, -0.1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer(99)


@asynccontextmanager
async def open_engine(kind: str, tokenizer: Any, fake: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Any]:
    """An engine, and its fake server as engine.fake."""
    server: Any = KINDS[kind](script, tokenizer=tokenizer, **(fake or {}))
    async with server, OpenAITextEngine(server.url, options.pop("model", NAMES[kind]), **options) as engine:
        yield engine, server


def body_of(server: Any) -> dict[str, Any]:
    """The last chat request that a fake server received."""
    return [request.json() for request in server.received if request.path == CHAT][-1]


@both
async def test_messages_go_in_and_text_comes_out(kind: str, tokenizer: Any) -> None:
    async with open_engine(kind, tokenizer) as (engine, server):
        answer = await engine.complete(USER, max_tokens=20, temperature=0.0)
        short = await engine.complete([Message(role="user", content="1+2=")], max_tokens=2, seed=4, top_p=0.5, stop=["x"])
        assert await engine.models() == (NAMES[kind],)
    prompt = tokenizer.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    first = prompt[-1] % 5
    assert answer.text == "".join(str(first + i) for i in range(6))
    assert (answer.finish_reason, answer.model) == ("stop", NAMES[kind])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 7)
    assert (short.text, short.finish_reason) == (answer.text[:2], "length")
    sent = body_of(server)
    assert {name: sent[name] for name in ("model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop")} == {
        "model": NAMES[kind], "messages": USER, "max_tokens": 2, "temperature": 1.0, "top_p": 0.5, "seed": 4, "stop": ["x"],
    }  # fmt: skip


@both
async def test_a_stop_string_ends_the_text(kind: str, tokenizer: Any) -> None:
    async with open_engine(kind, tokenizer) as (engine, _):
        whole = (await engine.complete(USER)).text
        assert (await engine.complete(USER, stop=whole[3])).text == whole[:3]


@both
async def test_many_answers_at_once_each_get_their_own(kind: str, tokenizer: Any) -> None:
    found: dict[int, str] = {}

    async def ask(engine: Any, i: int) -> None:
        found[i] = (await engine.complete(USER, max_tokens=1 + i % 6)).text

    async with open_engine(kind, tokenizer, {"seconds_per_token": 0.001}, max_connections=8) as (engine, server):
        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(ask, engine, i)
        assert server.num_connections <= 8
    assert [len(found[i]) for i in range(40)] == [1 + i % 6 for i in range(40)]


@both
async def test_a_model_that_is_not_served_is_refused_on_entering(kind: str, tokenizer: Any) -> None:
    with pytest.raises(EngineError, match=f"serves '{NAMES[kind]}', expected 'judge'"):
        async with open_engine(kind, tokenizer, model="judge"):
            pass


async def test_a_list_of_models_is_not_needed_where_it_is_not_asked_for(tokenizer: Any) -> None:
    async def respond(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            return await exchange.answer(b'{"detail":"Not Found"}', 404)
        reply = {"model": "x", "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "3"}}]}
        return await exchange.answer(json.dumps(reply).encode())

    async with serve(respond) as server:
        with pytest.raises(EngineError, match="check_model=False"):
            async with OpenAITextEngine(server.url, "x"):
                pass
        async with OpenAITextEngine(server.url, "x", check_model=False) as engine:
            assert (await engine.complete(USER)).text == "3"
        assert "top_k" not in json.loads(server.exchanges[-1].body), "a server that did not say what it is may refuse unknown fields"


async def test_a_checkpoint_does_not_cut_the_distribution_unless_it_may(tokenizer: Any) -> None:
    """Both servers take parameters that a chat request does not name from generation_config.json."""
    settings = VLLMSettings(generation_config={"top_k": 1, "repetition_penalty": 1.3})
    async with open_engine("vllm", tokenizer, {"settings": settings}) as (engine, server):
        await engine.complete(USER)
        assert {name: body_of(server)[name] for name in ("top_k", "min_p", "repetition_penalty")} == {
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        await engine.complete(USER, temperature=None, top_p=None, extra={"top_k": 5})
        assert (body_of(server)["top_k"], "temperature" in body_of(server), "top_p" in body_of(server)) == (5, False, False)
    async with open_engine("vllm", tokenizer, extra={}) as (engine, server):
        await engine.complete(USER)
        assert not {"top_k", "min_p", "repetition_penalty"} & set(body_of(server))


@both
async def test_a_key_is_sent_and_its_absence_reported_in_the_servers_words(kind: str, tokenizer: Any) -> None:
    settings = SETTINGS[kind](api_key="secret")
    async with open_engine(kind, tokenizer, {"settings": settings}, api_key="secret") as (engine, _):
        assert (await engine.complete(USER)).text
    with pytest.raises(EngineStatusError, match="Unauthorized") as caught:
        async with open_engine(kind, tokenizer, {"settings": settings}):
            pass
    assert caught.value.status == 401


@both
async def test_what_the_server_refuses_is_told_in_its_words(kind: str, tokenizer: Any) -> None:
    async with open_engine(kind, tokenizer) as (engine, server):
        with pytest.raises(EngineStatusError, match="512") as caught:
            await engine.complete([{"role": "user", "content": "1" * 600}], max_tokens=4)
        assert caught.value.status == 400
        assert (await engine.complete(USER)).text
        num_sent = server.count(CHAT)
        with pytest.raises(DataError):
            await engine.complete([])
        with pytest.raises(EngineError, match="temperature"):
            await engine.complete(USER, temperature=-1.0)
        with pytest.raises(ConfigError, match="stream"):
            await engine.complete(USER, extra={"stream": True})
        assert server.count(CHAT) == num_sent


FAULTS = [
    (Fault("status", path=CHAT, status=503, body='{"error":{"message":"queue full"}}'), None, 2),
    (Fault("status", path=CHAT, status=429, body="slow down"), None, 2),
    (Fault("status", path=CHAT, status=500, body='{"object":"error","message":"out of memory"}'), "out of memory", 1),
    (Fault("status", path=CHAT, status=502, body="<html><title>502 Bad Gateway</title></html>"), "502 Bad Gateway", 1),
    (Fault("drop", path=CHAT), "cannot|closed|reset|died", 1),
    (Fault("cut", path=CHAT), "closed|complete|died|body", 1),
    (Fault("garbage", path=CHAT), "HTTP", 1),
    (Fault("status", path=CHAT, status=200, body="Hello"), "expected JSON", 1),
    (Fault("status", path=CHAT, status=200, body='{"error":{"message":"overloaded"}}'), "overloaded", 1),
]


@both
@pytest.mark.parametrize(("fault", "message", "num_requests"), FAULTS, ids=[f"{f[0].kind}-{f[0].status}-{f[0].body[:9]}" for f in FAULTS])
async def test_only_what_was_not_begun_is_asked_again(
    kind: str, fault: Fault, message: str | None, num_requests: int, tokenizer: Any
) -> None:
    async with open_engine(kind, tokenizer, retry=RetryPolicy(first_wait_s=0.01)) as (engine, server):
        server.add_fault(fault)
        if message is None:
            assert (await engine.complete(USER)).text
        else:
            with pytest.raises(EngineError, match=message):
                await engine.complete(USER)
        assert server.count(CHAT) == num_requests
        assert (await engine.complete(USER)).text


async def test_a_server_that_hangs_is_an_error_that_says_where_its_deadline_is_set(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_DEADLINES", replace(openai._DEADLINES, generate_s=0.2))
    async with open_engine("vllm", tokenizer, {"faults": [Fault("hang", path=CHAT)]}) as (engine, _):
        with trio.fail_after(30), pytest.raises(EngineTimeout, match=r"OpenAITextEngine\(deadlines=Deadlines\(generate_s=\.\.\.\)\)"):
            await engine.complete(USER)


@both
async def test_a_server_that_hangs_is_given_up(kind: str, tokenizer: Any) -> None:
    async with open_engine(kind, tokenizer, {"faults": [Fault("hang", path=CHAT)]}) as (engine, server):
        async with OpenAITextEngine(server.url, NAMES[kind], deadlines=Deadlines(generate_s=0.2)) as impatient:
            with trio.fail_after(30), pytest.raises(EngineTimeout, match=r"0\.2 s"):
                await impatient.complete(USER)
        assert (await engine.complete(USER)).text


@both
async def test_a_cancelled_request_is_dropped_by_the_server(kind: str, tokenizer: Any) -> None:
    async with open_engine(kind, tokenizer) as (engine, server):
        server.scheduler.hold_tokens(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.complete, USER)
            await settle(lambda: any(len(sequence.draws) == 3 for sequence in server.scheduler.running))
            nursery.cancel_scope.cancel()
        await settle(lambda: not server.scheduler.running)


async def test_an_engine_that_could_not_be_entered_leaves_nothing_open() -> None:
    async def respond(exchange: Exchange) -> None:
        await exchange.answer(b'{"data":[{"id":"other"}]}')

    async with serve(respond) as server:
        engine = OpenAITextEngine(server.url, "m")
        with pytest.raises(EngineError, match="'other'"):
            async with engine:
                pass
        await settle(lambda: server.num_open == 0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:1/v1?x=1"])
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        OpenAITextEngine(url, "m")


async def test_an_engine_used_after_its_block_says_so(tokenizer: Any) -> None:
    async with open_engine("vllm", tokenizer) as (engine, _):
        pass
    with pytest.raises(EngineError, match="its client is closed"):
        await engine.complete(USER)


def test_settings_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="messages"):
        OpenAITextEngine("http://host", "m", extra={"messages": []})
    with pytest.raises(ConfigError, match="API key"):
        OpenAITextEngine("http://host", "m", api_key=" ")


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with open_engine("vllm", tokenizer) as (engine, _):
        assert (await engine.complete(USER)).text


async def test_any_transport_of_httpx_carries_it() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        assert (request.url, request.headers["authorization"]) == ("https://host/api/chat/completions", "Bearer k")
        return httpx.Response(200, json={"model": "m", "choices": [{"finish_reason": "stop", "message": {"content": "3"}}]})

    engine = OpenAITextEngine("https://host/api", "m", api_key="k", check_model=False, transport=httpx.MockTransport(respond))
    async with engine:
        assert (await engine.complete(USER)).text == "3"


# streams, as real servers sent them

TEXTS = {"vllm": "p<|pad|>* <])8", "sglang": "5,qjo"}  # of chat_stream


def stream_of(kind: str, name: str) -> bytes:
    return RECORDINGS[kind][name]["response"].encode()


@asynccontextmanager
async def open_replay(*parts: bytes, content_type: str = "text/event-stream", status: int = 200) -> AsyncIterator[Any]:
    """An engine, and a server that answers with these bytes and hangs after the last unless the answer is complete."""

    async def respond(exchange: Exchange) -> None:
        if exchange.target != CHAT:
            return await exchange.answer(b'{"data":[{"id":"m"}]}')
        if content_type != "text/event-stream":
            return await exchange.answer(b"".join(parts), status, (f"Content-Type: {content_type}",))
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            await exchange.send(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await trio.sleep(0)
        if b"[DONE]" in b"".join(parts):
            return await exchange.send(b"0\r\n\r\n")
        if parts[-1].endswith(b"\n\n"):
            return await exchange.wait_hung_up()
        return exchange.close()

    async with serve(respond) as server, OpenAITextEngine(server.url, "m", deadlines=Deadlines(generate_s=60)) as engine:
        yield engine, server


@both
@pytest.mark.parametrize("size", [7, 1000, 100_000])
async def test_a_stream_comes_piece_by_piece_and_ends_with_the_whole_answer(kind: str, size: int) -> None:
    data = stream_of(kind, "chat_stream")
    async with open_replay(*(data[i : i + size] for i in range(0, len(data), size))) as (engine, server):
        async with engine.stream_text(USER, max_tokens=8, seed=3) as stream:
            with pytest.raises(AssertionError, match="has not ended"):
                _ = stream.completion
            pieces = [piece async for piece in stream]
        assert len(pieces) > 1
        assert "".join(pieces) == stream.completion.text == TEXTS[kind]
        assert stream.completion.finish_reason == "length"
        assert stream.completion.usage.completion_tokens == 8
        sent = json.loads(server.exchanges[-1].body)
        assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})


@both
async def test_streamed_tool_calls_and_reasoning_are_in_the_completion(kind: str) -> None:
    async with open_replay(stream_of(kind, "chat_tool_required_stream")) as (engine, _):
        async with engine.stream_text(USER, extra={"tool_choice": "required"}) as stream:
            assert [piece async for piece in stream] == []
        assert {call["function"]["name"] for call in stream.completion.tool_calls} == {"move"}
    async with open_replay(stream_of(kind, "chat_reasoning_stream")) as (engine, _):
        async with engine.stream_text(USER) as stream:
            assert [piece async for piece in stream] == []
        assert stream.completion.reasoning


@both
async def test_leaving_a_stream_early_closes_its_connection(kind: str) -> None:
    first = stream_of(kind, "chat_stream").split(b"\n\n")[:4]
    async with open_replay(b"\n\n".join(first) + b"\n\n") as (engine, server):
        async with engine.stream_text(USER) as stream:
            async for piece in stream:
                assert piece
                break
        await settle(lambda: server.num_open == 0)


@both
async def test_a_stream_that_breaks_off_is_no_answer(kind: str) -> None:
    data = stream_of(kind, "chat_stream")
    async with open_replay(data[: len(data) // 2].rstrip(b"\n")) as (engine, _):
        with pytest.raises(EngineError):
            async with engine.stream_text(USER) as stream:
                _ = [piece async for piece in stream]
    done_too_soon = b"\n\n".join(data.split(b"\n\n")[:3]) + b"\n\ndata: [DONE]\n\n"
    async with open_replay(done_too_soon) as (engine, _):
        with pytest.raises(EngineProtocolError, match="reason why it ended"):
            async with engine.stream_text(USER) as stream:
                _ = [piece async for piece in stream]


@both
async def test_an_error_instead_of_a_stream_is_told_in_the_servers_words(kind: str) -> None:
    recording = RECORDINGS[kind]["err_stream_too_long"]
    is_stream = recording["content_type"].startswith("text/event-stream")
    body = recording["response"].encode() if is_stream else json.dumps(recording["response"]).encode()
    content_type = recording["content_type"].split(";")[0]
    async with open_replay(body, content_type=content_type, status=recording["status"]) as (engine, _):
        with pytest.raises(EngineStatusError, match="512") as caught:
            async with engine.stream_text(USER) as stream:
                _ = [piece async for piece in stream]
        assert caught.value.status == 400

"""Bodies that are wrong in every way get a 4xx with a typed error in the form of the dialect, and the gateway goes on."""

from __future__ import annotations

import json

import httpx
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.gateway import open_gateway
from rollouts.gateway.refusals import Refusal, parse_body
from rollouts.gateway.server import DIALECTS
from rollouts.testing import FakeEngine

TOKENIZER = create_char_tokenizer()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD = {
    "/v1/chat/completions": {
        "model": "m", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "y"},
        ],
        "max_tokens": 2, "temperature": 1.0, "n": 1, "stop": ["#"], "seed": 1, "stream": False, "logprobs": True, "top_p": 1.0,
        "stream_options": {"include_usage": True}, "tool_choice": "auto", "response_format": {"type": "text"},
        "max_completion_tokens": 2, "logit_bias": {}, "presence_penalty": 0,
    },
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 2, "logprobs": 0, "echo": False, "best_of": 1, "suffix": None},
    "/v1/responses": {
        "model": "m", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y", "annotations": []}], "id": "msg"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "z"}]},
        ],
        "instructions": "i", "max_output_tokens": 3, "temperature": 1.0, "top_p": 0.5, "stream": False, "store": True,
        "metadata": {"a": "b"},
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": "auto", "parallel_tool_calls": True, "include": ["message.output_text.logprobs"], "truncation": "disabled",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "previous_response_id": None,
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "temperature": 1.0, "top_p": 0.5, "top_k": 3,
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "y"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"e": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "z"}, {"type": "text", "text": "w"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "stop_sequences": ["#"], "stream": False, "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"},
    },
}  # fmt: skip
GOOD["/v1/messages/count_tokens"] = GOOD["/v1/messages"]


def list_places(value, path=()):
    """The paths of all values in a JSON value, its own left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from list_places(inner, (*path, key))


def put(value, path, new):
    """A copy of a JSON value with another value at one place."""
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = put(value[path[0]], path[1:], new)
    return copied


@pytest.mark.parametrize("path", sorted(DIALECTS))
def test_a_good_body_is_read(path):
    DIALECTS[path].read(GOOD[path])


@pytest.mark.parametrize("path", sorted(DIALECTS))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_readers_raise_nothing_but_refusals_with_a_field(path, data):
    place = data.draw(st.sampled_from(sorted(list_places(GOOD[path]), key=str)))
    body = put(GOOD[path], place, data.draw(VALUES))
    try:
        DIALECTS[path].read(body)
    except Refusal as refusal:
        assert refusal.status == 400
        assert refusal.param and str(place[0]) in refusal.param
        json.dumps(DIALECTS[path].write_refusal(refusal))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_only_json_objects_are_bodies(data):
    try:
        assert isinstance(parse_body(data), dict)
    except Refusal as refusal:
        assert (refusal.status, refusal.code) == (400, "invalid_json")


BODIES = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"messages": NaN}',
    b'{"messages": []}', b'{"messages": [{"role": "user"}], "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": [-1]}',
    json.dumps({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}).encode("utf-16"), b'{"temperature": ' + b"9" * 400 + b"}",
    b'{"prompt": [99999999]}', b'{"messages": [{"role": "user", "content": ""}], "temperature": -1}', b'{"messages": [1], "stream": true}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}', b'{"unknown_field": 1}',
]  # fmt: skip


@pytest.mark.parametrize("path", sorted(DIALECTS))
async def test_wrong_bodies_are_refused_over_a_socket(path):
    async with open_gateway(FakeEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = gateway.url(api="anthropic")
        for body in BODIES:
            answer = await client.post(url + path, content=body)
            if body == b'{"prompt": [99999999]}' and path == "/v1/completions":
                continue  # the engine knows its vocabulary, and a fake one has none
            assert answer.status_code == 400, (body[:60], answer.text)
            assert answer.json()["error"]["message"]


async def test_wrong_http_is_refused_and_the_gateway_goes_on():
    async with open_gateway(FakeEngine(), TOKENIZER, max_body_bytes=1000) as gateway, httpx.AsyncClient() as client:
        url = gateway.url("a")
        assert (await client.post(f"{url}/chat/completions", content=b"x" * 2000)).status_code == 413
        assert (await client.get(f"{url}/chat/completions")).status_code == 405
        assert (await client.post(f"{url}/embeddings", content=b"{}")).status_code == 404
        assert (await client.post(gateway.url(api="anthropic") + "/sessions/a%20b/v1/completions", json={"prompt": "x"})).status_code == 404
        assert (await client.get(f"{url}/models")).json()["data"][0]["id"] == "policy"
        for garbage in (b"this is not HTTP\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: z\r\n\r\n"):
            stream = await trio.open_tcp_stream("127.0.0.1", gateway.port)
            async with stream:
                await stream.send_all(garbage)
                assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 4")
        stream = await trio.open_tcp_stream("127.0.0.1", gateway.port)
        await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        await stream.aclose()  # in the middle of a body
        assert (await client.post(f"{url}/completions", json={"prompt": "x"})).status_code == 200

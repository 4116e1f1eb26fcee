"""The server's own words, from every shape in which SGLang and vLLM were seen to send an error."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_recordings import find_recordings, load_recordings
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import KeptConnectionLost, ServerHungUp
from rollouts.engines.http.errors import create_status_error, describe_server_error, describe_transport_error, parse_answer
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout

EXCERPTS = sorted((Path(__file__).parents[1] / "data" / "engines" / "errors").glob("*.json"))
URL = httpx.URL("http://127.0.0.1:8000/generate")


@pytest.mark.parametrize("path", [p for p in EXCERPTS if "stream" not in p.stem], ids=lambda p: p.stem)
def test_recorded_errors_give_the_servers_message(path: Path):
    recorded = json.loads(path.read_text())
    assert describe_server_error(recorded["status"], recorded["body"]) == recorded["message"]


def test_there_are_excerpts_of_both_servers_and_all_shapes():
    assert {p.stem.split("_")[0] for p in EXCERPTS} == {"vllm", "sglang"}
    assert len(EXCERPTS) >= 15


def iterate_recorded_errors() -> Iterator[tuple[str, int, str]]:
    """Name, status and body of every answer above 299."""
    for name, record in (*load_recordings("vllm").items(), *load_recordings("sglang").items()):
        if isinstance(record, str):  # told in words
            continue
        inner = record.get("response")
        answer = inner if isinstance(inner, dict) and "status" in inner else record.get("rejected_response", record)
        body = answer.get("body", answer.get("response"))
        if isinstance(body, dict) and "_raw_text" in body:
            body = body["_raw_text"]
        if isinstance(answer.get("status"), int) and answer["status"] >= 300:
            yield name, answer["status"], body if isinstance(body, str) else json.dumps(body)


@pytest.mark.more
def test_every_recorded_error_gives_a_short_message_without_the_shell_around_it():
    found = list(iterate_recorded_errors())
    assert len(found) > (80 if find_recordings("vllm") else 0), "recordings are missing"
    for name, status, body in found:
        message = describe_server_error(status, body)
        assert 0 < len(message) <= 1000, name
        assert "\n" not in message and '{"' not in message and "'loc'" not in message and ".py" not in message, f"{name}: {message}"
        if body:
            plain = body.replace('\\"', '"')
            assert message.split(": ", 1)[-1].split(";")[0] in plain, f"{name}: {message!r} is not in {body!r}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "no message (Bad Gateway)"),
        ("  \n", "no message (Bad Gateway)"),
        ("null", "null"),
        ("{}", "{}"),
        ('{"error": {"code": 3}}', '{"error": {"code": 3}}'),
        ('{"error": null, "message": "out of memory"}', "out of memory"),
        ('{"detail": [{"loc": ["body", "n"], "msg": "too big"}, {"loc": ["query"], "msg": "unknown"}]}', "body.n: too big; query: unknown"),
        ('"just a string"', "just a string"),
        ("upstream connect error", "upstream connect error"),
        ("line one\n   line two", "line one line two"),
        ("<html><head><title>502 Bad\n Gateway</title></head></html>", "an HTML page titled 502 Bad Gateway, as a proxy or another server"),
        ("<!DOCTYPE HTML><body>hello", "an HTML page, as a proxy or another server would send"),
        ("[" * 100_000, "[" * 1000),
        ("[" * 700 + "]" * 700, "[" * 700),
        ("x" * 5000, "x" * 1000),
    ],
)
def test_other_bodies_are_described_as_well_as_they_can_be(body: str, message: str):
    assert describe_server_error(502, body).startswith(message)
    assert len(describe_server_error(502, body)) <= 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["error", "message", "detail", "msg", "loc", "x"]), inner),
    max_leaves=8,
)


@given(st.one_of(JSON.map(json.dumps), st.text(max_size=200)), st.integers(300, 700))
def test_no_body_breaks_the_description(body: str, status: int):
    message = describe_server_error(status, body)
    assert message
    assert "\n" not in message


def test_a_status_error_carries_the_message_and_the_whole_body_and_pickles():
    body = '{"error": {"message": "queue full", "code": 503}}'
    error = create_status_error(503, URL, body)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "http://127.0.0.1:8000/generate answered with HTTP status 503: queue full"
    assert (copy.status, copy.url, copy.body, copy.reason) == (503, str(URL), body, "queue full")


def test_a_redirect_names_the_address_to_use():
    assert str(create_status_error(307, URL, "", "https://other/generate")).endswith(
        "307: no message (Temporary Redirect); it redirects to https://other/generate: use that address"
    )


REQUEST = httpx.Request("POST", URL)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (httpx.ConnectError("refused"), EngineError, "cannot be reached: refused. Check that the server runs"),
        (httpx.ConnectTimeout("no connection within 10 s"), EngineTimeout, "no connection within 10 s"),
        (httpx.ReadError(""), EngineError, "ReadError. The server may have died"),
        (ServerHungUp("hung up"), EngineError, "hung up. The server may have died"),
        (KeptConnectionLost("hung up", request=REQUEST, is_unread=False), EngineError, "hung up. The server may have died"),
        (httpx.CloseError("closed on this side"), EngineError, "closed on this side, while the call was in flight"),
        (httpx.RemoteProtocolError("illegal status line"), EngineProtocolError, "does not speak HTTP as it should: illegal status line"),
        (httpx.DecodingError("not a gzip file"), EngineProtocolError, "does not speak HTTP as it should: not a gzip file"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_calls_without_an_answer_are_errors_of_this_library_with_the_address(error: httpx.RequestError, kind: type, message: str):
    described = describe_transport_error(error, URL)
    assert type(described) is kind
    assert str(described).startswith(str(URL))
    assert message in str(described)


@pytest.mark.parametrize("content", [b"", b"<html>", b'{"a": 1', b"\xff\xfe\x00", b"[" * 100_000])
def test_an_answer_that_is_no_json_is_shown(content: bytes):
    with pytest.raises(EngineProtocolError, match="expected JSON") as caught:
        parse_answer(content, URL)
    assert str(URL) in str(caught.value)
    assert len(str(caught.value)) < 1000

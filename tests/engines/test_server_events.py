from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollouts.engines.http.events import EventDecoder, parse_event
from rollouts.errors import EngineProtocolError, EngineStatusError

URL = httpx.URL("http://127.0.0.1:8000/generate")


def decode(data: bytes, cuts: list[int]) -> list[str]:
    """Events of a stream that arrives in pieces."""
    decoder = EventDecoder()
    edges = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    return [event for start, end in pairwise(edges) for event in decoder.feed(data[start:end])]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: one\n\ndata: two\n\n", ["one", "two"]),
        (b"data:one\n\n", ["one"]),
        (b"data:  one\n\n", [" one"]),  # one space belongs to the format
        (b"data: one\ndata: more\n\n", ["one\nmore"]),
        (b"data: one\r\ndata: more\r\n\r\n", ["one\nmore"]),
        (b"data\ndata: x\n\n", ["\nx"]),
        (b"data:\n\n", [""]),
        (b": ping\n\n: ping\n\ndata: one\n\n", ["one"]),
        (b"event: message\nid: 7\nretry: 10\ndata: one\nunknown\n\n", ["one"]),
        (b"database: no\n\n", []),
        (b"\n\n\ndata: one\n\n\n\n", ["one"]),
        (b"\xef\xbb\xbfdata: one\n\n", ["one"]),
        (b"data: one\r\n\r\ndata: two\r\rdata: three\n\r\n", ["one", "two", "three"]),
        (b"data: one\r\n\ndata: two\n\n", ["one", "two"]),
        (b"data: cut off\n", []),
        (b"data: \xc3\xa9\xf0\x9f\x98\x80 \xff\n\n", ["é😀 \ufffd"]),
        (b"data: a\xe2\x80\xa8b\x0bc\x85\n\n", ["a\u2028b\x0bc\ufffd"]),  # other ends of lines, of str.splitlines, are none here
    ],
    ids=range(17),
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_streams_of_events(data: bytes, events: list[str], size: int):
    assert decode(data, list(range(0, len(data), size))) == events


LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=10), min_size=1, max_size=3)


@given(st.lists(LINES, max_size=4), st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200)), st.booleans())
@example([["one"], ["two"]], "\r\n", [10, 11, 12, 13], False)
def test_events_are_the_same_however_they_are_cut(events: list[list[str]], newline: str, cuts: list[int], comments: bool):
    lines: list[str] = []
    for event in events:
        lines += [f"data: {line}" for line in event] + ([": ping"] if comments else []) + [""]
    data = "".join(line + newline for line in lines).encode()
    assert decode(data, cuts) == ["\n".join(event) for event in events]


def test_an_error_among_the_events_is_one_though_the_status_was_200():
    recorded = json.loads((Path(__file__).parents[1] / "data" / "engines" / "errors" / "sglang_stream_too_long.json").read_text())
    error, done = decode(recorded["body"].encode(), [])
    assert (recorded["status"], done) == (200, "[DONE]")
    with pytest.raises(EngineStatusError) as caught:
        parse_event(error, URL)
    assert (caught.value.status, caught.value.reason) == (400, recorded["message"])


@pytest.mark.parametrize(
    ("data", "status"), [('{"error": "out of memory"}', 500), ('{"error": {"message": "bad", "code": "BadRequest"}}', 500)]
)
def test_an_error_without_a_code_counts_as_the_servers_fault(data: str, status: int):
    with pytest.raises(EngineStatusError) as caught:
        parse_event(data, URL)
    assert caught.value.status == status


def test_events_are_json():
    assert parse_event('{"error": null, "token_ids": [1]}', URL) == {"error": None, "token_ids": [1]}
    assert parse_event("[1]", URL) == [1]
    with pytest.raises(EngineProtocolError, match="half of"):
        parse_event('{"half of', URL)

"""Usual messages against h11: what is read without it is what it reads, and everything else is left to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import h11
import httpx
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from rollouts.engines.http import connection
from rollouts.engines.http.connection import READ_SIZE, Connection
from rollouts.engines.http.messages import encode_usual_request, parse_usual_answer

# answers

USUAL = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: 5\r\nContent-Type: application/json\r\n\r\nhello"
STATUS_LINES = st.sampled_from(
    [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 503 Service Unavailable",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 ",
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 204 No Content",
        b"HTTP/1.1 304 Not Modified",
        b"HTTP/1.1 100 Continue",
        b"HTTP/1.1 101 Switching",
        b"HTTP/1.1 999 \xe9",
        b"HTTP/1.1 099 no",
        b"HTTP/1.1  200 OK",
        b"http/1.1 200 OK",
        b"HTTP/2.0 200 OK",
        b"HTTP/1.1 200\tOK",
        b" HTTP/1.1 200 OK",
        b"",
    ]
)
FIELDS = st.sampled_from(
    [
        b"content-length: 5",
        b"Content-Length:5",
        b"Content-Length: 5 ",
        b"Content-Length: 7",
        b"Content-Length: 0",
        b"Content-Length: 5, 5",
        b"Content-Length: +5",
        b"Content-Length: 5_0",
        b"Content-Length: \xb2",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: 999999999999999999999",
        b"Content-Length : 5",
        b"Content-Length:",
        b"Transfer-Encoding: chunked",
        b"transfer-encoding: Chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding:",
        b"Transfer_Encoding: chunked",
        b"Connection: close",
        b"connection: keep-alive",
        b"Connection: Close",
        b"Connection: keep-alive, close",
        b"Connection:",
        b"Connection: x",
        b"Upgrade: websocket",
        b" folded",
        b"\tContent-Length: 3",
        b"X: a\x00b",
        b"X: \x01",
        b"X: \x7f",
        b"X:\xff\tb  ",
        b"X: a\rContent-Length: 3",
        b"X: a\nContent-Length: 3",
        b"no colon",
        b": no name",
        b"X",
        b"",
        b"date: Mon",
    ]
)
BODIES = st.sampled_from(
    [
        b"hello",
        b"",
        b"hell",
        b"hello and more",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;x=y\r\nhello\r\n0\r\nT: 1\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n0\r\n\r\n",
        b"fffffffffffffffffffff\r\n",
        b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
    ]
)


@st.composite
def draw_answers(draw: st.DrawFn) -> bytes:
    """Answers of all kinds, with a few bytes changed."""
    line_end = draw(st.sampled_from([b"\r\n"] * 6 + [b"\n", b"\r", b"\n\r"]))
    data = line_end.join([draw(STATUS_LINES), *draw(st.lists(FIELDS, max_size=4)), b"", draw(BODIES)])
    data = draw(st.sampled_from([data] * 4 + [USUAL, b"HTTP/1.1 103 Early\r\n\r\n" + data]))
    for _ in range(draw(st.integers(0, 2))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 3))
        data = data[:at] + draw(st.binary(max_size=3) | st.sampled_from([b"\r\n", b"\r\n\r\n", b" ", b"0"])) + data[at + length :]
    return data


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut data at these places."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[first:last] for first, last in pairwise(edges)]


class ScriptedStream(trio.abc.Stream):
    """A server that sends these pieces and then closes or resets."""

    def __init__(self, pieces: Sequence[bytes], ending: str) -> None:
        self.sent = b""
        self._pieces, self._ending = list(pieces), ending

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._ending == "reset":
            raise trio.BrokenResourceError from ConnectionResetError()
        return b""

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class NoSocket:
    def fileno(self) -> int:
        return 0

    def setsockopt(self, *option: int) -> None:
        pass


async def read_answer(pieces: Sequence[bytes], ending: str, request: httpx.Request) -> tuple[Any, ...]:
    """Return what a client learns from the pieces: the answer and whether the connection is kept, or the error; and the bytes it sent."""
    stream = ScriptedStream(pieces, ending)
    conn: Any = Connection(stream, NoSocket(), ("http", "x", 80))  # type: ignore[arg-type]
    try:
        head = await conn.begin(request, request.read())
        body = conn.take_whole_body()
        if body is None:
            body = b""
            while chunk := await conn.read_chunk(request, None):
                body += chunk
    except httpx.TransportError as error:
        return type(error), str(error), stream.sent
    return head, body, conn.is_reusable, stream.sent


@pytest.mark.hypothesis
@given(
    draw_answers(),
    st.lists(st.integers(0, 10_000), max_size=3),
    st.sampled_from(["close", "reset"]),
    st.sampled_from(["GET", "POST", "HEAD"]),
)
@example(USUAL, [], "close", "POST")
@example(USUAL + b"HTTP/1.1 200 OK\r\n", [], "close", "POST")
@example(USUAL.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"), [], "close", "POST")
@example(USUAL.replace(b"content", b"Content-Length: 3\r\ncontent"), [], "close", "POST")
@example(USUAL.replace(b"server: uvicorn", b"Connection: close"), [], "close", "POST")
@example(USUAL, [60], "close", "POST")
@example(USUAL[:-1], [], "close", "POST")
@example(USUAL, [40], "reset", "POST")
@example(USUAL, [], "close", "HEAD")
@example(USUAL.replace(b"200", b"304"), [], "close", "POST")
@example(USUAL.replace(b"5", b"5" * 16), [], "close", "POST")
def test_an_answer_is_read_as_h11_reads_it(data: bytes, places: list[int], ending: str, method: str):
    request = httpx.Request(method, "http://x/generate", content=b"question" if method == "POST" else None)
    pieces = cut(data, places)
    found = trio.run(read_answer, pieces, ending, request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "encode_usual_request", lambda *_: None)
        patch.setattr(connection, "parse_usual_answer", lambda _: None)
        assert found == trio.run(read_answer, pieces, ending, request)


@pytest.mark.hypothesis
@given(draw_answers())
def test_a_usual_answer_states_one_length_and_nothing_else_about_its_end(data: bytes):
    usual = parse_usual_answer(data)
    if usual is None:
        return
    names = [name.lower() for name, _ in usual.head.fields]
    assert names.count(b"content-length") == 1
    assert b"transfer-encoding" not in names
    head = data[: usual.num_head_bytes]
    assert head.endswith(b"\r\n\r\n")
    assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n") == len(names) + 2


def test_the_answers_of_servers_are_usual():
    usual = parse_usual_answer(USUAL)
    assert usual is not None
    assert usual.head.fields == [(b"server", b"uvicorn"), (b"content-length", b"5"), (b"Content-Type", b"application/json")]
    assert (usual.head.status, usual.head.reason, usual.num_body_bytes, usual.closes) == (200, b"OK", 5, False)
    assert USUAL[usual.num_head_bytes :] == b"hello"


@pytest.mark.parametrize(
    "field",
    [
        b"X:" + b" " * READ_SIZE + b"\x00",
        b"X" * READ_SIZE,
        b"X: " + b"a " * (READ_SIZE // 2) + b"\x00",
        b"a:\r\n" * (READ_SIZE // 4) + b"\x00",
    ],
)
def test_a_long_head_that_is_unusual_takes_no_longer_than_its_length(field: bytes):
    assert parse_usual_answer(b"HTTP/1.1 200 OK\r\n" + field + b"\r\n\r\n") is None  # quadratic time would be minutes


# requests

NAMES = st.sampled_from(
    [b"Host", b"host", b"Content-Length", b"Connection", b"Transfer-Encoding", b"Expect", b"Upgrade", b"X-Key", b"bad name", b"", b"X:"]
)
VALUES = st.sampled_from(
    [b"x", b"", b"5", b"0", b" 5", b"5 ", b"close", b"keep-alive", b"Close", b"a\r\nY: b", b"a\nb", b"\xe9", b"a \t b", b"\x00", b"chunked"]
)


@pytest.mark.hypothesis
@given(
    st.sampled_from([b"GET", b"POST", b"HEAD", b"CONNECT", b"PUT", b"BAD METHOD", b""]),
    st.sampled_from([b"/", b"/a?b=c", b"", b"/a b", b"/\r\nX: y", b"/\xe9"]),
    st.lists(st.tuples(NAMES, VALUES), max_size=4).map(lambda fields: [(b"Host", b"x"), *fields])
    | st.lists(st.tuples(NAMES, VALUES), max_size=3),
    st.sampled_from([b"", b"hello"]),
)
@example(b"POST", b"/generate", [(b"Host", b"x"), (b"Content-Length", b"5"), (b"Connection", b"close")], b"hello")
@example(b"POST", b"/generate", [(b"Host", b"x"), (b"Content-Length", b"4")], b"hello")
@example(b"POST", b"/generate", [(b"Host", b"x"), (b"X-Key", b"a\r\nY: b"), (b"Content-Length", b"5")], b"hello")
def test_a_usual_request_is_what_h11_writes(method: bytes, target: bytes, fields: list[tuple[bytes, bytes]], body: bytes):
    usual = encode_usual_request(method, target, fields, body)
    if usual is None:
        return
    http = h11.Connection(h11.CLIENT)
    parts = [http.send(h11.Request(method=method, target=target, headers=fields))]
    parts += [http.send(h11.Data(data=body)) if body else b"", http.send(h11.EndOfMessage())]
    assert usual == (b"".join(part or b"" for part in parts), http.our_state is h11.MUST_CLOSE)


def test_the_requests_of_engines_are_usual():
    fields = [(b"Host", b"x:80"), (b"Accept", b"*/*"), (b"Content-Type", b"application/json"), (b"Content-Length", b"2")]
    assert encode_usual_request(b"POST", b"/generate", fields, b"{}") is not None
    assert encode_usual_request(b"GET", b"/health", [(b"Host", b"x:80"), (b"Connection", b"close")], b"") is not None

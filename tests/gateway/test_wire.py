"""The wire reads common requests by itself and gives all others to h11: a client cannot tell which of the two it was."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import h11
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollouts.gateway.http.wire as wire_module
from rollouts.gateway.http.heads import Head, read_common_head
from rollouts.gateway.http.wire import CLIENT_HAS_LEFT, BodyTooLarge, Wire, open_wire

MOST = 60  # bytes of a body
COMMON = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
CLIENTS = (  # as sent, but for addresses
    b"POST /sessions/a/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:1\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    b"Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 1.99\r\nX-Stainless-Async: false\r\n"
    b"Authorization: Bearer any\r\nContent-Length: 2\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: localhost:1\r\nAccept: */*\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n",
    b"GET /health?full=1 HTTP/1.1\r\nhost:localhost\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n\r\n",
)

LINES = (
    b"Host: a", b"Host: a", b"Host: a", b"host:  b\t", b"Accept: */*", b"X: y z", b"Connection: keep-alive", b"Connection: Keep-Alive",
    b"Connection: close", b"Connection: keep-alive, close", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"Expect: 100-continue\r\nContent-Length: 3", b"Upgrade: x", b"X:",
    b"X y: z", b": v", b" folded", b"X: \xff", b"X: a\x00b", b"X: a\x0bb", b"X : v", b"X", b"X: \xc3\xa9", b"X: a\tb  c", b"X: a\rb",
    b"Content-Length: 3", b"Content-Length: 3", b"content-length: 0", b"Content-Length: 3, 3", b"Content-Length: 03", b"Content-Length: +3",
    b"Content-Length: 99", b"Content-Length: -1", b"Content-Length: 1_0", b"Content-Length: ", b"Content-Length: 3 ",
    b"Content-Length: 9999999999999999999999", b"Content-Length: \xd9\xa3",
)  # fmt: skip


def often(usual: bytes, *others: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from([usual] * 6 + list(others))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method = draw(often(b"POST", b"GET", b"DELETE", b"HEAD", b"PUT", b"post", b"CONNECT", b"P T", b""))
    target = draw(often(b"/v1/x", b"/a%20b?q=1", b"*", b"http://h/", b"/\xff", b"", b"//x"))
    version = draw(often(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.12", b"http/1.1"))
    end = draw(often(b"\r\n", b"\n", b"\r\r\n"))
    lines = [b" ".join((method, target, version)), *draw(st.lists(st.sampled_from(LINES), max_size=4))]
    if draw(st.integers(0, 4)):
        lines.insert(1, b"Host: a")
    return end.join(lines) + end * 2 + draw(often(b"abc", b"", b"1\r\na\r\n0\r\n\r\n", b"\r\n", b"abcd"))


async def answer_all(stream: trio.SocketStream, seen: list[Any]) -> None:
    """Answer requests in turn with a length and in chunks, as a server does."""
    try:
        async with open_wire(stream, max_body_bytes=MOST, idle_s=5) as wire:
            while not wire.is_over and (body := await wire.receive(seen.append)) is not None:
                seen.append(body)
                with wire.cancel_when_client_leaves():
                    await answer(wire, is_whole=len(seen) % 4 != 0)
                seen.append(wire.is_over)
    except (*CLIENT_HAS_LEFT, BodyTooLarge) as error:
        seen.append(f"{type(error).__name__}: {error}")


async def answer(wire: Wire, *, is_whole: bool) -> None:
    if is_whole:
        head = wire.write_head(200, [("content-length", "4"), ("content-type", "x")])
        return await wire.send_bytes(head + wire.write_data(b"good") + wire.write_end())
    await wire.send_bytes(wire.write_head(200, [("content-type", "x")]) + wire.write_data(b"one"))
    await wire.send_bytes(wire.write_data(b"") + wire.write_data(b"two" * 9))
    return await wire.send_bytes(wire.write_end())


async def exchange(pieces: Sequence[bytes]) -> tuple[list[Any], bytes]:
    """Send pieces one after the other; return what the server saw and what it sent."""
    ours, theirs = trio.socket.socketpair()
    seen: list[Any] = []
    found = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_all, trio.SocketStream(theirs), seen)
        async with trio.SocketStream(ours) as client:
            for piece in pieces:
                with suppress(trio.BrokenResourceError):
                    await client.send_all(piece)
                await trio.testing.wait_all_tasks_blocked()
            with suppress(trio.BrokenResourceError):
                while data := await client.receive_some():
                    found += data
    return seen, found


def play(pieces: Sequence[bytes]) -> tuple[list[Any], bytes]:
    return trio.run(exchange, pieces, clock=trio.testing.MockClock(autojump_threshold=0))


def play_by_h11(pieces: Sequence[bytes]) -> tuple[list[Any], bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_module, "read_common_head", lambda data: None)
        return play(pieces)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(1, 400), max_size=2), st.integers(0, 999), st.binary(max_size=1))
@example([COMMON, COMMON, COMMON], [20, 30], 0, b"")
@example([COMMON, COMMON.replace(b"Host", b"Expect: 100-continue\r\nHost"), COMMON], [], 0, b"")
@example([COMMON.replace(b" 3", b" 99")], [80], 0, b"")
def test_common_requests_are_read_and_answered_as_h11_does(parts: list[bytes], cuts: list[int], place: int, noise: bytes) -> None:
    whole = bytearray(b"".join(parts))
    if noise:
        whole[place % len(whole)] = noise[0]
    edges = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    pieces = [bytes(whole[begin:end]) for begin, end in pairwise(edges) if begin < end]
    assert play(pieces) == play_by_h11(pieces)


def test_each_unusual_line_is_treated_as_h11_does() -> None:
    for line in LINES:
        request = b"POST /v1/x HTTP/1.1\r\nHost: a\r\n" + line + b"\r\n\r\n"
        for body in (b"", b"abc", b"1\r\na\r\n0\r\n\r\n"):
            pieces = [request, body + COMMON] if body else [request + COMMON]
            assert play(pieces) == play_by_h11(pieces), line


@settings(max_examples=300, deadline=None)
@given(requests(), st.integers(0, 999), st.binary(max_size=1))
def test_a_head_is_common_only_if_h11_reads_the_same(data: bytes, place: int, noise: bytes) -> None:
    data = data[: place % len(data)] + noise + data[place % len(data) + 1 :] if noise else data
    found = read_common_head(data)
    if found is None:
        return
    head, size = found
    http = h11.Connection(h11.SERVER)
    http.receive_data(data)
    event = http.next_event()
    assert isinstance(event, h11.Request) and not http.they_are_waiting_for_100_continue
    assert (head.method.encode(), head.target.encode()) == (event.method, event.target)
    assert [(name.encode(), value.encode()) for name, value in head.headers.items()] == list(event.headers)
    assert http.trailing_data[0] == data[size:]
    http.receive_data(b"x" * head.body_size)
    body = b""
    while isinstance(event := http.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage) and len(body) == head.body_size
    http.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    http.send(h11.EndOfMessage())
    assert (http.our_state, http.their_state) == (h11.DONE, h11.DONE)


@pytest.mark.parametrize("head", CLIENTS)
def test_heads_of_clients_are_common(head: bytes) -> None:
    found = read_common_head(head + b"{}")
    assert found is not None
    assert found[1] == len(head)


@pytest.mark.parametrize("data", [COMMON[:40], COMMON.replace(b"Host", b"Most"), COMMON.replace(b"1.1", b"1.0"), b"HEAD" + COMMON[4:]])
def test_other_heads_are_left_to_h11(data: bytes) -> None:
    assert read_common_head(data) is None


def test_a_head_that_does_not_match_costs_one_pass() -> None:
    spaces = b"POST / HTTP/1.1\r\nHost: " + b"a \t" * 20_000 + b"\x00"
    names = b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\x00"
    assert read_common_head(spaces) is read_common_head(names) is None  # backtracking would not end


async def test_a_client_that_leaves_or_sends_too_much_ahead_cancels_its_answer() -> None:
    for ahead in (b"", b"x" * (MOST + 1)):
        ours, theirs = trio.socket.socketpair()
        client = trio.SocketStream(ours)
        async with open_wire(trio.SocketStream(theirs), max_body_bytes=MOST, idle_s=60) as wire:
            await client.send_all(COMMON + b"POST")  # the begin of the next request is no sign of leaving
            assert await wire.receive(ignore) == b"abc"
            reached_end = False
            with trio.fail_after(60), wire.cancel_when_client_leaves():
                await trio.testing.wait_all_tasks_blocked()
                await (client.send_all(ahead) if ahead else client.aclose())
                await trio.sleep_forever()
                reached_end = True
            assert wire.is_over and not reached_end
        await client.aclose()


async def test_a_client_that_left_before_its_answer_began_cancels_it() -> None:
    ours, theirs = trio.socket.socketpair()
    client = trio.SocketStream(ours)
    async with open_wire(trio.SocketStream(theirs), max_body_bytes=MOST, idle_s=60) as wire:
        await client.send_all(COMMON)
        assert await wire.receive(ignore) == b"abc"
        await client.aclose()
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(60), wire.cancel_when_client_leaves():
            await trio.sleep_forever()
        assert wire.is_over


def ignore(head: Head) -> None:
    """Take a head without a look."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from benchmarks.reliability.loopback import Exchange, count_open_files, serve, settle
from rollouts.engines.fleet.members import FleetConfig
from rollouts.engines.http import endpoint as http
from rollouts.engines.http.endpoint import CallKind, Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.engines.http.transport import PooledTransport
from rollouts.errors import ConfigError, EngineError, EngineProtocolError, EngineStatusError, EngineTimeout

KINDS: tuple[CallKind, ...] = ("generate", "control", "sync", "health")
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def create_endpoint(respond: Callable[[httpx.Request], Any], **settings: Any) -> HTTPEndpoint:
    return HTTPEndpoint("http://server:1", transport=httpx.MockTransport(respond), **settings)


# what is sent


async def test_questions_and_answers():
    async def describe(exchange: Exchange) -> None:
        await exchange.answer(json.dumps([exchange.method, exchange.target, exchange.headers, exchange.body.decode()]).encode())

    async with serve(describe) as server, HTTPEndpoint(server.url + "/base/", api_key="secret") as endpoint:
        method, target, headers, body = await endpoint.post_json(
            "/generate", {"ids": [1, 2], "text": "é"}, params={"mode": "keep", "n": "1"}
        )
        assert (method, target, json.loads(body)) == ("POST", "/base/generate?mode=keep&n=1", {"ids": [1, 2], "text": "é"})
        assert headers["authorization"] == "Bearer secret"
        assert (headers["content-type"], headers["host"]) == ("application/json", f"127.0.0.1:{server.port}")
        assert (await endpoint.get_json("/x"))[:2] == ["GET", "/base/x"]
        method, _, headers, body = json.loads(await endpoint.post_text("/resume"))
        assert (method, body, headers["content-length"], "content-type" in headers) == ("POST", "", "0", False)
        assert json.loads(await endpoint.get_text("/health", kind="health"))[0] == "GET"
        assert endpoint.base_url == server.url + "/base"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost:8000",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host?x=1",
        "http://host?",
        "http://host/#",
        "http://host:0",
        "http://u:p@host",
        "ht tp://x",
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address: str):
    with pytest.raises(ConfigError, match="http://host:port"):
        HTTPEndpoint(address)


@pytest.mark.parametrize("key", ["", " ", "a\nb", "clé", "key "])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str):
    with pytest.raises(ConfigError, match="the API key is empty, or has") as caught:
        HTTPEndpoint("http://host", api_key=key)
    assert "clé" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"generate_s": 0.0}, {"control_s": -1.0}, {"sync_s": math.nan}, {"connect_s": 0.0}])
def test_deadlines_are_positive(settings: dict):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Deadlines(**settings)


def test_deadlines_and_limits_of_a_fleet_can_be_keys():
    named = {"sync_s": "--sync"}
    assert len({Deadlines(), Deadlines(options={}), Deadlines(options=named), Deadlines(sync_s=1.0)}) == 3
    assert hash(FleetConfig()) == hash(FleetConfig(options={"wait_s": "--wait"}))


@pytest.mark.parametrize("settings", [{"attempts": 0}, {"first_wait_s": 0.0}, {"longest_wait_s": 0.01}, {"budget_s": -1.0}])
def test_retry_policies_make_sense(settings: dict):
    with pytest.raises(ConfigError):
        RetryPolicy(**settings)
    with pytest.raises(ConfigError, match="max_connections"):
        HTTPEndpoint("http://host", max_connections=0)


async def test_calls_belong_into_the_block():
    endpoint = create_endpoint(lambda request: httpx.Response(200))
    with pytest.raises(AssertionError, match="async with"):
        await endpoint.get_json("/x")
    async with endpoint:
        with pytest.raises(AssertionError, match="does not start with /"):
            await endpoint.get_json("x")
        with pytest.raises(ValueError, match="JSON"):
            await endpoint.post_json("/x", {"temperature": math.nan})
    with pytest.raises(EngineError, match=r"http://server:1/x was not asked: its client is closed"):
        await endpoint.get_json("/x")
    with pytest.raises(AssertionError, match="a second time"):
        await endpoint.__aenter__()


async def test_a_call_that_waits_for_a_place_fails_when_the_block_ends():
    failed: list[EngineError] = []

    async def hang(request: httpx.Request) -> httpx.Response:
        await trio.sleep_forever()
        raise AssertionError

    async def call(endpoint: HTTPEndpoint) -> None:
        try:
            await endpoint.post_json("/x", {})
        except EngineError as error:
            failed.append(error)

    first = trio.CancelScope()

    async def call_until_cancelled(endpoint: HTTPEndpoint) -> None:
        with first:
            await endpoint.post_json("/x", {})

    async with trio.open_nursery() as nursery:
        async with create_endpoint(hang, max_connections=1) as endpoint:
            for task in (call_until_cancelled, call):
                nursery.start_soon(task, endpoint)
                await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        await settle(lambda: len(failed) == 1)
    assert "its client is closed" in str(failed[0])


# which connections


async def test_generations_share_connections_and_control_calls_have_their_own():
    async def answer(exchange: Exchange) -> None:
        await exchange.answer()

    async with serve(answer) as server, HTTPEndpoint(server.url) as endpoint:
        for kind in (*KINDS, *KINDS):
            await endpoint.post_json("/x", {}, kind=kind)
        assert [exchange.connection for exchange in server.exchanges] == [0, 1, 2, 3, 0, 4, 5, 6]
        assert [exchange.headers.get("connection") for exchange in server.exchanges[:4]] == [None, "close", "close", "close"]
        await settle(lambda: server.num_open == 1)


async def test_a_control_call_does_not_wait_behind_generations():
    async def hang(exchange: Exchange) -> None:
        if exchange.target == "/generate":
            await exchange.wait_hung_up()
        else:
            await exchange.answer()

    async with serve(hang) as server, HTTPEndpoint(server.url, max_connections=2) as endpoint:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(endpoint.post_json, "/generate", {})
            await settle(lambda: len(server.exchanges) == 2)
            assert endpoint.num_generating == 2
            with trio.fail_after(30.0):
                for _ in range(3):
                    assert await endpoint.post_json("/abort_request", {}, kind="control") == {}
            nursery.cancel_scope.cancel()
        assert endpoint.num_generating == 0
        await settle(lambda: server.num_open == 0)  # the server learns that nobody waits any more


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch):
    async def answer(exchange: Exchange) -> None:
        await exchange.answer()

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(answer) as server, HTTPEndpoint(server.url) as endpoint:
        assert await endpoint.post_json("/generate", {}) == {}


# deadlines


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_of_call_has_a_deadline(kind: CallKind, autojump_clock: trio.testing.MockClock):
    async def hang(request: httpx.Request) -> httpx.Response:
        await trio.sleep(1e9)
        return httpx.Response(200)

    deadlines = Deadlines(generate_s=1000.0, control_s=20.0, sync_s=300.0, health_s=4.0)
    async with create_endpoint(hang, deadlines=deadlines) as endpoint:
        started = trio.current_time()
        with pytest.raises(EngineTimeout, match=rf"http://server:1/x gave no complete answer within \d+ s.*{kind}_s"):
            await endpoint.post_json("/x", {}, kind=kind, idempotent=True)
        assert trio.current_time() - started == {"generate": 1000.0, "control": 20.0, "sync": 300.0, "health": 4.0}[kind]
        assert endpoint.num_generating == 0


async def test_generations_may_have_no_deadline(autojump_clock: trio.testing.MockClock):
    async def slow(request: httpx.Request) -> httpx.Response:
        await trio.sleep(1e6)
        return httpx.Response(200, json=[])

    async with create_endpoint(slow, deadlines=Deadlines(generate_s=None)) as endpoint:
        assert await endpoint.post_json("/generate", {}) == []


@pytest.mark.parametrize(
    "half", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_a_server_that_hangs_at_any_point_does_not_hang_the_client(half: bytes):
    async def hang(exchange: Exchange) -> None:
        await exchange.send(half)
        await exchange.wait_hung_up()

    transport = PooledTransport()
    deadlines = Deadlines(generate_s=0.02, control_s=0.02, sync_s=0.02, health_s=0.02)
    async with serve(hang) as server, HTTPEndpoint(server.url, deadlines=deadlines, transport=transport) as endpoint:
        for kind in KINDS:
            with pytest.raises(EngineTimeout, match=r"within 0\.02 s"):
                await endpoint.post_json("/x", {}, kind=kind)
            with pytest.raises(EngineTimeout, match=r"within 0\.02 s"):
                async with endpoint.stream_events("/x", {}, kind=kind) as events:
                    async for _ in events:
                        pass
        assert (endpoint.num_generating, transport.num_in_flight, transport.num_idle) == (0, 0, 0)
        await settle(lambda: server.num_open == 0)


async def test_a_connection_that_is_never_made_has_a_deadline_of_its_own(autojump_clock: trio.testing.MockClock):
    def refuse(request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"] == {"connect": 3.0}
        raise httpx.ConnectTimeout("no connection to server:1 within 3 s", request=request)

    async with create_endpoint(refuse, deadlines=Deadlines(connect_s=3.0), retry=RetryPolicy(attempts=2)) as endpoint:
        with pytest.raises(EngineTimeout, match="no connection to server:1 within 3 s"):
            await endpoint.post_json("/x", {})


# answers that are none


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", EngineProtocolError, "'<html>', expected JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", EngineProtocolError, "'', expected JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", EngineProtocolError, "expected JSON"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", EngineProtocolError, "does not speak HTTP"),
        (b"HTTP/1.1 307 X\r\nLocation: http://b/\r\nContent-Length: 0\r\n\r\n", EngineStatusError, "redirects to http://b/: use that"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", EngineError, "in the middle of its answer"),
        (b"", EngineError, "without an answer. The server may have died"),
    ],
    ids=range(7),
)
async def test_answers_that_are_none_name_the_address_and_what_came(answer: bytes, error: type, message: str):
    async def send(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.close()

    transport = PooledTransport()
    async with serve(send) as server, HTTPEndpoint(server.url, transport=transport) as endpoint:
        with pytest.raises(EngineError, match=message) as caught:
            await endpoint.post_json("/generate", {})
        assert type(caught.value) is error
        assert server.url + "/generate" in str(caught.value)
        assert (len(server.exchanges), transport.num_in_flight, endpoint.num_generating) == (1, 0, 0)


async def test_an_answer_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 100_000)
    head = b"Transfer-Encoding: chunked\r\n\r\n"

    async def go_on(exchange: Exchange) -> None:
        if exchange.target == "/events":
            await send_events(exchange, *[f'"{i:01000d}"' for i in range(200)], "[DONE]")
            await exchange.send(b"0\r\n\r\n")
            return
        await exchange.send(b"HTTP/1.1 %d X\r\n%b" % (500 if exchange.target == "/error" else 200, head))
        while True:
            await exchange.send(b"400\r\n" + 1024 * b"x" + b"\r\n")

    transport = PooledTransport()
    async with serve(go_on) as server, HTTPEndpoint(server.url, transport=transport) as endpoint:
        for path in ("/endless", "/error"):
            with pytest.raises(EngineProtocolError, match=rf"{path} gave more than 100000 bytes in one answer"):
                await endpoint.post_json(path, {})
        with pytest.raises(EngineProtocolError, match="more than 100000 bytes"):
            async with endpoint.stream_events("/one-line", {}) as events:
                _ = [event async for event in events]
        assert (transport.num_in_flight, transport.num_idle, endpoint.num_generating) == (0, 0, 0)
        async with endpoint.stream_events("/events", {}) as events:  # of many events, each of its own length
            assert len([event async for event in events]) == 200
        await settle(lambda: server.num_open == transport.num_idle == 1)


async def test_a_server_that_is_not_there():
    async with HTTPEndpoint("http://127.0.0.1:1", retry=RetryPolicy(attempts=2, first_wait_s=0.01)) as endpoint:
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:1/generate cannot be reached.*refused.*Check that the server runs"):
            await endpoint.post_json("/generate", {})


async def test_a_server_that_starts_again_is_found_again():
    """The connections to the server before are all of no more use."""

    async def answer(exchange: Exchange) -> None:
        await exchange.answer()
        if exchange.target == "/last":
            exchange.close()

    async with serve(answer) as server, HTTPEndpoint(server.url) as endpoint:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(endpoint.post_json, "/last", {})
        assert len(server.exchanges) == 12


# streams


async def send_events(exchange: Exchange, *events: str) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for event in events:
        data = f"data: {event}\n\n".encode()
        await exchange.send(b"%x\r\n%b\r\n" % (len(data), data))
        await trio.lowlevel.checkpoint()


async def read_events(endpoint: HTTPEndpoint) -> list[Any]:
    async with endpoint.stream_events("/generate", {"stream": True}) as events:
        return [event async for event in events]


async def test_streams_of_events_come_one_by_one_and_the_connection_is_kept():
    seen = trio.Event()

    async def stream(exchange: Exchange) -> None:
        await send_events(exchange, "1")
        await seen.wait()
        data = b'data: {"a": 2}\n\ndata: [DONE]\n\ndata: "after the end"\n\n'
        await exchange.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    transport = PooledTransport()
    async with serve(stream) as server, HTTPEndpoint(server.url, transport=transport) as endpoint:
        async with endpoint.stream_events("/generate", {}) as events:
            assert await anext(events) == 1
            assert endpoint.num_generating == 1
            seen.set()
            assert [event async for event in events] == [{"a": 2}]
        assert await read_events(endpoint) == [1, {"a": 2}]
        assert (server.num_connections, transport.num_idle, endpoint.num_generating) == (1, 1, 0)


async def test_leaving_a_stream_early_hangs_up():
    async def stream(exchange: Exchange) -> None:
        await send_events(exchange, "1", "2")
        await exchange.wait_hung_up()

    transport = PooledTransport()
    async with serve(stream) as server, HTTPEndpoint(server.url, transport=transport) as endpoint:
        async with endpoint.stream_events("/generate", {}) as events:
            assert await anext(events) == 1
        await settle(lambda: server.num_open == 0)
        with pytest.raises(ZeroDivisionError):
            async with endpoint.stream_events("/generate", {}) as events:
                raise ZeroDivisionError
        with trio.move_on_after(0.02):
            await read_events(endpoint)
        await settle(lambda: server.num_open == 0)
        assert (transport.num_in_flight, transport.num_idle, endpoint.num_generating) == (0, 0, 0)


async def test_an_error_in_a_stream_is_raised_with_its_own_status():
    async def stream(exchange: Exchange) -> None:
        await send_events(exchange, "1", '{"error": {"message": "too long", "code": 400}}', "[DONE]")
        await exchange.send(b"0\r\n\r\n")

    async with serve(stream) as server, HTTPEndpoint(server.url) as endpoint:
        with pytest.raises(EngineStatusError, match="too long") as caught:
            await read_events(endpoint)
        assert caught.value.status == 400
        assert endpoint.num_generating == 0


async def test_an_error_instead_of_a_stream_is_raised():
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b'{"error": "unknown field"}', 400)

    async with serve(refuse) as server, HTTPEndpoint(server.url) as endpoint:
        with pytest.raises(EngineStatusError, match="unknown field"):
            await read_events(endpoint)
        assert server.num_connections == 1


async def test_a_stream_without_an_end_is_a_server_that_stopped():
    async def stop(exchange: Exchange) -> None:
        await send_events(exchange, "1")
        await exchange.send(b"" if exchange.target == "/drop" else b"0\r\n\r\n")
        exchange.close()

    async with serve(stop) as server, HTTPEndpoint(server.url) as endpoint:
        with pytest.raises(EngineProtocolError, match=r"ended without \[DONE\]"):
            await read_events(endpoint)
        with pytest.raises(EngineError, match="in the middle of its answer"):
            async with endpoint.stream_events("/drop", {}) as events:
                async for event in events:
                    assert event == 1


async def test_a_stream_whose_body_does_not_end_after_its_last_event_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "LAST_BYTES_S", 0.05)

    async def linger(exchange: Exchange) -> None:
        await send_events(exchange, "1", "[DONE]")
        await exchange.wait_hung_up()

    transport = PooledTransport()
    async with serve(linger) as server, HTTPEndpoint(server.url, transport=transport) as endpoint:
        assert await read_events(endpoint) == [1]
        assert (transport.num_in_flight, transport.num_idle) == (0, 0)


# over-sampling


async def test_no_place_is_lost_in_200_over_sampled_rounds():
    draw, num_waiting = random.Random(0), 0

    async def at_random(exchange: Exchange) -> None:
        nonlocal num_waiting
        if exchange.target != "/last" and draw.random() < 0.7 and num_waiting < 4:  # never all of the 6 that are in flight
            num_waiting += 1
            try:
                await exchange.wait_hung_up()
            finally:
                num_waiting -= 1
            return
        for _ in range(draw.randrange(8)):
            await trio.lowlevel.checkpoint()
        await exchange.answer()

    transport = PooledTransport(idle_expiry_s=1000.0)
    async with serve(at_random) as server, HTTPEndpoint(server.url, max_connections=6, transport=transport) as endpoint:

        async def one(nursery: trio.Nursery, done: list[int]) -> None:
            await endpoint.post_json("/generate", {})
            done.append(1)
            if len(done) == 3:
                nursery.cancel_scope.cancel()

        before = count_open_files()
        for _ in range(200):
            done: list[int] = []
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(one, nursery, done)
            assert (endpoint.num_generating, transport.num_in_flight) == (0, 0)
        await settle(lambda: server.num_open == transport.num_idle)
        assert count_open_files() <= before + 2 * 12
        assert server.num_connections > 200
        assert await endpoint.post_json("/last", {}) == {}


async def test_leaving_the_block_ends_calls_of_others():
    errors: list[EngineError] = []

    async def hang(exchange: Exchange) -> None:
        await exchange.wait_hung_up()

    async def call(endpoint: HTTPEndpoint, idempotent: bool) -> None:
        try:
            await endpoint.post_json("/generate", {}, idempotent=idempotent)
        except EngineError as error:
            errors.append(error)

    async with serve(hang) as server, trio.open_nursery() as nursery:
        async with HTTPEndpoint(server.url) as endpoint:
            nursery.start_soon(call, endpoint, False)
            nursery.start_soon(call, endpoint, True)
            await settle(lambda: len(server.exchanges) == 2)
        await settle(lambda: len(errors) == 2)
        assert all("closed on this side, while the call was in flight" in str(error) for error in errors)
        assert endpoint.num_generating == 0

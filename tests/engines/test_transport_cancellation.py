"""A request that is cancelled or fails holds no place, leaves no file open, and leaves no bytes that a later request could read."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
import trio
import trio.testing

from benchmarks.reliability.cancellation import cancel_at_step
from benchmarks.reliability.loopback import Exchange, count_open_files, serve, settle
from rollouts.engines.http import connection
from rollouts.engines.http.transport import PooledTransport

BIG = b"0123456789abcdef" * (1 << 20)  # 16 MB, more than the buffers of two sockets take together
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


async def never(exchange: Exchange) -> None:
    await exchange.wait_hung_up()


async def never_whole(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    await exchange.wait_hung_up()


@asynccontextmanager
async def serve_deaf() -> AsyncGenerator[str]:
    """A listener that takes connections and neither reads nor writes."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, lambda stream: trio.sleep_forever(), 0)
        yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serve_full() -> AsyncGenerator[str]:
    """A listener whose queue is full: connections stay half-open."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        try:
            await trio.lowlevel.checkpoint()
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for filler in fillers:
                filler.close()


@asynccontextmanager
async def serve_handler(handler: Callable) -> AsyncGenerator[str]:
    async with serve(handler) as server:
        yield server.url.removeprefix("http://")


PHASES: dict[str, tuple[Callable[[], AbstractAsyncContextManager[str]], str, bytes, str, type[httpx.TimeoutException]]] = {
    "connect": (serve_full, "http", b"", "connect", httpx.ConnectTimeout),
    "handshake": (serve_deaf, "https", b"", "connect", httpx.ConnectTimeout),
    "write": (serve_deaf, "http", BIG, "write", httpx.WriteTimeout),
    "head": (lambda: serve_handler(never), "http", b"", "read", httpx.ReadTimeout),
    "body": (lambda: serve_handler(never_whole), "http", b"", "read", httpx.ReadTimeout),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancelled_request_leaves_nothing_behind(phase: str):
    create_server, scheme, body, _, _ = PHASES[phase]
    transport = PooledTransport(max_connections=1, verify=False)
    async with create_server() as address, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        await trio.lowlevel.checkpoint()
        before = count_open_files()
        for _ in range(3):
            with trio.move_on_after(0.05) as scope:
                await client.post(f"{scheme}://{address}", content=body)
            assert scope.cancelled_caught
            assert (transport.num_in_flight, transport.num_idle) == (0, 0)
        if phase not in ("handshake", "write"):  # there the deaf listener keeps its end
            await settle(lambda: count_open_files() <= before)


@pytest.mark.parametrize("phase", PHASES)
async def test_every_phase_has_a_timeout(phase: str):
    create_server, scheme, body, timeout, error = PHASES[phase]
    transport = PooledTransport(max_connections=1, verify=False)
    async with create_server() as address, httpx.AsyncClient(transport=transport, trust_env=False) as client:
        for _ in range(2):
            with trio.fail_after(30.0), pytest.raises(error, match=r"within 0\.05 s \(POST") as caught:
                await client.post(f"{scheme}://{address}", content=body, timeout=httpx.Timeout(None, **{timeout: 0.05}))
            assert caught.value.request.method == "POST"
            assert (transport.num_in_flight, transport.num_idle) == (0, 0)


async def test_waiting_for_a_place_can_be_cancelled_and_has_a_timeout():
    transport = PooledTransport(max_connections=1)
    async with serve(never) as server, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.get, server.url)
            await settle(lambda: len(server.exchanges) == 1)
            with trio.move_on_after(0.02) as scope:
                await client.get(server.url)
            assert scope.cancelled_caught
            with pytest.raises(httpx.PoolTimeout, match="no free connection"):
                await client.get(server.url, timeout=httpx.Timeout(None, pool=0.02))
            assert (transport.num_in_flight, len(server.exchanges)) == (1, 1)
            nursery.cancel_scope.cancel()
        assert transport.num_in_flight == 0


async def test_a_response_that_nobody_reads_to_its_end_is_not_read_by_the_next():
    async def long_answer(exchange: Exchange) -> None:
        if exchange.target == "/half":
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            return
        await exchange.answer(b"x" * 100_000 if exchange.target == "/long" else b"short")

    transport = PooledTransport(max_connections=1)
    async with serve(long_answer) as server, httpx.AsyncClient(transport=transport, trust_env=False) as client:
        for target in ("/long", "/short", "/long", "/half"):
            async with client.stream("GET", server.url + target) as response:
                assert response.status_code == 200
            assert (await client.get(server.url + "/")).text == "short"
        assert (transport.num_in_flight, transport.num_idle) == (0, 1)
        assert server.num_connections == 4


async def test_a_response_may_be_closed_by_another_task_while_one_reads_it():
    transport = PooledTransport(max_connections=1)
    async with serve(never_whole) as server, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        response = await client.send(client.build_request("GET", server.url), stream=True)

        async def close() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await response.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            with pytest.raises(httpx.CloseError, match="closed on this side"):
                await response.aread()
        assert (transport.num_in_flight, transport.num_idle) == (0, 0)
        await settle(lambda: server.num_open == 0)


async def test_closing_the_transport_ends_all_that_is_in_flight():
    errors: list[Exception] = []

    async def get(client: httpx.AsyncClient, url: str) -> None:
        try:
            await client.get(url)
        except httpx.CloseError as error:
            errors.append(error)

    before = count_open_files()
    transport = PooledTransport(max_connections=3)
    async with serve_full() as full, serve(never) as server:
        client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(get, client, f"http://{full}")  # stays in the middle of connecting
            await settle(lambda: transport.num_in_flight == 1)
            for _ in range(5):  # two of which find a place
                nursery.start_soon(get, client, server.url)
            await settle(lambda: len(server.exchanges) == 2)
            await transport.aclose()
            await settle(lambda: len(errors) == 6)
            nursery.cancel_scope.cancel()
        assert transport.num_in_flight == 0
        with pytest.raises(httpx.CloseError, match="the transport is closed"):
            await client.get(server.url)
        await settle(lambda: server.num_open == 0)
    await settle(lambda: count_open_files() <= before)


async def test_closing_the_transport_ends_a_request_that_was_lost(monkeypatch: pytest.MonkeyPatch):
    """While it is looked whether the server has read it."""
    monkeypatch.setattr(connection, "ROUND_TRIP_S", 1000.0)
    errors: list[Exception] = []

    async def die_after_reading(exchange: Exchange) -> None:
        if len(server.exchanges) == 1:
            await exchange.answer()
        else:
            exchange.close()

    async def post(client: httpx.AsyncClient) -> None:
        try:
            await client.post(server.url)
        except httpx.TransportError as error:
            errors.append(error)

    transport = PooledTransport()
    async with serve(die_after_reading) as server:
        client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
        await client.get(server.url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, client)
            await settle(lambda: len(server.exchanges) == 2 and server.num_open == 0)
            await trio.testing.wait_all_tasks_blocked(0.001)
            await transport.aclose()
            await settle(lambda: len(errors) == 1)
        assert isinstance(errors[0], connection.KeptConnectionLost)
        assert (transport.num_in_flight, server.num_connections) == (0, 1)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_a_request_may_be_cancelled_at_every_step_it_takes(is_kept: bool, name: str):
    async def in_pieces(exchange: Exchange) -> None:
        for piece in (b"HTTP/1.1 200 OK\r\nTransfer-Enc", b"oding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"0\r\n\r\n"):
            await exchange.send_to_reader(piece)

    transport = PooledTransport(max_connections=1)
    endings = []
    async with serve(in_pieces) as server, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        url = f"http://{name}:{server.port}"
        for num_steps in range(1, 60):
            if is_kept:
                await client.get(url)
            with cancel_at_step(num_steps) as scope:
                await client.get(url, extensions={"fresh_connection": not is_kept})
            endings.append(scope.cancelled_caught)
            assert transport.num_in_flight == 0, f"cancelled at step {num_steps}"
            await settle(lambda: server.num_open == transport.num_idle)
            if not scope.cancel_called:
                break
        assert (await client.get(url)).text == "{}"
    assert endings.count(True) >= 4
    assert endings[-1] is False, "the request takes fewer steps than that"


async def checkpoint_often(count: int) -> None:
    """Let other tasks go first, without the time that a sleep takes on a busy machine."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


async def over_sample(client: httpx.AsyncClient, url: str, num_wanted: int, num_sent: int) -> None:
    """Send more requests than are wanted, and cancel those that are not done when enough are."""
    num_done = 0

    async def one(nursery: trio.Nursery) -> None:
        nonlocal num_done
        assert (await client.post(url, content=b"{}")).status_code == 200
        num_done += 1
        if num_done == num_wanted:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(num_sent):
            nursery.start_soon(one, nursery)
    assert num_done >= num_wanted


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
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for part in (head[:20], head[20:], b"2\r\n{}\r\n", b"0\r\n\r\n"):
            await exchange.send(part)
            await checkpoint_often(draw.randrange(8))

    transport = PooledTransport(max_connections=6, idle_expiry_s=1000.0)
    async with serve(at_random) as server, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        before, counts = count_open_files(), []
        for _ in range(200):
            await over_sample(client, server.url, 3, 12)
            assert transport.num_in_flight == 0
            await settle(lambda: server.num_open == transport.num_idle)
            assert transport.num_idle <= 6
            counts.append(count_open_files())
        assert max(counts) <= before + 2 * 12  # both ends of what one round can open
        assert server.num_connections > 400  # most rounds cancelled requests that were in flight
        assert (await client.get(server.url + "/last")).text == "{}"


async def test_more_requests_than_places_wait_and_all_are_answered():
    num_now = num_most = 0

    async def count(exchange: Exchange) -> None:
        nonlocal num_now, num_most
        num_now += 1
        num_most = max(num_most, num_now)
        await checkpoint_often(8)
        num_now -= 1
        await exchange.answer()

    transport = PooledTransport(max_connections=4, idle_expiry_s=1000.0)
    async with serve(count) as server, httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        for _ in range(30):
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(client.get, server.url)
        assert num_most == server.num_connections == transport.num_idle == 4
        assert len(server.exchanges) == 360

"""Clients of an inference server: requests per CPU-second with many in flight, and what 200 over-sampled rounds leave behind.

    python -m benchmarks.http_clients [--in-flight 100 1000 2000] [--requests 4000] [--repeats 3] [--rounds 200] [--output FILE.json]

The server is a process of its own and answers after 50 ms. Only the client's CPU time counts. Connections are made before the clock starts.
aiohttp is measured, too, where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import trio

from benchmarks.delayed_server import raise_open_files, run_server
from benchmarks.measure import memory_mb, print_table, write_json
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.http.transport import PooledTransport

BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 64}}
Ask = Callable[[], Awaitable[Any]]
DELAY_S = 0.05
SLOW = "httpx.AsyncClient"
AIOHTTP = "aiohttp"


@asynccontextmanager
async def open_endpoint(url: str, in_flight: int) -> AsyncGenerator[Ask]:
    """HTTPEndpoint, as the engines use it."""
    async with HTTPEndpoint(url, max_connections=in_flight) as endpoint:
        yield lambda: endpoint.post_json("/generate", BODY)


@asynccontextmanager
async def open_httpx_over_pool(url: str, in_flight: int) -> AsyncGenerator[Ask]:
    """httpx's client over PooledTransport."""
    async with httpx.AsyncClient(transport=PooledTransport(max_connections=in_flight), timeout=None, trust_env=False) as client:

        async def ask() -> Any:
            return (await client.post(url + "/generate", json=BODY)).json()

        yield ask


@asynccontextmanager
async def open_httpx(url: str, in_flight: int) -> AsyncGenerator[Ask]:
    """httpx's client over its own pool."""
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def ask() -> Any:
            return (await client.post(url + "/generate", json=BODY)).json()

        yield ask


@asynccontextmanager
async def open_bare(url: str, in_flight: int) -> AsyncGenerator[Ask]:
    """The least that a trio client can do: a stack of streams, bytes put together by hand, nothing checked."""
    port = httpx.URL(url).port
    assert port is not None
    streams: list[trio.SocketStream] = []

    async def ask() -> Any:
        body = json.dumps(BODY).encode()
        stream = streams.pop() if streams else await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += await stream.receive_some(65536)
        head, _, answer = answer.partition(b"\r\n\r\n")
        length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))[15:])
        while len(answer) < length:
            answer += await stream.receive_some(65536)
        streams.append(stream)
        return json.loads(answer)

    yield ask
    for stream in streams:
        await stream.aclose()


CLIENTS: dict[str, Callable[[str, int], AbstractAsyncContextManager[Ask]]] = {
    "HTTPEndpoint": open_endpoint,
    "httpx over PooledTransport": open_httpx_over_pool,
    SLOW: open_httpx,
    "bare trio streams": open_bare,
}


async def measure(client: str, url: str, in_flight: int, num_requests: int) -> tuple[float, float]:
    """Requests per CPU-second and per second with a number of tasks that each ask one question after another."""

    async def ask_often(ask: Ask, times: int) -> None:
        for _ in range(times):
            answer = await ask()
            assert answer["text"] == "ok", f"the server answered {answer!r}"

    async def run(ask: Ask, times: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(ask_often, ask, times)

    times = max(1, num_requests // in_flight)
    async with CLIENTS[client](url, in_flight) as ask:
        await run(ask, 1)
        wall, cpu = time.perf_counter(), time.process_time()
        await run(ask, times)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return times * in_flight / cpu, times * in_flight / wall


async def measure_aiohttp(url: str, in_flight: int, num_requests: int) -> tuple[float, float]:
    """Requests per CPU-second and per second of aiohttp's client, as in measure."""
    aiohttp: Any = importlib.import_module("aiohttp")
    times = max(1, num_requests // in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def ask_often(times: int) -> None:
            for _ in range(times):
                async with session.post(url + "/generate", json=BODY) as response:
                    answer = await response.json()
                assert answer["text"] == "ok", f"the server answered {answer!r}"

        await asyncio.gather(*(ask_often(1) for _ in range(in_flight)))
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(ask_often(times) for _ in range(in_flight)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return times * in_flight / cpu, times * in_flight / wall


def run_client(client: str, url: str, in_flight: int, num_requests: int) -> tuple[float, float]:
    """Measure one client in an event loop of its own."""
    if client == AIOHTTP:
        return asyncio.run(measure_aiohttp(url, in_flight, num_requests))
    return trio.run(measure, client, url, in_flight, num_requests)


def compare_clients(url: str, in_flight: list[int], num_requests: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians for each client and number in flight; clients take turns."""
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    clients = [*CLIENTS, *([AIOHTTP] if importlib.util.find_spec("aiohttp") else [])]
    for repeat in range(repeats):
        for number in in_flight:
            for client in clients:
                if client == SLOW and repeat > 0:
                    continue  # minutes at the larger numbers, and far enough from the others to be told apart by one run
                asked = min(num_requests, number) if client == SLOW else num_requests
                rates.setdefault((client, number), []).append(run_client(client, url, number, asked))
    table: dict[str, dict[str, float]] = {client: {} for client in clients}
    for (client, number), pairs in rates.items():
        table[client][f"{number} per CPU-s"] = statistics.median(cpu for cpu, _ in pairs)
        table[client][f"{number} per s"] = statistics.median(wall for _, wall in pairs)
    return table


async def soak(url: str, num_rounds: int, num_wanted: int = 64, num_sent: int = 256) -> dict[str, float]:
    """Rounds that send more requests than they want and cancel the rest: the places, files and memory that they leave behind."""
    files: list[int] = []
    memory: list[float] = []
    num_cancelled = 0
    transport = PooledTransport()
    async with HTTPEndpoint(url, max_connections=num_sent, transport=transport) as endpoint:
        for _ in range(num_rounds):
            done: list[None] = []

            async def ask(nursery: trio.Nursery, done: list[None]) -> None:
                await endpoint.post_json("/spread", BODY)
                done.append(None)
                if len(done) == num_wanted:
                    nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                for _ in range(num_sent):
                    nursery.start_soon(ask, nursery, done)
            num_cancelled += num_sent - len(done)
            files.append(len(os.listdir("/dev/fd")))
            memory.append(memory_mb("VmRSS"))
        lost = endpoint.num_generating + transport.num_in_flight
    fifth = max(1, num_rounds // 5)
    return {
        "rounds": num_rounds,
        "requests": num_rounds * num_sent,
        "cancelled": num_cancelled,
        "places lost": lost,
        "files, 1st fifth": max(files[:fifth]),
        "files, last fifth": max(files[-fifth:]),
        "MB, 1st fifth": max(memory[:fifth]),
        "MB, last fifth": max(memory[-fifth:]),
    }


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 2000])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    raise_open_files()
    with run_server(DELAY_S) as url:
        table = compare_clients(url, arguments.in_flight, arguments.requests, arguments.repeats)
        print_table(f"requests, answered after {DELAY_S * 1000:g} ms", table)
        left = trio.run(soak, url, arguments.rounds)
        print_table("over-sampled rounds, 64 of 256 requests wanted", {"HTTPEndpoint": left})
    write_json(arguments.output, {"requests": arguments.requests, "table": table, "soak": left})


if __name__ == "__main__":
    main()

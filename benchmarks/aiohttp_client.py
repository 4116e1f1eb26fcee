"""aiohttp's client as a contender of benchmarks.run. Needs aiohttp."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from benchmarks.http_clients import BODY


def measure_aiohttp(url: str, in_flight: int, num_requests: int) -> float:
    """Return requests per processor second of tasks that each ask one question after another; connections are open before."""

    async def run() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

            async def ask(times: int) -> None:
                for _ in range(times):
                    async with session.post(url + "/generate", json=BODY) as response:
                        answer = await response.json()
                    assert answer["text"] == "ok", f"the server answered {answer!r}"

            times = max(1, num_requests // in_flight)
            await asyncio.gather(*[ask(1) for _ in range(in_flight)])
            started = time.process_time()
            await asyncio.gather(*[ask(times) for _ in range(in_flight)])
            return times * in_flight / (time.process_time() - started)

    return asyncio.run(run())

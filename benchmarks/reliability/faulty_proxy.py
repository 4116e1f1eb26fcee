"""A proxy on loopback before a server: it forwards each request, and damages what its plan says about it."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import trio

from benchmarks.reliability import loopback

REFUSED_S = 0.02
"""Seconds in which connections are refused."""


@dataclass(frozen=True)
class Reply:
    """The server's answer as bytes, to send or to damage."""

    status: int
    content_type: str
    body: bytes

    def encode(self, more_bytes: int = 0) -> bytes:
        """Return the answer as HTTP/1.1. A content length that is larger by `more_bytes` promises more than comes."""
        lines = [
            f"HTTP/1.1 {self.status} X",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body) + more_bytes}",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + self.body


@dataclass(eq=False)
class FaultyProxy:
    """The proxy as a test sees it."""

    url: str = ""
    served: loopback.LoopbackServer = field(default_factory=loopback.LoopbackServer)
    hits: dict[str, int] = field(default_factory=dict[str, int])  # fault -> number of requests that it hit
    last: Reply | None = None  # the newest undamaged answer to a request with a fault plan
    accepting: trio.CancelScope = field(default_factory=trio.CancelScope)
    refusing: trio.Event = field(default_factory=trio.Event)

    async def refuse(self) -> None:
        """Refuse connections for REFUSED_S from now on."""
        self.hits["refused"] = self.hits.get("refused", 0) + 1
        self.refusing = trio.Event()
        self.accepting.cancel()
        await self.refusing.wait()


def text(status: int, body: str, content_type: str = "application/json") -> Reply:
    return Reply(status, content_type, body.encode())


async def damage(
    proxy: FaultyProxy, exchange: loopback.Exchange, fault: str, forward: Callable[[], Any], change: Callable[[bytes], bytes]
) -> None:
    """Answer with a fault.

    Args:
        forward: asks the server. Not called by faults that it does not notice.
        change: damage to the JSON of the answer, for the fault "wrong".
    """
    if fault == "reset":
        exchange.reset()
    elif fault == "hang":
        await exchange.wait_hung_up()
    elif fault.isdecimal():
        await exchange.send(text(int(fault), '{"error":{"message":"no","code":1}}').encode())
    elif fault == "redirect":
        await exchange.send(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
    elif fault == "garbage":
        await exchange.send(b"this is not HTTP\r\n\r\n")
        exchange.close()
    else:
        await damage_reply(proxy, exchange, fault, await forward(), change)


async def damage_reply(proxy: FaultyProxy, exchange: loopback.Exchange, fault: str, reply: Reply, change: Callable[[bytes], bytes]) -> None:
    """Send the server's answer with a fault."""
    half = len(reply.encode()) - len(reply.body) // 2
    if fault == "delay":
        await trio.sleep(0.05)
        await exchange.send(reply.encode())
    elif fault == "slow":  # a few bytes at a time
        data = reply.encode()
        for i in range(0, len(data), 97):
            await exchange.send(data[i : i + 97])
            await trio.sleep(0.001)
    elif fault == "reset in the middle":
        await exchange.send_to_reader(reply.encode()[:half])
        exchange.reset()
    elif fault == "end in the middle":
        await exchange.send(reply.encode()[:half])
        exchange.close()
    elif fault == "too short":
        await exchange.send(reply.encode(more_bytes=5))
        exchange.close()
    elif fault == "twice":
        await exchange.send(reply.encode() * 2)
    elif fault == "cut json":
        await exchange.send(replace(reply, body=reply.body[: len(reply.body) // 2]).encode())
    elif fault == "corrupted":
        middle = len(reply.body) // 2
        await exchange.send(replace(reply, body=reply.body[:middle] + b"\x00\xff" + reply.body[middle + 2 :]).encode())
    elif fault == "page":
        await exchange.send(text(200, "<html>It works</html>", "text/html").encode())
    elif fault == "other json":
        await exchange.send(text(200, '{"status":"ok"}').encode())
    elif fault == "answer of another":
        assert proxy.last is not None, "no answer was sent before"
        await exchange.send(proxy.last.encode())
    else:
        assert fault == "wrong", f"the fault is {fault!r}"
        await exchange.send(replace(reply, body=change(reply.body)).encode())


@asynccontextmanager
async def open_proxy(
    upstream: str, choose: Callable[[loopback.Exchange], str | None], change: Callable[[bytes], bytes]
) -> AsyncGenerator[FaultyProxy]:
    """Forward to the server at `upstream`.

    Args:
        choose: the fault for a request; "" = none, None = none, and its answer is not to be sent to another request.
        change: see damage.
    """
    proxy = FaultyProxy()
    # keeps the port while nobody listens on it: connections are then refused, and no other socket gets it
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        proxy.url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=upstream, timeout=60.0, trust_env=False) as client, trio.open_nursery() as nursery:

            async def answer(exchange: loopback.Exchange) -> None:
                async def forward() -> Reply:
                    headers = {"Content-Type": exchange.headers.get("content-type", "application/json")}
                    found = await client.request(exchange.method, exchange.target, content=exchange.body, headers=headers)
                    return Reply(found.status_code, found.headers.get("content-type", ""), found.content)

                fault = choose(exchange)
                if fault:
                    proxy.hits[fault] = proxy.hits.get(fault, 0) + 1
                    return await damage(proxy, exchange, fault, forward, change)
                reply = await forward()
                if fault is not None:
                    proxy.last = reply
                return await exchange.send(reply.encode())

            async def listen() -> None:
                while True:
                    sock = trio.socket.socket()
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    await sock.bind(("127.0.0.1", port))
                    sock.listen(1024)
                    with trio.CancelScope() as proxy.accepting:
                        handler = partial(loopback._serve_connection, proxy.served, answer, None)
                        await trio.serve_listeners(handler, [trio.SocketListener(sock)], handler_nursery=nursery)
                    proxy.refusing.set()
                    await trio.sleep(REFUSED_S)

            nursery.start_soon(listen)
            yield proxy
            nursery.cancel_scope.cancel()

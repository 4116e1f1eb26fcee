"""An HTTP/1.1 server on a loopback socket whose answers are written byte by byte, so that they can be wrong in any way."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import ssl
import struct
import termios
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import trio
import trio.testing


@dataclass(frozen=True)
class Exchange:
    """A request as it came, and the connection to answer on."""

    stream: trio.abc.Stream
    sock: trio.socket.SocketType
    connection: int  # 0 for the first that the server accepted
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def send_to_reader(self, data: bytes) -> None:
        """Send, and return when a client in this event loop, if it reads, has read it and waits for more."""
        await self.send(data)
        await settle(lambda: has_arrived(self.sock))
        await trio.testing.wait_all_tasks_blocked()

    async def answer(self, body: bytes = b"{}", status: int = 200, headers: tuple[str, ...] = ()) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]
        await self.send("\r\n".join(lines).encode() + body)

    def reset(self) -> None:
        """Close so that the client gets a reset instead of an end."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    async def wait_hung_up(self) -> None:
        """Wait until the client closes."""
        while await self.stream.receive_some():
            pass


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass
class LoopbackServer:
    """The server as a test sees it."""

    url: str = ""
    port: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0  # connections that are open now
    num_hung_up: int = 0  # exchanges that the client left before the answer was complete


@asynccontextmanager
async def serve(handler: Handler, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> AsyncGenerator[LoopbackServer]:
    """Answer every request by `handler`. After it a connection is used again, unless it closed it or the client does."""
    server = LoopbackServer()
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host=host, backlog=4096)
        server.port = listeners[0].socket.getsockname()[1]
        scheme, name = "https" if context else "http", f"[{host}]" if ":" in host else host
        server.url = f"{scheme}://{name}:{server.port}"
        nursery.start_soon(partial(trio.serve_listeners, partial(_serve_connection, server, handler, context), listeners))
        yield server
        nursery.cancel_scope.cancel()


async def _serve_connection(server: LoopbackServer, handler: Handler, context: ssl.SSLContext | None, raw: trio.SocketStream) -> None:
    connection = server.num_connections
    server.num_connections += 1
    server.num_open += 1
    stream: Any = trio.SSLStream(raw, context, server_side=True, https_compatible=True) if context else raw
    leftover = b""
    try:
        while True:
            http = h11.Connection(h11.SERVER)
            if leftover:  # nothing at all would mean the end
                http.receive_data(leftover)
            request, body = None, bytearray()
            while type(event := http.next_event()) is not h11.EndOfMessage:
                if event is h11.NEED_DATA:
                    data = await stream.receive_some()
                    if not data and request is None:
                        return
                    http.receive_data(data)
                elif type(event) is h11.Request:
                    request = event
                elif type(event) is h11.Data:
                    body += event.data
                else:
                    return
            assert request is not None
            leftover = http.trailing_data[0]
            headers = {name.decode(): value.decode() for name, value in request.headers}
            exchange = Exchange(stream, raw.socket, connection, request.method.decode(), request.target.decode(), headers, bytes(body))
            server.exchanges.append(exchange)
            try:
                await handler(exchange)
            except trio.BrokenResourceError:
                server.num_hung_up += 1
                return
            if raw.socket.fileno() < 0 or headers.get("connection") == "close":
                return
    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
        return  # a client that goes away in the middle is what many of these tests are about
    finally:
        server.num_open -= 1
        raw.socket.close()


def count_open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/dev/fd"))


def has_arrived(sock: trio.socket.SocketType) -> bool:
    """Return whether the other end's system has received all bytes, or has closed the connection."""
    (num_unacknowledged,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    hung_up = select.poll()
    hung_up.register(sock.fileno(), select.POLLRDHUP)
    return num_unacknowledged == 0 or bool(hung_up.poll(0))


async def settle(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until something that the other side does has been done."""
    with trio.fail_after(timeout_s):
        for _ in range(100):
            if condition():
                return
            await trio.lowlevel.checkpoint()
        while not condition():
            await trio.sleep(0.002)

"""A small HTTP/1.1 server on a loopback socket under trio: requests in, responses or event streams out, and faults on demand.

Each connection is a task of the server's nursery and each request a task of its connection. A client that hangs up cancels its request.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import trio

from rollouts.errors import RolloutsError, raise_single_errors
from rollouts.gateway.http.heads import Head
from rollouts.gateway.http.wire import CLIENT_HAS_LEFT, Wire, open_wire

_MAX_BODY_BYTES = 2**40  # weights are sent in bodies
_LOOK_S = 0.002


@dataclass(frozen=True)
class Request:
    """One request as received."""

    method: str
    path: str  # without the query
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    body: bytes = b""

    def json(self) -> Any:
        """Return the body as JSON. Raises json.JSONDecodeError if it is not JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Response:
    """One complete response."""

    status: int
    body: bytes = b""
    content_type: str | None = "application/json"
    hang_up: bool = False  # close the connection after the answer, unannounced


@dataclass(frozen=True)
class EventStream:
    """Server-sent events: produce(send) runs until all are sent; each string given to send becomes one `data:` line."""

    produce: Callable[[Callable[[str], Awaitable[None]]], Awaitable[None]]


Answer: TypeAlias = Response | EventStream
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


class ServerDied(RolloutsError):
    """Raised by a handler to simulate the end of the server's process: all connections drop, and new ones are refused."""


def dump_json(value: Any) -> str:
    """Return a value as JSON without spaces, as the real servers write it."""
    return json.dumps(value, separators=(",", ":"))


def json_response(body: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(status, dump_json(body).encode())


@dataclass(frozen=True)
class Fault:
    """A fault that hits some requests of a fake server, instead of or before the answer.

    "delay": handle the request delay_s later. "hang": never answer; the request stays open until the client disconnects.
    "status": answer with `status` and `body`. "drop": close the connection without an answer. "cut": close it in the middle of the
    body of the real answer. "garbage": send bytes that are not HTTP. "rewrite": apply `rewrite` to the JSON of the real answer.
    """

    kind: Literal["delay", "hang", "status", "drop", "cut", "garbage", "rewrite"]
    path: str | None = None  # path of the requests to hit; None = all
    after: int = 0  # number of requests of the path to serve well first, counted from when the fault is set
    times: int | None = 1  # number of requests to hit; None = all that follow
    delay_s: float = 0.0  # seconds to wait before a fault of any kind takes effect
    status: int = 500
    body: str = "Internal Server Error"  # body for "status"
    content_type: str = "text/plain; charset=utf-8"  # content type of `body`
    rewrite: Callable[[Any], Any] = lambda answer: answer  # rewrites the JSON for "rewrite"; answers in one piece only


class LoopbackServer:
    """Serve a handler on 127.0.0.1. Use it as an async context manager; leaving the block cancels requests in flight."""

    def __init__(
        self,
        handler: Handler,
        *,
        detached: Callable[[Request], bool] = lambda request: False,
        faults: Sequence[Fault] = (),
        keep_alive_s: float = 5.0,
        port: int = 0,
        max_received: int = 100_000,
    ) -> None:
        """
        Args:
            handler: Request -> Response or EventStream; may raise ServerDied.
            detached: whether a request continues after its client has disconnected.
            faults: see add_fault.
            keep_alive_s: seconds after which an idle connection is closed, as the real servers' 5.
            port: 0 = any free one.
            max_received: number of the newest requests that `received` keeps.
        """
        self.received: deque[Request] = deque(maxlen=max_received)
        self._handler = handler
        self._detached = detached
        self._faults: list[_ActiveFault] = [_ActiveFault(fault) for fault in faults]
        self._keep_alive_s = keep_alive_s
        self._port = port
        self._open: set[_Connection] = set()
        self._listeners: list[trio.SocketListener] = []
        self._accepting = trio.CancelScope()
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        assert self._port, "the server has no port yet: use its url inside its `async with` block"
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_alive(self) -> bool:
        """Whether the server accepts connections."""
        return bool(self._listeners)

    @property
    def num_connections(self) -> int:
        """Number of open connections, idle ones included."""
        return len(self._open)

    def count(self, path: str) -> int:
        """Return the number of requests received for a path."""
        return Counter(request.path for request in self.received)[path]

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until a condition on the server's state holds, checked every few milliseconds.

        Raises: trio.TooSlowError after timeout_s.
        """
        with trio.fail_after(timeout_s):
            while not condition():
                await trio.sleep(_LOOK_S)

    def add_fault(self, fault: Fault) -> None:
        """Activate a fault from now on. If several faults apply, the one added first takes effect."""
        self._faults.append(_ActiveFault(fault))

    def clear_faults(self) -> None:
        """Remove all faults. Requests that hang continue to hang."""
        self._faults.clear()

    def drop_connections(self) -> None:
        """Close every connection at once, those of requests in flight included; new ones are accepted."""
        for connection in tuple(self._open):
            connection.drop()

    def die(self) -> None:
        """Simulate the end of a server's process: every connection drops and new ones are refused."""
        self._accepting.cancel()
        for listener in self._listeners:
            listener.socket.close()
        self._listeners.clear()
        self.drop_connections()

    async def die_after(self, seconds: float) -> None:
        """Call die() after a delay; returns at once."""
        self._nursery.start_soon(self._sleep_and_die, seconds)
        await trio.lowlevel.checkpoint()

    async def revive(self) -> None:
        """Accept connections again, on the same port."""
        assert not self._listeners, f"{self.url} is alive"
        await self._listen()

    async def __aenter__(self) -> LoopbackServer:
        self._nursery = await self._stack.enter_async_context(_open_cancelled_nursery())
        await self._listen()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        self.die()
        with raise_single_errors():
            return await self._stack.__aexit__(kind, error, trace)

    async def _listen(self) -> None:
        self._listeners = await trio.open_tcp_listeners(self._port, host="127.0.0.1", backlog=4096)
        self._port = self._listeners[0].socket.getsockname()[1]
        self._accepting = trio.CancelScope()
        self._nursery.start_soon(self._accept, self._listeners[0], self._accepting)

    async def _sleep_and_die(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self.die()

    async def _accept(self, listener: trio.SocketListener, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                try:
                    stream = await listener.accept()
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    return
                self._nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            async with open_wire(stream, max_body_bytes=_MAX_BODY_BYTES, idle_s=self._keep_alive_s) as wire:
                connection = _Connection(wire)
                self._open.add(connection)
                try:
                    with connection.scope:
                        while not connection.is_over and (request := await connection.receive()) is not None:
                            self.received.append(request)
                            await self._answer(connection, request)
                finally:
                    self._open.discard(connection)
        except CLIENT_HAS_LEFT:
            pass  # the client's connection broke or did not carry HTTP: nobody to answer
        except ServerDied:
            self.die()

    async def _answer(self, connection: _Connection, request: Request) -> None:
        fault = self._take_fault(request.path)
        with connection.cancel_when_client_leaves():
            if fault is not None:
                await trio.sleep(fault.delay_s)
                if fault.kind == "hang":
                    await trio.sleep_forever()
                elif fault.kind == "drop":
                    return connection.drop()
                elif fault.kind == "garbage":
                    return await connection.send_garbage()
                elif fault.kind == "status":
                    return await connection.send(Response(fault.status, fault.body.encode(), fault.content_type))
            answer = await (self._handle_detached(request) if self._detached(request) else self._handler(request))
            if isinstance(answer, Response):
                if fault is not None and fault.kind == "rewrite":
                    answer = replace(answer, body=json.dumps(fault.rewrite(json.loads(answer.body))).encode())
                await connection.send(answer, cut=fault is not None and fault.kind == "cut")
            else:
                await connection.send_events(answer, cut=fault is not None and fault.kind == "cut")
        return None

    async def _handle_detached(self, request: Request) -> Answer:
        answers: list[Answer] = []
        done = trio.Event()

        async def handle() -> None:
            try:
                answers.append(await self._handler(request))
            except ServerDied:
                self.die()
            finally:
                done.set()

        self._nursery.start_soon(handle)
        await done.wait()
        if not answers:
            raise ServerDied(f"{request.method} {request.path}")
        return answers[0]

    def _take_fault(self, path: str) -> Fault | None:
        hits = [active.hit(path) for active in self._faults]
        return next((active.fault for active, is_hit in zip(self._faults, hits, strict=True) if is_hit), None)


class _ActiveFault:
    """A fault and the number of requests of its path so far."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._num_seen = 0

    def hit(self, path: str) -> bool:
        fault = self.fault
        if fault.path is not None and fault.path != path:
            return False
        self._num_seen += 1
        number = self._num_seen - fault.after
        return number >= 1 and (fault.times is None or number <= fault.times)


class _Connection:
    """One connection, whose answers can be spoilt."""

    def __init__(self, wire: Wire) -> None:
        self.scope = trio.CancelScope()
        self._wire = wire
        self.cancel_when_client_leaves = wire.cancel_when_client_leaves

    @property
    def is_over(self) -> bool:
        """Whether no further request will come."""
        return self._wire.is_over

    async def receive(self) -> Request | None:
        """Return the next request; None if the client has left or sends nothing for too long."""
        heads: list[Head] = []
        body = await self._wire.receive(heads.append)
        return None if body is None else _create_request(heads[0], body)

    async def send(self, response: Response, *, cut: bool = False) -> None:
        headers = [("content-length", str(len(response.body)))]
        if response.content_type is not None:
            headers.append(("content-type", response.content_type))
        head = self._wire.write_head(response.status, [*headers, ("server", "uvicorn")])
        if cut:
            await self._wire.send_bytes(head + response.body[: len(response.body) // 2])
            return self.drop()
        await self._wire.send_bytes(head + self._wire.write_data(response.body) + self._wire.write_end())
        self._wire.is_over = self._wire.is_over or response.hang_up
        return None

    async def send_events(self, stream: EventStream, *, cut: bool = False) -> None:
        await self._wire.send_bytes(self._wire.write_head(200, [("content-type", "text/event-stream; charset=utf-8")]))
        lock = trio.Lock()  # several samples may stream at the same time
        num_sent = 0

        async def send(event: str) -> None:
            nonlocal num_sent
            async with lock:
                await self._wire.send_bytes(self._wire.write_data(f"data: {event}\n\n".encode()))
            num_sent += 1
            if cut and num_sent == 2:
                self.drop()
                await trio.lowlevel.checkpoint()

        await stream.produce(send)
        await self._wire.send_bytes(self._wire.write_end())

    async def send_garbage(self) -> None:
        await self._wire.send_bytes(b"this is not HTTP\r\n\r\n")
        self.drop()

    def drop(self) -> None:
        """Stop requests in flight and close."""
        self._wire.is_over = True
        self.scope.cancel()
        self._wire.close()


def _create_request(head: Head, body: bytes) -> Request:
    target = urlsplit(head.target)
    return Request(head.method, target.path, dict(parse_qsl(target.query)), head.headers, body)


@asynccontextmanager
async def _open_cancelled_nursery() -> AsyncGenerator[trio.Nursery]:
    """Open a nursery whose tasks are cancelled when the block ends."""
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()

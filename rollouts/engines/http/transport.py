"""An httpx transport with a cost per request that does not grow with the number of open connections.

httpx's own pool searches all of its connections for every request, and loses a place for good when a request is cancelled while it waits
for one. Here the idle connections of an origin lie on a stack, a trio.CapacityLimiter counts places, and a connection without a clean end
of its exchange is closed, never used again. HTTP/1.1 only, over trio, with TLS, without proxies.

    async with httpx.AsyncClient(transport=PooledTransport(max_connections=2000), trust_env=False) as client: ...
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator, Callable, Mapping

import httpx
import trio

from rollouts.engines.http.connection import Connection, KeptConnectionLost, Origin, limit_time, open_connection
from rollouts.engines.http.messages import AnswerHead

REPEATABLE_METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE")  # RFC 9110 section 9.2.2


class PooledTransport(httpx.AsyncBaseTransport):
    """Keep-alive connections to any number of origins.

    Cancelling a request closes its connection, which tells the server to stop working on it. Two request extensions are supported besides
    httpx's "timeout": "fresh_connection" (True: not a kept one) and "repeatable" (send the request again if a kept connection ends after
    all of it was sent and before an answer; by default if the method allows it). A request that the server cannot have read is always sent
    again, once.
    """

    def __init__(
        self,
        *,
        max_connections: int = 4096,
        idle_expiry_s: float = 4.0,
        verify: ssl.SSLContext | bool = True,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """
        Args:
            max_connections: requests in flight at the same time; more wait for a place, for at most the pool timeout of the request.
            idle_expiry_s: seconds after which an idle connection is closed instead of used. Less than the server's keep-alive time, which
                is 5 s with uvicorn, so that the server closes none in the moment of its use.
            verify: verification of https certificates: True, False, or a context of your own.
            clock: seconds.
        """
        assert max_connections >= 1, f"max_connections is {max_connections}, expected at least 1"
        self._limiter = trio.CapacityLimiter(max_connections)
        self._open: set[Connection] = set()
        self._connecting: set[trio.CancelScope] = set()
        self._idle: dict[Origin, list[Connection]] = {}  # by origin, the one used last at the end
        self._idle_expiry_s = idle_expiry_s
        self._verify = verify
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        self._is_closed = False

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose response has not come whole, been read to its end or closed."""
        return self._limiter.borrowed_tokens

    @property
    def num_idle(self) -> int:
        """Number of open connections that wait for their next request."""
        return sum(map(len, self._idle.values()))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request and return its response, with the body still to be read.

        Raises: httpx.PoolTimeout, ConnectTimeout, ConnectError, WriteTimeout, WriteError, ReadTimeout, ReadError, RemoteProtocolError,
            LocalProtocolError, as httpx's own transport; CloseError if the transport is closed meanwhile.
        """
        body = request.read() if isinstance(request.stream, httpx.ByteStream) else await request.aread()
        timeouts: Mapping[str, float | None] = request.extensions.get("timeout", {})
        holder = object()  # a place belongs to the request, not to the task: another task may close the response
        await trio.lowlevel.checkpoint_if_cancelled()  # before a kept connection is taken, which would be lost
        try:  # no further checkpoint: if many answers come at once, all would be parsed before the first new request is sent
            self._limiter.acquire_on_behalf_of_nowait(holder)
        except trio.WouldBlock:
            with limit_time(timeouts.get("pool"), httpx.PoolTimeout, request, "no free connection"):
                await self._limiter.acquire_on_behalf_of(holder)
        try:
            connection, head = await self._exchange(request, body, timeouts.get("connect"))
        except BaseException:
            self._limiter.release_on_behalf_of(holder)
            raise
        stream: httpx.AsyncByteStream
        body_at_hand = connection.take_whole_body()
        if body_at_hand is None:
            stream = _ResponseStream(connection, request, timeouts.get("read"), lambda: self._give_back(connection, holder))
        else:
            stream = httpx.ByteStream(body_at_hand)
            self._give_back(connection, holder)
        return httpx.Response(
            status_code=head.status,
            headers=head.fields,
            stream=stream,
            extensions={"http_version": b"HTTP/" + head.version, "reason_phrase": head.reason},
        )

    async def aclose(self) -> None:
        """Close all connections. Requests in flight fail."""
        self._is_closed = True
        self._idle.clear()
        self._limiter.total_tokens = math.inf  # tasks that wait for a place find the transport closed
        for scope in self._connecting:
            scope.cancel()
        for connection in tuple(self._open):
            self._drop(connection)
        await trio.lowlevel.checkpoint()

    async def _exchange(self, request: httpx.Request, body: bytes, connect_timeout_s: float | None) -> tuple[Connection, AnswerHead]:
        connection = None if request.extensions.get("fresh_connection") else self._take_idle(_origin(request.url))
        if connection is not None:
            try:
                return connection, await self._begin(connection, request, body)
            except KeptConnectionLost as error:
                if not (error.is_unread or request.extensions.get("repeatable", request.method in REPEATABLE_METHODS)):
                    raise
        connection = await self._connect(request, connect_timeout_s)
        return connection, await self._begin(connection, request, body)

    async def _begin(self, connection: Connection, request: httpx.Request, body: bytes) -> AnswerHead:
        try:
            return await connection.begin(request, body)
        except BaseException:
            self._drop(connection)
            raise

    def _give_back(self, connection: Connection, holder: object) -> None:
        self._limiter.release_on_behalf_of(holder)
        if connection.is_reusable and not self._is_closed:
            connection.idle_since = self._clock()
            self._idle.setdefault(connection.origin, []).append(connection)
        else:
            self._drop(connection)

    def _take_idle(self, origin: Origin) -> Connection | None:
        """Return the connection that was used last, if one is alive. Older ones that have expired are closed."""
        stack = self._idle.get(origin)
        if not stack:
            return None
        oldest_allowed = self._clock() - self._idle_expiry_s
        if stack[0].idle_since < oldest_allowed:
            num_expired = sum(connection.idle_since < oldest_allowed for connection in stack)
            for connection in stack[:num_expired]:
                self._drop(connection)
            del stack[:num_expired]
        while stack:
            connection = stack.pop()
            if not connection.has_input():
                return connection
            self._drop(connection)
        return None

    async def _connect(self, request: httpx.Request, timeout_s: float | None) -> Connection:
        origin = _origin(request.url)
        context = None
        if origin[0] == "https":
            context = self._context = self._context or self._create_context()
        connection = None
        with trio.CancelScope() as scope:
            self._connecting.add(scope)
            try:
                if not self._is_closed:
                    connection = await open_connection(origin, request, timeout_s, context)
            finally:
                self._connecting.discard(scope)
        if connection is None or self._is_closed:
            if connection is not None:
                connection.close_now()
            raise httpx.CloseError("the transport is closed: send requests inside its `async with` block", request=request)
        self._open.add(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close_now()

    def _create_context(self) -> ssl.SSLContext:
        return self._verify if isinstance(self._verify, ssl.SSLContext) else httpx.create_ssl_context(verify=self._verify, trust_env=False)


class _ResponseStream(httpx.AsyncByteStream):
    """Body of a response. Returns the connection and the place once: after the last byte, an error, or aclose."""

    def __init__(self, connection: Connection, request: httpx.Request, timeout_s: float | None, give_back: Callable[[], None]) -> None:
        self._connection, self._request, self._timeout_s = connection, request, timeout_s
        self._give_back: Callable[[], None] | None = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._give_back is None:
            raise StopAsyncIteration
        chunk = b""
        try:
            chunk = await self._connection.read_chunk(self._request, self._timeout_s)
        finally:
            if not chunk:
                self._finish()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Return the connection; called by httpx after the last byte, and by callers that do not want the rest."""
        self._finish()

    def _finish(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()


def _origin(url: httpx.URL) -> Origin:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)

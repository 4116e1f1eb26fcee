"""One HTTP/1.1 connection over a trio stream, one request at a time. Usual messages are read by messages.py, all others by h11.

Much of this file answers one question: can the server have read a request whose answer never came? Only if it cannot, the request may be
sent again. A server that closes a connection with unread input, or gets input on a connection that it has closed, resets it; a server
that read everything and then went away just closes it.
"""

from __future__ import annotations

import errno
import select
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager

import h11
import httpx
import trio

from rollouts.engines.http.messages import AnswerHead, encode_usual_request, parse_usual_answer

READ_SIZE = 65536
MAX_HEAD_BYTES = 65536
ROUND_TRIP_S = 0.5  # seconds to wait, after a request that came too late, for the reset that reports it
RESET_S = 5.0  # seconds after which a reset is no answer to the request; more than a round trip, because this process may have been held up

Origin = tuple[str, str, int]
"""(scheme, host, port)."""


class ServerHungUp(httpx.RemoteProtocolError):
    """The server closed the connection before its answer was complete."""


class KeptConnectionLost(ServerHungUp):
    """A connection that had served before ended before the first byte of this answer."""

    def __init__(self, message: str, *, request: httpx.Request, is_unread: bool) -> None:
        """
        Args:
            is_unread: the server has certainly not read the whole request; it closed the connection while that was on its way.
        """
        super().__init__(message, request=request)
        self.is_unread = is_unread


async def open_connection(origin: Origin, request: httpx.Request, timeout_s: float | None, context: ssl.SSLContext | None) -> Connection:
    """Connect, over TLS if a context is given.

    Raises: httpx.ConnectError with the system's reasons, httpx.ConnectTimeout.
    """
    _, host, port = origin
    with limit_time(timeout_s, httpx.ConnectTimeout, request, f"no connection to {host}:{port}"):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise httpx.ConnectError(f"cannot connect to {host}:{port}: {_list_reasons(error)}", request=request) from error
        except UnicodeError as error:  # from the system's resolver, for instance for two dots in a row
            raise httpx.ConnectError(f"cannot connect to {host}:{port}: it is no name of a host ({error})", request=request) from error
        if context is None:
            return Connection(stream, stream.socket, origin)
        is_secure = False
        try:
            secure = trio.SSLStream(stream, context, server_hostname=host, https_compatible=True)
            await secure.do_handshake()
            is_secure = True
        except trio.BrokenResourceError as error:
            raise httpx.ConnectError(f"no TLS with {host}:{port}: {error.__cause__ or error}", request=request) from error
        finally:
            if not is_secure:
                stream.socket.close()
        return Connection(secure, stream.socket, origin)


class Connection:
    """A connection and its HTTP/1.1 state."""

    def __init__(self, stream: trio.abc.Stream, sock: trio.socket.SocketType, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0  # seconds on the clock of the pool
        self._stream = stream
        self._socket = sock
        self._http: h11.Connection | None = None  # state of an exchange that is not usual
        self._closes = False  # whether a side closes the connection after the present exchange
        self._rest = b""  # bytes that came with the head of a usual answer
        self._num_missing = 0  # bytes of its body that have not been returned
        self._num_body_bytes = 0
        self._is_kept = False  # whether it has served a request
        self._sent_at = 0.0
        self._has_answer = False  # whether a byte of the present answer has come
        self._has_ended = False  # whether the server has closed its side
        self._input = select.poll()
        self._input.register(sock.fileno(), select.POLLIN)
        _watch_for_silence(sock)

    def has_input(self) -> bool:
        """Whether there is input; between two requests that is a hang-up or garbage, and the connection is unusable."""
        return bool(self._input.poll(0))

    @property
    def is_reusable(self) -> bool:
        """Whether both sides have finished the exchange, neither wants to close, and nothing came after the end."""
        http = self._http
        if http is None:
            return not (self._closes or self._num_missing or self._rest)
        return http.our_state is h11.DONE and http.their_state is h11.DONE and not http.trailing_data[0]

    def close_now(self) -> None:
        """Close without waiting for anything. A task that still uses the connection gets httpx.CloseError."""
        self._socket.close()

    async def begin(self, request: httpx.Request, body: bytes) -> AnswerHead:
        """Send the request and read the head of the response. After an error the connection must be closed.

        Raises: httpx.WriteError if the server closed before it had the request, KeptConnectionLost, ServerHungUp, httpx.ReadError,
            RemoteProtocolError, LocalProtocolError, CloseError, and the timeouts that the request sets for writing and reading.
        """
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        assert not self._is_kept or self.is_reusable, "a connection was used again before the end of its answer"
        self._has_answer = False
        self._num_missing = 1  # not reusable before the end of the answer
        data = self._encode(request, body)
        write_s, read_s = timeouts.get("write"), timeouts.get("read")
        if write_s is None:
            is_sent = await self._send(request, data)
        else:
            is_sent = False
            with limit_time(write_s, httpx.WriteTimeout, request, "the request could not be written"):
                is_sent = await self._send(request, data)
        self._sent_at = trio.current_time()
        if read_s is None:
            return await self._read_head(request, body, is_sent)
        with limit_time(read_s, httpx.ReadTimeout, request, "no response"):
            return await self._read_head(request, body, is_sent)
        raise AssertionError("limit_time raises when the time is over")

    def take_whole_body(self) -> bytes | None:
        """Return the body if all of it came with the head; the exchange is then over. Otherwise None: read_chunk returns it."""
        if self._http is not None or self._num_missing > len(self._rest):
            return None
        return self._take_rest()

    async def read_chunk(self, request: httpx.Request, timeout_s: float | None) -> bytes:
        """Return the next bytes of the body, b"" at its end. Raises as begin."""
        if self._http is None and (self._rest or not self._num_missing):
            return self._take_rest() if self._num_missing else b""
        with limit_time(timeout_s, httpx.ReadTimeout, request, "the response stopped"):
            if self._http is not None:
                event = await self._next_event(self._http, request)
                return bytes(event.data) if type(event) is h11.Data else b""
            self._rest = await self._receive(request)
            if not self._rest:
                counts = f"received {self._num_body_bytes - self._num_missing} bytes, expected {self._num_body_bytes}"
                raise _create_hang_up(f"peer closed connection without sending complete message body ({counts})", request)
        return self._take_rest()

    def _take_rest(self) -> bytes:
        """Return the bytes at hand of the body. Those that came after its end stay, and make the connection unusable."""
        data, self._rest = self._rest[: self._num_missing], self._rest[self._num_missing :]
        self._num_missing -= len(data)
        return data

    def _encode(self, request: httpx.Request, body: bytes) -> bytes:
        method, target, fields = request.method.encode(), request.url.raw_path, request.headers.raw
        usual = encode_usual_request(method, target, fields, body)
        if usual is not None:
            self._http = None
            data, self._closes = usual
            return data
        self._http, data = _encode_with_h11(request, body)
        return data

    async def _send(self, request: httpx.Request, data: bytes) -> bool:
        """Send bytes. Returns False if the server did not take them; it may have refused a request before its end, with a reason."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError:
            return False
        except trio.ClosedResourceError as error:
            raise httpx.CloseError("the connection was closed on this side", request=request) from error
        return True

    async def _read_head(self, request: httpx.Request, body: bytes, is_sent: bool) -> AnswerHead:
        if self._http is None:
            data = await self._receive(request, is_sent)
            usual = parse_usual_answer(data)
            if usual is not None:
                self._is_kept = True
                self._closes = self._closes or usual.closes
                self._rest = data[usual.num_head_bytes :]
                self._num_missing = self._num_body_bytes = usual.num_body_bytes
                return usual.head
            self._http, _ = _encode_with_h11(request, body)
            self._http.receive_data(data)
        while True:
            event = await self._next_event(self._http, request, is_sent)
            if type(event) is h11.Response:
                self._is_kept = True
                return AnswerHead(event.status_code, bytes(event.reason), event.headers.raw_items(), bytes(event.http_version))
            assert type(event) is h11.InformationalResponse, f"{event!r} came before a response"

    async def _next_event(self, http: h11.Connection, request: httpx.Request, is_sent: bool = True) -> h11.Event:
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                if not self._has_ended:
                    raise httpx.RemoteProtocolError(str(error), request=request) from error
                raise _create_hang_up(str(error), request) from error
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type), f"h11 gave {event!r} in the middle of an exchange"
                return event
            http.receive_data(await self._receive(request, is_sent))

    async def _receive(self, request: httpx.Request, is_sent: bool = True) -> bytes:
        """Return the next bytes from the server; b"" if it has closed its side in the middle of an answer."""
        try:
            data = bytes(await self._stream.receive_some(READ_SIZE))
        except trio.BrokenResourceError as error:
            if self._has_answer:
                raise httpx.ReadError(f"the connection broke while the answer was read: {error}", request=request) from error
            is_reset = isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)
            raise self._describe_loss(request, is_sent, is_reset and trio.current_time() - self._sent_at <= RESET_S) from error
        except trio.ClosedResourceError as error:
            raise httpx.CloseError("the connection was closed on this side", request=request) from error
        if not data and not self._has_answer:
            raise self._describe_loss(request, is_sent, self._is_kept and is_sent and await self._is_reset_after_close())
        self._has_answer = True
        self._has_ended = not data
        return data

    def _describe_loss(self, request: httpx.Request, is_sent: bool, is_reset: bool) -> httpx.TransportError:
        """Return the error for an answer without a single byte."""
        if self._is_kept:
            return KeptConnectionLost(
                "the server closed a kept connection without an answer", request=request, is_unread=is_reset or not is_sent
            )
        if not is_sent:
            return httpx.WriteError("the server closed the connection before it had read the request", request=request)
        return ServerHungUp("the server closed the connection without an answer", request=request)

    async def _is_reset_after_close(self) -> bool:
        """Whether the server's close is followed by a reset. The stream shows the close alone, even if both have come."""
        is_reset = False
        with trio.move_on_after(ROUND_TRIP_S):
            while not is_reset and self._socket.fileno() >= 0:  # negative after close_now
                is_reset = self._take_error()
                await trio.sleep(0.01)
        return is_reset or self._take_error()  # a reset may have come while this process was held up

    def _take_error(self) -> bool:
        """Whether the system has recorded an error of the connection since the last call."""
        return self._socket.fileno() >= 0 and bool(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _encode_with_h11(request: httpx.Request, body: bytes) -> tuple[h11.Connection, bytes]:
    """Return the state of an exchange whose request is sent, and the bytes of the request."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        head = http.send(h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw))
        data = http.send(h11.Data(data=body)) if body else b""
        end = http.send(h11.EndOfMessage())
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error), request=request) from error
    return http, b"".join((head or b"", data or b"", end or b""))


def _create_hang_up(reason: str, request: httpx.Request) -> ServerHungUp:
    return ServerHungUp(f"the server closed the connection in the middle of its answer ({reason})", request=request)


@contextmanager
def limit_time(seconds: float | None, timeout: type[httpx.TimeoutException], request: httpx.Request, what: str) -> Generator[None]:
    """Cancel the block after that many seconds and raise httpx's timeout."""
    if seconds is None:
        yield
        return
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise timeout(f"{what} within {seconds:g} s ({request.method} {request.url})", request=request)


def _watch_for_silence(sock: trio.socket.SocketType) -> None:
    """Make the system detect within about two minutes that the other machine is gone; keep routers from forgetting the connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):  # Linux's names; others keep defaults
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _list_reasons(error: OSError) -> str:
    """Return the system's reasons: for a connection tried at several addresses each different one, once."""
    causes = error.__cause__.exceptions if isinstance(error.__cause__, ExceptionGroup) else (error,)
    reasons = ", ".join(dict.fromkeys(map(str, causes)))
    if any(isinstance(cause, OSError) and cause.errno == errno.EMFILE for cause in causes):
        return f"{reasons}: raise the limit of this process (ulimit -n) or send fewer requests at a time"
    return reasons

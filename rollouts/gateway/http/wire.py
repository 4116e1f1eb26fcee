"""The wire of a server: HTTP/1.1 on one connection under trio. A client that leaves cancels the block that answers it.

Common requests are read, and their answers written, by a few lines of this package; h11 has all others. One task for each connection reads
what its client sends, so that it sees the client leave at any time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager

import h11
import trio

from rollouts.errors import raise_single_errors
from rollouts.gateway.http.heads import Head, read_common_head

CLIENT_HAS_LEFT = (h11.LocalProtocolError, h11.RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Errors of a connection whose client has left, or speaks no HTTP."""

_READ_SIZE = 65536
_MAX_HEAD_BYTES = 65536
_BODY_S = 60.0  # a connection is closed whose request comes this slowly
_LINGER_S = 1.0  # time for the rest of a request that was refused before its end


class BodyTooLarge(Exception):
    """A body is larger than the wire takes."""


@asynccontextmanager
async def open_wire(stream: trio.SocketStream, *, max_body_bytes: int, idle_s: float) -> AsyncGenerator[Wire]:
    """Read from a connection for the block, and close it at its end.

    Args:
        max_body_bytes: largest body, and most bytes that a client may send ahead of its answer.
        idle_s: seconds after which an idle connection is over.
    """
    wire = Wire(stream, max_body_bytes, idle_s)
    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wire.read)
                try:
                    yield wire
                finally:
                    nursery.cancel_scope.cancel()
    finally:
        wire.close()


class Wire:
    """A connection and its HTTP state. Made by open_wire."""

    def __init__(self, stream: trio.SocketStream, max_body_bytes: int, idle_s: float) -> None:
        self.is_over = False  # whether no further request will come
        self._stream, self._max_body_bytes, self._idle_s = stream, max_body_bytes, idle_s
        self._arrived: list[bytes] = []  # as read, and not looked at
        self._has_left = False
        self._news = trio.Event()  # set when bytes have arrived, or the client has left
        self._answering: trio.CancelScope | None = None
        self._num_ahead = 0  # bytes that came during the answer
        self._rest = b""  # begin of the next request
        self._http: h11.Connection | None = None  # state of a request that is no common one
        self._is_chunked = False  # whether the answer to a common request has no length

    async def read(self) -> None:
        """Read what the client sends until it leaves."""
        try:
            while data := await self._stream.receive_some(_READ_SIZE):
                self._arrived.append(data)
                self._news.set()
                self._num_ahead += len(data)
                if self._answering is not None and self._num_ahead > self._max_body_bytes:
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self._has_left = True
        self._news.set()
        if self._answering is not None:
            self.is_over = True
            self._answering.cancel()

    async def _take(self, timeout_s: float) -> bytes | None:
        """Return what has arrived, at least a byte; b"" if the client has left, None after timeout_s."""
        if not self._arrived and not self._has_left:
            self._news = trio.Event()
            with trio.move_on_after(timeout_s):
                await self._news.wait()
            if not self._news.is_set():
                return None
        data = b"".join(self._arrived)
        self._arrived.clear()
        return data

    @property
    def may_answer(self) -> bool:
        """Whether an answer can be sent now."""
        return self._http is None or self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def receive(self, on_head: Callable[[Head], None]) -> bytes | None:
        """Return the body of the next request; None if the client has left or sends nothing for too long.

        Args:
            on_head: called with the head as soon as it has arrived; its errors count before the body is read.

        Raises: h11.RemoteProtocolError for what is not HTTP; BodyTooLarge; those of `on_head`.
        """
        if self._http is not None:
            self._http.start_next_cycle()
            self._rest, self._http = self._http.trailing_data[0], None
        data = self._rest or await self._take(self._idle_s)
        if not data:
            return None
        self._rest = b""
        found = read_common_head(data)
        if found is None:
            return await self._receive_by_h11(data, on_head)
        head, begin = found
        self.is_over = True  # until all of it has come
        on_head(head)
        self._check_size(head.body_size)
        parts, missing = [data], begin + head.body_size - len(data)
        while missing > 0:
            more = await self._take(_BODY_S)
            if more is None:
                return None
            if not more:
                return await self._receive_by_h11(b"".join(parts), lambda head: None)  # its error says what is missing
            parts.append(more)
            missing -= len(more)
        self.is_over = False
        data, end = b"".join(parts) if len(parts) > 1 else data, begin + head.body_size
        self._rest = data[end:]
        return data[begin:end]

    async def _receive_by_h11(self, data: bytes, on_head: Callable[[Head], None]) -> bytes | None:
        """Receive a request whose first bytes are there. Arguments and errors: see receive."""
        self._http = http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        http.receive_data(data)
        has_head, body, size = False, list[bytes](), 0
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError:
                self.is_over = True
                raise
            if event is h11.NEED_DATA:
                if has_head and http.they_are_waiting_for_100_continue:
                    await self.send_bytes(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                more = await self._take(_BODY_S if has_head else self._idle_s)
                if more is None:
                    return None
                http.receive_data(more)
            elif isinstance(event, h11.Request):
                has_head, self.is_over = True, True  # until all of it has come
                head = _create_head(event)
                on_head(head)
                self._check_size(head.body_size)
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
                size += len(event.data)
                self._check_size(size)
            elif isinstance(event, h11.EndOfMessage):
                self.is_over = False
                return b"".join(body)
            else:
                return None

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise BodyTooLarge

    @contextmanager
    def cancel_when_client_leaves(self) -> Generator[None]:
        """Cancel the block if the connection closes; bytes that the client sends meanwhile are kept for its next request."""
        finished = False
        with trio.CancelScope() as scope:
            self._answering, self._num_ahead = scope, 0
            if self._has_left:
                self.is_over = True
                scope.cancel()
            try:
                yield
                finished = True
            finally:
                self._answering = None
                self.is_over = self.is_over or not finished

    def write_head(self, status: int, headers: Sequence[tuple[str, str]]) -> bytes:
        """Return the head of an answer, which then counts as sent. headers: without content-length the body is sent in chunks."""
        if self._http is not None:
            return self._http.send(h11.Response(status_code=status, headers=list(headers))) or b""
        self._is_chunked = all(name != "content-length" for name, _ in headers)
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        if self._is_chunked:
            lines.append("Transfer-Encoding: chunked\r\n")
        return f"HTTP/1.1 {status} \r\n{''.join(lines)}\r\n".encode("ascii")

    def write_data(self, data: bytes) -> bytes:
        """Return a part of an answer's body as it is sent."""
        if self._http is not None:
            return self._http.send(h11.Data(data=data)) or b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked and data else data

    def write_end(self) -> bytes:
        """Return the end of an answer: whether the connection goes on is clear now."""
        if self._http is None:
            return b"0\r\n\r\n" if self._is_chunked else b""
        end = self._http.send(h11.EndOfMessage()) or b""
        self.is_over = self.is_over or self._http.our_state is not h11.DONE
        return end

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are. Raises one of CLIENT_HAS_LEFT."""
        await self._stream.send_all(data)

    async def linger(self) -> None:
        """Wait a moment for the rest of a request that was refused before its end, which would reset the connection."""
        await self._stream.send_eof()
        with trio.move_on_after(_LINGER_S):
            while await self._take(_LINGER_S):
                pass

    def close(self) -> None:
        """Close the socket."""
        self._stream.socket.close()


def _create_head(request: h11.Request) -> Head:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
    return Head(request.method.decode("ascii"), request.target.decode("latin-1"), headers, int(headers.get("content-length", 0)))

"""The wire of a server: HTTP/1.1 on one connection under trio. A client that leaves cancels the block that answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import h11
import trio

from rollouts.errors import raise_single_errors

CLIENT_HAS_LEFT = (h11.LocalProtocolError, h11.RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Errors of a connection whose client has left, or speaks no HTTP."""

Event: TypeAlias = h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage

_READ_SIZE = 65536
_MAX_HEAD_BYTES = 65536
_BODY_S = 60.0  # a connection is closed whose request comes this slowly
_LINGER_S = 1.0  # time for the rest of a request that was refused before its end


class BodyTooLarge(Exception):
    """A body is larger than the wire takes."""


class Wire:
    """A connection and its HTTP state."""

    def __init__(self, stream: trio.SocketStream, *, max_body_bytes: int, idle_s: float) -> None:
        """
        Args:
            max_body_bytes: largest body, and most bytes that a client may send ahead of its answer.
            idle_s: seconds after which an idle connection is over.
        """
        self.is_over = False  # whether no further request will come
        self._stream, self._max_body_bytes, self._idle_s = stream, max_body_bytes, idle_s
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)

    @property
    def may_answer(self) -> bool:
        """Whether an answer can be sent now."""
        return self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    async def receive(self, on_head: Callable[[h11.Request], None]) -> bytes | None:
        """Return the body of the next request; None if the client has left or sends nothing for too long.

        Args:
            on_head: called with the head as soon as it has arrived; its errors count before the body is read.

        Raises: h11.RemoteProtocolError for what is not HTTP; BodyTooLarge; those of `on_head`.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        has_head, body, size = False, list[bytes](), 0
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self.is_over = True
                raise
            if event is h11.NEED_DATA:
                data: bytes | None = None
                if has_head and self._http.they_are_waiting_for_100_continue:
                    await self.send(h11.InformationalResponse(status_code=100, headers=[]))
                with trio.move_on_after(_BODY_S if has_head else self._idle_s):
                    data = await self._stream.receive_some(_READ_SIZE)
                if data is None:
                    return None
                self._http.receive_data(data)
            elif isinstance(event, h11.Request):
                has_head, self.is_over = True, True  # until all of it has come
                on_head(event)
                self._check_size(next((int(value) for name, value in event.headers if name == b"content-length"), 0))
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

    @asynccontextmanager
    async def cancel_when_client_leaves(self) -> AsyncGenerator[None]:
        """Cancel the block if the connection closes; bytes that the client sends meanwhile are kept for its next request."""
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery.cancel_scope)
                finished = False
                try:
                    yield
                    finished = True
                finally:
                    self.is_over = self.is_over or not finished
                    nursery.cancel_scope.cancel()

    async def _watch(self, scope: trio.CancelScope) -> None:
        ahead = 0
        try:
            while data := await self._stream.receive_some(_READ_SIZE):
                self._http.receive_data(data)
                ahead += len(data)
                if ahead > self._max_body_bytes:
                    break
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.is_over = True
        scope.cancel()

    async def send(self, *events: Event) -> None:
        """Send parts of an answer, as one piece. Raises one of CLIENT_HAS_LEFT."""
        await self.send_bytes(b"".join(self._http.send(event) or b"" for event in events))

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self._stream.send_all(data)

    def encode(self, event: Event) -> bytes:
        """Return the bytes of a part of an answer, which then counts as sent."""
        return self._http.send(event) or b""

    def end_answer(self) -> None:
        """Note the end of an answer: whether the connection goes on is clear now."""
        self.is_over = self.is_over or self._http.our_state is not h11.DONE

    async def linger(self) -> None:
        """Wait a moment for the rest of a request that was refused before its end, which would reset the connection."""
        await self._stream.send_eof()
        with trio.move_on_after(_LINGER_S):
            while await self._stream.receive_some(_READ_SIZE):
                pass

    def close(self) -> None:
        """Close the socket."""
        self._stream.socket.close()

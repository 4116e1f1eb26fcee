"""HTTP/1.1 connections of a gateway, under trio: requests in, responses or server-sent events out.

A client that leaves cancels its request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import h11
import trio

from rollouts.errors import raise_single_errors
from rollouts.gateway.refusals import Refusal

_READ_SIZE = 65536
_MAX_HEAD_BYTES = 65536
_IDLE_S = 75.0  # an idle connection is closed after this time
_LINGER_S = 1.0  # time for the rest of a request that was refused before its end
_BODY_S = 60.0  # so is one that sends a request this slowly


@dataclass(frozen=True, kw_only=True)
class HTTPRequest:
    """One request as received."""

    method: str
    path: str  # decoded, without the query
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class HTTPResponse:
    """One whole response, JSON."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    on_failure: Callable[[], None] | None = None  # called if the client has left before it was sent


SendText: TypeAlias = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class HTTPEvents:
    """Server-sent events: produce(send) sends whole events as text, the empty line at their end included."""

    produce: Callable[[SendText], Awaitable[None]]
    refuse: Callable[[Refusal], HTTPResponse]  # answer to a refusal before the first event
    describe: Callable[[Refusal], str]  # event for a refusal after it


class Connection:
    """One connection and its HTTP state."""

    def __init__(self, stream: trio.SocketStream, max_body_bytes: int) -> None:
        self.is_over = False
        self.request = HTTPRequest(method="", path="")  # the newest one whose head has arrived, without its body
        self._stream, self._max_body_bytes = stream, max_body_bytes
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def receive(self, check: Callable[[HTTPRequest], None]) -> HTTPRequest | None:
        """Return the next request; None if the client has left or sends nothing for too long.

        Args:
            check: called with the request as soon as its head has arrived; its Refusal counts before the body is read.

        Raises: Refusal for what is not HTTP, or too large, and that of `check`: the connection ends behind the answer.
        """
        self.request = HTTPRequest(method="", path="")
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        has_head = False
        body, size = [b""], 0
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                self.is_over = True
                raise Refusal(error.error_status_hint, f"the request is not HTTP/1.1: {error}", code="bad_request") from None
            if event is h11.NEED_DATA:
                data: bytes | None = None
                if has_head and self._http.they_are_waiting_for_100_continue:
                    await self._stream.send_all(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                with trio.move_on_after(_BODY_S if has_head else _IDLE_S):
                    data = await self._stream.receive_some(_READ_SIZE)
                if data is None:
                    return None
                self._http.receive_data(data)
            elif isinstance(event, h11.Request):
                has_head, self.is_over = True, True  # until all of it has come
                self.request = _create_request(event)
                check(self.request)
                length = self.request.headers.get("content-length", "0")
                self._check_size(int(length) if length.isdecimal() else 0)
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
                size += len(event.data)
                self._check_size(size)
            elif isinstance(event, h11.EndOfMessage):
                self.is_over = False
                return replace(self.request, body=b"".join(body))
            else:
                return None

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes} bytes (GatewayConfig.max_body_bytes)"
            raise Refusal(413, message, code="request_too_large")

    async def refuse(self, response: HTTPResponse) -> None:
        """Send the answer to a request that was not read to its end, and wait a moment for its rest, which would reset the connection."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        await self.send(response)
        await self._stream.send_eof()
        with trio.move_on_after(_LINGER_S):
            while await self._stream.receive_some(_READ_SIZE):
                pass

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

    async def send(self, response: HTTPResponse) -> None:
        """Send a response. Raises trio.BrokenResourceError if the client has left."""
        headers = [("content-length", str(len(response.body))), ("content-type", "application/json"), *response.headers]
        if self.is_over:
            headers.append(("connection", "close"))
        try:
            data = self._http.send(h11.Response(status_code=response.status, headers=headers)) or b""
            if self.request.method != "HEAD":
                data += self._http.send(h11.Data(data=response.body)) or b""
            data += self._http.send(h11.EndOfMessage()) or b""
            await self._stream.send_all(data)
        except BaseException:
            if response.on_failure is not None:
                response.on_failure()
            raise
        self.is_over = self.is_over or self._http.our_state is not h11.DONE

    async def send_events(self, events: HTTPEvents) -> None:
        """Send events as they come. Raises trio.BrokenResourceError if the client has left."""
        has_begun = False

        async def send(text: str) -> None:
            nonlocal has_begun
            data = b""
            if not has_begun:
                has_begun = True
                headers = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
                data = self._http.send(h11.Response(status_code=200, headers=headers)) or b""
            data += self._http.send(h11.Data(data=text.encode())) or b""
            await self._stream.send_all(data)

        try:
            await events.produce(send)
        except Refusal as refusal:
            if not has_begun:
                return await self.send(events.refuse(refusal))
            await send(events.describe(refusal))
        await self._stream.send_all(self._http.send(h11.EndOfMessage()) or b"")
        self.is_over = self.is_over or self._http.our_state is not h11.DONE
        return None

    def close(self) -> None:
        """Close the socket."""
        self._stream.socket.close()


def _create_request(head: h11.Request) -> HTTPRequest:
    try:
        path = unquote(urlsplit(head.target.decode("latin-1")).path, errors="strict")
    except ValueError as error:
        raise Refusal(400, f"the address of the request cannot be read: {error}", code="bad_request") from None
    headers: dict[str, Any] = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return HTTPRequest(method=head.method.decode("latin-1"), path=path, headers=headers)

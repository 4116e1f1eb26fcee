"""Connections of a server: requests in, responses or server-sent events out."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import h11
import trio

from rollouts.gateway.http.heads import Head
from rollouts.gateway.http.wire import BodyTooLarge, Wire, open_wire
from rollouts.gateway.refusals import Refusal
from rollouts.types import change

_IDLE_S = 75.0  # an idle connection is closed after this time
_PLAIN_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")  # path that is decoded already


@dataclass(frozen=True, kw_only=True)
class HTTPRequest:
    """One request as received."""

    method: str
    path: str  # decoded, without the query
    query: str = ""  # as sent
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class HTTPResponse:
    """One whole response."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    on_failure: Callable[[], None] | None = None  # called if the client has left before it was sent


SendText: TypeAlias = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class HTTPEvents:
    """Server-sent events: produce(send) sends whole events as text, the empty line at their end included."""

    produce: Callable[[SendText], Awaitable[None]]
    refuse: Callable[[Refusal], HTTPResponse]  # answer to a refusal before the first event
    describe: Callable[[Refusal], str]  # event for a refusal after it


@asynccontextmanager
async def open_connection(stream: trio.SocketStream, max_body_bytes: int) -> AsyncGenerator[Connection]:
    """Receive requests from a stream for the block, and close it at its end."""
    async with open_wire(stream, max_body_bytes=max_body_bytes, idle_s=_IDLE_S) as wire:
        yield Connection(wire, max_body_bytes)


class Connection:
    """One connection of a server. Made by open_connection."""

    def __init__(self, wire: Wire, max_body_bytes: int) -> None:
        self.request = HTTPRequest(method="", path="")  # the newest one whose head has arrived, without its body
        self._wire, self._max_body_bytes = wire, max_body_bytes
        self.cancel_when_client_leaves = wire.cancel_when_client_leaves

    @property
    def is_over(self) -> bool:
        """Whether no further request will come."""
        return self._wire.is_over

    async def receive(self, check: Callable[[HTTPRequest], None]) -> HTTPRequest | None:
        """Return the next request; None if the client has left or sends nothing for too long.

        Args:
            check: called with the request as soon as its head has arrived; its Refusal counts before the body is read.

        Raises: Refusal for what is not HTTP, or too large, and that of `check`: the connection ends behind the answer.
        """
        self.request = HTTPRequest(method="", path="")

        def take_head(head: Head) -> None:
            self.request = _create_request(head)
            check(self.request)

        try:
            body = await self._wire.receive(take_head)
        except h11.RemoteProtocolError as error:
            raise Refusal(error.error_status_hint, f"the request is not HTTP/1.1: {error}", code="bad_request") from None
        except BodyTooLarge:
            message = f"the body is larger than {self._max_body_bytes} bytes (the setting max_body_bytes)"
            raise Refusal(413, message, code="request_too_large") from None
        return None if body is None else change(self.request, body=body)

    async def refuse(self, response: HTTPResponse) -> None:
        """Send the answer to a request that was not read to its end, and wait a moment for its rest."""
        if self._wire.may_answer:
            await self.send(response)
            await self._wire.linger()

    async def send(self, response: HTTPResponse) -> None:
        """Send a response. Raises trio.BrokenResourceError if the client has left."""
        headers = [("content-length", str(len(response.body))), ("content-type", response.content_type), *response.headers]
        if self.is_over:
            headers.append(("connection", "close"))
        try:
            data = self._wire.write_head(response.status, headers)
            if self.request.method != "HEAD":
                data += self._wire.write_data(response.body)
            await self._wire.send_bytes(data + self._wire.write_end())
        except BaseException:
            if response.on_failure is not None:
                response.on_failure()
            raise

    async def send_events(self, events: HTTPEvents) -> None:
        """Send events as they come. Raises trio.BrokenResourceError if the client has left."""
        has_begun = False

        async def send(text: str) -> None:
            nonlocal has_begun
            head = b""
            if not has_begun:
                has_begun = True
                head = self._wire.write_head(200, [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")])
            await self._wire.send_bytes(head + self._wire.write_data(text.encode()))

        try:
            await events.produce(send)
        except Refusal as refusal:
            if not has_begun:
                return await self.send(events.refuse(refusal))
            await send(events.describe(refusal))
        await self._wire.send_bytes(self._wire.write_end())
        return None


def _create_request(head: Head) -> HTTPRequest:
    path, query = head.target, ""
    if _PLAIN_PATH.fullmatch(path) is None:
        try:
            parts = urlsplit(path)
            path, query = unquote(parts.path, errors="strict"), parts.query
        except ValueError as error:
            raise Refusal(400, f"the address of the request cannot be read: {error}", code="bad_request") from None
    return HTTPRequest(method=head.method, path=path, query=query, headers=head.headers)

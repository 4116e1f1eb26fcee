"""Streamable HTTP to an MCP server at an address, by the transport of the package `mcp`: what it is asked and what it may answer.

A failure is an answer here, of the protocol: whatever leaves the transport of `mcp` as an exception would end every call in flight.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import trio
from mcp_types import INTERNAL_ERROR, JSONRPCError, jsonrpc_message_adapter

from rollouts.errors import ConfigError, make_safe, redact

_CONNECT_S = 10.0  # one attempt
_CONNECT_RETRIES = 2
_FAREWELL_S = 2.0  # for the end of a session
_VISIBLE = re.compile("[!-~]*")  # characters that the protocol allows in the name of a session


@asynccontextmanager
async def connect(
    url: str, headers: Mapping[str, str], max_bytes: int, lose: Callable[[str], None], hide: Callable[[str], str]
) -> AsyncGenerator[tuple[Any, Any]]:
    """Open the transport of a client: a stream of the server's messages, and one of messages for it.

    Args:
        url: address of the server's endpoint.
        headers: of each request.
        max_bytes: bytes of one message of the server.
        lose: is called with the reason when the server cannot be reached, or has ended the session.
        hide: shows secrets in the server's texts as ***, before these are cut.
    """
    from mcp.client.streamable_http import streamable_http_client

    transport = _Transport(max_bytes, lose, hide)
    timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # each call has a deadline of its own
    sent = {"accept-encoding": "identity", **headers}
    async with httpx2.AsyncClient(headers=sent, transport=transport, timeout=timeout, trust_env=False) as http:
        async with streamable_http_client(url, http_client=http, max_sse_event_size=max_bytes) as streams:
            yield streams


def check_address(url: str, headers: Mapping[str, str]) -> None:
    """Raises: ConfigError for an address or headers that no request can have."""
    try:
        parsed = httpx2.URL(url)
        httpx2.Headers(dict(headers)).raw  # noqa: B018, it encodes them
    except (httpx2.InvalidURL, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the MCP server {redact(url)!r:.200} cannot be asked: {type(error).__name__} in its address or headers"
        ) from error
    if not parsed.host:
        raise ConfigError(f"the MCP server {redact(url)!r:.200} has no host, expected an address such as 'http://127.0.0.1:8000/mcp'")
    bad = [name for name, value in headers.items() if not name.strip() or any(sign in name + value for sign in "\r\n\0")]
    if bad:
        raise ConfigError(f"the header {bad[0]!r:.80} for the MCP server {redact(url)!r:.200} has a line break or no name")


class _Transport(httpx2.AsyncBaseTransport):
    """HTTP connections whose failures are answers of the protocol, and whose answers have a limit."""

    def __init__(self, max_bytes: int, lose: Callable[[str], None], hide: Callable[[str], str]) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False, retries=_CONNECT_RETRIES, limits=limits)
        self._max_bytes = max_bytes
        self._lose = lose
        self._hide = hide

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE":  # the end of a session, which the server is told whatever ends the block
            with trio.move_on_after(_FAREWELL_S, shield=True):
                return await self._ask(request)
            return _refuse("late")
        return await self._ask(request)

    async def _ask(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                return _refuse(f"an answer is encoded as {self._hide(response.headers['content-encoding'])!r:.80}, which was not asked for")
            if not _VISIBLE.fullmatch(response.headers.get("mcp-session-id", "")):
                await response.aclose()
                return _refuse("the name of the session has other signs than visible ASCII, so that no request can have it")
            if response.headers.get("content-type", "").lower().startswith("text/event-stream") and response.status_code < 400:
                return response
            body = await self._read(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            self._lose(f"it cannot be reached: {self._describe(error)}")
            return _refuse("it cannot be reached")
        except httpx2.TransportError as error:
            return _refuse(f"the connection failed: {self._describe(error)}")
        if body is None:
            return _refuse(f"an answer has more than {self._max_bytes:,} bytes")
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            self._lose("it has ended the session")
        elif response.status_code >= 400 and response.status_code != 404 and not _is_error(body):
            return _refuse(f"HTTP status {response.status_code}: {self._describe(body.decode(errors='replace'))}", response.status_code)
        return httpx2.Response(response.status_code, headers=response.headers, content=body)

    async def _read(self, response: httpx2.Response) -> bytes | None:
        """Return the body of an answer, None if it is too long."""
        body = bytearray()
        try:
            async for data in response.aiter_raw():
                body += data
                if len(body) > self._max_bytes:
                    return None
        finally:
            with trio.CancelScope(shield=True):
                await response.aclose()
        return bytes(body)

    def _describe(self, what: object) -> str:
        return redact(make_safe(self._hide(" ".join(str(what).split()))))[:200] or type(what).__name__

    async def aclose(self) -> None:
        await self._inner.aclose()


def _is_error(body: bytes) -> bool:
    try:
        return isinstance(jsonrpc_message_adapter.validate_json(body, by_name=False), JSONRPCError)
    except ValueError:
        return False


def _refuse(what: str, status: int = 502) -> httpx2.Response:
    """Return a failure as an answer of the protocol."""
    return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": {"code": INTERNAL_ERROR, "message": what}})

"""Listening: the address of a server, who may reach it, and its connections, of which one that fails ends by itself."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from rollouts.config import check_setting
from rollouts.errors import ConfigError, flatten_errors
from rollouts.gateway.http.connections import Connection, open_connection
from rollouts.gateway.http.wire import CLIENT_HAS_LEFT
from rollouts.gateway.refusals import Refusal

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_logger = logging.getLogger(__name__)


class Address(Protocol):
    """Settings of a server's address; their class names them in errors."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def token(self) -> str | None: ...


def check_address(settings: Address) -> None:
    """Raise ConfigError for a port or token that cannot be one, and for an address beyond this machine without a token."""
    name, token = type(settings).__name__, settings.token
    check_setting(0 <= settings.port < 2**16, f"{name}.port", settings.port, "a port, 0 to 65535")
    good_token = token is None or (token.isascii() and token.isprintable() and not set(token) & set(" :"))
    check_setting(good_token and token != "", f"{name}.token", "***", "printable ASCII without spaces and colons, not empty")
    check_setting(
        token is not None or settings.host in _LOOPBACK,
        f"{name}.token",
        token,
        f"a token, because host is {settings.host}, where other machines can ask",
    )


async def listen(settings: Address, server: str) -> list[trio.SocketListener]:
    """Open the listeners of a server, which is called so in errors. Raises ConfigError for an address that cannot be had."""
    try:
        return await trio.open_tcp_listeners(settings.port, host=settings.host, backlog=4096)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that no name server can be asked for
        wrong_host = not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = "Give an address of this machine as host, such as 127.0.0.1" if wrong_host else "Choose another port, or 0"
        raise ConfigError(f"the {server} cannot listen on {settings.host}, port {settings.port}: {error}. {advice}") from error


async def serve_connection(
    stream: trio.SocketStream, answer_all: Callable[[Connection], Awaitable[None]], *, max_body_bytes: int, server: str
) -> None:
    """Answer the requests of a connection until it ends; its errors, but those of a client that has left, are logged and end it alone."""
    try:
        async with open_connection(stream, max_body_bytes) as connection:
            await answer_all(connection)
    except Exception as error:
        error.add_note(f"it ended one connection of the {server}; the others go on")
        if not all(isinstance(inner, (*CLIENT_HAS_LEFT, Refusal)) for inner in flatten_errors(error)):
            _logger.exception("a connection of the %s failed", server)

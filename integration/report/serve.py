"""A server on the loopback interface that follows live runs: the page, made anew when their files change, and a word that says so."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import h11
import trio

from rollouts.errors import ConfigError, DataError, make_safe, redact

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_FILES = ("config.json", "run.json", "metrics.jsonl", "summary.json", "warnings.jsonl")  # files of a run, besides its rollouts
_AGAIN_S = 5  # seconds after which a browser asks again for runs that could not be read
_WAIT_S = 10.0  # for a request, and for a reader of the answer

Respond = Callable[[str], "tuple[int, str, bytes]"]
"""Function of the path of a request: status, content type, body."""


async def serve(respond: Respond, port: int, say: Callable[[str], None]) -> None:
    """Answer GET requests on the loopback interface until cancelled. port: 0 = any free one; `say` is told the address.

    Only requests whose Host names this machine are answered, so that no web site can read a report by a name that leads here.

    Raises: ConfigError if the port is taken.
    """
    try:
        (listener,) = await trio.open_tcp_listeners(port, host=HOST)
    except OSError as error:
        raise ConfigError(f"--port {port} cannot be opened ({error.strerror or error}): choose another, or 0 for any free one") from error
    taken = listener.socket.getsockname()[1]
    say(f"http://{HOST}:{taken}/ shows the report and follows its runs; Ctrl-C ends it")
    await trio.serve_listeners(partial(_answer, respond=respond, port=taken), [listener])


async def _answer(stream: trio.SocketStream, respond: Respond, port: int) -> None:
    connection, request = h11.Connection(h11.SERVER), None
    try:
        with trio.move_on_after(_WAIT_S):
            request = await _receive(stream, connection)
        if request is None:
            return
        hosts = [value.decode("ascii", "replace") for name, value in request.headers if name == b"host"]
        if request.method != b"GET":
            status, kind, body = 405, "text/plain", b"only GET is answered"
        elif hosts[:1] not in [[f"{name}:{port}"] for name in _NAMES]:
            status, kind, body = 403, "text/plain", b"the report is answered only under its own address"
        else:
            path = request.target.decode("ascii", "replace").split("?")[0]
            status, kind, body = await trio.to_thread.run_sync(respond, path)
        headers = [
            ("content-type", f"{kind}; charset=utf-8"),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("connection", "close"),
        ]
        with trio.move_on_after(_WAIT_S):
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                await stream.send_all(connection.send(event) or b"")
    except (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
        pass  # the browser went away, or speaks no HTTP
    finally:
        await trio.aclose_forcefully(stream)


async def _receive(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        elif isinstance(event, h11.ConnectionClosed):
            return None


class FollowedReport:
    """The page of runs that go on; made anew when their files have changed since it was made."""

    def __init__(self, paths: Sequence[Path], render: Callable[[], str]) -> None:
        self._paths, self._render = paths, render
        self._made: tuple[str, bytes] | None = None

    def respond(self, path: str) -> tuple[int, str, bytes]:
        """Answer a request: "/" is the page, "/state" changes with the runs. Runs that cannot be read are told, and tried again."""
        if path not in ("/", "/state"):
            return 404, "text/plain", b"there is only /"
        try:
            now = describe_state(self._paths)
            if path == "/state":
                return 200, "text/plain", now.encode()
            if self._made is None or self._made[0] != now:
                self._made = (now, self._render().encode())
            return 200, "text/html", self._made[1]
        except (ConfigError, DataError, OSError) as error:  # a run that was moved or damaged meanwhile, and may be mended
            told = html.escape(make_safe(redact(f"error: {error}")))
            return 500, "text/html", f"<!doctype html><meta http-equiv=refresh content={_AGAIN_S}><p>{told}".encode()


def describe_state(paths: Iterable[Path]) -> str:
    """Return a short text that changes when a file of the runs does that a report reads."""
    digest = hashlib.sha256()
    for run in paths:
        for file in sorted([*(run / name for name in _FILES), *run.glob("rl/trajectories/step_*.jsonl")]):
            if file.is_file():
                found = file.stat()
                digest.update(f"{file}|{found.st_size}|{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]

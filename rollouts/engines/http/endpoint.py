"""Client of one inference server: deadlines, limits on calls, retries, and errors with the server's own messages.

    async with HTTPEndpoint("http://127.0.0.1:8000") as server:
        reply = await server.post_json("/generate", payload)

Requests go directly to a transport, because httpx.AsyncClient in between would cost a third more per request. No proxy is ever used, and
the environment is not read.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Literal, Self

import httpx
import trio

from rollouts.engines.http.connection import KeptConnectionLost, ServerHungUp
from rollouts.engines.http.errors import (
    create_hider,
    create_status_error,
    describe_server_error,
    describe_transport_error,
    parse_answer,
    raise_engine_errors,
)
from rollouts.engines.http.events import EventDecoder, parse_event
from rollouts.engines.http.transport import PooledTransport
from rollouts.errors import ConfigError, EngineError, EngineProtocolError, EngineTimeout, redact

__all__ = ["CallKind", "Deadlines", "HTTPEndpoint", "RetryPolicy", "describe_server_error", "is_safe_to_repeat", "parse_retry_after"]

CallKind = Literal["generate", "control", "sync", "health"]
"""Purpose of a call: it decides the deadline, and whether the call may wait behind generations or use a kept connection."""

MAX_CONTROL_CALLS = 64
MAX_ANSWER_BYTES = 2**30  # bytes of an answer, or of an event in a stream: no inference server sends a longer one
BUSY = (429, 503)  # refused before any work was done
GATEWAY = (502, 504)  # from a proxy, which does not report the progress of its server
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
LAST_BYTES_S = 1.0  # seconds for the end of a stream after its last event


@dataclass(frozen=True)
class Deadlines:
    """Seconds from the first byte of a request to the last byte of its answer, by kind of call."""

    generate_s: float | None = 3600.0  # None = as long as the connection lives; long responses queue for long
    control_s: float = 60.0  # pause, resume, abort, flush, versions; SGLang's pause waits for aborted requests
    sync_s: float = 600.0  # loading weights from a disk or from other processes
    health_s: float = 30.0  # SGLang's health check answers 503 after 20 s of its own
    connect_s: float = 10.0  # for the connection, within the others
    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # option that sets a deadline, by field, for messages

    def __post_init__(self) -> None:
        for name in ("generate_s", "control_s", "sync_s", "health_s", "connect_s"):
            value = getattr(self, name)
            if not (name == "generate_s" if value is None else value > 0):
                raise ConfigError(f"the deadline {name} is {value}, expected more than 0 seconds")

    def of(self, kind: CallKind) -> float:
        """Return the deadline of a kind of call in seconds, infinity if there is none."""
        if kind == "generate":
            return math.inf if self.generate_s is None else self.generate_s
        return {"control": self.control_s, "sync": self.sync_s, "health": self.health_s}[kind]

    def name(self, deadline: str) -> str:
        """Return the name under which the user sets a deadline, a field of this class: an option, or the field."""
        return self.options.get(deadline, f"Deadlines.{deadline}")


@dataclass(frozen=True)
class RetryPolicy:
    """Number of safe repeats, and the waits before them.

    Repeats are safe after connections that were refused or broke before the request was complete, and after the statuses 429 and 503
    (refused, nothing done). After a lost answer, or 502 and 504 from a proxy, only calls that may be done twice are repeated: GETs, and
    calls made with idempotent=True. Health calls are never repeated.
    """

    attempts: int = 5  # total attempts without an answer; a busy server is asked until the budget is used up
    first_wait_s: float = 0.1  # seconds; doubles with each repeat
    longest_wait_s: float = 5.0
    budget_s: float = 120.0  # seconds after the first failure of a call in which repeats may begin

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retry attempts is {self.attempts}, expected at least 1 (1 = no repeat)")
        if not (self.first_wait_s > 0 and self.longest_wait_s >= self.first_wait_s and self.budget_s >= 0):
            raise ConfigError(f"waits of {self} are not in order: expected 0 < first_wait_s <= longest_wait_s and budget_s >= 0")

    def wait_before(self, repeat: int, draw: float, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait: half of the exponential step and a random half, so that many clients do not return together.

        Args:
            repeat: 0 before the first repeat.
            draw: uniform in [0, 1).
            retry_after_s: seconds that the server asked for, a lower bound of the wait.
        """
        step = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(repeat, 60))
        if retry_after_s is not None:
            return retry_after_s + draw * step
        return step * (0.5 + 0.5 * draw)


class HTTPEndpoint:
    """One server. Generations have their own limit, so that an abort or a pause never queues behind the calls that it stops."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines | None = None,
        retry: RetryPolicy | None = None,
        max_connections: int = 4096,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        """
        Args:
            base_url: "http://host:port", with a path if all routes lie below one.
            api_key: sent as a bearer token.
            max_connections: maximum number of generations in flight; more wait. Mind the limit on open files (ulimit -n).
            transport: anything that carries httpx requests, for instance httpx.MockTransport; closed with the endpoint.
            rng: jitter of the waits before repeats.
            clock: seconds, for the budget of the retry policy.

        Raises: ConfigError if the address or the key cannot be used.
        """
        self.base_url = _check_base_url(base_url)
        if max_connections < 1:
            raise ConfigError(f"max_connections is {max_connections}, expected at least 1")
        self._headers = _create_headers(httpx.URL(self.base_url), api_key)
        self._hide = create_hider(api_key)
        self._deadlines = deadlines or Deadlines()
        self._retry = retry or RetryPolicy()
        self._generations = trio.CapacityLimiter(max_connections)
        self._control_calls = trio.CapacityLimiter(MAX_CONTROL_CALLS)
        self._transport = transport or PooledTransport(max_connections=max_connections + MAX_CONTROL_CALLS)
        self._rng = rng or random.Random()
        self._clock = clock
        self._urls: dict[str, httpx.URL] = {}
        self._is_open = self._is_closed = False

    async def __aenter__(self) -> Self:
        assert not (self._is_open or self._is_closed), f"the endpoint of {self.base_url} is entered a second time: create another"
        await self._transport.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._is_open, self._is_closed = False, True
        await self._transport.__aexit__(*exc_info)

    @property
    def deadlines(self) -> Deadlines:
        """Deadlines of calls."""
        return self._deadlines

    @property
    def num_generating(self) -> int:
        """Number of generations in flight from this client."""
        return self._generations.borrowed_tokens

    async def post_json(
        self, path: str, body: Any, *, kind: CallKind = "generate", idempotent: bool = False, params: Mapping[str, str] | None = None
    ) -> Any:
        """POST a JSON body and return the parsed answer.

        Args:
            idempotent: whether two calls have the effect of one, so that a lost answer may be requested again.
            params: parameters of the query string.

        Raises: EngineTimeout, EngineStatusError, EngineProtocolError; EngineError if the server cannot be reached or hung up, or after the
            end of the endpoint's block.
        """
        return parse_answer(await self._call("POST", path, body, kind, idempotent, params), self._url(path, params), self._hide)

    async def get_json(self, path: str, *, kind: CallKind = "control", params: Mapping[str, str] | None = None) -> Any:
        """GET and return the parsed answer. Raises as post_json."""
        return parse_answer(await self._call("GET", path, None, kind, True, params), self._url(path, params), self._hide)

    async def post_text(
        self, path: str, body: Any = None, *, kind: CallKind = "control", idempotent: bool = False, params: Mapping[str, str] | None = None
    ) -> str:
        """POST, without a body if it is None, and return the answer as text, for answers that are not JSON. Raises as post_json."""
        return (await self._call("POST", path, body, kind, idempotent, params)).decode(errors="replace")

    async def get_text(self, path: str, *, kind: CallKind = "control", params: Mapping[str, str] | None = None) -> str:
        """GET and return the answer as text, for instance the empty one of /health. Raises as post_json."""
        return (await self._call("GET", path, None, kind, True, params)).decode(errors="replace")

    @asynccontextmanager
    async def stream_events(
        self, path: str, body: Any, *, kind: CallKind = "generate", params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[AsyncIterator[Any]]:
        """POST and read the server-sent events of the answer, parsed, up to "[DONE]".

            async with server.stream_events("/generate", payload) as events:
                async for event in events: ...

        Leaving the block early closes the connection, which makes the server drop the request. Raises as post_json; an error that comes as
        an event is an EngineStatusError.
        """
        url = self._url(path, params)
        release = await self._take_place(kind)
        try:
            response, _, expires = await self._send("POST", url, body, kind, False, read=False)
            try:
                async with aclosing(self._read_events(response, url, kind, expires)) as events:
                    yield events
            finally:
                await response.aclose()
        finally:
            release()

    async def _read_events(self, response: httpx.Response, url: httpx.URL, kind: CallKind, expires: float) -> AsyncGenerator[Any]:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        chunks = aiter(response.stream)
        decoder = EventDecoder()
        is_done = False
        num_bytes = 0  # bytes since the last event
        while True:
            chunk = None
            with raise_engine_errors(url), trio.move_on_at(expires) as scope:
                chunk = await anext(chunks, None)
            if scope.cancelled_caught:
                if is_done:
                    return
                raise self._timeout(url, kind)
            if chunk is None:
                break
            data_of_events = decoder.feed(chunk)
            num_bytes = _add_bytes(0 if data_of_events else num_bytes, chunk, url)
            for data in data_of_events:
                if data == "[DONE]":
                    is_done = True
                    expires = min(expires, trio.current_time() + LAST_BYTES_S)  # after the end of the body the connection is kept
                elif not is_done:
                    yield parse_event(data, url, self._hide)
        if not is_done:
            raise EngineProtocolError(f"the events of {url} ended without [DONE]: the server stopped in the middle, see its log")

    async def _call(self, method: str, path: str, body: Any, kind: CallKind, idempotent: bool, params: Mapping[str, str] | None) -> bytes:
        url = self._url(path, params)
        release = await self._take_place(kind)
        try:
            _, content, _ = await self._send(method, url, body, kind, idempotent, read=True)
        finally:
            release()
        return content

    async def _take_place(self, kind: CallKind) -> Callable[[], None]:
        """Take a place for one call. Returns the function that releases it."""
        limiter = self._generations if kind == "generate" else self._control_calls
        holder = object()  # not the task, which may have several calls open
        try:
            limiter.acquire_on_behalf_of_nowait(holder)
        except trio.WouldBlock:
            await limiter.acquire_on_behalf_of(holder)
        return partial(limiter.release_on_behalf_of, holder)

    async def _send(
        self, method: str, url: httpx.URL, body: Any, kind: CallKind, idempotent: bool, *, read: bool
    ) -> tuple[httpx.Response, bytes, float]:
        """Return a successful response after as many attempts as are safe, its body if `read`, and its deadline."""
        if self._is_closed:  # perhaps while the call waited for a place
            raise EngineError(f"{url} was not asked: its client is closed. Use it inside its `async with` block")
        assert self._is_open, "use the endpoint inside its `async with` block"
        content = None if body is None else _ENCODER.encode(body).encode()
        first_failure_at = math.inf
        num_repeats = num_unanswered = 0
        while True:
            failure: EngineError
            retry_after = None
            expires = trio.current_time() + self._deadlines.of(kind)
            try:
                response, answer = await self._attempt(self._create_request(method, url, content, kind, idempotent), kind, expires, read)
            except httpx.RequestError as error:
                failure = describe_transport_error(error, url, self._deadlines.name("connect_s"))
                failure.__cause__ = error
                num_unanswered += 1
                may_repeat = is_safe_to_repeat(error, idempotent) and num_unanswered < self._retry.attempts
            else:
                status = response.status_code
                if status < 300:
                    return response, answer, expires
                told, location = self._hide(answer.decode(errors="replace")), self._hide(response.headers.get("location", ""))
                failure = create_status_error(status, url, told, location)
                may_repeat = status in BUSY or (idempotent and status in GATEWAY)
                retry_after = parse_retry_after(response.headers)
            now = self._clock()
            first_failure_at = min(first_failure_at, now)
            wait = self._retry.wait_before(num_repeats, self._rng.random(), retry_after)
            if kind == "health" or not may_repeat or now + wait > first_failure_at + self._retry.budget_s:
                raise failure
            await trio.sleep(wait)
            if not self._is_open:
                raise failure
            num_repeats += 1

    async def _attempt(self, request: httpx.Request, kind: CallKind, expires: float, read: bool) -> tuple[httpx.Response, bytes]:
        with trio.move_on_at(expires):
            response = await self._transport.handle_async_request(request)
            if not read and response.status_code < 300:
                return response, b""
            if isinstance(response.stream, httpx.ByteStream):  # all of it is at hand
                (content,) = response.stream
                _add_bytes(0, content, request.url)
                return response, content
            assert isinstance(response.stream, httpx.AsyncByteStream)
            chunks: list[bytes] = []
            num_bytes = 0
            try:
                async for chunk in response.stream:
                    num_bytes = _add_bytes(num_bytes, chunk, request.url)
                    chunks.append(chunk)
                return response, b"".join(chunks)
            finally:
                await response.aclose()
        raise self._timeout(request.url, kind)

    def _create_request(self, method: str, url: httpx.URL, content: bytes | None, kind: CallKind, idempotent: bool) -> httpx.Request:
        headers = self._headers.copy()
        if content is not None:
            headers["Content-Type"] = "application/json"
        if method == "POST":
            headers["Content-Length"] = str(len(content or b""))
        extensions: dict[str, Any] = {"timeout": {"connect": self._deadlines.connect_s}, "repeatable": idempotent}
        if kind != "generate":  # must not use a connection that the server is closing, as vLLM does after an error
            headers["Connection"] = "close"
            extensions["fresh_connection"] = True
        return httpx.Request(method, url, headers=headers, stream=httpx.ByteStream(content or b""), extensions=extensions)

    def _url(self, path: str, params: Mapping[str, str] | None) -> httpx.URL:
        assert path.startswith("/"), f"the path {path!r} does not start with /"
        if params:
            return httpx.URL(self.base_url + path, params=dict(params))
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.base_url + path)
        return url

    def _timeout(self, url: httpx.URL, kind: CallKind) -> EngineTimeout:
        seconds = self._deadlines.of(kind)
        name = self._deadlines.name(f"{kind}_s")
        return EngineTimeout(f"{url} gave no complete answer within {seconds:g} s: the server hangs, or the deadline {name} is too short")


def parse_retry_after(headers: httpx.Headers) -> float | None:
    """Return the seconds that the server asks to wait, from a number, or from a date compared with the server's own clock."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d*)?", value, re.ASCII):
        return float(value)
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return None


def is_safe_to_repeat(error: httpx.RequestError, idempotent: bool) -> bool:
    """Whether a failed request can be sent again: the server cannot have read all of it, or two calls have the effect of one."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.WriteError):
        return True
    if isinstance(error, KeptConnectionLost) and error.is_unread:
        return True
    return idempotent and isinstance(error, httpx.ReadError | ServerHungUp)


def _add_bytes(num_bytes: int, chunk: bytes, url: httpx.URL) -> int:
    """Return the sum of num_bytes and the chunk's size. Raises EngineProtocolError before the answer fills the memory."""
    num_bytes += len(chunk)
    if num_bytes > MAX_ANSWER_BYTES:
        raise EngineProtocolError(f"{url} gave more than {MAX_ANSWER_BYTES} bytes in one answer: it is no inference server, or is broken")
    return num_bytes


def _check_base_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f"the server's address {redact(base_url)!r} is no URL ({redact(str(error))}): expected http://host:port"
        ) from error
    if url.userinfo or "?" in base_url:
        raise ConfigError(
            f"the server's address {redact(base_url)!r} has a user, a password or a query: expected http://host:port; a key is api_key"
        )
    is_usable = url.scheme in ("http", "https") and bool(url.host) and "#" not in base_url
    if not is_usable or not (url.port is None or 1 <= url.port <= 65535):
        raise ConfigError(f"the server's address is {redact(base_url)!r}, expected http://host:port or https://host:port")
    return str(url).rstrip("/")


def _create_headers(url: httpx.URL, api_key: str | None) -> httpx.Headers:
    headers = [(b"Host", url.netloc), (b"Accept", b"application/json, text/event-stream, */*"), (b"User-Agent", b"rollouts")]
    if api_key is not None:
        if not api_key or not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip():
            raise ConfigError("the API key is empty, or has spaces around it or characters that an HTTP header cannot carry")
        headers.append((b"Authorization", b"Bearer " + api_key.encode()))
    return httpx.Headers(headers)

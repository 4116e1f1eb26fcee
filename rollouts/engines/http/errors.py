"""Exceptions of this library for failed calls, made from a server's answer or its absence."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx

from rollouts.checks import parse_json
from rollouts.engines.http.connection import ServerHungUp
from rollouts.errors import EngineError, EngineProtocolError, EngineStatusError, EngineTimeout

MAX_REASON_LENGTH = 1000
MIN_SECRET_LENGTH = 8  # characters of an API key that is one; a shorter one is a word ("EMPTY") that messages may have


def create_hider(api_key: str | None) -> Callable[[str], str]:
    """Create the function that replaces the key in a text by ***: a server may quote the key that it refuses."""
    if api_key is None or len(api_key) < MIN_SECRET_LENGTH:
        return str
    return lambda text: text.replace(api_key, "***")


def describe_server_error(status: int, body: str) -> str:
    """Return the server's own message from an error of any shape, on one line.

    Args:
        status: HTTP status.
        body: JSON of the shapes {"error": {"message"}}, {"error": str}, {"message"}, {"detail"}, or plain text, HTML, nothing.
    """
    text = _read_message(body) or body
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        text = f"an HTML page{' titled ' + title.group(1).strip() if title else ''}, as a proxy or another server would send"
    text = " ".join(_shorten_validation_errors(text.strip()).split())
    if not text:
        text = f"no message ({HTTPStatus(status).phrase})" if status in set(HTTPStatus) else "no message"
    return text[:MAX_REASON_LENGTH]


def describe_transport_error(error: httpx.RequestError, url: httpx.URL, connect_option: str = "connect_s") -> EngineError:
    """Return the exception for a call without a complete HTTP answer. connect_option: name of the deadline of connections."""
    what = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout):
        return EngineTimeout(f"{url}: {what}: check that the server runs and listens there, or raise the deadline {connect_option}")
    if isinstance(error, httpx.TimeoutException):
        return EngineTimeout(f"{url}: {what}")
    if isinstance(error, httpx.ConnectError):
        return EngineError(f"{url} cannot be reached: {what}. Check that the server runs and listens there")
    if isinstance(error, httpx.CloseError):
        return EngineError(f"{url}: {what}, while the call was in flight")
    if isinstance(error, httpx.NetworkError | ServerHungUp):
        return EngineError(f"{url}: {what}. The server may have died: see its log")
    return EngineProtocolError(f"{url} does not speak HTTP as it should: {what}")


def parse_answer(content: bytes, url: httpx.URL, hide: Callable[[str], str] = str) -> Any:
    """Parse an answer in JSON.

    Args:
        hide: removes secrets from what a message quotes.

    Raises: EngineProtocolError with the beginning of the actual answer.
    """
    try:
        return parse_json(content)
    except ValueError as error:
        found = hide(content[:2000].decode(errors="replace"))[:200]
        raise EngineProtocolError(f"{url} answered with {found!r}, expected JSON ({error})") from error


def create_status_error(status: int, url: httpx.URL, body: str, location: str = "") -> EngineStatusError:
    """Return the exception for a server's error, or for a redirect, which is not followed: a POST could become a GET."""
    reason = describe_server_error(status, body)
    return EngineStatusError(status, str(url), body, f"{reason}; it redirects to {location}: use that address" if location else reason)


@contextmanager
def raise_engine_errors(url: httpx.URL) -> Generator[None]:
    """Raise httpx's errors in the block as errors of this library."""
    try:
        yield
    except httpx.RequestError as error:
        raise describe_transport_error(error, url) from error


@contextmanager
def raise_protocol_errors(route: str, answer: Any) -> Generator[None]:
    """Raise EngineProtocolError, with the answer, for a missing or misshapen field."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineProtocolError(f"{route} answered with something else than expected ({error!r}): {str(answer)[:500]}") from error


def _read_message(body: str) -> str:
    try:
        return _find_message(parse_json(body))
    except (ValueError, RecursionError):  # its fields are nested too deeply to be looked at
        return ""


def _find_message(value: Any) -> str:
    """Return the message in a parsed error body, "" if there is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # FastAPI: one entry per wrong field
        return "; ".join(filter(None, map(_find_message, value)))
    if not isinstance(value, dict):
        return ""
    if "msg" in value and isinstance(value.get("loc"), list):
        return f"{'.'.join(map(str, value['loc']))}: {value['msg']}"
    return next(filter(None, (_find_message(value.get(key)) for key in ("error", "message", "detail"))), "")


_VALIDATION_ERROR = re.compile(r"""'loc': (\(.*?\)|'.*?'), 'msg': ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
_LOCATION_PART = re.compile(r"(?<![^\s('])[\w.]+(?=[',)])")  # not pydantic's own names, as in 'function-after[build(), Request]'


def _shorten_validation_errors(text: str) -> str:
    """Return the fields and their faults from an error dump of pydantic, which repeats the whole input and names the server's files."""
    if not re.match(r"\d+ validation errors?:", text):
        return text
    found = [f"{'.'.join(_LOCATION_PART.findall(where))}: {what[1:-1]}" for where, what in _VALIDATION_ERROR.findall(text)]
    return "; ".join(dict.fromkeys(found)) or text.split("\n\n")[0]

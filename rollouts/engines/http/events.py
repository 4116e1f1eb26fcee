"""Decoder of the server-sent events (the HTML standard, section 9.2) that servers stream."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx

from rollouts.engines.http.errors import create_status_error, parse_answer


class EventDecoder:
    """Decoder from bytes of a text/event-stream to the data of complete events. Comments, names and ids are dropped."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of an unfinished line
        self._data: list[str] = []  # lines of an unfinished event
        self._may_skip_newline = False  # after a carriage return, whose line feed may come with the next bytes
        self._is_first_line = True

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that this chunk completes."""
        if not chunk:
            return []
        if self._may_skip_newline:
            chunk = chunk.removeprefix(b"\n")
        self._may_skip_newline = chunk.endswith(b"\r")
        *lines, rest = re.split(rb"\r\n|\n|\r", chunk)
        events: list[str] = []
        for line in lines:
            if self._line:
                line = b"".join([*self._line, line])
                self._line = []
            self._read_line(line.decode(errors="replace"), events)
        if rest:
            self._line.append(rest)
        return events

    def _read_line(self, line: str, events: list[str]) -> None:
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix("\ufeff"), False
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data = []
        elif line == "data" or line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))


def parse_event(data: str, url: httpx.URL, hide: Callable[[str], str] = str) -> Any:
    """Return the value of an event. hide: removes secrets from what a message quotes.

    Raises: EngineProtocolError if it is not JSON; EngineStatusError if it is an error event, sent with status 200.
    """
    event = parse_answer(data.encode(), url, hide)
    if isinstance(event, dict) and event.get("error"):
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        raise create_status_error(code if isinstance(code, int) else 500, url, hide(data))
    return event

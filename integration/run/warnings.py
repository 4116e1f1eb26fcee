"""Warnings of a run, kept in a file of its directory for those who look at it later: each text once, from its start on."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rollouts.errors import OutputError, make_safe, redact
from rollouts.output_files import append_text

WARNINGS_FILE = "warnings.jsonl"
_PREFIX = "warning: "
_MOST = 200  # texts of a file, since one with a number in it may come at each step


class WarningsFile(logging.Handler):
    """Handler that appends warnings and errors of the log to a file; a text that it has already is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path, self._known = path, set(read_warnings(path))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record, without its traceback."""
        with suppress(Exception):  # a message whose parts do not fit is told by the handler of stderr
            self.keep(record.getMessage(), record.name)

    def keep(self, text: str, logger: str) -> None:
        """Append a text, on one line, without keys and control characters. A disk that refuses it is no reason to end a run."""
        text = make_safe(redact(text))
        if text in self._known or len(self._known) >= _MOST:
            return
        self._known.add(text)
        with suppress(OutputError):
            append_text(self._path, json.dumps({"logger": logger, "text": text}) + "\n")


@contextmanager
def keep_warnings(directory: Path) -> Generator[Callable[[str], None]]:
    """Keep within the block what is logged as a warning, in warnings.jsonl of a run directory.

    Yields: a function that prints a line to stderr, and keeps it if it begins with "warning: ".
    """
    handler, root = WarningsFile(directory / WARNINGS_FILE), logging.getLogger()
    root.addHandler(handler)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if line.startswith(_PREFIX):
            handler.keep(line.removeprefix(_PREFIX), __name__)

    try:
        yield tell
    finally:
        root.removeHandler(handler)


def read_warnings(path: Path) -> tuple[str, ...]:
    """Return the texts of a file of warnings, in order; () if there is none. Lines of another kind, or cut ones, are passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    found: list[str] = []
    for line in lines:
        with suppress(ValueError):
            row: Any = json.loads(line)
            if isinstance(row, dict) and "text" in row:
                found.append(str(cast("dict[str, Any]", row)["text"]))
    return tuple(dict.fromkeys(found))

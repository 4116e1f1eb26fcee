"""Messages on stderr, by --log-level, and those that a run keeps in its directory. The default shows warnings and errors only.

--log-level info                                    summaries, as of episodes
--log-level debug                                   every step of every episode, the turn of each judged step, the parts of advantages
--log-level warning,rollouts.training.rollout_batch=debug            details of one module alone
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rollouts.config_files import suggest
from rollouts.errors import ConfigError, OutputError, make_safe, redact
from rollouts.output_files import append_text

LEVELS = ("debug", "info", "warning", "error")
OWN_LOGGERS = ("rollouts", "integration")
DEFAULT_LEVEL = "warning"
_FORMAT = "%(levelname)s %(name)s: %(message)s"
WARNINGS_FILE = "warnings.jsonl"
_PREFIX = "warning: "
_MOST = 200  # texts of a file, since one with a number in it may come at each step


class StderrHandler(logging.StreamHandler[object]):
    """Write to the current sys.stderr, which a live progress line replaces to stay below the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line."""
        self.stream = sys.stderr
        super().emit(record)


def parse_log_level(text: str) -> dict[str, int]:
    """Return the level of each logger. A level without a name applies to the loggers of this program.

    Raises: ConfigError for an unknown level.
    """
    levels: dict[str, int] = {}
    for part in text.split(","):
        name, separator, level = (piece.strip() for piece in part.rpartition("="))
        if level.lower() not in LEVELS or (separator and not name):
            example = "write a level, or name=level, as in warning,rollouts.training.rollout_batch=debug"
            raise ConfigError(f"--log-level {text!r}: {part.strip()!r} is not a level: {suggest(level.lower(), LEVELS)}; {example}")
        levels |= dict.fromkeys((name,) if name else OWN_LOGGERS, getattr(logging, level.upper()))
    return levels


@contextmanager
def log_to_stderr(levels: Mapping[str, int]) -> Generator[None]:
    """Log to stderr within the block at the given levels, each message on one line that begins with its level and logger."""
    loggers = {name: logging.getLogger(name) for name in levels}
    before = {name: logger.level for name, logger in loggers.items()}
    handler, root = StderrHandler(), logging.getLogger()
    for name, level in levels.items():
        loggers[name].setLevel(level)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, level in before.items():
            loggers[name].setLevel(level)


# -- warnings that a run keeps


class WarningsFile(logging.Handler):
    """Handler that appends warnings and errors of the log to a file; a text that it has already is left out."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path, self._known = path, set(read_warnings(path))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record of this program, without its traceback: libraries warn of what no setting changes."""
        if record.name.partition(".")[0] not in OWN_LOGGERS:
            return
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

"""Messages on stderr, by --log-level, and those that a run keeps in its directory. The default shows warnings and errors only.

--log-level info                                    summaries, as of episodes
--log-level debug                                   every step of every episode, the turn of each judged step, the parts of advantages
--log-level warning,rollouts.training.rollout_batch=debug            details of one module alone
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rollouts.checks import parse_json
from rollouts.config_files import suggest
from rollouts.errors import ConfigError, OutputError, make_safe, redact
from rollouts.output_files import append_text

LEVELS = ("debug", "info", "warning", "error")
OWN_LOGGERS = ("rollouts", "integration")
DEFAULT_LEVEL = "warning"
_FORMAT = "%(levelname)s %(name)s: %(message)s"
WARNINGS_FILE = "warnings.jsonl"
_PREFIX = "warning: "
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_MOST_OF_KIND = 10  # texts that differ by their numbers or arguments, since one with a number in it may come at each step
_MOST_KINDS = 200  # kinds of texts; all others are one kind
_OTHERS = "(other warnings)"


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
    """Handler that appends warnings and errors of the log to a file; a text that it has already is left out.

    Texts of one kind differ by the numbers and arguments of their message alone. A start of the run keeps _MOST_OF_KIND of each kind, and
    a line of the file has the number of others, which is exact once the handler has finished.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        rows = _read_rows(path)
        self._known = {str(row["text"]) for row in rows}
        self._left_out = Counter({str(row["kind"]): row["left_out"] for row in rows if type(row.get("left_out")) is int})
        self._written = Counter(self._left_out)
        self._kept, self._open = Counter[str](), set[str]()  # texts of each kind since the start, and kinds with texts left out since
        with suppress(OSError):
            if path.is_file() and not path.read_bytes().endswith(b"\n"):  # the last line was cut by a kill
                self._append("\n")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record of this program, without its traceback: libraries warn of what no setting changes."""
        if record.name.partition(".")[0] not in OWN_LOGGERS:
            return
        with suppress(Exception):  # a message whose parts do not fit is told by the handler of stderr
            self.keep(record.getMessage(), record.name, str(record.msg))

    def keep(self, text: str, logger: str, template: str) -> None:
        """Append a text, on one line, without keys and control characters. A disk that refuses it is no reason to end a run.

        Args:
            template: message before its arguments are filled in.
        """
        text = make_safe(redact(text))
        if text in self._known:
            return
        kind = _NUMBER.sub("N", make_safe(redact(template)))
        if kind not in self._kept and len(self._kept) >= _MOST_KINDS:
            kind = _OTHERS
        if self._kept[kind] < _MOST_OF_KIND:
            self._kept[kind] += 1
            self._known.add(text)
            self._append(json.dumps({"logger": logger, "text": text}) + "\n")
            return
        self._left_out[kind] += 1
        self._open.add(kind)
        count = self._left_out[kind]
        if count == 1 or count >= 10 * self._written[kind]:  # few lines, and a run that is killed has told nearly all
            self._tell_left_out(kind, f"{count} or more")

    def finish(self) -> None:
        """Append how many texts of each kind were left out."""
        for kind, count in self._left_out.items():
            if kind in self._open:
                self._tell_left_out(kind, str(count))

    def _tell_left_out(self, kind: str, count: str) -> None:
        text = f"{count} further warnings of this kind were left out: {kind}"
        self._written[kind] = self._left_out[kind]
        self._append(json.dumps({"logger": __name__, "text": text, "kind": kind, "left_out": self._left_out[kind]}) + "\n")

    def _append(self, line: str) -> None:
        with suppress(OutputError):
            append_text(self._path, line)


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
            text = line.removeprefix(_PREFIX)
            handler.keep(text, __name__, text)

    try:
        yield tell
    finally:
        root.removeHandler(handler)
        handler.finish()


def read_warnings(path: Path) -> tuple[str, ...]:
    """Return the texts of a file of warnings, in order, and behind them how many of each kind it does not have; () if there is none."""
    rows = _read_rows(path)
    left_out = {str(row["kind"]): str(row["text"]) for row in rows if "kind" in row}  # the last of each kind
    return tuple(dict.fromkeys([*(str(row["text"]) for row in rows if "kind" not in row), *left_out.values()]))


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file of warnings. Those of another kind, or cut ones, are passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError):
            row: Any = parse_json(line)
            if isinstance(row, dict) and "text" in row:
                found.append(cast("dict[str, Any]", row))
    return found

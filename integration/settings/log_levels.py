"""--log-level: the log levels of messages on stderr. The default shows warnings and errors only.

--log-level info                                    summaries, as of episodes
--log-level debug                                   every step of every episode, the turn of each judged step, the parts of advantages
--log-level warning,rollouts.training.rollout_batch=debug            details of one module alone
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rollouts.config_files import suggest
from rollouts.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
OWN_LOGGERS = ("rollouts", "integration")
DEFAULT_LEVEL = "warning"
_FORMAT = "%(levelname)s %(name)s: %(message)s"


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

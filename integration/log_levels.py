"""--log-level: how much of what goes on is told on stderr. Quiet unless something is wrong.

--log-level info                                    summaries of episodes, and the like
--log-level debug                                   every step of every episode, which turn a judged step is, what advantages are made of
--log-level warning,rollouts.rollout_training=debug            of one module alone
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rollouts.config import suggest
from rollouts.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
OWN_LOGGERS = ("rollouts", "integration")
DEFAULT_LEVEL = "warning"
_FORMAT = "%(levelname)s %(name)s: %(message)s"


class StderrHandler(logging.StreamHandler[object]):
    """Writes to what sys.stderr is at that moment: a live line of progress puts something else there, and stays below what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.stream = sys.stderr
        super().emit(record)


def parse_log_level(text: str) -> dict[str, int]:
    """The level of each logger: of a level alone those of this program, of name=level that of the name.

    Raises: ConfigError for a level that does not exist.
    """
    levels: dict[str, int] = {}
    for part in text.split(","):
        name, separator, level = (piece.strip() for piece in part.rpartition("="))
        if level.lower() not in LEVELS or (separator and not name):
            example = "write a level, or name=level, as in warning,rollouts.rollout_training=debug"
            raise ConfigError(f"--log-level {text!r}: {part.strip()!r} is no level: {suggest(level.lower(), LEVELS)}; {example}")
        levels |= dict.fromkeys((name,) if name else OWN_LOGGERS, getattr(logging, level.upper()))
    return levels


@contextmanager
def log_to_stderr(levels: Mapping[str, int]) -> Generator[None]:
    """Tell on stderr, in the block, what loggers say at their levels, each in one line that begins with the level and the logger's name."""
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

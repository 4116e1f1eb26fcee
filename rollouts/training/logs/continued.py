"""A logger that a run does not depend on: its calls are made in a thread of its own, which is left behind if one does not return."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollouts.errors import ConfigError, redact
from rollouts.training.metrics import MetricsLogger, Value

if TYPE_CHECKING:
    from rollouts.types import Sample

_logger = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""Default limit of a call of a logger, in seconds."""
_PROMPT_S = 1.0  # seconds that a line is waited for, so that a logger that is up to date has it before the run goes on
_MOST_WAITING = 1000  # lines that may wait for a slow logger; the run waits for one that is further behind


class ContinuedLogger:
    """A logger that cannot end or stop a run: what it raises is said once, and it is given up if a call of it does not return.

    Its lines wait in a queue while it is slow. In a resumed run it passes on the lines that the logger's store lacks, and leaves out those
    that it has: they are the same.
    """

    def __init__(
        self,
        create: Callable[[], MetricsLogger],
        name: str,
        earlier: Sequence[Mapping[str, Any]] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """
        Args:
            create: makes the logger; if it fails, there is none.
            name: name for messages.
            earlier: the lines of metrics that a resumed run goes on behind; None = the run is new, and what the store has is of others.
            timeout_s: seconds for the start, for each further call, and in `finish` for all that waits and the end together.

        Raises: ConfigError of `create`, for example of a package that is not installed.
        """
        self._name, self._timeout_s = name, timeout_s
        self._last = dict[str, int]()
        self._logger: Any = None
        self._refusal: ConfigError | None = None
        self._has_failed = self._is_given_up = False
        self._lines = self._logged = 0  # lines that were given to the logger, and those of which its call has ended
        self._call: tuple[str, float] | None = None  # the present call of the thread, and its start
        self._calls: queue.Queue[tuple[str, Callable[[], object], threading.Event]] = queue.Queue(_MOST_WAITING)
        self._newest = threading.Event()  # set when all calls so far have ended
        threading.Thread(target=self._work, name=f"logger {name}", daemon=True).start()
        if not self._put("its start", partial(self._start, create)).wait(timeout_s):
            self._give_up("its start")
        if self._refusal is not None:
            self._is_given_up = True
            raise self._refusal
        if earlier is not None:
            self._put("last_steps", partial(self._catch_up, earlier))

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log a line that the store lacks."""
        self._lines += 1
        self._pass_on("log", partial(self._log, dict(metrics), step))

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Log samples of a step whose line the store lacks, if the logger has tables."""
        if hasattr(self._logger, "log_samples"):
            self._pass_on("log_samples", partial(self._log_samples, samples, step, stage))

    def finish(self) -> None:
        """Finish the logger."""
        if not self._is_given_up and not self._put("finish", self._finish).wait(self._timeout_s):
            self._give_up(late[0] if (late := self._call) is not None else "finish")
        if self._is_given_up and self._lines > self._logged:
            _logger.warning("the logger %s has not got %d of %d lines of this run", self._name, self._lines - self._logged, self._lines)
        self._is_given_up = True  # the thread ends, and nothing is logged afterwards

    def set_error(self, error: BaseException, where: str) -> None:
        """Say what failed, unless something was said before."""
        if not self._has_failed and not self._is_given_up:
            text = "the logger %s failed in %s (%s: %s); the run goes on, and this is said once. metrics.jsonl has every line"
            _logger.warning(text, self._name, where, type(error).__name__, redact(str(error)))
        self._has_failed = True

    # -- in the thread of the run

    def _pass_on(self, where: str, call: Callable[[], object]) -> None:
        if self._is_given_up:
            return
        is_up_to_date = self._newest.is_set()
        ended = self._put(where, call)
        if is_up_to_date:
            ended.wait(min(_PROMPT_S, self._timeout_s))
        elif (late := self._call) is not None and time.monotonic() - late[1] >= self._timeout_s:
            self._give_up(late[0])

    def _put(self, where: str, call: Callable[[], object]) -> threading.Event:
        """Hand a call to the thread; wait while too many are waiting. Returns the event of its end, or of the logger's that is given up."""
        ended = threading.Event()
        while not self._is_given_up:
            try:
                self._calls.put((where, call, ended), timeout=min(_PROMPT_S, self._timeout_s))
                break
            except queue.Full:
                if (late := self._call) is not None and time.monotonic() - late[1] >= self._timeout_s:
                    self._give_up(late[0])
        else:
            ended.set()  # there is nothing to wait for
        self._newest = ended
        return ended

    def _give_up(self, where: str) -> None:
        self._is_given_up = True
        _logger.warning(
            "the logger %s has not returned from %s within %g s (--logger-timeout-s) and is given up; the run goes on without it. "
            "metrics.jsonl has every line",
            *(self._name, where, self._timeout_s),
        )

    # -- in the thread of the logger

    def _work(self) -> None:
        where = ""
        while not self._is_given_up and self._refusal is None and where != "finish":
            where, call, ended = self._calls.get()
            self._try(where, call)
            self._call = None
            ended.set()

    def _try(self, where: str, call: Callable[[], object]) -> object:
        self._call = (where, time.monotonic())
        try:
            return call()
        except BaseException as error:  # packages of others, and networks, raise anything
            if where == "its start" and isinstance(error, ConfigError):
                self._refusal = error
            else:
                self.set_error(error, where)
            return None

    def _start(self, create: Callable[[], MetricsLogger]) -> None:
        self._logger = create()

    def _catch_up(self, earlier: Sequence[Mapping[str, Any]]) -> None:
        """Log the lines of the run so far that the store lacks; each call has the whole time limit."""
        if not hasattr(self._logger, "last_steps"):
            return
        self._last = dict(self._logger.last_steps())
        for line in earlier:
            self._try("log", partial(self._send, {key: value for key, value in line.items() if key != "step"}, int(line["step"])))

    def _send(self, metrics: Mapping[str, Value], step: int) -> None:
        if self._logger is not None and step > self._last.get(str(metrics.get("stage", "")), -1):
            self._logger.log(metrics, step)

    def _log(self, metrics: Mapping[str, Value], step: int) -> None:
        try:
            self._send(metrics, step)
        finally:
            self._logged += 1

    def _log_samples(self, samples: Sequence[Sample], step: int, stage: str) -> None:
        if step > self._last.get(stage, -1):
            self._logger.log_samples(samples, step, stage)

    def _finish(self) -> None:
        if self._logger is not None:
            self._logger.finish()

"""Watch threads of the processes of a run: heartbeats, reports of failure, and ending a stuck process.

A computing thread cannot leave a collective operation that another rank will never join. So each process has a thread that only watches.
It ends the process, with one line on stderr, if its computation is stuck although the run has failed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, NoneType
from typing import Any, cast

import torch.distributed as dist

from rollouts.backends.ranks.channel import Channel, ChannelClosed, wait_readable
from rollouts.errors import BackendError, CheckpointError, ConfigError, DataError, RolloutsError

_BEAT, _FAILED, _ABORT, _STOP = b"", b"F", b"A", b"S"
_SEND_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """Time limits of the watch."""

    timeout_s: float  # seconds that an operation, or a rank's silence, may last
    grace_s: float  # seconds for a stuck process to get free once another has failed
    beat_s: float  # seconds between two heartbeats


@dataclass(frozen=True)
class Trouble:
    """Failures that the leader's watch has seen during the running operation, or between operations."""

    operation: str | None = None
    reports: Mapping[int, str] = field(default_factory=dict[int, str])  # failure by rank, in order of arrival
    gone: tuple[int, ...] = ()  # ranks whose process ended before it was told to, in this order
    silent: tuple[int, ...] = ()  # ranks without a heartbeat for several beats


def end_process(line: str) -> None:
    """Write a line to stderr and end this process at once with status 1, whatever its threads are doing."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    os._exit(1)


class AwakeClock:
    """Clock of the seconds in which this process ran, so that a process stopped and resumed does not take the others for silent."""

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s, self._clock = longest_gap_s, clock
        self._last, self.now = clock(), 0.0

    def advance(self) -> float:
        """Return the time; a gap between two calls counts as longest_gap_s at most."""
        last, self._last = self._last, self._clock()
        self.now += min(self._last - last, self._longest_gap_s)
        return self.now


class _Watch:
    """Common base of both watches: a thread, and the operation of the computing thread."""

    def __init__(self, limits: WatchLimits, end: Callable[[str], None]) -> None:
        self._limits, self._end = limits, end
        self._clock = AwakeClock(2 * limits.beat_s)
        self._lock = threading.Lock()
        self._operation: str | None = None
        self._since = 0.0  # start time of the operation
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        next_beat = self._clock.now
        while not self._closed.is_set():
            now = self._clock.advance()
            with self._lock:
                if now >= next_beat:
                    next_beat = now + self._limits.beat_s
                    self._send_beats()
                self._judge(now)
            self._receive(self._limits.beat_s / 2)

    def _send_beats(self) -> None: ...

    def _judge(self, now: float) -> None: ...

    def _receive(self, timeout_s: float) -> None: ...


class LeaderWatch(_Watch):
    """Watch of rank 0: records ranks that are gone, silent or failed, tells all to end, and ends rank 0 if it is stuck."""

    def __init__(self, channels: Mapping[int, Channel], limits: WatchLimits, end: Callable[[str], None] = end_process) -> None:
        super().__init__(limits, end)
        self._channels = dict(channels)
        self._seen = dict.fromkeys(channels, 0.0)
        self._reports: dict[int, str] = {}
        self._gone: list[int] = []
        self._trouble_since: float | None = None
        self._is_aborted = False
        self.lost = threading.Event()  # a rank is gone, or the watch is closed
        self.stop_asked_by: int | None = None  # the rank that was told to end
        self._all_ended = threading.Event()  # no other rank is left
        if not channels:
            self._all_ended.set()

    def begin(self, operation: str) -> None:
        """Record that the computing thread begins an operation of all ranks."""
        with self._lock:
            self._operation, self._since, self._trouble_since = operation, self._clock.now, None
            self._reports.clear()

    def finish(self) -> Trouble:
        """Record that the operation is over on rank 0. Returns the failures seen."""
        with self._lock:
            found = replace(self._look(), operation=self._operation)
            self._operation, self._trouble_since = None, None
            return found

    def look(self) -> Trouble:
        """Return the failures seen so far."""
        with self._lock:
            return self._look()

    def abort(self, reason: str) -> None:
        """Tell every rank to end with a non-zero status, even from the middle of an operation."""
        with self._lock:
            self._abort(reason)

    def wait_for_ends(self, at_most_s: float) -> None:
        """Wait until every other rank has ended."""
        self._all_ended.wait(at_most_s)

    def close(self) -> None:
        """Stop watching; sets `lost`, so its waiters return."""
        super().close()
        self.lost.set()

    def _look(self) -> Trouble:
        limit = self._clock.now - max(3 * self._limits.beat_s, min(5.0, self._limits.timeout_s / 2))
        silent = tuple(rank for rank, seen in self._seen.items() if seen < limit and rank not in self._gone)
        return Trouble(self._operation, dict(self._reports), tuple(self._gone), silent)

    def _abort(self, reason: str) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            for channel in self._channels.values():
                _try_send(channel, _ABORT + reason.encode())

    def _send_beats(self) -> None:
        for channel in self._channels.values():
            _try_send(channel, _BEAT)

    def _receive(self, timeout_s: float) -> None:
        if not self._channels:
            self._closed.wait(timeout_s)
            return
        readable = set(wait_readable(self._channels.values(), timeout_s))
        for rank, channel in [item for item in self._channels.items() if item[1] in readable]:
            try:
                message = channel.receive(_SEND_S)
            except ChannelClosed:
                with self._lock:
                    del self._channels[rank]
                    if not self._is_aborted:
                        self._gone.append(rank)
                self.lost.set()
                if not self._channels:
                    self._all_ended.set()
            else:
                with self._lock:
                    self._seen[rank] = self._clock.now
                    if message == _STOP:
                        self.stop_asked_by = rank
                    if message.startswith(_FAILED):
                        self._reports.setdefault(rank, message.removeprefix(_FAILED).decode())

    def _judge(self, now: float) -> None:
        if self._operation is None:
            return
        limits, took = self._limits, now - self._since
        if self._trouble_since is None and (self._reports or self._gone or took > limits.timeout_s + limits.grace_s):
            self._trouble_since = now
        if self._trouble_since is None or now - self._trouble_since <= limits.grace_s:
            return
        told = describe_trouble(self._look())
        self._abort(told)
        if now - self._trouble_since > 2 * limits.grace_s:
            details = "".join(f"\nrank {rank}: {report}" for rank, report in self._reports.items())
            self._end(f"rank 0 ends, stuck in {self._operation}: {told}{details}")


class WorkerWatch(_Watch):
    """Watch of every other rank: sends rank 0 heartbeats or its failure, and ends the process if rank 0 is gone or demands it."""

    def __init__(
        self, rank: int, channel: Channel, limits: WatchLimits, *, wake: Callable[[], None], end: Callable[[str], None] = end_process
    ) -> None:
        """Args: wake: ends the wait for a command."""
        super().__init__(limits, end)
        self._rank, self._channel, self._wake = rank, channel, wake
        self._seen = 0.0
        self._doomed_since: float | None = None
        self.reason: str | None = None  # reason for this rank to end
        self.asks_to_stop = False  # each heartbeat asks rank 0 to end the run in order; set by signal handlers, so without the lock

    def begin(self, operation: str) -> None:
        """Record that the computing thread begins a command."""
        with self._lock:
            self._operation = operation

    def finish(self, report: str | None = None) -> None:
        """Record that the command is over. report: its failure, for rank 0, which may be stuck in its own part of the command."""
        with self._lock:
            if report is not None:
                _try_send(self._channel, _FAILED + report.encode())
            self._operation = None
            if self._doomed_since is not None:
                self._wake()

    def _send_beats(self) -> None:
        _try_send(self._channel, _STOP if self.asks_to_stop else _BEAT)

    def _receive(self, timeout_s: float) -> None:
        if self.reason is not None:
            self._closed.wait(timeout_s)
            return
        if not wait_readable([self._channel], timeout_s):
            return
        try:
            message = self._channel.receive(_SEND_S)
        except ChannelClosed:
            self._doom("rank 0 is gone")
        else:
            self._seen = self._clock.now
            if message.startswith(_ABORT):
                self._doom(message.removeprefix(_ABORT).decode())

    def _judge(self, now: float) -> None:
        if self._doomed_since is None and now - self._seen > self._limits.timeout_s:
            self._set_doom(f"rank 0 has given no sign of life for {self._limits.timeout_s:g} s", now)
        if self._doomed_since is not None and self._operation is not None and now - self._doomed_since > self._limits.grace_s:
            self._end(f"rank {self._rank} ends, stuck in {self._operation}: {self.reason}")

    def _doom(self, reason: str) -> None:
        with self._lock:
            self._set_doom(reason, self._clock.now)

    def _set_doom(self, reason: str, now: float) -> None:
        self.reason, self._doomed_since = reason, now
        if self._operation is None:
            self._wake()


def describe_trouble(trouble: Trouble) -> str:
    """Describe the failures in one line for users."""
    operation = trouble.operation or "the run"
    if trouble.reports:
        rank, report = next(iter(trouble.reports.items()))
        return f"rank {rank} failed in {operation}: {report.strip().splitlines()[-1]}"
    if trouble.gone:
        return f"rank {trouble.gone[0]} is gone (it was killed, or ran out of memory) during {operation}"
    if trouble.silent:
        return f"rank {', '.join(map(str, trouble.silent))} gives no sign of life (stopped, or its machine is gone) during {operation}"
    return f"{operation} does not end"


def _try_send(channel: Channel, message: bytes) -> None:
    """Send, ignoring a closed channel: receiving detects it."""
    try:
        channel.send(message, _SEND_S)
    except ChannelClosed:
        return


EXPLAIN_LOSS = "it was killed, or ran out of memory. Its output and the log of the system say why"

_KINDS: Mapping[str, type[RolloutsError]] = MappingProxyType(
    {kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError, BackendError)}
)
_SIGNS = (
    *("timed out", "timeout", "connection closed", "connection reset", "connection was closed", "broken pipe"),
    *("connection to another rank", "remote worker", "socket unexpectedly closed"),  # the last two are gloo's
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Exception of a rank, as a value."""

    rank: int
    kind: str | None  # name of the library's error class; None = another exception
    name: str  # name of its class
    message: str
    trace: str
    is_consequence: bool  # whether it is a failed exchange with another rank, most likely caused by that rank's failure


def describe_failure(rank: int, error: BaseException) -> Failure:
    """Convert an exception to a value."""
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)
    return Failure(
        rank=rank,
        kind=kind,
        name=type(error).__name__,
        message="\n".join([str(error), *getattr(error, "__notes__", ())]),
        trace="".join(traceback.format_exception(error)),
        is_consequence=_is_consequence(error),
    )


def read_failure(values: Mapping[str, object]) -> Failure:
    """Restore a failure from its vars. Raises ValueError if they are no failure."""
    types = {"rank": int, "kind": (str, NoneType), "name": str, "message": str, "trace": str, "is_consequence": bool}
    wrong = [name for name, kind in types.items() if not isinstance(values.get(name, ...), kind)]
    if wrong or set(values) != set(types) or values["kind"] not in (None, *_KINDS):
        raise ValueError(f"no failure of a rank: {sorted(values)}")
    return Failure(**cast("dict[str, Any]", dict(values)))


def _is_consequence(error: BaseException) -> bool:
    """Whether an exchange with another rank failed, as far as errors of torch.distributed can be recognized."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__
    return any(
        isinstance(e, dist.DistError) or (isinstance(e, RuntimeError) and any(sign in str(e).lower() for sign in _SIGNS)) for e in chain
    )


def are_alike(failures: Mapping[int, Failure], num_ranks: int) -> bool:
    """Whether every rank had the same error by itself, or every rank a broken exchange; not one the error, the others its consequence."""
    return len(failures) == num_ranks and len({(failure.name, failure.is_consequence) for failure in failures.values()}) == 1


def find_cause(
    operation: str,
    failures: Mapping[int, Failure],
    missing: Sequence[int],
    trouble: Trouble,
    timeout_s: float,
    *,
    closed: Sequence[int] = (),
    waited_s: float | None = None,
) -> Failure:
    """Find the failure that caused the others.

    Args:
        failures: failures of the ranks that answered with one.
        missing: ranks that have not answered.
        trouble: failures that the watch has seen.
        closed: ranks whose connection ended while an answer was awaited, in this order.
        waited_s: seconds from the operation's start until answers were given up; None = timeout_s.
    """
    own = [failures[rank] for rank in sorted(failures) if not failures[rank].is_consequence]
    if own:  # rank 0's first: its traceback is at hand
        order = {rank: place for place, rank in enumerate(trouble.reports)}
        return min(own, key=lambda failure: -1 if failure.rank == 0 else order.get(failure.rank, len(order)))
    gone = [rank for rank in trouble.gone if rank in missing]
    if gone:
        return _without_word(gone[0], f"its process is gone: {EXPLAIN_LOSS}")
    silent = [rank for rank in trouble.silent if rank in missing]
    if silent:
        return _without_word(silent[0], "its process gives no sign of life: it is stopped, or its machine cannot be reached")
    if closed:
        return _without_word(
            closed[0], "it has closed the connection to rank 0 without an answer, so its process ends. Its output says why"
        )
    if missing and waited_s is not None and waited_s < timeout_s:
        return _without_word(
            missing[0],
            f"it has not come to the end of {operation} within {waited_s:.1f} s, in which other ranks have failed waiting for it",
        )
    if missing:
        return _without_word(
            missing[0], f"it has not come to the end of {operation} within {timeout_s:g} s. Raise the timeout if that may take so long"
        )
    return failures[min(failures)]


def _without_word(rank: int, message: str) -> Failure:
    return Failure(rank=rank, kind=BackendError.__name__, name=BackendError.__name__, message=message, trace="", is_consequence=False)


def make_error(failure: Failure, operation: str) -> RolloutsError:
    """Make rank 0's error for a failure of another rank: it names rank and operation; for unexpected errors a note has the traceback."""
    if failure.kind is not None:
        return _KINDS[failure.kind](f"rank {failure.rank} failed in {operation}: {failure.message}")
    error = BackendError(f"rank {failure.rank} failed in {operation}: {failure.name}: {failure.message}")
    error.add_note(f"there:\n{failure.trace.rstrip()}")
    return error

"""The threads that watch over the processes of a run: signs of life, reports of failure, and the end of a process that is stuck.

A thread that computes cannot look up from a collective operation which another rank will never join. So each process has a thread that
does nothing else. It ends the process, with one line on stderr, when its computation is stuck although the run has failed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rollouts.backends.rank_channel import Channel, ChannelClosed, wait_readable

_BEAT, _FAILED, _ABORT = b"", b"F", b"A"
_SEND_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """How long what may take."""

    timeout_s: float  # an operation, and a rank without a sign of life
    grace_s: float  # for a stuck process to get free once another has failed
    beat_s: float  # between two signs of life


@dataclass(frozen=True)
class Trouble:
    """What the leader's watch knows of the operation that is under way, or of the ranks while there is none."""

    operation: str | None = None
    reports: Mapping[int, str] = field(default_factory=dict[int, str])  # by rank, first come first: what failed there
    gone: tuple[int, ...] = ()  # ranks whose process ended, in this order, before they were told to
    silent: tuple[int, ...] = ()  # ranks without a sign of life for several beats


def end_process(line: str) -> None:
    """Write a line to stderr and end this process at once with status 1, whatever its threads are doing."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    os._exit(1)


class AwakeClock:
    """Seconds in which this process ran: a process that was stopped and goes on must not think that the others have been silent."""

    def __init__(self, longest_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap_s, self._clock = longest_gap_s, clock
        self._last, self.now = clock(), 0.0

    def advance(self) -> float:
        """The time now; a gap between two calls counts as longest_gap_s at most."""
        last, self._last = self._last, self._clock()
        self.now += min(self._last - last, self._longest_gap_s)
        return self.now


class _Watch:
    """What both sides have: a thread, and what the thread that computes is doing."""

    def __init__(self, limits: WatchLimits, end: Callable[[str], None]) -> None:
        self._limits, self._end = limits, end
        self._clock = AwakeClock(2 * limits.beat_s)
        self._lock = threading.Lock()
        self._operation: str | None = None
        self._since = 0.0  # when the operation began
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
    """Rank 0's: knows which ranks are gone, silent or failed, tells all to end, and ends rank 0 if it is stuck."""

    def __init__(self, channels: Mapping[int, Channel], limits: WatchLimits, end: Callable[[str], None] = end_process) -> None:
        super().__init__(limits, end)
        self._channels = dict(channels)
        self._seen = dict.fromkeys(channels, 0.0)
        self._reports: dict[int, str] = {}
        self._gone: list[int] = []
        self._trouble_since: float | None = None
        self._is_aborted = False
        self.lost = threading.Event()  # a rank is gone, or the watch is closed
        self._all_ended = threading.Event()  # no other rank is left
        if not channels:
            self._all_ended.set()

    def begin(self, operation: str) -> None:
        """The thread that computes begins an operation of all ranks."""
        with self._lock:
            self._operation, self._since, self._trouble_since = operation, self._clock.now, None
            self._reports.clear()

    def finish(self) -> Trouble:
        """The operation is over on rank 0. Returns what is known of the ranks."""
        with self._lock:
            found = replace(self._look(), operation=self._operation)
            self._operation, self._trouble_since = None, None
            return found

    def look(self) -> Trouble:
        """What is known now."""
        with self._lock:
            return self._look()

    def abort(self, reason: str) -> None:
        """Tell every rank to end, non-zero, even from the middle of an operation."""
        with self._lock:
            self._abort(reason)

    def wait_for_ends(self, at_most_s: float) -> None:
        """Wait until every other rank has ended."""
        self._all_ended.wait(at_most_s)

    def close(self) -> None:
        """Stop watching; ends what waits for `lost`."""
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
    """Every other rank's: tells rank 0 that it lives, or what failed, and ends the process if rank 0 is gone or says so."""

    def __init__(
        self, rank: int, channel: Channel, limits: WatchLimits, *, wake: Callable[[], None], end: Callable[[str], None] = end_process
    ) -> None:
        """Args: wake: ends the wait for a command."""
        super().__init__(limits, end)
        self._rank, self._channel, self._wake = rank, channel, wake
        self._seen = 0.0
        self._doomed_since: float | None = None
        self.reason: str | None = None  # why this rank is to end

    def begin(self, operation: str) -> None:
        """The thread that computes begins a command."""
        with self._lock:
            self._operation = operation

    def finish(self, report: str | None = None) -> None:
        """The command is over. report: what failed, for rank 0, which may be stuck in its own part of the command."""
        with self._lock:
            if report is not None:
                _try_send(self._channel, _FAILED + report.encode())
            self._operation = None
            if self._doomed_since is not None:
                self._wake()

    def _send_beats(self) -> None:
        _try_send(self._channel, _BEAT)

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
    """One line for people."""
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
    """Send; that nobody is there is found out by receiving."""
    try:
        channel.send(message, _SEND_S)
    except ChannelClosed:
        return

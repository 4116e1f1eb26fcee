"""Calls of users' code: whatever it raises is its own failure, and it ends by its deadline, even if it blocks the event loop.

A trio deadline ends async code where it awaits. Code that never awaits, such as an `async def` with time.sleep in it, would stop the whole
program. Each step of it, from one await to the next, therefore has an alarm: a signal that raises CodeBlocked inside of it. The alarm ends
whatever the interpreter runs or waits in (loops, sleep, sockets, locks, subprocesses), at that place.

Limits: the alarm is the process's SIGALRM, which is delivered to the main thread alone. There is none if trio runs in another thread, on
Windows, while an earlier alarm of other code is due, or in further tasks that the user's code starts in a nursery. A C function that does
not return to the interpreter is not ended by it. In a plain `def`, which runs in a thread of its own, one that releases the interpreter's
lock is abandoned at its deadline; one that keeps the lock (an integer of millions of digits, a long `sum(range(...))`) stops the whole
program, and only another process can end it: run such code in the sandbox.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

import trio

from rollouts.checks import iterate_awaitable
from rollouts.errors import find_own_frame

T = TypeVar("T")
_AGAIN_S = 0.05  # seconds between two alarms, for code that takes the first for an error of its own


class CodeBlocked(BaseException):
    """Raised inside code that has blocked the event loop for too long. Not an Exception, so that the code does not swallow it."""

    def __init__(self, timeout_s: float, place: str) -> None:
        super().__init__(f"{place} has blocked the event loop for {timeout_s:g} s")
        self.timeout_s = timeout_s  # timeout of the alarm that rang
        self.place = place  # file:line in the user's code, if that is in the stack


class interrupt_blocking:  # a context manager reads as a verb
    """Raise CodeBlocked in the block, which awaits nothing, once it takes longer than a timeout. The module docstring lists limits.

    For several pieces of code one after another, with nothing awaited in between: begin and pause around each of them, and stop at the end,
    which costs a fraction of as many blocks.
    """

    def __init__(self, timeout_s: float, on_wait: Callable[[], None] | None = None) -> None:
        """
        Args:
            on_wait: called when code that finish runs waits, before other tasks run.
        """
        self.timeout_s = timeout_s
        self.on_wait = on_wait
        self._restore: Callable[[], None] | None = None
        self._is_running = False

    def __enter__(self) -> interrupt_blocking:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def begin(self) -> None:
        """Raise CodeBlocked after the timeout, counted from now, until pause or stop."""
        if self._restore is None:
            self._install()
        else:
            signal.setitimer(signal.ITIMER_REAL, max(self.timeout_s, 1e-6), _AGAIN_S)
        self._is_running = True

    def pause(self) -> None:
        """Raise nothing until begin."""
        self._is_running = False

    def stop(self) -> None:
        """Raise nothing, and restore the earlier handler and alarm of other code."""
        self._is_running = False
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _install(self) -> None:
        if not math.isfinite(self.timeout_s) or not hasattr(signal, "setitimer"):
            return
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) is None:
            return
        due, interval = signal.getitimer(signal.ITIMER_REAL)
        if 0 < due <= self.timeout_s:
            return
        self._restore = partial(_put_back, signal.signal(signal.SIGALRM, self._ring), due, interval, time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, max(self.timeout_s, 1e-6), _AGAIN_S)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._is_running and frame is not None and frame.f_code.co_filename != __file__:  # else the block is being left
            own = find_own_frame(frame)
            raise CodeBlocked(self.timeout_s, f"{own.f_code.co_filename}:{own.f_lineno}")


def _put_back(handler: Any, due: float, interval: float, since: float) -> None:
    """Restore the earlier alarm of other code, with its remaining time."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    if due > 0:
        signal.setitimer(signal.ITIMER_REAL, max(due - (time.monotonic() - since), 1e-3), interval)


async def finish(awaitable: Awaitable[T], timeout_s: float, alarm: interrupt_blocking | None = None) -> T:
    """Await the result of a user's function. Raises CodeBlocked once it blocks the event loop for longer than timeout_s.

    The caller sets the deadline of the whole, by a cancel scope.

    Args:
        alarm: alarm of several calls one after another, which its owner stops; default: one of its own.
    """
    own = None
    if alarm is None:
        alarm = own = interrupt_blocking(timeout_s)
    try:
        result: Any = await _Steps(awaitable, alarm)
    except BaseExceptionGroup as group:  # from a nursery in whose block the alarm rang
        blocks, others = group.split(CodeBlocked)
        if blocks is None or (others is not None and others.subgroup(KeyboardInterrupt) is not None):
            raise
        raise _first_leaf(blocks) from group
    finally:
        if own is not None:
            own.stop()
    return result


class ThreadResults(Generic[T]):
    """Results of calls in a thread that may go on after its caller has left: those that come later are thrown away."""

    def __init__(self, throw_away: Callable[[T], object]) -> None:
        self._throw_away = throw_away
        self._results: list[T] = []
        self._is_taken = False
        self._lock = threading.Lock()

    def add(self, result: T) -> bool:
        """Keep a result, in the thread. Returns False if the caller has left, so that no more calls are of use."""
        with self._lock:
            if not self._is_taken:
                self._results.append(result)
                return True
        self._throw_away(result)
        return False

    def take(self) -> list[T]:
        """Return the results so far; later ones are thrown away."""
        with self._lock:
            self._is_taken = True
            return self._results

    def drop(self) -> None:
        """Throw all results away, those so far and later ones."""
        for result in self.take():
            self._throw_away(result)


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return error  # pyright: ignore[reportUnknownVariableType]


class _Steps:
    """An awaitable that runs another one step by step, each with an alarm."""

    def __init__(self, awaitable: Awaitable[Any], alarm: interrupt_blocking) -> None:
        self.awaitable = awaitable  # for tools that show stacks
        self._steps: Any = iterate_awaitable(awaitable)
        self._alarm = alarm

    def __await__(self) -> _Steps:
        return self

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        return self._step(next, self._steps)

    def send(self, value: Any) -> Any:
        """Generator protocol: send the event loop's answer."""
        return self._step(self._steps.send, value)

    def throw(self, *error: Any) -> Any:
        """Generator protocol: raise an exception of the event loop, such as a cancellation."""
        return self._step(self._steps.throw, *error)

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        alarm = self._alarm
        alarm.begin()
        try:
            waits_for = step(*values)
        except BaseException:  # it has ended, StopIteration included: the next piece of code may follow at once
            alarm.pause()
            raise
        alarm.stop()
        if alarm.on_wait is not None:
            alarm.on_wait()
        return waits_for

    def close(self) -> None:
        """Generator protocol: close."""
        self._steps.close()


def is_passed_on(error: BaseException) -> bool:
    """Whether an exception that came out of user code is not its own failure: a cancellation, Ctrl-C, or an alarm of a caller.

    Everything else is its own, SystemExit too, which must not end a program that only asked for a reward.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(is_passed_on(inner) for inner in error.exceptions)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(error, KeyboardInterrupt | GeneratorExit):  # both reach the main thread alone, unless code raises them
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, trio.Cancelled | CodeBlocked)

"""Signal handling in a thread, which works even while user code or a C function blocks the event loop.

The interpreter writes the number of every signal into a socket, whatever the main thread is doing. A thread reads the socket and acts. The
exception are C functions that hold the interpreter's lock for good: no other thread runs then, and only SIGKILL ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from rollouts.errors import find_own_frame

if TYPE_CHECKING:
    import trio

END_S = 2.0  # seconds from the second signal to the end of the process, for cleanup
SAVE_S = 300.0  # most seconds for which the end of a run waits for the checkpoint that is being written
STUCK_S = 5.0  # seconds from an unanswered alarm to the end of the process
_TICK_S = 0.1  # seconds between two looks at whether a checkpoint is written
_ASK_S = 0.5  # seconds between two looks at whether there is a cause to end
EXIT_STUCK, EXIT_STOPPED = 1, 130


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits of the time after a signal, and of that without a step."""

    grace_s: float | None = None  # seconds from the first signal to the end of the run, more than 0, without those in which a
    # checkpoint is written; None = to the end of the step
    stall_s: float | None = None  # seconds without the end of a step after which all stacks are printed, more than 0; None = never


@contextmanager
def watch_beside(
    patience: Patience | None = None,
    count_steps: Callable[[], int] = lambda: 0,
    is_saving: Callable[[], bool] = lambda: False,
    find_cause: Callable[[], str | None] | None = None,
) -> Generator[None]:
    """Watch signals in the block: the second SIGINT or SIGTERM ends the process, SIGUSR1 prints tasks, an unanswered alarm ends the run.

    Does nothing if trio is not in the main thread, as only the main thread receives signals.

    Args:
        patience: when a first signal counts as a second one, and when a run without a step is one to look at.
        count_steps: the number of ended steps, asked by another thread.
        is_saving: whether a checkpoint is being written, asked by another thread; up to SAVE_S of that time do not count as grace.
        find_cause: returns a cause to end that sends this process no signal, or None, asked by another thread: the grace begins then, too.
    """
    patience = patience or Patience()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import trio  # takes a tenth of a second, which --help has no use for

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    trios = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = _Watch(ours, trios, trio.lowlevel.current_root_task(), trio.lowlevel.current_trio_token(), patience.grace_s, is_saving)
    threads = [threading.Thread(target=watch.listen, name="signals", daemon=True)]
    if patience.stall_s is not None:
        threads.append(threading.Thread(target=watch.look_for_stalls, args=(patience.stall_s, count_steps), name="stalls", daemon=True))
    if find_cause is not None and patience.grace_s is not None:
        threads.append(threading.Thread(target=watch.look_for_cause, args=(patience.grace_s, find_cause), name="cause", daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(trios, warn_on_full_buffer=False)
        watch.ended.set()
        theirs.close()
        for thread in threads:
            thread.join()
        ours.close()


class _Watch:
    def __init__(
        self,
        numbers: socket.socket,
        trios: int,
        root: Any,
        token: trio.lowlevel.TrioToken,
        grace_s: float | None,
        is_saving: Callable[[], bool],
    ) -> None:
        self._numbers, self._trios, self._root, self._token = numbers, trios, root, token
        self._grace_s, self._is_saving = grace_s, is_saving
        self._num_stops = 0
        self._check: threading.Thread | None = None
        self.ended = threading.Event()

    def listen(self) -> None:
        """Answer signals until the other end is closed."""
        while numbers := self._numbers.recv(4096):
            if self._trios >= 0:
                with suppress(BlockingIOError):
                    os.write(self._trios, b"\0")
            for number in numbers:
                self._hear(number)

    def look_for_stalls(self, stall_s: float, count_steps: Callable[[], int]) -> None:
        """Print all stacks each time that no step has ended for `stall_s` seconds, until the end of the block."""
        seen, since = count_steps(), time.monotonic()
        while not self.ended.wait(min(1.0, stall_s / 10)):
            count, now = count_steps(), time.monotonic()
            if count == seen and now - since >= stall_s:
                told = f"no step has ended for {stall_s:g} s (--stall-s): the stacks of all threads, then all tasks\n"
                with suppress(OSError):
                    os.write(2, told.encode())
                    faulthandler.dump_traceback(file=2, all_threads=True)
                    os.write(2, describe_tasks(self._root).encode("utf-8", "replace"))
                since = now
            elif count != seen:
                seen, since = count, now

    def look_for_cause(self, grace_s: float, find_cause: Callable[[], str | None]) -> None:
        """End the run when the grace from a cause to end is over, as from a first signal."""
        while find_cause() is None:
            if self.ended.wait(_ASK_S):
                return
        self._stop_after(grace_s)

    def _hear(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._num_stops += 1
            if self._num_stops == 1 and self._grace_s is not None:
                threading.Thread(target=self._stop_after, args=(self._grace_s,), daemon=True).start()
            elif self._num_stops == 2:
                threading.Thread(target=self._end, daemon=True).start()
            elif self._num_stops > 2:
                os._exit(EXIT_STOPPED)
        elif number == getattr(signal, "SIGUSR1", None):
            with suppress(OSError):  # stderr has no reader: go on handling signals
                os.write(2, describe_tasks(self._root).encode("utf-8", "replace"))
        elif number == getattr(signal, "SIGALRM", None) and not (self._check and self._check.is_alive()):  # it rings many times a second
            self._check = threading.Thread(target=self._check_turning, daemon=True)
            self._check.start()

    def _stop_after(self, grace_s: float) -> None:
        """Send this process a second signal when the grace is over, behind a first one if there was none."""
        left, saving, now = grace_s, SAVE_S, time.monotonic()
        while left > 0:
            if self.ended.wait(min(left, _TICK_S)) or self._num_stops > 1:
                return
            before, now = now, time.monotonic()
            if saving > 0 and self._is_saving():
                saving -= now - before
            else:
                left -= now - before
        with suppress(OSError):
            told = f"the run has not ended within {grace_s:g} s (--grace-s): the step in progress is abandoned\n"
            os.write(2, told.encode())
        for _ in range(2 - self._num_stops):
            os.kill(os.getpid(), signal.SIGTERM)
            if self.ended.wait(_TICK_S):
                return

    def _end(self) -> None:
        if not self.ended.wait(END_S):
            end_now("interrupted; --resume goes on from the last checkpoint", EXIT_STOPPED)

    def _check_turning(self) -> None:
        """End the run if an alarm has not freed the event loop: the blocking call cannot be interrupted."""
        import trio

        turned = threading.Event()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(turned.set)
            if not turned.wait(STUCK_S) and not self.ended.is_set():
                where = describe_blocking(sys._current_frames().get(threading.main_thread().ident or 0))
                faulthandler.dump_traceback(file=2, all_threads=True)
                end_now(
                    f"error: {where} has blocked the event loop beyond its deadline, in a call that cannot be interrupted: write the "
                    "function as a plain def, which runs in a thread; --resume goes on from the last checkpoint",
                    EXIT_STUCK,
                )


def end_now(message: str, status: int) -> None:
    """End the process, whatever its other threads do. Buffered output is flushed if that does not block."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(0.5)
    with suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(status)


def describe_blocking(frame: FrameType | None) -> str:
    """Return the innermost place of user code in a stack, as name (file:line)."""
    if frame is None:
        return "something"
    own = find_own_frame(frame)
    return f"{own.f_code.co_name} ({own.f_code.co_filename}:{own.f_lineno})"


def describe_tasks(root: Any) -> str:
    """Return the stacks of all tasks of a trio run, children below their parents. May be called from any thread."""
    lines = ["\nTasks of the event loop:\n"]
    waiting = [(root, 0)]
    while waiting:
        task, depth = waiting.pop()
        indent = "  " * depth
        try:
            summary = traceback.StackSummary.extract(iter(_walk(task.coro)))
            lines.append(f"{indent}task {task.name}{_name_awaited(summary)}\n")
            lines += [f"{indent}  {line}\n" for text in summary.format() for line in text.rstrip("\n").split("\n")]
            waiting += [(child, depth + 1) for nursery in task.child_nurseries for child in nursery.child_tasks]
        except RuntimeError as error:  # the task runs meanwhile
            lines.append(f"{indent}  (it changed while it was read: {error})\n")
    return "".join(lines)


def _name_awaited(summary: traceback.StackSummary) -> str:
    """Name the innermost place that is not trio's, and what it awaits there."""
    place = next((frame for frame in reversed(summary) if f"{os.sep}trio{os.sep}" not in frame.filename), None)
    return "" if place is None else f" waits in {place.name} ({place.filename}:{place.lineno}): {place.line}"


def _walk(awaitable: Any) -> Generator[tuple[FrameType, int]]:
    """Yield the frames of a waiting coroutine, outermost first."""
    while awaitable is not None:
        awaitable = getattr(awaitable, "awaitable", awaitable)  # user_code runs awaitables step by step
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaitable, name, None)) is not None), None)
        if frame is None:
            return
        yield frame, frame.f_lineno
        awaitable = next(
            (a for name in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(awaitable, name, None)) is not None), None
        )


@contextmanager
def stacks_on_request() -> Generator[None]:
    """Make SIGUSR1 write the stacks of all threads to stderr within the block. An existing handler is left alone."""
    with ExitStack() as stack:
        known = hasattr(signal, "SIGUSR1") and hasattr(faulthandler, "register")  # not on Windows
        usable = known and threading.current_thread() is threading.main_thread()
        if usable and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
            stack.callback(signal.signal, signal.SIGUSR1, signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # chained to the thread that prints the tasks
            stack.callback(faulthandler.unregister, signal.SIGUSR1)
        yield

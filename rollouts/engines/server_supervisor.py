"""Holds one inference server with all that it starts, and ends all of it when the process that asked for it is gone.

A script of the standard library alone, which rollouts.engines.servers runs:

    python -I -S server_supervisor.py GRACE_S PARENT_PID COMMAND...

* The server gets a session of its own, no standard input, and the supervisor's standard error as its output.
* It is ended when standard input closes, when the parent is gone (killed with -9, too), on SIGTERM, and what it leaves behind is ended when
  it exits by itself: SIGTERM, GRACE_S seconds, SIGKILL, until no descendant is left, and all are reaped.
* On Linux descendants are found wherever they went (other sessions, orphans), as orphans are adopted by the supervisor; elsewhere the
  server's process group is ended. On Linux the server is also killed when the supervisor is.

Standard output tells what happens, one line each: "started PID", "failed MESSAGE", "exited STATUS" (negative: the signal that killed it),
"left PIDS" for processes that not even SIGKILL ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

TICK_S = 0.5  # between two looks at the parent; all else wakes the supervisor at once
KILL_S = 10.0  # that killed processes may take to vanish: they do not while the kernel waits for a device
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IS_LINUX = sys.platform == "linux"


class Supervisor:
    """One server and its descendants."""

    def __init__(self, grace_s: float, parent_pid: int) -> None:
        self._grace_s = grace_s
        self._parent_pid = parent_pid
        self._leader = 0
        self._status: int | None = None  # of the leader, once it has exited
        self._wakeup = _receive_signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def run(self, command: Sequence[str]) -> int:
        """Start the server, wait for its end or for the order to end it, and leave nothing behind. Returns the exit status."""
        libc = ctypes.CDLL(None) if IS_LINUX else None
        if libc is not None:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if libc is not None:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True, preexec_fn=prepare)
        except (OSError, subprocess.SubprocessError) as error:
            _report(f"failed {error}")
            return 1
        self._leader = process.pid
        _report(f"started {self._leader}")
        self._wait()
        self._end_all()
        process.returncode = 0  # reaped here, not by Popen
        left = self._find_living()
        if left:
            _report(f"left {' '.join(map(str, left))}")
        return 1 if left else 0

    def _wait(self) -> None:
        """Until the server exits or is to be ended."""
        while self._status is None and os.getppid() == self._parent_pid:
            readable, _, _ = select.select([0, self._wakeup], [], [], TICK_S)
            if 0 in readable and not os.read(0, 4096):
                return
            if self._wakeup in readable and signal.SIGTERM in os.read(self._wakeup, 4096):
                return
            self._reap()

    def _end_all(self) -> None:
        self._send(signal.SIGTERM)
        self._wait_for_none(self._grace_s)
        deadline = time.monotonic() + KILL_S
        while self._find_living() and time.monotonic() < deadline:
            self._send(signal.SIGKILL)  # again and again, as they may start others
            self._wait_for_none(0.2)

    def _wait_for_none(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = 0.005
        while True:
            self._reap()
            left_s = deadline - time.monotonic()
            if not self._find_living() or left_s <= 0:
                return
            time.sleep(min(pause, left_s))
            pause = min(2 * pause, 0.1)

    def _reap(self) -> None:
        """Collect every child that has exited, adopted ones among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._leader:
                self._status = os.waitstatus_to_exitcode(status)
                _report(f"exited {self._status}")

    def _find_living(self) -> list[int]:
        """Processes to end: descendants on Linux; elsewhere the group, as the negative number that os.kill takes."""
        if IS_LINUX:
            return find_descendants(os.getpid())
        try:
            os.kill(-self._leader, 0)
        except ProcessLookupError:
            return []
        except PermissionError:
            return [] if self._status is not None else [-self._leader]  # macOS says so of a group of zombies
        return [-self._leader]

    def _send(self, number: int) -> None:
        for pid in self._find_living():
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue  # gone by now, or another user's: reported as left behind


def find_descendants(root: int) -> list[int]:
    """Ids of the living descendants of a process, from Linux's /proc. Zombies are none: their parent or the supervisor collects them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # exited in between
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    ahead = [root]
    while ahead:
        new = children.get(ahead.pop(), [])
        found += new
        ahead += new
    return found


def _receive_signals(*numbers: int) -> int:
    """A file descriptor from which the numbers of arriving signals can be read; they have no other effect."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return reader


def _report(line: str) -> None:
    try:
        os.write(1, " ".join(line.split()).encode(errors="replace") + b"\n")
    except BrokenPipeError:
        return  # nobody is there to hear it


if __name__ == "__main__":
    sys.exit(Supervisor(float(sys.argv[1]), int(sys.argv[2])).run(sys.argv[3:]))

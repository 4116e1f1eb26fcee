"""Run one inference server, and end it with all of its processes once the process that asked for it is gone.

A script of the standard library alone, run by rollouts.engines.launch.servers:

    python -I -S engines/launch/supervisor.py GRACE_S PARENT_PID FOLDER COMMAND...

* The server gets a session of its own, no standard input, and the supervisor's standard error as its output.
* The server is ended when standard input closes, when the parent is gone (even killed with -9), and on SIGTERM: SIGTERM to the server's
  first process, which knows how to end the others, and to these once it has exited; SIGKILL to all that live after GRACE_S seconds. All
  are reaped. Processes left by a server that exits by itself are ended in the same way.
* On Linux descendants are found wherever they went (other sessions, orphans), because the supervisor adopts orphans; elsewhere the server's
  process group is ended. On Linux the server is also killed when the supervisor is.
* At the end FOLDER, the server's place for temporary files, is removed, and so is the shared memory that it left: vLLM leaves 400 MB each
  time, because it kills its own workers.

Standard output has one line per event: "started PID", "failed MESSAGE", "exited STATUS" (negative: the signal that killed it), "left PIDS"
for processes that not even SIGKILL ended.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

TICK_S = 0.5  # seconds between two checks of the parent; everything else wakes the supervisor at once
KILL_S = 10.0  # seconds for killed processes to vanish; they remain while the kernel waits for a device
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IS_LINUX = sys.platform == "linux"

SHARED_MEMORY = "/dev/shm"
SHARED_NAMES = r"psm_\w+|sem\.mp-\w+|sglang_\w+\.shm|nccl-\w+"
"""Names given by Python's multiprocessing, SGLang and NCCL; other files there may be someone's checkpoints."""

LOOKS = 10  # ticks in which the server must map a new name for it to count as the server's


class Supervisor:
    """One server and its descendants."""

    def __init__(self, grace_s: float, parent_pid: int, folder: str) -> None:
        self._grace_s = grace_s
        self._parent_pid = parent_pid
        self._folder = folder
        self._leader = 0
        self._status: int | None = None  # exit status of the leader
        self._wakeup = _receive_signals(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._shared_memory = SharedMemory()

    def run(self, command: Sequence[str]) -> int:
        """Start the server, wait for its end or for the order to end it, and clean up. Returns the exit status."""
        try:
            return self._hold(command)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _hold(self, command: Sequence[str]) -> int:
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
        self._shared_memory.look(self._find_living())
        self._end_all()
        process.returncode = 0  # reaped here, not by Popen
        self._shared_memory.remove()
        if self._reap():
            _report(f"left {' '.join(map(str, self._find_living()))}")
            return 1
        return 0

    def _wait(self) -> None:
        """Wait until the server exits or is to be ended."""
        while self._status is None and os.getppid() == self._parent_pid:
            readable, _, _ = select.select([0, self._wakeup], [], [], TICK_S)
            if 0 in readable and not os.read(0, 4096):
                return
            if self._wakeup in readable and signal.SIGTERM in os.read(self._wakeup, 4096):
                return
            self._reap()
            if not readable:
                self._shared_memory.look(self._find_living())

    def _end_all(self) -> None:
        expires = time.monotonic() + self._grace_s
        if self._status is None:
            _send(signal.SIGTERM, [self._leader])
            self._wait_until_gone(expires, leader_only=True)
        if time.monotonic() < expires:
            _send(signal.SIGTERM, self._find_living())
            self._wait_until_gone(expires)
        expires = time.monotonic() + KILL_S
        while self._reap() and time.monotonic() < expires:
            _send(signal.SIGKILL, self._find_living())  # repeatedly, because they may start others
            self._wait_until_gone(min(expires, time.monotonic() + 0.2))

    def _wait_until_gone(self, expires: float, leader_only: bool = False) -> None:
        pause = 0.005
        while self._reap() and not (leader_only and self._status is not None) and time.monotonic() < expires:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _reap(self) -> bool:
        """Reap every child that has exited, adopted ones included. Returns whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return not IS_LINUX and bool(self._find_living())  # on Linux every descendant becomes a child once its parents are gone
            if pid == 0:
                return True
            if pid == self._leader:
                self._status = os.waitstatus_to_exitcode(status)
                _report(f"exited {self._status}")

    def _find_living(self) -> list[int]:
        """Return the processes to end: descendants on Linux; elsewhere the group, as the negative number for os.kill."""
        if IS_LINUX:
            return find_descendants(os.getpid())
        try:
            os.kill(-self._leader, 0)
        except ProcessLookupError:
            return []
        except PermissionError:
            return [] if self._status is not None else [-self._leader]  # raised by macOS for a group of zombies
        return [-self._leader]


class SharedMemory:
    """Names in shared memory that belong to the server: they appeared after its start and it has mapped them. On Linux only."""

    def __init__(self) -> None:
        self._known = set(_list_shared_names())  # names with a known owner
        self._looks: dict[str, int] = {}  # looks at names that no process of the server has mapped yet
        self._own: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Find the owners of new names."""
        new = set(_list_shared_names()) - self._known
        if not new:
            return
        mapped = new & _find_mapped(pids)
        self._own |= mapped
        for name in new - mapped:
            self._looks[name] = self._looks.get(name, 0) + 1
        self._known |= mapped | {name for name, looks in self._looks.items() if looks >= LOOKS}

    def remove(self) -> None:
        """Remove names that the server has left, unless another process uses them."""
        left = self._own & set(_list_shared_names())
        if left:
            left -= _find_mapped(int(name) for name in os.listdir("/proc") if name.isdigit())
        for name in left:
            try:
                os.unlink(os.path.join(SHARED_MEMORY, name))
            except OSError:
                continue  # gone by now, or another user's


def find_descendants(root: int) -> list[int]:
    """Return the ids of a process's living descendants, from Linux's /proc, without zombies: their parent or the supervisor reaps them."""
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


def _list_shared_names() -> list[str]:
    if not IS_LINUX or not os.path.isdir(SHARED_MEMORY):
        return []
    return [name for name in os.listdir(SHARED_MEMORY) if re.fullmatch(SHARED_NAMES, name)]


def _find_mapped(pids: Iterable[int]) -> set[str]:
    """Return the names in shared memory that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                found.update(os.fsdecode(line.rpartition(b"/")[2].strip()) for line in file if SHARED_MEMORY.encode() in line)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # exited in between, or another user's
    return found


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone by now, or another user's: reported as left


def _receive_signals(*numbers: int) -> int:
    """Return a file descriptor with the numbers of arriving signals, which have no other effect."""
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
        return  # no reader is left


if __name__ == "__main__":
    sys.exit(Supervisor(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).run(sys.argv[4:]))

"""Limits and clean-up of processes inside of a sandbox. Linux only; standard library only."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterable
from contextlib import suppress


def set_limit(kind: int, value: float, slack: int = 0) -> None:
    """Lower a limit for this process and its children; never raises it. The hard limit is higher by `slack`."""
    _, hard = resource.getrlimit(kind)
    soft = int(-(-value // 1))
    hard = soft + slack if hard == resource.RLIM_INFINITY else min(soft + slack, hard)
    resource.setrlimit(kind, (min(soft, hard), hard))


def kill_others() -> None:
    """Kill all processes of this PID namespace but the first and this one, a child of the first; return when they are gone.

    The kernel signals all of them at once, and a fork in progress fails, so a fork bomb cannot outrun this.
    """
    assert os.getppid() == 1, f"process {os.getpid()} is not the worker of a PID namespace: parent {os.getppid()}"
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        time.sleep(0.0002)  # the first process reaps orphans


def kill_descendants() -> None:
    """Kill all descendants of this process without a PID namespace: as a subreaper it becomes the parent of each orphan, one by one."""
    while True:
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    with open(f"/proc/{name}/stat", "rb") as file:
                        parent = int(file.read().rpartition(b")")[2].split()[1])
                    if parent == os.getpid():
                        os.kill(int(name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def close_all_but(kept: Iterable[int]) -> None:
    """Close all descriptors of this process but `kept`."""
    first = 0
    for number in sorted(kept):
        if first < number:  # otherwise closerange would close all
            os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 30)


def clear_folder(folder: str) -> None:
    """Remove everything in a folder, at any depth and with any permissions. Symbolic links are not followed.

    Folders in folders are moved up before they are emptied, so no path gets long.
    """
    os.chmod(folder, 0o700)
    left, moved = [entry.name for entry in os.scandir(folder)], 0
    while left:
        path = os.path.join(folder, left.pop())
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            if os.path.isdir(inner) and not os.path.islink(inner):
                while os.path.lexists(os.path.join(folder, f"moved-{moved}")):
                    moved += 1
                left.append(f"moved-{moved}")
                os.chmod(inner, 0o700)
                os.rename(inner, os.path.join(folder, left[-1]))
            else:
                os.unlink(inner)
        os.rmdir(path)

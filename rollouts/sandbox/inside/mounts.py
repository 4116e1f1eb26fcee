"""File system of a sandbox that makes its own namespaces: a few outside places, read-only, and a scratch directory in memory.

Linux only; imported inside of sandboxes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rollouts.sandbox.inside.kernel import (
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    bind_read_only,
    make_read_only,
    mount,
    pivot_root,
    unmount,
)

MAX_FILES = 10_000  # most files and folders in the scratch directory; init checks it on a mount that is not ours
OUTSIDE = "/.outside"  # place of the former root while the new one is built


def build_root(config: dict[str, Any]) -> None:
    """Replace the root of this mount namespace. This process must be the first of a PID namespace and own the mount namespace."""
    mount("none", "/", "", MS_PRIVATE | MS_REC)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"/tmp{OUTSIDE}")
    pivot_root("/tmp", f"/tmp{OUTSIDE}")  # the outside /tmp is itself again
    for path in (*config["readable"], *config["devices"]):
        _make_place(path)
        bind_read_only(OUTSIDE + path, path)
    for path, target in config["symlinks"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    scratch: str = config["scratch"]
    os.makedirs(scratch)
    mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={config['limits']['file_bytes']},nr_inodes={MAX_FILES},mode=700")
    os.makedirs("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    make_read_only("/proc", recursive=False)
    _limit_kernel(config)
    unmount(OUTSIDE)
    os.rmdir(OUTSIDE)
    make_read_only("/", recursive=False)


def _make_place(path: str) -> None:
    """Create an empty folder or file on which the outside one is mounted."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.isdir(OUTSIDE + path):
        os.makedirs(path, exist_ok=True)
    else:
        with open(path, "x"):
            pass


def _limit_kernel(config: dict[str, Any]) -> None:
    """Forbid further user namespaces, and limit process ids where a namespace has a limit of its own."""
    limits = {"user/max_user_namespaces": 0}
    if config["ids_by_namespace"]:
        limits["kernel/pid_max"] = 300 + config["limits"]["num_processes"] + 8  # the first 300 ids are used only once
    for name, value in limits.items():
        with suppress(OSError):
            with open(f"{OUTSIDE}/proc/sys/{name}", "w") as file:
                file.write(str(value))

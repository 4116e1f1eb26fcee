"""Levels of confinement, and the part of the file system visible in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rollouts.errors import SandboxError
from rollouts.sandbox.limits import SandboxLimits

SCRATCH = "/scratch"  # working directory inside, in memory
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/etc/ld.so.cache", "/etc/alternatives")
SYSTEM_LINKS = ("/bin", "/lib", "/lib32", "/lib64")  # links into /usr; folders on some systems
OWN_FOLDERS = ("/proc", "/dev/shm", SCRATCH)  # nothing of the machine's is shown there
MASKED_FOLDERS = ("sys", "fs", "bus", "driver", "scsi", "acpi", "asound", "irq", "tty")  # in /proc: they describe the machine
MASKED_FILES = (  # in /proc: they tell the machine's name, its disks and its users' keys
    "cmdline", "swaps", "partitions", "diskstats", "mdstat", "modules", "kallsyms", "kcore", "kmsg", "keys", "key-users", "locks", "iomem",
    "ioports", "timer_list", "sched_debug", "vmallocinfo", "slabinfo", "cgroups", "devices", "misc", "mtrr", "consoles", "config.gz",
)  # fmt: skip
PACKAGE = Path(__file__).resolve().parent.parent  # this library
WrapCommand = Callable[[str, "Layout", SandboxLimits], tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """The visible file system: real paths, read-only, and symbolic links."""

    readable: tuple[str, ...]
    symlinks: tuple[tuple[str, str], ...]  # (path, link text)


@dataclass(frozen=True)
class Confinement:
    """A way to confine a process: bubblewrap(), namespaces() or plain(). find_confinement() picks one."""

    name: str
    isolated: bool  # has its own PID, mount, network, IPC and user namespaces: the promises of docs/sandbox.md hold
    makes_namespaces: bool  # the sandbox's first process makes the namespaces itself
    wrap: WrapCommand  # (program, layout, limits) -> words in front of that process's command
    program: str = ""  # name or path of the confining program; "" = none


def bubblewrap(program: str = "bwrap") -> Confinement:
    """Confine by namespaces that the program bubblewrap makes, and by Landlock where the kernel has it.

    Args:
        program: name or path of the program; version 0.6 or later.
    """
    return Confinement("bubblewrap", isolated=True, makes_namespaces=False, wrap=_wrap_in_bubblewrap, program=program)


def namespaces() -> Confinement:
    """Confine by namespaces that the sandbox's first process makes; needs Linux 5.12 or later that lets users create user namespaces."""
    return Confinement("namespaces", isolated=True, makes_namespaces=True, wrap=_wrap_in_nothing)


def plain() -> Confinement:
    """Confine without namespaces: limits of single processes, an empty environment, and Landlock where the kernel has it.

    This stops accidents, not attackers: code can open UDP and unix sockets, see and (as the same user) signal other processes, and leave
    daemons behind if it kills the process that watches it.
    """
    return Confinement("plain", isolated=False, makes_namespaces=False, wrap=_wrap_in_nothing)


def _wrap_in_nothing(program: str, layout: Layout, limits: SandboxLimits) -> tuple[str, ...]:
    return ()


def _wrap_in_bubblewrap(program: str, layout: Layout, limits: SandboxLimits) -> tuple[str, ...]:
    words = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--uid", "1000", "--gid", "1000", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    for path in layout.readable:
        words += ["--ro-bind", path, path]
    for path, target in layout.symlinks:
        words += ["--symlink", target, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--proc", "/proc"]
    for name in MASKED_FOLDERS:
        words += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"] if os.path.isdir(f"/proc/{name}") else []
    for name in MASKED_FILES:
        words += ["--ro-bind", "/dev/null", f"/proc/{name}"] if os.path.exists(f"/proc/{name}") else []
    words += ["--size", str(limits.file_bytes), "--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH, "--"]
    return tuple(words)


def interpreter() -> str:
    """Return the path of the Python that runs inside: the one below the virtual environment, without its packages."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def package_folders() -> tuple[str, ...]:
    """Return the folders of this interpreter's installed packages."""
    found = [os.path.realpath(path) for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple(path for path in dict.fromkeys(found) if os.path.isdir(path))


def plan_layout(readable: Iterable[str | Path]) -> Layout:
    """Lay out the interpreter, this library, the system's programs and libraries, and `readable`. Missing system paths are left out.

    Raises:
        SandboxError: a path in `readable` does not exist.
    """
    wanted = [os.path.realpath(path) for path in readable]
    for path in wanted:
        if not os.path.exists(path):
            raise SandboxError(f"{path} does not exist, and cannot be made readable in a sandbox")
    base = os.path.realpath(sys.base_prefix)
    python = [f"{base}/lib", f"{base}/bin"] if base in ("/usr", "/usr/local") else [base]
    links = (*((path, os.readlink(path)) for path in SYSTEM_LINKS if os.path.islink(path)), ("/dev/shm", SCRATCH))
    folders = [path for path in SYSTEM_LINKS if os.path.isdir(path) and not os.path.islink(path)]
    paths = dict.fromkeys([*SYSTEM, *folders, *python, interpreter(), str(PACKAGE), *wanted])
    kept: list[str] = []
    for path in sorted(filter(os.path.exists, paths), key=len):
        if not any(path == outer or path.startswith(outer.rstrip("/") + "/") for outer in kept):
            kept.append(path)
    return Layout(tuple(kept), links)

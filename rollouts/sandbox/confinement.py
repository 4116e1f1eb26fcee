"""Levels of confinement, and what of the file system is visible in them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rollouts.errors import SandboxError
from rollouts.sandbox.limits import SandboxLimits

SCRATCH = "/scratch"  # working directory inside, in memory
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/etc/ld.so.cache", "/etc/alternatives")
SYSTEM_LINKS = ("/bin", "/lib", "/lib32", "/lib64")  # into /usr; folders on some systems
PACKAGE = Path(__file__).resolve().parent.parent  # this library
WrapCommand = Callable[[str, "Layout", SandboxLimits], tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """What is visible inside: real paths, read-only, and symbolic links."""

    readable: tuple[str, ...]
    symlinks: tuple[tuple[str, str], ...]  # (path, its text)


@dataclass(frozen=True)
class Confinement:
    """A way to confine a process. The values are bubblewrap(), namespaces() and plain(); find_confinement() picks one."""

    name: str
    isolated: bool  # it has PID, mount, network, IPC and user namespaces of its own: the promises of docs/sandbox.md hold
    makes_namespaces: bool  # the sandbox's first process does, by itself
    wrap: WrapCommand  # (program, layout, limits): what stands in front of the command of that process
    program: str = ""  # that confines


def bubblewrap(program: str = "bwrap") -> Confinement:
    """Namespaces made by bubblewrap, a small program made for that, and Landlock where the kernel has it.

    Args:
        program: name or path of the program; version 0.6 or later.
    """
    return Confinement("bubblewrap", isolated=True, makes_namespaces=False, wrap=_wrap_in_bubblewrap, program=program)


def namespaces() -> Confinement:
    """The same namespaces made by the sandbox's own first process: Linux 5.12 or later that lets users make user namespaces."""
    return Confinement("namespaces", isolated=True, makes_namespaces=True, wrap=_wrap_in_nothing)


def plain() -> Confinement:
    """No namespaces: limits of single processes, an empty environment, and Landlock where the kernel has it.

    Stops accidents, not attackers: code can open UDP and unix sockets, see and (as the same user) signal other processes, and leave daemons
    behind if it kills the process that watches it.
    """
    return Confinement("plain", isolated=False, makes_namespaces=False, wrap=_wrap_in_nothing)


def _wrap_in_nothing(program: str, layout: Layout, limits: SandboxLimits) -> tuple[str, ...]:
    return ()


def _wrap_in_bubblewrap(program: str, layout: Layout, limits: SandboxLimits) -> tuple[str, ...]:
    words = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--uid", "1000", "--gid", "1000", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    words += ["--disable-userns"] if _can_disable_userns(program) else []
    for path in layout.readable:
        words += ["--ro-bind", path, path]
    for path, target in layout.symlinks:
        words += ["--symlink", target, path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--proc", "/proc", "--size", str(limits.file_bytes), "--tmpfs", SCRATCH, "--remount-ro", "/", "--chdir", SCRATCH, "--"]
    return tuple(words)


@functools.cache
def _can_disable_userns(program: str) -> bool:
    """Whether this bubblewrap can forbid further user namespaces inside (0.8).

    Raises:
        SandboxError: there is none.
    """
    try:
        result = subprocess.run([program, "--help"], capture_output=True, text=True, env={}, check=False)
    except OSError as error:
        raise SandboxError(f"cannot start {program}: {error.strerror}") from error
    return "--disable-userns" in result.stdout + result.stderr


def interpreter() -> str:
    """The Python that runs inside: the one below the virtual environment, without its packages."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def package_folders() -> tuple[str, ...]:
    """Where this interpreter's installed packages are."""
    found = [os.path.realpath(path) for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple(path for path in dict.fromkeys(found) if os.path.isdir(path))


def plan_layout(readable: Iterable[str | Path]) -> Layout:
    """The interpreter, this library, the system's programs and libraries, and what is named. What is missing is left out.

    Raises:
        SandboxError: a path that is named does not exist.
    """
    wanted = [os.path.realpath(path) for path in readable]
    for path in wanted:
        if not os.path.exists(path):
            raise SandboxError(f"{path} is to be readable in a sandbox and does not exist")
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

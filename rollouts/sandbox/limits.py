"""Limits and results of runs in the sandbox."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollouts.errors import ConfigError, SandboxError

MEGABYTE = 1 << 20


def printable(text: str) -> str:
    """Return untrusted text for messages: characters that control a terminal, or are invisible, as escapes."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode() for letter in text)


@dataclass(frozen=True)
class SandboxLimits:
    """Resources of a program, or of one call of a pool's function.

    An exceeded limit never raises in the caller: the result names it. docs/sandbox.md tells how exactly each limit is enforced.
    """

    wall_s: float = 10.0  # seconds from the start of the program or call, after which it is killed
    cpu_s: float = 10.0  # processor seconds of each process (RLIMIT_CPU, rounded up to whole ones)
    memory_bytes: int = 512 * MEGABYTE  # address space of each process, and resident memory of all of them together
    num_processes: int = 32  # processes and threads at one time
    file_bytes: int = 16 * MEGABYTE  # bytes of the largest file; with namespaces also of the whole scratch directory
    output_bytes: int = MEGABYTE  # bytes of stdout, of stderr, and of a call's result as JSON

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"SandboxLimits.{name} must be a positive number of seconds, found {value!r}")
        for name, least in (("memory_bytes", 32 * MEGABYTE), ("num_processes", 1), ("file_bytes", 4096), ("output_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"SandboxLimits.{name} must be a whole number of at least {least}, found {value!r}")


class SandboxFailure(StrEnum):
    """Reason why a program or call gave no result."""

    RAISED = "raised"  # an exception, or an exit status other than 0
    WALL = "wall"  # more than SandboxLimits.wall_s
    CPU = "cpu"
    MEMORY = "memory"  # memory of all processes together; one process alone gets a MemoryError, which is RAISED
    PROCESSES = "processes"
    FILE = "file"  # ended by SIGXFSZ (Python programs get an OSError instead), or too many files
    OUTPUT = "output"
    DIED = "died"  # ended without a result: an exit before the end of the call, or a signal
    RESULT = "result"  # the returned value is not JSON


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program in run_confined."""

    failure: SandboxFailure | None  # None = it ended by itself with exit status 0
    returncode: int | None  # exit status; minus the number of a signal that ended it; None = the sandbox was killed
    stdout: bytes  # at most output_bytes
    stderr: bytes
    duration_s: float  # seconds from the program's start to its end, without the start of the sandbox (included for OUTPUT)

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit status 0 and within all limits."""
        return self.failure is None


@dataclass(frozen=True)
class CallResult:
    """Outcome of one call of a SandboxPool: a value, or a failure with a message."""

    value: Any  # a JSON value; None in case of a failure
    failure: SandboxFailure | None = None
    error: str = ""  # the failure in words; for an exception its type, message and last lines of the traceback
    output: str = ""  # text that the function printed
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.failure is None

    def unwrap(self) -> Any:
        """Return the value.

        Raises:
            SandboxError: there is none; the message says why.
        """
        if self.failure is not None:
            raise SandboxError(self.error)
        return self.value

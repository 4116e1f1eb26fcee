"""Limits of a run in the sandbox, and what comes back from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollouts.errors import ConfigError, SandboxError

MEGABYTE = 1 << 20


def printable(text: str) -> str:
    """Text that nobody trusts, for messages: characters that control a terminal, or that are not seen, as escapes."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode() for letter in text)


@dataclass(frozen=True)
class SandboxLimits:
    """What a program, or one call of a pool's function, may use.

    Exceeding a limit never raises in the caller: the result says which one it was. See docs/sandbox.md for how exactly each one is held.
    """

    wall_s: float = 10.0  # seconds from the start of the program, or of the call; what still runs then is killed
    cpu_s: float = 10.0  # processor seconds of each process (RLIMIT_CPU, rounded up to whole ones)
    memory_bytes: int = 512 * MEGABYTE  # address space of each process, and resident memory of all of them together
    num_processes: int = 32  # processes and threads at one time
    file_bytes: int = 16 * MEGABYTE  # largest file; with namespaces also everything in the scratch directory together
    output_bytes: int = MEGABYTE  # of stdout, of stderr, and of a call's result as JSON

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
    """Why a program or call gave no result."""

    RAISED = "raised"  # an exception, or an exit status that is not 0
    WALL = "wall"  # SandboxLimits.wall_s
    CPU = "cpu"
    MEMORY = "memory"  # of all processes together; one process alone gets a MemoryError, which is RAISED
    PROCESSES = "processes"
    FILE = "file"  # ended by SIGXFSZ, of which Python programs get an OSError instead; or too many files
    OUTPUT = "output"
    DIED = "died"  # ended without a result: an exit before the end of the call, or a signal
    RESULT = "result"  # what was returned is no JSON


@dataclass(frozen=True)
class SandboxResult:
    """What came of a program in run_confined."""

    failure: SandboxFailure | None  # None: it ended by itself with exit status 0
    returncode: int | None  # exit status; minus the number of a signal that ended it; None where the sandbox was killed
    stdout: bytes  # at most output_bytes
    stderr: bytes
    duration_s: float  # from the program's start to its end, without the start of the sandbox (which counts for OUTPUT)

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit status 0 and within all limits."""
        return self.failure is None


@dataclass(frozen=True)
class CallResult:
    """What came of one call of a SandboxPool: a value, or a failure with a message."""

    value: Any  # of JSON; None where there is a failure
    failure: SandboxFailure | None = None
    error: str = ""  # in words; of an exception its type, message and last lines of the traceback
    output: str = ""  # what the function printed
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.failure is None

    def unwrap(self) -> Any:
        """The value.

        Raises:
            SandboxError: there is none; says why.
        """
        if self.failure is not None:
            raise SandboxError(self.error)
        return self.value

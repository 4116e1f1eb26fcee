"""Programs of agents as processes: input on stdin, the end of their output kept, and nothing of them left afterwards."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from rollouts.errors import ConfigError, raise_single_errors

_KEPT_BYTES = 65536
_DRAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """A program that has ended."""

    status: int | None  # exit status, negative for a signal; None = it was stopped at its deadline
    stdout: str  # the last 64 KiB
    stderr: str  # the last 64 KiB

    @property
    def last_line(self) -> str:
        """Last line of stdout that is not empty; "" = none."""
        lines = self.stdout.replace("\r", "\n").split("\n")  # splitlines ends lines inside of texts of JSON, too
        return next((line for line in reversed(lines) if line.strip()), "")


def split_command(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return a command as its words; a text is split as a shell does. Raises ConfigError for an empty one, or open quotes."""
    try:
        words = tuple(shlex.split(command)) if isinstance(command, str) else tuple(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be split into words ({error}): close its quotes") from error
    if not words:
        raise ConfigError("the command of the agent is empty: give a program and its arguments, such as 'python my_agent.py'")
    return words


def find_program(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the path of the program that a command starts. Raises ConfigError saying why there is none."""
    name = command[0]
    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    if found is not None:
        return found
    if os.path.isdir(name):
        what = "is a directory: name a program in it"
    elif os.path.isfile(name) and os.path.dirname(name):
        what = f"may not be executed: run chmod +x {shlex.quote(name)}, or name the program that reads it first, as in 'python {name}'"
    elif os.path.dirname(name):
        what = "does not exist: correct its path"
    else:
        beside = f" (write ./{name} for the file here)" if os.path.isfile(name) else ""
        what = f"is in no directory of PATH: install it, or give its path{beside}"
    raise ConfigError(f"the program {name!r} {what}")


async def run_program(
    command: Sequence[str], given: bytes, *, environment: Mapping[str, str], directory: str | None = None, timeout_s: float | None = None
) -> ProgramResult:
    """Run a program to its end. At its end, a deadline or a cancellation all processes of its group are killed.

    Args:
        command: the program, found by PATH of `environment`, and its arguments.
        given: its stdin; a program that does not read it is fine.
        environment: all its variables.
        directory: its working directory; None = this process's.
        timeout_s: seconds until it is stopped; None = no limit.

    Raises: ConfigError if it cannot be started.
    """
    try:
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"the program of the agent, {command[0]!r}, cannot be started: {error}. Name one that can be run") from error
    kept = {"stdout": bytearray(), "stderr": bytearray()}
    status: int | None = None
    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_feed, process, given)
                nursery.start_soon(_keep_end, process.stdout, kept["stdout"])
                nursery.start_soon(_keep_end, process.stderr, kept["stderr"])
                with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
                    status = await process.wait()
                _kill_group(process)  # its children may hold its output open
                nursery.cancel_scope.deadline = trio.current_time() + _DRAIN_S
    finally:
        _kill_group(process)
        with trio.CancelScope(shield=True):
            await process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with trio.CancelScope(shield=True):
                    await trio.aclose_forcefully(pipe)
    return ProgramResult(status=status, stdout=kept["stdout"].decode(errors="replace"), stderr=kept["stderr"].decode(errors="replace"))


async def _feed(process: trio.Process, given: bytes) -> None:
    assert process.stdin is not None, "its stdin is a pipe"
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await process.stdin.send_all(given)
        await process.stdin.aclose()


async def _keep_end(pipe: trio.abc.ReceiveStream | None, kept: bytearray) -> None:
    assert pipe is not None, "its output is a pipe"
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in pipe:
            kept += data
            del kept[:-_KEPT_BYTES]


def _kill_group(process: trio.Process) -> None:
    """Kill the processes of a program's group; its id is the program's, which stays taken while one of them lives."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

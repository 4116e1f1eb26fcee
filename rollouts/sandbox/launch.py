"""Start of a sandbox from outside, and its end with everything in it."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

import trio

from rollouts.checks import parse_json
from rollouts.errors import SandboxError
from rollouts.sandbox.confinement import DEVICES, OWN_FOLDERS, PACKAGE, SCRATCH, Confinement, Layout, interpreter
from rollouts.sandbox.inside.messages import LENGTH_BYTES, encode_message, write_all
from rollouts.sandbox.limits import SandboxLimits

BOOT = """
import os, sys
control = int(sys.argv[1])
size = os.read(control, 8)  # of the name of this library's folder: all code in there can read a command line
sys.path.append(os.fsdecode(os.read(control, int.from_bytes(size, "big"))))
from rollouts.sandbox.inside.init import main
main(control, sys.argv[2])
"""
STARTUP_S = 60.0  # seconds for the start of a sandbox on a busy machine
KILL_S = 10.0  # seconds for its first process to end everything, before that is killed itself
ENVIRONMENT = (("PATH", "/usr/bin:/bin"), ("LANG", "C.UTF-8"), ("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("USER", "sandbox"))


@dataclass(frozen=True)
class Plan:
    """Content of a sandbox: a program's command, or a worker of a pool."""

    confinement: Confinement
    limits: SandboxLimits
    layout: Layout
    argv: tuple[str, ...] | None = None
    worker: Mapping[str, Any] | None = None
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # files of the scratch directory: relative name -> text
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # variables besides PATH, LANG, HOME, TMPDIR

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
                raise SandboxError(f"a file for the scratch directory must have a relative name without '..', found {name!r}")
        for path in self.layout.readable if self.confinement.isolated else ():
            own = next(filter(PurePosixPath(path).is_relative_to, OWN_FOLDERS), None)
            if own is not None:
                raise SandboxError(f"{path} cannot be shown in a sandbox, which has its own {own}: move it, or copy it elsewhere")


@dataclass(frozen=True)
class Spawned:
    """A process that makes a sandbox, and the ends of its pipes."""

    process: subprocess.Popen[bytes]
    control: int  # receives `config`; closing it ends the sandbox
    status: int  # reports of the first process
    config: bytes
    scratch: str


def describe(plan: Plan, scratch: str, status: int, parent: int, keep: tuple[int, ...]) -> bytes:
    """Encode the configuration that the first process of a sandbox reads."""
    release = [int(part) for part in os.uname().release.split("-")[0].split(".")[:2]]
    config = {
        "namespaces": plan.confinement.makes_namespaces,
        "isolated": plan.confinement.isolated,
        "count_by_namespace": plan.confinement.isolated and release >= [5, 14],  # earlier kernels count all processes of the user
        "ids_by_namespace": release >= [6, 14],  # earlier kernels have one limit of process ids, for the whole machine
        "readable": plan.layout.readable,
        "symlinks": plan.layout.symlinks,
        "devices": [path for path in DEVICES if os.path.exists(path)],
        "scratch": scratch,
        "files": dict(plan.files),
        "limits": asdict(plan.limits),
        "argv": plan.argv,
        "worker": None if plan.worker is None else dict(plan.worker),
        "status": status,
        "parent": parent,
        "keep": keep,
    }
    return encode_message(config)


def spawn(plan: Plan, *, stdin: int, stdout: int, stderr: int, keep: tuple[int, ...] = ()) -> Spawned:
    """Start a sandbox. Its first process ends, with everything in it, when `control` is closed or when this process ends.

    Call it in a thread that stays, such as that of trio's loop: bubblewrap ends with the thread that started it.

    Args:
        stdin, stdout, stderr: descriptors for the confined process; they stay open here.
        keep: further descriptors, for a pool's worker.

    Raises:
        SandboxError: the program that confines cannot be started.
    """
    confines = plan.confinement.wrap(plan.confinement.program, plan.layout, plan.limits)
    scratch = SCRATCH if plan.confinement.isolated else tempfile.mkdtemp(prefix="rollouts-sandbox-")
    control, control_in = os.pipe()
    folder = os.fsencode(PACKAGE.parent)
    write_all(control_in, len(folder).to_bytes(LENGTH_BYTES, "big") + folder)  # read by BOOT; a pipe has room for it
    status_out, status = os.pipe()
    parent = os.pidfd_open(os.getpid())
    command = [
        *confines,
        interpreter(),
        "-I",
        "-S",
        "-B",
        "-c",
        BOOT,
        str(control),
        "" if plan.confinement.isolated else scratch,
    ]
    environment = {**dict(ENVIRONMENT), **plan.environment, "HOME": scratch, "TMPDIR": scratch}
    try:
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd="/", start_new_session=True,
            pass_fds=(control, status, parent, *keep),
        )  # fmt: skip
    except OSError as error:
        os.close(control_in)
        os.close(status_out)
        remove_scratch(plan, scratch)
        raise SandboxError(f"cannot start {command[0]}: {error}") from error
    finally:
        config = describe(plan, scratch, status, parent, keep)
        for number in (control, status, parent):
            os.close(number)
    return Spawned(process, control_in, status_out, config, scratch)


def remove_scratch(plan: Plan, scratch: str) -> None:
    """Remove the rest of a sandbox's files: without namespaces the scratch directory is one of this machine's."""
    if not plan.confinement.isolated:
        shutil.rmtree(scratch, ignore_errors=True)


def read_report(name: str, data: bytes) -> dict[str, Any]:
    """Return the last message of a status pipe, {} if there is none.

    Raises:
        SandboxError: the sandbox could not be made, or its program or worker not started.
    """
    messages: list[dict[str, Any]] = []
    while data:
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
        if len(data) < end:
            break  # killed while it wrote
        messages.append(parse_json(data[LENGTH_BYTES:end]))
        data = data[end:]
    for message in messages:
        if "error" in message:
            raise SandboxError(f"sandbox ({name}): {message['error']}")
    return messages[-1] if messages else {}


class Sandbox:
    """A started sandbox, on trio."""

    def __init__(self, plan: Plan, *, stdin: int, stdout: int, stderr: int, keep: tuple[int, ...] = ()) -> None:
        """Start the sandbox, see spawn."""
        self.plan = plan
        self._spawned = spawn(plan, stdin=stdin, stdout=stdout, stderr=stderr, keep=keep)
        self._control = trio.lowlevel.FdStream(self._spawned.control)
        self._status = trio.lowlevel.FdStream(self._spawned.status)

    @property
    def pid(self) -> int:
        """Id of the process that was started here."""
        return self._spawned.process.pid

    async def configure(self) -> None:
        """Send the configuration; return once it is read, or cannot be read any more."""
        with suppress(trio.BrokenResourceError):
            await self._control.send_all(self._spawned.config)

    async def report(self) -> dict[str, Any]:
        """Return the first process's report once everything in the sandbox has ended; {} if it was killed.

        Raises:
            SandboxError: the sandbox could not be made, or the program not started.
        """
        data = bytearray()
        async for part in self._status:
            data += part
        await self._wait()
        return read_report(self.plan.confinement.name, bytes(data))

    async def _wait(self) -> None:
        """Wait for the process that was started here; the processes inside end before it."""
        process = self._spawned.process
        if process.poll() is None:
            ended = os.pidfd_open(process.pid)
            try:
                await trio.lowlevel.wait_readable(ended)
            finally:
                os.close(ended)
            process.wait()

    async def close(self) -> None:
        """End everything that is left. Cannot be canceled; takes milliseconds."""
        with trio.CancelScope(shield=True):
            await self._control.aclose()
            with trio.move_on_after(KILL_S):
                await self._wait()
            if self._spawned.process.poll() is None:
                self._spawned.process.kill()
                await self._wait()
            await self._status.aclose()
        remove_scratch(self.plan, self._spawned.scratch)


def try_plan(plan: Plan) -> str | None:
    """Run a plan without input, output and trio; None if its program ended with exit status 0, otherwise the reason."""
    with open(os.devnull, "r+b", buffering=0) as null, tempfile.TemporaryFile() as errors:
        try:
            spawned = spawn(plan, stdin=null.fileno(), stdout=null.fileno(), stderr=errors.fileno())
        except (SandboxError, OSError) as error:  # OSError: the kernel has no process descriptors
            return str(error)
        data, deadline = b"", time.monotonic() + STARTUP_S
        with suppress(BrokenPipeError):
            write_all(spawned.control, spawned.config)
        poll = select.poll()
        poll.register(spawned.status, select.POLLIN)
        while poll.poll(max(deadline - time.monotonic(), 0) * 1000) and (part := os.read(spawned.status, 1 << 16)):
            data += part
        os.close(spawned.control)
        os.close(spawned.status)
        try:
            spawned.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            spawned.process.kill()
            spawned.process.wait()
        remove_scratch(plan, spawned.scratch)
        errors.seek(0)
        said = errors.read(2000).decode(errors="replace").strip()
    try:
        report = read_report(plan.confinement.name, data)
    except SandboxError as error:
        return str(error)
    return None if report.get("returncode") == 0 else said or f"a program that does nothing ended with {report}"

"""Run of one program in a sandbox, from its start to its end.

result = await run_confined("print(6 * 7)")
result.ok, result.stdout        # True, b"42\\n"
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import trio

from rollouts.errors import SandboxError, raise_single_errors
from rollouts.sandbox.confinement import Confinement, bubblewrap, interpreter, namespaces, package_folders, plain, plan_layout
from rollouts.sandbox.launch import STARTUP_S, Plan, Sandbox, try_plan
from rollouts.sandbox.limits import SandboxFailure, SandboxLimits, SandboxResult

LOGGER = logging.getLogger(__name__)
CODE_FILE = "main.py"
SIGKILL, SIGXCPU, SIGXFSZ = 9, 24, 25


@functools.cache
def try_confinement(confinement: Confinement) -> None:
    """Run a program that does nothing. Takes some 50 ms; a success is cached for the process.

    Raises:
        SandboxError: the confinement does not work here; the message says why.
    """
    if sys.platform != "linux":
        raise SandboxError(f"sandboxes need Linux, this is {sys.platform}")
    argv = (interpreter(), "-I", "-S", "-c", "pass")
    reason = try_plan(Plan(confinement, SandboxLimits(), plan_layout(()), argv=argv))
    if reason is not None:
        raise SandboxError(f"{confinement.name}: {reason}")


def find_confinement(allow_plain: bool = False) -> Confinement:
    """Return the strongest confinement that works here: bubblewrap, else namespaces. Each is tried once in a process.

    Args:
        allow_plain: return plain() if neither works, instead of raising. It protects from accidents only.

    Raises:
        SandboxError: neither works; the message says why and what to do.
    """
    reasons: list[str] = []
    for confinement in (bubblewrap(), namespaces()):
        try:
            try_confinement(confinement)
        except SandboxError as error:
            reasons.append(str(error))
        else:
            return confinement
    if allow_plain and sys.platform == "linux":
        LOGGER.warning("code runs without namespaces, which protects from accidents only: %s", "; ".join(reasons))
        return plain()
    raise SandboxError(
        f"code cannot be confined here ({'; '.join(reasons)}). Install bubblewrap (package 'bubblewrap') or allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0; in a "
        "container its security profile decides), or pass allow_plain=True, which protects from accidents and not from attacks"
    )


async def run_confined(
    program: str | Sequence[str],
    *,
    stdin: bytes = b"",
    limits: SandboxLimits | None = None,
    confinement: Confinement | None = None,
    files: Mapping[str, str] | None = None,
    readable: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    packages: bool = False,
) -> SandboxResult:
    """Run an untrusted program and wait for its end. It can be canceled; no process or file of it is left afterwards.

    The program starts in an empty scratch directory, with PATH, LANG, HOME and TMPDIR as environment, without network. It sees the system's
    programs, the interpreter, this library, and nothing else of the file system.

    Args:
        program: Python source text, or a command: the name or path of a program and its arguments.
        stdin: bytes on its standard input.
        limits: its resources; SandboxLimits() by default.
        confinement: the level; find_confinement() by default.
        files: files of the scratch directory, relative name -> text.
        readable: further files and folders that it can read, at their outside paths.
        environment: further variables. Give no secrets.
        packages: let Python source text import this environment's installed packages.

    Returns: exit status, output, and the exceeded limit, if any.

    Raises:
        SandboxError: it could not be started; errors of the program itself never raise.
    """
    limits = limits or SandboxLimits()
    confinement = confinement or find_confinement()
    folders = package_folders() if packages else ()
    layout = plan_layout((*readable, *folders))
    variables = {"PYTHONPATH": ":".join(folders), **(environment or {})} if folders else dict(environment or {})
    files = dict(files or {})
    if isinstance(program, str):
        if CODE_FILE in files:
            raise SandboxError(f"{CODE_FILE} in the scratch directory is the program; give the file another name")
        files[CODE_FILE] = program
        argv = (interpreter(), "-s", "-S", "-B", CODE_FILE)
    else:
        argv = tuple(program)
        if not argv:
            raise SandboxError("the command of a program is empty: expected its name and arguments")
    plan = Plan(confinement, limits, layout, argv=argv, files=files, environment=variables)
    with raise_single_errors():
        return await _run(plan, stdin)


class _Pipe:
    """One pipe between this process and the program."""

    def __init__(self, to_program: bool) -> None:
        ends = os.pipe()
        self.theirs, ours = ends if to_program else ends[::-1]
        self.stream = trio.lowlevel.FdStream(ours)
        self.data = bytearray()
        self.exceeded = False

    async def feed(self, data: bytes) -> None:
        """Write all data, or as much as is read, and close."""
        with suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)
        await self.stream.aclose()

    async def collect(self, limit: int, scope: trio.CancelScope) -> None:
        """Read to the end, or cancel the scope once more than `limit` bytes came."""
        async for part in self.stream:
            self.data += part
            if len(self.data) > limit:
                del self.data[limit:]
                self.exceeded = True
                scope.cancel()
                return


async def _run(plan: Plan, stdin: bytes) -> SandboxResult:
    """Start the sandbox, serve its pipes, and end it in any case."""
    pipes = given, out, err = _Pipe(True), _Pipe(False), _Pipe(False)
    report: dict[str, Any] = {}
    sandbox: Sandbox | None = None
    start = monotonic()
    try:
        try:
            sandbox = Sandbox(plan, stdin=given.theirs, stdout=out.theirs, stderr=err.theirs)
        finally:
            for pipe in pipes:
                os.close(pipe.theirs)
        with trio.move_on_after(STARTUP_S + plan.limits.wall_s) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(given.feed, stdin)
                nursery.start_soon(out.collect, plan.limits.output_bytes, scope)
                nursery.start_soon(err.collect, plan.limits.output_bytes, scope)
                await sandbox.configure()
                start = monotonic()
                report = await sandbox.report()
    finally:
        measured = monotonic() - start
        for pipe in pipes:
            with trio.CancelScope(shield=True):
                await pipe.stream.aclose()
        if sandbox is not None:
            await sandbox.close()
    exceeded = out.exceeded or err.exceeded
    if scope.cancelled_caught and not exceeded:
        raise SandboxError(
            f"sandbox ({plan.confinement.name}): nothing came within {STARTUP_S + plan.limits.wall_s} s; is the machine busy?"
        )
    if not report and not exceeded:
        said = bytes(err.data[:2000]).decode(errors="replace").strip()
        raise SandboxError(f"sandbox ({plan.confinement.name}): could not be made: {said or 'it was killed'}")
    failure = SandboxFailure.OUTPUT if exceeded else _classify(report, plan.limits)
    return SandboxResult(failure, report.get("returncode"), bytes(out.data), bytes(err.data), report.get("duration_s", measured))


def _classify(report: Mapping[str, Any], limits: SandboxLimits) -> SandboxFailure | None:
    """Return the reason why a program failed, from the first process's report."""
    if "killed_by" in report:
        return SandboxFailure(report["killed_by"])
    code = report.get("returncode")
    if code == 0:
        return None
    if code == -SIGXCPU or (code == -SIGKILL and report["cpu_s"] >= limits.cpu_s):
        return SandboxFailure.CPU
    if code is None or code < 0:
        return SandboxFailure.FILE if code == -SIGXFSZ else SandboxFailure.DIED
    return SandboxFailure.RAISED

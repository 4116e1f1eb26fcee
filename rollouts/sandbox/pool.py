"""Pools of warm workers in sandboxes: a call costs milliseconds, and cannot harm the caller or the next call.

    async with SandboxPool("my_rewards.py:score", num_workers=2, limits=SandboxLimits(wall_s=2.0)) as pool:
        result = await pool.call({"answer": "42"})     # CallResult; never raises for what the function does
        reward = result.value if result.ok else None   # result.failure, result.error say why not

A worker imports the function once. Each call then runs in a process forked from it, which ends with the call, as do all processes that it
started: no variable, file handle, process or scratch file is left for the next call. With fresh_process=False the worker calls the
function itself. This saves a millisecond and keeps state between calls, for functions that are trusted with it; a call that exceeds its
time then costs a new worker.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import trio

from rollouts.checks import parse_json, refuse_constant
from rollouts.errors import SandboxError
from rollouts.sandbox.confinement import PACKAGE, Confinement, package_folders, plan_layout
from rollouts.sandbox.inside.messages import LENGTH_BYTES, encode_message
from rollouts.sandbox.launch import STARTUP_S, Plan, Sandbox
from rollouts.sandbox.limits import CallResult, SandboxFailure, SandboxLimits, printable
from rollouts.sandbox.run import SIGXCPU, find_confinement

HEADER_BYTES = 1 << 20  # bytes of a worker's message besides the answer; they hold the call's printed text
BACKUP_S = 5.0  # seconds after a call's deadline until a worker that does not keep it is killed


@dataclass(frozen=True, kw_only=True)
class SandboxView:
    """The part of this machine that code in a worker can see, besides Python itself."""

    readable: Sequence[str | Path] = ()  # files and folders
    python_path: Sequence[str | Path] = ()  # folders from which the function's module can import, besides the installed packages
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # further variables. Give no secrets
    packages: bool = True  # this environment's installed packages can be imported


class SandboxPool:
    """Confined workers that run one function on JSON. Use it with `async with`, which ends all of them.

    At most `num_workers` calls run at a time; further ones wait. A worker that hangs, dies or exceeds a limit is replaced.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int = 2,
        limits: SandboxLimits | None = None,
        confinement: Confinement | None = None,
        view: SandboxView | None = None,
        fresh_process: bool = True,
    ) -> None:
        """Prepare the pool; starts no process.

        Args:
            function: "package.module:name" or "path/to/file.py:name". Called with one argument, the payload, and returns JSON.
            num_workers: workers kept ready.
            limits: limits of each call; SandboxLimits() by default.
            confinement: the level; find_confinement() by default.
            view: default: SandboxView().
            fresh_process: run each call in a process of its own; False: in the worker itself.

        Raises:
            SandboxError: the function cannot be found, or no confinement works here.
        """
        if num_workers < 1:
            raise SandboxError(f"a pool needs at least 1 worker, found num_workers={num_workers}")
        module, source, folders = _locate(function)
        self.limits, view = limits or SandboxLimits(), view or SandboxView()
        self.num_workers = num_workers
        self.num_started = 0  # workers so far
        paths = [os.path.realpath(path) for path in (*view.python_path, *(package_folders() if view.packages else ()))]
        worker = {
            "fork": fresh_process,
            "module": module,
            "source": source,
            "function": function.rpartition(":")[2],
            "python_path": paths,
            "folders": folders,
        }
        layout = plan_layout((*view.readable, *paths, *folders))
        self._plan = Plan(confinement or find_confinement(), self.limits, layout, worker=worker, environment=dict(view.environment))
        self._limiter = trio.CapacityLimiter(num_workers)
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._open = False

    async def __aenter__(self) -> SandboxPool:
        """Start the first worker, so that a function that cannot be loaded is an error here; further workers start on demand.

        Raises:
            SandboxError: the worker did not start; the message has the error of the function's module.
        """
        self._open = True
        try:
            self._idle.append(await self._start())
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def process_ids(self) -> tuple[int, ...]:
        """Return the id of each worker's outer process; everything in the worker ends with it."""
        return tuple(worker.sandbox.pid for worker in self._workers if worker.sandbox is not None)

    async def aclose(self) -> None:
        """End all workers and what they run; calls in progress raise SandboxError."""
        self._open = False
        self._idle.clear()
        while self._workers:
            await self._discard(self._workers[-1])

    async def call(self, payload: Any) -> CallResult:
        """Run the function once.

        Args:
            payload: the function's argument, of JSON values.

        Returns: its value, or the failure: an exception, an exceeded limit, no result, or one that is not JSON.

        Raises:
            SandboxError: the payload is not JSON, the pool is closed, or no worker can be started.
        """
        nonce = secrets.token_hex(16)
        try:
            request = encode_message({"nonce": nonce, "payload": payload})
        except (TypeError, ValueError, RecursionError) as error:
            raise SandboxError(f"the payload of a call is not JSON: {type(error).__name__}: {error}") from error
        async with self._limiter:
            tries = 0
            while tries < 2:  # a worker may have ended before the call, through no fault of the call's
                tries += not self._idle  # counts new workers only: any number of idle ones may have ended
                result = await self._call_once(request, nonce)
                if result is not None:
                    return result
        raise SandboxError(f"two new workers of the sandbox ended before they took a call ({self._plan.confinement.name})")

    async def _call_once(self, request: bytes, nonce: str) -> CallResult | None:
        """Run a call on a worker; None if the worker had ended before."""
        worker: _Worker | None = None
        kept = False
        try:
            if not self._open:
                raise SandboxError("the pool of sandboxes is closed: call it within its `async with` block")
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                result, kept = await worker.call(request, nonce)
            except trio.ClosedResourceError:
                result = None
            if not self._open:
                raise SandboxError("the pool of sandboxes was closed during a call")
            return result
        finally:
            if worker is not None:
                if kept and self._open:
                    self._idle.append(worker)
                else:
                    await self._discard(worker)

    async def _start(self) -> _Worker:
        """Start a worker and wait until it has loaded the function."""
        self.num_started += 1
        worker = _Worker(self._plan)
        self._workers.append(worker)
        try:
            await worker.start()
        except BaseException as error:
            await self._discard(worker)
            if isinstance(error, Exception) and not self._open:  # its pipes were closed while in use
                raise SandboxError("the pool of sandboxes was closed while a worker started") from error
            raise
        return worker

    async def _discard(self, worker: _Worker) -> None:
        """End a worker. Cannot be canceled."""
        with suppress(ValueError):
            self._workers.remove(worker)
        await worker.close()


def _locate(function: str) -> tuple[str, str | None, tuple[str, ...]]:
    """Split "module:name" or "file.py:name" into the module's name, a file's source text, and the folders readable for its import."""
    place, _, name = function.rpartition(":")
    if not place or not name.isidentifier():
        raise SandboxError(f"a function for a sandbox is named 'package.module:name' or 'file.py:name', found {function!r}")
    if place.endswith(".py"):
        try:
            return Path(place).stem, Path(place).read_text(), ()
        except (OSError, UnicodeDecodeError) as error:
            raise SandboxError(f"cannot read {place}: {error}") from error
    top = place.split(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None  # such as __main__
    if spec is None:
        raise SandboxError(f"there is no module {top!r} here for the sandboxed function {function!r}")
    folders = tuple(os.path.realpath(path) for path in spec.submodule_search_locations or () if os.path.exists(path))
    if not folders and spec.origin is not None and os.path.exists(spec.origin):
        folders = (os.path.realpath(spec.origin),)
    installed = (*package_folders(), os.path.realpath(sys.base_prefix), str(PACKAGE))
    return place, None, tuple(path for path in folders if not any(Path(path).is_relative_to(place) for place in installed))


class _Worker:
    """One sandbox with a worker in it, and its pipes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sandbox: Sandbox | None = None
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        request, self._requests = os.pipe()
        self._results, result = os.pipe()
        worker = {**(plan.worker or {}), "requests": request, "results": result}
        self._theirs = (request, result)
        self._module = worker["module"]
        self._run = Plan(plan.confinement, plan.limits, plan.layout, worker=worker, environment=plan.environment)
        self.requests = trio.lowlevel.FdStream(self._requests)
        self.results = trio.lowlevel.FdStream(self._results)
        self.data = bytearray()

    async def start(self) -> None:
        """Start, and wait until the function is loaded.

        Raises:
            SandboxError: it cannot be loaded; the message says why.
        """
        with open(os.devnull, "r+b", buffering=0) as null:
            try:
                self.sandbox = Sandbox(self._run, stdin=null.fileno(), stdout=null.fileno(), stderr=self.errors.fileno(), keep=self._theirs)
            finally:
                for number in self._theirs:
                    os.close(number)
        name = self.plan.confinement.name
        with trio.move_on_after(STARTUP_S):
            await self.sandbox.configure()
            message = await self._receive()
            if message is None:
                report = await self.sandbox.report()
                self.errors.seek(0)
                said = printable(self.errors.read(2000).decode(errors="replace").strip())
                raise SandboxError(f"sandbox ({name}): the worker ended before it was ready: {report.get('killed_by') or said or report}")
            if "ready" not in message:
                raise SandboxError(f"sandbox ({name}): {self._module} cannot be loaded: {printable(str(message.get('error')))}")
            return
        raise SandboxError(f"sandbox ({name}): the worker was not ready within {STARTUP_S} s; does its module compute when it is imported?")

    async def call(self, request: bytes, nonce: str) -> tuple[CallResult | None, bool]:
        """Return (the result, whether the worker can be used again); no result if the worker had ended before it took the call."""
        assert self.sandbox is not None, "the worker was not started"
        limits, fork = self.plan.limits, (self.plan.worker or {})["fork"]
        started = False
        with trio.move_on_after(limits.wall_s + (BACKUP_S if fork else 0.0)):
            with suppress(trio.BrokenResourceError):
                await self.requests.send_all(request)
            message = await self._receive()
            started = message == {"nonce": nonce, "started": True}
            if message is not None and not started:
                return _broken(), False
            header = await self._receive() if started else None
            if header is not None:
                count = header.get("body_bytes")
                if header.get("nonce") != nonce or not isinstance(count, int) or not 0 <= count <= limits.output_bytes + HEADER_BYTES:
                    return _broken(), False
                body = await self._take(count)
                if body is not None:
                    try:
                        return _read_answer(header, bytes(body), limits), True
                    except (TypeError, ValueError):
                        return _broken(), False
            try:
                return self._explain_end(await self.sandbox.report(), started), False
            except SandboxError as error:
                return CallResult(None, SandboxFailure.DIED, str(error)) if started else None, False
        return CallResult(None, SandboxFailure.WALL, f"took longer than {limits.wall_s} s", duration_s=limits.wall_s), False

    def _explain_end(self, report: Mapping[str, Any], started: bool) -> CallResult | None:
        """Describe the end of a worker as the result of its call; None if the call had not begun."""
        if not started:
            return None
        exceeded = SandboxFailure.CPU if report.get("returncode") == -SIGXCPU else SandboxFailure.DIED  # by the worker, without a fork
        failure = SandboxFailure(report.get("killed_by", exceeded))
        why = f" ({report['why']})" if "why" in report else ""
        return CallResult(None, failure, describe_failure(failure, self.plan.limits, report.get("returncode")) + why)

    async def _receive(self) -> dict[str, Any] | None:
        """Read one message; None if the worker ended, {} if the message is not one of ours."""
        length = await self._take(LENGTH_BYTES)
        if length is None:
            return None
        count = int.from_bytes(length, "big")
        body = await self._take(count) if count <= HEADER_BYTES + 6 * self.plan.limits.output_bytes else bytearray(b"{}")
        try:
            message = None if body is None else parse_json(body)
        except ValueError:
            message = {}
        return message if message is None or isinstance(message, dict) else {}

    async def _take(self, count: int) -> bytearray | None:
        """Read `count` bytes; None if there are fewer."""
        while len(self.data) < count:
            part = await self.results.receive_some(max(count - len(self.data), 65536))
            if not part:
                return None
            self.data += part
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    async def close(self) -> None:
        """End the worker with everything that it runs. Cannot be canceled."""
        with trio.CancelScope(shield=True):
            await self.requests.aclose()
            await self.results.aclose()
            if self.sandbox is not None:
                await self.sandbox.close()
        self.errors.close()


def describe_failure(failure: SandboxFailure, limits: SandboxLimits, returncode: int | None) -> str:
    """Return a failure in words."""
    match failure:
        case SandboxFailure.WALL:
            return f"took longer than {limits.wall_s} s"
        case SandboxFailure.CPU:
            return f"used more than {limits.cpu_s} s of processor time"
        case SandboxFailure.MEMORY:
            return f"its processes used more than {limits.memory_bytes} bytes of memory together"
        case SandboxFailure.PROCESSES:
            return f"ran more than {limits.num_processes} processes and threads"
        case SandboxFailure.FILE:
            return f"wrote a file of more than {limits.file_bytes} bytes, or too many files"
        case SandboxFailure.OUTPUT:
            return f"wrote more than {limits.output_bytes} bytes of output"
        case SandboxFailure.RESULT:
            return "returned a value that is not JSON"
        case SandboxFailure.RAISED | SandboxFailure.DIED:
            return f"ended before the call returned, with exit status {returncode}"


def _broken() -> CallResult:
    return CallResult(None, SandboxFailure.DIED, "the worker sent no valid answer to this call")


def _read_answer(header: Mapping[str, Any], body: bytes, limits: SandboxLimits) -> CallResult:
    """Parse the result of a call. The body comes from an untrusted process."""
    printed, duration = str(header.get("output", "")), float(header.get("duration_s", 0.0))
    if "failure" in header:
        failure = SandboxFailure(header["failure"])
        return CallResult(None, failure, describe_failure(failure, limits, header.get("returncode")), printed, duration)
    try:
        answer = parse_json(body, parse_constant=refuse_constant)
        if not isinstance(answer, dict):
            raise ValueError(f"expected an object, found {type(answer).__name__}")
        json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()  # refuses 1e999 and halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        return CallResult(None, SandboxFailure.RESULT, f"returned a value that is not JSON: {error}", printed, duration)
    if "value" in answer:
        return CallResult(answer["value"], None, "", printed, duration)
    failure = answer.get("failure")
    known = (SandboxFailure.RAISED, SandboxFailure.RESULT, SandboxFailure.OUTPUT)
    kind = next((other for other in known if failure == other), SandboxFailure.RAISED)
    return CallResult(None, kind, printable(str(answer.get("error", "")))[:8000], printed, duration)

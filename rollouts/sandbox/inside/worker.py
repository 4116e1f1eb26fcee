"""Warm worker of a SandboxPool: loads one function, then runs it for each request, by default in a fork that ends with the call.

The worker itself is confined. A call's process has neither the pipes to the pool nor a way to signal the worker, and when it ends,
everything that it started is killed. This is the library's only file that compiles and executes source text.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import json
import linecache
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from rollouts.sandbox.inside.landlock import scope_signals
from rollouts.sandbox.inside.messages import LENGTH_BYTES, encode_message, read_message, write_all
from rollouts.sandbox.inside.processes import clear_folder, kill_descendants, kill_others, set_limit

Function = Callable[[Any], Any]
HERE = os.path.dirname(__file__)
FOLDERS = (HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "rewards"))  # frames of this library, left out of tracebacks
NUM_LIMITS = 16  # number of resource limits in Linux


def load_source(source: str, name: str, file: str | None = None) -> types.ModuleType:
    """Create a module from source text; tracebacks show the file's name and lines."""
    module = types.ModuleType(name)
    module.__file__ = file or f"{name}.py"
    sys.modules[name] = module
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def execute(source: str | ast.Module, names: dict[str, Any]) -> None:
    """Execute statements in a namespace of the caller."""
    exec(compile(source, "test", "exec"), names)


def import_from(folder: str) -> None:
    """Import a package or module from its folder or file, without its siblings; a package's own modules can be imported then."""
    name = os.path.splitext(os.path.basename(folder))[0]
    init = os.path.join(folder, "__init__.py")
    places = [folder] if os.path.isdir(folder) else None
    spec = importlib.util.spec_from_file_location(name, init if places else folder, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if places is None or os.path.exists(init):
        spec.loader.exec_module(module)


class Answer:
    """Answer of a call in JSON: a value or an exception."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    def set_value(self, value: object, limit: int) -> None:
        """Record the call's value."""
        try:
            body = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            self.message = {"failure": "result", "error": f"returned a value that JSON cannot hold: {type(error).__name__}: {error}"}
            return
        if len(body) > limit:
            self.message = {"failure": "output", "error": f"returned {len(body)} bytes of JSON; output_bytes allows {limit}"}
        else:
            self.message = {"value": value}

    def set_error(self, error: BaseException) -> None:
        """Record the call's exception."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(FOLDERS)]
        said = "".join(traceback.format_exception_only(error))[-2000:].strip()
        places = "".join(traceback.format_list(frames[-6:]))[-2000:].rstrip()
        self.message = {"failure": "raised", "error": f"{said}\n{places}".strip()}


def answer_call(function: Function, payload: Any, limit: int) -> bytes:
    """Call the function and return the message with its answer."""
    answer = Answer()
    try:
        answer.set_value(function(payload), limit)
    except BaseException as error:  # every exception is an answer, SystemExit too
        answer.set_error(error)
    return encode_message(answer.message)


def serve(worker: dict[str, Any], limits: dict[str, Any], isolated: bool) -> NoReturn:
    """Load the function, report that, and answer requests until the pipe is closed."""
    requests, results = worker["requests"], worker["results"]
    sys.path.extend(worker["python_path"])
    sys.argv = ["worker"]
    answer = Answer()
    try:
        for folder in worker["folders"]:
            import_from(folder)
        module = importlib.import_module(worker["module"]) if worker["source"] is None else load_source(worker["source"], worker["module"])
        function: Function = getattr(module, worker["function"])
        if not callable(function):
            raise TypeError(f"{worker['function']} of {worker['module']} is {type(function).__name__}, not a function")
        answer.message = {"ready": True}
    except BaseException as error:  # from the user's file, reported to the pool, which raises it
        answer.set_error(error)
        write_all(results, encode_message(answer.message))
        os._exit(1)
    own = _own_limits()
    gc.collect()
    gc.freeze()  # forks then do not copy loaded objects
    write_all(results, encode_message(answer.message))
    while True:
        try:
            request = read_message(requests)
        except EOFError:
            os._exit(0)
        write_all(results, encode_message({"nonce": request["nonce"], "started": True}))
        if worker["fork"]:
            header, body = Call(function, request["payload"], limits, (requests, results)).run(isolated)
        else:
            start = time.monotonic()
            _allow_processor_time(limits["cpu_s"])
            body = answer_call(function, request["payload"], limits["output_bytes"])[LENGTH_BYTES:]
            header = {"duration_s": time.monotonic() - start}
            resource.setrlimit(resource.RLIMIT_CPU, own[resource.RLIMIT_CPU])
        write_all(results, encode_message({"nonce": request["nonce"], "body_bytes": len(body), **header}) + body)
        if _own_limits() != own:
            os._exit(1)  # the pool takes another worker for the next call


def _own_limits() -> list[tuple[int, int]]:
    """Return the limits of this process, indexed by their number."""
    return [resource.getrlimit(kind) for kind in range(NUM_LIMITS)]


def _allow_processor_time(seconds: float) -> None:
    """Grant this process so many further seconds of processor time, rounded up; then a SIGXCPU ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


class Call:
    """One call in a process of its own, from the worker's side."""

    def __init__(self, function: Function, payload: Any, limits: dict[str, Any], pipes: tuple[int, int]) -> None:
        self.limits = limits
        self.result, result_in = os.pipe()
        self.output, output_in = os.pipe()
        self.start = time.monotonic()
        self.child = os.fork()
        if self.child == 0:
            _run_call(function, payload, limits, result_in, output_in, (*pipes, self.result, self.output))
        os.close(result_in)
        os.close(output_in)
        self.body, self.printed = bytearray(), bytearray()

    def run(self, isolated: bool) -> tuple[dict[str, Any], bytes]:
        """Wait for the call's end, or end it; return header and body of the answer. No process or file of the call is left."""
        failure = self._wait()
        with suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        _, status, usage = os.wait4(self.child, 0)
        duration = time.monotonic() - self.start
        if isolated:
            kill_others()
        else:
            kill_descendants()
        clear_folder(self.limits["scratch"])  # wherever the working directory is now
        self._drain()
        os.close(self.result)
        os.close(self.output)
        code = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        limit = self.limits["output_bytes"]
        whole = len(self.body) >= LENGTH_BYTES and int.from_bytes(self.body[:LENGTH_BYTES], "big") == len(self.body) - LENGTH_BYTES
        header = {"duration_s": duration, "output": self.printed[:limit].decode(errors="replace")}
        if failure is None and not whole:
            over_cpu = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self.limits["cpu_s"])  # as in sandbox/run.py
            failure = "cpu" if over_cpu else "file" if code == -signal.SIGXFSZ else "died"
        if failure is not None:
            return {**header, "failure": failure, "returncode": code}, b""
        return header, bytes(self.body[LENGTH_BYTES:])

    def _wait(self) -> str | None:
        """Collect the call's output until it ends; return the limit that it exceeded, or None."""
        poll = select.poll()
        ended = os.pidfd_open(self.child)
        try:
            for descriptor in (ended, self.result, self.output):
                poll.register(descriptor, select.POLLIN)
            while True:
                left = self.start + self.limits["wall_s"] - time.monotonic()
                if left <= 0:
                    return "wall"
                ready = {number for number, _ in poll.poll(left * 1000 + 1)}
                for number, data in ((self.result, self.body), (self.output, self.printed)):
                    if number in ready:
                        part = os.read(number, 1 << 16)
                        data += part
                        if not part:
                            poll.unregister(number)
                if max(len(self.body) - 8192, len(self.printed)) > self.limits["output_bytes"]:
                    return "output"
                if ended in ready:
                    return None
        finally:
            os.close(ended)

    def _drain(self) -> None:
        """Read the rest in the pipes once all their writers have ended."""
        for number, data in ((self.result, self.body), (self.output, self.printed)):
            os.set_blocking(number, False)
            with suppress(BlockingIOError):
                while part := os.read(number, 1 << 16):
                    data += part


def _run_call(function: Function, payload: Any, limits: dict[str, Any], result: int, output: int, closed: tuple[int, ...]) -> NoReturn:
    """Run one call, in its process."""
    try:
        for number in closed:
            os.close(number)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        scope_signals()
        set_limit(resource.RLIMIT_CPU, limits["cpu_s"], slack=1)
        own = int(os.pread(limits["size"], 100, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")  # size of the worker, of which this is a copy
        set_limit(resource.RLIMIT_AS, own + limits["memory_bytes"])
        os.close(limits["size"])
        body = answer_call(function, payload, limits["output_bytes"])
        with suppress(Exception):  # the call may have replaced or closed them
            sys.stdout.flush()
            sys.stderr.flush()
        write_all(result, body)
    finally:
        os._exit(0)

"""A warm worker of a SandboxPool: loads one function, then runs it for each request, by default in a fork that ends with the call.

It is confined itself. A call's own process has neither the pipes to the pool nor a way to signal this one, and when it ends everything that
it started is killed. This is the one file of the library that compiles and executes source text.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
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

from rollouts.sandbox.landlock import scope_signals
from rollouts.sandbox.messages import LENGTH_BYTES, encode_message, read_message, write_all
from rollouts.sandbox.processes import clear_folder, kill_descendants, kill_others, set_limit

Function = Callable[[Any], Any]
FOLDER = os.path.dirname(__file__)
NUM_LIMITS = 16  # kinds of limits that Linux has


def load_source(source: str, name: str) -> types.ModuleType:
    """A module from source text."""
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def import_from(folder: str) -> None:
    """Import a package or module from its folder or file, in whose parent nothing else can be seen; a package's modules are found then."""
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
    """What a call says about itself, in JSON: a value, or what was raised."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    def set_value(self, value: object, limit: int) -> None:
        """The call returned."""
        try:
            body = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            self.message = {"failure": "result", "error": f"returned what JSON has no text for: {type(error).__name__}: {error}"}
            return
        if len(body) > limit:
            self.message = {"failure": "output", "error": f"returned {len(body)} bytes of JSON; output_bytes allows {limit}"}
        else:
            self.message = {"value": value}

    def set_error(self, error: BaseException) -> None:
        """The call raised."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(FOLDER)]
        said = "".join(traceback.format_exception_only(error))[-2000:].strip()
        places = "".join(traceback.format_list(frames[-6:]))[-2000:].rstrip()
        self.message = {"failure": "raised", "error": f"{said}\n{places}".strip()}


def answer_call(function: Function, payload: Any, limit: int) -> bytes:
    """Call the function; the message with its answer."""
    answer = Answer()
    try:
        answer.set_value(function(payload), limit)
    except BaseException as error:  # whatever it raised is the answer, SystemExit as well
        answer.set_error(error)
    return encode_message(answer.message)


def serve(worker: dict[str, Any], limits: dict[str, Any], isolated: bool) -> NoReturn:
    """Load the function, say so, and answer requests until the pipe is closed."""
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
    except BaseException as error:  # of the user's file, reported to the pool, which raises it
        answer.set_error(error)
        write_all(results, encode_message(answer.message))
        os._exit(1)
    own = _own_limits()
    gc.collect()
    gc.freeze()  # so that forks do not copy what is loaded
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
    """Limits of this process, by their number."""
    return [resource.getrlimit(kind) for kind in range(NUM_LIMITS)]


def _allow_processor_time(seconds: float) -> None:
    """So much more processor time for this process, in whole seconds; then a SIGXCPU ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


class Call:
    """One call in a process of its own, seen from the worker."""

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
        """Wait for its end, or end it; header and body of the answer. Nothing of the call is left afterwards."""
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
            over_cpu = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self.limits["cpu_s"])  # as sandbox/run.py has it
            failure = "cpu" if over_cpu else "file" if code == -signal.SIGXFSZ else "died"
        if failure is not None:
            return {**header, "failure": failure, "returncode": code}, b""
        return header, bytes(self.body[LENGTH_BYTES:])

    def _wait(self) -> str | None:
        """Collect what it writes until it ends; the limit that it exceeded, if one."""
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
        """Take what is in the pipes when all that could write to them has ended."""
        for number, data in ((self.result, self.body), (self.output, self.printed)):
            os.set_blocking(number, False)
            with suppress(BlockingIOError):
                while part := os.read(number, 1 << 16):
                    data += part


def _run_call(function: Function, payload: Any, limits: dict[str, Any], result: int, output: int, closed: tuple[int, ...]) -> NoReturn:
    """The process of one call."""
    try:
        for number in closed:
            os.close(number)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        scope_signals()
        set_limit(resource.RLIMIT_CPU, limits["cpu_s"], slack=1)
        own = int(os.pread(limits["size"], 100, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")  # of the worker, which this is a copy of
        set_limit(resource.RLIMIT_AS, own + limits["memory_bytes"])
        os.close(limits["size"])
        body = answer_call(function, payload, limits["output_bytes"])
        with suppress(Exception):  # the call may have replaced or closed them
            sys.stdout.flush()
            sys.stderr.flush()
        write_all(result, body)
    finally:
        os._exit(0)

"""Inference servers as processes: start, wait until healthy, watch, restart, stop, and leave nothing behind.

    async with launch_server(config, run_dir / "vllm.log", environment=os.environ) as server:
        async with VLLMEngine(server.url) as engine: ...

A small supervisor (supervisor.py) stands between this process and the server. It notices the end of this process, even by kill -9, and
ends the server with all of its descendants. For POSIX; processes that have left the server's process group are found on Linux only.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint
from rollouts.engines.launch import supervisor as server_supervisor
from rollouts.engines.launch.commands import ServerConfig, build_command, build_environment
from rollouts.engines.launch.log import PORT_TAKEN, describe_log, describe_status, find_cause, read_log
from rollouts.errors import EngineError, EngineTimeout, raise_single_errors

Progress = Callable[[float, str], None]
"""f(seconds since the start, last line of the server's log), called about once a second until the server is healthy."""

OnExit = Callable[[EngineError], None]
"""f(error), called when a healthy server ends by itself; the error has its exit status and the end of its log."""

PORT_ATTEMPTS = 5
POLL_S = 0.5  # maximum seconds between two health checks; the first ones come sooner
PROGRESS_S = 1.0  # minimum seconds between two calls of on_progress
START_DEADLINES = Deadlines(health_s=5.0, connect_s=2.0)  # for one health check before the server is healthy; it is repeated
SPAWN_S = 30.0  # seconds until the supervisor reports the server's process
UNHEALTHY_EXIT_S = 10.0  # seconds from a failed request to the exit of the server that caused it; SGLang takes 5 s


class _Run:
    """One start of the server: its supervisor, and the known facts of its end."""

    def __init__(self, supervisor: trio.Process, folder: str, log_start: int) -> None:
        self.supervisor = supervisor
        self.folder = folder  # folder of temporary files
        self.log_start = log_start  # first byte of this start's output in the log
        self.pid = 0
        self.failure: str | None = None  # reason why the process could not be started
        self.status: int | None = None
        self.left: str | None = None  # ids of processes that could not be ended
        self.started = trio.Event()
        self.exited = trio.Event()
        self.finished = trio.Event()  # no further reports come
        self.is_stopping = False
        self.is_watched = False  # it was healthy, so its end fails the block

    async def follow(self) -> None:
        """Read the supervisor's reports until it has ended."""
        assert self.supervisor.stdout is not None
        try:
            async with self.supervisor.stdout as reports:
                buffered = b""
                async for chunk in reports:
                    *lines, buffered = (buffered + chunk).split(b"\n")
                    for line in lines:
                        self._note(line.decode(errors="replace"))
            if self.pid and not self.exited.is_set():  # the supervisor was killed: the server's first process died with it, others may live
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self.started.set()
            self.exited.set()
            self.finished.set()

    def _note(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "started":
            self.pid = int(rest)
            self.started.set()
        elif word == "failed":
            self.failure = rest
        elif word == "exited":
            self.status = int(rest)
            self.exited.set()
        else:
            assert word == "left", f"the supervisor said {line!r}"
            self.left = rest


class ServerProcess:
    """A running inference server, started by launch_server."""

    def __init__(self, launch: _Launch) -> None:
        self._launch = launch

    @property
    def url(self) -> str:
        """Base URL for an engine on this machine; restart() keeps it."""
        return self._launch.url

    @property
    def port(self) -> int:
        """Port that the server listens on; restart() keeps it."""
        return self._launch.port

    @property
    def pid(self) -> int:
        """Process id of the server's first process, which is also that of its process group."""
        return self._launch.get_run().pid

    @property
    def log_path(self) -> Path:
        """Log of the server's output, all starts one after the other."""
        return self._launch.log_path

    @property
    def is_running(self) -> bool:
        """Whether the server's first process is alive."""
        return not self._launch.get_run().exited.is_set()

    async def restart(self) -> None:
        """Stop the server and start it again, with the same settings, port and log, and with the weights of model_path.

        Raises: EngineError, EngineTimeout if it does not become healthy; restart() may then be tried again.
        """
        await self._launch.restart()

    async def stop(self) -> None:
        """Send SIGTERM to all of the server's processes, SIGKILL after the grace, until none is left. Does nothing if it does not run.

        It continues to its end even if it is cancelled.

        Raises: EngineError if a process could not be ended, naming it.
        """
        await self._launch.stop()


class _Launch:
    """The steps of launch_server."""

    def __init__(
        self,
        config: ServerConfig,
        log_path: Path,
        environment: Mapping[str, str],
        startup_s: float,
        grace_s: float,
        on_progress: Progress,
        on_exit: OnExit | None,
        deadlines: Deadlines,
    ) -> None:
        self.log_path = log_path
        self._config = config
        self._environment = environment
        self._startup_s = startup_s
        self._grace_s = grace_s
        self._on_progress = on_progress
        self._on_exit = on_exit
        self._deadlines = deadlines
        self._nursery: trio.Nursery | None = None
        self._place: _Place | None = None
        self._run: _Run | None = None
        self._lock = trio.Lock()  # one restart at a time

    @property
    def port(self) -> int:
        assert self._place is not None, "the server has not been started"
        return self._place.port

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def get_run(self) -> _Run:
        assert self._run is not None, "the server has not been started"
        return self._run

    async def restart(self) -> None:
        async with self._lock:
            await self.stop()
            await self._start(trio.current_time() + self._startup_s)

    async def stop(self) -> None:
        run = self._run
        if run is None:
            return
        run.is_stopping = True
        ended = False
        with trio.CancelScope(shield=True):
            assert run.supervisor.stdin is not None
            await run.supervisor.stdin.aclose()
            with trio.move_on_after(self._grace_s + server_supervisor.KILL_S + 10.0):
                await run.supervisor.wait()
                ended = True
            if not ended:
                run.supervisor.kill()
                await run.supervisor.wait()
            await run.finished.wait()
        if not ended or run.left is not None:
            left = f"processes {run.left}" if run.left else f"process {run.pid}"
            raise EngineError(f"{left} of the {self._config.kind} server do not end, not even by SIGKILL: look at what they wait for")

    async def open(self, nursery: trio.Nursery) -> None:
        """Start the server, on another port if the chosen one was taken in the meantime."""
        self._nursery = nursery
        expires = trio.current_time() + self._startup_s
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._place = await _Place.take(self._config.host, self._config.port)
            try:
                return await self._start(expires)
            except _PortTaken:
                if self._config.port is not None or attempt == PORT_ATTEMPTS:
                    raise
                await self.stop()
                self._place.release()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        try:
            await self.stop()
        finally:
            if self._place is not None:
                self._place.release()

    async def _start(self, expires: float) -> None:
        assert self._nursery is not None
        begin = trio.current_time()
        run = self._run = await self._spawn()
        self._nursery.start_soon(run.follow)
        with trio.move_on_after(SPAWN_S):
            await run.started.wait()
        if not run.pid:
            reason = run.failure or "its supervisor did not start it"
            raise EngineError(f"the {self._config.kind} server cannot be started with {self._config.python}: {reason}")
        await self._wait_until_healthy(run, begin, expires)
        run.is_watched = True
        self._nursery.start_soon(self._fail_on_exit, run)

    async def _spawn(self) -> _Run:
        command = build_command(self._config, self.port)
        environment = build_environment(self._config, self._environment)
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                start = log.tell()
                folder = tempfile.mkdtemp(prefix="rollouts-", dir=environment.get("TMPDIR"))  # removed by the supervisor
                environment["TMPDIR"] = folder
                supervisor = [sys.executable, "-I", "-S", server_supervisor.__file__, str(self._grace_s), str(os.getpid()), folder]
                try:
                    process = await trio.lowlevel.open_process(
                        [*supervisor, *command],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True,
                    )  # fmt: skip
                except BaseException:
                    os.rmdir(folder)
                    raise
        except OSError as error:
            raise EngineError(f"the {self._config.kind} server cannot be started: {error}") from error
        return _Run(process, folder, start)

    async def _wait_until_healthy(self, run: _Run, begin: float, expires: float) -> None:
        answer = "no answer yet"
        pause = 0.02
        reported = begin
        with trio.move_on_at(expires):
            async with HTTPEndpoint(self.url, deadlines=START_DEADLINES) as endpoint:
                while not run.exited.is_set():
                    try:
                        await endpoint.get_text("/health", kind="health")
                    except EngineError as error:
                        answer = str(error)
                    else:
                        return
                    now = trio.current_time()
                    if now - reported >= PROGRESS_S:
                        reported = now
                        lines = read_log(self.log_path, run.log_start).split("\n")
                        self._on_progress(now - begin, next((line for line in reversed(lines) if line.strip()), ""))
                    with trio.move_on_after(pause):
                        await run.exited.wait()
                    pause = min(1.5 * pause, POLL_S)
        if run.exited.is_set():
            raise self._describe_end(run, "before it was healthy")
        log = describe_log(read_log(self.log_path, run.log_start), self.log_path)
        raise EngineTimeout(
            f"the {self._config.kind} server is not healthy after {trio.current_time() - begin:.0f} s ({answer}): give it more time"
            f" ({self._deadlines.options.get('startup_s', 'startup_s')}) or see what it waits for. {log}"
        )

    async def _fail_on_exit(self, run: _Run) -> None:
        await run.exited.wait()
        if run.is_stopping:
            return
        error = self._describe_end(run, "while it was in use")
        if self._on_exit is None:
            raise error
        self._on_exit(error)

    def _describe_end(self, run: _Run, when: str) -> EngineError:
        log = read_log(self.log_path, run.log_start)
        message = f"the {self._config.kind} server (process {run.pid}, {self.url}) {describe_status(run.status)} {when}. "
        kind = _PortTaken if find_cause(log) == PORT_TAKEN else EngineError
        return kind(message + describe_log(log, self.log_path, run.status))

    async def await_end(self) -> None:
        """After a failed request, return if the server is healthy or does not end soon; if it ends, the watching task fails the block."""
        run = self._run
        if run is None or run.is_stopping or not run.is_watched or self._on_exit is not None:
            return
        try:
            async with HTTPEndpoint(self.url, deadlines=self._deadlines) as endpoint:
                await endpoint.get_text("/health", kind="health")
        except EngineError:
            await trio.sleep(UNHEALTHY_EXIT_S)  # cancelled by the watching task


@asynccontextmanager
async def launch_server(
    config: ServerConfig,
    log_path: Path | str,
    *,
    environment: Mapping[str, str],
    startup_s: float = 900.0,
    grace_s: float = 20.0,
    on_progress: Progress = lambda seconds, line: None,
    on_exit: OnExit | None = None,
    deadlines: Deadlines | None = None,
) -> AsyncGenerator[ServerProcess]:
    """Start a server, wait until it is healthy, and stop it at the end of the block.

    If the server ends while the block is open, the block is cancelled and fails with an EngineError with the exit status and the last lines
    of the log; a request that failed because of that is its cause.

    Args:
        config: settings of the server.
        log_path: file to which the server's output is appended; its folder is created.
        environment: variables of this process, for instance os.environ; those that the server needs are added, disturbing ones left out.
        startup_s: seconds until the server must be healthy; loading a large model takes minutes.
        grace_s: seconds between SIGTERM and SIGKILL.
        on_progress: called about once a second while waiting.
        on_exit: called with that error instead; the block then continues and may restart() the server.
        deadlines: deadlines of a health check after a failed request, with the name of the option that sets startup_s, for messages.

    Raises: EngineError if the server does not start, or ends; EngineTimeout if it is not healthy in time.
    """
    launch = _Launch(config, Path(log_path), environment, startup_s, grace_s, on_progress, on_exit, deadlines or Deadlines())
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            try:
                await launch.open(nursery)
                try:
                    yield ServerProcess(launch)
                except (EngineError, ExceptionGroup) as error:
                    if isinstance(error, EngineError) or error.subgroup(EngineError) is not None:
                        await launch.await_end()
                    raise
            finally:
                await launch.close()
                nursery.cancel_scope.cancel()


class _PortTaken(EngineError):
    """Another process has the port."""


class _Place:
    """A port reserved for the server.

    On Linux a bound socket that does not listen reserves it: other programs that ask for any port do not get this one, while the server,
    which like all servers sets SO_REUSEADDR, can listen on it. Without it two vLLM servers, which set SO_REUSEPORT, could even listen on
    one port, and the requests of two trainings would be mixed.
    """

    def __init__(self, socket: trio.socket.SocketType, port: int) -> None:
        self.port = port
        self._socket = socket

    @classmethod
    async def take(cls, host: str, port: int | None) -> _Place:
        """Take this port, or any free one. Raises: _PortTaken; EngineError if the host is not an address of this machine."""
        socket = trio.socket.socket(trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET)
        try:
            socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
            await socket.bind((host, port or 0))
        except OSError as error:
            socket.close()
            if error.errno == errno.EADDRINUSE:
                raise _PortTaken(f"port {port} of {host} cannot be used: {PORT_TAKEN}") from error
            raise EngineError(f"a server cannot listen on {host}, port {port}: {error}") from error
        place = cls(socket, socket.getsockname()[1])
        if sys.platform != "linux":
            socket.close()
        return place

    def release(self) -> None:
        """Release the port; may be called again."""
        self._socket.close()

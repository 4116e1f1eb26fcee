"""Starting, watching and ending inference servers, with real processes: a small HTTP server stands in for the real ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from rollouts.engines.http import HTTPEndpoint
from rollouts.engines.server_commands import ServerConfig
from rollouts.engines.servers import ServerProcess, launch_server
from rollouts.errors import EngineError, EngineTimeout

ROOT = Path(__file__).parent.parent
SHARED_MEMORY = Path("/dev/shm")
pytestmark = [
    pytest.mark.slow,  # dozens of processes, each given time to end
    pytest.mark.skipif(sys.platform != "linux", reason="looks for surviving processes in /proc"),
]

GRANDCHILD = """
import os, signal, sys, time
def asked(number, frame):
    os.write(2, b"grandchild asked\\n")
    if sys.argv[1] == "polite":
        os._exit(0)
signal.signal(signal.SIGTERM, asked)
print("ready", flush=True)
while True:
    time.sleep(600)
"""

STAND_IN = """
import http.server, json, mmap, os, signal, socket, subprocess, sys, threading, time
do = json.loads(os.environ["STAND_IN"])
args = dict(zip(sys.argv, sys.argv[1:]))
port = int(args["--port"])
print("starting on port", port, "with", len(sys.argv), "arguments", flush=True)
if "grandchild" in do:
    command = [sys.executable, "-IS", os.path.dirname(sys.argv[0]) + "/grandchild", do["grandchild"]]
    subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=do["grandchild"] == "session").stdout.readline()
if do.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "slow_end" in do:
    def end(number, frame):
        time.sleep(do["slow_end"])
        os.write(2, b"first process ends\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
print("temporary files in", os.environ["TMPDIR"], flush=True)
open(os.environ["TMPDIR"] + "/socket", "w").close()
maps = []
for path in do.get("map", ()):
    with open(path, "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        maps.append(mmap.mmap(file.fileno(), 4096))
if "steal_port_once" in do and not os.path.exists(do["steal_port_once"]):
    open(do["steal_port_once"], "w").close()
    thief = socket.create_server(("127.0.0.1", port))
if "message" in do:
    sys.exit(do["message"])
if do.get("never_healthy"):
    print("loading for ever", flush=True)
    time.sleep(600)
time.sleep(do.get("healthy_after", 0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("a request was too much", flush=True)
            self.connection.close()
            time.sleep(do.get("die_after", 0))
            os._exit(7)
        if self.path == "/kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer((args["--host"], port), Handler)
print("healthy", flush=True)
server.serve_forever()
"""


class StandIn:
    """Settings of servers that behave as told, and a look at what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "run" / "server.log"
        self.mark = f"MARK={uuid.uuid4().hex}"  # in the environment of all that is started, however deep
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        (folder / "grandchild").write_text(GRANDCHILD)
        self.python = folder / "python"
        self.python.write_text(f"#!{sys.executable} -IS\n{STAND_IN}")
        self.python.chmod(0o755)

    def config(self, port: int | None = None, **behavior: Any) -> ServerConfig:
        name, _, value = self.mark.partition("=")
        env = {"STAND_IN": json.dumps(behavior), name: value}
        return ServerConfig(kind="vllm", model_path="m", python=str(self.python), port=port, env=env)

    def launch(
        self, port: int | None = None, *, grace_s: float = 2.0, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[ServerProcess]:
        known = {key: options.pop(key) for key in ("startup_s", "on_progress") if key in options}
        environment = {"PATH": os.defpath, "TMPDIR": str(self.temporary)}
        return launch_server(self.config(port, **options), self.log_path, environment=environment, grace_s=grace_s, **known)

    def survivors(self) -> list[str]:
        """Command lines of the processes, supervisors included, that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(f"{entry.name} " + (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float = 15.0) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


@pytest.fixture
def stand_in(tmp_path):
    stand_in = StandIn(tmp_path)
    yield stand_in
    left = stand_in.survivors()
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    assert not left, f"these processes were left behind: {left}"
    assert not list(stand_in.temporary.iterdir()), "temporary files were left behind"


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", port))
        return True
    return False


async def test_a_server_is_there_while_the_block_is_open(stand_in):
    async with stand_in.launch(healthy_after=0.3) as server:
        assert server.is_running
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert (await httpx.AsyncClient(trust_env=False).get(server.url + "/health")).text == "ok"
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
        assert os.getsid(server.pid) == server.pid
        assert len(stand_in.survivors()) == 2
    assert stand_in.survivors() == []
    assert not can_connect(server.port)
    assert "healthy" in server.log_path.read_text().splitlines()
    assert server.log_path == stand_in.log_path


async def test_progress_is_told_with_the_last_line_of_the_log(stand_in):
    told = []
    scope = trio.CancelScope()

    def note(seconds: float, line: str) -> None:
        told.append((seconds, line))
        if [line for _, line in told].count("loading for ever") == 2:
            scope.cancel()

    with scope:
        async with stand_in.launch(never_healthy=True, on_progress=note):
            raise AssertionError("it is not healthy")
    times = [seconds for seconds, _ in told]
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise([0.0, *times]))


async def test_a_server_that_is_never_healthy_is_given_up(stand_in):
    begin = trio.current_time()
    with pytest.raises(EngineTimeout, match=r"not healthy after \d+ s \(.*refused(.|\n)*server\.log"):
        async with stand_in.launch(never_healthy=True, startup_s=1.0):
            raise AssertionError("it is not healthy")
    assert trio.current_time() - begin >= 1.0
    assert stand_in.survivors() == []


async def test_a_server_that_dies_at_start_shows_the_end_of_its_log(stand_in):
    with pytest.raises(EngineError) as caught:
        async with stand_in.launch(message="api_server.py: error: unrecognized arguments: --no-such-flag"):
            raise AssertionError("it is not healthy")
    message = str(caught.value)
    assert "ended with exit status 1 before it was healthy" in message
    assert "Probably an argument that this version of the server does not know" in message
    assert message.endswith("\n    api_server.py: error: unrecognized arguments: --no-such-flag")
    assert stand_in.survivors() == []


async def test_only_the_log_of_this_start_is_shown(stand_in):
    stand_in.log_path.parent.mkdir()
    stand_in.log_path.write_text("OSError: Address already in use, long ago\n")
    with pytest.raises(EngineError) as caught:
        async with stand_in.launch(message="bad"):
            raise AssertionError("it is not healthy")
    assert "long ago" not in str(caught.value)
    assert "long ago" in stand_in.log_path.read_text()


async def test_a_python_that_is_not_there_is_named(stand_in):
    config = ServerConfig(kind="sglang", model_path="m", python=str(stand_in.folder / "absent"))
    with pytest.raises(EngineError, match=r"sglang server cannot be started with .*absent: .*No such file"):
        async with launch_server(config, stand_in.log_path, environment={}):
            raise AssertionError("there is no server")


@pytest.mark.parametrize(("path", "status"), [("/die", "ended with exit status 7"), ("/kill", r"was killed by signal 9 \(SIGKILL")])
async def test_the_death_of_a_server_fails_the_block_whatever_it_waits_for(stand_in, path, status):
    with pytest.raises(EngineError, match=f"{status}(.|\n)*while it was in use(.|\n)*The last lines of .*server.log"):
        async with stand_in.launch() as server, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            with contextlib.suppress(httpx.TransportError):
                await httpx.AsyncClient(trust_env=False).get(server.url + path)
            await trio.sleep(10)
            raise AssertionError("the death was not noticed")
    assert stand_in.survivors() == []


async def test_a_request_that_fails_by_the_servers_death_shows_the_death(stand_in):
    with pytest.raises(EngineError, match=r"exit status 7(.|\n)*a request was too much") as caught:
        async with stand_in.launch(die_after=1.0) as server, HTTPEndpoint(server.url) as endpoint:
            await endpoint.get_text("/die", kind="health")
    assert isinstance(caught.value.__context__, BaseException)
    assert stand_in.survivors() == []


async def test_an_error_of_the_body_is_its_own(stand_in):
    with pytest.raises(KeyError, match="mine"):
        async with stand_in.launch():
            raise KeyError("mine")
    assert stand_in.survivors() == []


async def test_an_engine_error_while_the_server_is_healthy_is_its_own(stand_in):
    with pytest.raises(EngineError, match="wrong model") as caught:
        async with stand_in.launch():
            begin = trio.current_time()
            raise EngineError("wrong model")
    assert str(caught.value) == "wrong model"
    assert trio.current_time() - begin < 4.0


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(stand_in):
    async with stand_in.launch(ignore_sigterm=True, grace_s=0.5):
        begin = trio.current_time()
    assert 0.5 <= trio.current_time() - begin < 5.0
    assert stand_in.survivors() == []


@pytest.mark.parametrize("where", ["group", "session"])
async def test_grandchildren_are_ended_wherever_they_went(stand_in, where):
    async with stand_in.launch(grandchild=where, grace_s=0.2):
        assert len(stand_in.survivors()) == 3
    assert stand_in.survivors() == []


async def test_the_first_process_is_asked_to_end_before_the_others(stand_in):
    async with stand_in.launch(grandchild="polite", slow_end=0.3):
        begin = trio.current_time()
    assert trio.current_time() - begin < 1.9
    assert stand_in.log_path.read_text().splitlines()[-2:] == ["first process ends", "grandchild asked"]


async def test_temporary_files_are_removed(stand_in):
    async with stand_in.launch(healthy_after=0.1):
        (folder,) = stand_in.temporary.iterdir()
        assert f"temporary files in {folder}" in stand_in.log_path.read_text()
        assert [path.name for path in folder.iterdir()] == ["socket"]
    assert not folder.exists()


@pytest.fixture
def shared_file():
    """Makes paths in shared memory; removes what is there at the end."""
    paths = []

    def create(prefix: str) -> Path:
        paths.append(SHARED_MEMORY / f"{prefix}_{uuid.uuid4().hex}")
        return paths[-1]

    if not SHARED_MEMORY.is_dir():
        pytest.skip("shared memory is not seen as files")
    yield create
    for path in paths:
        path.unlink(missing_ok=True)


async def test_shared_memory_is_removed_and_that_of_others_is_not(stand_in, shared_file):
    own, used, checkpoint, older, foreign = (shared_file(prefix) for prefix in ("psm", "psm", "checkpoint", "psm", "psm"))
    older.write_bytes(b"x")
    async with stand_in.launch(map=[str(path) for path in (own, used, checkpoint, older)]):
        foreign.write_bytes(b"x")
        with used.open("rb") as file:
            held = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    assert [path.exists() for path in (own, used, checkpoint, older, foreign)] == [False, True, True, True, True]
    held.close()


async def test_shared_memory_of_a_killed_server_is_removed(stand_in, shared_file):
    own = shared_file("psm")
    with pytest.raises(EngineError, match="signal 9"):
        async with stand_in.launch(map=[str(own)], healthy_after=1.2) as server:  # time for a look at what it maps
            os.kill(server.pid, signal.SIGKILL)
            await trio.sleep_forever()
    assert not own.exists()


@pytest.mark.parametrize("where", ["group", "session"])
async def test_what_a_dead_server_leaves_behind_is_ended(stand_in, where):
    with pytest.raises(EngineError, match="exit status 7"):
        async with stand_in.launch(grandchild=where, grace_s=0.2) as server:
            with contextlib.suppress(httpx.TransportError):
                await httpx.AsyncClient(trust_env=False).get(server.url + "/die")
            await trio.sleep_forever()
    assert stand_in.survivors() == []


@pytest.mark.parametrize("healthy_after", [0.0, 600.0])
async def test_nothing_is_left_after_a_cancellation(stand_in, healthy_after):
    with trio.move_on_after(0.5) as scope:
        async with stand_in.launch(healthy_after=healthy_after, grandchild="session", grace_s=0.2):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert stand_in.survivors() == []


async def test_a_failing_progress_callback_ends_the_server(stand_in):
    def fail(seconds: float, line: str) -> None:
        raise KeyError(line)

    with pytest.raises(KeyError, match="loading"):
        async with stand_in.launch(never_healthy=True, on_progress=fail):
            raise AssertionError("it is not healthy")
    assert stand_in.survivors() == []


async def test_a_restart_keeps_the_port_and_the_log_and_is_watched(stand_in):
    with pytest.raises(EngineError, match="exit status 7"):
        async with stand_in.launch() as server:
            pid, url = server.pid, server.url
            await server.restart()
            assert (server.url, server.is_running) == (url, True)
            assert server.pid != pid
            assert len(stand_in.survivors()) == 2
            assert server.log_path.read_text().count("starting on port") == 2
            with contextlib.suppress(httpx.TransportError):
                await httpx.AsyncClient(trust_env=False).get(server.url + "/die")
            await trio.sleep_forever()


async def test_restarts_at_the_same_time_leave_one_server(stand_in):
    async with stand_in.launch() as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.restart)
            nursery.start_soon(server.restart)
        assert can_connect(server.port)
        assert len(stand_in.survivors()) == 2


async def test_stopping_is_no_failure(stand_in):
    async with stand_in.launch() as server:
        await server.stop()
        assert not server.is_running
        assert stand_in.survivors() == []
        await server.stop()
        await trio.sleep(0.1)
        await server.restart()
        assert can_connect(server.port)


async def test_a_stop_that_is_cancelled_still_stops(stand_in):
    async with stand_in.launch(ignore_sigterm=True, grace_s=0.2) as server:
        with trio.move_on_after(0.05):
            await server.stop()
        assert stand_in.survivors() == []


async def test_a_port_taken_in_the_meantime_is_replaced(stand_in):
    marker = stand_in.folder / "stolen"
    async with stand_in.launch(steal_port_once=str(marker)) as server:
        assert can_connect(server.port)
        log = stand_in.log_path.read_text()
        starts = [line for line in log.splitlines() if line.startswith("starting on port")]
        assert "Address already in use" in log
        assert len(starts) == len(set(starts)) == 2
        assert f"port {server.port} " in starts[1]


async def test_a_taken_port_that_was_asked_for_is_refused_at_once(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 cannot be used: the port is in use by another process"):
            async with stand_in.launch(port):
                raise AssertionError("there is no server")
    assert not stand_in.log_path.exists()


async def test_a_port_that_was_asked_for_is_used(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    async with stand_in.launch(port) as server:
        assert server.port == port


async def test_the_port_is_kept_from_others_while_the_server_loads(stand_in):
    tried = []
    scope = trio.CancelScope()

    def try_to_take(seconds: float, line: str) -> None:
        ports = [int(line.split()[3]) for line in stand_in.log_path.read_text().splitlines() if line.startswith("starting on port")]
        with socket.socket() as other:
            for port in ports:
                tried.append((port, other.connect_ex(("127.0.0.1", port)), is_free(port)))
                scope.cancel()

    with scope:
        async with stand_in.launch(never_healthy=True, on_progress=try_to_take):
            raise AssertionError("it is not healthy")
    ((port, connected, was_free),) = tried
    assert connected == errno.ECONNREFUSED
    assert not was_free
    assert is_free(port)


async def test_an_address_of_another_machine_is_refused(stand_in):
    config = ServerConfig(kind="vllm", model_path="m", python=str(stand_in.python), host="192.0.2.1")
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1"):
        async with launch_server(config, stand_in.log_path, environment={}):
            raise AssertionError("there is no server")


async def test_several_servers_do_not_meet(stand_in):
    async with stand_in.launch() as first, stand_in.launch() as second:
        assert first.port != second.port
        assert first.pid != second.pid
        assert can_connect(first.port)
        assert can_connect(second.port)


async def test_the_death_of_the_supervisor_is_the_death_of_all(stand_in):
    with pytest.raises(EngineError, match="unknown exit status"):
        async with stand_in.launch(grandchild="group") as server:
            supervisor = int((Path("/proc") / str(server.pid) / "stat").read_text().rpartition(")")[2].split()[1])
            os.kill(supervisor, signal.SIGKILL)
            await trio.sleep_forever()
    assert stand_in.wait_for(lambda: not stand_in.survivors(), seconds=5)


PARENT = """
import os, signal, sys, time
import trio
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from test_servers import StandIn
from pathlib import Path

async def main():
    stand_in = StandIn(Path({folder!r}))
    stand_in.mark = {mark!r}
    async with stand_in.launch(grace_s=0.2, **{options!r}):
        if {fork!r} and os.fork() == 0:
            time.sleep(600)
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@contextlib.contextmanager
def run_parent(stand_in: StandIn, *, fork: bool = False, **options: Any):
    """Another Python that launches a server, with a grandchild unless told otherwise."""
    options = {"grandchild": "session", **options}
    code = PARENT.format(root=str(ROOT), folder=str(stand_in.folder), mark=stand_in.mark, options=options, fork=fork)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        try:
            yield parent
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_survives_the_parent_however_it_ends(stand_in, number):
    with run_parent(stand_in) as parent:
        assert parent.stdout.readline() == "open\n"
        assert len(stand_in.survivors()) == 3
        parent.send_signal(number)
        assert stand_in.wait_for(lambda: not stand_in.survivors())
        error = parent.communicate()[1]
        assert parent.returncode == (1 if number == signal.SIGINT else -number) or parent.returncode == -signal.SIGINT
        assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_parent_that_ends_while_the_server_loads(stand_in, number):
    with run_parent(stand_in, never_healthy=True) as parent:
        assert stand_in.wait_for(lambda: len(stand_in.survivors()) == 3)
        parent.send_signal(number)
        assert stand_in.wait_for(lambda: not stand_in.survivors())


def test_a_forked_copy_of_the_parent_does_not_keep_the_server_alive(stand_in):
    with run_parent(stand_in, fork=True) as parent:
        assert parent.stdout.readline() == "open\n"
        parent.kill()
        assert stand_in.wait_for(lambda: not stand_in.survivors())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_what_a_terminal_sends_reaches_the_parent_alone(stand_in, number):
    with run_parent(stand_in) as parent:
        assert parent.stdout.readline() == "open\n"
        os.killpg(parent.pid, number)
        assert stand_in.wait_for(lambda: not stand_in.survivors())
        assert "ended with" not in parent.communicate()[1]


def test_a_server_whose_supervisor_and_parent_are_killed_at_once_dies(stand_in):
    with run_parent(stand_in, grandchild="group") as parent:
        assert parent.stdout.readline() == "open\n"
        (supervisor,) = [int(line.split()[0]) for line in stand_in.survivors() if "server_supervisor.py" in line]
        (server,) = [
            int(line.split()[0]) for line in stand_in.survivors() if "vllm.entrypoints" in line and "server_supervisor.py" not in line
        ]
        parent.send_signal(signal.SIGSTOP)  # it does not see that the supervisor dies
        os.kill(supervisor, signal.SIGKILL)
        assert stand_in.wait_for(lambda: not any(line.startswith(f"{server} ") for line in stand_in.survivors()))
        parent.kill()
        for line in stand_in.survivors():  # the rest is not promised
            os.kill(int(line.split()[0]), signal.SIGKILL)
        assert stand_in.wait_for(lambda: not stand_in.survivors())
        for folder in stand_in.temporary.iterdir():
            shutil.rmtree(folder)

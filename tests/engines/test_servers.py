"""Starting, watching and ending inference servers, with real processes: a small server on a socket stands in for the real ones."""

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
import time
import uuid
from pathlib import Path
from typing import Any

import needs
import pytest
import trio
import trio.testing

from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint
from rollouts.engines.launch import servers
from rollouts.engines.launch import supervisor as server_supervisor
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import ServerProcess, launch_server
from rollouts.errors import EngineError, EngineTimeout

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 60.0  # after which something hangs, however busy the machine is
pytestmark = needs.LINUX

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
import json, mmap, os, signal, socket, subprocess, sys, time
do = json.loads(os.environ["STAND_IN"])
args = dict(zip(sys.argv, sys.argv[1:]))
port = int(args["--port"])
print("starting on port", port, "with", len(sys.argv), "arguments", flush=True)
if os.path.exists(do.get("fails_if", "")):
    sys.exit("this start fails")
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
listener = socket.create_server((args["--host"], port))
print("healthy", flush=True)
while True:
    connection, _ = listener.accept()
    line = connection.recv(65536).split(b" ")
    if line[1:2] == [b"/health"]:
        time.sleep(0.5 * os.path.exists(do.get("busy_if", "")))
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nok")
    elif line[1:2] == [b"/die"]:
        print("a request was too much", flush=True)
        listener.close()
        connection.close()
        while "dies_when" in do and not os.path.exists(do["dies_when"]):
            time.sleep(0.01)
        os._exit(7)
    elif line[1:2] == [b"/kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    connection.close()
"""


class StandIn:
    """Settings of servers that behave as told, and a look at what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "run" / "server.log"
        self.mark = f"MARK={uuid.uuid4().hex}"  # in the environment of all that is started, however deep
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.environment = {"PATH": os.defpath, "TMPDIR": str(self.temporary)}
        (folder / "grandchild").write_text(GRANDCHILD)
        self.python = folder / "python"
        self.python.write_text(f"#!{sys.executable} -IS\n{STAND_IN}")
        self.python.chmod(0o755)

    def settings(self, port: int | None = None, **behavior: Any) -> dict[str, Any]:
        """Return the arguments of ServerConfig."""
        name, _, value = self.mark.partition("=")
        env = {"STAND_IN": json.dumps(behavior), name: value}
        return {"kind": "vllm", "model_path": "m", "python": str(self.python), "port": port, "env": env}

    def launch(
        self, port: int | None = None, *, grace_s: float = PATIENCE_S, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[ServerProcess]:
        known = {key: options.pop(key) for key in ("startup_s", "on_progress", "on_exit", "deadlines") if key in options}
        config = ServerConfig(**self.settings(port, **options))
        return launch_server(config, self.log_path, environment=self.environment, grace_s=grace_s, **known)

    def survivors(self) -> list[str]:
        """Command lines of the processes, supervisors included, that carry the mark."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(f"{entry.name} " + (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def wait_for(self, num_survivors: int) -> None:
        """Wait until `num_survivors` processes carry the mark. Blocks."""
        deadline = time.monotonic() + PATIENCE_S
        while len(left := self.survivors()) != num_survivors:
            assert time.monotonic() < deadline, f"these processes are there, expected {num_survivors}: {left}"
            time.sleep(0.02)


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


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Raise the deadlines: on a busy machine a healthy server may answer late."""
    monkeypatch.setattr(servers, "START_DEADLINES", Deadlines(health_s=PATIENCE_S, connect_s=PATIENCE_S))


@pytest.fixture
def progress_at_once(monkeypatch):
    """Progress is logged after each check of a server that is not healthy."""
    monkeypatch.setattr(servers, "PROGRESS_S", 0.0)


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
        return True
    return False


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", port))
        return True
    return False


async def ask(server: ServerProcess, path: str) -> bytes:
    """The answer to a request; nothing if the server closes the connection instead."""
    async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return b"".join([data async for data in stream])
    return b""


def parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


async def wait_for_looks(supervisor: int) -> None:
    """Wait until a supervisor has checked its server again, as it does after each sleep."""

    def count_sleeps() -> int:
        lines = (Path("/proc") / str(supervisor) / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))

    before = count_sleeps()
    with trio.fail_after(PATIENCE_S):
        while count_sleeps() < before + 3:
            await trio.sleep(0.02)


async def test_a_server_is_there_while_the_block_is_open(stand_in):
    async with stand_in.launch(healthy_after=0.2) as server:
        assert server.is_running
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert (await ask(server, "/health")).endswith(b"ok")
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
        assert os.getsid(server.pid) == server.pid
        assert len(stand_in.survivors()) == 2
    assert stand_in.survivors() == []
    assert not can_connect(server.port)
    assert "healthy" in server.log_path.read_text().splitlines()
    assert server.log_path == stand_in.log_path


async def test_progress_is_told_with_the_last_line_of_the_log(stand_in, monkeypatch):
    monkeypatch.setattr(servers, "PROGRESS_S", 0.1)
    told = []
    scope = trio.CancelScope()

    def note(seconds: float, line: str) -> None:
        told.append((seconds, line))
        if [line for _, line in told].count("loading for ever") == 2:
            scope.cancel()

    with trio.fail_after(PATIENCE_S), scope:
        async with stand_in.launch(never_healthy=True, on_progress=note):
            raise AssertionError("it is not healthy")
    times = [seconds for seconds, _ in told]
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise([0.0, *times]))


async def test_a_server_that_is_never_healthy_is_given_up(stand_in, mock_clock, progress_at_once):
    mock_clock.rate = 1.0
    with pytest.raises(EngineTimeout, match=r"not healthy after 1\d\d\d s \(.*refused(.|\n)*time \(--wait-s\)(.|\n)*server\.log"):
        named: Any = {"startup_s": 1000.0, "deadlines": Deadlines(options={"startup_s": "--wait-s"})}
        async with stand_in.launch(never_healthy=True, **named, on_progress=lambda seconds, line: mock_clock.jump(1000.0)):
            raise AssertionError("it is not healthy")
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
    with (
        trio.fail_after(PATIENCE_S),
        pytest.raises(EngineError, match=f"{status}(.|\n)*while it was in use(.|\n)*The last lines of .*server.log"),
    ):
        async with stand_in.launch() as server, trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await ask(server, path)
            while server.is_running:
                await trio.sleep(0.01)
            await trio.testing.wait_all_tasks_blocked()
            raise AssertionError("nobody has noticed")
    assert stand_in.survivors() == []


async def test_a_request_that_fails_by_the_servers_death_shows_the_death(stand_in, monkeypatch):
    """The server drops the request first, and lives until the error is on its way out of the block."""
    monkeypatch.setattr(servers, "UNHEALTHY_EXIT_S", 1000.0)
    mark = stand_in.folder / "die"
    failed = trio.Event()

    async def let_it_die() -> None:
        await failed.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        mark.touch()

    async def ask_in_vain() -> None:
        async with stand_in.launch(dies_when=str(mark)) as server, HTTPEndpoint(server.url) as endpoint:
            try:
                await endpoint.get_text("/die", kind="generate")
            finally:
                failed.set()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(let_it_die)
            with pytest.raises(EngineError, match=r"exit status 7(.|\n)*a request was too much") as caught:
                await ask_in_vain()
    assert isinstance(caught.value.__context__, BaseException)
    assert stand_in.survivors() == []


async def test_an_error_of_the_body_is_its_own(stand_in):
    with pytest.raises(KeyError, match="mine"):
        async with stand_in.launch():
            raise KeyError("mine")
    assert stand_in.survivors() == []


async def test_an_engine_error_while_the_server_is_healthy_is_its_own_and_waits_for_nothing(stand_in, monkeypatch):
    monkeypatch.setattr(servers, "UNHEALTHY_EXIT_S", -1.0)  # which nobody can wait
    with pytest.raises(EngineError, match="wrong model") as caught:
        async with stand_in.launch():
            raise EngineError("wrong model")
    assert str(caught.value) == "wrong model"


async def test_a_busy_server_is_not_dying_within_the_deadline_of_a_health_check(stand_in, monkeypatch):
    monkeypatch.setattr(servers, "UNHEALTHY_EXIT_S", -1.0)  # which nobody can wait
    busy = stand_in.folder / "busy"
    with pytest.raises(EngineError, match="too much"):
        async with stand_in.launch(busy_if=str(busy), deadlines=Deadlines(health_s=PATIENCE_S)):
            monkeypatch.setattr(servers, "START_DEADLINES", Deadlines(health_s=0.1, connect_s=0.1))
            busy.touch()
            raise EngineError("too much")


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(stand_in):
    with trio.fail_after(PATIENCE_S):
        async with stand_in.launch(ignore_sigterm=True, grace_s=0.5):
            begin = trio.current_time()
        assert trio.current_time() - begin >= 0.5
    assert stand_in.survivors() == []


@pytest.mark.parametrize("where", ["group", "session"])
async def test_grandchildren_are_ended_wherever_they_went(stand_in, where):
    async with stand_in.launch(grandchild=where, grace_s=0.2):
        assert len(stand_in.survivors()) == 3
    assert stand_in.survivors() == []


async def test_the_first_process_is_asked_to_end_before_the_others(stand_in):
    async with stand_in.launch(grandchild="polite", slow_end=0.3):
        pass
    assert stand_in.log_path.read_text().splitlines()[-2:] == ["first process ends", "grandchild asked"]


async def test_temporary_files_are_removed(stand_in):
    async with stand_in.launch():
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
    with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="signal 9"):
        async with stand_in.launch(map=[str(own)]) as server:
            await wait_for_looks(parent_of(server.pid))
            os.kill(server.pid, signal.SIGKILL)
            await trio.sleep_forever()
    assert not own.exists()


def test_a_name_in_shared_memory_that_is_no_text_is_no_trouble(shared_file):
    path = os.fsencode(shared_file("psm")) + b"\xff"
    with open(path, "w+b") as file:
        try:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                assert os.fsdecode(os.path.basename(path)) in server_supervisor._find_mapped([os.getpid()])
        finally:
            os.unlink(path)


@pytest.mark.parametrize("where", ["group", "session"])
async def test_what_a_dead_server_leaves_behind_is_ended(stand_in, where):
    with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="exit status 7"):
        async with stand_in.launch(grandchild=where, grace_s=0.2) as server:
            await ask(server, "/die")
            await trio.sleep_forever()
    assert stand_in.survivors() == []


async def test_nothing_is_left_after_a_cancellation(stand_in):
    with trio.CancelScope() as scope:
        async with stand_in.launch(grandchild="session", grace_s=0.2):
            assert len(stand_in.survivors()) == 3
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert stand_in.survivors() == []


async def test_nothing_is_left_after_a_cancellation_while_the_server_loads(stand_in, progress_at_once):
    scope = trio.CancelScope()

    def cancel_when_all_are_there(seconds: float, line: str) -> None:
        if len(stand_in.survivors()) == 3:
            scope.cancel()

    with trio.fail_after(PATIENCE_S), scope:
        async with stand_in.launch(never_healthy=True, grandchild="session", grace_s=0.2, on_progress=cancel_when_all_are_there):
            raise AssertionError("it is not healthy")
    assert scope.cancelled_caught
    assert stand_in.survivors() == []


async def test_a_failing_progress_callback_ends_the_server(stand_in, progress_at_once):
    def fail(seconds: float, line: str) -> None:
        if line == "loading for ever":
            raise KeyError(line)

    with trio.fail_after(PATIENCE_S), pytest.raises(KeyError, match="loading"):
        async with stand_in.launch(never_healthy=True, on_progress=fail):
            raise AssertionError("it is not healthy")
    assert stand_in.survivors() == []


async def test_a_restart_keeps_the_port_and_the_log_and_is_watched(stand_in):
    with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="exit status 7"):
        async with stand_in.launch() as server:
            pid, url = server.pid, server.url
            await server.restart()
            assert (server.url, server.is_running) == (url, True)
            assert server.pid != pid
            assert len(stand_in.survivors()) == 2
            assert server.log_path.read_text().count("starting on port") == 2
            await ask(server, "/die")
            await trio.sleep_forever()


async def test_a_restart_that_fails_says_why_at_once_and_may_be_tried_again(stand_in, monkeypatch):
    monkeypatch.setattr(servers, "UNHEALTHY_EXIT_S", -1.0)  # which nobody can wait
    mark = stand_in.folder / "fail"
    with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match=r"before it was healthy(.|\n)*this start fails"):
        async with stand_in.launch(fails_if=str(mark)) as server:
            mark.touch()
            with pytest.raises(EngineError, match="before it was healthy"):
                await server.restart()
            assert not server.is_running
            mark.unlink()
            await server.restart()
            assert (await ask(server, "/health")).endswith(b"ok")
            mark.touch()
            await server.restart()
    assert stand_in.survivors() == []


async def test_a_death_that_is_expected_leaves_the_block_open_and_the_server_can_be_started_again(stand_in):
    deaths: list[EngineError] = []
    with trio.fail_after(PATIENCE_S):
        async with stand_in.launch(on_exit=deaths.append) as server:
            for number in (1, 2):
                url = server.url
                await ask(server, "/die")
                while len(deaths) < number:
                    await trio.sleep(0.01)
                assert not server.is_running
                await server.restart()
                assert (server.url, server.is_running) == (url, True)
    assert all("exit status 7" in str(death) for death in deaths)
    assert len(deaths) == 2
    assert stand_in.survivors() == []


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
        await trio.testing.wait_all_tasks_blocked()  # whoever watches has seen it
        await server.restart()
        assert can_connect(server.port)


async def test_a_stop_that_is_cancelled_still_stops(stand_in):
    async with stand_in.launch(ignore_sigterm=True, grace_s=0.2) as server:
        with trio.CancelScope() as scope:
            scope.cancel()
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
    with socket.socket() as held:  # so that nobody else is given it meanwhile
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        async with stand_in.launch(port) as server:
            assert server.port == port


async def test_the_port_is_kept_from_others_while_the_server_loads(stand_in, progress_at_once):
    tried = []
    scope = trio.CancelScope()

    def try_to_take(seconds: float, line: str) -> None:
        ports = [int(line.split()[3]) for line in stand_in.log_path.read_text().splitlines() if line.startswith("starting on port")]
        with socket.socket() as other:
            for port in ports:
                tried.append((port, other.connect_ex(("127.0.0.1", port)), is_free(port)))
                scope.cancel()

    with trio.fail_after(PATIENCE_S), scope:
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
    with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="unknown exit status"):
        async with stand_in.launch(grandchild="group") as server:
            os.kill(parent_of(server.pid), signal.SIGKILL)
            await trio.sleep_forever()
    stand_in.wait_for(0)


PARENT = """
import json, os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):  # nohup, and shells for background jobs, have some of them ignored
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
root, settings, log_path, environment, forks = json.loads(sys.argv[1])
sys.path.insert(0, root)
import trio
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server

async def main():
    async with launch_server(ServerConfig(**settings), log_path, environment=environment, grace_s=0.2):
        if forks and os.fork() == 0:
            time.sleep(600)
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@contextlib.contextmanager
def run_parent(stand_in: StandIn, *, forks: bool = False, **behavior: Any):
    """Another Python that launches a server, with a grandchild unless told otherwise."""
    settings = stand_in.settings(**{"grandchild": "session", **behavior})
    arguments = json.dumps([str(ROOT), settings, str(stand_in.log_path), stand_in.environment, forks])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
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
        error = parent.communicate(timeout=PATIENCE_S)[1]
        assert parent.returncode == -number or (number == signal.SIGINT and parent.returncode == 1)
        assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
        stand_in.wait_for(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_parent_that_ends_while_the_server_loads(stand_in, number):
    with run_parent(stand_in, never_healthy=True) as parent:
        stand_in.wait_for(3)
        parent.send_signal(number)
        stand_in.wait_for(0)


def test_a_forked_copy_of_the_parent_does_not_keep_the_server_alive(stand_in):
    with run_parent(stand_in, forks=True) as parent:
        assert parent.stdout.readline() == "open\n"
        parent.kill()
        stand_in.wait_for(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_what_a_terminal_sends_reaches_the_parent_alone(stand_in, number):
    with run_parent(stand_in) as parent:
        assert parent.stdout.readline() == "open\n"
        os.killpg(parent.pid, number)
        stand_in.wait_for(0)
        assert "ended with" not in parent.communicate(timeout=PATIENCE_S)[1]


def test_a_server_whose_supervisor_and_parent_are_killed_at_once_dies(stand_in):
    with run_parent(stand_in, grandchild="group") as parent:
        assert parent.stdout.readline() == "open\n"
        (supervisor,) = [int(line.split()[0]) for line in stand_in.survivors() if "launch/supervisor.py" in line]
        (server,) = [
            int(line.split()[0]) for line in stand_in.survivors() if "vllm.entrypoints" in line and "launch/supervisor.py" not in line
        ]
        parent.send_signal(signal.SIGSTOP)  # it does not see that the supervisor dies
        os.kill(supervisor, signal.SIGKILL)
        stand_in.wait_for(1)
        assert not any(line.startswith(f"{server} ") for line in stand_in.survivors())
        parent.kill()
        for line in stand_in.survivors():  # the rest is not promised
            os.kill(int(line.split()[0]), signal.SIGKILL)
        stand_in.wait_for(0)
        for folder in stand_in.temporary.iterdir():
            shutil.rmtree(folder)

"""Programs in the sandbox: what they get, what they are refused, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
import trio
from sandboxes import ALL_LEVELS, GUARDED_LEVELS, ISOLATED, MARKER, first_process, no_survivors

import rollouts.sandbox.launch
import rollouts.sandbox.run
from rollouts.errors import ConfigError, SandboxError
from rollouts.sandbox.confinement import Confinement, bubblewrap, namespaces, plain, plan_layout
from rollouts.sandbox.inside import mounts
from rollouts.sandbox.inside.landlock import landlock_version
from rollouts.sandbox.inside.messages import LENGTH_BYTES
from rollouts.sandbox.launch import Plan, describe
from rollouts.sandbox.limits import SandboxFailure, SandboxLimits, SandboxResult
from rollouts.sandbox.run import find_confinement, run_confined, try_confinement

pytestmark = needs.LINUX
SHORT = SandboxLimits(wall_s=0.6, output_bytes=20_000)
PATIENT = SandboxLimits(wall_s=60.0)


async def run(code: str, level: Confinement, limits: SandboxLimits = PATIENT, **options: object) -> SandboxResult:
    """Run code, and look that nothing is left of it."""
    with no_survivors() as environment:
        return await run_confined(code, limits=limits, confinement=level, environment=environment, **options)  # type: ignore[arg-type]


async def ask(expression: str, level: Confinement, setup: str = "", **options: object) -> object:
    """The value of an expression inside."""
    result = await run(f"import json, os, sys\n{setup}\nprint(json.dumps({expression}))", level, **options)  # type: ignore[arg-type]
    assert result.ok, result
    return json.loads(result.stdout)


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_program_gets_its_input_and_files_and_gives_its_output(level: Confinement):
    code = "import sys, helper; print(helper.double(sys.stdin.read())); sys.stderr.write('careful')"
    result = await run(code, level, stdin=b"ab", files={"helper.py": "def double(x): return x * 2", "data/a.txt": "x"})
    assert (result.ok, result.failure, result.returncode, result.stdout, result.stderr) == (True, None, 0, b"abab\n", b"careful")
    assert 0 < result.duration_s < 60


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_commands_run_too_and_exit_statuses_are_told(level: Confinement):
    result = await run_confined(["sh", "-c", "cat; exit 3"], stdin=b"x" * 300_000, limits=PATIENT, confinement=level)
    assert (result.failure, result.returncode, len(result.stdout)) == (SandboxFailure.RAISED, 3, 300_000)
    result = await run_confined(["true"], stdin=b"x" * 300_000, limits=PATIENT, confinement=level)  # which reads nothing
    assert result.ok
    with pytest.raises(SandboxError, match="cannot start no-such-program"):
        await run_confined(["no-such-program"], confinement=level)


@pytest.mark.parametrize("level", ISOLATED)
async def test_nothing_of_the_outside_is_visible_but_programs_and_this_library(level: Confinement, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    shown = tmp_path / "shown"
    shown.write_text("public")
    places = [
        str(secret),
        *map(str, (Path.home(), Path.cwd(), tmp_path, Path(sys.prefix, "pyvenv.cfg"))),
        "/etc/passwd",
        "/var",
        "/sys",
        "/run",
    ]
    setup = f"""
def visible(place):
    try: return sorted(os.listdir(place)) != ["shown"] if os.path.isdir(place) else bool(open(place).read())
    except OSError: return False
seen = [place for place in {places} if visible(place)]
"""
    expression = "[sorted(os.environ), seen, os.getcwd(), os.listdir()]"
    names, seen, cwd, files = await ask(expression, level, setup, readable=[shown])  # type: ignore[misc]
    threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert set(names) <= {"PATH", "LANG", "LC_CTYPE", "HOME", "TMPDIR", "USER", "PWD", "SANDBOX_TEST"} | threads
    assert seen == []
    assert (cwd, files) == ("/scratch", ["main.py"])
    assert await ask(f"open({str(shown)!r}).read()", level, readable=[shown]) == "public"
    shared = "import multiprocessing; lock = multiprocessing.Lock(); open('/dev/shm/x', 'w').write('1')"
    assert await ask("sorted(os.listdir('/scratch'))", level, shared) == ["main.py", "x"]


@pytest.mark.parametrize("level", ISOLATED)
async def test_neither_the_machines_name_nor_the_places_of_files_outside_are_told(level: Confinement, tmp_path: Path):
    shown = tmp_path / "shown"
    shown.write_text("public")
    setup = """
import ctypes
told = {}
for pid in ("self", "1", "2"):
    for name in ("mountinfo", "mounts", "mountstats", "cmdline"):
        try: told[pid + "/" + name] = open(f"/proc/{pid}/{name}").read()
        except OSError: pass
for name in ("cmdline", "swaps", "partitions", "keys", "sys/kernel/hostname", "sys/kernel/random/boot_id"):
    try: told[name] = open("/proc/" + name).read()
    except OSError: pass
libc, names = ctypes.CDLL(None), ctypes.create_string_buffer(6 * 65)
libc.uname(names)
"""
    told, host, domain = await ask(
        "[told, os.uname().nodename, names.raw[5 * 65:].rstrip(b'\\0').decode()]", level, setup, readable=[shown]
    )  # type: ignore[misc]
    assert (host, domain) == ("sandbox", "(none)")
    assert {name: text for name, text in told.items() if text and not name.endswith("/cmdline")} == {}
    library = os.path.dirname(rollouts.__file__)
    assert [name for name, text in told.items() if library in text or str(tmp_path) in text] == []


@needs.bubblewrap()  # the level that makes its own namespaces hides mounts or does not start
@needs.landlock()  # which then closes /proc
async def test_where_mounts_cannot_be_hidden_nothing_of_proc_is_there(monkeypatch: pytest.MonkeyPatch):
    level = bubblewrap()
    broken = "import rollouts.sandbox.inside.init as init; init.hide_mounts = lambda: os.chdir('/none'); main(control,"
    boot = rollouts.sandbox.launch.BOOT.replace("main(control,", broken)
    monkeypatch.setattr(rollouts.sandbox.launch, "BOOT", boot)
    setup = """
def seen(name):
    try: return open(f"/proc/{name}").read()
    except OSError: return ""
"""
    assert await ask("[seen('self/mountinfo'), seen('1/mountinfo'), seen('1/cmdline'), os.getuid()]", level, setup) == ["", "", "", 1000]


@pytest.mark.parametrize("level", GUARDED_LEVELS)
async def test_secrets_of_the_process_that_asks_do_not_get_in(level: Confinement, tmp_path: Path):
    inside = """
import os
for pid in ["self", str(os.getppid()), *filter(str.isdigit, os.listdir("/proc"))]:
    try: print(open(f"/proc/{pid}/environ").read())
    except OSError as error: print(error)
print(dict(os.environ), sorted(os.listdir("/proc/self/fd")))
"""
    asker = f"""
import os, trio
from rollouts.sandbox import confinement, run
left_open = os.open("/etc/hostname", os.O_RDONLY)
os.set_inheritable(left_open, True)
os.dup2(left_open, 2000, inheritable=True) if os.sysconf("SC_OPEN_MAX") > 2000 else None
result = trio.run(lambda: run.run_confined({inside!r}, confinement=confinement.{level.name}()))
print(result)
"""
    environment = {**os.environ, "CANARY_TOKEN": "canary-4711"}
    done = subprocess.run([sys.executable, "-c", asker], env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert "failure=None" in done.stdout, done
    assert "canary-4711" not in done.stdout
    assert "['0', '1', '2', '3']" in done.stdout  # 3 is the look itself


FILES_OF_THE_MACHINE = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/pid_max",
    "/proc/1/oom_score_adj",
    "/etc/hostname",
    "/usr/bin/env",
    str(Path(rollouts.sandbox.run.__file__)),
)
FOLDERS_OF_THE_MACHINE = ("/", "/etc", "/dev", "/tmp", "/usr/lib", str(Path(rollouts.sandbox.run.__file__).parent))


@pytest.mark.parametrize("level", GUARDED_LEVELS)
async def test_writing_outside_of_the_scratch_directory_is_refused(level: Confinement, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("")
    # Where confinement fails, this must not harm the machine: nothing is written, created or cut but in the folder of the test. Files of
    # the machine are opened for writing and closed; in its folders a file without a name is opened, which ends with its descriptor.
    setup = f"""
done = []
os.symlink({str(tmp_path)!r}, "link")
opened = [(place, os.O_WRONLY) for place in {FILES_OF_THE_MACHINE}]
opened += [(place, os.O_WRONLY | os.O_TMPFILE) for place in {(*FOLDERS_OF_THE_MACHINE, "/proc/self/root/tmp")}]
opened += [(place, os.O_WRONLY | os.O_CREAT) for place in {(str(victim), str(tmp_path / "x"))} + ("link/x",)]
for place, flags in opened:
    try:
        os.close(os.open(place, flags)); done.append(place)
    except OSError: pass
changes = [lambda: os.rename({str(victim)!r}, "here"), lambda: os.remove({str(victim)!r}), lambda: os.link({str(victim)!r}, "here")]
if {level.isolated}:  # Landlock alone has no rule for permissions
    changes += [lambda: os.chmod({str(victim)!r}, 0o777), lambda: os.utime({str(victim)!r})]
for number, change in enumerate(changes):
    try: change(); done.append(number)
    except OSError: pass
"""
    assert await ask("done", level, setup, readable=[tmp_path]) == []
    assert (list(tmp_path.iterdir()), victim.read_text()) == ([victim], "")


CONNECT = """
import socket
reached = []
def attempt(name, family, kind, address):
    try:
        s = socket.socket(family, kind); s.settimeout(2)
        s.connect(address); s.send(b"hello")
        if kind == socket.SOCK_STREAM: reached.append(name)  # a packet that nobody takes is sent as well: looked at outside
    except OSError: pass
"""


VSOCK = """
import errno
for make in (socket.socket, socket.socketpair):
    for family in (40, socket.AF_PACKET, 31):  # vsock, which no network namespace holds; raw packets; bluetooth
        try: make(family, socket.SOCK_STREAM); reached.append(family)
        except OSError as error: reached += [] if error.errno == errno.EAFNOSUPPORT else [error.errno]
socket.socketpair()
"""


@pytest.mark.parametrize("level", ISOLATED)
async def test_no_socket_leads_outside(level: Confinement, tmp_path: Path):
    inet, unix, stream, packet = socket.AF_INET, socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
    path, abstract = str(tmp_path / "socket"), f"\0sandbox-{os.getpid()}"
    targets = [
        ("tcp", inet, stream, ("127.0.0.1", 0)),
        ("udp", inet, packet, ("127.0.0.1", 0)),
        ("unix", unix, stream, path),
        ("abstract", unix, stream, abstract),
    ]
    setup, sockets = CONNECT, []
    try:
        for name, family, kind, address in targets:
            listening = socket.socket(family, kind)
            sockets.append(listening)
            listening.bind(address)
            listening.setblocking(False)
            if kind == stream:
                listening.listen()
            setup += f"attempt({name!r}, {int(family)}, {int(kind)}, {listening.getsockname() if family == inet else address!r})\n"
        setup += VSOCK
        setup += "attempt('internet', socket.AF_INET, socket.SOCK_STREAM, ('1.1.1.1', 80))\n"
        assert await ask("reached", level, setup) == []
        with pytest.raises(BlockingIOError):
            sockets[1].recv(10)
    finally:
        for listening in sockets:
            listening.close()


ENDLESS = {
    "infinite loop": "while True: pass",
    "ignores signals": """
import signal, time
for number in set(signal.Signals) - {9, 19}: signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1)
""",
    "closes its pipes": "import os, time\nos.closerange(0, 1000)\ntime.sleep(1000)",
    "daemons": """
import os, time
if os.fork() == 0:
    os.setsid()
    os.fork()
time.sleep(1000)
""",
}


SIGNALLER = """
import os, time
for pid in [os.getppid(), 1]:
    for number in (9, 15, 19):
        try: os.kill(pid, number)
        except OSError: pass
time.sleep(1000)
"""


@pytest.mark.parametrize("level", ISOLATED)  # without namespaces it would stop the sandbox's own process
async def test_what_sends_signals_is_ended(level: Confinement):
    result = await run(SIGNALLER, level, SHORT)
    assert (result.failure, result.returncode) == (SandboxFailure.WALL, None), result


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("attack", ENDLESS)
async def test_what_does_not_end_is_ended(attack: str, level: Confinement):
    result = await run(ENDLESS[attack], level, SHORT)
    assert (result.failure, result.returncode) == (SandboxFailure.WALL, None), result


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_flood_of_output_is_cut(stream: str, level: Confinement):
    result = await run(f"import sys\nwhile True: sys.{stream}.write('x' * 5000)", level, SandboxLimits(wall_s=60.0, output_bytes=20_000))
    assert result.failure == SandboxFailure.OUTPUT
    assert (len(result.stdout), len(result.stderr)) == ((20_000, 0) if stream == "stdout" else (0, 20_000))
    assert 0 < result.duration_s < 60


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_output_up_to_the_limit_is_all_there(level: Confinement):
    result = await run("print('x' * 19_999)", level, SandboxLimits(wall_s=60.0, output_bytes=20_000))
    assert result.ok
    assert len(result.stdout) == 20_000


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_processes_left_behind_end_with_the_program_and_do_not_hold_its_output(level: Confinement):
    code = """
import os, time
for number in range(3):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(1000)
print("done")
"""
    result = await run(code, level)
    assert (result.ok, result.stdout) == (True, b"done\n")


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_process_cannot_have_more_memory_than_its_limit(level: Confinement):
    result = await run("x = bytearray(3 << 30)", level)
    assert result.failure == SandboxFailure.RAISED
    assert b"MemoryError" in result.stderr


@pytest.mark.parametrize("level", ISOLATED)
async def test_all_processes_together_cannot_have_more_memory_than_the_limit(level: Confinement):
    code = "import os, time\nfor i in range(6):\n    if os.fork() == 0: break\nx = b'x' * (60 << 20)\ntime.sleep(1000)"
    result = await run(code, level, SandboxLimits(wall_s=60.0, memory_bytes=150 << 20))
    assert result.failure == SandboxFailure.MEMORY


@pytest.mark.parametrize("release,has_limits", [("6.8.0-41-generic", False), ("6.13", False), ("6.14.2", True), ("7.0-rc1", True)])
def test_no_sandbox_limits_the_process_ids_of_the_whole_machine(release: str, has_limits: bool, tmp_path: Path, monkeypatch):
    # before Linux 6.14 this file is one for all namespaces, and root may write it from each
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    plan = Plan(namespaces(), SandboxLimits(num_processes=16), plan_layout(()), argv=("true",))
    config = json.loads(describe(plan, "/scratch", 3, 4, ())[LENGTH_BYTES:])
    for folder in ("user", "kernel"):
        (tmp_path / "proc/sys" / folder).mkdir(parents=True)
    monkeypatch.setattr(mounts, "OUTSIDE", str(tmp_path))
    mounts._limit_kernel(config)
    assert (tmp_path / "proc/sys/user/max_user_namespaces").read_text() == "0"
    written = tmp_path / "proc/sys/kernel/pid_max"
    assert (written.read_text() if written.exists() else None) == ("324" if has_limits else None)


BOMBS = {
    "processes": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "threads": """
import threading, time
threading.stack_size(65536)
while True:
    try: threading.Thread(target=time.sleep, args=(1000,)).start()
    except RuntimeError: pass
""",
}


@pytest.mark.parametrize("level", ISOLATED)
@pytest.mark.parametrize("bomb", BOMBS)
async def test_bombs_of_processes_and_threads_are_ended(bomb: str, level: Confinement):
    result = await run(BOMBS[bomb], level, SandboxLimits(wall_s=2.0, num_processes=16))
    assert result.failure in (SandboxFailure.PROCESSES, SandboxFailure.WALL), result  # the latter where the kernel refused each further one


@pytest.mark.parametrize("level", ISOLATED)
async def test_the_scratch_directory_as_a_whole_has_a_limit(level: Confinement):
    setup = """
import errno
written, said = 0, []
for number in range(100):
    try:
        with open(f"file{number}", "wb", buffering=0) as file:
            while True: written += file.write(bytes(65536))
    except OSError as error: said.append(error.errno)
"""
    limits = SandboxLimits(wall_s=60.0, file_bytes=1 << 20)
    written, said = await ask("[written, [errno.errorcode[n] for n in said]]", level, setup, limits=limits)  # type: ignore[misc]
    assert 500_000 < written <= 1 << 20
    assert "ENOSPC" in said


@pytest.mark.parametrize("level", ISOLATED)
async def test_the_number_of_files_has_a_limit(level: Confinement):
    code = "import os, time\nos.mkdir('a')\nfor i in range(10_100): os.symlink('x', f'a/{i}')\ntime.sleep(1000)"
    result = await run(code, level, SandboxLimits(wall_s=15.0))
    assert result.failure == (SandboxFailure.FILE if level.name == "bubblewrap" else SandboxFailure.RAISED), result  # OSError in namespaces


@pytest.mark.parametrize("level", ISOLATED)
async def test_a_first_process_that_cannot_watch_ends_the_program_and_is_no_failure_to_start(level: Confinement):
    results: list[SandboxResult] = []
    with no_survivors() as environment:

        async def start() -> None:
            code = "open('started', 'w'); import time; time.sleep(1000)"
            results.append(await run_confined(code, limits=PATIENT, confinement=level, environment=environment))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            started = False
            while not started:
                await trio.sleep(0.02)
                with suppress(AssertionError, OSError):
                    first = first_process(environment[MARKER])
                    started = Path(f"/proc/{first}/root/scratch/started").exists()
            resource.prlimit(first, resource.RLIMIT_NOFILE, (0, 0))
    assert [result.failure for result in results] == [SandboxFailure.DIED]


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_one_file_has_a_limit(level: Confinement):
    result = await run("open('big', 'wb').write(bytes(3 << 20))", level, SandboxLimits(wall_s=60.0, file_bytes=1 << 20))
    assert result.failure in (SandboxFailure.FILE, SandboxFailure.RAISED)


@pytest.mark.parametrize("level", ISOLATED)
async def test_processor_time_has_a_limit_that_cannot_be_ignored(level: Confinement):
    ignore = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" if level.name == "namespaces" else ""
    result = await run(ignore + "while True: pass", level, SandboxLimits(wall_s=100.0, cpu_s=1.0))
    assert result.failure == SandboxFailure.CPU, result


KERNEL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def works(function, *arguments): return getattr(libc, function)(*arguments) >= 0
"""
REFUSED_CALLS = """
ptrace 16 os.getppid() 0 0 | memfd_create b'x' 0 | unshare 0x10000000 | mount b'x' b'/scratch' b'tmpfs' 0 0 | shmget 0 4096 0o1600
| semget 0 1 0o1600 | msgget 0 0o1600 | mq_open b'/queue' 0o102 0o600 0
| setns 0 0 | personality 0x40000 | chroot b'/scratch' | umount2 b'/proc' 2 | inotify_init | inotify_init1 0 | fanotify_init 0 0
| name_to_handle_at -100 b'/usr/bin' b'a'*200 b'a'*8 0 | syscall 457 0 0 0 0 | syscall 458 0 0 0 0 | syscall 470 0 0 0 0
"""

HOLDS = """
import fcntl, socket, sqlite3, struct
shown, own = os.open(PLACE, os.O_RDONLY), os.open("own", os.O_RDWR | os.O_CREAT)
def done(function, *arguments):
    try: function(*arguments)
    except OSError as error: return 0
    return 1
lease, notify, delegation, signal_number, owner, owner_ex = 1024, 1026, 1040, 10, 8, 15
held = [
    *(done(fcntl.fcntl, file, lease, kind) for file in (shown, own) for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK)),
    *(done(fcntl.fcntl, os.open(".", os.O_RDONLY), command, 1) for command in (notify, delegation)),
    *(done(fcntl.fcntl, file, signal_number, 9) for file in (shown, own)),
    *(done(fcntl.fcntl, file, owner, os.getpid()) for file in (shown, own)),
    done(fcntl.fcntl, own, owner_ex, struct.pack("ii", 1, os.getpid())),
    *(done(fcntl.ioctl, file, request, struct.pack("i", os.getpid())) for file in socket.socketpair() for request in (0x8901, 0x8902)),
    *(done(fcntl.flock, file, kind) for file in (shown, own) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX | fcntl.LOCK_NB)),
]
with sqlite3.connect("data") as base:
    base.execute("create table t (x)"); base.execute("insert into t values (7)")
row = sqlite3.connect("data").execute("select x from t").fetchone()
copy = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, 40)
fcntl.lockf(copy, fcntl.LOCK_EX)
os.set_blocking(copy, False); os.set_inheritable(copy, True)
"""


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_code_cannot_hold_up_whoever_uses_a_file_outside(level: Confinement, tmp_path: Path):
    shown = tmp_path / "shown"
    shown.write_text("public")
    held, row, copied = await ask("[held, row, copy >= 40]", level, HOLDS.replace("PLACE", repr(str(shown))), readable=[shown])  # type: ignore[misc]
    assert (set(held), row, copied) == ({0}, [7], True)  # nothing is held; record locks of files in the scratch directory are as ever


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_memory_that_belongs_to_no_process_is_refused(level: Confinement):
    setup = """
import mmap
def shared(descriptor):
    memory = mmap.mmap(descriptor, 4096)
    memory[0] = 1
made = []
for name, make in (("anonymous", lambda: shared(-1)), ("device", lambda: shared(os.open("/dev/zero", os.O_RDWR)))):
    try: make(); made.append(name)
    except OSError: pass
private = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private[0] = 1
open("file", "wb").write(bytes(4096))
shared(os.open("file", os.O_RDWR))
"""
    allowed = ["device"] if not level.isolated and landlock_version() == 0 else []
    assert await ask("made", level, setup) == allowed


@pytest.mark.parametrize("level", ISOLATED)
async def test_dangerous_system_calls_are_refused(level: Confinement):
    words = [call.split() for call in REFUSED_CALLS.split("|")]
    calls = ", ".join(f"({name!r}, works({name!r}, {', '.join(arguments)}))" for name, *arguments in words)
    assert await ask(f"[name for name, works in [{calls}] if works]", level, KERNEL) == []
    if os.uname().machine == "x86_64":
        clone = (
            "[libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), libc.syscall(0x40000000 + 39), libc.syscall(435, 0, 0), libc.syscall(39) > 1]"
        )
        assert await ask(clone, level, KERNEL) == [-1, -1, -1, True]  # a user namespace, the x32 table, clone3, getpid
    status = (
        "{l.split(':')[0]: l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'NoNewPrivs', 'Seccomp:'))}"
    )
    assert await ask(status, level) == {"CapPrm": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}


@pytest.mark.parametrize("level", ISOLATED)
async def test_no_process_of_the_outside_is_visible_or_can_be_signaled(level: Confinement):
    setup = f"""
hit = []
for pid in [{os.getpid()}, {os.getppid()}]:
    try: os.kill(pid, 0); hit.append(pid)
    except OSError: pass
try: os.kill(1, 9)
except OSError: pass
"""
    hit, pids = await ask("[hit, [int(n) for n in os.listdir('/proc') if n.isdigit()]]", level, setup)  # type: ignore[misc]
    assert hit == []
    assert pids == [1, 2]


async def test_scratch_of_the_plain_level_is_removed_and_links_in_it_are_not_followed(tmp_path: Path):
    (tmp_path / "kept").write_text("kept")
    setup = f"""
os.symlink({str(tmp_path)!r}, "link"); os.symlink("/etc/hostname", "file")
os.makedirs("a/b"); os.symlink({str(tmp_path)!r}, "a/b/link"); os.chmod("a/b", 0)
for i in range(300):
    os.mkdir("d" * 100); os.chdir("d" * 100)
os.chdir(os.environ["HOME"])
"""
    scratch = await ask("os.getcwd()", plain(), setup)
    assert not Path(str(scratch)).exists()
    assert (tmp_path / "kept").read_text() == "kept"


def test_folders_are_cleared_without_long_paths_and_without_following_links(tmp_path: Path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for path in (outside, folder, folder / "moved-0", folder / "a", folder / "a" / "b"):
        path.mkdir()
    (outside / "kept").write_text("")
    outside.chmod(0o755)
    (folder / "a" / "link").symlink_to(outside)
    (folder / "a" / "b" / "file").write_text("")
    (folder / "dangling").symlink_to("nowhere")
    from rollouts.sandbox.inside.processes import clear_folder

    clear_folder(str(folder))
    assert list(folder.iterdir()) == []
    assert (outside / "kept").exists()
    assert outside.stat().st_mode & 0o777 == 0o755


def test_all_descriptors_are_closed_but_those_that_are_kept():
    code = """
import os
from rollouts.sandbox.inside.processes import close_all_but
keeping, closing = os.pipe()
high = os.dup2(closing, 1500)
close_all_but({0, 1, 2, keeping})
print([os.path.exists(f"/proc/self/fd/{number}") for number in (keeping, closing, high)])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout == b"[True, False, False]\n"


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_run_can_be_canceled_and_leaves_nothing(level: Confinement):
    with no_survivors() as environment:
        with trio.move_on_after(0.3) as scope:
            await run_confined("import time; time.sleep(1000)", limits=PATIENT, confinement=level, environment=environment)
        assert scope.cancelled_caught


async def test_installed_packages_are_there_only_when_asked_for():
    level = find_confinement()
    code = "import trio, rollouts; print(trio.__name__)"
    assert (await run_confined(code, limits=PATIENT, confinement=level)).failure == SandboxFailure.RAISED
    assert (await run_confined("import trio; print(trio.__name__)", limits=PATIENT, confinement=level, packages=True)).stdout == b"trio\n"


def test_the_strongest_level_that_works_is_found(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    broken = bubblewrap("/no/such/bwrap")
    with pytest.raises(SandboxError, match="cannot start /no/such/bwrap"):
        try_confinement(broken)
    monkeypatch.setattr(rollouts.sandbox.run, "bubblewrap", lambda: broken)
    try:
        try_confinement(namespaces())
    except SandboxError:
        pass
    else:
        assert find_confinement() == namespaces()
    monkeypatch.setattr(rollouts.sandbox.run, "namespaces", lambda: bubblewrap("/bin/false"))
    with pytest.raises(SandboxError, match=r"Install bubblewrap .* or pass allow_plain=True"):
        find_confinement()
    assert find_confinement(allow_plain=True) == plain()
    assert "protects from accidents only" in caplog.text


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
async def test_names_of_scratch_files_stay_in_the_scratch_directory(name: str):
    with pytest.raises(SandboxError, match="relative name"):
        await run_confined("", files={name: ""}, confinement=plain())


@pytest.mark.parametrize(
    "field,value",
    [("wall_s", 0), ("wall_s", float("nan")), ("cpu_s", -1), ("memory_bytes", 1000), ("num_processes", 0), ("file_bytes", 1.5)],
)
def test_limits_that_make_no_sense_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"SandboxLimits.{field}"):
        SandboxLimits(**{field: value})  # type: ignore[arg-type]


async def test_what_cannot_be_shown_is_an_error():
    with pytest.raises(SandboxError, match="does not exist"):
        plan_layout(["/no/such/folder"])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        for level in (bubblewrap(), namespaces()):
            with pytest.raises(SandboxError, match=f"{shared} cannot be shown in a sandbox, which has its own /dev/shm: move it"):
                await run_confined("", readable=[shared], confinement=level)
        Path(shared, "a.txt").write_text("public")
        assert await ask(f"open({f'{shared}/a.txt'!r}).read()", plain(), readable=[shared]) == "public"
    with pytest.raises(SandboxError, match="is empty"):
        await run_confined([])
    with pytest.raises(SandboxError, match=r"main\.py"):
        await run_confined("", files={"main.py": ""})

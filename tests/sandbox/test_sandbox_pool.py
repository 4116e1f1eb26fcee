"""Calls in warm workers: what each attack comes to, that no call harms the next one, and that nothing outlives the pool."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import trio
from sandboxes import ALL_LEVELS, ISOLATED, MARKER, first_process, marked, no_survivors, wait_until_gone

from rollouts.errors import SandboxError
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import CallResult, SandboxFailure, SandboxLimits
from rollouts.sandbox.pool import SandboxPool, SandboxView
from rollouts.sandbox.reward_code import execute_code, execute_user_reward_code, open_code_pool

pytestmark = needs.LINUX
LIMITS = SandboxLimits(wall_s=20.0, output_bytes=100_000)
QUICK = SandboxLimits(wall_s=0.5)

ATTACKS: dict[str, tuple[str, SandboxFailure, str]] = {  # code, what it comes to, what the error says
    "raises": ("raise ValueError('bug in a reward')", SandboxFailure.RAISED, "ValueError: bug in a reward"),
    "raises SystemExit": ("raise SystemExit(0)", SandboxFailure.RAISED, "SystemExit"),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", SandboxFailure.RAISED, "KeyboardInterrupt"),
    "recurses": ("def f(): f()\n    f()", SandboxFailure.RAISED, "RecursionError"),
    "exits early with success": ("os._exit(0)", SandboxFailure.DIED, "exit status 0"),
    "prints a fake result and exits": ("print('{\"value\": 1.0}', flush=True); os._exit(0)", SandboxFailure.DIED, "exit status 0"),
    "crashes": ("import ctypes; ctypes.string_at(0)", SandboxFailure.DIED, "exit status -11"),
    "closes everything": ("os.closerange(0, 1000); return 1", SandboxFailure.DIED, "exit status"),
    "returns NaN": ("return float('nan')", SandboxFailure.RESULT, "Out of range float"),
    "returns infinity": ("return {'score': float('inf')}", SandboxFailure.RESULT, "Out of range float"),
    "returns an object": ("return object()", SandboxFailure.RESULT, "object"),
    "returns half a character": ("return '\\ud800'", SandboxFailure.RESULT, "surrogates"),
    "returns a nested list": ("x = []\n    for i in range(100_000): x = [x]\n    return x", SandboxFailure.RESULT, "RecursionError"),
    "returns too much": ("return 'x' * 10_000_000", SandboxFailure.OUTPUT, "output_bytes allows 100000"),
    "prints too much": ("while True: print('x' * 1000)", SandboxFailure.OUTPUT, "100000 bytes of output"),
    "writes raw NaN": ("answer(b'{\"value\": NaN}')", SandboxFailure.RESULT, "NaN"),
    "writes raw infinity": ("answer(b'{\"value\": 1e999}')", SandboxFailure.RESULT, "not JSON compliant"),
    "writes a nested list": ("answer(b'{\"value\": ' + b'[' * 90_000 + b']' * 90_000 + b'}')", SandboxFailure.OUTPUT, "output"),
    "writes a deep list": ("answer(b'{\"value\": ' + b'[' * 40_000 + b']' * 40_000 + b'}')", SandboxFailure.RESULT, "nested too deeply"),
    "writes no object": ("answer(b'[1]')", SandboxFailure.RESULT, "expected an object"),
    "writes half of an answer": ("answer(b'{\"value\": 1', 5)", SandboxFailure.DIED, "exit status 0"),
    "writes a wrong failure": ("answer(b'{\"failure\": \"wall\", \"error\": 1}')", SandboxFailure.RAISED, "1"),
    "has too much memory": ("x = bytearray(3 << 30)", SandboxFailure.RAISED, "MemoryError"),
    "writes too large a file": ("open('x', 'wb', buffering=0).write(bytes(20 << 20)); open('y', 'wb').write(bytes(20 << 20))",
                                SandboxFailure.RAISED, "OSError"),
}  # fmt: skip
PREAMBLE = """
import os, sys
def answer(body, missing=0):
    data = (len(body) + missing).to_bytes(8, "big") + body
    for number in range(3, 1000):
        try: os.write(number, data)
        except OSError: pass
    os._exit(0)
def attack():
    """


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_attacks_come_to_a_failure_and_harm_nothing(level: Confinement):
    with no_survivors() as environment:
        async with open_code_pool(limits=LIMITS, confinement=level, environment=environment) as pool:
            for name, (code, failure, error) in ATTACKS.items():
                result = await execute_code(PREAMBLE + code, "attack", {}, pool=pool)
                assert (result.failure, result.value) == (failure, None), (name, result)
                assert error in result.error, (name, result)
                assert (await execute_code("def f(x): return x + 1", "f", {"x": 1}, pool=pool)).value == 2, name
            assert pool.num_started == 1


HARMLESS = {
    "changes modules": "import math, random; math.sqrt = sys.path[:] = []; sys.modules['os'] = None; os.environ['HOME'] = '/'; return 'ok'",
    "replaces stdout": "sys.stdout = sys.stderr = None; sys.__stdout__.close(); return 'ok'",
    "leaves processes": """
    if os.fork() == 0:
        os.setsid()
        os.fork()
        __import__("time").sleep(1000)
    return 'ok'""",
    "leaves a thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); return 'ok'",
    "leaves files": "os.makedirs('a/b'); os.symlink('/', 'a/l'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); return 'ok'",
    "attacks the worker": """
    import ctypes
    parent = os.getppid()
    ctypes.CDLL(None).ptrace(16, parent, 0, 0)
    reached = []
    for name in ["environ", "mem", "maps", *(f"fd/{number}" for number in range(50))]:
        for mode in (os.O_RDONLY, os.O_WRONLY):
            try: reached.append((name, os.open(f"/proc/{parent}/{name}", mode)))
            except OSError: pass
    return reached or 'ok'""",
}


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_call_leaves_nothing_for_the_next_one(level: Confinement):
    look = """
import math, os
def look(): return [os.listdir(), len(os.listdir("/proc/self/task")), os.getcwd() == os.environ["HOME"], math.sqrt(4)]
"""
    with no_survivors() as environment:
        async with open_code_pool(limits=LIMITS, confinement=level, environment=environment) as pool:
            for name, code in HARMLESS.items():
                result = await execute_code(PREAMBLE + code, "attack", {}, pool=pool)
                assert result.value == "ok", (name, result)
                assert (await execute_code(look, "look", {}, pool=pool)).value == [[], 1, True, 2], name
            if level.isolated:
                count = "import os\ndef count(): return sorted(n for n in os.listdir('/proc') if n.isdigit())"
                assert len((await execute_code(count, "count", {}, pool=pool)).value) == 3  # the first, the worker, the call
            assert pool.num_started == 1


CHANGES = """
import os, resource
def change():
    worker = os.getppid()
    first = int(open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[1])
    done = []
    for pid in (worker, first):  # both of this sandbox, at every level
        for name, act in {
            "prlimit": lambda: resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20)),
            "look": lambda: resource.prlimit(pid, resource.RLIMIT_AS),
            "setpriority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
            "scheduler": lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
            "param": lambda: os.sched_setparam(pid, os.sched_param(0)),
            "affinity": lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}),
        }.items():
            try: act(); done.append(name)
            except OSError: pass
    for what in (os.PRIO_PGRP, os.PRIO_USER):
        try: os.setpriority(what, 0, 19); done.append(what)
        except OSError: pass
    os.setpriority(os.PRIO_PROCESS, 0, 19)  # its own
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    return done
"""


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_call_cannot_change_limits_or_priorities_of_the_worker(level: Confinement):
    with no_survivors() as environment:
        async with open_code_pool(limits=LIMITS, confinement=level, environment=environment) as pool:
            assert (await execute_code(CHANGES, "change", {}, pool=pool)).unwrap() == []
            large = "def large(): return len(bytearray(100 << 20))"
            assert (await execute_code(large, "large", {}, pool=pool)).unwrap() == 100 << 20
            assert pool.num_started == 1


@pytest.mark.parametrize("level", ISOLATED)
async def test_killing_the_worker_is_refused_or_costs_only_that_call(level: Confinement):
    with no_survivors() as environment:
        async with open_code_pool(limits=LIMITS, confinement=level, environment=environment) as pool:
            code = (
                PREAMBLE
                + """
    for pid in (os.getppid(), 1, -1):
        try: os.kill(pid, 9)
        except OSError: pass
    return 1
"""
            )
            result = await execute_code(code, "attack", {}, pool=pool)
            assert result.value == 1 or result.failure == SandboxFailure.DIED
            assert (await execute_code("def f(): return 2", "f", {}, pool=pool)).value == 2


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_an_infinite_loop_in_reward_code_ends_within_the_limit_and_the_caller_goes_on(level: Confinement):
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    loop = "import signal\ndef reward(messages, **_):\n    signal.signal(15, signal.SIG_IGN)\n    while True: pass"
    good = "def reward(messages, ground_truth): return float(messages[-1]['content'] == ground_truth)"
    with no_survivors() as environment:
        async with open_code_pool(limits=QUICK, confinement=level, environment=environment) as pool:
            result = await execute_user_reward_code(loop, messages, "2", pool=pool)
            assert (result.ok, result.failure, result.error) == (False, SandboxFailure.WALL, "took longer than 0.5 s")
            assert (await execute_user_reward_code(good, messages, "2", pool=pool)).value == 1.0
            assert pool.num_started == 1  # the worker lived


@pytest.mark.parametrize("level", ISOLATED)
@pytest.mark.parametrize("attack,failure", [
    ("while True:\n        try: os.fork()\n        except OSError: pass", SandboxFailure.PROCESSES),
    ("for i in range(6): os.fork() or i == 9\n    x = b'x' * (30 << 20)\n    while True: pass", SandboxFailure.MEMORY),
])  # fmt: skip
async def test_a_worker_whose_processes_exceed_a_limit_together_is_replaced(attack: str, failure: SandboxFailure, level: Confinement):
    limits = SandboxLimits(wall_s=5.0, num_processes=16 if failure == SandboxFailure.PROCESSES else 200, memory_bytes=200 << 20)
    with no_survivors() as environment:
        async with open_code_pool(limits=limits, confinement=level, environment=environment) as pool:
            result = await execute_code(PREAMBLE + attack, "attack", {}, pool=pool)
            assert result.failure in (failure, SandboxFailure.WALL), result
            assert (await execute_code("def f(): return 2", "f", {}, pool=pool)).value == 2
            assert pool.num_started <= 2


REWARDS = """
import os, time
calls = 0
def score(payload):
    global calls
    calls += 1
    if payload == "hang":
        while True: time.sleep(1)
    if payload == "exit":
        os._exit(0)
    return [calls, os.getpid(), payload]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    """A file with a reward function."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    return f"{tmp_path}/rewards.py:score"


async def test_functions_of_modules_files_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "my_project" / "my_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rules.py").write_text(
        "from my_rewards.words import WORD\nimport trio, rollouts.errors\ndef score(payload): return [WORD, payload]"
    )
    (package / "words.py").write_text("WORD = 'word'")
    monkeypatch.syspath_prepend(package.parent)
    async with SandboxPool("my_rewards.rules:score", limits=LIMITS) as pool:
        assert (await pool.call({"a": [1, None]})).value == ["word", {"a": [1, None]}]
    source = tmp_path / "alone.py"
    source.write_text("import words\ndef score(payload): return words.WORD + open(payload).read()")
    (tmp_path / "text").write_text("!")
    async with SandboxPool(f"{source}:score", limits=LIMITS, view=SandboxView(python_path=[package], readable=[tmp_path / "text"])) as pool:
        assert (await pool.call(str(tmp_path / "text"))).value == "word!"


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_only_the_scratch_directory_is_cleared_wherever_the_worker_went(level: Confinement, tmp_path: Path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "kept").write_text("")
    source = tmp_path / "moves.py"
    source.write_text(f"import os\nos.chdir({str(folder)!r})\ndef score(payload): return os.listdir(os.environ['HOME'])")
    async with SandboxPool(f"{source}:score", limits=LIMITS, confinement=level, view=SandboxView(readable=[folder])) as pool:
        assert [(await pool.call(1)).value for _ in range(2)] == [[], []]
        assert pool.num_started == 1
    assert [path.name for path in folder.iterdir()] == ["kept"]


async def test_functions_that_cannot_be_loaded_are_errors_that_say_why(tmp_path: Path):
    (tmp_path / "bad.py").write_text("constant = 1\nimport no_such_module")
    (tmp_path / "good.py").write_text("constant = 1")
    for function, message in (
        ("no-colon", "is named 'package.module:name'"),
        ("/no/such/file.py:score", "cannot read /no/such/file.py"),
        ("no_such_package.module:score", "there is no module 'no_such_package'"),
    ):
        with pytest.raises(SandboxError, match=message):
            SandboxPool(function)
    with no_survivors() as environment:
        for function, message in (
            (f"{tmp_path}/bad.py:score", "No module named 'no_such_module'"),
            (f"{tmp_path}/good.py:score", "has no attribute 'score'"),
            (f"{tmp_path}/good.py:constant", "constant of good is int, not a function"),
            ("rollouts.no_such_module:score", "No module named 'rollouts.no_such_module'"),
        ):
            with pytest.raises(SandboxError, match=message):
                async with SandboxPool(function, limits=LIMITS, view=SandboxView(environment=environment)):
                    pass
    async with SandboxPool("json:dumps", limits=LIMITS) as pool:
        assert (await pool.call([1])).value == "[1]"
        for payload in (float("nan"), object(), {1: {2}}):
            with pytest.raises(SandboxError, match="payload of a call is not JSON"):
                await pool.call(payload)


@pytest.mark.parametrize("level", ISOLATED)
async def test_without_fresh_processes_state_stays_and_a_hung_worker_is_replaced(level: Confinement, rewards: str):
    with no_survivors() as environment:
        async with SandboxPool(
            rewards, num_workers=1, limits=QUICK, confinement=level, fresh_process=False, view=SandboxView(environment=environment)
        ) as pool:
            assert [(await pool.call(i)).value[0] for i in range(3)] == [1, 2, 3]
            assert (await pool.call("hang")).failure == SandboxFailure.WALL
            assert (await pool.call("exit")).failure == SandboxFailure.DIED
            assert (await pool.call(4)).value[0] == 1
            assert pool.num_started == 3


LIMITED = """
import resource, time
calls = 0
def score(payload):
    global calls
    calls += 1
    if payload == "limits":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    start = time.process_time()
    while payload == "loop" or time.process_time() < start + 0.4:
        if payload in ("limits", "nothing"):
            break
    return calls
"""


@pytest.mark.slow
async def test_without_fresh_processes_each_call_has_its_processor_time(tmp_path: Path):
    (tmp_path / "limited.py").write_text(LIMITED)
    limits = SandboxLimits(wall_s=20.0, cpu_s=0.5)
    with no_survivors() as environment:
        options = {"num_workers": 1, "fresh_process": False, "view": SandboxView(environment=environment)}
        async with SandboxPool(f"{tmp_path}/limited.py:score", limits=limits, **options) as pool:
            assert [(await pool.call("work")).value for _ in range(3)] == [1, 2, 3]
            result = await pool.call("loop")
            assert (result.failure, result.error) == (SandboxFailure.CPU, "used more than 0.5 s of processor time")
            assert pool.num_started == 1


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_a_worker_whose_limits_were_changed_is_replaced(level: Confinement, tmp_path: Path):
    (tmp_path / "limited.py").write_text(LIMITED)
    with no_survivors() as environment:
        options = {"num_workers": 1, "fresh_process": False, "view": SandboxView(environment=environment)}
        async with SandboxPool(f"{tmp_path}/limited.py:score", limits=LIMITS, confinement=level, **options) as pool:
            assert [(await pool.call(payload)).value for payload in ("nothing", "limits", "nothing")] == [1, 2, 1]
            assert pool.num_started == 2


async def test_many_calls_need_as_many_workers_as_the_pool_has(rewards: str):
    results: list[Any] = []
    with no_survivors() as environment:
        async with SandboxPool(rewards, num_workers=2, limits=LIMITS, view=SandboxView(environment=environment)) as pool:

            async def call(number: int) -> None:
                results.append((await pool.call(number)).unwrap())

            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(call, number)
            assert pool.num_started == 2
    assert sorted(value for _, _, value in results) == list(range(60))
    assert {calls for calls, _, _ in results} == {1}  # each in a process of its own


@pytest.mark.slow
@pytest.mark.parametrize("level", ISOLATED)
async def test_a_thousand_calls_need_one_worker(level: Confinement, rewards: str):
    async with SandboxPool(rewards, num_workers=1, limits=LIMITS, confinement=level) as pool:
        values = [(await pool.call(number)).unwrap()[2] for number in range(1000)]
        assert (values, pool.num_started) == (list(range(1000)), 1)


@pytest.mark.parametrize("level", ISOLATED)
async def test_a_call_can_be_canceled_and_the_pool_goes_on(level: Confinement, rewards: str):
    with no_survivors() as environment:
        async with SandboxPool(rewards, num_workers=1, limits=LIMITS, confinement=level, view=SandboxView(environment=environment)) as pool:
            with trio.move_on_after(0.2) as scope:
                await pool.call("hang")
            assert scope.cancelled_caught
            assert (await pool.call(1)).value[2] == 1
            assert pool.num_started == 2


CANCELS_CALLS = """
import os, sys, trio
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool, SandboxView
file, name, marker = sys.argv[1:]
async def main():
    descriptors = os.listdir("/proc/self/fd")
    async with SandboxPool(file, num_workers=2, limits=SandboxLimits(wall_s=20.0), view=SandboxView(environment={name: marker})) as pool:
        for number in range(12):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(pool.call, number)
                await trio.sleep(0.002 * number)
                nursery.cancel_scope.cancel()
        assert (await pool.call(1)).unwrap()[2] == 1
    assert os.listdir("/proc/self/fd") == descriptors, (descriptors, os.listdir("/proc/self/fd"))
trio.run(main)
"""


def test_calls_are_canceled_at_any_moment_without_leaving_anything(rewards: str):
    """The test runs in a process of its own, because threads of other tests open and close descriptors."""
    with no_survivors() as environment:
        subprocess.run([sys.executable, "-c", CANCELS_CALLS, rewards, *environment.popitem()], check=True, timeout=100)


async def test_a_pool_that_is_closed_during_a_call_ends_it_with_an_error(rewards: str):
    with no_survivors() as environment:
        pool = SandboxPool(rewards, num_workers=1, limits=LIMITS, view=SandboxView(environment=environment))

        async def call() -> None:
            with pytest.raises(SandboxError, match="closed"):
                await pool.call("hang")

        async with trio.open_nursery() as nursery:
            async with pool:
                nursery.start_soon(call)
                await trio.sleep(0.3)
    with pytest.raises(SandboxError, match="closed"):
        await pool.call(1)


async def test_a_pool_that_is_closed_while_a_worker_starts_says_so(rewards: str):
    with no_survivors() as environment:
        for wait_s in (0.0, 0.03):
            pool = SandboxPool(rewards, num_workers=2, limits=LIMITS, view=SandboxView(environment=environment))

            async def call() -> None:
                with pytest.raises(SandboxError, match="closed"):
                    await pool.call("hang")  # noqa: B023  (this round's)

            async with trio.open_nursery() as nursery:
                async with pool:
                    for _ in range(2):
                        nursery.start_soon(call)
                    while pool.num_started < 2:
                        await trio.lowlevel.checkpoint()
                    await trio.sleep(wait_s)


@pytest.mark.parametrize("level", ALL_LEVELS)
async def test_errors_do_not_control_a_terminal(level: Confinement, tmp_path: Path):
    clear = "raise ValueError('\\x1b[2Jfake \\x9b31m \\u202e\\u00e9\\n\\tnext')"
    async with open_code_pool(limits=LIMITS, confinement=level) as pool:
        result = await execute_code(f"def f():\n    {clear}", "f", {}, pool=pool)
    assert result.error.startswith("ValueError: \\x1b[2Jfake \\x9b31m \\u202e\u00e9\n\tnext\n")
    (tmp_path / "bad.py").write_text(clear)
    with pytest.raises(SandboxError) as caught:
        async with SandboxPool(f"{tmp_path}/bad.py:f", limits=LIMITS, confinement=level):
            pass
    assert "\\x1b[2Jfake" in str(caught.value)
    assert "\x1b" not in str(caught.value)


async def test_a_worker_that_ended_before_the_call_is_replaced_without_a_word(rewards: str):
    with no_survivors() as environment:
        async with SandboxPool(rewards, num_workers=1, limits=LIMITS, view=SandboxView(environment=environment)) as pool:
            _, pid, _ = (await pool.call(1)).value
            assert pid > 0
            for process in pool.process_ids():
                os.kill(process, signal.SIGKILL)
            await trio.to_thread.run_sync(wait_until_gone, environment[MARKER])
            assert (await pool.call(2)).value[2] == 2
            assert pool.num_started == 2


async def test_any_number_of_idle_workers_may_have_ended(rewards: str):
    with no_survivors() as environment:
        async with SandboxPool(rewards, num_workers=3, limits=LIMITS, view=SandboxView(environment=environment)) as pool:
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(pool.call, number)
            assert pool.num_started == 3
            for process in pool.process_ids():
                os.kill(process, signal.SIGKILL)
            await trio.to_thread.run_sync(wait_until_gone, environment[MARKER])
            assert (await pool.call(2)).value[2] == 2
            assert pool.num_started == 4


@pytest.mark.parametrize("level", ISOLATED)
async def test_a_call_whose_sandbox_cannot_watch_is_not_made_again(level: Confinement, rewards: str):
    with no_survivors() as environment:
        async with SandboxPool(rewards, num_workers=1, limits=LIMITS, confinement=level, view=SandboxView(environment=environment)) as pool:
            results: list[CallResult] = []

            async def call() -> None:
                results.append(await pool.call("hang"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await trio.sleep(0.3)
                resource.prlimit(first_process(environment[MARKER]), resource.RLIMIT_NOFILE, (0, 0))
            assert [result.failure for result in results] == [SandboxFailure.DIED]
            assert pool.num_started == 1
            assert (await pool.call(2)).value[2] == 2


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_nothing_is_left_of_a_pool_whose_process_is_killed(level: Confinement, rewards: str, tmp_path: Path):
    marker = f"asker-{os.getpid()}-{level.name}"
    asker = f"""
import trio
from rollouts.sandbox import confinement, limits, pool
async def main():
    options = dict(view=pool.SandboxView(environment={{{MARKER!r}: {marker!r}}}), confinement=confinement.{level.name}(),
                   limits=limits.SandboxLimits(wall_s=1000.0))
    async with pool.SandboxPool({rewards!r}, **options) as workers:
        async with trio.open_nursery() as nursery:
            await workers.call(1)
            nursery.start_soon(workers.call, "hang")
            nursery.start_soon(workers.call, "hang")
            while workers.num_started < 2: await trio.sleep(0.01)
            await trio.sleep(0.2)
            print("busy", flush=True)
trio.run(main)
"""
    process = subprocess.Popen([sys.executable, "-c", asker, marker], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdout.readline() == b"busy\n"
    assert len(marked(marker)) >= 4  # for each worker what was started, and the worker
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_gone(marker)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]

"""Reward code with planted faults, and programs that try to get out of the sandbox."""

from __future__ import annotations

import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import trio

from benchmarks.reliability.experiment import Amount, Outcome, Skipped
from rollouts.config import RewardConfig
from rollouts.errors import SandboxError
from rollouts.rewards.code.sandboxed import SandboxedReward
from rollouts.rewards.evaluate import score_group
from rollouts.sandbox.limits import SandboxLimits, SandboxResult
from rollouts.sandbox.run import find_confinement, run_confined
from rollouts.types import Sample, Status

_REWARD = """
import os, sys, time

def judge(messages, fault, number):
    if fault == "raises":
        raise ValueError("planted")
    if fault == "hangs":
        time.sleep(1000)
    if fault == "NaN":
        return float("nan")
    if fault == "None":
        return None
    if fault == "ends the process":
        os._exit(0)
    if fault == "prints":
        print("0.0\\n" * 100); sys.stdout.flush()
    return 0.25 + number % 4
"""
_FAULTS = ("raises", "hangs", "NaN", "None", "ends the process")


def _plant(count: int, faults: int, draw: Random) -> list[Sample]:
    texts = [_FAULTS[i % len(_FAULTS)] for i in range(faults)] + ["prints" if i % 10 == 0 else "right" for i in range(count - faults)]
    draw.shuffle(texts)
    return [
        Sample(prompt="q", response="a", status=Status.COMPLETED, index=i, metadata={"fault": text, "number": i})
        for i, text in enumerate(texts)
    ]


def _is_faulty(sample: Sample) -> bool:
    return sample.metadata["fault"] in _FAULTS


async def _score(path: Path, samples: list[Sample]) -> tuple[list[Sample], int]:
    """Score samples one by one, and in groups that a failure drops. Returns the samples, and the groups that are wrongly kept or gone."""
    source = SandboxedReward(f"{path}:judge", num_workers=2, limits=SandboxLimits(wall_s=1.0))
    wrong = 0
    async with source.open_reward() as reward_fn:
        scored = await score_group(tuple(samples), reward_fn, RewardConfig(on_error="zero"))
        assert scored is not None, "failures are marked, nothing is dropped"
        for start in range(0, len(samples), 64):  # a part of the groups, as hanging rewards take their time twice
            group = tuple(samples[start : start + 8])
            kept = await score_group(group, reward_fn, RewardConfig(on_error="drop"))
            wrong += (kept is None) != any(map(_is_faulty, group))
    return list(scored), wrong


def _count_silent_zeros(samples: list[Sample]) -> int:
    """Count the rewards that a naive evaluation gets wrong, without the faults that it would not survive at all."""
    room: dict[str, Any] = {}
    exec(_REWARD, room)
    count = 0
    for sample in samples:
        if sample.metadata["fault"] in ("raises", "NaN", "None"):
            try:
                reward = float(room["judge"](None, **sample.metadata) or 0.0)
            except Exception:
                reward = 0.0
            count += reward == 0.0 or math.isnan(reward)
    return count


def plant_reward_faults(amount: Amount) -> Outcome:
    """Score samples of which some make the reward function fail, each in one of five ways."""
    count, faults = amount.count(128, 1024), amount.count(10, 63)
    path = amount.folder / "reward.py"
    path.write_text(_REWARD)
    try:
        find_confinement()
    except SandboxError as error:
        raise Skipped(str(error)) from error
    samples = _plant(count, faults, amount.draw)
    scored, wrong_groups = trio.run(_score, path, samples)
    found: Counter[str] = Counter()
    for before, after in zip(samples, scored, strict=True):
        failed = after.reward_details is not None and after.reward_details.error is not None
        found["failures not reported"] += _is_faulty(before) and not failed
        found["failures that are none"] += failed and not _is_faulty(before)
        found["wrong rewards"] += not failed and after.reward != 0.25 + before.index % 4
    measured = {**found, "groups wrongly kept or dropped": wrong_groups, "processes left": len(_marked(str(path)))}
    zeros = _count_silent_zeros(samples)
    return Outcome(
        size=f"{count} rewards with {faults} planted faults, {len(_FAULTS)} kinds", measured=measured,
        holds=not any(measured.values()), control={"rewards that are silently 0 or NaN": zeros},
        control_fails=zeros > 0,
    )  # fmt: skip


_ATTACKS = {
    "environment": "import os; print('GOT' if any('canary' in value for value in os.environ.values()) else '')",
    "read a file": "print('GOT', open({folder!r} + '/secret').read())",
    "write a file": "open({folder!r} + '/written', 'w').write('x'); print('GOT')",
    "TCP": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('GOT')",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))",
    "memory": "x = bytearray(3 << 30); print('GOT')",
    "disk": "open('big', 'wb').write(bytes(50 << 20)); print('GOT')",
    "output": "import sys\nfor i in range(20000): sys.stdout.write('x' * 1000)\nsys.stdout.write('GOT')",
    "spins": "while True: pass",
    "ignores SIGTERM": "import signal, time; signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    "signals its parent": "import os; os.kill({pid}, 0); print('GOT')",
    "forks": "import os, time\nfor i in range(50):\n    if os.fork() == 0: time.sleep(30); os._exit(0)",
    "environment of others": "print('GOT' if b'canary' in open('/proc/{pid}/environ', 'rb').read() else '')",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(30)\n    os._exit(0)\nprint('done')",
}
# an attack succeeds if it prints GOT, reaches a socket, or leaves a process


def _marked(marker: str) -> list[int]:
    """Processes other than this one with a marker in their command or environment."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in Path("/proc", name, "environ").read_bytes() + Path("/proc", name, "cmdline").read_bytes():
                    found.append(int(name))
    return found


def _attack_confined(code: str, limits: SandboxLimits, marker: str) -> bool:
    async def run() -> SandboxResult:
        return await run_confined(code, limits=limits, environment={"MARKER": marker})

    result = trio.run(run)
    return b"GOT" in result.stdout or bool(_marked(marker))


def _attack_plainly(code: str, folder: Path, marker: str) -> bool:
    """Run as a naive reward does: a subprocess with a deadline."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=2.0, cwd=folder, env=os.environ | {"MARKER": marker}
        )
        got = b"GOT" in done.stdout
    except subprocess.TimeoutExpired:
        got = False
    left = _marked(marker)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, 9)
    return got or bool(left)


def _was_reached(udp: socket.socket) -> bool:
    try:
        return bool(udp.recv(10))
    except BlockingIOError:
        return False


def attack_sandbox(amount: Amount) -> Outcome:
    """Run 14 programs that attack, in the sandbox and in a plain subprocess."""
    try:
        level = find_confinement()
    except SandboxError as error:
        raise Skipped(str(error)) from error
    (amount.folder / "secret").write_text("x")
    os.environ["CANARY"] = "canary-of-the-environment"
    limits = SandboxLimits(wall_s=2.0, cpu_s=2.0, memory_bytes=256 << 20, num_processes=8, file_bytes=1 << 20, output_bytes=2**16)
    escaped, naive = list[str](), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        ports = {"port": listener.getsockname()[1], "udp": udp.getsockname()[1]}
        for name, code in _ATTACKS.items():
            code = code.format(folder=str(amount.folder), pid=os.getpid(), **ports)
            if _attack_confined(code, limits, uuid.uuid4().hex) or _was_reached(udp):
                escaped.append(name)
            if _attack_plainly(code, amount.folder, uuid.uuid4().hex) or _was_reached(udp):
                naive.append(name)
    return Outcome(
        size=f"{len(_ATTACKS)} attacks, confinement {level.name}",
        measured={"attacks not contained": len(escaped), **dict.fromkeys(escaped, "not contained")},
        holds=not escaped, control={"attacks not contained": len(naive)}, control_fails=len(naive) >= 7,
    )  # fmt: skip


def time_sandbox(amount: Amount) -> Outcome:
    """Measure what a run in the sandbox costs more than a plain process, in processor time, and in time at the speed that both had.

    On a busy machine both wait for a processor: the time of the plain process, divided by its processor time, says how much slower it is.
    """
    repeats = amount.count(5, 20)

    def confined() -> None:
        trio.run(run_confined, "print(1)")

    def plain() -> None:
        subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True)

    pairs = [(_time(confined), _time(plain)) for _ in range(repeats)]  # in turn, at one load
    ours, theirs = ([statistics.median(column) for column in zip(*(pair[i] for pair in pairs), strict=True)] for i in (0, 1))
    slowness = max(1.0, theirs[0] / theirs[1])
    more, processor = (ours[0] - theirs[0]) / slowness, ours[1] - theirs[1]
    return Outcome(
        size=f"medians of {repeats}, in turn",
        measured={
            "ms more than a plain process": round(1000 * more), "ms more of processor time": round(1000 * processor),
            "times slower than idle": round(slowness, 1),
        },
        holds=max(more, processor) <= 0.1,
    )  # fmt: skip


def _time(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and the processor seconds of this process and of the processes that it starts."""
    started, used = time.perf_counter(), _processor_s()
    call()
    return time.perf_counter() - started, _processor_s() - used


def _processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)

"""Benchmark the cost of confinement: one run of a program at each level, and one call through a pool, relative to a plain subprocess.

    python -m benchmarks.sandbox [--runs 20] [--calls 1000] [--workers 1] [--output FILE.json]

Contenders take turns. A plain subprocess is the same interpreter running the same empty program without confinement. Times are medians
of single runs, and for pools the mean over all calls, one after the other from one task. "Starts" counts workers: 1 means that no call
needed a new one. The table has only levels that work on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from benchmarks.measure import print_table, write_json
from rollouts.errors import SandboxError
from rollouts.sandbox.confinement import Confinement, bubblewrap, interpreter, namespaces, plain
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.sandbox.reward_code import execute_user_reward_code, open_code_pool
from rollouts.sandbox.run import run_confined, try_confinement

LIMITS = SandboxLimits(wall_s=60.0)
BASE = "plain subprocess"
REWARD = "def reward(messages, ground_truth): return float(messages[-1]['content'] == ground_truth)"
SCORE = "def score(payload): return float(payload['response'].rpartition('#### ')[2] == payload['answer'])"
MESSAGES = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"})


def levels() -> list[Confinement]:
    """Return the levels that work on this machine."""
    found: list[Confinement] = []
    for level in (plain(), namespaces(), bubblewrap()):
        try:
            try_confinement(level)
        except SandboxError as error:
            print(f"left out: {error}")
        else:
            found.append(level)
    return found


async def time_runs(runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run of an empty program."""
    times: dict[str, list[float]] = {}
    for repeat in range(-1, runs):
        start = time.perf_counter()
        subprocess.run([interpreter(), "-s", "-S", "-B", "-c", "pass"], check=True, stdin=subprocess.DEVNULL, capture_output=True)
        seconds = {BASE: time.perf_counter() - start}
        for level in levels():
            start = time.perf_counter()
            result = await run_confined("pass", limits=LIMITS, confinement=level)
            assert result.ok, result
            seconds[level.name] = time.perf_counter() - start
        for name, value in seconds.items() if repeat >= 0 else ():
            times.setdefault(name, []).append(value)
    return times


async def time_calls(pool: SandboxPool, calls: int, workers: int, source: bool) -> float:
    """Return the seconds of `calls` calls, from as many tasks as there are workers."""

    async def call(count: int) -> None:
        for _ in range(count):
            if source:
                result = await execute_user_reward_code(REWARD, MESSAGES, "2", pool=pool)
            else:
                result = await pool.call({"response": "the answer is 2 #### 2", "answer": "2"})
            result.unwrap()

    await call(3)
    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(workers):
            nursery.start_soon(call, calls // workers + (number < calls % workers))
    return time.perf_counter() - start


async def measure(runs: int, calls: int, workers: int) -> dict[str, dict[str, float]]:
    """Return the table: milliseconds of each contender, and the ratio to a plain subprocess."""
    times = await time_runs(runs)
    base = statistics.median(times[BASE])
    table = {f"run: {name}": {"ms": 1e3 * statistics.median(t), "ratio": statistics.median(t) / base} for name, t in times.items()}
    for level in levels():
        for name, fresh, source in (("source", True, True), ("a process each", True, False), ("in the worker", False, False)):
            options: dict[str, Any] = {"num_workers": workers, "limits": LIMITS, "confinement": level}
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "score.py").write_text(SCORE)
                pool = open_code_pool(**options) if source else SandboxPool(f"{folder}/score.py:score", fresh_process=fresh, **options)
                async with pool:
                    seconds = await time_calls(pool, calls, workers, source) / calls
            row = {"ms": 1e3 * seconds, "ratio": seconds / base, "starts": float(pool.num_started)}
            table[f"call: {level.name}, {name}"] = row
    return {name: {"starts": float("nan"), **row} for name, row in table.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    table = trio.run(measure, arguments.runs, arguments.calls, arguments.workers)
    ordered = {name: {column: row[column] for column in ("ms", "ratio", "starts")} for name, row in table.items()}
    print_table(f"{arguments.runs} runs, {arguments.calls} calls", ordered)
    write_json(arguments.output, {"runs": arguments.runs, "calls": arguments.calls, "workers": arguments.workers, "table": ordered})


if __name__ == "__main__":
    main()

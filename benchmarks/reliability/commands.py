"""Runs of the command in processes of their own, which can be killed or signalled at any scheduling point of their event loop.

A process is forked from this one, which has imported everything and has started no thread; it begins at once.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers.models.qwen3.modeling_qwen3
import trio

import integration.run.job
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint

PRELOADED = (integration.run.job, transformers.models.qwen3.modeling_qwen3)  # what each process would import otherwise

Naive = Mapping[str, Callable[..., Any]]
"""Functions that take the place of those of the library in a process, by "module:name.of.function"."""

REWARD = f"{Path(__file__).with_name('rewards_of_runs.py')}:random_reward"
_COMMON = (
    "--model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --generation.max-tokens 8 --num-threads 1 "
    "--evaluation.num-prompts 2"
)
RL = [*f"--mode rl --rl.prompts-per-step 3 --rl.samples-per-prompt 2 --checkpoint.rl-every 1 {_COMMON} --reward.function".split(), REWARD]
SFT = f"--mode sft --sft.batch-size 8 --checkpoint.sft-every 1 {_COMMON}".split()
"""Options of small runs, without their number of steps."""


class AtPoint(trio.abc.Instrument):
    """Calls a function before the n-th step of any task, and counts the steps."""

    def __init__(self, number: int | None, act: Callable[[], None]) -> None:
        self.count, self._number, self._act = 0, number, act

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1
        if self.count == self._number:
            self._act()


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int  # minus the number of the signal that ended it
    points: int | None  # scheduling points, where it came to its end
    out: str
    error: str
    signalled_at: float | None  # time.monotonic() when it signalled itself
    ended_at: float


def run_train(
    argv: Sequence[object], streams: Path, *, number: int = signal.SIGKILL, at: int | None = None, naive: Naive | None = None
) -> Ended:
    """Run `rollouts train` in a process, and wait for its end.

    Args:
        streams: directory for what it prints.
        number: signal that it sends to itself before its scheduling point `at`; None = it is left alone.
    """
    streams.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(_train_here([str(argument) for argument in argv], streams, number, at, naive or {}))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    points, signalled = streams / "points", streams / "signalled"
    return Ended(
        status, int(points.read_text()) if points.exists() else None, (streams / "out").read_text(), (streams / "error").read_text(),
        float(signalled.read_text()) if signalled.exists() else None, time.monotonic(),
    )  # fmt: skip


def _train_here(argv: list[str], streams: Path, number: int, at: int | None, naive: Naive) -> int:
    for descriptor, name in ((1, "out"), (2, "error")):
        opened = os.open(streams / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(opened, descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    for name in ("points", "signalled"):
        (streams / name).unlink(missing_ok=True)

    def act() -> None:
        (streams / "signalled").write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    for place, function in naive.items():
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, last = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, last, function)
    counter, run = AtPoint(at, act), trio.run
    trio.run = lambda function, *arguments, **options: run(function, *arguments, instruments=(counter,), **options)  # type: ignore[assignment]
    from integration.train import main

    try:
        status = main(argv)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    (streams / "points").write_text(str(counter.count))
    return status


@dataclass(frozen=True)
class Left:
    """What a run leaves that another run with the same seed must leave, too."""

    metrics: tuple[str, ...]  # lines of metrics.jsonl without what ends in _s
    prompts: tuple[tuple[str, tuple[tuple[int, int, tuple[int, ...]], ...]], ...]  # file, then (prompt, sample, tokens) of each sample
    weights: str  # SHA-256 of the newest checkpoint's safetensors


def read_run(directory: Path) -> Left:
    """Read what a run has left."""
    from rollouts.data.trajectories import read_samples

    lines = [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(directory / "metrics.jsonl")]
    found: list[tuple[str, tuple[tuple[int, int, tuple[int, ...]], ...]]] = []
    for path in sorted((directory / "rl" / "trajectories").glob("*.jsonl")):
        found.append((path.name, tuple((s.group_index, s.index, s.tokens) for s in read_samples(path))))
    return Left(tuple(json.dumps(line, sort_keys=True) for line in lines), tuple(found), hash_weights(directory))


def hash_weights(directory: Path) -> str:
    """Return the SHA-256 of all safetensors in the newest checkpoint of a run's last stage."""
    stage = next(stage for stage in ("rl", "sft") if (directory / stage).is_dir())
    checkpoint = latest_checkpoint(directory / stage / "checkpoints")
    assert checkpoint is not None, f"{directory} has no checkpoint"
    digest = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        digest.update(path.relative_to(checkpoint).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def differences(expected: Left, found: Left) -> dict[str, int]:
    """Count what is missing, doubled or different: prompts lost, prompts repeated, metric lines that differ, weights that differ."""
    ours, theirs = ([(name, sample[0], sample[1]) for name, samples in left.prompts for sample in samples] for left in (found, expected))
    pairs = [a != b for a, b in zip(found.metrics, expected.metrics, strict=False)]
    return {
        "samples lost": len(set(theirs) - set(ours)),
        "samples repeated": len(ours) - len({(prompt, sample) for _, prompt, sample in ours}),
        "samples that differ": sum(a != b for a, b in zip(found.prompts, expected.prompts, strict=False)),
        "metric lines that differ": sum(pairs) + abs(len(found.metrics) - len(expected.metrics)),
        "weights that differ": int(found.weights != expected.weights),
    }

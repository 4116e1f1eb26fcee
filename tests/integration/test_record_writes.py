"""The record of a step is written beside what follows its update, and no checkpoint counts a step whose record is not whole."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from forked import Child

from integration.run import step_files
from integration.run.stages import RunControl, run_rl
from integration.run.step_files import Ledger, TrajectoryWriter, open_files
from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.records import TrajectorySection
from integration.settings.sections.stages import RLSection
from integration.tasks.task import create_sort_task
from rollouts import create_pytorch_backend
from rollouts.asynchronous.config import AsyncConfig
from rollouts.config import CheckpointConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.trajectories import read_records
from rollouts.errors import OutputError
from rollouts.testing import create_tiny_model
from rollouts.training.rl_parts import RLParts
from rollouts.training.saving.checkpoints import list_checkpoints
from rollouts.types import RolloutBatch, Sample

STEPS, EVERY = 4, 2
LOOPS = {"sync": AsyncConfig(), "async": AsyncConfig(enabled=True, max_staleness=1)}


def count_even(sample: Sample) -> float:
    return sum(token % 2 == 0 for token in sample.tokens[-4:]) / 4


class Lines:
    """A logger that lets others wait for the line of a step."""

    def __init__(self) -> None:
        self.logged = [threading.Event() for _ in range(STEPS + 1)]

    def log(self, metrics: Any, step: int) -> None:
        self.logged[step].set()

    def finish(self) -> None:
        pass


async def run(loop: str, directory: Path, lines: Lines) -> None:
    torch.set_num_threads(1)
    config = Config(
        rl=RLSection(num_steps=STEPS, prompts_per_step=4, samples_per_prompt=4, asynchronous=LOOPS[loop]),
        model=ModelSection(hidden_size=32, intermediate_size=32, num_layers=1),
        evaluation=EvaluationSection(num_prompts=4, sampled=False),
        checkpoint=CheckpointConfig(rl_every=EVERY),
    )
    task = replace(create_sort_task(num_train=64, num_heldout=4), reward_fn=count_even)
    await run_rl(config, directory / "rl", None, RunControl(logger=lines), task=task)


def patch_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call `before` with the number of the step before each record is written."""
    write = step_files.write_lines

    def write_later(path: Path, lines: Sequence[str]) -> int:
        before(int(path.stem.removeprefix("step_")))
        return write(path, lines)

    monkeypatch.setattr(step_files, "write_lines", write_later)


def is_whole(path: Path) -> bool:
    records = read_records(path)
    return len(records) == 16 and all(record.update is not None and record.estimate is not None for record in records)


@pytest.mark.parametrize("loop", LOOPS)
async def test_the_run_goes_on_beside_a_slow_write_and_a_checkpoint_waits_for_it(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines, overtaken, early = Lines(), list[int](), list[int]()
    checkpoints = tmp_path / "rl" / "checkpoints"

    def delay(step: int) -> None:
        if step % EVERY:
            if lines.logged[step].wait(20.0):  # without a checkpoint nothing waits for the record
                overtaken.append(step)
            return
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            if any(path.name == f"step_{step:04d}" for path in list_checkpoints(checkpoints)):
                early.append(step)
                return
            time.sleep(0.01)

    patch_writes(monkeypatch, delay)
    await run(loop, tmp_path, lines)
    assert overtaken == [1, 3], "a step waited for the write of its record"
    assert early == [], "a checkpoint counts a step whose record is not written"
    records = sorted((tmp_path / "rl" / "trajectories").iterdir())
    assert [path.name for path in records] == [f"step_{step:04d}.jsonl" for step in range(1, STEPS + 1)]
    assert all(map(is_whole, records))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("lost", "newest"), [(2, []), (3, ["step_0002"]), (4, ["step_0002"])])
async def test_no_checkpoint_counts_a_step_whose_record_is_lost(
    loop: str, lost: int, newest: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(step: int) -> None:
        if step == lost:
            raise OutputError("the disk is full: no room for the record")

    patch_writes(monkeypatch, fail)
    with pytest.raises(OutputError, match="no room for the record"):
        await run(loop, tmp_path, Lines())
    assert [path.name for path in list_checkpoints(tmp_path / "rl" / "checkpoints")] == newest


@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_lost_record_is_told_although_the_run_is_cancelled(is_nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(step: int) -> None:
        raise OutputError("the disk is full: no room for the record")

    patch_writes(monkeypatch, fail)
    parts = RLParts(backend=create_pytorch_backend(create_tiny_model(), lr=1e-3), data_buffer=DataBuffer(None, seed=0), engines=())
    rollouts = RolloutBatch(samples=(Sample(tokens=(3, 4), loss_mask=(0.0, 1.0), rollout_log_probs=(0.0, -1.0), reward=1.0),))
    trajectories = TrajectoryWriter(tmp_path, TrajectorySection())
    with pytest.raises(OutputError, match="no room for the record"), trio.CancelScope() as scope:
        async with open_files(parts, trajectories, Ledger(tmp_path / "ledger.jsonl", finished_steps=0)) as parts:
            assert parts.record is not None
            trajectories.prepare(1, rollouts, None)
            parts.record.write(1, rollouts, {})
            scope.cancel()
            if is_nested:  # its nursery raises a group
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()


async def test_a_checkpoint_has_the_rollouts_of_a_step_whose_update_was_left_out(tmp_path: Path):
    sample = Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), rollout_log_probs=(0.0, -1.0, -1.0), reward=1.0)
    parts = RLParts(backend=create_pytorch_backend(create_tiny_model(), lr=1e-3), data_buffer=DataBuffer(None, seed=0), engines=())
    ledger = Ledger(tmp_path / "ledger.jsonl", finished_steps=0)
    with TrajectoryWriter(tmp_path, TrajectorySection()) as trajectories:
        async with open_files(parts, trajectories, ledger) as parts:
            assert parts.on_rollouts is not None and parts.before_save is not None
            await parts.on_rollouts(1, RolloutBatch(samples=(sample,)))
            assert not list(tmp_path.glob("step_*"))
            await parts.before_save()
            assert [record.sample for record in read_records(tmp_path / "step_0001.jsonl")] == [sample]


async def test_the_event_loop_is_free_while_the_rollouts_of_an_update_that_was_left_out_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The hooks of the next step write them: nothing else does where no checkpoint is between the two."""
    threads: list[threading.Thread] = []
    patch_writes(monkeypatch, lambda step: threads.append(threading.current_thread()))
    sample = Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), rollout_log_probs=(0.0, -1.0, -1.0), reward=1.0)
    parts = RLParts(backend=create_pytorch_backend(create_tiny_model(), lr=1e-3), data_buffer=DataBuffer(None, seed=0), engines=())
    with TrajectoryWriter(tmp_path, TrajectorySection()) as trajectories:
        async with open_files(parts, trajectories, Ledger(tmp_path / "ledger.jsonl", finished_steps=0)) as parts:
            assert parts.on_rollouts is not None
            for step in (1, 2):
                await parts.on_rollouts(step, RolloutBatch(samples=(sample,)))
            assert [path.name for path in tmp_path.glob("step_*")] == ["step_0001.jsonl"]
            assert len(threads) == 1 and threads[0] is not threading.current_thread()


SIZES = "--model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --num-threads 1".split()
HUNG = """
import sys, threading
from integration.run import step_files
def hang(path, lines):
    print("writing", flush=True)
    threading.Event().wait()
step_files.write_lines = hang
from integration.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", ["1", "None"])
def test_a_write_that_never_ends_does_not_hold_the_run_for_ever(grace_s: str, tmp_path: Path):
    """A disk that hangs: the grace after the first Ctrl-C ends the process, and without one the second Ctrl-C does."""
    argv = ["--mode", "rl", "--rl.num-steps", "7", "--evaluation.num-prompts", "4", "--quiet", "--grace-s", grace_s]
    argv += ["--rl.prompts-per-step", "4", "--rl.samples-per-prompt", "4", "--output-dir", str(tmp_path / "run")]
    with Child(HUNG, *argv, *SIZES, folder=tmp_path / "process") as child:
        child.wait_for_lines(1)
        os.kill(child.pid, signal.SIGINT)
        if grace_s == "None":
            time.sleep(1.0)
            assert child.is_alive
            os.kill(child.pid, signal.SIGINT)
        assert child.wait() == 130, child.error


SLOW = """
import sys, time
from integration.run import step_files
write = step_files.write_lines
def write_slowly(path, lines):
    time.sleep(0.4)
    return write(path, lines)
step_files.write_lines = write_slowly
from integration.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_after_a_kill_the_record_of_each_step_that_a_checkpoint_counts_is_whole(every: int, tmp_path: Path):
    directory = tmp_path / "run"
    argv = ["--mode", "rl", "--rl.num-steps", "7", "--checkpoint.rl-every", str(every), "--evaluation.num-prompts", "4", "--quiet"]
    argv += ["--rl.prompts-per-step", "4", "--rl.samples-per-prompt", "4", *SIZES, "--output-dir", str(directory)]
    checkpoints, records = directory / "rl" / "checkpoints", directory / "rl" / "trajectories"
    for kill_at in (every, 2 * every, None):
        resume = ["--resume"] if directory.exists() else []
        with Child(SLOW, *argv, *resume, folder=tmp_path / f"process {kill_at}") as child:
            while child.is_alive:
                found = [int(path.name.removeprefix("step_")) for path in list_checkpoints(checkpoints)] if checkpoints.is_dir() else []
                if kill_at is not None and max(found, default=0) >= kill_at:
                    child.kill()
                    break
                time.sleep(0.01)
            assert child.wait() == (0 if kill_at is None else -signal.SIGKILL), child.error
        newest = int(list_checkpoints(checkpoints)[-1].name.removeprefix("step_"))
        for step in range(1, newest + 1):
            assert is_whole(records / f"step_{step:04d}.jsonl"), f"step {step} of {newest}, killed at {kill_at}"
    ledger = [json.loads(line)["step"] for line in (directory / "rl" / "ledger.jsonl").read_text().splitlines()]
    assert ledger == list(range(1, 8))

"""Memory of long runs: with history_steps it does not grow with the number of steps, in any loop."""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked
import pytest
from trio._core import _run

from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import (
    HISTORY_STEPS,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts.data.prompts import DataBuffer
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.sft_loop import run_sft_training
from rollouts.testing import FakeBackend, FakeEngine
from rollouts.trainer.session import _History
from rollouts.types import Sample, SamplingParams


class Weigher:
    """A logger that notes how many bytes are allocated at certain steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps
        self.found: list[int] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step in self._steps:
            _run.GLOBAL_RUN_CONTEXT.runner.deadlines._prune()  # trio keeps up to 1,000 deadlines that have ended
            gc.collect()
            self.found.append(tracemalloc.get_traced_memory()[0])

    def finish(self) -> None: ...


async def train(loop: str, num_steps: int, history_steps: int | None, logger: Weigher) -> list[dict[str, float]]:
    backend = FakeBackend(calls=deque(maxlen=10))
    if loop == "sft":
        sample = Sample(prompt="a", tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0), response="b")
        return await run_sft_training(
            backend, [sample] * 4, SFTTrainingConfig(num_steps=num_steps, batch_size=2, history_steps=history_steps), logger
        )
    engine = FakeEngine(calls=deque(maxlen=10))
    buffer = DataBuffer([f"s{i}=" for i in range(4)])
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=4))
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=generate, reward_fn=lambda sample: float(sample.index % 2))
    training = RLTrainingConfig(num_steps=num_steps, weight_sync="memory", history_steps=history_steps)
    if loop == "rl":
        async with AsyncRolloutManager(buffer, config, engines=[engine]) as manager:
            return await run_rl_training(backend, buffer, manager, [engine], training, logger)
    async with create_workflow_executor(buffer, config, AsyncConfig(max_staleness=1), engines=[engine]) as executor:
        return await run_async_rl_training(backend, buffer, executor, [engine], training, logger)


NUM_WINDOWS = 12


async def measure_growth(loop: str, history_steps: int | None, num_steps: int) -> float:
    """Return the bytes by which each step of the second half adds to the memory: the median over windows of equal length.

    A leak is in every window. What is allocated once, by a cache, an import or a warning, is in one of them, and so is what other tests of
    the process have left.
    """
    length = num_steps // (2 * NUM_WINDOWS)
    logger = Weigher(*range(num_steps - 1 - NUM_WINDOWS * length, num_steps, length))
    tracemalloc.start()
    try:
        await train(loop, num_steps, history_steps, logger)
    finally:
        tracemalloc.stop()
    assert len(logger.found) == NUM_WINDOWS + 1
    return statistics.median(after - before for before, after in pairwise(logger.found)) / length


MEASURE = """
import runpy, sys, trio

_, file, loop, history_steps, num_steps = sys.argv
measure_growth = runpy.run_path(file)["measure_growth"]
print(trio.run(measure_growth, loop, int(history_steps) or None, int(num_steps)))
"""


def measure_alone(folder: Path, loop: str, history_steps: int | None, num_steps: int) -> float:
    """Call measure_growth in a process in which no other test has run: what threads, caches and handlers of others do would count."""
    status, out, error = forked.run(MEASURE, __file__, loop, history_steps or 0, num_steps, folder=folder)
    assert status == 0, error
    return float(out.split()[-1])


@pytest.mark.parametrize("loop", ["sft", "rl", "async"])
@pytest.mark.parametrize("num_steps", [pytest.param(240, id="short"), pytest.param(1200, id="long", marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_steps(loop: str, num_steps: int, tmp_path: Path):
    flat = measure_alone(tmp_path / "flat", loop, 1, num_steps)
    grows = measure_alone(tmp_path / "grows", loop, None, 120)
    limit = 30 if num_steps > 1000 else 150
    assert flat < limit, f"{flat:.0f} bytes a step"
    assert grows > flat + 200, f"{grows:.0f} bytes a step, and {flat:.0f} without a history: the control does not show it"


@pytest.mark.parametrize("kind", [SFTTrainingConfig, RLTrainingConfig, PreferenceTrainingConfig, RewardModelTrainingConfig])
def test_by_default_the_memory_of_metrics_is_bounded(kind: Any):
    assert kind().history_steps == HISTORY_STEPS == 1000


async def test_a_run_longer_than_the_default_returns_its_last_steps():
    logger = Weigher()
    found = await train("sft", HISTORY_STEPS + 3, SFTTrainingConfig().history_steps, logger)
    assert len(found) == HISTORY_STEPS
    assert [metrics["grad_norm"] for metrics in (found[0], found[-1])] == [1 / 4, 1 / (HISTORY_STEPS + 3)]  # of the fake: 1 / its updates


def test_the_history_of_a_trainer_is_bounded_and_cut_back():
    history = _History(None)
    for step in range(1, HISTORY_STEPS + 4):
        history.log({"loss": 0.5}, step)
    assert [history.lines[0]["iteration"], history.lines[-1]["iteration"]] == [4, HISTORY_STEPS + 3]
    history.cut(9)
    assert [line["iteration"] for line in history.lines] == [4, 5, 6, 7, 8, 9]


async def test_the_last_steps_are_returned():
    assert len(await train("rl", 5, 2, Weigher())) == 2
    assert len(await train("sft", 5, None, Weigher())) == 5
    with pytest.raises(Exception, match="history_steps"):
        replace(SFTTrainingConfig(num_steps=1), history_steps=0)

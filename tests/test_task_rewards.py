"""--reward.*: which function a run is given, and that it is open while the run lasts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.sections import RewardSection
from integration.task_rewards import open_task, use_own_reward
from integration.tasks import create_sort_task
from integration.train import main
from rollouts.config import RewardConfig
from rollouts.errors import ConfigError
from rollouts.rewards.evaluate import score_group
from rollouts.types import Sample, Status

SECTIONS = ["--task", "sort", "--rl.num-steps", "1", "--rl.prompts-per-step", "4", "--rl.samples-per-prompt", "2"]
SIZES = ["--model.hidden-size", "16", "--model.intermediate-size", "16", "--model.num-layers", "1", "--evaluation.num-prompts", "4"]

MINE = """
import math
from rollouts import EvaluateResult, MetricResult, reward_function

@reward_function
def pointwise(messages, ground_truth):
    text = messages[-1].content
    return EvaluateResult(float(text == ground_truth), metrics={"digits": MetricResult(sum(c.isdigit() for c in text))})

@reward_function(mode="batch")
async def longest_but_first(conversations):
    lengths = [len(messages[-1].content) for messages in conversations]
    results = [EvaluateResult(float(n == max(lengths)), metrics={"length": MetricResult(n)}) for n in lengths]
    return [math.nan, *results[1:]] if len(results) > 1 else results
"""


def run(tmp_path: Path, *arguments: str) -> list[dict[str, float]]:
    """The RL lines of a run of one step."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    words = [word.replace("mine.py", str(file)) for word in arguments]
    assert main(["--mode", "rl", *SECTIONS, *SIZES, *words, "--output-dir", str(tmp_path / "run"), "--rl.filter", "none"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] == 1]


def test_a_batch_function_rewards_a_run_and_what_fails_counts_as_the_run_says(tmp_path: Path):
    (line,) = run(tmp_path, "--reward.function", "mine.py:longest_but_first", "--reward.on-error", "zero")
    assert line["num_rewards_zeroed"] == 4.0 and "reward/length" in line and 0 <= line["reward_mean"] <= 0.5


@pytest.mark.slow
def test_a_pointwise_function_rewards_a_run_and_its_metrics_are_logged(tmp_path: Path):
    (line,) = run(tmp_path, "--reward.function", "mine.py:pointwise")
    assert "reward/digits" in line and 0 <= line["reward_mean"] <= 1


async def test_a_source_is_open_while_the_task_is(tmp_path: Path):
    file = tmp_path / "theirs.py"
    file.write_text("def reward(messages, ground_truth):\n    return float(messages[-1]['content'] == ground_truth)\n")
    task = use_own_reward(RewardSection(function=f"{file}:reward", sandboxed=True), create_sort_task(num_train=4, num_heldout=4))
    async with open_task(task) as opened:
        assert opened.reward_fn is not None
        sample = Sample(response="12", status=Status.COMPLETED, metadata={"ground_truth": "12"})
        scored = await score_group((sample,), opened.reward_fn, RewardConfig(timeout_s=60))
        assert scored is not None and scored[0].reward == 1.0
    assert opened.train_prompts == task.train_prompts


async def test_a_plain_reward_needs_no_opening():
    task = create_sort_task(num_train=4, num_heldout=4)
    async with open_task(task) as opened:
        assert opened is task
    assert use_own_reward(RewardSection(), task) is task


def test_a_sandbox_without_a_function_is_refused():
    with pytest.raises(ConfigError, match=r"reward.sandboxed is True, but reward.function is None"):
        use_own_reward(RewardSection(sandboxed=True), create_sort_task(num_train=4, num_heldout=4))

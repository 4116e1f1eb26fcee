"""--reward.*: which function a run is given, and that it is open while the run lasts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.parts.rewards import open_task, use_own_reward
from integration.settings.sections.generation import RewardSection
from integration.tasks.own_data import OwnData, create_jsonl_task
from integration.tasks.task import create_sort_task
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.evaluate import score_group
from rollouts.types import Sample, Status

SECTIONS = ["--task", "sort", "--rl.num-steps", "1", "--rl.prompts-per-step", "4", "--rl.samples-per-prompt", "2"]
SIZES = ["--model.hidden-size", "16", "--model.intermediate-size", "16", "--model.num-layers", "1", "--evaluation.num-prompts", "4"]

MINE = """
import math
from rollouts import EvaluateResult, MetricResult, create_composite_reward, create_length_penalty, reward_function

@reward_function
def pointwise(messages, ground_truth):
    text = messages[-1].content
    return EvaluateResult(float(text == ground_truth), metrics={"digits": MetricResult(sum(c.isdigit() for c in text))})

@reward_function(mode="batch")
async def longest_but_first(conversations):
    lengths = [len(messages[-1].content) for messages in conversations]
    results = [EvaluateResult(float(n == max(lengths)), metrics={"length": MetricResult(n)}) for n in lengths]
    return [math.nan, *results[1:]] if len(results) > 1 else results

short = create_length_penalty(free_tokens=0, per_token=0.1)
parts = create_composite_reward({"right": (pointwise, 0.5), "short": (short, 0.5)})
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


def test_gdpo_compares_each_part_of_a_composite_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (line,) = run(tmp_path, "--reward.function", "mine.py:parts", "--rl.algorithm", "gdpo('right short=0.5')")
    assert {"reward/right", "reward/short"} <= set(line) and line["num_tokens"] > 0
    for name, function, words in (("length", "mine.py:parts", "reward component 'length'; there are"), ("right", None, "named parts")):
        more = [] if function is None else ["--reward.function", str(tmp_path / function)]
        algorithm = ["--rl.algorithm", f"gdpo('{name}')"]
        out = ["--output-dir", str(tmp_path / name), "--rl.filter", "none"]
        assert main(["--mode", "rl", *SECTIONS, *SIZES, *more, *algorithm, *out]) != 0
        assert words in capsys.readouterr().err


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


def test_tests_of_code_rewards_are_read_before_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    good, bad = "assert f(2) == 4", "import sys\nassert f(1) and sys.stdout"
    rows = [{"question": f"double it {k}", "answer": "-", "tests": [good, bad] if k == 2 else [good]} for k in range(12)]
    data, own = tmp_path / "mine.jsonl", tmp_path / "own.py"
    data.write_text("\n\n".join(json.dumps(row) for row in rows))  # the third row is in line 5
    own.write_text("from rollouts import CodeReward\nlenient = CodeReward(inseparable='leave_out')")
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=data, with_sft=False, eval_fraction=0))
    with pytest.raises(RewardError, match=rf"1 of 12 rows .* a test of {data}, line 5 cannot be run apart from the program"):
        use_own_reward(RewardSection(function="rollouts.rewards.code.unit_tests:code_reward"), task)
    use_own_reward(RewardSection(function=f"{own}:lenient"), task)
    assert f"1 tests of 1 rows (of 12) cannot be run apart from the program and are left out, the first: {data}, line 5" in caplog.text

"""Warnings for runs that cannot learn, and none for those that can; then the real loops, with a real model."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from integration.run.stages import RunControl, run_rl
from integration.run.summary import summarize_run
from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.generation import GenerationSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from integration.tasks.task import create_sort_task
from rollouts.asynchronous.config import AsyncConfig
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import SFTTrainingConfig
from rollouts.sft_loop import run_sft_training
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.summaries import PATIENCE, find_warnings
from rollouts.types import Sample

GOOD = {
    "loss": -0.01, "grad_norm": 1.0, "num_tokens": 40.0, "lr": 1e-4, "update_skipped": 0.0, "reward_min": 0.0, "reward_max": 1.0,
    "zero_std_fraction": 0.5, "truncated_fraction": 0.2,
}  # fmt: skip
ALL_EQUAL = {"zero_std_fraction": 1.0, "grad_norm": 0.0, "loss": 0.0}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"loss": float("nan")}, "--rl.optimizer.lr"),
        ({"loss": "NaN"}, "--rl.optimizer.lr"),  # as a line of metrics.jsonl has it
        ({"update_skipped": 1.0}, "not finite"),
        ({"truncated_fraction": 1.0}, "every answer of .* was cut .*--generation.max-tokens"),
        ({"truncated_fraction": 0.98}, "nearly all answers of the last 5 steps of RL were cut .*truncated_fraction is 0.98"),
        ({"truncated_fraction": 1.0, "reward_min": 0.0, "reward_max": 0.0, **ALL_EQUAL}, "--generation.max-tokens"),
        ({"truncated_fraction": 1.0, "num_tokens": 0.0}, "--rl.mask-truncated leaves nothing"),
        ({"reward_min": 0.0, "reward_max": 0.0, **ALL_EQUAL}, "all rewards of the last 5 steps of RL were 0, .*--reward.function"),
        ({"reward_min": 0.2, "reward_max": 0.2}, "were 0.2"),
        (ALL_EQUAL, "all answers to a prompt had the same reward.*--rl.samples-per-prompt"),
        ({"grad_norm": 0.0}, "gradient of 0.*--rl.algorithm"),
        ({"num_tokens": 0.0}, "no token to train on: look at --rl.mask-truncated"),
        ({"lr": 0.0}, "learning rate.*--rl.optimizer.lr"),
    ],
)
def test_a_sign_is_told_once_when_it_has_been_there_for_some_steps(bad: dict[str, object], said: str):
    steps = [GOOD, *[{**GOOD, **bad}] * (PATIENCE - 1), GOOD, *[{**GOOD, **bad}] * (PATIENCE - 1)]
    assert find_warnings(steps, stage="rl") == ()
    (text,) = find_warnings([*steps, *[{**GOOD, **bad}] * 20], stage="rl")
    assert re.search(said, text), text


@pytest.mark.parametrize(
    "steps",
    [
        [GOOD] * 20,
        [GOOD, *[{**GOOD, "reward_min": 1.0, **ALL_EQUAL, "truncated_fraction": 1.0}] * 20],  # all of them are right
        [{**GOOD, "reward_min": 1.0, **ALL_EQUAL}] * 20,  # from the first step on
        [{**GOOD, "reward_min": -3.0, "reward_max": 2.5}, *[{**GOOD, "reward_min": 2.5, "reward_max": 2.5, **ALL_EQUAL}] * 20],
        [{**GOOD, "zero_std_fraction": 1.0}] * 20,  # an algorithm that compares across groups
        [{"stage": "sft", "loss": 0.3, "num_tokens": 9.0, "grad_norm": 0.1, "lr": 1e-3}] * 20,
        [{"value_loss": 0.3, "num_tokens": 9.0, "reward_min": 0.0, "reward_max": 1.0}] * 20,  # the critic alone
        [{"eval_accuracy": 0.0}] * 20,
    ],
)
def test_a_run_that_learns_or_has_learned_is_left_alone(steps: list[dict[str, object]]):
    assert find_warnings(steps, stage="rl") == ()


def test_rewards_that_fall_to_the_worst_number_are_no_success():
    steps = [{**GOOD, "reward_min": -1.0}, *[{**GOOD, "reward_min": -1.0, "reward_max": -1.0, **ALL_EQUAL}] * PATIENCE]
    assert "all rewards of the last 5 steps of RL were -1" in find_warnings(steps, stage="rl")[0]


def test_a_single_update_that_leaps_is_told_at_once():
    assert find_warnings([GOOD, {**GOOD, "approx_kl": 0.4}], stage="rl") == ()
    (text,) = find_warnings([GOOD, {**GOOD, "approx_kl": 1.53}, {**GOOD, "approx_kl": 1.9}], stage="rl")
    assert "approx_kl is 1.5 nats for each token" in text and "--rl.optimizer.lr" in text


@pytest.mark.parametrize(
    ("line", "named", "unnamed"),
    [
        ({"rollout_kl": 0.0, "num_updates": 1.0}, ("the updates of a step", "--rl.optimizer.lr"), ("parity", "staleness")),
        ({"num_updates": 1.0}, ("--engine.parity-rows 8",), ("updates", "--rl.optimizer.lr", "staleness")),
        ({"num_updates": 4.0}, ("--engine.parity-rows 8", "--rl.num-epochs"), ("staleness",)),
        (
            {"num_updates": 1.0, "staleness_max": 3.0},
            ("the oldest token is 3 weight versions old", "--rl.asynchronous.max-staleness", "--engine.parity-rows"),
            ("the updates",),
        ),
        ({"rollout_kl": 0.1, "staleness_max": 1.0}, ("1 weight version old", "--engine.parity-rows"), ("the updates",)),
    ],
)
def test_a_policy_far_from_its_rollouts_is_told_by_what_can_have_moved_it(line: dict, named: tuple[str, ...], unnamed: tuple[str, ...]):
    (text,) = find_warnings([GOOD, {**GOOD, "approx_kl": 1.53, **line}], stage="rl")
    assert "approx_kl is 1.5 nats" in text
    assert all(word in text for word in named) and not any(word in text for word in unnamed), text


def test_settings_are_those_of_the_stage():
    assert "--preference.optimizer.lr" in find_warnings([{**GOOD, "loss": float("inf")}] * PATIENCE, stage="dpo")[0]
    assert "--sft.optimizer.lr" in find_warnings([{**GOOD, "loss": float("inf")}] * PATIENCE, stage="sft")[0]
    assert "--data.path" in find_warnings([{"loss": 0.0, "num_tokens": 0.0, "grad_norm": 0.0, "lr": 1e-3}] * PATIENCE, stage="sft")[0]


# -- the loops


def reward_none(sample: Sample) -> float:
    return 0.0


def reward_all(sample: Sample) -> float:
    return 1.0


def reward_prompts(sample: Sample) -> float:
    """A reward of the problem, not of the answer."""
    return float(sample.group_index)


def reward_answers(sample: Sample) -> float:
    return sum(token % 2 == 0 for token in sample.tokens[-3:]) / 3


LOOPS = {
    "all 0": (reward_none, 8, "were 0, so that nothing says which answers are better"),
    "of the prompt": (reward_prompts, 8, "all answers to a prompt had the same reward"),
    "cut": (reward_answers, 1, "--generation.max-tokens"),
    "good": (reward_answers, 8, None),
    "all 1": (reward_all, 8, None),
}


@pytest.mark.parametrize(
    ("reward", "max_tokens", "said", "asynchronous"),
    [pytest.param(*LOOPS[name], False, id=f"{name}-sync") for name in ("all 0", "good")]
    + [pytest.param(*LOOPS[name], False, id=f"{name}-sync", marks=pytest.mark.slow) for name in ("of the prompt", "cut", "all 1")]
    + [pytest.param(*LOOPS[name], True, id=f"{name}-async") for name in ("all 0",)]
    + [pytest.param(*LOOPS[name], True, id=f"{name}-async", marks=pytest.mark.slow) for name in ("of the prompt", "cut", "good", "all 1")],
)
async def test_the_loops_say_that_a_run_cannot_learn(caplog, tmp_path: Path, reward, max_tokens: int, said: str | None, asynchronous: bool):
    asynchronous_config = AsyncConfig(enabled=asynchronous)
    config = Config(
        seed=2,  # with which no answer ends at its first token
        model=ModelSection(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1),
        rl=RLSection(num_steps=PATIENCE, prompts_per_step=2, samples_per_prompt=2, num_minibatches=1, asynchronous=asynchronous_config),
        generation=GenerationSection(max_tokens=max_tokens),
        evaluation=EvaluationSection(num_prompts=1, sampled=False),
    )
    task = replace(create_sort_task(create_char_tokenizer(), num_heldout=1), reward_fn=reward)
    metrics = tmp_path / "metrics.jsonl"
    with caplog.at_level(logging.WARNING, "rollouts"):
        await run_rl(config, tmp_path / "rl", None, RunControl(logger=JSONLLogger(metrics)), task=task)
    logged = [record.message for record in caplog.records if "steps of RL" in record.message]
    assert summarize_run(read_metrics(metrics), {}, config)["warnings"] == logged
    assert len(logged) == (said is not None)
    assert said is None or said in logged[0]


async def test_the_sft_loop_says_that_nothing_is_trained(caplog):
    backend = create_pytorch_backend(create_tiny_model(), lr=0.0)
    samples = [Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), index=i) for i in range(4)]
    with caplog.at_level(logging.WARNING, "rollouts"):
        await run_sft_training(backend, samples, SFTTrainingConfig(num_steps=PATIENCE + 1, batch_size=2))
    assert [record.message for record in caplog.records] == [
        "the learning rate of the last 5 steps of SFT was 0, so that nothing was learned: raise --sft.optimizer.lr"
    ]

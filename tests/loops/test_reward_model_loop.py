"""A reward model learns from pairs: exactly the loss, in any micro-batches, resumed bit for bit, and in a directory that loads again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reward_model_backend
from rollouts.backends.futures import open_pipeline
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardModelTrainingConfig
from rollouts.data.preference_pairs import PreferencePair, prepare_preference_pair
from rollouts.errors import ConfigError, DataError
from rollouts.models.heads import load_reward_model
from rollouts.reward_model_loop import evaluate_reward_model, score_pairs, select_pairs, train_reward_model
from rollouts.rewards.models.local import RewardModel
from rollouts.testing import create_tiny_model
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import Sample


def make_pairs(n: int = 40) -> tuple[PreferencePair, ...]:
    """Small digits are preferred to large ones, in answers of various lengths."""
    tokenizer = create_char_tokenizer()
    rows = [{"prompt": f"{i % 10}=", "chosen": "x" * (1 + i % 3) + str(i % 5), "rejected": "x" + str(5 + i % 4)} for i in range(n)]
    return tuple(prepare_preference_pair(tokenizer, row) for row in rows)


def make_backend(seed: int = 0, **options: Any) -> Any:
    model = create_tiny_model(seed=seed)
    return create_reward_model_backend(model, **{"lr": 5e-3, "tokenizer": create_char_tokenizer(), **options})


def config(**options: Any) -> RewardModelTrainingConfig:
    return RewardModelTrainingConfig(**{"num_steps": 6, "batch_size": 8, **options})


def without_times(history: Any) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in history]


async def test_a_model_learns_which_answers_are_preferred_and_ranks_pairs_that_it_has_not_seen():
    pairs, backend = make_pairs(80), make_backend()
    before = await evaluate_reward_model(backend, pairs[60:])
    history = await train_reward_model(backend, pairs[:60], config(num_steps=20), heldout=pairs[60:])
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=0.1)
    assert history[-1]["eval_accuracy"] >= 0.95
    assert history[-1]["loss"] < 0.3 < history[0]["loss"]
    assert history[-1]["score_margin"] > 1.0
    assert {"score_accuracy", "score_chosen", "score_rejected", "num_pairs", "grad_norm", "lr", "step_s"} <= set(history[0])


async def test_the_loss_is_that_of_bradley_and_terry_with_margins():
    pairs = tuple(replace(pair, margin=0.5 * i) for i, pair in enumerate(make_pairs(4)))
    backend = make_backend()
    chosen, rejected = await score_pairs(backend, pairs)
    expected = [math.log1p(math.exp(-(c - r - p.margin))) for c, r, p in zip(chosen.tolist(), rejected.tolist(), pairs, strict=True)]
    found = await evaluate_reward_model(backend, pairs)
    assert found["eval_loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)
    (line,) = await train_reward_model(backend, pairs, config(num_steps=1, batch_size=4))
    assert line["loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)


async def test_micro_batches_change_nothing():
    pairs, losses, weights = make_pairs(), [], []
    for limit in (16384, 30, 1):
        backend = make_backend()
        history = await train_reward_model(backend, pairs, config(num_steps=3, max_tokens_per_microbatch=limit))
        losses.append([line["loss"] for line in history])
        weights.append(backend.model.score.weight.detach().clone())
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-3, atol=1e-5)


async def test_what_was_trained_is_what_scores(tmp_path: Path):
    """The score that the loss compares is the one that a reward function gives."""
    pairs, backend = make_pairs(), make_backend()
    async with open_pipeline(backend) as pipeline:
        await train_reward_model(pipeline, pairs, config(), checkpoint_dir=tmp_path)
        chosen, rejected = await score_pairs(pipeline, pairs)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    model = RewardModel(load_reward_model(checkpoint))
    assert model.score_samples([pair.chosen for pair in pairs]) == pytest.approx(chosen.tolist(), abs=1e-5)
    assert model.score_samples([pair.rejected for pair in pairs]) == pytest.approx(rejected.tolist(), abs=1e-5)


async def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path):
    pairs = make_pairs()
    whole = make_backend()
    expected = await train_reward_model(whole, pairs, config(), heldout=pairs[:8])
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    calls: list[int] = []

    def stop_at_3() -> bool:
        calls.append(1)
        return len(calls) == 3

    first = await train_reward_model(make_backend(), pairs, config(), logger, checkpoint_dir=tmp_path / "c", should_stop=stop_at_3)
    checkpoint = latest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    state = read_run_state(checkpoint)
    assert (state.step, state.stage) == (3, "reward_model")
    resumed = make_backend(seed=1)
    await resumed.load_checkpoint(checkpoint).result()
    second = await train_reward_model(resumed, pairs, config(), logger, heldout=pairs[:8], start_step=3)
    assert without_times(first + second) == without_times(expected)
    assert torch.equal(resumed.model.score.weight, whole.model.score.weight)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


async def test_an_evaluation_that_is_given_up_is_made_by_the_resumed_run(tmp_path: Path):
    pairs, told, abandonment, given = make_pairs(), [], Abandonment(), config(num_steps=4, eval_every=2)
    abandonment.request(told.append)
    async with open_pipeline(make_backend()) as pipeline:
        history = await train_reward_model(pipeline, pairs, given, heldout=pairs[:8], checkpoint_dir=tmp_path, abandonment=abandonment)
        assert told == ["the evaluation of step 2"] and "eval_loss" not in history[-1]
        state = read_run_state(tmp_path / "step_0002")
        rest = await train_reward_model(pipeline, pairs, given, heldout=pairs[:8], start_step=2, unfinished=state.metrics)
    expected = await train_reward_model(make_backend(), pairs, given, heldout=pairs[:8])
    assert without_times([*history[:-1], *rest]) == without_times(expected)


def test_every_pair_is_seen_once_in_an_epoch():
    pairs = make_pairs(10)
    seen = [pair for step in range(5) for pair in select_pairs(pairs, step, 4, seed=3)]
    assert {id(pair) for pair in seen[:10]} == {id(pair) for pair in pairs}
    assert [id(pair) for pair in seen[10:]] != [id(pair) for pair in seen[:10]]


async def test_a_backend_that_gives_no_scores_and_no_pairs_are_refused():
    pairs = make_pairs(4)
    for backend in (create_critic_backend(create_tiny_model(), lr=1e-3), create_pytorch_backend(create_tiny_model(), lr=1e-3)):
        with pytest.raises(ConfigError, match=r"expected scores: make it with create_reward_model_backend"):
            await train_reward_model(backend, pairs, config())
    with pytest.raises(DataError, match="there are no pairs to train on"):
        await train_reward_model(make_backend(), (), config())
    with pytest.raises(AssertionError, match="no token of the rejected answer has loss_mask > 0"):
        PreferencePair(pairs[0].chosen, Sample(tokens=(3, 4), loss_mask=(0.0, 0.0)))
    with pytest.raises(ConfigError, match="batch_size"):
        config(batch_size=0)

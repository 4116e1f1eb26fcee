"""Pairs among rollouts in a step: what they are, that they stay whole, and that the update is the one of the loop of preferences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollouts.algorithms.preference_objectives import dpo, ipo, simpo
from rollouts.algorithms.preferences import measure_pairs, order_pairs
from rollouts.algorithms.presets import online_dpo
from rollouts.backends.factory import create_pytorch_backend, create_reference_backend
from rollouts.config import ParityConfig, PreferenceTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.preference_pairs import rank_rollouts
from rollouts.errors import ConfigError
from rollouts.preference_loop import PreferenceParts, train_preferences
from rollouts.testing import create_tiny_model
from rollouts.training.parity import correct
from rollouts.training.requirements import check_requirements
from rollouts.training.rollout_batch import UpdatePlan, deal_minibatches, train_on_rollouts
from rollouts.types import KeptTokens, Sample

REWARDS = (0.5, 2.0, -1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 3.0, 1.0, 0.0, -2.0, -1.0, -2.0, -3.0)  # the second of four groups is tied


def draw_samples(seed: int = 0, **changes: Any) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, reward in enumerate(REWARDS):
        n = int(torch.randint(4, 12, (1,), generator=generator))
        tokens = (7, 8, *torch.randint(3, 64, (n - 2,), generator=generator).tolist())
        mask = (0.0, 0.0, *(1.0,) * (n - 2))
        known = {"tokens": tokens, "loss_mask": mask, "rollout_log_probs": tuple(-4.0 * m for m in mask)}
        samples.append(Sample(**known, index=i, group_index=i // 4, reward=reward, **changes))
    return samples


async def take_step(
    samples: list[Sample], plan: UpdatePlan | None = None, algorithm: Any = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of a step, and the weights after it."""
    backend = create_pytorch_backend(create_tiny_model(seed=0), lr=1e-2, eps=1e-3)
    reference = create_reference_backend(create_tiny_model(seed=5))
    found = await train_on_rollouts(backend, collate_samples(samples), algorithm or online_dpo(beta=0.5), plan, reference=reference)
    return found, dict(await backend.get_weights().result())


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)


def test_the_best_of_a_group_is_paired_with_its_worst_as_by_rank_rollouts():
    samples = draw_samples()
    samples[9] = replace(samples[9], trainable=False)  # the best of its group, a baseline
    samples[15] = replace(samples[15], loss_mask=(0.0,) * len(samples[15].tokens))  # the worst, all of it masked
    batch = online_dpo().estimate(collate_samples(samples))
    assert order_pairs(batch) == [1, 2, 10, 8, 13, 12]
    assert [(pair.chosen.index, pair.rejected.index) for pair in rank_rollouts(samples)] == [(1, 2), (10, 8), (13, 12)]
    assert batch.trainable.tolist() == [row in order_pairs(batch) for row in range(16)]
    assert measure_pairs(batch) == {"num_pairs": 3.0, "num_ties": 1.0, "reward_gap": pytest.approx((3.0 + 1.0 + 1.0) / 3)}
    assert order_pairs(online_dpo(min_difference=2.0).estimate(collate_samples(samples))) == [1, 2]
    masked = [replace(one, loss_mask=(0.0,) * len(one.tokens)) if one.group_index == 1 else one for one in samples]
    assert measure_pairs(online_dpo().estimate(collate_samples(masked)))["num_ties"] == 0.0  # nothing of that group could be trained on


@pytest.mark.parametrize("objective", [dpo, ipo, simpo], ids=lambda f: f.__name__)
async def test_a_step_is_that_of_the_loop_of_preferences_on_the_same_pairs(objective: Any):
    """Whose ten steps are those of TRL's DPOTrainer (tests/loops/test_preferences_against_trl.py)."""
    samples = draw_samples()
    metrics, weights = await take_step(samples, algorithm=online_dpo(loss=objective, beta=0.5))
    backend = create_pytorch_backend(create_tiny_model(seed=0), lr=1e-2, eps=1e-3)
    parts = PreferenceParts(backend=backend, reference=create_reference_backend(create_tiny_model(seed=5)))
    pairs = rank_rollouts(samples)
    config = PreferenceTrainingConfig(num_steps=1, batch_size=len(pairs))
    (line,) = await train_preferences(parts, pairs, objective(beta=0.5), config)
    assert metrics["num_pairs"] == line["num_pairs"] == 3
    for name in ("loss", "grad_norm", "num_tokens", "reward_margin", "reward_accuracy", "log_prob_chosen"):
        assert metrics[name] == pytest.approx(line[name], rel=1e-5), name
    assert_same(weights, dict(await backend.get_weights().result()))


@pytest.mark.parametrize("plan", [UpdatePlan(max_tokens_per_microbatch=1), UpdatePlan(skip_redundant=False)], ids=["pairs apart", "whole"])
async def test_a_step_does_not_depend_on_how_its_pairs_are_split(plan: UpdatePlan):
    whole, weights = await take_step(draw_samples())
    split, found = await take_step(draw_samples(), plan)
    for name in ("loss", "grad_norm", "reward_margin", "num_tokens", "entropy"):
        assert split[name] == pytest.approx(whole[name], rel=1e-5), name
    assert_same(found, weights)


def test_minibatches_hold_whole_pairs_and_are_no_more_than_these():
    batch = online_dpo().estimate(collate_samples(draw_samples()))
    for count in (2, 3, 8):
        parts = deal_minibatches(batch, count, seed=count)
        assert len(parts) == min(count, 3)
        assert sum(part.num_rows for part in parts) == 16
        pairs = [sorted(pair for pair in part.pair_ids.tolist() if pair >= 0) for part in parts]
        assert all(part[0::2] == part[1::2] for part in pairs)
        assert sorted(pair for part in pairs for pair in part) == [0, 0, 2, 2, 3, 3]


async def test_ties_train_nothing_and_are_counted():
    samples = [replace(sample, reward=1.0) for sample in draw_samples()]
    estimated = []
    metrics, weights = await take_step(samples)
    assert {name: metrics[name] for name in ("num_pairs", "num_ties", "num_updates", "num_tokens")} == {
        "num_pairs": 0.0, "num_ties": 4.0, "num_updates": 0.0, "num_tokens": 0.0,
    }  # fmt: skip
    assert "update_skipped" not in metrics  # no number was bad
    assert_same(weights, dict(await create_pytorch_backend(create_tiny_model(seed=0), lr=1.0).get_weights().result()))
    backend, reference = create_pytorch_backend(create_tiny_model(), lr=1.0), create_reference_backend(create_tiny_model())
    await train_on_rollouts(backend, collate_samples(samples), online_dpo(), reference=reference, on_estimate=estimated.append)
    assert [batch.advantages.abs().sum() for batch in estimated] == [0.0]  # files of rollouts have these, too


async def test_likelihoods_are_those_of_whole_answers_whatever_they_were_drawn_from():
    def keep(sample: Sample) -> Sample:
        data = b"".join(token.to_bytes(4, "little") for token in sample.tokens[2:])
        kept = KeptTokens(data=data, counts=(-1, -1, *(1,) * (len(sample.tokens) - 2)))
        return replace(sample, truncated_sampling=True, kept_tokens=kept)

    samples = draw_samples()
    whole, _ = await take_step(samples)
    cut, _ = await take_step([keep(sample) for sample in samples])
    assert cut["loss"] == whole["loss"]
    assert cut["reward_margin"] == whole["reward_margin"]


def test_a_reference_is_needed_a_controller_is_not_and_an_engine_that_differs_changes_nothing():
    with pytest.raises(ConfigError, match=r"compares with a reference.*simpo or orpo"):
        check_requirements(online_dpo(), None)
    check_requirements(online_dpo(loss=simpo), None)
    reference = create_reference_backend(create_tiny_model())
    with pytest.raises(ConfigError, match=r"kl_control is set.*beta of its loss is the pull"):
        check_requirements(online_dpo(), reference, controls_kl=True)
    algorithm = online_dpo()
    assert correct(algorithm, ParityConfig()) is algorithm


async def test_an_estimate_and_the_flag_of_its_algorithm_agree():
    with pytest.raises(AssertionError, match=r"compares_pairs is False, but the estimate fills pair_ids"):
        await take_step(draw_samples(), algorithm=replace(online_dpo(), compares_pairs=False))

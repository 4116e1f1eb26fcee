"""Advantages by name: the values of verl's functions, naive loops, and the algorithm of each estimator."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from parity.mapping import revive
from samples import make_batch

from rollouts import k1, k2, k3
from rollouts.algorithms import apply_kl_penalty
from rollouts.algorithms.loss_weights import token_mean
from rollouts.trainer import TrainingConfig, compute_gae_advantage_return, compute_grpo_advantage, create_algorithm
from rollouts.trainer.config import Estimator
from rollouts.types import TokenOutputs, TrainBatch

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "advantages"


def read_cases(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text())["cases"]


def to_tensors(kwargs: dict[str, Any]) -> dict[str, Any]:
    columns = ("token_level_rewards", "values", "response_mask")
    return {k: torch.tensor(revive(v), dtype=torch.float64) if k in columns else v for k, v in kwargs.items()}


def assert_same(found: torch.Tensor, expected: Any, mask: torch.Tensor) -> None:
    expected = torch.tensor(revive(expected), dtype=torch.float64)
    torch.testing.assert_close(found[mask > 0], expected[mask > 0], rtol=1e-6, atol=1e-6)
    assert not found[mask <= 0].any()


@pytest.mark.parametrize("case", read_cases("verl_gae"), ids=lambda case: case["id"])
def test_gae_gives_the_numbers_of_verl(case: dict[str, Any]):
    kwargs = to_tensors(case["kwargs"])
    advantages, returns = compute_gae_advantage_return(**kwargs)
    assert_same(advantages, case["outputs"]["advantages"], kwargs["response_mask"])
    assert_same(returns, case["outputs"]["returns"], kwargs["response_mask"])


@pytest.mark.parametrize("case", read_cases("verl_grpo"), ids=lambda case: case["id"])
def test_grpo_gives_the_numbers_of_verl(case: dict[str, Any]):
    kwargs = to_tensors(case["kwargs"])
    advantages, returns = compute_grpo_advantage(**kwargs, keep_single=True)
    assert_same(advantages, case["outputs"]["advantages"], kwargs["response_mask"])
    assert torch.equal(advantages, returns)


def test_gae_is_the_double_sum_over_the_sampled_tokens():
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the tokens with mask 1: a tool's tokens in between count as no time."""
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(4, 9, generator=generator), torch.randn(4, 9, generator=generator)
    mask = (torch.rand(4, 9, generator=generator) > 0.4).float()
    mask[0] = 0
    gamma, lam = 0.9, 0.8
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam, normalize=False)
    for row in range(4):
        places = mask[row].nonzero().flatten().tolist()
        for k, place in enumerate(places):
            expected = 0.0
            for m, other in enumerate(places[k:]):
                after = values[row, places[k + m + 1]] if k + m + 1 < len(places) else 0.0
                expected += (gamma * lam) ** m * float(rewards[row, other] + gamma * after - values[row, other])
            assert float(advantages[row, place]) == pytest.approx(expected, abs=1e-5)
            assert float(returns[row, place]) == pytest.approx(expected + float(values[row, place]), abs=1e-5)
    assert not advantages[mask == 0].any()
    assert not returns[mask == 0].any()
    whitened, same_returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    assert float(whitened[mask > 0].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened[mask > 0].std()) == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(same_returns, returns)


def test_groups_are_found_by_their_names_in_any_order():
    rewards, mask = torch.zeros(6, 3), torch.ones(6, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 5.0, 3.0, 1.0, 9.0])
    mask[2, -1] = 0  # its reward counts nevertheless
    names = ["b", "a", "b", "a", "a", "lone"]
    found, _ = compute_grpo_advantage(rewards, mask, names)
    for row, name in enumerate(names):
        group = [float(rewards[i].sum()) for i, other in enumerate(names) if other == name]
        own = float(rewards[row].sum())
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / max(len(group) - 1, 1)) ** 0.5
        assert float(found[row, 0]) == pytest.approx((own - mean) / (std + 1e-6), abs=1e-5)
    assert torch.equal(found[2, -1], torch.zeros(()))
    numbers, _ = compute_grpo_advantage(rewards, mask, torch.tensor([4, 1, 4, 1, 1, 0]))
    assert torch.equal(numbers, found)
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        rows = torch.tensor(order)
        again, _ = compute_grpo_advantage(rewards[rows], mask[rows], [names[i] for i in order])
        torch.testing.assert_close(again, found[rows])
    centered, _ = compute_grpo_advantage(rewards, mask, names, norm_adv_by_std_in_grpo=False)
    assert float(centered[1, 0]) == pytest.approx(0.0 - 4 / 3, abs=1e-6)


def test_the_kl_penalty_is_k1_unless_another_is_chosen():
    rewards, log_probs, ref, mask = torch.zeros(1, 3), torch.tensor([[-1.0, -2.0, -3.0]]), torch.full((1, 3), -2.0), torch.ones(1, 3)
    penalised, kl = apply_kl_penalty(rewards, log_probs, ref, mask, 0.5)
    assert penalised.tolist() == [[-0.5, 0.0, 0.5]]
    assert float(kl) == 0.0
    for other in (k1, k2, k3):
        found, mean = apply_kl_penalty(rewards, log_probs, ref, mask, 0.5, other)
        torch.testing.assert_close(found, -0.5 * other(log_probs, ref))
        torch.testing.assert_close(mean, other(log_probs, ref).mean())


# -- the algorithm of a configuration


def fill(batch: TrainBatch) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    shape = tuple(batch.tokens.shape)
    columns = {name: -torch.rand(shape, generator=generator) for name in ("rollout_log_probs", "ref_log_probs")}
    return replace(batch, **columns, values=torch.rand(shape, generator=generator))


def make_rows() -> TrainBatch:
    """Two groups of three rows, the last one of each not trained on."""
    mask = torch.tensor([[0.0, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]] * 2)
    batch = fill(make_batch(mask))
    trainable = torch.tensor([True, True, False] * 2)
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.0])
    return replace(batch, rewards=rewards, group_ids=torch.tensor([0, 0, 0, 1, 1, 1]), trainable=trainable)


@pytest.mark.parametrize("name", get_args(Estimator))
def test_every_estimator_gives_an_algorithm_that_trains(name: Estimator):
    batch = make_rows()
    algorithm = create_algorithm(TrainingConfig(adv_estimator=name))
    batch = algorithm.estimate(batch)
    assert batch.advantages is not None and batch.advantages.abs().sum() > 0
    batch = replace(batch, loss_weights=algorithm.weigh(batch))
    assert torch.equal(batch.loss_weights, token_mean(batch))
    assert batch.rollout_log_probs is not None
    log_probs = (batch.rollout_log_probs + 0.1).requires_grad_()
    algorithm.loss(TokenOutputs(log_probs=log_probs), batch).loss.backward()
    assert log_probs.grad is not None and log_probs.grad.abs().sum() > 0
    assert ("values" in algorithm.requires) == (name == "gae")
    assert ("greedy_rows" in algorithm.requires) == (name == "remax")
    assert {"ref_log_probs", "entropy"}.isdisjoint(algorithm.requires)


def test_the_estimator_of_gae_is_the_function_of_that_name():
    batch = make_rows()
    batch = replace(batch, trainable=torch.ones(6, dtype=torch.bool))
    found = create_algorithm(TrainingConfig(gamma=0.7, lam=0.6)).estimate(batch)
    rewards = torch.zeros_like(batch.loss_mask)
    for row in range(6):
        rewards[row, int(batch.loss_mask[row].nonzero()[-1])] = batch.rewards[row]
    assert batch.values is not None
    advantages, returns = compute_gae_advantage_return(rewards, batch.values, batch.loss_mask, 0.7, 0.6)
    torch.testing.assert_close(found.advantages, advantages)
    torch.testing.assert_close(found.returns, returns)


@pytest.mark.parametrize("name", ["gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "opo"])
def test_a_kl_penalty_lowers_the_rewards_of_every_estimator(name: Estimator):
    batch = make_rows()
    plain = create_algorithm(TrainingConfig(adv_estimator=name)).estimate(batch)
    algorithm = create_algorithm(TrainingConfig(adv_estimator=name, use_kl_in_reward=True, kl_coef=0.5))
    assert "ref_log_probs" in algorithm.requires
    penalised = algorithm.estimate(batch)
    assert penalised.advantages is not None and not torch.allclose(penalised.advantages, plain.advantages)
    assert torch.equal(batch.rewards, make_rows().rewards)
    if name in ("gae", "reinforce_plus_plus"):  # by token
        return
    assert batch.rollout_log_probs is not None and batch.ref_log_probs is not None
    lower = 0.5 * ((batch.rollout_log_probs - batch.ref_log_probs) * (batch.loss_mask > 0)).sum(1)
    by_hand = create_algorithm(TrainingConfig(adv_estimator=name)).estimate(replace(batch, rewards=batch.rewards - lower))
    torch.testing.assert_close(penalised.advantages, by_hand.advantages)


def test_clip_ratio_entropy_and_the_kl_term_are_those_of_the_loss():
    batch = make_rows()

    def gradient(config: TrainingConfig) -> torch.Tensor:
        algorithm = create_algorithm(config)
        filled = algorithm.estimate(batch)
        filled = replace(filled, loss_weights=algorithm.weigh(filled))
        assert batch.rollout_log_probs is not None
        log_probs = (batch.rollout_log_probs + 0.3).requires_grad_()
        outputs = TokenOutputs(log_probs=log_probs, entropy=-log_probs if "entropy" in algorithm.requires else None)
        algorithm.loss(outputs, filled).loss.backward()
        assert log_probs.grad is not None
        return log_probs.grad

    narrow, wide = gradient(TrainingConfig(clip_ratio=0.2)), gradient(TrainingConfig(clip_ratio=0.5))
    assert (narrow == 0).sum() > (wide == 0).sum()  # a ratio of e^0.3 = 1.35 is clipped at 1.2 where the advantage is positive
    on = (batch.loss_mask > 0) & batch.trainable[:, None]
    bonus = gradient(TrainingConfig(entropy_coef=0.1)) - narrow
    torch.testing.assert_close(bonus[on], torch.full_like(bonus[on], 0.1 / int(on.sum())))  # the loss has -0.1 * mean(-log p)
    assert not torch.allclose(gradient(TrainingConfig(kl_loss_coef=0.1)), narrow)


def test_own_log_probs_replace_those_of_the_engine():
    algorithm = create_algorithm(TrainingConfig(), own_log_probs=True)
    assert {"old_log_probs"} == algorithm.loss_only
    assert "old_log_probs" in algorithm.requires and "rollout_log_probs" not in algorithm.requires
    penalised = create_algorithm(TrainingConfig(use_kl_in_reward=True), own_log_probs=True)
    assert not penalised.loss_only  # the penalty reads them before the update

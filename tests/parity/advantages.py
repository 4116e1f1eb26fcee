"""advantages: our compositions for the vectors of this group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from parity.mapping import Parity, group_numbers, pad_rows
from torch import Tensor

from rollouts import advantages as adv
from rollouts import kl as kls
from rollouts import statistics as stats

KL = {"k1": kls.k1, "k2": kls.k2, "k3": kls.k3}


# -- verl


def row_rewards(token_level_rewards: Tensor) -> Tensor:
    return adv.sum_token_rewards(token_level_rewards)


def along(row: Tensor, mask: Tensor) -> Tensor:
    """One value a row on every masked-in token."""
    return torch.where(mask > 0, row[:, None], torch.zeros_like(row)[:, None])


def verl_grpo(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(rewards, group_numbers(index), std_level=std_level, epsilon=epsilon, singleton="keep")
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_passk(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    found = adv.pass_at_k_advantages(row_rewards(token_level_rewards), group_numbers(index), std_level=std_level, epsilon=epsilon)
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_rloo(token_level_rewards, response_mask, index, *, singleton):
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(
        rewards, group_numbers(index), mean_level=stats.leave_one_out_mean, std_level=None, singleton=singleton
    )
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def verl_opo(token_level_rewards, response_mask, index):
    rewards = row_rewards(token_level_rewards)
    baseline = adv.length_weighted_mean(rewards, stats.count_tokens(response_mask), group_numbers(index), singleton="keep")
    found = along(adv.compute_advantages(rewards, baseline), response_mask)
    return {"advantages": found, "returns": found}


def verl_gpg(token_level_rewards, response_mask, index, f_norm):
    found = adv.gpg_advantages(row_rewards(token_level_rewards), group_numbers(index), valid="nonzero", f_norm=f_norm, singleton="keep")
    return {"advantages": along(found, response_mask), "returns": along(found, response_mask)}


def whiten(x: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return stats.whiten(x, mask, count_epsilon=1e-8, **options)


def verl_gdpo_single(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo):
    std_level = stats.group_std if norm_adv_by_std_in_grpo else None
    rewards = row_rewards(token_level_rewards)
    found = adv.gdpo_advantages(rewards[:, None], group_numbers(index), std_level=std_level, epsilon=1e-6, singleton="keep")
    whitened = whiten(along(found, response_mask), response_mask)
    return {"advantages": whitened, "returns": whitened}


def verl_gdpo_multi(rewards, reward_weights, response_mask, index):
    weights = None if reward_weights is None else torch.tensor(reward_weights, dtype=torch.float64)
    found = adv.gdpo_advantages(rewards, group_numbers(index), weights, epsilon=1e-6, singleton="keep")
    return {"advantages": whiten(along(found, response_mask), response_mask)}


def verl_reinforce_plus_plus(token_level_rewards, response_mask, gamma):
    returns = adv.discounted_returns(token_level_rewards, response_mask, gamma)
    return {"returns": returns, "advantages": whiten(returns, response_mask)}


def verl_reinforce_plus_plus_baseline(token_level_rewards, response_mask, index):
    rewards = row_rewards(token_level_rewards)
    found = adv.normalize_by_group(rewards, group_numbers(index), std_level=None, singleton="keep")
    whitened = whiten(along(found, response_mask), response_mask)
    return {"advantages": whitened, "returns": whitened}


def verl_remax(token_level_rewards, reward_baselines, response_mask):
    returns = adv.discounted_returns(token_level_rewards, response_mask)
    return {"returns": returns, "advantages": adv.compute_advantages(returns, reward_baselines[:, None])}


def verl_gae(token_level_rewards, values, response_mask, gamma, lam):
    advantages = adv.gae(token_level_rewards, values, response_mask, gamma, lam)
    returns = adv.lambda_returns(token_level_rewards, values, response_mask, gamma, lam)
    return {"advantages": whiten(advantages, response_mask), "returns": returns}


def verl_masked_whiten(values, mask, shift_mean):
    return {
        "whitened": whiten(values, mask, shift_mean=shift_mean),
        "mean": stats.masked_mean(values, mask, epsilon=1e-8),
        "var": stats.masked_var(values, mask, epsilon=1e-8),
        "var_biased": stats.masked_var(values, mask, unbiased=False, epsilon=1e-8),
    }


def verl_optimal_token_baseline(
    token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights, handle_zero_tail, *, compact
):
    returns = adv.discounted_returns(token_level_rewards, response_mask)
    scores = adv.squared_scores(old_log_probs, sum_pi_squared, rollout_is_weights)
    baseline = adv.optimal_token_baseline(
        returns, scores, response_mask, group_numbers(index), compact=compact, keep_tail=handle_zero_tail, singleton="keep"
    )
    return {"returns": returns, "advantages": adv.compute_advantages(returns, baseline)}


VERL = {
    "verl_grpo": Parity(run=verl_grpo, ours="advantages.normalize_by_group(singleton='keep')", mask="response_mask"),
    "verl_grpo_vectorized": Parity(run=verl_grpo, ours="advantages.normalize_by_group(singleton='keep')", mask="response_mask"),
    "verl_grpo_passk": Parity(run=verl_passk, ours="advantages.pass_at_k_advantages", mask="response_mask"),
    "verl_rloo": Parity(
        run=partial(verl_rloo, singleton="keep"), ours="advantages.normalize_by_group(mean_level=leave_one_out_mean)", mask="response_mask"
    ),
    "verl_rloo_vectorized": Parity(
        run=partial(verl_rloo, singleton="zero"), ours="advantages.normalize_by_group(mean_level=leave_one_out_mean)", mask="response_mask"
    ),
    "verl_opo": Parity(run=verl_opo, ours="advantages.length_weighted_mean", mask="response_mask"),
    "verl_gpg": Parity(run=verl_gpg, ours="advantages.gpg_advantages(valid='nonzero')", mask="response_mask"),
    "verl_gdpo_single": Parity(run=verl_gdpo_single, ours="advantages.gdpo_advantages, statistics.whiten", mask="response_mask"),
    "verl_gdpo_multi": Parity(run=verl_gdpo_multi, ours="advantages.gdpo_advantages, statistics.whiten", mask="response_mask"),
    "verl_reinforce_plus_plus": Parity(
        run=verl_reinforce_plus_plus, ours="advantages.discounted_returns, statistics.whiten", mask="response_mask"
    ),
    "verl_reinforce_plus_plus_baseline": Parity(
        run=verl_reinforce_plus_plus_baseline, ours="advantages.normalize_by_group(std_level=None), statistics.whiten", mask="response_mask"
    ),
    "verl_remax": Parity(run=verl_remax, ours="advantages.discounted_returns, compute_advantages", mask="response_mask"),
    "verl_gae": Parity(run=verl_gae, ours="advantages.gae, lambda_returns, statistics.whiten", mask="response_mask"),
    "verl_masked_whiten": Parity(run=verl_masked_whiten, ours="statistics.whiten, masked_mean, masked_var", mask="mask"),
    "verl_optimal_token_baseline": Parity(
        run=partial(verl_optimal_token_baseline, compact=False),
        ours="advantages.optimal_token_baseline(compact=False)",
        mask="response_mask",
    ),
    "verl_tir_optimal_token_baseline": Parity(
        run=partial(verl_optimal_token_baseline, compact=True), ours="advantages.optimal_token_baseline", mask="response_mask"
    ),
}

MAPPINGS: dict[str, Parity] = {**VERL}
NOT_OFFERED: dict[str, str] = {}

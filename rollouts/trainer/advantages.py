"""Advantages by name: the algorithm of a TrainingConfig, and two estimators as functions of token rewards.

All tensors are [B, T] and aligned with each other; the mask is 1 on the tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rollouts.algorithms.advantages import apply_kl_penalty, gae, normalize_by_group, sum_token_rewards
from rollouts.algorithms.estimators import policy_log_probs
from rollouts.algorithms.kl import k1, k3
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import clipped_policy_loss
from rollouts.algorithms.preset_parts import BOUNDED_RATIO, fill_terms, find_required
from rollouts.algorithms.presets import (
    chain,
    dapo,
    dr_grpo,
    gpg,
    opo,
    pass_at_k,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from rollouts.algorithms.statistics import group_std, whiten
from rollouts.checks import check_shapes
from rollouts.trainer.config import TrainingConfig
from rollouts.types import Algorithm, TrainBatch


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the sampled tokens; tokens with mask 0, such as a tool's, are stepped over.

    Args:
        token_level_rewards, values, response_mask: # [B, T]; values[:, t] is the value of the state that token t was chosen in.
        gamma, lam: in [0, 1].
        normalize: whiten the advantages over all sampled tokens, as verl does; False = the plain advantages.

    Returns: advantages and returns (plain advantage + value), each # [B, T], 0 where the mask is 0.
    Source: Schulman et al. 2016, equation 16; verl's function of this name.
    """
    shape = tuple(response_mask.shape)
    check_shapes(token_level_rewards=(token_level_rewards, shape), values=(values, shape))
    advantages = gae(token_level_rewards, values, response_mask, gamma, lam)
    returns = torch.where(response_mask > 0, advantages + values, torch.zeros_like(values))
    return (whiten(advantages, response_mask.to(advantages.dtype)) if normalize else advantages), returns


def compute_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable] | Tensor,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    *,
    keep_single: bool = False,
) -> tuple[Tensor, Tensor]:
    """A = (r - mean of the group) / (std of the group + epsilon), r the sum of a row's token rewards, on every sampled token of the row.

    Args:
        token_level_rewards, response_mask: # [B, T]; rewards count at every place, masked or not, as in verl.
        index: name of each row's prompt, in any order: rows with equal names are a group; or # [B] numbers.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False = do not divide (Dr. GRPO).
        keep_single: the advantage of a row alone in its group is its reward, as in verl; False = 0, as it has nothing to compare with.

    Returns: advantages, twice as verl does (there is no other return): # [B, T], 0 where the mask is 0.
    Source: Shao et al. 2024 (DeepSeekMath); verl's compute_grpo_outcome_advantage.
    """
    names: Sequence[Hashable] = index.tolist() if isinstance(index, Tensor) else list(index)
    check_shapes(token_level_rewards=(token_level_rewards, tuple(response_mask.shape)))
    assert len(names) == response_mask.shape[0], f"index has {len(names)} names for {response_mask.shape[0]} rows"
    numbers: dict[Hashable, int] = {}
    groups = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    rewards = sum_token_rewards(token_level_rewards)
    std_level = group_std if norm_adv_by_std_in_grpo else None
    row = normalize_by_group(rewards, groups, std_level=std_level, epsilon=epsilon, keep_single=keep_single)
    advantages = torch.where(response_mask > 0, row[:, None], torch.zeros_like(row)[:, None])
    return advantages, advantages


def create_algorithm(config: TrainingConfig, *, own_log_probs: bool = False) -> Algorithm:
    """Create the algorithm of a TrainingConfig: the named advantages under PPO's clipped loss, mean over tokens, as verl composes them.

    Args:
        own_log_probs: the ratio is to the trainer's log-probs of the policy before the update, not to the engine's.
    """
    kl_coef = config.kl_coef if config.use_kl_in_reward else 0.0
    algorithm = _find_advantages(config, kl_coef)
    if kl_coef > 0 and config.adv_estimator not in ("gae", "reinforce_plus_plus"):  # their estimators have it for each token
        algorithm = replace(algorithm, estimate=chain(partial(penalize_by_kl, kl_coef=kl_coef), algorithm.estimate))
    loss = partial(
        clipped_policy_loss,
        low=config.clip_ratio,
        high=config.clip_ratio,
        ratio=BOUNDED_RATIO,
        **fill_terms(config.kl_loss_coef, config.entropy_coef, k3),
    )
    requires = algorithm.requires | find_required(max(kl_coef, config.kl_loss_coef), config.entropy_coef)
    algorithm = replace(algorithm, weigh=token_mean, loss=loss, requires=requires)
    if not own_log_probs:
        return algorithm
    read_by_estimate = kl_coef > 0  # all estimators above read rewards and values only, and log-probs for the penalty
    own = {"old_log_probs"}
    return replace(
        algorithm, requires=requires - {"rollout_log_probs"} | own, loss_only=frozenset() if read_by_estimate else frozenset(own)
    )


def penalize_by_kl(batch: TrainBatch, *, kl_coef: float) -> TrainBatch:
    """Return the batch with r - kl_coef * sum over the row's tokens of k1(policy || reference) as rewards, for estimators of rows."""
    assert batch.ref_log_probs is not None, "a KL penalty needs ref_log_probs: name it in Algorithm.requires"
    rewards, _ = apply_kl_penalty(batch.rewards, policy_log_probs(batch), batch.ref_log_probs, batch.loss_mask, kl_coef, k1)
    return replace(batch, rewards=rewards)


def _find_advantages(config: TrainingConfig, kl_coef: float) -> Algorithm:
    """Return the preset whose estimate is the one that config.adv_estimator names."""
    match config.adv_estimator:
        case "gae":
            return ppo(gamma=config.gamma, lam=config.lam, kl_coef=kl_coef)
        case "reinforce_plus_plus":
            return reinforce_plus_plus(kl_coef=kl_coef, gamma=config.gamma)
        case "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline()
        case "grpo":
            return dapo()  # group mean and standard deviation, mean over tokens
        case "dr_grpo":
            return dr_grpo(max_tokens=1)  # its constant length belongs to the weights, which are replaced
        case "grpo_passk":
            return pass_at_k()
        case "rloo":
            return rloo()
        case "remax":
            return remax()
        case "opo":
            return opo()
        case "gpg":
            return gpg()

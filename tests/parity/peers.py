"""Parts that other frameworks have and that no preset, page or option of this library needs: the tables of parity compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rollouts.algorithms.advantages import gae
from rollouts.algorithms.loss_weights import token_mean, trained_mask
from rollouts.types import TrainBatch


def lambda_returns(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    *,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """G_t = r_t + gamma_t * ((1 - lam_t) * V_{t+1} + lam_t * G_{t+1}) over the masked-in tokens: gae + values.

    Arguments as of gae. Returns # [B, T], 0 where mask = 0.

    Source: Sutton and Barto 2018, section 12.1, in recursive form.
    """
    advantages = gae(token_rewards, values, mask, gamma, lam, bootstrap=bootstrap)
    return torch.where(mask > 0, advantages + values, torch.zeros_like(values))


def normalize_weights(batch: TrainBatch, *, weigh: Callable[[TrainBatch], Tensor] = token_mean) -> TrainBatch:
    """importance_weights / mean(importance_weights), the mean under the given aggregation: self-normalized importance sampling.

    A batch statistic: for `estimate` only. Weights whose mean is 0 stay as they are.

    Args:
        batch: importance_weights filled, by a transform before this one.
        weigh: token_mean for weights of tokens, sample_mean for weights of rows.
    """
    weights = batch.importance_weights
    assert weights is not None, "normalize_weights needs batch.importance_weights: it follows a transform that fills them"
    shares = weigh(batch)
    mean = torch.where(shares > 0, shares * weights, torch.zeros_like(weights)).sum()
    return replace(batch, importance_weights=torch.where(mean > 0, weights / torch.where(mean > 0, mean, torch.ones_like(mean)), weights))


def fill_missing_log_probs(batch: TrainBatch) -> TrainBatch:
    """rollout_log_probs with old_log_probs where they are NaN (an engine that did not report one): those tokens get weight 1."""
    assert batch.old_log_probs is not None, "fill_missing_log_probs needs batch.old_log_probs"
    assert batch.rollout_log_probs is not None, "fill_missing_log_probs needs batch.rollout_log_probs"
    rollout = batch.rollout_log_probs
    return replace(batch, rollout_log_probs=torch.where(rollout.isnan(), batch.old_log_probs, rollout))


def token_sum(batch: TrainBatch) -> Tensor:
    """1 for every trained token (its mask, where that is a fraction)."""
    return trained_mask(batch)


def inside_tv_lower(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, width: float) -> Tensor:
    """Tokens with p - p_old >= -width, whatever the advantage: those that have not yet become much rarer. Returns # [B, T] bool."""
    moved = log_probs.detach().exp() - (log_probs - log_ratio).detach().exp()
    return moved >= -width

"""Tokens whose log-prob and advantage vary together, at which an update costs the most entropy (Cui et al. 2025, "The entropy mechanism
of reinforcement learning for reasoning language models").

    cov_t = (A_t - mean A) * (log p_t - mean log p)        means over all tokens of the step

A large covariance is a probable token with a positive advantage (or an improbable one with a negative advantage): learning it lowers the
policy's entropy. Clip-Cov takes a few of them out of the loss; KL-Cov holds the top ones back with a KL term (losses.kl_cov_policy_loss).

Both are statistics over the step, so they belong in `estimate`, with all rows. Tokens are chosen once, under the policy before the
update; the choice cannot depend on how the step is split into micro-batches. (verl chooses in each micro-batch, under the current
policy; the functions on tensors allow this, too.)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollouts.algorithms.loss_weights import trained_mask
from rollouts.checks import check_shapes
from rollouts.types import TrainBatch


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A) * (log p - mean log p), the means over tokens with mask > 0: each token's share of the covariance.

    Args:
        log_probs, advantages, mask: # [B, T].

    Returns: # [B, T] without gradient; 0 where mask = 0.
    Source: Cui et al. 2025.
    """
    check_shapes(advantages=(advantages, tuple(log_probs.shape)), mask=(mask, tuple(log_probs.shape)))
    on = mask > 0
    count = on.sum().clamp(min=1)

    def centered(x: Tensor) -> Tensor:
        kept = torch.where(on, x.detach(), torch.zeros_like(x))
        return kept - kept.sum() / count

    return torch.where(on, centered(advantages) * centered(log_probs), 0.0)


def clip_cov_tokens(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clipped: Tensor | None = None,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """max(1, int(fraction * tokens)) of the tokens with cov_low < covariance < cov_high that the clip has not already taken out.

    Args:
        log_probs, advantages, mask: # [B, T].
        clipped: # [B, T] bool, tokens that the loss clips (surrogates.clip_fractions); None = none, as before the update.
        fraction: share of the tokens with mask > 0, in [0, 1].
        cov_low, cov_high: bounds of the candidates' covariances (the paper's are many times the mean covariance).
        generator: draws among the candidates; None takes the first in row-major order.

    Returns: # [B, T] bool; all False for a batch without candidates.
    Source: Cui et al. 2025 (Clip-Cov).
    """
    assert 0 <= fraction <= 1, f"fraction is {fraction}, expected in [0, 1]"
    assert cov_low < cov_high, f"cov_low is {cov_low}, expected less than cov_high ({cov_high})"
    on = mask > 0
    covariances = token_covariances(log_probs, advantages, mask)
    free = on if clipped is None else on & ~clipped
    candidates = (free & (covariances > cov_low) & (covariances < cov_high)).flatten().nonzero()[:, 0]
    number = min(max(int(fraction * int(on.sum())), 1), candidates.numel())
    if generator is not None:
        candidates = candidates[torch.randperm(candidates.numel(), generator=generator).to(candidates.device)]
    return _at(candidates[:number], on)


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, fraction: float = 2e-4) -> Tensor:
    """The max(1, int(fraction * tokens)) tokens of largest covariance.

    Args:
        log_probs, advantages, mask: # [B, T].
        fraction: share of the tokens with mask > 0, in [0, 1]; 0 selects none.

    Returns: # [B, T] bool; without tokens of covariance 0, which are all tokens if no advantage differs.
    Source: Cui et al. 2025 (KL-Cov).
    """
    assert 0 <= fraction <= 1, f"fraction is {fraction}, expected in [0, 1]"
    on = mask > 0
    total = int(on.sum())
    number = 0 if fraction == 0 else min(max(int(fraction * total), 1), total)
    covariances = torch.where(on, token_covariances(log_probs, advantages, mask), -torch.inf)
    found = covariances.flatten().topk(number)
    return _at(found.indices[found.values != 0], on)


def drop_tokens(batch: TrainBatch, tokens: Tensor) -> TrainBatch:
    """Return the batch with importance weight 0 at `tokens` # [B, T] bool: no policy loss there, unchanged denominators."""
    check_shapes(tokens=(tokens, tuple(batch.loss_mask.shape)))
    weights = torch.ones_like(batch.loss_mask) if batch.importance_weights is None else batch.importance_weights
    return replace(batch, importance_weights=torch.where(tokens, 0.0, weights))


def drop_clip_cov(
    batch: TrainBatch,
    *,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int | None = 0,
) -> TrainBatch:
    """Clip-Cov as a step of `estimate`: clip_cov_tokens get importance weight 0. Before the update every ratio is 1, so none is clipped.

    Args:
        batch: advantages filled; old_log_probs, else rollout_log_probs.
        fraction, cov_low, cov_high: as in clip_cov_tokens.
        seed: seed of the draw among the candidates, the same at every step; None takes the first in row-major order.
    """
    log_probs, advantages = _columns(batch, "drop_clip_cov")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    selected = clip_cov_tokens(
        log_probs,
        advantages,
        trained_mask(batch),
        fraction=fraction,
        cov_low=cov_low,
        cov_high=cov_high,
        generator=generator,
    )
    return drop_tokens(batch, selected)


def select_kl_cov(batch: TrainBatch, *, fraction: float = 2e-4) -> TrainBatch:
    """KL-Cov as a step of `estimate`: kl_cov_tokens are batch.selected, which losses.kl_cov_policy_loss holds back.

    Args:
        batch: advantages filled; old_log_probs, else rollout_log_probs.
        fraction: as in kl_cov_tokens.
    """
    log_probs, advantages = _columns(batch, "select_kl_cov")
    return replace(batch, selected=kl_cov_tokens(log_probs, advantages, trained_mask(batch), fraction=fraction))


def _columns(batch: TrainBatch, name: str) -> tuple[Tensor, Tensor]:
    log_probs = batch.old_log_probs if batch.old_log_probs is not None else batch.rollout_log_probs
    assert log_probs is not None, f"{name} needs batch.old_log_probs or batch.rollout_log_probs"
    assert batch.advantages is not None, f"{name} needs batch.advantages: append it to the algorithm's estimate"
    return log_probs, batch.advantages


def _at(places: Tensor, like: Tensor) -> Tensor:
    """Return True at flat places: # [B, T] bool in the shape of `like`."""
    selected = torch.zeros_like(like).flatten()
    selected[places] = True
    return selected.reshape(like.shape)

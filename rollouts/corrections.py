"""Corrections for tokens that another policy sampled: TrainBatch -> TrainBatch.

    d_t = log p(y_t) - log p_rollout(y_t)        p = the proximal policy, or the trainer's policy before the update
    w   = bound(exp(level(d)))                   multiplies the policy term of the loss; not its KL term, not its denominator

`level` turns the log-ratios of tokens into those of rows (token_level, sequence_level, ...); the bound clamps a weight or drops its token.
Every transform looks at one row at a time and multiplies into importance_weights, so they chain, and they work in `estimate` as well
as inside the loss (losses.corrected_loss). Weights carry no gradient. Bounds are on p / p_rollout.

A token that is dropped has weight 0 and still counts in the loss's denominator: dropping tokens must not make the others louder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.checks import check_shapes
from rollouts.types import TrainBatch

Level: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(x, mask), each [B, T] and x = 0 where mask = 0 -> [B, T]."""

Bound: TypeAlias = Callable[..., Tensor]
"""f(weights [B, T], *, floor, cap) -> weights [B, T]."""


# -- levels


def token_level(x: Tensor, mask: Tensor) -> Tensor:
    """Each token's own x. All # [B, T]."""
    return x


def sequence_level(x: Tensor, mask: Tensor) -> Tensor:
    """The sum over the row, at each of its places: of log-ratios, the ratio of whole sequences. All # [B, T]."""
    return x.sum(1, keepdim=True).expand_as(x)


def geometric_level(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over the row's tokens with mask > 0, at each place: of log-ratios, the geometric mean of ratios. 0 for an empty row."""
    return (x.sum(1, keepdim=True) / (mask > 0).sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def max_level(x: Tensor, mask: Tensor) -> Tensor:
    """The largest x among the row's tokens with mask > 0, at each place. 0 for an empty row."""
    largest = torch.where(mask > 0, x, -torch.inf).amax(1, keepdim=True)
    return torch.where((mask > 0).any(1, keepdim=True), largest, torch.zeros_like(largest)).expand_as(x)


# -- bounds


def clamp_weights(weights: Tensor, *, floor: float | None = None, cap: float | None = None) -> Tensor:
    """min(max(w, floor), cap): a weight beyond the cap still counts, as the cap (truncated importance sampling). None = no bound."""
    if floor is not None:
        weights = weights.clamp(min=floor)
    return weights if cap is None else weights.clamp(max=cap)


def drop_outside(weights: Tensor, *, floor: float | None = None, cap: float | None = None) -> Tensor:
    """w inside [floor, cap], else 0 (masked importance sampling, IcePop). None = no bound."""
    keep = torch.ones_like(weights, dtype=torch.bool)
    if floor is not None:
        keep = keep & (weights >= floor)
    if cap is not None:
        keep = keep & (weights <= cap)
    return torch.where(keep, weights, torch.zeros_like(weights))


# -- weights


def importance_weights(
    log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor, *, level: Level = token_level, log_bound: float | None = 20.0
) -> Tensor:
    """exp(clamp(level(log p - log p_behavior), -log_bound, log_bound)), without gradient.

    Args:
        log_probs, behavior_log_probs, mask: # [B, T]; what stands where mask = 0 is not read.
        log_bound: keeps exp finite; None = no clamp.

    Returns: # [B, T]. Where mask = 0: the row's weight, or 1 at token level; no loss reads it.
    """
    check_shapes(behavior_log_probs=(behavior_log_probs, tuple(log_probs.shape)), mask=(mask, tuple(log_probs.shape)))
    log_ratio = torch.where(mask > 0, (log_probs - behavior_log_probs).detach(), torch.zeros_like(log_probs))
    log_weights = level(log_ratio, mask)
    return (log_weights if log_bound is None else log_weights.clamp(-log_bound, log_bound)).exp()


# -- transforms


def anchor_to_proximal(
    batch: TrainBatch,
    *,
    cap: float | None = 5.0,
    floor: float | None = None,
    level: Level = token_level,
    drop: bool = True,
    segment_wise: bool = False,
    log_bound: float | None = 20.0,
) -> TrainBatch:
    """Decoupled objectives: the ratio is taken against the proximal policy, the weight is proximal / rollout.

    old_log_probs = prox_log_probs; importance_weights *= bound(exp(level(prox_log_probs - rollout_log_probs)))

    Args:
        batch: prox_log_probs and rollout_log_probs filled; segment_log_probs too where segment_wise.
        cap, floor: of the weight; None = no bound. Tokens beyond them are dropped, as AReaL's behav_imp_weight_cap does.
        level: token_level as in the paper; geometric_level for AReaL's sequence modes.
        drop: False = clamp the weight instead.
        segment_wise: the weight uses segment_log_probs, whose proximal policy is one version after the one that sampled the token, so it
            stays near 1 for rows that several versions wrote; the ratio still uses prox_log_probs.
        log_bound: of the log-weight before exp.

    Source: Hilton et al. 2022 (Batch size-invariance for policy optimization), equation 4; Fu et al. 2025 (AReaL), equation 5.
    """
    prox, rollout = batch.prox_log_probs, batch.rollout_log_probs
    assert prox is not None, "anchor_to_proximal needs batch.prox_log_probs"
    assert rollout is not None, "anchor_to_proximal needs batch.rollout_log_probs"
    assert not segment_wise or batch.segment_log_probs is not None, "anchor_to_proximal with segment_wise needs batch.segment_log_probs"
    target = batch.segment_log_probs if segment_wise and batch.segment_log_probs is not None else prox
    weights = importance_weights(target, rollout, batch.loss_mask, level=level, log_bound=log_bound)
    bound = drop_outside if drop else clamp_weights
    return replace(_multiplied(batch, bound(weights, floor=floor, cap=cap)), old_log_probs=prox.detach())


def truncate_weights(
    batch: TrainBatch,
    *,
    cap: float | None = 2.0,
    floor: float | None = None,
    level: Level = token_level,
    log_bound: float | None = 20.0,
) -> TrainBatch:
    """Truncated importance sampling: importance_weights *= clamp(exp(level(old_log_probs - rollout_log_probs)), floor, cap).

    Corrects for an engine whose numbers differ from the trainer's; the ratio stays against old_log_probs.

    Args:
        batch: old_log_probs (the trainer's, before the update) and rollout_log_probs filled.
        cap, floor: of the weight; None = no bound.
        level: token_level, sequence_level (product of ratios) or geometric_level.
        log_bound: of the log-weight before exp.

    Source: Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL training), TIS; verl's rollout correction.
    """
    return _multiplied(batch, clamp_weights(_trainer_weights(batch, level, log_bound), floor=floor, cap=cap))


def mask_weights(
    batch: TrainBatch,
    *,
    cap: float | None = 2.0,
    floor: float | None = None,
    level: Level = token_level,
    log_bound: float | None = 20.0,
) -> TrainBatch:
    """Masked importance sampling: as truncate_weights, but what lies outside [floor, cap] has weight 0.

    Source: Ling Team 2025 (Every step evolves), IcePop, at token level; Liu et al. 2025 (When speed kills stability), MIS.
    """
    return _multiplied(batch, drop_outside(_trainer_weights(batch, level, log_bound), floor=floor, cap=cap))


def _trainer_weights(batch: TrainBatch, level: Level, log_bound: float | None) -> Tensor:
    assert batch.old_log_probs is not None, "weights of trainer against rollout need batch.old_log_probs"
    assert batch.rollout_log_probs is not None, "weights of trainer against rollout need batch.rollout_log_probs"
    return importance_weights(batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask, level=level, log_bound=log_bound)


def _multiplied(batch: TrainBatch, weights: Tensor) -> TrainBatch:
    """The batch with its importance weights multiplied by `weights`."""
    own = batch.importance_weights
    return replace(batch, importance_weights=weights if own is None else own * weights)

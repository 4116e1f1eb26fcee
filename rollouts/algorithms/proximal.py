"""Proximal log-probs without a forward pass over everything: one version at a time on samples that wait, or from the versions alone.

Segment-wise: a row that several weight versions sampled has no single behavior policy. Right before the weights change from version v on,
the tokens that v - 1 sampled get their log-prob under v (with_segment_log_probs): each token's proximal policy is then one version after
the one that sampled it, however long its row waits, and the weight p_(v) / p_(v-1) stays near 1.

By version: if even that is too expensive, interpolate between the log-probs of engine and trainer, which exist anyway.

docs/asynchronous.md explains the purpose of each of these weights and the choice between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.corrections import anchor_to_proximal
from rollouts.types import TrainBatch

Interpolation: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(rollout_log_probs, log_probs, fraction), each [B, T] -> proximal log-probs [B, T]."""


# -- on batches, interpolated between rollout and trainer


def proximal_fraction(weight_versions: Tensor, current_version: float | Tensor) -> Tensor:
    """Fraction of the way from the token's version to current_version at which the proximal policy, floor(current_version) - 1, lies.

    alpha = (floor(current_version) - 1 - version) / (current_version - version) for tokens that an earlier version sampled, else 0

    Args:
        weight_versions: # [B, T] int64, -1 where the policy did not sample.
        current_version: version of the trained policy; a fraction if it is ahead of the engines (TrainBatch.policy_versions);
            a number, or # [B].

    Returns: # [B, T] float64 in [0, 1); 0 for tokens of the current version and tokens without a version.
    """
    current = torch.as_tensor(current_version, dtype=torch.float64, device=weight_versions.device)
    current = current[:, None] if current.dim() == 1 else current
    age = current - weight_versions
    earlier = (weight_versions >= 0) & (weight_versions < current.floor())
    behind = current.floor() - 1 - weight_versions
    return torch.where(earlier, behind / torch.where(earlier, age, torch.ones_like(age)), torch.zeros_like(age))


def interpolate_log_probs(rollout_log_probs: Tensor, log_probs: Tensor, fraction: Tensor) -> Tensor:
    """log p_rollout + alpha (log p - log p_rollout): the geometric way. All # [B, T]."""
    return rollout_log_probs + fraction.to(log_probs.dtype) * (log_probs - rollout_log_probs)


def interpolate_probs(rollout_log_probs: Tensor, log_probs: Tensor, fraction: Tensor) -> Tensor:
    """log((1 - alpha) p_rollout + alpha p): the arithmetic way. All # [B, T]."""
    alpha = fraction.to(log_probs.dtype)
    return torch.logaddexp(torch.log1p(-alpha) + rollout_log_probs, alpha.log() + log_probs)


def approximate_proximal(
    batch: TrainBatch, *, current_version: float | None = None, interpolate: Interpolation = interpolate_log_probs
) -> TrainBatch:
    """Fill prox_log_probs, interpolated between rollout_log_probs and old_log_probs by the weight versions.

    Saves the forward pass of a proximal policy if old_log_probs come from the forward pass of the gradient; follow it with
    anchor_to_proximal then. Works on single tokens.

    Args:
        batch: rollout_log_probs, old_log_probs (of the trained policy) and weight_versions filled.
        current_version: version of the trained policy; None = batch.policy_versions.
        interpolate: interpolate_log_probs or interpolate_probs.

    Source: AReaL, prox_logp_method = loglinear.
    """
    assert batch.rollout_log_probs is not None, "approximate_proximal needs batch.rollout_log_probs"
    assert batch.old_log_probs is not None, "approximate_proximal needs batch.old_log_probs"
    assert batch.weight_versions is not None, "approximate_proximal needs batch.weight_versions"
    current = batch.policy_versions if current_version is None else current_version
    assert current is not None, "approximate_proximal needs batch.policy_versions, or current_version"
    fraction = proximal_fraction(batch.weight_versions, current)
    return replace(batch, prox_log_probs=interpolate(batch.rollout_log_probs, batch.old_log_probs.detach(), fraction))


def approximate_and_anchor(batch: TrainBatch, *, interpolate: Interpolation, **anchor: Any) -> TrainBatch:
    """approximate_proximal, then anchor_to_proximal with the given arguments."""
    return anchor_to_proximal(approximate_proximal(batch, interpolate=interpolate), **anchor)

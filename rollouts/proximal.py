"""Proximal log-probs without a forward pass over everything: one version at a time on samples that wait, or from the versions alone.

Segment-wise: a row that several weight versions wrote has no single behavior policy. Right before the weights change from version v on,
the tokens that v - 1 sampled get their log-prob under v (with_segment_log_probs): each token's proximal policy is then one version after
the one that sampled it, however long its row waits, and the weight p_(v) / p_(v-1) stays near 1.

By version: where even that is too dear, interpolate between what the engine reported and what the trainer computes anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.samples import describe_sample
from rollouts.types import Sample, TrainBatch

Interpolation: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(rollout_log_probs, log_probs, fraction), each [B, T] -> proximal log-probs [B, T]."""


# -- on samples, one version after the one that sampled


def find_segment_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Positions of trained tokens that version current_version - 1 sampled: those whose log-prob under current_version is now due.

    The first token of a row is never among them, since nothing predicts it.

    Args:
        sample: with weight_versions.
        current_version: of the weights that are about to be replaced.
    """
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    pairs = enumerate(zip(sample.weight_versions, sample.loss_mask, strict=True))
    return tuple(place for place, (version, mask) in pairs if place > 0 and mask > 0 and version == current_version - 1)


def with_segment_log_probs(sample: Sample, log_probs: Sequence[float], current_version: int) -> Sample:
    """A copy of the sample whose find_segment_tokens have segment_log_probs from `log_probs`; other tokens keep theirs.

    Args:
        sample: with rollout_log_probs and weight_versions. Tokens that have no segment log-prob yet start with the rollout's.
        log_probs: aligned with tokens, under the weights of current_version; only find_segment_tokens are read.
        current_version: of those weights.

    Returns: segment_version = current_version, or the very sample if no token is due.
    """
    due = find_segment_tokens(sample, current_version)
    if not due:
        return sample
    where = describe_sample(sample)
    start = sample.segment_log_probs if sample.segment_log_probs is not None else sample.rollout_log_probs
    assert start is not None, f"{where} has neither segment_log_probs nor rollout_log_probs"
    assert len(log_probs) == len(sample.tokens), f"{where}: {len(log_probs)} log_probs for {len(sample.tokens)} tokens"
    values = list(start)
    for place in due:
        values[place] = float(log_probs[place])
    return replace(sample, segment_log_probs=tuple(values), segment_version=current_version)


# -- on batches, interpolated between rollout and trainer


def proximal_fraction(weight_versions: Tensor, current_version: int) -> Tensor:
    """How far the proximal policy (version current_version - 1) is on the way from the token's version to current_version.

    alpha = (current_version - 1 - version) / (current_version - version) for tokens that an earlier version sampled, else 0

    Args:
        weight_versions: # [B, T] int64, -1 where the policy did not sample.
        current_version: of the policy that is being trained.

    Returns: # [B, T] float64 in [0, 1); 0 for tokens of the current version and those that no version sampled.
    """
    age = (current_version - weight_versions).to(torch.float64)
    earlier = (weight_versions >= 0) & (age > 0)
    return torch.where(earlier, (age - 1) / torch.where(earlier, age, torch.ones_like(age)), torch.zeros_like(age))


def interpolate_log_probs(rollout_log_probs: Tensor, log_probs: Tensor, fraction: Tensor) -> Tensor:
    """log p_rollout + alpha (log p - log p_rollout): the geometric way. All # [B, T]."""
    return rollout_log_probs + fraction.to(log_probs.dtype) * (log_probs - rollout_log_probs)


def interpolate_probs(rollout_log_probs: Tensor, log_probs: Tensor, fraction: Tensor) -> Tensor:
    """log((1 - alpha) p_rollout + alpha p): the arithmetic way. All # [B, T]."""
    alpha = fraction.to(log_probs.dtype)
    return torch.logaddexp(torch.log1p(-alpha) + rollout_log_probs, alpha.log() + log_probs)


def approximate_proximal(batch: TrainBatch, *, current_version: int, interpolate: Interpolation = interpolate_log_probs) -> TrainBatch:
    """prox_log_probs between rollout_log_probs and old_log_probs, as far along as the weight versions say.

    Saves the forward pass of a proximal policy where old_log_probs are those of the very pass that the gradient comes from; then follow
    it with anchor_to_proximal. Looks at one token at a time.

    Args:
        batch: rollout_log_probs, old_log_probs (of the policy that is being trained) and weight_versions filled.
        current_version: of the policy that is being trained.
        interpolate: interpolate_log_probs or interpolate_probs.

    Source: AReaL, prox_logp_method = loglinear.
    """
    assert batch.rollout_log_probs is not None, "approximate_proximal needs batch.rollout_log_probs"
    assert batch.old_log_probs is not None, "approximate_proximal needs batch.old_log_probs"
    assert batch.weight_versions is not None, "approximate_proximal needs batch.weight_versions"
    fraction = proximal_fraction(batch.weight_versions, current_version)
    return replace(batch, prox_log_probs=interpolate(batch.rollout_log_probs, batch.old_log_probs.detach(), fraction))

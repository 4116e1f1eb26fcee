"""Proximal log-probs without a forward pass over everything: one version at a time on samples that wait, or from the versions alone.

Segment-wise: a row that several weight versions wrote has no single behavior policy. Right before the weights change from version v on,
the tokens that v - 1 sampled get their log-prob under v (with_segment_log_probs): each token's proximal policy is then one version after
the one that sampled it, however long its row waits, and the weight p_(v) / p_(v-1) stays near 1.

By version: where even that is too dear, interpolate between what the engine reported and what the trainer computes anyway.

docs/asynchronous.md says what each of these weights is for and which to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollouts.corrections import anchor_to_proximal
from rollouts.errors import DataError
from rollouts.samples import describe_sample
from rollouts.types import Sample, TrainBatch

Interpolation: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(rollout_log_probs, log_probs, fraction), each [B, T] -> proximal log-probs [B, T]."""


# -- on samples, one version after the one that sampled


def check_versions(samples: Sequence[Sample]) -> None:
    """Raise DataError if a sample has a trained token of which it is not known which version sampled it.

    Segment-wise corrections stand on these versions: an engine that does not report them would make every token look like a missed one.
    """
    for sample in samples:
        versions = (-1,) * len(sample.tokens) if sample.weight_versions is None else sample.weight_versions
        if min(compress(versions, sample.loss_mask), default=0) < 0:
            place = next(t for t, mask in enumerate(sample.loss_mask) if mask > 0 and versions[t] < 0)
            found = "no weight_versions" if sample.weight_versions is None else f"weight version {versions[place]} at token {place}"
            raise DataError(
                f"{describe_sample(sample)} has {found}, but segment-wise corrections need the version that sampled each trained token: "
                "use an engine that reports versions (Completion.output_versions), or set segment_wise (enable_segment_wise_ppo) to False"
            )


def start_segments(sample: Sample) -> Sample:
    """The sample with segment_log_probs, where it has none: the rollout's, none of them computed. As it is without rollout_log_probs."""
    if sample.segment_log_probs is not None or sample.rollout_log_probs is None:
        return sample
    return replace(sample, segment_log_probs=sample.rollout_log_probs, segment_versions=(-1,) * len(sample.tokens))


def find_segment_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Positions of trained tokens that version current_version - 1 sampled: those whose log-prob under current_version is now due.

    The first token of a context is never among them, since nothing predicts it.

    Args:
        sample: with weight_versions.
        current_version: of the weights that are about to be replaced.
    """
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    if current_version - 1 not in sample.weight_versions:  # thousands of samples may wait, most of them without such tokens
        return ()
    pairs = enumerate(zip(sample.weight_versions, sample.loss_mask, strict=True))
    firsts = {0, *sample.context_starts}
    return tuple(place for place, (version, mask) in pairs if mask > 0 and version == current_version - 1 and place not in firsts)


def find_due_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """find_segment_tokens without those whose log-prob under current_version the sample has: none, the second time."""
    known = sample.segment_versions
    places = find_segment_tokens(sample, current_version)
    return places if known is None else tuple(place for place in places if known[place] != current_version)


def find_missed_tokens(sample: Sample, current_version: int) -> tuple[int, ...]:
    """Positions of trained tokens that an earlier version sampled and whose segment log-prob was never computed: their window is closed.

    The version after theirs is no longer held by anybody. Their weight is 1, or that of the proximal policy (anchor_to_proximal).

    Args:
        current_version: of the weights that train, after find_due_tokens got theirs.
    """
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    known = sample.segment_versions or (-1,) * len(sample.tokens)
    rows = enumerate(zip(sample.weight_versions, known, sample.loss_mask, strict=True))
    firsts = {0, *sample.context_starts}
    return tuple(p for p, (version, own, mask) in rows if mask > 0 and 0 <= version < current_version and own < 0 and p not in firsts)


def with_segment_log_probs(sample: Sample, log_probs: Sequence[float], current_version: int) -> Sample:
    """A copy of the sample whose find_segment_tokens have segment_log_probs from `log_probs`; other tokens keep theirs.

    Args:
        sample: with rollout_log_probs and weight_versions. Tokens that have no segment log-prob yet start with the rollout's.
        log_probs: aligned with tokens, under the weights of current_version; only find_segment_tokens are read.
        current_version: of those weights.

    Returns: recompute_version = current_version, segment_versions too at the tokens that are due; or the very sample if none is.
    """
    due = find_segment_tokens(sample, current_version)
    if not due:
        return sample
    where = describe_sample(sample)
    start = sample.segment_log_probs if sample.segment_log_probs is not None else sample.rollout_log_probs
    assert start is not None, f"{where} has neither segment_log_probs nor rollout_log_probs"
    assert len(log_probs) == len(sample.tokens), f"{where}: {len(log_probs)} log_probs for {len(sample.tokens)} tokens"
    values, versions = list(start), list(sample.segment_versions or (-1,) * len(sample.tokens))
    for place in due:
        values[place], versions[place] = float(log_probs[place]), current_version
    return replace(sample, segment_log_probs=tuple(values), segment_versions=tuple(versions), recompute_version=current_version)


# -- on batches, interpolated between rollout and trainer


def proximal_fraction(weight_versions: Tensor, current_version: float | Tensor) -> Tensor:
    """How far the proximal policy (version floor(current_version) - 1) is on the way from the token's version to current_version.

    alpha = (floor(current_version) - 1 - version) / (current_version - version) for tokens that an earlier version sampled, else 0

    Args:
        weight_versions: # [B, T] int64, -1 where the policy did not sample.
        current_version: of the policy that is being trained; a fraction where it is ahead of the engines (TrainBatch.policy_versions);
            a number, or # [B].

    Returns: # [B, T] float64 in [0, 1); 0 for tokens of the current version and those that no version sampled.
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
    """prox_log_probs between rollout_log_probs and old_log_probs, as far along as the weight versions say.

    Saves the forward pass of a proximal policy where old_log_probs are those of the very pass that the gradient comes from; then follow
    it with anchor_to_proximal. Looks at one token at a time.

    Args:
        batch: rollout_log_probs, old_log_probs (of the policy that is being trained) and weight_versions filled.
        current_version: of the policy that is being trained; None = batch.policy_versions.
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

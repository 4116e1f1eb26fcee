"""Corrections for tokens that another policy sampled: TrainBatch -> TrainBatch.

    d_t = log p(y_t) - log p_rollout(y_t)        p = the proximal policy, or the trainer's policy before the update
    w   = bound(exp(level(d)))                   multiplies the policy term of the loss; not its KL term, not its denominator

`level` turns the log-ratios of tokens into those of rows (token_level, sequence_level, ...); the bound clamps a weight or drops its token.
Weights carry no gradient, and bounds are on p / p_rollout. Every transform multiplies into importance_weights, so they chain. They treat
each row separately, so they work in `estimate` as well as inside the loss (losses.corrected_loss); the one marked "a batch statistic" needs
all rows of the step, hence `estimate`.

A dropped token has weight 0 and still counts in the loss's denominator, so that dropping tokens does not scale the others up. The
rejections can instead take it out of loss_mask, which changes the denominators and must happen in `estimate`, before `weigh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.kl import KLEstimator, k3
from rollouts.algorithms.loss_weights import trained_mask
from rollouts.algorithms.losses import clipped_policy_loss, plain_batch
from rollouts.algorithms.statistics import masked_mean
from rollouts.checks import check_shapes
from rollouts.types import LossOutput, TokenOutputs, TrainBatch

Level: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(x, mask), each [B, T] and x = 0 where mask = 0 -> [B, T]."""


# -- levels


def token_level(x: Tensor, mask: Tensor) -> Tensor:
    """Each token's own x. All # [B, T]."""
    return x


def sequence_level(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over the row, at each of its places; for log-ratios, the ratio of whole sequences. All # [B, T]."""
    return x.sum(1, keepdim=True).expand_as(x)


def geometric_level(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the row's tokens with mask > 0, at each place; for log-ratios, the geometric mean of ratios. 0 for an empty row."""
    return (x.sum(1, keepdim=True) / (mask > 0).sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def max_level(x: Tensor, mask: Tensor) -> Tensor:
    """Largest x among the row's tokens with mask > 0, at each place. 0 for an empty row."""
    largest = torch.where(mask > 0, x, -torch.inf).amax(1, keepdim=True)
    return torch.where((mask > 0).any(1, keepdim=True), largest, torch.zeros_like(largest)).expand_as(x)


def min_level(x: Tensor, mask: Tensor) -> Tensor:
    """Smallest x among the row's tokens with mask > 0, at each place. 0 for an empty row."""
    return -max_level(-x, mask)


# -- bounds


def clamp_weights(weights: Tensor, *, floor: float | None = None, cap: float | None = None) -> Tensor:
    """min(max(w, floor), cap): a weight beyond the cap counts as the cap (truncated importance sampling). None = no bound."""
    if floor is not None:
        weights = weights.clamp(min=floor)
    return weights if cap is None else weights.clamp(max=cap)


def drop_outside(weights: Tensor, *, floor: float | None = None, cap: float | None = None) -> Tensor:
    """w inside [floor, cap], else 0 (masked importance sampling, IcePop). None = no bound."""
    return torch.where(_inside(weights, floor, cap), weights, torch.zeros_like(weights))


# -- weights


def importance_weights(
    log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor, *, level: Level = token_level, log_bound: float | None = 20.0
) -> Tensor:
    """exp(clamp(level(log p - log p_behavior), -log_bound, log_bound)), without gradient.

    Args:
        log_probs, behavior_log_probs, mask: # [B, T]; values at mask = 0 are not read.
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
    missed_as_proximal: bool = False,
    log_bound: float | None = 20.0,
) -> TrainBatch:
    """Decoupled objectives: the ratio is taken against the proximal policy, the weight is proximal / rollout.

    old_log_probs = prox_log_probs; importance_weights *= bound(exp(level(prox_log_probs - rollout_log_probs)))

    Args:
        batch: prox_log_probs and rollout_log_probs filled; segment_log_probs too if segment_wise.
        cap, floor: bounds of the weight; None = no bound. Tokens beyond them are dropped, as AReaL's behav_imp_weight_cap does.
        level: token_level as in the paper; geometric_level for AReaL's sequence modes.
        drop: False = clamp the weight instead.
        segment_wise: the weight uses segment_log_probs, whose proximal policy is one version after the token's sampling version, so it
            stays near 1 for rows that several versions sampled; the ratio still uses prox_log_probs.
        missed_as_proximal: tokens from find_missed get the weight of prox_log_probs, as without segment_wise; else weight 1.
        log_bound: bound of the log-weight before exp.

    Source: Hilton et al. 2022 (Batch size-invariance for policy optimization); Fu et al. 2025 (AReaL), equation 5.
    """
    prox, rollout = batch.prox_log_probs, batch.rollout_log_probs
    assert prox is not None, "anchor_to_proximal needs batch.prox_log_probs"
    assert rollout is not None, "anchor_to_proximal needs batch.rollout_log_probs"
    assert not segment_wise or batch.segment_log_probs is not None, "anchor_to_proximal with segment_wise needs batch.segment_log_probs"
    target = batch.segment_log_probs if segment_wise and batch.segment_log_probs is not None else prox
    if segment_wise and missed_as_proximal:
        target = torch.where(find_missed(batch), prox, target)
    weights = importance_weights(target, rollout, batch.loss_mask, level=level, log_bound=log_bound)
    bound = drop_outside if drop else clamp_weights
    return replace(_multiplied(batch, bound(weights, floor=floor, cap=cap)), old_log_probs=prox.detach())


def find_missed(batch: TrainBatch) -> Tensor:
    """Find trained tokens that an earlier version than the trainer's has sampled, without a segment log-prob.

    Args:
        batch: weight_versions and policy_versions filled; without segment_mask no segment log-prob counts as computed.

    Returns: # [B, T] bool.
    """
    assert batch.weight_versions is not None, "find_missed needs batch.weight_versions"
    assert batch.policy_versions is not None, "find_missed needs batch.policy_versions: the version that trains"
    earlier = (batch.weight_versions >= 0) & (batch.weight_versions < batch.policy_versions.floor()[:, None])
    missed = earlier & (batch.loss_mask > 0)
    return missed if batch.segment_mask is None else missed & ~batch.segment_mask


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
        cap, floor: bounds of the weight; None = no bound.
        level: token_level, sequence_level (product of ratios) or geometric_level.
        log_bound: bound of the log-weight before exp.

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
    """Masked importance sampling: as truncate_weights, but weights outside [floor, cap] become 0.

    Source: Ling Team 2025 (Every step evolves), IcePop, at token level; Liu et al. 2025 (When speed kills stability), MIS.
    """
    return _multiplied(batch, drop_outside(_trainer_weights(batch, level, log_bound), floor=floor, cap=cap))


def decoupled_ppo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_range: float = 0.2,
    dual: float | None = None,
    proximal_log_probs: Tensor | None = None,
    behav_imp_weight_cap: float | None = None,
) -> LossOutput:
    """Mean over trained tokens of w * (PPO's clipped loss against the proximal policy), w = proximal / old, 0 above the cap.

    Args:
        log_probs: # [B, T] of the current policy, with gradient.
        old_log_probs: # [B, T] of the sampling policy.
        advantages: # [B] or [B, T].
        loss_mask: # [B, T].
        clip_range: width on both sides of 1, in [0, 1).
        dual: > 1, bound of the loss where A < 0 and the ratio is large; None = off.
        proximal_log_probs: # [B, T]; None = plain PPO against old_log_probs, w = 1.
        behav_imp_weight_cap: bound of w; None = no cap.

    Source: Hilton et al. 2022 (Batch size-invariance for policy optimization); Fu et al. 2025 (AReaL), equation 5.
    """
    assert proximal_log_probs is not None or behav_imp_weight_cap is None, (
        f"behav_imp_weight_cap is {behav_imp_weight_cap}, but there are no proximal_log_probs: without them the weight is 1"
    )
    batch = plain_batch(torch.zeros_like(loss_mask, dtype=torch.int64), loss_mask, advantages, old_log_probs)
    if proximal_log_probs is not None:
        batch = replace(batch, prox_log_probs=proximal_log_probs, rollout_log_probs=old_log_probs)
        batch = anchor_to_proximal(batch, cap=behav_imp_weight_cap)
    return clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch, low=clip_range, high=clip_range, dual=dual)


# -- rejection


def keep_tokens(batch: TrainBatch, keep: Tensor) -> TrainBatch:
    """loss_mask where `keep` # [B, T] bool, else 0: the other tokens leave every term and denominator of the loss.

    For masks computed separately from the samples, and for rejections that were multiplied first: keep_tokens(batch, weights > 0).
    To keep the denominators use covariance.drop_tokens.
    """
    check_shapes(keep=(keep, tuple(batch.loss_mask.shape)))
    return _reject(batch, keep, from_mask=True)


def reject_ratios(
    batch: TrainBatch,
    *,
    cap: float | None = None,
    floor: float | None = None,
    level: Level = token_level,
    log_bound: float | None = None,
    from_mask: bool = False,
) -> TrainBatch:
    """Drop tokens or rows with exp(level(old_log_probs - rollout_log_probs)) outside [floor, cap]; the other weights stay unchanged.

    With level=min_level and a small floor: drop rows with a token that is nearly impossible under the trainer (a veto).

    Args:
        batch: old_log_probs and rollout_log_probs filled (after anchor_to_proximal: those of the proximal policy).
        cap, floor: > 0, of trainer / rollout (verl's k1 bounds are of rollout / trainer: exchange and invert them); None = no bound.
        level: unit of the judgement: each token, or a row by the product, mean, largest or smallest of its ratios.
        log_bound: clamps each token's log-ratio beforehand (verl: 20); None = no clamp.
        from_mask: take the tokens out of loss_mask, and so out of every term and denominator, instead of giving them weight 0.
    """
    assert cap is None or cap > 0, f"cap is {cap}, expected > 0"
    assert floor is None or floor > 0, f"floor is {floor}, expected > 0"
    old, rollout = _trainer_and_rollout(batch)
    log_ratio = old - rollout if log_bound is None else (old - rollout).clamp(-log_bound, log_bound)
    low, high = (None if bound is None else math.log(bound) for bound in (floor, cap))
    return _reject(batch, _inside(level(log_ratio, batch.loss_mask), low, high), from_mask)


def reject_divergence(
    batch: TrainBatch,
    *,
    kl: KLEstimator = k3,
    cap: float | None = None,
    floor: float | None = None,
    level: Level = token_level,
    from_mask: bool = False,
) -> TrainBatch:
    """Drop tokens or rows with level(kl(rollout_log_probs, old_log_probs)) outside [floor, cap]: KL(rollout || trainer), at rollout tokens.

    Args:
        kl: k1, k2 or k3, bounded(k3, log_ratio=20), or the caller's own.
        cap, floor: in nats; None = no bound.
        batch, level, from_mask: as in reject_ratios; sequence_level sums the divergence over the row, geometric_level is its
            mean, max_level its largest.
    """
    old, rollout = _trainer_and_rollout(batch)
    return _reject(batch, _inside(level(kl(rollout, old), batch.loss_mask), floor, cap), from_mask)


def limit_second_moment(batch: TrainBatch, *, threshold: float = 0.04) -> TrainBatch:
    """Take the fewest tokens out of loss_mask, largest first, that bring the mean of (old_log_probs - rollout_log_probs)^2 below threshold.

    A batch statistic: for `estimate` only. At least one token stays.

    Args:
        threshold: > 0, in squared nats.

    Source: Zheng et al. 2025 (Prosperity before collapse: M2PO), algorithm 1.
    """
    old, rollout = _trainer_and_rollout(batch)
    on = trained_mask(batch) > 0
    moments, order = (old - rollout).square()[on].sort(descending=True)
    count = moments.numel()
    if count == 0:
        return batch
    remaining = torch.arange(count, 0, -1, device=moments.device)
    below = moments.flip(0).cumsum(0).flip(0) / remaining < threshold  # entry k: without the k largest
    num_dropped = int(below.to(torch.int64).argmax()) if bool(below.any()) else count - 1
    keep = torch.ones(count, dtype=torch.bool, device=moments.device)
    keep[order[:num_dropped]] = False
    kept = torch.ones_like(on)
    kept[on] = keep
    return _reject(batch, kept, from_mask=True)


def mask_off_policy_rows(log_probs: Tensor, batch: TrainBatch, *, threshold: float, against_old: bool = False) -> Tensor:
    """0 at tokens with A < 0 in rows with mean(rollout_log_probs - log_probs) > threshold, else 1: ignore mistakes that are nearly
    impossible under the current policy.

    For policy_loss(reweigh=...), since it depends on the current policy.

    Args:
        log_probs: # [B, T] of the current policy, without gradient.
        batch: advantages and rollout_log_probs filled.
        threshold: in nats per token; any sign.
        against_old: compare with old_log_probs in place of rollout_log_probs.

    Returns: # [B, T]; 1 where loss_mask = 0 and A >= 0.
    Source: DeepSeek-V3.2 2025, section 3.1 (off-policy sequence masking).
    """
    anchor = batch.old_log_probs if against_old else batch.rollout_log_probs
    assert anchor is not None, f"mask_off_policy_rows needs batch.{'old' if against_old else 'rollout'}_log_probs"
    assert batch.advantages is not None, "mask_off_policy_rows needs batch.advantages: call algorithm.estimate first"
    on = batch.loss_mask > 0
    drift = geometric_level(torch.where(on, anchor - log_probs, torch.zeros_like(log_probs)), batch.loss_mask)
    return ((batch.advantages >= 0) | (drift <= threshold)).to(log_probs.dtype)


# -- diagnostics


def off_policy_metrics(batch: TrainBatch, *, count_empty_rows: bool = False, log_bound: float = 20.0) -> dict[str, Tensor]:
    """Measure the distance between the sampling policy and the trained one. Scalars, 0 for a batch without trained tokens.

    Args:
        batch: old_log_probs (the trainer's) and rollout_log_probs filled; importance_weights too for effective_sample_size.
        count_empty_rows: include rows without a trained token in means over rows, with log-prob 0 (verl).
        log_bound: clamps log-ratios before exp in the chi2 pair.

    Returns: over tokens: rollout_kl, rollout_k3 (two estimates of KL(rollout || trainer)), chi2_token = mean(w^2) - 1;
        over rows: trainer_log_ppl, trainer_ppl, rollout_log_ppl, rollout_ppl (of -mean log p), log_ppl_diff = trainer's - rollout's with
        _abs, _max, _min, ppl_ratio = mean(exp(log_ppl_diff)), chi2_sequence; and with importance weights effective_sample_size =
        mean(w)^2 / mean(w^2) in (0, 1] and dropped_fraction = the share of weights that are 0.
    """
    old, rollout = _trainer_and_rollout(batch)
    on = trained_mask(batch) > 0
    mask = on.to(old.dtype)
    old, rollout = torch.where(on, old, torch.zeros_like(old)), torch.where(on, rollout, torch.zeros_like(rollout))
    rows = torch.ones_like(mask[:, 0]) if count_empty_rows else on.any(1).to(mask.dtype)
    if not bool(on.any()):
        rows = torch.zeros_like(rows)
    log_ratio = old - rollout
    trainer_log_ppl, rollout_log_ppl = -geometric_level(old, mask)[:, 0], -geometric_level(rollout, mask)[:, 0]
    diff = trainer_log_ppl - rollout_log_ppl
    square = (2 * log_ratio.clamp(-log_bound, log_bound)).exp()
    row_square = (2 * log_ratio.sum(1).clamp(-log_bound, log_bound)).exp()
    metrics = {
        "rollout_kl": masked_mean(-log_ratio, mask),
        "rollout_k3": masked_mean(k3(rollout, old), mask),
        "chi2_token": masked_mean(square - 1, mask),
        "trainer_log_ppl": masked_mean(trainer_log_ppl, rows),
        "trainer_ppl": masked_mean(trainer_log_ppl.exp(), rows),
        "rollout_log_ppl": masked_mean(rollout_log_ppl, rows),
        "rollout_ppl": masked_mean(rollout_log_ppl.exp(), rows),
        "log_ppl_diff": masked_mean(diff, rows),
        "log_ppl_diff_abs": masked_mean(diff.abs(), rows),
        "log_ppl_diff_max": max_level(diff[None], rows[None])[0, 0],
        "log_ppl_diff_min": min_level(diff[None], rows[None])[0, 0],
        "ppl_ratio": masked_mean(diff.exp(), rows),
        "chi2_sequence": masked_mean(row_square - 1, rows),
    }
    if batch.importance_weights is not None:
        weights = torch.where(on, batch.importance_weights, torch.zeros_like(mask))
        second = masked_mean(weights.square(), mask)
        metrics["effective_sample_size"] = masked_mean(weights, mask).square() / torch.where(second > 0, second, torch.ones_like(second))
        metrics["dropped_fraction"] = masked_mean((weights == 0).to(mask.dtype), mask)
    return metrics


# -- pieces


def _trainer_and_rollout(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return old_log_probs and rollout_log_probs without gradient, 0 at untrained tokens."""
    assert batch.old_log_probs is not None, "a comparison of trainer and rollout needs batch.old_log_probs"
    assert batch.rollout_log_probs is not None, "a comparison of trainer and rollout needs batch.rollout_log_probs"
    on, zeros = batch.loss_mask > 0, torch.zeros_like(batch.old_log_probs)
    return torch.where(on, batch.old_log_probs.detach(), zeros), torch.where(on, batch.rollout_log_probs.detach(), zeros)


def _trainer_weights(batch: TrainBatch, level: Level, log_bound: float | None) -> Tensor:
    return importance_weights(*_trainer_and_rollout(batch), batch.loss_mask, level=level, log_bound=log_bound)


def _inside(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """Find low <= x <= high; None = no bound."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep = keep & (x >= low)
    return keep if high is None else keep & (x <= high)


def _reject(batch: TrainBatch, keep: Tensor, from_mask: bool) -> TrainBatch:
    if from_mask:
        return replace(batch, loss_mask=torch.where(keep, batch.loss_mask, torch.zeros_like(batch.loss_mask)))
    return _multiplied(batch, keep.to(batch.loss_mask.dtype))


def _multiplied(batch: TrainBatch, weights: Tensor) -> TrainBatch:
    """Return the batch with its importance weights multiplied by `weights`."""
    own = batch.importance_weights
    return replace(batch, importance_weights=weights if own is None else own * weights)

"""rollout_correction: our compositions for the vectors of this group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, pad_rows, token_losses
from parity.peers import fill_missing_log_probs, normalize_weights
from rollouts.algorithms.corrections import (
    geometric_level,
    keep_tokens,
    limit_second_moment,
    mask_off_policy_rows,
    mask_weights,
    max_level,
    min_level,
    off_policy_metrics,
    reject_divergence,
    reject_ratios,
    sequence_level,
    token_level,
    truncate_weights,
)
from rollouts.algorithms.kl import bounded, k2, k3
from rollouts.algorithms.loss_weights import sample_mean, token_mean, weighted_sum
from rollouts.algorithms.losses import policy_loss
from rollouts.algorithms.proximal import approximate_proximal, interpolate_probs
from rollouts.data.segments import find_segment_tokens, with_segment_log_probs
from rollouts.types import Sample, TokenOutputs

# -- verl


def verl_is_weights(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float | str,
    rollout_is_batch_normalize: bool,
) -> dict[str, Any]:
    batch = make_batch(response_mask, old_log_probs=train_log_prob, rollout_log_probs=rollout_log_prob)
    level, mean = {"token": (token_level, token_mean), "sequence": (sequence_level, sample_mean)}[rollout_is]
    if isinstance(rollout_is_threshold, str) and "_" in rollout_is_threshold:
        floor, cap = map(float, rollout_is_threshold.split("_"))
        batch = mask_weights(batch, floor=floor, cap=cap, level=level)
    else:
        batch = truncate_weights(batch, cap=float(rollout_is_threshold), level=level)
    assert batch.importance_weights is not None
    metrics = {
        "mean": weighted_sum(batch.importance_weights, token_mean(batch, epsilon=1e-8)),
        "eff_sample_size": off_policy_metrics(batch)["effective_sample_size"],
    }
    if rollout_is_batch_normalize:
        shares = partial(mean, epsilon=1e-8)
        metrics["batch_norm_factor"] = weighted_sum(batch.importance_weights, shares(batch))
        batch = normalize_weights(batch, weigh=shares)
    return {"weights": batch.importance_weights, "metrics": metrics}


def verl_rejection_mask(
    train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, rollout_rs: str, rollout_rs_threshold: str
) -> dict[str, Any]:
    kinds, thresholds = rollout_rs.split(","), str(rollout_rs_threshold).split(",")
    if len(thresholds) == 1:
        thresholds = thresholds * len(kinds)
    batch = make_batch(response_mask, old_log_probs=train_log_prob, rollout_log_probs=rollout_log_prob)
    exchanged = replace(batch, old_log_probs=rollout_log_prob, rollout_log_probs=train_log_prob)  # verl bounds rollout / trainer
    for kind, threshold in zip(kinds, thresholds, strict=True):
        where, statistic = kind.strip().rsplit("_", 1)
        level = {"token": token_level, "seq_sum": sequence_level, "seq_mean": geometric_level, "seq_max": max_level}[where]
        if statistic == "k1":
            floor, cap = map(float, threshold.split("_")) if "_" in threshold else (1 / float(threshold), float(threshold))
            judged = reject_ratios(exchanged, floor=floor, cap=cap, level=level, log_bound=20.0)
        else:
            kl = bounded({"k2": k2, "k3": k3}[statistic], log_ratio=20.0)
            judged = reject_divergence(batch, kl=kl, cap=float(threshold), level=level)
        batch = replace(batch, importance_weights=judged.importance_weights)
        exchanged = replace(exchanged, importance_weights=judged.importance_weights)
    return {"mask": batch.importance_weights, "masked_fraction": off_policy_metrics(batch)["dropped_fraction"]}


def verl_offpolicy_metrics(train_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, Any]:
    batch = make_batch(response_mask, old_log_probs=train_log_prob, rollout_log_probs=rollout_log_prob)
    found = off_policy_metrics(batch, count_empty_rows=True)
    names = {
        "training_ppl": "trainer_ppl", "training_log_ppl": "trainer_log_ppl", "kl": "rollout_kl", "k3_kl": "rollout_k3",
        "rollout_ppl": "rollout_ppl", "rollout_log_ppl": "rollout_log_ppl", "log_ppl_diff": "log_ppl_diff",
        "log_ppl_abs_diff": "log_ppl_diff_abs", "log_ppl_diff_max": "log_ppl_diff_max", "log_ppl_diff_min": "log_ppl_diff_min",
        "ppl_ratio": "ppl_ratio", "chi2_token": "chi2_token", "chi2_seq": "chi2_sequence",
    }  # fmt: skip
    return {"metrics": {theirs: found[ours] for theirs, ours in names.items()}}


# -- slime


def unpad(padded: Tensor | None, rows: list[Tensor]) -> list[Tensor]:
    assert padded is not None
    return [row[: len(like)] for row, like in zip(padded, rows, strict=True)]


LEVELS = {"token": token_level, "sequence": sequence_level, "geometric": geometric_level}


def slime_mis_weights(
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    tis_level: str,
    tis_mode: str,
    tis_upper_bound: float,
    tis_lower_bound: float | None,
    use_rs: bool,
    rs_level: str,
    rs_upper_bound: float | None,
    rs_lower_bound: float | None,
    rs_veto_threshold: float | None,
    tis_batch_normalize: bool,
) -> dict[str, Any]:
    batch = make_batch(pad_rows(loss_masks), old_log_probs=pad_rows(train_log_probs), rollout_log_probs=pad_rows(rollout_log_probs))
    level = LEVELS[tis_level]
    tis_floor = 1 / tis_upper_bound if tis_lower_bound is None else tis_lower_bound
    bounds = {"truncate": (None, tis_upper_bound), "clip": (tis_floor, tis_upper_bound), "mask": (None, None)}[tis_mode]
    weighted = truncate_weights(batch, floor=bounds[0], cap=bounds[1], level=level)
    if tis_batch_normalize:
        weigh = {"token": token_mean, "sequence": partial(sample_mean, count_empty_rows=True)}[tis_level]
        weighted = normalize_weights(weighted, weigh=weigh)
    kept = reject_ratios(batch)
    if tis_mode == "mask":
        kept = reject_ratios(kept, floor=tis_floor, cap=tis_upper_bound, level=level)
    if use_rs:
        cap = tis_upper_bound if rs_upper_bound is None else rs_upper_bound
        floor = tis_floor if rs_lower_bound is None else rs_lower_bound
        kept = reject_ratios(kept, floor=floor, cap=cap, level=LEVELS[rs_level])
        if rs_veto_threshold is not None:
            kept = reject_ratios(kept, floor=rs_veto_threshold, level=min_level)
    return {
        "weights": unpad(weighted.importance_weights, loss_masks),
        "modified_masks": unpad(kept.importance_weights, loss_masks),
    }


def slime_tis_icepop(
    pg_loss: list[Tensor],
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    tis_clip_low: float,
    tis_clip: float,
    kind: str,
) -> dict[str, Any]:
    batch = make_batch(pad_rows(loss_masks), old_log_probs=pad_rows(train_log_probs), rollout_log_probs=pad_rows(rollout_log_probs))
    correct = {"tis": truncate_weights, "icepop": mask_weights}[kind]
    raw = truncate_weights(batch, cap=None, log_bound=None)
    losses = correct(replace(batch, advantages=pad_rows(pg_loss)), floor=tis_clip_low, cap=tis_clip, log_bound=None)
    loss = partial(policy_loss, surrogate=lambda log_ratio, log_probs, given: given)  # a surrogate that is already computed
    corrected = token_losses(loss, TokenOutputs(log_probs=pad_rows(train_log_probs)), losses)
    return {"tis": unpad(raw.importance_weights, loss_masks), "pg_loss": unpad(corrected, loss_masks)}


def slime_opsm_mask(
    log_probs: list[Tensor], old_log_probs: list[Tensor], advantages: list[Tensor], loss_masks: list[Tensor], opsm_delta: float
) -> dict[str, Any]:
    batch = make_batch(pad_rows(loss_masks), old_log_probs=pad_rows(old_log_probs), advantages=pad_rows(advantages))
    return {"mask": unpad(mask_off_policy_rows(pad_rows(log_probs), batch, threshold=opsm_delta, against_old=True), loss_masks)}


# -- TRL


def trl_vllm_importance_sampling(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    tool_mask: Tensor | None,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> dict[str, Any]:
    batch = make_batch(completion_mask, old_log_probs=old_per_token_logps, rollout_log_probs=sampling_per_token_logps)
    if tool_mask is not None:
        batch = keep_tokens(batch, tool_mask > 0)
    where, action = mode.split("_")
    correct = {"truncate": truncate_weights, "mask": mask_weights}[action]
    level = {"token": token_level, "sequence": sequence_level}[where]
    ratio = correct(fill_missing_log_probs(batch), floor=clip_min, cap=clip_max, level=level, log_bound=None).importance_weights
    assert ratio is not None
    return {"ratio": ratio if where == "token" else ratio[:, :1]}


def trl_off_policy_mask(
    advantages: Tensor, per_token_logps: Tensor, sampling_per_token_logps: Tensor, mask: Tensor, off_policy_threshold: float
) -> dict[str, Any]:
    batch = make_batch(
        mask,
        old_log_probs=per_token_logps,
        rollout_log_probs=sampling_per_token_logps,
        advantages=advantages.expand_as(per_token_logps),
    )
    kept = mask_off_policy_rows(per_token_logps, fill_missing_log_probs(batch), threshold=off_policy_threshold)
    return {"mask": kept[:, :1]}


# -- AReaL


def areal_m2po_mask(old_logp: Tensor, prox_logp: Tensor, loss_mask: Tensor, m2_threshold: float) -> dict[str, Any]:
    batch = make_batch(loss_mask, old_log_probs=prox_logp, rollout_log_probs=old_logp)
    return {"mask": limit_second_moment(batch, threshold=m2_threshold).loss_mask}


def areal_prox_logp_approximations(old_logp: Tensor, logprobs: Tensor, versions: Tensor, current_version: int) -> dict[str, Any]:
    batch = make_batch(torch.ones_like(old_logp), rollout_log_probs=old_logp, old_log_probs=logprobs, weight_versions=versions)
    loglinear = approximate_proximal(batch, current_version=current_version)
    linear = approximate_proximal(batch, current_version=current_version, interpolate=interpolate_probs)
    return {"loglinear": loglinear.prox_log_probs, "linear": linear.prox_log_probs, "rollout": batch.rollout_log_probs}


def areal_fork_proximal_recompute(
    versions: list[int],
    loss_mask: list[int],
    attention_mask: list[int],
    proximal_logprobs_t: list[float],
    engine_logprobs: list[float],
    current_version: int,
) -> dict[str, Any]:
    length = attention_mask.count(1)
    first = [0.0] * max(loss_mask.index(1), 1) if 1 in loss_mask else []  # the engine's list starts at the first output token
    known = [*first, *engine_logprobs, *[0.0] * length][:length]
    sample = Sample(
        tokens=(0,) * length,
        loss_mask=tuple(map(float, loss_mask[:length])),
        weight_versions=tuple(versions[:length]),
        segment_log_probs=tuple(proximal_logprobs_t[:length]),
    )
    patched = with_segment_log_probs(sample, known, current_version)
    assert patched.segment_log_probs is not None
    return {
        "proximal_logprobs_t": [*patched.segment_log_probs, *proximal_logprobs_t[length:]],
        "patched": len(find_segment_tokens(sample, current_version)),
        "recompute_version": patched.recompute_version,
    }


MAPPINGS: dict[str, Parity] = {
    "verl_is_weights": Parity(
        run=verl_is_weights,
        ours="corrections.truncate_weights | mask_weights, then peers.normalize_weights",
        mask="response_mask",
        left_out=dict.fromkeys(
            (f"metrics.{name}" for name in ("min", "max", "std", "ratio_fraction_high", "ratio_fraction_low")),
            "a description of the weights, which are compared; no metric of ours",
        ),
    ),
    "verl_rejection_mask": Parity(
        run=verl_rejection_mask,
        ours="corrections.reject_ratios | reject_divergence",
        mask="response_mask",
        left_out={"seq_masked_fraction": "a share of rows, with those that have no token; our metrics count tokens"},
        note="our bounds on k1 are of trainer / rollout, verl's of rollout / trainer: the two columns are exchanged",
    ),
    "verl_offpolicy_metrics": Parity(
        run=verl_offpolicy_metrics,
        ours="corrections.off_policy_metrics(count_empty_rows=True)",
        note="by default our means over rows leave out rows without a trained token",
    ),
    "slime_mis_weights": Parity(
        run=slime_mis_weights,
        ours="corrections.truncate_weights, peers.normalize_weights, reject_ratios (level=min_level for the veto)",
        mask="loss_masks",
    ),
    "slime_tis_icepop": Parity(
        run=slime_tis_icepop,
        ours="corrections.truncate_weights | mask_weights, losses.policy_loss",
        mask="loss_masks",
        left_out={"tis_clipfrac": "where a weight was bounded; the weights are compared"},
    ),
    "slime_opsm_mask": Parity(
        run=slime_opsm_mask,
        ours="corrections.mask_off_policy_rows(against_old=True)",
        left_out={"clipfrac": "a sum over rows of the share that is masked; the mask is compared"},
    ),
    "trl_vllm_importance_sampling": Parity(
        run=trl_vllm_importance_sampling, ours="peers.fill_missing_log_probs, then truncate_weights | mask_weights"
    ),
    "trl_off_policy_mask": Parity(run=trl_off_policy_mask, ours="corrections.mask_off_policy_rows"),
    "areal_prox_logp_approximations": Parity(
        run=areal_prox_logp_approximations,
        ours="proximal.approximate_proximal(interpolate=interpolate_log_probs | interpolate_probs)",
        note="'rollout' is the rollout's own column",
    ),
    "areal_fork_proximal_recompute": Parity(run=areal_fork_proximal_recompute, ours="proximal.find_segment_tokens, with_segment_log_probs"),
    "areal_m2po_mask": Parity(run=areal_m2po_mask, ours="corrections.limit_second_moment"),
}
NOT_OFFERED: dict[str, str] = {}

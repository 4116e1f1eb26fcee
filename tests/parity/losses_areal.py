"""losses: our compositions for the loss functions of areal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule, importance_ratio, token_losses, zero_nans
from rollouts.algorithms.corrections import (
    anchor_to_proximal,
    geometric_level,
    limit_second_moment,
    max_level,
    reject_divergence,
    reject_ratios,
    sequence_level,
    token_level,
)
from rollouts.algorithms.kl import k1, k2, k3
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import KLTerm, clipped_policy_loss, policy_loss, value_loss
from rollouts.algorithms.proximal import approximate_proximal
from rollouts.algorithms.surrogates import (
    Ratio,
    clip_fractions,
    row_mean_advantages,
    sapo,
    sequence_mean_ratio,
    token_ratio,
)
from rollouts.types import TokenOutputs, TrainBatch

LEVELS = {"mean": geometric_level, "sum": sequence_level, "max": max_level}
DIVERGENCES = {"kl_k1": k1, "kl_k2": k2, "kl_k3": k3}


def clipped_outputs(
    logprobs: Tensor,
    batch: TrainBatch,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    ratio: Ratio = token_ratio,
) -> dict[str, Any]:
    """Their mean over valid tokens, with what they log of it at each of them."""
    assert batch.old_log_probs is not None
    assert batch.advantages is not None
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    weighed, outputs = replace(batch, loss_weights=token_mean(batch)), TokenOutputs(log_probs=logprobs)
    clip = partial(clipped_policy_loss, low=eps_clip, high=high, dual=c_clip, ratio=ratio)
    loss, metrics = clip(outputs, weighed)
    log_ratio = ratio(logprobs, batch.old_log_probs, batch.loss_mask)
    out = {
        "loss": loss,
        "token_loss": token_losses(clip, outputs, batch),
        "importance_weight": importance_ratio(logprobs, batch.old_log_probs, batch.loss_mask, ratio=ratio),
        "clip_mask": clip_fractions(log_ratio.detach(), logprobs, batch.advantages, low=eps_clip, high=high)["clip_fraction"],
    }
    if batch.importance_weights is None:
        return out
    return out | {
        "behave_imp_weight": batch.importance_weights,
        "behave_mask": batch.importance_weights.bool(),
        "filtered_fraction": metrics["dropped_fraction"],
    }


def areal_ppo_actor_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
) -> dict[str, Any]:
    batch = make_batch(loss_mask, old_log_probs=proximal_logprobs, advantages=advantages)
    return clipped_outputs(logprobs, batch, eps_clip, eps_clip_higher, c_clip)


def areal_gspo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
) -> dict[str, Any]:
    batch = make_batch(loss_mask, old_log_probs=proximal_logprobs, advantages=row_mean_advantages(advantages, loss_mask))
    return clipped_outputs(logprobs, batch, eps_clip, eps_clip_higher, c_clip, ratio=sequence_mean_ratio)


def areal_realhf_actor_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    c_clip: float | None,
    proximal_logprobs: Tensor | None,
    behav_imp_weight_cap: float | None,
) -> dict[str, Any]:
    batch = make_batch(loss_mask, rollout_log_probs=old_logprobs, prox_log_probs=proximal_logprobs, advantages=advantages)
    if proximal_logprobs is None:
        batch = replace(batch, old_log_probs=old_logprobs)
    else:
        batch = anchor_to_proximal(batch, cap=behav_imp_weight_cap, log_bound=None)
    return clipped_outputs(logprobs, batch, eps_clip, None, c_clip)


def areal_decoupled_ppo_cap(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    behav_imp_weight_cap: float | None,
    behave_imp_weight_mode: str = "token_mask",
    proximal_logprobs_t: Tensor | None = None,
    behav_imp_weight_floor: float | None = None,
) -> dict[str, Any]:
    batch = make_batch(
        loss_mask,
        rollout_log_probs=old_logprobs,
        prox_log_probs=proximal_logprobs,
        segment_log_probs=proximal_logprobs_t,
        advantages=advantages,
    )
    if behave_imp_weight_mode == "disabled":
        batch = replace(batch, old_log_probs=proximal_logprobs)
    else:
        where, action = behave_imp_weight_mode.split("_")
        batch = anchor_to_proximal(
            batch,
            cap=behav_imp_weight_cap,
            floor=behav_imp_weight_floor,
            level={"token": token_level, "sequence": geometric_level}[where],
            drop={"mask": True, "truncate": False}[action],
            segment_wise=proximal_logprobs_t is not None,
            log_bound=None,
        )
    return clipped_outputs(logprobs, batch, eps_clip, eps_clip_higher, c_clip)


def reject(batch: TrainBatch, config: Mapping[str, Any] | None) -> TrainBatch:
    """Their RejectionSamplingConfig on a batch with prox_log_probs and rollout_log_probs."""
    if config is None:
        return replace(batch, old_log_probs=batch.prox_log_probs)
    lower, upper, by_ratio = config["lower"], config["upper"], config["metric"] == "ratio"
    by_row = config["level"] == "sequence"
    anchor = partial(anchor_to_proximal, level=geometric_level if by_row and by_ratio else token_level, log_bound=None)
    if config["action"] == "clamp":
        return anchor(batch, cap=upper, floor=lower, drop=False)
    level = LEVELS[config.get("agg", "mean")] if by_row else token_level
    weighed = anchor(batch, cap=None)
    if by_ratio:
        return reject_ratios(weighed, cap=upper, floor=lower, level=level)
    exchanged = replace(weighed, old_log_probs=batch.rollout_log_probs, rollout_log_probs=batch.prox_log_probs)
    judged = reject_divergence(exchanged, kl=DIVERGENCES[config["metric"]], cap=upper, floor=lower, level=level)
    return replace(weighed, importance_weights=judged.importance_weights)


def clamps_rows(config: Mapping[str, Any] | None, **chosen: str) -> bool:
    return config is not None and all(
        config.get(name, "mean") == x for name, x in {"action": "clamp", "level": "sequence", **chosen}.items()
    )


CLAMP = {"level": "sequence", "action": "clamp", "metric": "ratio", "agg": "max", "upper": 1.1, "lower": 0.9}
CLAMPED_ROWS = (
    Rule(
        reason="the peer clamps the weights of rows to the bounds of a divergence; here to the same bounds of the ratio",
        applies=lambda kwargs, _: any(clamps_rows(kwargs["rejection_sampling"], metric=metric) for metric in DIVERGENCES),
        given={"rejection_sampling": {**CLAMP, "metric": "kl_k2"}},
    ),
    Rule(
        reason="the peer bounds a row's weight from below only where its largest ratio is below the bound; here always",
        applies=lambda kwargs, _: (
            clamps_rows(kwargs["rejection_sampling"], metric="ratio", agg="max") and kwargs["rejection_sampling"]["lower"] is not None
        ),
        given={"rejection_sampling": CLAMP},
    ),
)


def areal_decoupled_ppo_rejection(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    rejection_sampling: Mapping[str, Any] | None,
) -> dict[str, Any]:
    batch = make_batch(loss_mask, rollout_log_probs=old_logprobs, prox_log_probs=proximal_logprobs, advantages=advantages)
    out = clipped_outputs(logprobs, reject(batch, rejection_sampling), eps_clip, eps_clip_higher, c_clip)
    clamped = rejection_sampling is not None and rejection_sampling["action"] == "clamp"
    not_theirs = {"clip_mask", "importance_weight"} | ({"filtered_fraction"} if clamped else set())
    return {name: x for name, x in out.items() if name not in not_theirs}


def areal_grpo_loss_full(
    logprobs: Tensor,
    old_logprobs: Tensor,
    prox_logp: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    versions: Tensor,
    current_version: int,
    prox_logp_method: str,
    m2_threshold: float | None,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    rejection_sampling: Mapping[str, Any] | None,
    teacher_logp: Tensor | None,
    rl_loss_weight: float,
    distill_loss_weight: float,
) -> dict[str, Any]:
    batch = make_batch(
        loss_mask,
        rollout_log_probs=old_logprobs,
        old_log_probs=logprobs.detach(),
        prox_log_probs=prox_logp,
        ref_log_probs=teacher_logp,
        weight_versions=versions,
        advantages=advantages,
    )
    if prox_logp is None:
        batch = approximate_proximal(batch, current_version=current_version)
    if m2_threshold is not None:
        batch = limit_second_moment(replace(batch, old_log_probs=batch.prox_log_probs), threshold=m2_threshold)
    if teacher_logp is not None:
        batch = replace(batch, importance_weights=torch.full_like(logprobs.detach(), rl_loss_weight))
    batch = reject(batch, rejection_sampling)
    loss = clipped_policy_loss(
        TokenOutputs(log_probs=logprobs),
        replace(batch, loss_weights=token_mean(batch)),
        low=eps_clip,
        high=eps_clip if eps_clip_higher is None else eps_clip_higher,
        dual=c_clip,
        kl=None if teacher_logp is None else KLTerm(k1, distill_loss_weight),
    )
    return {"loss": loss.loss}


def areal_sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    tau_pos: float,
    tau_neg: float,
    importance_sampling_level: str,
) -> dict[str, Any]:
    by_row = {"token": False, "sequence": True}[importance_sampling_level]
    batch = make_batch(
        loss_mask, old_log_probs=old_logprobs, advantages=row_mean_advantages(advantages, loss_mask) if by_row else advantages
    )
    loss = policy_loss(
        TokenOutputs(log_probs=logprobs),
        replace(batch, loss_weights=token_mean(batch)),
        surrogate=partial(sapo, tau_pos=tau_pos, tau_neg=tau_neg),
        ratio=sequence_mean_ratio if by_row else token_ratio,
    )
    return {"loss": loss.loss}


def areal_critic_loss(
    value: Tensor, old_value: Tensor, target_value: Tensor, value_eps_clip: float, loss_mask: Tensor, loss_fn_type: str
) -> dict[str, Any]:
    batch = make_batch(loss_mask, values=old_value, returns=target_value)
    outputs = TokenOutputs(log_probs=torch.zeros_like(value), values=value)
    huber = {"mse": None, "huber": 10.0}[loss_fn_type]
    return {"loss": value_loss(outputs, replace(batch, loss_weights=token_mean(batch)), clip=value_eps_clip, huber=huber).loss}


EMPTY = Rule(
    reason="NaN there for a batch without a valid token, 0 here",
    applies=lambda kwargs, _: not bool(kwargs["loss_mask"].any()),
    gives=lambda outputs: zero_nans({"loss": outputs["loss"]}),
    given={"loss_mask": torch.zeros_like},
    theirs={"loss": math.nan},
)
DUAL = {"dual_clip_mask": "where the dual clip acts is no output of ours; its effect is in token_loss"}
DROPPED = "theirs is that of a ratio of 0 at tokens that were dropped"


DECOUPLED = "corrections.anchor_to_proximal, then losses.clipped_policy_loss, loss_weights.token_mean"
ACTOR: dict[str, Any] = {"wrt": ("logprobs",), "mask": "loss_mask", "left_out": DUAL}
DECOUPLED_ACTOR: dict[str, Any] = {**ACTOR, "optional": ("filtered_fraction",)}
MAPPINGS: dict[str, Parity] = {
    "areal_ppo_actor_loss": Parity(run=areal_ppo_actor_loss, ours="losses.clipped_policy_loss, loss_weights.token_mean", **ACTOR),
    "areal_realhf_actor_loss_v0_3_0": Parity(run=areal_realhf_actor_loss, ours=DECOUPLED, **DECOUPLED_ACTOR),
    "areal_decoupled_ppo_cap_v0_3_4": Parity(run=areal_decoupled_ppo_cap, ours=DECOUPLED, **DECOUPLED_ACTOR),
    "areal_decoupled_ppo_cap_modes_v1_0_3": Parity(
        run=areal_decoupled_ppo_cap, ours=f"{DECOUPLED}; level=geometric_level for sequence_*, drop=False for *_truncate", **DECOUPLED_ACTOR
    ),
    "areal_fork_segment_wise_decoupled_ppo": Parity(run=areal_decoupled_ppo_cap, ours=f"{DECOUPLED}; segment_wise=True", **DECOUPLED_ACTOR),
    "areal_decoupled_ppo_rejection": Parity(
        run=areal_decoupled_ppo_rejection,
        ours=f"{DECOUPLED}; before it corrections.reject_ratios | reject_divergence",
        wrt=("logprobs",),
        mask="loss_mask",
        rules=CLAMPED_ROWS,
        left_out={
            **DUAL,
            "clip_mask": DROPPED,
            "importance_weight": DROPPED,
            "filtered_fraction": "of action='clamp': we do not count weights that were bounded",
        },
        note="our divergences are KL(rollout || trainer), theirs KL(trainer || rollout): the two columns are exchanged",
    ),
    "areal_gspo": Parity(
        run=areal_gspo,
        ours="losses.clipped_policy_loss(ratio=sequence_mean_ratio) on surrogates.row_mean_advantages, loss_weights.token_mean",
        **ACTOR,
    ),
    "areal_sapo": Parity(
        run=areal_sapo,
        ours="losses.policy_loss(surrogate=sapo, ratio=token_ratio | sequence_mean_ratio), loss_weights.token_mean",
        wrt=("logprobs",),
    ),
    "areal_grpo_loss_full": Parity(
        run=areal_grpo_loss_full,
        ours=f"proximal.approximate_proximal, corrections.limit_second_moment, {DECOUPLED}; distillation is kl=KLTerm(k1) to the teacher",
        wrt=("logprobs",),
        rules=CLAMPED_ROWS,
    ),
    "areal_critic_loss": Parity(
        run=areal_critic_loss,
        ours="losses.value_loss(huber=10), loss_weights.token_mean",
        wrt=("value",),
        rules=(EMPTY,),
        left_out={"clip_mask": "ours is a mean over the tokens, the metric value_clip_fraction"},
    ),
}
NOT_OFFERED: dict[str, str] = {}

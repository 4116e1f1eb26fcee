"""losses: our compositions for the loss functions of verl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.mapping import Parity, make_batch
from parity.rollout_correction import verl_is_weights, verl_rejection_mask
from rollouts.covariance import clip_cov_tokens, drop_tokens, kl_cov_tokens
from rollouts.loss_weights import fixed_length_mean, sample_mean, sample_sum, scaled, token_mean, token_sum, weighted_sum
from rollouts.losses import clipped_policy_loss, gmpo_policy_loss, kl_cov_policy_loss, policy_loss, value_loss
from rollouts.surrogates import (
    Ratio,
    Surrogate,
    capped,
    cispo,
    clipped,
    dppo,
    dro,
    inside_binary_kl,
    inside_tv,
    reinforce,
    sapo,
    sequence_ratio,
    token_ratio,
)
from rollouts.types import LossFn, TokenOutputs, TrainBatch

bounded_ratio: Ratio = partial(token_ratio, bound=20)
E_TO_THE_10 = 22026.465794806718  # verl's largest sequence ratio, as a log-ratio of 10


def weigh(
    batch: TrainBatch,
    mode: str,
    *,
    dp_size: float = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Their aggregations. Each rank's loss is multiplied by the number of ranks, because gradients are averaged over ranks."""
    length = batch.tokens.shape[1] if loss_scale_factor is None else loss_scale_factor
    aggregation: Callable[[TrainBatch], Tensor] = {
        "token-mean": partial(token_mean, num_tokens=batch_num_tokens),
        "token-sum": token_sum,
        "seq-mean-token-sum": partial(sample_sum, num_rows=global_batch_size),
        "seq-mean-token-sum-norm": partial(fixed_length_mean, length=length, num_rows=global_batch_size),
        "seq-mean-token-mean": partial(sample_mean, num_rows=global_batch_size, epsilon=1e-8),
        "all-rows": partial(sample_mean, count_empty_rows=True),  # GMPO's own
    }[mode]
    return scaled(batch, weigh=aggregation, factor=dp_size)


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **sizes: float | None) -> Mapping[str, Any]:
    given = {name: size for name, size in sizes.items() if size is not None}
    return {"loss": weighted_sum(loss_mat, weigh(make_batch(loss_mask), loss_agg_mode, **given))}


def batch_of(
    response_mask: Tensor, mode: str, old_log_prob: Tensor, advantages: Tensor, rollout_is_weights: Tensor | None = None
) -> TrainBatch:
    batch = make_batch(response_mask, old_log_probs=old_log_prob, advantages=advantages, importance_weights=rollout_is_weights)
    return replace(batch, loss_weights=weigh(batch, mode))


def with_loss(make: Callable[..., LossFn], mode: str | None = None, select: Callable[..., TrainBatch] | None = None) -> Callable[..., Any]:
    """A policy loss of verl: make(**hyper-parameters) is the loss; `mode` fixes the aggregation; `select` looks at the whole batch."""

    def run(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        rollout_is_weights: Tensor | None = None,
        **hyper: Any,
    ) -> Mapping[str, Any]:
        batch = batch_of(response_mask, mode or loss_agg_mode, old_log_prob, advantages, rollout_is_weights)
        if select is not None:
            batch = select(batch, log_prob.detach(), **hyper)
        return {"loss": make(**hyper)(TokenOutputs(log_probs=log_prob), batch).loss}

    return run


def policy(surrogate: Surrogate, ratio: Ratio = token_ratio) -> LossFn:
    return partial(policy_loss, surrogate=surrogate, ratio=ratio)


def ppo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0) -> LossFn:
    return policy(partial(clipped, low=clip_ratio_low, high=clip_ratio_high, dual=clip_ratio_c), bounded_ratio)


def gspo(clip_ratio_low: float, clip_ratio_high: float) -> LossFn:
    return policy(partial(clipped, low=clip_ratio_low, high=clip_ratio_high), capped(sequence_ratio, cap=E_TO_THE_10))


def trust_region(inside: Callable[..., Tensor], clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> LossFn:
    return policy(partial(dppo, low=clip_ratio_low, high=clip_ratio_high, inside=inside, cap=clip_ratio_c, log_ratio_bound=20))


def clip_cov(clip_ratio_low: float, clip_ratio_high: float, **selection: float) -> LossFn:
    return partial(clipped_policy_loss, low=clip_ratio_low, high=clip_ratio_high)


def without_clip_cov(
    batch: TrainBatch,
    log_probs: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> TrainBatch:
    tokens = clip_cov_tokens(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.loss_mask,
        fraction=clip_cov_ratio,
        cov_low=clip_cov_lb,
        cov_high=clip_cov_ub,
        clip_low=clip_ratio_low,
        clip_high=clip_ratio_high,
    )
    return drop_tokens(batch, tokens)


def with_kl_cov(batch: TrainBatch, log_probs: Tensor, *, kl_cov_ratio: float, ppo_kl_coef: float) -> TrainBatch:
    return replace(batch, selected=kl_cov_tokens(log_probs, batch.advantages, batch.loss_mask, fraction=kl_cov_ratio))


def bypass(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    loss_type: str,
    rollout_is: str | None,
    rollout_is_threshold: float | str,
    rollout_is_batch_normalize: bool,
    rollout_rs: str | None,
    rollout_rs_threshold: str | None,
) -> Mapping[str, Any]:
    """The rollout policy is the anchor; weights and rejections compare it with the current policy. PPO's ratio is its own weight."""
    current = log_prob.detach()
    mask, weights = response_mask, None
    if rollout_rs is not None and rollout_rs_threshold is not None:
        mask = verl_rejection_mask(current, old_log_prob, response_mask, rollout_rs, rollout_rs_threshold)["mask"]
        mask = torch.minimum(mask, response_mask.to(mask.dtype))
    if rollout_is is not None and loss_type == "reinforce":
        arguments = (rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
        weights = verl_is_weights(current, old_log_prob, response_mask, *arguments)["weights"]
    batch = batch_of(mask, loss_agg_mode, old_log_prob, advantages, weights)
    loss = {"reinforce": policy(reinforce), "ppo_clip": ppo()}[loss_type]
    return {"loss": loss(TokenOutputs(log_probs=log_prob), batch).loss}


def clipped_value(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float, loss_agg_mode: str
) -> Mapping[str, Any]:
    batch = make_batch(response_mask, returns=returns, values=values)
    outputs = TokenOutputs(log_probs=torch.zeros_like(vpreds), values=vpreds)
    loss, metrics = value_loss(outputs, replace(batch, loss_weights=weigh(batch, loss_agg_mode)), clip=cliprange_value)
    return {"loss": loss, "vf_clipfrac": metrics["value_clip_fraction"]}


def theirs_is_nan(kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> str | None:
    """Their means are 0 / 0 where no token is left, and their means over rows read masked places."""
    return "theirs is NaN where no token is left (ours is 0) or a masked place holds NaN" if outputs["loss"] != outputs["loss"] else None


def loss_parity(run: Callable[..., Any], ours: str, note: str = "") -> Parity:
    return Parity(run=run, ours=ours, wrt=("log_prob",), differs=theirs_is_nan, note=note)


BOUND = "policy_loss(surrogate={}, ratio=partial(token_ratio, bound=20))"
CHOSEN = "chosen under the current policy as theirs; in a run, once before the update ({})"
MAPPINGS: dict[str, Parity] = {
    "verl_agg_loss": Parity(
        run=agg_loss,
        ours="loss_weights.weighted_sum(x, token_mean | token_sum | sample_sum | fixed_length_mean | sample_mean(epsilon=1e-8))",
        wrt=("loss_mat",),
        differs=theirs_is_nan,
        note="a batch without tokens gives 0, not NaN; dp_size is loss_weights.scaled",
    ),
    "verl_ppo_clip_dual": loss_parity(with_loss(ppo), BOUND.format("clipped(dual=3)")),
    "verl_cispo": loss_parity(
        with_loss(lambda clip_ratio_low, clip_ratio_high: policy(partial(cispo, low=clip_ratio_low, high=clip_ratio_high), bounded_ratio)),
        BOUND.format("cispo"),
    ),
    "verl_sapo": loss_parity(
        with_loss(lambda tau_pos, tau_neg: policy(partial(sapo, tau_pos=tau_pos, tau_neg=tau_neg), bounded_ratio), "seq-mean-token-mean"),
        BOUND.format("sapo") + ", sample_mean",
    ),
    "verl_gspo": loss_parity(with_loss(gspo), "policy_loss(surrogate=clipped, ratio=capped(sequence_ratio, cap=exp(10)))"),
    "verl_gmpo": loss_parity(
        with_loss(
            lambda clip_ratio_low, clip_ratio_high: partial(gmpo_policy_loss, low=clip_ratio_low, high=clip_ratio_high, epsilon=1e-8),
            "all-rows",
        ),
        "gmpo_policy_loss(epsilon=1e-8), sample_mean(count_empty_rows=True)",
    ),
    "verl_gpg": loss_parity(with_loss(lambda: policy(reinforce)), "policy_loss(surrogate=reinforce)"),
    "verl_reinforce_is": loss_parity(with_loss(lambda: policy(reinforce)), "policy_loss(surrogate=reinforce), importance_weights"),
    "verl_dro": loss_parity(with_loss(lambda dro_beta: policy(partial(dro, beta=dro_beta))), "policy_loss(surrogate=dro)"),
    "verl_dppo_tv": loss_parity(with_loss(partial(trust_region, inside_tv)), "policy_loss(surrogate=dppo(inside=inside_tv))"),
    "verl_dppo_kl": loss_parity(with_loss(partial(trust_region, inside_binary_kl)), "policy_loss(surrogate=dppo(inside=inside_binary_kl))"),
    "verl_clip_cov": loss_parity(
        with_loss(clip_cov, select=without_clip_cov),
        "clipped_policy_loss after covariance.drop_tokens(clip_cov_tokens(...))",
        CHOSEN.format("covariance.drop_clip_cov"),
    ),
    "verl_kl_cov": loss_parity(
        with_loss(lambda kl_cov_ratio, ppo_kl_coef: partial(kl_cov_policy_loss, coef=ppo_kl_coef), select=with_kl_cov),
        "kl_cov_policy_loss with selected = covariance.kl_cov_tokens(...)",
        CHOSEN.format("covariance.select_kl_cov"),
    ),
    "verl_bypass_mode": loss_parity(
        bypass,
        "policy_loss(surrogate=reinforce | clipped(dual=3)) after corrections.reject_ratios | reject_divergence (from the mask), "
        "truncate_weights | mask_weights, normalize_weights",
    ),
    "verl_value_loss_clip": Parity(run=clipped_value, ours="losses.value_loss", wrt=("vpreds",), differs=theirs_is_nan),
}
NOT_OFFERED: dict[str, str] = {}

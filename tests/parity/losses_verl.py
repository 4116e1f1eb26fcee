"""losses: our compositions for the loss functions of verl."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule, zero_nans
from parity.peers import token_sum
from parity.rollout_correction import verl_is_weights, verl_rejection_mask
from rollouts.algorithms.corrections import keep_tokens
from rollouts.algorithms.covariance import clip_cov_tokens, drop_tokens, kl_cov_tokens
from rollouts.algorithms.kl import KLEstimator, abs_kl, bounded, k1
from rollouts.algorithms.loss_weights import fixed_length_mean, sample_mean, sample_sum, scaled, token_mean, weighted_sum
from rollouts.algorithms.losses import clipped_policy_loss, gmpo_policy_loss, kl_cov_policy_loss, policy_loss, value_loss
from rollouts.algorithms.statistics import masked_mean
from rollouts.algorithms.surrogates import (
    Ratio,
    Surrogate,
    capped,
    cispo,
    cispo_fractions,
    clip_fractions,
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
BOUNDED_K1 = bounded(k1, log_ratio=20)
NO_NAMES: dict[str, str] = {}
CLIPFRAC = {"pg_clipfrac": "clip_fraction"}
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


def with_loss(
    make: Callable[..., LossFn],
    mode: str | None = None,
    select: Callable[..., TrainBatch] | None = None,
    kl: KLEstimator | None = k1,
    names: Mapping[str, str] = NO_NAMES,
) -> Callable[..., Any]:
    """A policy loss of verl.

    Args:
        make: its hyper-parameters -> the loss.
        mode: an aggregation that cannot be chosen.
        select: looks at the whole batch.
        kl: what verl measures between the old policy and the current one.
        names: verl's names of our metrics.
    """

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
        loss, found = make(**hyper)(TokenOutputs(log_probs=log_prob), batch)
        metrics = {theirs: found[ours] for theirs, ours in names.items()}
        if kl is not None:
            metrics["ppo_kl"] = measure(kl, old_log_prob, log_prob, response_mask)
        return {"loss": loss, "metrics": metrics}

    return run


def measure(kl: KLEstimator, old_log_prob: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(kl(old_log_prob, log_prob.detach()), mask, epsilon=1e-8)


def policy(surrogate: Surrogate, ratio: Ratio = token_ratio) -> LossFn:
    return partial(policy_loss, surrogate=surrogate, ratio=ratio)


def ppo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0) -> LossFn:
    return partial(clipped_policy_loss, low=clip_ratio_low, high=clip_ratio_high, dual=clip_ratio_c, ratio=bounded_ratio)


def cispo_loss(clip_ratio_low: float, clip_ratio_high: float) -> LossFn:
    bounds = {"low": clip_ratio_low, "high": clip_ratio_high}
    return partial(policy_loss, surrogate=partial(cispo, **bounds), ratio=bounded_ratio, clip_metrics=partial(cispo_fractions, **bounds))


def gspo(clip_ratio_low: float, clip_ratio_high: float) -> LossFn:
    return partial(clipped_policy_loss, low=clip_ratio_low, high=clip_ratio_high, ratio=capped(sequence_ratio, cap=E_TO_THE_10))


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
    log_ratio = token_ratio(log_probs.detach(), batch.old_log_probs, batch.loss_mask)
    clips = clip_fractions(log_ratio, log_probs, batch.advantages, low=clip_ratio_low, high=clip_ratio_high)
    tokens = clip_cov_tokens(
        log_probs,
        batch.advantages,
        batch.loss_mask,
        clipped=clips["clip_fraction"] > 0,
        fraction=clip_cov_ratio,
        cov_low=clip_cov_lb,
        cov_high=clip_cov_ub,
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
    batch, weights = make_batch(response_mask), None
    if rollout_rs is not None and rollout_rs_threshold is not None:
        kept = verl_rejection_mask(current, old_log_prob, response_mask, rollout_rs, rollout_rs_threshold)["mask"]
        batch = keep_tokens(batch, kept > 0)
    if rollout_is is not None and loss_type == "reinforce":
        arguments = (rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
        weights = verl_is_weights(current, old_log_prob, response_mask, *arguments)["weights"]
    mask, clips = batch.loss_mask, loss_type == "ppo_clip"
    batch = batch_of(mask, loss_agg_mode, old_log_prob, advantages, weights)
    loss, found = {"reinforce": policy(reinforce), "ppo_clip": ppo()}[loss_type](TokenOutputs(log_probs=log_prob), batch)
    metrics = {"ppo_kl": measure(BOUNDED_K1 if clips else k1, old_log_prob, log_prob, mask)}
    return {"loss": loss, "metrics": metrics | ({"pg_clipfrac": found["clip_fraction"]} if clips else {})}


def clipped_value(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float, loss_agg_mode: str
) -> Mapping[str, Any]:
    batch = make_batch(response_mask, returns=returns, values=values)
    outputs = TokenOutputs(log_probs=torch.zeros_like(vpreds), values=vpreds)
    loss, metrics = value_loss(outputs, replace(batch, loss_weights=weigh(batch, loss_agg_mode)), clip=cliprange_value)
    return {"loss": loss, "vf_clipfrac": metrics["value_clip_fraction"]}


def given_nan(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    return any(bool(x.isnan().any()) for x in kwargs.values() if isinstance(x, Tensor))


def nan_rules(mask: str, read: str) -> tuple[Rule, Rule]:
    """Their means are 0 / 0 where no token is left, and their means over rows read masked places."""
    return (
        Rule(
            reason="theirs is NaN where a masked place holds one; what stands there is not read here",
            applies=lambda kwargs, outputs: outputs["loss"] != outputs["loss"] and given_nan(kwargs, outputs),
            given={mask: lambda x: (torch.arange(x.shape[1]) > 0).to(x.dtype).expand_as(x), read: nan_in_front},
            theirs={"loss": math.nan},
        ),
        Rule(
            reason="theirs is NaN where no token is left, ours is 0",
            applies=lambda _, outputs: outputs["loss"] != outputs["loss"],
            gives=lambda outputs: zero_nans({"loss": outputs["loss"]}),
            given={mask: torch.zeros_like},
            theirs={"loss": math.nan},
        ),
    )


def nan_in_front(x: Tensor) -> Tensor:
    return torch.cat((torch.full_like(x[:, :1], math.nan), x[:, 1:]), dim=1)


LOSS_RULES = nan_rules("response_mask", "log_prob")
CONSTANT = {"metrics.pg_clipfrac_lower": "always 0"}
DUAL = {"metrics.pg_clipfrac_lower": "where the dual clip acts is no output of ours"}
OUTSIDE = {
    "metrics.pg_clipfrac": "the share of tokens outside the region",
    "metrics.pg_clipfrac_lower": "the share of capped weights inside it",
}


def loss_parity(run: Callable[..., Any], ours: str, note: str = "", left_out: Mapping[str, str] = NO_NAMES) -> Parity:
    return Parity(run=run, ours=ours, wrt=("log_prob",), rules=LOSS_RULES, note=note, left_out=left_out)


BOUND = "policy_loss(surrogate={}, ratio=partial(token_ratio, bound=20))"
CHOSEN = "chosen under the current policy as theirs; in a run, once before the update ({})"
MAPPINGS: dict[str, Parity] = {
    "verl_agg_loss": Parity(
        run=agg_loss,
        ours="loss_weights.weighted_sum(x, token_mean | peers.token_sum | sample_sum | fixed_length_mean | sample_mean(epsilon=1e-8))",
        wrt=("loss_mat",),
        rules=nan_rules("loss_mask", "loss_mat"),
        note="dp_size is loss_weights.scaled",
    ),
    "verl_ppo_clip_dual": loss_parity(with_loss(ppo, kl=BOUNDED_K1, names=CLIPFRAC), BOUND.format("clipped(dual=3)"), left_out=DUAL),
    "verl_cispo": loss_parity(with_loss(cispo_loss, kl=BOUNDED_K1, names=CLIPFRAC), BOUND.format("cispo"), left_out=CONSTANT),
    "verl_sapo": loss_parity(
        with_loss(
            lambda tau_pos, tau_neg: policy(partial(sapo, tau_pos=tau_pos, tau_neg=tau_neg), bounded_ratio),
            "seq-mean-token-mean",
            kl=BOUNDED_K1,
        ),
        BOUND.format("sapo") + ", sample_mean",
        left_out={"metrics.pg_clipfrac": "always 0", **CONSTANT},
    ),
    "verl_gspo": loss_parity(
        with_loss(gspo, names=CLIPFRAC), "policy_loss(surrogate=clipped, ratio=capped(sequence_ratio, cap=exp(10)))", left_out=CONSTANT
    ),
    "verl_gmpo": loss_parity(
        with_loss(
            lambda clip_ratio_low, clip_ratio_high: partial(gmpo_policy_loss, low=clip_ratio_low, high=clip_ratio_high, epsilon=1e-8),
            "all-rows",
        ),
        "gmpo_policy_loss(epsilon=1e-8), sample_mean(count_empty_rows=True)",
        left_out=dict.fromkeys(
            ("metrics.pg_clipfrac", "metrics.pg_clipfrac_lower"), "theirs counts ratios beyond either bound, ours those where the clip acts"
        ),
    ),
    "verl_gpg": loss_parity(with_loss(lambda: policy(reinforce), kl=None), "policy_loss(surrogate=reinforce)"),
    "verl_reinforce_is": loss_parity(with_loss(lambda: policy(reinforce)), "policy_loss(surrogate=reinforce), importance_weights"),
    "verl_dro": loss_parity(with_loss(lambda dro_beta: policy(partial(dro, beta=dro_beta))), "policy_loss(surrogate=dro)"),
    "verl_dppo_tv": loss_parity(
        with_loss(partial(trust_region, inside_tv), kl=BOUNDED_K1), "policy_loss(surrogate=dppo(inside=inside_tv))", left_out=OUTSIDE
    ),
    "verl_dppo_kl": loss_parity(
        with_loss(partial(trust_region, inside_binary_kl), kl=BOUNDED_K1),
        "policy_loss(surrogate=dppo(inside=inside_binary_kl))",
        left_out=OUTSIDE,
    ),
    "verl_clip_cov": loss_parity(
        with_loss(clip_cov, select=without_clip_cov, names={"pg_clipfrac": "dropped_fraction"}),
        "clipped_policy_loss after covariance.drop_tokens(clip_cov_tokens(...))",
        CHOSEN.format("covariance.drop_clip_cov"),
    ),
    "verl_kl_cov": loss_parity(
        with_loss(lambda kl_cov_ratio, ppo_kl_coef: partial(kl_cov_policy_loss, coef=ppo_kl_coef), select=with_kl_cov, kl=abs_kl),
        "kl_cov_policy_loss with selected = covariance.kl_cov_tokens(...)",
        CHOSEN.format("covariance.select_kl_cov"),
    ),
    "verl_bypass_mode": loss_parity(
        bypass,
        "policy_loss(surrogate=reinforce | clipped(dual=3)) after corrections.reject_ratios | reject_divergence (from the mask), "
        "truncate_weights | mask_weights, peers.normalize_weights",
        left_out=DUAL,
    ),
    "verl_value_loss_clip": Parity(
        run=clipped_value, ours="losses.value_loss", wrt=("vpreds",), rules=nan_rules("response_mask", "vpreds")
    ),
}
NOT_OFFERED: dict[str, str] = {}

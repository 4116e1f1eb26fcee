"""Losses, composed of a ratio, a surrogate and a KL estimator.

    policy_loss = sum(loss_weights * (importance_weights * surrogate + kl_coef * kl - entropy_coef * entropy))

Nothing here is a statistic over rows, so the sum over micro-batches is the loss of the whole.

Each part is one plain function; a surrogate is a loss, so it is minimized. Values at masked places (loss_mask = 0) are replaced by 0
before anything is computed from them: a NaN or infinity there changes neither the loss nor a gradient. Masking after exp would leave NaN
gradients (0 * inf).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.kl import KLEstimator
from rollouts.algorithms.logprobs import finite_exp, token_log_probs
from rollouts.algorithms.statistics import masked_mean
from rollouts.algorithms.surrogates import (
    LOG_RATIO_BOUND,
    Ratio,
    Surrogate,
    clip_fractions,
    clipped,
    clipped_sequence_ratio,
    importance_weighted,
    kl_cov,
    reinforce,
    row_geometric_mean,
    row_mean_advantages,
    token_ratio,
)
from rollouts.checks import check_shapes
from rollouts.types import TOKEN_PREFIX, LossFn, LossOutput, TokenOutputs, TrainBatch, Transform

Reweigh: TypeAlias = Callable[[Tensor, TrainBatch], Tensor]
"""f(log_probs [B, T] without gradient, batch) -> weights of the policy term, [B, T] or [B, 1]."""


@dataclass(frozen=True)
class KLTerm:
    """The KL term of a loss: coef * estimate(log_probs, ref_log_probs) for each token."""

    estimate: KLEstimator  # function from kl.py, or the caller's own
    coef: float = 0.0  # coefficient; batch.kl_coef replaces it if a controller fills it
    unbiased: bool = False  # multiply by the ratio, with its gradient: unbiased if the tokens come from the anchor and not from the
    # policy (DeepSeek-V3.2 2025, section 3.1)


# -- losses on TokenOutputs and TrainBatch


def policy_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    surrogate: Surrogate,
    ratio: Ratio | None = token_ratio,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
    reweigh: Reweigh | None = None,
    clip_metrics: Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]] | None = None,
) -> LossOutput:
    """sum(loss_weights * (importance_weights * surrogate + kl.coef * kl - entropy_coef * entropy)).

    Args:
        outputs: outputs of the current policy; entropy is needed if entropy_coef is not 0.
        batch: advantages and loss_weights filled; old_log_probs, else rollout_log_probs, anchor the ratio; ref_log_probs if kl is used.
        surrogate, ratio: parts from surrogates.py, or the caller's own. ratio=None: the surrogate reads none, so no anchor is
            needed; metrics about the ratio are reported if there is an anchor.
        reweigh: (log_probs without gradient, batch) -> weights # [B, T] of the policy term that depend on the current policy, for example
            a mask of rows that have drifted too far.
        clip_metrics: (log_ratio, log_probs, advantages) without gradient -> further per-token metrics, such as the clipped fraction.

    Returns: the loss (a sum, so micro-batches add up); metrics are means over tokens with loss_mask > 0. If the batch has the columns:
        importance_weight, max_importance_weight, dropped_fraction (weight 0), rollout_kl (k1 of KL(rollout || anchor)).
    Asserts: the columns named above are there.
    """
    weights, mask = _weights_and_mask(outputs, batch)
    anchor = batch.old_log_probs if batch.old_log_probs is not None else batch.rollout_log_probs
    anchored = anchor is not None
    assert anchored or ratio is None, "policy_loss needs batch.old_log_probs or batch.rollout_log_probs"
    assert not (kl is not None and kl.unbiased and ratio is None), "an unbiased KL term multiplies by the ratio, but ratio is None"
    anchor = outputs.log_probs.detach() if anchor is None else anchor  # the surrogate gets a ratio of 1
    assert batch.advantages is not None, "policy_loss needs batch.advantages: call algorithm.estimate first"
    log_probs, anchor, advantages = _where(mask, outputs.log_probs), _where(mask, anchor), _where(mask, batch.advantages)
    log_ratio = (token_ratio if ratio is None else ratio)(log_probs, anchor, batch.loss_mask)
    extra, largest = {"log_prob_mean": log_probs}, dict[str, Tensor]()
    scale: Tensor | None = None
    if batch.importance_weights is not None:
        scale = extra["importance_weight"] = _where(mask, batch.importance_weights)
        extra["dropped_fraction"] = (scale == 0).to(log_probs.dtype)
        largest["max_importance_weight"] = scale.detach().max()
    if reweigh is not None:
        extra["policy_weight"] = _where(mask, reweigh(log_probs.detach(), batch).detach().to(log_probs.dtype).expand_as(log_probs))
        scale = extra["policy_weight"] if scale is None else scale * extra["policy_weight"]
    if scale is None:
        per_token = surrogate(log_ratio, log_probs, advantages)
    else:  # a dropped token is often one whose ratio overflows, and 0 * inf is NaN
        per_token = scale * surrogate(_where(scale != 0, log_ratio), _where(scale != 0, log_probs), advantages)
    if kl is not None:
        assert batch.ref_log_probs is not None, "policy_loss with a KL term needs batch.ref_log_probs"
        ref_log_probs = _where(mask, batch.ref_log_probs)
        divergence = kl.estimate(log_probs, ref_log_probs)
        extra["ref_kl"] = divergence
        if kl.unbiased:
            divergence = divergence * finite_exp(log_ratio)
        per_token = per_token + (kl.coef if batch.kl_coef is None else batch.kl_coef[:, None]) * divergence
    if outputs.entropy is not None:
        extra["entropy"] = _where(mask, outputs.entropy)
        if entropy_coef:  # else it is only a metric, and adds nothing to the gradient, not even 0
            per_token = per_token - entropy_coef * extra["entropy"]
    else:
        assert entropy_coef == 0.0, f"entropy_coef is {entropy_coef}, but outputs.entropy is None: add 'entropy' to Algorithm.requires"
    if clip_metrics is not None and anchored:
        extra.update(clip_metrics(log_ratio.detach(), log_probs.detach(), advantages))
    if batch.old_log_probs is not None and batch.rollout_log_probs is not None:
        extra["rollout_kl"] = _where(mask, batch.rollout_log_probs) - anchor  # k1 of KL(rollout || anchor)
    metrics = _ratio_metrics(log_ratio, batch.loss_mask) if anchored else {}
    metrics |= largest | {name: _mean(x, batch.loss_mask) for name, x in extra.items()}
    if batch.recorded is not None:
        metrics |= mark_tokens(batch, extra, log_ratio if anchored else None)
    return LossOutput((weights * _where(mask, per_token)).sum(), metrics)


def clipped_policy_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    ratio: Ratio = token_ratio,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
) -> LossOutput:
    """policy_loss with the `clipped` surrogate and the fractions of tokens that it clips."""
    return policy_loss(
        outputs,
        batch,
        surrogate=partial(clipped, low=low, high=high, dual=dual),
        ratio=ratio,
        kl=kl,
        entropy_coef=entropy_coef,
        clip_metrics=partial(clip_fractions, low=low, high=high, dual=dual),
    )


def gmpo_policy_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    low: float = 0.4,
    high: float = 0.4,
    bound: float | None = None,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
    epsilon: float = 0.0,
) -> LossOutput:
    """-A_i * (geometric mean over the row of the token ratios, each clipped to [e^-low, e^high] on the side that A_i selects).

    With sample_mean weights: the mean over rows. Advantages are averaged over each row, and so are importance weights (geometric mean).

    Args:
        low, high: widths in nats.
        bound: bound of each token's log-ratio, see surrogates.token_ratio; None = no bound.
        epsilon: added to the number of tokens of a row (verl 1e-8).
        kl, entropy_coef: as in policy_loss.

    Source: Zhao et al. 2025 (Geometric-mean policy optimization), section 4.
    """
    assert batch.advantages is not None, "gmpo_policy_loss needs batch.advantages: call algorithm.estimate first"
    mask = batch.loss_mask
    advantages = row_mean_advantages(batch.advantages, mask, epsilon=epsilon)
    weights = batch.importance_weights
    ratio = partial(clipped_sequence_ratio, advantages=batch.advantages, low=low, high=high, bound=bound, epsilon=epsilon)
    averaged = replace(
        batch, advantages=advantages, importance_weights=None if weights is None else row_geometric_mean(weights, mask, epsilon=epsilon)
    )
    loss, metrics = policy_loss(outputs, averaged, surrogate=importance_weighted, ratio=ratio, kl=kl, entropy_coef=entropy_coef)
    anchor = batch.old_log_probs if batch.old_log_probs is not None else batch.rollout_log_probs
    assert anchor is not None, "gmpo_policy_loss needs batch.old_log_probs or batch.rollout_log_probs"
    log_probs = outputs.log_probs.detach()
    each = clip_fractions(token_ratio(log_probs, anchor, mask), log_probs, advantages, low=-math.expm1(-low), high=math.expm1(high))
    marks = {} if batch.recorded is None else mark_tokens(averaged, each, None)
    return LossOutput(loss, {**metrics, **{name: _mean(x, mask) for name, x in each.items()}, **marks})


def kl_cov_policy_loss(
    outputs: TokenOutputs,
    batch: TrainBatch,
    *,
    coef: float = 1.0,
    ratio: Ratio = token_ratio,
    kl: KLTerm | None = None,
    entropy_coef: float = 0.0,
) -> LossOutput:
    """policy_loss with -A r, plus coef * |log r| at batch.selected (covariance.select_kl_cov fills it). No clip.

    Args:
        coef: strength of the pull at selected tokens, >= 0.
        ratio, kl, entropy_coef: as in policy_loss.

    Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models: KL-Cov).
    """
    assert batch.selected is not None, "kl_cov_policy_loss needs batch.selected: append covariance.select_kl_cov to Algorithm.estimate"
    surrogate = partial(kl_cov, selected=batch.selected, coef=coef)
    loss, metrics = policy_loss(outputs, batch, surrogate=surrogate, ratio=ratio, kl=kl, entropy_coef=entropy_coef)
    return LossOutput(loss, {**metrics, "selected": _mean(batch.selected.to(loss.dtype), batch.loss_mask)})


def corrected_loss(outputs: TokenOutputs, batch: TrainBatch, *, correction: Transform, loss: LossFn, from_own: bool = False) -> LossOutput:
    """Compute `loss` on the corrected batch, for example with importance weights of rollout against trainer.

    The correction must treat each row separately. Here, unlike in `estimate`, it can also use log-probs of the forward pass that is
    differentiated (see Algorithm.loss_only).

    Args:
        from_own: the correction finds the policy's log-probs of this pass, without gradient, as old_log_probs; the metric rollout_kl is
            then that of KL(rollout || policy), whatever the correction makes of the two.
    """
    if not from_own:
        return loss(outputs, correction(batch))
    own = outputs.log_probs.detach()
    value, metrics = loss(outputs, correction(replace(batch, old_log_probs=own)))
    if batch.rollout_log_probs is not None:
        metrics = {**metrics, "rollout_kl": _mean(_where(batch.loss_mask > 0, batch.rollout_log_probs - own), batch.loss_mask)}
    return LossOutput(value, metrics)


def mark_tokens(batch: TrainBatch, per_token: Mapping[str, Tensor], log_ratio: Tensor | None) -> dict[str, Tensor]:
    """Tell of each token whether the loss clips it or leaves it out, and its ratio: columns # [B, T] for a record, see LossOutput.

    The metric x_fraction is the mean over trained tokens of the mark x, since both are made of the same column; for clip_fraction there
    are the marks clip_low and clip_high. A token can have several marks.

    Args:
        batch: as the loss reads it.
        per_token: columns that metrics are means of; those of 0 and 1 have _fraction in their names. policy_weight is 0 for what a loss
            masks by itself.
        log_ratio: # [B, T] as the surrogate reads it; None = no ratio.

    Returns: a column of 0 and 1 for each mark: besides the named ones no_advantage, no_weight (loss weight 0) and masked (loss_mask or
        policy_weight 0), of which a token with loss_mask 0 has the last alone; ratio, 1 where loss_mask is 0.
    """
    mask = batch.loss_mask > 0
    shares = {name: x for name, x in per_token.items() if "_fraction" in name and f"{name}_low" not in per_token}
    marks = {name.replace("_fraction", ""): x > 0 for name, x in shares.items()}
    if batch.advantages is not None:
        marks["no_advantage"] = batch.advantages == 0
    if batch.loss_weights is not None:
        marks["no_weight"] = batch.loss_weights == 0
    masked = ~mask if "policy_weight" not in per_token else ~mask | (per_token["policy_weight"] == 0)
    columns = {name: (mark & mask).to(batch.loss_mask.dtype) for name, mark in marks.items()}
    columns["masked"] = masked.to(batch.loss_mask.dtype)
    if log_ratio is not None:
        columns["ratio"] = _where(mask, log_ratio.detach()).exp()
    return {TOKEN_PREFIX + name: column for name, column in columns.items()}


def sft_loss(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    """-sum(loss_weights * log_probs): the negative log-likelihood of the trained tokens.

    Equals policy_loss with the `reinforce` surrogate and advantage 1. With token_mean weights: the cross entropy of the trained tokens.
    """
    weights, mask = _weights_and_mask(outputs, batch)
    log_probs = _where(mask, outputs.log_probs)
    metrics = {"log_prob_mean": _mean(log_probs, batch.loss_mask)}
    if outputs.entropy is not None:
        metrics["entropy"] = _mean(_where(mask, outputs.entropy), batch.loss_mask)
    return LossOutput(-(weights * log_probs).sum(), metrics)


def dft_loss(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    """-sum(loss_weights * sg(p) * log p), p the probability of the token: SFT without its excess gradient on improbable tokens.

    The gradient of -log p is that of a policy with reward 1 / p; the factor cancels the 1 / p.

    Source: Wu et al. 2025 (On the generalization of SFT: dynamic fine-tuning), its token-level loss.
    """
    weights, mask = _weights_and_mask(outputs, batch)
    log_probs = _where(mask, outputs.log_probs)
    probability = log_probs.detach().exp()
    metrics = {"log_prob_mean": _mean(log_probs, batch.loss_mask), "probability": _mean(probability, batch.loss_mask)}
    return LossOutput(-(weights * probability * log_probs).sum(), metrics)


def distillation_loss(
    outputs: TokenOutputs, batch: TrainBatch, *, surrogate: Surrogate = importance_weighted, ratio: Ratio = token_ratio
) -> LossOutput:
    """policy_loss with A = log p_teacher - log p, without gradient: on-policy distillation.

    At sampled tokens the gradient of -A r is that of KL(policy || teacher), corrected by the ratio if the anchor sampled them.

    Args:
        batch: ref_log_probs are the teacher's; loss_weights and an anchor as in policy_loss. Its advantages are not read.
        surrogate, ratio: as in policy_loss.

    Source: Agarwal et al. 2024 (On-policy distillation of language models), with the reverse KL of sampled tokens.
    """
    assert batch.ref_log_probs is not None, "distillation_loss needs batch.ref_log_probs, the teacher's"
    advantages = (batch.ref_log_probs - outputs.log_probs).detach()
    return policy_loss(outputs, replace(batch, advantages=advantages), surrogate=surrogate, ratio=ratio)


def entropy_loss(outputs: TokenOutputs, batch: TrainBatch, *, coef: float) -> LossOutput:
    """-coef * sum(loss_weights * entropy): an entropy bonus with its own weights; for those of the policy term use its entropy_coef."""
    weights, mask = _weights_and_mask(outputs, batch)
    assert outputs.entropy is not None, "entropy_loss needs outputs.entropy: add 'entropy' to Algorithm.requires"
    entropy = _where(mask, outputs.entropy)
    return LossOutput(-coef * (weights * entropy).sum(), {"entropy": _mean(entropy, batch.loss_mask)})


def total_loss(parts: Mapping[str, LossOutput]) -> LossOutput:
    """Sum losses on the same outputs, each with its own weights (policy, supervised and distilled tokens of one batch, for example).

    Args:
        parts: name -> loss; a metric m of it is logged as m/name. Columns of single tokens (LossOutput) are left out: each part has others.
    """
    losses = [part.loss for part in parts.values()]
    assert losses, "total_loss needs at least one part"
    metrics = {
        f"{metric}/{name}": value
        for name, part in parts.items()
        for metric, value in part.metrics.items()
        if not metric.startswith(TOKEN_PREFIX)
    }
    return LossOutput(torch.stack(losses).sum(), metrics)


def value_loss(
    outputs: TokenOutputs, batch: TrainBatch, *, clip: float | None = 0.2, huber: float | None = None, factor: float = 0.5
) -> LossOutput:
    """factor * sum(loss_weights * max((V - R)^2, (V_clip - R)^2)), V_clip = clamp(V, V_old - clip, V_old + clip).

    Args:
        outputs: values # [B, T] of the critic.
        batch: values (of the critic at collection time), returns and loss_weights filled.
        clip: > 0, width of the range around the old value; None = no clipping.
        huber: > 0; errors beyond it count linearly, 2 huber |e| - huber^2 instead of e^2 (AReaL: 10). None = off.
        factor: factor of the square; 0.5 makes the gradient V - R (verl and AReaL; slime has no factor, that is 1).

    Source: Schulman et al. 2017, section 5, with the clipping of OpenAI's baselines.
    """
    assert clip is None or clip > 0, f"clip is {clip}, expected more than 0"
    assert huber is None or huber > 0, f"huber is {huber}, expected more than 0"
    assert factor > 0, f"factor is {factor}, expected more than 0"
    weights, mask = _weights_and_mask(outputs, batch)
    assert outputs.values is not None, "value_loss needs outputs.values: the model has no value head"
    assert batch.returns is not None, "value_loss needs batch.returns: call algorithm.estimate first"
    values, returns = _where(mask, outputs.values), _where(mask, batch.returns)
    per_token = _square(values - returns, huber)
    metrics: dict[str, Tensor] = {
        "value_mean": _mean(values, batch.loss_mask),
        "value_error": _mean((values - returns).abs(), batch.loss_mask),
    }
    if clip is not None:
        assert batch.values is not None, "value_loss with clip needs batch.values of collection time"
        old = _where(mask, batch.values)
        bounded = _square(values.clamp(old - clip, old + clip) - returns, huber)
        metrics["value_clip_fraction"] = _mean((bounded > per_token).to(values.dtype), batch.loss_mask)
        per_token = torch.maximum(per_token, bounded)
    return LossOutput(factor * (weights * per_token).sum(), metrics)


def merge_metrics(parts: Sequence[tuple[Mapping[str, float | Tensor], int]]) -> dict[str, float]:
    """Merge the metrics of micro-batches.

    Args:
        parts: (metrics, number of tokens with loss_mask > 0) of each. A metric missing from a part is averaged over the others.

    Returns: token-weighted means; names that begin with `max_` or `min_` take the largest or smallest. Parts without tokens are ignored.
    """
    names = {name: None for metrics, _ in parts for name in metrics}  # in order of appearance
    merged: dict[str, float] = {}
    for name in names:
        values = [(float(metrics[name]), count) for metrics, count in parts if name in metrics and count > 0]
        if not values:
            merged[name] = 0.0
        elif name.startswith("max_"):
            merged[name] = max(value for value, _ in values)
        elif name.startswith("min_"):
            merged[name] = min(value for value, _ in values)
        else:
            merged[name] = sum(value * count for value, count in values) / sum(count for _, count in values)
    return merged


# -- named losses on logits, for a first look and for comparing with other code


def plain_batch(tokens: Tensor, loss_mask: Tensor, advantages: Tensor, old_log_probs: Tensor | None = None) -> TrainBatch:
    """Return the columns that policy_loss reads, with token_mean weights; every row is its own group and trained on.

    Args:
        tokens, loss_mask: # [B, T].
        advantages: # [B] or [B, T].
        old_log_probs: # [B, T]; None = none, for losses without a ratio.
    """
    rows, width = tokens.shape
    check_shapes(loss_mask=(loss_mask, (rows, width)), old_log_probs=(old_log_probs, (rows, width)))
    mask = loss_mask.to(advantages.dtype if advantages.is_floating_point() else torch.float32)
    total = mask.sum()
    return TrainBatch(
        tokens=tokens,
        lengths=torch.full((rows,), width, device=tokens.device),
        loss_mask=mask,
        rewards=torch.zeros(rows, device=tokens.device),
        group_ids=torch.arange(rows, device=tokens.device),
        trainable=torch.ones(rows, dtype=torch.bool, device=tokens.device),
        old_log_probs=old_log_probs,
        advantages=advantages[:, None].expand(rows, width) if advantages.dim() == 1 else advantages,
        loss_weights=torch.where(total > 0, mask / total.clamp(min=1e-30), torch.zeros_like(mask)),
    )


def reinforce_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> LossOutput:
    """-mean over trained tokens of A * log p(label).

    Args:
        logits: # [B, T, V] of a causal model on `labels`.
        labels: # [B, T] int64, the tokens themselves, not shifted: the shift happens here, so position t is about labels[:, t].
        loss_mask: # [B, T] aligned with labels; the first token of a row has no prediction and should be 0.
        advantages: # [B] or [B, T].

    Returns: loss 0 and gradient 0 for a batch that is masked out entirely.
    """
    batch = plain_batch(labels, loss_mask, advantages)
    return policy_loss(TokenOutputs(log_probs=token_log_probs(logits, labels)), batch, surrogate=reinforce, ratio=None)


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> LossOutput:
    """-mean over trained tokens of A * log p(label): GRPO's on-policy gradient, with all ratios 1. Arguments as reinforce_loss.

    For GRPO off policy or with a KL term use ppo_loss, or algorithms.grpo in the loop.
    """
    return reinforce_loss(logits, labels, loss_mask, advantages)


def ppo_loss(
    logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor, old_log_probs: Tensor, clip_range: float = 0.2
) -> LossOutput:
    """-mean over trained tokens of min(r A, clip(r, 1 - clip_range, 1 + clip_range) A) (Schulman et al. 2017, equation 7).

    Args:
        logits, labels, loss_mask, advantages: as in reinforce_loss.
        old_log_probs: # [B, T] aligned with labels.
        clip_range: width on both sides.
    """
    batch = plain_batch(labels, loss_mask, advantages, old_log_probs)
    return clipped_policy_loss(TokenOutputs(log_probs=token_log_probs(logits, labels)), batch, low=clip_range, high=clip_range)


def compute_policy_loss(
    old_log_probs: Tensor, log_probs: Tensor, advantages: Tensor, response_mask: Tensor, clip_ratio: float = 0.2
) -> LossOutput:
    """PPO's clipped loss, token mean, on log-probs: all arguments # [B, T] and aligned with each other."""
    batch = plain_batch(torch.zeros_like(response_mask, dtype=torch.int64), response_mask, advantages, old_log_probs)
    return clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch, low=clip_ratio, high=clip_ratio)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    old_values: Tensor | None,
    response_mask: Tensor,
    cliprange_value: float | None = 0.2,
) -> LossOutput:
    """value_loss, token mean: all tensors # [B, T]. old_values may be None if cliprange_value is (no clipping)."""
    batch = plain_batch(torch.zeros_like(response_mask, dtype=torch.int64), response_mask, returns)
    batch = replace(batch, returns=returns, values=old_values)
    return value_loss(TokenOutputs(log_probs=torch.zeros_like(vpreds), values=vpreds), batch, clip=cliprange_value)


# -- parts


def _weights_and_mask(outputs: TokenOutputs, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    shape = tuple(batch.tokens.shape)
    check_shapes(log_probs=(outputs.log_probs, shape), entropy=(outputs.entropy, shape), values=(outputs.values, shape))
    assert batch.loss_weights is not None, "the loss needs batch.loss_weights: call algorithm.weigh (or token_mean) on the whole step first"
    return batch.loss_weights, batch.loss_mask > 0


def _square(error: Tensor, huber: float | None) -> Tensor:
    """error^2, with `huber` continued linearly (value and slope) beyond it."""
    if huber is None:
        return error.square()
    return torch.where(error.abs() <= huber, error.square(), huber * (2 * error.abs() - huber))


def _where(mask: Tensor, x: Tensor) -> Tensor:
    """x where mask is True, else 0 with gradient 0."""
    return torch.where(mask, x, torch.zeros_like(x))


def _mean(x: Tensor, loss_mask: Tensor) -> Tensor:
    return masked_mean(x.detach(), (loss_mask > 0).to(x.dtype))


def _ratio_metrics(log_ratio: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """Measure the distance of policy and anchor. approx_kl is k3 of KL(old || new) at tokens drawn from old: r - 1 - log r.

    One token far from its anchor must not make a mean infinite: log r is bounded by LOG_RATIO_BOUND. Below |log r| of 3e-4, as after small
    updates, r - 1 in float32 has lost the square that is measured; expm1 keeps it.
    """
    log_ratio = log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio, on = log_ratio.exp(), loss_mask > 0
    return {
        "approx_kl": _mean(log_ratio.expm1() - log_ratio, loss_mask),
        "ratio_mean": _mean(ratio, loss_mask),
        "max_ratio": torch.where(on, ratio, torch.zeros_like(ratio)).max(),
        "min_ratio": torch.where(on, ratio, torch.full_like(ratio, torch.inf)).min() if bool(on.any()) else ratio.new_zeros(()),
    }

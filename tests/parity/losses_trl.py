"""losses: our compositions for the loss functions of trl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule
from rollouts.algorithms import kl, loss_weights, losses, statistics, surrogates
from rollouts.algorithms.corrections import mask_off_policy_rows
from rollouts.algorithms.covariance import drop_tokens
from rollouts.types import LossOutput, TokenOutputs, TrainBatch

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def as_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """# [B], [B, 1] or [B, T] -> [B, T]."""
    return (x[:, None] if x.dim() == 1 else x).expand(mask.shape)


def weigher(
    loss_type: str, max_completion_length: int, num_items_in_batch: int | None, accumulation: int, steps_per_generation: int
) -> Callable[[TrainBatch], Tensor]:
    """TRL averages over the micro-batches of an optimizer step: a factor of each one's weights."""
    if loss_type in ("dapo", "cispo", "vespo"):
        # the tokens are those of all micro-batches of the rollout
        weigh = partial(loss_weights.token_mean, num_tokens=num_items_in_batch)
        return partial(loss_weights.scaled, weigh=weigh, factor=steps_per_generation / accumulation)
    weigh = {
        "grpo": partial(loss_weights.sample_mean, count_empty_rows=True),
        "sapo": partial(loss_weights.sample_mean, count_empty_rows=True),
        "bnpo": loss_weights.token_mean,
        "dr_grpo": partial(loss_weights.fixed_length_mean, length=max_completion_length, count_empty_rows=True),
        "luspo": partial(loss_weights.sample_sum, count_empty_rows=True),
    }[loss_type]
    return partial(loss_weights.scaled, weigh=weigh, factor=1 / accumulation)


def grpo(
    per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    loss_type: str,
    importance_sampling_level: str,
    epsilon_low: float,
    epsilon_high: float,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    entropies: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    max_completion_length: int = 1,
    num_items_in_batch: int | None = None,
    gradient_accumulation_steps: int = 1,
    steps_per_generation: int = 1,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    entropy_coef: float = 0.0,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Mapping[str, Any]:
    """No old log-probs: the policy itself, as in a first update."""
    old = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps
    batch = make_batch(
        completion_mask,
        advantages=as_tokens(advantages, completion_mask),
        old_log_probs=old,
        rollout_log_probs=old if sampling_per_token_logps is None else sampling_per_token_logps,
        ref_log_probs=ref_per_token_logps,
    )
    if importance_sampling_ratio is not None:
        batch = replace(batch, importance_weights=as_tokens(importance_sampling_ratio, completion_mask))
    if top_entropy_quantile < 1:
        assert entropies is not None
        batch = drop_tokens(batch, ~statistics.top_share(entropies, completion_mask, share=top_entropy_quantile))
    ratio = {"token": surrogates.token_ratio, "sequence": surrogates.sequence_mean_ratio}[importance_sampling_level]
    if loss_type in CLIPPED:
        surrogate = partial(surrogates.clipped, low=epsilon_low, high=epsilon_high, dual=delta)
    elif loss_type == "cispo":
        surrogate = partial(surrogates.cispo, low=1.0, cap=epsilon_high)
    elif loss_type == "sapo":
        surrogate = partial(surrogates.sapo, tau_pos=sapo_temperature_pos, tau_neg=sapo_temperature_neg)
    else:
        assert loss_type == "vespo"
        surrogate, ratio = surrogates.vespo, partial(surrogates.sequence_sum_ratio, bound=20.0)
    accumulation = gradient_accumulation_steps
    weigh = weigher(loss_type, max_completion_length, num_items_in_batch, accumulation, steps_per_generation)
    outputs = TokenOutputs(log_probs=per_token_logps, entropy=entropies)
    parts: dict[str, LossOutput] = {
        "policy": losses.policy_loss(
            outputs,
            replace(batch, loss_weights=weigh(batch)),
            surrogate=surrogate,
            ratio=ratio,
            kl=losses.KLTerm(kl.k3, beta, unbiased=bool(use_bias_correction_kl)) if beta != 0 else None,
            reweigh=None if off_policy_mask_threshold is None else partial(mask_off_policy_rows, threshold=off_policy_mask_threshold),
        )
    }
    if entropy_coef != 0:
        weights = loss_weights.scaled(batch, weigh=loss_weights.token_mean, factor=1 / accumulation)
        parts["entropy"] = losses.entropy_loss(outputs, replace(batch, loss_weights=weights), coef=entropy_coef)
    return {"loss": losses.total_loss(parts).loss}


def small_delta(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    delta = kwargs.get("delta")
    return kwargs["loss_type"] in CLIPPED and delta is not None and delta < 1 + kwargs["epsilon_high"]


def at_a_token(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    share = kwargs.get("top_entropy_quantile", 1.0)
    rank = (int((kwargs["completion_mask"] > 0).sum()) - 1) * (1 - share)
    return share < 1 and abs(rank - round(rank)) < 1e-6


DELTA = "delta is our dual clip, which it equals from 1 + epsilon_high on; a smaller one contradicts the clip"
DELTAS = (
    Rule(
        reason=f"{DELTA}, and up to 1 it is refused",
        applies=lambda kwargs, outputs: small_delta(kwargs, outputs) and kwargs["delta"] <= 1,
        raises=AssertionError,
        given={"loss_type": "grpo", "delta": 0.9},
    ),
    Rule(reason=DELTA, applies=small_delta, given={"loss_type": "grpo", "delta": 1.1, "epsilon_high": 0.2}),
)
VESPO = (
    Rule(
        reason="VESPO takes the engine's ratio into its sequence weight; with us the anchor of the ratio is the rollout policy then",
        applies=lambda kwargs, _: kwargs["loss_type"] == "vespo" and kwargs.get("importance_sampling_ratio") is not None,
        given={"loss_type": "vespo", "importance_sampling_ratio": lambda _: torch.ones(1, 1, dtype=torch.float64)},
    ),
    Rule(
        reason="the KL term is corrected by the ratio of the policy term, which is the sequence's here; TRL corrects by each token's",
        applies=lambda kwargs, _: (
            kwargs["loss_type"] == "vespo"
            and kwargs.get("beta", 0.0) != 0
            and kwargs.get("ref_per_token_logps") is not None
            and bool(kwargs.get("use_bias_correction_kl"))
        ),
        given={"loss_type": "vespo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
)
QUANTILE = Rule(
    reason="the quantile is one token's own entropy, which TRL rounds to float32 and may then find to be too small",
    applies=at_a_token,
    given={
        "completion_mask": lambda mask: torch.zeros_like(mask).index_fill(1, torch.arange(3), 1)[:1].expand_as(mask),
        "top_entropy_quantile": 0.5,
    },
)


def rloo(
    per_token_logps: Tensor, completion_mask: Tensor, old_logps: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Mapping[str, Any]:
    """TRL has the old log-prob of whole rows: it stands at one more place at the start, where the current one is 0."""
    zeros = torch.zeros_like(per_token_logps)
    first = zeros[:, :1]
    mask = torch.cat([torch.ones_like(completion_mask[:, :1]), completion_mask], 1)
    batch = make_batch(mask, advantages=as_tokens(advantages, mask), old_log_probs=torch.cat([old_logps[:, None], zeros], 1))
    batch = replace(batch, loss_weights=loss_weights.sample_mean(batch))
    outputs = TokenOutputs(log_probs=torch.cat([first, per_token_logps], 1))
    surrogate = partial(surrogates.clipped, low=epsilon_low, high=epsilon_high)
    return {"loss": losses.policy_loss(outputs, batch, surrogate=surrogate, ratio=surrogates.sequence_sum_ratio).loss}


def of_grpo(ours: str, rules: tuple[Rule, ...] = ()) -> Parity:
    return Parity(run=grpo, ours=ours, wrt=("per_token_logps",), rules=(*rules, QUANTILE))


CLIP = "losses.policy_loss(surrogate=clipped(low, high, dual=delta), kl=KLTerm(k3, unbiased=True)) with loss_weights."
MAPPINGS: dict[str, Parity] = {
    "trl_bnpo": of_grpo(CLIP + "token_mean", DELTAS),
    "trl_cispo": of_grpo("losses.policy_loss(surrogate=cispo(low=1, cap=...), kl=KLTerm(k3)) with loss_weights.token_mean(num_tokens=...)"),
    "trl_dapo": of_grpo(CLIP + "token_mean(num_tokens=...)", DELTAS),
    "trl_dr_grpo": of_grpo(CLIP + "fixed_length_mean(count_empty_rows=True)", DELTAS),
    "trl_grpo": of_grpo(CLIP + "sample_mean(count_empty_rows=True)", DELTAS),
    "trl_grpo_options": of_grpo(
        "losses.policy_loss(surrogate=clipped, ratio=sequence_mean_ratio or token_ratio, kl=KLTerm(k3), reweigh=mask_off_policy_rows), "
        "covariance.drop_tokens(~statistics.top_share), losses.entropy_loss, added up by losses.total_loss",
        (*DELTAS, *VESPO),
    ),
    "trl_luspo": of_grpo(
        "losses.policy_loss(surrogate=clipped, ratio=sequence_mean_ratio, kl=KLTerm(k3)) with "
        "loss_weights.sample_sum(count_empty_rows=True)",
        DELTAS,
    ),
    "trl_rloo": Parity(
        run=rloo,
        ours="losses.policy_loss(surrogate=clipped, ratio=sequence_sum_ratio) with loss_weights.sample_mean",
        wrt=("per_token_logps",),
        note="a row without tokens has ratio 1 in TRL and adds its advantage to the loss, not to the gradient",
    ),
    "trl_sapo": of_grpo("losses.policy_loss(surrogate=sapo, kl=KLTerm(k3)) with loss_weights.sample_mean(count_empty_rows=True)"),
    "trl_vespo": of_grpo(
        "losses.policy_loss(surrogate=vespo, ratio=sequence_sum_ratio(bound=20)) with loss_weights.token_mean(num_tokens=...)",
        VESPO,
    ),
}
NOT_OFFERED: dict[str, str] = {}

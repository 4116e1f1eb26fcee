"""losses: our compositions for the loss functions of prime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from samples import make_batch
from torch import Tensor

from parity import peers
from parity.mapping import Parity, Rule, pad_rows
from rollouts.algorithms import losses, surrogates
from rollouts.algorithms.corrections import keep_tokens
from rollouts.algorithms.loss_weights import token_mean
from rollouts.types import LossOutput, TokenOutputs, TrainBatch


def columns(mask: Tensor, scale: int, **rows: Sequence[Tensor]) -> TrainBatch:
    """Ragged rows as a batch; the weights divide by prime-rl's count of the tokens of all ranks."""
    batch = make_batch(mask, **{name: pad_rows(x) for name, x in rows.items()})
    return replace(batch, loss_weights=token_mean(batch, num_tokens=scale))


def policy(
    trainer_logprobs: Sequence[Tensor],
    inference_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    mask: Tensor,
    scale: int,
    inside: Callable[[Tensor, Tensor, Tensor], Tensor],
    adv_tau: float,
    kl_tau: float,
) -> LossOutput:
    batch = columns(mask, scale, rollout_log_probs=inference_logprobs, advantages=advantages)
    surrogate = partial(surrogates.penalized_ratio, inside=inside, advantage_scale=adv_tau, penalty=kl_tau)
    return losses.policy_loss(TokenOutputs(log_probs=pad_rows(trainer_logprobs)), batch, surrogate=surrogate)


def default_dppo(
    trainer_logprobs: Sequence[Tensor],
    inference_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Tensor],
    rl_scale: int,
    dppo_mask_low: float,
    dppo_mask_high: float,
    adv_tau: float,
    kl_tau: float,
) -> Mapping[str, Any]:
    inside = partial(surrogates.inside_tv, low=dppo_mask_low, high=dppo_mask_high)
    mask = pad_rows(loss_mask)
    return {"loss": policy(trainer_logprobs, inference_logprobs, advantages, mask, rl_scale, inside, adv_tau, kl_tau).loss}


def ipo(
    trainer_logprobs: Sequence[Tensor],
    inference_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Tensor],
    rl_scale: int,
    ipo_threshold: float,
    adv_tau: float,
    kl_tau: float,
) -> Mapping[str, Any]:
    inside = partial(surrogates.inside_tv_symmetric, width=ipo_threshold)
    mask = pad_rows(loss_mask)
    return {"loss": policy(trainer_logprobs, inference_logprobs, advantages, mask, rl_scale, inside, adv_tau, kl_tau).loss}


def components(
    trainer_logprobs: Sequence[Tensor],
    inference_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_mask: Sequence[Tensor],
    rl_scale: int,
    ref_logprobs: Sequence[Tensor] | None = None,
    ce_weights: Sequence[Tensor] | None = None,
    ref_kl_weights: Sequence[Tensor] | None = None,
    rl_weights: Sequence[Tensor] | None = None,
    ce_scale: int = 1,
    ref_kl_scale: int = 1,
) -> Mapping[str, Any]:
    """A stream of token weights is a fractional mask: the tokens of a component are those where its stream is not 0."""
    outputs = TokenOutputs(log_probs=pad_rows(trainer_logprobs))
    trained = make_batch(pad_rows(loss_mask))
    if rl_weights is not None:
        trained = keep_tokens(make_batch(pad_rows(rl_weights)), trained.loss_mask > 0)
    inside = partial(surrogates.inside_tv, low=0.2, high=0.2)
    parts = {"rl": policy(trainer_logprobs, inference_logprobs, advantages, trained.loss_mask, rl_scale, inside, 1.0, 1e-3)}
    if ce_weights is not None:
        parts["ce"] = losses.sft_loss(outputs, columns(pad_rows(ce_weights), ce_scale))
    if ref_kl_weights is not None:
        assert ref_logprobs is not None
        batch = columns(pad_rows(ref_kl_weights), ref_kl_scale, rollout_log_probs=inference_logprobs, ref_log_probs=ref_logprobs)
        surrogate = partial(surrogates.penalized_ratio, inside=partial(peers.inside_tv_lower, width=0.2), penalty=1e-3)
        parts["ref_kl"] = losses.distillation_loss(outputs, batch, surrogate=surrogate)
    return {"loss": losses.total_loss(parts).loss}


def has_negative_weights(kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> bool:
    return any(bool((row < 0).any()) for name in ("ce_weights", "ref_kl_weights", "rl_weights") for row in kwargs.get(name) or ())


NEGATIVE_WEIGHTS = Rule(
    reason="a negative token weight is not a mask, and its token is left out; there it changes the sign of the loss",
    applies=has_negative_weights,
    given={"ce_weights": lambda rows: [-row for row in rows]},
)


MAPPINGS: dict[str, Parity] = {
    "prime_default_dppo": Parity(
        run=default_dppo,
        ours="losses.policy_loss(surrogate=penalized_ratio(inside=inside_tv)) with loss_weights.token_mean(num_tokens=...)",
        wrt=("trainer_logprobs",),
    ),
    "prime_ipo": Parity(
        run=ipo,
        ours="losses.policy_loss(surrogate=penalized_ratio(inside=inside_tv_symmetric)) with loss_weights.token_mean(num_tokens=...)",
        wrt=("trainer_logprobs",),
    ),
    "prime_ref_kl_ce": Parity(
        run=components,
        ours="losses.total_loss of policy_loss(surrogate=penalized_ratio), sft_loss and distillation_loss(surrogate=penalized_ratio("
        "inside=peers.inside_tv_lower)), each with loss_weights.token_mean(num_tokens=...) of its own tokens",
        wrt=("trainer_logprobs",),
        rules=(NEGATIVE_WEIGHTS,),
    ),
}
NOT_OFFERED: dict[str, str] = {}

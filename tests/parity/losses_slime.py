"""losses: our compositions for the loss functions of slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.kl import slime_estimator
from parity.mapping import Parity, importance_ratio, pad_rows
from parity.peers import token_sum
from rollouts.algorithms.corrections import truncate_weights
from rollouts.algorithms.loss_weights import sample_mean, weighted_sum
from rollouts.algorithms.losses import KLTerm, clipped_policy_loss, policy_loss, value_loss
from rollouts.algorithms.surrogates import (
    Ratio,
    Surrogate,
    cispo,
    cispo_fractions,
    clip_fractions,
    clipped,
    sequence_mean_ratio,
    token_ratio,
)
from rollouts.types import TokenOutputs, TrainBatch

sum_of_sample_means = partial(sample_mean, num_rows=1)  # the caller divides by the number of rollouts


def rows_of(padded: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [row[: len(other)] for row, other in zip(padded, like, strict=True)]


def batch_of(loss_masks: list[Tensor], per_token: bool = False, **columns: list[Tensor]) -> TrainBatch:
    batch = make_batch(pad_rows(loss_masks), **{name: pad_rows(rows) for name, rows in columns.items()})
    return replace(batch, loss_weights=(token_sum if per_token else sum_of_sample_means)(batch))


def unmasked(surrogate: Surrogate, log_probs: list[Tensor], old: list[Tensor], advantages: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The surrogate and the log-ratio at all tokens, masked or not."""
    everywhere = pad_rows([torch.ones_like(row) for row in log_probs])
    log_ratio = token_ratio(pad_rows(log_probs), pad_rows(old), everywhere)
    return rows_of(surrogate(log_ratio, pad_rows(log_probs), pad_rows(advantages)), log_probs), log_ratio


def slime_policy_loss(
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    calculate_per_token_loss: bool = False,
) -> Mapping[str, Any]:
    batch = batch_of(loss_masks, calculate_per_token_loss, old_log_probs=old_log_probs, advantages=advantages)
    clip = partial(clipped_policy_loss, low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    surrogate = partial(clipped, low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    token_loss, log_ratio = unmasked(surrogate, log_probs, old_log_probs, advantages)
    fractions = clip_fractions(log_ratio, pad_rows(log_probs), pad_rows(advantages), low=eps_clip, high=eps_clip_high)["clip_fraction"]
    loss = clip(TokenOutputs(log_probs=pad_rows(log_probs)), batch).loss
    return {"loss": loss, "token_loss": token_loss, "clipfrac": rows_of(fractions, log_probs)}


def slime_cispo(
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
    eps_clip: float,
    eps_clip_high: float,
) -> Mapping[str, Any]:
    batch = batch_of(loss_masks, old_log_probs=old_log_probs, advantages=advantages)
    surrogate = partial(cispo, low=eps_clip, high=eps_clip_high)
    token_loss, log_ratio = unmasked(surrogate, log_probs, old_log_probs, advantages)
    fractions = cispo_fractions(log_ratio, pad_rows(log_probs), pad_rows(advantages), low=eps_clip, high=eps_clip_high)["clip_fraction"]
    loss = policy_loss(TokenOutputs(log_probs=pad_rows(log_probs)), batch, surrogate=surrogate).loss
    return {"loss": loss, "token_loss": token_loss, "clipfrac": rows_of(fractions, log_probs)}


def slime_gspo(
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
    eps_clip: float,
    eps_clip_high: float,
) -> Mapping[str, Any]:
    """Theirs is KL(old || new), hence seq_kl with the arguments exchanged; it is the same at every token of a row."""
    batch = batch_of(loss_masks, old_log_probs=old_log_probs, advantages=advantages)
    outputs = TokenOutputs(log_probs=pad_rows(log_probs))
    seq_kl = sequence_mean_ratio(pad_rows(old_log_probs), outputs.log_probs, batch.loss_mask)
    first = batch.loss_mask.argmax(1, keepdim=True)
    loss = clipped_policy_loss(outputs, batch, low=eps_clip, high=eps_clip_high, ratio=sequence_mean_ratio).loss
    return {"loss": loss, "seq_kl": seq_kl.gather(1, first)[:, 0]}


def slime_full(
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    ref_log_probs: list[Tensor],
    entropy: list[Tensor],
    advantages: list[Tensor],
    loss_masks: list[Tensor],
    advantage_estimator: str,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
    use_tis: bool,
    tis_clip: float,
    tis_clip_low: float,
    use_kl_loss: bool,
    kl_loss_type: str,
    kl_loss_coef: float,
    use_unbiased_kl: bool,
    entropy_coef: float,
) -> Mapping[str, Any]:
    batch = batch_of(
        loss_masks,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        ref_log_probs=ref_log_probs,
        advantages=advantages,
    )
    if use_tis:
        batch = truncate_weights(batch, floor=tis_clip_low, cap=tis_clip, log_bound=None)
    outputs = TokenOutputs(log_probs=pad_rows(log_probs), entropy=pad_rows(entropy))
    ratio: Ratio = sequence_mean_ratio if advantage_estimator == "gspo" else token_ratio
    surrogate: Surrogate = partial(clipped, low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    if advantage_estimator == "cispo":
        surrogate = partial(cispo, low=eps_clip, high=eps_clip_high)
    policy = policy_loss(outputs, batch, surrogate=surrogate, ratio=ratio).loss
    found: dict[str, Any] = {"pg_loss": policy, "entropy_loss": weighted_sum(outputs.entropy, batch.loss_weights)}
    kl = None
    if use_kl_loss:
        weights = importance_ratio(outputs.log_probs, batch.old_log_probs, batch.loss_mask) if use_unbiased_kl else None
        kl = KLTerm(slime_estimator(kl_loss_type, weights), kl_loss_coef)
        found["kl_loss"] = weighted_sum(kl.estimate(outputs.log_probs, batch.ref_log_probs), batch.loss_weights)
    whole = policy_loss(outputs, batch, surrogate=surrogate, ratio=ratio, kl=kl, entropy_coef=entropy_coef)
    return {**found, "loss": whole.loss}


def slime_reduction(
    x: list[Tensor], loss_masks: list[Tensor], sample_denoms: list[float] | None = None, calculate_per_token_loss: bool = False
) -> Mapping[str, Any]:
    batch = make_batch(pad_rows(loss_masks))
    lengths = None if sample_denoms is None else torch.tensor(sample_denoms)
    weights = token_sum(batch) if calculate_per_token_loss else sum_of_sample_means(batch, row_lengths=lengths)
    return {"value": weighted_sum(pad_rows(x), weights)}


def slime_value_loss(
    values: list[Tensor], old_values: list[Tensor], returns: list[Tensor], loss_masks: list[Tensor], value_clip: float
) -> Mapping[str, Any]:
    batch = batch_of(loss_masks, values=old_values, returns=returns)
    outputs = TokenOutputs(log_probs=torch.zeros_like(batch.loss_mask), values=pad_rows(values))
    return {"loss": value_loss(outputs, batch, clip=value_clip, factor=1.0).loss}


MAPPINGS: dict[str, Parity] = {
    "slime_policy_loss": Parity(
        run=slime_policy_loss,
        ours="losses.clipped_policy_loss, sample_mean(num_rows=1) or peers.token_sum",
        wrt=("log_probs",),
    ),
    "slime_cispo": Parity(run=slime_cispo, ours="losses.policy_loss(surrogate=cispo), sample_mean(num_rows=1)", wrt=("log_probs",)),
    "slime_gspo": Parity(
        run=slime_gspo,
        ours="losses.clipped_policy_loss(ratio=sequence_mean_ratio), sample_mean(num_rows=1)",
        wrt=("log_probs",),
    ),
    "slime_policy_loss_full": Parity(
        run=slime_full,
        ours="losses.policy_loss(surrogate=clipped | cispo, ratio=token_ratio | sequence_mean_ratio, kl=..., entropy_coef=...) after "
        "corrections.truncate_weights, sample_mean(num_rows=1)",
        wrt=("log_probs",),
    ),
    "slime_sum_of_sample_mean": Parity(
        run=slime_reduction,
        ours="loss_weights.weighted_sum(x, sample_mean(num_rows=1, row_lengths=...) | peers.token_sum)",
        wrt=("x",),
        grad_of="value",
    ),
    "slime_value_loss": Parity(
        run=slime_value_loss,
        ours="losses.value_loss(factor=1), sample_mean(num_rows=1)",
        wrt=("values",),
        left_out={"value_clipfrac": "theirs counts values that moved beyond the clip, ours where the clipped error is larger"},
    ),
}
NOT_OFFERED: dict[str, str] = {}

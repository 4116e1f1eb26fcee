"""sft: our compositions for the vectors of this group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule, pad_rows, zero_nans
from rollouts.algorithms.logprobs import token_log_probs
from rollouts.algorithms.loss_weights import sample_mean, scaled, token_mean
from rollouts.algorithms.losses import dft_loss, sft_loss
from rollouts.types import LossFn, LossOutput, TokenOutputs


def weighted(loss: LossFn, log_probs: Tensor, mask: Tensor, weigh: Any) -> LossOutput:
    """A loss on log-probs aligned with the mask, with the weights of the whole step."""
    batch = make_batch(mask)
    return loss(TokenOutputs(log_probs=log_probs), replace(batch, loss_weights=weigh(batch)))


def align_predictions(rows: Sequence[Tensor]) -> Tensor:
    """Predictions of the tokens behind them -> [B, T] aligned with tokens: 0 for the first, the last prediction is of no token."""
    return pad_rows([torch.cat([row.new_zeros(1), row[:-1]]) for row in rows])


def areal_packed(logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Mapping[str, Any]:
    """A mean over tokens does not see where rows end."""
    return {"loss": weighted(sft_loss, logprobs[None], loss_mask[None], lambda batch: token_mean(batch, epsilon=1e-5)).loss}


def slime_sum_of_means(log_probs: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> Mapping[str, Any]:
    return {"loss": weighted(sft_loss, pad_rows(log_probs), pad_rows(loss_masks), lambda batch: sample_mean(batch, num_rows=1)).loss}


def transformers_causal_lm(logits: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Mapping[str, Any]:
    """The first label is not predicted by anything."""
    mask = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, 1:] != -100], 1)
    log_probs = token_log_probs(logits, torch.where(mask > 0, labels, 0))
    return {"loss": weighted(sft_loss, log_probs, mask, lambda batch: token_mean(batch, num_tokens=num_items_in_batch)).loss}


EMPTY = Rule(
    reason="a batch without labels has loss 0 with us, NaN in transformers",
    applies=lambda kwargs, _: kwargs.get("num_items_in_batch") is None and not bool((kwargs["labels"][:, 1:] != -100).any()),
    gives=zero_nans,
    given={"labels": lambda labels: torch.full_like(labels, -100), "num_items_in_batch": None},
    theirs={"loss": math.nan},
)


def trl_nll_or_dft(log_probs: Tensor, label_mask: Tensor, loss_type: str, num_items_in_batch: int | None = None) -> Mapping[str, Any]:
    loss = {"nll": sft_loss, "dft": dft_loss}[loss_type]
    return {"loss": weighted(loss, log_probs, label_mask, lambda batch: token_mean(batch, num_tokens=num_items_in_batch)).loss}


def verl_packed(log_probs: Sequence[Tensor], loss_mask: Sequence[Tensor], batch_num_tokens: float, dp_size: float = 1) -> Mapping[str, Any]:
    """dp_size undoes the mean over ranks that their gradients go through."""
    aligned, mask = align_predictions(log_probs), pad_rows(loss_mask)
    weigh = lambda batch: scaled(batch, weigh=lambda b: token_mean(b, num_tokens=batch_num_tokens), factor=dp_size)
    return {"loss": weighted(sft_loss, aligned, mask, weigh).loss}


MAPPINGS: dict[str, Parity] = {
    "areal_packed_sft_loss": Parity(run=areal_packed, ours="losses.sft_loss with loss_weights.token_mean(epsilon=1e-5)", wrt=("logprobs",)),
    "slime_sft_loss": Parity(run=slime_sum_of_means, ours="losses.sft_loss with loss_weights.sample_mean(num_rows=1)", wrt=("log_probs",)),
    "transformers_causal_lm_loss": Parity(
        run=transformers_causal_lm,
        ours="losses.sft_loss on logprobs.token_log_probs with loss_weights.token_mean(num_tokens=...)",
        wrt=("logits",),
        rules=(EMPTY,),
    ),
    "trl_sft_nll_dft": Parity(
        run=trl_nll_or_dft,
        ours="losses.sft_loss, losses.dft_loss with loss_weights.token_mean(num_tokens=...)",
        wrt=("log_probs",),
        grad_mask="label_mask",
        note="TRL puts 0 at unlabelled places before its function, whose own gradient there goes nowhere; ours is 0",
    ),
    "verl_sft_loss": Parity(
        run=verl_packed,
        ours="losses.sft_loss with loss_weights.scaled(token_mean(num_tokens=...), factor=dp_size)",
        wrt=("log_probs",),
    ),
}
NOT_OFFERED: dict[str, str] = {}

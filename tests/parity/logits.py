"""logits: our compositions for the vectors of this group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from samples import make_batch
from torch import Tensor

from parity.mapping import Parity, Rule, zero_nans
from parity.peers import token_sum
from rollouts.algorithms.distillation.divergences import TeacherTops, chunked_divergence, divergence
from rollouts.algorithms.logprobs import (
    Sampling,
    chunked_log_probs,
    entropy_from_logits,
    gather_log_probs,
    sum_of_squared_probs,
    temper,
    token_log_probs,
)
from rollouts.algorithms.loss_weights import fixed_length_mean, sample_mean, sample_sum, token_mean
from rollouts.algorithms.losses import policy_loss
from rollouts.algorithms.surrogates import reinforce
from rollouts.types import TokenOutputs


def differentiated(log_probs: Tensor, entropy: Tensor | None = None) -> Tensor:
    """Compute the objective of the recorded gradients: sum(log_probs) + 0.5 * sum(entropy)."""
    return log_probs.sum() if entropy is None else log_probs.sum() + 0.5 * entropy.sum()


def areal_gather(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Mapping[str, Any]:
    """The logits as hidden states under an output layer that is the identity."""
    identity, heat = torch.eye(logits.shape[1], dtype=logits.dtype), torch.full(labels.shape, temperature, dtype=logits.dtype)
    log_probs, entropy = chunked_log_probs(logits, identity, labels, sampling=Sampling(heat), chunk_size=2, with_entropy=True)
    return {"logprobs": log_probs, "entropy": entropy, "sum": differentiated(log_probs, entropy)}


def prime_helpers(logits: Tensor, input_ids: Tensor, pad_value: float | None = None) -> Mapping[str, Any]:
    """Theirs is unshifted first, and has pad_value in front when it is shifted."""
    labels = torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)
    aligned = token_log_probs(logits, input_ids)
    front = torch.full_like(aligned[:, :1], 0.0 if pad_value is None else pad_value)
    return {
        "labels": labels,
        "logprobs": gather_log_probs(logits, labels),
        "entropy": entropy_from_logits(logits),
        "aligned_logprobs": torch.cat([front, aligned[:, 1:]], 1),
        "sum": differentiated(aligned),
    }


def slime_log_probs(logits: Tensor, tokens: Tensor, keep_mask: Tensor | None = None) -> Mapping[str, Any]:
    log_probs, entropy = gather_log_probs(logits, tokens, keep=keep_mask), entropy_from_logits(logits)
    return {"log_probs": log_probs, "entropy": entropy, "sum": differentiated(log_probs, entropy)}


def trl_selective(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None) -> Mapping[str, Any]:
    log_probs = gather_log_probs(temper(logits, temperature), index)
    if row_mask is not None:
        log_probs = torch.where(row_mask.reshape(*row_mask.shape, *(1,) * (index.dim() - 2)) > 0, log_probs, 0.0)
    return {"logprobs": log_probs, "entropy": entropy_from_logits(logits), "sum": differentiated(log_probs)}


def verl_entropy(logits: Tensor, response_mask: Tensor, loss_agg_mode: str) -> Mapping[str, Any]:
    """An entropy bonus with coefficient -1 is the entropy itself."""
    entropy, zeros = entropy_from_logits(logits), torch.zeros_like(logits[..., 0])
    batch = make_batch(response_mask, old_log_probs=zeros, advantages=zeros)
    weigh = {
        "token-mean": token_mean,
        "seq-mean-token-mean": partial(sample_mean, epsilon=1e-8),
        "seq-mean-token-sum": sample_sum,
        "seq-mean-token-sum-norm": partial(fixed_length_mean, length=response_mask.shape[1]),
        "token-sum": token_sum,
    }[loss_agg_mode]
    outputs = TokenOutputs(log_probs=zeros, entropy=entropy)
    batch = replace(batch, loss_weights=weigh(batch))
    return {"entropy": entropy, "entropy_loss": policy_loss(outputs, batch, surrogate=reinforce, entropy_coef=-1.0).loss}


EMPTY = Rule(
    reason="a batch without trained tokens has loss 0 with us, NaN in verl",
    applies=lambda kwargs, _: not bool(kwargs["response_mask"].any()),
    gives=zero_nans,
    given={"response_mask": torch.zeros_like},
    theirs={"entropy_loss": math.nan},
)


def verl_log_probs(logits: Tensor, labels: Tensor) -> Mapping[str, Any]:
    log_probs = gather_log_probs(logits, labels)
    return {"logprobs": log_probs, "sum_pi_squared": sum_of_squared_probs(logits), "sum": differentiated(log_probs)}


def trl_gkd(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, beta: float, temperature: float, reduction: str
) -> Mapping[str, Any]:
    """The student's logits as hidden states under an output layer that is the identity; TRL's "batchmean" is over tokens."""
    on = labels != -100
    rows = student_logits[on]
    theirs, ids = (teacher_logits[on] / temperature).log_softmax(-1).sort(descending=True)
    heat = torch.full((len(rows),), temperature, dtype=rows.dtype)
    identity = torch.eye(rows.shape[1], dtype=rows.dtype)
    found = chunked_divergence(rows, identity, TeacherTops(ids, theirs, beta), temperatures=heat, chunk_size=2)
    return {"loss": found.sum() if reduction == "sum" else found.mean()}


def trl_sparse_jsd(student_log_probs: Tensor, teacher_log_probs: Tensor, beta: float) -> Mapping[str, Any]:
    return {"loss": divergence(student_log_probs, teacher_log_probs, beta, has_rest=True).sum()}


MAPPINGS: dict[str, Parity] = {
    "areal_gather_logprobs_entropy": Parity(
        run=areal_gather,
        ours="logprobs.chunked_log_probs(sampling=..., with_entropy=True)",
        wrt=("logits",),
        grad_of="sum",
    ),
    "prime_logits_helpers": Parity(
        run=prime_helpers,
        ours="logprobs.token_log_probs; gather_log_probs and entropy_from_logits before the shift",
        wrt=("logits",),
        grad_of="sum",
        note="the first token of a row, which nothing predicts, has log-prob 0 with us and log(1 / V) in prime-rl",
    ),
    "slime_log_probs_entropy": Parity(
        run=slime_log_probs,
        ours="logprobs.gather_log_probs(keep=...), entropy_from_logits",
        wrt=("logits",),
        grad_of="sum",
    ),
    "trl_selective_log_softmax_entropy": Parity(
        run=trl_selective,
        ours="logprobs.gather_log_probs(temper(logits, temperature), index), entropy_from_logits",
        wrt=("logits",),
        grad_of="sum",
    ),
    "verl_entropy": Parity(
        run=verl_entropy,
        ours="logprobs.entropy_from_logits; losses.policy_loss(entropy_coef=...)",
        wrt=("logits",),
        grad_of="entropy_loss",
        rules=(EMPTY,),
    ),
    "verl_logprobs_from_logits": Parity(
        run=verl_log_probs,
        ours="logprobs.gather_log_probs, sum_of_squared_probs",
        wrt=("logits",),
        grad_of="sum",
    ),
    "trl_gkd": Parity(run=trl_gkd, ours="divergences.chunked_divergence", wrt=("student_logits",)),
    "trl_sparse_jsd": Parity(run=trl_sparse_jsd, ours="divergences.divergence(has_rest=True)", wrt=("student_log_probs",)),
}
NOT_OFFERED: dict[str, str] = {}

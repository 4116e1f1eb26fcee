"""Aggregation as a weight tensor: f(TrainBatch) -> loss_weights [B, T].

The weights are computed on all rows of an optimizer step, before it is split; the loss is then a plain weighted sum, so micro-batches,
accumulation and data parallelism are exact. Masked tokens and rows that are not trainable have weight 0. A batch without any trained
token has all weights 0, hence loss 0 and gradient 0, never NaN. Fractional masks scale a token's weight.

If a step is spread over ranks or over several calls, its denominators are those of the whole: pass num_tokens, num_rows or num_groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.statistics import group_sum
from rollouts.checks import check_shapes
from rollouts.types import TrainBatch

Weigh: TypeAlias = Callable[[TrainBatch], Tensor]
"""f(batch) -> loss_weights [B, T]."""


def trained_mask(batch: TrainBatch) -> Tensor:
    """Return the loss mask without the rows that are not trainable. # [B, T]."""
    return batch.loss_mask * batch.trainable[:, None].to(batch.loss_mask.dtype)


def token_mean(batch: TrainBatch, *, num_tokens: float | None = None, epsilon: float = 0.0) -> Tensor:
    """1 / (number of trained tokens): every token counts the same (DAPO, Yu et al. 2025, equation 8; SFT).

    Args:
        num_tokens: number in the whole step, if the batch is a part of it; None = that of the batch.
        epsilon: added to the number of tokens (AReaL's SFT 1e-5).
    """
    assert num_tokens is None or num_tokens >= 0, f"num_tokens is {num_tokens}, expected at least 0"
    assert epsilon >= 0, f"epsilon is {epsilon}, expected at least 0"
    mask = trained_mask(batch)
    return _divide(mask, (mask.sum() if num_tokens is None else mask.new_tensor(num_tokens)) + epsilon)


def sample_mean(
    batch: TrainBatch,
    *,
    num_rows: float | None = None,
    count_empty_rows: bool = False,
    row_lengths: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """1 / (length of the row * number of rows): every row counts the same (GRPO, Shao et al. 2024, equation 3).

    Args:
        num_rows: number in the whole step, if the batch is a part of it; None = rows of the batch with a trained token.
        count_empty_rows: None's count includes rows without a trained token (TRL; verl and this library leave them out).
        row_lengths: # [B] divisor of each row; None = its number of trained tokens.
        epsilon: added to the length of each row (verl 1e-8).
    """
    assert epsilon >= 0, f"epsilon is {epsilon}, expected at least 0"
    check_shapes(row_lengths=(row_lengths, (batch.num_rows,)))
    mask = trained_mask(batch)
    lengths = mask.sum(1) if row_lengths is None else row_lengths.to(mask.dtype)
    return _divide(_divide(mask, lengths[:, None] + epsilon), _num_rows(mask, num_rows, count_empty_rows))


def sample_sum(batch: TrainBatch, *, num_rows: float | None = None, count_empty_rows: bool = False) -> Tensor:
    """1 / (number of rows): the log-prob of a row is the sum over its tokens (REINFORCE, RLOO). Arguments as in sample_mean."""
    mask = trained_mask(batch)
    return _divide(mask, _num_rows(mask, num_rows, count_empty_rows))


def group_token_mean(batch: TrainBatch, *, num_groups: float | None = None) -> Tensor:
    """1 / (trained tokens of the group * number of groups): every prompt counts the same.

    Args:
        num_groups: number in the whole step, if the batch is a part of it (groups must be whole); None = those with a trained token.
    """
    assert num_groups is None or num_groups >= 0, f"num_groups is {num_groups}, expected at least 0"
    mask = trained_mask(batch)
    per_group = group_sum(mask.sum(1), batch.group_ids)  # [B]
    count = batch.group_ids[mask.sum(1) > 0].unique().numel() if num_groups is None else num_groups
    return _divide(mask, per_group[:, None] * count)


def fixed_length_mean(batch: TrainBatch, length: float, *, num_rows: float | None = None, count_empty_rows: bool = False) -> Tensor:
    """1 / (length * number of rows) for a constant length (Dr. GRPO, Liu et al. 2025, section 3.2).

    Args:
        length: tokens, for example the token budget of a response.
        num_rows, count_empty_rows: as in sample_mean.
    """
    assert length > 0, f"length is {length}, expected more than 0"
    return sample_sum(batch, num_rows=num_rows, count_empty_rows=count_empty_rows) / length


def scaled(batch: TrainBatch, *, weigh: Weigh, factor: float) -> Tensor:
    """factor * weigh(batch), for example by the number of ranks if gradients are averaged over ranks and not summed."""
    assert factor > 0, f"factor is {factor}, expected more than 0"
    return factor * weigh(batch)


def weighted_sum(per_token: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * per_token), the weighted sum of a loss. Both # [B, T]; returns a scalar.

    Values at weights = 0 are not read: a NaN there changes neither the sum nor its gradient.
    """
    check_shapes(weights=(weights, tuple(per_token.shape)))
    return (weights * torch.where(weights != 0, per_token, torch.zeros_like(per_token))).sum()


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 if the denominator is 0."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, torch.ones_like(denominator)), 0.0)


def _num_rows(mask: Tensor, num_rows: float | None, count_empty_rows: bool) -> Tensor:
    """Return the divisor for a mean over rows, as a scalar."""
    assert num_rows is None or num_rows >= 0, f"num_rows is {num_rows}, expected at least 0"
    if num_rows is not None:
        return mask.new_tensor(num_rows)
    return mask.new_tensor(mask.shape[0]) if count_empty_rows else (mask.sum(1) > 0).sum().to(mask.dtype)

"""Aggregation as a weight tensor: f(TrainBatch) -> loss_weights [B, T].

The weights are computed on all rows of an optimizer step, before it is split; the loss is then a plain weighted sum, so micro-batches,
accumulation and data parallelism are exact. Masked tokens and rows that are not trainable have weight 0. A batch without any trained
token has all weights 0, hence loss 0 and gradient 0, never NaN. Fractional masks scale a token's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.statistics import group_sum
from rollouts.types import TrainBatch


def trained_mask(batch: TrainBatch) -> Tensor:
    """The loss mask without the rows that are not trainable. Returns # [B, T]."""
    return batch.loss_mask * batch.trainable[:, None].to(batch.loss_mask.dtype)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, torch.ones_like(denominator)), 0.0)


def _num_rows(mask: Tensor) -> Tensor:
    """Number of rows with a trained token, as a float scalar."""
    return (mask.sum(1) > 0).sum().to(mask.dtype)


def token_mean(batch: TrainBatch) -> Tensor:
    """1 / (number of trained tokens): every token counts the same (DAPO, Yu et al. 2025, equation 8; SFT)."""
    mask = trained_mask(batch)
    return _divide(mask, mask.sum())


def sample_mean(batch: TrainBatch) -> Tensor:
    """1 / (length of the row * number of rows): every row counts the same (GRPO, Shao et al. 2024, equation 3)."""
    mask = trained_mask(batch)
    return _divide(_divide(mask, mask.sum(1, keepdim=True)), _num_rows(mask))


def sample_sum(batch: TrainBatch) -> Tensor:
    """1 / (number of rows): the log-prob of a row is the sum over its tokens (REINFORCE, RLOO)."""
    mask = trained_mask(batch)
    return _divide(mask, _num_rows(mask))


def group_token_mean(batch: TrainBatch) -> Tensor:
    """1 / (trained tokens of the group * number of groups): every prompt counts the same."""
    mask = trained_mask(batch)
    per_group = group_sum(mask.sum(1), batch.group_ids)  # [B]
    num_groups = batch.group_ids[mask.sum(1) > 0].unique().numel()
    return _divide(mask, per_group[:, None] * num_groups)


def fixed_length_mean(batch: TrainBatch, length: int) -> Tensor:
    """1 / (length * number of rows) for a length that is the same in every batch (Dr. GRPO, Liu et al. 2025, section 3.2).

    Args:
        length: tokens, for example the token budget of a response.
    """
    assert length >= 1, f"length is {length}, expected at least 1"
    return sample_sum(batch) / length

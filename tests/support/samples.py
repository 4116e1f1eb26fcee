"""Samples and batches for tests: around a mask that the test writes down, or of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollouts.algorithms.loss_weights import token_mean
from rollouts.data.collate import collate_samples
from rollouts.types import Sample, TrainBatch


def make_batch(mask: Tensor, **columns: Any) -> TrainBatch:
    """Return a TrainBatch around a loss mask # [B, T] and further columns.

    Columns that are not given: tokens 0, rows as wide as the mask, rewards 0 in its dtype, one group a row, all trainable. A mask of whole
    numbers or flags becomes float64.
    """
    rows, width = mask.shape
    mask = mask if mask.is_floating_point() else mask.double()
    base: dict[str, Any] = {
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "lengths": torch.full((rows,), width),
        "loss_mask": mask,
        "rewards": torch.zeros(rows, dtype=mask.dtype),
        "group_ids": torch.arange(rows),
        "trainable": torch.ones(rows, dtype=torch.bool),
    }
    return TrainBatch(**base | columns)


def draw_lengths(generator: torch.Generator, num_rows: int, longest: int) -> list[int]:
    """Draw a length of at least 2 tokens for each row."""
    return torch.randint(2, longest + 1, (num_rows,), generator=generator).tolist()


def draw_samples(
    generator: torch.Generator, lengths: Sequence[int], *, vocab_size: int = 64, group_size: int = 2, **changes: Any
) -> list[Sample]:
    """Draw samples of random tokens, of which all but the first are trained.

    Args:
        lengths: number of tokens of each.
        group_size: number of neighbors that make a group.
        changes: further fields of every sample.
    """
    samples = []
    for i, length in enumerate(lengths):
        tokens = tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())
        samples.append(Sample(tokens=tokens, loss_mask=(0.0, *(1.0,) * (length - 1)), index=i, group_index=i // group_size, **changes))
    return samples


def draw_batch(seed: int, lengths: Sequence[int] | int, **settings: Any) -> TrainBatch:
    """Draw a batch whose loss weights are those of token_mean.

    Args:
        lengths: number of tokens of each row, or the number of rows of 2 to 11 tokens.
        settings: as in draw_samples.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = draw_lengths(generator, lengths, 11) if isinstance(lengths, int) else lengths
    batch = collate_samples(draw_samples(generator, lengths, **settings))
    return replace(batch, loss_weights=token_mean(batch))

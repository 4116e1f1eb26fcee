"""Samples and batches for tests: around a mask that the test writes down, or of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollouts.algorithms.loss_weights import token_mean
from rollouts.data.collate import collate_samples
from rollouts.types import Group, Sample, Status, TrainBatch


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


def make_sample(index: int = 0, num_prompt: int = 2, num_output: int = 3, group_index: int = 0, **changes: Any) -> Sample:
    """Return a sample whose tokens, log-probs, version and reward tell it from samples of other indices; its output is trained."""
    length = num_prompt + num_output
    values: dict[str, Any] = {
        "tokens": tuple(100 * (index + 1) + t for t in range(length)),
        "loss_mask": (0.0,) * num_prompt + (1.0,) * num_output,
        "rollout_log_probs": (0.0,) * num_prompt + tuple(-0.1 * (t + 1) for t in range(num_output)),
        "weight_versions": (-1,) * num_prompt + (index,) * num_output,
        "reward": float(index),
        "status": Status.COMPLETED,
    }
    return Sample(index=index, group_index=group_index, **(values | changes))


def make_row(tokens: Sequence[int], **fields: Any) -> Sample:
    """Return a sample of these tokens, of which all but the first are trained."""
    return Sample(**{"tokens": tuple(tokens), "loss_mask": (0.0, *(1.0,) * (len(tokens) - 1)), **fields})


def make_versioned_sample(versions: Sequence[int], **changes: Any) -> Sample:
    """Return a sample with one token for each weight version, -1 for one of the prompt; the rollout log-prob of token t is -t."""
    values: dict[str, Any] = {
        "tokens": tuple(range(len(versions))),
        "loss_mask": tuple(float(version >= 0) for version in versions),
        "rollout_log_probs": tuple(-float(t) if version >= 0 else 0.0 for t, version in enumerate(versions)),
        "weight_versions": tuple(versions),
        "reward": 1.0,
        "status": Status.COMPLETED,
    }
    return Sample(**(values | changes))


def make_group(group_index: int = 0, size: int = 2, **fields: Any) -> Group:
    """Return the samples of a prompt, each of one token after the prompt's one."""
    values: dict[str, Any] = {"tokens": (3, 4), "loss_mask": (0.0, 1.0), "status": Status.COMPLETED, "group_index": group_index}
    return tuple(Sample(**(values | {"index": size * group_index + k} | fields)) for k in range(size))


def make_answers(*responses: str, **fields: Any) -> Group:
    """Return a group of responses, without tokens, for rewards to score: samples 10, 11, ... of prompt 3."""
    values: dict[str, Any] = {"prompt": "2+2=", "status": Status.COMPLETED, "group_index": 3}
    return tuple(Sample(**(values | {"response": response, "index": 10 + k} | fields)) for k, response in enumerate(responses))


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
        tokens = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        samples.append(make_row(tokens, index=i, group_index=i // group_size, **changes))
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

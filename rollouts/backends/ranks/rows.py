"""Rows of a batch over ranks: which rank computes which, and one result from those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollouts.algorithms.losses import merge_metrics
from rollouts.backends.unread_metrics import RecordedTokens
from rollouts.batches import plan_shards, select_rows
from rollouts.types import TrainBatch


def plan_rank_rows(lengths: Sequence[int], num_shards: int, rows_per_unit: int = 1) -> list[list[int]]:
    """Deal rows to ranks by batches.plan_shards, so that ranks have nearly the same number of tokens; a rank may get none.

    Args:
        lengths: real tokens of each row.
        rows_per_unit: consecutive rows that stay together.

    Returns: positions of each rank's rows, ascending; every row exactly once.
    """
    units = [range(i, min(i + rows_per_unit, len(lengths))) for i in range(0, len(lengths), rows_per_unit)]
    plan = plan_shards([sum(lengths[row] for row in unit) for unit in units], num_shards)
    return [[row for i in part for row in units[i]] for part in plan]


def count_unit_rows(batch: TrainBatch, rows_per_unit: int) -> int:
    """Return the consecutive rows of a batch that one rank computes together: 2 if the loss compares its pairs."""
    return rows_per_unit if batch.pair_ids is None else 2


def select_part(batch: TrainBatch, rows: Sequence[int]) -> TrainBatch | None:
    """Select rows of a batch; None if there are none."""
    return select_rows(batch, rows) if rows else None


def combine_rows(parts: Sequence[Tensor | None], plan: Sequence[Sequence[int]], shape: tuple[int, int]) -> Tensor:
    """Combine the results of all ranks into one tensor.

    Args:
        parts: # [rows of the rank, T of its rows, ...]; None for a rank without rows.
        plan: result of plan_rank_rows.
        shape: (B, T) of the whole batch.

    Returns: # [B, T, ...]; 0 past the end of a part.
    """
    present = [(part, rows) for part, rows in zip(parts, plan, strict=True) if part is not None]
    assert present, "no rank has rows"
    first = present[0][0]
    out = torch.zeros((*shape, *first.shape[2:]), dtype=first.dtype)
    for part, rows in present:
        out[torch.tensor(rows), : part.shape[1]] = part
    return out


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine each rank's metrics of one forward_backward: loss and num_tokens add, means are weighted by tokens."""
    means = [({k: v for k, v in part.items() if k not in ("loss", "num_tokens")}, int(part["num_tokens"])) for part in parts]
    return {key: sum(part[key] for part in parts) for key in ("loss", "num_tokens")} | merge_metrics(means)


def pack_recorded(records: Sequence[RecordedTokens]) -> list[tuple[int, tuple[int, ...], dict[str, Tensor]]]:
    """Return records as values that ranks exchange."""
    return [(one.call, one.numbers, dict(one.columns)) for one in records]


def combine_recorded(parts: Sequence[Sequence[tuple[int, tuple[int, ...], dict[str, Tensor]]]]) -> tuple[RecordedTokens, ...]:
    """Combine the packed records of all ranks: in the order of the calls, and by rank in each."""
    records = [RecordedTokens(numbers, columns, call) for part in parts for call, numbers, columns in part]
    return tuple(sorted(records, key=lambda one: one.call))

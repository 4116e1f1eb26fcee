"""Estimators, TrainBatch -> TrainBatch: from rewards (and values) to advantages (and returns), once per rollout batch."""

from __future__ import annotations

from dataclasses import replace

from rollouts.advantages import normalize_by_group
from rollouts.statistics import GroupStatistic, group_mean, group_std
from rollouts.types import TrainBatch


def estimate_group_relative(
    batch: TrainBatch,
    *,
    mean_level: GroupStatistic | None = group_mean,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-4,
) -> TrainBatch:
    """Fill advantages with normalize_by_group of the rewards, the same on every trained token of a row.

    Rows that are not trainable count in the statistics of their group.
    """
    advantages = normalize_by_group(batch.rewards, batch.group_ids, mean_level=mean_level, std_level=std_level, epsilon=epsilon)
    return replace(batch, advantages=advantages[:, None] * (batch.loss_mask > 0))

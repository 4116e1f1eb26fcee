"""Statistics over groups and masks, advantages of whole samples and along tokens, and the estimators made of them.

Group statistics take rewards [B] and group_ids [B] (any numbering, any order of rows) and give [B]: each row gets its group's value.
Singleton groups and groups of equal rewards have a defined result everywhere: advantage 0, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.checks import check_finite, check_shapes
from rollouts.types import TrainBatch

GroupStatistic: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(rewards [B], group_ids [B]) -> [B]."""


# -- statistics of groups


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over each row's group. x: # [B]. Returns # [B]."""
    check_shapes(group_ids=(group_ids, tuple(x.shape)))
    _, dense = torch.unique(group_ids, return_inverse=True)
    return torch.zeros(int(dense.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, dense, x)[dense]


def group_count(x: Tensor, group_ids: Tensor) -> Tensor:
    """Number of rows in each row's group. Returns # [B] in the dtype of x."""
    return group_sum(torch.ones_like(x), group_ids)


def group_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over each row's group. Returns # [B]."""
    return group_sum(x, group_ids) / group_count(x, group_ids)


def group_std(x: Tensor, group_ids: Tensor) -> Tensor:
    """Standard deviation (divisor n - 1) of each row's group; 0 for a group of one.

    A group whose values are all the same number gets exactly 0, whatever rounding does to its mean.
    """
    count = group_count(x, group_ids)
    squares = group_sum(group_centered(x, group_ids).square(), group_ids)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.zeros_like(x))


def group_centered(x: Tensor, group_ids: Tensor) -> Tensor:
    """x minus the mean of its group; exactly 0 in groups whose values are all equal."""
    _, dense = torch.unique(group_ids, return_inverse=True)
    num_groups = int(dense.max()) + 1
    low = torch.full((num_groups,), torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, dense, x, "amin")[dense]
    high = torch.full((num_groups,), -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, dense, x, "amax")[dense]
    return torch.where(low == high, torch.zeros_like(x), x - group_mean(x, group_ids))


def leave_one_out_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of the other rows of the group (RLOO, Ahmadian et al. 2024, equation 5); the row itself in a group of one.

    Where all values of a group are equal it is exactly that value: x - mean(others) = n / (n - 1) * (x - mean(all)).
    """
    count = group_count(x, group_ids)
    return x - group_centered(x, group_ids) * (count / (count - 1).clamp(min=1))


def batch_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over the batch, as a group statistic."""
    return group_mean(x, torch.zeros_like(group_ids))


def batch_std(x: Tensor, group_ids: Tensor) -> Tensor:
    """Standard deviation (n - 1) over the batch, as a group statistic."""
    return group_std(x, torch.zeros_like(group_ids))


# -- advantages of whole samples, [B] -> [B]


def compute_advantages(rewards: Tensor, baseline: float | Tensor = 0.0, scale: float | Tensor = 1.0) -> Tensor:
    """A = (r - baseline) / scale.

    Args:
        rewards: # [B] finite.
        baseline: a number, or # [B].
        scale: a number, or # [B]; not 0.

    Returns: # [B].
    """
    check_finite("rewards", rewards)
    return (rewards - baseline) / scale


def normalize_by_group(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mean_level: GroupStatistic | None = group_mean,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-4,
) -> Tensor:
    """A = (r - mean) / (std + epsilon), mean and std each over the group, over the batch, or not at all.

    Groups of one, and groups (or batches) whose rewards are all equal, get exactly 0 where a mean is subtracted.

    Args:
        rewards: # [B] finite.
        group_ids: # [B].
        mean_level: group_mean, batch_mean, leave_one_out_mean, or None.
        std_level: group_std, batch_std, or None.
        epsilon: added to the standard deviation. The paper has none; TRL and slime-like stacks use 1e-4 to 1e-6; we follow TRL.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2.
    """
    check_finite("rewards", rewards)
    if mean_level is group_mean:
        centered = group_centered(rewards, group_ids)
    elif mean_level is batch_mean:
        centered = group_centered(rewards, torch.zeros_like(group_ids))
    else:
        centered = rewards if mean_level is None else rewards - mean_level(rewards, group_ids)
    return centered if std_level is None else centered / (std_level(rewards, group_ids) + epsilon)


def group_ids_from_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Group id of each packed entry: # [R + 1] boundaries -> # [N], for statistics over packed data."""
    return torch.repeat_interleave(torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device), cu_seqlens.diff())


# -- statistics and advantages along tokens, [B, T] -> [B, T]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over entries with mask > 0, weighted by the mask; 0 if there is none. Returns a scalar."""
    total = mask.sum()
    summed = (torch.where(mask > 0, x, torch.zeros_like(x)) * mask).sum()
    return torch.where(total > 0, summed / total.clamp(min=torch.finfo(x.dtype).tiny), torch.zeros_like(summed))


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) over the entries with mask > 0; 0 elsewhere.

    Args:
        x: # [B, T].
        mask: # [B, T].
        shift_mean: False adds the mean back.
        unbiased: divisor n - 1 (verl, OpenRLHF) or n.
    """
    count = mask.sum()
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    whitened = (x - mean) * (variance + epsilon).rsqrt()
    return torch.where(mask > 0, whitened if shift_mean else whitened + mean, torch.zeros_like(x))


def reward_at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Token rewards of an outcome reward: the whole of it on each row's last token with mask > 0.

    Args:
        rewards: # [B].
        mask: # [B, T]; a row without any token gets no reward.

    Returns: # [B, T].
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask > 0, positions, -1).max(dim=1).values  # [B], -1 = none
    return torch.where(positions == last[:, None], rewards[:, None], torch.zeros_like(mask))


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the masked-in tokens; tokens between them (an environment's) are stepped over.

    Args:
        token_rewards, mask: # [B, T].
        gamma: in [0, 1].

    Returns: # [B, T], 0 where mask = 0.
    """
    columns: list[Tensor] = []
    running = torch.zeros_like(token_rewards[:, 0])
    for t in reversed(range(token_rewards.shape[1])):
        on = mask[:, t] > 0
        running = torch.where(on, token_rewards[:, t] + gamma * running, running)
        columns.append(torch.where(on, running, torch.zeros_like(running)))
    return torch.stack(columns[::-1], dim=1)


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t, over the masked-in tokens.

    t + 1 is the next token with mask > 0, so environment tokens between two turns are stepped over; behind the last one V = A = 0.

    Args:
        token_rewards, values, mask: # [B, T].
        gamma, lam: in [0, 1].

    Returns: # [B, T], 0 where mask = 0.
    Source: Schulman et al. 2016, equation 16.
    """
    columns: list[Tensor] = []
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        on = mask[:, t] > 0
        here = token_rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        advantage = torch.where(on, here, advantage)
        next_value = torch.where(on, values[:, t], next_value)
        columns.append(torch.where(on, advantage, torch.zeros_like(advantage)))
    return torch.stack(columns[::-1], dim=1)


# -- estimators, TrainBatch -> TrainBatch


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

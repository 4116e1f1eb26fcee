"""Advantages of whole samples [B] and along tokens [B, T].

Singleton groups and groups of equal rewards have a defined result everywhere: advantage 0, never NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollouts.checks import check_finite
from rollouts.statistics import GroupStatistic, batch_mean, group_centered, group_mean, group_std

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


# -- advantages along tokens, [B, T] -> [B, T]


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

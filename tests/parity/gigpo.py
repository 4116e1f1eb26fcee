"""gigpo: our compositions for the vectors of this group."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.mapping import Parity, group_numbers
from rollouts.algorithms import anchors as gigpo
from rollouts.algorithms.advantages import sum_token_rewards
from rollouts.algorithms.anchors import GiGPOSettings
from rollouts.algorithms.statistics import group_std


def along(row: Tensor, mask: Tensor) -> Tensor:
    """One value a row on every masked-in token."""
    return torch.where(mask > 0, row[:, None], torch.zeros_like(row)[:, None])


def anchor_groups(anchor_obs, index, enable_similarity, similarity_thresh):
    threshold = similarity_thresh if enable_similarity else None
    return {"group": gigpo.anchor_groups(anchor_obs, group_numbers(index), threshold=threshold)}


def step_returns(rewards, traj_uid, gamma):
    return {"returns": gigpo.step_returns(rewards, group_numbers(traj_uid), gamma)}


def episode_norm_reward(token_level_rewards, response_mask, index, traj_index, epsilon, remove_std, compute_mean_std_cross_steps):
    found = gigpo.episode_advantages(
        sum_token_rewards(token_level_rewards),
        group_numbers(index),
        group_numbers(traj_index),
        across_steps=compute_mean_std_cross_steps,
        std_level=None if remove_std else group_std,
        epsilon=epsilon,
        keep_single=True,
    )
    return {"advantages": along(found, response_mask)}


def step_norm_reward(step_rewards, response_mask, group, epsilon, remove_std):
    std_level = None if remove_std else group_std
    found = gigpo.step_advantages(step_rewards, torch.tensor(group), std_level=std_level, epsilon=epsilon)
    return {"advantages": along(found, response_mask)}


def outcome_advantage(
    token_level_rewards,
    rewards,
    gamma,
    response_mask,
    anchor_obs,
    index,
    traj_index,
    epsilon,
    step_advantage_w,
    mode,
    enable_similarity,
    similarity_thresh,
):
    groups, trajectories = group_numbers(index), group_numbers(traj_index)
    step_groups = gigpo.anchor_groups(anchor_obs, groups, threshold=similarity_thresh if enable_similarity else None)
    found = gigpo.gigpo_advantages(
        sum_token_rewards(token_level_rewards),
        rewards,
        groups,
        trajectories,
        step_groups,
        settings=GiGPOSettings(
            gamma=gamma,
            omega=step_advantage_w,
            across_steps=True,
            std_level={"mean_norm": None, "mean_std_norm": group_std}[mode],
            epsilon=epsilon,
            keep_single=True,
        ),
    )
    return {
        "advantages": along(found, response_mask),
        "step_returns": gigpo.step_returns(rewards, trajectories, gamma),
        "group": step_groups,
    }


NOTE = "by default every episode counts once, as in the paper, and a group of one gets 0"

MAPPINGS: dict[str, Parity] = {
    "gigpo_anchor_groups": Parity(run=anchor_groups, ours="gigpo.anchor_groups"),
    "gigpo_step_discounted_returns": Parity(run=step_returns, ours="gigpo.step_returns"),
    "gigpo_episode_norm_reward": Parity(run=episode_norm_reward, ours="gigpo.episode_advantages(keep_single=True)", note=NOTE),
    "gigpo_step_norm_reward": Parity(run=step_norm_reward, ours="gigpo.step_advantages"),
    "gigpo_outcome_advantage": Parity(
        run=outcome_advantage, ours="gigpo.gigpo_advantages(GiGPOSettings(across_steps=True, keep_single=True))", note=NOTE
    ),
}
NOT_OFFERED: dict[str, str] = {}

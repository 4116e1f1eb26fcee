"""GiGPO: groups within groups. Advantages of whole episodes, plus advantages of single steps among all visits to the same state.

Two layouts: one row a step, [N] with the number of its group and of its trajectory (the functions with trajectory_ids), and one row an
episode, [B] with Turns (turn_advantages). Steps that start from equal states in episodes of the same prompt are compared with each other:
the state is their anchor.

Source: Feng et al. 2025 (Group-in-Group Policy Optimization).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, cast

import torch
from torch import Tensor

from rollouts.advantages import discounted_returns, normalize_by_group
from rollouts.checks import check_shapes
from rollouts.statistics import GroupStatistic, group_std
from rollouts.types import Turns

# -- anchor states


def state_key(state: Any) -> Hashable:
    """A hashable value that is equal for equal states: strings, numbers, and nested lists, tuples, mappings, arrays and tensors of them."""
    if hasattr(state, "tolist"):
        return state_key(state.tolist())
    if isinstance(state, Mapping):
        items = cast("Mapping[Any, Any]", state)
        return ("mapping", *sorted(((state_key(k), state_key(v)) for k, v in items.items()), key=repr))
    if isinstance(state, Sequence) and not isinstance(state, (str, bytes)):
        return ("sequence", *(state_key(x) for x in cast("Sequence[Any]", state)))
    assert isinstance(state, Hashable), f"a state of type {type(state).__name__} cannot be compared: give text, numbers, or lists of them"
    return state


def similarity(a: str, b: str) -> float:
    """2 * (matching characters) / (all characters) of two texts, in [0, 1] (Ratcliff and Obershelp)."""
    return SequenceMatcher(None, a, b).ratio()


def anchor_groups(states: Sequence[Any], group_ids: Tensor, *, threshold: float | None = None) -> Tensor:
    """Number of the step group of each step: steps of one episode group that start from the same state.

    Args:
        states: of the N steps, what the policy saw before acting. Equal states are those with equal state_key; with a threshold, texts.
        group_ids: # [N] group of the step's episode; steps of different groups never share a step group.
        threshold: None = equal states. Else in (0, 1]: a text joins the first step group of its episode group whose first text has at
            least this similarity to it, or begins a new one; the order of rows then matters.

    Returns: # [N] int64 in the order of first appearance.
    """
    check_shapes(group_ids=(group_ids, (len(states),)))
    assert threshold is None or 0 < threshold <= 1, f"threshold is {threshold}, expected in (0, 1]"
    numbers: list[int] = []
    names: dict[Hashable, int] = {}
    firsts: dict[int, list[tuple[str, int]]] = {}  # of each episode group: (first text, number) of its step groups
    for state, group in zip(states, group_ids.tolist(), strict=True):
        if threshold is None:
            numbers.append(names.setdefault((group, state_key(state)), len(names)))
            continue
        assert isinstance(state, str), f"similarity needs states that are text, found {type(state).__name__}"
        known = firsts.setdefault(group, [])
        found = next((number for text, number in known if similarity(state, text) >= threshold), None)
        if found is None:
            found = sum(len(entries) for entries in firsts.values())
            known.append((state, found))
        numbers.append(found)
    return torch.tensor(numbers, dtype=torch.int64, device=group_ids.device)


# -- one row a step, [N] -> [N]


def step_returns(rewards: Tensor, trajectory_ids: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma * R_{t+1} along each trajectory.

    Args:
        rewards: # [N] of the environment for each step.
        trajectory_ids: # [N]; the rows of one trajectory are its steps in order, other rows may stand between them.
        gamma: in [0, 1].

    Returns: # [N].
    """
    check_shapes(trajectory_ids=(trajectory_ids, tuple(rewards.shape)))
    order = trajectory_ids.argsort(stable=True)
    _, lengths = trajectory_ids[order].unique_consecutive(return_counts=True)
    rows = (
        torch.nn.utils.rnn.pad_sequence(list(rewards[order].split(lengths.tolist())), batch_first=True)
        if len(rewards)
        else rewards[:, None]
    )
    mask = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    return torch.zeros_like(rewards).index_copy(0, order, discounted_returns(rows, mask, gamma)[mask])


def episode_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor,
    *,
    across_steps: bool = False,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-6,
    keep_single: bool = False,
) -> Tensor:
    """A_E = (R - mean) / (std + epsilon) of the episode rewards in the group, for every step of the episode.

    Args:
        rewards: # [N] reward of the step's episode, equal in all rows of a trajectory.
        group_ids, trajectory_ids: # [N].
        across_steps: whether an episode counts once for each of its steps in mean and std (the authors' code), or once (the paper).
        std_level, epsilon, keep_single: see normalize_by_group; a group is single if it has one entry that counts.

    Returns: # [N].
    """
    check_shapes(group_ids=(group_ids, tuple(rewards.shape)), trajectory_ids=(trajectory_ids, tuple(rewards.shape)))
    if across_steps:
        return normalize_by_group(rewards, group_ids, std_level=std_level, epsilon=epsilon, keep_single=keep_single)
    episodes, episode_of = torch.unique(torch.stack((group_ids, trajectory_ids)), dim=1, return_inverse=True)
    count = episodes.shape[1]
    places = torch.arange(len(rewards), device=rewards.device)
    first = torch.full((count,), len(rewards), device=rewards.device).scatter_reduce(0, episode_of, places, "amin")
    found = normalize_by_group(rewards[first], group_ids[first], std_level=std_level, epsilon=epsilon, keep_single=keep_single)
    return found[episode_of]


def step_advantages(returns: Tensor, step_groups: Tensor, *, std_level: GroupStatistic | None = group_std, epsilon: float = 1e-6) -> Tensor:
    """A_S = (R_t - mean) / (std + epsilon) of the returns of all steps from the same anchor state; 0 for a state visited once.

    Args:
        returns: # [N] see step_returns.
        step_groups: # [N] see anchor_groups.

    Returns: # [N].
    """
    return normalize_by_group(returns, step_groups, std_level=std_level, epsilon=epsilon)


def gigpo_advantages(
    rewards: Tensor,
    step_rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor,
    step_groups: Tensor,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    across_steps: bool = False,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-6,
    keep_single: bool = False,
) -> Tensor:
    """A = A_E + omega * A_S, one row a step.

    Args:
        rewards: # [N] of the step's episode.
        step_rewards: # [N] of the step.
        group_ids, trajectory_ids, step_groups: # [N].
        gamma: discount of step rewards, in [0, 1]; the paper has 0.95.
        omega: weight of the step level; the paper has 1.
        across_steps, std_level, epsilon, keep_single: see episode_advantages; std_level None is the paper's leave-one-out form up to scale.

    Returns: # [N].
    """
    episode = episode_advantages(
        rewards, group_ids, trajectory_ids, across_steps=across_steps, std_level=std_level, epsilon=epsilon, keep_single=keep_single
    )
    returns = step_returns(step_rewards, trajectory_ids, gamma)
    return episode + omega * step_advantages(returns, step_groups, std_level=std_level, epsilon=epsilon)


# -- one row an episode


def turn_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    turns: Turns,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    std_level: GroupStatistic | None = group_std,
    epsilon: float = 1e-6,
    keep_single: bool = False,
) -> Tensor:
    """A = A_E + omega * A_S at every token of a turn; A_E alone at tokens of no turn.

    Args:
        rewards, group_ids: # [B] of the episodes.
        turns: turn of each token, anchor state and reward of each turn; state ids are compared within a group only.
        gamma, omega, std_level, epsilon, keep_single: see gigpo_advantages; every episode counts once in A_E.

    Returns: # [B, T].
    """
    check_shapes(rewards=(rewards, (turns.ids.shape[0],)), group_ids=(group_ids, (turns.ids.shape[0],)))
    episode = normalize_by_group(rewards, group_ids, std_level=std_level, epsilon=epsilon, keep_single=keep_single)
    real = turns.states >= 0
    returns = discounted_returns(turns.rewards, real, gamma)
    groups = group_ids[:, None].expand_as(turns.states)
    _, anchors = torch.unique(torch.stack((groups[real], turns.states[real])), dim=1, return_inverse=True)
    found = step_advantages(returns[real], anchors, std_level=std_level, epsilon=epsilon)
    by_turn = torch.zeros_like(returns).masked_scatter(real, found)
    by_turn = torch.cat((by_turn, by_turn.new_zeros(len(rewards), 1)), dim=1)  # the last column is that of tokens of no turn
    at_tokens = by_turn.gather(1, torch.where(turns.ids >= 0, turns.ids, by_turn.shape[1] - 1))
    return episode[:, None] + omega * at_tokens

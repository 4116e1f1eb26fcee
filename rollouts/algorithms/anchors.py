"""GiGPO: groups within groups. Advantages of whole episodes, plus advantages of single steps among all visits to the same state.

Two layouts: one row a step, [N] with the number of its group and of its trajectory (the functions with trajectory_ids), and one row an
episode, [B, K] with K = most turns of an episode (compute_turn_levels, turn_advantages). Steps that start from equal states in episodes of
the same prompt are compared with each other: the state is their anchor. rollouts.algorithms.gigpo_steps does the same on StepData.

Source: Feng et al. 2025 (Group-in-Group Policy Optimization).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from rollouts.algorithms.advantages import discounted_returns, normalize_by_group
from rollouts.algorithms.statistics import GroupStatistic, group_std
from rollouts.checks import check_shapes
from rollouts.config_files import is_number
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, TurnLevels, Turns

Combine: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""f(A_E, A_S, omega) -> A, element by element; any shape. add_weighted and interpolate, or your own."""

# -- the two levels as one


def add_weighted(episode: Tensor, step: Tensor, omega: float) -> Tensor:
    """A_E + omega * A_S: the paper's, and the default everywhere. omega >= 0."""
    return episode + omega * step


def interpolate(episode: Tensor, step: Tensor, omega: float) -> Tensor:
    """omega * A_E + (1 - omega) * A_S. omega in [0, 1]; 1 = the episode alone."""
    assert 0 <= omega <= 1, f"omega is {omega}, expected in [0, 1]: interpolate weighs the levels with omega and 1 - omega"
    return omega * episode + (1 - omega) * step


@dataclass(frozen=True, kw_only=True)
class GiGPOSettings:
    """Settings of GiGPO's advantages; the defaults are the paper's. Raises ConfigError for a number out of range."""

    gamma: float = 0.95  # discount of step rewards, in [0, 1]
    omega: float = 1.0  # weight of A_S, at least 0; with combine=interpolate the share of A_E, in [0, 1]
    combine: Combine = add_weighted  # add_weighted, interpolate, or a function of your own
    across_steps: bool = False  # in mean and std of A_E, count an episode once a step (the authors' code), not once (the paper)
    std_level: GroupStatistic | None = group_std  # divisor of both levels, see normalize_by_group; None = the paper's leave-one-out form
    # up to scale
    epsilon: float = 1e-6  # added to the standard deviations
    keep_single: bool = False  # give the only episode of a group its reward as A_E, not 0
    default_step_reward: float = 0.0  # reward of turns whose own reward is unknown; 0 is a known reward
    add_final_reward: bool | None = None  # add the episode's reward to that of its last turn; None = in groups without a known turn reward

    def __post_init__(self) -> None:
        convex = self.combine is interpolate
        for name, low, high, expected in (
            ("gamma", 0.0, 1.0, " in [0, 1]"),
            ("omega", 0.0, 1.0 if convex else math.inf, " in [0, 1], the share of A_E" if convex else " of at least 0"),
            ("epsilon", 0.0, math.inf, " of at least 0"),
            ("default_step_reward", -math.inf, math.inf, ""),
        ):
            value = getattr(self, name)
            if not (is_number(value) and math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} is {value!r}, expected a finite number{expected}")


# -- anchor states


def hash_observation(observation: Any) -> str:
    """Hash an observation, equally for equal ones in every process: 128 bits of blake2b over their canonical JSON.

    Canonical: keys sorted, no spaces; arrays and tensors as lists, tuples as lists, a Message as its dict.

    Args:
        observation: JSON values, or arrays and tensors (objects with tolist()).

    Raises: DataError for anything else: two of them cannot be compared. Pass a function of your own, which may be str or repr.
    """
    try:
        text = json.dumps(observation, sort_keys=True, separators=(",", ":"), default=_to_json)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"an observation of type {type(observation).__name__} cannot be written as JSON, so it is no anchor state ({error}): give "
            "text, numbers, lists and mappings of them, or a hash function of your own"
        ) from error
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _to_json(value: Any) -> Any:
    if isinstance(value, Message):
        return value.to_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"found a {type(value).__name__}")


def state_key(state: Any) -> Hashable:
    """Return a hashable value, equal for equal states: text, numbers, and nested lists, tuples, mappings, arrays and tensors of them."""
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
    """Return 2 * (matching characters) / (all characters) of two texts, in [0, 1] (Ratcliff and Obershelp)."""
    return SequenceMatcher(None, a, b).ratio()


def find_similar(text: str, firsts: Sequence[str], threshold: float) -> int:
    """Find the position of the first of `firsts` with a similarity of at least the threshold, in (0, 1]; len(firsts) without one."""
    assert 0 < threshold <= 1, f"threshold is {threshold}, expected in (0, 1]"
    return next((place for place, first in enumerate(firsts) if similarity(text, first) >= threshold), len(firsts))


def anchor_groups(states: Sequence[Any], group_ids: Tensor, *, threshold: float | None = None) -> Tensor:
    """Number the step groups: steps of one episode group that start from the same state.

    Args:
        states: observation before each of the N steps. States are equal if their state_key is; with a threshold they are texts.
        group_ids: # [N] group of the step's episode; steps of different groups never share a step group.
        threshold: None = equal states. Else in (0, 1]: a text joins the first step group of its episode group whose first text has at
            least this similarity to it, or begins a new one; the order of rows then matters.

    Returns: # [N] int64 in the order of first appearance.
    """
    check_shapes(group_ids=(group_ids, (len(states),)))
    assert threshold is None or 0 < threshold <= 1, f"threshold is {threshold}, expected in (0, 1]"
    names: dict[Hashable, int] = {}
    firsts: dict[int, list[str]] = {}  # first text of each step group, by episode group
    numbers: list[int] = []
    for state, group in zip(states, group_ids.tolist(), strict=True):
        if threshold is None:
            key = state_key(state)
        else:
            assert isinstance(state, str), f"similarity needs states that are text, found {type(state).__name__}"
            known = firsts.setdefault(group, [])
            key = find_similar(state, known, threshold)
            if key == len(known):
                known.append(state)
        numbers.append(names.setdefault((group, key), len(names)))
    return torch.tensor(numbers, dtype=torch.int64, device=group_ids.device)


# -- one row a step, [N] -> [N]


def step_returns(rewards: Tensor, trajectory_ids: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma * R_{t+1} along each trajectory.

    Args:
        rewards: # [N] reward of the environment for each step.
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
    settings: GiGPOSettings | None = None,
) -> Tensor:
    """A = A_E + omega * A_S, or as settings.combine has it; one row a step.

    Args:
        rewards: # [N] reward of the step's episode.
        step_rewards: # [N] reward of the step. All are known: default_step_reward and add_final_reward are not read.
        group_ids, trajectory_ids, step_groups: # [N].

    Returns: # [N].
    """
    s = settings or GiGPOSettings()
    episode = episode_advantages(
        rewards,
        group_ids,
        trajectory_ids,
        across_steps=s.across_steps,
        std_level=s.std_level,
        epsilon=s.epsilon,
        keep_single=s.keep_single,
    )
    returns = step_returns(step_rewards, trajectory_ids, s.gamma)
    return s.combine(episode, step_advantages(returns, step_groups, std_level=s.std_level, epsilon=s.epsilon), s.omega)


# -- one row an episode


def fill_turn_rewards(
    step_rewards: Tensor,
    known: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    real: Tensor,
    *,
    default_step_reward: float = 0.0,
    add_final_reward: bool | None = None,
) -> Tensor:
    """Fill the rewards of turns. A turn's own reward may be unknown, which is not zero. See docs/gigpo.md for the rule.

    Args:
        step_rewards: # [B, K] of each turn.
        known: # [B, K] bool, whether a turn's own reward was given, 0 included; elsewhere step_rewards are not read.
        rewards, group_ids: # [B] of the episodes.
        real: # [B, K] bool, whether there is such a turn: the first ones of each row.
        default_step_reward: reward of a turn that is not known.
        add_final_reward: whether the episode's reward is added to that of its last turn. None = in groups without a known turn reward:
            their turns cannot be compared otherwise.

    Returns: # [B, K], 0 where there is no turn.
    Raises: ConfigError if default_step_reward is not finite.
    """
    if not math.isfinite(default_step_reward):
        raise ConfigError(f"default_step_reward is {default_step_reward!r}, expected a finite number")
    shape = tuple(real.shape)
    check_shapes(step_rewards=(step_rewards, shape), known=(known, shape), rewards=(rewards, shape[:1]), group_ids=(group_ids, shape[:1]))
    zeros = torch.zeros_like(step_rewards)
    filled = torch.where(real, torch.where(known & real, step_rewards, zeros + default_step_reward), zeros)
    if add_final_reward is None:
        paid = torch.isin(group_ids, group_ids[(known & real).any(dim=1)])
    else:
        paid = torch.full_like(group_ids, not add_final_reward, dtype=torch.bool)
    last = real & ~torch.nn.functional.pad(real[:, 1:], (0, 1)) & ~paid[:, None]
    return filled + torch.where(last, rewards[:, None].to(filled.dtype), zeros)


def compute_turn_levels(
    rewards: Tensor, group_ids: Tensor, states: Tensor, step_rewards: Tensor, settings: GiGPOSettings | None = None
) -> TurnLevels:
    """Compute A_E, G_k, A_S and A = combine(A_E, A_S, omega) of the turns of B episodes.

    Args:
        rewards, group_ids: # [B] of the episodes.
        states: # [B, K] int64, number of the state that each turn starts from, compared within a group only; -1 = no such turn.
        step_rewards: # [B, K] filled by fill_turn_rewards; not read where there is no turn.
    """
    s = settings or GiGPOSettings()
    check_shapes(rewards=(rewards, (states.shape[0],)), group_ids=(group_ids, (states.shape[0],)))
    check_shapes(step_rewards=(step_rewards, tuple(states.shape)))
    real = states >= 0
    zeros = torch.zeros_like(step_rewards)
    normalize = partial(normalize_by_group, std_level=s.std_level, epsilon=s.epsilon, keep_single=s.keep_single)
    if s.across_steps:
        by_turn = normalize(rewards[:, None].expand_as(zeros), group_ids, mask=real.to(rewards.dtype))
        episode = by_turn[:, 0] if by_turn.shape[1] else torch.zeros_like(rewards)
    else:
        episode = normalize(rewards, group_ids)
    returns = discounted_returns(torch.where(real, step_rewards, zeros), real, s.gamma)
    groups = group_ids[:, None].expand_as(states)
    _, numbers = torch.unique(torch.stack((groups[real], states[real])), dim=1, return_inverse=True)
    step = zeros.masked_scatter(real, step_advantages(returns[real], numbers, std_level=s.std_level, epsilon=s.epsilon))
    combined = s.combine(episode[:, None].to(step.dtype), step, s.omega)
    return TurnLevels(
        episode=episode,
        rewards=torch.where(real, step_rewards, zeros),
        returns=torch.where(real, returns, zeros),
        anchors=torch.full_like(states, -1).masked_scatter(real, numbers),
        step=step,
        combined=torch.where(real, combined, zeros),
    )


def estimate_turn_levels(rewards: Tensor, group_ids: Tensor, turns: Turns, settings: GiGPOSettings | None = None) -> TurnLevels:
    """Compute the levels of turns whose own rewards may be unknown (NaN): fill_turn_rewards, then compute_turn_levels."""
    s = settings or GiGPOSettings()
    step_rewards = fill_turn_rewards(
        turns.rewards,
        ~turns.rewards.isnan(),
        rewards,
        group_ids,
        turns.states >= 0,
        default_step_reward=s.default_step_reward,
        add_final_reward=s.add_final_reward,
    )
    return compute_turn_levels(rewards, group_ids, turns.states, step_rewards, s)


def turn_advantages(
    rewards: Tensor, group_ids: Tensor, turns: Turns, settings: GiGPOSettings | None = None, *, levels: TurnLevels | None = None
) -> Tensor:
    """A = combine(A_E, A_S, omega) at every token of a turn; at tokens of no turn the same with A_S = 0.

    Args:
        rewards, group_ids: # [B] of the episodes.
        turns: turn of each token, anchor state and reward of each turn (NaN where unknown); state ids are compared within a group only.
        levels: result of estimate_turn_levels, if known already.

    Returns: # [B, T].
    """
    check_shapes(rewards=(rewards, (turns.ids.shape[0],)), group_ids=(group_ids, (turns.ids.shape[0],)))
    s = settings or GiGPOSettings()
    levels = levels or estimate_turn_levels(rewards, group_ids, turns, s)
    elsewhere = s.combine(levels.episode, torch.zeros_like(levels.episode), s.omega)
    return spread_turns(levels.combined, turns.ids, elsewhere)


def spread_turns(values: Tensor, turn_ids: Tensor, elsewhere: Tensor) -> Tensor:
    """Spread one value for each turn over all of its tokens.

    Args:
        values: # [B, K].
        turn_ids: # [B, T] int64, -1 outside of turns.
        elsewhere: # [B], at tokens of no turn.

    Returns: # [B, T].
    """
    columns = torch.cat((values, elsewhere[:, None].to(values.dtype)), dim=1)  # the last column is for tokens of no turn
    return columns.gather(1, torch.where(turn_ids >= 0, turn_ids, values.shape[1]))


# -- sizes of the groups of turns


def summarize_anchors(anchors: Tensor) -> dict[str, float]:
    """Count the turns that share their state: A_S is 0 for all others.

    Args:
        anchors: # [...] int64, number of the anchor of each turn (TurnLevels.anchors); -1 = no turn.

    Returns: num_anchors (states of a group), anchor_size_mean, anchor_size_max, anchor_single_fraction (turns whose A_S is 0 because
        no other turn started there); and a histogram, anchors_of_1, _2, _3_to_4, _5_to_8, _9_to_16, _17_or_more: number of anchors by their
        turns. Only num_anchors = 0 without turns.
    """
    sizes = list(Counter(cast("list[int]", anchors[anchors >= 0].tolist())).values())
    if not sizes:
        return {"num_anchors": 0.0}
    buckets = {"1": (1, 1), "2": (2, 2), "3_to_4": (3, 4), "5_to_8": (5, 8), "9_to_16": (9, 16), "17_or_more": (17, max(sizes))}
    return {
        "num_anchors": float(len(sizes)),
        "anchor_size_mean": sum(sizes) / len(sizes),
        "anchor_size_max": float(max(sizes)),
        "anchor_single_fraction": sizes.count(1) / sum(sizes),
        **{f"anchors_of_{name}": float(sum(low <= size <= high for size in sizes)) for name, (low, high) in buckets.items()},
    }

"""Filters of groups: predicates Group -> bool, True = worth training on. They combine by ordinary Python.

Filters that look at rewards need every sample of the group scored. A filter that refuses every group starves the run; the code that
collects groups counts and reports that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rollouts.data.samples import compute_response_lengths, describe_sample
from rollouts.errors import RewardError
from rollouts.types import Group


def group_rewards(group: Group) -> list[float]:
    """Return the rewards of a group.

    Raises: RewardError if a sample has none or a NaN: filters run after rewards.
    """
    rewards: list[float] = []
    for sample in group:
        if sample.reward is None or math.isnan(sample.reward):
            raise RewardError(f"{describe_sample(sample)} has reward {sample.reward}: score samples before a filter that looks at rewards")
        rewards.append(sample.reward)
    return rewards


def check_reward_nonzero_std(group: Group, min_std: float = 0.0) -> bool:
    """Keep groups whose rewards differ, so that group-relative advantages are not all 0: population std > min_std.

    A group of one has std 0 and is refused (False, not NaN). With min_std 0 rewards are compared for equality, so rounding in the
    mean of equal rewards cannot pass for a difference.

    Args:
        min_std: at least 0.

    Source: dynamic sampling of DAPO (Yu et al. 2025, eq. 11) for rewards 0 and 1.
    """
    assert min_std >= 0, f"min_std is {min_std}, expected at least 0"
    rewards = group_rewards(group)
    if not rewards or min(rewards) == max(rewards):
        return False
    mean = math.fsum(rewards) / len(rewards)
    return min_std == 0 or math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) > min_std


def check_min_reward(group: Group, threshold: float = 0.0) -> bool:
    """Keep groups with a mean reward of at least threshold. False for an empty group."""
    rewards = group_rewards(group)
    return bool(rewards) and math.fsum(rewards) / len(rewards) >= threshold


def check_any_success(group: Group, threshold: float = 1.0) -> bool:
    """Keep groups with at least one sample with reward >= threshold."""
    return any(reward >= threshold for reward in group_rewards(group))


def check_response_diversity(group: Group, min_unique_ratio: float = 0.5) -> bool:
    """Keep groups with (number of distinct response texts) / (number of samples) >= min_unique_ratio. False for an empty group.

    Args:
        min_unique_ratio: in [0, 1]; a group of one has ratio 1.
    """
    assert 0 <= min_unique_ratio <= 1, f"min_unique_ratio is {min_unique_ratio}, expected in [0, 1]"
    return bool(group) and len({sample.response for sample in group}) >= min_unique_ratio * len(group)


def check_reasonable_length(group: Group, min_tokens: int = 1, max_tokens: int | None = None) -> bool:
    """Keep groups in which every response has min_tokens to max_tokens tokens, both included.

    The count is of tokens with loss_mask > 0: those that the policy generated, the end-of-text token included.

    Args:
        min_tokens: at least 0.
        max_tokens: at least min_tokens; None = no limit.
    """
    assert max_tokens is None or min_tokens <= max_tokens, f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}"
    lengths = compute_response_lengths(sample.loss_mask for sample in group)
    return all(length >= min_tokens and (max_tokens is None or length <= max_tokens) for length in lengths)


def check_quality_and_diversity(group: Group, threshold: float = 0.0, min_unique_ratio: float = 0.5) -> bool:
    """Keep groups that pass check_min_reward(threshold) and check_response_diversity(min_unique_ratio)."""
    return check_min_reward(group, threshold) and check_response_diversity(group, min_unique_ratio)


def make_threshold_filter(threshold: float) -> Callable[[Group], bool]:
    """Return check_min_reward with its threshold filled in."""

    def check_threshold(group: Group) -> bool:
        return check_min_reward(group, threshold)

    return check_threshold


def make_length_filter(min_tokens: int = 1, max_tokens: int | None = None) -> Callable[[Group], bool]:
    """Return check_reasonable_length with its limits filled in."""
    assert max_tokens is None or min_tokens <= max_tokens, f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}"

    def check_length(group: Group) -> bool:
        return check_reasonable_length(group, min_tokens, max_tokens)

    return check_length

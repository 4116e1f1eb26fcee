"""Filters of groups: predicates Group -> bool, True = worth training on. They combine by ordinary Python.

Filters that look at rewards need every sample of the group scored. A filter that refuses every group starves the run; the code that
collects groups counts and reports that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollouts.config import BadNumbers
from rollouts.data.samples import compute_response_lengths, describe_sample
from rollouts.errors import BadNumberError, RewardError
from rollouts.types import Group, Sample, TrainBatch


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
    """Keep groups whose rewards differ, so that group-relative advantages are not all 0: population std > min_std. In a group with
    subgroups, whose samples are compared with their like alone, those of one subgroup must.

    A group of one has std 0 and is refused (False, not NaN). With min_std 0 rewards are compared for equality, so rounding in the
    mean of equal rewards cannot pass for a difference.

    Args:
        min_std: at least 0.

    Source: dynamic sampling of DAPO (Yu et al. 2025, eq. 11) for rewards 0 and 1.
    """
    assert min_std >= 0, f"min_std is {min_std}, expected at least 0"
    rewards = group_rewards(group)
    compared: dict[str | None, list[float]] = {}
    for sample, reward in zip(group, rewards, strict=True):
        compared.setdefault(sample.subgroup, []).append(reward)
    return any(_differ(some, min_std) for some in compared.values())


def _differ(rewards: list[float], min_std: float) -> bool:
    if min(rewards) == max(rewards):
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


# -- rows of a batch whose numbers are bad before the update

_COLUMNS = ("rollout_log_probs", "old_log_probs", "prox_log_probs", "ref_log_probs", "teacher_log_probs", "segment_log_probs")
_MOST_NAMED = 5


def find_bad_log_probs(batch: TrainBatch) -> Tensor:
    """Find rows with a log-prob that is not finite at a trained token, in any column that is filled. # [B], bool"""
    on, bad = _find_trained(batch), torch.zeros(batch.num_rows, dtype=torch.bool)
    for name in _COLUMNS:
        column = getattr(batch, name)
        if column is not None:
            bad |= (~column.isfinite() & on).any(1)
    return bad


def find_empty_answers(batch: TrainBatch) -> Tensor:
    """Find trained rows with at most one token to train on, which is the end of the answer. # [B], bool"""
    return ((batch.loss_mask > 0).sum(1) <= 1) & batch.trainable


def sift_rows(
    batch: TrainBatch, bad: Tensor, kind: str, policy: BadNumbers, samples: Sequence[Sample] = ()
) -> tuple[TrainBatch | None, dict[str, float]]:
    """Treat bad rows by the policy for their kind.

    Args:
        bad: rows # [B], bool.
        kind: log_prob or empty_answer.
        samples: those of the rows, for messages; () = not known.

    Returns: the batch, of dropped rows without a token to train on (their rewards still count in their groups), or None if the update is
        to be left out; and num_bad_<kind>, the number of bad rows, unless it is 0.
    Raises: BadNumberError naming the rows if the policy is to stop.
    """
    count, action = int(bad.sum()), getattr(policy, kind)
    if count == 0 or action == "ignore":
        return batch, {}
    metrics = {{"log_prob": "num_bad_log_prob", "empty_answer": "num_bad_empty_answer"}[kind]: float(count)}
    if action == "skip":
        return None, metrics
    if action == "drop":
        return replace(batch, loss_mask=torch.where(bad[:, None], torch.zeros_like(batch.loss_mask), batch.loss_mask)), metrics
    rows = bad.nonzero().flatten().tolist()[:_MOST_NAMED]
    names = ", ".join(describe_sample(samples[row]) if samples else f"row {row}" for row in rows)
    more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
    what = {"log_prob": "a log-prob that is not finite", "empty_answer": "an answer of at most one token"}[kind]
    raise BadNumberError(
        f"{count} of {batch.num_rows} rows have {what}: {names}{more}; and the policy for {kind} is to stop. The step updated nothing. "
        f"Look at these rollouts, or set on_bad.{kind} to drop (these rows) or skip (the update)",
        kind,
        batch=batch,
    )


def refuse_all_masked(policy: BadNumbers, what: str, batch: TrainBatch | None = None) -> dict[str, float]:
    """Return the metrics of a batch without a token to train on. Raises BadNumberError if the policy is to stop. what: its name."""
    if policy.all_masked == "stop":
        raise BadNumberError(
            f"{what} has no token with loss_mask > 0, and the policy for all_masked is to stop. The step updated nothing. Look at the data "
            "and at what masks them, or set on_bad.all_masked to skip",
            "all_masked",
            batch=batch,
        )
    return {"num_bad_all_masked": 1.0}


def describe_left_out() -> dict[str, float]:
    """Return the metrics of a step whose update was left out before it was computed."""
    return {"num_tokens": 0.0, "num_updates": 0.0, "update_skipped": 1.0}


def _find_trained(batch: TrainBatch) -> Tensor:
    return (batch.loss_mask > 0) & batch.trainable[:, None]

"""Filters on one group: tables, singletons, missing rewards."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.data.filters import (
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
    make_length_filter,
    make_threshold_filter,
)
from rollouts.errors import RewardError
from rollouts.types import Group, Sample


def make_filtered(rewards: list[float | None], responses: list[str] | None = None, lengths: list[int] | None = None) -> Group:
    n = len(rewards)
    responses = responses or [str(i) for i in range(n)]
    lengths = lengths or [2] * n
    return tuple(
        Sample(tokens=(5,) * (3 + length), loss_mask=(0.0,) * 3 + (1.0,) * length, reward=r, response=text, index=i)
        for i, (r, text, length) in enumerate(zip(rewards, responses, lengths, strict=True))
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0], False), ([0.0, 0.0], False), ([0.0, 1.0], True), ([0.1, 0.1, 0.1], False), ([0.1, 0.1, 0.2], True), ([], False)],
)
def test_reward_nonzero_std(rewards, expected):
    assert check_reward_nonzero_std(make_filtered(rewards)) is expected


@given(st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=2, max_size=8), st.floats(0, 10))
def test_reward_std_threshold_equals_population_std(rewards, min_std):
    expected = len(set(rewards)) > 1 and (min_std == 0 or statistics.pstdev(rewards) > min_std)
    if math.isclose(statistics.pstdev(rewards), min_std, rel_tol=1e-9, abs_tol=1e-9) and min_std > 0:
        return
    assert check_reward_nonzero_std(make_filtered(rewards), min_std) == expected


@given(st.floats(-1e300, 1e300), st.integers(1, 8))
def test_equal_rewards_never_count_as_different(reward, n):
    assert check_reward_nonzero_std(make_filtered([reward] * n)) is False


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, True), (0.5, True), (0.51, False)])
def test_min_reward_compares_the_mean(threshold, expected):
    group = make_filtered([0.0, 1.0])
    assert check_min_reward(group, threshold) is expected
    assert make_threshold_filter(threshold)(group) is expected


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, True), (0.5, True), (0.75, False), (1.0, False)])
def test_response_diversity(ratio, expected):
    assert check_response_diversity(make_filtered([0.0] * 4, ["a", "a", "a", "b"]), ratio) is expected
    assert check_response_diversity(make_filtered([0.0], ["a"]), 1.0) is True


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1, None, True), (2, 5, True), (3, 5, False), (2, 4, False), (0, 4, False), (5, None, False)]
)
def test_length_counts_trained_tokens_only(low, high, expected):
    group = make_filtered([None, None], lengths=[2, 5])
    assert check_reasonable_length(group, low, high) is expected
    assert make_length_filter(low, high)(group) is expected


def test_quality_and_diversity_is_the_conjunction():
    good, same = make_filtered([1.0, 1.0], ["a", "b"]), make_filtered([1.0, 1.0, 1.0], ["a", "a", "a"])
    assert check_quality_and_diversity(good, threshold=0.5, min_unique_ratio=0.5) is True
    assert check_quality_and_diversity(same, threshold=0.5, min_unique_ratio=0.5) is False
    assert check_quality_and_diversity(good, threshold=1.5, min_unique_ratio=0.5) is False


def test_any_success():
    assert check_any_success(make_filtered([0.0, 1.0])) is True
    assert check_any_success(make_filtered([0.0, 0.9])) is False
    assert check_any_success(make_filtered([0.0, 0.9]), threshold=0.9) is True


@pytest.mark.parametrize("reward", [None, math.nan])
@pytest.mark.parametrize("check", [check_reward_nonzero_std, check_min_reward, check_any_success, check_quality_and_diversity])
def test_missing_reward_is_an_error_that_names_the_sample(check, reward):
    with pytest.raises(RewardError, match="sample 1"):
        check(make_filtered([0.0, reward]))


def test_impossible_limits_are_refused_when_the_filter_is_made():
    with pytest.raises(AssertionError, match="min_tokens is 5"):
        make_length_filter(5, 4)

"""Statistics of groups and along tokens, against naive loops, and what must not depend on order, numbering or masked places."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.advantages import compute_advantages, discounted_returns, gae, normalize_by_group, penalize_overlong, reward_at_last_token
from rollouts.estimators import estimate_group_relative
from rollouts.statistics import (
    batch_mean,
    batch_std,
    group_centered,
    group_count,
    group_ids_from_cu_seqlens,
    group_mean,
    group_std,
    group_sum,
    leave_one_out_mean,
    masked_mean,
    whiten,
)
from rollouts.types import TrainBatch

REWARDS = st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=12)
STATISTICS = [group_sum, group_count, group_mean, group_std, group_centered, leave_one_out_mean, batch_mean, batch_std]


def columns(rows, dtype=torch.float64):
    return torch.tensor([r for r, _ in rows], dtype=dtype), torch.tensor([g for _, g in rows])


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance)


# -- groups


@given(ROWS)
def test_group_statistics_against_loops(rows):
    rewards, groups = columns(rows)
    own = [[rows[i][0] for i in oracles.members(groups.tolist(), group)] for _, group in rows]
    close(group_sum(rewards, groups), [sum(values) for values in own])
    close(group_count(rewards, groups), [len(values) for values in own])
    close(group_mean(rewards, groups), [oracles.mean(values) for values in own])
    close(group_std(rewards, groups), [oracles.std(values) for values in own])
    close(batch_mean(rewards, groups), [oracles.mean(rewards.tolist())] * len(rows))
    close(batch_std(rewards, groups), [oracles.std(rewards.tolist())] * len(rows))
    close(rewards - leave_one_out_mean(rewards, groups), oracles.rloo_advantages(rewards.tolist(), groups.tolist()))
    close(normalize_by_group(rewards, groups, std_level=None), oracles.grpo_advantages(rewards.tolist(), groups.tolist(), None))
    epsilon = 1e-2  # where it is small, rounding in the mean of nearly equal rewards is all there is to compare
    found = normalize_by_group(rewards, groups, epsilon=epsilon)
    close(found, oracles.grpo_advantages(rewards.tolist(), groups.tolist(), epsilon))


@pytest.mark.parametrize("statistic", STATISTICS)
@given(rows=ROWS, data=st.data())
def test_order_and_numbering_of_groups_do_not_matter(statistic, rows, data):
    rewards, groups = columns(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    close(statistic(rewards[order], groups[order]), statistic(rewards, groups)[order])
    names = torch.tensor(data.draw(st.permutations([-7, 0, 1, 5, 40, 41, 10**12])))
    assert torch.equal(statistic(rewards, names[groups + 3]), statistic(rewards, groups))


@given(rows=ROWS)
def test_advantages_of_one_group_do_not_depend_on_the_others(rows):
    rewards, groups = columns(rows)
    own = groups == groups[0]
    close(normalize_by_group(rewards, groups)[own], normalize_by_group(rewards[own], groups[own]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean_level", [group_mean, batch_mean, leave_one_out_mean])
@pytest.mark.parametrize("std_level", [group_std, batch_std, None])
@given(reward=REWARDS, size=st.integers(1, 12), epsilon=st.sampled_from([1e-12, 1e-4]))
def test_equal_rewards_give_exactly_zero(dtype, mean_level, std_level, reward, size, epsilon):
    rewards = torch.full((size,), reward, dtype=dtype)
    groups = torch.zeros(size, dtype=torch.int64)
    assert group_std(rewards, groups).tolist() == [0.0] * size
    found = normalize_by_group(rewards, groups, mean_level=mean_level, std_level=std_level, epsilon=epsilon)
    assert found.tolist() == [0.0] * size


@pytest.mark.parametrize("mean_level", [group_mean, leave_one_out_mean])
@pytest.mark.parametrize("std_level", [group_std, None])
def test_equal_rewards_give_exactly_zero_beside_other_groups(mean_level, std_level):
    rewards = torch.tensor([0.1, 1.0, 0.1, -3.0, 0.1, 0.7, 0.7])
    groups = torch.tensor([4, 2, 4, 2, 4, 9, 1])  # 9 and 1: groups of one
    found = normalize_by_group(rewards, groups, mean_level=mean_level, std_level=std_level)
    assert found[[0, 2, 4, 5, 6]].tolist() == [0.0] * 5
    assert (found[[1, 3]] != 0).all()


@given(rows=ROWS)
def test_advantages_sum_to_zero_in_each_group(rows):
    rewards, groups = columns(rows)
    for mean_level in (group_mean, leave_one_out_mean):
        sums = group_sum(normalize_by_group(rewards, groups, mean_level=mean_level, std_level=None), groups)
        close(sums, torch.zeros_like(sums), 1e-8)


def test_a_group_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 0, 1])
    close(group_std(rewards, groups), [(1 / 3) ** 0.5] * 4 + [0.0], 1e-6)
    close(normalize_by_group(rewards, groups, epsilon=0.0)[:4], [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], 1e-6)
    close(rewards - leave_one_out_mean(rewards, groups), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0], 1e-6)


def test_without_a_mean_the_reward_itself_is_scaled():
    rewards, groups = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    assert normalize_by_group(rewards, groups, mean_level=None, std_level=None).tolist() == [1.0, 3.0]
    close(normalize_by_group(rewards, groups, mean_level=None, epsilon=0.0), [1 / 2**0.5, 3 / 2**0.5], 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_must_be_finite_and_fit_the_groups(bad):
    with pytest.raises(AssertionError, match=r"rewards holds 1 non-finite entries, the first at index \[1\]"):
        normalize_by_group(torch.tensor([0.0, bad]), torch.tensor([0, 0]))
    with pytest.raises(AssertionError, match=r"rewards holds 1 non-finite"):
        compute_advantages(torch.tensor([bad]))
    with pytest.raises(AssertionError, match=r"group_ids has shape \(3,\), expected \(2,\)"):
        group_mean(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_overlong_answers_lose_up_to_the_factor(factor):
    rewards, lengths = torch.ones(6, dtype=torch.float64), torch.tensor([0, 12, 14, 16, 20, 24])
    found = penalize_overlong(rewards, lengths, max_tokens=20, buffer=8, factor=factor)
    expected = [1.0 - factor * cut for cut in (0.0, 0.0, 0.25, 0.5, 1.0, 1.0)]
    assert found.tolist() == pytest.approx(expected)
    free = penalize_overlong(rewards, lengths, max_tokens=20, buffer=8, factor=factor, bounded=False)
    assert free.tolist() == pytest.approx([*expected[:5], 1.0 - 1.5 * factor])
    with pytest.raises(AssertionError, match="buffer is 0, expected more than 0"):
        penalize_overlong(rewards, lengths, max_tokens=20, buffer=0)


def test_compute_advantages_with_numbers_and_tensors():
    rewards = torch.tensor([1.0, 2.0, 4.0])
    assert compute_advantages(rewards).tolist() == [1.0, 2.0, 4.0]
    assert compute_advantages(rewards, baseline=1.0, scale=2.0).tolist() == [0.0, 0.5, 1.5]
    found = compute_advantages(rewards, baseline=torch.tensor([1.0, 1.0, 2.0]), scale=torch.tensor([1.0, 0.5, 2.0]))
    assert found.tolist() == [0.0, 2.0, 1.0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_groups_of_packed_entries(lengths):
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    assert group_ids_from_cu_seqlens(boundaries).tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]


# -- tokens


def token_case(seed: int, rows: int = 4, width: int = 7, dtype=torch.float64):
    """rewards, values, mask [rows, width]; the mask has gaps and, in its last row, nothing."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(2))
    mask = (torch.rand(rows, width, generator=generator) < 0.6).to(dtype)
    mask[-1] = 0
    return rewards, values, mask


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_discounted_returns_against_the_sum_over_all_pairs(seed, gamma):
    rewards, _, mask = token_case(seed)
    expected = [oracles.discounted_returns(r, m, gamma) for r, m in zip(rewards.tolist(), mask.tolist(), strict=True)]
    close(discounted_returns(rewards, mask, gamma), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.0, 1.0)])
def test_gae_against_the_sum_over_all_pairs(seed, gamma, lam):
    rewards, values, mask = token_case(seed)
    parts = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    close(gae(rewards, values, mask, gamma, lam), [oracles.gae(r, v, m, gamma, lam) for r, v, m in parts])


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values, mask = token_case(5)
    close(gae(rewards, values, mask, 0.9, 1.0), (discounted_returns(rewards, mask, 0.9) - values) * mask)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_what_stands_at_masked_places_does_not_matter(garbage):
    rewards, values, mask = token_case(6)
    dirty_rewards, dirty_values = (torch.where(mask > 0, x, garbage) for x in (rewards, values))
    assert torch.equal(discounted_returns(dirty_rewards, mask, 0.9), discounted_returns(rewards, mask, 0.9))
    assert torch.equal(gae(dirty_rewards, dirty_values, mask, 0.9, 0.8), gae(rewards, values, mask, 0.9, 0.8))
    assert torch.equal(masked_mean(dirty_values, mask), masked_mean(values, mask))
    for shift_mean in (True, False):
        assert torch.equal(whiten(dirty_values, mask, shift_mean=shift_mean), whiten(values, mask, shift_mean=shift_mean))


def test_masked_places_get_zero():
    rewards, values, mask = token_case(7)
    found = (discounted_returns(rewards, mask), gae(rewards, values, mask), whiten(values, mask, shift_mean=False))
    assert all((x[mask == 0] == 0).all() and (x[mask > 0] != 0).all() for x in found)


def test_the_reward_stands_on_the_last_trained_token():
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    found = reward_at_last_token(torch.tensor([2.0, 3.0, 4.0, 5.0]), mask)
    assert found.tolist() == [[0, 0, 2, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 5]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unbiased", [True, False])
def test_whiten_against_the_loop(seed, unbiased):
    _, values, mask = token_case(seed)
    mean, variance = oracles.masked_moments(values.tolist(), mask.tolist())
    close(masked_mean(values, mask), mean)
    count = int(mask.sum())
    variance = variance if unbiased else variance * (count - 1) / count
    expected = (values - mean) / (variance + 1e-8) ** 0.5
    close(whiten(values, mask, unbiased=unbiased), torch.where(mask > 0, expected, 0.0))
    close(whiten(values, mask, unbiased=unbiased, shift_mean=False), torch.where(mask > 0, expected + mean, 0.0))


def test_means_and_whitening_of_nothing_and_of_one_token():
    x = torch.tensor([[torch.nan, 3.0]])
    assert masked_mean(x, torch.zeros(1, 2)).item() == 0.0
    assert whiten(x, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert whiten(x, torch.tensor([[0.0, 1.0]])).tolist() == [[0.0, 0.0]]


def test_fractional_masks_weigh_the_mean():
    assert masked_mean(torch.tensor([1.0, 4.0, torch.nan]), torch.tensor([0.5, 1.0, 0.0])).item() == 3.0


# -- estimators


def make_batch(rewards, groups, mask, trainable=None) -> TrainBatch:
    mask = torch.tensor(mask)
    rows, width = mask.shape
    return TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=torch.full((rows,), width),
        loss_mask=mask,
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        trainable=torch.tensor([True] * rows if trainable is None else trainable),
    )


def test_estimated_advantages_stand_on_every_trained_token():
    batch = make_batch([1.0, 0.0, 3.0, 5.0], [0, 1, 0, 1], [[0.0, 1.0, 1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    found = estimate_group_relative(batch, std_level=None)
    assert found.advantages is not None and batch.advantages is None
    assert found.advantages.tolist() == [[0.0, -1.0, -1.0], [0.0, -2.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_rows_that_are_not_trained_count_in_their_group():
    mask = [[1.0], [1.0], [1.0]]
    found = estimate_group_relative(make_batch([0.0, 0.0, 3.0], [0, 0, 0], mask, [True, True, False]), std_level=None)
    assert found.advantages is not None
    assert found.advantages[:2].tolist() == [[-1.0], [-1.0]]

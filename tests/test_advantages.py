from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.advantages import (
    batch_mean,
    batch_std,
    compute_advantages,
    discounted_returns,
    gae,
    group_ids_from_cu_seqlens,
    group_mean,
    group_std,
    leave_one_out_mean,
    masked_mean,
    normalize_by_group,
    reward_at_last_token,
    whiten,
)

grouped = st.lists(st.tuples(st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)), st.integers(0, 3)), min_size=1, max_size=16)


@given(pairs=grouped, divide=st.booleans())
def test_group_advantages_match_the_loop_for_any_groups_in_any_order(pairs, divide):
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    found = normalize_by_group(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), std_level=group_std if divide else None, epsilon=1e-4
    )
    expected = oracles.group_advantages(rewards, groups, divide=divide, epsilon=1e-4)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@given(pairs=grouped)
def test_leave_one_out_matches_the_loop(pairs):
    rewards, groups = torch.tensor([r for r, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])
    found = normalize_by_group(rewards, groups, mean_level=leave_one_out_mean, std_level=None)
    assert found.tolist() == pytest.approx(oracles.leave_one_out_advantages(rewards.tolist(), groups.tolist()), abs=1e-9)


@given(pairs=grouped, seed=st.integers(0, 99))
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(pairs, seed):
    rewards, groups = torch.tensor([r for r, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    straight = normalize_by_group(rewards, groups)
    torch.testing.assert_close(normalize_by_group(rewards[order], 100 - 7 * groups[order]), straight[order])


def test_singletons_and_equal_rewards_get_exactly_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 1 / 3, 1 / 3])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    assert normalize_by_group(rewards, groups).tolist() == [0.0] * 6
    assert group_std(rewards, groups).tolist() == [0.0] * 6
    assert normalize_by_group(rewards[:1], groups[:1], mean_level=leave_one_out_mean, std_level=None).tolist() == [0.0]


def test_levels_can_be_chosen_separately():
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 1, 1])
    found = normalize_by_group(rewards, groups, mean_level=group_mean, std_level=batch_std, epsilon=0.0)
    torch.testing.assert_close(found, (rewards - torch.tensor([1.5, 1.5, 6.0, 6.0])) / rewards.std())
    found = normalize_by_group(rewards, groups, mean_level=batch_mean, std_level=None)
    torch.testing.assert_close(found, rewards - rewards.mean())


def test_packed_data_are_grouped_by_their_boundaries():
    assert group_ids_from_cu_seqlens(torch.tensor([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0, 8.0])
    ids = group_ids_from_cu_seqlens(torch.tensor([0, 2, 5]))
    assert normalize_by_group(rewards, ids, std_level=None).tolist() == [-1.0, 1.0, -1.0, -1.0, 2.0]


def test_a_baseline_is_a_number_or_one_for_each_row():
    rewards = torch.tensor([1.0, 0.0])
    assert compute_advantages(rewards, baseline=0.25).tolist() == [0.75, -0.25]
    assert compute_advantages(rewards, torch.tensor([0.5, 1.0]), scale=2.0).tolist() == [0.25, -0.5]
    with pytest.raises(AssertionError, match="rewards"):
        compute_advantages(torch.tensor([float("nan")]))


def random_rows(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(4, 9, generator=g) < 0.6).double()
    return torch.randn(4, 9, generator=g, dtype=torch.float64), torch.randn(4, 9, generator=g, dtype=torch.float64), mask


@pytest.mark.parametrize("seed", range(5))
def test_gae_and_returns_step_over_masked_tokens(seed):
    rewards, values, mask = random_rows(seed)
    expected = [oracles.gae(*rows, 0.9, 0.8) for rows in zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)]
    torch.testing.assert_close(gae(rewards, values, mask, 0.9, 0.8), torch.tensor(expected, dtype=torch.float64))
    expected = [oracles.discounted_returns(*rows, 0.9) for rows in zip(rewards.tolist(), mask.tolist(), strict=True)]
    torch.testing.assert_close(discounted_returns(rewards, mask, 0.9), torch.tensor(expected, dtype=torch.float64))


def test_whitened_values_have_mean_zero_and_variance_one_where_the_mask_is():
    x, _, mask = random_rows(0)
    white = whiten(x, mask)
    inside = white[mask > 0]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-9)
    assert float(inside.std()) == pytest.approx(1, abs=1e-6)
    assert float(white[mask == 0].abs().sum()) == 0
    assert float(masked_mean(x, torch.zeros_like(x))) == 0
    assert bool(whiten(x, torch.zeros_like(x)).isfinite().all())


def test_an_outcome_reward_stands_on_the_last_trained_token():
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    assert reward_at_last_token(torch.tensor([2.0, 3.0, 4.0]), mask).tolist() == [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 4]]

"""Advantages of samples and along tokens against naive loops, and what must not depend on order, numbering or masked places."""

from __future__ import annotations

import math
from functools import partial

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages as naive
from parity.peers import lambda_returns

from rollouts.algorithms import kl
from rollouts.algorithms.advantages import (
    RatioClips,
    apply_kl_penalty,
    combine_rewards,
    compute_advantages,
    discounted_returns,
    gae,
    gdpo_advantages,
    gpg_advantages,
    greedy_baseline,
    in_unequal_group,
    is_not_zero,
    length_weighted_mean,
    max_rl_advantages,
    normalize_by_group,
    optimal_token_baseline,
    pass_at_k_advantages,
    penalize_length,
    reward_at_last_token,
    shape_rewards,
    squared_scores,
    sum_token_rewards,
    vtrace,
    zero_truncated_rewards,
)
from rollouts.algorithms.statistics import (
    batch_leave_one_out_mean,
    batch_mean,
    batch_std,
    group_mean,
    group_rms,
    group_std,
    group_sum,
    leave_one_out_mean,
    whiten,
)

REWARDS = st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=12)
FEW_REWARDS = st.sampled_from([0.0, 0.0, 1.0, 0.5, -1.0])  # with ties
SMALL_ROWS = st.lists(st.tuples(FEW_REWARDS, st.integers(0, 2)), min_size=1, max_size=9)


def columns(rows, dtype=torch.float64):
    return torch.tensor([r for r, _ in rows], dtype=dtype), torch.tensor([g for _, g in rows])


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance)


# -- normalisation


@given(ROWS)
def test_group_relative_advantages_against_loops(rows):
    rewards, groups = columns(rows)
    values, ids = rewards.tolist(), groups.tolist()
    close(normalize_by_group(rewards, groups, std_level=None), oracles.grpo_advantages(values, ids, None), 1e-9)
    close(normalize_by_group(rewards, groups, mean_level=leave_one_out_mean, std_level=None), oracles.rloo_advantages(values, ids), 1e-9)
    epsilon = 1e-2  # where it is small, rounding in the mean of nearly equal rewards is all there is to compare
    close(normalize_by_group(rewards, groups, epsilon=epsilon), oracles.grpo_advantages(values, ids, epsilon), 1e-9)


MEANS = {
    "group": group_mean,
    "batch": batch_mean,
    "none": None,
    "group-others": leave_one_out_mean,
    "batch-others": batch_leave_one_out_mean,
}
STDS = {"group": group_std, "batch": batch_std, None: None}


@pytest.mark.parametrize("mean_of", MEANS)
@pytest.mark.parametrize("std_of", STDS)
@pytest.mark.parametrize("unbiased", [True, False])
@given(st.lists(st.tuples(REWARDS, st.integers(0, 2), st.booleans()), min_size=1, max_size=9))
def test_mean_and_std_level_are_chosen_separately(mean_of, std_of, unbiased, rows):
    rewards, groups = columns([row[:2] for row in rows])
    counted = [row[2] for row in rows]
    level = STDS[std_of]
    found = normalize_by_group(
        torch.where(torch.tensor(counted), rewards, torch.nan),
        groups,
        mask=torch.tensor(counted),
        mean_level=MEANS[mean_of],
        std_level=None if level is None else partial(level, unbiased=unbiased),
        epsilon=0.5,
    )
    expected = naive.normalized(rewards.tolist(), groups.tolist(), counted, mean_of=mean_of, std_of=std_of, unbiased=unbiased, epsilon=0.5)
    close(found, expected, 1e-8)


def test_values_of_tokens_are_normalised_under_a_mask():
    rewards, groups = torch.tensor([[1.0, torch.nan, 3.0], [5.0, 2.0, torch.inf], [9.0, 8.0, 7.0]]), torch.tensor([0, 0, 1])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert normalize_by_group(rewards, groups, mask=mask, std_level=None).tolist() == [[-2, 0, 0], [2, 0, 0], [0, 0, 0]]
    assert normalize_by_group(rewards, groups, mask=torch.zeros_like(mask)).eq(0).all()
    close(normalize_by_group(rewards, groups, mask=mask, epsilon=0.0), [[-1, 0, 0], [1, 0, 0], [0, 0, 0]], 1e-6)


def test_the_std_is_of_the_rewards_or_of_what_the_mean_leaves():
    rewards, groups = torch.tensor([0.0, 2.0, 10.0, 12.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    by_rewards = normalize_by_group(rewards, groups, std_level=batch_std, epsilon=0.0)
    by_centered = normalize_by_group(rewards, groups, std_level=batch_std, std_of_centered=True, epsilon=0.0)
    close(by_rewards, torch.tensor([-1, 1, -1, 1]) / rewards.std())
    close(by_centered, torch.tensor([-1, 1, -1, 1]).double() / (4 / 3) ** 0.5)
    about_zero = normalize_by_group(rewards, groups, mean_level=None, std_level=group_rms, epsilon=0.0)
    close(about_zero, [0.0, 1.0, 10 / 244**0.5, 12 / 244**0.5])


@given(rows=ROWS)
def test_advantages_of_one_group_do_not_depend_on_the_others(rows):
    rewards, groups = columns(rows)
    own = groups == groups[0]
    close(normalize_by_group(rewards, groups)[own], normalize_by_group(rewards[own], groups[own]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean_level", [group_mean, batch_mean, leave_one_out_mean])
@pytest.mark.parametrize("std_level", [group_std, batch_std, None])
@given(reward=REWARDS, size=st.integers(1, 12), epsilon=st.sampled_from([0.0, 1e-12, 1e-4]))
def test_equal_rewards_give_exactly_zero(dtype, mean_level, std_level, reward, size, epsilon):
    rewards = torch.full((size,), reward, dtype=dtype)
    groups = torch.zeros(size, dtype=torch.int64)
    assert group_std(rewards, groups).tolist() == [0.0] * size
    found = normalize_by_group(rewards, groups, mean_level=mean_level, std_level=std_level, epsilon=epsilon)
    assert found.tolist() == [0.0] * size
    assert pass_at_k_advantages(rewards, groups, std_level=std_level, epsilon=epsilon).tolist() == [0.0] * size
    assert gdpo_advantages(rewards[:, None], groups, std_level=std_level, epsilon=epsilon).tolist() == [0.0] * size


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_a_group_without_spread_is_not_scaled(epsilon):
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    found = normalize_by_group(rewards, groups, mean_level=batch_mean, std_level=group_std, epsilon=epsilon)
    close(found[:2], [0.375 / (1 + epsilon)] * 2)
    raw = normalize_by_group(rewards, groups, mean_level=None, std_level=group_std, epsilon=epsilon)
    close(raw[:2], [1 / (1 + epsilon)] * 2)


@pytest.mark.parametrize("mean_level", [group_mean, leave_one_out_mean])
@pytest.mark.parametrize("std_level", [group_std, None])
def test_equal_rewards_give_exactly_zero_beside_other_groups(mean_level, std_level):
    rewards = torch.tensor([0.1, 1.0, 0.1, -3.0, 0.1, 0.7, 0.7])
    groups = torch.tensor([4, 2, 4, 2, 4, 9, 1])  # 9 and 1: groups of one
    found = normalize_by_group(rewards, groups, mean_level=mean_level, std_level=std_level)
    assert found[[0, 2, 4, 5, 6]].tolist() == [0.0] * 5
    assert (found[[1, 3]] != 0).all()


def test_a_group_of_one_is_zero_or_keeps_its_reward():
    rewards, groups = torch.tensor([2.0, 1.0, 4.0]), torch.tensor([7, 3, 3])
    for std_level, scale in ((group_std, 1 / 1.5), (None, 1.0)):
        options = {"std_level": std_level, "epsilon": 0.5}
        assert normalize_by_group(rewards, groups, **options)[0] == 0
        assert normalize_by_group(rewards, groups, **options, keep_single=True)[0] == pytest.approx(2.0 * scale)
        assert torch.equal(
            normalize_by_group(rewards, groups, **options)[1:], normalize_by_group(rewards, groups, **options, keep_single=True)[1:]
        )
    assert normalize_by_group(rewards, groups, mean_level=None, epsilon=0.0)[0] == 2.0
    kept = normalize_by_group(rewards, groups, std_level=batch_std, epsilon=0.0, keep_single=True)
    assert kept[0] == pytest.approx(2.0 / rewards.std().item())


@given(rows=ROWS)
def test_advantages_sum_to_zero_in_each_group(rows):
    rewards, groups = columns(rows)
    for mean_level in (group_mean, leave_one_out_mean):
        sums = group_sum(normalize_by_group(rewards, groups, mean_level=mean_level, std_level=None), groups)
        close(sums, torch.zeros_like(sums), 1e-8)


def test_a_group_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 0, 1])
    close(normalize_by_group(rewards, groups, epsilon=0.0)[:4], [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], 1e-6)


def test_without_a_mean_the_reward_itself_is_scaled():
    rewards, groups = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    assert normalize_by_group(rewards, groups, mean_level=None, std_level=None).tolist() == [1.0, 3.0]
    close(normalize_by_group(rewards, groups, mean_level=None, epsilon=0.0), [1 / 2**0.5, 3 / 2**0.5], 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_must_be_finite(bad):
    rewards, groups = torch.tensor([0.0, bad]), torch.tensor([0, 0])
    for advantages in (normalize_by_group, pass_at_k_advantages, max_rl_advantages, gpg_advantages):
        with pytest.raises(AssertionError, match=r"rewards holds 1 non-finite entries, the first at index \[1\]"):
            advantages(rewards, groups)
    with pytest.raises(AssertionError, match=r"rewards holds 1 non-finite"):
        compute_advantages(torch.tensor([bad]))


def test_compute_advantages_with_numbers_and_tensors():
    rewards = torch.tensor([1.0, 2.0, 4.0])
    assert compute_advantages(rewards).tolist() == [1.0, 2.0, 4.0]
    assert compute_advantages(rewards, baseline=1.0, scale=2.0).tolist() == [0.0, 0.5, 1.5]
    found = compute_advantages(rewards, baseline=torch.tensor([1.0, 1.0, 2.0]), scale=torch.tensor([1.0, 0.5, 2.0]))
    assert found.tolist() == [0.0, 2.0, 1.0]


# -- rewards before they become advantages


def test_rewards_are_shifted_scaled_and_clipped():
    assert shape_rewards(torch.tensor([-9.0, 0.0, 1.0, 9.0]), bias=1.0, scale=2.0, low=-3.0, high=5.0).tolist() == [-3.0, 2.0, 4.0, 5.0]
    assert shape_rewards(torch.tensor([1e30])).item() == pytest.approx(1e30)
    with pytest.raises(AssertionError, match=r"low 1\.0 is above high 0\.0"):
        shape_rewards(torch.zeros(1), low=1.0, high=0.0)


def test_rewards_of_several_functions_are_summed_over_those_that_scored():
    components = torch.tensor([[1.0, 2.0], [torch.nan, 4.0], [torch.nan, torch.nan]])
    rewards, scored = combine_rewards(components, torch.tensor([1.0, 0.5]))
    assert rewards.tolist() == [2.0, 2.0, 0.0] and scored.tolist() == [True, True, False]
    assert combine_rewards(components)[0].tolist() == [3.0, 4.0, 0.0]


def test_length_penalty_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 7.0]), torch.tensor([0, 0, 1])
    found = penalize_length(
        rewards,
        groups,
        num_output_tokens=torch.tensor([10, 5, 0]),
        num_total_tokens=torch.tensor([14, 13, 0]),
        num_turns=torch.tensor([1, 2, 0]),
        weights=(0.1, 0.2, 0.4),
    )
    close(found, [1 - 0.5 * (0.1 + 0.1 + 0.2), -0.5 * (0.05 + 0.2 + 0.4), 7.0], 1e-6)


def test_length_penalty_leaves_groups_without_success_alone():
    counts = {name: torch.tensor([5, 9]) for name in ("num_output_tokens", "num_total_tokens", "num_turns")}
    assert penalize_length(torch.zeros(2), torch.zeros(2, dtype=torch.int64), **counts, weights=(1.0, 1.0, 1.0)).eq(0).all()


# -- other baselines


@given(SMALL_ROWS, st.data())
def test_opo_pass_at_k_gpg_and_max_rl_against_loops(rows, data):
    rewards, groups = columns(rows)
    values, ids = rewards.tolist(), groups.tolist()
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    mask = [[1.0] * n for n in lengths]
    close(rewards - length_weighted_mean(rewards, torch.tensor(lengths), groups), naive.opo(values, ids, mask))
    close(pass_at_k_advantages(rewards, groups), naive.pass_at_k(values, ids, 1e-6))
    close(pass_at_k_advantages(rewards, groups, std_level=None), naive.pass_at_k(values, ids, None))
    close(max_rl_advantages(rewards, groups), naive.max_rl(values, ids))
    for name, valid in (("unequal", in_unequal_group), ("nonzero", is_not_zero)):
        close(gpg_advantages(rewards, groups, valid=valid, f_norm=0.5), naive.gpg(values, ids, name, 0.5))


def test_other_baselines_keep_the_reward_of_a_group_of_one_when_asked():
    rewards, groups, lengths = torch.tensor([2.0, 1.0, 4.0]), torch.tensor([7, 3, 3]), torch.tensor([5, 1, 2])
    assert length_weighted_mean(rewards, lengths, groups).tolist() == [2.0, 3.0, 3.0]
    assert length_weighted_mean(rewards, lengths, groups, keep_single=True).tolist() == [0.0, 3.0, 3.0]
    assert gpg_advantages(rewards, groups, valid=is_not_zero, keep_single=True).tolist() == [2.0, -1.5, 1.5]
    assert gpg_advantages(rewards, groups).tolist() == [0.0, -2.25, 2.25]
    assert pass_at_k_advantages(rewards, groups, std_level=None).tolist() == [0.0, 0.0, 3.0]
    assert max_rl_advantages(rewards, groups)[0] == 0
    with pytest.raises(AssertionError, match=r"f_norm is 0"):
        gpg_advantages(rewards, groups, f_norm=0)


def test_the_greedy_baseline_is_the_mean_of_the_rows_that_are_not_trained():
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 8.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    found = greedy_baseline(rewards, groups, torch.tensor([True, False, False, True, True]))
    assert found[:3].tolist() == [4.0] * 3 and found[3:].isnan().all()


def test_gdpo_normalises_each_reward_before_the_sum():
    generator = torch.Generator().manual_seed(0)
    components = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    components[2, 1] = components[5, 1] = torch.nan
    groups, weights = [0, 0, 0, 1, 1, 1, 4], [1.0, 0.5, 2.0]
    expected = [0.0] * 7
    for k, weight in enumerate(weights):
        values = components[:, k].tolist()
        counted = [not math.isnan(v) for v in values]
        part = naive.normalized(values, groups, counted, mean_of="group", std_of="group", unbiased=True, epsilon=1e-4)
        expected = [total + weight * a for total, a in zip(expected, part, strict=True)]
    close(gdpo_advantages(components, torch.tensor(groups), torch.tensor(weights)), expected)
    one = gdpo_advantages(components[:, :1], torch.tensor(groups))
    assert torch.equal(one, normalize_by_group(components[:, 0], torch.tensor(groups)))


# -- along tokens


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
    close(discounted_returns(rewards, mask, gamma), naive.returns(rewards.tolist(), mask.tolist(), gamma))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.0, 1.0)])
def test_gae_against_the_sum_over_all_pairs(seed, gamma, lam):
    rewards, values, mask = token_case(seed)
    parts = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    expected = [naive.gae(r, v, m, [gamma] * 7, [lam] * 7, 0.0) for r, v, m in parts]
    close(gae(rewards, values, mask, gamma, lam), expected)
    close(lambda_returns(rewards, values, mask, gamma, lam), (torch.tensor(expected, dtype=torch.float64) + values) * mask)


@pytest.mark.parametrize("seed", range(3))
def test_discounts_of_steps_and_the_value_behind_a_row_that_was_cut_off(seed):
    rewards, values, mask = token_case(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    gammas, lams = (torch.rand(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    bootstrap = torch.randn(4, generator=generator, dtype=torch.float64)
    parts = zip(*(x.tolist() for x in (rewards, values, mask, gammas, lams, bootstrap)), strict=True)
    expected = [naive.gae(*row) for row in parts]
    close(gae(rewards, values, mask, gammas, lams, bootstrap=bootstrap), expected)
    close(
        lambda_returns(rewards, values, mask, gammas, lams, bootstrap=bootstrap),
        (torch.tensor(expected, dtype=torch.float64) + values) * mask,
    )
    ones = torch.ones_like(lams)
    with_values = lambda_returns(rewards, values, mask, gammas, ones, bootstrap=bootstrap)
    close(discounted_returns(rewards, mask, gammas, bootstrap=bootstrap), with_values)  # lambda 1 forgets the values between


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values, mask = token_case(5)
    close(gae(rewards, values, mask, 0.9, 1.0), (discounted_returns(rewards, mask, 0.9) - values) * mask)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam", "clip_rho", "clip_pg_rho"), [(1.0, 1.0, 1.0, 1.0), (0.9, 0.5, 2.0, 0.7), (0.99, 0.0, 0.5, 3.0)])
def test_vtrace_against_the_sum_of_the_paper(seed, gamma, lam, clip_rho, clip_pg_rho):
    rewards, values, mask = token_case(seed)
    generator = torch.Generator().manual_seed(seed + 50)
    ratios = torch.randn(4, 7, generator=generator, dtype=torch.float64).exp()
    bootstrap = torch.randn(4, generator=generator, dtype=torch.float64)
    after = torch.empty_like(values)  # value of the next masked-in token, or behind the last one
    following = bootstrap
    for t in reversed(range(values.shape[1])):
        after[:, t], following = following, torch.where(mask[:, t] > 0, values[:, t], following)
    found = vtrace(rewards, values, ratios, mask, gamma, lam, clips=RatioClips(clip_rho, clip_pg_rho), next_values=after)
    for b in range(4):
        row = (x[b].tolist() for x in (rewards, values, ratios, mask))
        errors, advantages, q_values = naive.vtrace(*row, gamma, lam, clip_rho, clip_pg_rho, bootstrap[b].item())
        close(found.errors[b], errors)
        close(found.advantages[b], advantages)
        close(found.q_values[b], q_values)


def test_vtrace_on_policy_is_the_return_minus_the_value():
    rewards, values, mask = token_case(6)
    found = vtrace(rewards, values, torch.ones_like(values), mask, 0.9)
    expected = (discounted_returns(rewards, mask, 0.9) - values) * mask
    close(found.errors, expected)
    close(found.advantages, expected)


def test_vtrace_takes_values_of_next_states_where_an_episode_ends_inside_a_row():
    rewards, values, ratios = (torch.tensor([x]) for x in ([1.0, 2.0], [0.5, 0.25], [1.0, 1.0]))
    gamma, after = torch.tensor([[0.0, 0.9]]), torch.tensor([[7.0, 3.0]])
    found = vtrace(rewards, values, ratios, torch.ones(1, 2), gamma, next_values=after)
    close(found.errors, [[0.5, 2.0 + 0.9 * 3.0 - 0.25]], 1e-6)
    close(found.q_values, [[1.0, 2.0 + 0.9 * 3.0]], 1e-6)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_what_stands_at_masked_places_does_not_matter(garbage):
    rewards, values, mask = token_case(6)
    bad_rewards, bad_values = (torch.where(mask > 0, x, garbage) for x in (rewards, values))
    ratios, groups = values.exp(), torch.tensor([0, 0, 1, 0])
    bad_ratios = torch.where(mask > 0, ratios, garbage)
    assert torch.equal(discounted_returns(bad_rewards, mask, 0.9), discounted_returns(rewards, mask, 0.9))
    assert torch.equal(gae(bad_rewards, bad_values, mask, 0.9, 0.8), gae(rewards, values, mask, 0.9, 0.8))
    assert torch.equal(lambda_returns(bad_rewards, bad_values, mask), lambda_returns(rewards, values, mask))
    found = zip(vtrace(bad_rewards, bad_values, bad_ratios, mask, 0.9, 0.8), vtrace(rewards, values, ratios, mask, 0.9, 0.8), strict=True)
    assert all(torch.equal(dirty, clean) for dirty, clean in found)
    dirty = optimal_token_baseline(bad_rewards, bad_ratios, mask, groups)
    assert torch.equal(dirty, optimal_token_baseline(rewards, ratios, mask, groups))
    dirty = apply_kl_penalty(rewards, bad_values, bad_rewards, mask, 0.1, kl.k3)
    assert all(torch.equal(x, y) for x, y in zip(dirty, apply_kl_penalty(rewards, values, rewards, mask, 0.1, kl.k3), strict=True))


def test_masked_places_get_zero():
    rewards, values, mask = token_case(7)
    found = (discounted_returns(rewards, mask), gae(rewards, values, mask), whiten(values, mask, shift_mean=False))
    assert all((x[mask == 0] == 0).all() and (x[mask > 0] != 0).all() for x in found)
    assert (vtrace(rewards, values, values.exp(), mask).q_values[mask == 0] == 0).all()


def test_the_reward_stands_on_the_last_trained_token():
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    found = reward_at_last_token(torch.tensor([2.0, 3.0, 4.0, 5.0]), mask)
    assert found.tolist() == [[0, 0, 2, 0], [0, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0, 5]]
    assert sum_token_rewards(found).tolist() == [2, 3, 0, 5]
    assert sum_token_rewards(found + torch.nan * (mask == 0).float().log(), mask).isnan().any()
    assert sum_token_rewards(torch.where(mask > 0, found, torch.nan), mask).tolist() == [2, 3, 0, 5]


# -- KL in the reward


@pytest.mark.parametrize(("estimator", "loop"), [(kl.k1, naive.K1), (kl.k2, naive.K2), (kl.k3, naive.K3)])
@pytest.mark.parametrize("seed", range(2))
def test_kl_penalised_rewards_against_loops(estimator, loop, seed):
    log_probs, ref, mask = token_case(seed)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    expected = naive.token_rewards(rewards.tolist(), mask.tolist(), log_probs.tolist(), ref.tolist(), 0.3, loop)
    expected = torch.tensor(expected, dtype=torch.float64)
    found, mean_kl = apply_kl_penalty(reward_at_last_token(rewards, mask), log_probs, ref, mask, 0.3, estimator)
    close(found, expected)
    kept = [loop(p, q) for p, q, m in zip(log_probs.flatten().tolist(), ref.flatten().tolist(), mask.flatten().tolist(), strict=True) if m]
    close(mean_kl, sum(kept) / len(kept))
    of_rows, _ = apply_kl_penalty(rewards, log_probs, ref, mask, 0.3, estimator)
    assert of_rows[-1] == 3.0  # a row without tokens keeps its reward
    close(of_rows[:-1], expected.sum(dim=1)[:-1])


def test_a_coefficient_for_each_row_weighs_its_kl():
    log_probs, ref, mask = token_case(3)
    rewards, coefficients = torch.zeros(4, 7, dtype=torch.float64), torch.tensor([0.0, 0.1, 2.0, 1.0], dtype=torch.float64)
    found, mean_kl = apply_kl_penalty(rewards, log_probs, ref, mask, coefficients, kl.k2)
    one, same = apply_kl_penalty(rewards, log_probs, ref, mask, 1.0, kl.k2)
    close(found, coefficients[:, None] * one)
    assert mean_kl == same
    assert apply_kl_penalty(rewards, log_probs, ref, torch.zeros_like(mask), 1.0, kl.k3)[1] == 0.0


# -- optimal token baseline


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("keep_tail", [True, False])
def test_optimal_token_baseline_against_loops(seed, compact, keep_tail):
    returns, log_probs, mask = token_case(seed, rows=7)
    scores = squared_scores(-log_probs.abs())
    groups = torch.tensor([0, 1, 0, 0, 1, 2, 1])
    options = {"compact": compact, "keep_tail": keep_tail, "epsilon": 1e-8}
    expected = naive.optimal_token_baselines(returns.tolist(), scores.tolist(), mask.tolist(), groups.tolist(), **options)
    close(optimal_token_baseline(returns, scores, mask, groups, **options), expected)


def test_the_only_row_with_tokens_has_its_return_or_nothing_as_baseline():
    returns, mask = torch.tensor([[3.0, 2.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    scores, groups = torch.ones(2, 2), torch.tensor([0, 0])
    assert optimal_token_baseline(returns, scores, mask, groups).tolist() == [[3.0, 2.0], [0.0, 0.0]]
    assert optimal_token_baseline(returns, scores, mask, groups, keep_single=True).eq(0).all()


def test_squared_scores_are_the_squared_norms_of_the_gradients():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 1, 2, 3, 4, 0])
    log_probs = logits.log_softmax(-1)
    chosen = log_probs[torch.arange(6), tokens]
    (gradient,) = torch.autograd.grad(chosen.sum(), logits)
    probs = log_probs.detach().exp()
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    close(squared_scores(chosen.detach(), probs.square().sum(-1)), gradient.square().sum(-1))
    close(squared_scores(chosen.detach(), probs.square().sum(-1), weights), (weights[:, None] * gradient).square().sum(-1))
    estimated = squared_scores(log_probs.detach())  # of every token that could have been drawn
    close((probs * estimated).sum(-1), 1 - probs.square().sum(-1))


def test_rows_that_were_cut_off_earn_nothing():
    rewards, truncated = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([False, True, True])
    assert zero_truncated_rewards(rewards, truncated).tolist() == [1.0, 0.0, 0.0]
    assert rewards.tolist() == [1.0, -2.0, 3.0]
    with pytest.raises(AssertionError, match="truncated"):
        zero_truncated_rewards(rewards, truncated[:2])


def test_rows_without_any_column_have_nothing():
    nothing = torch.zeros(3, 0)
    assert discounted_returns(nothing, nothing).shape == (3, 0)
    assert gae(nothing, nothing, nothing).shape == (3, 0)
    assert [x.shape for x in vtrace(nothing, nothing, nothing, nothing)] == [(3, 0)] * 3


def test_gpg_is_zero_where_no_row_is_valid():
    rewards = torch.tensor([3.0, 6.0, 9.0])
    assert gpg_advantages(rewards, torch.arange(3), keep_single=True).tolist() == [0.0] * 3
    assert gpg_advantages(rewards, torch.arange(3), keep_single=True, valid=is_not_zero).tolist() == [3.0, 6.0, 9.0]


@pytest.mark.parametrize("name", ["log_probs", "ref_log_probs"])
def test_log_probs_of_a_kl_penalty_are_one_for_each_token(name: str):
    columns = {"log_probs": torch.zeros(2, 3), "ref_log_probs": torch.zeros(2, 3)} | {name: torch.zeros(2, 1)}
    with pytest.raises(AssertionError, match=rf"^{name}\b"):  # one column would otherwise be used for all tokens
        apply_kl_penalty(torch.zeros(2, 3), mask=torch.ones(2, 3), kl_coef=0.1, kl=kl.k1, **columns)

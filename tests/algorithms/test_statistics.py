"""Statistics of groups and of masked tokens against naive loops, over packed sequences and over ranks; order, numbering, masked places."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import forked
import oracles
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollouts.algorithms.advantages import normalize_by_group
from rollouts.algorithms.statistics import (
    batch_leave_one_out_mean,
    batch_mean,
    batch_rms,
    batch_std,
    count_tokens,
    group_centered,
    group_count,
    group_max,
    group_mean,
    group_min,
    group_rms,
    group_std,
    group_sum,
    leave_one_out_mean,
    masked_entries,
    masked_mean,
    masked_var,
    whiten,
)

REWARDS = st.floats(-1e3, 1e3, allow_subnormal=False).map(lambda x: round(x, 3))
ROWS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=12)
STATISTICS = [
    group_sum,
    group_count,
    group_mean,
    group_max,
    group_min,
    group_std,
    partial(group_std, unbiased=False),
    group_rms,
    partial(group_rms, unbiased=False),
    group_centered,
    leave_one_out_mean,
    batch_mean,
    batch_std,
    batch_rms,
    batch_leave_one_out_mean,
]


def columns(rows, dtype=torch.float64):
    return torch.tensor([r for r, _ in rows], dtype=dtype), torch.tensor([g for _, g in rows])


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance)


# -- groups


@given(ROWS)
def test_group_statistics_against_loops(rows):
    rewards, groups = columns(rows)
    values = rewards.tolist()
    own = [[values[i] for i in oracles.members(groups.tolist(), group)] for _, group in rows]
    close(group_sum(rewards, groups), [sum(x) for x in own])
    close(group_count(rewards, groups), [len(x) for x in own])
    close(group_mean(rewards, groups), [oracles.mean(x) for x in own])
    close(group_max(rewards, groups), [max(x) for x in own])
    close(group_min(rewards, groups), [min(x) for x in own])
    close(group_std(rewards, groups), [oracles.std(x) for x in own])
    close(group_std(rewards, groups, unbiased=False), [oracles.mean([(v - oracles.mean(x)) ** 2 for v in x]) ** 0.5 for x in own])
    close(group_rms(rewards, groups, unbiased=False), [oracles.mean([v**2 for v in x]) ** 0.5 for x in own])
    close(group_rms(rewards, groups), [(sum(v**2 for v in x) / (len(x) - 1)) ** 0.5 if len(x) > 1 else 0.0 for x in own])
    close(rewards - leave_one_out_mean(rewards, groups), oracles.rloo_advantages(values, groups.tolist()))


@given(ROWS)
def test_batch_statistics_are_those_of_one_group(rows):
    rewards, groups = columns(rows)
    values = rewards.tolist()
    close(batch_mean(rewards, groups), [oracles.mean(values)] * len(rows))
    close(batch_std(rewards, groups), [oracles.std(values)] * len(rows))
    close(rewards - batch_leave_one_out_mean(rewards, groups), oracles.rloo_advantages(values, [0] * len(rows)))
    for unbiased in (True, False):
        one = torch.zeros_like(groups)
        assert torch.equal(batch_std(rewards, groups, unbiased=unbiased), group_std(rewards, one, unbiased=unbiased))
        assert torch.equal(batch_rms(rewards, groups, unbiased=unbiased), group_rms(rewards, one, unbiased=unbiased))


@pytest.mark.parametrize("statistic", STATISTICS)
@given(rows=ROWS, data=st.data())
def test_order_and_numbering_of_groups_do_not_matter(statistic, rows, data):
    rewards, groups = columns(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    close(statistic(rewards[order], groups[order]), statistic(rewards, groups)[order])
    names = torch.tensor(data.draw(st.permutations([-7, 0, 1, 5, 40, 41, 10**12])))
    assert torch.equal(statistic(rewards, names[groups + 3]), statistic(rewards, groups))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics_of_no_row_are_empty(statistic):
    assert statistic(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_group_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 0, 1])
    close(group_std(rewards, groups), [(1 / 3) ** 0.5] * 4 + [0.0], 1e-6)
    close(group_std(rewards, groups, unbiased=False), [0.5] * 4 + [0.0], 1e-6)
    close(rewards - leave_one_out_mean(rewards, groups), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0], 1e-6)


def test_group_ids_must_fit():
    for statistic in (group_mean, group_max):
        with pytest.raises(AssertionError, match=r"group_ids has shape \(3,\), expected \(2,\)"):
            statistic(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


# -- packed sequences, and tokens under a mask


@given(st.lists(st.lists(REWARDS, max_size=5), min_size=1, max_size=5))
def test_packed_groups_of_uneven_length_are_normalised_one_by_one(sequences):
    packed = torch.tensor([x for values in sequences for x in values], dtype=torch.float64)
    groups = torch.tensor([number for number, values in enumerate(sequences) for _ in values], dtype=torch.int64)
    expected = [a for values in sequences for a in oracles.grpo_advantages(values, [0] * len(values), 1e-2)]
    close(normalize_by_group(packed, groups, epsilon=1e-2), expected)


@given(st.lists(st.lists(st.tuples(REWARDS, st.booleans()), min_size=3, max_size=3), min_size=1, max_size=6), st.data())
def test_masked_entries_are_those_that_count_with_the_group_of_their_row(rows, data):
    x = torch.tensor([[r for r, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[float(m) for _, m in row] for row in rows])
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    values, ids = masked_entries(x, mask, torch.tensor(groups))
    expected = [(r, groups[b]) for b, row in enumerate(rows) for r, m in row if m]
    assert list(zip(values.tolist(), ids.tolist(), strict=True)) == expected
    assert count_tokens(mask).tolist() == [sum(m for _, m in row) for row in rows]


# -- masked tokens


def token_case(seed: int, rows: int = 4, width: int = 7, dtype=torch.float64):
    """x, mask [rows, width]; the mask has gaps and, in its last row, nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, dtype=dtype)
    mask = (torch.rand(rows, width, generator=generator) < 0.6).to(dtype)
    mask[-1] = 0
    return x, mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unbiased", [True, False])
def test_whiten_against_the_loop(seed, unbiased):
    values, mask = token_case(seed)
    mean, variance = oracles.masked_moments(values.tolist(), mask.tolist())
    count = int(mask.sum())
    variance = variance if unbiased else variance * (count - 1) / count
    close(masked_mean(values, mask), mean)
    close(masked_var(values, mask, unbiased=unbiased), variance)
    expected = (values - mean) / (variance + 1e-8) ** 0.5
    close(whiten(values, mask, unbiased=unbiased), torch.where(mask > 0, expected, 0.0))
    close(whiten(values, mask, unbiased=unbiased, shift_mean=False), torch.where(mask > 0, expected + mean, 0.0))
    close(whiten(values, mask, unbiased=unbiased, epsilon=0.5), torch.where(mask > 0, (values - mean) / (variance + 0.5) ** 0.5, 0.0))


def test_whitened_tokens_have_mean_zero_and_variance_one():
    values, mask = token_case(3)
    found = whiten(values * 7 + 100, mask, epsilon=0.0)
    close(masked_mean(found, mask), 0.0)
    close(masked_var(found, mask), 1.0)


def test_an_epsilon_is_added_to_the_count():
    x, mask = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0])
    close(masked_mean(x, mask, epsilon=1.0), 2.0)
    close(masked_var(x, mask, epsilon=1.0, unbiased=False), (1 + 9) / 3)
    close(masked_var(x, mask, epsilon=1.0), 2 * (1 + 9) / 3)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_what_stands_at_masked_places_does_not_matter(garbage):
    values, mask = token_case(6)
    dirty = torch.where(mask > 0, values, garbage)
    assert torch.equal(masked_mean(dirty, mask), masked_mean(values, mask))
    assert torch.equal(masked_var(dirty, mask), masked_var(values, mask))
    for shift_mean in (True, False):
        assert torch.equal(whiten(dirty, mask, shift_mean=shift_mean), whiten(values, mask, shift_mean=shift_mean))


def test_statistics_of_nothing_and_of_one_token():
    x = torch.tensor([[torch.nan, 3.0]])
    assert masked_mean(x, torch.zeros(1, 2)).item() == 0.0
    assert masked_var(x, torch.zeros(1, 2)).item() == 0.0
    assert whiten(x, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert masked_var(x, torch.tensor([[0.0, 1.0]])).item() == 0.0
    assert whiten(x, torch.tensor([[0.0, 1.0]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(value=REWARDS, count=st.integers(1, 40))
def test_whitening_equal_tokens_gives_exactly_zero(dtype, value, count):
    x = torch.full((2, count), value, dtype=dtype)
    assert whiten(x, torch.ones_like(x)).eq(0).all()


def test_fractional_masks_weigh_the_mean():
    assert masked_mean(torch.tensor([1.0, 4.0, torch.nan]), torch.tensor([0.5, 1.0, 0.0])).item() == 3.0


def test_masks_of_integers_and_booleans_are_masks():
    values, mask = token_case(1)
    for kind in (torch.int64, torch.bool):
        assert torch.equal(whiten(values, mask.to(kind)), whiten(values, mask))


# -- over ranks


def whiten_on_two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def all_reduce(sums: Tensor) -> Tensor:
        total = sums.clone()
        dist.all_reduce(total)
        return total

    values, mask = token_case(8, rows=6)
    rows = slice(0, 2) if rank == 0 else slice(2, 6)  # uneven shares, one with an empty row
    x, on = values[rows] * 3 + 50, mask[rows]
    found = {
        "mean": masked_mean(x, on, all_reduce=all_reduce),
        "var": masked_var(x, on, all_reduce=all_reduce),
        "whitened": whiten(x, on, all_reduce=all_reduce),
        "biased": whiten(x, on, unbiased=False, count_epsilon=1e-8, all_reduce=all_reduce),
        "nothing": whiten(x, torch.zeros_like(on), all_reduce=all_reduce),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_whiten_like_one(tmp_path):
    mp.start_processes(whiten_on_two_ranks, args=(str(tmp_path),), nprocs=2, start_method=forked.START_METHOD)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    values, mask = token_case(8, rows=6)
    x = values * 3 + 50
    for part in parts:
        close(part["mean"], masked_mean(x, mask), 1e-12)
        close(part["var"], masked_var(x, mask), 1e-12)
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("whitened", "biased", "nothing")}
    close(joined["whitened"], whiten(x, mask), 1e-12)
    close(joined["biased"], whiten(x, mask, unbiased=False, count_epsilon=1e-8), 1e-12)
    assert joined["nothing"].eq(0).all()

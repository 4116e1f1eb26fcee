"""Aggregations as weights: what they sum to, where they are zero, and that they are the means that the papers write."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import make_batch

from rollouts.algorithms.loss_weights import (
    fixed_length_mean,
    group_token_mean,
    sample_mean,
    sample_sum,
    scaled,
    token_mean,
    trained_mask,
    weighted_sum,
)
from rollouts.types import TrainBatch

fixed_mean = partial(fixed_length_mean, length=8)
MEANS = [token_mean, sample_mean, group_token_mean]
ALL = [*MEANS, sample_sum, fixed_mean]


def weigh_rows(mask, groups=None, trainable=None) -> TrainBatch:
    columns = {"group_ids": groups, "trainable": trainable}
    given = {name: torch.tensor(values) for name, values in columns.items() if values is not None}
    return make_batch(torch.tensor(mask, dtype=torch.float32), **given)


@st.composite
def batches(draw, values=(0.0, 1.0)) -> TrainBatch:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    mask = [[draw(st.sampled_from(values)) for _ in range(width)] for _ in range(rows)]
    groups = [draw(st.integers(0, 2)) * 10 for _ in range(rows)]
    return weigh_rows(mask, groups, [draw(st.booleans()) for _ in range(rows)])


def loop_mean(batch: TrainBatch, x: torch.Tensor, kind: str) -> float:
    """The mean (or sum over rows) of x that the aggregation of that name stands for, with fractions as weights."""
    rows = [[(float(m), float(v)) for m, v in zip(mask, row, strict=True)] for mask, row in zip(trained_mask(batch), x, strict=True)]
    filled = [b for b, row in enumerate(rows) if any(m > 0 for m, _ in row)]
    if not filled:
        return 0.0

    def total(b: int) -> float:
        return sum(m * v for m, v in rows[b])

    def size(b: int) -> float:
        return sum(m for m, _ in rows[b])

    if kind == "token_mean":
        return sum(total(b) for b in filled) / sum(size(b) for b in filled)
    if kind == "sample_mean":
        return sum(total(b) / size(b) for b in filled) / len(filled)
    if kind == "sample_sum":
        return sum(total(b) for b in filled) / len(filled)
    if kind == "fixed_mean":
        return sum(total(b) / 8 for b in filled) / len(filled)
    groups = sorted({int(batch.group_ids[b]) for b in filled})
    own = [[b for b in filled if int(batch.group_ids[b]) == g] for g in groups]
    return sum(sum(total(b) for b in bs) / sum(size(b) for b in bs) for bs in own) / len(groups)


@pytest.mark.parametrize(
    ("weigh", "kind"), list(zip(ALL, ["token_mean", "sample_mean", "group_token_mean", "sample_sum", "fixed_mean"], strict=True))
)
@given(data=st.data())
def test_the_weighted_sum_is_the_mean_by_hand(weigh, kind, data):
    batch = data.draw(batches(values=(0.0, 0.25, 1.0)))
    x = torch.arange(batch.tokens.numel(), dtype=torch.float32).reshape(batch.tokens.shape).cos()
    assert (weigh(batch) * x).sum().item() == pytest.approx(loop_mean(batch, x, kind), abs=1e-5)


@pytest.mark.parametrize("weigh", MEANS)
@given(batch=batches(values=(0.0, 0.5, 1.0)))
def test_means_sum_to_one_or_to_nothing(weigh, batch):
    expected = 1.0 if bool((trained_mask(batch) > 0).any()) else 0.0
    assert weigh(batch).sum().item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("weigh", ALL)
@given(batch=batches(values=(0.0, 0.5, 1.0)))
def test_weight_is_positive_exactly_on_trained_tokens(weigh, batch):
    weights = weigh(batch)
    assert weights.shape == batch.tokens.shape
    assert bool(weights.isfinite().all())
    assert torch.equal(weights > 0, trained_mask(batch) > 0)


@pytest.mark.parametrize("weigh", ALL)
@given(batch=batches())
def test_rows_that_are_not_trained_are_as_if_absent(weigh, batch):
    kept = batch.trainable
    if not bool(kept.any()):
        assert not weigh(batch).any()
        return
    smaller = weigh_rows(batch.loss_mask[kept].tolist(), batch.group_ids[kept].tolist())
    torch.testing.assert_close(weigh(batch)[kept], weigh(smaller))


@pytest.mark.parametrize("weigh", ALL)
@given(batch=batches(), data=st.data())
def test_order_of_rows_and_padding_do_not_matter(weigh, batch, data):
    rows, width = batch.tokens.shape
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    shuffled = weigh_rows(batch.loss_mask[order].tolist(), batch.group_ids[order].tolist(), batch.trainable[order].tolist())
    torch.testing.assert_close(weigh(shuffled), weigh(batch)[order])
    padded = torch.nn.functional.pad(batch.loss_mask, (0, 3))
    wider = weigh_rows(padded.tolist(), batch.group_ids.tolist(), batch.trainable.tolist())
    torch.testing.assert_close(weigh(wider)[:, :width], weigh(batch))


@pytest.mark.parametrize("weigh", ALL)
def test_a_batch_without_trained_tokens_weighs_nothing(weigh):
    for batch in (weigh_rows([[0.0, 0.0], [0.0, 0.0]]), weigh_rows([[1.0, 1.0]], trainable=[False])):
        assert torch.equal(weigh(batch), torch.zeros(batch.tokens.shape))


def test_weights_by_hand():
    batch = weigh_rows([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]], groups=[0, 0, 1, 1])
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    close(token_mean(batch), batch.loss_mask / 6)
    close(sample_mean(batch), batch.loss_mask / torch.tensor([[9.0], [3.0], [1.0], [6.0]]))
    close(sample_sum(batch), batch.loss_mask / 3)
    close(group_token_mean(batch), batch.loss_mask / torch.tensor([[8.0], [8.0], [1.0], [4.0]]))
    close(fixed_length_mean(batch, 10), batch.loss_mask / 30)


def test_fractions_scale_a_token():
    batch = weigh_rows([[0.5, 1.0], [0.0, 0.5]])
    torch.testing.assert_close(token_mean(batch), torch.tensor([[0.25, 0.5], [0.0, 0.25]]))
    torch.testing.assert_close(sample_sum(batch), torch.tensor([[0.25, 0.5], [0.0, 0.25]]))
    torch.testing.assert_close(sample_mean(batch), torch.tensor([[1 / 6, 1 / 3], [0.0, 0.5]]))


def test_the_length_of_fixed_length_mean_is_positive():
    with pytest.raises(AssertionError, match="length is 0, expected more than 0"):
        fixed_length_mean(weigh_rows([[1.0]]), 0)


def test_an_epsilon_adds_to_the_count_and_a_factor_scales():
    batch = weigh_rows([[0, 1, 1, 1], [0, 1, 0, 0]])
    torch.testing.assert_close(token_mean(batch, epsilon=1.0), batch.loss_mask / 5)
    torch.testing.assert_close(sample_mean(batch, epsilon=1.0), batch.loss_mask / torch.tensor([[8.0], [4.0]]))
    torch.testing.assert_close(scaled(batch, weigh=token_mean, factor=3), batch.loss_mask * 0.75)


def test_rows_without_tokens_count_where_asked_and_lengths_may_be_given():
    batch = weigh_rows([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    close(sample_mean(batch, count_empty_rows=True), batch.loss_mask / torch.tensor([[6.0], [1.0], [3.0]]))
    close(sample_sum(batch, count_empty_rows=True), batch.loss_mask / 3)
    close(fixed_length_mean(batch, 4, count_empty_rows=True), batch.loss_mask / 12)
    close(sample_mean(batch, row_lengths=torch.tensor([4, 4, 8])), batch.loss_mask / torch.tensor([[8.0], [8.0], [16.0]]))
    close(sample_mean(batch, num_rows=10), batch.loss_mask / torch.tensor([[20.0], [1.0], [10.0]]))
    assert not sample_mean(batch, row_lengths=torch.zeros(3)).any()
    assert not token_mean(batch, num_tokens=0).any()


def test_a_weighted_sum_does_not_read_what_has_no_weight():
    x = torch.tensor([[1.0, math.nan], [math.inf, 2.0]], requires_grad=True)
    weights = torch.tensor([[0.5, 0.0], [0.0, 2.0]])
    total = weighted_sum(x, weights)
    assert float(total.detach()) == 4.5
    assert torch.equal(torch.autograd.grad(total, x)[0], weights)
    with pytest.raises(AssertionError, match=r"weights has shape \(2, 1\)"):
        weighted_sum(x, weights[:, :1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(token_mean, num_tokens=-1), "num_tokens is -1"),
        (partial(sample_mean, num_rows=-1), "num_rows is -1"),
        (partial(sample_mean, epsilon=-1e-8), "epsilon is -1e-08"),
        (partial(sample_mean, row_lengths=torch.ones(3)), r"row_lengths has shape \(3,\), expected \(1,\)"),
        (partial(group_token_mean, num_groups=-1), "num_groups is -1"),
        (partial(fixed_length_mean, length=-1.0), r"length is -1\.0"),
        (partial(scaled, weigh=token_mean, factor=0.0), r"factor is 0\.0"),
    ],
)
def test_denominators_out_of_range_say_which_and_what(call, message):
    with pytest.raises(AssertionError, match=message):
        call(weigh_rows([[1.0, 0.0]]))

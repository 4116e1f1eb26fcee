"""Clip-Cov and KL-Cov: which tokens are chosen, against loops, and that nothing else decides."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import losses as oracles
from samples import make_batch
from torch import Tensor

from rollouts.algorithms.covariance import clip_cov_tokens, drop_clip_cov, drop_tokens, kl_cov_tokens, select_kl_cov, token_covariances
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import clipped_policy_loss, kl_cov_policy_loss
from rollouts.algorithms.surrogates import clip_fractions, token_ratio
from rollouts.batches import select_rows
from rollouts.types import TokenOutputs, TrainBatch


def draw(seed: int, rows: int = 4, width: int = 5) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    old = -torch.randn(rows, width, generator=g, dtype=torch.float64).abs()
    return {
        "log_probs": old + 0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "old": old,
        "advantages": torch.randn(rows, width, generator=g, dtype=torch.float64),
        "mask": (torch.rand(rows, width, generator=g) < 0.7).double(),
    }


def draw_columns(seed: int = 0, rows: int = 4) -> TrainBatch:
    columns = draw(seed, rows)
    return make_batch(columns["mask"], old_log_probs=columns["old"], advantages=columns["advantages"])


def places(selected: Tensor) -> set[tuple[int, int]]:
    return {(int(b), int(t)) for b, t in selected.nonzero()}


@given(seed=st.integers(0, 10**6))
def test_covariances_are_those_of_the_loop_and_sum_to_the_covariance(seed):
    x = draw(seed)
    found = token_covariances(x["log_probs"], x["advantages"], x["mask"])
    expected = oracles.covariances(x["log_probs"].tolist(), x["advantages"].tolist(), x["mask"].tolist())
    for b in range(4):
        for t in range(5):
            assert float(found[b, t]) == pytest.approx(expected.get((b, t), 0.0), abs=1e-12)
    on = x["mask"] > 0
    if int(on.sum()) > 1:
        exact = torch.cov(torch.stack([x["log_probs"][on], x["advantages"][on]]), correction=0)[0, 1]
        torch.testing.assert_close(found.sum() / on.sum(), exact)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([1e-4, 0.2, 0.5, 1.0]))
def test_kl_cov_takes_the_largest(seed, fraction):
    x = draw(seed)
    selected = kl_cov_tokens(x["log_probs"], x["advantages"], x["mask"], fraction=fraction)
    found = oracles.covariances(x["log_probs"].tolist(), x["advantages"].tolist(), x["mask"].tolist())
    assert places(selected) == oracles.kl_cov_places(found, fraction)


@given(seed=st.integers(0, 10**6), fraction=st.sampled_from([1e-4, 0.2, 1.0]), low=st.floats(-0.5, 0.2), width=st.floats(0.1, 1.0))
def test_clip_cov_takes_the_first_candidates_that_the_clip_leaves(seed, fraction, low, width):
    x = draw(seed)
    arguments = (x["log_probs"], x["advantages"], x["mask"])
    bounds = {"fraction": fraction, "cov_low": low, "cov_high": low + width}
    found = oracles.covariances(x["log_probs"].tolist(), x["advantages"].tolist(), x["mask"].tolist())

    def clipped(b: int, t: int) -> bool:
        ratio, a = math.exp(float(x["log_probs"][b, t] - x["old"][b, t])), float(x["advantages"][b, t])
        return (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.9)

    log_ratio = token_ratio(x["log_probs"], x["old"], x["mask"])
    taken = clip_fractions(log_ratio, x["log_probs"], x["advantages"], low=0.1, high=0.3)["clip_fraction"] > 0
    selected = clip_cov_tokens(*arguments, clipped=taken, **bounds)
    expected = oracles.clip_cov_places(found, clipped, fraction, low, low + width)
    assert places(selected) == set(expected)
    drawn = clip_cov_tokens(*arguments, clipped=taken, generator=torch.Generator().manual_seed(seed), **bounds)
    candidates = set(oracles.clip_cov_places(found, clipped, 1.0, low, low + width))
    assert places(drawn) <= candidates
    assert len(places(drawn)) == len(expected)


def test_clip_cov_draws_among_all_candidates():
    x = draw(1, rows=8)
    one = partial(clip_cov_tokens, x["log_probs"], x["advantages"], x["mask"], fraction=1e-9, cov_low=-9.0, cov_high=9.0)
    seen = set().union(*(places(one(generator=torch.Generator().manual_seed(seed))) for seed in range(40)))
    assert len(seen) > 10


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_masked_places_decide_nothing(garbage):
    x = draw(2)
    dirty = {name: torch.where(x["mask"] > 0, column, garbage) for name, column in x.items() if name != "mask"}
    for choose in (
        lambda c: kl_cov_tokens(c["log_probs"], c["advantages"], x["mask"], fraction=0.3),
        lambda c: clip_cov_tokens(c["log_probs"], c["advantages"], x["mask"], fraction=0.5, cov_low=-1.0, cov_high=1.0),
        lambda c: token_covariances(c["log_probs"], c["advantages"], x["mask"]),
    ):
        assert torch.equal(choose(x), choose(dirty))


def test_a_batch_without_tokens_selects_none():
    x, empty = draw(0), torch.zeros(4, 5).double()
    assert not kl_cov_tokens(x["log_probs"], x["advantages"], empty, fraction=1.0).any()
    assert not clip_cov_tokens(x["log_probs"], x["advantages"], empty).any()
    assert not kl_cov_tokens(x["log_probs"], x["advantages"], x["mask"], fraction=0.0).any()


def test_clip_cov_as_a_transform_drops_tokens_from_the_loss_and_not_from_its_denominator():
    batch = draw_columns()
    dropped = drop_clip_cov(batch, fraction=0.3, cov_low=0.0, cov_high=9.0)
    gone = (dropped.importance_weights == 0) & (batch.loss_mask > 0)
    assert int(gone.sum()) == int(0.3 * int(batch.loss_mask.sum()))
    assert torch.equal(dropped.loss_mask, batch.loss_mask)
    log_probs = (batch.old_log_probs + 0.05).requires_grad_()
    whole, part = (
        torch.autograd.grad(clipped_policy_loss(TokenOutputs(log_probs=log_probs), replace(b, loss_weights=token_mean(b))).loss, log_probs)[
            0
        ]
        for b in (batch, dropped)
    )
    assert torch.equal(part, torch.where(gone, 0.0, whole))


def test_dropped_tokens_keep_the_weights_of_the_others():
    batch = replace(draw_columns(), importance_weights=torch.full((4, 5), 0.7).double())
    chosen = torch.zeros(4, 5, dtype=torch.bool)
    chosen[1, 2] = True
    weights = drop_tokens(batch, chosen).importance_weights
    assert float(weights[1, 2]) == 0
    assert float(weights.sum()) == pytest.approx(19 * 0.7)


@given(seed=st.integers(0, 10**6), cut=st.integers(1, 3))
def test_the_kl_cov_loss_does_not_depend_on_micro_batches(seed, cut):
    batch = select_kl_cov(draw_columns(seed), fraction=0.2)
    batch = replace(batch, loss_weights=token_mean(batch))
    log_probs = (batch.old_log_probs + draw(seed + 1)["advantages"]).requires_grad_()
    whole = kl_cov_policy_loss(TokenOutputs(log_probs=log_probs), batch, coef=0.5).loss
    parts = []
    for rows in (list(range(cut)), list(range(cut, 4))):
        micro = select_rows(batch, rows)
        parts.append(kl_cov_policy_loss(TokenOutputs(log_probs=log_probs[rows, : micro.tokens.shape[1]]), micro, coef=0.5).loss)
    torch.testing.assert_close(sum(parts), whole)


def test_rows_that_are_not_trainable_are_not_chosen():
    batch = draw_columns()
    batch = replace(batch, trainable=torch.tensor([True, False, True, True]))
    assert not select_kl_cov(batch, fraction=1.0).selected[1].any()
    assert int(select_kl_cov(batch, fraction=1.0).selected.sum()) == int(batch.loss_mask[[0, 2, 3]].sum())


def test_what_is_missing_or_out_of_range_is_named():
    batch = draw_columns()
    with pytest.raises(AssertionError, match=r"select_kl_cov needs batch\.advantages"):
        select_kl_cov(replace(batch, advantages=None))
    with pytest.raises(AssertionError, match=r"drop_clip_cov needs batch\.old_log_probs or batch\.rollout_log_probs"):
        drop_clip_cov(replace(batch, old_log_probs=None))
    with pytest.raises(AssertionError, match=r"fraction is 1\.5"):
        select_kl_cov(batch, fraction=1.5)
    with pytest.raises(AssertionError, match=r"fraction is -0\.1"):
        drop_clip_cov(batch, fraction=-0.1)
    with pytest.raises(AssertionError, match=r"cov_low is 5\.0, expected less than cov_high"):
        drop_clip_cov(batch, cov_low=5.0, cov_high=5.0)
    with pytest.raises(AssertionError, match=r"needs batch\.selected"):
        kl_cov_policy_loss(TokenOutputs(log_probs=batch.old_log_probs), replace(batch, loss_weights=token_mean(batch)))


def test_the_defaults_of_clip_cov_are_those_of_its_authors():
    defaults = {name: given.default for name, given in inspect.signature(drop_clip_cov).parameters.items()}
    assert (defaults["fraction"], defaults["cov_low"], defaults["cov_high"]) == (2e-4, 1.0, 5.0)

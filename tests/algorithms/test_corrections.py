"""Corrections against naive loops, and what they promise: no gradient, one row at a time, unchanged denominators."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import corrections as oracles
from parity.peers import fill_missing_log_probs, normalize_weights
from torch import Tensor

from rollouts.algorithms.corrections import (
    Level,
    anchor_to_proximal,
    clamp_weights,
    drop_outside,
    geometric_level,
    importance_weights,
    keep_tokens,
    limit_second_moment,
    mask_off_policy_rows,
    mask_weights,
    max_level,
    min_level,
    off_policy_metrics,
    reject_divergence,
    reject_ratios,
    sequence_level,
    token_level,
    truncate_weights,
)
from rollouts.algorithms.kl import KLEstimator, k1, k2, k3
from rollouts.algorithms.loss_weights import sample_mean, token_mean
from rollouts.algorithms.losses import clipped_policy_loss, corrected_loss, policy_loss
from rollouts.algorithms.presets import chain
from rollouts.algorithms.surrogates import importance_weighted
from rollouts.batches import select_rows
from rollouts.types import TokenOutputs, TrainBatch, Transform

LEVELS: dict[str, Level] = {
    "token": token_level,
    "sequence": sequence_level,
    "geometric": geometric_level,
    "max": max_level,
    "min": min_level,
}
STATISTICS: dict[str, tuple[KLEstimator, Callable[[float, float], float]]] = {
    "k1": (k1, lambda trainer, rollout: rollout - trainer),
    "k2": (k2, lambda trainer, rollout: 0.5 * (trainer - rollout) ** 2),
    "k3": (k3, lambda trainer, rollout: math.exp(trainer - rollout) - 1 - (trainer - rollout)),
}
TRANSFORMS: dict[str, Transform] = {
    "anchor": anchor_to_proximal,
    "anchor-segment": partial(anchor_to_proximal, segment_wise=True, cap=1.5, floor=0.5),
    "anchor-geometric-clamped": partial(anchor_to_proximal, level=geometric_level, cap=1.2, drop=False),
    "truncate": truncate_weights,
    "truncate-sequence": partial(truncate_weights, level=sequence_level, floor=0.1),
    "mask": partial(mask_weights, cap=1.3, floor=0.7),
    "ratios": partial(reject_ratios, cap=1.5, floor=0.6),
    "ratios-row": partial(reject_ratios, cap=1.5, floor=0.6, level=sequence_level),
    "veto": partial(reject_ratios, floor=0.4, level=min_level),
    "divergence": partial(reject_divergence, cap=0.1),
    "divergence-row": partial(reject_divergence, cap=0.2, level=max_level),
}
seeds = st.integers(0, 10**6)
bounds = st.one_of(st.none(), st.floats(1.0, 3.0))
floors = st.one_of(st.none(), st.floats(0.1, 1.0))


def draw_loss_inputs(seed: int = 0, rows: int = 5, width: int = 6, *, empty_row: bool = True) -> tuple[Tensor, TrainBatch]:
    """Log-probs that ask for a gradient, and ragged rows with three older policies. Row 1 has no trained token. float64."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (rows,), generator=g)
    lengths[0] = width
    positions = torch.arange(width)
    mask = ((positions > 0) & (positions < lengths[:, None]) & (torch.rand(rows, width, generator=g) < 0.8)).double()
    mask[0, 1] = 1.0
    if empty_row:
        mask[1] = 0.0

    def draw(scale: float) -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    rollout = -draw(1.0).abs()
    prox = rollout + draw(0.4)
    batch = TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.zeros(rows, dtype=torch.float64),
        group_ids=torch.arange(rows),
        trainable=torch.ones(rows, dtype=torch.bool),
        rollout_log_probs=rollout,
        old_log_probs=rollout + draw(0.4),
        prox_log_probs=prox,
        segment_log_probs=rollout + draw(0.3),
        advantages=draw(1.0),
    )
    log_probs = (prox + draw(0.2)).requires_grad_()
    return log_probs, replace(batch, loss_weights=token_mean(batch))


def rows_of(x: Tensor | None) -> list[list[float]]:
    assert x is not None
    return x.detach().tolist()


def assert_same(found: Tensor | None, expected: list[list[float]], mask: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(torch.where(mask > 0, found, 0.0), torch.tensor(expected, dtype=found.dtype), rtol=1e-10, atol=1e-10)


def loss_and_gradient(log_probs: Tensor, batch: TrainBatch, **options: float) -> tuple[Tensor, Tensor]:
    leaf = log_probs.detach().clone().requires_grad_()
    loss = clipped_policy_loss(TokenOutputs(log_probs=leaf), batch, **options).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


# -- against loops


@given(seed=seeds, level=st.sampled_from(sorted(LEVELS)), cap=bounds, floor=floors, drop=st.booleans())
def test_weights_equal_a_loop(seed: int, level: str, cap: float | None, floor: float | None, drop: bool):
    _, batch = draw_loss_inputs(seed)
    new, rollout, mask = batch.old_log_probs, batch.rollout_log_probs, batch.loss_mask
    expected = oracles.weights(rows_of(new), rows_of(rollout), mask.tolist(), level, floor, cap, drop)
    correct = mask_weights if drop else truncate_weights
    assert_same(correct(batch, cap=cap, floor=floor, level=LEVELS[level]).importance_weights, expected, mask)
    prox = oracles.weights(rows_of(batch.prox_log_probs), rows_of(rollout), mask.tolist(), level, floor, cap, drop)
    anchored = anchor_to_proximal(batch, cap=cap, floor=floor, level=LEVELS[level], drop=drop)
    assert_same(anchored.importance_weights, prox, mask)
    assert anchored.old_log_probs is not None
    assert torch.equal(anchored.old_log_probs, batch.prox_log_probs)  # type: ignore[arg-type]


@given(seed=seeds, level=st.sampled_from(sorted(LEVELS)), cap=bounds, floor=floors)
def test_rejected_ratios_equal_a_loop(seed: int, level: str, cap: float | None, floor: float | None):
    _, batch = draw_loss_inputs(seed)
    low, high = (None if b is None else math.log(b) for b in (floor, cap))
    trainer, rollout, mask = rows_of(batch.old_log_probs), rows_of(batch.rollout_log_probs), batch.loss_mask
    expected = oracles.kept(lambda a, b: a - b, trainer, rollout, mask.tolist(), level, low, high)
    assert_same(reject_ratios(batch, cap=cap, floor=floor, level=LEVELS[level]).importance_weights, expected, mask)
    assert_same(reject_ratios(batch, cap=cap, floor=floor, level=LEVELS[level], from_mask=True).loss_mask, expected, mask)


@given(seed=seeds, level=st.sampled_from(sorted(LEVELS)), kl=st.sampled_from(sorted(STATISTICS)), cap=st.floats(0.01, 0.5))
def test_rejected_divergences_equal_a_loop(seed: int, level: str, kl: str, cap: float):
    _, batch = draw_loss_inputs(seed)
    estimator, statistic = STATISTICS[kl]
    trainer, rollout, mask = rows_of(batch.old_log_probs), rows_of(batch.rollout_log_probs), batch.loss_mask
    expected = oracles.kept(statistic, trainer, rollout, mask.tolist(), level, -0.3, cap)
    found = reject_divergence(batch, kl=estimator, cap=cap, floor=-0.3, level=LEVELS[level])
    assert_same(found.importance_weights, expected, mask)


@given(seed=seeds, cap=bounds, floor=floors, segment=st.booleans())
def test_decoupled_ppo_equals_the_paper(seed: int, cap: float | None, floor: float | None, segment: bool):
    log_probs, batch = draw_loss_inputs(seed)
    loss, gradient = loss_and_gradient(log_probs, anchor_to_proximal(batch, cap=cap, floor=floor, segment_wise=segment), high=0.28)
    leaf = log_probs.detach().clone().requires_grad_()
    expected = oracles.decoupled_ppo(
        [list(row.unbind()) for row in leaf.unbind()],
        rows_of(batch.prox_log_probs),
        rows_of(batch.rollout_log_probs),
        rows_of(batch.advantages),
        batch.loss_mask.tolist(),
        0.2,
        0.28,
        cap,
        floor,
        rows_of(batch.segment_log_probs) if segment else None,
    )
    assert float(loss) == pytest.approx(float(torch.as_tensor(expected).detach()), abs=1e-10)
    if isinstance(expected, Tensor):  # a number where every token is dropped
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, leaf)[0], rtol=1e-10, atol=1e-10)
    else:
        assert not gradient.any()


@given(seed=seeds, threshold=st.floats(1e-4, 0.5))
def test_second_moment_equals_dropping_one_token_at_a_time(seed: int, threshold: float):
    _, batch = draw_loss_inputs(seed)
    expected = oracles.second_moment_kept(
        rows_of(batch.old_log_probs), rows_of(batch.rollout_log_probs), batch.loss_mask.tolist(), threshold
    )
    assert_same(limit_second_moment(batch, threshold=threshold).loss_mask, expected, batch.loss_mask)


@given(seed=seeds, threshold=st.floats(-0.3, 0.3), against_old=st.booleans())
def test_mask_of_off_policy_rows_equals_a_loop(seed: int, threshold: float, against_old: bool):
    log_probs, batch = draw_loss_inputs(seed)
    anchor = batch.old_log_probs if against_old else batch.rollout_log_probs
    expected = oracles.off_policy_rows(rows_of(log_probs), rows_of(anchor), rows_of(batch.advantages), batch.loss_mask.tolist(), threshold)
    found = mask_off_policy_rows(log_probs.detach(), batch, threshold=threshold, against_old=against_old)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@given(seed=seeds)
def test_off_policy_metrics_equal_a_loop(seed: int):
    _, batch = draw_loss_inputs(seed)
    expected = oracles.off_policy_metrics(rows_of(batch.old_log_probs), rows_of(batch.rollout_log_probs), batch.loss_mask.tolist())
    found = off_policy_metrics(batch)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, abs=1e-10)


def test_off_policy_metrics_of_weights():
    _, batch = draw_loss_inputs()
    mask = torch.zeros_like(batch.loss_mask)
    mask[0, 1:5] = 1
    weights = torch.zeros_like(mask)
    weights[0, 1:5] = torch.tensor([0.0, 1.0, 2.0, 1.0])
    found = off_policy_metrics(replace(batch, loss_mask=mask, importance_weights=weights))
    assert float(found["effective_sample_size"]) == pytest.approx(1.0 / 1.5)
    assert float(found["dropped_fraction"]) == 0.25


# -- what they promise


def test_decoupled_equals_ppo_exactly_when_the_three_policies_are_one():
    log_probs, batch = draw_loss_inputs(3)
    same = replace(batch, old_log_probs=batch.rollout_log_probs, prox_log_probs=batch.rollout_log_probs)
    plain = loss_and_gradient(log_probs, replace(batch, old_log_probs=batch.rollout_log_probs))
    for transform in (anchor_to_proximal, truncate_weights, mask_weights, partial(reject_divergence, cap=0.0)):
        loss, gradient = loss_and_gradient(log_probs, transform(same))
        assert torch.equal(loss, plain[0])
        assert torch.equal(gradient, plain[1])


def test_tokens_beyond_the_cap_are_excluded_and_still_counted():
    old = torch.zeros(1, 4, dtype=torch.float64)
    ones = torch.ones(1, 4, dtype=torch.float64)
    _, batch = draw_loss_inputs(rows=1, width=4, empty_row=False)
    rollout = -torch.tensor([[0.0, 6.0, 5.0, 0.1]], dtype=torch.float64).log().clamp(min=-3.0)  # weights 1 (masked), 6, 5, 0.1
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    batch = replace(batch, loss_mask=mask, rollout_log_probs=rollout, prox_log_probs=old, advantages=ones)
    batch = replace(batch, loss_weights=token_mean(batch))
    log_probs = old.clone().requires_grad_()

    def outcome(**options: float | bool) -> tuple[list[float], float]:
        loss, gradient = loss_and_gradient(log_probs, anchor_to_proximal(batch, **options))  # type: ignore[arg-type]
        return gradient[0].tolist(), float(loss)

    gradient, loss = outcome(cap=5.5)
    assert gradient == pytest.approx([0, 0, -5 / 3, -0.1 / 3])
    assert loss == pytest.approx(-5.1 / 3)
    assert outcome(cap=5.5, floor=0.5)[0] == pytest.approx([0, 0, -5 / 3, 0])
    assert outcome(cap=5.5, floor=0.5, drop=False)[0] == pytest.approx([0, -5.5 / 3, -5 / 3, -0.5 / 3])


def test_segment_wise_over_three_versions():
    """A row whose tokens versions 1, 2 and 3 sampled, trained at version 4: each weight is one version wide, not three."""
    p = {1: math.log(0.2), 2: math.log(0.3), 3: math.log(0.4), 4: math.log(0.6)}
    versions = [1, 2, 3]
    rollout = torch.tensor([[0.0, *[p[v] for v in versions]]], dtype=torch.float64)
    segment = torch.tensor([[0.0, *[p[v + 1] for v in versions]]], dtype=torch.float64)
    current = torch.full((1, 4), p[4], dtype=torch.float64)
    _, batch = draw_loss_inputs(rows=1, width=4, empty_row=False)
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    batch = replace(batch, loss_mask=mask, rollout_log_probs=rollout, segment_log_probs=segment, prox_log_probs=current)
    weights = anchor_to_proximal(batch, cap=2.0, segment_wise=True).importance_weights
    assert weights is not None
    assert weights[0, 1:].tolist() == pytest.approx([0.3 / 0.2, 0.4 / 0.3, 0.6 / 0.4])
    plain = anchor_to_proximal(batch, cap=2.5).importance_weights
    assert plain is not None
    assert plain[0, 1:].tolist() == pytest.approx([0.0, 2.0, 1.5])


def test_weights_carry_no_gradient():
    log_probs, batch = draw_loss_inputs(1)
    for name, transform in TRANSFORMS.items():
        source = log_probs.detach().clone().requires_grad_()
        made = transform(replace(batch, old_log_probs=source, prox_log_probs=source, segment_log_probs=source))
        assert made.importance_weights is not None
        assert not made.importance_weights.requires_grad, name
    anchored = anchor_to_proximal(replace(batch, prox_log_probs=log_probs))
    assert anchored.old_log_probs is not None
    assert not anchored.old_log_probs.requires_grad


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_transforms_look_at_one_row_and_at_no_masked_place(name: str):
    log_probs, batch = draw_loss_inputs(7)
    transform, mask = TRANSFORMS[name], batch.loss_mask
    whole = loss_and_gradient(log_probs, transform(batch))

    def spoil(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(mask > 0, x, torch.nan)

    dirty = replace(
        batch,
        rollout_log_probs=spoil(batch.rollout_log_probs),
        old_log_probs=spoil(batch.old_log_probs),
        prox_log_probs=spoil(batch.prox_log_probs),
        segment_log_probs=spoil(batch.segment_log_probs),
    )
    loss, gradient = loss_and_gradient(log_probs, transform(dirty))
    assert torch.equal(loss, whole[0])
    assert torch.equal(gradient, whole[1])
    order = torch.tensor([3, 0, 4, 2, 1])
    parts = [loss_and_gradient(log_probs[rows], transform(select(batch, rows)))[0] for rows in (order[:2], order[2:])]
    torch.testing.assert_close(sum(parts), whole[0], rtol=1e-10, atol=1e-12)
    padded = transform(widen(batch))
    torch.testing.assert_close(loss_and_gradient(pad(log_probs), padded)[0], whole[0], rtol=1e-12, atol=1e-12)


def select(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    width = torch.full_like(batch.lengths, batch.tokens.shape[1])
    return select_rows(replace(batch, lengths=width), rows)


def pad(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 2))


def widen(batch: TrainBatch) -> TrainBatch:
    """The batch with two more columns of padding."""
    names = (
        "tokens",
        "loss_mask",
        "rollout_log_probs",
        "old_log_probs",
        "prox_log_probs",
        "segment_log_probs",
        "advantages",
        "loss_weights",
    )
    return replace(batch, **{name: pad(getattr(batch, name)) for name in names})


def test_kept_tokens_leave_the_mask_where_dropped_ones_keep_their_denominator():
    _, batch = draw_loss_inputs()
    batch = reject_ratios(batch, cap=1.0)
    assert batch.importance_weights is not None
    kept = keep_tokens(batch, batch.importance_weights > 0)
    assert kept.loss_mask.equal(reject_ratios(draw_loss_inputs()[1], cap=1.0, from_mask=True).loss_mask)
    assert 0 < kept.loss_mask.sum() < batch.loss_mask.sum()
    on = kept.loss_mask > 0
    assert token_mean(kept)[on].sum().item() == pytest.approx(1.0) != token_mean(batch)[on].sum().item()
    with pytest.raises(AssertionError, match="keep"):
        keep_tokens(batch, on[:, 1:])


def test_transforms_chain_by_multiplying():
    _, batch = draw_loss_inputs(2)
    both = chain(truncate_weights, partial(reject_ratios, cap=1.2, floor=0.8))(batch).importance_weights
    first, second = truncate_weights(batch).importance_weights, reject_ratios(batch, cap=1.2, floor=0.8).importance_weights
    assert both is not None
    assert first is not None
    assert second is not None
    assert torch.equal(both, first * second)


def test_a_correction_inside_the_loss_equals_one_in_estimate():
    log_probs, batch = draw_loss_inputs(4)
    inside = corrected_loss(TokenOutputs(log_probs=log_probs), batch, correction=anchor_to_proximal, loss=clipped_policy_loss)
    assert torch.equal(inside.loss, clipped_policy_loss(TokenOutputs(log_probs=log_probs), anchor_to_proximal(batch)).loss)


def test_losses_report_what_the_correction_did():
    log_probs, batch = draw_loss_inputs(5)
    anchored = anchor_to_proximal(batch, cap=1.1)
    metrics = clipped_policy_loss(TokenOutputs(log_probs=log_probs), anchored).metrics
    on = batch.loss_mask > 0
    assert anchored.importance_weights is not None
    weights = anchored.importance_weights[on]
    assert float(metrics["dropped_fraction"]) == pytest.approx(float((weights == 0).double().mean()))
    assert 0 < float(metrics["dropped_fraction"]) < 1
    assert float(metrics["importance_weight"]) == pytest.approx(float(weights.mean()))
    assert batch.rollout_log_probs is not None
    assert batch.prox_log_probs is not None
    assert float(metrics["rollout_kl"]) == pytest.approx(float((batch.rollout_log_probs - batch.prox_log_probs)[on].mean()))
    assert {"clip_fraction", "approx_kl"} <= set(metrics)
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_a_mask_of_off_policy_rows_acts_on_the_policy_term():
    log_probs, batch = draw_loss_inputs(6)
    reweigh = partial(mask_off_policy_rows, threshold=0.0)
    leaf = log_probs.detach().clone().requires_grad_()
    loss = policy_loss(TokenOutputs(log_probs=leaf), batch, surrogate=importance_weighted, reweigh=reweigh).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    dropped = (mask_off_policy_rows(log_probs.detach(), batch, threshold=0.0) == 0) & (batch.loss_mask > 0)
    assert dropped.any()
    assert not gradient[dropped].any()


def test_rejection_from_the_mask_changes_the_denominator():
    _, batch = draw_loss_inputs(8)
    kept = reject_ratios(batch, cap=1.2, floor=0.8, from_mask=True)
    assert kept.importance_weights is None
    assert 0 < float(kept.loss_mask.sum()) < float(batch.loss_mask.sum())
    assert float(token_mean(kept).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("weigh", [token_mean, sample_mean])
def test_normalized_weights_have_mean_1(weigh: Callable[[TrainBatch], Tensor]):
    _, batch = draw_loss_inputs(9)
    weights = normalize_weights(truncate_weights(batch), weigh=weigh).importance_weights
    assert weights is not None
    assert float((weigh(batch) * weights).sum()) == pytest.approx(1.0)


def test_weights_that_are_all_0_stay_0_when_normalized():
    _, batch = draw_loss_inputs(9)
    weights = normalize_weights(replace(batch, importance_weights=torch.zeros_like(batch.loss_mask))).importance_weights
    assert weights is not None
    assert not weights.any()


def test_missing_log_probs_get_weight_1():
    _, batch = draw_loss_inputs(10)
    assert batch.rollout_log_probs is not None
    missing = batch.rollout_log_probs.clone()
    missing[0, 1] = torch.nan
    weights = truncate_weights(fill_missing_log_probs(replace(batch, rollout_log_probs=missing))).importance_weights
    assert weights is not None
    assert weights[0, 1] == 1
    assert torch.isfinite(weights).all()


def test_batch_statistics_of_a_batch_without_trained_tokens():
    _, batch = draw_loss_inputs(11)
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert not limit_second_moment(empty).loss_mask.any()
    assert all(float(value) == 0 for value in off_policy_metrics(truncate_weights(empty)).values())
    assert all(float(value) == 0 for value in off_policy_metrics(empty, count_empty_rows=True).values())


def test_a_second_moment_that_nothing_meets_leaves_the_nearest_token():
    _, batch = draw_loss_inputs(12)
    kept = limit_second_moment(batch, threshold=1e-12).loss_mask
    assert batch.old_log_probs is not None
    assert batch.rollout_log_probs is not None
    distance = torch.where(batch.loss_mask > 0, (batch.old_log_probs - batch.rollout_log_probs).abs(), torch.inf)
    assert kept.flatten().nonzero().tolist() == [[int(distance.argmin())]]


def test_huge_log_ratios_stay_finite():
    mask = torch.ones(1, 3, dtype=torch.float64)
    new, old = torch.tensor([[0.0, 0.0, -900.0]], dtype=torch.float64), torch.tensor([[0.0, -900.0, 0.0]], dtype=torch.float64)
    assert torch.isfinite(importance_weights(new, old, mask)).all()
    assert importance_weights(new, old, mask, log_bound=None).isinf().any()


def test_bounds():
    weights = torch.tensor([0.1, 1.0, 3.0])
    assert clamp_weights(weights, floor=0.5, cap=2.0).tolist() == [0.5, 1.0, 2.0]
    assert drop_outside(weights, floor=0.5, cap=2.0).tolist() == [0.0, 1.0, 0.0]
    assert drop_outside(weights).tolist() == weights.tolist()
    assert drop_outside(weights, floor=1.0, cap=1.0).tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(AssertionError, match="floor is -1"):
        reject_ratios(draw_loss_inputs()[1], floor=-1.0)


@pytest.mark.parametrize(
    ("transform", "column"),
    [
        (anchor_to_proximal, "prox_log_probs"),
        (anchor_to_proximal, "rollout_log_probs"),
        (partial(anchor_to_proximal, segment_wise=True), "segment_log_probs"),
        (truncate_weights, "old_log_probs"),
        (mask_weights, "rollout_log_probs"),
        (reject_ratios, "old_log_probs"),
        (limit_second_moment, "rollout_log_probs"),
        (fill_missing_log_probs, "old_log_probs"),
        (normalize_weights, "importance_weights"),
    ],
)
def test_a_missing_column_is_named(transform: Transform, column: str):
    _, batch = draw_loss_inputs()
    with pytest.raises(AssertionError, match=column):
        transform(replace(batch, **{column: None}))


def test_transforms_pickle():
    for transform in TRANSFORMS.values():
        assert repr(pickle.loads(pickle.dumps(transform))) == repr(transform)

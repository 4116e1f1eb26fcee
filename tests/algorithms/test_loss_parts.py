"""Losses with weights of their own, ratios with a cap and selections of tokens, against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity.peers import inside_tv_lower
from test_losses import draw_loss_inputs

from rollouts.algorithms.kl import k2
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import KLTerm, distillation_loss, entropy_loss, policy_loss, sft_loss, total_loss
from rollouts.algorithms.statistics import top_share
from rollouts.algorithms.surrogates import (
    capped,
    cispo,
    clipped,
    importance_weighted,
    reinforce,
    sequence_mean_ratio,
    token_ratio,
)
from rollouts.types import TokenOutputs, TrainBatch


def weighted_batch(seed: int) -> tuple[torch.Tensor, TrainBatch]:
    log_probs, batch = draw_loss_inputs(seed)
    return log_probs, replace(batch, loss_weights=token_mean(batch))


def triples(*columns: torch.Tensor) -> list[tuple[float, ...]]:
    """The numbers that stand at each place, row by row."""
    return list(zip(*(column.flatten().tolist() for column in columns), strict=True))


@pytest.mark.parametrize("cap", [0.7, 1.0, 1.5])
def test_a_capped_ratio_is_never_larger_than_its_cap_and_has_no_gradient_above(cap: float):
    log_probs, batch = weighted_batch(0)
    found = capped(token_ratio, cap=cap)(log_probs, batch.rollout_log_probs, batch.loss_mask)
    found.sum().backward()
    for new, old, on, ratio, gradient in triples(log_probs, batch.rollout_log_probs, batch.loss_mask, found.exp(), log_probs.grad):
        if on:
            assert ratio == pytest.approx(min(math.exp(new - old), cap), abs=1e-12)
            assert gradient == (1.0 if math.exp(new - old) < cap else 0.0)
        else:
            assert gradient == 0.0


@pytest.mark.parametrize("ratio", [token_ratio, sequence_mean_ratio])
def test_with_a_clip_a_cap_above_it_is_the_dual_clip(ratio):
    log_probs, batch = weighted_batch(1)
    outputs = TokenOutputs(log_probs=log_probs)
    surrogate = partial(clipped, low=0.2, high=0.28)
    one = policy_loss(outputs, batch, surrogate=surrogate, ratio=capped(ratio, cap=1.3)).loss
    other = policy_loss(outputs, batch, surrogate=partial(surrogate, dual=1.3), ratio=ratio).loss
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x, log_probs)[0] for x in (one, other)), rtol=1e-10, atol=1e-12)


def test_the_cap_of_cispo_is_one_plus_its_width():
    log_probs, batch = weighted_batch(2)
    log_ratio = token_ratio(log_probs, batch.rollout_log_probs, batch.loss_mask)
    by_width = cispo(log_ratio, log_probs, batch.advantages, high=0.5)
    by_cap = cispo(log_ratio, log_probs, batch.advantages, high=9.0, cap=1.5)
    torch.testing.assert_close(by_cap, by_width, rtol=1e-14, atol=0)
    for r, p, a, loss in triples(log_ratio.exp(), log_probs, batch.advantages, by_cap):
        assert loss == pytest.approx(-min(r, 1.5) * a * p, abs=1e-12)


def test_tokens_leave_the_lower_region_when_they_became_much_rarer():
    log_probs, batch = weighted_batch(3)
    log_ratio = token_ratio(log_probs, batch.rollout_log_probs, torch.ones_like(batch.loss_mask))
    kept = inside_tv_lower(log_ratio, log_probs, batch.advantages, width=0.1)
    expected = [math.exp(new) - math.exp(old) >= -0.1 for new, old in triples(log_probs, batch.rollout_log_probs)]
    assert kept.flatten().tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_distillation_has_the_gradient_of_the_divergence_from_the_teacher():
    log_probs, batch = weighted_batch(4)
    weights = batch.loss_weights
    found = torch.autograd.grad(distillation_loss(TokenOutputs(log_probs=log_probs), batch, surrogate=importance_weighted).loss, log_probs)[
        0
    ]
    rows = triples(log_probs, batch.rollout_log_probs, batch.ref_log_probs, weights, found)
    for new, old, teacher, weight, gradient in rows:
        assert gradient == pytest.approx(weight * (new - teacher) * math.exp(new - old), abs=1e-12)


def test_distillation_ignores_what_stands_at_masked_places():
    log_probs, batch = weighted_batch(4)
    outputs = TokenOutputs(log_probs=log_probs)
    spoiled = replace(batch, ref_log_probs=torch.where(batch.loss_mask > 0, batch.ref_log_probs, torch.nan))
    assert torch.equal(distillation_loss(outputs, spoiled).loss, distillation_loss(outputs, batch).loss)


def test_parts_add_up_each_with_its_own_weights():
    log_probs, batch = weighted_batch(5)
    entropy = torch.rand(batch.tokens.shape, dtype=torch.float64)
    outputs = TokenOutputs(log_probs=log_probs, entropy=entropy)
    other = replace(batch, loss_weights=token_mean(batch, num_tokens=100))
    parts = {"sft": sft_loss(outputs, other), "bonus": entropy_loss(outputs, batch, coef=0.3)}
    total = total_loss(parts)
    rows = triples(log_probs, entropy, other.loss_weights, batch.loss_weights)
    assert total.loss.item() == pytest.approx(-sum(w * p + 0.3 * v * h for p, h, w, v in rows), abs=1e-12)
    assert {"log_prob_mean/sft", "entropy/sft", "entropy/bonus"} <= set(total.metrics)
    torch.testing.assert_close(torch.autograd.grad(total.loss, log_probs)[0], -other.loss_weights, rtol=1e-12, atol=0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=25),
    st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0]),
)
def test_the_top_share_is_what_lies_at_or_above_the_quantile(entries: list[tuple[int, bool]], share: float):
    x = torch.tensor([value if on else math.nan for value, on in entries], dtype=torch.float64)
    found = top_share(x, torch.tensor([float(on) for _, on in entries]), share=share).tolist()
    valid = sorted(value for value, on in entries if on)
    tenths = round(10 * (1 - share)) * max(len(valid) - 1, 0)  # the rank in tenths, exact
    bound = valid[-(-tenths // 10)] if valid else 0
    assert found == [on and value >= bound for value, on in entries]


def test_a_share_outside_its_range_is_refused():
    with pytest.raises(AssertionError, match="share is 0"):
        top_share(torch.ones(3), torch.ones(3), share=0)


def test_weights_of_both_kinds_multiply_the_policy_term_alone():
    log_probs, batch = weighted_batch(6)
    given = torch.rand(batch.tokens.shape, dtype=torch.float64)
    batch = replace(batch, importance_weights=given)
    outputs = TokenOutputs(log_probs=log_probs)
    found = policy_loss(outputs, batch, surrogate=reinforce, kl=KLTerm(estimate=k2, coef=0.1), reweigh=lambda p, rows: (2 * p).exp()).loss
    rows = triples(log_probs, batch.ref_log_probs, batch.advantages, given, batch.loss_weights)
    expected = sum(w * (v * math.exp(2 * p) * -a * p + 0.1 * (p - q) ** 2 / 2) for p, q, a, v, w in rows)
    assert found.item() == pytest.approx(expected, abs=1e-12)
    gradient = [w * (v * math.exp(2 * p) * -a + 0.1 * (p - q)) for p, q, a, v, w in rows]  # none through the weights
    assert torch.autograd.grad(found, log_probs)[0].flatten().tolist() == pytest.approx(gradient, abs=1e-12)

"""KL estimators against naive loops, and in expectation over a whole vocabulary."""

from __future__ import annotations

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import losses as oracles

from rollouts.algorithms.kl import abs_kl, bounded, k1, k2, k3, straight_through, weighted

ESTIMATORS = {"k1": (k1, oracles.k1), "abs": (abs_kl, oracles.abs_kl), "k2": (k2, oracles.k2), "k3": (k3, oracles.k3)}
log_prob = st.floats(-8, -0.01)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(pairs=st.lists(st.tuples(log_prob, log_prob), min_size=1, max_size=6))
def test_estimators_are_those_of_the_papers(name, pairs):
    ours, oracle = ESTIMATORS[name]
    log_probs = torch.tensor([[p for p, _ in pairs]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[q for _, q in pairs]], dtype=torch.float64)
    per_token = ours(log_probs, ref)
    each = [oracle(p, q) for p, (_, q) in zip(log_probs[0], pairs, strict=True)]
    torch.testing.assert_close(per_token[0], torch.stack(each), rtol=1e-10, atol=1e-10)
    if name == "abs" and any(abs(p - q) < 1e-12 for p, q in pairs):
        return  # no gradient at the kink
    (gradient,), (expected,) = (torch.autograd.grad(x, log_probs) for x in (per_token.sum(), torch.stack(each).sum()))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kl", [k1, k2, k3, bounded(k3, log_ratio=20, value=10)], ids=["k1", "k2", "k3", "bounded"])
def test_gradients_are_those_of_the_value(kl):
    ref = torch.tensor([[-1.0, -2.0, -0.3]]).double()
    log_probs = torch.tensor([[-0.4, -3.0, -0.3]]).double().requires_grad_()
    assert torch.autograd.gradcheck(partial(kl, ref_log_probs=ref), (log_probs,))


@pytest.mark.parametrize("kl", [k3, bounded(k3, log_ratio=20)], ids=["k3", "bounded"])
def test_a_token_that_the_reference_finds_far_more_probable_has_a_finite_gradient(kl):
    log_probs = torch.tensor([[-100.0, -0.5]], requires_grad=True)
    estimate = kl(log_probs, torch.tensor([[-0.5, -100.0]]))
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.isfinite().all()
    assert gradient.isfinite().all()


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(5, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(0)


def test_k1_and_k3_are_unbiased_and_k2_and_abs_are_not():
    logits, ref = distributions()
    log_probs = logits.log_softmax(0).detach()
    exact = float((log_probs.exp() * (log_probs - ref)).sum())
    mean = {name: float((log_probs.exp() * kl(log_probs, ref)).sum()) for name, (kl, _) in ESTIMATORS.items()}
    assert mean["k1"] == pytest.approx(exact)
    assert mean["k3"] == pytest.approx(exact)
    assert abs(mean["k2"] - exact) > 1e-3
    assert abs(mean["abs"] - exact) > 1e-3


def expected_gradient(kl) -> torch.Tensor:
    """Compute the estimator's gradient at sampled tokens, averaged over all tokens with their probabilities (which have no gradient)."""
    logits, ref = distributions()
    log_probs = logits.log_softmax(0)
    return torch.autograd.grad((log_probs.exp().detach() * kl(log_probs, ref)).sum(), logits)[0]


def test_the_gradient_of_k2_and_of_straight_through_forms_is_that_of_the_divergence():
    logits, ref = distributions()
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)
    for kl in (k2, straight_through(k1), straight_through(k3), straight_through(abs_kl), straight_through(bounded(k3, value=0.1))):
        torch.testing.assert_close(expected_gradient(kl), exact)
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(exact), atol=1e-12, rtol=0)
    assert float((expected_gradient(k3) - exact).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_straight_through_keeps_the_value(name):
    kl = ESTIMATORS[name][0]
    log_probs, ref = torch.tensor([[-0.5, -4.0]]).double(), torch.tensor([[-1.5, -1.0]]).double()
    torch.testing.assert_close(straight_through(kl)(log_probs, ref), kl(log_probs, ref))


def test_the_ratio_makes_the_estimate_unbiased_at_tokens_of_another_policy():
    """E_old[(p / p_old) k3] = KL(p || ref), and so for the gradient."""
    logits, ref = distributions()
    log_probs = logits.log_softmax(0)
    old = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]).double()
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    estimate = (old * weighted(k3, (log_probs - old.log()).exp())(log_probs, ref)).sum()
    torch.testing.assert_close(estimate, exact)
    (gradient,), (expected,) = (torch.autograd.grad(x, logits, retain_graph=True) for x in (estimate, exact))
    torch.testing.assert_close(gradient, expected)


def test_bounds_act_on_the_log_ratio_and_on_the_result():
    log_probs = torch.tensor([[-30.0, -5.0, -1.0, 0.0]]).double().requires_grad_()
    ref = torch.tensor([[-1.0, -1.0, -1.0, -9.0]]).double()
    per_token = bounded(k3, log_ratio=20, value=10)(log_probs, ref)
    assert per_token[0].tolist() == [10.0, 10.0, 0.0, pytest.approx(math.exp(-9) - 1 + 9)]
    (gradient,) = torch.autograd.grad(per_token.sum(), log_probs)
    assert gradient[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert float(gradient[0, 3]) == pytest.approx(1 - math.exp(-9))
    log_probs = log_probs.detach()
    assert bounded(k1, value=2)(log_probs, ref)[0].tolist() == [-2.0, -2.0, 0.0, 2.0]
    assert bounded(k2, log_ratio=2)(log_probs, ref)[0].tolist() == [2.0, 2.0, 0.0, 2.0]
    ratio = torch.tensor([[1.0, 1.0, 1.0, 3.0]]).double()
    assert float(bounded(weighted(k1, ratio), value=20)(log_probs, ref)[0, 3]) == 20
    assert float(weighted(bounded(k1, value=5), ratio)(log_probs, ref)[0, 3]) == 15


@pytest.mark.parametrize("call", [partial(bounded, k3, log_ratio=0.0), partial(bounded, k3, value=-1.0)])
def test_bounds_are_positive(call):
    with pytest.raises(AssertionError, match="expected more than 0"):
        call()


def test_combinators_are_values():
    for kl in (bounded(k3, log_ratio=20, value=10), straight_through(k3), weighted(k2, torch.ones(1))):
        assert repr(pickle.loads(pickle.dumps(kl))) == repr(kl)
        assert "lambda" not in repr(kl)

"""Ratios and surrogates against naive loops, value and gradient; what they do at the borders of their regions."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import losses as oracles
from parity.peers import inside_tv_lower
from torch import Tensor

from rollouts.algorithms.surrogates import (
    capped,
    cispo,
    cispo_fractions,
    clip_fractions,
    clipped,
    clipped_sequence_ratio,
    dppo,
    dro,
    importance_weighted,
    inside_binary_kl,
    inside_tv,
    inside_tv_symmetric,
    kl_cov,
    outside_fractions,
    penalized_ratio,
    reinforce,
    row_geometric_mean,
    row_mean_advantages,
    sapo,
    sapo_gates,
    sequence_mean_ratio,
    sequence_ratio,
    sequence_sum_ratio,
    token_ratio,
    vespo,
)


@dataclass(frozen=True)
class Rows:
    """Ragged rows with holes, some of them empty. float64."""

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor

    @staticmethod
    def draw(seed: int, spread: float = 0.5) -> Rows:
        g = torch.Generator().manual_seed(seed)
        rows, width = int(torch.randint(1, 5, (), generator=g)), int(torch.randint(1, 7, (), generator=g))

        def normal() -> Tensor:
            return torch.randn(rows, width, generator=g, dtype=torch.float64)

        old = -normal().abs() - 0.01
        return Rows(
            log_probs=(old + spread * normal()).clamp(max=-1e-3).requires_grad_(),
            old=old,
            advantages=normal(),
            mask=(torch.rand(rows, width, generator=g) < 0.7).double(),
            weights=torch.rand(rows, width, generator=g, dtype=torch.float64),
        )

    def leaves(self) -> list[list[Tensor]]:
        return [list(row) for row in self.log_probs]


RATIOS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "token": (token_ratio, oracles.token_ratio),
    "token bounded": (partial(token_ratio, bound=0.4), partial(oracles.token_ratio, bound=0.4)),
    "sequence": (sequence_ratio, oracles.sequence_ratio),
    "sequence bounded": (partial(sequence_ratio, bound=0.1), partial(oracles.sequence_ratio, bound=0.1)),
    "sequence mean": (sequence_mean_ratio, oracles.sequence_mean_ratio),
    "sequence sum": (sequence_sum_ratio, oracles.sequence_sum_ratio),
    "sequence sum bounded": (partial(sequence_sum_ratio, bound=0.3), partial(oracles.sequence_sum_ratio, bound=0.3)),
    "capped": (capped(token_ratio, cap=1.2), lambda *row: oracles.capped(oracles.token_ratio(*row), 1.2)),
}
SURROGATES: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "reinforce": (reinforce, oracles.reinforce),
    "importance_weighted": (importance_weighted, oracles.importance_weighted),
    "clipped": (clipped, oracles.clipped),
    "clip higher": (partial(clipped, low=0.1, high=0.4), partial(oracles.clipped, low=0.1, high=0.4)),
    "dual": (partial(clipped, low=0.1, high=0.2, dual=1.3), partial(oracles.clipped, low=0.1, high=0.2, dual=1.3)),
    "cispo": (cispo, oracles.cispo),
    "cispo below": (partial(cispo, low=0.2, high=0.3), partial(oracles.cispo, low=0.2, high=0.3)),
    "cispo cap": (partial(cispo, cap=1.5), partial(oracles.cispo, high=0.5)),
    "sapo": (sapo, oracles.sapo),
    "sapo sharp": (partial(sapo, tau_pos=3.0, tau_neg=0.5), partial(oracles.sapo, tau_pos=3.0, tau_neg=0.5)),
    "dro": (partial(dro, beta=0.7), partial(oracles.dro, beta=0.7)),
    "vespo": (vespo, oracles.vespo),
    "dppo tv": (partial(dppo, low=0.1, high=0.05), partial(oracles.dppo, inside=oracles.inside_tv, low=0.1, high=0.05)),
    "dppo kl": (
        partial(dppo, low=0.01, high=0.02, inside=inside_binary_kl, cap=1.4),
        partial(oracles.dppo, inside=oracles.inside_binary_kl, low=0.01, high=0.02, cap=1.4),
    ),
    "penalized": (
        partial(penalized_ratio, inside=partial(inside_tv_symmetric, width=0.1), advantage_scale=2.0, penalty=0.3),
        partial(oracles.penalized_ratio, width=0.1, scale=2.0, penalty=0.3),
    ),
}
ON_TOKENS = {"dppo tv", "dppo kl", "penalized"}  # their regions are about single tokens


def agree(ours: Tensor, theirs: Any, leaf: Tensor, atol: float = 1e-10) -> None:
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=atol)
    gradients = [torch.autograd.grad(x, leaf, allow_unused=True, retain_graph=True)[0] if x.requires_grad else None for x in (ours, theirs)]
    ours_grad, theirs_grad = (torch.zeros_like(leaf) if g is None else g for g in gradients)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-10, atol=atol)


@pytest.mark.parametrize("ratio", RATIOS)
@given(seed=st.integers(0, 10**6))
def test_log_ratios_are_those_of_the_papers(ratio, seed):
    rows = Rows.draw(seed)
    ours, oracle = RATIOS[ratio]
    theirs: Any = 0.0
    leaves = rows.leaves()
    for b, row in enumerate(leaves):
        found = oracle(row, rows.old[b].tolist(), rows.mask[b].tolist())
        theirs = theirs + sum(w * x for w, x in zip(rows.weights[b].tolist(), found, strict=True))
    agree((rows.weights * ours(rows.log_probs, rows.old, rows.mask)).sum(), theirs, rows.log_probs)


@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 10**6), ratio=st.sampled_from(sorted(RATIOS)))
def test_surrogates_are_those_of_the_papers(name, seed, ratio):
    rows = Rows.draw(seed)
    if name in ON_TOKENS:
        ratio = "token"
    (ours, oracle), (our_ratio, oracle_ratio) = SURROGATES[name], RATIOS[ratio]
    per_token = ours(our_ratio(rows.log_probs, rows.old, rows.mask), rows.log_probs, rows.advantages)
    theirs: Any = 0.0
    for b, row in enumerate(rows.leaves()):
        log_ratios = oracle_ratio(row, rows.old[b].tolist(), rows.mask[b].tolist())
        for t in oracles.on(rows.mask[b].tolist()):
            theirs = theirs + float(rows.weights[b, t]) * oracle(log_ratios[t], row[t], float(rows.advantages[b, t]))
    agree((rows.weights * rows.mask * per_token).sum(), theirs, rows.log_probs)


@given(seed=st.integers(0, 10**6), coef=st.floats(0, 2))
def test_kl_cov_pulls_at_selected_tokens_only(seed, coef):
    rows = Rows.draw(seed)
    selected = rows.weights < 0.5
    per_token = kl_cov(rows.log_probs - rows.old, rows.log_probs, rows.advantages, selected=selected, coef=coef)
    theirs: Any = 0.0
    for b, row in enumerate(rows.leaves()):
        for t, p in enumerate(row):
            theirs = theirs + oracles.kl_cov(p - float(rows.old[b, t]), p, float(rows.advantages[b, t]), bool(selected[b, t]), coef)
    agree(per_token.sum(), theirs, rows.log_probs)


@given(seed=st.integers(0, 10**6), low=st.floats(0, 0.8), high=st.floats(0, 0.8))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(seed, low, high):
    rows = Rows.draw(seed)
    advantages = rows.advantages[:, :1].expand_as(rows.advantages)
    ratio = clipped_sequence_ratio(rows.log_probs, rows.old, rows.mask, advantages=advantages, low=low, high=high)
    means = row_mean_advantages(advantages, rows.mask)
    counts = rows.mask.sum(1, keepdim=True).clamp(min=1)
    ours = (rows.mask / counts * importance_weighted(ratio, rows.log_probs, means)).sum()
    theirs: Any = 0.0
    for b, row in enumerate(rows.leaves()):
        theirs = theirs + oracles.gmpo_row(row, rows.old[b].tolist(), rows.mask[b].tolist(), advantages[b].tolist(), low, high)
    agree(ours, theirs, rows.log_probs)


@pytest.mark.parametrize(
    "surrogate",
    [
        reinforce,
        importance_weighted,
        clipped,
        partial(clipped, dual=1.5),
        sapo,
        dro,
        partial(kl_cov, selected=torch.tensor([[True, False]])),
    ],
    ids=["reinforce", "importance_weighted", "clipped", "dual", "sapo", "dro", "kl_cov"],
)
@pytest.mark.parametrize("ratio", [token_ratio, sequence_mean_ratio, sequence_sum_ratio], ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_value(surrogate, ratio):
    old, mask = torch.tensor([[-1.0, -0.5]]).double(), torch.ones(1, 2).double()
    for advantages in (torch.tensor([[1.3, -0.7]]).double(), torch.tensor([[-2.0, 0.4]]).double()):
        for shift in ([0.05, 0.1], [0.6, -0.7], [-0.5, 0.45], [0.9, 0.8]):
            log_probs = (old + torch.tensor([shift]).double()).requires_grad_()

            def value(p: Tensor, a: Tensor = advantages) -> Tensor:
                return surrogate(ratio(p, old, mask), p, a)

            assert torch.autograd.gradcheck(value, (log_probs,))


def test_the_gradient_of_a_weight_that_is_data_is_the_weight():
    """CISPO, DPPO and VESPO: d/dlog p = -weight * A, also where the weight is bounded."""
    log_ratio = torch.tensor([[math.log(0.1), 0.0, math.log(5.0)]]).double()
    log_probs = torch.full((1, 3), -3.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0, 1.0]]).double()
    for surrogate, weights in (
        (partial(cispo, low=0.2, high=0.28), [0.8, 1.0, 1.28]),
        (cispo, [0.1, 1.0, 1.28]),
        (partial(dppo, low=1.0, high=1.0, cap=2.0), [0.1, 1.0, 2.0]),
        (vespo, [0.1**2 * math.exp(3 * 0.9), 1.0, 25 * math.exp(-12)]),
    ):
        (gradient,) = torch.autograd.grad(surrogate(log_ratio, log_probs, advantages).sum(), log_probs)
        assert gradient[0].tolist() == pytest.approx([-w * a for w, a in zip(weights, [2.0, -1.0, 1.0], strict=True)])


def test_sapo_starts_as_policy_gradient_and_fades_on_both_sides():
    at = torch.tensor([[math.log(0.3), 0.0, math.log(3.0)]]).double().requires_grad_()
    (gradient,) = torch.autograd.grad(sapo(at, at, torch.ones(1, 3).double(), tau_pos=2.0).sum(), at)
    slopes = (gradient / at.exp()).detach()[0].tolist()
    assert slopes[1] == pytest.approx(-1.0)
    assert slopes[1] < slopes[0] < 0
    assert slopes[1] < slopes[2] < 0


def test_both_forms_of_the_sequence_ratio_have_one_gradient_under_the_mean_over_rows():
    rows = Rows.draw(7)
    mask = torch.ones_like(rows.mask)
    advantages = rows.advantages[:, :1].expand_as(rows.advantages)
    losses = [
        clipped(ratio(rows.log_probs, rows.old, mask), rows.log_probs, advantages).mean() for ratio in (sequence_ratio, sequence_mean_ratio)
    ]
    torch.testing.assert_close(losses[0], losses[1])
    first, second = (torch.autograd.grad(loss, rows.log_probs)[0] for loss in losses)
    torch.testing.assert_close(first, second)


def test_a_capped_ratio_is_the_dual_clip_from_one_plus_high_on():
    rows = Rows.draw(3, spread=2.0)
    for cap in (1.28, 1.5, 3.0):
        two_sided = clipped(capped(token_ratio, cap=cap)(rows.log_probs, rows.old, rows.mask), rows.log_probs, rows.advantages, high=0.28)
        dual = clipped(token_ratio(rows.log_probs, rows.old, rows.mask), rows.log_probs, rows.advantages, high=0.28, dual=cap)
        agree((rows.mask * two_sided).sum(), (rows.mask * dual).sum(), rows.log_probs)


def test_trust_regions_close_in_the_direction_of_the_advantage_only():
    old = torch.tensor([[0.5, 0.5, 0.5, 0.5]]).double().log()
    new = torch.tensor([[0.7, 0.3, 0.7, 0.3]]).double().log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]]).double()
    arguments = (new - old, new, advantages)
    assert inside_tv(*arguments, low=0.1, high=0.1)[0].tolist() == [False, True, True, False]
    assert inside_tv(*arguments, low=0.3, high=0.1)[0].tolist() == [False, True, True, True]
    assert inside_tv(*arguments, low=0.1, high=0.3)[0].tolist() == [True, True, True, False]
    assert inside_binary_kl(*arguments, low=0.01, high=0.01)[0].tolist() == [False, True, True, False]
    assert inside_tv_symmetric(*arguments, width=0.1)[0].tolist() == [False] * 4
    assert inside_tv_symmetric(*arguments, width=0.3)[0].tolist() == [True] * 4
    assert inside_tv_lower(*arguments, width=0.1)[0].tolist() == [True, False, True, False]


def test_fractions_count_the_tokens_whose_gradient_the_clip_takes():
    log_ratio = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]]).log().double()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]]).double()
    log_probs = torch.full_like(log_ratio, -1.0)
    found = clip_fractions(log_ratio, log_probs, advantages, low=0.2, high=0.28)
    assert found["clip_fraction_high"][0].tolist() == [1, 0, 0, 0, 0]
    assert found["clip_fraction_low"][0].tolist() == [0, 0, 0, 1, 0]
    assert found["clip_fraction"][0].tolist() == [1, 0, 0, 1, 0]
    assert cispo_fractions(log_ratio, log_probs, advantages, low=0.2, high=0.28)["clip_fraction"][0].tolist() == [1, 1, 1, 1, 0]
    assert cispo_fractions(log_ratio, log_probs, advantages, cap=1.05)["clip_fraction"][0].tolist() == [1, 0, 1, 0, 1]
    region = outside_fractions(log_ratio, log_probs, advantages, inside=inside_tv, low=0.2, high=0.1)
    assert region["outside_fraction"][0].tolist() == [1, 0, 0, 1, 0]  # p moves by 0.12, -0.37, 0.12, -0.37, 0.03
    assert region["outside_fraction_high"][0].tolist() == [1, 0, 0, 0, 0]
    assert region["outside_fraction_low"][0].tolist() == [0, 0, 0, 1, 0]


def test_the_gate_of_sapo_is_what_it_leaves_of_the_gradient():
    log_ratio = torch.tensor([[-2.0, 0.0, 0.7, 2.0, 200.0]]).double().requires_grad_()
    for advantages in (torch.full((1, 5), 1.5).double(), torch.full((1, 5), -0.5).double()):
        (gated,) = torch.autograd.grad(sapo(log_ratio, log_ratio, advantages, tau_pos=2.0, tau_neg=3.0).sum(), log_ratio)
        (whole,) = torch.autograd.grad(importance_weighted(log_ratio, log_ratio, advantages).sum(), log_ratio)
        gate = sapo_gates(log_ratio.detach(), log_ratio.detach(), advantages, tau_pos=2.0, tau_neg=3.0)["gate"]
        torch.testing.assert_close(gate, gated / whole)
        assert gate[0, 1] == 1


def test_row_means():
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]).double()
    x = torch.tensor([[1.0, math.nan, 4.0], [math.inf, -1.0, math.nan]]).double()
    assert row_mean_advantages(x, mask).tolist() == [[2.5, 0.0, 2.5], [0.0, 0.0, 0.0]]
    assert row_geometric_mean(x, mask, floor=0.0).tolist() == [pytest.approx([2.0, 1.0, 2.0]), [1.0, 1.0, 1.0]]
    zero = torch.tensor([[0.0, math.nan, 4.0]]).double()
    assert float(row_geometric_mean(zero, mask[:1])[0, 0]) == pytest.approx(2e-5)
    assert float(row_geometric_mean(zero, mask[:1], floor=0.0)[0, 0]) == 0


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_do_not_read_masked_places(ratio, garbage):
    rows = Rows.draw(11)
    off = rows.mask == 0
    found = []
    for log_probs, old in (
        (rows.log_probs, rows.old),
        (torch.where(off, garbage, rows.log_probs.detach()).requires_grad_(), torch.where(off, garbage, rows.old)),
    ):
        log_ratio = RATIOS[ratio][0](log_probs, old, rows.mask)
        (gradient,) = torch.autograd.grad((log_ratio * rows.weights).sum(), log_probs)
        found.append((log_ratio, gradient))
        assert not log_ratio[off].any()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


ONE = torch.zeros(1, 1).double()
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "clip low 1": (partial(clipped, low=1.0), r"low is 1\.0, expected in \[0, 1\)"),
    "clip low negative": (partial(clipped, low=-0.1), "low is -0.1"),
    "clip high negative": (partial(clipped, high=-0.1), "high is -0.1"),
    "dual": (partial(clipped, dual=1.0), "dual is 1.0, expected more than 1"),
    "cispo low": (partial(cispo, low=-1.0), "low is -1.0"),
    "cispo high": (partial(cispo, high=-0.1), "high is -0.1"),
    "cispo cap": (partial(cispo, cap=0.0), "cap is 0.0"),
    "sapo pos": (partial(sapo, tau_pos=0.0), "tau_pos is 0.0"),
    "sapo neg": (partial(sapo, tau_neg=-1.0), "tau_neg is -1.0"),
    "dro": (partial(dro, beta=-1.0), "beta is -1.0"),
    "kl_cov": (partial(kl_cov, selected=ONE > 0, coef=-1.0), "coef is -1.0"),
    "dppo low": (partial(dppo, low=-0.1), "low is -0.1"),
    "dppo high": (partial(dppo, high=-0.1), "high is -0.1"),
    "dppo cap": (partial(dppo, cap=0.0), "cap is 0.0"),
    "penalty": (partial(penalized_ratio, inside=partial(inside_tv, low=0.1, high=0.1), penalty=-1.0), "penalty is -1.0"),
    "gmpo low": (partial(clipped_sequence_ratio, advantages=ONE, low=-0.1), "low is -0.1"),
    "gmpo high": (partial(clipped_sequence_ratio, advantages=ONE, high=-0.1), "high is -0.1"),
    "cap": (lambda *_: capped(token_ratio, cap=0.0), "cap is 0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_hyper_parameters_out_of_range_say_which_and_what(name):
    call, message = BAD[name]
    with pytest.raises(AssertionError, match=message):
        call(ONE, ONE, ONE)


@pytest.mark.parametrize("log_ratio", [-1000.0, -100.0, 88.0, 89.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", SURROGATES)
def test_any_ratio_leaves_the_gradient_of_a_surrogate_a_number(name, log_ratio):
    surrogate, _ = SURROGATES[name]
    for advantage in (1.0, 0.0, -1.0):
        leaf = torch.tensor([[log_ratio]], requires_grad=True)
        log_probs = torch.tensor([[min(log_ratio, 0.0) - 0.5]], requires_grad=True)
        surrogate(leaf, log_probs, torch.tensor([[advantage]])).sum().backward()
        assert leaf.grad is None or not leaf.grad.isnan().any()
        assert log_probs.grad is None or log_probs.grad.isfinite().all()


@pytest.mark.parametrize("dual", [None, 3.0])
def test_a_clip_that_is_active_takes_the_gradient_however_large_the_ratio(dual):
    leaf = torch.full((1, 1), 1000.0, requires_grad=True)
    loss = clipped(leaf, leaf, torch.tensor([[2.0]]), low=0.2, high=0.28, dual=dual)
    assert loss.item() == pytest.approx(-2.56)
    assert torch.autograd.grad(loss.sum(), leaf)[0].item() == 0
    bad = clipped(leaf, leaf, torch.tensor([[-2.0]]), dual=3.0)
    assert bad.item() == 6.0
    assert torch.autograd.grad(bad.sum(), leaf)[0].item() == 0


def test_the_ratio_of_a_long_sequence_overflows_nothing():
    log_probs, mask = torch.full((1, 2000), -0.95, requires_grad=True), torch.ones(1, 2000)
    for bound in (None, 20.0):
        log_ratio = sequence_sum_ratio(log_probs, torch.full((1, 2000), -1.0), mask, bound=bound)
        assert bound is None or log_ratio.max() == bound
        loss = clipped(log_ratio, log_probs, mask).mean()
        assert loss.item() == pytest.approx(-1.2)
        assert torch.autograd.grad(loss, log_probs)[0].eq(0).all()


def test_combinators_are_values():
    for part in (capped(sequence_ratio, cap=2.0), partial(clipped, low=0.1), partial(dppo, inside=inside_binary_kl)):
        assert repr(pickle.loads(pickle.dumps(part))) == repr(part)
        assert "lambda" not in repr(part)

"""The shift, against naive loops; chunked log-probs, against the plain ones and against numerical gradients."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from products import CountedProducts

from rollouts.algorithms.logprobs import (
    Foresight,
    LogitTransform,
    Sampling,
    choose_chunk_size,
    chunked_log_probs,
    count_kept_positions,
    entropy_from_logits,
    finite_exp,
    gather_log_probs,
    shift_packed,
    sum_of_squared_probs,
    temper,
    token_entropy,
    token_log_probs,
)
from rollouts.types import KeptSets


def random_logits(seed: int, *shape: int, dtype=torch.float64, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_tokens(seed: int, vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def random_layer(seed: int, n: int = 7, h: int = 4, v: int = 5, dtype=torch.float64):
    """hidden [n, h], weight [v, h], bias [v], targets [n], temperatures [n]."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((n, h), (v, h), (v,))]
    return (*parts, torch.randint(v, (n,), generator=generator), 0.5 + torch.rand(n, generator=generator, dtype=torch.float64))


# -- the shift


@pytest.mark.parametrize("temperatures", [None, [1.0, 0.6, 1.7]])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_token_log_probs_and_entropy_against_the_loop(width, temperatures):
    logits, tokens = random_logits(0, 3, width, 5), random_tokens(1, 5, 3, width)
    heat = 1.0 if temperatures is None else torch.tensor(temperatures, dtype=torch.float64)
    expected = torch.tensor(oracles.log_probs(logits, tokens, temperatures), dtype=torch.float64)
    torch.testing.assert_close(token_log_probs(logits, tokens, heat), expected, rtol=1e-12, atol=1e-12)
    expected = torch.tensor(oracles.entropies(logits, temperatures), dtype=torch.float64)
    torch.testing.assert_close(token_entropy(logits, heat), expected, rtol=1e-12, atol=1e-12)


def test_one_temperature_is_that_temperature_for_every_row():
    logits, tokens = random_logits(2, 2, 4, 5), random_tokens(3, 5, 2, 4)
    rows = torch.full((2,), 0.7, dtype=torch.float64)
    torch.testing.assert_close(token_log_probs(logits, tokens, 0.7), token_log_probs(logits, tokens, rows))
    torch.testing.assert_close(token_entropy(logits, 0.7), token_entropy(logits, rows))


def test_temperatures_must_fit_and_be_positive():
    logits, tokens = random_logits(2, 2, 4, 5), random_tokens(3, 5, 2, 4)
    with pytest.raises(AssertionError, match=r"temperature has shape \(3,\) for 2 rows"):
        token_log_probs(logits, tokens, torch.ones(3))
    with pytest.raises(AssertionError, match=r"temperature is 0.0, expected > 0"):
        token_log_probs(logits, tokens, 0.0)


def test_a_later_token_and_the_last_output_change_nothing_before():
    logits, tokens = random_logits(4, 1, 6, 5), random_tokens(5, 5, 1, 6)
    before = token_log_probs(logits, tokens)
    other_logits, other_tokens = logits.clone(), tokens.clone()
    other_logits[:, 3:] += random_logits(6, 1, 3, 5)
    other_tokens[:, 4:] = (tokens[:, 4:] + 1) % 5
    assert torch.equal(token_log_probs(other_logits, other_tokens)[:, :4], before[:, :4])
    last_changed = logits.clone()
    last_changed[:, -1] = torch.nan  # predicts a token that is not there
    assert torch.equal(token_log_probs(last_changed, tokens), before)


def test_low_precision_logits_are_computed_in_float32():
    logits = random_logits(7, 2, 5, 50).to(torch.bfloat16)
    tokens = random_tokens(8, 50, 2, 5)
    found = token_log_probs(logits, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, token_log_probs(logits.float(), tokens), rtol=0, atol=0)
    assert token_entropy(logits).dtype == torch.float32


# -- distributions


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(-1e4, 1e4))
def test_gathered_log_probs_are_a_distribution_that_ignores_constants(values, constant):
    logits = torch.tensor([values] * len(values), dtype=torch.float64)
    found = gather_log_probs(logits, torch.arange(len(values)))
    assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(gather_log_probs(logits + constant, torch.arange(len(values))), found, rtol=0, atol=1e-10)
    assert -1e-12 <= float(entropy_from_logits(logits)[0]) <= math.log(len(values)) + 1e-12


def test_entropy_of_known_distributions_and_of_tokens_that_cannot_be_drawn():
    logits = torch.tensor([[0.0] * 4, [0.0, 0.0, -torch.inf, -torch.inf], [1e4, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    found = entropy_from_logits(logits)
    torch.testing.assert_close(found, torch.tensor([math.log(4), math.log(2), 0.0], dtype=torch.float64))
    found.sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_targets_of_another_shape_are_refused():
    with pytest.raises(AssertionError, match=r"logits have shape \(2, 5\), targets \(3,\)"):
        gather_log_probs(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))


def test_several_targets_at_a_position_are_gathered_one_by_one():
    logits, targets = random_logits(21, 2, 3, 5), random_tokens(22, 5, 2, 3, 4)
    found = gather_log_probs(logits, targets)
    expected = torch.stack([gather_log_probs(logits, targets[..., k]) for k in range(4)], -1)
    assert torch.equal(found, expected)
    with pytest.raises(AssertionError, match="keep goes with one target"):
        gather_log_probs(logits, targets, keep=torch.ones(2, 3, 5, dtype=torch.bool))


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 4))
def test_kept_tokens_share_the_probability_and_the_target_is_always_kept(keep, target):
    logits = random_logits(23, 1, 5).requires_grad_()
    found = gather_log_probs(logits, torch.tensor([target]), keep=torch.tensor([keep]))
    kept = [z for v, z in enumerate(logits[0].tolist()) if keep[v] or v == target]
    expected = logits[0, target].item() - math.log(sum(math.exp(z) for z in kept))
    assert found.item() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), [logits])
    for v, slope in enumerate(gradient[0].tolist()):  # 1[v = y] - p_v, 0 for what is not kept
        p = math.exp(logits[0, v].item() - math.log(sum(math.exp(z) for z in kept))) if keep[v] or v == target else 0.0
        assert slope == pytest.approx((v == target) - p, abs=1e-12)


def test_keep_must_have_the_shape_of_the_logits():
    with pytest.raises(AssertionError, match=r"keep has shape \(5,\), logits \(2, 5\)"):
        gather_log_probs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), keep=torch.ones(5))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(-500, 500))
def test_sum_of_squared_probs_is_that_sum(values, constant):
    expected = sum(math.exp(z) ** 2 for z in oracles.log_softmax(values))
    found = sum_of_squared_probs(torch.tensor([values], dtype=torch.float64) + constant)
    assert found.item() == pytest.approx(expected, rel=1e-10)


def test_sum_of_squared_probs_gives_the_norm_of_the_gradient_of_a_log_prob():
    logits = random_logits(24, 1, 6).requires_grad_()
    log_prob = gather_log_probs(logits, torch.tensor([2]))
    (gradient,) = torch.autograd.grad(log_prob.sum(), [logits])
    norm = 1 - 2 * log_prob.exp() + sum_of_squared_probs(logits)
    assert norm.item() == pytest.approx(gradient.square().sum().item(), rel=1e-12)
    assert sum_of_squared_probs(torch.tensor([[1e4, -1e4, 0.0]])).item() == 1.0


def test_tempering_takes_one_number_or_one_for_each_row():
    logits = random_logits(25, 2, 3, 5)
    rows = temper(logits, torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert torch.equal(rows, torch.stack([temper(logits[0], 0.5), temper(logits[1], 2.0)]))
    assert temper(logits[:, 0], torch.tensor([0.5, 2.0], dtype=torch.float64)).shape == (2, 5)
    assert temper(logits.to(torch.bfloat16), 0.5).dtype == torch.float32


# -- packed rows


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_packed_shift_is_the_shift_of_every_row(lengths):
    total = sum(lengths)
    tokens = random_tokens(total, 5, total)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    shift = shift_packed(tokens, boundaries)
    expected = [(boundaries[r].item() + t - 1, boundaries[r].item() + t) for r, n in enumerate(lengths) for t in range(1, n)]
    assert list(zip(shift.predictors.tolist(), shift.positions.tolist(), strict=True)) == expected
    assert shift.targets.tolist() == [int(tokens[position]) for _, position in expected]


def test_packed_log_probs_equal_those_of_each_row():
    lengths = [4, 1, 0, 6]
    logits, tokens = random_logits(9, sum(lengths), 5), random_tokens(10, 5, sum(lengths))
    shift = shift_packed(tokens, torch.tensor([0, *lengths]).cumsum(0))
    found = torch.zeros(sum(lengths), dtype=torch.float64)
    found[shift.positions] = gather_log_probs(logits[shift.predictors], shift.targets)
    rows = zip(logits.split(lengths), tokens.split(lengths), strict=True)
    expected = torch.cat([token_log_probs(z[None], y[None])[0] for z, y in rows if len(y)])
    torch.testing.assert_close(found, expected)


def test_boundaries_must_cover_the_tokens():
    with pytest.raises(AssertionError, match="cu_seqlens ends at 4 for 5 packed tokens"):
        shift_packed(torch.zeros(5, dtype=torch.int64), torch.tensor([0, 4]))


# -- chunked log-probs


def test_a_chunk_of_logits_takes_a_bounded_memory_and_a_small_vocabulary_a_chunk_of_1024():
    assert [choose_chunk_size(size, "cpu") for size in (64, 32_768, 151_936, 10_000_000)] == [1024, 1024, 192, 64]
    assert [choose_chunk_size(size, "cuda") for size in (64, 32_768, 151_936, 10_000_000)] == [4096, 4096, 832, 64]
    hidden, weight = torch.randn(150, 4).double(), torch.randn(600_000, 4).double()  # chunks of 64 positions, the last of 22
    targets = torch.randint(600_000, (150,))
    found, _ = chunked_log_probs(hidden, weight, targets)
    torch.testing.assert_close(found, torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0])


def plain(hidden, weight, targets, bias=None, temperatures=None):
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if temperatures is None else logits / temperatures[:, None]
    return gather_log_probs(logits, targets), entropy_from_logits(logits)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_temperatures", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1024])
def test_chunked_values_and_gradients_equal_the_plain_ones(with_bias, with_temperatures, chunk_size):
    hidden, weight, bias, targets, temperatures = random_layer(11)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]
    bias, temperatures = bias if with_bias else None, temperatures if with_temperatures else None
    found = chunked_log_probs(hidden, weight, targets, bias=bias, sampling=Sampling(temperatures), chunk_size=chunk_size, with_entropy=True)
    expected = plain(hidden, weight, targets, bias, temperatures)
    factors = random_logits(12, 2, 7)
    losses = [(factors[0] * log_probs).sum() + (factors[1] * entropy).sum() for log_probs, entropy in (found, expected)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_temperatures", [False, True])
@pytest.mark.parametrize("output", ["log_probs", "entropy", "both"])
def test_chunked_gradients_are_the_numerical_ones(with_bias, with_temperatures, output):
    hidden, weight, bias, targets, temperatures = random_layer(13, n=4, h=3, v=4)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]

    def function(hidden, weight, bias=None):
        log_probs, entropy = chunked_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            sampling=Sampling(temperatures if with_temperatures else None),
            chunk_size=3,
            with_entropy=True,
        )
        return {"log_probs": log_probs, "entropy": entropy, "both": (log_probs, entropy)}[output]

    assert torch.autograd.gradcheck(function, leaves)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 60), st.integers(1, 50))
def test_chunked_log_probs_of_random_layers_equal_the_plain_ones(seed, n, v, chunk_size):
    hidden, weight, bias, targets, temperatures = random_layer(seed, n=n, h=8, v=v)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    found = chunked_log_probs(hidden, weight, targets, bias=bias, sampling=Sampling(temperatures), chunk_size=chunk_size, with_entropy=True)
    expected = plain(hidden, weight, targets, bias, temperatures)
    factors = random_logits(seed + 1, 2, n)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad((factors[0] * p + factors[1] * h).sum(), leaves) for p, h in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    hidden, weight, _, targets, _ = random_layer(14)
    leaf = (weight if frozen == "hidden" else hidden).requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, chunk_size=3)
    assert entropy is None
    (found,) = torch.autograd.grad(log_probs.sum(), [leaf])
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets)[0].sum(), [leaf])
    torch.testing.assert_close(found, expected)


def test_tokens_that_cannot_be_drawn_leave_entropy_and_gradients_finite():
    hidden, weight, bias, _, _ = random_layer(15)
    bias = bias.clone()
    bias[-1] = -torch.inf  # for example a padded vocabulary
    targets = torch.zeros(7, dtype=torch.int64)
    hidden.requires_grad_()
    found = chunked_log_probs(hidden, weight, targets, bias=bias, chunk_size=3, with_entropy=True)
    expected = plain(hidden, weight, targets, bias)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    gradients = [torch.autograd.grad(log_probs.sum() + 7 * entropy.sum(), [hidden])[0] for log_probs, entropy in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_bfloat16_inputs_give_float32_log_probs_and_gradients_in_their_own_dtype():
    hidden, weight, bias, targets, temperatures = random_layer(16, n=9, h=16, v=20, dtype=torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, bias=bias, sampling=Sampling(temperatures.float()), chunk_size=4, with_entropy=True
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = plain(exact_leaves[0], exact_leaves[1], targets, exact_leaves[2], temperatures)
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=0, atol=1e-5)  # logits rounded to bfloat16 would be off by 0.01
    torch.testing.assert_close(entropy.double(), exact[1], rtol=0, atol=1e-5)
    for found, expected in zip(gradients, torch.autograd.grad(exact[0].sum() + exact[1].sum(), exact_leaves), strict=True):
        assert (found.double() - expected).norm() < 0.005 * expected.norm()  # rounded once, at the end


def test_a_float32_head_under_bfloat16_hidden_states():
    hidden, weight, _, targets, _ = random_layer(17, dtype=torch.float32)
    leaves = [hidden.to(torch.bfloat16).requires_grad_(), weight.requires_grad_()]
    log_probs, _ = chunked_log_probs(leaves[0], leaves[1], targets, chunk_size=2)
    exact, _ = plain(leaves[0].detach().double(), weight.detach().double(), targets, None, None)
    torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(log_probs.sum(), leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]


def differentiate_loss(loss, foresight=None, *, chunk_size=3, **kwargs):
    """Return values and gradients of a loss of 8 log-probs, and the products of their passes, in those of one [8, 4] x [4, 5]."""
    hidden, weight, bias, targets, temperatures = random_layer(21, n=8, dtype=torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    with CountedProducts() as counted:
        log_probs, _ = chunked_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            sampling=Sampling(temperatures.float()),
            chunk_size=chunk_size,
            foresight=foresight,
            **kwargs,
        )
        gradients = torch.autograd.grad(loss(log_probs), leaves)
    return [log_probs.detach(), *gradients], counted.multiplications / (8 * 4 * 5)


def of_tokens(log_probs):
    return -(torch.linspace(-1.0, 2.0, 8) * torch.nn.functional.softplus(log_probs)).sum()


def of_a_sequence(log_probs):
    return -torch.exp(log_probs.mean())


def foresee(loss):
    def differentiate(log_probs):
        with torch.enable_grad():
            leaf = log_probs.detach().requires_grad_()
            return torch.autograd.grad(loss(leaf), leaf)[0]

    return Foresight(differentiate)


@pytest.mark.parametrize("transform", [None, LogitTransform(0.5), LogitTransform(soft_cap=2.0)])
@pytest.mark.parametrize("loss", [of_tokens, of_a_sequence])
def test_a_foreseen_gradient_saves_a_product_and_another_one_is_computed_as_without(loss, transform):
    expected, products = differentiate_loss(loss, transform=transform)
    assert products == pytest.approx(4), "the backward pass computes the logits again"
    foresight = foresee(loss)
    found, products = differentiate_loss(loss, foresight, transform=transform)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert foresight.failed == (loss is of_a_sequence)
    assert products == pytest.approx(6 if foresight.failed else 3)


def test_logits_that_fit_the_memory_of_a_chunk_are_kept():
    expected, _ = differentiate_loss(of_a_sequence, chunk_size=3)
    foresight = foresee(of_a_sequence)
    found, products = differentiate_loss(of_a_sequence, foresight, chunk_size=None)
    assert products == pytest.approx(3)
    assert not foresight.failed, "nothing has to be foreseen"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert [count_kept_positions(size, "cpu") for size in (128, 4096, 32_768, 151_936)] == [262_144, 8192, 1024, 220]
    assert [count_kept_positions(size, "cuda") for size in (128, 151_936, 10_000_000)] == [1_048_576, 883, 64]


def test_a_chunk_without_gradient_costs_no_product_and_changes_none():
    def loss(log_probs):
        return log_probs[6:].sum()  # the last of three chunks

    expected, products = differentiate_loss(loss)
    assert products == pytest.approx(1 + 3 * 2 / 8)
    found, products = differentiate_loss(loss, foresee(loss))
    assert products == pytest.approx(1 + 2 * 2 / 8)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    plain_gradients, _ = differentiate_loss(loss, chunk_size=8)
    for a, b in zip(found, plain_gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_no_targets_give_no_log_probs_and_zero_gradients():
    hidden, weight, bias, _, _ = random_layer(18, n=0)
    weight.requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), bias=bias, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(log_probs.sum(), [weight])
    assert torch.equal(gradient, torch.zeros_like(weight))


def test_token_by_token_and_chunked_are_the_same_number():
    hidden, weight, _, _, _ = random_layer(19, n=12, h=4, v=6)
    tokens = random_tokens(20, 6, 2, 6)
    logits = (hidden @ weight.T).reshape(2, 6, 6)
    shift = shift_packed(tokens.flatten(), torch.tensor([0, 6, 12]))
    packed, _ = chunked_log_probs(hidden[shift.predictors], weight, shift.targets, chunk_size=4)
    torch.testing.assert_close(packed, token_log_probs(logits, tokens)[:, 1:].flatten())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_exponential_that_would_overflow_is_a_number_without_gradient(dtype):
    largest = math.log(torch.finfo(dtype).max)
    inside = torch.tensor([-math.inf, -1000.0, 0.0, 0.3, 0.99 * largest], dtype=dtype, requires_grad=True)
    found, expected = finite_exp(inside), inside.exp()
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), inside)[0], torch.autograd.grad(expected.sum(), inside)[0])
    beyond = torch.tensor([1.01 * largest, 10 * largest, math.inf], dtype=dtype, requires_grad=True)
    assert finite_exp(beyond).isfinite().all()
    assert torch.autograd.grad(finite_exp(beyond).sum(), beyond)[0].eq(0).all()
    assert finite_exp(torch.tensor([math.nan], dtype=dtype)).isnan().all()


@pytest.mark.parametrize("transform", [LogitTransform(0.25), LogitTransform(soft_cap=2.0), LogitTransform(3.0, 1.5)])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_changed_logits_have_the_values_and_gradients_of_autograd(transform: LogitTransform, tempered: bool, with_entropy: bool):
    torch.manual_seed(0)
    inputs = [torch.randn(11, 6), torch.randn(23, 6), torch.randn(23)]
    targets, temperatures = torch.randint(0, 23, (11,)), (torch.rand(11) + 0.5).double() if tempered else None
    hidden, weight, bias = ours = [x.double().requires_grad_() for x in inputs]
    found, entropy = chunked_log_probs(
        hidden, weight, targets, bias=bias, sampling=Sampling(temperatures), chunk_size=4, with_entropy=with_entropy, transform=transform
    )
    reference = [x.double().requires_grad_() for x in inputs]
    logits = (reference[0] @ reference[1].T + reference[2]) * transform.scale
    if transform.soft_cap is not None:  # as in transformers' Gemma 2
        logits = torch.tanh(logits / transform.soft_cap) * transform.soft_cap
    log_p = (logits if temperatures is None else logits / temperatures[:, None]).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    weights = torch.randn(11).double()
    total, wanted = (found * weights).sum(), (expected * weights).sum()
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
        total, wanted = total + (entropy * weights).sum(), wanted - ((log_p.exp() * log_p).sum(-1) * weights).sum()
    for left, right in zip(torch.autograd.grad(total, ours), torch.autograd.grad(wanted, reference), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("transform", [None, LogitTransform(3.0, 1.5)])
@pytest.mark.parametrize("chunk_size", [1, 3, 1024, None])
@pytest.mark.parametrize("foreseen", [False, True])
def test_over_kept_sets_values_and_gradients_are_those_of_a_softmax_over_the_sets_alone(
    transform: LogitTransform | None, chunk_size: int | None, foreseen: bool
):
    hidden, weight, bias, targets, temperatures = random_layer(21, n=9, v=12)
    sets = [sorted({*range(i % 5, 12, 1 + i % 3), int(target)}) if i % 4 else [] for i, target in enumerate(targets)]
    sets[5] = [int(targets[5])]  # one token alone: log-prob 0, entropy 0, no gradient
    counts = torch.tensor([len(ids) for ids in sets])
    starts = torch.zeros(9, dtype=torch.int64)
    ids: list[int] = []
    for i in reversed(range(9)):  # in another order than the tokens
        starts[i] = len(ids)
        ids += sets[i]
    kept = KeptSets(ids=torch.tensor(ids, dtype=torch.int32), starts=starts, counts=counts)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    factors = random_logits(22, 2, 9)
    foresight = Foresight(lambda log_probs: factors[0]) if foreseen else None
    found, entropy = chunked_log_probs(
        hidden, weight, targets, bias=bias, sampling=Sampling(temperatures, kept), chunk_size=chunk_size, with_entropy=not foreseen,
        transform=transform, foresight=foresight,
    )  # fmt: skip
    logits = hidden @ weight.T + bias
    logits = (logits if transform is None else transform.apply(logits)) / temperatures[:, None]
    expected, wanted = [], []
    for row, target, members in zip(logits, targets.tolist(), sets, strict=True):
        members = members or list(range(12))
        log_p = row[members].log_softmax(0)
        expected.append(log_p[members.index(target)])
        wanted.append(-(log_p.exp() * log_p).sum())
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    losses = [(factors[0] * found).sum(), (factors[0] * torch.stack(expected)).sum()]
    if entropy is not None:
        torch.testing.assert_close(entropy, torch.stack(wanted), rtol=1e-12, atol=1e-12)
        losses = [losses[0] + (factors[1] * entropy).sum(), losses[1] + (factors[1] * torch.stack(wanted)).sum()]
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert foresight is None or not foresight.failed

from __future__ import annotations

import math

import oracles
import pytest
import torch

from rollouts.logprobs import (
    chunked_log_probs,
    entropy_from_logits,
    gather_log_probs,
    shift_packed,
    token_entropy,
    token_log_probs,
)


def make(b=3, t=5, v=7, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, v, generator=g, dtype=torch.float64) * 3, torch.randint(0, v, (b, t), generator=g)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_log_probs_are_aligned_with_tokens(temperature):
    logits, tokens = make()
    found = token_log_probs(logits, tokens, temperature)
    torch.testing.assert_close(found, torch.tensor(oracles.token_log_probs(logits.tolist(), tokens.tolist(), temperature)).double())
    per_row = token_log_probs(logits, tokens, torch.full((3,), temperature))
    torch.testing.assert_close(per_row, found)


def test_a_model_that_predicts_the_next_token_is_right_and_one_that_repeats_the_token_is_not():
    tokens = torch.tensor([[2, 5, 1, 3]])
    next_token = torch.full((1, 4, 7), -50.0)
    same_token = next_token.clone()
    for t in range(4):
        next_token[0, t, tokens[0, (t + 1) % 4]] = 50.0
        same_token[0, t, tokens[0, t]] = 50.0
    assert float(token_log_probs(next_token, tokens)[:, 1:].min()) > -1e-4
    assert float(token_log_probs(same_token, tokens)[:, 1:].max()) < -50


def test_half_precision_logits_are_computed_in_float32():
    logits, tokens = make()
    rounded = logits.to(torch.bfloat16)
    assert token_log_probs(rounded, tokens).dtype == torch.float32
    torch.testing.assert_close(token_log_probs(rounded, tokens), token_log_probs(rounded.float(), tokens))


def test_entropy_is_that_of_the_distribution_and_zero_for_a_certain_one():
    logits, _ = make()
    p = logits.softmax(-1)
    torch.testing.assert_close(token_entropy(logits)[:, 1:], (-(p * p.log()).sum(-1))[:, :-1])
    assert float(token_entropy(logits)[:, 0].abs().max()) == 0
    assert float(entropy_from_logits(torch.tensor([[0.0, -math.inf]]))) == 0
    assert float(entropy_from_logits(torch.zeros(1, 8))) == pytest.approx(math.log(8))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunks_give_the_values_of_full_logits(with_bias, chunk_size):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(8, 4, generator=g), torch.randn(11, 4, generator=g)
    bias = torch.randn(11, generator=g) if with_bias else None
    targets, temperatures = torch.randint(0, 11, (8,), generator=g), torch.rand(8, generator=g) + 0.5
    log_probs, entropy = chunked_log_probs(
        hidden, weight, targets, bias=bias, temperatures=temperatures, chunk_size=chunk_size, with_entropy=True
    )
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperatures[:, None]
    torch.testing.assert_close(log_probs, gather_log_probs(logits, targets), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, entropy_from_logits(logits), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 2.0, 1.5, 0.7]])
def test_gradients_of_chunks_are_right_for_log_probs_and_entropy(temperatures):
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(5, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 6, (5,), generator=g)
    t = None if temperatures is None else torch.tensor(temperatures, dtype=torch.float64)

    def both(h, w, b):
        return chunked_log_probs(h, w, targets, bias=b, temperatures=t, chunk_size=2, with_entropy=True)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w: chunked_log_probs(h, w, targets, temperatures=t, chunk_size=2)[0], (hidden, weight))


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(6, 3)
    chunked_log_probs(hidden, weight, torch.zeros(4, dtype=torch.int64))[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_bfloat16_hidden_states_give_float32_log_probs_and_gradients_in_the_dtype_of_the_parameters():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 16, generator=g)
    weight = torch.randn(50, 16, generator=g, requires_grad=True)
    targets = torch.randint(0, 50, (40,), generator=g)
    log_probs, _ = chunked_log_probs(hidden.to(torch.bfloat16), weight, targets, chunk_size=16)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, gather_log_probs(hidden @ weight.t(), targets), atol=0.15, rtol=0.05)
    log_probs.mean().backward()
    assert weight.grad.dtype == torch.float32


def test_the_packed_shift_never_crosses_a_row():
    tokens = torch.tensor([10, 11, 12, 20, 30, 31])
    shift = shift_packed(tokens, torch.tensor([0, 3, 4, 6]))
    assert shift.predictors.tolist() == [0, 1, 4]
    assert shift.positions.tolist() == [1, 2, 5]
    assert shift.targets.tolist() == [11, 12, 31]

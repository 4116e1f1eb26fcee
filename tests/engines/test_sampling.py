from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.inprocess.sampling import SamplingRows, UniformStream, sample_tokens, truncate_logits


def rows(n: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingRows:
    settings = (torch.full((n,), value) for value in (temperature, top_p, top_k, min_p))
    return SamplingRows(*settings, truncates=top_p < 1 or top_k > 0 or min_p > 0)


def naive_distribution(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Sort, cut, renormalise, in float64 and in Python."""
    p = np.exp((np.array(logits, dtype=np.float64) - max(logits)) / temperature)
    p /= p.sum()
    order = sorted(range(len(logits)), key=lambda i: -p[i])
    kept = order[: top_k or len(order)]
    total, out, collected = sum(p[i] for i in kept), np.zeros(len(logits)), 0.0
    for i in kept:
        if (collected >= top_p and out.any()) or p[i] < min_p * p[order[0]]:
            break
        out[i] = p[i]
        collected += p[i] / total
    return (out / out.sum()).tolist()


LOGITS = [2.0, -1.0, 0.5, 1.5, 0.0, -3.0]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.5, 1.0, 0, 0.0),
        (1.0, 0.7, 0, 0.0),
        (2.0, 1.0, 3, 0.0),
        (1.3, 0.8, 4, 0.0),
        (1.0, 1.0, 0, 0.2),
        (2.0, 1.0, 0, 0.2),  # of the tempered distribution: five tokens stay instead of three
        (1.0, 1.0, 0, 1.0),
        (1.5, 0.9, 4, 0.3),
    ],
)
def test_draws_follow_the_distribution_and_report_its_log_probs(temperature, top_p, top_k, min_p):
    n = 20000
    uniforms = torch.tensor(np.random.Generator(np.random.Philox(key=1)).random(n))
    tokens, log_probs, _ = sample_tokens(torch.tensor([LOGITS]).expand(n, -1), rows(n, temperature, top_p, top_k, min_p), uniforms)
    expected = np.array(naive_distribution(LOGITS, temperature, top_p, top_k, min_p))
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert (counts[expected == 0] == 0).all()
    live = expected > 0
    chi_square = ((counts[live] - n * expected[live]) ** 2 / (n * expected[live])).sum()
    assert chi_square < 25  # 5 degrees of freedom: p < 2e-4
    np.testing.assert_allclose(log_probs.exp().numpy(), expected[tokens.numpy()], rtol=1e-5)


def test_greedy_rows_take_the_largest_logit_and_report_temperature_one():
    tokens, log_probs, _ = sample_tokens(torch.tensor([LOGITS, LOGITS]), rows(2, temperature=0.0, top_p=0.1), torch.tensor([0.99, 0.0]))
    assert tokens.tolist() == [0, 0]
    torch.testing.assert_close(log_probs, torch.tensor([LOGITS]).log_softmax(-1)[0, 0].expand(2))


@given(u=st.floats(0, 1, exclude_max=True, width=64), k=st.integers(1, 6))
def test_a_token_outside_the_kept_set_is_never_drawn(u, k):
    tokens, *_ = sample_tokens(torch.tensor([LOGITS]), rows(1, top_k=k), torch.tensor([u], dtype=torch.float64))
    assert tokens.item() in sorted(range(6), key=lambda i: -LOGITS[i])[:k]


def test_the_best_token_survives_any_cut():
    cut = truncate_logits(torch.tensor([LOGITS]), torch.tensor([1]), torch.tensor([1e-9]), torch.tensor([1.0]))
    assert cut[0, 0] == LOGITS[0]
    assert torch.isinf(cut[0, 1:]).all()


def test_a_stream_depends_on_its_seed_alone():
    a, b, c = UniformStream(5, block=2), UniformStream(5, block=2), UniformStream(6)
    forwards = [a[i] for i in range(7)]
    assert [b[i] for i in reversed(range(7))] == forwards[::-1]
    assert forwards != [c[i] for i in range(7)]
    assert all(0 <= u < 1 for u in forwards)


@given(st.lists(st.sampled_from([(1.0, 1.0, 0, 0.0, False), (0.0, 0.9, 3, 0.1, False), (0.7, 0.9, 0, 0.0, True)]), min_size=1, max_size=5))
def test_parameters_of_rows_are_stacked_in_their_order(each):
    found = SamplingRows.stack(each, torch.device("cpu"))
    for column, name in enumerate(("temperatures", "top_p", "top_k", "min_p")):
        torch.testing.assert_close(getattr(found, name), torch.tensor([row[column] for row in each]), rtol=0, atol=0)
    assert found.truncates == any(row[4] for row in each)

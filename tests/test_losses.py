from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from functools import partial

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.algorithms import chain, dapo, dr_grpo, grpo, reinforce, rloo
from rollouts.batching import select_rows
from rollouts.kl import abs_kl, k1, k2, k3
from rollouts.loss_weights import fixed_length_mean, group_token_mean, sample_mean, sample_sum, token_mean
from rollouts.losses import (
    clipped_policy_loss,
    compute_policy_loss,
    dft_loss,
    grpo_loss,
    merge_metrics,
    policy_loss,
    ppo_loss,
    reinforce_loss,
    sft_loss,
    value_loss,
)
from rollouts.surrogates import cispo, clipped, importance_weighted, sequence_ratio
from rollouts.surrogates import reinforce as reinforce_surrogate
from rollouts.types import TokenOutputs, TrainBatch


def make_batch(seed: int = 0, rows: int = 6, width: int = 7, num_groups: int = 2) -> tuple[torch.Tensor, TrainBatch]:
    """Log-probs that ask for a gradient, and a batch with every column that policy losses read. float64."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, width + 1, (rows,), generator=g)
    lengths[0] = width
    positions = torch.arange(width)
    mask = ((positions > 0) & (positions < lengths[:, None]) & (torch.rand(rows, width, generator=g) < 0.8)).double()
    mask[:, 1] = 1.0

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    old = -draw().abs()
    log_probs = (old + draw(0.4)).requires_grad_()
    batch = TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.randint(0, 2, (rows,), generator=g).double(),
        group_ids=torch.arange(rows) % num_groups,
        trainable=torch.ones(rows, dtype=torch.bool),
        rollout_log_probs=old,
        ref_log_probs=old + draw(0.3),
        advantages=draw(),
        values=draw(),
        returns=draw(),
    )
    return log_probs, batch


AGGREGATIONS = {
    "token_mean": token_mean,
    "sample_mean": sample_mean,
    "sample_sum": sample_sum,
    "group_token_mean": group_token_mean,
    "fixed_length_mean": partial(fixed_length_mean, length=5),
}
KL = {
    k1: lambda p, q: p - q,
    abs_kl: lambda p, q: abs(p - q),
    k2: lambda p, q: (p - q) ** 2 / 2,
    k3: lambda p, q: math.exp(q - p) - 1 - (q - p),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@pytest.mark.parametrize("dual", [None, 1.1])
@pytest.mark.parametrize("kl", KL, ids=lambda f: f.__name__)
def test_the_clipped_loss_matches_the_loop_in_value_and_gradient(name, dual, kl):
    log_probs, batch = make_batch()
    batch = replace(batch, loss_weights=AGGREGATIONS[name](batch))
    loss, _ = clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch, low=0.2, high=0.3, dual=dual, kl=kl, kl_coef=0.1)
    loss.backward()

    def oracle(values: list[list[float]]) -> float:
        rows = [
            [oracles.clip_loss(math.exp(p - o), a, 0.2, 0.3, dual) + 0.1 * KL[kl](p, r) for p, o, a, r in zip(*columns, strict=True)]
            for columns in zip(
                values, batch.rollout_log_probs.tolist(), batch.advantages.tolist(), batch.ref_log_probs.tolist(), strict=True
            )
        ]
        return oracles.aggregate(rows, batch.loss_mask.tolist(), name, batch.group_ids.tolist(), 5)

    values = log_probs.detach().tolist()
    assert float(loss.detach()) == pytest.approx(oracle(values), abs=1e-12)
    for i, t in ((0, 1), (0, 3), (2, 1), (5, 1), (3, 2)):
        up, down = [list(row) for row in values], [list(row) for row in values]
        up[i][t] += 1e-6
        down[i][t] -= 1e-6
        assert float(log_probs.grad[i, t]) == pytest.approx((oracle(up) - oracle(down)) / 2e-6, abs=1e-7)


SURROGATES = {
    "reinforce": reinforce_surrogate,
    "importance_weighted": importance_weighted,
    "clipped": partial(clipped, low=0.2, high=0.2, dual=3.0),
    "cispo": partial(cispo, low=1.0, high=0.28),
}


def loss_and_gradient(log_probs, batch, loss_fn):
    leaf = log_probs.detach().clone().requires_grad_()
    loss, metrics = loss_fn(TokenOutputs(log_probs=leaf, values=leaf * 2, entropy=leaf.abs()), batch)
    loss.backward()
    return loss.detach(), leaf.grad, {k: float(v) for k, v in metrics.items()}


LOSSES = {
    **{name: partial(policy_loss, surrogate=s, kl=k3, kl_coef=0.1, entropy_coef=0.01) for name, s in SURROGATES.items()},
    "sequence": partial(policy_loss, surrogate=clipped, ratio=sequence_ratio),
    "sft": sft_loss,
    "value": value_loss,
}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_places_changes_nothing_bit_for_bit(name, garbage):
    log_probs, batch = make_batch()
    batch = replace(batch, loss_weights=token_mean(batch), importance_weights=batch.loss_mask * 0.7)
    clean = loss_and_gradient(log_probs, batch, LOSSES[name])
    off = batch.loss_mask == 0

    def spoil(x):
        return torch.where(off, garbage, x)

    columns = ("rollout_log_probs", "ref_log_probs", "advantages", "importance_weights", "values", "returns")
    dirty = replace(batch, **{c: spoil(getattr(batch, c)) for c in columns})
    loss, gradient, metrics = loss_and_gradient(spoil(log_probs.detach()), dirty, LOSSES[name])
    assert torch.equal(loss, clean[0])
    assert torch.equal(gradient, clean[1])
    assert metrics == clean[2]
    assert float(gradient[off].abs().sum()) == 0


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 5), name=st.sampled_from(sorted(LOSSES)), how=st.sampled_from(sorted(AGGREGATIONS)))
def test_micro_batches_row_order_and_padding_never_change_loss_or_gradient(seed, cut, name, how):
    log_probs, batch = make_batch(seed)
    batch = replace(batch, loss_weights=AGGREGATIONS[how](batch))
    whole, gradient, metrics = loss_and_gradient(log_probs, batch, LOSSES[name])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    total, parts = torch.zeros((), dtype=torch.float64), []
    for rows in (order[:cut], order[cut:]):
        micro = select_rows(batch, rows)
        width = micro.tokens.shape[1]
        loss, part, values = loss_and_gradient(log_probs[rows, :width], micro, LOSSES[name])
        total = total + loss
        torch.testing.assert_close(part, gradient[rows, :width])
        parts.append((values, int((micro.loss_mask > 0).sum())))
    torch.testing.assert_close(total, whole)
    assert merge_metrics(parts) == pytest.approx(metrics)


def test_dft_loss_matches_the_loop_in_value_and_gradient():
    log_probs, batch = make_batch(seed=3)
    loss = dft_loss(TokenOutputs(log_probs=log_probs), replace(batch, loss_weights=token_mean(batch))).loss
    expected = oracles.dft_loss(log_probs, batch.loss_mask.tolist())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    found, wanted = (torch.autograd.grad(x, [log_probs])[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens():
    g = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(3, 6, 11, generator=g), torch.randint(0, 11, (3, 6), generator=g)
    _, batch = make_batch(rows=3, width=6)
    batch = replace(batch, tokens=tokens, loss_weights=token_mean(batch), advantages=torch.ones(3, 6))
    from rollouts.logprobs import token_log_probs

    outputs = TokenOutputs(log_probs=token_log_probs(logits, tokens))
    sft = sft_loss(outputs, batch).loss
    torch.testing.assert_close(sft, policy_loss(outputs, batch, surrogate=reinforce_surrogate).loss)
    labels = torch.where(batch.loss_mask > 0, tokens, -100)[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(sft, expected, check_dtype=False)


def test_grpo_loss_equals_a_two_by_three_example_computed_by_hand():
    """Vocabulary of 2; each prediction gives one of them probability 1/4 or 3/4."""
    a, b = math.log(1 / 4), math.log(3 / 4)
    logits = torch.tensor([[[a, b], [b, a], [0.0, 0.0]], [[b, a], [a, b], [0.0, 0.0]]])
    labels = torch.tensor([[0, 1, 0], [1, 1, 1]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    advantages = torch.tensor([1.0, -2.0])
    # row 0: p(1) = 3/4 after token 0, p(0) = 3/4 after token 1; row 1: p(1) = 1/4 after token 0
    expected = -(1 * b + 1 * b + -2 * a) / 3
    assert float(grpo_loss(logits, labels, mask, advantages).loss) == pytest.approx(expected, abs=1e-6)
    assert float(reinforce_loss(logits, labels, mask, advantages[:, None].expand(2, 3)).loss) == pytest.approx(expected, abs=1e-6)
    loss, metrics = ppo_loss(logits, labels, mask, advantages, torch.tensor([[0.0, b, b], [0.0, a, 0.0]]))
    assert float(loss) == pytest.approx(-(1 + 1 - 2) / 3, abs=1e-6)
    assert float(metrics["clip_fraction"]) == 0


def test_the_ppo_gradient_is_zero_outside_the_clip_on_the_pessimistic_side_only():
    old = torch.zeros(1, 4)
    log_probs = torch.log(torch.tensor([[1.5, 0.5, 1.5, 0.5]])).requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    loss, metrics = compute_policy_loss(old, log_probs, advantages, torch.ones(1, 4), clip_ratio=0.2)
    loss.backward()
    assert log_probs.grad[0, :2].tolist() == [0.0, 0.0]
    assert (log_probs.grad[0, 2:] != 0).all()
    assert float(metrics["clip_fraction"]) == 0.5
    assert {"approx_kl", "clip_fraction_low", "clip_fraction_high", "ratio_mean"} <= set(metrics)


def test_dual_clip_bounds_the_loss_of_a_bad_token_and_takes_its_gradient():
    log_ratio = torch.tensor([[math.log(5.0), math.log(2.0)]]).requires_grad_()
    loss = clipped(log_ratio, log_ratio, torch.tensor([[-1.0, -1.0]]), dual=3.0)
    assert loss.tolist()[0] == pytest.approx([3.0, 2.0])
    loss.sum().backward()
    assert log_ratio.grad[0].tolist() == pytest.approx([0.0, 2.0])


def test_a_batch_that_is_masked_out_has_loss_and_gradient_zero():
    logits = torch.randn(2, 4, 5, requires_grad=True)
    loss, metrics = grpo_loss(logits, torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4), torch.ones(2))
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(logits.grad.abs().sum()) == 0
    assert all(math.isfinite(float(v)) for v in metrics.values())
    _, batch = make_batch()
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    for weigh in AGGREGATIONS.values():
        assert float(weigh(empty).abs().sum()) == 0


def test_weights_leave_out_rows_that_are_not_trainable_and_scale_with_fractions():
    _, batch = make_batch()
    trainable = torch.tensor([True, True, False, True, False, True])
    part = replace(batch, trainable=trainable)
    for weigh in AGGREGATIONS.values():
        assert float(weigh(part)[~trainable].abs().sum()) == 0
        torch.testing.assert_close(weigh(part)[trainable], weigh(select_rows(batch, trainable.nonzero()[:, 0]))[:, : batch.tokens.shape[1]])
    for name in ("token_mean", "sample_mean", "group_token_mean"):
        assert float(AGGREGATIONS[name](batch).sum()) == pytest.approx(1)
    half = replace(batch, loss_mask=torch.where(torch.arange(7) == 1, 0.5, batch.loss_mask))
    weights = token_mean(half)
    assert float(weights[0, 1]) == pytest.approx(0.5 / float(half.loss_mask.sum()))


def test_losses_say_which_column_is_missing():
    log_probs, batch = make_batch()
    outputs = TokenOutputs(log_probs=log_probs)
    with pytest.raises(AssertionError, match="loss_weights"):
        sft_loss(outputs, batch)
    weighted = replace(batch, loss_weights=token_mean(batch))
    for column, needs in (("advantages", {}), ("ref_log_probs", {"kl": k3}), ("rollout_log_probs", {})):
        with pytest.raises(AssertionError, match=column):
            policy_loss(outputs, replace(weighted, **{column: None}), surrogate=clipped, **needs)
    with pytest.raises(AssertionError, match="entropy"):
        policy_loss(outputs, weighted, surrogate=clipped, entropy_coef=0.1)


ALGORITHMS = {
    "grpo": (grpo(), lambda r, g: oracles.grpo_advantages(r, g, 1e-4), "sample_mean", (0.2, 0.2)),
    "dr_grpo": (dr_grpo(max_tokens=5), lambda r, g: oracles.grpo_advantages(r, g, None), "fixed_length_mean", (0.2, 0.2)),
    "dapo": (dapo(), lambda r, g: oracles.grpo_advantages(r, g, 1e-4), "token_mean", (0.2, 0.28)),
    "rloo": (rloo(), oracles.rloo_advantages, "sample_sum", None),
    "reinforce": (reinforce(), lambda r, g: oracles.grpo_advantages(r, [0] * len(r), None), "sample_sum", None),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_is_its_paper(name):
    algorithm, advantages, how, clip = ALGORITHMS[name]
    log_probs, batch = make_batch(3)
    estimated = algorithm.estimate(replace(batch, advantages=None))
    expected = advantages(batch.rewards.tolist(), batch.group_ids.tolist())
    for row, advantage in enumerate(expected):
        assert estimated.advantages[row][batch.loss_mask[row] > 0].tolist() == pytest.approx(
            [advantage] * int((batch.loss_mask[row] > 0).sum()), abs=1e-9
        )
    loss, _ = algorithm.loss(TokenOutputs(log_probs=log_probs), replace(estimated, loss_weights=algorithm.weigh(estimated)))
    rows = [
        [oracles.clip_loss(math.exp(p - o), a, *clip) if clip else -a * p for p, o in zip(ps, os, strict=True)]
        for ps, os, a in zip(log_probs.tolist(), batch.rollout_log_probs.tolist(), expected, strict=True)
    ]
    assert float(loss) == pytest.approx(oracles.aggregate(rows, batch.loss_mask.tolist(), how, length=5), abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_are_values(name):
    algorithm = ALGORITHMS[name][0]
    copy = pickle.loads(pickle.dumps(algorithm))
    assert copy.requires == algorithm.requires
    assert repr(copy) == repr(algorithm)
    assert "lambda" not in repr(algorithm)
    assert {f.name for f in fields(algorithm)} == {"estimate", "weigh", "loss", "requires", "loss_only"}


def test_a_kl_term_asks_for_a_reference_and_its_absence_does_not():
    assert "ref_log_probs" in grpo(kl_coef=0.04).requires
    assert "ref_log_probs" not in grpo().requires
    _, batch = make_batch()
    double = chain(grpo().estimate, lambda b: replace(b, advantages=2 * b.advantages))
    torch.testing.assert_close(double(batch).advantages, 2 * grpo().estimate(batch).advantages)


def test_the_sequence_ratio_is_the_geometric_mean_with_the_gradient_of_each_token():
    log_probs, batch = make_batch()
    ratio = sequence_ratio(log_probs, batch.rollout_log_probs, batch.loss_mask)
    for row in range(6):
        on = batch.loss_mask[row] > 0
        mean = float((log_probs - batch.rollout_log_probs)[row][on].mean())
        assert ratio[row][on].tolist() == pytest.approx([mean] * int(on.sum()))
    ratio.sum().backward()
    assert torch.equal(log_probs.grad, (batch.loss_mask > 0).double())


def test_max_and_min_metrics_merge_as_such_and_parts_without_tokens_say_nothing():
    merged = merge_metrics([({"a": 1.0, "max_a": 1.0, "min_a": 1.0}, 1), ({"a": 4.0, "max_a": 4.0, "min_a": 4.0}, 2), ({"a": 99.0}, 0)])
    assert merged == {"a": 3.0, "max_a": 4.0, "min_a": 1.0}

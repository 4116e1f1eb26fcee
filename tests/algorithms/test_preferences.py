"""Preference losses against loops and numerical gradients, on pairs and on batches of pairs; what no split or padding may change."""

from __future__ import annotations

import doctest
import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import preferences as oracles

from rollouts.algorithms import preferences
from rollouts.algorithms.losses import merge_metrics
from rollouts.algorithms.preferences import (
    bradley_terry_loss,
    dpo_loss,
    hinge_pair_loss,
    ipo_pair_loss,
    odds_ratio_loss,
    orpo_loss,
    pair_mean,
    preference_loss,
    robust_pair_loss,
    score_loss,
    sequence_log_probs,
    sigmoid_pair_loss,
    simpo_pair_loss,
    smoothed_pair_loss,
    split_pairs,
)
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.batches import select_rows
from rollouts.data.collate import collate_samples
from rollouts.models.forward.outputs import compute_scores
from rollouts.models.heads import create_critic_model
from rollouts.testing import create_tiny_model
from rollouts.types import Sample, TokenOutputs, TrainBatch


def squared(h: torch.Tensor, beta: float) -> torch.Tensor:
    return (beta * h).square()


def squared_oracle(chosen, rejected, ref_chosen, ref_rejected, beta):
    return (beta * ((chosen - ref_chosen) - (rejected - ref_rejected))) ** 2


KINDS = {
    "sigmoid": (sigmoid_pair_loss, oracles.dpo),
    "smoothed": (smoothed_pair_loss, oracles.smoothed),
    "robust": (robust_pair_loss, oracles.robust),
    "ipo": (ipo_pair_loss, oracles.ipo),
    "hinge": (hinge_pair_loss, oracles.hinge),
    "simpo": (simpo_pair_loss, oracles.simpo),
    "of the caller": (squared, squared_oracle),
}


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_pairs(seed: int, pairs: int = 3, width: int = 6) -> tuple[torch.Tensor, torch.Tensor, TrainBatch]:
    """Log-probs and values that ask for a gradient, and a ragged batch of pairs with a reference. float64."""
    g = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    lengths = torch.randint(2, width + 1, (rows,), generator=g)
    lengths[0] = width
    positions = torch.arange(width)
    mask = ((positions > 0) & (positions < lengths[:, None]) & (torch.rand(rows, width, generator=g) < 0.7)).double()
    mask[:, 1] = 1.0
    batch = TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.randn(rows, generator=g, dtype=torch.float64),
        group_ids=torch.arange(pairs).repeat_interleave(2),
        trainable=torch.ones(rows, dtype=torch.bool),
        ref_log_probs=-torch.rand(rows, width, generator=g, dtype=torch.float64) * 3,
    )
    log_probs = (-torch.rand(rows, width, generator=g, dtype=torch.float64) * 3).requires_grad_()
    values = torch.randn(rows, width, generator=g, dtype=torch.float64).requires_grad_()
    return log_probs, values, replace(batch, loss_weights=pair_mean(batch))


def loop_loss(log_probs, batch: TrainBatch, one_pair, beta: float, *, reference_free: bool = False):
    """The mean over pairs of a loss of one pair."""
    mask = batch.loss_mask.tolist()
    policy = [oracles.answer_log_prob(row, m) for row, m in zip(log_probs, mask, strict=True)]
    reference = [oracles.answer_log_prob(row, m) for row, m in zip(batch.ref_log_probs.tolist(), mask, strict=True)]
    if reference_free:
        reference = [0.0] * len(reference)
    terms = [one_pair(policy[i], policy[i + 1], reference[i], reference[i + 1], beta=beta) for i in range(0, len(policy), 2)]
    return sum(terms) / len(terms)


# -- pairs of numbers


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.tuples(*[st.floats(-20, 0)] * 4), min_size=1, max_size=4), st.sampled_from([0.05, 0.1, 0.5]))
def test_losses_of_pairs_are_those_of_the_papers(kind, pairs, beta):
    pair_loss, one_pair = KINDS[kind]
    columns = [double(*column) for column in zip(*pairs, strict=True)]
    loss, metrics = dpo_loss(*columns, beta=beta, pair_loss=pair_loss)
    assert loss.item() == pytest.approx(sum(one_pair(*pair, beta=beta) for pair in pairs) / len(pairs), rel=1e-10, abs=1e-10)
    won = [c - rc > r - rr for c, r, rc, rr in pairs]
    close = [abs((c - rc) - (r - rr)) < 1e-9 for c, r, rc, rr in pairs]
    if not any(close):
        assert metrics["reward_accuracy"].item() == pytest.approx(sum(won) / len(won))
    assert metrics["reward_chosen"].item() == pytest.approx(beta * sum(c - rc for c, _, rc, _ in pairs) / len(pairs), abs=1e-10)
    assert metrics["reward_rejected"].item() == pytest.approx(beta * sum(r - rr for _, r, _, rr in pairs) / len(pairs), abs=1e-10)
    margin = metrics["reward_chosen"] - metrics["reward_rejected"]
    assert metrics["reward_margin"].item() == pytest.approx(margin.item(), abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_pair_losses_are_the_numerical_ones(kind):
    columns = [torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(4)]
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.3, pair_loss=KINDS[kind][0]).loss, columns)


@given(st.lists(st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01)), min_size=1, max_size=4), st.sampled_from([0.1, 1.0]))
def test_the_odds_ratio_is_that_of_the_paper(pairs, beta):
    chosen, rejected = (double(*column).requires_grad_() for column in zip(*pairs, strict=True))
    loss, metrics = odds_ratio_loss(chosen, rejected, beta=beta)
    expected = sum(oracles.orpo(c, r, beta) for c, r in zip(chosen, rejected, strict=True)) / len(pairs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    found, wanted = (torch.autograd.grad(x, [chosen, rejected]) for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    assert metrics["reward_chosen"].item() == pytest.approx(beta * sum(c for c, _ in pairs) / len(pairs))


def test_odds_of_certain_and_of_impossible_answers_are_finite():
    chosen, rejected = torch.tensor([0.0, -1e4]).requires_grad_(), torch.tensor([-1e4, 0.0]).requires_grad_()
    loss = odds_ratio_loss(chosen, rejected).loss
    loss.backward()
    assert loss.isfinite() and bool(chosen.grad.isfinite().all()) and bool(rejected.grad.isfinite().all())


def test_robust_dpo_expects_the_loss_of_the_pairs_as_they_should_be():
    h = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = 0.8 * robust_pair_loss(h, 0.5, label_smoothing=0.2) + 0.2 * robust_pair_loss(-h, 0.5, label_smoothing=0.2)
    torch.testing.assert_close(expected, sigmoid_pair_loss(h, 0.5))
    for loss in (smoothed_pair_loss, robust_pair_loss):
        torch.testing.assert_close(loss(h, 0.5, label_smoothing=0.0), sigmoid_pair_loss(h, 0.5))
        with pytest.raises(AssertionError, match=r"label_smoothing is 0.5, expected at least 0 and less than 0.5"):
            loss(h, 0.5, label_smoothing=0.5)


def test_the_likelihood_of_chosen_answers_is_added():
    log_probs, _, batch = random_pairs(3)
    outputs = TokenOutputs(log_probs=log_probs)
    both, alone = preference_loss(outputs, batch, nll_coef=0.5), preference_loss(outputs, batch)
    mask = batch.loss_mask.tolist()
    terms = [-oracles.answer_log_prob(log_probs[i], mask[i]) / sum(mask[i]) for i in range(0, len(mask), 2)]
    assert (both.loss - alone.loss).item() == pytest.approx(0.5 * (sum(terms) / len(terms)).item())
    assert "nll_chosen" in both.metrics and "nll_chosen" not in alone.metrics


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20), st.floats(0, 3)), min_size=1, max_size=4), st.booleans())
def test_bradley_terry_is_that_of_the_paper(pairs, with_margin):
    chosen, rejected, margin = (double(*column) for column in zip(*pairs, strict=True))
    loss, metrics = bradley_terry_loss(chosen, rejected, margin if with_margin else None)
    terms = [oracles.bradley_terry(c, r, m if with_margin else 0.0) for c, r, m in pairs]
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-9, abs=1e-9)
    assert metrics["score_margin"].item() == pytest.approx(sum(c - r for c, r, _ in pairs) / len(pairs), abs=1e-10)
    assert metrics["score_accuracy"].item() == pytest.approx(sum(c > r for c, r, _ in pairs) / len(pairs))
    same = bradley_terry_loss(chosen, rejected, 0.5).loss
    assert same.item() == pytest.approx(bradley_terry_loss(chosen - 0.5, rejected).loss.item(), rel=1e-9, abs=1e-12)


def test_gradients_of_bradley_terry_are_the_numerical_ones():
    scores = [torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2)]
    assert torch.autograd.gradcheck(lambda a, b: bradley_terry_loss(a, b, 0.3).loss, scores)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_large_margins_stay_finite(size):
    chosen = torch.tensor([0.0, -size], requires_grad=True)
    rejected, reference = torch.tensor([-size, 0.0]), torch.zeros(2)
    loss = dpo_loss(chosen, rejected, reference, reference, beta=1.0, pair_loss=sigmoid_pair_loss).loss
    loss.backward()
    assert loss.isfinite()
    assert chosen.grad is not None and bool(chosen.grad.isfinite().all())
    assert loss.item() == pytest.approx(size / 2, rel=1e-6)  # the pair that is right has loss 0 and no gradient
    assert chosen.grad.tolist() == pytest.approx([0.0, -0.5])  # the other one has a slope of beta / P
    scores = torch.tensor([size, -size], requires_grad=True)
    assert bradley_terry_loss(scores, -scores.detach()).loss.isfinite()


def test_without_a_reference_only_the_policy_counts():
    chosen, rejected = double(-1.0, -2.0), double(-3.0, -1.0)
    free = dpo_loss(chosen, rejected, None, None, beta=0.5)
    zero = dpo_loss(chosen, rejected, torch.zeros(2), torch.zeros(2), beta=0.5)
    assert free.loss.item() == zero.loss.item()
    assert free.metrics["reward_chosen"].item() == pytest.approx(0.5 * -1.5)
    with pytest.raises(AssertionError, match="both ref_chosen and ref_rejected"):
        dpo_loss(chosen, rejected, chosen, None)


def test_no_pairs_have_loss_zero():
    empty = torch.zeros(0, requires_grad=True)
    for loss, metrics in (dpo_loss(empty, empty, empty, empty), bradley_terry_loss(empty, empty)):
        assert loss.item() == 0.0
        assert all(value.item() == 0.0 for value in metrics.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dpo_loss(x, x, x, x, beta=0.0), "beta is 0.0, expected more than 0"),
        (lambda x: dpo_loss(x, x[:1], x, x), r"rejected has shape \(1,\), expected \(2,\)"),
        (lambda x: dpo_loss(x, x, x, x, weights=x[:1]), r"weights has shape \(1,\)"),
        (lambda x: bradley_terry_loss(x, x[:1]), r"rejected_scores has shape \(1,\)"),
        (lambda x: bradley_terry_loss(x, x, x[:1]), r"margin has shape \(1,\)"),
        (lambda x: sequence_log_probs(x[:, None], x[None]), r"mask has shape \(1, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(AssertionError, match=message):
        call(torch.zeros(2))


def test_log_probs_of_answers_are_sums_over_trained_tokens():
    log_probs = torch.tensor([[9.0, -1.0, -2.0], [9.0, torch.nan, -3.0], [1.0, 2.0, 3.0]]).requires_grad_()
    mask = torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    found = sequence_log_probs(log_probs, mask)
    assert found.tolist() == [-2.0, -3.0, 0.0]
    found.sum().backward()
    assert torch.equal(log_probs.grad, mask)
    assert sequence_log_probs(log_probs.detach(), mask, average=True).tolist() == pytest.approx([-2.0 / 1.5, -3.0, 0.0])


# -- batches of pairs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reference_free", [False, True])
@given(seed=st.integers(0, 1000), pairs=st.integers(1, 4))
def test_batches_give_value_and_gradient_of_the_loop(kind, reference_free, seed, pairs):
    log_probs, _, batch = random_pairs(seed, pairs)
    pair_loss, one_pair = KINDS[kind]
    loss = preference_loss(TokenOutputs(log_probs=log_probs), batch, beta=0.2, pair_loss=pair_loss, reference_free=reference_free).loss
    expected = loop_loss(log_probs, batch, one_pair, 0.2, reference_free=reference_free)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-10)
    found, wanted = (torch.autograd.grad(x, [log_probs])[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 1000), with_margin=st.booleans())
def test_scores_are_read_at_the_last_trained_token(seed, with_margin):
    _, values, batch = random_pairs(seed)
    loss = score_loss(TokenOutputs(log_probs=torch.zeros_like(values), values=values), batch, margin_from_rewards=with_margin).loss
    last = [max(t for t, m in enumerate(row) if m > 0) for row in batch.loss_mask.tolist()]
    scores = [values[row, t] for row, t in enumerate(last)]
    rewards = batch.rewards.tolist()
    terms = [
        oracles.bradley_terry(scores[i], scores[i + 1], rewards[i] - rewards[i + 1] if with_margin else 0.0) for i in range(0, len(last), 2)
    ]
    expected = sum(terms) / len(terms)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-10)
    found, wanted = (torch.autograd.grad(x, [values])[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


LOSSES = {
    "preference": partial(preference_loss, beta=0.2),
    "average": partial(preference_loss, beta=0.2, pair_loss=ipo_pair_loss, average=True),
    "with likelihood": partial(preference_loss, pair_loss=hinge_pair_loss, nll_coef=0.3),
    "odds ratio": partial(orpo_loss, beta=0.5),
    "score": score_loss,
}


def value_and_gradients(loss_fn, log_probs, values, batch):
    loss, metrics = loss_fn(TokenOutputs(log_probs=log_probs, values=values), batch)
    gradients = torch.autograd.grad(loss, [log_probs, values], allow_unused=True, retain_graph=True)
    return loss.detach(), metrics, [torch.zeros_like(values) if g is None else g for g in gradients]


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 1000), max_tokens=st.integers(4, 40))
def test_parts_of_a_step_add_up(name, seed, max_tokens):
    log_probs, values, batch = random_pairs(seed, pairs=5)
    whole, metrics, gradients = value_and_gradients(LOSSES[name], log_probs, values, batch)
    numbered = replace(batch, values=torch.arange(batch.num_rows).double()[:, None].expand_as(batch.loss_mask))
    parts = split_pairs(numbered, max_tokens=max_tokens)
    total, sums, merged = torch.zeros(()).double(), [torch.zeros_like(g) for g in gradients], []
    for part in parts:
        rows = part.values[:, 0].long()
        width = part.tokens.shape[1]
        loss, found, slopes = value_and_gradients(LOSSES[name], log_probs[rows, :width], values[rows, :width], part)
        total += loss
        merged.append((found, int((part.loss_mask > 0).sum())))
        for column, slope in zip(sums, slopes, strict=True):
            column[rows, :width] += slope
    torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sums, gradients, rtol=1e-10, atol=1e-12)
    assert merge_metrics(merged) == pytest.approx({key: value.item() for key, value in metrics.items()}, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_places_padding_and_the_order_of_pairs_change_nothing(name):
    log_probs, values, batch = random_pairs(7)
    expected, _, gradients = value_and_gradients(LOSSES[name], log_probs, values, batch)
    on = batch.loss_mask > 0
    for garbage in (torch.nan, torch.inf, 1e9):
        dirty = [torch.where(on, x.detach(), garbage).requires_grad_() for x in (log_probs, values)]
        reference = torch.where(on, batch.ref_log_probs, garbage)
        found, _, slopes = value_and_gradients(LOSSES[name], *dirty, replace(batch, ref_log_probs=reference))
        assert torch.equal(found, expected)
        torch.testing.assert_close(slopes, gradients, rtol=0, atol=0)
    order = [4, 5, 0, 1, 2, 3]
    found, _, slopes = value_and_gradients(LOSSES[name], log_probs[order], values[order], select_rows(batch, order))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, [g[order] for g in gradients], rtol=1e-12, atol=1e-12)


def test_swapping_the_answers_of_every_pair_turns_the_margins():
    log_probs, _, batch = random_pairs(8)
    swapped = [row ^ 1 for row in range(batch.num_rows)]
    _, found = preference_loss(TokenOutputs(log_probs=log_probs), batch)
    _, other = preference_loss(TokenOutputs(log_probs=log_probs[swapped]), select_rows(batch, swapped))
    assert found["reward_margin"].item() == pytest.approx(-other["reward_margin"].item())
    assert found["reward_accuracy"].item() == pytest.approx(1 - other["reward_accuracy"].item())


def test_pairs_that_are_not_whole_weigh_nothing():
    log_probs, _, batch = random_pairs(9, pairs=4)
    mask, trainable = batch.loss_mask.clone(), batch.trainable.clone()
    mask[3], trainable[4] = 0.0, False
    cut = replace(batch, loss_mask=mask, trainable=trainable)
    cut = replace(cut, loss_weights=pair_mean(cut))
    assert cut.loss_weights[2:6].abs().sum() == 0
    found = preference_loss(TokenOutputs(log_probs=log_probs), cut).loss
    kept = select_rows(batch, [0, 1, 6, 7])
    kept = replace(kept, loss_weights=pair_mean(kept))
    expected = preference_loss(TokenOutputs(log_probs=log_probs[[0, 1, 6, 7], : kept.tokens.shape[1]]), kept).loss
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    nothing = replace(batch, loss_mask=torch.zeros_like(mask))
    nothing = replace(nothing, loss_weights=pair_mean(nothing))
    loss, metrics = preference_loss(TokenOutputs(log_probs=log_probs), nothing)
    assert loss.item() == 0.0 and all(value.item() == 0.0 for value in metrics.values())


def test_weights_of_a_part_take_the_number_of_pairs_of_the_step():
    _, _, batch = random_pairs(10, pairs=4)
    part = select_rows(batch, [2, 3])
    torch.testing.assert_close(pair_mean(part, num_pairs=4), part.loss_weights)
    with pytest.raises(AssertionError, match="num_pairs is 0, expected more than 0"):
        pair_mean(part, num_pairs=0)


def test_split_pairs_keeps_them_whole_and_within_the_limit():
    _, _, batch = random_pairs(11, pairs=6)
    for part in split_pairs(batch, max_tokens=14):
        assert torch.equal(part.group_ids[0::2], part.group_ids[1::2])
        assert part.num_rows == 2 or int(part.lengths.sum()) <= 14
    assert [part.num_rows for part in split_pairs(batch, max_pairs=1)] == [2] * 6
    assert sorted(int(g) for part in split_pairs(batch, max_pairs=4) for g in part.group_ids) == sorted(batch.group_ids.tolist())
    shared = split_pairs(batch, max_tokens=14, num_shards=2)
    assert len(shared) == len(split_pairs(batch, max_tokens=14)) // 2, "each of two ranks may have so many tokens"
    assert sorted(int(g) for part in shared for g in part.group_ids) == sorted(batch.group_ids.tolist())


@pytest.mark.parametrize("loss_fn", [preference_loss, score_loss])
def test_split_pairs_weights_of_tokens_and_missing_columns_are_refused(loss_fn):
    log_probs, values, batch = random_pairs(12)
    outputs = TokenOutputs(log_probs=log_probs, values=values)

    def rows_of(*index: int):
        keep = list(index)
        part = select_rows(batch, keep)
        width = part.tokens.shape[1]
        return TokenOutputs(log_probs=log_probs[keep, :width], values=values[keep, :width]), part

    with pytest.raises(AssertionError, match="3 rows are not pairs"):
        loss_fn(*rows_of(0, 1, 2))
    with pytest.raises(AssertionError, match=r"rows 0 and 1 have group ids \[0, 1\], expected one"):
        loss_fn(*rows_of(1, 2))
    with pytest.raises(AssertionError, match="use pair_mean"):
        loss_fn(outputs, replace(batch, loss_weights=batch.loss_mask * torch.arange(batch.num_rows)[:, None]))
    with pytest.raises(AssertionError, match="call pair_mean on the whole step first"):
        loss_fn(outputs, replace(batch, loss_weights=None))
    if loss_fn is preference_loss:
        with pytest.raises(AssertionError, match="ref_log_probs, or reference_free=True"):
            loss_fn(outputs, replace(batch, ref_log_probs=None))
    else:
        with pytest.raises(AssertionError, match="the model has no value head"):
            loss_fn(TokenOutputs(log_probs=log_probs), batch)


def test_losses_with_their_options_are_values():
    loss = partial(preference_loss, beta=0.2, pair_loss=partial(robust_pair_loss, label_smoothing=0.3))
    log_probs, _, batch = random_pairs(13)
    again = pickle.loads(pickle.dumps(loss))
    outputs = TokenOutputs(log_probs=log_probs)
    assert again(outputs, batch).loss.item() == loss(outputs, batch).loss.item()


def test_the_example_of_the_module_runs():
    found = doctest.testmod(preferences)
    assert found.attempted >= 5 and found.failed == 0


async def test_a_policy_learns_which_answer_is_preferred():
    def answer(token: int, pair: int, length: int) -> Sample:
        tokens = (1, 2 + pair, *[token] * length)
        return Sample(tokens=tokens, loss_mask=(0.0, 0.0, *[1.0] * length), group_index=pair, index=token)

    batch = collate_samples([answer(token, pair, 2 + pair) for pair in range(3) for token in (10, 11)])
    backend = create_pytorch_backend(create_tiny_model(), lr=3e-3)
    reference = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
    batch = replace(batch, ref_log_probs=reference, loss_weights=pair_mean(batch))
    margins, losses = [], []
    for _ in range(8):
        metrics = [await backend.forward_backward(part, preference_loss).result() for part in split_pairs(batch, max_pairs=2)]
        await backend.optim_step().result()
        losses.append(sum(m["loss"] for m in metrics))
        margins.append(merge_metrics([(m, int(m["num_tokens"])) for m in metrics])["reward_margin"])
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the policy is the reference
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    assert losses[-1] < 0.5 < losses[0] and margins[-1] > 0.5


async def test_a_reward_model_learns_to_score_by_the_last_token():
    def answer(last: int, pair: int) -> Sample:
        return Sample(tokens=(1, 2 + pair, 9, last), loss_mask=(0.0, 0.0, 1.0, 1.0), group_index=pair, index=last)

    model = create_critic_model(create_tiny_model(), seed=0)
    optimizer = create_adamw_optimizer(model, lr=3e-3)
    backend = PyTorchTrainingBackend(model, optimizer, compute_outputs=compute_scores)
    batch = collate_samples([answer(last, pair) for pair in range(3) for last in (10, 11)])
    batch = replace(batch, loss_weights=pair_mean(batch))
    found = await backend.forward(batch, lambda outputs: outputs.values).result()
    assert torch.equal(found[0, :3], found[1, :3]) and found[0, 3] != found[1, 3]  # the score at t has seen token t, and no later one
    for _ in range(12):
        metrics = await backend.forward_backward(batch, score_loss).result()
        await backend.optim_step().result()
    assert metrics["score_accuracy"] == 1.0 and metrics["loss"] < 0.5

"""KTO against a loop over answers; the reference point of mismatched answers; what no split may change."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import preferences as oracles
from samples import make_row

from rollouts.algorithms.kto import kto_answer_loss, kto_loss, kto_reference_point, label_rewards, mismatch_answers
from rollouts.algorithms.loss_weights import sample_mean
from rollouts.algorithms.losses import merge_metrics
from rollouts.batches import select_rows
from rollouts.data.collate import collate_samples
from rollouts.types import Sample, TokenOutputs, TrainBatch


def answer(prompt: int, length: int, label: float = 1.0) -> Sample:
    tokens = (1, 2 + prompt, *[20 + 3 * prompt + t for t in range(length)])
    return Sample(tokens=tokens, loss_mask=(0.0, 0.0, *(1.0,) * length), reward=label, group_index=prompt, index=prompt)


def make_case(seed: int, point: float = 0.4) -> tuple[torch.Tensor, TrainBatch]:
    g = torch.Generator().manual_seed(seed)
    batch = collate_samples([answer(i, 1 + i % 3, float(i % 3 != 0)) for i in range(5)])
    columns = {"loss_mask": batch.loss_mask.double(), "rewards": batch.rewards.double()}
    batch = replace(batch, **columns, ref_log_probs=-torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64) * 3)
    batch = replace(batch, values=torch.full_like(batch.loss_mask, point), loss_weights=sample_mean(batch))
    return (-torch.rand(batch.tokens.shape, generator=g, dtype=torch.float64) * 3).requires_grad_(), batch


@given(seed=st.integers(0, 1000), point=st.floats(0, 3), weights=st.sampled_from([(1.0, 1.0), (1.5, 0.5)]))
def test_the_loss_and_its_gradient_are_those_of_the_paper(seed, point, weights):
    log_probs, batch = make_case(seed, point)
    loss = kto_loss(TokenOutputs(log_probs=log_probs), batch, beta=0.3, desirable_weight=weights[0], undesirable_weight=weights[1]).loss
    mask = batch.loss_mask.tolist()
    ratios = [
        oracles.answer_log_prob(row, m) - oracles.answer_log_prob(ref, m)
        for row, ref, m in zip(log_probs, batch.ref_log_probs.tolist(), mask, strict=True)
    ]
    terms = [oracles.kto(x, label > 0, point, 0.3, weights) for x, label in zip(ratios, batch.rewards.tolist(), strict=True)]
    expected = sum(terms) / len(terms)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    found, wanted = (torch.autograd.grad(x, [log_probs])[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@given(cut=st.integers(1, 4))
def test_any_split_gives_the_same_loss_gradient_and_metrics(cut):
    log_probs, batch = make_case(3)
    whole = kto_loss(TokenOutputs(log_probs=log_probs), batch)
    (gradient,) = torch.autograd.grad(whole.loss, [log_probs], retain_graph=True)
    total, slopes, merged = torch.zeros((), dtype=torch.float64), torch.zeros_like(log_probs), []
    for rows in ([*range(cut)], [*range(cut, 5)]):
        part = select_rows(batch, rows)
        width = part.tokens.shape[1]
        found = kto_loss(TokenOutputs(log_probs=log_probs[rows, :width]), part)
        slopes += torch.autograd.grad(found.loss, [log_probs])[0]
        total += found.loss.detach()
        merged.append((found.metrics, int((part.loss_mask > 0).sum())))
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, gradient, rtol=1e-12, atol=1e-12)
    assert merge_metrics(merged) == pytest.approx({name: value.item() for name, value in whole.metrics.items()})


def test_prompts_get_the_answers_of_the_rows_before_them():
    batch = collate_samples([answer(0, 1), answer(1, 3), answer(2, 2)])
    found = mismatch_answers(batch)
    assert [found.tokens[row, : found.lengths[row]].tolist() for row in range(3)] == [[1, 2, 26, 27], [1, 3, 20], [1, 4, 23, 24, 25]]
    assert [row.tolist() for row in found.loss_mask] == [[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 1]]
    cut = mismatch_answers(batch, max_length=4)
    assert cut.lengths.tolist() == [4, 3, 4]


def test_the_reference_point_is_a_mean_of_at_least_zero_without_gradient():
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    log_probs = torch.tensor([[9.0, -1.0, -1.0], [9.0, -1.0, 9.0]], requires_grad=True)
    point = kto_reference_point(log_probs, torch.tensor([[0.0, -2.0, -2.0], [0.0, -2.0, 0.0]]), mask)
    assert point.item() == 1.5 and not point.requires_grad
    assert kto_reference_point(log_probs, torch.zeros(2, 3), mask).item() == 0.0


def test_labels_of_pairs_and_what_is_missing():
    batch = collate_samples([make_row([1, 2, 3]), make_row([1, 2, 4])])
    assert label_rewards(batch).rewards.tolist() == [1.0, 0.0]
    outputs, loss = TokenOutputs(log_probs=torch.zeros(2, 3)), partial(kto_loss, beta=0.2)
    with pytest.raises(AssertionError, match=r"kto_loss needs batch\.ref_log_probs"):
        loss(outputs, batch)
    with pytest.raises(AssertionError, match=r"the reference point in batch.values: see kto_reference_point"):
        loss(outputs, replace(batch, ref_log_probs=torch.zeros(2, 3)))
    with pytest.raises(AssertionError, match="beta is 0, expected more than 0"):
        kto_answer_loss(torch.zeros(1), torch.ones(1, dtype=torch.bool), 0.0, beta=0)

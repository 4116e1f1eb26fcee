"""Distillation: signals of a teacher as advantages and as divergences, against plain formulas, and whatever the split of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from samples import make_batch
from torch import Tensor

from rollouts.algorithms.distillation.divergences import TeacherTops, chunked_divergence, chunked_tops, divergence
from rollouts.algorithms.distillation.signals import divergence_loss, estimate_beside_divergence, estimate_from_teacher, measure_teacher
from rollouts.algorithms.logprobs import LogitTransform, Sampling
from rollouts.algorithms.presets import decoupled, gkd, opd, truncated
from rollouts.backends.factory import create_pytorch_backend, create_reference_backend
from rollouts.batches import select_rows
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError, DataError
from rollouts.testing import create_tiny_model
from rollouts.training.distillation.teachers import ModelTeacher
from rollouts.types import Algorithm, Sample, TokenOutputs

MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])


def whole_divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The definition, over probabilities."""
    p, t = student.softmax(-1), teacher.softmax(-1)
    if beta == 0:
        return (t * (t / p).log()).sum(-1)
    if beta == 1:
        return (p * (p / t).log()).sum(-1)
    m = beta * t + (1 - beta) * p
    return beta * (t * (t / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("transform", [None, LogitTransform(scale=0.5, soft_cap=3.0)])
def test_chunks_have_the_values_and_gradients_of_the_whole_vocabulary(beta: float, transform: LogitTransform | None):
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden, weight, bias = draw(7, 5).requires_grad_(), draw(11, 5).requires_grad_(), draw(11).requires_grad_()
    teacher, heat, upstream = draw(7, 11), draw(7).abs() + 0.5, draw(7)
    logits = hidden @ weight.t() + bias
    logits = (logits if transform is None else transform.apply(logits)) / heat[:, None]
    expected = whole_divergence(logits, teacher, beta)
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias))
    log_probs, ids = teacher.log_softmax(-1).topk(11)
    tops = TeacherTops(ids, log_probs, beta)
    found = chunked_divergence(hidden, weight, tops, bias=bias, temperatures=heat, chunk_size=3, transform=transform)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * upstream).sum(), (hidden, weight, bias)), wanted)


@pytest.mark.parametrize("beta", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_tokens_that_the_teacher_does_not_name_count_as_one(beta: float, k: int):
    generator = torch.Generator().manual_seed(k)
    student = torch.randn(6, 9, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    _, ids = teacher.topk(k)

    def merge(logits: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        named = probs.gather(-1, ids)
        return torch.cat([named, probs.scatter(-1, ids, 0.0).sum(-1, keepdim=True)], -1).log()

    expected = whole_divergence(merge(student), merge(teacher), beta)
    wanted = torch.autograd.grad(expected.sum(), student)
    tops = TeacherTops(ids, teacher.log_softmax(-1).gather(-1, ids), beta)
    found = chunked_divergence(student, torch.eye(9, dtype=torch.float64), tops, chunk_size=4)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), student), wanted)
    assert (found <= whole_divergence(student, teacher, beta) + 1e-12).all(), "merging outcomes loses information"


def test_a_token_without_probability_gives_a_number():
    student = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        found = divergence(student, torch.tensor([[-math.inf, 0.0]]), beta)
        found.sum().backward()
        assert found.isfinite().all()
        assert student.grad is not None and student.grad.isfinite().all()


def test_the_most_probable_tokens_are_those_of_the_whole_logits():
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(9, 4, generator=generator), torch.randn(13, 4, generator=generator)
    heat = torch.rand(9, generator=generator) + 0.5
    found = chunked_tops(hidden, weight, 5, sampling=Sampling(heat), chunk_size=4)
    expected = ((hidden @ weight.t()) / heat[:, None]).log_softmax(-1).topk(5)
    torch.testing.assert_close(found[:, :5], expected.values)
    torch.testing.assert_close(found[:, 5].exp(), 1 - expected.values.exp().sum(-1))
    assert torch.equal(found[:, 6:].long(), expected.indices)
    assert chunked_tops(hidden, weight, 100).shape == (9, 27)
    torch.testing.assert_close(chunked_tops(hidden, weight, 3, vocab_size=8), chunked_tops(hidden, weight[:8], 3))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_rest_of_a_large_vocabulary_is_precise_in_float32(beta: float):
    """Policy and teacher are sure of the K tokens: 1 - sum p would be rounding alone."""
    generator, (n, v, k) = torch.Generator().manual_seed(2), (3, 50_000, 64)
    student, teacher = (torch.randn(n, v, generator=generator) for _ in range(2))
    student[:, :k] += 24.0
    teacher[:, :k] += torch.tensor([[20.0], [24.0], [28.0]])

    def compute(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        own, eye = student.to(kind).requires_grad_(), torch.eye(1, dtype=kind)
        rows, theirs = own.reshape(n, v), teacher.to(kind)
        found, gradients = [], []
        for row in range(n):  # hidden = 1, weight = the logits of a row
            tops = chunked_tops(eye, theirs[row, :, None], k)
            ids, log_probs = tops[:, k + 1 :].long(), theirs[row, None].log_softmax(-1)
            named = log_probs.gather(1, ids)
            rest = log_probs.scatter(1, ids, -math.inf).logsumexp(-1)
            if kind == torch.float32:
                named, rest = tops[:, :k], tops[:, k]
            found.append(chunked_divergence(eye, rows[row, :, None], TeacherTops(ids, named, beta, rest)))
        total = torch.cat(found)
        gradients = torch.autograd.grad(total.sum(), own)[0]
        return total.detach(), gradients

    (value, slope), (exact, exact_slope) = compute(torch.float32), compute(torch.float64)
    torch.testing.assert_close(value.double(), exact, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(slope[:, k:].double(), exact_slope[:, k:], rtol=2e-3, atol=0)


def test_advantages_are_the_log_ratio_of_teacher_and_policy():
    own, theirs = -torch.arange(16.0).reshape(4, 4).double(), -torch.ones(4, 4).double()
    batch = make_batch(MASK.double(), rollout_log_probs=own, teacher_log_probs=theirs)
    plain = estimate_from_teacher(batch).advantages
    assert plain is not None
    torch.testing.assert_close(plain, (theirs - own) * MASK)
    bounded = estimate_from_teacher(batch, coef=0.5, bound=3.0).advantages
    torch.testing.assert_close(bounded, 0.5 * ((theirs - own).clamp(-3, 3) * MASK))
    later = estimate_from_teacher(batch, gamma=0.5).advantages
    assert later is not None
    assert float(later[0, 1]) == float(plain[0, 1] + 0.5 * plain[0, 2] + 0.25 * plain[0, 3])
    old = replace(batch, old_log_probs=theirs)
    assert not estimate_from_teacher(old).advantages.any(), "the trainer's own log-probs come first"  # type: ignore[union-attr]


def test_rewards_are_added_by_their_weight_and_not_read_without():
    columns = {"rollout_log_probs": torch.zeros(4, 4), "teacher_log_probs": torch.zeros(4, 4), "group_ids": torch.tensor([0, 0, 1, 1])}
    batch = make_batch(MASK, rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]), **columns)
    mixed = estimate_from_teacher(batch, reward_coef=2.0).advantages
    torch.testing.assert_close(mixed, MASK * torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None] * 2 * 0.70701, atol=1e-3, rtol=0)
    unknown = replace(batch, rewards=torch.full((4,), math.nan))
    assert not estimate_from_teacher(unknown).advantages.any()  # type: ignore[union-attr]
    assert not opd().reads_rewards
    assert opd(reward_coef=0.1).reads_rewards
    assert not decoupled(gkd()).reads_rewards


def test_settings_out_of_range_are_named():
    for call, name in (
        (partial(opd, coef=-1), "coef"),
        (partial(opd, gamma=2), "gamma"),
        (partial(opd, bound=0), "bound"),
        (partial(gkd, beta=1.5), "beta"),
        (partial(gkd, reward_coef=-0.1), "reward_coef"),
    ):
        with pytest.raises(ConfigError, match=name):
            call()


def test_the_distance_of_a_teacher_is_measured_over_trained_tokens():
    own, theirs = torch.full((4, 4), -1.0), torch.full((4, 4), -1.5)
    theirs[0, 1], theirs[0, 0] = -3.0, math.nan
    batch = make_batch(MASK, rollout_log_probs=own, teacher_log_probs=theirs, trainable=torch.tensor([True, True, True, False]))
    found = measure_teacher(batch)
    assert found["teacher_kl"] == pytest.approx((2.0 + 5 * 0.5) / 6)
    assert found["teacher_doubt_fraction"] == pytest.approx(1 / 6)
    assert measure_teacher(replace(batch, rollout_log_probs=None)) == {}


def test_a_backend_without_divergences_is_named():
    batch = replace(make_batch(MASK), loss_weights=MASK)
    with pytest.raises(DataError, match="pytorch or fsdp"):
        divergence_loss(TokenOutputs(log_probs=MASK), batch)


def test_corrections_weigh_the_divergence():
    divergence = torch.tensor([[0.5, 1.0, math.inf, 2.0]]).requires_grad_()
    batch = replace(make_batch(torch.tensor([[0.0, 1.0, 1.0, 1.0]])), importance_weights=torch.tensor([[9.0, 0.5, 0.0, 2.0]]))
    batch = replace(batch, loss_weights=batch.loss_mask / 4)
    found, metrics = divergence_loss(TokenOutputs(log_probs=torch.zeros(1, 4), divergence=divergence), batch, coef=3.0)
    assert found.item() == pytest.approx(3 * (0.5 * 1 + 2 * 2) / 4)
    found.backward()
    assert divergence.grad is not None and divergence.grad.tolist() == [[0.0, 0.375, 0.0, 1.5]]
    assert float(metrics["importance_weight"]) == pytest.approx(2.5 / 3) and float(metrics["max_importance_weight"]) == 2
    assert float(metrics["dropped_fraction"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("wrap", [truncated, decoupled])
def test_an_algorithm_with_a_correction_weighs_its_divergence(wrap: Callable[[Algorithm], Algorithm]):
    algorithm, known = wrap(gkd()), torch.log(torch.tensor([[1.0, 1.5, 0.25]]))
    columns = {"old_log_probs": known, "prox_log_probs": known, "rollout_log_probs": torch.zeros(1, 3)}
    batch = replace(make_batch(torch.tensor([[0.0, 1.0, 1.0]]), **columns), loss_weights=torch.tensor([[0.0, 0.5, 0.5]]))
    found, _ = algorithm.loss(TokenOutputs(log_probs=known, divergence=torch.tensor([[1.0, 2.0, 4.0]])), batch)
    assert float(found) == pytest.approx(0.5 * 1.5 * 2 + 0.5 * 0.25 * 4)


def draw_batch(rows: int = 6):
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(rows):
        n = int(torch.randint(4, 10, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 32, (n,), generator=generator).tolist())
        mask = (0.0, 0.0, *(1.0,) * (n - 2))
        samples.append(
            Sample(
                tokens=tokens, loss_mask=mask, rollout_log_probs=(0.0, 0.0, *(-3.0,) * (n - 2)), index=i, group_index=i // 2, reward=i % 3
            )
        )
    return samples, collate_samples(samples)


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
async def test_a_divergence_has_one_gradient_whatever_the_micro_batches(reward_coef: float):
    model = partial(create_tiny_model, vocab_size=32, hidden_size=16, num_layers=1)
    algorithm = gkd(beta=0.4, reward_coef=reward_coef)
    teacher = ModelTeacher(backend=create_reference_backend(model(seed=1), num_tops=5))
    samples, batch = draw_batch()
    batch = await teacher.fill(batch, samples, {"teacher_tops"}, max_tokens=12)
    batch = algorithm.estimate(batch)
    batch = replace(batch, loss_weights=algorithm.weigh(batch))
    gradients, losses = [], []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[5], [0, 3], [1, 2, 4]]):
        backend = create_pytorch_backend(model(seed=0), lr=1e-3)
        losses.append(sum([(await backend.forward_backward(select_rows(batch, part), algorithm.loss).result())["loss"] for part in parts]))
        gradients.append({name: p.grad.clone() for name, p in backend.model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert any(gradient.abs().max() > 1e-5 for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


async def test_a_teacher_with_more_embeddings_names_tokens_of_the_policy_alone():
    student, large = (create_tiny_model(vocab_size=size, hidden_size=16, num_layers=1, seed=1) for size in (32, 40))
    samples, batch = draw_batch(2)
    filled = []
    for options in ({}, {"tops_vocab_size": 32}):
        teacher = ModelTeacher(backend=create_reference_backend(large, num_tops=10**6, **options))
        found = await teacher.fill(batch, samples, {"teacher_tops"}, max_tokens=1000)
        found = estimate_beside_divergence(found, beta=0.7)
        filled.append(replace(found, loss_weights=found.loss_mask))
    backend = create_pytorch_backend(student, lr=1e-3)
    with pytest.raises(DataError, match=r"but the policy has 32 embeddings: .*tops_vocab_size=32"):
        await backend.forward_backward(filled[0], divergence_loss).result()
    assert filled[1].teacher_ids is not None and filled[1].teacher_ids.shape[-1] == 32
    assert (await backend.forward_backward(filled[1], divergence_loss).result())["teacher_divergence"] > 0


async def test_the_loss_in_a_model_is_that_of_its_logits():
    student, other = (create_tiny_model(vocab_size=32, hidden_size=16, num_layers=1, seed=seed) for seed in (0, 1))
    samples, batch = draw_batch()
    teacher = ModelTeacher(backend=create_reference_backend(other, num_tops=10**6))
    batch = await teacher.fill(batch, samples, {"teacher_tops", "teacher_log_probs"}, max_tokens=1000)
    assert batch.teacher_ids is not None and batch.teacher_ids.shape == (*batch.tokens.shape, 32)
    batch = estimate_beside_divergence(batch, beta=0.7)
    batch = replace(batch, loss_weights=batch.loss_mask)
    found = await create_pytorch_backend(student, lr=1e-3).forward_backward(batch, divergence_loss, with_entropy=True).result()
    student, other = (create_tiny_model(vocab_size=32, hidden_size=16, num_layers=1, seed=seed) for seed in (0, 1))  # no backend's
    expected, log_probs = 0.0, torch.zeros(batch.tokens.shape)
    with torch.no_grad():
        for row, sample in enumerate(samples):
            tokens = torch.tensor([sample.tokens])
            theirs = other(tokens).logits[0, :-1]
            each = whole_divergence(student(tokens).logits[0, :-1], theirs, 0.7)
            expected += float((each * torch.tensor(sample.loss_mask[1:])).sum())
            log_probs[row, 1 : len(sample.tokens)] = theirs.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    assert found["loss"] == pytest.approx(expected, rel=1e-4)
    assert found["teacher_divergence"] == pytest.approx(expected / float(batch.loss_mask.sum()), rel=1e-4)
    torch.testing.assert_close(batch.teacher_log_probs * batch.loss_mask, log_probs * batch.loss_mask, atol=1e-4, rtol=1e-4)

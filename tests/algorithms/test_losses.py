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
from oracles import losses as oracles_losses

from rollouts.algorithms.corrections import decoupled_ppo_loss
from rollouts.algorithms.kl import abs_kl, bounded, k1, k2, k3, straight_through
from rollouts.algorithms.loss_weights import fixed_length_mean, group_token_mean, sample_mean, sample_sum, scaled, token_mean
from rollouts.algorithms.losses import (
    KLTerm,
    clipped_policy_loss,
    compute_policy_loss,
    compute_value_loss,
    dft_loss,
    distillation_loss,
    entropy_loss,
    gmpo_policy_loss,
    grpo_loss,
    kl_cov_policy_loss,
    merge_metrics,
    policy_loss,
    ppo_loss,
    reinforce_loss,
    sft_loss,
    total_loss,
    value_loss,
)
from rollouts.algorithms.presets import chain, dapo, dr_grpo, grpo, reinforce, rloo
from rollouts.algorithms.surrogates import (
    capped,
    cispo,
    clipped,
    dppo,
    dro,
    importance_weighted,
    inside_binary_kl,
    inside_tv,
    penalized_ratio,
    sapo,
    sequence_mean_ratio,
    sequence_ratio,
    sequence_sum_ratio,
    token_ratio,
    vespo,
)
from rollouts.algorithms.surrogates import reinforce as reinforce_surrogate
from rollouts.batches import select_rows
from rollouts.types import TokenOutputs, TrainBatch


def draw_loss_inputs(seed: int = 0, rows: int = 6, width: int = 7, num_groups: int = 2) -> tuple[torch.Tensor, TrainBatch]:
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
        selected=draw() > 0.5,
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
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=AGGREGATIONS[name](batch))
    loss, _ = clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch, low=0.2, high=0.3, dual=dual, kl=KLTerm(estimate=kl, coef=0.1))
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
    "sapo": sapo,
    "dro": dro,
    "vespo": vespo,
    "dppo": partial(dppo, low=0.1, high=0.1),
    "dppo_kl": partial(dppo, low=0.02, high=0.02, inside=inside_binary_kl),
    "penalized_ratio": partial(penalized_ratio, inside=partial(inside_tv, low=0.1, high=0.1)),
}


def loss_and_gradient(log_probs, batch, loss_fn):
    leaf = log_probs.detach().clone().requires_grad_()
    loss, metrics = loss_fn(TokenOutputs(log_probs=leaf, values=leaf * 2, entropy=leaf.abs()), batch)
    loss.backward()
    return loss.detach(), leaf.grad, {k: float(v) for k, v in metrics.items()}


def never_far(log_probs, batch):
    """A weight of the policy term that depends on the current policy."""
    return (log_probs - batch.rollout_log_probs).abs() < 0.5


LOSSES = {
    **{name: partial(policy_loss, surrogate=s, kl=KLTerm(estimate=k3, coef=0.1), entropy_coef=0.01) for name, s in SURROGATES.items()},
    "sequence": partial(policy_loss, surrogate=clipped, ratio=sequence_ratio),
    "sequence_mean": partial(policy_loss, surrogate=clipped, ratio=sequence_mean_ratio),
    "sequence_sum": partial(policy_loss, surrogate=vespo, ratio=sequence_sum_ratio),
    "capped": partial(clipped_policy_loss, ratio=capped(token_ratio, cap=1.5), kl=KLTerm(bounded(k3, value=1.0), 0.1, unbiased=True)),
    "reweighed": partial(policy_loss, surrogate=clipped, reweigh=never_far, kl=KLTerm(estimate=straight_through(k1), coef=0.1)),
    "gmpo": partial(gmpo_policy_loss, kl=KLTerm(estimate=k2, coef=0.1), entropy_coef=0.01),
    "kl_cov": partial(kl_cov_policy_loss, coef=0.5),
    "distillation": distillation_loss,
    "entropy": partial(entropy_loss, coef=0.3),
    "sft": sft_loss,
    "dft": dft_loss,
    "value": value_loss,
    "value_huber": partial(value_loss, huber=0.5, factor=1.0),
    "value_plain": partial(value_loss, clip=None),
}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30, -1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_places_changes_nothing_bit_for_bit(name, garbage):
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=token_mean(batch), importance_weights=batch.loss_mask * 0.7)
    clean = loss_and_gradient(log_probs, batch, LOSSES[name])
    off = batch.loss_mask == 0

    def spoil(x):
        return torch.where(off, garbage, x)

    columns = ("rollout_log_probs", "ref_log_probs", "advantages", "importance_weights", "values", "returns")
    dirty = replace(batch, selected=batch.selected ^ off, **{c: spoil(getattr(batch, c)) for c in columns})
    loss, gradient, metrics = loss_and_gradient(spoil(log_probs.detach()), dirty, LOSSES[name])
    assert torch.equal(loss, clean[0])
    assert torch.equal(gradient, clean[1])
    assert metrics == clean[2]
    assert float(gradient[off].abs().sum()) == 0


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 5), how=st.sampled_from(sorted(AGGREGATIONS)))
def test_micro_batches_row_order_and_padding_never_change_loss_or_gradient(name, seed, cut, how):
    log_probs, batch = draw_loss_inputs(seed)
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


WHOLE = {  # the aggregation of a part of a step, given the numbers of the whole
    "token_mean": lambda step: partial(token_mean, num_tokens=float(step.loss_mask.sum())),
    "sample_mean": lambda step: partial(sample_mean, num_rows=step.num_rows),
    "sample_sum": lambda step: partial(sample_sum, num_rows=step.num_rows),
    "group_token_mean": lambda step: partial(group_token_mean, num_groups=2),
    "fixed_length_mean": lambda step: partial(fixed_length_mean, length=5, num_rows=step.num_rows),
}


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(LOSSES)))
def test_ranks_that_weigh_their_own_rows_add_up_to_the_step(how, num_ranks, seed, name):
    log_probs, batch = draw_loss_inputs(seed, rows=8)
    whole, gradient, _ = loss_and_gradient(log_probs, replace(batch, loss_weights=AGGREGATIONS[how](batch)), LOSSES[name])
    weigh = WHOLE[how](batch)
    if how == "group_token_mean":  # a group lies on one rank
        num_ranks = 2
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(num_ranks):
        rows = list(range(rank, 8, num_ranks))
        shard = select_rows(batch, rows)
        width = shard.tokens.shape[1]
        loss, part, _ = loss_and_gradient(log_probs[rows, :width], replace(shard, loss_weights=weigh(shard)), LOSSES[name])
        total = total + loss
        torch.testing.assert_close(part, gradient[rows, :width])
        averaged = partial(scaled, weigh=weigh, factor=num_ranks)(shard)
        torch.testing.assert_close(averaged / num_ranks, weigh(shard))
    torch.testing.assert_close(total, whole)


@given(
    seed=st.integers(0, 10**6),
    clip=st.sampled_from([None, 0.05, 0.5]),
    huber=st.sampled_from([None, 0.1, 1.0]),
    factor=st.sampled_from([0.5, 1.0]),
)
def test_the_value_loss_matches_the_loop_in_value_and_gradient(seed, clip, huber, factor):
    values, batch = draw_loss_inputs(seed)
    batch = replace(batch, loss_weights=token_mean(batch))
    loss, metrics = value_loss(
        TokenOutputs(log_probs=torch.zeros_like(values), values=values), batch, clip=clip, huber=huber, factor=factor
    )
    theirs, clipped_tokens = torch.zeros((), dtype=torch.float64), 0
    for b, row in enumerate(values):
        for t in oracles_losses.on(batch.loss_mask[b].tolist()):
            old, target = float(batch.values[b, t]), float(batch.returns[b, t])
            token = oracles_losses.value_loss(row[t], old, target, clip, huber)
            clipped_tokens += oracles_losses.constant(token) > float(oracles_losses.huber(row[t].detach() - target, huber)) + 1e-12
            theirs = theirs + factor * batch.loss_weights[b, t] * token
    torch.testing.assert_close(loss, theirs, rtol=1e-10, atol=1e-10)
    (ours_grad,), (theirs_grad,) = (torch.autograd.grad(x, values) for x in (loss, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-10, atol=1e-10)
    if clip is not None:
        assert float(metrics["value_clip_fraction"]) == pytest.approx(clipped_tokens / float(batch.loss_mask.sum()))


def test_gradients_of_whole_losses_are_those_of_their_values():
    log_probs, batch = draw_loss_inputs(rows=3, width=4)
    batch = replace(batch, loss_weights=sample_mean(batch))
    for name in ("importance_weighted", "clipped", "sapo", "dro", "sequence_mean", "gmpo", "kl_cov", "sft", "value", "value_huber"):

        def value(x, loss=LOSSES[name]):
            return loss(TokenOutputs(log_probs=x, values=x * 2, entropy=x.square()), batch).loss

        assert torch.autograd.gradcheck(value, (log_probs,)), name


def test_gmpo_is_its_paper_on_whole_rows_and_averages_importance_weights_geometrically():
    log_probs, batch = draw_loss_inputs(5)
    advantages = batch.advantages[:, :1].expand_as(batch.advantages)
    batch = replace(batch, advantages=advantages, loss_weights=sample_mean(batch))
    weights = torch.rand(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    plain = gmpo_policy_loss(TokenOutputs(log_probs=log_probs), batch, low=0.2, high=0.3)
    weighted = gmpo_policy_loss(TokenOutputs(log_probs=log_probs), replace(batch, importance_weights=weights), low=0.2, high=0.3)
    expected = [torch.zeros((), dtype=torch.float64)] * 2
    for b, row in enumerate(log_probs):
        mask = batch.loss_mask[b].tolist()
        term = oracles_losses.gmpo_row(list(row), batch.rollout_log_probs[b].tolist(), mask, advantages[b].tolist(), 0.2, 0.3) / 6
        mean = math.prod(float(weights[b, t]) for t in oracles_losses.on(mask)) ** (1 / len(oracles_losses.on(mask)))
        expected = [expected[0] + term, expected[1] + mean * term]
    torch.testing.assert_close(plain.loss, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(weighted.loss, expected[1], rtol=1e-8, atol=1e-8)
    (ours,), (theirs,) = (torch.autograd.grad(x, log_probs) for x in (plain.loss, expected[0]))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    log_ratio, on = (log_probs - batch.rollout_log_probs).detach(), batch.loss_mask > 0
    outside = ((log_ratio > 0.3) & (advantages > 0)) | ((log_ratio < -0.2) & (advantages < 0))
    assert float(plain.metrics["clip_fraction"]) == pytest.approx(float(outside[on].double().mean()))


def test_the_clip_of_gmpo_is_in_nats():
    old, advantages = torch.full((2, 2), -2.0).double(), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double()
    log_probs = old + torch.tensor([[0.55, 0.65], [-0.55, -0.65]]).double()
    _, batch = draw_loss_inputs(rows=2, width=2)
    batch = replace(batch, loss_mask=torch.ones(2, 2).double(), rollout_log_probs=old, advantages=advantages)
    metrics = gmpo_policy_loss(TokenOutputs(log_probs=log_probs), replace(batch, loss_weights=token_mean(batch)), low=0.6, high=0.6).metrics
    assert float(metrics["clip_fraction_low"]) == 0.25
    assert float(metrics["clip_fraction_high"]) == 0.25


@pytest.mark.parametrize("kl", KL, ids=lambda f: f.__name__)
def test_the_unbiased_kl_is_multiplied_by_the_ratio_with_its_gradient(kl):
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=token_mean(batch))
    loss = clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch, kl=KLTerm(estimate=kl, coef=0.7, unbiased=True)).loss
    estimator = getattr(oracles_losses, kl.__name__)
    theirs = clipped_policy_loss(TokenOutputs(log_probs=log_probs), batch).loss
    for b, row in enumerate(log_probs):
        for t in oracles_losses.on(batch.loss_mask[b].tolist()):
            ratio = (row[t] - batch.rollout_log_probs[b, t]).exp()
            theirs = theirs + 0.7 * batch.loss_weights[b, t] * ratio * estimator(row[t], float(batch.ref_log_probs[b, t]))
    torch.testing.assert_close(loss, theirs, rtol=1e-10, atol=1e-10)
    (ours_grad,), (theirs_grad,) = (torch.autograd.grad(x, log_probs) for x in (loss, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_dropped_token_may_have_any_ratio(name):
    """float32 overflows at e^89; a token of weight 0 neither enters the loss nor turns it into NaN."""
    log_probs, batch = draw_loss_inputs()
    far = torch.zeros(6, 7, dtype=torch.bool)
    far[:, 1] = True
    weights = torch.where(far, 0.0, 1.0)
    batch = replace(batch, loss_weights=token_mean(batch))
    calm = loss_and_gradient(log_probs, replace(batch, importance_weights=weights), partial(policy_loss, surrogate=SURROGATES[name]))
    wild = replace(batch, rollout_log_probs=torch.where(far, -800.0, batch.rollout_log_probs))
    for loss in (
        partial(policy_loss, surrogate=SURROGATES[name], reweigh=lambda *_: weights),
        lambda outputs, b: policy_loss(outputs, replace(b, importance_weights=weights), surrogate=SURROGATES[name]),
    ):
        found = loss_and_gradient(log_probs, wild, loss)
        assert torch.equal(found[0], calm[0])
        assert torch.equal(found[1], calm[1])


def test_compute_value_loss_is_the_clipped_loss_by_hand():
    vpreds, returns = torch.tensor([[0.5, 0.9, 7.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    old, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    loss, metrics = compute_value_loss(vpreds, returns, old, mask, cliprange_value=0.2)
    assert float(loss) == pytest.approx(0.5 * (0.8**2 + 0.9**2) / 2)
    assert float(metrics["value_clip_fraction"]) == 0.5
    assert float(compute_value_loss(vpreds, returns, None, mask, cliprange_value=None).loss) == pytest.approx(0.5 * (0.5**2 + 0.9**2) / 2)
    assert float(compute_value_loss(vpreds, returns, old, torch.zeros(1, 3)).loss) == 0


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("cap", [None, 1.1])
def test_decoupled_ppo_matches_the_loop_in_value_and_gradient(dual, proximal, cap):
    log_probs, batch = draw_loss_inputs(9)
    old, prox, mask = batch.rollout_log_probs, batch.ref_log_probs, batch.loss_mask
    if not proximal and cap is not None:
        with pytest.raises(AssertionError, match=r"behav_imp_weight_cap is 1\.1, but there are no proximal_log_probs"):
            decoupled_ppo_loss(log_probs, old, batch.advantages, mask, behav_imp_weight_cap=cap)
        return
    loss, _ = decoupled_ppo_loss(log_probs, old, batch.advantages, mask, 0.2, dual, prox if proximal else None, cap)
    theirs = torch.zeros((), dtype=torch.float64)
    for b, row in enumerate(log_probs):
        for t in oracles_losses.on(mask[b].tolist()):
            anchor = float(prox[b, t]) if proximal else float(old[b, t])
            weight = math.exp(anchor - float(old[b, t]))
            if cap is None or weight <= cap:
                theirs = theirs + weight * oracles_losses.clipped(row[t] - anchor, row[t], float(batch.advantages[b, t]), 0.2, 0.2, dual)
    theirs = theirs / float(mask.sum())
    torch.testing.assert_close(loss, theirs, rtol=1e-10, atol=1e-10)
    (ours_grad,), (theirs_grad,) = (torch.autograd.grad(x, log_probs) for x in (loss, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-10, atol=1e-10)


def test_a_coefficient_in_the_batch_replaces_that_of_the_loss():
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=token_mean(batch))
    outputs = TokenOutputs(log_probs=log_probs)
    given = policy_loss(outputs, replace(batch, kl_coef=torch.full((6,), 0.3).double()), surrogate=clipped, kl=KLTerm(k3, 9.0))
    torch.testing.assert_close(given.loss, policy_loss(outputs, batch, surrogate=clipped, kl=KLTerm(estimate=k3, coef=0.3)).loss)


def test_importance_weights_and_masks_of_the_policy_act_on_the_policy_term_only():
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=token_mean(batch))
    outputs = TokenOutputs(log_probs=log_probs, entropy=log_probs.abs())
    rest = {"kl": KLTerm(k3, 0.2), "entropy_coef": 0.1}
    nothing = policy_loss(outputs, replace(batch, importance_weights=torch.zeros(6, 7)), surrogate=clipped, **rest).loss
    silent = policy_loss(outputs, replace(batch, advantages=torch.zeros(6, 7).double()), surrogate=clipped, **rest).loss
    torch.testing.assert_close(nothing, silent)
    reweighed = policy_loss(outputs, batch, surrogate=clipped, reweigh=lambda p, _: torch.zeros(6, 1), **rest).loss
    torch.testing.assert_close(reweighed, silent)


def test_parts_of_a_total_add_up_and_keep_their_metrics_apart():
    log_probs, batch = draw_loss_inputs()
    batch = replace(batch, loss_weights=token_mean(batch))
    outputs = TokenOutputs(log_probs=log_probs)
    policy, sft = policy_loss(outputs, batch, surrogate=clipped), sft_loss(outputs, batch)
    total = total_loss({"policy": policy, "sft": sft})
    torch.testing.assert_close(total.loss, policy.loss + sft.loss)
    assert {"log_prob_mean/policy", "log_prob_mean/sft"} <= set(total.metrics)
    with pytest.raises(AssertionError, match="at least one"):
        total_loss({})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (partial(clipped_policy_loss, low=1.0), r"low is 1\.0"),
        (partial(gmpo_policy_loss, low=-0.1), r"low is -0\.1"),
        (partial(kl_cov_policy_loss, coef=-1.0), r"coef is -1\.0"),
        (partial(value_loss, clip=0.0), r"clip is 0\.0"),
        (partial(value_loss, huber=-1.0), r"huber is -1\.0"),
        (partial(value_loss, factor=0.0), r"factor is 0\.0"),
    ],
)
def test_hyper_parameters_out_of_range_say_which_and_what(loss, message):
    log_probs, batch = draw_loss_inputs()
    with pytest.raises(AssertionError, match=message):
        loss(TokenOutputs(log_probs=log_probs, values=log_probs), replace(batch, loss_weights=token_mean(batch)))


def test_dft_loss_matches_the_loop_in_value_and_gradient():
    log_probs, batch = draw_loss_inputs(seed=3)
    loss = dft_loss(TokenOutputs(log_probs=log_probs), replace(batch, loss_weights=token_mean(batch))).loss
    expected = oracles.dft_loss(log_probs, batch.loss_mask.tolist())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    found, wanted = (torch.autograd.grad(x, [log_probs])[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens():
    g = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(3, 6, 11, generator=g), torch.randint(0, 11, (3, 6), generator=g)
    _, batch = draw_loss_inputs(rows=3, width=6)
    batch = replace(batch, tokens=tokens, loss_weights=token_mean(batch), advantages=torch.ones(3, 6))
    from rollouts.algorithms.logprobs import token_log_probs

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
    found = grpo_loss(logits, labels, mask, advantages)
    assert float(found.loss) == pytest.approx(expected, abs=1e-6)
    assert not {"ratio_mean", "approx_kl"} & set(found.metrics), "there is no old policy to compare with"
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


def test_approx_kl_of_a_small_update_is_measured_and_not_rounded_to_zero():
    log_ratio = torch.tensor([[2e-5, -3e-5, 1e-4, -1.2e-4, 0.7]])
    for width in (4, 5):
        found = compute_policy_loss(torch.zeros(1, width), log_ratio[:, :width], torch.ones(1, width), torch.ones(1, width), clip_ratio=0.2)
        wide = log_ratio[:, :width].double()
        expected = float((wide.expm1() - wide).mean())
        assert float(found[1]["approx_kl"]) == pytest.approx(expected, rel=1e-4)


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
    _, batch = draw_loss_inputs()
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    for weigh in AGGREGATIONS.values():
        assert float(weigh(empty).abs().sum()) == 0


def test_weights_leave_out_rows_that_are_not_trainable_and_scale_with_fractions():
    _, batch = draw_loss_inputs()
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
    log_probs, batch = draw_loss_inputs()
    outputs = TokenOutputs(log_probs=log_probs)
    with pytest.raises(AssertionError, match="loss_weights"):
        sft_loss(outputs, batch)
    weighted = replace(batch, loss_weights=token_mean(batch))
    for column, needs in (("advantages", {}), ("ref_log_probs", {"kl": KLTerm(k3)}), ("rollout_log_probs", {})):
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
    log_probs, batch = draw_loss_inputs(3)
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
    assert float(loss.detach()) == pytest.approx(oracles.aggregate(rows, batch.loss_mask.tolist(), how, length=5), abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_are_values(name):
    algorithm = ALGORITHMS[name][0]
    copy = pickle.loads(pickle.dumps(algorithm))
    assert copy.requires == algorithm.requires
    assert repr(copy) == repr(algorithm)
    assert "lambda" not in repr(algorithm)
    assert {f.name for f in fields(algorithm)} == {"estimate", "weigh", "loss", "requires", "loss_only", "reads_rewards", "compares_pairs"}


def test_a_kl_term_asks_for_a_reference_and_its_absence_does_not():
    assert "ref_log_probs" in grpo(kl_coef=0.04).requires
    assert "ref_log_probs" not in grpo().requires
    _, batch = draw_loss_inputs()
    double = chain(grpo().estimate, lambda b: replace(b, advantages=2 * b.advantages))
    torch.testing.assert_close(double(batch).advantages, 2 * grpo().estimate(batch).advantages)


def test_the_sequence_ratio_is_the_geometric_mean_with_the_gradient_of_each_token():
    log_probs, batch = draw_loss_inputs()
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

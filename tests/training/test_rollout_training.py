"""One rollout batch: the origin of each column, the split of rows, and steps that anchor their ratio to themselves."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from rollouts.algorithms.estimators import estimate_group_relative
from rollouts.algorithms.kl import k1
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import clipped_policy_loss, policy_loss, sft_loss
from rollouts.algorithms.presets import (
    chain,
    dapo,
    decoupled,
    gigpo,
    gpg,
    grpo,
    opo,
    ppo,
    recomputed,
    reinforce,
    reinforce_plus_plus,
    remax,
    rloo,
    truncated,
)
from rollouts.algorithms.surrogates import clipped
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend
from rollouts.config import RLTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError, DataError
from rollouts.seeds import derive_seed
from rollouts.testing import FakeBackend, create_tiny_model
from rollouts.training.rl_run import resolve_algorithm
from rollouts.training.rollout_batch import UpdatePlan, columns_from_loss, deal_minibatches, summarize_values, train_on_rollouts
from rollouts.types import Algorithm, Sample, TrainBatch, Turn


def draw_rollouts(rows: int = 8, untrainable: tuple[int, ...] = (), masked: tuple[int, ...] = (), seed: int = 0) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(rows):
        n = int(torch.randint(3, 12, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 64, (n,), generator=generator).tolist())
        mask = (0.0,) * n if i in masked else (0.0, *(1.0,) * (n - 1))
        samples.append(
            Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=(0.0, *(-4.0,) * (n - 1)), index=i, group_index=i // 4,
                   reward=float(derive_seed(*tokens) % 3), trainable=i not in untrainable)
        )  # fmt: skip
    return collate_samples(samples)


ANCHORED = Algorithm(
    estimate=estimate_group_relative,
    weigh=token_mean,
    loss=partial(clipped_policy_loss, low=0.2, high=0.2),
    requires=frozenset({"old_log_probs", "prox_log_probs"}),
    loss_only=frozenset({"old_log_probs", "prox_log_probs"}),
)


def count(backend: FakeBackend, method: str) -> int:
    return sum(call.method == method for call in backend.calls)


# log-probs from the pass that is trained on


@pytest.mark.parametrize("max_tokens", [10_000, 20])
@pytest.mark.parametrize("algorithm", [ANCHORED, recomputed(grpo(kl_coef=0.1)), recomputed(ppo())], ids=["both", "grpo+kl", "ppo"])
async def test_a_single_update_needs_no_forward_pass_and_gives_the_same_numbers(algorithm: Algorithm, max_tokens: int):
    results = []
    for loss_only in (algorithm.loss_only, frozenset()):
        # a large eps: else the rounding of a gradient near 0 decides the direction of a whole step
        backend, reference = (create_pytorch_backend(create_tiny_model(seed=seed), lr=1e-2, eps=1e-3) for seed in (0, 5))
        critic = create_critic_backend(create_tiny_model(seed=1), lr=1e-2) if "values" in algorithm.requires else None
        metrics = await train_on_rollouts(
            backend,
            draw_rollouts(),
            replace(algorithm, loss_only=loss_only),
            plan=UpdatePlan(max_tokens_per_microbatch=max_tokens),
            reference=reference,
            critic=critic,
        )
        results.append((metrics, await backend.get_weights().result()))
    (saved, weights), (full, expected) = results
    if "reference_kl" in saved:  # of rollout_log_probs, which this batch made up, and of the forward pass
        assert saved.pop("reference_kl") != full.pop("reference_kl")
    assert saved == pytest.approx(full, abs=1e-6, rel=1e-5)
    assert saved["ratio_mean"] == 1.0
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "options", "passes"),
    [
        ({}, {}, 0),
        ({}, {"num_minibatches": 2}, 1),
        ({}, {"num_epochs": 2}, 1),
        ({"loss_only": frozenset({"old_log_probs"})}, {}, 1),
        ({"loss_only": frozenset()}, {}, 1),
        ({"requires": frozenset({"prox_log_probs"}), "loss_only": frozenset({"prox_log_probs"})}, {}, 0),
        ({"requires": frozenset({"rollout_log_probs"}), "loss_only": frozenset()}, {"num_epochs": 3}, 0),
    ],
)
async def test_the_policy_is_asked_at_most_once_and_only_where_it_must_be(changes: dict, options: dict, passes: int):
    backend = FakeBackend()
    await train_on_rollouts(backend, draw_rollouts(), replace(ANCHORED, **changes), UpdatePlan(**options))
    assert count(backend, "forward") == passes
    assert count(backend, "optim_step") == options.get("num_epochs", 1) * options.get("num_minibatches", 1)


def test_a_measured_kl_reads_the_old_log_probs():
    assert columns_from_loss(ANCHORED, num_updates=1) == {"old_log_probs", "prox_log_probs"}
    assert columns_from_loss(ANCHORED, num_updates=1, measures_kl=True) == set()
    assert columns_from_loss(grpo(), num_updates=1, measures_kl=True) == set()


async def test_the_anchor_of_several_updates_is_the_policy_before_the_first():
    anchors = []

    def loss(outputs, batch):
        anchors.append(batch.old_log_probs[batch.loss_mask > 0])
        return ANCHORED.loss(outputs, batch)

    await train_on_rollouts(FakeBackend(), draw_rollouts(), replace(ANCHORED, loss=loss), plan=UpdatePlan(num_epochs=2, num_minibatches=2))
    assert len(anchors) == 4
    assert set(torch.cat(anchors).tolist()) == {-1.0}  # the fake policy's log-prob before any update; afterwards -1/2, -1/3, ...


# rows


async def test_rows_that_are_not_trained_on_count_in_the_estimate_and_cost_nothing():
    backend, seen = FakeBackend(), []

    def estimate(batch: TrainBatch) -> TrainBatch:
        seen.append((batch.num_rows, batch.old_log_probs))
        return estimate_group_relative(batch)

    batch = draw_rollouts(untrainable=(3, 7), masked=(1,))
    await train_on_rollouts(backend, batch, replace(ANCHORED, estimate=estimate, loss_only=frozenset()), plan=UpdatePlan(num_minibatches=2))
    (rows, old), *_ = seen
    assert rows == 8
    assert old[[1, 3, 7]].abs().sum() == 0
    assert sum(call.arguments["rows"] for call in backend.calls if call.method == "forward") == 5
    assert sum(call.arguments["rows"] for call in backend.calls if call.method == "forward_backward") == 5


@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 8])
def test_minibatches_share_trained_rows_evenly_and_every_row_is_in_one(num_minibatches: int):
    batch = replace(draw_rollouts(12, untrainable=(3, 7, 11), masked=(1,)), rewards=torch.arange(12.0))
    parts = deal_minibatches(batch, num_minibatches, seed=4)
    assert len(parts) == num_minibatches
    assert sorted(torch.cat([part.rewards for part in parts]).tolist()) == list(range(12))
    trained = [int((part.loss_mask > 0).any(1).sum()) for part in parts]
    assert max(trained) - min(trained) <= 1
    assert sum(trained) == 8


def test_there_are_no_more_minibatches_than_trained_rows():
    parts = deal_minibatches(draw_rollouts(8, masked=(0, 1, 2, 3, 4, 5)), 4, seed=0)
    assert [int((part.loss_mask > 0).any(1).sum()) for part in parts] == [1, 1]


async def test_a_batch_without_a_trained_token_changes_nothing():
    batch = draw_rollouts()
    backend = FakeBackend()
    metrics = await train_on_rollouts(backend, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), ANCHORED)
    assert metrics == {"num_tokens": 0.0, "num_updates": 0.0, "num_bad_all_masked": 1.0}
    assert backend.calls == []


async def test_advantages_of_an_own_estimator_that_are_not_finite_are_refused_before_any_update():
    def estimate(batch):
        return replace(batch, advantages=torch.where(batch.loss_mask > 0, torch.nan, 0.0))

    backend = FakeBackend()
    with pytest.raises(DataError, match="the advantage of row 0"):
        await train_on_rollouts(backend, draw_rollouts(), replace(grpo(), estimate=estimate))
    assert count(backend, "forward_backward") == 0


async def test_a_batch_without_a_column_that_comes_with_the_samples_is_refused():
    with pytest.raises(DataError, match="rollout_log_probs"):
        await train_on_rollouts(FakeBackend(), replace(draw_rollouts(), rollout_log_probs=None), grpo())


@pytest.mark.parametrize(
    "algorithm",
    [rloo(), reinforce(), opo(), gpg(), remax(), recomputed(grpo()), recomputed(grpo(kl_coef=0.1)), recomputed(ppo(kl_coef=0.1))],
    ids=["rloo", "reinforce", "opo", "gpg", "remax", "recomputed", "recomputed with KL", "recomputed ppo with KL"],
)
async def test_an_algorithm_that_does_not_read_the_engines_log_probs_trains_without_them_and_just_the_same(algorithm: Algorithm):
    results = []
    with_engine = draw_rollouts(untrainable=(3, 7))
    for batch in (with_engine, replace(with_engine, rollout_log_probs=None)):
        backend, reference = (create_pytorch_backend(create_tiny_model(seed=seed), lr=1e-2) for seed in (0, 5))
        critic = create_critic_backend(create_tiny_model(seed=1), lr=1e-2) if "values" in algorithm.requires else None
        metrics = await train_on_rollouts(backend, batch, algorithm, reference=reference, critic=critic)
        results.append((metrics, await backend.get_weights().result()))
    (full, expected), (bare, weights) = results
    assert "rollout_log_probs" not in algorithm.requires
    about_the_ratio = {"approx_kl", "ratio_mean", "max_ratio", "min_ratio"}
    assert about_the_ratio <= set(full)
    assert set(full) - set(bare) <= about_the_ratio | {"rollout_kl", "reference_kl"}
    assert about_the_ratio <= set(bare) or "old_log_probs" not in algorithm.requires
    assert {name: bare[name] for name in ("loss", "grad_norm")} == {name: full[name] for name in ("loss", "grad_norm")}
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def read_rollouts(log_probs: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    assert batch.rollout_log_probs is not None
    return batch.rollout_log_probs.exp()


@pytest.mark.parametrize(
    "algorithm",
    [
        grpo(),
        truncated(recomputed(grpo())),
        recomputed(decoupled(grpo())),
        recomputed(replace(grpo(), loss=partial(policy_loss, surrogate=clipped, reweigh=read_rollouts))),
        recomputed(replace(grpo(), estimate=lambda batch: batch)),
        recomputed(replace(grpo(), loss=lambda outputs, batch: grpo().loss(outputs, batch))),
    ],
)
def test_the_engines_log_probs_are_required_wherever_something_may_read_them(algorithm: Algorithm):
    assert "rollout_log_probs" in algorithm.requires


# KL control


async def test_a_kl_coefficient_fills_its_column_and_the_kl_is_measured_on_trained_rows():
    coefficients = []
    batch = draw_rollouts(untrainable=(3,))

    def loss(outputs, batch):
        coefficients.append(batch.kl_coef)
        return grpo(kl_coef=1.0).loss(outputs, batch)

    reference = FakeBackend(name="reference")
    reference.num_updates = 1  # log-prob -1/2 everywhere
    metrics = await train_on_rollouts(
        FakeBackend(), batch, replace(grpo(kl_coef=1.0), loss=loss), reference=reference, plan=UpdatePlan(kl_coef=0.25)
    )
    assert torch.cat(coefficients).tolist() == [0.25] * 7
    assert metrics["kl_coef"] == 0.25
    assert metrics["reference_kl"] == pytest.approx(float(k1(torch.tensor(-4.0), torch.tensor(-0.5))))
    anchored = recomputed(grpo(kl_coef=1.0))
    metrics = await train_on_rollouts(FakeBackend(), batch, anchored, reference=reference, plan=UpdatePlan(kl_coef=0.25))
    assert metrics["reference_kl"] == pytest.approx(-1.0 + 0.5)


async def test_without_a_coefficient_the_kl_is_measured_all_the_same_and_no_column_filled():
    reference = FakeBackend(name="reference")
    reference.num_updates = 1  # log-prob -1/2 everywhere
    seen = []

    def loss(outputs, batch):
        seen.append((batch.kl_coef, batch.old_log_probs is None))
        return grpo(kl_coef=1.0).loss(outputs, batch)

    for wrap, measured, passes in ((lambda a: a, -4.0, 0), (recomputed, -4.0, 0)):
        backend = FakeBackend()
        algorithm = wrap(replace(grpo(kl_coef=1.0), loss=loss))
        metrics = await train_on_rollouts(backend, draw_rollouts(), algorithm, reference=reference)
        assert metrics["reference_kl"] == pytest.approx(measured + 0.5)
        assert "kl_coef" not in metrics
        assert count(backend, "forward") == passes
    assert seen == [(None, True), (None, False)]
    metrics = await train_on_rollouts(
        FakeBackend(), draw_rollouts(), recomputed(grpo(kl_coef=1.0)), plan=UpdatePlan(num_minibatches=2), reference=reference
    )
    assert metrics["reference_kl"] == pytest.approx(-1.0 + 0.5)  # the forward pass is there, so its numbers are taken


async def test_a_kl_that_cannot_be_measured_is_left_out_and_refused_to_a_controller():
    batch, reference = replace(draw_rollouts(), rollout_log_probs=None), FakeBackend(name="reference")
    algorithm = replace(grpo(kl_coef=1.0), requires=frozenset({"ref_log_probs"}), loss=lambda outputs, batch: sft_loss(outputs, batch))
    assert "reference_kl" not in await train_on_rollouts(FakeBackend(), batch, algorithm, reference=reference)
    with pytest.raises(DataError, match=r"KL controller .* no rollout_log_probs"):
        await train_on_rollouts(FakeBackend(), batch, algorithm, reference=reference, plan=UpdatePlan(kl_coef=0.5))


# a scalar baseline


@pytest.mark.parametrize(
    "algorithm",
    [ppo(), remax(), opo(), gpg(), reinforce_plus_plus(kl_coef=0.0), replace(grpo(), estimate=chain(estimate_group_relative, list)),
     replace(grpo(), estimate=lambda batch: batch)],
)  # fmt: skip
def test_a_scalar_baseline_is_refused_where_it_would_throw_more_away_than_a_baseline(algorithm: Algorithm):
    with pytest.raises(
        ConfigError, match=r"baseline is 0.5, but the algorithm's estimator, \S+, does more .* leave the baseline \(--rl.baseline\) out"
    ):
        resolve_algorithm(RLTrainingConfig(algorithm=algorithm, baseline=0.5))
    assert resolve_algorithm(RLTrainingConfig(algorithm=algorithm)) is algorithm


@pytest.mark.parametrize("algorithm", [None, grpo(kl_coef=0.1), rloo(), dapo(), decoupled(grpo())])
def test_a_scalar_baseline_takes_the_place_of_the_groups(algorithm: Algorithm | None):
    resolved, batch = resolve_algorithm(RLTrainingConfig(algorithm=algorithm, baseline=0.5)), draw_rollouts()
    assert (resolved.loss, resolved.requires) == ((algorithm or grpo()).loss, (algorithm or grpo()).requires) or algorithm is None
    expected = (batch.rewards - 0.5)[:, None] * (batch.loss_mask > 0)
    assert torch.equal(resolved.estimate(batch).advantages, expected)


# values


def test_explained_variance_is_1_for_perfect_values_and_0_for_constant_ones():
    batch = draw_rollouts()
    returns = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    trained = batch.loss_mask > 0
    noise = torch.where(trained, 0.0, math.nan)  # masked places do not count
    assert summarize_values(replace(batch, returns=returns + noise, values=returns))["explained_variance"] == pytest.approx(1.0)
    constant = replace(batch, returns=returns, values=torch.full_like(returns, 3.0))
    assert summarize_values(constant)["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert summarize_values(replace(batch, returns=torch.ones_like(returns), values=returns))["explained_variance"] == 0.0
    opposite = summarize_values(replace(batch, returns=returns, values=-returns))["explained_variance"]
    assert opposite == pytest.approx(-3.0, rel=1e-4)


# -- episodes


def make_episodes() -> TrainBatch:
    """The episodes of make_episode_samples as a batch."""
    return collate_samples(make_episode_samples())


def make_episode_samples() -> list[Sample]:
    """Two episodes of a group: both begin in one state, where the first chose better; and one that has nobody to be compared with."""
    return [
        Sample(tokens=tuple(range(3, 10)), loss_mask=(0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0), rollout_log_probs=(0.0, 0.0, *(-4.0,) * 5),
               index=i, group_index=i // 2, reward=float(i == 0), turns=(Turn(start=2, end=4, state="hall"), Turn(start=5, end=7)))
        for i in range(3)
    ]  # fmt: skip


async def test_turns_are_told_by_sample_group_and_state(caplog):
    samples = make_episode_samples()
    with caplog.at_level(logging.DEBUG, logger="rollouts.training.rollout_batch"):
        await train_on_rollouts(create_pytorch_backend(create_tiny_model(), lr=0.0), collate_samples(samples), gigpo(), samples=samples)
    assert caplog.messages[0].startswith("sample 0 (group 0) turn 0: episode_advantage=0.7071 ")
    assert caplog.messages[0].endswith(" state=hall")
    assert caplog.messages[5].startswith("sample 2 (group 1) turn 1: ")


async def test_what_turns_are_compared_with_is_measured_and_told(caplog):
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2)
    with caplog.at_level(logging.DEBUG, logger="rollouts.training.rollout_batch"):
        metrics = await train_on_rollouts(backend, make_episodes(), gigpo())
    assert (metrics["num_anchors"], metrics["anchors_of_1"], metrics["anchors_of_2"]) == (5.0, 4.0, 1.0)
    assert metrics["anchor_single_fraction"] == pytest.approx(4 / 6)
    assert metrics["num_tokens"] == 12 and metrics["grad_norm"] > 0
    assert len(caplog.messages) == 6
    assert caplog.messages[0].startswith("row 0 turn 0: episode_advantage=0.7071 step_reward=0 return_to_go=0.95 anchor=0 anchor_size=2")
    assert caplog.messages[4].endswith("step_advantage=0 advantage=0")


async def test_other_algorithms_train_on_episodes_and_measure_no_anchors(caplog):
    with caplog.at_level(logging.DEBUG, logger="rollouts.training.rollout_batch"):
        metrics = await train_on_rollouts(create_pytorch_backend(create_tiny_model(), lr=1e-2), make_episodes(), dapo())
    assert metrics["num_tokens"] == 12 and not any("anchor" in name for name in metrics) and not caplog.messages


async def test_single_answers_that_reach_an_algorithm_of_turns_are_refused_before_it_runs():
    with pytest.raises(DataError, match=r"requires \['turns'\], which the samples do not have"):
        await train_on_rollouts(FakeBackend(), draw_rollouts(), gigpo())


async def test_minibatches_and_a_wrapper_train_on_the_same_advantages():
    batch = make_episodes()
    once = await train_on_rollouts(create_pytorch_backend(create_tiny_model(), lr=0.0), batch, gigpo())
    for algorithm in (decoupled(gigpo(), cap=None), recomputed(gigpo())):
        parts = await train_on_rollouts(
            create_pytorch_backend(create_tiny_model(), lr=0.0), batch, algorithm, plan=UpdatePlan(num_minibatches=2, num_epochs=2)
        )
        assert parts["num_anchors"] == once["num_anchors"] == 5.0 and parts["num_updates"] == 4
    assert columns_from_loss(recomputed(gigpo()), num_updates=1) == {"old_log_probs"}, "its estimator reads no log-probs"

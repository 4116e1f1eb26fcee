"""Presets against their papers as naive loops (oracles_algorithms), and what must not change a loss or a gradient."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import algorithms as oracles_algorithms
from oracles.algorithms import Step

from rollouts.algorithms import presets as algorithms
from rollouts.algorithms.advantages import in_unequal_group
from rollouts.algorithms.anchors import interpolate
from rollouts.algorithms.estimators import (
    estimate_gpg,
    estimate_group_relative,
    estimate_opo,
    estimate_optimal_token_baseline,
    estimate_vtrace,
)
from rollouts.algorithms.kl import abs_kl, k1, k2, k3
from rollouts.algorithms.loss_weights import trained_mask
from rollouts.algorithms.preference_objectives import cdpo, ipo, kto, simpo
from rollouts.algorithms.presets import (
    chain,
    cispo,
    dapo,
    decoupled,
    dppo,
    dppo_kl,
    dr_grpo,
    gdpo,
    gigpo,
    gkd,
    gmpo,
    gpg,
    grpo,
    gspo,
    kl_cov,
    max_rl,
    online_dpo,
    opd,
    opo,
    pass_at_k,
    ppo,
    recomputed,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    sapo,
    truncated,
)
from rollouts.algorithms.proximal import interpolate_log_probs, interpolate_probs
from rollouts.algorithms.statistics import AllReduce, batch_mean, masked_mean, whiten
from rollouts.batches import select_rows
from rollouts.errors import ConfigError, DataError
from rollouts.types import Algorithm, RewardComponents, TokenOutputs, TrainBatch, Transform, Turns

CASES: dict[str, tuple[Algorithm, Callable[[Step], Any]]] = {
    "grpo": (grpo(), oracles_algorithms.grpo),
    "grpo, all terms": (
        grpo(0.1, 0.3, kl_coef=0.2, dual=1.2, entropy_coef=0.05),
        partial(oracles_algorithms.grpo, clip_low=0.1, clip_high=0.3, kl_coef=0.2, dual=1.2, entropy_coef=0.05),
    ),
    "dr_grpo": (dr_grpo(11), partial(oracles_algorithms.dr_grpo, max_tokens=11)),
    "dapo": (dapo(), oracles_algorithms.dapo),
    "gspo": (gspo(), oracles_algorithms.gspo),
    "gspo, wide": (gspo(0.1, 0.2), partial(oracles_algorithms.gspo, clip_low=0.1, clip_high=0.2)),
    "gmpo": (gmpo(0.3, 0.2), partial(oracles_algorithms.gmpo, clip_low=0.3, clip_high=0.2)),
    "cispo": (cispo(), oracles_algorithms.cispo),
    "cispo, both bounds": (cispo(0.1, 0.2), partial(oracles_algorithms.cispo, clip_high=0.1, clip_low=0.2)),
    "sapo": (sapo(1.5, 2.0), partial(oracles_algorithms.sapo, tau_pos=1.5, tau_neg=2.0)),
    "dppo": (dppo(0.05, 0.02, cap=1.2), partial(oracles_algorithms.dppo, low=0.05, high=0.02, cap=1.2)),
    "dppo_kl": (dppo_kl(0.05, 0.02), partial(oracles_algorithms.dppo_kl, low=0.05, high=0.02)),
    "max_rl": (max_rl(), oracles_algorithms.max_rl),
    "pass_at_k": (pass_at_k(), oracles_algorithms.pass_at_k),
    "pass_at_k, in units of the reward": (pass_at_k(divide_by_std=False), partial(oracles_algorithms.pass_at_k, divide_by_std=False)),
    "gdpo": (gdpo("right form=0.5"), partial(oracles_algorithms.gdpo, weights=(1.0, 0.5))),
    "gdpo, not whitened": (
        gdpo({"right": 2.0, "form": -1.0}, 0.1, 0.1, whiten=False),
        partial(oracles_algorithms.gdpo, weights=(2.0, -1.0), clip_low=0.1, clip_high=0.1, whiten=False),
    ),
    "kl_cov": (kl_cov(), oracles_algorithms.kl_cov),
    "kl_cov, many": (kl_cov(0.3, 2.0), partial(oracles_algorithms.kl_cov, fraction=0.3, coef=2.0)),
    "rloo": (rloo(), oracles_algorithms.rloo),
    "reinforce": (reinforce(), oracles_algorithms.reinforce),
    "remax": (remax(), oracles_algorithms.remax),
    "opo": (opo(), oracles_algorithms.opo),
    "gpg": (gpg(2.0), partial(oracles_algorithms.gpg, f_norm=2.0)),
    "opd": (opd(), oracles_algorithms.opd),
    "opd, all terms": (opd(0.5, 2.0, 0.9, bound=0.4), partial(oracles_algorithms.opd, coef=0.5, reward_coef=2.0, gamma=0.9, bound=0.4)),
    "gkd": (gkd(), oracles_algorithms.gkd),
    "gkd, with rewards": (gkd(coef=0.3, reward_coef=2.0), partial(oracles_algorithms.gkd, coef=0.3, reward_coef=2.0)),
    "online_dpo": (online_dpo(), oracles_algorithms.online_dpo),
    "online_dpo, ipo, clear ones": (
        online_dpo(loss=ipo, beta=0.3, min_difference=1.0),
        partial(oracles_algorithms.online_dpo, loss="ipo", beta=0.3, min_difference=1.0),
    ),
    "online_dpo, simpo": (
        online_dpo(loss=simpo, beta=1.5, gamma=0.4),
        partial(oracles_algorithms.online_dpo, loss="simpo", beta=1.5, gamma=0.4),
    ),
    "reinforce_plus_plus": (reinforce_plus_plus(0.1, 0.9), partial(oracles_algorithms.reinforce_plus_plus, kl_coef=0.1, gamma=0.9)),
    "reinforce_plus_plus, no KL": (reinforce_plus_plus(0.0), partial(oracles_algorithms.reinforce_plus_plus, kl_coef=0.0)),
    "reinforce_plus_plus_baseline": (
        reinforce_plus_plus_baseline(0.3),
        partial(oracles_algorithms.reinforce_plus_plus_baseline, kl_coef=0.3),
    ),
    "ppo": (ppo(0.95, 0.8), partial(oracles_algorithms.ppo, gamma=0.95, lam=0.8)),
    "ppo, all terms": (
        ppo(kl_coef=0.1, dual=2.0, entropy_coef=0.02),
        partial(oracles_algorithms.ppo, kl_coef=0.1, dual=2.0, entropy_coef=0.02),
    ),
    "gigpo": (gigpo(), oracles_algorithms.gigpo),
    "gigpo, all terms": (
        gigpo(0.8, 0.5, kl_coef=0.1, default_step_reward=-0.1, add_final_reward=True, epsilon=0.1, dual=2.0, entropy_coef=0.02),
        partial(
            oracles_algorithms.gigpo,
            gamma=0.8,
            omega=0.5,
            kl_coef=0.1,
            default_step_reward=-0.1,
            add_final_reward=True,
            epsilon=0.1,
            dual=2.0,
            entropy_coef=0.02,
        ),
    ),
    "gigpo, interpolated": (
        gigpo(omega=0.3, combine=interpolate, divide_by_std=False),
        partial(oracles_algorithms.gigpo, omega=0.3, divide_by_std=False, convex=True),
    ),
    "decoupled": (decoupled(dapo(), cap=1.5, floor=0.6), partial(oracles_algorithms.decoupled, cap=1.5, floor=0.6)),
    "decoupled, clamped": (decoupled(dapo(), 1.2, 0.9, drop=False), partial(oracles_algorithms.decoupled, cap=1.2, floor=0.9, drop=False)),
    "decoupled, segment-wise": (
        decoupled(dapo(), cap=1.5, segment_wise=True),
        partial(oracles_algorithms.decoupled, cap=1.5, segment_wise=True),
    ),
    "decoupled, segment-wise, missed": (
        decoupled(dapo(), cap=1.5, floor=0.5, segment_wise=True, missed_as_proximal=True),
        partial(oracles_algorithms.decoupled, cap=1.5, floor=0.5, segment_wise=True, missed_as_proximal=True),
    ),
    "decoupled, log-probs by version": (
        decoupled(dapo(), cap=1.1, approximate=interpolate_log_probs),
        partial(oracles_algorithms.decoupled, cap=1.1, geometric=True),
    ),
    "decoupled, probs by version": (
        decoupled(dapo(), drop=False, cap=1.05, floor=0.97, approximate=interpolate_probs),
        partial(oracles_algorithms.decoupled, drop=False, cap=1.05, floor=0.97, geometric=False),
    ),
    "decoupled, segment-wise, by version": (
        decoupled(dapo(), cap=1.5, segment_wise=True, approximate=interpolate_log_probs, missed_as_proximal=True),
        partial(oracles_algorithms.decoupled, cap=1.5, segment_wise=True, geometric=True, missed_as_proximal=True),
    ),
    "recomputed": (recomputed(dapo()), oracles_algorithms.recomputed),
    "truncated": (truncated(dapo(), cap=1.1), partial(oracles_algorithms.truncated, cap=1.1)),
}
WRAPPERS = {"decoupled", "recomputed", "truncated"}
PRESETS = {
    name: function
    for name, function in inspect.getmembers(algorithms, inspect.isfunction)
    if function.__module__ == algorithms.__name__ and not name.startswith("_") and function.__annotations__["return"] == "Algorithm"
}


def make_rollouts(seed: int, rows: int, width: int, *, with_greedy: bool = False) -> tuple[torch.Tensor, TrainBatch]:
    """Current log-probs and a ragged float64 batch with every column; groups of uneven size, holes in the masks."""
    g, ages = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    lengths = torch.randint(2, width + 1, (rows,), generator=g)
    positions = torch.arange(width)
    mask = ((positions > 0) & (positions < lengths[:, None]) & (torch.rand(rows, width, generator=g) < 0.75)).double()
    mask[:, 1] = 1.0
    group_ids = torch.randint(0, max(1, rows // 3), (rows,), generator=g)
    trainable = torch.ones(rows, dtype=torch.bool)
    if with_greedy:  # the last row of every group stands for the greedy answer
        for group in group_ids.unique().tolist():
            trainable[(group_ids == group).nonzero()[-1]] = False
        if not trainable.any():
            trainable[0], group_ids = True, torch.zeros_like(group_ids)
            trainable[-1] = rows == 1
        mask = mask * trainable[:, None]
    rollout = -draw().abs() - 0.05
    batch = TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.randint(0, 3, (rows,), generator=g).double() + 0.1 * torch.randint(0, 2, (rows,), generator=g),
        group_ids=group_ids,
        trainable=trainable,
        rollout_log_probs=rollout,
        old_log_probs=None,
        segment_log_probs=rollout + draw(0.2),
        ref_log_probs=rollout + draw(0.3),
        values=draw(),
        teacher_log_probs=rollout + torch.randn(rows, width, generator=ages, dtype=torch.float64),
        teacher_ids=torch.zeros(rows, width, 2, dtype=torch.int32),
        teacher_tops=torch.tensor([0.0, 0.0, -torch.inf]).expand(rows, width, 3),
        segment_mask=torch.rand(rows, width, generator=ages) < 0.6,
        weight_versions=torch.randint(0, 6, (rows, width), generator=ages),
        policy_versions=torch.full((rows,), 4.5 if seed % 2 else 4.0),
        turns=make_turns(seed, lengths, width, group_ids),
        reward_components=RewardComponents(names=("other", "form", "right"), scores=make_scores(seed, rows)),
    )
    return rollout + draw(0.3).clamp(max=0.0) + 0.04, batch


def make_scores(seed: int, rows: int) -> torch.Tensor:
    """Scores of three rewards, some of which are missing."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (rows, 3), generator=g).double()
    return torch.where(torch.rand(rows, 3, generator=g) < 0.2, torch.nan, scores)


def make_turns(seed: int, lengths: torch.Tensor, width: int, group_ids: torch.Tensor) -> Turns:
    """Turns of two tokens behind the first; few states, so that some meet; of steps in every second group nothing is known, and of some in
    the others; some earned 0."""
    g, rows = torch.Generator().manual_seed(seed), len(lengths)
    positions = torch.arange(width).expand(rows, -1)
    ids = torch.where((positions > 0) & (positions < lengths[:, None]), (positions - 1) // 2, -1)
    there = torch.arange(width // 2 + 1) < lengths[:, None] // 2
    chance = torch.rand(there.shape, generator=g)
    paid = torch.rand(there.shape, generator=g, dtype=torch.float64) * (chance < 0.6)
    unknown = there & ((group_ids % 2 == 1)[:, None] | (chance > 0.8))
    states = torch.where(there, torch.randint(0, 3, there.shape, generator=g), -1)
    return Turns(ids=ids, states=states, rewards=torch.where(unknown, torch.nan, paid * there))


def with_columns(algorithm: Algorithm, batch: TrainBatch, seed: int) -> TrainBatch:
    """Fill the columns that the loop fills: the trainer's log-probs before the update, if the algorithm requires them."""
    g = torch.Generator().manual_seed(seed + 1)
    assert batch.rollout_log_probs is not None
    own = batch.rollout_log_probs + 0.25 * torch.randn(batch.tokens.shape, generator=g, dtype=torch.float64)
    return replace(batch, **{name: own for name in ("old_log_probs", "prox_log_probs") if name in algorithm.requires})


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    return torch.where(log_probs.isfinite(), log_probs, 0.0).square()  # any function of the log-probs will do


def divergence_of(log_probs: torch.Tensor) -> torch.Tensor:
    return 2 * torch.where(log_probs.isfinite(), log_probs, 0.0).sin()


def run(algorithm: Algorithm, log_probs: torch.Tensor, batch: TrainBatch, parts: list[list[int]] | None = None):
    """Loss and gradient of a whole step, in one call or as a sum over micro-batches."""
    leaf = log_probs.detach().clone().requires_grad_()
    estimated = algorithm.estimate(batch)
    step = replace(estimated, loss_weights=algorithm.weigh(estimated))
    total = torch.zeros((), dtype=torch.float64)
    for rows in keep_pairs(step, parts or [list(range(batch.num_rows))]):
        micro = select_rows(step, rows)
        own = leaf[rows, : micro.tokens.shape[1]]
        loss, metrics = algorithm.loss(TokenOutputs(log_probs=own, entropy=entropy_of(own), divergence=divergence_of(own)), micro)
        assert all(bool(torch.isfinite(value).all()) for value in metrics.values()), metrics
        loss.backward()
        total = total + loss.detach()
    return total, leaf.grad


def keep_pairs(step: TrainBatch, parts: list[list[int]]) -> list[list[int]]:
    """The parts with the two rows of a pair in that of the first, as the loop keeps them."""
    if step.pair_ids is None:
        return parts
    ids = step.pair_ids.tolist()
    whole: list[list[int]] = []
    for part in parts:
        taken = {row for rows in whole for row in rows}
        own = [row for row in part if row not in taken]
        whole.append([*own, *(k for row in own for k, pair in enumerate(ids) if pair == ids[row] >= 0 and k not in own and k not in taken)])
    return [part for part in whole if part]


def run_oracle(oracle: Callable[[Step], Any], log_probs: torch.Tensor, batch: TrainBatch):
    leaf = log_probs.detach().clone().requires_grad_()
    own = batch.prox_log_probs if batch.prox_log_probs is not None else batch.old_log_probs
    step = Step(
        rewards=batch.rewards.tolist(),
        groups=batch.group_ids.tolist(),
        mask=batch.loss_mask.tolist(),
        log_probs=[list(row) for row in leaf],
        rollout=batch.rollout_log_probs.tolist(),
        old=own.tolist() if own is not None else batch.rollout_log_probs.tolist(),
        segment=batch.segment_log_probs.tolist(),
        ref=batch.ref_log_probs.tolist(),
        values=batch.values.tolist(),
        entropy=[list(row) for row in entropy_of(leaf)],
        teacher=batch.teacher_log_probs.tolist(),
        divergence=[list(row) for row in divergence_of(leaf)],
        trainable=batch.trainable.tolist(),
        versions=batch.weight_versions.tolist(),
        computed=batch.segment_mask.tolist(),
        current=float(batch.policy_versions[0]),
        turn_of=batch.turns.ids.tolist(),
        states=batch.turns.states.tolist(),
        step_rewards=batch.turns.rewards.tolist(),
        components=batch.reward_components.scores[:, [2, 1]].tolist(),
    )
    loss = oracle(step) + 0.0 * leaf.sum()  # clipped everywhere, it is a plain number
    loss.backward()
    return loss.detach(), leaf.grad


def close(found, expected, tolerance: float = 1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), rows=st.integers(2, 7), width=st.integers(2, 6))
def test_value_and_gradient_of_each_preset_are_the_papers(name: str, seed: int, rows: int, width: int):
    algorithm, oracle = CASES[name]
    log_probs, batch = make_rollouts(seed, rows, width, with_greedy=name == "remax")
    batch = with_columns(algorithm, batch, seed)
    loss, gradient = run(algorithm, log_probs, batch)
    expected, expected_gradient = run_oracle(oracle, log_probs, batch)
    close(loss, expected)
    close(gradient, expected_gradient)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_micro_batches_row_order_padding_and_garbage_change_nothing(name: str, seed: int, cut: int):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(seed, 6, 5, with_greedy=name == "remax")
    if algorithm.compares_pairs:  # of equal rewards the first row counts
        batch = replace(batch, rewards=batch.rewards + 1e-3 * torch.arange(6))
    batch = with_columns(algorithm, batch, seed)
    loss, gradient = run(algorithm, log_probs, batch)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [p for p in (order[:cut], order[cut:]) if p]
    split = run(algorithm, log_probs, batch, parts)
    close(split[0], loss)
    close(split[1], gradient)

    shuffled = select_rows(replace(batch, lengths=torch.full((6,), 5)), order)  # trimming would hide columns here
    moved = run(algorithm, log_probs[order], shuffled)
    close(moved[0], loss)
    close(moved[1], gradient[order])

    def widen(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return x
        return torch.cat([x, torch.zeros(6, 3, *x.shape[2:], dtype=x.dtype)], dim=1)

    turns = replace(batch.turns, ids=torch.cat([batch.turns.ids, torch.full((6, 3), -1)], dim=1))
    wide = replace(
        batch, **{name: widen(value) for name, value in vars(batch).items() if name not in ("turns", "reward_components")}, turns=turns
    )
    padded = run(algorithm, widen(log_probs), wide)
    close(padded[0], loss)
    close(padded[1][:, :5], gradient)

    off = batch.loss_mask == 0
    columns = ("rollout_log_probs", "old_log_probs", "prox_log_probs", "segment_log_probs", "ref_log_probs", "values", "teacher_log_probs")
    dirty = {c: torch.where(off, torch.nan, getattr(batch, c)) for c in columns if getattr(batch, c) is not None}
    spoiled = run(algorithm, torch.where(off, torch.inf, log_probs), replace(batch, **dirty))
    assert torch.equal(spoiled[0], loss)
    assert torch.equal(spoiled[1], gradient)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_sum_their_gradients_have_the_gradient_of_one(name: str):
    """The step's weights and advantages are computed before rows are dealt out, so a rank's share is just a micro-batch."""
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(5, 8, 6, with_greedy=name == "remax")
    batch = with_columns(algorithm, batch, 5)
    loss, gradient = run(algorithm, log_probs, batch)
    shares = run(algorithm, log_probs, batch, [[0, 2, 4, 6], [1, 3], [5], [7]])
    close(shares[0], loss)
    close(shares[1], gradient)


class Ranks:
    """Threads that stand for the processes of data parallelism."""

    def __init__(self, number: int):
        self.barrier, self.slots = threading.Barrier(number, timeout=60), [torch.zeros(())] * number

    def all_reduce(self, rank: int, sums: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, which must all call this."""
        self.slots[rank] = sums
        self.barrier.wait()
        total = torch.stack(self.slots).sum(0)
        self.barrier.wait()
        return total

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.slots)) as pool:
            return list(pool.map(work, range(len(self.slots))))


def mean_over_ranks(rewards: torch.Tensor, group_ids: torch.Tensor, *, all_reduce: AllReduce) -> torch.Tensor:
    return masked_mean(rewards, torch.ones_like(rewards), all_reduce=all_reduce).expand_as(rewards)


def estimate_on_a_rank(algorithm: Algorithm, batch: TrainBatch, all_reduce: AllReduce) -> TrainBatch:
    """The preset's estimate on whole groups, its statistics over rows and tokens taken over all ranks."""
    estimate = algorithm.estimate if isinstance(algorithm.estimate, partial) else partial(algorithm.estimate)
    if estimate.keywords.get("mean_level") is batch_mean:
        return partial(estimate, mean_level=partial(mean_over_ranks, all_reduce=all_reduce))(batch)
    if estimate.func is estimate_gpg:
        centered = estimate_group_relative(batch, std_level=None)
        counts = torch.tensor([batch.num_rows, int(in_unequal_group(batch.rewards, batch.group_ids).sum())], dtype=torch.float64)
        rows, valid = all_reduce(counts)
        return replace(centered, advantages=centered.advantages * rows / valid / estimate.keywords["f_norm"])
    if "whiten" in inspect.signature(estimate).parameters and estimate.keywords.get("whiten") is not False:
        plain = partial(estimate, whiten=False)(batch)
        return replace(plain, advantages=whiten(plain.advantages, trained_mask(batch), all_reduce=all_reduce))
    return estimate(batch)


def weigh_on_a_rank(algorithm: Algorithm, batch: TrainBatch, all_reduce: AllReduce) -> torch.Tensor:
    """The preset's weights with the denominator of the whole step."""
    mask = trained_mask(batch)
    if "num_tokens" in inspect.signature(algorithm.weigh).parameters:
        return partial(algorithm.weigh, num_tokens=float(all_reduce(mask.sum())))(batch)
    if "num_pairs" in inspect.signature(algorithm.weigh).parameters:
        assert batch.pair_ids is not None
        return partial(algorithm.weigh, num_pairs=float(all_reduce((batch.pair_ids >= 0).sum())) / 2)(batch)
    return partial(algorithm.weigh, num_rows=float(all_reduce((mask.sum(1) > 0).sum())))(batch)


@pytest.mark.parametrize("with_an_idle_rank", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("kl_cov")])  # which selects among all tokens of the batch
def test_ranks_that_see_their_own_groups_only_have_the_gradient_of_one(name: str, with_an_idle_rank: bool):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(5, 9, 6, with_greedy=name == "remax")
    if with_an_idle_rank:
        idle = batch.group_ids == batch.group_ids[0]
        batch = replace(batch, loss_mask=torch.where(idle[:, None], 0.0, batch.loss_mask))
    batch = with_columns(algorithm, batch, 5)
    loss, gradient = run(algorithm, log_probs, batch)
    shares = [(batch.group_ids == group).nonzero()[:, 0].tolist() for group in batch.group_ids.unique()]
    assert len(shares) > 2
    ranks = Ranks(len(shares))

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own, all_reduce = select_rows(batch, shares[rank]), partial(ranks.all_reduce, rank)
        leaf = log_probs[shares[rank], : own.tokens.shape[1]].clone().requires_grad_()
        step = estimate_on_a_rank(algorithm, own, all_reduce)
        step = replace(step, loss_weights=weigh_on_a_rank(algorithm, step, all_reduce))
        part = algorithm.loss(TokenOutputs(log_probs=leaf, entropy=entropy_of(leaf), divergence=divergence_of(leaf)), step).loss
        return part.detach(), torch.autograd.grad(part, leaf)[0]

    found = ranks.run(work)
    close(torch.stack([part for part, _ in found]).sum(), loss)
    for rows, (_, own) in zip(shares, found, strict=True):
        close(own, gradient[rows, : own.shape[1]])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_preset_has_an_oracle_of_its_name_and_a_case(name: str):
    assert hasattr(oracles_algorithms, name), f"tests/oracles/algorithms.py has no {name}: write the paper's loss as a loop"
    assert any(case.split(",")[0] == name for case in CASES), f"CASES has no {name}"


@pytest.mark.parametrize("name", CASES)
def test_algorithms_are_values_and_their_parts_print(name: str):
    algorithm = CASES[name][0]
    copy = pickle.loads(pickle.dumps(algorithm))
    assert copy.requires == algorithm.requires
    assert copy.loss_only == algorithm.loss_only
    for part in ("estimate", "weigh", "loss"):  # not the whole: sets of texts print in an order that changes from process to process
        assert repr(getattr(copy, part)) == repr(getattr(algorithm, part))
    assert "lambda" not in repr(algorithm)


ADVANTAGES_OF_MORE_THAN_REWARDS = {  # a KL penalty on tokens, a critic's values, rewards of turns, a teacher
    "reinforce_plus_plus", "ppo", "ppo, all terms", "gigpo", "gigpo, all terms", "gigpo, interpolated", "gdpo", "gdpo, not whitened",
    "opd", "opd, all terms", "gkd", "gkd, with rewards",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equal_rewards_give_a_policy_gradient_of_zero_and_nothing_that_is_not_finite(name: str):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(7, 6, 5, with_greedy=name == "remax")
    batch = with_columns(algorithm, replace(batch, rewards=torch.full((6,), 0.7, dtype=torch.float64)), 7)
    loss, gradient = run(algorithm, log_probs, batch)
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(gradient).all())
    if name in ADVANTAGES_OF_MORE_THAN_REWARDS:
        return
    estimated = algorithm.estimate(batch)
    assert float(estimated.advantages.abs().sum()) == 0.0
    if algorithm.compares_pairs or not algorithm.requires & {"ref_log_probs", "entropy"}:
        assert float(gradient.abs().sum()) == 0.0
    else:  # what is left is the gradient of the KL and entropy terms, whatever the clip
        other = dict(algorithm.loss.keywords) | {"low": 0.5, "high": 0.5, "dual": None}
        expected = run(replace(algorithm, loss=partial(algorithm.loss.func, **other)), log_probs, batch)[1]
        assert float(expected.abs().sum()) > 0.0
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("preset", [grpo, dapo, gspo, gmpo, cispo, sapo, dppo, dppo_kl], ids=lambda preset: preset.__name__)
def test_equal_rewards_need_no_epsilon(preset: Callable[..., Algorithm]):
    log_probs, batch = make_rollouts(7, 6, 5)
    equal = batch.group_ids == batch.group_ids[0]
    batch = replace(batch, rewards=torch.where(equal, 0.7, batch.rewards))
    assert float(preset(epsilon=0.0).estimate(batch).advantages[equal].abs().sum()) == 0.0
    assert bool(torch.isfinite(run(preset(epsilon=0.0), log_probs, batch)[1]).all())


@pytest.mark.parametrize("name", CASES)
def test_a_batch_that_is_masked_out_has_loss_and_gradient_zero(name: str):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(7, 6, 5, with_greedy=name == "remax")
    batch = with_columns(algorithm, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), 7)
    loss, gradient = run(algorithm, log_probs, batch)
    assert float(loss) == 0.0
    assert float(gradient.abs().sum()) == 0.0


BASELINES_BEYOND_THE_GROUP = {"reinforce", "reinforce_plus_plus", "ppo"}  # which groups there are does not matter to them


@pytest.mark.parametrize("name", CASES)
def test_groups_of_one_have_advantage_zero_where_the_group_is_the_baseline(name: str):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(7, 5, 5)
    batch = with_columns(algorithm, replace(batch, group_ids=torch.arange(5)), 7)
    if name == "remax":
        with pytest.raises(DataError, match="greedy"):
            run(algorithm, log_probs, batch)
        return
    loss, gradient = run(algorithm, log_probs, batch)
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(gradient).all())
    estimated = algorithm.estimate(batch)
    advantages = estimated.advantages
    if estimated.turns.levels is not None:  # an episode that meets a state again is compared with itself
        assert float(estimated.turns.levels.episode.abs().sum()) == 0.0
    elif name.split(",")[0] in ("opd", "gkd"):  # a teacher compares no answers
        assert advantages is None or (name == "gkd, with rewards") == (float(advantages.abs().sum()) == 0.0)
    elif name.split(",")[0] in BASELINES_BEYOND_THE_GROUP:
        together = algorithm.estimate(replace(batch, group_ids=torch.zeros(5, dtype=torch.int64)))
        assert torch.equal(advantages, together.advantages)
        assert float(advantages.abs().sum()) > 0.0
    else:
        assert float(advantages.abs().sum()) == 0.0


def far_off(columns: tuple[str, ...], log_ratio: float, batch: TrainBatch, log_probs: torch.Tensor):
    """Policy and batch, in which the second token of every row, a trained one, has this log-ratio to each of the columns."""
    policy, values = log_probs.clone(), {name: getattr(batch, name).clone() for name in columns if getattr(batch, name) is not None}
    policy[:, 1] = -0.5 + min(log_ratio, 0.0)
    for value in values.values():
        value[:, 1] = -0.5 - max(log_ratio, 0.0)
    return policy, replace(batch, **values)


ANCHORS = ("rollout_log_probs", "old_log_probs", "prox_log_probs", "segment_log_probs")


@pytest.mark.parametrize("log_ratio", [-100.0, 19.0, 100.0])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("kl_cov")])  # whose choice among equal tokens is free
def test_presets_are_their_papers_with_tokens_far_off_the_anchor(name: str, log_ratio: float):
    algorithm, oracle = CASES[name]
    log_probs, batch = make_rollouts(3, 6, 5, with_greedy=name == "remax")
    log_probs, batch = far_off(ANCHORS, log_ratio, with_columns(algorithm, batch, 3), log_probs)
    loss, gradient = run(algorithm, log_probs, batch)
    expected, expected_gradient = run_oracle(oracle, log_probs, batch)
    close(loss, expected)
    close(gradient, expected_gradient)


@pytest.mark.parametrize("columns", [ANCHORS, ("rollout_log_probs",), ("old_log_probs", "prox_log_probs"), ("ref_log_probs",)])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_a_token_far_off_leaves_loss_gradient_and_metrics_finite(name: str, log_ratio: float, columns: tuple[str, ...]):
    algorithm, _ = CASES[name]
    log_probs, batch = make_rollouts(3, 6, 5, with_greedy=name == "remax")
    log_probs, batch = far_off(columns, log_ratio, with_columns(algorithm, batch, 3), log_probs)
    estimated = to_float32(algorithm.estimate(batch))
    for sign in (1.0, 0.0, -1.0):
        advantages = sign * estimated.loss_mask if estimated.pair_ids is None else estimated.advantages  # which say whom to prefer
        step = replace(estimated, advantages=advantages, loss_weights=algorithm.weigh(estimated))
        leaf = log_probs.float().requires_grad_()
        loss, metrics = algorithm.loss(TokenOutputs(log_probs=leaf, entropy=entropy_of(leaf), divergence=divergence_of(leaf)), step)
        loss.backward()
        assert leaf.grad is not None
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(leaf.grad).all())
        assert bool(torch.isfinite(leaf.grad.norm()))
        assert all(bool(torch.isfinite(value)) for value in metrics.values()), metrics
        others = algorithm.requires & {"ref_log_probs", "entropy", "teacher_tops"}
        if sign == 0.0 and not others and step.selected is None and step.pair_ids is None:
            assert float(leaf.grad.abs().sum()) == 0.0


def test_presets_report_what_their_surrogate_did():
    log_probs, batch = make_rollouts(3, 6, 5)
    log_probs, batch = far_off(ANCHORS, 3.0, batch, log_probs)

    def metrics_of(algorithm: Algorithm, sign: float) -> Mapping[str, float]:
        step = replace(batch, advantages=sign * batch.loss_mask, loss_weights=batch.loss_mask)
        return {name: float(x) for name, x in algorithm.loss(TokenOutputs(log_probs=log_probs), step).metrics.items()}

    for sign in (1.0, -1.0):  # CISPO bounds a weight whatever the advantage; a clip takes the gradient only of what goes on rising
        ratio = (log_probs - batch.rollout_log_probs).exp()[batch.loss_mask > 0]
        bounded = float((ratio > 1.28).double().mean())
        assert metrics_of(cispo(), sign)["clip_fraction"] == pytest.approx(bounded)
        assert metrics_of(cispo(), sign)["clip_fraction_low"] == 0
        assert (metrics_of(dppo(), sign)["outside_fraction"] > 0) == (sign > 0)
        assert 0 < metrics_of(sapo(), sign)["gate"] < 1
    assert metrics_of(dapo(clip_high=0.28), 1.0)["clip_fraction_high"] == pytest.approx(bounded)
    assert metrics_of(dapo(clip_high=0.28), -1.0)["clip_fraction_high"] == 0


def to_float32(batch: TrainBatch) -> TrainBatch:
    doubles = {name: x for name, x in vars(batch).items() if isinstance(x, torch.Tensor) and x.dtype == torch.float64}
    return replace(batch, **{name: x.float() for name, x in doubles.items()})


BAD = [
    (grpo, {"clip_low": 1.0}, "clip_low"),
    (grpo, {"clip_low": -0.1}, "clip_low"),
    (grpo, {"clip_high": -0.1}, "clip_high"),
    (grpo, {"dual": 1.0}, "dual"),
    (grpo, {"kl_coef": -1.0}, "kl_coef"),
    (gdpo, {"components": ""}, "components"),
    (gdpo, {"components": "a=1 a=2"}, "components"),
    (gdpo, {"components": "a=much"}, "components"),
    (gdpo, {"components": "a=nan"}, "the weight of 'a' in components"),
    (kl_cov, {"fraction": 1.5}, "fraction"),
    (kl_cov, {"coef": -1.0}, "coef"),
    (grpo, {"entropy_coef": -1.0}, "entropy_coef"),
    (grpo, {"epsilon": -1e-9}, "epsilon"),
    (grpo, {"epsilon": float("nan")}, "epsilon"),
    (dr_grpo, {"max_tokens": 0}, "max_tokens"),
    (dapo, {"clip_low": 1.5}, "clip_low"),
    (gspo, {"clip_low": 1.0}, "clip_low"),
    (gmpo, {"clip_high": -1.0}, "clip_high"),
    (cispo, {"clip_low": 1.1}, "clip_low"),
    (cispo, {"clip_high": -0.1}, "clip_high"),
    (sapo, {"tau_pos": 0.0}, "tau_pos"),
    (sapo, {"tau_neg": -1.0}, "tau_neg"),
    (dppo, {"low": 1.1}, "low"),
    (dppo, {"cap": 0.0}, "cap"),
    (dppo_kl, {"high": -0.1}, "high"),
    (gpg, {"f_norm": 0.0}, "f_norm"),
    (reinforce_plus_plus, {"gamma": 1.1}, "gamma"),
    (reinforce_plus_plus, {"kl_coef": -0.1}, "kl_coef"),
    (ppo, {"lam": -0.1}, "lam"),
    (ppo, {"gamma": 2.0}, "gamma"),
    (gigpo, {"gamma": 1.1}, "gamma"),
    (gigpo, {"omega": -0.5}, "omega"),
    (gigpo, {"omega": 1.5, "combine": interpolate}, "omega"),
    (gigpo, {"clip_low": 1.0}, "clip_low"),
    (gigpo, {"epsilon": -1.0}, "epsilon"),
    (gigpo, {"default_step_reward": float("nan")}, "default_step_reward"),
    (partial(decoupled, grpo()), {"cap": 0.0}, "cap"),
    (partial(decoupled, grpo()), {"floor": -1.0}, "floor"),
    (partial(decoupled, grpo()), {"floor": 6.0}, "floor"),
    (partial(truncated, grpo()), {"cap": -2.0}, "cap"),
    (online_dpo, {"beta": 0.0}, "beta"),
    (online_dpo, {"beta": float("nan")}, "beta"),
    (online_dpo, {"min_difference": -0.1}, "min_difference"),
    (online_dpo, {"nll_coef": -1.0}, "nll_coef"),
    (online_dpo, {"loss": cdpo, "label_smoothing": 0.5}, "label_smoothing"),
    (online_dpo, {"loss": simpo, "gamma": float("inf")}, "gamma"),
    (dr_grpo, {"max_tokens": float("inf")}, "max_tokens"),
    (grpo, {"kl_coef": float("inf")}, "kl_coef"),
    (grpo, {"epsilon": float("inf")}, "epsilon"),
    (grpo, {"clip_low": "0.2"}, "clip_low"),
    (grpo, {"clip_high": None}, "clip_high"),
    (grpo, {"dual": float("inf")}, "dual"),
    (grpo, {"epsilon": True}, "epsilon"),
    (sapo, {"tau_pos": float("inf")}, "tau_pos"),
    (ppo, {"lam": "high"}, "lam"),
    (partial(truncated, grpo()), {"cap": float("inf")}, "cap"),
]


def describe_arguments(value: Any) -> str | None:
    """Describe arguments without addresses of functions, which differ between processes."""
    return str({k: getattr(v, "__name__", v) for k, v in value.items()}) if isinstance(value, dict) else None


@pytest.mark.parametrize(("preset", "arguments", "name"), BAD, ids=describe_arguments)
def test_hyper_parameters_out_of_range_are_refused_by_name(preset: Any, arguments: dict[str, Any], name: str):
    with pytest.raises(ConfigError, match=f"{name} is .*expected"):
        preset(**arguments)


@pytest.mark.parametrize("preset", [p for p in PRESETS.values() if "kl" in inspect.signature(p).parameters], ids=lambda p: p.__name__)
def test_each_preset_takes_its_kl_estimator(preset: Callable[..., Algorithm]):
    log_probs, batch = make_rollouts(3, 6, 5)
    for kl in (k1, k2, k3, abs_kl):
        found = preset(kl_coef=0.3, kl=kl)
        term = found.estimate if "kl" in getattr(found.estimate, "keywords", {}) else found.loss
        assert isinstance(term, partial)
        plain, reference = log_probs.nan_to_num(), batch.ref_log_probs
        assert reference is not None
        given = term.keywords["kl"].estimate if term is found.loss else term.keywords["kl"]
        torch.testing.assert_close(given(plain, reference), kl(plain, reference))
    assert len({run(preset(kl_coef=0.3, kl=kl), log_probs, batch)[0].item() for kl in (k1, k2, k3, abs_kl)}) == 4


def test_an_advantage_that_is_not_finite_is_refused_with_its_row():
    _, batch = make_rollouts(0, 6, 5)
    batch = replace(batch, values=torch.full_like(batch.values, torch.nan))
    with pytest.raises(DataError, match="row 0"):
        ppo().estimate(batch)


def test_what_a_term_needs_is_required_only_where_it_is_on():
    assert grpo().requires == {"rollout_log_probs"}
    assert "ref_log_probs" in grpo(kl_coef=0.04).requires
    assert "entropy" in grpo(entropy_coef=0.01).requires
    assert ppo().requires == {"rollout_log_probs", "values"}
    assert "ref_log_probs" in ppo(kl_coef=0.1).requires
    assert "greedy_rows" in remax().requires
    assert decoupled(ppo()).requires == {"rollout_log_probs", "values", "prox_log_probs"}
    assert decoupled(ppo()).loss_only == {"prox_log_probs"}
    assert truncated(grpo()).loss_only == {"old_log_probs"}
    assert truncated(ppo(kl_coef=0.1)).loss_only == frozenset(), "the penalty in the rewards reads old_log_probs in estimate"
    assert recomputed(grpo(kl_coef=0.1)).loss_only == {"old_log_probs"}, "its KL term stands in the loss"


@pytest.mark.parametrize("estimate", [estimate_optimal_token_baseline, estimate_vtrace, chain(estimate_opo, list), lambda batch: batch])
def test_an_estimator_that_may_read_log_probs_keeps_its_forward_pass(estimate: Transform):
    algorithm = replace(grpo(), estimate=estimate)
    assert [wrap(algorithm).loss_only for wrap in (recomputed, truncated, decoupled)] == [frozenset()] * 3


def test_a_column_that_the_algorithm_required_itself_is_not_taken_away_from_it():
    algorithm = replace(grpo(), requires=frozenset({"old_log_probs", "prox_log_probs", "rollout_log_probs"}))
    assert [wrap(algorithm).loss_only for wrap in (recomputed, truncated, decoupled)] == [frozenset()] * 3


@pytest.mark.parametrize("wrap", [decoupled, truncated, recomputed])
def test_a_wrapper_round_something_else_than_an_algorithm_is_refused(wrap: Callable[..., Algorithm]):
    name = wrap.__name__
    with pytest.raises(ConfigError, match=rf"^{name}\(...\) was given the function grpo, expected an algorithm: write {name}\(grpo\(\)\)$"):
        wrap(grpo)
    for wrong in ("grpo", None, 3, partial(grpo, clip_low=0.1)):
        with pytest.raises(ConfigError, match=rf"^{name}\(...\) was given .*, expected an algorithm: write {name}\(grpo\(\)\)$"):
            wrap(wrong)


@pytest.mark.parametrize("inner", [decoupled, truncated])
@pytest.mark.parametrize("outer", [decoupled, truncated])
def test_tokens_are_not_weighted_twice(outer: Callable[..., Algorithm], inner: Callable[..., Algorithm]):
    with pytest.raises(ConfigError, match=f"^{outer.__name__}.*already has a correction"):
        outer(inner(grpo()))
    assert outer(recomputed(grpo())).requires >= {"old_log_probs"}


@pytest.mark.parametrize("wrap", [decoupled, truncated, recomputed])
def test_pairs_that_read_no_log_probs_of_rollouts_are_not_corrected(wrap: Callable[..., Algorithm]):
    with pytest.raises(ConfigError, match=f"{wrap.__name__}.*compares pairs.*Leave {wrap.__name__}"):
        wrap(online_dpo())


def test_a_loss_of_pairs_takes_its_own_numbers_alone():
    with pytest.raises(ConfigError, match=r"gamma is 0\.5, but the loss ipo has none: it takes beta"):
        online_dpo(loss=ipo, gamma=0.5)
    with pytest.raises(ConfigError, match="kto, which compares no pairs"):
        online_dpo(loss=kto)
    assert online_dpo().requires == {"ref_log_probs"}
    assert online_dpo(loss=simpo).requires == frozenset()


def test_decoupled_is_the_algorithm_itself_where_all_three_policies_agree():
    log_probs, batch = make_rollouts(3, 6, 5)
    plain = run(grpo(), log_probs, batch)
    same = replace(batch, prox_log_probs=batch.rollout_log_probs, old_log_probs=batch.rollout_log_probs)
    for wrapped in (decoupled(grpo()), truncated(grpo()), recomputed(grpo())):
        found = run(wrapped, log_probs, same)
        assert torch.equal(found[0], plain[0])
        assert torch.equal(found[1], plain[1])


def test_chains_apply_from_left_to_right():
    _, batch = make_rollouts(3, 6, 5)
    add = chain(grpo().estimate, partial(replace_advantages, scale=2.0, shift=1.0), partial(replace_advantages, scale=3.0, shift=0.0))
    close(add(batch).advantages, 3 * (2 * grpo().estimate(batch).advantages + 1))


def replace_advantages(batch: TrainBatch, scale: float, shift: float) -> TrainBatch:
    assert batch.advantages is not None
    return replace(batch, advantages=scale * batch.advantages + shift)


def test_weights_are_reported_with_their_largest_and_the_distance_to_the_rollout():
    log_probs, batch = make_rollouts(3, 6, 5)
    step = replace(batch, advantages=batch.loss_mask, loss_weights=batch.loss_mask)
    on = batch.loss_mask > 0
    metrics = (
        decoupled(dapo(), cap=1.2, segment_wise=True, approximate=interpolate_log_probs)
        .loss(TokenOutputs(log_probs=log_probs), step)
        .metrics
    )
    weights = (batch.segment_log_probs - batch.rollout_log_probs).exp()
    bounded = torch.where(weights <= 1.2, weights, 0.0)[on]
    assert float(metrics["max_importance_weight"]) == pytest.approx(float(bounded.max()))
    assert float(metrics["importance_weight"]) == pytest.approx(float(bounded.mean()))
    assert float(metrics["dropped_fraction"]) == pytest.approx(float((bounded == 0).double().mean()))
    assert float(metrics["rollout_kl"]) == pytest.approx(float((batch.rollout_log_probs - log_probs)[on].mean()))

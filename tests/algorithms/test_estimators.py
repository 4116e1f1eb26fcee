"""Estimators against loops on random ragged batches; what must not depend on padding, order, dead places or the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages as naive
from parity.mapping import load

from rollouts.algorithms import kl
from rollouts.algorithms.advantages import is_not_zero
from rollouts.algorithms.anchors import GiGPOSettings
from rollouts.algorithms.estimators import (
    check_advantages,
    estimate_gae,
    estimate_gigpo,
    estimate_gpg,
    estimate_greedy_baseline,
    estimate_group_relative,
    estimate_max_rl,
    estimate_opo,
    estimate_optimal_token_baseline,
    estimate_pass_at_k,
    estimate_reinforce_plus_plus,
    estimate_reinforce_plus_plus_baseline,
    estimate_vtrace,
    penalized_token_rewards,
    policy_log_probs,
)
from rollouts.algorithms.statistics import batch_mean, batch_std, leave_one_out_mean
from rollouts.errors import DataError
from rollouts.types import TrainBatch, Transform, Turns

MASKED_NORMALIZATION = load(Path(__file__).parents[1] / "data" / "golden" / "advantages" / "areal_masked_normalization.json")["cases"]
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")


def draw_ragged(seed: int, rows: int, width: int, num_groups: int, dead: float = torch.nan) -> TrainBatch:
    """A ragged float64 batch: prompts, gaps, rows without a trained token; `dead` wherever nothing is trained.

    Every group has a row that is not trained.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    group_ids = torch.arange(rows) % num_groups
    lengths = (draw(rows) * width).long() + 1
    inside = torch.arange(width) < lengths[:, None]
    mask = (inside & (draw(rows, width) < 0.7) & (draw(rows, 1) < 0.9)).double()
    trainable = draw(rows) < 0.7
    trainable[:num_groups] = False
    columns = {name: torch.where(mask > 0, -2 * draw(rows, width), dead) for name in LOG_PROBS}
    values = torch.where(mask > 0, 2 * draw(rows, width) - 1, dead)
    rewards = (draw(rows) * 4).round() / 2 - 0.5  # with ties
    turn_ids = (torch.arange(width) // 2).expand(rows, width).clone()
    num_turns = (width + 1) // 2
    present = torch.arange(num_turns) < (lengths[:, None] + 1) // 2
    turns = Turns(
        ids=torch.where(inside, turn_ids, -1),
        states=torch.where(present, (draw(rows, num_turns) * 3).long(), -1),
        rewards=torch.where(present & (draw(rows, num_turns) < 0.3), torch.nan, torch.where(present, draw(rows, num_turns), 0.0)),
    )
    order = torch.randperm(rows, generator=generator)
    batch = TrainBatch(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        loss_mask=mask,
        rewards=rewards,
        group_ids=group_ids,
        trainable=trainable,
        values=values,
        turns=turns,
        **columns,
    )
    return take(batch, order)


def take(batch: TrainBatch, rows: torch.Tensor) -> TrainBatch:
    def pick(value: Any) -> Any:
        if isinstance(value, Turns):
            return Turns(ids=value.ids[rows], states=value.states[rows], rewards=value.rewards[rows])
        return value[rows] if isinstance(value, torch.Tensor) else value

    return replace(batch, **{f.name: pick(getattr(batch, f.name)) for f in fields(batch)})


def widen(batch: TrainBatch, by: int) -> TrainBatch:
    """More padding on the right."""

    def pad(value: Any) -> Any:
        if isinstance(value, Turns):
            return replace(value, ids=torch.nn.functional.pad(value.ids, (0, by), value=-1))
        return torch.nn.functional.pad(value, (0, by)) if isinstance(value, torch.Tensor) and value.dim() == 2 else value

    return replace(batch, **{f.name: pad(getattr(batch, f.name)) for f in fields(batch)})


@st.composite
def batches(draw: Any) -> TrainBatch:
    num_groups = draw(st.integers(1, 3))
    rows = draw(st.integers(num_groups, 9))
    return draw_ragged(draw(st.integers(0, 10**6)), rows, draw(st.integers(1, 8)), num_groups)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


# -- every estimator, and the same with loops


@dataclass(frozen=True)
class Case:
    estimate: Transform
    loops: Callable[[TrainBatch], Any]  # -> advantages [B][T], or (advantages, returns)
    of_groups: bool = True  # a group's advantages do not depend on the other groups


def lists(batch: TrainBatch) -> dict[str, Any]:
    names = ("rewards", "group_ids", "loss_mask", "values", "trainable", *LOG_PROBS)
    return {name: getattr(batch, name).tolist() for name in names}


def per_row(compute: Callable[..., list[float]]) -> Callable[[TrainBatch], Any]:
    def loops(batch: TrainBatch) -> Any:
        x = lists(batch)
        return naive.broadcast(compute(x["rewards"], x["group_ids"], x["loss_mask"]), x["loss_mask"])

    return loops


def trained_rows(x: dict[str, Any]) -> list[int]:
    return [b for b, on in enumerate(x["trainable"]) if on]


def kl_rewards(x: dict[str, Any], coefficient: float, estimator: Any) -> list[list[float]]:
    return naive.token_rewards(x["rewards"], x["loss_mask"], x["old_log_probs"], x["ref_log_probs"], coefficient, estimator)


def reinforce_plus_plus(batch: TrainBatch, gamma: float, coefficient: float, estimator: Any) -> Any:
    x = lists(batch)
    returns = naive.returns(kl_rewards(x, coefficient, estimator), x["loss_mask"], gamma)
    return naive.whitened(returns, x["loss_mask"], trained_rows(x)), returns


def reinforce_plus_plus_baseline(batch: TrainBatch, coefficient: float, estimator: Any) -> Any:
    x = lists(batch)
    centered = oracles.grpo_advantages(x["rewards"], x["group_ids"], None)
    raw = naive.broadcast(centered, x["loss_mask"])
    for b, row in enumerate(x["loss_mask"]):
        for t in naive.trained(row):
            raw[b][t] -= coefficient * estimator(x["old_log_probs"][b][t], x["ref_log_probs"][b][t]) if coefficient else 0.0
    return naive.whitened(raw, x["loss_mask"], trained_rows(x))


def remax(batch: TrainBatch, coefficient: float, estimator: Any) -> Any:
    x = lists(batch)
    returns = naive.returns(kl_rewards(x, coefficient, estimator), x["loss_mask"], 1.0)
    baselines = naive.greedy_baselines(x["rewards"], x["group_ids"], x["trainable"])
    advantages = [
        [g - b if m > 0 else 0.0 for g, m in zip(row, mask, strict=True)]
        for row, mask, b in zip(returns, x["loss_mask"], baselines, strict=True)
    ]
    return advantages, returns


def generalised(batch: TrainBatch, gamma: float, lam: float, coefficient: float, estimator: Any, whiten: bool) -> Any:
    x = lists(batch)
    width = len(x["loss_mask"][0])
    rewards = kl_rewards(x, coefficient, estimator)
    raw = [naive.gae(r, v, m, [gamma] * width, [lam] * width, 0.0) for r, v, m in zip(rewards, x["values"], x["loss_mask"], strict=True)]
    returns = [
        [a + v if m > 0 else 0.0 for a, v, m in zip(*row, strict=True)] for row in zip(raw, x["values"], x["loss_mask"], strict=True)
    ]
    return (naive.whitened(raw, x["loss_mask"], trained_rows(x)) if whiten else raw), returns


def off_policy(batch: TrainBatch, gamma: float, lam: float, clip_rho: float, clip_pg_rho: float) -> Any:
    x = lists(batch)
    rewards = naive.token_rewards(x["rewards"], x["loss_mask"], [], [], 0.0, None)
    advantages, returns = [], []
    for b, mask in enumerate(x["loss_mask"]):
        pairs = zip(x["old_log_probs"][b], x["rollout_log_probs"][b], mask, strict=True)
        ratios = [oracles.exp(p - q) if m > 0 else 1.0 for p, q, m in pairs]
        errors, a, _ = naive.vtrace(rewards[b], x["values"][b], ratios, mask, gamma, lam, clip_rho, clip_pg_rho, 0.0)
        advantages.append(a)
        returns.append([e + v if m > 0 else 0.0 for e, v, m in zip(errors, x["values"][b], mask, strict=True)])
    return advantages, returns


def token_baseline(batch: TrainBatch, keep_tail: bool) -> Any:
    x = lists(batch)
    returns = naive.returns(naive.token_rewards(x["rewards"], x["loss_mask"], [], [], 0.0, None), x["loss_mask"], 1.0)
    scores = [[1 - oracles.exp(p) for p in row] for row in x["old_log_probs"]]
    baselines = naive.optimal_token_baselines(
        returns, scores, x["loss_mask"], x["group_ids"], compact=True, keep_tail=keep_tail, epsilon=1e-8
    )
    advantages = [[g - b for g, b in zip(*rows, strict=True)] for rows in zip(returns, baselines, strict=True)]
    return advantages, returns


def gigpo(batch: TrainBatch, gamma: float, omega: float, epsilon: float) -> Any:
    x, turns = lists(batch), batch.turns
    assert turns is not None
    steps = (x["rewards"], x["group_ids"], turns.states.tolist(), turns.rewards.tolist())
    by_turn, ids = (naive.gigpo(*steps, gamma, omega, epsilon), naive.gigpo_returns(*steps, gamma)), turns.ids.tolist()
    return tuple(
        [[values[b][ids[b][t]] if m > 0 else 0.0 for t, m in enumerate(row)] for b, row in enumerate(x["loss_mask"])] for values in by_turn
    )


WITH_KL: dict[str, Any] = {"kl": kl.k3, "kl_coef": 0.2}
CASES = {
    "grpo": Case(partial(estimate_group_relative, epsilon=0.1), per_row(lambda r, g, m: oracles.grpo_advantages(r, g, 0.1))),
    "dr_grpo": Case(partial(estimate_group_relative, std_level=None), per_row(lambda r, g, m: oracles.grpo_advantages(r, g, None))),
    "rloo": Case(
        partial(estimate_group_relative, mean_level=leave_one_out_mean, std_level=None),
        per_row(lambda r, g, m: oracles.rloo_advantages(r, g)),
    ),
    "batch": Case(
        partial(estimate_group_relative, mean_level=batch_mean, std_level=batch_std, epsilon=0.1),
        per_row(lambda r, g, m: oracles.grpo_advantages(r, [0] * len(r), 0.1)),
        of_groups=False,
    ),
    "opo": Case(estimate_opo, per_row(naive.opo)),
    "gpg": Case(partial(estimate_gpg, f_norm=2.0), per_row(lambda r, g, m: naive.gpg(r, g, "unequal", 2.0)), of_groups=False),
    "gpg_nonzero": Case(
        partial(estimate_gpg, valid=is_not_zero), per_row(lambda r, g, m: naive.gpg(r, g, "nonzero", 1.0)), of_groups=False
    ),
    "pass_at_k": Case(estimate_pass_at_k, per_row(lambda r, g, m: naive.pass_at_k(r, g, 1e-6))),
    "max_rl": Case(estimate_max_rl, per_row(lambda r, g, m: naive.max_rl(r, g))),
    "reinforce++": Case(
        partial(estimate_reinforce_plus_plus, gamma=0.9, kl=kl.k1, kl_coef=0.1),
        partial(reinforce_plus_plus, gamma=0.9, coefficient=0.1, estimator=naive.K1),
        of_groups=False,
    ),
    "reinforce++_without_kl": Case(
        estimate_reinforce_plus_plus, partial(reinforce_plus_plus, gamma=1.0, coefficient=0.0, estimator=None), of_groups=False
    ),
    "reinforce++_baseline": Case(
        estimate_reinforce_plus_plus_baseline, partial(reinforce_plus_plus_baseline, coefficient=0.0, estimator=None), of_groups=False
    ),
    "reinforce++_baseline_kl": Case(
        partial(estimate_reinforce_plus_plus_baseline, **WITH_KL),
        partial(reinforce_plus_plus_baseline, coefficient=0.2, estimator=naive.K3),
        of_groups=False,
    ),
    "remax": Case(estimate_greedy_baseline, partial(remax, coefficient=0.0, estimator=None)),
    "remax_kl": Case(partial(estimate_greedy_baseline, **WITH_KL), partial(remax, coefficient=0.2, estimator=naive.K3)),
    "ppo": Case(
        partial(estimate_gae, gamma=0.99, lam=0.9, kl=kl.k2, kl_coef=0.3),
        partial(generalised, gamma=0.99, lam=0.9, coefficient=0.3, estimator=naive.K2, whiten=True),
        of_groups=False,
    ),
    "ppo_raw": Case(
        partial(estimate_gae, whiten=False), partial(generalised, gamma=1.0, lam=0.95, coefficient=0.0, estimator=None, whiten=False)
    ),
    "vtrace": Case(
        partial(estimate_vtrace, gamma=0.9, lam=0.8, clip_rho=1.5, clip_pg_rho=0.9),
        partial(off_policy, gamma=0.9, lam=0.8, clip_rho=1.5, clip_pg_rho=0.9),
    ),
    "optimal_token_baseline": Case(estimate_optimal_token_baseline, partial(token_baseline, keep_tail=True)),
    "optimal_token_baseline_all": Case(partial(estimate_optimal_token_baseline, keep_tail=False), partial(token_baseline, keep_tail=False)),
    "gigpo": Case(
        partial(estimate_gigpo, settings=GiGPOSettings(gamma=0.9, omega=0.7, epsilon=0.1)),
        partial(gigpo, gamma=0.9, omega=0.7, epsilon=0.1),
    ),
}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each
@given(batch=batches())
def test_each_estimator_is_its_paper(case, batch):
    found = case.estimate(batch)
    expected = case.loops(batch)
    advantages, returns = expected if isinstance(expected, tuple) else (expected, None)
    close(found.advantages, advantages, 1e-9)
    if returns is None:
        assert found.returns is None
    else:
        close(found.returns, returns)


@each
@given(batch=batches(), data=st.data())
def test_padding_and_the_order_of_rows_do_not_matter(case, batch, data):
    expected = case.estimate(batch).advantages
    width = batch.tokens.shape[1]
    wide = case.estimate(widen(batch, data.draw(st.integers(1, 3)))).advantages
    close(wide[:, :width], expected)
    assert wide[:, width:].eq(0).all()
    order = torch.tensor(data.draw(st.permutations(range(batch.num_rows))))
    close(case.estimate(take(batch, order)).advantages, expected[order])


@each
def test_what_stands_where_nothing_is_trained_does_not_matter(case):
    with_nan, with_number = (draw_ragged(5, 8, 6, 2, dead) for dead in (torch.nan, -0.3))
    assert torch.equal(case.estimate(with_nan).advantages, case.estimate(with_number).advantages)
    found = case.estimate(with_nan)
    assert found.advantages[with_nan.loss_mask == 0].eq(0).all()
    if found.returns is not None:
        assert found.returns[with_nan.loss_mask == 0].eq(0).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.of_groups])
@given(batch=batches())
def test_groups_can_be_estimated_apart(name, batch):
    case = CASES[name]
    whole = case.estimate(batch).advantages
    for group in batch.group_ids.unique():
        own = (batch.group_ids == group).nonzero()[:, 0]
        close(case.estimate(take(batch, own)).advantages, whole[own])


@each
def test_batches_without_a_trained_token_get_zeros(case):
    batch = draw_ragged(2, 6, 4, 2)
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert case.estimate(empty).advantages.eq(0).all()


@each
def test_the_batch_itself_is_left_as_it_was(case):
    batch = draw_ragged(3, 6, 4, 2, dead=0.0)
    before = {f.name: getattr(batch, f.name) for f in fields(batch)}
    copies = {name: value.clone() for name, value in before.items() if isinstance(value, torch.Tensor)}
    case.estimate(batch)
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert all(torch.equal(before[name], copy) for name, copy in copies.items())


@each
def test_float32_batches_stay_float32(case):
    batch = draw_ragged(4, 8, 6, 2)
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    narrow = {name: x.float() for name, x in columns.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    small = replace(batch, **narrow, turns=replace(batch.turns, rewards=batch.turns.rewards.float()))
    found = case.estimate(small)
    assert found.advantages.dtype == torch.float32
    torch.testing.assert_close(found.advantages.double(), case.estimate(batch).advantages, rtol=1e-3, atol=1e-4)


# -- by hand


def tiny(rewards: list[float], mask: list[list[float]], **columns: Any) -> TrainBatch:
    rows = len(rewards)
    base: dict[str, Any] = {
        "tokens": torch.zeros(rows, len(mask[0]), dtype=torch.int64),
        "lengths": torch.full((rows,), len(mask[0])),
        "loss_mask": torch.tensor(mask),
        "rewards": torch.tensor(rewards),
        "group_ids": torch.zeros(rows, dtype=torch.int64),
        "trainable": torch.ones(rows, dtype=torch.bool),
    }
    return TrainBatch(**base | columns)


def test_estimated_advantages_stand_on_every_trained_token():
    mask = [[0.0, 1.0, 1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    found = estimate_group_relative(tiny([1.0, 0.0, 3.0, 5.0], mask, group_ids=torch.tensor([0, 1, 0, 1])), std_level=None)
    assert found.advantages.tolist() == [[0.0, -1.0, -1.0], [0.0, -2.5, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_rows_that_are_not_trained_count_in_their_group_but_not_among_the_tokens():
    trainable = torch.tensor([True, True, False])
    batch = tiny([0.0, 0.0, 3.0], [[1.0], [1.0], [1.0]], trainable=trainable)
    found = estimate_group_relative(batch, std_level=None)
    assert found.advantages[:2].tolist() == [[-1.0], [-1.0]]
    whitened = estimate_reinforce_plus_plus(tiny([1.0, 3.0, 99.0], [[1.0], [1.0], [1.0]], trainable=trainable))
    torch.testing.assert_close(whitened.advantages, torch.tensor([[-(0.5**0.5)], [0.5**0.5], [0.0]]))


def test_remax_subtracts_the_reward_of_the_greedy_answer():
    trainable = torch.tensor([True, False, True, False])
    batch = tiny([1.0, 0.25, 0.0, 1.0], [[1.0, 1.0]] * 4, group_ids=torch.tensor([0, 0, 1, 1]), trainable=trainable)
    assert estimate_greedy_baseline(batch).advantages.tolist() == [[0.75, 0.75], [0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
    with pytest.raises(DataError, match=r"group 1 has no row with trainable = False: sample one greedy answer"):
        estimate_greedy_baseline(replace(batch, trainable=torch.tensor([True, False, True, True])))


def test_a_controller_sets_the_coefficient_of_the_kl():
    batch = draw_ragged(1, 6, 5, 2)
    fixed = estimate_gae(batch, kl=kl.k1, kl_coef=0.7)
    controlled = estimate_gae(replace(batch, kl_coef=torch.full((6,), 0.7, dtype=torch.float64)), kl=kl.k1, kl_coef=0.1)
    close(controlled.advantages, fixed.advantages)
    in_the_loss = estimate_gae(replace(batch, kl_coef=torch.full((6,), 0.7)))  # the controller's coefficient is for the loss here
    assert torch.equal(in_the_loss.advantages, estimate_gae(batch).advantages)


def test_the_policy_is_the_anchor_or_else_the_behaviour():
    batch = draw_ragged(1, 6, 5, 2)
    assert policy_log_probs(batch) is batch.old_log_probs
    assert policy_log_probs(replace(batch, old_log_probs=None)) is batch.rollout_log_probs
    found = penalized_token_rewards(replace(batch, old_log_probs=None), kl.k1, 0.5)
    assert not torch.equal(found, penalized_token_rewards(batch, kl.k1, 0.5))


def test_importance_weights_count_squared_in_the_optimal_token_baseline():
    batch = tiny([1.0, 0.0], [[1.0], [1.0]], rollout_log_probs=torch.tensor([[0.5], [0.5]]).log())
    plain = estimate_optimal_token_baseline(batch)
    torch.testing.assert_close(plain.advantages, torch.tensor([[0.5], [-0.5]]))
    weighed = estimate_optimal_token_baseline(replace(batch, importance_weights=torch.tensor([[1.0], [2.0]])))
    torch.testing.assert_close(weighed.advantages, torch.tensor([[0.8], [-0.2]]))


def test_vtrace_prefers_the_proximal_policy():
    batch = draw_ragged(1, 6, 5, 2)
    moved = replace(batch, prox_log_probs=batch.old_log_probs, old_log_probs=None)
    assert torch.equal(estimate_vtrace(moved).advantages, estimate_vtrace(batch).advantages)


# -- what cannot be estimated


@each
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(case, bad):
    batch = draw_ragged(5, 8, 6, 2)
    rewards = batch.rewards.clone()
    rewards[3] = bad
    with pytest.raises(DataError, match=rf"the reward of row 3 \(group {int(batch.group_ids[3])}\) is {bad}: rewards must be finite"):
        case.estimate(replace(batch, rewards=rewards))


@pytest.mark.parametrize("whiten", [True, False])
def test_an_advantage_that_is_not_finite_names_its_row_and_value(whiten):
    batch = tiny([1.0, 2.0], [[1.0, 1.0], [0.0, 1.0]], values=torch.tensor([[0.0, 0.0], [torch.nan, torch.nan]]))
    with pytest.raises(DataError, match=r"the advantage of row 1 \(group 0, reward 2\) is nan at token 1, 1 of 2 rows are not finite"):
        estimate_gae(batch, whiten=whiten)


def test_finite_advantages_pass_the_check():
    batch = estimate_opo(tiny([1.0, 2.0], [[1.0], [1.0]]))
    assert check_advantages(batch) is batch
    with pytest.raises(AssertionError, match="advantages is None"):
        check_advantages(tiny([1.0], [[1.0]]))


def test_missing_columns_and_estimators_are_named():
    batch = tiny([1.0], [[1.0]])
    with pytest.raises(AssertionError, match=r"kl_coef is 0\.1 but kl is None"):
        estimate_reinforce_plus_plus(batch, kl_coef=0.1)
    with pytest.raises(AssertionError, match="needs ref_log_probs"):
        estimate_reinforce_plus_plus(batch, kl=kl.k1, kl_coef=0.1)
    with pytest.raises(AssertionError, match="neither old_log_probs nor rollout_log_probs"):
        estimate_optimal_token_baseline(batch)
    with pytest.raises(AssertionError, match="GAE needs values"):
        estimate_gae(batch)
    with pytest.raises(AssertionError, match="V-trace needs values"):
        estimate_vtrace(batch)
    with pytest.raises(AssertionError, match="V-trace needs old_log_probs or prox_log_probs"):
        estimate_vtrace(replace(batch, values=torch.zeros(1, 1), rollout_log_probs=torch.zeros(1, 1)))
    with pytest.raises(AssertionError, match="GiGPO needs turns"):
        estimate_gigpo(batch)


@pytest.mark.parametrize("seed", range(4))
def test_generalised_advantages_can_be_whitened_within_each_group(seed: int):
    batch = draw_ragged(seed, 9, 7, 3)
    raw, found = estimate_gae(batch, whiten=False), estimate_gae(batch, by_group=True)
    trained = (batch.loss_mask > 0) & batch.trainable[:, None]
    for group in range(3):
        members = trained & (batch.group_ids == group)[:, None]
        values = raw.advantages[members].tolist()
        mean = sum(values) / max(len(values), 1)
        std = (sum((v - mean) ** 2 for v in values) / max(len(values), 1)) ** 0.5
        expected = [(v - mean) / (std + 1e-5) if std else 0.0 for v in values]
        assert found.advantages[members].tolist() == pytest.approx(expected, abs=1e-10)
    assert float(found.advantages[~trained].abs().sum()) == 0
    assert torch.equal(found.returns, raw.returns)


@pytest.mark.parametrize("case", [case for case in MASKED_NORMALIZATION if not case["kwargs"]["unbiased"]], ids=lambda case: case["id"])
def test_whitening_by_group_is_what_areal_does_to_each_group(case):
    """Its group_adv_norm calls masked_normalization, by default biased, on the rows of each group: recorded numbers of that function."""
    x, mask, recorded = case["kwargs"]["x"].double(), case["kwargs"]["mask"].double(), torch.tensor(case["outputs"]["out"]).double()
    rows, width = x.shape
    batch = TrainBatch(
        tokens=torch.zeros(2 * rows, width, dtype=torch.int64),
        lengths=torch.full((2 * rows,), width),
        loss_mask=mask.repeat(2, 1),
        rewards=torch.zeros(2 * rows, dtype=torch.float64),
        group_ids=torch.arange(2).repeat_interleave(rows),
        trainable=torch.ones(2 * rows, dtype=torch.bool),
        values=torch.cat([-x, -(3 * x + 1)]),  # nothing is paid, and nothing comes after a step: the advantage is minus the value
    )
    found = estimate_gae(batch, gamma=0.0, lam=0.0, by_group=True).advantages
    torch.testing.assert_close(found[:rows], recorded * mask, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[rows:], found[:rows], rtol=1e-4, atol=1e-4)  # another scale and mean, up to epsilon

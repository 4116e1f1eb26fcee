"""Settings of algorithms: the defaults are those of the papers and frameworks that the docstrings name, and each value is checked."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from samples import make_batch

from rollouts.algorithms import presets
from rollouts.algorithms.anchors import compute_turn_levels, step_returns
from rollouts.algorithms.covariance import token_covariances
from rollouts.algorithms.estimators import estimate_gigpo, estimate_reinforce_plus_plus
from rollouts.algorithms.kl import k1
from rollouts.algorithms.losses import KLTerm, kl_cov_policy_loss, value_loss
from rollouts.algorithms.preferences import pair_mean
from rollouts.algorithms.surrogates import clipped_sequence_ratio, dppo, sequence_ratio, token_ratio
from rollouts.errors import ConfigError, DataError
from rollouts.types import Algorithm, TokenOutputs, Turns

DEFAULTS = """
advantages.shape_rewards: bias=0.0 scale=1.0 low=-inf high=inf
advantages.penalize_overlong: factor=1.0 bounded=True
advantages.compute_advantages: baseline=0.0 scale=1.0
advantages.normalize_by_group: std_of_centered=False epsilon=0.0001 keep_single=False
advantages.length_weighted_mean: keep_single=False
advantages.gpg_advantages: f_norm=1.0 keep_single=False
advantages.pass_at_k_advantages: epsilon=1e-06
advantages.gdpo_advantages: epsilon=0.0001 keep_single=False
advantages.discounted_returns: gamma=1.0
advantages.gae: gamma=1.0 lam=0.95
advantages.optimal_token_baseline: compact=True keep_tail=True epsilon=1e-08 keep_single=False
advantages.RatioClips: rho=1.0 pg_rho=1.0
advantages.vtrace: gamma=1.0 lam=1.0
anchors.GiGPOSettings: gamma=0.95 omega=1.0 across_steps=False epsilon=1e-06 keep_single=False default_step_reward=0.0
anchors.episode_advantages: across_steps=False epsilon=1e-06 keep_single=False
anchors.step_advantages: epsilon=1e-06
anchors.fill_turn_rewards: default_step_reward=0.0
corrections.importance_weights: log_bound=20.0
corrections.anchor_to_proximal: cap=5.0 drop=True segment_wise=False missed_as_proximal=False log_bound=20.0
corrections.truncate_weights: cap=2.0 log_bound=20.0
corrections.mask_weights: cap=2.0 log_bound=20.0
corrections.decoupled_ppo_loss: clip_range=0.2
corrections.reject_ratios: from_mask=False
corrections.reject_divergence: from_mask=False
corrections.limit_second_moment: threshold=0.04
corrections.mask_off_policy_rows: against_old=False
corrections.off_policy_metrics: count_empty_rows=False log_bound=20.0
covariance.clip_cov_tokens: fraction=0.0002 cov_low=1.0 cov_high=5.0
covariance.kl_cov_tokens: fraction=0.0002
covariance.drop_clip_cov: fraction=0.0002 cov_low=1.0 cov_high=5.0 seed=0
covariance.select_kl_cov: fraction=0.0002
estimators.estimate_group_relative: epsilon=0.0001 keep_single=False
estimators.estimate_reinforce_plus_plus_baseline: kl_coef=0.0 whiten=True keep_single=False
estimators.estimate_greedy_baseline: kl_coef=0.0
estimators.estimate_opo: keep_single=False
estimators.estimate_gpg: f_norm=1.0 keep_single=False
estimators.estimate_pass_at_k: epsilon=1e-06
estimators.estimate_gdpo: epsilon=0.0001 whiten=True keep_single=False
estimators.estimate_reinforce_plus_plus: gamma=1.0 kl_coef=0.0 whiten=True
estimators.estimate_gae: gamma=1.0 lam=0.95 kl_coef=0.0 whiten=True by_group=False
estimators.estimate_vtrace: gamma=1.0 lam=1.0 clip_rho=1.0 clip_pg_rho=1.0 kl_coef=0.0 whiten=False
estimators.estimate_optimal_token_baseline: kl_coef=0.0 keep_tail=True epsilon=1e-08 keep_single=False
kl_control.measure_kl: count_empty_rows=True epsilon=0.0
logprobs.token_log_probs: temperature=1.0
logprobs.token_entropy: temperature=1.0
logprobs.chunked_log_probs: with_entropy=False
loss_weights.token_mean: epsilon=0.0
loss_weights.sample_mean: count_empty_rows=False epsilon=0.0
loss_weights.sample_sum: count_empty_rows=False
loss_weights.fixed_length_mean: count_empty_rows=False
losses.KLTerm: coef=0.0 unbiased=False
losses.policy_loss: entropy_coef=0.0
losses.clipped_policy_loss: low=0.2 high=0.2 entropy_coef=0.0
losses.gmpo_policy_loss: low=0.4 high=0.4 entropy_coef=0.0 epsilon=0.0
losses.kl_cov_policy_loss: coef=1.0 entropy_coef=0.0
losses.corrected_loss: from_own=False
losses.value_loss: clip=0.2 factor=0.5
losses.ppo_loss: clip_range=0.2
losses.compute_policy_loss: clip_ratio=0.2
losses.compute_value_loss: cliprange_value=0.2
kto.kto_answer_loss: beta=0.1 desirable_weight=1.0 undesirable_weight=1.0
kto.kto_loss: beta=0.1 desirable_weight=1.0 undesirable_weight=1.0
preference_objectives.dpo: beta=0.1 nll_coef=0.0
preference_objectives.cdpo: beta=0.1 label_smoothing=0.1
preference_objectives.robust_dpo: beta=0.1 label_smoothing=0.1
preference_objectives.ipo: beta=0.1
preference_objectives.slic: beta=0.1 nll_coef=0.0
preference_objectives.kto: beta=0.1 desirable_weight=1.0 undesirable_weight=1.0
preference_objectives.orpo: beta=0.1
preference_objectives.simpo: beta=2.0 gamma=1.0
preferences.smoothed_pair_loss: label_smoothing=0.1
preferences.robust_pair_loss: label_smoothing=0.1
preferences.simpo_pair_loss: gamma=0.5
preferences.dpo_loss: beta=0.1
preferences.odds_ratio_loss: beta=0.1
preferences.orpo_loss: beta=0.1
preferences.sequence_log_probs: average=False
preferences.split_pairs: num_shards=1
preferences.preference_loss: beta=0.1 reference_free=False average=False nll_coef=0.0
preferences.score_loss: margin_from_rewards=False
presets.grpo: clip_low=0.2 clip_high=0.2 kl_coef=0.0 epsilon=0.0001 entropy_coef=0.0
presets.dr_grpo: clip_low=0.2 clip_high=0.2
presets.dapo: clip_low=0.2 clip_high=0.28 epsilon=0.0001
presets.gspo: clip_low=0.0003 clip_high=0.0004 epsilon=0.0001
presets.gmpo: clip_low=0.4 clip_high=0.4 epsilon=0.0001
presets.cispo: clip_high=0.28 clip_low=1.0 epsilon=0.0001
presets.sapo: tau_pos=1.0 tau_neg=1.05 epsilon=0.0001
presets.dppo: low=0.2 high=0.2 cap=20.0 epsilon=0.0001
presets.dppo_kl: low=0.05 high=0.05 cap=20.0 epsilon=0.0001
presets.max_rl: clip_low=0.2 clip_high=0.28
presets.pass_at_k: clip_low=0.2 clip_high=0.28 divide_by_std=True epsilon=1e-06
presets.gdpo: clip_low=0.2 clip_high=0.28 epsilon=0.0001 whiten=True
presets.kl_cov: fraction=0.0002 coef=1.0 epsilon=0.0001
presets.gpg: f_norm=1.0
presets.reinforce_plus_plus: kl_coef=0.01 gamma=1.0 clip_low=0.2 clip_high=0.2
presets.reinforce_plus_plus_baseline: kl_coef=0.0 clip_low=0.2 clip_high=0.2
presets.ppo: gamma=1.0 lam=0.95 clip_low=0.2 clip_high=0.2 kl_coef=0.0 entropy_coef=0.0 by_group=False
presets.gigpo: gamma=0.95 omega=1.0 clip_low=0.2 clip_high=0.2 kl_coef=0.0 default_step_reward=0.0 divide_by_std=True epsilon=1e-06 entropy_coef=0.0
presets.decoupled: cap=5.0 drop=True segment_wise=False missed_as_proximal=False
presets.truncated: cap=2.0
statistics.group_std: unbiased=True
statistics.group_rms: unbiased=True
statistics.batch_std: unbiased=True
statistics.batch_rms: unbiased=True
statistics.masked_mean: epsilon=0.0
statistics.masked_var: unbiased=True epsilon=0.0
statistics.whiten: shift_mean=True unbiased=True epsilon=1e-08 count_epsilon=0.0
surrogates.clipped_sequence_ratio: low=0.4 high=0.4 epsilon=0.0
surrogates.row_mean_advantages: epsilon=0.0
surrogates.row_geometric_mean: floor=1e-10 epsilon=0.0
surrogates.clipped: low=0.2 high=0.2
surrogates.cispo: low=1.0 high=0.28
surrogates.sapo: tau_pos=1.0 tau_neg=1.05
surrogates.dro: beta=0.1
surrogates.kl_cov: coef=1.0
surrogates.vespo: floor=1e-08 bound=20.0
surrogates.inside_binary_kl: epsilon=1e-08
surrogates.dppo: low=0.2 high=0.2 cap=20.0 log_ratio_bound=20.0
surrogates.penalized_ratio: advantage_scale=1.0 penalty=0.001
surrogates.cispo_fractions: low=1.0 high=0.28
surrogates.sapo_gates: tau_pos=1.0 tau_neg=1.05
"""  # noqa: E501


@pytest.mark.parametrize("line", DEFAULTS.strip().splitlines(), ids=lambda line: line.partition(":")[0])
def test_defaults_are_the_published_ones(line: str):
    """A user who names no value compares with the paper."""
    name, _, values = line.partition(": ")
    module, function = name.split(".")
    parameters = inspect.signature(getattr(importlib.import_module(f"rollouts.algorithms.{module}"), function)).parameters
    found = {p.name: p.default for p in parameters.values() if isinstance(p.default, int | float)}
    assert " ".join(f"{key}={value}" for key, value in found.items()) == values


REQUIRED: dict[str, dict[str, Any]] = {  # arguments without a default
    "dr_grpo": {"max_tokens": 8},
    "gdpo": {"components": "right=1 form=0.5"},
    "decoupled": {"algorithm": presets.grpo()},
    "truncated": {"algorithm": presets.grpo()},
}
NUMBERS = [
    (name, parameter)
    for name, function in inspect.getmembers(presets, inspect.isfunction)
    if function.__module__ == presets.__name__ and not name.startswith("_") and function.__annotations__.get("return") == "Algorithm"
    for parameter, kind in function.__annotations__.items()
    if kind in ("float", "int", "float | None", "int | None")
]


def make(name: str, **values: Any) -> Algorithm:
    return getattr(presets, name)(**{**REQUIRED.get(name, {}), **values})


@pytest.mark.parametrize(("name", "parameter"), NUMBERS)
def test_every_number_of_a_preset_is_checked(name: str, parameter: str):
    for value in (float("nan"), float("inf"), "0.2", True):
        with pytest.raises(ConfigError, match=rf"^{parameter} is .*expected"):
            make(name, **{parameter: value})
    optional = "None" in getattr(presets, name).__annotations__[parameter]
    if optional:
        make(name, **{parameter: None})
    else:
        with pytest.raises(ConfigError, match=rf"^{parameter} is None, expected"):
            make(name, **{parameter: None})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("grpo", {"clip_low": 0.0, "clip_high": 0.0, "kl_coef": 0.0, "epsilon": 0.0, "entropy_coef": 0.0}),
        ("decoupled", {"floor": 0.0}),
        ("decoupled", {"floor": 7.0, "cap": None}),
        ("truncated", {"floor": 0.0}),
        ("dppo", {"low": 0.0, "high": 1.0, "cap": 0.5}),
        ("dppo_kl", {"low": 0.0, "high": 0.0}),
        ("kl_cov", {"fraction": 0.0, "coef": 0.0}),
        ("kl_cov", {"fraction": 1.0}),
        ("cispo", {"clip_low": 1.0, "clip_high": 0.0}),
        ("ppo", {"gamma": 0.0, "lam": 0.0}),
        ("ppo", {"gamma": 1.0, "lam": 1.0}),
        ("gigpo", {"gamma": 0.0, "omega": 0.0}),
    ],
)
def test_the_ends_of_a_range_are_in_it(name: str, values: dict[str, float]):
    make(name, **values)


@pytest.mark.parametrize(("name", "values"), [("decoupled", {"floor": 5.0}), ("truncated", {"floor": 2.0}), ("truncated", {"cap": 0.0})])
def test_a_range_without_a_weight_in_it_is_refused(name: str, values: dict[str, float]):
    with pytest.raises(ConfigError, match="expected"):
        make(name, **values)


def test_a_weight_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match=r"components is 'right=x form=1', expected a number as the weight of 'right'"):
        presets.gdpo("right=x form=1")


def test_remax_reads_no_ratio():
    """Its samples are the policy's own: how the engine's log-probs differ changes nothing, and they may be missing."""
    loss = presets.remax().loss
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    batch = make_batch(mask, advantages=torch.randn(2, 3).double(), loss_weights=mask.double() / 2)
    log_probs = -torch.rand(2, 3).double()
    found = [
        loss(TokenOutputs(log_probs=log_probs), dataclasses.replace(batch, rollout_log_probs=anchor)).loss
        for anchor in (None, log_probs - 3, log_probs)
    ]
    assert batch.advantages is not None and batch.loss_weights is not None
    expected = -(batch.loss_weights * batch.advantages * log_probs).sum()
    for value in found:
        torch.testing.assert_close(value, expected)


def test_a_penalty_of_coefficient_one_is_subtracted():
    mask = torch.tensor([[1, 1]])
    batch = make_batch(
        mask,
        rewards=torch.tensor([2.0]).double(),
        old_log_probs=torch.full((1, 2), -1.0).double(),
        ref_log_probs=torch.full((1, 2), -1.5).double(),
    )
    returns = estimate_reinforce_plus_plus(batch, kl=k1, kl_coef=1.0, whiten=False).advantages
    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.5]]).double())  # 2 - 0.5 - 0.5, and 2 - 0.5


def test_rows_that_are_no_pairs_have_no_pair_weights():
    mask = torch.ones(4, 2)
    with pytest.raises(AssertionError, match="rows 2 and 3 have group ids"):
        pair_mean(make_batch(mask, group_ids=torch.tensor([0, 0, 1, 2])))
    with pytest.raises(AssertionError, match="3 rows are not pairs"):
        pair_mean(make_batch(mask[:3]))


def test_turn_levels_name_the_column_of_another_shape():
    states, rewards = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)
    for name, columns in (("rewards", (torch.zeros(3), torch.arange(2))), ("group_ids", (rewards, torch.arange(3)))):
        with pytest.raises(AssertionError, match=name):
            compute_turn_levels(*columns, states, torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="step_rewards"):
        compute_turn_levels(rewards, torch.arange(2), states, torch.zeros(2, 4))


@pytest.mark.parametrize("setting", ["clip", "huber", "factor"])
def test_settings_of_the_value_loss_are_more_than_0(setting: str):
    batch = make_batch(torch.ones(1, 2), values=torch.zeros(1, 2), returns=torch.ones(1, 2), loss_weights=torch.ones(1, 2))
    outputs = TokenOutputs(log_probs=torch.zeros(1, 2), values=torch.zeros(1, 2))
    with pytest.raises(AssertionError, match=f"{setting} is 0.0, expected more than 0"):
        value_loss(outputs, batch, **{setting: 0.0})


def test_ratios_of_rows_are_0_beside_the_mask():
    mask, log_probs = torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[-1.0, -2.0, -3.0]])
    for ratio in (sequence_ratio, partial(clipped_sequence_ratio, advantages=torch.ones(1, 3))):
        found = ratio(log_probs, log_probs - 0.2, mask)
        torch.testing.assert_close(found, torch.tensor([[0.0, 0.2, 0.2]]))


def test_a_small_cap_of_the_ratio_is_a_cap():
    log_probs, advantages = torch.tensor([[-1.0]]), torch.tensor([[1.0]])
    torch.testing.assert_close(dppo(torch.zeros(1, 1), log_probs, advantages, cap=0.5), torch.tensor([[0.5]]))


def test_columns_of_another_shape_are_named():
    with pytest.raises(AssertionError, match="trajectory_ids"):
        step_returns(torch.ones(3), torch.arange(2), 0.9)
    for advantages, mask, name in ((torch.ones(1, 2), torch.ones(2, 2), "advantages"), (torch.ones(2, 2), torch.ones(2, 1), "mask")):
        with pytest.raises(AssertionError, match=name):
            token_covariances(torch.ones(2, 2), advantages, mask)


def test_an_infinite_reward_of_a_turn_is_named():
    turns = Turns(ids=torch.tensor([[0, 1]]), states=torch.tensor([[0, 1]]), rewards=torch.tensor([[0.0, float("inf")]]))
    with pytest.raises(DataError, match="the reward of turn 1 of row 0 is inf"):
        estimate_gigpo(make_batch(torch.ones(1, 2), turns=turns))


def test_kl_cov_passes_its_terms_on():
    mask = torch.ones(1, 2)
    columns = {"advantages": mask, "loss_weights": mask, "old_log_probs": torch.zeros(1, 2), "ref_log_probs": torch.zeros(1, 2)}
    batch = make_batch(mask, selected=torch.zeros(1, 2, dtype=torch.bool), **columns)
    outputs = TokenOutputs(log_probs=torch.full((1, 2), 2.0), entropy=torch.full((1, 2), 3.0))
    bounded = partial(token_ratio, bound=1.0)
    plain = kl_cov_policy_loss(outputs, batch, ratio=bounded).loss
    torch.testing.assert_close(plain, torch.tensor(-2 * math.e))
    torch.testing.assert_close(kl_cov_policy_loss(outputs, batch, ratio=bounded, entropy_coef=0.1).loss, plain - 0.6)
    torch.testing.assert_close(kl_cov_policy_loss(outputs, batch, ratio=bounded, kl=KLTerm(k1, 0.1)).loss, plain + 0.4)


def test_sapo_reports_the_gate_of_its_temperatures():
    mask, old = torch.ones(1, 2), torch.zeros(1, 2)
    columns = {"loss_weights": mask, "old_log_probs": old}
    outputs = TokenOutputs(log_probs=torch.full((1, 2), 0.5))
    for sign, name in ((1.0, "tau_pos"), (-1.0, "tau_neg")):
        batch = make_batch(mask, advantages=sign * mask, **columns)
        plain, steep = (float(presets.sapo(**values).loss(outputs, batch).metrics["gate"]) for values in ({}, {name: 4.0}))
        assert steep < plain - 0.1

"""The KL controller against the paper's formula, step by step, and the KL that it reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.algorithms.kl import k2
from rollouts.algorithms.kl_control import measure_kl, update_kl_control
from rollouts.config import RLTrainingConfig
from rollouts.config_files import from_dict, to_dict
from rollouts.errors import ConfigError
from rollouts.types import KLControl


def naive_controller(kl_coef: float, target: float, horizon: float, measured: list[float], counts: list[int]) -> list[float]:
    """Ziegler et al. 2019, section 2.2: e = clip(KL / target - 1, -0.2, 0.2); beta *= 1 + K e, K = samples / horizon."""
    out = []
    for kl, n in zip(measured, counts, strict=True):
        e = kl / target - 1
        e = 0.2 if e > 0.2 else -0.2 if e < -0.2 else e
        kl_coef = kl_coef * (1 + n / horizon * e)
        out.append(kl_coef)
    return out


@given(
    st.floats(1e-3, 2),
    st.floats(0.01, 10),
    st.floats(500, 20_000),
    st.lists(st.tuples(st.floats(-5, 50), st.integers(1, 512)), min_size=1, max_size=6),
)
def test_the_coefficient_follows_the_paper(kl_coef: float, target: float, horizon: float, steps: list[tuple[float, int]]):
    control, found = KLControl(kl_coef=kl_coef, target=target, horizon=horizon), []
    for kl, n in steps:
        control = update_kl_control(control, kl, n)
        found.append(control.kl_coef)
    assert found == pytest.approx(naive_controller(kl_coef, target, horizon, [kl for kl, _ in steps], [n for _, n in steps]), rel=1e-12)


def test_the_coefficient_rises_above_the_target_and_falls_below_it():
    control = KLControl(kl_coef=0.1, target=0.5, horizon=100)
    assert update_kl_control(control, 5.0, 10).kl_coef == pytest.approx(0.1 * 1.02)
    assert update_kl_control(control, 0.0, 10).kl_coef == pytest.approx(0.1 * 0.98)
    assert update_kl_control(control, 0.5, 10) == control


def test_a_control_without_a_target_is_fixed():
    control = KLControl(kl_coef=0.1)
    assert update_kl_control(control, 5.0, 10) is control
    assert update_kl_control(control, math.nan, 10) is control


def test_the_coefficient_can_always_rise_again():
    control = KLControl(kl_coef=0.1, target=1.0, horizon=1.0)
    assert update_kl_control(control, 0.0, 100).kl_coef == pytest.approx(0.01)
    for _ in range(400):
        control = update_kl_control(control, 0.0, 100)
    assert control.kl_coef > 0
    assert update_kl_control(control, 9.0, 100).kl_coef > control.kl_coef


@pytest.mark.parametrize(
    "wrong",
    [
        {"kl_coef": -0.1},
        {"kl_coef": math.nan},
        {"kl_coef": math.inf},
        {"kl_coef": "0.1"},
        {"kl_coef": 0.0, "target": 0.1},
        {"target": 0.0},
        {"target": math.nan},
        {"target": math.inf},
        {"horizon": 0.0},
        {"horizon": math.inf},
        {"horizon": None},
    ],
)
def test_numbers_out_of_range_are_refused_by_name(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KLControl(**{"kl_coef": 0.1, **wrong})


def test_an_infinite_kl_is_an_assertion():
    with pytest.raises(AssertionError, match="current_kl is nan"):
        update_kl_control(KLControl(kl_coef=0.1, target=1.0), math.nan, 4)


def test_a_configuration_with_a_controller_goes_through_json():
    config = RLTrainingConfig(kl_control=KLControl(kl_coef=0.1, target=0.02), value_clip=None, critic_warmup_steps=3)
    assert from_dict(RLTrainingConfig, to_dict(config)) == config
    with pytest.raises(ConfigError, match="value_clip"):
        RLTrainingConfig(value_clip=0.0)
    with pytest.raises(ConfigError, match="critic_warmup_steps"):
        RLTrainingConfig(critic_warmup_steps=-1)


ROWS = {
    "log_probs": torch.tensor([[0.0, -1.0, -2.0, math.nan], [0.0, -0.5, math.inf, -1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
    "ref_log_probs": torch.tensor([[0.0, -1.5, -1.0, 0.0], [0.0, -2.5, 0.0, math.nan], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
    "loss_mask": torch.tensor([[0.0, 1.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64),
}


def test_the_kl_is_a_mean_over_rows_of_means_over_trained_tokens_and_sees_no_others():
    rows = [((-1.0 + 1.5) + (-2.0 + 1.0)) / 2, -0.5 + 2.5]
    assert float(measure_kl(**ROWS)) == pytest.approx(sum(rows) / 3, rel=1e-12)
    assert float(measure_kl(**ROWS, count_empty_rows=False)) == pytest.approx(sum(rows) / 2, rel=1e-12)
    assert float(measure_kl(**ROWS, epsilon=1.0)) == pytest.approx((-0.5 / 3 + 2.0 / 2) / 3, rel=1e-12)
    assert float(measure_kl(**ROWS, kl=k2)) == pytest.approx(((0.125 + 0.5) / 2 + 2.0) / 3, rel=1e-12)


def test_the_kl_of_a_batch_without_trained_tokens_is_0():
    empty = {**ROWS, "loss_mask": torch.zeros(3, 4, dtype=torch.float64)}
    assert float(measure_kl(**empty)) == 0.0
    assert float(measure_kl(**empty, count_empty_rows=False)) == 0.0

"""kl: our compositions for the vectors of this group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parity.mapping import Parity
from rollouts.algorithms.advantages import apply_kl_penalty
from rollouts.algorithms.kl import KLEstimator, abs_kl, bounded, k1, k2, k3, straight_through, weighted
from rollouts.algorithms.kl_control import measure_kl, update_kl_control
from rollouts.types import KLControl

VERL: dict[str, KLEstimator] = {
    "kl": k1,
    "k1": k1,
    "abs": abs_kl,
    "mse": k2,
    "k2": k2,
    "low_var_kl": bounded(k3, log_ratio=20, value=10),
    "k3": bounded(k3, log_ratio=20, value=10),
}
SLIME: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}


def verl_estimator(name: str) -> KLEstimator:
    """A name that ends with + takes the value of the estimator and the gradient of k2."""
    return straight_through(VERL[name.removesuffix("+")]) if name.endswith("+") else VERL[name]


def slime_estimator(name: str, ratio: Tensor | None) -> KLEstimator:
    """Only low_var_kl is bounded, after it has been multiplied by the ratio."""
    kl = SLIME[name] if ratio is None else weighted(SLIME[name], ratio)
    return bounded(kl, value=10) if name == "low_var_kl" else kl


def verl_kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Mapping[str, Any]:
    kl = verl_estimator(kl_penalty)(logprob, ref_logprob)
    return {"kl": kl, "sum": kl.sum()}


def slime_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Mapping[str, Any]:
    kl = slime_estimator(kl_loss_type, importance_ratio)(log_probs, log_probs_base)
    return {"kl": kl, "sum": kl.sum()}


def areal_kl(log_probs: Tensor, log_probs_base: Tensor, kl_estimator: str, apply_clamp: bool) -> Mapping[str, Any]:
    kl = {"k1": k1, "k2": k2, "k3": k3}[kl_estimator]
    return {"kl": (bounded(kl, value=10) if apply_clamp else kl)(log_probs, log_probs_base)}


def verl_compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Mapping[str, Any]:
    everywhere = torch.ones_like(token_level_scores)
    return {"rewards": apply_kl_penalty(token_level_scores, old_log_prob, ref_log_prob, everywhere, kl_ratio, k1)[0]}


def control_of(type: str, kl_coef: float, target_kl: float, horizon: float) -> KLControl:
    return KLControl(kl_coef=kl_coef, target=target_kl if type == "adaptive" else None, horizon=horizon)


def verl_controllers(
    type: str, init_kl_coef: float, target_kl: float, horizon: float, current_kl: list[float], n_steps: list[int]
) -> Mapping[str, Any]:
    control, values = control_of(type, init_kl_coef, target_kl, horizon), []
    for kl, number in zip(current_kl, n_steps, strict=True):
        control = update_kl_control(control, kl, number)
        values.append(control.kl_coef)
    return {"values": values}


def verl_penalty_steps(
    steps: list[Mapping[str, Any]], type: str, kl_coef: float, target_kl: float, horizon: float, kl_penalty: str
) -> Mapping[str, Any]:
    control, kl, found = control_of(type, kl_coef, target_kl, horizon), verl_estimator(kl_penalty), []
    for step in steps:
        scores, old, ref, mask = (
            torch.tensor(step[name], dtype=torch.float64)
            for name in ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
        )
        rewards = apply_kl_penalty(scores, old, ref, mask, control.kl_coef, kl)[0]
        current = float(measure_kl(old, ref, mask, kl=kl, epsilon=1e-8))
        after = update_kl_control(control, current, len(scores))
        found.append({"token_level_rewards": rewards, "current_kl": current, "beta_used": control.kl_coef, "beta_after": after.kl_coef})
        control = after
    return {"steps": found}


MAPPINGS: dict[str, Parity] = {
    "verl_kl_penalty": Parity(
        run=verl_kl_penalty,
        ours="kl.k1, abs_kl, k2; bounded(k3, log_ratio=20, value=10); straight_through(kl) for the names with +",
        wrt=("logprob",),
        grad_of="sum",
    ),
    "slime_approx_kl": Parity(
        run=slime_approx_kl,
        ours="kl.k1, k2, k3, weighted(kl, ratio); bounded(kl, value=10) for low_var_kl",
        wrt=("log_probs",),
        grad_of="sum",
    ),
    "verl_compute_rewards": Parity(run=verl_compute_rewards, ours="advantages.apply_kl_penalty(kl=k1)"),
    "verl_kl_controllers": Parity(run=verl_controllers, ours="kl_control.update_kl_control"),
    "verl_apply_kl_penalty_sequence": Parity(
        run=verl_penalty_steps,
        ours="advantages.apply_kl_penalty, kl_control.measure_kl(epsilon=1e-8), kl_control.update_kl_control",
    ),
    "areal_kl_estimator": Parity(run=areal_kl, ours="kl.k1, k2, k3; bounded(kl, value=10) with apply_clamp"),
}
NOT_OFFERED: dict[str, str] = {}

"""kl: our compositions for the vectors of this group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from parity.mapping import Parity
from rollouts.kl import KLEstimator, abs_kl, bounded, k1, k2, k3, straight_through, weighted

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
    "areal_kl_estimator": Parity(run=areal_kl, ours="kl.k1, k2, k3; bounded(kl, value=10) with apply_clamp"),
}
NOT_OFFERED: dict[str, str] = {}

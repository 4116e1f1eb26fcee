"""KL(policy || reference) estimated at the sampled tokens (Schulman 2020, "Approximating KL divergence"), and forms made of estimators.

An estimator is f(log_probs, ref_log_probs) -> [B, T] in nats. A combinator takes one and returns one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor

from rollouts.algorithms.logprobs import finite_exp

KLEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(log_probs, ref_log_probs), each [B, T] -> estimate of KL(policy || reference) at each token [B, T]."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log p - log p_ref: unbiased, can be negative. Its gradient has mean 0, so in a loss it does not pull to the reference: use it in
    rewards, or as straight_through(k1)."""
    return log_probs - ref_log_probs


def abs_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log p - log p_ref|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log p - log p_ref)^2 / 2: biased, low variance; its gradient on policy is that of the KL divergence."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """p_ref / p - 1 - log(p_ref / p): unbiased, never negative (GRPO, Shao et al. 2024, equation 4)."""
    log_ratio = ref_log_probs - log_probs
    return finite_exp(log_ratio) - 1 - log_ratio


def bounded(kl: KLEstimator, *, log_ratio: float | None = None, value: float | None = None) -> KLEstimator:
    """`kl` with log p - log p_ref clamped to [-log_ratio, log_ratio] and its result to [-value, value].

    Beyond a bound the gradient is 0. verl bounds k3 by 20 and 10, AReaL the result of all three estimators by 10; None = no bound.
    """
    assert log_ratio is None or log_ratio > 0, f"log_ratio is {log_ratio}, expected more than 0"
    assert value is None or value > 0, f"value is {value}, expected more than 0"
    return partial(_bounded, kl=kl, log_ratio=log_ratio, value=value)


def _bounded(log_probs: Tensor, ref_log_probs: Tensor, *, kl: KLEstimator, log_ratio: float | None, value: float | None) -> Tensor:
    if log_ratio is not None:
        log_probs, ref_log_probs = (log_probs - ref_log_probs).clamp(-log_ratio, log_ratio), ref_log_probs.new_zeros(())
    estimate = kl(log_probs, ref_log_probs)
    return estimate if value is None else estimate.clamp(-value, value)


def weighted(kl: KLEstimator, weights: Tensor) -> KLEstimator:
    """`kl` times weights # [B, T]: with the ratio p / p_old, gradient included, it is unbiased at tokens drawn from p_old.

    bounded(weighted(kl, ratio)) bounds the product; policy_loss(kl=KLTerm(kl, unbiased=True)) multiplies the bounded `kl`.

    Source: DeepSeek-V3.2 2025, section 3.1 (unbiased KL estimate).
    """
    return partial(_weighted, kl=kl, weights=weights)


def _weighted(log_probs: Tensor, ref_log_probs: Tensor, *, kl: KLEstimator, weights: Tensor) -> Tensor:
    return kl(log_probs, ref_log_probs) * weights


def straight_through(kl: KLEstimator) -> KLEstimator:
    """The value of `kl` with the gradient of k2, which is the gradient of the KL divergence in expectation (verl's "k1+", "k3+").

    k2 - sg(k2) + sg(kl), sg = no gradient.
    """
    return partial(_straight_through, kl=kl)


def _straight_through(log_probs: Tensor, ref_log_probs: Tensor, *, kl: KLEstimator) -> Tensor:
    carrier = k2(log_probs, ref_log_probs)
    return carrier - carrier.detach() + kl(log_probs, ref_log_probs).detach()

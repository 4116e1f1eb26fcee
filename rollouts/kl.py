"""KL(policy || reference) estimated at the sampled tokens (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

KLEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(log_probs, ref_log_probs), each [B, T] -> estimate of KL(policy || reference) at each token [B, T]."""


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log p - log p_ref: unbiased, can be negative."""
    return log_probs - ref_log_probs


def abs_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log p - log p_ref|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log p - log p_ref)^2 / 2: biased, low variance; its gradient is that of the KL divergence."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """p_ref / p - 1 - log(p_ref / p): unbiased, never negative (GRPO, Shao et al. 2024, equation 4)."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - 1 - log_ratio

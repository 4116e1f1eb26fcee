"""Preference losses as naive float64 loops, straight from the papers. Nothing here is shared with the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

Number = Any  # float, or a 0-dimensional Tensor where a gradient is wanted


def exp(x: Number) -> Number:
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


def log(x: Number) -> Number:
    return x.log() if isinstance(x, Tensor) else math.log(x)


def sigmoid(x: Number) -> Number:
    return 1 / (1 + exp(-x))


def answer_log_prob(log_probs: Sequence[Number], mask: Sequence[float]) -> Number:
    total: Number = 0.0
    for log_prob, m in zip(log_probs, mask, strict=True):
        if m > 0:
            total = total + m * log_prob
    return total


def dpo(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float) -> Number:
    """Rafailov et al. 2023, equation 7, of one pair."""
    return -log(sigmoid(beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)))


def ipo(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float) -> Number:
    """Azar et al. 2023, equation 17: h(y, y') = log(p(y) p_ref(y') / (p(y') p_ref(y)))."""
    h = (chosen + ref_rejected) - (rejected + ref_chosen)
    return (h - 1 / (2 * beta)) ** 2


def smoothed(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float, epsilon: float = 0.1) -> Number:
    """Mitchell 2023, equation 3: DPO's loss with probability 1 - epsilon, that of the exchanged pair with epsilon."""
    right = dpo(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (1 - epsilon) * right + epsilon * dpo(rejected, chosen, ref_rejected, ref_chosen, beta)


def robust(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float, epsilon: float = 0.1) -> Number:
    """Chowdhury et al. 2024, equation 10."""
    right = dpo(chosen, rejected, ref_chosen, ref_rejected, beta)
    exchanged = dpo(rejected, chosen, ref_rejected, ref_chosen, beta)
    return ((1 - epsilon) * right - epsilon * exchanged) / (1 - 2 * epsilon)


def hinge(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float) -> Number:
    """Zhao et al. 2023, equation 1, of log-ratios (Liu et al. 2023, equation 10)."""
    missing = 1 - (beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected))
    return missing if missing > 0 else 0 * missing


def simpo(chosen: Number, rejected: Number, ref_chosen: float, ref_rejected: float, beta: float, gamma: float = 0.5) -> Number:
    """Meng et al. 2024, equation 6, of log-probs per token; the reference is not part of it."""
    return -log(sigmoid(beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected) - gamma))


def orpo(chosen: Number, rejected: Number, beta: float) -> Number:
    """Hong et al. 2024, equations 4, 6 and 7, of log-probs per token."""
    odds = [exp(x) / (1 - exp(x)) for x in (chosen, rejected)]
    return -chosen - beta * log(sigmoid(log(odds[0] / odds[1])))


def kto(log_ratio: Number, desirable: bool, point: float, beta: float, weights: tuple[float, float] = (1.0, 1.0)) -> Number:
    """Ethayarajh et al. 2024, equation 8, of one answer: lambda_y - v(x, y)."""
    if desirable:
        return weights[0] - weights[0] * sigmoid(beta * (log_ratio - point))
    return weights[1] - weights[1] * sigmoid(beta * (point - log_ratio))


def bradley_terry(chosen: Number, rejected: Number, margin: float = 0.0) -> Number:
    """-log of the probability that the chosen answer wins by the margin (Ouyang et al. 2022, equation 1)."""
    return -log(sigmoid(chosen - rejected - margin))

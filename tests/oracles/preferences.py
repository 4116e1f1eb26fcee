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


def bradley_terry(chosen: Number, rejected: Number, margin: float = 0.0) -> Number:
    """-log of the probability that the chosen answer wins by the margin (Ouyang et al. 2022, equation 1)."""
    return -log(sigmoid(chosen - rejected - margin))

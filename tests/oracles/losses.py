"""Ratios, surrogates, KL estimators, the value loss and selections by covariance as naive loops, straight from the papers.

Nothing here is shared with the library. A policy log-prob is a 0-dimensional float64 tensor, so the same loop gives the gradient by
autograd; all else is a float. A row is a list, and a function of a row returns 0 where its mask is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Number = Any  # a 0-dimensional tensor, or a float
Row = Sequence[Number]


def exp(x: Number) -> Number:
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


def log(x: Number) -> Number:
    return x.log() if isinstance(x, Tensor) else math.log(x)


def constant(x: Number) -> float:
    """A number without gradient."""
    return float(x.detach()) if isinstance(x, Tensor) else float(x)


def clip(x: Number, low: float, high: float) -> Number:
    return low if x < low else high if x > high else x


# -- log-ratios of a row


def on(mask: Sequence[float]) -> list[int]:
    return [t for t, m in enumerate(mask) if m > 0]


def token_ratio(log_probs: Row, old: Sequence[float], mask: Sequence[float], bound: float = math.inf) -> list[Number]:
    return [clip(p - q, -bound, bound) if m > 0 else 0.0 for p, q, m in zip(log_probs, old, mask, strict=True)]


def sequence_mean_ratio(log_probs: Row, old: Sequence[float], mask: Sequence[float]) -> list[Number]:
    """log (p(y) / p_old(y)) / |y| at each token (GSPO)."""
    places = on(mask)
    if not places:
        return [0.0] * len(mask)
    mean = sum(log_probs[t] - old[t] for t in places) / len(places)
    return [mean if m > 0 else 0.0 for m in mask]


def sequence_ratio(log_probs: Row, old: Sequence[float], mask: Sequence[float], bound: float = math.inf) -> list[Number]:
    """GSPO-token: sg(log s) + log p_t - sg(log p_t)."""
    whole = sequence_mean_ratio(log_probs, old, mask)
    return [clip(constant(s) + p - constant(p), -bound, bound) if m > 0 else 0.0 for s, p, m in zip(whole, log_probs, mask, strict=True)]


def sequence_sum_ratio(log_probs: Row, old: Sequence[float], mask: Sequence[float], bound: float = math.inf) -> list[Number]:
    total = clip(sum(token_ratio(log_probs, old, mask, bound)), -bound, bound)
    return [total if m > 0 else 0.0 for m in mask]


def capped(row: Row, cap: float) -> list[Number]:
    """r is at most cap."""
    return [min(x, math.log(cap)) for x in row]


def gmpo_row(log_probs: Row, old: Sequence[float], mask: Sequence[float], advantages: Sequence[float], low: float, high: float) -> Number:
    """-A (prod_t min over {r_t, clip(r_t, e^-low, e^high)} in the direction of A)^(1 / |y|), A the mean advantage of the row."""
    places = on(mask)
    if not places:
        return 0.0
    product: Number = 1.0
    for t in places:
        r = exp(log_probs[t] - old[t])
        bounded = clip(r, math.exp(-low), math.exp(high))
        if advantages[t] > 0:
            product = product * min(r, bounded)
        elif advantages[t] < 0:
            product = product * max(r, bounded)
    mean = sum(advantages[t] for t in places) / len(places)
    return -mean * product ** (1 / len(places))


# -- surrogates of a token: r is the ratio, log_p the log-prob, a the advantage


def reinforce(log_r: Number, log_p: Number, a: float) -> Number:
    return -a * log_p


def importance_weighted(log_r: Number, log_p: Number, a: float) -> Number:
    return -a * exp(log_r)


def clipped(log_r: Number, log_p: Number, a: float, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Number:
    r = exp(log_r)
    objective = min(r * a, clip(r, 1 - low, 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


def cispo(log_r: Number, log_p: Number, a: float, low: float = 1.0, high: float = 0.28) -> Number:
    return -clip(constant(exp(log_r)), 1 - low, 1 + high) * a * log_p


def sapo(log_r: Number, log_p: Number, a: float, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Number:
    tau = tau_pos if a > 0 else tau_neg
    return -a * 4 / tau / (1 + exp(-tau * (exp(log_r) - 1)))


def dro(log_r: Number, log_p: Number, a: float, beta: float = 0.1) -> Number:
    return -(log_p * a) + beta / 2 * log_r**2


def vespo(
    log_r: Number, log_p: Number, a: float, k_pos: float = 2.0, lam_pos: float = 3.0, k_neg: float = 3.0, lam_neg: float = 2.0
) -> Number:
    w = min(max(constant(exp(log_r)), 1e-8), math.exp(20))
    k, lam = (k_pos, lam_pos) if a >= 0 else (k_neg, lam_neg)
    return -(w**k) * math.exp(lam * (1 - w)) * a * log_p


def kl_cov(log_r: Number, log_p: Number, a: float, selected: bool, coef: float = 1.0) -> Number:
    return -a * exp(log_r) + (coef * max(log_r, -log_r) if selected else 0.0)


def probabilities(log_r: Number, log_p: Number) -> tuple[float, float]:
    """(p, p_old)."""
    return math.exp(constant(log_p)), math.exp(constant(log_p) - constant(log_r))


def inside_tv(log_r: Number, log_p: Number, a: float, low: float, high: float) -> bool:
    p, p_old = probabilities(log_r, log_p)
    return p <= p_old + high if a > 0 else p >= p_old - low


def inside_binary_kl(log_r: Number, log_p: Number, a: float, low: float, high: float) -> bool:
    """KL of a coin that shows the token with p_old from one that shows it with p."""
    p, q = probabilities(log_r, log_p)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return kl <= high or p <= q if a > 0 else kl <= low or p >= q


def dppo(log_r: Number, log_p: Number, a: float, inside: Callable[..., bool], low: float, high: float, cap: float = 20.0) -> Number:
    return -min(constant(exp(log_r)), cap) * a * log_p if inside(log_r, log_p, a, low, high) else 0.0 * log_p


def penalized_ratio(log_r: Number, log_p: Number, a: float, width: float, scale: float, penalty: float) -> Number:
    """Penalized ratio with the symmetric region |p - p_old| <= width."""
    p, p_old = probabilities(log_r, log_p)
    kept = -scale * a * exp(log_r) if abs(p - p_old) <= width else 0.0
    return kept + penalty * log_r**2


# -- KL of a token


def k1(log_p: Number, log_q: float) -> Number:
    return log_p - log_q


def abs_kl(log_p: Number, log_q: float) -> Number:
    return max(log_p - log_q, log_q - log_p)


def k2(log_p: Number, log_q: float) -> Number:
    return (log_p - log_q) ** 2 / 2


def k3(log_p: Number, log_q: float) -> Number:
    ratio = exp(log_q - log_p)
    return ratio - 1 - log(ratio)


# -- the critic


def huber(error: Number, delta: float | None) -> Number:
    """error^2 up to delta, then its tangent."""
    size = max(error, -error)
    return error**2 if delta is None or size <= delta else delta**2 + 2 * delta * (size - delta)


def value_loss(value: Number, old: float, target: float, width: float | None, delta: float | None = None) -> Number:
    plain = huber(value - target, delta)
    return plain if width is None else max(plain, huber(clip(value, old - width, old + width) - target, delta))


# -- selection by covariance


def covariances(
    log_probs: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]], mask: Sequence[Sequence[float]]
) -> dict[tuple[int, int], float]:
    """(A - mean A)(log p - mean log p) of each token that is trained on, by place."""
    places = [(b, t) for b, row in enumerate(mask) for t in on(row)]
    if not places:
        return {}
    mean_a = sum(advantages[b][t] for b, t in places) / len(places)
    mean_p = sum(log_probs[b][t] for b, t in places) / len(places)
    return {(b, t): (advantages[b][t] - mean_a) * (log_probs[b][t] - mean_p) for b, t in places}


def kl_cov_places(found: dict[tuple[int, int], float], fraction: float) -> set[tuple[int, int]]:
    """The largest max(1, floor(fraction n))."""
    number = max(1, math.floor(fraction * len(found))) if found else 0
    return set(sorted(found, key=lambda place: -found[place])[:number])


def clip_cov_places(
    found: dict[tuple[int, int], float], clipped: Callable[[int, int], bool], fraction: float, low: float, high: float
) -> list[tuple[int, int]]:
    """The first max(1, floor(fraction n)) with low < covariance < high that the clip leaves, row by row."""
    number = max(1, math.floor(fraction * len(found)))
    return [place for place in sorted(found) if low < found[place] < high and not clipped(*place)][:number]

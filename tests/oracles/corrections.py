"""Naive loops for corrections, proximal log-probs and staleness, straight from their definitions. Rows are lists of floats (or of
0-dimensional tensors where a gradient is wanted); nothing here is shared with the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Number = Any
Rows = Sequence[Sequence[float]]


def tokens_of(mask: Sequence[float]) -> list[int]:
    return [t for t, m in enumerate(mask) if m > 0]


def judged(values: Sequence[float], mask: Sequence[float], how: str) -> list[float]:
    """Return the value by which each token of a row is judged: its own, or one number of the row."""
    own = [values[t] for t in tokens_of(mask)]
    if how == "token":
        return [values[t] if m > 0 else 0.0 for t, m in enumerate(mask)]
    if not own:
        return [0.0] * len(mask)
    row = {"sequence": sum(own), "geometric": sum(own) / len(own), "max": max(own), "min": min(own)}[how]
    return [row] * len(mask)


def inside(x: float, floor: float | None, cap: float | None) -> bool:
    return (floor is None or x >= floor) and (cap is None or x <= cap)


def weights(new: Rows, behavior: Rows, mask: Rows, how: str, floor: float | None, cap: float | None, drop: bool) -> list[list[float]]:
    """Importance weights of new against behavior; 0 where the mask is 0."""
    out: list[list[float]] = []
    for n, b, m in zip(new, behavior, mask, strict=True):
        log_ratio = [n[t] - b[t] if m[t] > 0 else 0.0 for t in range(len(m))]
        row: list[float] = []
        for x, on in zip(judged(log_ratio, m, how), m, strict=True):
            w = math.exp(x)
            if drop:
                w = w if inside(w, floor, cap) else 0.0
            else:
                w = w if floor is None else max(w, floor)
                w = w if cap is None else min(w, cap)
            row.append(w if on > 0 else 0.0)
        out.append(row)
    return out


def kept(
    statistic: Callable[[float, float], float], trainer: Rows, rollout: Rows, mask: Rows, how: str, floor: float | None, cap: float | None
):
    """1 where the judged statistic of (trainer, rollout) log-probs lies in [floor, cap], 0 elsewhere and where the mask is 0."""
    out: list[list[float]] = []
    for a, b, m in zip(trainer, rollout, mask, strict=True):
        values = [statistic(a[t], b[t]) if m[t] > 0 else 0.0 for t in range(len(m))]
        out.append([float(on > 0 and inside(x, floor, cap)) for x, on in zip(judged(values, m, how), m, strict=True)])
    return out


def decoupled_ppo(
    log_probs: Sequence[Sequence[Number]],
    prox: Rows,
    rollout: Rows,
    advantages: Rows,
    mask: Rows,
    low: float,
    high: float,
    cap: float | None,
    floor: float | None,
    segment: Rows | None = None,
) -> Number:
    """Hilton et al. 2022: E_rollout[prox / rollout * min(r A, clip(r) A)], r = p / prox, averaged over all tokens of the mask."""
    total, count = 0.0, 0
    for i, m in enumerate(mask):
        for t in tokens_of(m):
            count += 1
            weight = math.exp((prox if segment is None else segment)[i][t] - rollout[i][t])
            if not inside(weight, floor, cap):
                continue
            ratio = (log_probs[i][t] - prox[i][t]).exp() if isinstance(log_probs[i][t], Tensor) else math.exp(log_probs[i][t] - prox[i][t])
            clipped = min(max(ratio, 1 - low), 1 + high)
            total = total - weight * min(ratio * advantages[i][t], clipped * advantages[i][t])
    return total / max(count, 1)


def second_moment_kept(trainer: Rows, rollout: Rows, mask: Rows, threshold: float) -> list[list[float]]:
    """Drop the token with the largest squared difference, one at a time, until the mean of the others is below the threshold."""
    places = [(i, t) for i, m in enumerate(mask) for t in tokens_of(m)]
    moment = {(i, t): (trainer[i][t] - rollout[i][t]) ** 2 for i, t in places}
    while len(places) > 1 and sum(moment[p] for p in places) / len(places) >= threshold:
        places.remove(max(places, key=lambda p: moment[p]))
    return [[float((i, t) in places) for t in range(len(m))] for i, m in enumerate(mask)]


def off_policy_rows(log_probs: Rows, anchor: Rows, advantages: Rows, mask: Rows, threshold: float) -> list[list[float]]:
    out: list[list[float]] = []
    for n, b, a, m in zip(log_probs, anchor, advantages, mask, strict=True):
        own = tokens_of(m)
        drift = sum(b[t] - n[t] for t in own) / len(own) if own else 0.0
        out.append([0.0 if a[t] < 0 and drift > threshold else 1.0 for t in range(len(m))])
    return out


def off_policy_metrics(trainer: Rows, rollout: Rows, mask: Rows) -> dict[str, float]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    d = [trainer[i][t] - rollout[i][t] for i, m in enumerate(mask) for t in tokens_of(m)]
    rows = [(trainer[i], rollout[i], tokens_of(m)) for i, m in enumerate(mask) if tokens_of(m)]
    a = [-mean([x[t] for t in own]) for x, _, own in rows]
    b = [-mean([y[t] for t in own]) for _, y, own in rows]
    diff = [x - y for x, y in zip(a, b, strict=True)]
    return {
        "rollout_kl": -mean(d),
        "rollout_k3": mean([math.exp(x) - 1 - x for x in d]),
        "chi2_token": mean([math.exp(x) ** 2 - 1 for x in d]),
        "trainer_log_ppl": mean(a),
        "trainer_ppl": mean([math.exp(x) for x in a]),
        "rollout_log_ppl": mean(b),
        "rollout_ppl": mean([math.exp(x) for x in b]),
        "log_ppl_diff": mean(diff),
        "log_ppl_diff_abs": mean([abs(x) for x in diff]),
        "log_ppl_diff_max": max(diff, default=0.0),
        "log_ppl_diff_min": min(diff, default=0.0),
        "ppl_ratio": mean([math.exp(x) for x in diff]),
        "chi2_sequence": mean([math.exp(sum(x[t] - y[t] for t in own)) ** 2 - 1 for x, y, own in rows]),
    }


def proximal(rollout: float, trainer: float, version: int, current: int, geometric: bool) -> float:
    """The log-prob on the way from `version` (rollout) to `current` (trainer), one version before its end."""
    if version < 0 or version >= current:
        return rollout
    alpha = (current - 1 - version) / (current - version)
    if geometric:
        return (1 - alpha) * rollout + alpha * trainer
    return math.log((1 - alpha) * math.exp(rollout) + alpha * math.exp(trainer))

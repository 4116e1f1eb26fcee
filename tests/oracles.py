"""The algorithms as naive loops over lists of floats, straight from the papers. Slow, float64, no tensors."""

from __future__ import annotations

import math

Rows = list[list[float]]


def log_softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    z = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - z for x in logits]


def token_log_probs(logits: list[Rows], tokens: list[list[int]], temperature: float = 1.0) -> Rows:
    """log p(token t | tokens before t), 0 for the first."""
    return [
        [0.0] + [log_softmax([x / temperature for x in row[t - 1]])[ids[t]] for t in range(1, len(ids))]
        for row, ids in zip(logits, tokens, strict=True)
    ]


def group_advantages(rewards: list[float], groups: list[int], *, divide: bool, epsilon: float = 0.0) -> list[float]:
    """(r - mean) / (std + epsilon) of the group, std with n - 1; 0 where there is nothing to compare with."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(members) / len(members)
        if len(members) == 1 or all(r == members[0] for r in members):
            out.append(0.0)
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        out.append((reward - mean) / (std + epsilon) if divide else reward - mean)
    return out


def leave_one_out_advantages(rewards: list[float], groups: list[int]) -> list[float]:
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        out.append(reward - sum(others) / len(others) if others else 0.0)
    return out


def clipped_token_loss(log_prob: float, old: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """PPO equation 7, as a loss; dual clip equation 3."""
    ratio = math.exp(log_prob - old)
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def aggregate(losses: Rows, mask: Rows, how: str, groups: list[int] | None = None, length: int = 1) -> float:
    """Token losses to one number."""
    rows = [i for i, m in enumerate(mask) if sum(m) > 0]
    sums = {i: sum(x * w for x, w in zip(losses[i], mask[i], strict=True) if w > 0) for i in rows}
    if not rows:
        return 0.0
    if how == "token_mean":
        return sum(sums.values()) / sum(map(sum, mask))
    if how == "sample_mean":
        return sum(sums[i] / sum(mask[i]) for i in rows) / len(rows)
    if how == "sample_sum":
        return sum(sums.values()) / len(rows)
    if how == "fixed_length_mean":
        return sum(sums.values()) / len(rows) / length
    assert how == "group_token_mean"
    assert groups is not None
    kinds = sorted({groups[i] for i in rows})
    per_group = [sum(sums[i] for i in rows if groups[i] == g) / sum(sum(mask[i]) for i in rows if groups[i] == g) for g in kinds]
    return sum(per_group) / len(kinds)


def discounted_returns(rewards: list[float], mask: list[float], gamma: float) -> list[float]:
    """sum over later masked-in tokens, each one discounted by how many masked-in tokens lie between."""
    places = [t for t, m in enumerate(mask) if m > 0]
    out = [0.0] * len(mask)
    for i, t in enumerate(places):
        out[t] = sum(gamma ** (j - i) * rewards[places[j]] for j in range(i, len(places)))
    return out


def gae(rewards: list[float], values: list[float], mask: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 as the double sum."""
    places = [t for t, m in enumerate(mask) if m > 0]
    v = [values[t] for t in places] + [0.0]
    deltas = [rewards[t] + gamma * v[i + 1] - v[i] for i, t in enumerate(places)]
    out = [0.0] * len(mask)
    for i, t in enumerate(places):
        out[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(places)))
    return out

"""Naive float64 loops, straight from the papers, that the tests compare the vectorised code with.

Nothing here is shared with the library. Numbers are Python floats or 0-dimensional float64 tensors: with tensors the same loop also gives
the gradient by autograd. Masks, rewards and group numbers are plain lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

Number = Any  # float, or a 0-dimensional Tensor where a gradient is wanted


def exp(x: Number) -> Number:
    return x.exp() if isinstance(x, Tensor) else math.exp(x)


def clamp(x: Number, low: float, high: float) -> Number:
    return low if x < low else high if x > high else x


# -- log-probs


def log_softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(sum(math.exp(z - top) for z in logits))
    return [z - total for z in logits]


def log_probs(logits: Tensor, tokens: Tensor, temperatures: Sequence[float] | None = None) -> list[list[float]]:
    """log p(tokens[b, t] | before), from the logits one position earlier; 0 for the first token."""
    rows: list[list[float]] = []
    for b in range(tokens.shape[0]):
        heat = 1.0 if temperatures is None else temperatures[b]
        row = [0.0]
        for t in range(1, tokens.shape[1]):
            row.append(log_softmax([z / heat for z in logits[b, t - 1].tolist()])[int(tokens[b, t])])
        rows.append(row)
    return rows


def entropy(logits: Sequence[float]) -> float:
    return -sum(math.exp(z) * z for z in log_softmax(logits))


def entropies(logits: Tensor, temperatures: Sequence[float] | None = None) -> list[list[float]]:
    """Entropy of the distribution that each token was drawn from; 0 for the first token."""
    rows: list[list[float]] = []
    for b in range(logits.shape[0]):
        heat = 1.0 if temperatures is None else temperatures[b]
        rows.append([0.0] + [entropy([z / heat for z in logits[b, t].tolist()]) for t in range(logits.shape[1] - 1)])
    return rows


# -- groups


def members(groups: Sequence[int], group: int) -> list[int]:
    return [i for i, other in enumerate(groups) if other == group]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Divisor n - 1; 0 for one value."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def grpo_advantages(rewards: Sequence[float], groups: Sequence[int], epsilon: float | None) -> list[float]:
    """(r - mean) / (std + epsilon) of the group; epsilon None does not divide (Dr. GRPO)."""
    advantages: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [rewards[i] for i in members(groups, group)]
        advantages.append((reward - mean(own)) / (1.0 if epsilon is None else std(own) + epsilon))
    return advantages


def rloo_advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Reward minus the mean of the others; 0 where there is no other."""
    advantages: list[float] = []
    for i, group in enumerate(groups):
        others = [rewards[j] for j in members(groups, group) if j != i]
        advantages.append(rewards[i] - mean(others) if others else 0.0)
    return advantages


# -- along tokens


def discounted_returns(rewards: Sequence[float], mask: Sequence[float], gamma: float) -> list[float]:
    """O(T^2): every trained token sums what comes at and behind it, discounted by the number of trained tokens between."""
    on = [t for t, m in enumerate(mask) if m > 0]
    out = [0.0] * len(mask)
    for i, t in enumerate(on):
        out[t] = sum(gamma**k * rewards[u] for k, u in enumerate(on[i:]))
    return out


def gae(rewards: Sequence[float], values: Sequence[float], mask: Sequence[float], gamma: float, lam: float) -> list[float]:
    """O(T^2): A_t = sum_k (gamma lam)^k delta_{t+k} over the trained tokens."""
    on = [t for t, m in enumerate(mask) if m > 0]
    deltas = [
        rewards[t] + gamma * (values[on[i + 1]] if i + 1 < len(on) else 0.0) - values[t] for i, t in enumerate(on)
    ]  # fmt: skip
    out = [0.0] * len(mask)
    for i, t in enumerate(on):
        out[t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return out


def masked_moments(values: Sequence[Sequence[float]], mask: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean and variance (n - 1) of the entries with mask > 0."""
    kept = [v for row, on in zip(values, mask, strict=True) for v, m in zip(row, on, strict=True) if m > 0]
    return mean(kept), std(kept) ** 2


# -- losses of one token


def clip_loss(ratio: Number, advantage: float, low: float, high: float, dual: float | None = None) -> Number:
    """-min(r A, clip(r) A); with dual, for A < 0: -max(min(r A, clip(r) A), dual A)."""
    objective = min(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def k1(log_p: Number, log_q: float) -> Number:
    return log_p - log_q


def k2(log_p: Number, log_q: float) -> Number:
    return (log_p - log_q) ** 2 / 2


def k3(log_p: Number, log_q: float) -> Number:
    return exp(log_q - log_p) - 1 - (log_q - log_p)


# -- losses of a batch. log_probs, old, ref: [B][T]; mask [B][T] of 0 and 1; advantages [B]


def _tokens(mask: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    return [(b, t) for b, row in enumerate(mask) for t, m in enumerate(row) if m > 0]


def _filled(mask: Sequence[Sequence[float]]) -> list[int]:
    return [b for b, row in enumerate(mask) if any(m > 0 for m in row)]


def aggregate(
    losses: Sequence[Sequence[Number]], mask: Sequence[Sequence[float]], how: str, groups: Sequence[int] | None = None, length: int = 1
) -> Number:
    """Token losses to one number, by the name of the aggregation; rows without tokens do not count."""
    rows = _filled(mask)
    if not rows:
        return 0.0
    sums = {b: sum(losses[b][t] * m for t, m in enumerate(mask[b]) if m > 0) for b in rows}
    sizes = {b: sum(mask[b]) for b in rows}
    if how == "token_mean":
        return sum(sums.values()) / sum(sizes.values())
    if how == "sample_mean":
        return sum(sums[b] / sizes[b] for b in rows) / len(rows)
    if how == "sample_sum":
        return sum(sums.values()) / len(rows)
    if how == "fixed_length_mean":
        return sum(sums.values()) / len(rows) / length
    assert how == "group_token_mean" and groups is not None, how
    kinds = sorted({groups[b] for b in rows})
    per_group = [sum(sums[b] for b in rows if groups[b] == g) / sum(sizes[b] for b in rows if groups[b] == g) for g in kinds]
    return sum(per_group) / len(kinds)


def grpo_loss(
    log_probs: Any,
    old: Any,
    ref: Any,
    mask: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    kl_coef: float = 0.0,
) -> Number:
    """Shao et al. 2024, equation 3: mean over the tokens of an answer, then over the answers that have tokens."""
    rows = _filled(mask)
    total: Number = 0.0
    for b in rows:
        on = [t for t, m in enumerate(mask[b]) if m > 0]
        for t in on:
            term = clip_loss(exp(log_probs[b][t] - old[b][t]), advantages[b], low, high, dual)
            if kl_coef:
                term = term + kl_coef * k3(log_probs[b][t], ref[b][t])
            total = total + term / len(on) / len(rows)
    return total


def dr_grpo_loss(
    log_probs: Any,
    old: Any,
    mask: Sequence[Sequence[float]],
    advantages: Sequence[float],
    length: int,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Number:
    """Liu et al. 2025: the sum over the tokens of an answer, over a constant and the number of answers."""
    total: Number = 0.0
    for b, t in _tokens(mask):
        total = total + clip_loss(exp(log_probs[b][t] - old[b][t]), advantages[b], low, high)
    return total / length / max(len(_filled(mask)), 1)


def dapo_loss(
    log_probs: Any, old: Any, mask: Sequence[Sequence[float]], advantages: Sequence[float], *, low: float = 0.2, high: float = 0.28
) -> Number:
    """Yu et al. 2025, equation 8: the mean over all tokens."""
    total: Number = 0.0
    for b, t in _tokens(mask):
        total = total + clip_loss(exp(log_probs[b][t] - old[b][t]), advantages[b], low, high)
    return total / max(len(_tokens(mask)), 1)


def reinforce_loss(log_probs: Any, mask: Sequence[Sequence[float]], advantages: Sequence[float]) -> Number:
    """-A log p(y), log p(y) the sum over the answer's tokens; mean over the answers that have tokens (REINFORCE, RLOO)."""
    total: Number = 0.0
    for b, t in _tokens(mask):
        total = total - advantages[b] * log_probs[b][t]
    return total / max(len(_filled(mask)), 1)


def sft_loss(log_probs: Any, mask: Sequence[Sequence[float]]) -> Number:
    """Mean negative log-likelihood of the trained tokens."""
    total: Number = 0.0
    for b, t in _tokens(mask):
        total = total - log_probs[b][t]
    return total / max(len(_tokens(mask)), 1)


def dft_loss(log_probs: Any, mask: Sequence[Sequence[float]]) -> Number:
    """Wu et al. 2025: mean over the trained tokens of -sg(p) log p."""
    total: Number = 0.0
    for b, t in _tokens(mask):
        total = total - exp(log_probs[b][t]).detach() * log_probs[b][t]
    return total / max(len(_tokens(mask)), 1)

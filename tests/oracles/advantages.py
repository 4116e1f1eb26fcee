"""Naive float64 loops of the advantage estimators, straight from the papers. Nothing here is shared with the library.

Rows are plain lists: rewards [B], groups [B], masks, values, log-probs [B][T]. Where t + 1 is written, the next trained token is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from oracles import mean, members, std

Row = Sequence[float]
Rows = Sequence[Row]
Table = list[list[float]]

K1: Callable[[float, float], float] = lambda p, q: p - q
K2: Callable[[float, float], float] = lambda p, q: (p - q) ** 2 / 2
K3: Callable[[float, float], float] = lambda p, q: math.exp(q - p) - 1 - (q - p)


def trained(mask: Row) -> list[int]:
    return [t for t, m in enumerate(mask) if m > 0]


def zeros(mask: Rows) -> Table:
    return [[0.0] * len(row) for row in mask]


def broadcast(advantages: Row, mask: Rows) -> Table:
    return [[a if m > 0 else 0.0 for m in row] for a, row in zip(advantages, mask, strict=True)]


def whitened(values: Rows, mask: Rows, rows: Sequence[int], epsilon: float = 1e-8) -> Table:
    """Over the trained tokens of the given rows; one token, or equal ones, give 0."""
    kept = [values[b][t] for b in rows for t in trained(mask[b])]
    out = zeros(mask)
    if not kept:
        return out
    middle, spread = mean(kept), std(kept)
    for b in rows:
        for t in trained(mask[b]):
            out[b][t] = (values[b][t] - middle) / math.sqrt(spread**2 + epsilon)
    return out


# -- whole samples


def normalized(
    values: Row, groups: Sequence[int], counted: Sequence[bool], *, mean_of: str, std_of: str | None, unbiased: bool, epsilon: float
) -> list[float]:
    """(x - mean) / (std + epsilon); mean_of: group, batch, group-others, batch-others, none; std_of: group, batch or None."""
    out: list[float] = []
    for i, value in enumerate(values):
        if not counted[i]:
            out.append(0.0)
            continue
        own = [j for j in members(groups, groups[i]) if counted[j]]
        everybody = [j for j in range(len(values)) if counted[j]]
        pool = {"group": own, "batch": everybody}
        if mean_of == "none":
            middle = 0.0
        else:
            level, _, others = mean_of.partition("-")
            chosen = [j for j in pool[level] if not (others and j == i)]
            middle = mean([values[j] for j in chosen]) if chosen else value
        scale = 1.0
        if std_of is not None:
            entries = [values[j] for j in pool[std_of]]
            n = len(entries)
            scale = 0.0 if len(set(entries)) == 1 else std(entries) * (1.0 if unbiased or n < 2 else math.sqrt((n - 1) / n))
            scale = (scale if scale > 0 else 1.0) + epsilon
        out.append((value - middle) / scale)
    return out


def opo(rewards: Row, groups: Sequence[int], mask: Rows) -> list[float]:
    out: list[float] = []
    for i, group in enumerate(groups):
        own = members(groups, group)
        total = sum(len(trained(mask[j])) for j in own)
        baseline = sum(len(trained(mask[j])) * rewards[j] for j in own) / total if total else 0.0
        out.append(rewards[i] - baseline)
    return out


def gpg(rewards: Row, groups: Sequence[int], valid: str, f_norm: float) -> list[float]:
    counted = 0
    for i, group in enumerate(groups):
        unequal = len({rewards[j] for j in members(groups, group)}) > 1
        counted += unequal if valid == "unequal" else rewards[i] != 0
    centered = [r - mean([rewards[j] for j in members(groups, g)]) for r, g in zip(rewards, groups, strict=True)]
    return [len(rewards) / max(counted, 1) * c / f_norm for c in centered]


def pass_at_k(rewards: Row, groups: Sequence[int], epsilon: float | None) -> list[float]:
    out = [0.0] * len(rewards)
    for group in set(groups):
        own = sorted(members(groups, group), key=lambda j: -rewards[j])
        if len(own) > 1 and rewards[own[0]] > rewards[own[1]]:
            scale = 1.0 if epsilon is None else std([rewards[j] for j in own]) + epsilon
            out[own[0]] = (rewards[own[0]] - rewards[own[1]]) / scale
    return out


def max_rl(rewards: Row, groups: Sequence[int]) -> list[float]:
    out: list[float] = []
    for reward, group in zip(rewards, groups, strict=True):
        middle = mean([rewards[j] for j in members(groups, group)])
        out.append((reward - middle) / middle if middle > 0 else 0.0)
    return out


def greedy_baselines(rewards: Row, groups: Sequence[int], trainable: Sequence[bool]) -> list[float]:
    return [mean([rewards[j] for j in members(groups, group) if not trainable[j]]) for group in groups]


# -- along tokens


def token_rewards(
    rewards: Row, mask: Rows, log_probs: Rows, ref: Rows, coefficient: float, kl: Callable[[float, float], float] | None
) -> Table:
    """The reward on the last trained token, minus coefficient * kl on all of them."""
    out = zeros(mask)
    for b, row in enumerate(mask):
        for t in trained(row):
            out[b][t] = -coefficient * kl(log_probs[b][t], ref[b][t]) if kl else 0.0
        if trained(row):
            out[b][trained(row)[-1]] += rewards[b]
    return out


def returns(rewards: Rows, mask: Rows, gamma: float) -> Table:
    """O(T^2)."""
    out = zeros(mask)
    for b, row in enumerate(mask):
        on = trained(row)
        for i, t in enumerate(on):
            out[b][t] = sum(gamma**k * rewards[b][u] for k, u in enumerate(on[i:]))
    return out


def gae(rewards: Row, values: Row, mask: Row, gammas: Row, lams: Row, bootstrap: float) -> list[float]:
    """O(T^2), with a discount and a lambda for each token: A_t = sum_u prod_{t <= v < u} gamma_v lam_v * delta_u."""
    on, out = trained(mask), [0.0] * len(mask)
    for i, t in enumerate(on):
        weight = 1.0
        for j in range(i, len(on)):
            u = on[j]
            following = values[on[j + 1]] if j + 1 < len(on) else bootstrap
            out[t] += weight * (rewards[u] + gammas[u] * following - values[u])
            weight *= gammas[u] * lams[u]
    return out


def vtrace(
    rewards: Row, values: Row, ratios: Row, mask: Row, gamma: float, lam: float, clip_rho: float, clip_pg_rho: float, bootstrap: float
) -> tuple[list[float], list[float], list[float]]:
    """Espeholt et al. 2018, equation 1 as the sum over all later steps. (errors, advantages, q)."""
    on = trained(mask)
    errors, advantages, q = ([0.0] * len(mask) for _ in range(3))
    for i, t in enumerate(on):
        weight = 1.0
        for j in range(i, len(on)):
            u = on[j]
            following = values[on[j + 1]] if j + 1 < len(on) else bootstrap
            errors[t] += weight * min(clip_rho, ratios[u]) * (rewards[u] + gamma * following - values[u])
            weight *= gamma * lam * min(1.0, ratios[u])
    for i, t in enumerate(on):
        if i + 1 < len(on):
            n = on[i + 1]
            q[t] = rewards[t] + gamma * (lam * (values[n] + errors[n]) + (1 - lam) * values[n])
        else:
            q[t] = rewards[t] + gamma * bootstrap
        advantages[t] = min(clip_pg_rho, ratios[t]) * (q[t] - values[t])
    return errors, advantages, q


def optimal_token_baselines(
    gains: Rows, scores: Rows, mask: Rows, groups: Sequence[int], *, compact: bool, keep_tail: bool, epsilon: float
) -> Table:
    """Groups with one row that has tokens: its own return."""
    out = zeros(mask)
    for b, row in enumerate(mask):
        peers = [j for j in members(groups, groups[b]) if trained(mask[j])]
        lengths = sorted((len(trained(mask[j])) for j in peers), reverse=True)
        for i, t in enumerate(trained(row)):
            position = i if compact else t
            if len(peers) == 1:
                out[b][t] = gains[b][t]
                continue
            longest_alone = len(trained(row)) == lengths[0] > lengths[1]
            if keep_tail and longest_alone and position >= lengths[1]:
                continue
            top = bottom = 0.0
            for j in peers:
                on = trained(mask[j])
                here = on[position] if compact and position < len(on) else position
                if here in on and (not compact or position < len(on)):
                    weight = sum(scores[j][u] for u in on if u <= here)
                    top += weight * gains[j][here]
                    bottom += weight
            out[b][t] = top / (bottom + epsilon)
    return out


# -- GiGPO


def gigpo_returns(
    rewards: Row,
    groups: Sequence[int],
    states: Sequence[Sequence[int]],
    step_rewards: Rows,
    gamma: float,
    *,
    default: float = 0.0,
    add_final: bool | None = None,
) -> list[list[float]]:
    """G_k of each turn [B][K], 0 where states[b][k] is -1. A turn of which nobody said what it earned (NaN) gets `default`; the last one of
    an episode the episode's reward besides, if add_final or, where that is None, if nobody said it of any turn of its group."""
    out: list[list[float]] = []
    for b, row in enumerate(states):
        group = members(groups, groups[b])
        nobody_paid = all(math.isnan(step_rewards[j][n]) for j in group for n, state in enumerate(states[j]) if state >= 0)
        steps = [default if math.isnan(step_rewards[b][k]) else step_rewards[b][k] for k, state in enumerate(row) if state >= 0]
        if steps and (nobody_paid if add_final is None else add_final):
            steps[-1] += rewards[b]
        found = [sum(gamma ** (n - k) * steps[n] for n in range(k, len(steps))) for k in range(len(steps))]
        out.append(found + [0.0] * (len(row) - len(steps)))
    return out


def gigpo(
    rewards: Row,
    groups: Sequence[int],
    states: Sequence[Sequence[int]],
    step_rewards: Rows,
    gamma: float,
    omega: float,
    epsilon: float | None,
    *,
    convex: bool = False,
    default: float = 0.0,
    add_final: bool | None = None,
) -> list[list[float]]:
    """Advantage of each turn [B][K] of episodes whose turn k starts in states[b][k]; -1 = no such turn, and 0 there."""

    def normalize(value: float, pool: Sequence[float]) -> float:
        return (value - mean(pool)) / (1.0 if epsilon is None else std(pool) + epsilon)

    returns = gigpo_returns(rewards, groups, states, step_rewards, gamma, default=default, add_final=add_final)
    out: list[list[float]] = []
    for b, row in enumerate(states):
        group = members(groups, groups[b])
        episode = normalize(rewards[b], [rewards[j] for j in group])
        steps: list[float] = []
        for k, state in enumerate(row):
            pool = [returns[j][n] for j in group for n, other in enumerate(states[j]) if other == state]
            step = normalize(returns[b][k], pool)
            both = omega * episode + (1 - omega) * step if convex else episode + omega * step
            steps.append(both if state >= 0 else 0.0)
        out.append(steps)
    return out

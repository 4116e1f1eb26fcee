"""Each preset as one naive float64 function, straight from its paper: the loss of a whole optimizer step, with loops and no tensors but the
0-dimensional ones that carry the gradient.

Nothing here is shared with the library. A step is a `Step` of lists; the function of a preset has the preset's name and its
hyper-parameters, and returns the loss as a 0-dimensional float64 tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Number = Any  # a float, or a 0-dimensional float64 tensor


@dataclass(frozen=True)
class Step:
    """B responses as lists. Every list of lists is [B][T]; what stands where the mask is 0 must not matter."""

    rewards: Sequence[float]
    groups: Sequence[int]
    mask: Sequence[Sequence[float]]  # 1 = trained on
    log_probs: Sequence[Sequence[Number]]  # of the policy
    rollout: Sequence[Sequence[float]]  # log-probs of the engine
    old: Sequence[Sequence[float]]  # of the trainer before the update
    segment: Sequence[Sequence[float]]  # of the policy one version after the one that sampled the token
    ref: Sequence[Sequence[float]]  # of the reference model
    values: Sequence[Sequence[float]]  # of the critic
    entropy: Sequence[Sequence[Number]]
    teacher: Sequence[Sequence[float]]  # log-probs of the teacher
    divergence: Sequence[Sequence[Number]]  # of policy and teacher, over the vocabulary
    trainable: Sequence[bool]
    versions: Sequence[Sequence[int]]  # of the weights that sampled each token
    computed: Sequence[Sequence[bool]]  # whether `segment` was computed
    current: float  # version of the weights that train; with a fraction: on the way to the next one
    turn_of: Sequence[Sequence[int]]  # number of the turn that each token is of, -1 = none
    states: Sequence[Sequence[int]]  # [B][K], number of the state that each turn began in, -1 = no such turn
    step_rewards: Sequence[Sequence[float]]  # [B][K]; NaN = unknown
    components: Sequence[Sequence[float]]  # [B][C], scores of single rewards; NaN = none

    def places(self, b: int) -> list[int]:
        """Positions of row b that are trained on."""
        return [t for t, m in enumerate(self.mask[b]) if m > 0] if self.trainable[b] else []

    def rows(self) -> list[int]:
        """Rows with at least one such position."""
        return [b for b in range(len(self.rewards)) if self.places(b)]

    def tokens(self) -> list[tuple[int, int]]:
        """All (row, position) that are trained on."""
        return [(b, t) for b in self.rows() for t in self.places(b)]

    def group(self, b: int) -> list[int]:
        """Rows of b's group, b included."""
        return [i for i, g in enumerate(self.groups) if g == self.groups[b]]


# -- pieces that several papers share


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Divisor n - 1."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def group_normalized(step: Step, epsilon: float) -> list[float]:
    """(r - mean) / (std + epsilon) in the group."""
    out = []
    for b, r in enumerate(step.rewards):
        own = [step.rewards[i] for i in step.group(b)]
        out.append(0.0 if len(own) < 2 or max(own) == min(own) else (r - mean(own)) / (std(own) + epsilon))
    return out


def group_centered(step: Step) -> list[float]:
    return [r - mean([step.rewards[i] for i in step.group(b)]) for b, r in enumerate(step.rewards)]


def clip(r: Number, low: float, high: float) -> Number:
    return low if r < low else high if r > high else r


def clip_loss(r: Number, a: float, low: float, high: float, dual: float | None = None) -> Number:
    """-min(r A, clip(r) A); for A < 0 not more than -dual A."""
    loss = -min(r * a, clip(r, 1 - low, 1 + high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def bounded(log_ratio: Number) -> Number:
    """Clamp |log r| to 20 nats, as in verl; beyond that there is no gradient."""
    return log_ratio.clamp(-20, 20)


def ratio(step: Step, b: int, t: int, anchor: Sequence[Sequence[float]]) -> Number:
    return (step.log_probs[b][t] - anchor[b][t]).exp()


def bounded_ratio(step: Step, b: int, t: int, anchor: Sequence[Sequence[float]]) -> Number:
    return bounded(step.log_probs[b][t] - anchor[b][t]).exp()


def per_row(step: Step, token_loss: Any) -> Number:
    """Mean over a row's tokens, then over rows."""
    total: Number = 0.0
    for b in step.rows():
        total = total + sum(token_loss(b, t) for t in step.places(b)) / len(step.places(b))
    return total / len(step.rows())


def per_token(step: Step, token_loss: Any) -> Number:
    """Mean over all tokens."""
    return sum(token_loss(b, t) for b, t in step.tokens()) / len(step.tokens())


def per_response(step: Step, token_loss: Any) -> Number:
    """Sum over a row's tokens, mean over rows."""
    return sum(token_loss(b, t) for b, t in step.tokens()) / len(step.rows())


def whitened(step: Step, values: Sequence[Sequence[float]]) -> list[list[float]]:
    """(x - mean) / sqrt(var + 1e-8) over all trained tokens, var with n - 1."""
    flat = [values[b][t] for b, t in step.tokens()]
    spread = math.sqrt(std(flat) ** 2 + 1e-8)
    return [[(x - mean(flat)) / spread for x in row] for row in values]


def token_rewards(step: Step, kl_coef: float) -> list[list[float]]:
    """The reward on the last trained token of a row, minus kl_coef (log p_rollout - log p_ref) on every one."""
    out = [[0.0] * len(row) for row in step.mask]
    for b in step.rows():
        for t in step.places(b):
            if kl_coef:
                out[b][t] -= kl_coef * (step.rollout[b][t] - step.ref[b][t])
        out[b][step.places(b)[-1]] += step.rewards[b]
    return out


# -- group-relative algorithms


def grpo(
    step: Step,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    epsilon: float = 1e-4,
    dual: float | None = None,
    entropy_coef: float = 0.0,
) -> Number:
    """Shao et al. 2024, equations 3 and 4."""
    a = group_normalized(step, epsilon)

    def loss(b: int, t: int) -> Number:
        total = clip_loss(bounded_ratio(step, b, t, step.rollout), a[b], clip_low, clip_high, dual)
        if kl_coef:
            d = bounded(step.ref[b][t] - step.log_probs[b][t])
            total = total + kl_coef * (d.exp() - d - 1)
        return total - entropy_coef * step.entropy[b][t] if entropy_coef else total

    return per_row(step, loss)


def dr_grpo(step: Step, max_tokens: int, clip_low: float = 0.2, clip_high: float = 0.2) -> Number:
    """Liu et al. 2025: no std, and a constant in place of the length."""
    a = group_centered(step)
    return per_response(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), a[b], clip_low, clip_high)) / max_tokens


def dapo(step: Step, clip_low: float = 0.2, clip_high: float = 0.28, epsilon: float = 1e-4, dual: float | None = None) -> Number:
    """Yu et al. 2025, equation 8."""
    a = group_normalized(step, epsilon)
    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), a[b], clip_low, clip_high, dual))


def gspo(step: Step, clip_low: float = 3e-4, clip_high: float = 4e-4, epsilon: float = 1e-4) -> Number:
    """Zheng et al. 2025: one ratio a response, exp(mean of token log-ratios)."""
    a = group_normalized(step, epsilon)
    total: Number = 0.0
    for b in step.rows():
        places = step.places(b)
        s = bounded(sum(step.log_probs[b][t] - step.rollout[b][t] for t in places) / len(places)).exp()
        total = total + clip_loss(s, a[b], clip_low, clip_high)
    return total / len(step.rows())


def gmpo(step: Step, clip_low: float = 0.4, clip_high: float = 0.4, epsilon: float = 1e-4) -> Number:
    """Zhao et al. 2025: geometric mean of token ratios, each clipped where that lowers the objective."""
    a = group_normalized(step, epsilon)
    total: Number = 0.0
    for b in step.rows():
        places = step.places(b)
        logs = []
        for t in places:
            d = bounded(step.log_probs[b][t] - step.rollout[b][t])
            c = clip(d, -clip_low, clip_high)
            logs.append(min(d, c) if a[b] > 0 else max(d, c) if a[b] < 0 else 0.0 * d)
        total = total - a[b] * math.e ** (sum(logs) / len(places))
    return total / len(step.rows())


def cispo(step: Step, clip_high: float = 0.28, clip_low: float = 1.0, epsilon: float = 1e-4) -> Number:
    """MiniMax-M1 2025, equations 4 and 5."""
    a = group_normalized(step, epsilon)

    def loss(b: int, t: int) -> Number:
        weight = clip(float(ratio(step, b, t, step.rollout).detach()), 1 - clip_low, 1 + clip_high)
        return -weight * a[b] * step.log_probs[b][t]

    return per_token(step, loss)


def sapo(step: Step, tau_pos: float = 1.0, tau_neg: float = 1.05, epsilon: float = 1e-4) -> Number:
    """Gao et al. 2025: sigmoid(tau (r - 1)) 4 / tau in place of the clipped ratio."""
    a = group_normalized(step, epsilon)

    def loss(b: int, t: int) -> Number:
        tau = tau_pos if a[b] > 0 else tau_neg
        return -a[b] * 4 / tau / (1 + (-tau * (ratio(step, b, t, step.rollout) - 1)).exp())

    return per_row(step, loss)


def dppo(step: Step, low: float = 0.2, high: float = 0.2, cap: float = 20.0, epsilon: float = 1e-4) -> Number:
    """Qi et al. 2026, total variation: a token counts unless its probability has moved too far in the advantage's direction."""
    a = group_normalized(step, epsilon)

    def loss(b: int, t: int) -> Number:
        p, q = math.exp(float(step.log_probs[b][t])), math.exp(step.rollout[b][t])
        keep = p - q <= high if a[b] > 0 else p - q >= -low
        return -min(max(p / q, math.exp(-20)), cap) * a[b] * step.log_probs[b][t] if keep else 0.0 * step.log_probs[b][t]

    return per_token(step, loss)


def dppo_kl(step: Step, low: float = 0.05, high: float = 0.05, cap: float = 20.0, epsilon: float = 1e-4) -> Number:
    """Qi et al. 2026, binary KL divergence."""
    a = group_normalized(step, epsilon)

    def loss(b: int, t: int) -> Number:
        p, q = math.exp(float(step.log_probs[b][t])), math.exp(step.rollout[b][t])
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        keep = kl <= high or p <= q if a[b] > 0 else kl <= low or p >= q
        return -min(max(p / q, math.exp(-20)), cap) * a[b] * step.log_probs[b][t] if keep else 0.0 * step.log_probs[b][t]

    return per_token(step, loss)


def max_rl(step: Step, clip_low: float = 0.2, clip_high: float = 0.28) -> Number:
    """Tajwar et al. 2026: (r - mean) / mean, 0 where the mean is not positive."""

    def advantage(b: int) -> float:
        level = mean([step.rewards[i] for i in step.group(b)])
        return (step.rewards[b] - level) / level if level > 0 else 0.0

    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), advantage(b), clip_low, clip_high))


def pass_at_k(step: Step, clip_low: float = 0.2, clip_high: float = 0.28, divide_by_std: bool = True, epsilon: float = 1e-6) -> Number:
    """Tang et al. 2025: what the best answer adds to the best of the others."""

    def advantage(b: int) -> float:
        others = [step.rewards[i] for i in step.group(b) if i != b]
        if not others or step.rewards[b] <= max(others):
            return 0.0
        gap = step.rewards[b] - max(others)
        return gap / (std([step.rewards[b], *others]) + epsilon) if divide_by_std else gap

    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), advantage(b), clip_low, clip_high))


def gdpo(
    step: Step,
    weights: Sequence[float],
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    epsilon: float = 1e-4,
    whiten: bool = True,
) -> Number:
    """Liu et al. 2026: each reward normalised in its group, summed with its weight, then whitened; rows without a score count nowhere."""

    def advantage(b: int) -> float:
        total = 0.0
        for c, weight in enumerate(weights):
            own = [step.components[i][c] for i in step.group(b) if not math.isnan(step.components[i][c])]
            if len(own) > 1 and not math.isnan(step.components[b][c]) and max(own) > min(own):
                total += weight * (step.components[b][c] - mean(own)) / (std(own) + epsilon)
        return total

    a = [[advantage(b)] * len(row) for b, row in enumerate(step.mask)]
    a = whitened(step, a) if whiten else a
    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), a[b][t], clip_low, clip_high))


def kl_cov(step: Step, fraction: float = 2e-4, coef: float = 1.0, epsilon: float = 1e-4) -> Number:
    """Cui et al. 2025: the tokens of largest (log p - mean) (A - mean) pay coef |log r|; nothing is clipped."""
    a, tokens = group_normalized(step, epsilon), step.tokens()
    level, height = mean([step.rollout[b][t] for b, t in tokens]), mean([a[b] for b, _ in tokens])
    covariance = {(b, t): (step.rollout[b][t] - level) * (a[b] - height) for b, t in tokens}
    number = max(int(fraction * len(tokens)), 1) if fraction else 0
    selected = [place for place in sorted(tokens, key=covariance.__getitem__, reverse=True)[:number] if covariance[place] != 0]

    def loss(b: int, t: int) -> Number:
        log_ratio = bounded(step.log_probs[b][t] - step.rollout[b][t])
        return -a[b] * log_ratio.exp() + (coef * abs(log_ratio) if (b, t) in selected else 0.0)

    return per_token(step, loss)


# -- policy gradients without a clip


def rloo(step: Step) -> Number:
    """Ahmadian et al. 2024: the baseline is the mean of the others."""

    def advantage(b: int) -> float:
        others = [step.rewards[i] for i in step.group(b) if i != b]
        return step.rewards[b] - mean(others) if others else 0.0

    return per_response(step, lambda b, t: -advantage(b) * step.log_probs[b][t])


def reinforce(step: Step) -> Number:
    """Williams 1992 with the mean reward of the batch as its baseline."""
    baseline = mean(step.rewards)
    return per_response(step, lambda b, t: -(step.rewards[b] - baseline) * step.log_probs[b][t])


def remax(step: Step) -> Number:
    """Li et al. 2023: the baseline is the reward of the greedy answer, the row of the group that is not trained on."""

    def advantage(b: int) -> float:
        return step.rewards[b] - mean([step.rewards[i] for i in step.group(b) if not step.trainable[i]])

    return per_response(step, lambda b, t: -advantage(b) * step.log_probs[b][t])


def opo(step: Step) -> Number:
    """Hao et al. 2025: the baseline is the group's reward weighted by length."""

    def advantage(b: int) -> float:
        own = step.group(b)
        lengths = {i: sum(m > 0 for m in step.mask[i]) for i in own}
        if len(own) == 1:
            return 0.0
        return step.rewards[b] - sum(lengths[i] * step.rewards[i] for i in own) / sum(lengths.values())

    return per_response(step, lambda b, t: -advantage(b) * step.log_probs[b][t])


def gpg(step: Step, f_norm: float = 1.0) -> Number:
    """Chu et al. 2025: alpha (r - mean) / F, alpha = rows / rows in groups whose rewards are not all equal."""
    teaching = [b for b in range(len(step.rewards)) if len({step.rewards[i] for i in step.group(b)}) > 1]
    alpha = len(step.rewards) / max(len(teaching), 1)
    centered = group_centered(step)
    return per_token(step, lambda b, t: -alpha * centered[b] / f_norm * step.log_probs[b][t])


# -- advantages along tokens


def opd(step: Step, coef: float = 1.0, reward_coef: float = 0.0, gamma: float = 0.0, bound: float | None = None) -> Number:
    """Thinking Machines 2025: the negative reverse KL of the sampled token is its advantage; importance sampling."""
    compared = group_normalized(step, 1e-4)

    def advantage(b: int, t: int) -> float:
        total = 0.0
        for k, s in enumerate(u for u in step.places(b) if u >= t):
            reverse_kl = step.rollout[b][s] - step.teacher[b][s]
            total -= gamma**k * (reverse_kl if bound is None else clip(reverse_kl, -bound, bound))
        return coef * total + reward_coef * compared[b]

    return per_token(step, lambda b, t: -advantage(b, t) * bounded_ratio(step, b, t, step.rollout))


def gkd(
    step: Step, beta: float = 0.5, coef: float = 1.0, reward_coef: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> Number:
    """Agarwal et al. 2024: the divergence of policy and teacher at each token; beside it PPO's clip of the reward's advantage."""
    compared = group_normalized(step, 1e-4)

    def token_loss(b: int, t: int) -> Number:
        loss = coef * step.divergence[b][t]
        if not reward_coef:
            return loss
        return loss + clip_loss(bounded_ratio(step, b, t, step.rollout), reward_coef * compared[b], clip_low, clip_high)

    return per_token(step, token_loss)


def online_dpo(step: Step, loss: str = "dpo", beta: float = 0.1, gamma: float = 1.0, min_difference: float = 0.0) -> Number:
    """Guo et al. 2024, with the best and the worst answer of each group; the loss of a pair is Rafailov et al. 2023, equation 7."""
    losses: list[Number] = []
    for group in sorted(set(step.groups)):
        rows = [b for b in step.rows() if step.groups[b] == group]
        if not rows:
            continue
        best, worst = max(rows, key=lambda b: step.rewards[b]), min(rows, key=lambda b: step.rewards[b])
        difference = step.rewards[best] - step.rewards[worst]
        if difference == 0 or difference < min_difference:
            continue

        def log_prob(b: int, of: Sequence[Sequence[Number]], *, average: bool = False) -> Number:
            total = sum(step.mask[b][t] * of[b][t] for t in step.places(b))
            return total / sum(step.mask[b]) if average else total

        if loss == "dpo":
            h = sum(sign * (log_prob(b, step.log_probs) - log_prob(b, step.ref)) for b, sign in ((best, 1), (worst, -1)))
            losses.append((1 + (-beta * h).exp()).log())
        elif loss == "ipo":
            h = sum(
                sign * (log_prob(b, step.log_probs, average=True) - log_prob(b, step.ref, average=True))
                for b, sign in ((best, 1), (worst, -1))
            )
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            assert loss == "simpo", f"loss is {loss!r}"
            h = log_prob(best, step.log_probs, average=True) - log_prob(worst, step.log_probs, average=True)
            losses.append((1 + (-(beta * h - gamma)).exp()).log())
    return sum(losses) / len(losses) if losses else 0.0


def reinforce_plus_plus(
    step: Step, kl_coef: float = 0.01, gamma: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> Number:  # fmt: skip
    """Hu et al. 2025: discounted sum of token rewards behind each token, whitened over the batch."""
    r = token_rewards(step, kl_coef)
    a = [[0.0] * len(row) for row in step.mask]
    for b in step.rows():
        places = step.places(b)
        for i, t in enumerate(places):
            a[b][t] = sum(gamma**k * r[b][s] for k, s in enumerate(places[i:]))
    a = whitened(step, a)
    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.rollout), a[b][t], clip_low, clip_high))


def reinforce_plus_plus_baseline(step: Step, kl_coef: float = 0.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Number:
    """Hu et al. 2025: r - mean(group), whitened over the tokens of the batch; the KL term is k2 in the loss."""
    centered = group_centered(step)
    a = whitened(step, [[centered[b]] * len(row) for b, row in enumerate(step.mask)])

    def loss(b: int, t: int) -> Number:
        total = clip_loss(bounded_ratio(step, b, t, step.rollout), a[b][t], clip_low, clip_high)
        return total + kl_coef * (step.log_probs[b][t] - step.ref[b][t]) ** 2 / 2 if kl_coef else total

    return per_token(step, loss)


def ppo(
    step: Step,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    dual: float | None = None,
    entropy_coef: float = 0.0,
) -> Number:
    """Schulman et al. 2016, equation 16 as the double sum; Schulman et al. 2017, equation 7."""
    r = token_rewards(step, kl_coef)
    a = [[0.0] * len(row) for row in step.mask]
    for b in step.rows():
        places = step.places(b)
        v = [step.values[b][t] for t in places] + [0.0]
        deltas = [r[b][t] + gamma * v[i + 1] - v[i] for i, t in enumerate(places)]
        for i, t in enumerate(places):
            a[b][t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    a = whitened(step, a)

    def loss(b: int, t: int) -> Number:
        total = clip_loss(bounded_ratio(step, b, t, step.rollout), a[b][t], clip_low, clip_high, dual)
        return total - entropy_coef * step.entropy[b][t] if entropy_coef else total

    return per_token(step, loss)


# -- episodes of several turns


def gigpo(
    step: Step,
    gamma: float = 0.95,
    omega: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    default_step_reward: float = 0.0,
    add_final_reward: bool | None = None,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
    dual: float | None = None,
    entropy_coef: float = 0.0,
    convex: bool = False,
) -> Number:
    """Feng et al. 2025, equations 3 to 9. `convex`: omega A_E + (1 - omega) A_S in place of A_E + omega A_S."""

    def normalized(value: float, pool: Sequence[float]) -> float:
        return (value - mean(pool)) / (std(pool) + epsilon if divide_by_std else 1.0)

    def turns(b: int) -> list[int]:
        return [k for k, state in enumerate(step.states[b]) if state >= 0]

    def step_return(b: int, k: int) -> float:
        unpaid = all(math.isnan(step.step_rewards[i][n]) for i in step.group(b) for n in turns(i))
        rewards = [default_step_reward if math.isnan(r) else r for r in (step.step_rewards[b][n] for n in turns(b))]
        if unpaid if add_final_reward is None else add_final_reward:
            rewards[-1] += step.rewards[b]
        return sum(gamma ** (n - k) * rewards[n] for n in range(k, len(rewards)))

    def advantage(b: int, t: int) -> float:
        episode = normalized(step.rewards[b], [step.rewards[i] for i in step.group(b)])
        k, other = step.turn_of[b][t], 0.0
        if k >= 0:
            same = [(i, n) for i in step.group(b) for n in turns(i) if step.states[i][n] == step.states[b][k]]
            other = normalized(step_return(b, k), [step_return(i, n) for i, n in same])
        return omega * episode + (1 - omega) * other if convex else episode + omega * other

    def loss(b: int, t: int) -> Number:
        total = clip_loss(bounded_ratio(step, b, t, step.rollout), advantage(b, t), clip_low, clip_high, dual)
        if kl_coef:
            d = bounded(step.ref[b][t] - step.log_probs[b][t])
            total = total + kl_coef * (d.exp() - d - 1)
        return total - entropy_coef * step.entropy[b][t] if entropy_coef else total

    return per_row(step, loss)


# -- wrappers, round DAPO


def decoupled(
    step: Step,
    cap: float | None = 5.0,
    floor: float | None = None,
    drop: bool = True,
    segment_wise: bool = False,
    missed_as_proximal: bool = False,
    geometric: bool | None = None,
) -> Number:
    """Fu et al. 2025: ratio against the policy before the update; proximal over behaviour as a weight, 0 outside the bounds.

    Segment-wise, the weight's proximal policy is that of each token's own segment. With `geometric` the proximal policy is taken between
    the engine's log-prob and the policy's own: at version floor(current) - 1, on the way from the token's version to the current one.
    """
    a = group_normalized(step, 1e-4)

    def proximal(b: int, t: int) -> float:
        version, last = step.versions[b][t], math.floor(step.current)
        if geometric is None:
            return step.old[b][t]
        if version >= last:
            return step.rollout[b][t]
        alpha = (last - 1 - version) / (step.current - version)
        own, sampled = float(step.log_probs[b][t].detach()), step.rollout[b][t]
        return (1 - alpha) * sampled + alpha * own if geometric else math.log((1 - alpha) * math.exp(sampled) + alpha * math.exp(own))

    def loss(b: int, t: int) -> Number:
        prox = target = proximal(b, t)
        missed = step.versions[b][t] < math.floor(step.current) and not step.computed[b][t]
        if segment_wise and not (missed and missed_as_proximal):
            target = step.segment[b][t]
        w = math.exp(target - step.rollout[b][t])
        if (cap is not None and w > cap) or (floor is not None and w < floor):
            w = 0.0 if drop else (cap if cap is not None and w > cap else floor)
        return w * clip_loss(bounded(step.log_probs[b][t] - prox).exp(), a[b], 0.2, 0.28)

    return per_token(step, loss)


def recomputed(step: Step) -> Number:
    """The ratio against the trainer's own numbers of the policy before the update."""
    a = group_normalized(step, 1e-4)
    return per_token(step, lambda b, t: clip_loss(bounded_ratio(step, b, t, step.old), a[b], 0.2, 0.28))


def truncated(step: Step, cap: float | None = 2.0, floor: float | None = None) -> Number:
    """`recomputed` with min(trainer / engine, cap) as a weight."""
    a = group_normalized(step, 1e-4)

    def loss(b: int, t: int) -> Number:
        w = math.exp(step.old[b][t] - step.rollout[b][t])
        w = w if cap is None else min(w, cap)
        w = w if floor is None else max(w, floor)
        return w * clip_loss(bounded_ratio(step, b, t, step.old), a[b], 0.2, 0.28)

    return per_token(step, loss)

"""Log-ratios between the policy and its anchor, and the surrogates made of them. A surrogate is a loss, so it is minimized.

Callers put 0 at masked places before anything is computed there: masking after exp would leave NaN gradients (0 * inf). At trained places
finite_exp ensures the same: a token with any ratio has a finite gradient if the formula has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import finite_exp

Ratio: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(log_probs, old_log_probs, mask), each [B, T] -> log_ratio [B, T]."""

Surrogate: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(log_ratio, log_probs, advantages), each [B, T] -> loss of each token [B, T]."""

LOG_RATIO_BOUND = 20.0
"""Default bound of |log r| in nats: e^20 is 4.9e8 (verl)."""


# -- log-ratios


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, bound: float | None = None) -> Tensor:
    """log r_t = log p(y_t) - log p_old(y_t). All # [B, T]; 0 where mask = 0.

    Args:
        bound: clamps log r_t to [-bound, bound] (verl: 20); beyond it the token has no gradient. None = no clamp.
    """
    log_ratio = torch.where(mask > 0, log_probs - old_log_probs, 0.0)
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, bound: float | None = None) -> Tensor:
    """The mean of a row's token log-ratios at each of its tokens: log s_i, s_i = (p(y) / p_old(y))^(1 / |y|).

    The gradient goes through each token's own log-prob (the token-level form), so advantages may differ along a row. With sample_mean
    and one advantage a row it is the gradient of the sequence-level objective (sequence_mean_ratio).

    Args:
        bound: clamps log s_i to [-bound, bound]; beyond it the row has no gradient. None = no clamp.

    Source: Zheng et al. 2025 (GSPO), equations 7, 13 and 14.
    """
    mean = _row_mean(token_ratio(log_probs, old_log_probs, mask), mask)
    own = torch.where(mask > 0, log_probs - log_probs.detach(), 0.0)  # 0, with the gradient of log_probs
    log_ratio = torch.where(mask > 0, mean.detach() + own, 0.0)
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def sequence_mean_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """As sequence_ratio, with the gradient through the mean: each token's loss reaches all tokens of its row (AReaL, slime, TRL).

    Source: Zheng et al. 2025 (GSPO), equation 7.
    """
    return torch.where(mask > 0, _row_mean(token_ratio(log_probs, old_log_probs, mask), mask), 0.0)


def sequence_sum_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, bound: float | None = None) -> Tensor:
    """log (p(y) / p_old(y)), the sum of a row's token log-ratios, at each of its tokens. All # [B, T]; 0 where mask = 0.

    Args:
        bound: clamps each token's log-ratio, then their sum, to [-bound, bound]; beyond it there is no gradient. None = no clamp.
    """
    total = token_ratio(log_probs, old_log_probs, mask, bound=bound).sum(1, keepdim=True)
    return torch.where(mask > 0, total if bound is None else total.clamp(-bound, bound), 0.0)


def capped(ratio: Ratio, *, cap: float) -> Ratio:
    """`ratio` with r bounded by cap: log r <= log(cap), no gradient above.

    With the `clipped` surrogate and cap >= 1 + high it is the two-sided clip, equal to dual=cap; with an unbiased KLTerm it also bounds the
    weight of the KL term, which dual does not.

    Args:
        cap: > 0.

    Source: Prime Intellect 2025 (INTELLECT-2), its two-sided clipping.
    """
    assert cap > 0, f"cap is {cap}, expected more than 0"
    return partial(_capped, ratio=ratio, cap=cap)


def _capped(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, ratio: Ratio, cap: float) -> Tensor:
    return ratio(log_probs, old_log_probs, mask).clamp(max=math.log(cap))


def clipped_sequence_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    low: float = 0.4,
    high: float = 0.4,
    bound: float | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """GMPO's log-ratio: token log-ratios clipped to [-low, high] on the side that the sign of the advantage selects, then their row mean.

    Args:
        advantages: # [B, T], one sign along a row.
        low, high: widths in nats, >= 0 (the paper clips the ratio to (e^-0.4, e^0.4)).
        bound: clamps each token's log-ratio beforehand, see token_ratio.
        epsilon: added to the number of tokens of a row (verl 1e-8).

    Returns: # [B, T], the same at every token of a row, with the gradient through the mean; 0 where mask = 0 or the advantage is 0.
    Source: Zhao et al. 2025 (Geometric-mean policy optimization), section 4.
    """
    assert low >= 0, f"low is {low}, expected at least 0"
    assert high >= 0, f"high is {high}, expected at least 0"
    log_ratio = token_ratio(log_probs, old_log_probs, mask, bound=bound)
    sign = torch.where(mask > 0, advantages, 0.0).sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    return torch.where(mask > 0, _row_mean(pessimistic, mask, epsilon), 0.0)


def _row_mean(x: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """Mean of x over the tokens of each row with mask > 0: # [B, 1]; 0 for a row without any. x is 0 where mask = 0."""
    on = (mask > 0).to(x.dtype)
    return x.sum(1, keepdim=True) / (on.sum(1, keepdim=True) + epsilon).clamp(min=1)


def row_mean_advantages(advantages: Tensor, mask: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """Each row's mean advantage over its tokens with mask > 0, at each of them. All # [B, T]; 0 where mask = 0.

    Args:
        epsilon: added to the number of tokens of a row (verl 1e-8).
    """
    return torch.where(mask > 0, _row_mean(torch.where(mask > 0, advantages, 0.0), mask, epsilon), 0.0)


def row_geometric_mean(weights: Tensor, mask: Tensor, *, floor: float = 1e-10, epsilon: float = 0.0) -> Tensor:
    """Each row's geometric mean of weights >= 0 over its tokens with mask > 0, at each of them. All # [B, T]; 1 where mask = 0.

    Args:
        floor: added to each weight, so that a weight of 0 shrinks its row's mean and does not erase it.
        epsilon: added to the number of tokens of a row (verl 1e-8).
    """
    assert floor >= 0, f"floor is {floor}, expected at least 0"
    logs = torch.where(mask > 0, torch.where(mask > 0, weights + floor, 1.0).log(), 0.0)
    return torch.where(mask > 0, _row_mean(logs, mask, epsilon), 0.0).exp()


# -- surrogates


def reinforce(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p (Williams 1992). All # [B, T]."""
    return -advantages * log_probs


def importance_weighted(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A r, the unclipped surrogate (Schulman et al. 2017, equation 6). All # [B, T]."""
    return -advantages * finite_exp(log_ratio)


def clipped(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual`, bounded by -dual * A where A < 0.

    Args:
        log_ratio, log_probs, advantages: # [B, T].
        low: width of the range below 1, in [0, 1).
        high: width above 1, >= 0 (DAPO's clip-higher: 0.2 and 0.28).
        dual: > 1; a token with A < 0 and r > dual has loss -dual * A and no gradient. None = off: only the ratio's own bound
            (token_ratio) then holds the loss of such a token.

    Source: Schulman et al. 2017 (PPO), equation 7; Ye et al. 2020 (Mastering complex control in MOBA games: dual clip).
    """
    assert 0 <= low < 1, f"low is {low}, expected in [0, 1): the ratio is clipped to at least 1 - low, and it is never below 0"
    assert high >= 0, f"high is {high}, expected at least 0"
    assert dual is None or dual > 1, f"dual is {dual}, expected more than 1"
    ratio = finite_exp(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def cispo(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float = 1.0, high: float = 0.28, cap: float | None = None
) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the ratio is a weight, every token keeps its gradient.

    Args:
        low: width below 1, >= 0; 1 or more = no lower bound, as in the paper's experiments.
        high: width above 1, >= 0: the cap of the weight is 1 + high (verl, slime).
        cap: the cap itself, in place of 1 + high (TRL).

    Source: MiniMax-M1 2025 (CISPO), equations 4 and 5.
    """
    assert low >= 0, f"low is {low}, expected at least 0"
    assert high >= 0, f"high is {high}, expected at least 0"
    assert cap is None or cap > 0, f"cap is {cap}, expected more than 0"
    return -log_ratio.exp().clamp(1 - low, 1 + high if cap is None else cap).detach() * advantages * log_probs


def sapo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos where A > 0, else tau_neg: a soft gate in place of the clip.

    At r = 1 the gradient is that of -A r; it fades on both sides, faster for a larger tau.

    Args:
        tau_pos, tau_neg: > 0; with the larger tau_neg, tokens that become less likely fade sooner.

    Source: Gao et al. 2025 (Soft adaptive policy optimization).
    """
    assert tau_pos > 0, f"tau_pos is {tau_pos}, expected more than 0"
    assert tau_neg > 0, f"tau_neg is {tau_neg}, expected more than 0"
    tau = _sapo_temperatures(advantages, tau_pos, tau_neg)
    return -advantages * torch.sigmoid(tau * (finite_exp(log_ratio) - 1)) * 4 / tau


def _sapo_temperatures(advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    return torch.where(advantages > 0, torch.full_like(advantages, tau_pos), torch.full_like(advantages, tau_neg))


def dro(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, beta: float = 0.1) -> Tensor:
    """-(A log p - beta / 2 (log r)^2): policy gradient with a quadratic pull to the anchor.

    Source: Richemond et al. 2024 (Offline regularised reinforcement learning: DRO), with the baseline in the advantage.
    """
    assert beta >= 0, f"beta is {beta}, expected at least 0"
    return -(advantages * log_probs - 0.5 * beta * log_ratio.square())


def kl_cov(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, selected: Tensor, coef: float = 1.0) -> Tensor:
    """-A r, plus coef * |log r| at selected tokens: it holds back the few tokens that would cost the policy the most entropy.

    Args:
        selected: # [B, T] bool, chosen over the whole step (covariance.kl_cov_tokens).
        coef: >= 0.

    Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models: KL-Cov).
    """
    assert coef >= 0, f"coef is {coef}, expected at least 0"
    return -advantages * finite_exp(log_ratio) + coef * torch.where(selected, log_ratio.abs(), 0.0)


@dataclass(frozen=True)
class GammaShape:
    """The shape of vespo's weight phi(w) = w^k exp(lam (1 - w))."""

    k: float
    lam: float


def vespo(
    log_ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    *,
    positive: GammaShape = GammaShape(k=2.0, lam=3.0),
    negative: GammaShape = GammaShape(k=3.0, lam=2.0),
    floor: float = 1e-8,
    bound: float = 20.0,
) -> Tensor:
    """-sg(phi(w)) A log p, phi(w) = w^k exp(lam (1 - w)): a gamma-shaped weight of the sequence ratio w, 1 at w = 1.

    For ratio=sequence_sum_ratio. log w is clamped to [log(floor), bound]; `positive` is the shape where A >= 0, `negative` where A < 0.

    Source: VESPO (variational sequence-level soft policy optimization, 2026), with TRL's constants.
    """
    log_w = log_ratio.clamp(math.log(floor), bound).detach()
    good = advantages >= 0
    k = torch.where(good, torch.full_like(log_w, positive.k), torch.full_like(log_w, negative.k))
    lam = torch.where(good, torch.full_like(log_w, positive.lam), torch.full_like(log_w, negative.lam))
    return -(lam + k * log_w - lam * log_w.exp()).exp() * advantages * log_probs


# -- trust regions on probabilities (DPPO)


def inside_tv(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Tokens whose probability has not yet moved too far in the advantage's direction: p - p_old <= high where A > 0, else >= -low.

    Args:
        log_ratio: log-ratio of single tokens (token_ratio), so that log p_old = log_probs - log_ratio.
        low, high: bounds of |p - p_old|, the token's share of the total variation, in [0, 1].

    Returns: # [B, T] bool, without gradient.
    """
    moved = log_probs.detach().exp() - (log_probs - log_ratio).detach().exp()
    return torch.where(advantages > 0, moved <= high, moved >= -low)


def inside_tv_symmetric(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, width: float) -> Tensor:
    """Tokens with |p - p_old| <= width, whatever the advantage. Returns # [B, T] bool."""
    moved = log_probs.detach().exp() - (log_probs - log_ratio).detach().exp()
    return moved.abs() <= width


def inside_binary_kl(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float, high: float, epsilon: float = 1e-8) -> Tensor:
    """As inside_tv, measured by KL(p_old || p) of the event "this token": p_old log(p_old/p) + (1 - p_old) log((1 - p_old)/(1 - p)).

    A token outside is kept if the update brings p back: p <= p_old for A > 0, p >= p_old else.
    """
    new = log_probs.detach()
    old = (log_probs - log_ratio).detach()
    p, p_old = new.exp(), old.exp()
    divergence = p_old * (old - new) + (1 - p_old) * ((1 - p_old + epsilon) / (1 - p + epsilon)).log()
    return torch.where(advantages > 0, (divergence <= high) | (p <= p_old), (divergence <= low) | (p >= p_old))


def dppo(
    log_ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    inside: Callable[..., Tensor] = inside_tv,
    cap: float = 20.0,
    log_ratio_bound: float = 20.0,
) -> Tensor:
    """-sg(min(r, cap)) A log p inside the trust region, 0 outside: the region is about probabilities, not ratios, so a rare token may
    change its ratio freely and a common one may not.

    Args:
        low, high: widths of the region, in the measure of `inside`: total variation (inside_tv) or KL (inside_binary_kl).
        cap: bound of the detached ratio, > 0.
        log_ratio_bound: clamps the log-ratio before exp.

    Source: Qi et al. 2026 (Rethinking the trust region in LLM reinforcement learning: DPPO), with verl's truncated weight.
    """
    assert low >= 0, f"low is {low}, expected at least 0"
    assert high >= 0, f"high is {high}, expected at least 0"
    assert cap > 0, f"cap is {cap}, expected more than 0"
    keep = inside(log_ratio, log_probs, advantages, low=low, high=high)
    weight = log_ratio.detach().clamp(-log_ratio_bound, log_ratio_bound).exp().clamp(max=cap)
    return torch.where(keep, -weight * advantages * log_probs, torch.zeros_like(log_probs))


def penalized_ratio(
    log_ratio: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    *,
    inside: Callable[[Tensor, Tensor, Tensor], Tensor],
    advantage_scale: float = 1.0,
    penalty: float = 1e-3,
) -> Tensor:
    """-keep A r + penalty (log r)^2: the ratio keeps its gradient inside a region, a square pulls all tokens back to the anchor.

    Args:
        inside: (log_ratio, log_probs, advantages) -> # [B, T] bool, for example partial(inside_tv, low=0.2, high=0.2).
        advantage_scale: multiplies A.
        penalty: coefficient of the squared log-ratio, also outside the region.

    Source: prime-rl's default loss (DPPO) and, with inside_tv_symmetric, its IPO loss.
    """
    assert penalty >= 0, f"penalty is {penalty}, expected at least 0"
    keep = inside(log_ratio, log_probs, advantages)
    policy = torch.where(keep, -advantage_scale * advantages * finite_exp(log_ratio), torch.zeros_like(log_ratio))
    return policy + penalty * log_ratio.square()


# -- metrics of a surrogate: # [B, T] each, from its own arguments


def clip_fractions(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> dict[str, Tensor]:
    """Find the tokens whose gradient the clip removes: # [B, T] of 0 and 1 each; arguments as in clipped."""
    ratio = log_ratio.exp()
    below = ((ratio < 1 - low) & (advantages < 0)).to(log_ratio.dtype)
    above = ((ratio > 1 + high) & (advantages > 0)).to(log_ratio.dtype)
    by_dual = {} if dual is None else {"dual_clip_fraction": ((ratio > dual) & (advantages < 0)).to(log_ratio.dtype)}
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above, **by_dual}


def cispo_fractions(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float = 1.0, high: float = 0.28, cap: float | None = None
) -> dict[str, Tensor]:
    """Find tokens whose weight CISPO bounds, whatever the advantage (the gradient stays): # [B, T] of 0 and 1; arguments as in cispo."""
    ratio = log_ratio.exp()
    below = (ratio < 1 - low).to(log_ratio.dtype)
    above = (ratio > (1 + high if cap is None else cap)).to(log_ratio.dtype)
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}


def outside_fractions(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, inside: Callable[..., Tensor], low: float, high: float
) -> dict[str, Tensor]:
    """Find the tokens that have left DPPO's trust region and lost their gradient: # [B, T] of 0 and 1 each; arguments as in dppo."""
    outside = ~inside(log_ratio, log_probs, advantages, low=low, high=high)
    below = (outside & (advantages < 0)).to(log_ratio.dtype)
    above = (outside & (advantages > 0)).to(log_ratio.dtype)
    return {"outside_fraction": below + above, "outside_fraction_low": below, "outside_fraction_high": above}


def sapo_gates(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> dict[str, Tensor]:
    """The share of the gradient of -A r that SAPO's gate leaves: # [B, T], 4 s (1 - s) with s = sigmoid(tau (r - 1)), so 1 at r = 1."""
    tau = _sapo_temperatures(advantages, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (finite_exp(log_ratio) - 1))
    return {"gate": 4 * gate * (1 - gate)}

"""Log-ratios between the policy and its anchor, and the surrogates made of them. A surrogate is a loss, so it is minimised.

Callers put 0 at masked places before anything is computed there: masking after exp would leave NaN gradients (0 * inf).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Ratio: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(log_probs, old_log_probs, mask), each [B, T] -> log_ratio [B, T]."""

Surrogate: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""f(log_ratio, log_probs, advantages), each [B, T] -> loss of each token [B, T]."""

# -- log-ratios


def token_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log r_t = log p(y_t) - log p_old(y_t). All # [B, T]; 0 where mask = 0."""
    return torch.where(mask > 0, log_probs - old_log_probs, 0.0)


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The mean of a row's token log-ratios at each of its tokens: log s_i, s_i = (p(y) / p_old(y))^(1 / |y|).

    The gradient goes through each token's own log-prob (the token-level form), so advantages may differ along a row.

    Source: Zheng et al. 2025 (GSPO), equations 7, 13 and 14.
    """
    on = (mask > 0).to(log_probs.dtype)
    per_token = token_ratio(log_probs, old_log_probs, mask)
    mean = (per_token * on).sum(1, keepdim=True) / on.sum(1, keepdim=True).clamp(min=1)
    own = torch.where(mask > 0, log_probs - log_probs.detach(), 0.0)  # 0, with the gradient of log_probs
    return (mean.detach() + own) * on


# -- surrogates


def reinforce(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p (Williams 1992). All # [B, T]."""
    return -advantages * log_probs


def importance_weighted(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A r, the unclipped surrogate (Schulman et al. 2017, equation 6). All # [B, T]."""
    return -advantages * log_ratio.exp()


def clipped(
    log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A); with `dual`, bounded by -dual * A where A < 0.

    Args:
        log_ratio, log_probs, advantages: # [B, T].
        low, high: widths of the clip range, in [0, 1] and >= 0 (DAPO's clip-higher: 0.2 and 0.28).
        dual: > 1; a token with A < 0 and r > dual has loss -dual * A and no gradient. None = off.

    Source: Schulman et al. 2017 (PPO), equation 7; Ye et al. 2020 (dual clip), equation 3.
    """
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    assert dual > 1, f"dual is {dual}, expected > 1"
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def cispo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, low: float = 1.0, high: float = 0.28) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the ratio is a weight, every token keeps its gradient.

    Source: MiniMax-M1 2025 (CISPO), equations 4 and 5.
    """
    return -log_ratio.exp().clamp(1 - low, 1 + high).detach() * advantages * log_probs


def clip_fractions(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """At which tokens the clip is active, that is, where it removes the gradient: # [B, T] of 0 and 1 each."""
    ratio = log_ratio.exp()
    below = ((ratio < 1 - low) & (advantages < 0)).to(log_ratio.dtype)
    above = ((ratio > 1 + high) & (advantages > 0)).to(log_ratio.dtype)
    return {"clip_fraction": below + above, "clip_fraction_low": below, "clip_fraction_high": above}

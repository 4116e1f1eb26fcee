"""The coefficient of a KL term as a pure state update: fixed, or adapted so that the measured KL stays near a target."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
from torch import Tensor

from rollouts.algorithms.kl import KLEstimator, k1
from rollouts.checks import check_shapes
from rollouts.types import KLControl


def update_kl_control(control: KLControl, current_kl: float, num_samples: int) -> KLControl:
    """kl_coef * (1 + clip(current_kl / target - 1, -0.2, 0.2) * num_samples / horizon); unchanged if target is None.

    A step of many horizons would give 0, which no factor can increase: one update leaves at least a tenth.

    Args:
        current_kl: measured on the samples, in nats; may be negative, as k1 can be.
        num_samples: number of samples of the measurement.

    Asserts: current_kl is finite.
    Source: Ziegler et al. 2019 (Fine-tuning language models from human preferences), section 2.2.
    """
    if control.target is None:
        return control
    assert math.isfinite(current_kl), f"current_kl is {current_kl}, expected a finite number"
    error = min(max(current_kl / control.target - 1, -0.2), 0.2)
    factor = max(1 + error * num_samples / control.horizon, 0.1)
    return replace(control, kl_coef=max(control.kl_coef * factor, sys.float_info.min))


def measure_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    *,
    kl: KLEstimator = k1,
    count_empty_rows: bool = True,
    epsilon: float = 0.0,
) -> Tensor:
    """mean over rows of (sum_t kl_t / (number of trained tokens + epsilon)): the KL per token that a controller steers.

    Args:
        log_probs: # [B, T] of the sampling policy.
        ref_log_probs: # [B, T].
        loss_mask: # [B, T]; every token with more than 0 counts as one.
        kl: (log_probs, ref_log_probs) -> [B, T].
        count_empty_rows: rows without a trained token count as KL 0; False leaves them out.
        epsilon: at least 0; some code adds 1e-8 here.

    Returns: a scalar; 0 for a batch without a trained token.
    """
    check_shapes(ref_log_probs=(ref_log_probs, tuple(log_probs.shape)), loss_mask=(loss_mask, tuple(log_probs.shape)))
    on = loss_mask > 0
    zeros = torch.zeros_like(log_probs)
    per_token = torch.where(on, kl(torch.where(on, log_probs, zeros), torch.where(on, ref_log_probs, zeros)), zeros)
    counts = on.sum(-1).to(log_probs.dtype)  # [B]
    row_means = per_token.sum(-1) / torch.where(counts > 0, counts + epsilon, torch.ones_like(zeros[:, 0]))
    num_rows = row_means.numel() if count_empty_rows else int((counts > 0).sum())
    return row_means.sum() / max(num_rows, 1)

"""Statistics over groups of rows and over masked tokens.

Group statistics take values [B] and group_ids [B] (any numbering, any order of rows) and give [B]: each row gets its group's value.
Singleton groups and groups of equal values have a defined result everywhere, never NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.checks import check_shapes

GroupStatistic: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(rewards [B], group_ids [B]) -> [B]."""


# -- over groups


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over each row's group. x: # [B]. Returns # [B]."""
    check_shapes(group_ids=(group_ids, tuple(x.shape)))
    _, dense = torch.unique(group_ids, return_inverse=True)
    return torch.zeros(int(dense.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, dense, x)[dense]


def group_count(x: Tensor, group_ids: Tensor) -> Tensor:
    """Number of rows in each row's group. Returns # [B] in the dtype of x."""
    return group_sum(torch.ones_like(x), group_ids)


def group_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over each row's group. Returns # [B]."""
    return group_sum(x, group_ids) / group_count(x, group_ids)


def group_std(x: Tensor, group_ids: Tensor) -> Tensor:
    """Standard deviation (divisor n - 1) of each row's group; 0 for a group of one.

    A group whose values are all the same number gets exactly 0, whatever rounding does to its mean.
    """
    count = group_count(x, group_ids)
    squares = group_sum(group_centered(x, group_ids).square(), group_ids)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.zeros_like(x))


def group_centered(x: Tensor, group_ids: Tensor) -> Tensor:
    """x minus the mean of its group; exactly 0 in groups whose values are all equal."""
    _, dense = torch.unique(group_ids, return_inverse=True)
    num_groups = int(dense.max()) + 1
    low = torch.full((num_groups,), torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, dense, x, "amin")[dense]
    high = torch.full((num_groups,), -torch.inf, dtype=x.dtype, device=x.device).scatter_reduce(0, dense, x, "amax")[dense]
    return torch.where(low == high, torch.zeros_like(x), x - group_mean(x, group_ids))


def leave_one_out_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of the other rows of the group (RLOO, Ahmadian et al. 2024, equation 5); the row itself in a group of one.

    Where all values of a group are equal it is exactly that value: x - mean(others) = n / (n - 1) * (x - mean(all)).
    """
    count = group_count(x, group_ids)
    return x - group_centered(x, group_ids) * (count / (count - 1).clamp(min=1))


def batch_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over the batch, as a group statistic."""
    return group_mean(x, torch.zeros_like(group_ids))


def batch_std(x: Tensor, group_ids: Tensor) -> Tensor:
    """Standard deviation (n - 1) over the batch, as a group statistic."""
    return group_std(x, torch.zeros_like(group_ids))


def group_ids_from_cu_seqlens(cu_seqlens: Tensor) -> Tensor:
    """Group id of each packed entry: # [R + 1] boundaries -> # [N], for statistics over packed data."""
    return torch.repeat_interleave(torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device), cu_seqlens.diff())


# -- over masked tokens


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over entries with mask > 0, weighted by the mask; 0 if there is none. Returns a scalar."""
    total = mask.sum()
    summed = (torch.where(mask > 0, x, torch.zeros_like(x)) * mask).sum()
    return torch.where(total > 0, summed / total.clamp(min=torch.finfo(x.dtype).tiny), torch.zeros_like(summed))


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) over the entries with mask > 0; 0 elsewhere.

    Args:
        x: # [B, T].
        mask: # [B, T].
        shift_mean: False adds the mean back.
        unbiased: divisor n - 1 (verl, OpenRLHF) or n.
    """
    count = mask.sum()
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    whitened = (x - mean) * (variance + epsilon).rsqrt()
    return torch.where(mask > 0, whitened if shift_mean else whitened + mean, torch.zeros_like(x))

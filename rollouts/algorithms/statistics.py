"""Statistics over groups of rows and over masked tokens.

Group statistics take values [B] and group_ids [B] (any numbering, any order of rows) and give [B]: each row gets its group's value.
For [B, T] data under a mask, take the entries with mask > 0 and repeat the group number along the row (masked_entries); for packed data,
number the entries by their sequence. Singleton groups and groups of equal values have a defined result
everywhere, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.checks import check_shapes

GroupStatistic: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""f(rewards [B], group_ids [B]) -> [B]."""

AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""f(sums of this rank) -> sums over all ranks, the same shape."""


# -- over groups


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """Sum over each row's group. x: # [B]. Returns # [B]."""
    check_shapes(group_ids=(group_ids, tuple(x.shape)))
    names, dense = torch.unique(group_ids, return_inverse=True)
    return torch.zeros(names.numel(), dtype=x.dtype, device=x.device).index_add(0, dense, x)[dense]


def group_count(x: Tensor, group_ids: Tensor) -> Tensor:
    """Number of rows in each row's group. Returns # [B] in the dtype of x."""
    return group_sum(torch.ones_like(x), group_ids)


def group_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over each row's group. Returns # [B]."""
    return group_sum(x, group_ids) / group_count(x, group_ids)


def group_max(x: Tensor, group_ids: Tensor) -> Tensor:
    """Largest value of each row's group. Returns # [B]."""
    check_shapes(group_ids=(group_ids, tuple(x.shape)))
    names, dense = torch.unique(group_ids, return_inverse=True)
    lowest = torch.full((names.numel(),), -torch.inf, dtype=x.dtype, device=x.device)
    return lowest.scatter_reduce(0, dense, x, "amax")[dense]


def group_min(x: Tensor, group_ids: Tensor) -> Tensor:
    """Smallest value of each row's group. Returns # [B]."""
    return -group_max(-x, group_ids)


def group_std(x: Tensor, group_ids: Tensor, *, unbiased: bool = True) -> Tensor:
    """Standard deviation (divisor n - 1, or n if not unbiased) of each row's group; 0 for a group of one.

    A group whose values are all the same number gets exactly 0, independent of the rounding of its mean.
    """
    count = group_count(x, group_ids)
    squares = group_sum(group_centered(x, group_ids).square(), group_ids)
    return (squares / (count - 1 if unbiased else count).clamp(min=1)).sqrt()


def group_rms(x: Tensor, group_ids: Tensor, *, unbiased: bool = True) -> Tensor:
    """Root of the mean square (divisor n - 1, or n if not unbiased) of each row's group: the standard deviation about 0.

    0 for a group of one if the divisor is n - 1.
    """
    count = group_count(x, group_ids)
    rms = (group_sum(x.square(), group_ids) / (count - 1 if unbiased else count).clamp(min=1)).sqrt()
    return torch.where((count > 1) | (not unbiased), rms, torch.zeros_like(rms))


def group_centered(x: Tensor, group_ids: Tensor) -> Tensor:
    """x minus the mean of its group; exactly 0 in groups whose values are all equal."""
    equal = group_min(x, group_ids) == group_max(x, group_ids)
    return torch.where(equal, torch.zeros_like(x), x - group_mean(x, group_ids))


def leave_one_out_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of the other rows of the group (RLOO, Ahmadian et al. 2024); the row itself in a group of one.

    If all values of a group are equal it is exactly that value: x - mean(others) = n / (n - 1) * (x - mean(all)).
    """
    count = group_count(x, group_ids)
    return x - group_centered(x, group_ids) * (count / (count - 1).clamp(min=1))


def batch_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean over the batch, as a group statistic."""
    return group_mean(x, torch.zeros_like(group_ids))


def batch_std(x: Tensor, group_ids: Tensor, *, unbiased: bool = True) -> Tensor:
    """Standard deviation over the batch (divisor n - 1, or n if not unbiased), as a group statistic."""
    return group_std(x, torch.zeros_like(group_ids), unbiased=unbiased)


def batch_rms(x: Tensor, group_ids: Tensor, *, unbiased: bool = True) -> Tensor:
    """Root of the mean square over the batch (divisor n - 1, or n if not unbiased), as a group statistic."""
    return group_rms(x, torch.zeros_like(group_ids), unbiased=unbiased)


def batch_leave_one_out_mean(x: Tensor, group_ids: Tensor) -> Tensor:
    """Mean of all other rows of the batch, as a group statistic."""
    return leave_one_out_mean(x, torch.zeros_like(group_ids))


def masked_entries(x: Tensor, mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The entries with mask > 0 and the group of each, for group statistics over tokens.

    Args:
        x, mask: # [B, T] or # [B].
        group_ids: # [B].

    Returns: two # [N], N = number of entries with mask > 0, in the order of x[mask > 0].
    """
    check_shapes(mask=(mask, tuple(x.shape)), group_ids=(group_ids, (x.shape[0],)))
    on = mask > 0
    ids = group_ids if x.dim() == 1 else group_ids[:, None].expand_as(x)
    return x[on], ids[on]


# -- over masked tokens


def count_tokens(mask: Tensor) -> Tensor:
    """Number of entries with mask > 0 in each row. # [B, T] -> # [B] int64."""
    return (mask > 0).sum(dim=1)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x * mask over entries with mask > 0; values elsewhere, NaN included, are ignored. Returns a scalar."""
    return (torch.where(mask > 0, x, torch.zeros_like(x)) * mask).sum()


def masked_mean(x: Tensor, mask: Tensor, *, epsilon: float = 0.0, all_reduce: AllReduce | None = None) -> Tensor:
    """sum(x * mask) / (sum(mask) + epsilon) over entries with mask > 0; 0 if there is none. Returns a scalar.

    Args:
        x, mask: the same shape; the mask may hold fractional weights.
        epsilon: added to the count; verl has 1e-8, the mean itself 0.
        all_reduce: sums over ranks, for a mean over the entries of all of them.
    """
    sums = torch.stack((masked_sum(x, mask), mask.sum().to(x.dtype)))
    total, count = sums if all_reduce is None else all_reduce(sums)
    return torch.where(count > 0, total / (count + epsilon).clamp(min=torch.finfo(x.dtype).tiny), torch.zeros_like(total))


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True, epsilon: float = 0.0, all_reduce: AllReduce | None = None) -> Tensor:
    """Mean square about the mean over entries with mask > 0, times n / (n - 1) if unbiased; 0 for one entry or none. Returns a scalar.

    Args:
        x, mask: the same shape.
        unbiased: divisor n - 1, n = sum of the mask.
        epsilon: added to the counts of both means.
        all_reduce: sums over ranks.
    """
    mean = masked_mean(x, mask, epsilon=epsilon, all_reduce=all_reduce)
    variance = masked_mean((x - mean).square(), mask, epsilon=epsilon, all_reduce=all_reduce)
    if not unbiased:
        return variance
    count = mask.sum().to(x.dtype)
    if all_reduce is not None:
        count = all_reduce(count)
    return torch.where(count > 1, variance * count / torch.where(count > 1, count - 1, 1), torch.zeros_like(variance))


def top_share(x: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The entries at or above the (1 - share) quantile of x over all entries with mask > 0, for example the tokens of highest entropy.

    As importance weights they train on those tokens alone. A statistic over the batch: take it over the whole step, before it is split.

    Args:
        x, mask: the same shape.
        share: share of the entries to keep, in (0, 1]; if the quantile falls between two entries the upper one bounds.

    Returns: bool, the shape of x; False where mask = 0.
    Source: Wang et al. 2025 (Beyond the 80/20 rule: high-entropy minority tokens), section 5.
    """
    assert 0 < share <= 1, f"share is {share}, expected in (0, 1]"
    ordered = x[mask > 0].sort().values
    if ordered.numel() == 0:
        return torch.zeros_like(mask, dtype=torch.bool)
    rank = math.ceil((1 - share) * (ordered.numel() - 1) - 1e-9)  # rounding must not move a whole rank up
    return (x >= ordered[rank]) & (mask > 0)


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    count_epsilon: float = 0.0,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) over the entries with mask > 0; 0 elsewhere.

    Entries that are all the same number get exactly 0 (plus the mean, if it is added back): a spread due to rounding of the mean alone
    counts as none.

    Args:
        x: # [B, T].
        mask: # [B, T].
        shift_mean: False adds the mean back.
        unbiased: divisor n - 1 (verl, OpenRLHF) or n.
        epsilon: added to the variance.
        count_epsilon: added to the counts of both means, see masked_mean.
        all_reduce: sums over ranks; every rank then gets the result of one process with all rows.
    """
    mean = masked_mean(x, mask, epsilon=count_epsilon, all_reduce=all_reduce)
    variance = masked_var(x, mask, unbiased=unbiased, epsilon=count_epsilon, all_reduce=all_reduce)
    rounding = 32 * torch.finfo(x.dtype).eps * mean.abs()
    whitened = torch.where(variance <= rounding.square(), torch.zeros_like(x), (x - mean) * (variance + epsilon).rsqrt())
    return torch.where(mask > 0, whitened if shift_mean else whitened + mean, torch.zeros_like(x))

"""Staleness of samples: which are too many weight versions behind, and a summary for the metrics. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from rollouts.data.samples import count_token_ages, find_trained_versions
from rollouts.types import Group, Sample


def compute_staleness(sample: Sample, current_version: int) -> int:
    """Return the number of versions that the sample is behind; 0 without a trained token that the policy sampled.

    It is current_version minus the newest version in the sample, or minus the oldest where it has segment_log_probs. The proximal policy
    of a plain row can only fit its newest part, while segment-wise each part has its own.

    Args:
        sample: with weight_versions; trained tokens (loss_mask > 0) of versions >= 0 count.
        current_version: version of the weights that train or generate now.
    """
    versions = find_trained_versions(sample)
    if not versions:
        return 0
    return current_version - (max(versions) if sample.recompute_version < 0 else min(versions))


def compute_allowed_staleness(sample: Sample, max_staleness: int | None) -> int:
    """Return the largest allowed value of compute_staleness: 1, or with segment_log_probs max(1, max_staleness).

    Args:
        sample: as in compute_staleness.
        max_staleness: limit of the run; None = 1.
    """
    if sample.recompute_version < 0 or max_staleness is None or not find_trained_versions(sample):
        return 1
    return max(1, max_staleness)


def is_too_stale(sample: Sample, current_version: int, max_staleness: int | None = None) -> bool:
    """Return True if the sample is further behind than allowed."""
    return compute_staleness(sample, current_version) > compute_allowed_staleness(sample, max_staleness)


def drop_stale_groups(
    groups: Iterable[Group], current_version: int, max_staleness: int | None = None
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Return (kept, dropped), each in the order given: a group is used whole or not at all, so one stale sample drops it."""
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        stale = any(is_too_stale(sample, current_version, max_staleness) for sample in group)
        (dropped if stale else kept).append(group)
    return tuple(kept), tuple(dropped)


def summarize_staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    """Return staleness_mean, staleness_max and staleness_<k>, the fraction of trained tokens that are k versions behind.

    Samples without weight_versions and baselines do not count. {} if no token counts.
    """
    ages = count_token_ages((sample for sample in samples if sample.weight_versions is not None), version)
    total = sum(ages.values())
    if not total:
        return {}
    mean = sum(age * n for age, n in ages.items()) / total
    return {"staleness_mean": mean, "staleness_max": float(max(ages)), **{f"staleness_{age}": n / total for age, n in ages.items()}}

"""Staleness of samples: the number of weight versions that they are behind, and which are too old. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollouts.data.samples import describe_sample
from rollouts.errors import EngineProtocolError
from rollouts.types import Group, Sample


def compute_staleness(sample: Sample, current_version: int) -> int:
    """Return the number of versions that the sample is behind; 0 without a trained token that the policy sampled.

    It is current_version minus the newest version in the sample, or minus the oldest where it has segment_log_probs. The proximal policy
    of a plain row can only fit its newest part, while segment-wise each part has its own.

    Args:
        sample: with weight_versions; trained tokens (loss_mask > 0) of versions >= 0 count.
        current_version: version of the weights that train or generate now.
    """
    versions = _trained_versions(sample)
    if not versions:
        return 0
    return current_version - (max(versions) if sample.recompute_version < 0 else min(versions))


def compute_allowed_staleness(sample: Sample, max_staleness: int | None) -> int:
    """Return the largest allowed value of compute_staleness: 1, or with segment_log_probs max(1, max_staleness).

    Args:
        sample: as in compute_staleness.
        max_staleness: limit of the run; None = 1.
    """
    if sample.recompute_version < 0 or max_staleness is None or not _trained_versions(sample):
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


def count_token_ages(samples: Iterable[Sample], current_version: int) -> dict[int, int]:
    """Return a mapping from versions behind to the number of trained tokens of that age, in the order of age."""
    ages = Counter(current_version - version for sample in samples for version in _trained_versions(sample))
    return dict(sorted(ages.items()))


def check_versions(samples: Iterable[Sample], newest_version: int) -> None:
    """Refuse samples of a weight version that never existed.

    Args:
        samples: samples without weight_versions and baselines are skipped.
        newest_version: newest version that any engine can have sampled with.

    Raises: EngineProtocolError for a trained token of a later version.
    """
    for sample in samples:
        newest = max(_trained_versions(sample), default=0) if sample.weight_versions is not None else 0
        if newest > newest_version:
            raise EngineProtocolError(
                f"{describe_sample(sample)} has tokens of weight version {newest}, but the engines were given none after {newest_version}: "
                "an engine serves weights that this run never made, and nobody can say how old its tokens are. Another program updates it, "
                "or it has the weights of an earlier run: start it again or sync the weights before the first rollout, and let one run "
                "alone update an engine"
            )


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


def _trained_versions(sample: Sample) -> list[int]:
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    if not sample.trainable:  # a baseline may be of any age: only its reward is used
        return []
    return [version for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=True) if mask > 0 and version >= 0]

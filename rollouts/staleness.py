"""How many rollouts may run, and which samples are too old: the arithmetic of bounded staleness, as pure functions.

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * batch_size - (accepted + running)) + filtered

The second term lets the trainer fall at most max_staleness versions behind what is generated: at version v it has consumed v batches,
and (max_staleness + 1) more may be under way. Accepted samples that are dropped before training must give their room back, or a run that
drops enough of them stops for ever: with_dropped takes them out of `accepted`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollouts.samples import describe_sample
from rollouts.types import Group, Sample

# -- capacity


@dataclass(frozen=True, kw_only=True)
class StalenessLimits:
    """What bounds the rollouts under way. Numbers below 1 count as 1 where noted."""

    max_concurrent: int  # rollouts running at once; below 1 counts as 1
    batch_size: int  # rollouts in one training batch; below 1 counts as 1
    max_staleness: int  # versions that the trainer may be behind; 0 = one batch ahead, at most


@dataclass(frozen=True, kw_only=True)
class RolloutCounts:
    """Where the rollouts of a run are. enqueued + running + accepted + rejected counts each of them once."""

    enqueued: int = 0  # waiting for capacity
    running: int = 0
    accepted: int = 0  # finished and kept, over the whole run
    rejected: int = 0  # finished and not kept
    filtered: int = 0  # room on top of the limits (with_filtered)


def compute_capacity(limits: StalenessLimits, counts: RolloutCounts, version: int) -> int:
    """How many more rollouts may start now; 0 or less = none, and a negative number says by how much the limits are exceeded.

    Args:
        version: of the weights that generate now, from 0.

    Source: Fu et al. 2025 (AReaL), equation 3.
    """
    concurrent = max(1, limits.max_concurrent) - counts.running
    ahead = (limits.max_staleness + version + 1) * max(1, limits.batch_size) - (counts.accepted + counts.running)
    return min(concurrent, ahead) + counts.filtered


def compute_pending_limit(limits: StalenessLimits) -> int:
    """The most rollouts that are worth keeping in a queue: (max_staleness + 1) * batch_size."""
    return (limits.max_staleness + 1) * limits.batch_size


def with_enqueued(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n rollouts began to wait."""
    return replace(counts, enqueued=counts.enqueued + n)


def with_submitted(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n rollouts started: waiting ones as far as there are any, else new ones."""
    return replace(counts, enqueued=max(0, counts.enqueued - n), running=counts.running + n)


def with_accepted(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n running rollouts finished and were kept."""
    assert counts.running >= n, f"{n} rollouts accepted, but {counts.running} are running"
    return replace(counts, running=counts.running - n, accepted=counts.accepted + n)


def with_rejected(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n running rollouts failed or were refused."""
    assert counts.running >= n, f"{n} rollouts rejected, but {counts.running} are running"
    return replace(counts, running=counts.running - n, rejected=counts.rejected + n)


def with_returned(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n running rollouts were stopped before their end: they wait again, with the tokens they have."""
    assert counts.running >= n, f"{n} rollouts returned, but {counts.running} are running"
    return replace(counts, running=counts.running - n, enqueued=counts.enqueued + n)


def with_dropped(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n accepted rollouts were dropped before training: they count as rejected, and others may take their place."""
    assert counts.accepted >= n, f"{n} accepted rollouts dropped, but {counts.accepted} are accepted"
    return replace(counts, accepted=counts.accepted - n, rejected=counts.rejected + n)


def with_filtered(counts: RolloutCounts, n: int) -> RolloutCounts:
    """The counts with room for n more, also beyond max_concurrent; n <= 0 changes nothing.

    For rollouts that stay in `accepted` although they were dropped; where they can be named, with_dropped is exact.
    """
    return replace(counts, filtered=counts.filtered + max(0, n))


def with_consumed(counts: RolloutCounts, n: int) -> RolloutCounts:
    """The counts after n samples went to training, which ends as much of the room that with_filtered gave."""
    return replace(counts, filtered=counts.filtered - min(max(0, n), counts.filtered))


def with_forgotten(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """The counts after n waiting rollouts were given up: they count as rejected."""
    assert counts.enqueued >= n, f"{n} waiting rollouts given up, but {counts.enqueued} wait"
    return replace(counts, enqueued=counts.enqueued - n, rejected=counts.rejected + n)


def divide_limits(limits: StalenessLimits, data_parallel_size: int) -> StalenessLimits:
    """The share of one of several trainers that take their batches from executors of their own: max(1, n // data_parallel_size)."""
    assert data_parallel_size >= 1, f"data_parallel_size is {data_parallel_size}, expected at least 1"
    share = {name: max(1, getattr(limits, name) // data_parallel_size) for name in ("max_concurrent", "batch_size")}
    return replace(limits, **share)


def clamp_capacity(capacity: int, limits: StalenessLimits, counts: RolloutCounts) -> int:
    """What a producer may use of a reported capacity: at least 0, and never more at once than max_concurrent."""
    return max(0, min(capacity, max(1, limits.max_concurrent) - counts.running))


def with_recovered(counts: RolloutCounts, limits: StalenessLimits, version: int) -> RolloutCounts:
    """The counts of a run that resumes at `version`: accepted are the rollouts that its batches have used.

    Without it capacity would be that of a run that has consumed nothing, version batches too many.
    """
    return replace(counts, accepted=version * max(1, limits.batch_size))


# -- samples


def compute_staleness(sample: Sample, current_version: int) -> int:
    """How many versions the sample is behind; 0 for one without a trained token that the policy sampled.

    current_version - the newest version in the sample; with segment_log_probs: - the oldest. The proximal policy of a plain row can only
    fit its newest part, while segment-wise each part has its own.

    Args:
        sample: with weight_versions; trained tokens (loss_mask > 0) of versions >= 0 count.
        current_version: of the weights that train or generate now.
    """
    versions = _trained_versions(sample)
    if not versions:
        return 0
    return current_version - (max(versions) if sample.recompute_version < 0 else min(versions))


def compute_allowed_staleness(sample: Sample, max_staleness: int | None) -> int:
    """The most that compute_staleness may be: 1, or with segment_log_probs max(1, max_staleness).

    Args:
        sample: as in compute_staleness.
        max_staleness: of the run; None = 1.
    """
    if sample.recompute_version < 0 or max_staleness is None or not _trained_versions(sample):
        return 1
    return max(1, max_staleness)


def is_too_stale(sample: Sample, current_version: int, max_staleness: int | None = None) -> bool:
    """Whether the sample is further behind than it may be."""
    return compute_staleness(sample, current_version) > compute_allowed_staleness(sample, max_staleness)


def drop_stale_groups(
    groups: Iterable[Group], current_version: int, max_staleness: int | None = None
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """(kept, dropped), each in the order given: a group is used whole or not at all, so one stale sample drops it."""
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        stale = any(is_too_stale(sample, current_version, max_staleness) for sample in group)
        (dropped if stale else kept).append(group)
    return tuple(kept), tuple(dropped)


def count_token_ages(samples: Iterable[Sample], current_version: int) -> dict[int, int]:
    """Versions behind -> number of trained tokens of that age, in the order of age."""
    ages = Counter(current_version - version for sample in samples for version in _trained_versions(sample))
    return dict(sorted(ages.items()))


def summarize_staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    """staleness_mean, staleness_max and staleness_<k>, the fraction of trained tokens that are k versions behind.

    Samples without weight_versions, and those that are not trained on (metadata["trainable"] False), do not count; nothing is returned
    where no token counts.
    """
    ages = count_token_ages((sample for sample in samples if sample.weight_versions is not None), version)
    total = sum(ages.values())
    if not total:
        return {}
    mean = sum(age * n for age, n in ages.items()) / total
    return {"staleness_mean": mean, "staleness_max": float(max(ages)), **{f"staleness_{age}": n / total for age, n in ages.items()}}


def _trained_versions(sample: Sample) -> list[int]:
    assert sample.weight_versions is not None, f"{describe_sample(sample)} has no weight_versions"
    if not sample.metadata.get("trainable", True):  # a baseline sample may be of any age: only its reward is used
        return []
    return [version for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=True) if mask > 0 and version >= 0]

"""Capacity: the arithmetic of bounded staleness, and the manager that tells an executor how many rollouts may start.

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * batch_size - (accepted + running)) + filtered

The second term lets a trained token be at most max_staleness versions behind the trainer: at version v it has consumed v batches, and
(max_staleness + 1) more may be in progress. Accepted groups that are dropped before training must return their capacity, or a run that
drops enough of them stops forever: see FilteredSamplesCapacityModifier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rollouts.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class StalenessLimits:
    """Bounds on the rollouts in progress. Numbers below 1 count as 1 where noted."""

    max_concurrent: int  # rollouts that may run at once; below 1 counts as 1
    batch_size: int  # rollouts in one training batch; below 1 counts as 1
    max_staleness: int  # versions that a trained token may be behind the trainer; 0 = at most one batch ahead


@dataclass(frozen=True, kw_only=True)
class RolloutCounts:
    """Number of rollouts of a run in each state. enqueued + running + accepted + rejected counts each of them once."""

    enqueued: int = 0  # waiting for capacity
    running: int = 0
    accepted: int = 0  # finished and kept, over the whole run
    rejected: int = 0  # finished and not kept
    filtered: int = 0  # additional capacity beyond the limits (with_filtered)


def compute_capacity(limits: StalenessLimits, counts: RolloutCounts, version: int) -> int:
    """Return the number of further rollouts that may start now; 0 or less = none, a negative number = the excess over the limits.

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * batch_size - (accepted + running)) + filtered

    Args:
        version: weight version that generates now, from 0.

    Source: Fu et al. 2025 (AReaL), equation 3.
    """
    concurrent = max(1, limits.max_concurrent) - counts.running
    ahead = (limits.max_staleness + version + 1) * max(1, limits.batch_size) - (counts.accepted + counts.running)
    return min(concurrent, ahead) + counts.filtered


def compute_pending_limit(limits: StalenessLimits) -> int:
    """Return the maximum number of rollouts worth keeping in a queue: (max_staleness + 1) * batch_size."""
    return (limits.max_staleness + 1) * limits.batch_size


def with_enqueued(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n rollouts began to wait."""
    return replace(counts, enqueued=counts.enqueued + n)


def with_submitted(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n rollouts started: waiting ones first, then new ones."""
    return replace(counts, enqueued=max(0, counts.enqueued - n), running=counts.running + n)


def with_accepted(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n running rollouts finished and were kept."""
    assert counts.running >= n, f"{n} rollouts accepted, but {counts.running} are running"
    return replace(counts, running=counts.running - n, accepted=counts.accepted + n)


def with_rejected(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n running rollouts failed or were refused."""
    assert counts.running >= n, f"{n} rollouts rejected, but {counts.running} are running"
    return replace(counts, running=counts.running - n, rejected=counts.rejected + n)


def with_returned(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n running rollouts were stopped before their end: they wait again, with their tokens."""
    assert counts.running >= n, f"{n} rollouts returned, but {counts.running} are running"
    return replace(counts, running=counts.running - n, enqueued=counts.enqueued + n)


def with_filtered(counts: RolloutCounts, n: int) -> RolloutCounts:
    """Return the counts with capacity for n more, also beyond max_concurrent; n <= 0 changes nothing.

    For rollouts that stay in `accepted` although they were dropped.
    """
    return replace(counts, filtered=counts.filtered + max(0, n))


def with_consumed(counts: RolloutCounts, n: int) -> RolloutCounts:
    """Return the counts after n samples went to training, which removes as much of the capacity added by with_filtered."""
    return replace(counts, filtered=counts.filtered - min(max(0, n), counts.filtered))


def with_forgotten(counts: RolloutCounts, n: int = 1) -> RolloutCounts:
    """Return the counts after n waiting rollouts were given up: they count as rejected."""
    assert counts.enqueued >= n, f"{n} waiting rollouts given up, but {counts.enqueued} wait"
    return replace(counts, enqueued=counts.enqueued - n, rejected=counts.rejected + n)


def divide_limits(limits: StalenessLimits, data_parallel_size: int) -> StalenessLimits:
    """Return one trainer's share, if several take batches from their own executors: max(1, n // data_parallel_size)."""
    assert data_parallel_size >= 1, f"data_parallel_size is {data_parallel_size}, expected at least 1"
    share = {name: max(1, getattr(limits, name) // data_parallel_size) for name in ("max_concurrent", "batch_size")}
    return replace(limits, **share)


def clamp_capacity(capacity: int, limits: StalenessLimits, counts: RolloutCounts) -> int:
    """Return the usable part of a reported capacity: at least 0, and at most max_concurrent - running."""
    return max(0, min(capacity, max(1, limits.max_concurrent) - counts.running))


def with_recovered(counts: RolloutCounts, limits: StalenessLimits, version: int) -> RolloutCounts:
    """Return the counts of a run that resumes at `version`: accepted are the rollouts used by its batches.

    Otherwise the capacity would be that of a run that has consumed nothing, `version` batches too many.
    """
    return replace(counts, accepted=version * max(1, limits.batch_size))


class CapacityModifier(Protocol):
    """Adjustment of the number of rollouts that may start."""

    def get_capacity_delta(self, version: int) -> int:
        """Return the rollouts to add to the capacity of the formula while weights of this version generate."""
        ...

    def on_samples_filtered(self, n: int, version: int) -> None:
        """Note that n accepted rollouts were dropped while weights of this version generated."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict."""
        ...

    def reset(self) -> None:
        """Clear the state, for a run that resumes from its version alone."""
        ...


class FilteredSamplesCapacityModifier:
    """Modifier that gives back the capacity of rollouts that were accepted and then dropped before training.

    A dropped rollout stays in the manager's `accepted`, so its capacity stays used forever unless it is returned forever; a run that drops
    enough of them stops without this modifier. on_capacity_consumed removes capacity again, for owners that correct `accepted` themselves.
    """

    def __init__(self) -> None:
        self._counts = RolloutCounts()
        self._by_version: Counter[int] = Counter()

    def on_samples_filtered(self, n: int, version: int) -> None:
        """Note that n accepted rollouts were dropped while weights of this version generated; n <= 0 changes nothing."""
        self._counts = with_filtered(self._counts, n)
        if n > 0:
            self._by_version[version] += n

    def on_capacity_consumed(self, n: int) -> None:
        """Remove the capacity of n dropped rollouts again; at most all of it."""
        self._counts = with_consumed(self._counts, n)

    def get_capacity_delta(self, version: int) -> int:
        """Return the number of dropped rollouts whose capacity was returned, at any version."""
        return self._counts.filtered

    def get_filtered_count(self) -> int:
        """Return the number of dropped rollouts whose capacity was returned."""
        return self._counts.filtered

    def get_stats(self) -> dict[int, int]:
        """Return version -> number of rollouts dropped under it, in the order of version."""
        return dict(sorted(self._by_version.items()))

    def reset(self) -> None:
        """Clear the state."""
        self._counts = RolloutCounts()
        self._by_version.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"filtered": self._counts.filtered, "by_version": [list(item) for item in self.get_stats().items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict."""
        self._counts = RolloutCounts(filtered=int(state["filtered"]))
        self._by_version = Counter({int(version): int(n) for version, n in state["by_version"]})


class StalenessManager:
    """Counter of rollouts that computes how many more may start."""

    def __init__(self, max_concurrent_rollouts: int, consumer_batch_size: int, max_staleness: int) -> None:
        """
        Args:
            max_concurrent_rollouts: rollouts that may run at once; below 1 counts as 1.
            consumer_batch_size: rollouts trained on under one weight version; below 1 counts as 1.
            max_staleness: weight versions that a trained token may be behind the trainer.

        Raises: ConfigError for a negative staleness.
        """
        if max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness}, expected at least 0 (0 = train only on rollouts of the current weights)")
        self._limits = StalenessLimits(max_concurrent=max_concurrent_rollouts, batch_size=consumer_batch_size, max_staleness=max_staleness)
        self._counts = RolloutCounts()
        self._modifiers: list[CapacityModifier] = []

    @property
    def limits(self) -> StalenessLimits:
        """Bounds of the rollouts."""
        return self._limits

    def get_stats(self) -> RolloutCounts:
        """Return the number of rollouts in each state; each is counted once."""
        return self._counts

    def get_capacity(self, version: int) -> int:
        """Return the capacity by formula and modifiers; a negative number is the excess over the limits."""
        delta = sum(modifier.get_capacity_delta(version) for modifier in self._modifiers)
        return compute_capacity(self._limits, self._counts, version) + delta

    def get_usable_capacity(self, version: int) -> int:
        """Return the number of rollouts that may start now: get_capacity in [0, max_concurrent_rollouts - running]."""
        return clamp_capacity(self.get_capacity(version), self._limits, self._counts)

    def get_pending_limit(self) -> int:
        """Return the maximum number of rollouts worth keeping in a queue."""
        return compute_pending_limit(self._limits)

    def register_capacity_modifier(self, modifier: CapacityModifier) -> None:
        """Add the modifier's delta to the capacity from now on."""
        self._modifiers.append(modifier)

    def follow(self, counts: RolloutCounts) -> None:
        """Adopt the counts of an executor."""
        self._counts = counts

    def on_rollout_enqueued(self, n: int = 1) -> None:
        """Note that n rollouts began to wait for capacity."""
        self._counts = with_enqueued(self._counts, n)

    def on_rollout_submitted(self, n: int = 1) -> None:
        """Note that n rollouts started: waiting ones first."""
        self._counts = with_submitted(self._counts, n)

    def on_rollout_accepted(self, n: int = 1) -> None:
        """Note that n running rollouts finished and were kept."""
        self._counts = with_accepted(self._counts, n)

    def on_rollout_rejected(self, n: int = 1) -> None:
        """Note that n running rollouts failed or were refused."""
        self._counts = with_rejected(self._counts, n)

    def on_rollout_returned(self, n: int = 1) -> None:
        """Note that n running rollouts were stopped before their end, and wait again."""
        self._counts = with_returned(self._counts, n)

    def on_rollout_forgotten(self, n: int = 1) -> None:
        """Note that n waiting rollouts were given up."""
        self._counts = with_forgotten(self._counts, n)

    def on_rollout_dropped(self, n: int, version: int) -> None:
        """Note that n accepted rollouts were dropped before training: they stay accepted, and modifiers may return their capacity."""
        for modifier in self._modifiers:
            modifier.on_samples_filtered(n, version)

    def on_version_recovered(self, version: int) -> None:
        """Count as a run that resumes at this version, with nothing else known: it has used version * batch size rollouts.

        load_state_dict is exact, if the counts themselves were saved.
        """
        self._counts = with_recovered(self._counts, self._limits, version)
        for modifier in self._modifiers:
            modifier.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return counts and modifiers as JSON values; running rollouts count as waiting, since none runs after a restart."""
        counts = asdict(with_returned(self._counts, self._counts.running))
        return {"counts": counts, "modifiers": [modifier.state_dict() for modifier in self._modifiers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict.

        Raises: CheckpointError if another number of modifiers is registered.
        """
        saved = state["modifiers"]
        if len(saved) != len(self._modifiers):
            raise CheckpointError(
                f"the saved counts of rollouts have {len(saved)} capacity modifiers, but {len(self._modifiers)} are registered: register "
                "the same ones, in the same order, before loading"
            )
        self._counts = RolloutCounts(**state["counts"])
        for modifier, own in zip(self._modifiers, saved, strict=True):
            modifier.load_state_dict(own)

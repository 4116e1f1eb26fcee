"""Who may start and who is too old, as objects that an executor is given: shells over the pure functions of staleness.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from rollouts.errors import CheckpointError, ConfigError
from rollouts.rollout_queue import FinishedRollout, RolloutCache, RolloutQueue, TimedResult
from rollouts.staleness import (
    RolloutCounts,
    StalenessLimits,
    clamp_capacity,
    compute_allowed_staleness,
    compute_capacity,
    compute_pending_limit,
    compute_staleness,
    with_accepted,
    with_consumed,
    with_enqueued,
    with_filtered,
    with_forgotten,
    with_recovered,
    with_rejected,
    with_returned,
    with_submitted,
)
from rollouts.types import Sample

# -- how many may start


class CapacityModifier(Protocol):
    """Something that changes how many rollouts may start."""

    def get_capacity_delta(self, version: int) -> int:
        """What is added to the capacity of the formula while weights of this version generate."""
        ...

    def on_samples_filtered(self, n: int, version: int) -> None:
        """n accepted rollouts were dropped while weights of this version generated."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it holds, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict."""
        ...

    def reset(self) -> None:
        """Forget everything, where a run goes on from its version alone."""
        ...


class FilteredSamplesCapacityModifier:
    """Gives back the room of rollouts that were accepted and then dropped before training.

    A dropped rollout stays in the manager's `accepted`, so its room stays taken for ever unless it is given back for ever; a run that drops
    enough of them stops without this. on_capacity_consumed takes room away again, for owners that correct `accepted` themselves.
    """

    def __init__(self) -> None:
        self._counts = RolloutCounts()
        self._by_version: Counter[int] = Counter()

    def on_samples_filtered(self, n: int, version: int) -> None:
        """n accepted rollouts were dropped while weights of this version generated; n <= 0 changes nothing."""
        self._counts = with_filtered(self._counts, n)
        if n > 0:
            self._by_version[version] += n

    def on_capacity_consumed(self, n: int) -> None:
        """n of them no longer count as accepted; more than there are takes all."""
        self._counts = with_consumed(self._counts, n)

    def get_capacity_delta(self, version: int) -> int:
        """The number of dropped rollouts whose room was given back, at any version."""
        return self._counts.filtered

    def get_filtered_count(self) -> int:
        """The number of dropped rollouts whose room was given back."""
        return self._counts.filtered

    def get_stats(self) -> dict[int, int]:
        """Version -> rollouts that were dropped under it, in the order of version."""
        return dict(sorted(self._by_version.items()))

    def reset(self) -> None:
        """Forget everything."""
        self._counts = RolloutCounts()
        self._by_version.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it holds, as JSON values."""
        return {"filtered": self._counts.filtered, "by_version": [list(item) for item in self.get_stats().items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict."""
        self._counts = RolloutCounts(filtered=int(state["filtered"]))
        self._by_version = Counter({int(version): int(n) for version, n in state["by_version"]})


class StalenessManager:
    """Counts rollouts and says how many more may start."""

    def __init__(self, max_concurrent_rollouts: int, consumer_batch_size: int, max_staleness: int) -> None:
        """
        Args:
            max_concurrent_rollouts: that may run at once; below 1 counts as 1.
            consumer_batch_size: rollouts that are trained on under one weight version; below 1 counts as 1.
            max_staleness: versions that the trainer may be behind.

        Raises: ConfigError for a negative staleness.
        """
        if max_staleness < 0:
            raise ConfigError(f"max_staleness is {max_staleness}, expected at least 0 (0 = train only on rollouts of the current weights)")
        self._limits = StalenessLimits(max_concurrent=max_concurrent_rollouts, batch_size=consumer_batch_size, max_staleness=max_staleness)
        self._counts = RolloutCounts()
        self._modifiers: list[CapacityModifier] = []

    @property
    def limits(self) -> StalenessLimits:
        """What bounds the rollouts."""
        return self._limits

    def get_stats(self) -> RolloutCounts:
        """Where the rollouts are: each is counted once."""
        return self._counts

    def get_capacity(self, version: int) -> int:
        """What the formula and the modifiers give; a negative number says by how much the limits are exceeded."""
        delta = sum(modifier.get_capacity_delta(version) for modifier in self._modifiers)
        return compute_capacity(self._limits, self._counts, version) + delta

    def get_usable_capacity(self, version: int) -> int:
        """How many rollouts may start now: get_capacity in [0, max_concurrent_rollouts - running]."""
        return clamp_capacity(self.get_capacity(version), self._limits, self._counts)

    def get_pending_limit(self) -> int:
        """The most rollouts that are worth keeping in a queue."""
        return compute_pending_limit(self._limits)

    def register_capacity_modifier(self, modifier: CapacityModifier) -> None:
        """Add the modifier's delta to the capacity from now on."""
        self._modifiers.append(modifier)

    def on_rollout_enqueued(self, n: int = 1) -> None:
        """n rollouts began to wait for capacity."""
        self._counts = with_enqueued(self._counts, n)

    def on_rollout_submitted(self, n: int = 1) -> None:
        """n rollouts started: waiting ones as far as there are any."""
        self._counts = with_submitted(self._counts, n)

    def on_rollout_accepted(self, n: int = 1) -> None:
        """n running rollouts finished and were kept."""
        self._counts = with_accepted(self._counts, n)

    def on_rollout_rejected(self, n: int = 1) -> None:
        """n running rollouts failed or were refused."""
        self._counts = with_rejected(self._counts, n)

    def on_rollout_returned(self, n: int = 1) -> None:
        """n running rollouts were stopped before their end, and wait again."""
        self._counts = with_returned(self._counts, n)

    def on_rollout_forgotten(self, n: int = 1) -> None:
        """n waiting rollouts were given up."""
        self._counts = with_forgotten(self._counts, n)

    def on_rollout_dropped(self, n: int, version: int) -> None:
        """n accepted rollouts were dropped before training: they stay accepted, and modifiers may give their room back."""
        for modifier in self._modifiers:
            modifier.on_samples_filtered(n, version)

    def on_version_recovered(self, version: int) -> None:
        """A run goes on at this version, and nothing else is known of it: its batches have used up version * batch size rollouts.

        Where the counts themselves were saved, load_state_dict is exact.
        """
        self._counts = with_recovered(self._counts, self._limits, version)
        for modifier in self._modifiers:
            modifier.reset()

    def state_dict(self) -> dict[str, Any]:
        """Counts and modifiers as JSON values; what runs is counted as waiting, since nothing runs after a restart."""
        counts = asdict(with_returned(self._counts, self._counts.running))
        return {"counts": counts, "modifiers": [modifier.state_dict() for modifier in self._modifiers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict.

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


# -- who is too old


class StalenessControlStrategy(Protocol):
    """When rollouts are looked at for their age, and what counts as too old.

    Beside it an executor never returns a group with a token beyond max_staleness; a strategy can only look earlier, or be stricter.
    """

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """How many versions the sample is behind."""
        ...

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Whether the sample is further behind than it may be."""
        ...

    def should_filter_before_enqueue(self) -> bool:
        """Whether rollouts are looked at when they finish."""
        ...

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Whether a rollout that has just finished may be queued; asked if should_filter_before_enqueue()."""
        ...

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Take those that are too old out of the queue, if the version rose since the last purge.

        Returns: what was taken, and the version of the last purge.
        """
        ...

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        """Take those that are too old out of the cache."""
        ...


class StandardPPOStrategy:
    """Looks at nothing: capacity bounds the age of nearly all rollouts, and the executor refuses the rest when it hands out a batch."""

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """See staleness.compute_staleness."""
        return compute_staleness(sample, current_version)

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Never."""
        return False

    def should_filter_before_enqueue(self) -> bool:
        """No."""
        return False

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Always."""
        return True

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Nothing is taken."""
        return (), max(last_purged_version, current_version)

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        """Nothing is taken."""
        return ()


class SegmentWisePPOStrategy:
    """Looks at finished rollouts at once, at the queue when the version rose, and at the cache before each batch.

    The age of a sample is that of its oldest token once it has segment log-probs, else that of its newest, which may be 1
    (staleness.compute_staleness, staleness.compute_allowed_staleness).
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        """max_staleness: of samples with segment log-probs; None = 1."""
        self._max_staleness = max_staleness

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """See staleness.compute_staleness."""
        return compute_staleness(sample, current_version)

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Whether calculate_staleness exceeds staleness.compute_allowed_staleness."""
        allowed = compute_allowed_staleness(sample, self._max_staleness)
        return self.calculate_staleness(sample, current_version) > allowed

    def should_filter_before_enqueue(self) -> bool:
        """Yes."""
        return True

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Whether no sample of the group is too old."""
        return not self._is_stale(rollout, current_version)

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Take stale groups out of the queue; at a version that was purged before this does nothing."""
        if current_version <= last_purged_version:
            return (), last_purged_version
        dropped: list[FinishedRollout] = []
        for _ in range(queue.qsize()):
            result = queue.get_nowait()
            if self._is_stale(result.data, current_version):
                dropped.append(result.data)
            else:
                queue.put_nowait(result)
        return tuple(dropped), current_version

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        """Take stale groups out of the cache."""
        return take_out(cache, lambda rollout: self._is_stale(rollout, current_version))

    def _is_stale(self, rollout: FinishedRollout, current_version: int) -> bool:
        # one version behind is allowed by either rule, and known without a look at every token
        if rollout.oldest_version >= current_version - 1:
            return False
        return any(self._is_sample_stale(sample, current_version) for sample in rollout.group)

    def _is_sample_stale(self, sample: Sample, current_version: int) -> bool:
        return sample.weight_versions is not None and self.is_sample_too_stale(sample, current_version)


def take_out(cache: RolloutCache, refuse: Callable[[FinishedRollout], bool]) -> tuple[FinishedRollout, ...]:
    """Take the rollouts that `refuse` names out of a cache."""
    taken: list[FinishedRollout] = []

    def keep(result: TimedResult) -> bool:
        refused = refuse(result.data)
        if refused:
            taken.append(result.data)
        return not refused

    cache.filter_inplace(keep)
    return tuple(taken)


def is_beyond(rollout: FinishedRollout, current_version: int, max_staleness: int) -> bool:
    """Whether a trained token of the rollout is more than max_staleness versions behind."""
    return current_version - rollout.oldest_version > max_staleness

"""Finished groups: strategies against groups that are too old, and their moves from the queue to the cache and to the checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from rollouts.asynchronous.queue import FinishedRollout, RolloutCache, RolloutQueue, TimedResult
from rollouts.checks import require_flag
from rollouts.data.staleness import compute_allowed_staleness, compute_staleness
from rollouts.types import Group, Sample

EditSamples: TypeAlias = Callable[[tuple[Sample, ...]], Awaitable[Sequence[Sample]]]
"""Samples -> the same samples in the same order, some of them with other values."""


class StalenessControlStrategy(Protocol):
    """Rule that decides when the staleness of rollouts is checked, and which of them are too old.

    An executor never returns a group with a token beyond max_staleness; a strategy can only check earlier, or be stricter.
    """

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """Return the number of versions that the sample is behind."""
        ...

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Whether the sample is further behind than allowed."""
        ...

    def should_filter_before_enqueue(self) -> bool:
        """Whether rollouts are checked when they finish."""
        ...

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Whether a rollout that has just finished may be queued; called if should_filter_before_enqueue()."""
        ...

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Remove rollouts that are too old from the queue, if the version rose since the last purge.

        Returns: the removed rollouts, and the version of the last purge.
        """
        ...

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        """Remove rollouts that are too old from the cache."""
        ...


class StandardPPOStrategy:
    """Strategy without checks: capacity bounds the staleness of nearly all rollouts, and the executor refuses the rest at hand-out."""

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """Return staleness.compute_staleness of the sample."""
        return compute_staleness(sample, current_version)

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Return False."""
        return False

    def should_filter_before_enqueue(self) -> bool:
        """Return False."""
        return False

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Return True."""
        return True

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Remove nothing."""
        return (), max(last_purged_version, current_version)

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        """Remove nothing."""
        return ()


class SegmentWisePPOStrategy:
    """Strategy that checks finished rollouts at once, the queue when the version rose, and the cache before each batch.

    The staleness of a sample is that of its oldest token once it has segment log-probs, else that of its newest, which may be 1
    (staleness.compute_staleness, staleness.compute_allowed_staleness).
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        """max_staleness: limit for samples with segment log-probs; None = 1."""
        self._max_staleness = max_staleness

    def calculate_staleness(self, sample: Sample, current_version: int) -> int:
        """Return staleness.compute_staleness of the sample."""
        return compute_staleness(sample, current_version)

    def is_sample_too_stale(self, sample: Sample, current_version: int) -> bool:
        """Whether calculate_staleness exceeds staleness.compute_allowed_staleness."""
        allowed = compute_allowed_staleness(sample, self._max_staleness)
        return self.calculate_staleness(sample, current_version) > allowed

    def should_filter_before_enqueue(self) -> bool:
        """Return True."""
        return True

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        """Whether no sample of the group is too old."""
        return not self._is_stale(rollout, current_version)

    def purge_stale_samples_from_queue(
        self, queue: RolloutQueue, current_version: int, last_purged_version: int
    ) -> tuple[tuple[FinishedRollout, ...], int]:
        """Remove stale groups from the queue; do nothing at a version that was purged before."""
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
        """Remove stale groups from the cache."""
        return take_out(cache, lambda rollout: self._is_stale(rollout, current_version))

    def _is_stale(self, rollout: FinishedRollout, current_version: int) -> bool:
        # one version behind is allowed by either rule, and known without a look at every token
        if rollout.oldest_version >= current_version - 1:
            return False
        return any(self._is_sample_stale(sample, current_version) for sample in rollout.group)

    def _is_sample_stale(self, sample: Sample, current_version: int) -> bool:
        if sample.weight_versions is None:
            return False
        return require_flag(self.is_sample_too_stale(sample, current_version), f"{type(self).__name__}.is_sample_too_stale")


def take_out(cache: RolloutCache, refuse: Callable[[FinishedRollout], bool]) -> tuple[FinishedRollout, ...]:
    """Remove and return the rollouts of a cache that `refuse` selects."""
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


def refuses(strategy: StalenessControlStrategy, rollout: FinishedRollout, version: int, max_staleness: int) -> bool:
    """Whether a rollout that has just finished is too old to be queued, for a strategy that checks at once.

    Args:
        max_staleness: versions that a trained token may be behind when its group is handed out, whatever the strategy.
    """
    name = type(strategy).__name__
    if not require_flag(strategy.should_filter_before_enqueue(), f"{name}.should_filter_before_enqueue"):
        return False
    if is_beyond(rollout, version, max_staleness):
        return True
    taken = strategy.should_enqueue_sample(rollout, version)
    return not require_flag(taken, f"{name}.should_enqueue_sample", f" for the group of prompt {rollout.prompt.index}")


# -- contents of queue and cache


def drain(queue: RolloutQueue, cache: RolloutCache) -> None:
    """Move all results of the queue into the cache."""
    while not queue.empty():
        cache.add(queue.get_nowait())


def read_results(queue: RolloutQueue, cache: RolloutCache) -> list[TimedResult]:
    """Return all results, in the order in which they are handed out; they stay in place."""
    found: list[TimedResult] = []

    def read(result: TimedResult) -> TimedResult:
        found.append(result)
        return result

    edit_results(queue, cache, read)
    return sorted(found, key=lambda result: result.order)


def edit_results(queue: RolloutQueue, cache: RolloutCache, edit: Callable[[TimedResult], TimedResult]) -> None:
    """Replace each result by its edited one, in place."""
    for result in cache.take_first_n(cache.size()):
        cache.add(edit(result))
    for _ in range(queue.qsize()):
        queue.put_nowait(edit(queue.get_nowait()))


def load_results(queue: RolloutQueue, cache: RolloutCache, rollouts: Iterable[FinishedRollout]) -> None:
    """Replace the contents of both by these rollouts in the cache, in their order and before all that finish from now on."""
    ready = tuple(rollouts)
    while not queue.empty():
        queue.get_nowait()
    cache.clear()
    for place, rollout in enumerate(ready):
        cache.add(TimedResult(float(place - len(ready)), rollout))


def edit_result(result: TimedResult, edited: Mapping[int, tuple[FinishedRollout, Group]]) -> TimedResult:
    """Return the result with its edited group, if it still has the group that was edited: a group generated anew since is another one."""
    rollout, group = edited.get(result.data.prompt.index, (None, ()))
    return TimedResult(result.create_time, result.data.with_group(group)) if result.data is rollout else result

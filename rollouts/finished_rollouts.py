"""Finished rollouts on their way to a batch: those that wait for their turn or for room, the queue, and the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

from rollouts.rollout_queue import FinishedRollout, RolloutCache, RolloutQueue, TimedResult
from rollouts.staleness_control import StalenessControlStrategy, is_beyond, take_out
from rollouts.types import Group, Prompt, Sample


class FinishedRollouts:
    """What is finished and not yet handed out. A result is in one place at a time: held -> queue -> cache -> batch."""

    def __init__(
        self,
        queue: RolloutQueue,
        cache: RolloutCache,
        strategy: StalenessControlStrategy,
        *,
        max_staleness: int,
        in_order: bool,
        waits: bool,
    ) -> None:
        """
        Args:
            max_staleness: versions that a trained token may be behind when its group is handed out, whatever the strategy says.
            in_order: queue a group only when no group of a lower index can still come.
            waits: keep what the queue has no room for, instead of raising.
        """
        self._queue = queue
        self._cache = cache
        self._strategy = strategy
        self._max_staleness = max_staleness
        self._in_order = in_order
        self._waits = waits
        self._held: list[tuple[tuple[float, int], TimedResult]] = []  # heap; in_order: by index, else by time
        self._purged_version = -1

    @property
    def num_ready(self) -> int:
        """How many groups a batch could be made of, if none of them is too old."""
        return self._queue.qsize() + self._cache.size()

    @property
    def size(self) -> int:
        """How many groups there are, those included that wait for their turn."""
        return self.num_ready + len(self._held)

    @property
    def is_blocked(self) -> bool:
        """Whether nothing new should start until the queue has room."""
        return self._waits and self._queue.full()

    def refuses(self, rollout: FinishedRollout, version: int) -> bool:
        """Whether a rollout that has just finished is too old to be taken in, for a strategy that looks at once."""
        if not self._strategy.should_filter_before_enqueue():
            return False
        return is_beyond(rollout, version, self._max_staleness) or not self._strategy.should_enqueue_sample(rollout, version)

    def hold(self, rollout: FinishedRollout, now: float) -> None:
        """Take in a rollout that has just finished; pass_on queues it when it is its turn."""
        key = (0.0, rollout.prompt.index) if self._in_order else (now, rollout.prompt.index)
        heappush(self._held, (key, TimedResult(now, rollout)))

    def pass_on(self, *, now: float, first_open: float, drains: bool = False) -> None:
        """Queue the held results whose turn it is.

        Args:
            now: becomes their time where they had to wait for their turn, so that their order is that of their prompts.
            first_open: the lowest index of a group that can still come.
            drains: a full queue is emptied into the cache, because somebody waits for more than there is.

        Raises: ConfigError if the queue is full and results do not wait for room.
        """
        while self._may_pass(first_open):
            if self._waits and self._queue.full():
                return
            self._queue.put_nowait(self._next_held(now))
            heappop(self._held)
            if drains and self._queue.full():
                self._drain()

    def _drain(self) -> None:
        while not self._queue.empty():
            self._cache.add(self._queue.get_nowait())

    def _may_pass(self, first_open: float) -> bool:
        return bool(self._held) and (not self._in_order or self._held[0][1].data.prompt.index < first_open)

    def _next_held(self, now: float) -> TimedResult:
        result = self._held[0][1]
        return TimedResult(now, result.data) if self._in_order else result

    def collect(self, version: int, *, now: float, first_open: float) -> tuple[FinishedRollout, ...]:
        """Purge the queue (if the version rose), move it into the cache, filter the cache. Returns what was too old."""
        dropped, self._purged_version = self._strategy.purge_stale_samples_from_queue(self._queue, version, self._purged_version)
        self._drain()
        while self._may_pass(first_open):
            self._cache.add(self._next_held(now))  # there is room now
            heappop(self._held)
        dropped += self._strategy.filter_stale_from_cache(self._cache, version)
        return dropped + take_out(self._cache, lambda rollout: is_beyond(rollout, version, self._max_staleness))

    def recall(self, first_open: float) -> None:
        """Where order counts: let those of the cache wait for their turn again that come after a group which is begun anew."""
        if not self._in_order:
            return
        early: list[TimedResult] = []

        def keep(result: TimedResult) -> bool:
            is_due = result.data.prompt.index < first_open
            if not is_due:
                early.append(result)
            return is_due

        self._cache.filter_inplace(keep)
        for result in early:
            heappush(self._held, ((0.0, result.data.prompt.index), result))

    def take(self, count: int) -> tuple[FinishedRollout, ...]:
        """The `count` oldest of the cache."""
        return tuple(result.data for result in self._cache.take_first_n(count))

    @property
    def rollouts(self) -> tuple[FinishedRollout, ...]:
        """All of them, the queue and the cache first, by age; then those that wait for their turn."""
        ready, held = self._results()
        return tuple(result.data for result in (*ready, *held))

    def replace_groups(self, edited: Iterable[tuple[FinishedRollout, Group]]) -> None:
        """Put other samples into those of these rollouts that are still here; one that was generated anew since is another one."""
        groups = {rollout.prompt.index: (rollout, group) for rollout, group in edited}

        def edit(result: TimedResult) -> TimedResult:
            rollout, group = groups.get(result.data.prompt.index, (None, ()))
            return TimedResult(result.create_time, result.data.with_group(group)) if result.data is rollout else result

        self._held = [(key, edit(result)) for key, result in self._held]
        for _ in range(self._queue.qsize()):
            self._queue.put_nowait(edit(self._queue.get_nowait()))
        cached = self._cache.take_first_n(self._cache.size())
        for result in cached:
            self._cache.add(edit(result))

    def _results(self) -> tuple[list[TimedResult], list[TimedResult]]:
        cached = self._cache.take_first_n(self._cache.size())
        for result in cached:
            self._cache.add(result)
        queued = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for result in queued:
            self._queue.put_nowait(result)
        return sorted((*cached, *queued), key=lambda result: result.order), [result for _, result in sorted(self._held, key=lambda e: e[0])]

    def state_dict(self) -> dict[str, Any]:
        """All groups as JSON values, in order; times are left out, since they mean nothing to another process."""
        ready, held = self._results()
        if not self._in_order:  # they wait for room in the queue, which is not part of a state
            ready, held = [*ready, *held], []
        return {"ready": [_to_plain(result.data) for result in ready], "held": [_to_plain(result.data) for result in held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict. Loaded groups come before those that finish from now on."""
        ready, held = ([_from_plain(entry) for entry in state[name]] for name in ("ready", "held"))
        if not self._in_order:
            ready, held = [*ready, *held], []
        self._cache.clear()
        while not self._queue.empty():
            self._queue.get_nowait()
        for place, rollout in enumerate(ready):
            self._cache.add(TimedResult(float(place - len(ready)), rollout))
        self._held = [((0.0, rollout.prompt.index), TimedResult(-0.5, rollout)) for rollout in held]
        heapify(self._held)
        self._purged_version = -1


def _to_plain(rollout: FinishedRollout) -> dict[str, Any]:
    return {
        "prompt": rollout.prompt.to_dict(),
        "group": [sample.to_dict() for sample in rollout.group],
        "oldest_version": rollout.oldest_version,
    }


def _from_plain(data: Mapping[str, Any]) -> FinishedRollout:
    group = tuple(Sample.from_dict(sample) for sample in data["group"])
    return FinishedRollout(Prompt.from_dict(data["prompt"]), group, int(data["oldest_version"]))

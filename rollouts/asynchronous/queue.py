"""Containers of finished rollouts: a bounded queue between producer and consumer, and the consumer's cache, which gives the oldest first.

The protocols have the methods that an executor needs, so that another implementation (between processes, on a disk) can replace them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol

import trio

from rollouts.data.samples import select_trainable
from rollouts.errors import ConfigError
from rollouts.types import Group, Prompt, Sample


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that is ready for training."""

    prompt: Prompt
    group: Group
    oldest_version: int  # oldest weight version of a trained token; the version when the rollout began, if samples have none

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        group = [sample.to_dict() for sample in self.group]
        return {"prompt": self.prompt.to_dict(), "group": group, "oldest_version": self.oldest_version}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FinishedRollout:
        """Return the rollout of to_dict's values."""
        group = tuple(Sample.from_dict(sample) for sample in data["group"])
        return cls(Prompt.from_dict(data["prompt"]), group, int(data["oldest_version"]))

    def with_group(self, group: Group) -> FinishedRollout:
        """Return a copy with edited samples."""
        return replace(self, group=group)


def find_oldest_version(group: Group, *, begun: int, newest: int) -> int:
    """Return the oldest weight version that sampled a trained token of the group.

    Args:
        group: samples with trainable False do not count.
        begun: weight version when the rollout began; counts for samples with trained tokens of unknown versions.
        newest: weight version now, returned for a group without a trained token.
    """
    found: list[int] = []
    for sample in select_trainable(group):
        if any(sample.loss_mask):
            versions = set(compress(sample.weight_versions or (), sample.loss_mask))
            found.append(min([version for version in versions if version >= 0], default=begun))
    return min(found, default=newest)


@dataclass(frozen=True)
class TimedResult:
    """A finished rollout and the time at which it finished."""

    create_time: float  # seconds of trio's clock; below 0 for results of an earlier process, in their order
    data: FinishedRollout

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: the time, and at the same moment the prompt's index."""
        return self.create_time, self.data.prompt.index


class RolloutQueue(Protocol):
    """First in, first out, of bounded size."""

    @property
    def maxsize(self) -> int:
        """Maximum number of results in the queue."""
        ...

    async def put(self, result: TimedResult) -> None:
        """Append a result, as soon as there is space."""
        ...

    def put_nowait(self, result: TimedResult) -> None:
        """Append a result. Raises ConfigError that names the setting to increase if there is no space."""
        ...

    async def get(self) -> TimedResult:
        """Take the first result, as soon as there is one."""
        ...

    def get_nowait(self) -> TimedResult:
        """Take the first result. Raises trio.WouldBlock if there is none."""
        ...

    def qsize(self) -> int:
        """Return the number of results."""
        ...

    def empty(self) -> bool:
        """Return whether there is no result."""
        ...

    def full(self) -> bool:
        """Return whether there is no space for another result."""
        ...


class RolloutCache(Protocol):
    """Results by age, independent of the order of insertion."""

    def add(self, result: TimedResult) -> None:
        """Insert a result at its place in the order."""
        ...

    def take_first_n(self, n: int) -> tuple[TimedResult, ...]:
        """Remove and return the n oldest results, or all if there are fewer."""
        ...

    def filter_inplace(self, keep: Callable[[TimedResult], bool]) -> int:
        """Drop the results that `keep` refuses; the others stay in order. Return the number of dropped results."""
        ...

    def size(self) -> int:
        """Return the number of results."""
        ...

    def clear(self) -> None:
        """Drop all results."""
        ...


class LocalRolloutQueue:
    """A RolloutQueue within one trio run. Waiting tasks are served in order of arrival."""

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ConfigError(f"queue_size is {maxsize}, expected at least 1")
        self._maxsize = maxsize
        self._results: deque[TimedResult] = deque()
        self._putters = trio.lowlevel.ParkingLot()
        self._getters = trio.lowlevel.ParkingLot()

    @property
    def maxsize(self) -> int:
        """Maximum number of results in the queue."""
        return self._maxsize

    async def put(self, result: TimedResult) -> None:
        """Append a result, as soon as there is space. A cancelled call has appended nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.full():
            await self._putters.park()
        self.put_nowait(result)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def put_nowait(self, result: TimedResult) -> None:
        """Append a result. Raises ConfigError if there is no space."""
        if self.full():
            raise ConfigError(
                f"the rollout queue is full: {len(self._results)} finished groups wait in it, and its queue_size is {self._maxsize}. "
                "Increase queue_size, or set when_queue_full='wait' so that nothing new starts until there is room"
            )
        self._results.append(result)
        self._getters.unpark()

    async def get(self) -> TimedResult:
        """Take the first result, as soon as there is one. A cancelled call has taken nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._results:
            await self._getters.park()
        result = self.get_nowait()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    def get_nowait(self) -> TimedResult:
        """Take the first result. Raises trio.WouldBlock if there is none."""
        if not self._results:
            raise trio.WouldBlock
        result = self._results.popleft()
        self._putters.unpark()
        return result

    def qsize(self) -> int:
        """Return the number of results."""
        return len(self._results)

    def empty(self) -> bool:
        """Return whether there is no result."""
        return not self._results

    def full(self) -> bool:
        """Return whether there is no room for another result."""
        return len(self._results) >= self._maxsize


class LocalRolloutCache:
    """A RolloutCache in memory: a list in order."""

    def __init__(self) -> None:
        self._results: list[TimedResult] = []

    def add(self, result: TimedResult) -> None:
        """Insert a result at its place; at the end, the usual place, this is cheap."""
        if not self._results or self._results[-1].order <= result.order:
            self._results.append(result)
        else:
            insort(self._results, result, key=lambda other: other.order)

    def take_first_n(self, n: int) -> tuple[TimedResult, ...]:
        """Remove and return the n oldest results, or all if there are fewer."""
        assert n >= 0, f"n is {n}, expected at least 0"
        taken = tuple(self._results[:n])
        del self._results[:n]
        return taken

    def filter_inplace(self, keep: Callable[[TimedResult], bool]) -> int:
        """Drop the results that `keep` refuses; the others stay in order. Return the number of dropped results."""
        kept = [result for result in self._results if keep(result)]
        num_dropped = len(self._results) - len(kept)
        self._results = kept
        return num_dropped

    def size(self) -> int:
        """Return the number of results."""
        return len(self._results)

    def clear(self) -> None:
        """Drop all results."""
        self._results = []

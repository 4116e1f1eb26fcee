"""Where finished rollouts wait: a bounded queue between producer and consumer, and the consumer's cache, which gives the oldest first.

The protocols are what the executor needs of them, so that another implementation (between processes, on a disk) can take their place.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from rollouts.errors import ConfigError
from rollouts.samples import select_trainable
from rollouts.types import Group, Prompt


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that may be trained on."""

    prompt: Prompt
    group: Group
    oldest_version: int  # that sampled one of its trained tokens; where samples have no versions, that of the weights when it began

    def with_group(self, group: Group) -> FinishedRollout:
        """A copy with edited samples."""
        return replace(self, group=group)


def find_oldest_version(group: Group, *, begun: int, newest: int) -> int:
    """The oldest weight version that sampled a trained token of the group.

    Args:
        group: samples with metadata["trainable"] False do not count.
        begun: version of the weights when the rollout began: counts for samples with trained tokens whose versions nobody told.
        newest: version of the weights now: for a group without a trained token.
    """
    found: list[int] = []
    for sample in select_trainable(group):
        pairs = zip(sample.weight_versions or (), sample.loss_mask, strict=sample.weight_versions is not None)
        oldest = min((version for version, mask in pairs if version >= 0 and mask > 0), default=begun)
        if oldest != begun or any(mask > 0 for mask in sample.loss_mask):
            found.append(oldest)
    return min(found, default=newest)


@dataclass(frozen=True)
class TimedResult:
    """A finished rollout and when it finished."""

    create_time: float  # seconds of trio's clock; below 0 for those of an earlier process, in their order
    data: FinishedRollout

    @property
    def order(self) -> tuple[float, int]:
        """What decides which comes first: the time, and at the same moment the prompt's index."""
        return self.create_time, self.data.prompt.index


class RolloutQueue(Protocol):
    """First in, first out, of bounded size."""

    @property
    def maxsize(self) -> int:
        """How many results it holds."""
        ...

    async def put(self, result: TimedResult) -> None:
        """Append a result, as soon as there is room."""
        ...

    def put_nowait(self, result: TimedResult) -> None:
        """Append a result. Raises ConfigError that says what to increase if there is no room."""
        ...

    async def get(self) -> TimedResult:
        """Take the first result, as soon as there is one."""
        ...

    def get_nowait(self) -> TimedResult:
        """Take the first result. Raises trio.WouldBlock if there is none."""
        ...

    def qsize(self) -> int:
        """How many results are there."""
        ...

    def empty(self) -> bool:
        """Whether there is none."""
        ...

    def full(self) -> bool:
        """Whether there is no room for another one."""
        ...


class RolloutCache(Protocol):
    """Results by age, whatever order they were added in."""

    def add(self, result: TimedResult) -> None:
        """Put a result at its place in the order."""
        ...

    def take_first_n(self, n: int) -> tuple[TimedResult, ...]:
        """Take the n oldest results out, or all if there are fewer."""
        ...

    def filter_inplace(self, keep: Callable[[TimedResult], bool]) -> int:
        """Drop the results that `keep` refuses; the others stay in order. Returns how many were dropped."""
        ...

    def size(self) -> int:
        """How many results are there."""
        ...

    def clear(self) -> None:
        """Drop all results."""
        ...


class LocalRolloutQueue:
    """A RolloutQueue within one trio run. Those who wait are served in the order in which they came."""

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ConfigError(f"queue_size is {maxsize}, expected at least 1")
        self._maxsize = maxsize
        self._results: deque[TimedResult] = deque()
        self._putters = trio.lowlevel.ParkingLot()
        self._getters = trio.lowlevel.ParkingLot()

    @property
    def maxsize(self) -> int:
        """How many results it holds."""
        return self._maxsize

    async def put(self, result: TimedResult) -> None:
        """Append a result, as soon as there is room. A cancelled call has appended nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.full():
            await self._putters.park()
        self.put_nowait(result)
        await trio.lowlevel.cancel_shielded_checkpoint()

    def put_nowait(self, result: TimedResult) -> None:
        """Append a result. Raises ConfigError if there is no room."""
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
        """How many results are there."""
        return len(self._results)

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._results

    def full(self) -> bool:
        """Whether there is no room for another one."""
        return len(self._results) >= self._maxsize


class LocalRolloutCache:
    """A RolloutCache in memory: a list in order."""

    def __init__(self) -> None:
        self._results: list[TimedResult] = []

    def add(self, result: TimedResult) -> None:
        """Put a result at its place; at the end, where most belong, this costs next to nothing."""
        insort(self._results, result, key=lambda other: other.order)

    def take_first_n(self, n: int) -> tuple[TimedResult, ...]:
        """Take the n oldest results out, or all if there are fewer."""
        assert n >= 0, f"n is {n}, expected at least 0"
        taken = tuple(self._results[:n])
        del self._results[:n]
        return taken

    def filter_inplace(self, keep: Callable[[TimedResult], bool]) -> int:
        """Drop the results that `keep` refuses; the others stay in order. Returns how many were dropped."""
        kept = [result for result in self._results if keep(result)]
        num_dropped = len(self._results) - len(kept)
        self._results = kept
        return num_dropped

    def size(self) -> int:
        """How many results are there."""
        return len(self._results)

    def clear(self) -> None:
        """Drop all results."""
        self._results = []

"""Calls of a reward function for single samples, answered in batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import trio

from rollouts.errors import RewardError, RolloutsError, raise_single_errors
from rollouts.types import Sample

ScoreSamples: TypeAlias = Callable[[Sequence[Sample]], Awaitable[Sequence[Any]]]
"""f(samples) -> for each, in their order, a value that a reward function may return, or the RewardError of this sample alone."""


@dataclass(eq=False)
class _Call:
    """One sample that waits for its score."""

    sample: Sample
    is_answered: trio.Event = field(default_factory=trio.Event)
    result: Any = None

    def answer(self, result: Any) -> None:
        self.result = result
        self.is_answered.set()


class GatheredReward:
    """A reward function for RolloutConfig that scores simultaneous calls together. Created by gather_calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.__qualname__ = name  # name in messages about rewards
        self.num_batches = 0  # batches that have been scored or are being scored
        self.num_samples = 0  # samples in these batches
        self._waiting: list[_Call] = []  # calls that no batch has taken yet
        self._unanswered: set[_Call] = set()
        self._has_work = trio.Event()
        self._is_open = True

    @property
    def num_waiting(self) -> int:
        """Number of samples that no batch has taken yet."""
        return len(self._waiting)

    async def __call__(self, sample: Sample) -> Any:
        """Return the score of one sample. Raises RewardError if there is none."""
        if not self._is_open:
            raise RewardError(f"{self.name} was asked for a score outside its `async with` block: open it around the whole run")
        call = _Call(sample)
        self._waiting.append(call)
        self._unanswered.add(call)
        self._has_work.set()
        try:
            await call.is_answered.wait()
        finally:
            self._unanswered.discard(call)
            if call in self._waiting:  # the caller was cancelled: compute nothing for it
                self._waiting.remove(call)
        if isinstance(call.result, Exception):
            raise RewardError(str(call.result)) from call.result
        return call.result

    async def take(self, max_samples: int) -> list[_Call]:
        """Take the next calls, at least one, in the order of their samples, not of their arrival."""
        while not self._waiting:
            self._has_work = trio.Event()
            await self._has_work.wait()
        num_seen = 0
        while num_seen < len(self._waiting) < max_samples:  # collect calls for as long as others come without waiting for anything
            num_seen = len(self._waiting)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        if not self._waiting:
            return []
        taken = sorted(self._waiting, key=lambda call: (call.sample.group_index, call.sample.index))[:max_samples]
        self._waiting = [call for call in self._waiting if call not in taken]
        self.num_batches += 1
        self.num_samples += len(taken)
        return taken

    def close(self) -> None:
        """Answer all waiting calls with an error. Callers inside the block have been cancelled by then."""
        self._is_open = False
        for call in self._unanswered:
            call.answer(RewardError(f"{self.name} was closed before it scored the sample: open it around the whole run"))


@asynccontextmanager
async def gather_calls(
    score_samples: ScoreSamples, *, name: str, max_samples: int = 512, max_batches: int = 1
) -> AsyncGenerator[GatheredReward]:
    """Create a reward function of one sample from a function that scores many at once.

        async with gather_calls(score, name="my reward") as reward:
            config = RolloutConfig(batch_size=8, reward_fn=reward, ...)

    Calls during a batch wait and become the next one. A cancelled caller does not affect the others.

    Args:
        score_samples: gets 1 to max_samples samples; raises RolloutsError if it has a score for none of them.
        name: name in messages.
        max_samples: most samples in one batch.
        max_batches: batches scored at the same time: 1 for a model, more for a server.

    Raises: any other error of score_samples than a RolloutsError; the block is then cancelled, so that nobody waits for ever.
    """
    assert max_samples >= 1, f"max_samples is {max_samples}, expected at least 1"
    assert max_batches >= 1, f"max_batches is {max_batches}, expected at least 1"
    reward = GatheredReward(name)
    places = trio.Semaphore(max_batches)

    async def answer(calls: Sequence[_Call]) -> None:
        try:
            results: Sequence[Any] = await score_samples([call.sample for call in calls])
            if len(results) != len(calls):
                raise RewardError(f"{name} gave {len(results)} scores for {len(calls)} samples: expected one for each, in their order")
        except RolloutsError as error:
            results = [error] * len(calls)
        finally:
            places.release()
        for call, result in zip(calls, results, strict=True):
            call.answer(result)

    async def work(nursery: trio.Nursery) -> None:
        while True:
            await places.acquire()
            calls: list[_Call] = []
            while not calls:
                calls = await reward.take(max_samples)
            nursery.start_soon(answer, calls)

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, nursery)
            try:
                yield reward
            finally:
                reward.close()
                nursery.cancel_scope.cancel()

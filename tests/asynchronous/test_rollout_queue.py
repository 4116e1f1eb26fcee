"""The queue and the cache of finished rollouts: bounds, order, waiting and cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from samples import make_row

from rollouts.asynchronous.queue import FinishedRollout, LocalRolloutCache, LocalRolloutQueue, TimedResult, find_oldest_version
from rollouts.errors import ConfigError
from rollouts.types import Prompt, Sample


def make_result(time: float, index: int = 0) -> TimedResult:
    return TimedResult(time, FinishedRollout(Prompt(content="?", index=index), (), 0))


def make_trained(versions: tuple[int, ...] | None, mask: tuple[float, ...], **fields: Any) -> Sample:
    return make_row((0,) * len(mask), loss_mask=mask, weight_versions=versions, **fields)


# the queue


def test_first_in_first_out_and_bounded():
    queue = LocalRolloutQueue(2)
    assert (queue.maxsize, queue.qsize(), queue.empty(), queue.full()) == (2, 0, True, False)
    queue.put_nowait(make_result(2.0))
    queue.put_nowait(make_result(1.0))
    assert (queue.qsize(), queue.empty(), queue.full()) == (2, False, True)
    with pytest.raises(ConfigError, match=r"2 finished groups wait in it, and its queue_size is 2.*Increase queue_size"):
        queue.put_nowait(make_result(3.0))
    assert [queue.get_nowait().create_time for _ in range(2)] == [2.0, 1.0]
    with pytest.raises(trio.WouldBlock):
        queue.get_nowait()


def test_a_queue_for_nothing_is_refused():
    with pytest.raises(ConfigError, match="queue_size is 0, expected at least 1"):
        LocalRolloutQueue(0)


async def test_put_waits_for_room_and_get_for_a_result(autojump_clock: trio.testing.MockClock) -> None:
    queue, got = LocalRolloutQueue(1), []

    async def produce() -> None:
        for time in range(5):
            await queue.put(make_result(float(time)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        for _ in range(5):
            await trio.sleep(1)
            assert queue.qsize() == 1
            got.append((await queue.get()).create_time)
    assert got == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_cancelled_put_appends_nothing_and_a_cancelled_get_takes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    queue = LocalRolloutQueue(1)
    with trio.move_on_after(1) as scope:
        await queue.get()
    assert scope.cancelled_caught
    await queue.put(make_result(1.0))
    with trio.move_on_after(1) as scope:
        await queue.put(make_result(2.0))
    assert scope.cancelled_caught
    assert queue.qsize() == 1
    with trio.CancelScope() as scope:
        scope.cancel()
        await queue.get()
    assert queue.qsize() == 1
    assert (await queue.get()).create_time == 1.0


async def test_a_cancelled_waiter_does_not_keep_others_from_their_turn(autojump_clock: trio.testing.MockClock) -> None:
    queue, got = LocalRolloutQueue(1), []

    async def get(scope: trio.CancelScope) -> None:
        with scope:
            got.append((await queue.get()).create_time)

    first, second = trio.CancelScope(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(get, first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(get, second)
        await trio.testing.wait_all_tasks_blocked()
        queue.put_nowait(make_result(7.0))
        first.cancel()
        await trio.testing.wait_all_tasks_blocked()
        second.cancel()
    assert got + ([] if queue.empty() else [queue.get_nowait().create_time]) == [7.0]


# the cache


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30), st.integers(0, 40))
def test_the_cache_gives_the_oldest_first(keys: list[tuple[int, int]], n: int):
    cache = LocalRolloutCache()
    for time, index in keys:
        cache.add(make_result(float(time), index))
    taken = [(int(result.create_time), result.data.prompt.index) for result in cache.take_first_n(n)]
    assert taken == sorted(keys)[:n]
    assert cache.size() == len(keys) - len(taken)


@given(st.lists(st.integers(0, 9), max_size=20), st.sets(st.integers(0, 9)))
def test_filtering_keeps_the_order_and_counts(indices: list[int], refused: set[int]):
    cache = LocalRolloutCache()
    for index in indices:
        cache.add(make_result(1.0, index))
    assert cache.filter_inplace(lambda result: result.data.prompt.index not in refused) == sum(index in refused for index in indices)
    assert [r.data.prompt.index for r in cache.take_first_n(99)] == sorted(index for index in indices if index not in refused)
    cache.add(make_result(1.0))
    cache.clear()
    assert cache.size() == 0


# the age of a group


@pytest.mark.parametrize(
    ("samples", "oldest"),
    [
        ([make_trained((-1, 4, 3), (0.0, 1.0, 1.0))], 3),
        ([make_trained((-1, 4, 3), (0.0, 1.0, 0.0))], 4),  # of the trained tokens
        ([make_trained((5,), (1.0,)), make_trained((2,), (1.0,))], 2),
        ([make_trained((5,), (1.0,)), make_trained((2,), (1.0,), trainable=False)], 5),
        ([make_trained(None, (0.0, 1.0))], 1),  # when it began
        ([make_trained(None, (0.0, 0.0))], 6),
        ([make_trained((-1, -1), (0.0, 1.0))], 1),  # an engine that does not tell: when it began
        ([make_trained((-1, -1), (0.0, 0.0))], 6),
        ([make_trained((-1, 7), (0.0, 1.0))], 7),  # engines have newer weights before set_version tells of them
        ([], 6),
    ],
)
def test_a_group_is_as_old_as_its_oldest_trained_token(samples: list[Sample], oldest: int):
    assert find_oldest_version(tuple(samples), begun=1, newest=6) == oldest

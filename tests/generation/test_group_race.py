"""Races: the winner, the samples kept of the others, and no task that continues afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from samples import make_group

from rollouts.errors import GenerationError
from rollouts.generation.contract import PendingGroup
from rollouts.generation.manager import CollectedGroups, collect_groups
from rollouts.types import Group, Prompt, Status


@dataclass
class Runner:
    """Groups that take a given time each; when stopped, what has begun returns unfinished if it listens."""

    delays: Sequence[float]
    deaf: frozenset[int] = frozenset()  # prompts whose generation does not listen to stop
    halt: trio.Event = field(default_factory=trio.Event)
    cancelled: list[int] = field(default_factory=list)
    num_stops: int = 0

    @property
    def issued(self) -> list[PendingGroup]:
        return [PendingGroup(Prompt(content="p", index=i)) for i in range(len(self.delays))]

    async def generate(self, pending: PendingGroup) -> Group:
        i = pending.prompt.index
        try:
            with trio.move_on_after(self.delays[i]) as scope:
                await (trio.sleep_forever() if i in self.deaf else self.halt.wait())
        except trio.Cancelled:
            self.cancelled.append(i)
            raise
        return make_group(i, status=Status.COMPLETED if scope.cancelled_caught else Status.ABORTED)

    async def stop(self) -> None:
        self.num_stops += 1
        self.halt.set()
        await trio.lowlevel.checkpoint()


def indices(groups: Sequence[Group]) -> list[int]:
    return [group[0].group_index for group in groups]


def pending_indices(collected: CollectedGroups) -> list[int]:
    return [pending.prompt.index for pending in collected.partial]


async def test_a_hundred_groups_take_as_long_as_one(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([0.05] * 100)
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=100)
    assert trio.current_time() == pytest.approx(0.05)
    assert indices(collected.kept) == list(range(100))


async def test_the_first_to_arrive_are_kept_in_the_order_of_their_prompts(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([9.0, 3.0, 1.0, 2.0, 8.0])
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=3, stop=runner.stop, grace_s=5.0)
    assert indices(collected.kept) == [1, 2, 3]
    assert pending_indices(collected) == [0, 4]
    assert [pending.samples[0].status for pending in collected.partial] == [Status.ABORTED] * 2
    assert (trio.current_time(), runner.num_stops) == (3.0, 1)


async def test_what_ends_within_the_grace_is_kept_and_the_rest_is_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([1.0, 5.0, 50.0, 3.0], deaf=frozenset({1, 2}))
    before = trio.lowlevel.current_statistics().tasks_living
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=1, stop=runner.stop, grace_s=10.0)
    assert indices(collected.kept) == [0]
    assert indices(collected.overflow) == [1]
    assert pending_indices(collected) == [2, 3]
    assert collected.partial[0].samples == (), "a cancelled group is as it was issued"
    assert collected.partial[1].samples == make_group(3, status=Status.ABORTED)
    assert runner.cancelled == [2]
    assert trio.current_time() == 11.0
    assert trio.lowlevel.current_statistics().tasks_living == before


async def test_groups_of_the_same_moment_count_in_the_order_they_were_issued(autojump_clock: trio.testing.MockClock) -> None:
    for _ in range(20):  # trio runs tasks that wake together in random order
        runner = Runner([1.0] * 12)
        collected = await collect_groups(runner.issued, runner.generate, num_wanted=5, stop=runner.stop)
        assert indices(collected.kept) == [0, 1, 2, 3, 4]
        assert indices(collected.overflow) == [5, 6, 7, 8, 9, 10, 11]


async def test_refused_and_dropped_groups_do_not_count(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([1.0, 2.0, 3.0, 4.0])
    asked: list[int] = []

    async def generate(pending: PendingGroup) -> Group | None:
        group = await runner.generate(pending)
        return None if pending.prompt.index == 1 else group

    def keep(group: Group) -> bool:
        asked.append(group[0].group_index)
        return group[0].group_index != 0

    collected = await collect_groups(runner.issued, generate, num_wanted=3, keep=keep)
    assert indices(collected.kept) == [2, 3]
    assert indices(collected.rejected) == [0]
    assert [prompt.index for prompt in collected.dropped] == [1]
    assert asked == [0, 2, 3]


async def test_an_async_filter_is_waited_for_and_its_answer_counts(autojump_clock: trio.testing.MockClock) -> None:
    asked: list[int] = []

    async def keep(group: Group) -> bool:
        asked.append(group[0].group_index)
        await trio.sleep(0.5)
        return group[0].group_index != 0

    runner = Runner([1.0, 1.0, 3.0, 4.0])
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=2, keep=keep)
    assert (indices(collected.kept), indices(collected.rejected), asked) == ([1, 2], [0], [0, 1, 2])
    with pytest.raises(GenerationError, match="keep <lambda> returned 'no'") as caught:
        await collect_groups(runner.issued, runner.generate, num_wanted=1, keep=lambda group: "no")
    assert caught.value.__notes__ == ["while working on prompt 0: 'p'"]


async def test_a_group_whose_filter_the_grace_period_cut_short_is_asked_about_again(autojump_clock: trio.testing.MockClock) -> None:
    asked: list[int] = []

    async def keep(group: Group) -> bool:
        asked.append(group[0].group_index)
        await trio.sleep(5.0 * (group[0].group_index == 1))
        return True

    runner = Runner([1.0, 2.0, 50.0], deaf=frozenset({1, 2}))
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=1, keep=keep, stop=runner.stop, grace_s=3.0)
    assert (indices(collected.kept), indices(collected.overflow), pending_indices(collected)) == ([0], [1], [2])
    assert asked == [0, 1, 1]


async def test_abort_ends_the_race_before_it_is_won(autojump_clock: trio.testing.MockClock) -> None:
    runner, abort = Runner([1.0, 9.0, 9.0]), trio.Event()
    async with trio.open_nursery() as nursery:

        async def press() -> None:
            await trio.sleep(4.0)
            abort.set()

        nursery.start_soon(press)
        collected = await collect_groups(runner.issued, runner.generate, num_wanted=3, stop=runner.stop, grace_s=2.0, abort=abort)
    assert trio.current_time() == 4.0
    assert indices(collected.kept) == [0]
    assert pending_indices(collected) == [1, 2]
    assert runner.num_stops == 1


async def test_an_abort_that_nobody_asks_for_does_not_hold_the_race(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([1.0])
    await collect_groups(runner.issued, runner.generate, num_wanted=1, abort=trio.Event())
    assert trio.current_time() == 1.0


async def test_a_failure_is_raised_as_itself_names_the_prompt_and_cancels_the_others(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([9.0, 9.0])
    issued = [*runner.issued, PendingGroup(Prompt(content="why?", index=2))]

    async def generate(pending: PendingGroup) -> Group:
        if pending.prompt.index == 2:
            await trio.sleep(1.0)
            raise LookupError("no such tool")
        return await runner.generate(pending)

    with pytest.raises(LookupError, match="no such tool") as caught:
        await collect_groups(issued, generate, num_wanted=3)
    assert caught.value.__notes__ == ["while working on prompt 2: 'why?'"]
    assert sorted(runner.cancelled) == [0, 1]


async def test_failures_of_the_same_moment_are_all_raised(autojump_clock: trio.testing.MockClock) -> None:
    crash = trio.Event()

    async def generate(pending: PendingGroup) -> Group:
        await crash.wait()
        raise LookupError(str(pending.prompt.index))

    async def set_crash() -> None:
        await trio.sleep(1.0)
        crash.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(set_crash)
        with pytest.raises(ExceptionGroup) as caught:
            await collect_groups(Runner([0.0] * 2).issued, generate, num_wanted=2)
    assert sorted(str(error) for error in caught.value.exceptions) == ["0", "1"]


async def test_a_failing_filter_or_stop_is_raised_as_itself(autojump_clock: trio.testing.MockClock) -> None:
    def keep(group: Group) -> bool:
        raise ZeroDivisionError("std of nothing")

    async def stop() -> None:
        raise ConnectionError("engine gone")

    with pytest.raises(ZeroDivisionError) as caught:
        await collect_groups(Runner([1.0, 2.0]).issued, Runner([1.0, 2.0]).generate, num_wanted=1, keep=keep)
    assert caught.value.__notes__ == ["while working on prompt 0: 'p'"]
    with pytest.raises(ConnectionError):
        await collect_groups(Runner([1.0, 2.0]).issued, Runner([1.0, 2.0]).generate, num_wanted=1, stop=stop)


async def test_a_stop_that_hangs_is_cut_by_the_grace(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([1.0, 50.0])
    collected = await collect_groups(runner.issued, runner.generate, num_wanted=1, stop=trio.sleep_forever, grace_s=2.0)
    assert trio.current_time() == 3.0
    assert indices(collected.kept) == [0]
    assert pending_indices(collected) == [1]


async def test_cancelling_a_race_from_outside_ends_all_of_it(autojump_clock: trio.testing.MockClock) -> None:
    runner = Runner([9.0] * 3)
    with trio.move_on_after(1.0) as scope:
        await collect_groups(runner.issued, runner.generate, num_wanted=3)
    assert scope.cancelled_caught
    assert sorted(runner.cancelled) == [0, 1, 2]


@given(st.data())
def test_every_group_is_whole_and_in_exactly_one_place(data: st.DataObject) -> None:
    delays = data.draw(st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12))
    deaf = data.draw(st.frozensets(st.sampled_from(range(len(delays)))))
    refused = data.draw(st.frozensets(st.sampled_from(range(len(delays)))))
    num_wanted = data.draw(st.integers(1, len(delays)))
    grace_s = data.draw(st.sampled_from([0.0, 1.5, 3.0]))

    async def race() -> CollectedGroups:
        runner = Runner(delays, deaf)
        return await collect_groups(
            runner.issued,
            runner.generate,
            num_wanted=num_wanted,
            keep=lambda group: group[0].group_index not in refused,
            stop=runner.stop,
            grace_s=grace_s,
        )

    collected = trio.run(race, clock=trio.testing.MockClock(autojump_threshold=0))
    places = [indices(collected.kept), indices(collected.overflow), indices(collected.rejected), pending_indices(collected)]
    assert all(place == sorted(place) for place in places)
    assert sorted(i for place in places for i in place) == list(range(len(delays)))
    for group in (*collected.kept, *collected.overflow, *collected.rejected):
        assert group == make_group(group[0].group_index)
    by_arrival = sorted((i for i in range(len(delays)) if i not in refused), key=lambda i: (delays[i], i))
    assert indices(collected.kept) == sorted(by_arrival[:num_wanted])

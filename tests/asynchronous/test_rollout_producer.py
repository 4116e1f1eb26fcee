"""Wake-ups of and by the producer of rollouts, and rollouts without a task. Starts and stops are tested in test_async_rollouts.py."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from executors import make_executor
from samples import make_group

from rollouts.asynchronous.config import AsyncConfig
from rollouts.errors import ConfigError, GenerationError, RewardError
from rollouts.generation.contract import OnEnd
from rollouts.types import Group, Prompt, Status

Clock = trio.testing.MockClock


async def test_rollouts_go_on_after_an_interruption_although_nobody_waits(autojump_clock: Clock) -> None:
    calls: list[int] = []

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        calls.append(prompt.index)
        return make_group(0, n, status=Status.COMPLETED, weight_versions=(-1, 0))

    async with make_executor(generate_fn, AsyncConfig(max_staleness=1), batch_size=1) as executor:
        await executor.interrupt()
        await trio.sleep(10)
        assert calls == []
        executor.resume()
        await trio.sleep(10)
        assert sorted(calls) == [0, 1]


async def test_who_waits_is_told_at_once_when_a_prompt_is_given_up_that_was_to_start(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int, partial: Group = ()) -> Group:
        if prompt.index == 0:  # stops with a token of version 0, and fails when it goes on from there: it is tried again at 100 s
            if partial:
                raise GenerationError("no")
            return make_group(0, n, status=Status.ABORTED, weight_versions=(-1, 0))
        await trio.sleep(5 if prompt.index == 1 else 1000)  # no later rollout ends, which would wake the waiter, too
        return make_group(0, n, status=Status.COMPLETED, weight_versions=(-1, 1))

    asynchronous = AsyncConfig(max_staleness=1, order="submitted", on_stale="drop", retry_delay_s=100.0)
    async with make_executor(generate_fn, asynchronous, batch_size=1) as executor:
        await trio.sleep(1)
        executor.set_version(1)
        await trio.sleep(5)
        executor.set_version(2)
        (group,) = await executor.wait(1, timeout_s=500)
        assert group[0].group_index == 1, "prompt 0 was given up: what it had was two versions behind"
        assert trio.current_time() == 100


class Begun:
    """A generate function that the test tells what to return, through `begin_group`."""

    def __init__(self) -> None:
        self.on_end: dict[int, OnEnd] = {}
        self.partials: list[tuple[int, Group]] = []
        self.aborts: list[Any] = []

    async def __call__(self, prompt: Prompt, n: int, partial: Group) -> Group:
        raise AssertionError("the executor calls begin_group() instead")

    def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:
        self.on_end[prompt.index] = on_end
        self.partials.append((prompt.index, partial))

    def end(self, index: int, status: Status = Status.COMPLETED, **fields: Any) -> None:
        self.on_end.pop(index)(make_group(0, fields.pop("size", 1), status=status, **{"weight_versions": (-1, 0), **fields}))

    async def abort(self, request_ids: Any = None) -> None:
        self.aborts.append(request_ids)


def accept(group: Group) -> bool:
    return True


async def reward_fn(sample: Any) -> float:
    await trio.sleep(3)
    return float(sample.group_index)


@pytest.mark.parametrize(("more", "seconds"), [({}, 0), ({"reward_fn": reward_fn}, 3), ({"filter_fn": accept}, 0)])
async def test_a_group_that_is_begun_without_a_task_is_scored_and_handed_out(
    autojump_clock: Clock, more: dict[str, Any], seconds: int
) -> None:
    begun = Begun()
    async with make_executor(begun, AsyncConfig(max_staleness=1), batch_size=1, **more) as executor:
        await trio.sleep(1)
        begun.end(1)
        (group,) = await executor.wait(1)
        assert (group[0].group_index, group[0].index) == (1, 1)
        assert group[0].reward == (1.0 if "reward_fn" in more else None)
        assert trio.current_time() == 1 + seconds
        begun.end(0)
        await executor.interrupt()
        assert len(executor.resident_samples) == 1, "the other one is finished, or being scored"


async def test_an_interrupted_group_without_a_task_goes_on_from_its_tokens(autojump_clock: Clock) -> None:
    begun = Begun()
    async with make_executor(begun, AsyncConfig(max_staleness=1), batch_size=1) as executor:
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.interrupt)
            await trio.sleep(0.5)
            begun.end(0, Status.ABORTED)
            begun.end(1, Status.ABORTED, tokens=(3,), loss_mask=(0.0,), weight_versions=(-1,))
        executor.resume()
        await trio.sleep(1)
        assert [(index, len(partial)) for index, partial in begun.partials] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        begun.end(0)
        begun.end(1)
        assert [group[0].group_index for group in await executor.wait(2)] == [0, 1]


async def test_a_group_without_a_task_that_does_not_end_is_cut_and_its_late_result_is_ignored(autojump_clock: Clock) -> None:
    begun = Begun()
    async with make_executor(begun, AsyncConfig(max_staleness=1), batch_size=1) as executor:
        await trio.sleep(1)
        late = begun.on_end[0]
        await executor.interrupt()
        assert trio.current_time() == 1 + 1.0, "grace_s"
        assert executor.get_stats().enqueued == 2
        executor.resume()
        await trio.sleep(1)
        late(make_group(0, 1, weight_versions=(-1, 0)))
        assert executor.get_stats().accepted == 0
        begun.end(0)
        begun.end(1)
        batch = await executor.generate_batch()
        assert batch.metadata["num_groups_cut"] == 2
    late(make_group(0, 1, weight_versions=(-1, 0)))
    assert executor.get_stats().accepted == 2


@pytest.mark.parametrize(
    ("result", "message"),
    [(GenerationError("no luck"), "no luck"), (make_group(0, 3), "returned 3 samples for prompt 0, expected n = 1"), (None, "broken")],
)
async def test_errors_of_groups_without_a_task_are_tried_again_as_others_are(autojump_clock: Clock, result: Any, message: str) -> None:
    class Broken(Begun):
        def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:
            super().begin_group(prompt, n, partial, on_end)
            if result is None:
                raise ValueError("broken")
            on_end(result)

    broken = Broken()
    async with make_executor(broken, AsyncConfig(max_attempts=2, max_concurrent_rollouts=1), batch_size=1) as executor:
        with pytest.raises(GenerationError, match=rf"(?s)prompt 0 failed in 2 attempts.*{message}"):
            await executor.wait(1)
    assert [index for index, _ in broken.partials] == [0, 0]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
async def test_begin_group_that_raises_ends_its_group_alone(autojump_clock: Clock, error: BaseException) -> None:
    class Broken(Begun):
        def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:
            super().begin_group(prompt, n, partial, on_end)
            if prompt.index == 0:
                raise error
            self.end(prompt.index)

    async with make_executor(Broken(), AsyncConfig(on_failure="drop"), batch_size=1) as executor:
        (group,) = await executor.wait(1)
    assert group[0].group_index == 1


async def test_groups_that_end_as_they_are_begun_make_room_for_the_next_ones(autojump_clock: Clock) -> None:
    class Known(Begun):
        def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:
            super().begin_group(prompt, n, partial, on_end)
            self.end(prompt.index)

    known = Known()
    async with make_executor(known, AsyncConfig(max_staleness=2, max_concurrent_rollouts=1), batch_size=1) as executor:
        await trio.sleep(1)
        assert [index for index, _ in known.partials] == [0, 1, 2], "each of them ended while the producer was awake"
        assert len(await executor.wait(3, timeout_s=5)) == 3


async def test_a_group_that_was_stopped_while_it_was_scored_is_scored_and_not_begun_again(autojump_clock: Clock) -> None:
    begun, fails = Begun(), [True]

    async def reward_fn(sample: Any) -> float:
        if fails.pop():
            raise ValueError("no judge")
        return 1.0

    fails.insert(0, False)
    asynchronous = AsyncConfig(max_staleness=1, max_concurrent_rollouts=1)
    async with make_executor(begun, asynchronous, batch_size=1, reward_fn=reward_fn) as executor:
        await trio.sleep(1)
        begun.end(0)
        with pytest.raises(RewardError, match="no judge"):
            await executor.wait(1)
        (group,) = await executor.wait(1, timeout_s=5)
        assert (group[0].group_index, group[0].reward) == (0, 1.0)
    assert [index for index, _ in begun.partials if index == 0] == [0]


async def test_groups_without_a_task_may_end_while_their_block_is_cancelled(autojump_clock: Clock) -> None:
    begun = Begun()

    async def serve() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for on_end in list(begun.on_end.values()):
                    on_end(GenerationError("cancelled"))
                    await trio.lowlevel.checkpoint()

    async def roll_out() -> None:
        async with make_executor(begun, AsyncConfig(max_staleness=15), batch_size=1):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        nursery.start_soon(roll_out)
        await trio.sleep(1)
        assert len(begun.on_end) == 16
        nursery.cancel_scope.cancel()


class WithoutPartial(Begun):
    def begin_group(self, prompt: Prompt, n: int, on_end: OnEnd) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


class WithAsync(Begun):
    async def begin_group(self, prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


class WithoutMethod(Begun):
    begin_group = "later"  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("generate_fn", "message"),
    [
        (WithoutPartial(), r"begin_group of WithoutPartial cannot be called with four arguments \(too many positional arguments\)"),
        (WithAsync(), "begin_group of WithAsync is an async function, which nobody would await"),
        (WithoutMethod(), "begin_group of WithoutMethod is 'later'"),
    ],
)
def test_begin_group_of_another_form_is_refused_at_once(generate_fn: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*expected a plain method begin_group\(prompt, n, partial, on_end\), or none"):
        make_executor(generate_fn)

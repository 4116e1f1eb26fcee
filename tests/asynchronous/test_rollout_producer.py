"""Wake-ups of and by the producer of rollouts. Its starts and stops are tested in test_async_rollouts.py."""

from __future__ import annotations

import trio
import trio.testing
from executors import make_executor
from samples import make_group

from rollouts.asynchronous.config import AsyncConfig
from rollouts.errors import GenerationError
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

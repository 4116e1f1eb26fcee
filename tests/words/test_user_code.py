"""Calls of user code by rewards, environments and tools: each ends by its deadline, and SystemExit does not end the run."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from integration.run.signal_watch import describe_tasks
from rollouts.config import RewardConfig
from rollouts.environments.calls import open_environment
from rollouts.environments.tools.tool import Tool, call_tool, create_tool
from rollouts.errors import EnvironmentFault, GenerationError, ToolFault
from rollouts.generation.contract import PendingGroup, bind_generate_fn
from rollouts.rewards.evaluate import judge_samples
from rollouts.types import Prompt, Sample
from rollouts.user_code import finish, interrupt_blocking


async def sleeps(sample: Sample) -> float:
    time.sleep(20)
    return 1.0


async def loops(sample: Sample) -> float:
    await trio.sleep(0.01)
    while True:
        with suppress(Exception):
            sum(range(100))


async def waits(sample: Sample) -> float:
    threading.Lock().acquire() and threading.Event().wait(20)
    return 1.0


@pytest.mark.parametrize("reward_fn", [sleeps, loops, waits])
async def test_an_async_reward_that_blocks_is_ended_by_its_deadline(reward_fn):
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    started = time.monotonic()
    (judgement,) = await judge_samples(reward_fn, [Sample(tokens=(1,), loss_mask=(1.0,))], RewardConfig(timeout_s=0.2))
    assert time.monotonic() - started < 15
    assert f"reward function {reward_fn.__name__} (" in str(judgement.error) and ") did not return within 0.2 s" in str(judgement.error)
    (note,) = judgement.error.__notes__
    assert f"it blocked the event loop at {__file__}:" in note and "write it as a plain def" in note
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


async def test_deadlines_hold_for_code_with_a_nursery_of_its_own():
    async def blocks() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            time.sleep(20)

    async def raises_when_told_to_end() -> None:
        async def fail() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("no")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            nursery.start_soon(trio.sleep_forever)

    for function in (blocks, raises_when_told_to_end):

        async def reward(sample: Sample, function: Any = function) -> None:
            await function()

        started = time.monotonic()
        (judgement,) = await judge_samples(reward, [Sample(tokens=(1,), loss_mask=(1.0,))], RewardConfig(timeout_s=0.1))
        assert ") did not return within 0.1 s" in str(judgement.error)
        tool = Tool(name="tool", description="", parameters={}, function=function, timeout_s=0.1)
        with pytest.raises(ToolFault, match=r"tool tool did not return within 0\.1 s"):
            await call_tool(tool, {})
        with pytest.raises(EnvironmentFault, match=r"did not return within 0\.1 s"):
            async with open_environment(function, timeout_s=0.1):
                pass
        assert time.monotonic() - started < 15


async def blocks_in_a_task_of_its_own(clock: trio.testing.MockClock) -> float:
    async def block() -> None:
        clock.jump(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(block)
    return 1.0


async def shields_itself(clock: trio.testing.MockClock) -> float:
    with trio.CancelScope(shield=True):
        await trio.sleep(10)
    return 1.0


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("function", [blocks_in_a_task_of_its_own, shields_itself])
async def test_a_reward_that_cannot_be_ended_is_not_paid_after_its_deadline(function, num_samples: int, autojump_clock):
    async def reward(sample: Sample) -> float:
        return await function(autojump_clock)

    samples = [Sample(tokens=(1,), loss_mask=(1.0,))] * num_samples
    for judgement in await judge_samples(reward, samples, RewardConfig(timeout_s=5)):
        assert ") did not return within 5 s" in str(judgement.error) and not hasattr(judgement.error, "__notes__"), "no alarm has rung"


async def test_each_late_reward_of_a_group_is_asked_again_by_itself(autojump_clock):
    attempts: list[int] = []

    async def reward(sample: Sample) -> float:
        attempts.append(sample.index)
        await trio.sleep(10 if attempts.count(sample.index) == 1 and sample.index < 2 else 0)
        return float(sample.index)

    samples = [Sample(tokens=(1,), loss_mask=(1.0,), index=index) for index in range(3)]
    judgements = await judge_samples(reward, samples, RewardConfig(timeout_s=5, on_error="retry", max_retries=1))
    assert [judgement.result and judgement.result.score for judgement in judgements] == [0.0, 1.0, 2.0]
    assert [judgement.num_retries for judgement in judgements] == [1, 1, 0] and sorted(attempts) == [0, 0, 1, 1, 2]


async def test_async_rewards_still_use_what_belongs_to_the_event_loop():
    """Events, channels and nurseries of the caller's, values that are sent in, cancellation that is thrown in."""
    event, seen = trio.Event(), []
    send, receive = trio.open_memory_channel[int](0)

    async def reward(sample: Sample) -> float:
        event.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 0)
            value = await receive.receive()
        with trio.move_on_after(0.01):
            await trio.sleep_forever()
        return value + await trio.to_thread.run_sync(lambda: 0.5)

    async def feed() -> None:
        await event.wait()
        await send.send(3)

    async def endless() -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append("cancelled")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed)
        (judgement,) = await judge_samples(reward, [Sample(tokens=(1,), loss_mask=(1.0,))], RewardConfig(timeout_s=10))
    assert judgement.scored is not None and judgement.scored.reward == 3.5
    with trio.move_on_after(0.01) as scope:
        await finish(endless(), 10)
    assert (scope.cancelled_caught, seen) == (True, ["cancelled"])


async def test_the_stack_of_a_task_shows_what_the_user_s_code_waits_for():
    async def inner() -> None:
        await trio.sleep_forever()

    async def outer() -> None:
        await finish(inner(), 10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(outer)
        await trio.testing.wait_all_tasks_blocked()
        shown = describe_tasks(trio.lowlevel.current_root_task())
        nursery.cancel_scope.cancel()
    place = [line.split(" in ")[-1].strip() for line in shown.splitlines() if ", line " in line]
    assert place[place.index("outer") :][:4] == ["outer", "finish", "inner", "sleep_forever"]


async def test_each_of_several_async_rewards_may_block_for_its_timeout_and_no_longer():
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    waits, seen, in_waits = trio.Event(), trio.Event(), list[bool]()

    async def reward(sample: Sample) -> float:
        if sample.index == 3:
            waits.set()
            await seen.wait()
            in_waits.append(signal.getsignal(signal.SIGALRM) != before[0])
            return 1.0
        time.sleep(20 if sample.index == 2 else 0.6)
        return 1.0

    async def look() -> None:
        await waits.wait()
        assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before
        seen.set()

    samples = [Sample(tokens=(1,), loss_mask=(1.0,), index=k) for k in range(4)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        judgements = await judge_samples(reward, samples, RewardConfig(timeout_s=1.0))
    assert [judgement.error is None for judgement in judgements] == [True, True, False, True]
    (note,) = getattr(judgements[2].error, "__notes__", ())
    assert "it blocked the event loop" in note
    assert in_waits == [True]  # an alarm is set while its code runs again
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_an_alarm_of_somebody_else_goes_on_and_goes_first():
    rung: list[float] = []
    handler, (due, interval) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, lambda number, frame: rung.append(time.monotonic()))
    try:
        for other, ours in ((0.1, 5.0), (0.3, 0.2)):
            started, count = time.monotonic(), len(rung)
            signal.setitimer(signal.ITIMER_REAL, other)
            with interrupt_blocking(ours):
                pass
            while len(rung) == count and time.monotonic() < started + 5:
                time.sleep(0.01)
            assert rung[-1] - started == pytest.approx(other, abs=0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, due, interval)


class Hard(BaseException):
    """Error of a library that derives its errors from BaseException."""


def exits(*_: Any) -> Any:
    raise SystemExit(0)


def interrupts(*_: Any) -> Any:  # in a thread, so nobody has pressed a key
    raise KeyboardInterrupt


async def exits_later(*_: Any) -> Any:
    await trio.sleep(0)
    raise Hard("no")


@pytest.mark.parametrize(("function", "kind"), [(exits, "SystemExit"), (interrupts, "KeyboardInterrupt"), (exits_later, "Hard")])
async def test_what_would_end_the_program_is_an_error_with_file_and_line(function, kind):
    (judgement,) = await judge_samples(function, [Sample(tokens=(1,), loss_mask=(1.0,))], RewardConfig(timeout_s=5))
    assert f"raised {kind}" in str(judgement.error)
    assert f"{__file__}:{function.__code__.co_firstlineno + (2 if function is exits_later else 1)}" in str(judgement.error)
    if function is interrupts:  # elsewhere it is taken for Ctrl-C
        return
    generate = bind_generate_fn(lambda prompt, n: function(prompt, n), 1)
    with pytest.raises(GenerationError, match=rf"raised {kind} \(.*test_user_code\.py"):
        await generate(PendingGroup(Prompt(content="a")))
    with pytest.raises(EnvironmentFault, match=f"raised {kind}"):
        async with open_environment(function, timeout_s=5, in_thread=True):
            pass


async def test_sync_environments_and_tools_that_block_the_event_loop_are_ended_by_their_deadlines():
    def blocks() -> str:
        """Takes too long."""
        time.sleep(20)
        return "late"

    tool: Tool = create_tool(blocks, timeout_s=0.1, in_thread=False)
    with pytest.raises(ToolFault, match=r"did not return within 0\.1 s: it blocked the event loop at .*test_user_code"):
        await call_tool(tool, {})
    with pytest.raises(EnvironmentFault, match=r"did not return within 0\.1 s .*it blocked the event loop at"):
        async with open_environment(blocks, timeout_s=0.1):
            pass


@pytest.mark.parametrize("timeout_s", [None, 30.0])
async def test_the_deadline_of_a_caller_is_not_taken_for_that_of_its_tool(timeout_s: float | None):
    def blocks() -> str:
        """Takes too long."""
        time.sleep(20)
        return "late"

    tool: Tool = create_tool(blocks, timeout_s=timeout_s, in_thread=False)

    async def asks_a_tool(sample: Sample) -> float:
        return float(len(await call_tool(tool, {})))

    (judgement,) = await judge_samples(asks_a_tool, [Sample(tokens=(1,), loss_mask=(1.0,))], RewardConfig(timeout_s=0.2))
    assert "asks_a_tool (" in str(judgement.error) and ") did not return within 0.2 s" in str(judgement.error)

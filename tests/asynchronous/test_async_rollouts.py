"""The executor: what it hands out and when, failures, timeouts, interruption and resume, in virtual time."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from executors import make_buffer, make_executor

from rollouts.asynchronous.capacity import StalenessManager
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.asynchronous.finished import StandardPPOStrategy, take_out
from rollouts.asynchronous.queue import FinishedRollout, LocalRolloutCache, LocalRolloutQueue, RolloutCache, RolloutQueue, TimedResult
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig, RolloutConfig
from rollouts.data.filters import check_reward_nonzero_std, make_threshold_filter
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import create_pending_group
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineRequestError,
    EngineStatusError,
    EngineTimeout,
    GenerationError,
    GenerationTimeout,
    RewardError,
)
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.generation.workflows import WorkflowEngine, create_workflow_generate_fn
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, create_tiny_model
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status

Clock = trio.testing.MockClock


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer()


async def reward_length(sample: Sample) -> float:
    return float(sum(sample.loss_mask))


def ragged_delay(prompt_tokens: tuple[int, ...], seed: int | None) -> float:
    return 0.5 + derive_seed(0 if seed is None else seed) % 5


class Script:
    """A generate_fn: prompt i takes seconds(i), its tokens are of `version`, and errors(i, attempt) may be raised instead."""

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda index: 1.0,
        error: Callable[[int, int], Exception | None] = lambda index, attempt: None,
    ) -> None:
        self.seconds = seconds
        self.error = error
        self.version = 0
        self.calls: list[int] = []

    async def __call__(self, prompt: Prompt, n: int) -> Group:
        attempt = self.calls.count(prompt.index)
        self.calls.append(prompt.index)
        version = self.version
        await trio.sleep(self.seconds(prompt.index))
        error = self.error(prompt.index, attempt)
        if error is not None:
            raise error
        return tuple(
            Sample(prompt=prompt.content, tokens=(1, 2), loss_mask=(0.0, 1.0), weight_versions=(-1, version), status=Status.COMPLETED)
            for _ in range(n)
        )


def make_engine_executor(
    tokenizer: Any, engine: FakeEngine, asynchronous: AsyncConfig, max_tokens: int = 12, **changes: Any
) -> WorkflowExecutor:
    generate_fn = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=max_tokens))
    defaults: dict[str, Any] = {"n_samples_per_prompt": 2, "reward_fn": reward_length, "engines": [engine]}
    return make_executor(generate_fn, asynchronous, **(defaults | changes))


def indices(groups: Sequence[Group]) -> list[int]:
    return [group[0].group_index for group in groups]


def check_conserved(executor: WorkflowExecutor, num_handed_out: int, num_given_up: int = 0) -> None:
    """Each prompt that was taken is in one place: waiting, running, finished, handed out or given up."""
    state = executor.state_dict()
    waiting = [group["prompt"]["index"] for group in state["pending"]]
    finished = [entry["prompt"]["index"] for place in state["finished"].values() for entry in place]
    assert len({*waiting, *finished}) == len(waiting) + len(finished)
    taken = state["buffer"]["epoch_id"] * state["buffer"]["num_prompts"] + state["buffer"]["sample_offset"]
    assert len(waiting) + len(finished) + num_handed_out + num_given_up == taken
    counts = executor.get_stats()
    assert counts.enqueued + counts.running == len(waiting)


# what is handed out


async def test_without_staleness_batches_are_those_of_the_synchronous_manager(tokenizer: Any, autojump_clock: Clock) -> None:
    def engine() -> FakeEngine:
        return FakeEngine(seconds_per_token=ragged_delay)

    def keep_long(group: Group) -> bool:
        return max(sample.reward or 0.0 for sample in group) > 7

    ours, theirs = engine(), engine()
    changes: dict[str, Any] = {"batch_size": 3, "filter_fn": keep_long}
    generate_fn = create_generate_fn([theirs], tokenizer, SamplingParams(max_tokens=12))
    config = RolloutConfig(n_samples_per_prompt=2, reward_fn=reward_length, generate_fn=generate_fn, **changes)
    manager = AsyncRolloutManager(make_buffer(), config, engines=[theirs])
    async with make_engine_executor(tokenizer, ours, AsyncConfig(max_staleness=0), **changes) as executor:
        for version in range(5):
            assert (await executor.generate_batch()).samples == (await manager.generate_batch()).samples
            await trio.sleep(100)
            ours.weight_version = theirs.weight_version = version + 1
            executor.set_version(version + 1)


async def test_with_the_embedded_engine_they_are_so_bit_for_bit(tokenizer: Any) -> None:
    batches: list[list[tuple[Sample, ...]]] = [[], []]
    for place, is_asynchronous in enumerate((False, True)):
        engine = InProcessEngine(create_tiny_model(seed=4), tokenizer, max_slots=4)
        generate_fn = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=8))
        config = RolloutConfig(batch_size=3, n_samples_per_prompt=2, generate_fn=generate_fn, reward_fn=reward_length)
        manager = AsyncRolloutManager(make_buffer(), config, engines=[engine])
        async with engine, create_workflow_executor(make_buffer(), config, AsyncConfig(max_staleness=0), engines=[engine]) as executor:
            if not is_asynchronous:
                await executor.interrupt()
            for version in range(1, 4):
                batches[place].append((await (executor if is_asynchronous else manager).generate_batch()).samples)
                await engine.update_weights(dict(create_tiny_model(seed=4 + version).state_dict()), version)
                executor.set_version(version)
    assert batches[0] == batches[1]


async def test_two_batches_of_one_version_are_in_the_order_of_their_prompts(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 10.0 - index)
    async with make_executor(script, AsyncConfig(max_staleness=0), batches_per_version=2) as executor:
        assert indices(await executor.wait(2)) == [0, 1]
        assert indices(await executor.wait(2)) == [2, 3]
        assert script.calls.__len__() == 4


async def test_the_first_to_finish_are_handed_out_first(autojump_clock: Clock) -> None:
    async with make_executor(Script(seconds=lambda index: [3.0, 1.0, 4.0, 2.0][index % 4])) as executor:
        assert indices(await executor.wait(2)) == [1, 3]
        assert trio.current_time() == 2.0
        assert indices(await executor.wait(2)) == [0, 2]
        batch = None
        executor.set_version(1)
        batch = await executor.generate_batch()
        assert [sample.group_index for sample in batch.samples] == [4, 5], "a batch is in the order of prompts"


async def test_those_that_finish_at_the_same_moment_are_in_the_order_of_their_prompts(autojump_clock: Clock) -> None:
    for _ in range(5):
        async with make_executor(Script(), AsyncConfig(max_staleness=3), batch_size=5) as executor:
            assert indices(await executor.wait(3)) == [0, 1, 2]
            assert indices(await executor.wait(17)) == list(range(3, 20))


async def test_those_with_more_to_do_at_the_same_moment_are_waited_for(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int) -> Group:
        await trio.sleep(1)
        for _ in range(4 - prompt.index):
            await trio.lowlevel.checkpoint()
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED),) * n

    async with make_executor(generate_fn, AsyncConfig(max_staleness=1), batch_size=2) as executor:
        assert indices(await executor.wait(2)) == [0, 1]


async def test_in_strict_order_the_trainer_waits_for_stragglers(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 9.0 if index == 1 else 1.0)
    async with make_executor(script, AsyncConfig(max_staleness=2, order="submitted")) as executor:
        assert indices(await executor.wait(1)) == [0]
        assert trio.current_time() == 1.0
        assert indices(await executor.wait(2)) == [1, 2]
        assert trio.current_time() == 9.0


async def test_capacity_bounds_what_is_under_way(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=1, max_concurrent_rollouts=3)) as executor:
        await trio.sleep(0.5)
        assert len(script.calls) == 3
        await trio.sleep(50)
        assert len(script.calls) == 4, "two batches of 2 may be under way at version 0"
        await executor.wait(2)
        await trio.sleep(50)
        assert len(script.calls) == 4
        executor.set_version(1)
        await trio.sleep(50)
        assert len(script.calls) == 6
        check_conserved(executor, 2)


async def test_capacity_of_one_of_four_trainers(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=1), batch_size=8, data_parallel_size=4) as executor:
        assert len((await executor.generate_batch()).samples) == 2
        await trio.sleep(50)
        assert len(script.calls) == 4


async def test_a_batch_tells_its_staleness_and_what_happened(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=2)) as executor:
        await trio.sleep(1.5)
        executor.set_version(1)
        script.version = 1
        first = await executor.generate_batch()
        assert {key: first.metadata[key] for key in ("staleness_mean", "staleness_max", "staleness_1")} == {
            "staleness_mean": 1.0,
            "staleness_max": 1.0,
            "staleness_1": 1.0,
        }
        names = ("num_groups_filtered", "num_groups_purged", "num_groups_retried", "num_groups_failed", "num_groups_ready")
        assert [first.metadata[name] for name in names] == [0, 0, 0, 0, 4]


async def test_rollouts_are_filtered_before_they_are_queued(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(seconds_per_token=1.0)
    asynchronous = AsyncConfig(max_staleness=1)
    async with make_engine_executor(tokenizer, engine, asynchronous, filter_fn=check_reward_nonzero_std, batch_size=3) as executor:
        for version in range(4):
            batch = await executor.generate_batch()
            assert all(check_reward_nonzero_std(batch.samples[k : k + 2]) for k in range(0, 6, 2))
            executor.set_version(version + 1)
            engine.weight_version = version + 1


async def test_an_executor_waits_for_an_async_filter_and_refuses_what_is_no_answer(autojump_clock: Clock) -> None:
    async def odd_groups(group: Group) -> bool:
        await trio.sleep(0.1)
        return group[0].group_index % 2 == 1

    async with make_executor(Script(), filter_fn=odd_groups) as executor:
        assert {sample.group_index % 2 for sample in (await executor.generate_batch()).samples} == {1}
    for mistake in (make_threshold_filter, lambda group: "no"):
        async with make_executor(Script(), filter_fn=mistake) as executor:
            with pytest.raises(GenerationError, match=r"filter_fn .* returned .* for group \d+, expected True or False"):
                await executor.generate_batch()


async def test_a_filter_that_refuses_everything_is_an_error(autojump_clock: Clock) -> None:
    async with make_executor(Script(), filter_fn=lambda group: False, max_filter_attempts=4) as executor:
        with pytest.raises(GenerationError, match=r"only 0 of the 2 groups of a batch were found in 4 rounds.*passed 0 of") as caught:
            await executor.generate_batch()
    assert "dropped because" not in str(caught.value), "nothing failed"


async def test_a_straggler_that_keeps_groups_from_their_turn_is_not_taken_for_a_filter_that_starves(autojump_clock: Clock) -> None:
    def keep(group: Group) -> bool:
        return not 3 <= group[0].group_index <= 8

    script = Script(seconds=lambda index: 1.0 if index else 100.0)
    async with make_executor(script, AsyncConfig(order="submitted"), filter_fn=keep, max_filter_attempts=2) as executor:
        assert indices(await executor.wait(2)) == [0, 1]
        assert trio.current_time() == 100.0


async def test_engines_that_never_get_new_weights_are_an_error(autojump_clock: Clock) -> None:
    async with make_executor(Script(), AsyncConfig(max_staleness=0)) as executor:
        await executor.generate_batch()
        executor.set_version(1)
        with pytest.raises(GenerationError, match=r"more than max_staleness \(0\) versions behind version 1: do the engines"):
            await executor.generate_batch()


# order of operations


class Spy:
    """Parts that note what is done with them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        notes = self.notes

        class Queue(LocalRolloutQueue):
            def get_nowait(self) -> Any:
                notes.append("drain")
                return super().get_nowait()

        class Strategy(StandardPPOStrategy):
            def purge_stale_samples_from_queue(
                self, queue: RolloutQueue, current_version: int, last_purged_version: int
            ) -> tuple[tuple[FinishedRollout, ...], int]:
                if current_version > last_purged_version:
                    notes.append(f"purge {current_version}")
                return (), current_version

            def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
                notes.append(f"filter {cache.size()}")
                return ()

        self.queue, self.strategy = Queue(8), Strategy()


async def test_wait_purges_drains_filters_and_counts_in_this_order(autojump_clock: Clock) -> None:
    spy = Spy()
    async with make_executor(Script(), queue=spy.queue, strategy=spy.strategy) as executor:
        await trio.sleep(2)
        await executor.wait(2)
        assert spy.notes[:6] == ["purge 0", "drain", "drain", "drain", "drain", "filter 4"]
        assert not [note for note in spy.notes[6:] if note.startswith("purge")], "the version did not rise"
        spy.notes.clear()
        executor.set_version(1)
        await executor.wait(1)
        assert spy.notes[0] == "purge 1"


# staleness


async def test_the_bound_is_exact(autojump_clock: Clock) -> None:
    for max_staleness in (0, 1, 2):
        for version, old in ((max_staleness, True), (max_staleness + 1, False)):
            script = Script()
            async with make_executor(script, AsyncConfig(max_staleness=max_staleness, on_stale="drop", queue_size=20)) as executor:
                await trio.sleep(1.5)
                script.version = version
                executor.set_version(version)
                assert (indices(await executor.wait(2)) == [0, 1]) == old


async def test_a_straggler_that_became_too_old_is_generated_anew(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 10.0 if index == 0 and script.calls.count(0) == 1 else 1.0)
    async with make_executor(script, AsyncConfig(max_staleness=1)) as executor:
        got: list[int] = []
        for version in range(1, 8):
            groups = await executor.wait(2)
            assert all(executor.version - v <= 1 for group in groups for v in (group[0].weight_versions or ())[1:])
            got += indices(groups)
            await trio.sleep(2)
            script.version = version
            executor.set_version(version)
        assert script.calls.count(0) == 2
        assert 0 in got
        check_conserved(executor, len(got))


async def test_a_straggler_that_became_too_old_can_be_dropped(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 10.0 if index == 0 else 1.0)
    async with make_executor(script, AsyncConfig(max_staleness=1, on_stale="drop")) as executor:
        purged = 0
        for version in range(1, 12):
            batch = await executor.generate_batch()
            purged += batch.metadata["num_groups_purged"]
            await trio.sleep(2)
            script.version = version
            executor.set_version(version)
        assert purged == 1
        assert script.calls.count(0) == 1


async def test_samples_without_versions_are_as_old_as_their_beginning(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int) -> Group:
        await trio.sleep(5.0 if prompt.index == 0 else 1.0)
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED),) * n

    async with make_executor(generate_fn, AsyncConfig(max_staleness=1, on_stale="drop")) as executor:
        for version in (1, 2, 3):
            assert 0 not in indices(await executor.wait(2))
            executor.set_version(version)
        await trio.sleep(10)
        assert 0 not in indices(await executor.wait(4))


async def test_a_group_that_is_too_old_in_every_attempt_is_given_up(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 10.0 if index == 0 else 1.0)
    async with make_executor(script, AsyncConfig(max_staleness=1, max_stale_attempts=2)) as executor:
        for version in range(1, 20):
            await executor.wait(2)
            await trio.sleep(2)
            script.version = version
            executor.set_version(version)
        assert script.calls.count(0) == 2
        check_conserved(executor, 38, num_given_up=1)


class Fickle(StandardPPOStrategy):
    """Drops the finished groups of every other prompt, once."""

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        return take_out(cache, lambda rollout: rollout.prompt.index % 2 == 0)


@pytest.mark.parametrize("gives_back", [True, False])
async def test_a_run_that_drops_groups_stops_unless_they_give_their_room_back(autojump_clock: Clock, gives_back: bool) -> None:
    asynchronous = AsyncConfig(max_staleness=1, on_stale="drop", patience_s=1000.0)
    config = RolloutConfig(batch_size=2, generate_fn=Script())
    make = create_workflow_executor if gives_back else WorkflowExecutor
    async with make(make_buffer(), config, asynchronous, strategy=Fickle()) as executor:
        version = 0
        try:
            for version in range(20):
                await executor.wait(2)
                config.generate_fn.version = version + 1  # type: ignore[union-attr]
                executor.set_version(version + 1)
        except GenerationTimeout as error:
            assert not gives_back
            assert "0 are running" in str(error)
            assert "dropped groups give their room back" in str(error)
        assert (version == 19) == gives_back


# the queue


async def test_a_full_queue_is_an_error_that_says_what_to_do(autojump_clock: Clock) -> None:
    async with make_executor(Script(), AsyncConfig(max_staleness=3, queue_size=2)) as executor:
        await trio.sleep(5)
        with pytest.raises(ConfigError, match="Increase queue_size"):
            await executor.wait(2)
        assert sorted(indices(await executor.wait(8))) == list(range(8)), "nothing is lost"


@pytest.mark.parametrize("order", ["finished", "submitted"])
async def test_a_full_queue_can_hold_the_producer_back(autojump_clock: Clock, order: Any) -> None:
    script = Script(seconds=lambda index: 1.0 + index % 3)
    asynchronous = AsyncConfig(max_staleness=3, queue_size=2, max_concurrent_rollouts=2, when_queue_full="wait", order=order)
    async with make_executor(script, asynchronous) as executor:
        await trio.sleep(50)
        assert len(script.calls) <= 4, "nothing starts while the queue is full"
        got: list[int] = []
        for version in range(1, 9):
            got += indices(await executor.wait(2))
            script.version = version
            executor.set_version(version)
            await trio.sleep(4)
        assert sorted(got) == list(range(16))
        assert order == "finished" or got == list(range(16))


def test_a_queue_smaller_than_a_batch_is_refused():
    with pytest.raises(ConfigError, match="increase queue_size"):
        make_executor(Script(), AsyncConfig(queue_size=1))
    with pytest.raises(ConfigError, match="holds 1 groups, but a batch has 2: increase queue_size"):
        make_executor(Script(), queue=LocalRolloutQueue(1))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="generate_fn is None"):
        make_executor(None)
    with pytest.raises(ConfigError, match="data_parallel_size is 0"):
        make_executor(Script(), data_parallel_size=0)
    with pytest.raises(ConfigError, match="over_sampling_factor is 2"):
        make_executor(Script(), over_sampling_factor=2.0)


async def test_a_version_that_goes_backwards_is_refused(autojump_clock: Clock) -> None:
    executor = make_executor(Script(), version=4)
    executor.set_version(4)
    with pytest.raises(ConfigError, match="set to 3, but it is 4 already: versions only rise"):
        executor.set_version(3)


async def test_a_run_that_begins_at_a_version_has_the_capacity_of_a_new_one(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=1, max_concurrent_rollouts=100), version=7):
        await trio.sleep(50)
    assert len(script.calls) == 4


# waiting


async def test_a_wait_that_takes_too_long_says_how_many_are_there(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 1.0 if index < 1 else 100.0)
    async with make_executor(script) as executor:
        with pytest.raises(GenerationTimeout, match="1 of the 2 groups that were waited for are there after 5 s: 3 are running, 0 wait"):
            await executor.wait(2, timeout_s=5)
        assert trio.current_time() == 5.0
        assert indices(await executor.wait(2)) == [0, 1], "what was there is not lost"
        with pytest.raises(ConfigError, match="0 groups were asked for"):
            await executor.wait(0)


async def test_a_cancelled_wait_takes_nothing(autojump_clock: Clock) -> None:
    async with make_executor(Script()) as executor:
        with trio.move_on_after(0.5):
            await executor.wait(2)
        assert indices(await executor.wait(4)) == [0, 1, 2, 3]


async def test_the_patience_of_the_configuration_is_the_default(autojump_clock: Clock) -> None:
    async with make_executor(Script(seconds=lambda index: 100.0), AsyncConfig(patience_s=7.0)) as executor:
        with pytest.raises(TimeoutError, match="after 7 s"):
            await executor.generate_batch()


# failures


async def test_a_rollout_that_crashes_once_is_tried_again(autojump_clock: Clock) -> None:
    script = Script(error=lambda index, attempt: ValueError("boom") if index == 1 and attempt == 0 else None)
    async with make_executor(script, AsyncConfig(max_staleness=0, retry_delay_s=3.0)) as executor:
        batch = await executor.generate_batch()
        assert trio.current_time() == 5.0
        assert [sample.group_index for sample in batch.samples] == [0, 1]
        assert batch.metadata["num_groups_retried"] == 1
        check_conserved(executor, 2)


async def test_a_rollout_that_always_crashes_ends_the_wait(autojump_clock: Clock) -> None:
    script = Script(error=lambda index, attempt: ValueError("boom") if index == 1 else None)
    async with make_executor(script) as executor:
        with pytest.raises(GenerationError, match="the rollout of prompt 1 failed in 3 attempts, the last time with ValueError: boom"):
            await executor.wait(4)
        check_conserved(executor, 0)
        script.error = lambda index, attempt: None
        assert sorted(indices(await executor.wait(4))) == [0, 1, 2, 3], "it can go on once the cause is repaired"


async def test_a_crash_can_end_the_run_at_once(autojump_clock: Clock) -> None:
    error = ValueError("boom")
    script = Script(error=lambda index, attempt: error if index == 2 else None)
    async with make_executor(script, AsyncConfig(on_failure="raise")) as executor:
        with pytest.raises(ValueError, match="boom") as caught:
            await executor.wait(4)
        assert caught.value is error
        assert any("while working on prompt 2" in note for note in error.__notes__)
        check_conserved(executor, 0)


async def test_a_crash_can_drop_the_group(autojump_clock: Clock) -> None:
    script = Script(error=lambda index, attempt: ValueError("boom") if index % 3 == 1 else None)
    for order in ("finished", "submitted"):
        async with make_executor(script, AsyncConfig(on_failure="drop", order=order)) as executor:
            assert indices(await executor.wait(2)) == [0, 2]
            executor.set_version(1)
            batch = await executor.generate_batch()
            assert [sample.group_index for sample in batch.samples] == [3, 5]
            assert batch.metadata["num_groups_failed"] == 2
            check_conserved(executor, 4, num_given_up=2)


async def test_a_failure_that_nobody_waited_for_is_raised_at_the_end_of_the_block(autojump_clock: Clock) -> None:
    executor = make_executor(Script(error=lambda index, attempt: ValueError("boom")), AsyncConfig(on_failure="raise"))
    with pytest.raises(ValueError, match="boom"):
        async with executor:
            await trio.sleep(5)
    check_conserved(executor, 0)


async def test_a_failure_beside_an_error_of_the_block_is_told_with_it(autojump_clock: Clock) -> None:
    executor = make_executor(Script(error=lambda index, attempt: ValueError("boom")), AsyncConfig(on_failure="raise"))
    with pytest.raises(KeyError) as caught:
        async with executor:
            await trio.sleep(5)
            raise KeyError("own")
    assert "4 rollouts failed; the first: ValueError('boom')" in caught.value.__notes__[0]


async def test_failed_samples_drop_their_group(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int) -> Group:
        await trio.sleep(1)
        status = Status.FAILED if prompt.index == 0 else Status.COMPLETED
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=status),) * n

    async with make_executor(generate_fn) as executor:
        batch = await executor.generate_batch()
        assert [sample.group_index for sample in batch.samples] == [1, 2]
        assert batch.metadata["num_groups_failed"] == 1


async def test_a_failed_reward_is_raised_at_once_and_the_group_is_not_generated_again(autojump_clock: Clock) -> None:
    broken = True

    async def reward(sample: Sample) -> float:
        if broken and sample.group_index == 1:
            raise ValueError("no reward")
        return 1.0

    script = Script()
    async with make_executor(script, reward_fn=reward) as executor:
        with pytest.raises(RewardError, match="no reward"):
            await executor.wait(4)
        broken = False
        assert sorted(indices(await executor.wait(4))) == [0, 1, 2, 3]
        assert script.calls.count(1) == 1
    dropping = make_executor(Script(), reward_fn=reward, reward=RewardConfig(on_error="drop"))
    broken = True
    async with dropping:
        assert indices(await dropping.wait(2)) == [0, 2]


@pytest.mark.parametrize("policy", ["retry", "drop"])
async def test_while_every_engine_is_dead_prompts_are_neither_dropped_nor_given_up(autojump_clock: Clock, policy: Any) -> None:
    dead = True
    script = Script(error=lambda index, attempt: EngineError("connection refused") if dead else None)
    async with make_executor(script, AsyncConfig(on_failure=policy, patience_s=600.0)) as executor:
        with pytest.raises(
            GenerationTimeout, match=r"0 of the 2 groups.*rollouts failed since the last batch.*connection refused"
        ) as caught:
            await executor.generate_batch()
        assert isinstance(caught.value.__cause__, EngineError)
        assert trio.current_time() == 600.0
        check_conserved(executor, 0)
        dead = False
        assert indices(await executor.wait(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [EngineStatusError(400, "http://x", "too long"), EngineRequestError("too long")])
async def test_a_request_that_engines_refuse_is_no_outage(autojump_clock: Clock, error: EngineError) -> None:
    script = Script(error=lambda index, attempt: copy.copy(error) if index == 0 else None)
    async with make_executor(script, AsyncConfig(on_failure="drop", max_concurrent_rollouts=1)) as executor:
        assert indices(await executor.wait(2, timeout_s=100)) == [1, 2]


async def test_an_endless_series_of_unfinished_answers_is_a_failure(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int) -> Group:
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.ABORTED),) * n

    async with make_executor(generate_fn) as executor:
        with pytest.raises(GenerationError, match="came back unfinished and as it was, more than once"):
            await executor.wait(1)


async def test_rollouts_that_a_weight_sync_aborts_from_outside_begin_again(autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9, seconds_per_token=1.0)

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        completion = await engine.generate([7], SamplingParams(), request_id=str(prompt.index))
        if completion.finish_reason == "abort":
            return create_pending_group(prompt, n)
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED),) * n

    asynchronous = AsyncConfig(max_staleness=9, on_failure="raise", max_concurrent_rollouts=2)
    async with make_executor(generate_fn, asynchronous, engines=[engine]) as executor:
        for version in range(1, 5):
            await trio.sleep(5)
            await engine.abort()
            await trio.testing.wait_all_tasks_blocked()
            executor.set_version(version)
        assert indices(await executor.wait(2)) == [0, 1]


async def test_segment_wise_needs_versions(autojump_clock: Clock) -> None:
    async def generate_fn(prompt: Prompt, n: int) -> Group:
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED),) * n

    async with make_executor(generate_fn, AsyncConfig(enable_segment_wise_ppo=True), engines=[FakeEngine()]) as executor:
        with pytest.raises(ConfigError, match=r"enable_segment_wise_ppo is on, but sample \d \(group \d\) has no weight_versions"):
            await executor.wait(1)


async def test_a_broken_data_source_does_not_hang(autojump_clock: Clock) -> None:
    class Broken(DataBuffer):
        def get_prompts(self, n: int) -> tuple[Prompt, ...]:
            raise OSError("no disk")

    executor = create_workflow_executor(Broken(["a"]), RolloutConfig(batch_size=1, generate_fn=Script()), AsyncConfig())
    with pytest.raises(OSError, match="no disk"):
        async with executor:
            await executor.wait(1)


# rollouts that do not end


async def test_a_rollout_that_takes_too_long_is_aborted_and_goes_on_from_its_tokens(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=lambda tokens, seed: 1.0)
    asynchronous = AsyncConfig(max_staleness=0, rollout_timeout_s=6.5, retry_delay_s=0.0)
    async with make_engine_executor(tokenizer, engine, asynchronous, batch_size=1, n_samples_per_prompt=1) as executor:
        batch = await executor.generate_batch()
        requests = [call for call in engine.calls if call.method == "generate"]
        assert len(requests) == 2
        assert requests[1].arguments["prompt_tokens"][-6:] == (5,) * 6, "what was there is continued"
        assert requests[1].arguments["params"].max_tokens == 6
        assert batch.metadata["num_groups_retried"] == 1


async def test_a_rollout_that_never_ends_is_an_error_and_its_tokens_are_kept(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 100, seconds_per_token=1.0)
    asynchronous = AsyncConfig(max_staleness=0, rollout_timeout_s=6.5, max_attempts=2, retry_delay_s=0.0)
    executor = make_engine_executor(tokenizer, engine, asynchronous, max_tokens=100, batch_size=1, n_samples_per_prompt=1)
    async with executor:
        with pytest.raises(GenerationError, match=r"prompt 0 failed in 2 attempts.*not end within rollout_timeout_s \(6.5 s\).*are kept"):
            await executor.generate_batch()
        (kept,) = executor.resident_samples
        assert sum(kept.loss_mask) == 12
        assert kept.status is Status.ABORTED


async def test_what_a_nursery_of_the_user_raises_while_it_is_cancelled_is_the_failure_of_that_rollout_alone(autojump_clock):
    script = Script()
    attempts = 0

    async def raises_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("the cleanup failed")

    async def generate(prompt: Prompt, n: int) -> Group:
        nonlocal attempts
        attempts += prompt.index == 0
        if prompt.index == 0 and attempts == 1:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(raises_when_cancelled)
                nursery.start_soon(trio.sleep_forever)
        return await script(prompt, n)

    asynchronous = AsyncConfig(max_staleness=0, rollout_timeout_s=6.5, retry_delay_s=0.0)
    async with make_executor(generate, asynchronous) as executor:
        assert sorted(indices(await executor.wait(2))) == [0, 1]
    assert attempts == 2


async def test_a_judge_that_thinks_for_longer_than_a_rollout_may_take_is_asked_once(tokenizer: Any, autojump_clock: Clock) -> None:
    judged: list[int] = []

    async def judge(sample: Sample) -> float:
        judged.append(sample.index)
        await trio.sleep(40.0)
        return 1.0

    engine = FakeEngine(lambda tokens, seed: [5, 1], seconds_per_token=1.0)
    asynchronous = AsyncConfig(max_staleness=0, rollout_timeout_s=20.0)
    rewards: dict[str, Any] = {"reward_fn": judge, "reward": RewardConfig(timeout_s=60.0)}
    async with make_engine_executor(tokenizer, engine, asynchronous, batch_size=2, n_samples_per_prompt=1, **rewards) as executor:
        batch = await executor.generate_batch()
    assert sorted(judged) == [0, 1]
    assert batch.metadata["num_groups_retried"] == batch.metadata["num_groups_cut"] == 0


async def test_fresh_samples_have_their_place_for_proximal_log_probs_where_the_switch_is_on(tokenizer: Any, autojump_clock: Clock) -> None:
    for switch in (True, False):
        asynchronous = AsyncConfig(max_staleness=1, enable_segment_wise_ppo=switch)
        engine = FakeEngine(lambda tokens, seed: [5, 1], seconds_per_token=1.0)
        async with make_engine_executor(tokenizer, engine, asynchronous, batch_size=2, segment_log_probs=switch) as executor:
            samples = (await executor.generate_batch()).samples
        assert [sample.segment_log_probs == sample.rollout_log_probs for sample in samples] == [switch] * len(samples)
        assert [sample.segment_versions for sample in samples] == [(-1,) * len(s.tokens) if switch else None for s in samples]


async def test_a_rollout_that_cannot_be_told_to_stop_is_cancelled(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 1000.0 if len(script.calls) == 1 else 1.0)
    async with make_executor(script, AsyncConfig(rollout_timeout_s=5.0, retry_delay_s=0.0, max_concurrent_rollouts=1)) as executor:
        assert indices(await executor.wait(1)) == [0]
        assert trio.current_time() == 5.0 + 1.0 + 1.0  # timeout, grace_s, the second attempt


# interruption


async def test_interrupted_rollouts_go_on_from_their_tokens_under_the_new_weights(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=1.0)
    async with make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=1), batch_size=1, n_samples_per_prompt=1) as executor:
        await trio.sleep(4.5)
        await executor.interrupt()
        assert trio.current_time() == 4.5
        assert engine.pending_requests == ()
        assert [int(sum(sample.loss_mask)) for sample in executor.resident_samples] == [4, 4]
        await trio.sleep(100)
        assert engine.pending_requests == (), "nothing starts before resume()"
        engine.weight_version = 1
        executor.set_version(1)
        executor.resume()
        (group,) = await executor.wait(1)
        assert (group[0].weight_versions or ())[-12:] == (0,) * 4 + (1,) * 8
        check_conserved(executor, 1)


async def test_what_is_there_can_be_taken_during_an_interruption(autojump_clock: Clock) -> None:
    async with make_executor(Script(seconds=lambda index: 1.0 + 8.0 * (index > 1))) as executor:
        await trio.sleep(2)
        await executor.interrupt()
        assert trio.current_time() == 3.0, "what does not listen is cancelled after grace_s"
        assert indices(await executor.wait(2)) == [0, 1]
        with pytest.raises(GenerationTimeout, match="nothing may start before resume"):
            await executor.wait(1, timeout_s=5)


async def test_unfinished_tokens_that_are_too_old_are_not_continued(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=1.0)
    async with make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=1), batch_size=1, n_samples_per_prompt=1) as executor:
        await trio.sleep(4.5)
        await executor.interrupt()
        engine.weight_version = 2
        executor.set_version(2)
        executor.resume()
        batch = await executor.generate_batch()
        assert set((batch.samples[0].weight_versions or ())[-10:]) == {2}
        assert batch.metadata["num_groups_purged"] == 2
        assert all(call.arguments["prompt_tokens"][-1] != 5 for call in engine.calls if call.method == "generate")


async def test_a_rollout_of_several_requests_is_told_again(autojump_clock: Clock) -> None:
    """An abort ends one request of it, and the next one begins behind the abort."""
    engine = FakeEngine(lambda tokens, seed: [5] * 99, seconds_per_token=1.0)

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        for turn in range(3):
            await engine.generate([7], SamplingParams(max_tokens=99), request_id=f"{prompt.index}-{turn}")
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.ABORTED),) * n

    async with make_executor(generate_fn, engines=[engine], grace_s=100.0) as executor:
        await trio.sleep(1)
        await executor.interrupt()
        assert trio.current_time() < 3.0
        assert len(executor.resident_samples) == 4


async def test_samples_without_versions_keep_their_age_when_they_go_on(autojump_clock: Clock) -> None:
    engine, calls = FakeEngine(lambda tokens, seed: [5] * 3, seconds_per_token=1.0), []

    async def generate_fn(prompt: Prompt, n: int, partial: Group = ()) -> Group:
        calls.append((prompt.index, len(partial)))
        completion = await engine.generate([7], SamplingParams(), request_id=str(prompt.index))
        status = Status.ABORTED if completion.finish_reason == "abort" else Status.COMPLETED
        return (Sample(tokens=(1,) * len(calls), loss_mask=(1.0,) * len(calls), status=status),) * n

    asynchronous = AsyncConfig(max_staleness=1, on_stale="drop", queue_size=9)
    async with make_executor(generate_fn, asynchronous, batch_size=1, engines=[engine]) as executor:
        await trio.sleep(1.5)
        await executor.interrupt()
        state = copy_state(executor.state_dict())
    for version, continued in ((1, [(0, 1), (1, 1)]), (2, [])):
        calls.clear()
        executor.load_state_dict(state)
        executor.set_version(version)
        async with executor:
            await executor.wait(1)
        assert sorted(call for call in calls if call[0] < 2) == continued
    executor.load_state_dict(state)
    executor.set_version(1)
    async with executor:
        await trio.sleep(10)
        executor.set_version(2)
        assert indices(await executor.wait(1)) == [2], "0 and 1 have tokens of version 0"


async def test_an_engine_that_is_dead_does_not_keep_an_interruption_from_ending(autojump_clock: Clock) -> None:
    class Dead(FakeEngine):
        async def abort(self, request_ids: Any = None) -> None:
            raise EngineError("connection refused")

    async with make_executor(Script(seconds=lambda index: 100.0), engines=[Dead()]) as executor:
        await trio.sleep(1)
        await executor.interrupt()
        assert trio.current_time() == 2.0
        check_conserved(executor, 0)


async def test_an_engine_that_cannot_abort_one_rollout_does_not_end_the_run(
    tokenizer: Any, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(FakeEngine):
        async def abort(self, request_ids: Any = None) -> None:
            raise OSError("no route to host")

    engine = Deaf(lambda tokens, seed: [5] * (99 if len(engine.calls) < 3 else 1), seconds_per_token=1.0)
    asynchronous = AsyncConfig(rollout_timeout_s=5.0, max_concurrent_rollouts=2)
    with pytest.raises(KeyError, match="own") as caught:
        async with make_engine_executor(tokenizer, engine, asynchronous, n_samples_per_prompt=1, max_tokens=99) as executor:
            assert indices(await executor.wait(2)) == [0, 1]
            await trio.sleep(0.5)
            raise KeyError("own")
    assert "an engine could not be told to abort" in caplog.text
    assert "rollouts could not be stopped: OSError('no route to host')" in caught.value.__notes__


async def test_a_clean_stop_keeps_what_was_generated(tokenizer: Any, autojump_clock: Clock) -> None:
    for error in (None, KeyError("own")):
        engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=1.0)
        executor = make_engine_executor(tokenizer, engine, AsyncConfig())
        try:
            async with executor:
                await trio.sleep(4.5)
                if error is not None:
                    raise error
        except KeyError as caught:
            assert caught is error
        assert engine.pending_requests == ()
        assert [int(sum(sample.loss_mask)) for sample in executor.resident_samples] == [4] * 8
        check_conserved(executor, 0)


async def test_cancelling_the_block_loses_nothing(autojump_clock: Clock) -> None:
    executor = make_executor(Script())
    with trio.move_on_after(0.5):
        async with executor:
            await trio.sleep(100)
    assert trio.current_time() == 0.5
    check_conserved(executor, 0)
    assert executor.get_stats().enqueued == 4


async def test_only_running_rollouts_make_an_engine_busy(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=0)) as executor:
        first = await executor.generate_batch()
        assert first.metadata["engine_idle_s"] == 0.0
        await trio.sleep(7)
        script.version = 1
        executor.set_version(1)
        assert (await executor.generate_batch()).metadata["engine_idle_s"] == 7.0


# residents


async def test_residents_can_be_edited_at_their_places(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * (2 if seed is not None and seed % 2 else 9) + [1], seconds_per_token=1.0)
    async with make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=2), n_samples_per_prompt=1) as executor:
        await trio.sleep(4.5)
        await executor.interrupt()
        seen: list[Sample] = []

        async def mark(samples: tuple[Sample, ...]) -> list[Sample]:
            seen.extend(samples)
            await trio.sleep(3)
            return [replace(sample, metadata={**sample.metadata, "marked": sample.index}) for sample in samples]

        before = executor.resident_samples
        assert {sample.status for sample in before} == {Status.COMPLETED, Status.ABORTED}
        await executor.edit_residents(mark)
        assert tuple(seen) == before
        after = executor.resident_samples
        assert [sample.metadata["marked"] for sample in after] == [sample.index for sample in before]
        assert [replace(sample, metadata={k: v for k, v in sample.metadata.items() if k != "marked"}) for sample in after] == list(before)
        executor.resume()
        for group in await executor.wait(6):
            assert group[0].metadata["marked"] == group[0].index, "also those that went on"


async def test_rollouts_go_on_during_an_edit_and_nothing_is_handed_out(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 1.0 + index)
    async with make_executor(script, AsyncConfig(max_staleness=3)) as executor:
        await trio.sleep(2.5)

        async def slow(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            assert [sample.group_index for sample in samples] == [0, 1]
            await trio.sleep(3)
            return tuple(replace(sample, reward=9.0) for sample in samples)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.edit_residents, slow)
            await trio.sleep(0.1)
            groups = await executor.wait(2)
            assert trio.current_time() == 5.5
            assert [group[0].reward for group in groups] == [9.0, 9.0]
        assert indices(await executor.wait(2)) == [2, 3]


async def test_an_edit_that_fails_or_returns_others_changes_nothing(autojump_clock: Clock) -> None:
    async with make_executor(Script()) as executor:
        await trio.sleep(1.5)
        before = executor.resident_samples

        async def fail(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            raise ValueError("no")

        async def reverse(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            return samples[::-1]

        async def lose(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            return samples[1:]

        edits: list[tuple[Callable[[tuple[Sample, ...]], Awaitable[Sequence[Sample]]], type[Exception]]] = [
            (fail, ValueError),
            (reverse, GenerationError),
            (lose, GenerationError),
        ]
        for edit, error in edits:
            with pytest.raises(error):
                await executor.edit_residents(edit)
            assert executor.resident_samples == before
        assert len(await executor.wait(4)) == 4


# resume


def copy_state(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("order", ["finished", "submitted"])
async def test_a_resumed_run_goes_on_as_it_would_have(tokenizer: Any, autojump_clock: Clock, order: Any) -> None:
    def make() -> tuple[FakeEngine, WorkflowExecutor]:
        engine = FakeEngine(seconds_per_token=ragged_delay)
        return engine, make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=2, order=order), batch_size=3)

    async def run(executor: WorkflowExecutor, engine: FakeEngine, versions: range) -> list[tuple[Sample, ...]]:
        batches = []
        for version in versions:
            batches.append((await executor.generate_batch()).samples)
            await trio.sleep(6.25)  # no token comes at this moment
            await executor.interrupt()
            engine.weight_version = version + 1
            executor.set_version(version + 1)
            executor.resume()
        return batches

    engine, executor = make()
    async with executor:
        await run(executor, engine, range(3))
        await executor.interrupt()
        state = copy_state(executor.state_dict())
        executor.resume()
        expected = await run(executor, engine, range(3, 7))
    engine, resumed = make()
    engine.weight_version = 3
    resumed.load_state_dict(state)
    assert resumed.version == 3
    assert resumed.state_dict() == state
    async with resumed:
        assert await run(resumed, engine, range(3, 7)) == expected


async def test_a_state_taken_at_any_moment_counts_what_runs_as_waiting(autojump_clock: Clock) -> None:
    async with make_executor(Script(seconds=lambda index: 1.0 + index)) as executor:
        await trio.sleep(2.5)
        state = copy_state(executor.state_dict())
        assert [group["prompt"]["index"] for group in state["pending"]] == [2, 3]
        assert [entry["prompt"]["index"] for entry in state["finished"]["ready"]] == [0, 1]
        with pytest.raises(AssertionError, match="while 2 rollouts run"):
            executor.load_state_dict(state)
    resumed = make_executor(Script())
    resumed.load_state_dict(state)
    async with resumed:
        assert indices(await resumed.wait(4)) == [0, 1, 2, 3]
        check_conserved(resumed, 4)


async def test_states_that_do_not_fit_are_refused(autojump_clock: Clock) -> None:
    state = make_executor(Script()).state_dict()
    with pytest.raises(CheckpointError, match=r"lacks \['finished'\]"):
        make_executor(Script()).load_state_dict({key: value for key, value in state.items() if key != "finished"})
    with pytest.raises(CheckpointError, match="n_samples_per_prompt 1, but the config has 4"):
        make_executor(Script(), n_samples_per_prompt=4).load_state_dict(state)


async def test_the_block_can_be_opened_again(autojump_clock: Clock) -> None:
    executor = make_executor(Script())
    async with executor:
        assert indices(await executor.wait(2)) == [0, 1]
    async with executor:
        assert indices(await executor.wait(2)) == [2, 3]
    with pytest.raises(AssertionError, match="block is not open"):
        await executor.wait(1)


class CountedQueue(LocalRolloutQueue):
    """Counts what goes in."""

    num_put = 0

    def put_nowait(self, result: TimedResult) -> None:
        super().put_nowait(result)
        self.num_put += 1


class NewestFirst(LocalRolloutCache):
    """A cache of another order: by falling index."""

    def take_first_n(self, n: int) -> tuple[TimedResult, ...]:
        results = sorted(super().take_first_n(self.size()), key=lambda result: -result.data.prompt.index)
        for result in results[n:]:
            self.add(result)
        return tuple(results[:n])


class OnlyEven(StandardPPOStrategy):
    """Refuses every other prompt when its rollout finishes."""

    def should_filter_before_enqueue(self) -> bool:
        return True

    def should_enqueue_sample(self, rollout: FinishedRollout, current_version: int) -> bool:
        return rollout.prompt.index % 2 == 0


async def test_the_parts_can_be_replaced(autojump_clock: Clock) -> None:
    queue, cache, strategy = CountedQueue(5), NewestFirst(), OnlyEven()
    asynchronous = AsyncConfig(on_stale="drop")
    async with make_executor(Script(), asynchronous, queue=queue, cache=cache, strategy=strategy) as executor:
        assert (executor.batch_size, executor.version, executor.config.batch_size) == (2, 0, 2)
        assert executor.asynchronous == asynchronous
        await trio.sleep(100)
        assert (queue.num_put, queue.qsize(), cache.size()) == (4, 4, 0)
        assert indices(await executor.wait(1)) == [6], "of the prompts 0, 2, 4 and 6 the cache's own first"
        assert (queue.qsize(), cache.size()) == (0, 3)
        assert indices(await executor.wait(3)) == [4, 2, 0]


async def test_a_manager_of_ones_own_says_how_many_may_start(autojump_clock: Clock) -> None:
    script = Script()
    config = RolloutConfig(batch_size=2, generate_fn=script)
    async with WorkflowExecutor(make_buffer(), config, AsyncConfig(), manager=StalenessManager(1, 3, 0)) as executor:
        await trio.sleep(1.5)
        assert script.calls == [0, 1], "one after another"
        await trio.sleep(100)
        assert script.calls == [0, 1, 2], "three under one version"
        assert executor.get_stats().accepted == 3


# engines that are dead, and requests that they refuse


class Dying(FakeEngine):
    """While `error` is set, requests raise it before their first checkpoint, and so does the question for its version if it is dead."""

    def __init__(self, name: str = "engine") -> None:
        super().__init__(lambda tokens, seed: [5] * 3 + [1], seconds_per_token=1.0, name=name)
        self.error: EngineError | None = None
        self.error_of_one: EngineError | None = None  # raised for prompt 0 alone
        self.dead = False

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Any:
        if self.error is not None:
            raise copy.copy(self.error)
        if self.error_of_one is not None and int((request_id or "1").split("-")[0]) == 0:
            raise copy.copy(self.error_of_one)
        return await super().generate(prompt_tokens, params, request_id=request_id)

    async def get_weight_version(self) -> int:
        if self.dead:
            raise EngineError("connection refused")
        return await super().get_weight_version()


OUTAGES: list[dict[str, Any]] = [{"order": "finished"}, {"order": "submitted"}, {"max_staleness": 0}]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("more", OUTAGES)
@pytest.mark.parametrize(
    "error", [EngineRequestError("too long: shorten the prompt"), EngineStatusError(500, "http://x", "boom"), EngineTimeout("too slow")]
)
async def test_a_prompt_that_engines_cannot_answer_ends_the_run_with_its_error(
    tokenizer: Any, autojump_clock: Clock, n: int, more: dict[str, Any], error: EngineError
) -> None:
    engine = Dying()
    engine.error_of_one = error
    changes = {"n_samples_per_prompt": n, "batch_size": 1 if "max_staleness" in more else 2}  # 1: nothing else ends
    async with make_engine_executor(tokenizer, engine, AsyncConfig(**more), **changes) as executor:
        with pytest.raises(GenerationError, match=f"prompt 0 failed in 3 attempts, the last time with {type(error).__name__}: ") as caught:
            while True:
                await executor.wait(2, timeout_s=500)
                executor.set_version(executor.version + 1)
                engine.weight_version += 1
        assert str(error) in str(caught.value)
        assert trio.current_time() < 60


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("more", OUTAGES)
async def test_a_prompt_that_engines_cannot_answer_can_be_dropped(
    tokenizer: Any, autojump_clock: Clock, n: int, more: dict[str, Any]
) -> None:
    engine = Dying()
    engine.error_of_one = EngineRequestError("too long")
    asynchronous = AsyncConfig(on_failure="drop", **more)
    async with make_engine_executor(tokenizer, engine, asynchronous, n_samples_per_prompt=n) as executor:
        assert indices(await executor.wait(2, timeout_s=100)) == [1, 2]


@pytest.mark.parametrize(
    ("n", "policy"), [(1, "retry"), (4, "drop"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "retry"), (1, "drop")))]
)
@pytest.mark.parametrize("more", OUTAGES)
async def test_dead_engines_cost_no_prompt(tokenizer: Any, autojump_clock: Clock, n: int, more: dict[str, Any], policy: Any) -> None:
    engine = Dying()
    asynchronous = AsyncConfig(on_failure=policy, patience_s=300.0, **more)
    async with make_engine_executor(tokenizer, engine, asynchronous, n_samples_per_prompt=n) as executor:
        assert indices(await executor.wait(2)) == [0, 1]
        engine.error, engine.dead = EngineError("connection refused"), True
        executor.set_version(1)
        for _ in range(2):
            with pytest.raises(
                GenerationTimeout, match=r"300 s in which no rollout ended \(patience_s.*with EngineError: connection refused"
            ):
                await executor.wait(4)
        engine.error, engine.dead = None, False
        engine.weight_version = 1
        assert indices(await executor.wait(2)) == [2, 3]
        check_conserved(executor, 4)


async def test_engines_that_die_while_rewards_are_asked_for_cost_no_prompt(tokenizer: Any, autojump_clock: Clock) -> None:
    async def judge(sample: Sample) -> float:
        await trio.sleep(5.0 * (1 + sample.group_index))
        return 1.0

    engine = Dying()
    asynchronous = AsyncConfig(patience_s=100.0, max_attempts=2)
    async with make_engine_executor(tokenizer, engine, asynchronous, n_samples_per_prompt=1, reward_fn=judge) as executor:
        await trio.sleep(5)
        engine.error, engine.dead = EngineError("connection refused"), True
        executor.set_version(1)
        assert indices(await executor.wait(4)) == [0, 1, 2, 3], "others come to their end"
        with pytest.raises(GenerationTimeout, match="connection refused"):
            await executor.wait(1)
        check_conserved(executor, 4)


async def test_one_dead_engine_of_two_is_named_and_its_prompts_wait_for_it(tokenizer: Any, autojump_clock: Clock, caplog: Any) -> None:
    engines = [Dying("left"), Dying("right")]
    engines[1].error, engines[1].dead = EngineError("connection refused"), True
    generate_fn = create_generate_fn(engines, tokenizer, SamplingParams(max_tokens=12))
    async with make_executor(generate_fn, AsyncConfig(max_staleness=4), engines=engines) as executor:
        assert [index % 2 for index in indices(await executor.wait(4))] == [0] * 4
        await trio.sleep(100)
        (warning,) = (record.message for record in caplog.records if "do not answer" in record.message)
        assert "right (number 1): connection refused" in warning
        engines[1].error, engines[1].dead = None, False
        assert 1 in indices(await executor.wait(6))


async def test_an_engine_that_says_nothing_at_all_is_dead(tokenizer: Any, autojump_clock: Clock) -> None:
    class Mute(Dying):
        async def get_weight_version(self) -> int:
            await trio.sleep_forever()
            raise AssertionError

    engine = Mute()
    engine.error = EngineError("no answer")
    async with make_engine_executor(tokenizer, engine, AsyncConfig(patience_s=100.0), n_samples_per_prompt=1) as executor:
        with pytest.raises(GenerationTimeout, match="no answer"):
            await executor.wait(1)
        await executor.interrupt()
        check_conserved(executor, 0)


async def test_errors_of_one_class_at_one_moment_are_one_error(autojump_clock: Clock) -> None:
    async def fail(number: int) -> None:
        raise KeyError(number)

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(fail, number)
        raise AssertionError

    async with make_executor(generate_fn, AsyncConfig(on_failure="raise")) as executor:
        with pytest.raises(KeyError) as caught:
            await executor.wait(1)
        assert "and 2 more KeyError at the same moment" in caught.value.__notes__
        assert any("while working on prompt" in note for note in caught.value.__notes__)


# prompts that become too old


async def test_a_crash_and_two_stale_attempts_are_counted_apart(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(
        seconds=lambda index: 10.0 if index == 0 and script.calls.count(0) <= 3 else 1.0,
        error=lambda index, attempt: ValueError("boom") if index == 0 and attempt == 3 else None,
    )
    got: list[int] = []
    counts: dict[str, int] = {}
    async with make_executor(script, AsyncConfig(max_staleness=1, max_attempts=2)) as executor:
        for version in range(1, 16):
            batch = await executor.generate_batch()
            got += [sample.group_index for sample in batch.samples]
            counts = {name: counts.get(name, 0) + n for name, n in batch.metadata.items() if name.startswith("num_groups_")}
            await trio.sleep(2)
            script.version = version
            executor.set_version(version)
    assert 0 in got, "no prompt is lost for its age"
    assert (counts["num_groups_given_up"], counts["num_groups_purged"], counts["num_groups_retried"]) == (0, 3, 4)
    caplog.clear()
    script = Script(seconds=lambda index: 10.0 if index == 0 else 1.0)
    num_given_up = 0
    async with make_executor(script, AsyncConfig(max_staleness=1, max_stale_attempts=2)) as executor:
        for version in range(1, 12):
            num_given_up += (await executor.generate_batch()).metadata["num_groups_given_up"]
            await trio.sleep(2)
            script.version = version
            executor.set_version(version)
    assert num_given_up == 1
    assert "prompt 0 is given up" in caplog.text


async def test_rollouts_that_are_too_old_already_do_not_run_to_their_end(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 99 + [1], seconds_per_token=1.0)
    changes: dict[str, Any] = {"max_tokens": 100, "batch_size": 1, "n_samples_per_prompt": 1}
    async with make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=1), **changes) as executor:
        await trio.sleep(4.5)
        for version in (1, 2):
            engine.weight_version = version
            executor.set_version(version)
            await trio.testing.wait_all_tasks_blocked()
        started = trio.current_time()
        batch = await executor.generate_batch()
        assert trio.current_time() == started + 100
        assert batch.metadata["num_groups_purged"] == batch.metadata["num_groups_retried"] == 2
        check_conserved(executor, 1)


async def test_what_waited_in_its_engine_is_as_old_as_its_first_token(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=lambda tokens, seed: 2.0)
    changes: dict[str, Any] = {"batch_size": 1, "n_samples_per_prompt": 1}
    async with make_engine_executor(tokenizer, engine, AsyncConfig(max_staleness=1), **changes) as executor:
        await trio.sleep(1)
        engine.weight_version = 1
        executor.set_version(1)
        await trio.sleep(10)
        engine.weight_version = 2
        executor.set_version(2)
        batch = await executor.generate_batch()
        assert batch.metadata["num_groups_purged"] == 0, "it was stopped, and went on"
        assert set((batch.samples[0].weight_versions or ())[-10:]) == {1, 2}


async def test_a_reward_of_what_is_too_old_is_not_waited_for(autojump_clock: Clock) -> None:
    async def reward(sample: Sample) -> float:
        await trio.sleep(1.0 if (sample.weight_versions or ())[1] else 1000.0)
        return 1.0

    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=0), reward_fn=reward) as executor:
        await trio.sleep(2)
        script.version = 1
        executor.set_version(1)
        assert indices(await executor.wait(2)) == [0, 1]
        assert trio.current_time() == 4.0


async def test_engines_may_be_ahead_of_what_the_executor_knows(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=1, on_stale="drop", max_concurrent_rollouts=2)) as executor:
        await trio.sleep(0.5)
        script.version = 1  # the weights are there
        await executor.wait(2)
        await trio.sleep(2)  # what ends now was begun before set_version, with tokens of version 1
        executor.set_version(1)
        executor.set_version(2)
        batch = await executor.generate_batch()
        assert (batch.metadata["num_groups_purged"], batch.metadata["staleness_max"]) == (0, 1.0)


async def test_in_strict_order_a_group_that_is_begun_anew_comes_before_those_behind_it(autojump_clock: Clock) -> None:
    class DropOnce(StandardPPOStrategy):
        dropped = False

        def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
            if self.dropped or not cache.size():
                return ()
            self.dropped = True
            return take_out(cache, lambda rollout: rollout.prompt.index == 0)

    async with make_executor(Script(), AsyncConfig(order="submitted"), strategy=DropOnce()) as executor:
        await trio.sleep(5)
        assert indices(await executor.wait(4)) == [0, 1, 2, 3]


# a queue that is smaller than what is waited for


@pytest.mark.parametrize("when_full", ["wait", "raise"])
@pytest.mark.parametrize("order", ["finished", "submitted"])
async def test_a_full_queue_is_emptied_while_somebody_waits(autojump_clock: Clock, when_full: Any, order: Any) -> None:
    asynchronous = AsyncConfig(max_staleness=5, queue_size=2, when_queue_full=when_full, order=order, patience_s=100.0)
    async with make_executor(Script(), asynchronous) as executor:
        assert indices(await executor.wait(12)) == list(range(12))
        assert trio.current_time() == 1.0


def test_a_queue_that_is_sure_to_overflow_is_warned_of(caplog: pytest.LogCaptureFixture):
    make_executor(Script(), AsyncConfig(max_staleness=3, queue_size=6))
    make_executor(Script(), AsyncConfig(max_staleness=3, queue_size=2, when_queue_full="wait"))
    assert not caplog.records
    make_executor(Script(), AsyncConfig(max_staleness=3, queue_size=5))
    assert "holds 5 groups, but up to 6 may finish while the trainer works" in caplog.text


# patience


async def test_patience_counts_from_the_last_rollout_that_ended(autojump_clock: Clock) -> None:
    script = Script(seconds=lambda index: 8.0 * (index + 1) if index < 3 else 1000.0)
    async with make_executor(script, AsyncConfig(patience_s=10.0), batch_size=3) as executor:
        assert indices(await executor.wait(3)) == [0, 1, 2]
        assert trio.current_time() == 24.0
        with pytest.raises(GenerationTimeout, match=r"after 10 s in which no rollout ended \(patience_s; rl.asynchronous.patience_s\)"):
            await executor.wait(1)
        assert trio.current_time() == 34.0


async def test_what_is_there_is_handed_out_without_any_time(autojump_clock: Clock) -> None:
    async with make_executor(Script()) as executor:
        await trio.sleep(2)
        assert indices(await executor.wait(4, timeout_s=0)) == [0, 1, 2, 3]
        with pytest.raises(GenerationTimeout, match="0 of the 1 groups"):
            await executor.wait(1, timeout_s=0)


async def test_without_staleness_never_more_than_a_batch_is_under_way(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=0), batches_per_version=3) as executor:
        for number in range(1, 4):
            await trio.sleep(50)
            assert len(script.calls) == 2 * (number - 1), "what is not waited for is not begun beside an evaluation"
            await executor.wait(2)


# interruption while rewards are asked for, and of what does not obey


async def test_an_interruption_leaves_alone_what_is_being_scored(autojump_clock: Clock) -> None:
    calls: list[int] = []

    async def judge(sample: Sample) -> float:
        calls.append(sample.group_index)
        await trio.sleep(20)
        return 5.0

    async def mark(samples: tuple[Sample, ...]) -> list[Sample]:
        await trio.sleep(during)
        return [replace(s, metadata={**s.metadata, "marked": True}, segment_log_probs=(0.0, -1.0), recompute_version=0) for s in samples]

    for during in (1.0, 50.0):  # the judge is through behind the edit, or in it
        calls.clear()
        script = Script()
        async with make_executor(script, reward_fn=judge, grace_s=5.0, engines=[FakeEngine()]) as executor:
            await trio.sleep(2)
            started = trio.current_time()
            await executor.interrupt()
            assert trio.current_time() == started
            state = copy_state(executor.state_dict())
            assert [sample["tokens"] for group in state["pending"] for sample in group["samples"]] == [[1, 2]] * 4
            assert [sample.group_index for sample in executor.resident_samples] == [0, 1, 2, 3]
            await executor.edit_residents(mark)
            executor.resume()
            groups = await executor.wait(4)
            assert indices(groups) == [0, 1, 2, 3]
            for (sample,) in groups:
                assert (sample.reward, sample.metadata.get("marked"), sample.segment_log_probs) == (5.0, True, (0.0, -1.0))
            assert trio.current_time() == started + max(19.0, during)
        assert sorted(calls) == [0, 1, 2, 3], "no reward is asked for twice"
        assert sorted(script.calls) == [0, 1, 2, 3]


async def test_what_is_cancelled_is_counted_and_warned_of(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with make_executor(Script(seconds=lambda index: 10.0)) as executor:
        await trio.sleep(1)
        await executor.interrupt()
        executor.resume()
        assert (await executor.generate_batch()).metadata["num_groups_cut"] == 4
        await executor.interrupt()
    assert [record.message for record in caplog.records if "pass the executor the engines=" in record.message].__len__() == 1


@pytest.mark.parametrize("more", [{"in_flight": "interrupt"}, {"enable_segment_wise_ppo": True}])
def test_interruptions_need_engines_that_can_be_told(more: dict[str, Any]):
    with pytest.raises(ConfigError, match="was given no engines that it could tell: pass engines="):
        make_executor(Script(), AsyncConfig(**more))


async def test_a_thread_that_does_not_stop_holds_nothing_up() -> None:
    release = threading.Event()

    def generate_fn(prompt: Prompt, n: int) -> Group:
        release.wait(30)
        return (Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED),) * n

    try:
        with trio.fail_after(20):
            async with make_executor(generate_fn, grace_s=0.05) as executor:
                await trio.testing.wait_all_tasks_blocked(0.01)
                await executor.interrupt()
                executor.resume()
                with pytest.raises(GenerationTimeout):
                    await executor.wait(1, timeout_s=0.05)
        check_conserved(executor, 0)
        assert not release.is_set()
    finally:
        release.set()


async def test_a_late_turn_of_an_episode_is_told_to_stop(autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * (99 if tokens[-1] == 8 else 1), seconds_per_token=1.0)

    async def episode(one: WorkflowEngine, data: Any) -> Sample:
        for token in (7, 7, 8):
            await one.generate([token], SamplingParams(max_tokens=99))
        return Sample(tokens=(1,), loss_mask=(1.0,), status=Status.COMPLETED)

    generate_fn = create_workflow_generate_fn(episode, [engine])
    asynchronous = AsyncConfig(rollout_timeout_s=5.0, max_concurrent_rollouts=2)
    async with make_executor(generate_fn, asynchronous, engines=[engine], grace_s=50.0) as executor:
        assert indices(await executor.wait(2)) == [0, 1]
        assert trio.current_time() == 5.0


# edits


async def test_an_edit_does_not_reach_what_was_generated_anew_meanwhile(autojump_clock: Clock) -> None:
    script = Script()
    async with make_executor(script, AsyncConfig(max_staleness=1, queue_size=20)) as executor:
        await trio.sleep(2)
        before = executor.resident_samples
        assert {sample.weight_versions for sample in before} == {(-1, 0)}

        async def slow(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            await trio.sleep(10)
            return samples

        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.edit_residents, slow)
            await trio.sleep(0.1)
            script.version = 2
            executor.set_version(2)
            executor._collect()  # pyright: ignore[reportPrivateUsage]  # as a wait() does that was settling when the edit began
        assert {group[0].weight_versions for group in await executor.wait(2)} == {(-1, 2)}


async def test_an_edit_does_not_shorten_the_delay_of_a_retry(tokenizer: Any, autojump_clock: Clock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 9 + [1], seconds_per_token=1.0)
    asynchronous = AsyncConfig(max_staleness=0, rollout_timeout_s=6.5, retry_delay_s=100.0)
    async with make_engine_executor(tokenizer, engine, asynchronous, batch_size=1, n_samples_per_prompt=1) as executor:
        await trio.sleep(10)

        async def same(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            assert len(samples) == 1
            await trio.sleep(1)
            return samples

        await executor.edit_residents(same)
        await executor.wait(1)
        assert trio.current_time() == 6.5 + 100.0 + 6.0

"""Batches of whole groups, carry-over, abort and exact resume, in virtual time."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from executors import make_buffer
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig, RolloutConfig
from rollouts.data.filters import check_reward_nonzero_std, make_threshold_filter
from rollouts.errors import CheckpointError, ConfigError, DataError, GenerationError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.generation.sync_batches import RolloutManager
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, script_answer
from rollouts.types import Group, Prompt, RolloutBatch, Sample, SamplingParams, Status


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer()


async def reward_length(sample: Sample) -> float:
    return float(sum(sample.loss_mask))


def ragged_delay(prompt_tokens: tuple[int, ...], seed: int | None) -> float:
    return 0.5 + derive_seed(0 if seed is None else seed) % 5


def make_manager(tokenizer: Any, engine: FakeEngine, partial_samples: Sequence[Sample] = (), **changes: Any) -> AsyncRolloutManager:
    defaults: dict[str, Any] = {
        "batch_size": 3,
        "n_samples_per_prompt": 2,
        "generate_fn": create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=12)),
        "reward_fn": reward_length,
        "grace_s": 1.0,
    }
    return AsyncRolloutManager(make_buffer(), RolloutConfig(**(defaults | changes)), partial_samples, [engine])


def group_indices(batch: RolloutBatch) -> list[int]:
    return [sample.group_index for sample in batch.samples]


def check_batch(batch: RolloutBatch, batch_size: int, n: int) -> None:
    """Exactly batch_size whole groups, in order, of one prompt each."""
    assert len(batch.samples) == batch_size * n
    for position in range(0, len(batch.samples), n):
        group = batch.samples[position : position + n]
        assert {sample.group_index for sample in group} == {group[0].group_index}
        assert len({sample.prompt for sample in group}) == 1
        assert [sample.index for sample in group] == [group[0].group_index * n + k for k in range(n)]
    assert group_indices(batch) == sorted(group_indices(batch))
    assert all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in batch.samples)


# what a batch is


async def test_a_batch_is_rewarded_whole_groups_in_order(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=ragged_delay)
    async with make_manager(tokenizer, engine) as manager:
        first, second = await manager.generate_batch(), await manager.generate_batch()
    for batch in (first, second):
        check_batch(batch, 3, 2)
        assert batch.rewards == [float(length) for length in batch.response_lengths]
        assert all("ground_truth" in sample.metadata for sample in batch.samples)
    assert group_indices(first) + group_indices(second) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {key: first.metadata[key] for key in ("num_rounds", "num_groups_generated", "num_groups_carried_in", "filter_pass_rate")} == {
        "num_rounds": 1,
        "num_groups_generated": 3,
        "num_groups_carried_in": 0,
        "filter_pass_rate": 1.0,
    }


async def test_a_reward_function_of_the_call_replaces_the_configured_one(tokenizer: Any) -> None:
    async def reward_one(sample: Sample) -> float:
        return 1.0

    manager = make_manager(tokenizer, FakeEngine())
    assert (await manager.generate_batch(reward_one)).rewards == [1.0] * 6
    unrewarded = make_manager(tokenizer, FakeEngine(), reward_fn=None)
    assert all(sample.reward is None for sample in (await unrewarded.generate_batch()).samples)


async def test_sync_functions_run_beside_each_other_in_threads() -> None:
    barrier = threading.Barrier(60, timeout=60)  # more than trio's default of 40 threads

    def generate_fn(prompt: Prompt, n: int) -> list[Sample]:
        barrier.wait()
        return [Sample(prompt=prompt.content, tokens=(1, 2), loss_mask=(0.0, 1.0), status=Status.COMPLETED) for _ in range(n)]

    config = RolloutConfig(batch_size=60, n_samples_per_prompt=2, generate_fn=generate_fn, reward_fn=lambda sample: 0.5)
    batch = await AsyncRolloutManager(make_buffer(), config).generate_batch()
    check_batch(batch, 60, 2)
    assert batch.rewards == [0.5] * 120


async def test_a_missing_generate_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="generate_fn is None"):
        AsyncRolloutManager(make_buffer(), RolloutConfig(batch_size=1))


# over-sampling and carry-over


@pytest.mark.parametrize(("batch_size", "factor", "num_requested"), [(10, 1.0, 10), (10, 1.25, 13), (10, 2.0, 20), (50, 1.1, 55)])
async def test_the_number_of_groups_in_flight_is_the_batch_times_the_factor(
    tokenizer: Any, autojump_clock: trio.testing.MockClock, batch_size: int, factor: float, num_requested: int
) -> None:
    engine = FakeEngine(seconds_per_token=ragged_delay)
    manager = make_manager(tokenizer, engine, batch_size=batch_size, over_sampling_factor=factor)
    check_batch(await manager.generate_batch(), batch_size, 2)
    assert len({call.arguments["request_id"] for call in engine.calls if call.method == "generate"}) == 2 * num_requested


async def test_the_slow_are_stopped_and_continued_in_the_next_batch(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    slow_prompt = make_buffer().get_prompts(2)[1]
    slow_tokens = tuple(tokenizer(str(slow_prompt.content))["input_ids"])
    engine = FakeEngine(
        lambda tokens, seed: [5] * (4 if tokens == slow_tokens else 3) + [1],
        seconds_per_token=lambda tokens, seed: 1.5 if tokens == slow_tokens else 1.0,
    )
    manager = make_manager(tokenizer, engine, batch_size=2, over_sampling_factor=1.5)
    first = await manager.generate_batch()
    assert trio.current_time() == 4.0
    assert group_indices(first) == [0, 0, 2, 2]
    assert first.metadata["num_groups_partial"] == 1
    engine.weight_version = 1
    second = await manager.generate_batch()
    check_batch(second, 2, 2)
    assert group_indices(second) == [1, 1, 3, 3]
    await manager.generate_batch()
    continued = [call for call in engine.calls if call.method == "generate" and call.arguments["request_id"].startswith("000000000001")]
    assert len(continued) == 4, "each of the two samples was asked for once, stopped, and asked for once more"


async def test_groups_that_end_too_late_are_used_first(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5, 1]), seconds_per_token=1.0)
    manager = make_manager(tokenizer, engine, batch_size=2, over_sampling_factor=2.0)
    first = await manager.generate_batch()
    assert first.metadata["num_groups_carried_over"] == 2
    num_calls = len(engine.calls)
    second = await manager.generate_batch()
    assert len(engine.calls) == num_calls, "the batch was there already"
    assert (group_indices(first), group_indices(second)) == ([0, 0, 1, 1], [2, 2, 3, 3])
    assert second.metadata["num_groups_carried_in"] == 2
    assert second.rewards == [2.0] * 4


async def test_tokens_of_two_batches_carry_two_versions(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(
        lambda tokens, seed: [5] * 6,
        seconds_per_token=lambda tokens, seed: 1.0 if (seed or 0) % 2 else 2.0,
    )
    manager = make_manager(tokenizer, engine, batch_size=1, n_samples_per_prompt=1, over_sampling_factor=6.0)
    mixed: list[Sample] = []
    for version in range(12):
        engine.weight_version = version
        mixed.extend(s for s in (await manager.generate_batch()).samples if len(set(s.weight_versions or ())) > 2)
    assert mixed
    for sample in mixed:
        versions = [version for version in sample.weight_versions or () if version >= 0]
        assert versions == sorted(versions)


async def test_without_a_partial_parameter_stopped_groups_begin_anew(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=ragged_delay)
    inner = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=12))

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        return await inner(prompt, n)

    manager = make_manager(tokenizer, engine, over_sampling_factor=2.0, generate_fn=generate_fn)
    samples = [sample for _ in range(5) for sample in (await manager.generate_batch()).samples]
    assert len({sample.index for sample in samples}) == 30
    prompt_lengths = {len(tokenizer(f"{i}=")["input_ids"]) for i in range(7)}
    assert {len(call.arguments["prompt_tokens"]) for call in engine.calls if call.method == "generate"} <= prompt_lengths


@given(st.data())
def test_no_group_is_ever_split_mixed_lost_or_used_twice(data: st.DataObject) -> None:
    tokenizer = create_char_tokenizer()
    batch_size, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    factor = data.draw(st.sampled_from([1.0, 1.3, 2.0, 3.0]))
    salt = data.draw(st.integers(0, 1000))
    grace_s = data.draw(st.sampled_from([0.0, 1.5, 4.0]))
    refused = data.draw(st.frozensets(st.integers(0, 30), max_size=8))

    async def run() -> None:
        engine = FakeEngine(seconds_per_token=lambda tokens, seed: derive_seed(salt, seed or 0) % 4 + 0.5)
        manager = make_manager(
            tokenizer,
            engine,
            batch_size=batch_size,
            n_samples_per_prompt=n,
            over_sampling_factor=factor,
            grace_s=grace_s,
            max_filter_attempts=20,
            filter_fn=lambda group: group[0].group_index not in refused,
        )
        seen: list[int] = []
        for _ in range(4):
            batch = await manager.generate_batch()
            check_batch(batch, batch_size, n)
            seen.extend(sorted(set(group_indices(batch))))
        carried = {sample.group_index for sample in manager.partial_samples}
        pending = {item["prompt"]["index"] for item in manager.state_dict()["pending"]}
        assert len(set(seen)) == len(seen)
        assert not set(seen) & (carried | pending | refused)
        drawn = manager.state_dict()["buffer"]
        num_drawn = drawn["epoch_id"] * 7 + drawn["sample_offset"]
        assert set(seen) | carried | pending | {i for i in refused if i < num_drawn} == set(range(num_drawn))
        assert engine.pending_requests == ()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


# filters, drops and failures


async def test_rewards_come_before_the_filter_and_more_prompts_are_drawn(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    async def reward_by_group(sample: Sample) -> float:
        return float(sample.index % 2 if sample.group_index % 3 == 0 else 0)

    manager = make_manager(tokenizer, FakeEngine(), filter_fn=check_reward_nonzero_std, reward_fn=reward_by_group, max_filter_attempts=20)
    batch = await manager.generate_batch()
    assert group_indices(batch) == [0, 0, 3, 3, 6, 6]
    assert batch.metadata["num_groups_filtered"] == batch.metadata["num_groups_generated"] - 3
    assert batch.metadata["filter_pass_rate"] == 3 / batch.metadata["num_groups_generated"]
    assert batch.metadata["num_rounds"] > 1


async def test_a_filter_may_be_async_and_what_is_no_answer_is_an_error(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    async def odd_groups(group: Group) -> bool:
        await trio.sleep(0.1)
        return group[0].group_index % 2 == 1

    batch = await make_manager(tokenizer, FakeEngine(), filter_fn=odd_groups).generate_batch()
    assert group_indices(batch) == [1, 1, 3, 3, 5, 5]
    for mistake in (make_threshold_filter, lambda group: "no"):
        with pytest.raises(GenerationError, match=r"filter_fn .* returned .* for group 0, expected True or False"):
            await make_manager(tokenizer, FakeEngine(), filter_fn=mistake).generate_batch()


async def test_a_filter_that_passes_too_little_ends_with_its_name_and_loses_nothing(tokenizer: Any) -> None:
    passing = {1}

    def pass_some(group: Group) -> bool:
        return group[0].group_index in passing

    manager = make_manager(tokenizer, FakeEngine(), filter_fn=pass_some, max_filter_attempts=4)
    with pytest.raises(GenerationError) as caught:
        await manager.generate_batch()
    message = str(caught.value)
    assert "only 1 of the 3 groups" in message
    assert "filter_fn pass_some passed 1 of 9 groups (pass rate 0.111)" in message
    assert "in 4 rounds" in message
    passing.update(range(100))
    assert group_indices(await manager.generate_batch())[:2] == [1, 1], "the group that passed is used in the next batch"


async def test_groups_whose_reward_or_generation_failed_are_dropped_and_counted(tokenizer: Any) -> None:
    async def reward_some(sample: Sample) -> float:
        if sample.group_index == 1:
            raise ValueError("cannot parse")
        return 1.0

    inner = create_generate_fn([FakeEngine()], tokenizer, SamplingParams(max_tokens=12))

    async def generate_some(prompt: Prompt, n: int) -> Group:
        return (Sample(status=Status.FAILED),) * n if prompt.index == 2 else await inner(prompt, n)

    manager = make_manager(tokenizer, FakeEngine(), generate_fn=generate_some, reward_fn=reward_some, reward=RewardConfig(on_error="drop"))
    batch = await manager.generate_batch()
    assert group_indices(batch) == [0, 0, 3, 3, 4, 4]
    assert batch.metadata["num_groups_dropped"] == 2
    assert batch.metadata["filter_pass_rate"] == 1.0


async def test_an_error_is_raised_as_itself_and_the_groups_are_issued_again(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    broken = True
    inner = create_generate_fn([FakeEngine(seconds_per_token=ragged_delay)], tokenizer, SamplingParams(max_tokens=12))

    async def generate_fn(prompt: Prompt, n: int) -> Group:
        if broken and prompt.index == 1:
            raise LookupError("no such tool")
        return await inner(prompt, n)

    manager = make_manager(tokenizer, FakeEngine(), generate_fn=generate_fn)
    with pytest.raises(LookupError, match="no such tool") as caught:
        await manager.generate_batch()
    assert any("prompt 1" in note for note in caught.value.__notes__)
    broken = False
    batch = await manager.generate_batch()
    assert batch.samples == (await make_manager(tokenizer, FakeEngine(), generate_fn=inner).generate_batch()).samples


async def test_a_cancelled_batch_leaves_no_task_and_is_issued_again(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=ragged_delay)
    manager = make_manager(tokenizer, engine, over_sampling_factor=2.0)
    before = trio.lowlevel.current_statistics().tasks_living
    with trio.move_on_after(1.0) as scope:
        await manager.generate_batch()
    assert scope.cancelled_caught
    assert engine.pending_requests == ()
    assert trio.lowlevel.current_statistics().tasks_living == before
    other = make_manager(tokenizer, FakeEngine(seconds_per_token=ragged_delay), over_sampling_factor=2.0)
    assert (await manager.generate_batch()).samples == (await other.generate_batch()).samples


# abort and resume


async def test_abort_keeps_the_tokens_so_far_and_the_next_batch_goes_on_from_them(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(script_answer([5] * 7 + [1]), seconds_per_token=1.0)
    manager = make_manager(tokenizer, engine)
    async with trio.open_nursery() as nursery:

        async def press() -> None:
            await trio.sleep(3.5)
            manager.request_abort()

        nursery.start_soon(press)
        with pytest.raises(GenerationError, match="stopped by request_abort"):
            await manager.generate_batch()
    assert trio.current_time() == 3.5
    state = json.loads(json.dumps(manager.state_dict()))
    unfinished = [Sample.from_dict(sample) for item in state["pending"] for sample in item["samples"]]
    assert [(sample.status, sum(sample.loss_mask)) for sample in unfinished] == [(Status.ABORTED, 3.0)] * 6
    assert manager.partial_samples == tuple(unfinished)

    heirs = [make_manager(tokenizer, engine), make_manager(tokenizer, engine, manager.partial_samples)]
    heirs[0].load_state_dict(state)
    for heir in (manager, *heirs):
        engine.calls.clear()
        batch = await heir.generate_batch()
        assert group_indices(batch) == [0, 0, 1, 1, 2, 2]
        assert {len(call.arguments["prompt_tokens"]) for call in engine.calls} == {len(unfinished[0].tokens)}
        assert all(
            sample.tokens[: len(unfinished[0].tokens)] == begun.tokens for sample, begun in zip(batch.samples, unfinished, strict=True)
        )


async def test_an_abort_while_nothing_runs_stops_the_next_batch_only(tokenizer: Any) -> None:
    manager = make_manager(tokenizer, FakeEngine())
    manager.request_abort()
    with pytest.raises(GenerationError, match="stopped by request_abort"):
        await manager.generate_batch()
    check_batch(await manager.generate_batch(), 3, 2)


async def test_leaving_the_block_stops_a_batch_that_runs_elsewhere(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5] * 7 + [1]), seconds_per_token=1.0)
    outcomes: list[str] = []

    async def run(manager: AsyncRolloutManager) -> None:
        with pytest.raises(GenerationError):
            await manager.generate_batch()
        outcomes.append(f"stopped at {trio.current_time()}")

    async with trio.open_nursery() as nursery:
        async with make_manager(tokenizer, engine) as manager:
            nursery.start_soon(run, manager)
            await trio.sleep(2.5)
    assert outcomes == ["stopped at 2.5"]
    assert len(manager.partial_samples) == 6


@given(st.data())
def test_a_resumed_stream_equals_the_uninterrupted_one(data: st.DataObject) -> None:
    tokenizer = create_char_tokenizer()
    factor = data.draw(st.sampled_from([1.0, 1.5, 2.5]))
    salt = data.draw(st.integers(0, 1000))
    interrupted_after = data.draw(st.sets(st.integers(1, 5)))

    def make() -> AsyncRolloutManager:
        engine = FakeEngine(seconds_per_token=lambda tokens, seed: derive_seed(salt, seed or 0) % 4 + 0.25)
        return make_manager(
            tokenizer,
            engine,
            over_sampling_factor=factor,
            max_filter_attempts=20,
            filter_fn=lambda group: len({sample.reward for sample in group}) > 1,
        )

    async def run(interrupted: set[int]) -> tuple[list[RolloutBatch], dict[str, Any]]:
        manager, batches = make(), list[RolloutBatch]()
        for number in range(6):
            if number in interrupted:
                state = json.loads(json.dumps(manager.state_dict()))
                manager = make()
                manager.load_state_dict(state)
            batches.append(await manager.generate_batch())
        return batches, manager.state_dict()

    def run_in_virtual_time(interrupted: set[int]) -> tuple[list[RolloutBatch], dict[str, Any]]:
        return trio.run(run, interrupted, clock=trio.testing.MockClock(autojump_threshold=0))

    expected = run_in_virtual_time(set())
    assert run_in_virtual_time(interrupted_after) == expected
    indices = [sample.index for batch in expected[0] for sample in batch.samples]
    assert len(set(indices)) == len(indices)


async def test_a_state_that_does_not_fit_is_refused(tokenizer: Any) -> None:
    manager = make_manager(tokenizer, FakeEngine())
    state = manager.state_dict()
    with pytest.raises(CheckpointError, match=r"lacks \['buffer', 'complete'"):
        manager.load_state_dict({"num_batches": 3})
    with pytest.raises(CheckpointError, match="n_samples_per_prompt 2, but the config has 3"):
        make_manager(tokenizer, FakeEngine(), n_samples_per_prompt=3).load_state_dict(state)
    with pytest.raises(DataError, match="seed"):
        manager.load_state_dict(state | {"buffer": state["buffer"] | {"seed": 99}})
    with pytest.raises(GenerationError, match="expected 2"):
        make_manager(tokenizer, FakeEngine(), [Sample(group_index=4)])


# the deprecated iterator


def test_the_deprecated_iterator_gives_the_batches_of_the_async_manager_and_resumes() -> None:
    tokenizer, engine = create_char_tokenizer(), FakeEngine()
    generate_fn = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=12))

    async def generate(prompt: Prompt, n: int, *, suffix: str) -> Group:
        group = await generate_fn(prompt, n)
        return tuple(replace(sample, response=sample.response + suffix) for sample in group)

    config = RolloutConfig(batch_size=3, n_samples_per_prompt=2, generate_fn=generate, reward_fn=reward_length)

    def create() -> RolloutManager:
        with pytest.warns(DeprecationWarning, match="RolloutManager is deprecated: use AsyncRolloutManager") as warned:
            manager = RolloutManager(make_buffer(), config, suffix="!")
        assert warned[0].filename == __file__
        return manager

    async def run() -> list[RolloutBatch]:
        manager = AsyncRolloutManager(make_buffer(), replace(config, generate_fn=partial(generate, suffix="!")))
        return [await manager.generate_batch() for _ in range(4)]

    expected, first, second = trio.run(run), create(), create()
    begun = list(itertools.islice(first, 2))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [*begun, next(second), next(second)] == expected
    assert all(sample.response.endswith("!") for batch in begun for sample in batch.samples)
    with pytest.warns(DeprecationWarning), pytest.raises(ConfigError, match="generate_fn is None"):
        RolloutManager(make_buffer(), RolloutConfig(batch_size=3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_deprecated_iterator_is_refused_where_a_loop_runs() -> None:
    async def generate(prompt: Prompt, n: int) -> Group:
        raise AssertionError("nothing is generated")

    manager = RolloutManager(make_buffer(), RolloutConfig(batch_size=1, generate_fn=generate))
    with pytest.raises(RuntimeError, match="inside a run"):
        next(manager)

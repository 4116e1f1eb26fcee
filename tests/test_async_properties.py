"""Random schedules of everything that can happen to an executor: nothing is lost or comes twice, nothing too old is handed out, it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.async_config import AsyncConfig
from rollouts.async_rollouts import WorkflowExecutor, create_workflow_executor
from rollouts.config import RolloutConfig
from rollouts.data_buffer import DataBuffer
from rollouts.errors import GenerationError, GenerationTimeout
from rollouts.rollout_queue import FinishedRollout, RolloutCache
from rollouts.samples import derive_seed
from rollouts.staleness_control import StandardPPOStrategy, take_out
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

Event = tuple[str, int]

EVENTS = st.one_of(
    st.tuples(st.just("sleep"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
    st.tuples(st.just("version"), st.integers(1, 2)),
    st.tuples(st.just("interrupt"), st.integers(0, 4)),
    st.tuples(st.just("cancel"), st.integers(1, 6)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("edit"), st.integers(0, 4)),
)
CONFIGS = st.builds(
    AsyncConfig,
    max_staleness=st.integers(0, 3),
    max_concurrent_rollouts=st.none() | st.integers(1, 6),
    queue_size=st.none() | st.integers(2, 6),
    when_queue_full=st.just("wait"),
    order=st.sampled_from(["finished", "submitted"]),
    on_stale=st.sampled_from(["retry", "drop"]),
    on_failure=st.sampled_from(["raise", "retry", "drop"]),
    max_attempts=st.just(1000),  # so that nothing is given up for want of attempts; test_async_rollouts.py is about those
    retry_delay_s=st.sampled_from([0.0, 1.0, 5.0]),
    rollout_timeout_s=st.none() | st.sampled_from([3.0, 20.0]),
    patience_s=st.just(500.0),
)


@dataclass
class World:
    """What rollouts do, decided by (seed, prompt, attempt): how long they take, whether they fail, obey an abort, pass the filter."""

    seed: int
    p_failure: float = 0.0
    p_deaf: float = 0.0  # ignores aborts
    p_filtered: float = 0.0
    version: int = 0
    attempts: dict[int, int] = field(default_factory=dict)
    requests: dict[int, trio.Event] = field(default_factory=dict)
    filtered: set[int] = field(default_factory=set)
    interrupted: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)  # failed, or aborted alone, as those are that take too long

    def draw(self, *keys: int) -> float:
        return derive_seed(self.seed, *keys) / 2**63

    async def generate(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """One token a second, of the version of its moment; continues what there is."""
        index = prompt.index
        attempt = self.attempts[index] = self.attempts.get(index, 0) + 1
        length = 1 + derive_seed(self.seed, index, 0) % 8
        fails = self.draw(index, attempt, 1) < self.p_failure
        deaf = self.draw(index, attempt, 2) < self.p_deaf
        assert index not in self.requests, f"prompt {index} is generated twice at a time"
        aborted = self.requests[index] = trio.Event()
        before = partial[0] if partial else Sample(prompt=prompt.content, weight_versions=())
        versions = list(before.weight_versions or ())
        try:
            while len(versions) < length:
                if deaf:
                    await trio.sleep(1)
                else:
                    with trio.move_on_after(1):
                        await aborted.wait()
                        return self.make_group(before, versions, n, Status.ABORTED)
                if fails and len(versions) + 1 == length:
                    self.stopped.add(index)
                    raise ValueError(f"prompt {index} failed")
                versions.append(self.version)
            return self.make_group(before, versions, n, Status.COMPLETED)
        except trio.Cancelled:
            self.stopped.add(index)
            raise
        finally:
            del self.requests[index]

    def make_group(self, before: Sample, versions: list[int], n: int, status: Status) -> Group:
        length = len(versions)
        status = status if length else Status.PENDING
        sample = replace(before, tokens=(7,) * length, loss_mask=(1.0,) * length, weight_versions=tuple(versions), status=status)
        return (sample,) * n

    def passes(self, group: Group) -> bool:
        index = group[0].group_index
        kept = self.draw(index, 3) >= self.p_filtered
        if not kept:
            self.filtered.add(index)
        return kept

    # of an engine

    async def generate_tokens(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        raise AssertionError("this world generates whole groups")

    async def abort(self, request_ids: Any = None) -> None:
        wanted = None if request_ids is None else {int(request_id.split("-")[0]) for request_id in request_ids}
        for index, aborted in self.requests.items():
            if wanted is None or index in wanted:
                aborted.set()
                (self.stopped if wanted is not None else self.interrupted).add(index)
        await trio.lowlevel.checkpoint()


def make_executor(world: World, asynchronous: AsyncConfig, **changes: Any) -> WorkflowExecutor:
    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=2, generate_fn=world.generate, filter_fn=world.passes, grace_s=2.0, max_filter_attempts=50
    )
    return create_workflow_executor(DataBuffer([str(i) for i in range(5)]), config, asynchronous, engines=[world], **changes)  # type: ignore[list-item]


@dataclass
class Ledger:
    """What a run has handed out."""

    executor: WorkflowExecutor
    world: World
    groups: list[Group] = field(default_factory=list)

    @property
    def indices(self) -> list[int]:
        return [group[0].group_index for group in self.groups]

    def take(self, groups: Sequence[Group]) -> None:
        for group in groups:
            assert len(group) == 2
            assert all(sample.status is Status.COMPLETED for sample in group)
            oldest = min(version for sample in group for version in sample.weight_versions or ())
            assert self.executor.version - oldest <= self.executor.asynchronous.max_staleness
        self.groups.extend(groups)
        assert len(set(self.indices)) == len(self.indices), "a group came twice"

    def check(self) -> None:
        """Every prompt that was taken is handed out, here, or was given up by a policy that may do so."""
        asynchronous = self.executor.asynchronous
        state = self.executor.state_dict()
        json.dumps(state)
        here = [group["prompt"]["index"] for group in state["pending"]]
        here += [entry["prompt"]["index"] for place in state["finished"].values() for entry in place]
        assert len(set(here)) == len(here), f"a prompt is at two places: {sorted(here)}"
        assert not set(here) & set(self.indices), "a group was handed out and is still here"
        buffer = state["buffer"]
        taken = set(range(buffer["epoch_id"] * buffer["num_prompts"] + buffer["sample_offset"]))
        missing = taken - set(here) - set(self.indices)
        assert set(here) | set(self.indices) <= taken
        may_be_given_up = set(self.world.filtered)
        if asynchronous.on_failure == "drop":
            may_be_given_up |= self.world.stopped
            if asynchronous.rollout_timeout_s is not None:  # at the very moment of an interruption
                may_be_given_up |= self.world.interrupted
        if asynchronous.on_stale == "retry":
            assert missing <= may_be_given_up
        counts = self.executor.get_stats()
        waiting_or_running = [group["prompt"]["index"] for group in state["pending"]]
        assert counts.enqueued + counts.running == len(waiting_or_running)
        assert counts.running >= 0


async def play(world: World, asynchronous: AsyncConfig, events: Sequence[Event]) -> Ledger:
    """Let events happen one after another; after each of them the books must be right."""
    executor = make_executor(world, asynchronous)
    ledger = Ledger(executor, world)
    saved: tuple[dict[str, Any], int] | None = None
    position = 0
    restart = True
    while restart:
        restart = False
        try:
            async with executor:
                while position < len(events) and not restart:
                    name, number = events[position]
                    position += 1
                    if name == "sleep":
                        await trio.sleep(number / 2)
                    elif name == "wait":
                        with suppress(GenerationError, ValueError):
                            ledger.take(await executor.wait(number, timeout_s=30))
                    elif name == "version":
                        world.version += number
                        executor.set_version(world.version)
                    elif name == "interrupt":
                        await executor.interrupt()
                        assert not world.requests
                        ledger.check()
                        await trio.sleep(number)
                        executor.resume()
                    elif name == "cancel":
                        with trio.move_on_after(number / 2):
                            ledger.take(await executor.wait(4, timeout_s=30))
                    elif name == "edit":
                        seen = executor.resident_samples

                        async def edit(samples: tuple[Sample, ...], number: int = number) -> list[Sample]:
                            await trio.sleep(number)
                            return [replace(sample, reward=(sample.reward or 0.0) + 1) for sample in samples]

                        await executor.edit_residents(edit)
                        assert len(executor.resident_samples) >= len(seen) or world.p_failure or asynchronous.rollout_timeout_s
                    elif name == "save":
                        saved = (json.loads(json.dumps(executor.state_dict())), len(ledger.groups))
                    elif name == "restart" and saved is not None:
                        restart = True
                    ledger.check()
        except (GenerationError, ValueError):  # a failure that nobody waited for
            restart = position < len(events)
        ledger.check()
        if restart and position and events[position - 1][0] == "restart" and saved is not None:
            state, num_groups = saved
            executor = make_executor(world, asynchronous)
            executor.load_state_dict(state)
            assert json.loads(json.dumps(executor.state_dict())) == state
            executor.set_version(max(executor.version, world.version))
            ledger = Ledger(executor, world, ledger.groups[:num_groups])
    return ledger


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return trio.run(function, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**20),
    asynchronous=CONFIGS,
    events=st.lists(EVENTS, max_size=25),
    p_failure=st.sampled_from([0.0, 0.2, 0.7]),
    p_deaf=st.sampled_from([0.0, 0.3]),
    p_filtered=st.sampled_from([0.0, 0.4]),
)
def test_whatever_happens_nothing_is_lost_or_comes_twice_or_is_too_old(
    seed: int, asynchronous: AsyncConfig, events: list[Event], p_failure: float, p_deaf: float, p_filtered: float
):
    world = World(seed, p_failure=p_failure, p_deaf=p_deaf, p_filtered=p_filtered)
    run(play, world, asynchronous, events)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**20), asynchronous=CONFIGS, p_filtered=st.sampled_from([0.0, 0.5]))
def test_a_run_that_trains_gets_all_its_batches(seed: int, asynchronous: AsyncConfig, p_filtered: float):
    async def main() -> None:
        # a rollout takes up to 8 s, so that with a timeout of 3 s it needs three attempts
        world = World(seed, p_filtered=p_filtered)
        config = replace(asynchronous, max_attempts=20)
        executor = make_executor(world, config)
        ledger = Ledger(executor, world)
        async with executor:
            for version in range(1, 12):
                if config.on_failure == "raise" and config.rollout_timeout_s == 3.0:
                    return
                ledger.take(await executor.wait(2))
                await trio.sleep(derive_seed(seed, version) % 3)
                world.version = version
                executor.set_version(version)
                ledger.check()

    run(main)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    max_staleness=st.integers(0, 3),
    max_concurrent=st.integers(1, 8),
    batches_per_version=st.integers(1, 3),
    p_filtered=st.sampled_from([0.0, 0.4]),
    p_failure=st.sampled_from([0.0, 0.4]),
)
def test_in_strict_order_batches_do_not_depend_on_timing_and_are_never_too_old(
    seed: int, max_staleness: int, max_concurrent: int, batches_per_version: int, p_filtered: float, p_failure: float
):
    async def main(pause: float) -> list[int]:
        world = World(seed, p_filtered=p_filtered, p_failure=p_failure)
        limits = {"max_staleness": max_staleness, "max_concurrent_rollouts": max_concurrent, "max_attempts": 1000}
        asynchronous = AsyncConfig(**limits, order="submitted", retry_delay_s=3.0)
        ledger = Ledger(make_executor(world, asynchronous, batches_per_version=batches_per_version), world)
        async with ledger.executor as executor:
            for version in range(1, 7):
                for _ in range(batches_per_version):
                    batch = await executor.generate_batch()
                    assert batch.metadata["num_groups_purged"] == 0
                    ledger.take([batch.samples[:2], batch.samples[2:]])
                    await trio.sleep(pause)
                world.version = version
                executor.set_version(version)
        return ledger.indices

    quick, slow = run(main, 0.0), run(main, 7.0)
    assert quick == slow == sorted(quick)


class RandomDrops(StandardPPOStrategy):
    """Drops finished groups at random before training."""

    def __init__(self, seed: int, p: float) -> None:
        self.seed, self.p, self.kept = seed, p, set[int]()

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        def refuse(rollout: FinishedRollout) -> bool:
            return derive_seed(self.seed, rollout.prompt.index) / 2**63 < self.p

        return take_out(cache, refuse)


@pytest.mark.parametrize("gives_back", [True, False])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), max_staleness=st.integers(0, 2), p=st.sampled_from([0.3, 0.6]))
def test_a_run_that_drops_at_random_ends_only_if_room_is_given_back(gives_back: bool, seed: int, max_staleness: int, p: float):
    """Without the modifier the room of dropped groups stays taken, and the run stands still before its end."""

    async def main() -> int:
        world = World(seed)
        asynchronous = AsyncConfig(max_staleness=max_staleness, on_stale="drop", patience_s=1000.0)
        config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=world.generate, max_filter_attempts=1000)
        make = create_workflow_executor if gives_back else WorkflowExecutor
        async with make(DataBuffer(["0", "1", "2"]), config, asynchronous, strategy=RandomDrops(seed, p)) as executor:
            ledger = Ledger(executor, world)
            for version in range(1, 31):
                try:
                    ledger.take(await executor.wait(2))
                except GenerationTimeout as error:
                    assert "0 are running, 0 wait to be started" in str(error)
                    return version
                world.version = version
                executor.set_version(version)
        return 31

    reached = run(main)
    assert (reached == 31) == gives_back

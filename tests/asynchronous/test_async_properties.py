"""Random schedules of everything that can happen to an executor: nothing is lost or comes twice, nothing too old is handed out, it ends.

A schedule that stands still fails: a wait for groups that may still be generated has to return them, and no error may end it that this
schedule does not explain.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.create import create_filtered_capacity_modifier, create_staleness_manager, register_capacity_modifiers
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.asynchronous.finished import StandardPPOStrategy, take_out
from rollouts.asynchronous.queue import FinishedRollout, RolloutCache
from rollouts.asynchronous.recompute import ProximalRecomputer
from rollouts.config import RewardConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample, create_pending_group
from rollouts.errors import ConfigError, GenerationTimeout, RewardError
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

Event = tuple[str, int]

BATCH_SIZE, GROUP_SIZE = 2, 2
PATIENCE_S = 3000.0  # of virtual time: hundreds of attempts at a rollout of at most 8 s, so that only what stands still takes longer

EVENTS = st.one_of(
    st.tuples(st.just("sleep"), st.sampled_from([1, 2, 5, 12, 30])),
    st.tuples(st.just("wait"), st.integers(1, 6)),
    st.tuples(st.just("batch"), st.just(0)),
    st.tuples(st.just("version"), st.sampled_from([1, 1, 3])),
    st.tuples(st.just("interrupt"), st.integers(0, 4)),
    st.tuples(st.just("cancel"), st.integers(1, 6)),
    st.tuples(st.just("save"), st.integers(0, 8)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("edit"), st.integers(0, 4)),
)
# a queue that raises has room for all that these schedules can let finish; test_a_queue_without_room_... is about those that have not
QUEUES = st.sampled_from([(None, "wait"), (2, "wait"), (3, "wait"), (6, "wait"), (200, "raise")])
SYNCS = st.sampled_from([("continue", False), ("interrupt", False), (None, True)])


def make_config(queue: tuple[Any, Any], sync: tuple[Any, bool], **settings: Any) -> AsyncConfig:
    """max_attempts are so many that nothing is given up for want of them; test_async_rollouts.py is about those."""
    (size, when_full), (in_flight, segment_wise) = queue, sync
    kept = {"queue_size": size, "when_queue_full": when_full, "in_flight": in_flight, "enable_segment_wise_ppo": segment_wise}
    return AsyncConfig(**kept, **settings, max_attempts=1000, patience_s=PATIENCE_S)


SEEDS = st.integers(0, 2**20)
ORDERS = st.sampled_from(["finished", "submitted"])
CONFIGS = st.builds(
    make_config,
    QUEUES,
    SYNCS,
    max_staleness=st.integers(0, 3),
    max_concurrent_rollouts=st.none() | st.integers(1, 6),
    order=ORDERS,
    on_stale=st.sampled_from(["retry", "drop"]),
    on_failure=st.sampled_from(["raise", "retry", "drop"]),
    retry_delay_s=st.sampled_from([0.0, 1.0, 5.0]),
    rollout_timeout_s=st.none() | st.sampled_from([3.0, 20.0]),
)


def log_prob(place: int, version: int) -> float:
    """Return the log-prob of any token at this place under the weights of this version."""
    return -1.0 - version - place / 64


@dataclass
class World:
    """Behaviour of rollouts, decided by (seed, prompt, attempt): how long they and their rewards take, whether they fail, obey an abort,
    pass the filter. It holds what engines hold (version), and the possible outcomes of each prompt."""

    seed: int
    p_failure: float = 0.0
    p_deaf: float = 0.0  # ignores aborts
    p_filtered: float = 0.0
    p_reward_failure: float = 0.0
    on_reward_error: Any = "raise"
    version: int = 0
    attempts: Counter[int] = field(default_factory=Counter[int])
    reward_attempts: Counter[int] = field(default_factory=Counter[int])
    first_version: dict[int, int] = field(default_factory=dict[int, int])  # of the weights when a prompt was taken from the data
    requests: dict[int, trio.Event] = field(default_factory=dict[int, trio.Event])
    filtered: set[int] = field(default_factory=set[int])
    unrewarded: set[int] = field(default_factory=set[int])
    interrupted: set[int] = field(default_factory=set[int])
    stopped: set[int] = field(default_factory=set[int])  # failed, cancelled, or aborted alone, as those are that take too long

    def draw(self, *keys: int) -> float:
        return derive_seed(self.seed, *keys) / 2**63

    async def generate(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """One token a second, of the version of its moment, behind a prompt of one token; continues what there is."""
        index = prompt.index
        self.attempts[index] += 1
        attempt, length = self.attempts[index], 1 + derive_seed(self.seed, index, 0) % 8
        fails = self.draw(index, attempt, 1) < self.p_failure
        deaf = self.draw(index, attempt, 2) < self.p_deaf
        assert index not in self.requests, f"prompt {index} is generated twice at a time"
        aborted = self.requests[index] = trio.Event()
        before = partial or create_pending_group(prompt, n)
        num_before = max(1, len(before[0].tokens))
        versions: list[int] = []
        try:
            while num_before + len(versions) <= length:
                if deaf:
                    await trio.sleep(1)
                else:
                    with trio.move_on_after(1):
                        await aborted.wait()
                        return tuple(extend(sample, versions, "abort") for sample in before)
                if fails and num_before + len(versions) == length:
                    self.stopped.add(index)
                    raise ValueError(f"prompt {index} failed")
                versions.append(self.version)
            return tuple(extend(sample, versions, "stop") for sample in before)
        except trio.Cancelled:
            self.stopped.add(index)
            raise
        finally:
            del self.requests[index]

    async def reward(self, sample: Sample) -> float:
        """The index of the prompt, after a while."""
        self.reward_attempts[sample.index] += 1
        attempt = self.reward_attempts[sample.index]
        try:
            await trio.sleep(derive_seed(self.seed, sample.index, attempt, 4) % 3)
        except trio.Cancelled:
            self.stopped.add(sample.group_index)
            raise
        if self.draw(sample.index, attempt, 5) < self.p_reward_failure:
            self.unrewarded.add(sample.group_index)
            raise OSError(f"the judge of sample {sample.index} is away")
        return float(sample.group_index)

    def is_wanted(self, index: int) -> bool:
        return self.draw(index, 3) >= self.p_filtered

    def passes(self, group: Group) -> bool:
        index = group[0].group_index
        if not self.is_wanted(index):
            self.filtered.add(index)
        return self.is_wanted(index)

    def explains(self, error: Exception, asynchronous: AsyncConfig) -> bool:
        """Return whether this world raises this error and its policies let it through."""
        if isinstance(error, RewardError):
            return self.p_reward_failure > 0 and self.on_reward_error != "drop" and "the judge of sample" in str(error)
        if asynchronous.on_failure != "raise":
            return False
        if isinstance(error, GenerationTimeout):
            return asynchronous.rollout_timeout_s is not None and str(error).startswith("the rollout of prompt")
        return type(error) is ValueError and str(error) in {f"prompt {index} failed" for index in self.stopped}

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


def extend(sample: Sample, versions: Sequence[int], finish_reason: Any) -> Sample:
    tokens = sample.tokens or (3,)
    completion = Completion(
        request_id=str(sample.index),
        input_tokens=tokens,
        output_tokens=(7,) * len(versions),
        output_log_probs=tuple(log_prob(len(tokens) + place, version) for place, version in enumerate(versions)),
        output_versions=tuple(versions),
        finish_reason=finish_reason,
    )
    return completion_to_sample(sample, (3,), completion, "")


async def score(samples: Sequence[Sample], version: int) -> list[list[float]]:
    """A trainer that holds this version, and needs its time."""
    await trio.sleep(1.5)
    return [[log_prob(place, version) for place in range(len(sample.tokens))] for sample in samples]


def make_world_executor(world: World, asynchronous: AsyncConfig, **changes: Any) -> WorkflowExecutor:
    config = RolloutConfig(
        batch_size=BATCH_SIZE,
        n_samples_per_prompt=GROUP_SIZE,
        generate_fn=world.generate,
        reward_fn=world.reward,
        reward=RewardConfig(timeout_s=None, on_error=world.on_reward_error),
        filter_fn=world.passes,
        grace_s=2.0,
        max_filter_attempts=10_000,  # a filter that starves a run is an error of its own
    )
    return create_workflow_executor(DataBuffer([str(i) for i in range(5)]), config, asynchronous, engines=[world], **changes)  # type: ignore[list-item]


@dataclass
class Run:
    """An executor, what it has handed out, and what its prompts must look like at every moment."""

    executor: WorkflowExecutor
    world: World
    groups: list[Group] = field(default_factory=list[Group])
    given_up: set[int] = field(default_factory=set[int])  # that were so at the last check
    counts: Counter[str] = field(default_factory=Counter[str])  # of batches
    counted_before: tuple[int, int] = (0, 0)  # given up and tried again by those that this executor's state comes from
    is_restored: bool = False
    syncing: bool = False

    @property
    def asynchronous(self) -> AsyncConfig:
        return self.executor.asynchronous

    @property
    def indices(self) -> list[int]:
        return [group[0].group_index for group in self.groups]

    @property
    def most(self) -> int:
        """Groups that may be accepted, in all, before the version rises."""
        return (self.asynchronous.max_staleness + self.executor.version + 1) * self.executor.batch_size * self.executor.batches_per_version

    def take(self, groups: Sequence[Group]) -> None:
        for group in groups:
            index = group[0].group_index
            assert [sample.index for sample in group] == [GROUP_SIZE * index + k for k in range(GROUP_SIZE)]
            assert all(sample.status is Status.COMPLETED and sample.reward == index for sample in group)
            assert self.world.is_wanted(index), "the filter refused it"
            oldest = min(version for sample in group for version in sample.weight_versions or () if version >= 0)
            assert self.executor.version - oldest <= self.asynchronous.max_staleness
            for sample in group:
                self.check_segments(sample)
        self.groups.extend(groups)
        assert len(set(self.indices)) == len(self.indices), "a group came twice"
        assert not set(self.indices) & self.given_up, "a group was given up, and came"
        assert len(self.groups) <= self.most

    def check_segments(self, sample: Sample) -> None:
        """Behind every sync all that waits gets its log-probs, so each token older than the version has the one of the version after it."""
        if not self.asynchronous.segment_wise:
            assert sample.segment_log_probs is None
            return
        versions = sample.weight_versions or ()
        if max(versions) == min(version for version in versions if version >= 0) == self.executor.version:
            return  # no sync has seen it
        assert sample.segment_versions is not None and sample.segment_log_probs is not None
        for place, version in enumerate(versions):
            is_due = 0 <= version < self.executor.version
            assert sample.segment_versions[place] == (version + 1 if is_due else -1)
            if version >= 0:
                assert sample.segment_log_probs[place] == log_prob(place, version + 1 if is_due else version)

    def check(self) -> None:
        """Every prompt that was taken is in one place: handed out, waiting, running, finished, or given up by a policy that may do so."""
        state = self.executor.state_dict()
        json.dumps(state)
        unfinished = [group["prompt"]["index"] for group in state["pending"]]
        finished = [entry["prompt"]["index"] for place in state["finished"].values() for entry in place]
        here = {*unfinished, *finished}
        assert len(here) == len(unfinished) + len(finished), f"a prompt is at two places: {unfinished} {finished}"
        assert not here & set(self.indices), "a group was handed out and is still here"
        taken = set(range(count_taken(state)))
        assert here | set(self.indices) <= taken
        for index in taken:
            self.world.first_version[index] = min(self.executor.version, self.world.first_version.get(index, self.executor.version))
        missing = taken - here - set(self.indices)
        assert self.given_up <= missing, "a group was given up, and is back"
        self.given_up = missing
        assert missing <= self.find_doomed(), "a prompt is lost"
        assert set(self.world.requests) <= set(unfinished), "a group is generated that is finished"
        counts = self.executor.get_stats()
        assert counts.enqueued + counts.running == len(unfinished)
        assert len(self.world.requests) <= counts.running <= self.asynchronous.concurrent_groups(BATCH_SIZE)
        assert counts.accepted == len(self.groups) + len(finished) + state["manager"]["modifiers"][0]["filtered"]
        assert len(self.groups) + len(finished) + counts.running <= self.most
        num_ready, held = len(state["finished"]["ready"]), [entry["prompt"]["index"] for entry in state["finished"]["held"]]
        if not self.is_restored and num_ready < self.asynchronous.queue_groups(BATCH_SIZE):  # groups of a state wait for the next look
            assert min(held, default=math.inf) >= min(unfinished, default=math.inf), "its turn has come, the queue has room, and it is held"

    def find_doomed(self) -> set[int]:
        """Prompts that a policy may have given up."""
        asynchronous, world = self.asynchronous, self.world
        doomed = set(world.filtered)
        if world.on_reward_error == "drop":
            doomed |= world.unrewarded
        if asynchronous.on_failure == "drop":
            doomed |= world.stopped
            if asynchronous.rollout_timeout_s is not None:  # at the very moment of an interruption
                doomed |= world.interrupted
        if asynchronous.on_stale == "drop":
            newest = self.executor.version - asynchronous.max_staleness - 1
            doomed |= {index for index, version in world.first_version.items() if version <= newest}
        return doomed

    def check_counts(self, metadata: dict[str, Any]) -> None:
        """Right after a batch: what its metadata count is exactly what is missing."""
        self.check()
        names = ("filtered", "failed", "given_up", "retried", "purged", "cut")
        self.counts.update({name: metadata[f"num_groups_{name}"] for name in names})
        given_up, retried = self.counted_before
        assert len(self.given_up) == given_up + sum(self.counts[name] for name in ("filtered", "failed", "given_up"))
        state, counts = self.executor.state_dict(), self.executor.get_stats()
        num_counted = counts.enqueued + counts.running + counts.accepted + counts.rejected
        assert num_counted == count_taken(state) + retried + self.counts["retried"]
        assert self.counts["given_up"] == 0 or self.asynchronous.on_stale == "drop"
        assert self.counts["failed"] == 0 or "drop" in (self.asynchronous.on_failure, self.world.on_reward_error)
        assert metadata["num_groups_waiting"] + metadata["num_groups_running"] == len(state["pending"])

    # what its trainer does

    async def wait(self, take: Callable[[], Awaitable[None]], count: int) -> None:
        """Wait for groups that may still come, whatever errors of this world come between; without them the wait has to be in vain."""
        is_possible = len(self.groups) + count <= self.most
        for _ in range(500):
            try:
                await take()
            except Exception as error:
                if self.world.explains(error, self.asynchronous):
                    continue
                if not (isinstance(error, GenerationTimeout) and "groups that were waited for are there after" in str(error)):
                    raise  # of whatever else ends a wait; a rollout that takes too long is a GenerationTimeout, too
                assert not is_possible, f"it stands still: {error}"
                return
            assert is_possible, "more groups came than may be accepted"
            return
        raise AssertionError("500 errors in a row, and no group")

    async def take_groups(self, count: int) -> None:
        async def take() -> None:
            self.take(await self.executor.wait(count, timeout_s=PATIENCE_S))

        await self.wait(take, count)

    async def take_batch(self) -> None:
        async def take() -> None:
            batch = await self.executor.generate_batch()
            self.take([batch.samples[i : i + GROUP_SIZE] for i in range(0, len(batch.samples), GROUP_SIZE)])
            self.check_counts(dict(batch.metadata))

        await self.wait(take, BATCH_SIZE)

    async def sync(self) -> None:
        """Act as the loop does around a weight sync."""
        self.syncing = True
        if self.asynchronous.interrupts:
            await self.executor.interrupt()
            assert not self.world.requests
        self.world.version += 1
        if self.asynchronous.segment_wise:
            await ProximalRecomputer(score).recompute_all(self.executor, self.world.version)
        self.check()  # which remembers the version of those that have just been taken
        self.executor.set_version(self.world.version)
        if self.asynchronous.interrupts:
            self.executor.resume()
        self.syncing = False

    async def try_for(self, seconds: float, count: int) -> bool:
        """Wait for so long. Whether it ended before that, with groups or an error."""
        with trio.move_on_after(seconds):
            try:
                self.take(await self.executor.wait(count))
            except Exception as error:
                if not self.world.explains(error, self.asynchronous):
                    raise
            return True
        return False

    async def happen(self, name: str, number: int) -> None:
        """One event, from its begin to its end."""
        executor = self.executor
        if name == "sleep":
            await trio.sleep(number / 2)
        elif name == "wait":
            await self.take_groups(number)
        elif name == "batch":
            await self.take_batch()
        elif name == "version":
            for _ in range(number):
                await self.sync()
        elif name == "interrupt":
            await executor.interrupt()
            assert not self.world.requests
            self.check()
            await self.try_for(number, 1)
            assert not self.world.requests, "something started before resume()"
            executor.resume()
        elif name == "cancel":
            await self.try_for(number / 2, 4)
        elif name == "edit":
            with suppress(KeyError):
                await executor.edit_residents(make_edit(number))

    async def check_meanwhile(self) -> None:
        pause = 0.3
        while True:
            await trio.sleep(pause)
            self.check()
            pause *= 2


def make_edit(number: int) -> Callable[[tuple[Sample, ...]], Awaitable[list[Sample]]]:
    """An edit that takes so many seconds, or raises."""

    async def edit(samples: tuple[Sample, ...]) -> list[Sample]:
        await trio.sleep(number)
        if number == 3:
            raise KeyError("the edit failed")
        return [replace(sample, metadata={**sample.metadata, "edited": True}) for sample in samples]

    return edit


def count_taken(state: dict[str, Any]) -> int:
    """Prompts that were taken from the data."""
    buffer = state["buffer"]
    return buffer["epoch_id"] * buffer["num_prompts"] + buffer["sample_offset"]


@dataclass(frozen=True)
class Saved:
    """A state, and what a run had then."""

    state: dict[str, Any]
    groups: tuple[Group, ...]
    given_up: frozenset[int]
    num_counted: int

    @classmethod
    def of(cls, run: Run) -> Saved:
        run.check()
        state, counts = json.loads(json.dumps(run.executor.state_dict())), run.executor.get_stats()
        num_counted = counts.enqueued + counts.running + counts.accepted + counts.rejected
        return cls(state, tuple(run.groups), frozenset(run.given_up), num_counted)

    def restore(self, world: World, asynchronous: AsyncConfig) -> Run:
        """In another process: engines get the weights of the saved version again."""
        executor = make_world_executor(world, asynchronous)
        executor.load_state_dict(self.state)
        assert json.loads(json.dumps(executor.state_dict())) == self.state
        world.version = executor.version
        counted_before = len(self.given_up), self.num_counted - count_taken(self.state)
        restored = Run(executor, world, list(self.groups), set(self.given_up), counted_before=counted_before, is_restored=True)
        restored.check()
        return restored


async def play(world: World, asynchronous: AsyncConfig, events: Sequence[Event]) -> Run:
    """Let events happen one after another; at all times the books must be right. In the end it is trained as if nothing had been."""
    run = Run(make_world_executor(world, asynchronous), world)
    saved: Saved | None = None
    left = [*events, *[("version", 1), ("batch", 0)] * 3]

    async def save(after_s: float) -> None:
        nonlocal saved
        await trio.sleep(after_s)
        while run.syncing:  # no checkpoint is written between new weights and their version
            await trio.sleep(0.1)
        saved = Saved.of(run)

    while left:
        restarts = False
        try:
            async with run.executor:
                async with trio.open_nursery() as savers:
                    while left and not restarts:
                        name, number = left.pop(0)
                        restarts = name == "restart"
                        if name == "save":
                            savers.start_soon(save, number)
                            continue
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(run.check_meanwhile)
                            await run.happen(name, number)
                            nursery.cancel_scope.cancel()
                        run.check()
                    savers.cancel_scope.cancel()
        except Exception as error:  # a failure that nobody waited for
            if not world.explains(error, asynchronous):
                raise
        run.check()
        if restarts:
            run = (saved or Saved.of(run)).restore(world, asynchronous)
            saved = None
    return run


def run_virtually(function: Callable[..., Any], *arguments: Any) -> Any:
    return trio.run(function, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))


@given(
    seed=SEEDS,
    asynchronous=CONFIGS,
    events=st.lists(EVENTS, min_size=5, max_size=20),
    p_failure=st.sampled_from([0.0, 0.2, 0.7]),
    p_deaf=st.sampled_from([0.0, 0.3]),
    p_filtered=st.sampled_from([0.0, 0.4]),
    p_reward_failure=st.sampled_from([0.0, 0.2]),
    on_reward_error=st.sampled_from(["raise", "retry", "drop"]),
)
def test_whatever_happens_nothing_is_lost_or_comes_twice_or_is_too_old(
    seed: int, asynchronous: AsyncConfig, events: list[Event], **rates: Any
):
    run_virtually(play, World(seed, **rates), asynchronous, events)


@given(
    seed=SEEDS,
    asynchronous=CONFIGS,
    p_filtered=st.sampled_from([0.0, 0.5]),
    p_reward_failure=st.sampled_from([0.0, 0.3]),
    on_reward_error=st.sampled_from(["raise", "drop"]),
)
def test_a_run_that_trains_gets_all_its_batches(seed: int, asynchronous: AsyncConfig, **rates: Any):
    async def main() -> None:
        world = World(seed, **rates)
        run = Run(make_world_executor(world, asynchronous), world)
        try:
            async with run.executor:
                for version in range(11):
                    await run.take_batch()
                    assert len(run.groups) == BATCH_SIZE * (version + 1)
                    await trio.sleep(derive_seed(seed, version) % 3)
                    await run.sync()
                    run.check()
        except Exception as error:  # a failure that nobody waited for
            if not world.explains(error, asynchronous):
                raise

    run_virtually(main)


@given(
    seed=SEEDS,
    max_staleness=st.integers(0, 3),
    queue_size=st.integers(BATCH_SIZE, 9),
    order=ORDERS,
)
def test_a_queue_without_room_ends_the_run_if_it_is_to_raise_and_nothing_is_lost(
    seed: int, max_staleness: int, queue_size: int, order: Any
):
    """While nobody waits, as many groups finish as staleness allows. Those for which there is no room come after those in the queue."""

    async def main() -> None:
        world = World(seed)
        asynchronous = AsyncConfig(max_staleness=max_staleness, queue_size=queue_size, when_queue_full="raise", order=order)
        run = Run(make_world_executor(world, asynchronous), world)
        async with run.executor as executor:
            await trio.sleep(100)
            run.check()
            if queue_size < run.most:
                with pytest.raises(ConfigError, match=f"its queue_size is {queue_size}. Increase queue_size"):
                    await executor.wait(BATCH_SIZE)
                run.check()
            while run.most - len(run.groups):
                await run.take_groups(BATCH_SIZE)
                run.check()

    run_virtually(main)


@given(
    seed=SEEDS,
    sync=SYNCS,
    max_staleness=st.integers(2, 4),
    queue_size=st.integers(BATCH_SIZE, 4),
    order=ORDERS,
    sleeps=st.booleans(),
)
def test_more_groups_than_a_full_queue_holds_can_be_waited_for(
    seed: int, sync: tuple[Any, bool], max_staleness: int, queue_size: int, order: Any, sleeps: bool
):
    async def main() -> None:
        world = World(seed)
        run = Run(make_world_executor(world, make_config((queue_size, "wait"), sync, max_staleness=max_staleness, order=order)), world)
        async with run.executor as executor:
            if sleeps:
                await trio.sleep(100)
                assert executor.get_stats().running == 0
            before = trio.current_time()
            await run.take_groups(run.most)
            assert trio.current_time() - before < 50, "it waits for nothing but rollouts"
            run.check()

    run_virtually(main)


@given(
    seed=SEEDS,
    queue=QUEUES,
    sync=SYNCS,
    max_staleness=st.integers(0, 3),
    jump=st.integers(1, 5),
    order=ORDERS,
    on_stale=st.sampled_from(["retry", "drop"]),
)
def test_what_has_waited_too_long_is_begun_anew_or_given_up(
    seed: int, queue: tuple[Any, Any], sync: tuple[Any, bool], max_staleness: int, jump: int, order: Any, on_stale: Any
):
    async def main() -> None:
        world = World(seed)
        run = Run(make_world_executor(world, make_config(queue, sync, max_staleness=max_staleness, order=order, on_stale=on_stale)), world)
        async with run.executor as executor:
            await trio.sleep(100)
            num_finished = executor.get_stats().accepted
            assert num_finished >= BATCH_SIZE and executor.get_stats().running == 0
            for _ in range(jump):
                await run.sync()
            await run.take_batch()
            if jump <= max_staleness:
                assert run.counts["purged"] == 0
            else:
                assert run.counts["purged"] >= num_finished
                assert run.counts["given_up" if on_stale == "drop" else "retried"] >= num_finished
            if order == "submitted":
                is_lost = jump > max_staleness and on_stale == "drop"
                assert run.indices == ([num_finished, num_finished + 1] if is_lost else [0, 1])

    run_virtually(main)


@given(
    seed=SEEDS,
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
        run = Run(make_world_executor(world, asynchronous, batches_per_version=batches_per_version), world)
        async with run.executor as executor:
            for version in range(1, 7):
                for _ in range(batches_per_version):
                    batch = await executor.generate_batch()
                    assert batch.metadata["num_groups_purged"] == 0
                    run.take([batch.samples[:2], batch.samples[2:]])
                    await trio.sleep(pause)
                world.version = version
                executor.set_version(version)
        return run.indices

    quick, slow = run_virtually(main, 0.0), run_virtually(main, 7.0)
    assert quick == slow == sorted(quick)


class RandomDrops(StandardPPOStrategy):
    """Drops finished groups at random before training."""

    def __init__(self, seed: int, p: float) -> None:
        self.seed, self.p, self.dropped = seed, p, set[int]()

    def filter_stale_from_cache(self, cache: RolloutCache, current_version: int) -> tuple[FinishedRollout, ...]:
        def refuse(rollout: FinishedRollout) -> bool:
            return derive_seed(self.seed, rollout.prompt.index) / 2**63 < self.p

        dropped = take_out(cache, refuse)
        self.dropped.update(rollout.prompt.index for rollout in dropped)
        return dropped


@pytest.mark.parametrize("gives_back", [True, False])
@given(seed=SEEDS, max_staleness=st.integers(0, 2), p=st.sampled_from([0.3, 0.6]))
def test_a_run_that_drops_at_random_ends_only_if_room_is_given_back(gives_back: bool, seed: int, max_staleness: int, p: float):
    """Without the modifier, dropped groups keep their capacity and the run stalls before its end: no group runs or waits, there are too few
    for a batch, and no more may be accepted. If the capacity of dropped groups is returned, the same run reaches its end."""

    async def main() -> tuple[int, bool]:
        world, drops = World(seed), RandomDrops(seed, p)
        asynchronous = AsyncConfig(max_staleness=max_staleness, on_stale="drop", patience_s=1000.0)
        config = RolloutConfig(batch_size=BATCH_SIZE, n_samples_per_prompt=GROUP_SIZE, generate_fn=world.generate, max_filter_attempts=1000)
        manager, modifier, stood_still = create_staleness_manager(config, asynchronous), create_filtered_capacity_modifier(), False
        if gives_back:
            register_capacity_modifiers(manager, modifier)
        async with WorkflowExecutor(DataBuffer(["0", "1", "2"]), config, asynchronous, manager=manager, strategy=drops) as executor:
            num_taken = 0
            for version in range(1, 31):
                try:
                    num_taken += len(await executor.wait(BATCH_SIZE))
                except GenerationTimeout as error:
                    assert "0 are running, 0 wait to be started" in str(error)
                    counts, num_ready = manager.get_stats(), len(executor.resident_samples) // GROUP_SIZE
                    assert num_ready < BATCH_SIZE and counts.running == counts.enqueued == 0
                    num_dropped = counts.accepted - num_taken - num_ready  # some of them for their age
                    assert num_dropped >= len(drops.dropped) > 0
                    assert counts.accepted == (max_staleness + version) * BATCH_SIZE
                    assert manager.get_capacity(executor.version) == 0
                    stood_still = True
                    modifier.on_samples_filtered(num_dropped, executor.version)
                    register_capacity_modifiers(manager, modifier)
                    num_taken += len(await executor.wait(BATCH_SIZE))
                world.version = version
                executor.set_version(version)
            return num_taken, stood_still

    assert run_virtually(main) == (30 * BATCH_SIZE, not gives_back)

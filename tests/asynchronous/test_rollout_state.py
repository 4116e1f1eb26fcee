"""A state machine that drives the transitions in any order, without tasks, engines or time: no prompt is lost, no limit is exceeded."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from samples import make_versioned_sample

from rollouts.asynchronous import transitions
from rollouts.asynchronous.capacity import RolloutCounts, clamp_capacity
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.create import create_filtered_capacity_modifier, create_parts, register_capacity_modifiers
from rollouts.asynchronous.queue import LocalRolloutCache, LocalRolloutQueue, TimedResult
from rollouts.asynchronous.state import ByIndex, Failed, Refused, RolloutState, Running, Scored, Stopped
from rollouts.asynchronous.store import RolloutStore
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import EngineError, RewardError
from rollouts.generation.contract import PendingGroup
from rollouts.testing import FakeEngine
from rollouts.types import Group, Prompt, Status, change

BATCH_SIZE = 2
PICKS = st.integers(0, 9)  # of the candidates of a rule
CONFIGS = st.builds(
    AsyncConfig,
    max_staleness=st.integers(0, 2),
    max_concurrent_rollouts=st.none() | st.integers(1, 5),
    queue_size=st.none() | st.integers(BATCH_SIZE, 4),
    when_queue_full=st.sampled_from(["raise", "wait"]),
    order=st.sampled_from(["finished", "submitted"]),
    on_stale=st.sampled_from(["retry", "drop"]),
    on_failure=st.sampled_from(["raise", "retry", "drop"]),
    max_attempts=st.integers(1, 3),
    max_stale_attempts=st.none() | st.integers(1, 2),
    rollout_timeout_s=st.just(10.0),
    enable_segment_wise_ppo=st.booleans(),
)


def find_versions(group: Group) -> tuple[int, ...]:
    return tuple(version for sample in group for version in sample.weight_versions or () if version >= 0)


class RolloutMachine(RuleBasedStateMachine):
    """Rollouts that generate, end, fail and are stopped in any order, and a trainer that takes groups and makes new weights."""

    @initialize(asynchronous=CONFIGS, batches_per_version=st.integers(1, 2))
    def begin(self, asynchronous: AsyncConfig, batches_per_version: int) -> None:
        self.asynchronous, self.batches_per_version = asynchronous, batches_per_version
        self.now = 0.0
        self.versions: dict[int, tuple[int, ...]] = {}  # of the tokens that engines have generated for what runs
        self.handed_out: list[Group] = []
        self.events: Counter[str] = Counter()  # of the stores before this one
        self.missing: set[int] = set()
        self.store = self.make_store()

    def make_store(self) -> RolloutStore:
        config = RolloutConfig(batch_size=BATCH_SIZE, generate_fn=lambda prompt, n: (), max_filter_attempts=1000)
        options: dict[str, Any] = {"engines": [FakeEngine()], "batches_per_version": self.batches_per_version}
        parts = create_parts(DataBuffer(["a", "b", "c"]), config, self.asynchronous, **options)
        register_capacity_modifiers(parts.manager, create_filtered_capacity_modifier())
        return RolloutStore(parts, 0, clock=lambda: self.now)

    @property
    def state(self) -> RolloutState:
        return self.store.state

    def pick(self, number: int, *, scoring: bool) -> int | None:
        found = [i for i, run in sorted(self.state.running.items()) if run.scoring is scoring and i not in self.state.edited]
        return found[number % len(found)] if found else None

    # few rules with many actions each: hypothesis leaves out some rules in most runs

    def start(self) -> None:
        for index in self.store.start_rollouts():
            versions = self.versions[index] = find_versions(self.state.running[index].pending.samples)
            assert self.state.version - min(versions, default=self.state.version) <= self.asynchronous.max_staleness, (
                "its tokens are too old"
            )

    def bring(self, index: int, status: Status) -> Group:
        """Return a group as generate_fn does, and record it in the state."""
        prompt = self.state.running[index].pending.prompt
        group = (make_versioned_sample((-1, *self.versions[index]), group_index=prompt.index, status=status),)
        run = replace(self.state.running[index], pending=PendingGroup(prompt, group), scoring=status is Status.COMPLETED)
        self.store.set(transitions.update_run(self.state, index, run))
        return group

    @rule(action=st.sampled_from(["through", "through", "through", "token", "last token", "reward", "refuse", "drop"]), number=PICKS)
    def generate(self, action: str, number: int) -> None:
        """Start what may start; some rollouts get a token, their last one, rewards, or all of it, those of the highest index first."""
        self.start()
        for place in range(1 + number % 5):
            index = self.pick(-1 - place if action == "token" else -1, scoring=action in ("reward", "refuse", "drop"))
            if index is None:
                return
            if action in ("through", "token", "last token"):
                self.versions[index] += (self.state.version,)
            if action in ("through", "last token"):
                self.bring(index, Status.COMPLETED)
            if action not in ("token", "last token"):
                group = self.state.running[index].pending.samples
                self.store.end(index, Scored(None if action == "drop" else group, action != "refuse", before=group))

    @rule(action=st.sampled_from(["wait", "wait", "sync"]), number=st.integers(1, 4))
    def train(self, action: str, number: int) -> None:
        if action == "wait":
            self.wait(number)
            return
        self.store.update(version=self.state.version + (number + 1) // 2)
        for index in transitions.find_outdated(self.store.parts.rules, self.state):
            run = replace(self.state.running[index], outdated=True)
            self.store.set(transitions.update_run(self.state, index, run))
            if run.scoring and index not in self.state.edited:
                self.store.end(index, Stopped(cancelled=True))

    def wait(self, count: int) -> None:
        """Look for groups, as executor.wait() does."""
        with suppress(Exception):
            self.store.raise_failure()
        assert not self.state.failures
        if self.state.is_edited:
            self.end_edit()
        self.store.update(num_wanted=count)
        self.start()
        self.store.collect()
        groups = self.store.hand_out(min(count, self.store.num_ready))
        for group in groups:
            assert self.state.version - min(find_versions(group)) <= self.asynchronous.max_staleness, "a token is too old"
        self.handed_out.extend(groups)
        self.store.update(num_wanted=0)

    @rule(how=st.sampled_from(["aborted", "timed out", "cancelled", "unchanged"]), number=PICKS)
    def stop(self, how: str, number: int) -> None:
        index = self.pick(number, scoring=False)
        if index is None:
            return
        if how == "cancelled":
            self.store.set(transitions.cut(self.state, index, "it did not listen"))
            self.store.end(index, Stopped(cancelled=True))
        else:
            self.bring(index, Status.ABORTED)
            run = replace(self.state.running[index], timed_out=how == "timed out")
            self.store.set(transitions.update_run(self.state, index, run))
            self.store.end(index, Stopped(unchanged=how == "unchanged"))

    @rule(error=st.sampled_from([ValueError("no"), RewardError("no"), EngineError("no")]), answer=st.none() | st.booleans(), number=PICKS)
    def fail(self, error: Exception, answer: bool | None, number: int) -> None:
        index = self.pick(number, scoring=isinstance(error, RewardError))
        if index is not None:
            silent = "engine: dead" if answer is False else ""
            self.store.end(index, Failed(error, isinstance(error, EngineError), engines_answer=answer, silent_engines=silent))
        self.now += 0.5

    @rule(action=st.sampled_from(["edit", "edit", "restart"]))
    def edit_or_restart(self, action: str) -> None:
        if self.state.is_edited:
            self.end_edit()
        elif action == "edit":
            self.store.set(transitions.begin_edit(self.state))
            self.before_edit = {index: group for index, group in self.store.unfinished.items() if group}
            assert set(self.before_edit) == self.state.edited
        else:
            saved = json.loads(json.dumps(self.store.state_dict()))
            self.events.update(self.state.events)
            self.store = self.make_store()
            self.store.load_state_dict(saved)
            assert json.loads(json.dumps(self.store.state_dict())) == saved

    def end_edit(self) -> None:
        edited = {index: tuple(replace(sample, reward=1.0) for sample in group) for index, group in self.before_edit.items()}
        self.store.set(transitions.end_edit(self.state, edited))
        unfinished = self.store.unfinished
        assert all(unfinished.get(index) == group for index, group in edited.items()), "what is edited neither starts nor ends"
        assert not self.state.edited

    # what holds at any moment

    @invariant()
    def each_prompt_is_in_one_place_or_accounted_for(self) -> None:
        finished = [rollout.prompt.index for rollout in self.store.finished]
        places = [*self.state.waiting, *self.state.running, *finished, *(group[0].group_index for group in self.handed_out)]
        assert len(places) == len(set(places)), f"a prompt is in two places: {sorted(places)}"
        buffer = self.store.parts.data_buffer.save_state()
        num_taken = buffer["epoch_id"] * buffer["num_prompts"] + buffer["sample_offset"]
        missing = set(range(num_taken)).difference(places)
        assert set(places) <= set(range(num_taken))
        assert self.missing <= missing, "a prompt was given up, and is back"
        self.missing = missing
        events = self.events + Counter(self.state.events)
        assert len(missing) == events["filtered"] + events["failed"] + events["given_up"], "a prompt is lost"
        most = self.asynchronous.max_stale_attempts
        assert most is None or all(attempts.stale < most for attempts in self.state.attempts.values()), "an attempt too many"
        assert all(attempts.failed < self.asynchronous.max_attempts for attempts in self.state.attempts.values())
        counts = self.state.counts
        assert counts.enqueued + counts.running + counts.accepted + counts.rejected == num_taken + events["retried"]

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        parts, counts = self.store.parts, self.state.counts
        assert parts.manager.get_stats() == counts
        limits = parts.manager.limits
        assert counts.running <= max(1, limits.max_concurrent)
        most = (limits.max_staleness + self.state.version + 1) * limits.batch_size
        assert len(self.handed_out) + self.store.num_finished + counts.running <= most
        assert 0 <= parts.manager.get_usable_capacity(self.state.version) <= clamp_capacity(limits.max_concurrent, limits, counts)
        if parts.rules.on_demand and not self.state.num_wanted:
            assert not self.store.start_rollouts(), "nobody waits for it"

    @invariant()
    def order_is_kept(self) -> None:
        held = [result.order if not self.store.parts.rules.in_order else result.data.prompt.index for result in self.state.held]
        assert held == sorted(held)
        if self.store.parts.rules.in_order:
            indices = [group[0].group_index for group in self.handed_out]
            assert indices == sorted(indices), "a group was handed out before one that comes first"


RolloutMachine.TestCase.settings = settings(stateful_step_count=40, max_examples=4 * settings().max_examples)
test_transitions_in_any_order_lose_nothing_and_exceed_no_limit = RolloutMachine.TestCase


class FullDiskQueue(LocalRolloutQueue):
    """A queue of a user that fails for the second group."""

    def put_nowait(self, result: TimedResult) -> None:
        if self.qsize() == 1:
            raise OSError("no space left on device")
        super().put_nowait(result)


class FullDiskCache(LocalRolloutCache):
    """A cache of a user that fails for the fourth group."""

    def add(self, result: TimedResult) -> None:
        if self.size() == 3:
            raise OSError("no space left on device")
        super().add(result)


@pytest.mark.parametrize("parts", [{"queue": FullDiskQueue(4)}, {"queue": LocalRolloutQueue(2), "cache": FullDiskCache()}])
def test_an_error_of_a_users_queue_or_cache_leaves_each_group_in_one_place(parts: dict[str, Any]):
    config = RolloutConfig(batch_size=BATCH_SIZE, generate_fn=lambda prompt, n: ())
    asynchronous = AsyncConfig(max_staleness=1, max_concurrent_rollouts=4, when_queue_full="wait", order="submitted")
    store = RolloutStore(create_parts(DataBuffer(["a", "b", "c", "d"]), config, asynchronous, **parts), 0, clock=lambda: 0.0)
    assert store.start_rollouts() == (0, 1, 2, 3)
    with pytest.raises(OSError, match="no space left"):
        for index in (1, 2, 3, 0):  # the last one lets all of them go on
            group, run = (make_versioned_sample((-1, 0), group_index=index),), store.state.running[index]
            store.set(
                transitions.update_run(store.state, index, change(run, pending=PendingGroup(run.pending.prompt, group), scoring=True))
            )
            store.end(index, Scored(group, True, before=group))
        store.collect()
    assert sorted(rollout.prompt.index for rollout in store.finished) == [0, 1, 2, 3]
    finished = store.state_dict()["finished"]
    assert len(finished["ready"]) + len(finished["held"]) == 4


def test_counts_from_outside_are_overwritten_by_the_next_transition_even_by_one_that_moves_no_rollout():
    config = RolloutConfig(batch_size=BATCH_SIZE, generate_fn=lambda prompt, n: ())
    parts = create_parts(DataBuffer(["a"]), config, AsyncConfig(max_staleness=1, max_concurrent_rollouts=3))
    store = RolloutStore(parts, 0, clock=lambda: 0.0)
    assert store.start_rollouts() == (0, 1, 2)
    assert parts.manager.get_stats() == RolloutCounts(running=3) and store.state.agrees(parts.manager.get_stats())
    for note in ("enqueued", "submitted", "accepted", "rejected"):
        getattr(parts.manager, f"on_rollout_{note}")()
        assert not store.state.agrees(parts.manager.get_stats())
        store.update(num_wanted=1)
        assert parts.manager.get_stats() == RolloutCounts(running=3)


INDICES = st.integers(0, 300)  # several blocks


@given(st.lists(st.tuples(st.dictionaries(INDICES, st.integers()), st.sets(INDICES)), max_size=8))
def test_a_mapping_by_index_is_a_dict_in_the_order_of_index(edits: list[tuple[dict[int, int], set[int]]]):
    expected, found = dict[int, int](), ByIndex[int]()
    for added, removed in edits:
        before, copied = found, dict(found)
        expected = {index: value for index, value in {**expected, **added}.items() if index not in removed}
        found = found.having(added).without(removed)
        assert list(found.items()) == sorted(expected.items())
        assert (len(found), found.first) == (len(expected), min(expected, default=float("inf")))
        assert found == ByIndex(expected.items()) and dict(before) == copied
        assert all((index in found) == (index in expected) for index in range(301))


@pytest.mark.parametrize("num_running", [100, 10_000])
def test_a_transition_copies_what_it_changes_whatever_else_runs(num_running: int):
    pending = [PendingGroup(Prompt(content="one", index=index)) for index in range(num_running)]
    running = ByIndex((group.prompt.index, Running(group, 0)) for group in pending)
    state = RolloutState(running=running)
    tracemalloc.start()
    try:
        after = transitions.update_run(state, 50, change(running[50], scoring=True))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 20_000  # a copy of 10,000 items has 295,000
    assert not state.running[50].scoring and [index for index, run in after.running.items() if run.scoring] == [50]


def test_a_changed_value_has_the_other_fields_and_refuses_what_is_no_field():
    assert change(Refused(1, 2, 3), num_stale=4) == replace(Refused(1, 2, 3), num_stale=4)
    with pytest.raises(AssertionError, match=r"Refused has no \['num_old'\]"):
        change(Refused(), num_old=1)

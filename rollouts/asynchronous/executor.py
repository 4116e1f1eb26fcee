"""WorkflowExecutor: rollouts generated during training, none of them trained on beyond the allowed staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Unpack

import trio

from rollouts.asynchronous import transitions
from rollouts.asynchronous.capacity import RolloutCounts, StalenessManager
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.create import ExecutorOptions, create_filtered_capacity_modifier, create_parts, register_capacity_modifiers
from rollouts.asynchronous.finished import EditSamples
from rollouts.asynchronous.messages import create_starvation_error, create_wait_error
from rollouts.asynchronous.store import RolloutStore
from rollouts.asynchronous.tasks import RolloutTasks
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import convert_to_batch
from rollouts.data.staleness import summarize_staleness
from rollouts.errors import ConfigError, GenerationError
from rollouts.generation.contract import take_counts
from rollouts.types import Group, RolloutBatch, Sample

_SETTLING_PASSES = 5
_MOST_SETTLING_PASSES = 50
_EVENTS = ("filtered", "purged", "retried", "failed", "given_up", "cut")  # counted in the metadata of a batch


class WorkflowExecutor:
    """Generate rollouts in the background of its block, as many as bounded staleness allows, and hand out whole groups.

        async with create_workflow_executor(data_buffer, config, AsyncConfig(max_staleness=2), engines=engines) as executor:
            batch = await executor.generate_batch()
            ...                                             # train; rollouts continue meanwhile
            executor.set_version(1)                         # after the engines have the new weights; more rollouts may start

    A prompt taken from the data is in exactly one place until its group is handed out or given up: waiting (in the order of its
    index; with its tokens, if it was stopped), running, or finished. state_dict() holds all of it, at any moment.

    No group is handed out in which a trained token is more than max_staleness versions behind, whatever the strategy; a group dropped for
    its age is generated anew or given up (AsyncConfig.on_stale). With max_staleness=0 groups are handed out in the order of
    their prompts, whatever AsyncConfig.order is: batches then equal those of AsyncRolloutManager.

    A rollout that raises is handled by AsyncConfig.on_failure. An error that ends the run is raised by wait(), or else at the end of the
    block; its prompt waits again, and no rollout starts until it was raised. Failed reward functions follow RolloutConfig.reward. While
    no engine answers at all, rollouts are retried without a limit of attempts, and wait() gives up after its timeout: a failure of a dead
    engine is not the prompt's.

    At the end of the block engines are told to abort; tokens that unfinished groups have by then (grace_s later) are kept.
    """

    def __init__(
        self, data_buffer: DataBuffer, config: RolloutConfig, asynchronous: AsyncConfig, **options: Unpack[ExecutorOptions]
    ) -> None:
        """
        Args:
            data_buffer: source of prompts; its position is part of the executor's state.
            config: with generate_fn set; over_sampling_factor must be 1.
            asynchronous: limits and policies.
            options: engines, version, replaced parts and shares; see ExecutorOptions.

        Raises: ConfigError if generate_fn is missing, limits contradict each other, or rollouts are to be interrupted without engines.
        """
        self._parts = create_parts(data_buffer, config, asynchronous, **options)
        self._store = RolloutStore(self._parts, options.get("version", 0))
        self._tasks = RolloutTasks(self._store, self._wake_waiter)
        self._block: AbstractAsyncContextManager[None] | None = None
        self._arrival = trio.lowlevel.ParkingLot()  # wait()

    @property
    def config(self) -> RolloutConfig:
        """Settings of batches."""
        return self._parts.config

    @property
    def asynchronous(self) -> AsyncConfig:
        """Limits and policies."""
        return self._parts.rules.asynchronous

    @property
    def batches_per_version(self) -> int:
        """Batches trained on between two weight syncs."""
        return self._parts.batches_per_version

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        return self._store.state.version

    @property
    def batch_size(self) -> int:
        """Groups in a batch."""
        return self._parts.batch_size

    @property
    def manager(self) -> StalenessManager:
        """Manager of capacity.

        Its counts follow the executor: they are set after each transition, so calls of on_rollout_... from outside are overwritten.
        """
        return self._parts.manager

    @property
    def resident_samples(self) -> tuple[Sample, ...]:
        """All samples held here and not being generated: finished groups by age, then groups being scored, then the samples of stopped
        groups, the last two by index."""
        groups = [rollout.group for rollout in self._store.finished] + list(self._store.unfinished.values())
        return tuple(sample for group in groups for sample in group)

    def get_stats(self) -> RolloutCounts:
        """Number of rollouts in each state."""
        return self._parts.manager.get_stats()

    # -- the block

    async def __aenter__(self) -> WorkflowExecutor:
        assert self._block is None, "the executor's block is already open"
        self._block = self._tasks.open()
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None, "the executor's block is not open"
        block, self._block = self._block, None
        return await block.__aexit__(kind, error, traceback)

    # -- from outside

    async def interrupt(self) -> None:
        """Start no more rollouts, tell the engines to abort, and return when no rollout is being generated.

        Rollouts that have not returned after RolloutConfig.grace_s are cancelled. Unfinished groups then wait with their tokens or, if they
        were cancelled, with the tokens that they began with (num_groups_cut). Scoring continues: it needs no engine. Until resume()
        wait() returns only groups that are finished or were being scored. All requests of the engines are aborted, also other users'.
        """
        await self._tasks.interrupt()

    def resume(self) -> None:
        """Start rollouts again after interrupt()."""
        self._tasks.resume()
        self._wake_waiter()

    def set_version(self, version: int) -> None:
        """Note that the engines generate with the weights of this version from now on; more rollouts may start.

        Running rollouts that began too long ago are aborted, and begun anew if their tokens are too old (num_groups_retried).

        Raises: ConfigError if the version goes backwards.
        """
        if version < self.version:
            raise ConfigError(
                f"the weight version was set to {version}, but it is {self.version} already: versions only rise. Count syncs from "
                "the version that the run was resumed at, or load the state of that version first"
            )
        self._store.update(version=version)
        self._tasks.stop_outdated()
        self._wake()

    def _wake(self) -> None:
        """Wake the producer, and the waiter if it may have work."""
        self._tasks.wake()
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        state = self._store.state
        if state.num_wanted and (state.failures or self._may_collect() or transitions.is_starving(self._parts.rules, state)):
            self._arrival.unpark_all()

    # -- batches

    def _may_collect(self) -> bool:
        state = self._store.state
        return not state.is_edited and (self._store.num_ready >= state.num_wanted or state.collected_version != state.version)

    async def wait(self, count: int, timeout_s: float | None = None) -> tuple[Group, ...]:
        """Return the `count` oldest finished groups, in the order in which they finished; at the same moment in the order of their prompts.

        Args:
            count: number of groups; at least 1.
            timeout_s: total seconds to wait; None = until no rollout has ended for AsyncConfig.patience_s.

        Returns: whole groups, none of them with a trained token more than max_staleness versions behind.
        Raises: GenerationTimeout with the number of finished groups; GenerationError if filter_fn refuses too many; the error of a
            rollout, depending on AsyncConfig.on_failure. Nothing is lost by any of them, and the next wait() continues.
        """
        store = self._store
        assert self._tasks.are_open, "the executor's block is not open: async with executor: ..."
        assert not store.state.num_wanted, "wait() is already running; await it before the next call"
        if count < 1:
            raise ConfigError(f"{count} groups were asked for, expected at least 1")
        begun = trio.current_time()
        store.update(num_wanted=count, collected_version=-1)
        self._tasks.wake()  # wanted groups may start, or a full queue may be emptied
        try:
            while not await self._is_ready(count):
                deadline = self._find_deadline(begun, timeout_s)
                if trio.current_time() >= deadline:
                    break
                with trio.move_on_at(deadline):
                    await self._arrival.park()
            else:
                await trio.lowlevel.checkpoint_if_cancelled()  # no full checkpoint: training need not wait for rollouts that start now
                return store.hand_out(count)
        finally:
            store.update(num_wanted=0)
        capacity = self._parts.manager.get_capacity(self.version)
        raise create_wait_error(self._parts.rules, store.state, count, timeout_s, num_ready=store.num_ready, capacity=capacity)

    async def _is_ready(self, count: int) -> bool:
        """Whether `count` groups can be handed out. Raises the error that prevents it."""
        store, rules = self._store, self._parts.rules
        if store.state.failures:
            self._tasks.wake()  # it starts rollouts again when the failure has been raised
            store.raise_failure()
        if self._may_collect():
            self._collect()
            if store.num_ready >= count and store.state.running:
                await self._let_arrivals_settle()
                self._collect()
        if store.num_ready >= count and not store.state.is_edited:
            return True
        if transitions.is_starving(rules, store.state) and store.num_finished < count:
            error = create_starvation_error(rules, store.state, self.config, store.num_finished)
            store.set(transitions.hand_out(store.state, ()))  # restart the counts
            raise error
        return False

    def _find_deadline(self, begun: float, timeout_s: float | None) -> float:
        """Return the end of a wait that began at `begun`, if no rollout ends."""
        if timeout_s is not None:
            return begun + timeout_s
        patience_s = self.asynchronous.patience_s
        return math.inf if patience_s is None else max(begun, self._store.state.last_end) + patience_s

    def _collect(self) -> None:
        """Move finished rollouts into the cache, without those that are too old."""
        self._store.collect()
        self._tasks.wake()  # the queue has space, and dropped groups have returned their capacity

    async def generate_batch(self) -> RolloutBatch:
        """Return the next batch: config.batch_size whole groups, rewarded, filtered, in the order of their prompts.

        Returns: a batch whose metadata have, of the groups since the last batch, num_groups_filtered (by filter_fn), num_groups_purged (too
            old), num_groups_retried and num_groups_failed (given up); num_groups_ready, num_groups_running and num_groups_waiting;
            engine_idle_s, the seconds since the last batch in which no rollout ran; and of the batch staleness_mean, staleness_max and
            staleness_<k>, the fraction of trained tokens that are k versions behind.
        Raises: as wait().
        """
        groups = await self.wait(self.batch_size)
        samples = [sample for group in groups for sample in group]
        state, now = self._store.state, trio.current_time()
        metadata = {f"num_groups_{name}": state.events.get(name, 0) for name in _EVENTS}
        metadata |= {"num_groups_ready": self._store.num_ready, "num_groups_waiting": len(state.waiting)}
        idle_s = state.idle_s + (0.0 if state.idle_since is None else now - state.idle_since)
        details = {"num_groups_running": len(state.running), "engine_idle_s": idle_s, **take_counts(self.config.generate_fn)}
        idle_since = None if state.idle_since is None else now
        self._store.update(events={}, idle_s=0.0, idle_since=idle_since, num_batches=state.num_batches + 1)
        return convert_to_batch(samples, metadata | details | summarize_staleness(samples, state.version))

    async def _let_arrivals_settle(self) -> None:
        """Let all rollouts that end at this moment arrive: trio runs their tasks in random order, and the result must not depend on it."""
        quiet = 0
        for _ in range(_MOST_SETTLING_PASSES):
            before = self._store.state.num_ended
            await trio.lowlevel.checkpoint()
            quiet = quiet + 1 if self._store.state.num_ended == before else 0
            if quiet == _SETTLING_PASSES:
                return

    # -- edits and checkpoints

    async def edit_residents(self, edit: EditSamples) -> None:
        """Edit the samples held here: those of finished groups, of groups being scored, and of stopped groups.

        Rollouts continue meanwhile. Groups that finish during the edit are not included; neither are groups being generated:
        interrupt() first to include all. wait() hands nothing out, and stopped groups do not start, until the edit ends. If `edit` raises,
        nothing has changed.

        Args:
            edit: called with resident_samples; returns them in the same order, edited.

        Raises: GenerationError if other samples are returned; errors of `edit`.
        """
        store, groups = self._store, dict[int, Group]()
        assert not store.state.is_edited, "edit_residents() is already running; await it before the next call"
        store.set(transitions.begin_edit(store.state))
        try:
            finished, unfinished = store.finished, store.unfinished
            samples = self.resident_samples
            edited = tuple(await edit(samples)) if samples else ()
            _check_same_samples(samples, edited)
            rest = iter(edited)
            edited_finished = [(rollout, tuple(next(rest) for _ in rollout.group)) for rollout in finished]
            groups = {index: tuple(next(rest) for _ in group) for index, group in unfinished.items() if group}
            store.edit_finished({rollout.prompt.index: (rollout, group) for rollout, group in edited_finished})
        finally:
            store.set(transitions.end_edit(store.state, groups))
            self._tasks.release()
            self._wake()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides the next batches, as JSON values; at any moment.

        Running rollouts count as waiting, with the samples that they had when last stopped: interrupt() first to have all of them.
        """
        return self._store.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of state_dict; moves the data buffer, too. Before the block, or after interrupt().

        Raises: CheckpointError if the state is invalid, or has another group size; DataError if the data differ.
        """
        num_running = len(self._store.state.running)
        assert not num_running, f"load_state_dict was called while {num_running} rollouts run: interrupt() first"
        self._store.load_state_dict(state)
        self._wake()


def _check_same_samples(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    found = [(sample.group_index, sample.index) for sample in after]
    if found != [(sample.group_index, sample.index) for sample in before]:
        raise GenerationError(
            f"an edit of {len(before)} resident samples returned {len(after)} samples, or others, or in another order: return each of them "
            "at its place"
        )


def create_workflow_executor(
    data_buffer: DataBuffer, config: RolloutConfig, asynchronous: AsyncConfig, **options: Unpack[ExecutorOptions]
) -> WorkflowExecutor:
    """Create a WorkflowExecutor of the usual parts, in which dropped groups return their capacity. Arguments as of WorkflowExecutor."""
    executor = WorkflowExecutor(data_buffer, config, asynchronous, **options)
    register_capacity_modifiers(executor.manager, create_filtered_capacity_modifier())
    return executor

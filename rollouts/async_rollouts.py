"""WorkflowExecutor: rollouts that are produced while training goes on, none of them trained on beyond the allowed staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import trio

from rollouts.async_config import AsyncConfig, check_async_config
from rollouts.config import RolloutConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError
from rollouts.executor_parts import (
    create_filtered_capacity_modifier,
    create_rollout_book,
    register_capacity_modifiers,
    share_batch_size,
)
from rollouts.generate_fns import take_counts
from rollouts.resident_samples import EditSamples, ResidentSamples
from rollouts.rollout_producer import RolloutProducer
from rollouts.rollout_queue import RolloutCache, RolloutQueue
from rollouts.rollout_runs import RolloutRun, RolloutRuns
from rollouts.samples import convert_to_batch
from rollouts.staleness import RolloutCounts, summarize_staleness
from rollouts.staleness_control import StalenessControlStrategy, StalenessManager
from rollouts.types import Group, RolloutBatch, Sample

_SETTLING_PASSES = 5
_MOST_SETTLING_PASSES = 50


class WorkflowExecutor:
    """Produces rollouts in the background of its block, as many as bounded staleness allows, and hands out whole groups.

        async with create_workflow_executor(data_buffer, config, AsyncConfig(max_staleness=2), engines=engines) as executor:
            batch = await executor.generate_batch()
            ...                                             # train; rollouts go on meanwhile
            executor.set_version(1)                         # after the engines have the new weights; more rollouts may start

    A prompt that was taken from the data is in exactly one place until its group is handed out or given up: waiting (in the order of its
    index; with what it has, if it was stopped), running, or finished. state_dict() holds all of it, at any moment.

    No group is handed out in which a trained token is more than max_staleness versions behind, whatever the strategy; a group that is
    dropped for its age is generated anew or given up (AsyncConfig.on_stale). With max_staleness=0 groups are handed out in the order of
    their prompts, whatever AsyncConfig.order says: batches then equal those of AsyncRolloutManager.

    A rollout that raises is treated as AsyncConfig.on_failure says. What ends the run is raised by wait(), or else at the end of the
    block; its prompt waits again, and nothing new starts until it was raised. Failed reward functions follow RolloutConfig.reward. While
    no engine answers at all, rollouts are tried again without limit of attempts, and wait() gives up after its timeout: dead engines say
    nothing about a prompt.

    At the end of the block engines are told to abort; what unfinished groups have by then (grace_s later) is kept.
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        asynchronous: AsyncConfig,
        *,
        engines: Sequence[InferenceEngine] = (),
        queue: RolloutQueue | None = None,
        cache: RolloutCache | None = None,
        manager: StalenessManager | None = None,
        strategy: StalenessControlStrategy | None = None,
        version: int = 0,
        batches_per_version: int = 1,
        data_parallel_size: int = 1,
    ) -> None:
        """
        Args:
            data_buffer: where prompts come from; its position is part of the executor's state.
            config: with generate_fn set; over_sampling_factor must be 1.
            asynchronous: limits and policies.
            engines: that generate_fn uses, told to abort when rollouts are to stop; see make_request_id.
            queue, cache, manager, strategy: default those of create_workflow_executor, but a manager without any modifier.
            version: of the weights that the engines hold.
            batches_per_version: batches that are trained on between two weight syncs.
            data_parallel_size: trainers that share config's batch, each fed by an executor of its own: limits and batches of this one are
                max(1, n // data_parallel_size).

        Raises: ConfigError if generate_fn is missing, limits contradict each other, or rollouts are to be interrupted without engines.
        """
        if config.generate_fn is None:
            raise ConfigError("RolloutConfig.generate_fn is None: set it, for example to create_generate_fn(engines, tokenizer, params)")
        check_async_config(asynchronous, config)
        self._config = config
        self._asynchronous = asynchronous
        self._batch_size = share_batch_size(config, data_parallel_size)
        self._batches_per_version = batches_per_version
        self._book = create_rollout_book(
            data_buffer,
            config,
            asynchronous,
            engines,
            queue=queue,
            cache=cache,
            manager=manager,
            strategy=strategy,
            version=version,
            batches_per_version=batches_per_version,
            data_parallel_size=data_parallel_size,
        )
        self._finished = self._book.finished
        self._runs = RolloutRuns(
            config,
            config.generate_fn,
            engines,
            self._settle,
            max_concurrent=self._book.manager.limits.max_concurrent,
            timeout_s=asynchronous.rollout_timeout_s,
            needs_versions=asynchronous.segment_wise,
        )
        self._residents = ResidentSamples(self._book.schedule, self._finished, self._runs)
        self._producer = RolloutProducer(self._book, self._runs, self._wake_waiter)
        self._num_batches = 0
        self._collected_version = -1
        self._block: AbstractAsyncContextManager[None] | None = None
        self._arrival = trio.lowlevel.ParkingLot()  # wait()

    @property
    def config(self) -> RolloutConfig:
        """What its batches are."""
        return self._config

    @property
    def asynchronous(self) -> AsyncConfig:
        """Its limits and policies."""
        return self._asynchronous

    @property
    def batches_per_version(self) -> int:
        """Batches that are trained on between two weight syncs."""
        return self._batches_per_version

    @property
    def version(self) -> int:
        """Of the weights that generate now."""
        return self._book.version

    @property
    def batch_size(self) -> int:
        """Groups in a batch."""
        return self._batch_size

    @property
    def manager(self) -> StalenessManager:
        """Counts rollouts and says how many more may start."""
        return self._book.manager

    @property
    def resident_samples(self) -> tuple[Sample, ...]:
        """All samples that are here and not being generated: finished groups by age, then those that are being scored, then what stopped
        groups have, both by index."""
        return self._residents.samples

    def get_stats(self) -> RolloutCounts:
        """Where the rollouts are."""
        return self._book.manager.get_stats()

    # -- the block

    async def __aenter__(self) -> WorkflowExecutor:
        assert self._block is None, "the executor's block is already open"
        self._block = self._producer.open()
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
        """Start no more rollouts, tell the engines to abort, and return when none is generated.

        What has not returned after RolloutConfig.grace_s is cancelled. Unfinished groups then wait with the tokens they have, or with those
        that they began with where they were cancelled (num_groups_cut). What is being scored goes on: it needs no engine. Until resume()
        wait() returns only what is there, or was being scored. All requests of the engines are aborted, also those of others.
        """
        await self._producer.interrupt()

    def resume(self) -> None:
        """Start rollouts again after interrupt()."""
        self._producer.resume()
        self._wake_waiter()

    def set_version(self, version: int) -> None:
        """The engines generate with the weights of this version from now on; more rollouts may start.

        Those that run and were begun too long ago are aborted, and begun anew where their tokens are too old (num_groups_retried).

        Raises: ConfigError if the version goes backwards.
        """
        if version < self._book.version:
            raise ConfigError(
                f"the weight version was set to {version}, but it is {self._book.version} already: versions only rise. Count syncs from "
                "the version that the run was resumed at, or load the state of that version first"
            )
        self._book.version = version
        self._producer.stop_outdated(self._asynchronous.max_staleness)
        self._wake()

    # -- who looks when

    def _settle(self, run: RolloutRun) -> None:
        self._book.settle(run)
        self._wake()

    def _wake(self) -> None:
        """Let those look who may have something to do now."""
        self._producer.wake()
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._book.num_wanted and (self._book.failures or self._may_collect() or self._book.is_starving):
            self._arrival.unpark_all()

    # -- batches

    def _may_collect(self) -> bool:
        is_enough = self._finished.num_ready >= self._book.num_wanted
        return not self._residents.is_being_edited and (is_enough or self._collected_version != self._book.version)

    async def wait(self, count: int, timeout_s: float | None = None) -> tuple[Group, ...]:
        """The `count` oldest finished groups: in the order in which they finished, at the same moment in that of their prompts.

        Args:
            count: groups; at least 1.
            timeout_s: to wait, in all; None = until no rollout has come to its end for AsyncConfig.patience_s.

        Returns: whole groups, none of them with a trained token more than max_staleness versions behind.
        Raises: GenerationTimeout that says how many are there; GenerationError if filter_fn refuses too many; what ended a rollout, as
            AsyncConfig.on_failure has it. Nothing is lost by any of them, and the next wait() goes on.
        """
        assert self._producer.is_open, "the executor's block is not open: async with executor: ..."
        assert not self._book.num_wanted, "wait() is already running; await it before the next call"
        if count < 1:
            raise ConfigError(f"{count} groups were asked for, expected at least 1")
        begun = trio.current_time()
        self._book.num_wanted, self._collected_version = count, -1
        self._producer.wake()  # what is wanted may start, or a queue that is full may be emptied
        try:
            while True:
                if self._book.failures:
                    self._producer.wake()  # it starts rollouts again when the failure has been raised
                    self._book.raise_failure()
                if self._may_collect():
                    self._collect()
                    if self._finished.num_ready >= count and self._runs:
                        await self._let_arrivals_settle()
                        self._collect()
                if self._finished.num_ready >= count and not self._residents.is_being_edited:
                    await trio.lowlevel.checkpoint_if_cancelled()  # no more than that: who trains on it need not wait for what starts now
                    return self._book.hand_out(count)
                if self._book.is_starving and self._finished.size < count:
                    raise self._book.create_starvation_error()
                deadline = self._find_deadline(begun, timeout_s)
                if trio.current_time() >= deadline:
                    break
                with trio.move_on_at(deadline):
                    await self._arrival.park()
        finally:
            self._book.num_wanted = 0
        raise self._book.create_wait_error(count, timeout_s, num_running=len(self._runs), interrupted=self._producer.is_interrupted)

    def _find_deadline(self, begun: float, timeout_s: float | None) -> float:
        """When a wait that was begun at that moment is over, should nothing more happen."""
        if timeout_s is not None:
            return begun + timeout_s
        patience_s = self._asynchronous.patience_s
        return math.inf if patience_s is None else max(begun, self._book.last_end) + patience_s

    def _collect(self) -> None:
        """Bring what is finished into the cache, without what is too old."""
        self._collected_version = self._book.version
        self._book.collect()
        self._producer.wake()  # the queue has room, and dropped groups have given theirs back

    async def generate_batch(self) -> RolloutBatch:
        """The next batch: as many whole groups as config.batch_size says, rewarded, filtered, in the order of their prompts.

        Returns: a batch whose metadata have, of the groups since the last batch, num_groups_filtered (by filter_fn), num_groups_purged (too
            old), num_groups_retried and num_groups_failed (given up); num_groups_ready, num_groups_running and num_groups_waiting;
            engine_idle_s, the seconds since the last batch in which no rollout ran; and of the batch staleness_mean, staleness_max and
            staleness_<k>, the fraction of trained tokens that are k versions behind.
        Raises: as wait().
        """
        groups = await self.wait(self._batch_size)
        samples = [sample for group in groups for sample in group]
        metadata = self._book.take_counts() | {"num_groups_running": len(self._runs), "engine_idle_s": self._runs.take_idle_s()}
        metadata |= take_counts(self._config.generate_fn)
        batch = convert_to_batch(samples, metadata | summarize_staleness(samples, self._book.version))
        self._num_batches += 1
        return batch

    async def _let_arrivals_settle(self) -> None:
        """Let all rollouts that end at this moment arrive: trio runs their tasks in random order, and the order must not be chance."""
        quiet = 0
        for _ in range(_MOST_SETTLING_PASSES):
            before = self._book.num_ended
            await trio.lowlevel.checkpoint()
            quiet = quiet + 1 if self._book.num_ended == before else 0
            if quiet == _SETTLING_PASSES:
                return

    # -- what is here

    async def edit_residents(self, edit: EditSamples) -> None:
        """Change the samples that are here: finished groups, those that are being scored, and what stopped groups have.

        Rollouts go on meanwhile. Groups that finish during the edit are not in it; neither are those that are being generated, so
        interrupt() before it brings all in. wait() hands nothing out, and stopped groups do not start, until it ends. If `edit` raises,
        nothing has changed.

        Args:
            edit: gets resident_samples and returns them in the same order, edited.

        Raises: GenerationError if other samples come back; what `edit` raises.
        """
        try:
            await self._residents.edit(edit)
        finally:
            self._wake()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides which batches come next, as JSON values; at any moment.

        What runs counts as waiting, with the samples that it had when it was last stopped: interrupt() before it to have all of them.
        """
        return {**self._book.state_dict(self._runs), "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict; moves the data buffer, too. Before the block, or after interrupt().

        Raises: CheckpointError if the state is not one, or is of another group size; DataError if the data differ.
        """
        assert not len(self._runs), f"load_state_dict was called while {len(self._runs)} rollouts run: interrupt() first"
        self._book.load_state_dict(state)
        self._num_batches = int(state.get("num_batches", 0))
        self._wake()


def create_workflow_executor(
    data_buffer: DataBuffer,
    config: RolloutConfig,
    asynchronous: AsyncConfig,
    *,
    engines: Sequence[InferenceEngine] = (),
    version: int = 0,
    batches_per_version: int = 1,
    data_parallel_size: int = 1,
    queue: RolloutQueue | None = None,
    cache: RolloutCache | None = None,
    strategy: StalenessControlStrategy | None = None,
) -> WorkflowExecutor:
    """A WorkflowExecutor of the usual parts, in which dropped groups give their room back. Arguments as there."""
    executor = WorkflowExecutor(
        data_buffer,
        config,
        asynchronous,
        engines=engines,
        queue=queue,
        cache=cache,
        strategy=strategy,
        version=version,
        batches_per_version=batches_per_version,
        data_parallel_size=data_parallel_size,
    )
    register_capacity_modifiers(executor.manager, create_filtered_capacity_modifier())
    return executor

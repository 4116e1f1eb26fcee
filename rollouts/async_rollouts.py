"""WorkflowExecutor: rollouts that are produced while training goes on, none of them trained on beyond the allowed staleness."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeAlias

import trio

from rollouts.async_config import AsyncConfig, check_async_config
from rollouts.config import RolloutConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineProtocolError,
    EngineStatusError,
    GenerationError,
    GenerationTimeout,
    raise_single_errors,
)
from rollouts.executor_parts import (
    create_cache,
    create_filtered_capacity_modifier,
    create_queue,
    create_staleness_manager,
    create_staleness_strategy,
    register_capacity_modifiers,
    share_batch_size,
)
from rollouts.finished_rollouts import FinishedRollouts
from rollouts.generate_fns import PendingGroup
from rollouts.generation import create_starvation_error
from rollouts.prompt_schedule import PromptSchedule
from rollouts.rollout_queue import FinishedRollout, RolloutCache, RolloutQueue, find_oldest_version
from rollouts.rollout_runs import RolloutRun, RolloutRuns
from rollouts.samples import convert_to_batch
from rollouts.staleness import RolloutCounts, count_token_ages
from rollouts.staleness_control import StalenessControlStrategy, StalenessManager
from rollouts.types import Group, RolloutBatch, Sample

EditSamples: TypeAlias = Callable[[tuple[Sample, ...]], Awaitable[Sequence[Sample]]]
"""Samples -> the same samples in the same order, some of them with other values."""

_SETTLING_PASSES = 5
_MOST_SETTLING_PASSES = 50
_OUTAGE_RETRY_S = 0.5  # at least, between two attempts while no engine answers


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

        Raises: ConfigError if generate_fn is missing, or limits contradict each other.
        """
        if config.generate_fn is None:
            raise ConfigError("RolloutConfig.generate_fn is None: set it, for example to create_generate_fn(engines, tokenizer, params)")
        check_async_config(asynchronous, config)
        self._config = config
        self._asynchronous = asynchronous
        self._engines = tuple(engines)
        self._version = version
        self._batch_size = share_batch_size(config, data_parallel_size)
        if manager is None:
            manager = create_staleness_manager(config, asynchronous, batches_per_version, data_parallel_size)
        self._manager = manager
        if version > 0 and self._manager.get_stats() == RolloutCounts():
            self._manager.on_version_recovered(version)
        if queue is None:
            queue = create_queue(asynchronous, manager.limits.batch_size, data_parallel_size)
        if queue.maxsize < self._batch_size:
            raise ConfigError(
                f"the rollout queue holds {queue.maxsize} groups, but a batch has {self._batch_size}: increase queue_size to at least that"
            )
        self._schedule = PromptSchedule(data_buffer)
        self._finished = FinishedRollouts(
            queue,
            create_cache() if cache is None else cache,
            create_staleness_strategy(asynchronous) if strategy is None else strategy,
            max_staleness=asynchronous.max_staleness,
            in_order=asynchronous.order == "submitted" or asynchronous.max_staleness == 0,
            waits=asynchronous.when_queue_full == "wait",
        )
        self._runs = RolloutRuns(
            config,
            config.generate_fn,
            engines,
            self._settle,
            max_concurrent=self._manager.limits.max_concurrent,
            timeout_s=asynchronous.rollout_timeout_s,
            needs_versions=asynchronous.segment_wise,
        )
        self._failures: list[Exception] = []  # for wait() to raise
        self._last_error: Exception | None = None
        self._num_ended = 0  # rollouts that came to their end, whatever became of them
        self._num_batches = 0
        self._counts: Counter[str] = Counter()  # since the last batch
        self._refused: deque[Group] = deque(maxlen=config.max_filter_attempts * self._batch_size)  # by filter_fn, since the last batch
        self._wanted = 0  # groups that wait() waits for
        self._collected_version = -1
        self._interrupted = False
        self._editing = False
        self._nursery: trio.Nursery | None = None
        self._block: AbstractAsyncContextManager[None] | None = None
        self._work = trio.lowlevel.ParkingLot()  # the producer
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
    def version(self) -> int:
        """Of the weights that generate now."""
        return self._version

    @property
    def batch_size(self) -> int:
        """Groups in a batch."""
        return self._batch_size

    @property
    def resident_samples(self) -> tuple[Sample, ...]:
        """All samples that are here and not being generated: finished groups by age, then what stopped groups have, by index."""
        groups = [rollout.group for rollout in self._finished.rollouts] + [pending.samples for pending in self._schedule.waiting]
        return tuple(sample for group in groups for sample in group)

    def get_stats(self) -> RolloutCounts:
        """Where the rollouts are."""
        return self._manager.get_stats()

    # -- the block

    async def __aenter__(self) -> WorkflowExecutor:
        assert self._block is None, "the executor's block is already open"
        self._block = self._open()
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None, "the executor's block is not open"
        block, self._block = self._block, None
        return await block.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        self._interrupted = False
        self._runs.begin_idling()
        try:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._produce)
                    nursery.start_soon(self._runs.watch_deadlines, nursery)
                    try:
                        yield
                        await self.interrupt()
                    except Exception as error:
                        await self.interrupt()
                        for failure in self._failures[:1]:
                            error.add_note(f"beside it, {len(self._failures)} rollouts failed; the first: {failure!r}")
                        self._failures.clear()
                        raise
                    finally:
                        nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            for run in self._runs.drop_cancelled():
                self._give_back(run)
        self._raise_failure()

    async def _produce(self) -> None:
        while True:
            self._start_rollouts()
            with trio.move_on_at(self._schedule.next_time):
                await self._work.park()

    def _start_rollouts(self) -> None:
        """Start as many rollouts as may start now."""
        all_started = False
        while not (all_started or self._interrupted or self._failures or self._finished.is_blocked):
            num_waiting = self._schedule.num_waiting
            taken = self._schedule.take(self._manager.get_usable_capacity(self._version), trio.current_time())
            self._manager.on_rollout_enqueued(len(taken) - (num_waiting - self._schedule.num_waiting))  # those that are new
            num_started = sum(self._start(pending) for pending in taken)
            all_started = num_started == len(taken)

    def _start(self, pending: PendingGroup) -> bool:
        """Start a rollout; False if it was too old to go on and waits again, or was given up."""
        assert self._nursery is not None, "the producer runs outside of its block"
        index, version = pending.prompt.index, self._version
        begun = self._schedule.find_begun_version(index, version)
        if version - find_oldest_version(pending.samples, begun=begun, newest=version) > self._asynchronous.max_staleness:
            self._schedule.end(index)
            self._manager.on_rollout_forgotten()
            self._begin_anew(pending)
            return False
        self._manager.on_rollout_submitted()
        self._runs.start(self._nursery, pending, begun, self._num_ended)
        return True

    # -- how rollouts end

    def _settle(self, run: RolloutRun) -> None:
        """Give a rollout that does not run any more its place."""
        if run.error is not None and run.scoring:
            self._fail(run, run.error)  # of the reward function, which had its own attempts, or of the filter
        elif run.error is not None:
            self._handle_failure(run, run.error)
        elif run.was_stopped and run.timed_out:
            self._handle_failure(run, _create_timeout_error(run, self._asynchronous.rollout_timeout_s))
        elif run.was_stopped:
            self._give_back(run)
        else:
            self._num_ended += 1
            self._schedule.end(run.index)
            self._take_in(run)
            self._pass_on()
        self._wake()

    def _take_in(self, run: RolloutRun) -> None:
        """A rollout has come to its end: accept or refuse it."""
        prompt, group = run.pending.prompt, run.group
        if group is None:
            self._refuse(run.index, "num_groups_failed")
        elif not run.passes:
            self._refused.append(group)
            self._refuse(run.index, "num_groups_filtered")
        else:
            oldest = find_oldest_version(group, begun=run.begun_version, newest=self._version)
            rollout = FinishedRollout(prompt, group, oldest)
            if self._finished.refuses(rollout, self._version):
                self._manager.on_rollout_rejected()
                self._begin_anew(run.pending)
            else:
                self._manager.on_rollout_accepted()
                self._finished.hold(rollout, trio.current_time())

    def _refuse(self, index: int, reason: str) -> None:
        """Give up a rollout that ran."""
        self._manager.on_rollout_rejected()
        self._schedule.forget_attempts(index)
        self._counts[reason] += 1
        self._counts["num_refused"] += 1

    def _pass_on(self) -> None:
        try:
            self._finished.pass_on(now=trio.current_time(), first_open=self._schedule.first_open)
        except ConfigError as error:  # the queue is full
            self._failures.append(error)

    def _begin_anew(self, pending: PendingGroup) -> None:
        """A group was too old: let its prompt wait again, without what there was, or give it up."""
        index = pending.prompt.index
        self._counts["num_groups_purged"] += 1
        if self._asynchronous.on_stale == "retry" and self._schedule.count_attempt(index) < self._asynchronous.max_attempts:
            self._counts["num_groups_retried"] += 1
            self._schedule.add(PendingGroup(pending.prompt))
            self._manager.on_rollout_enqueued()
        else:
            self._schedule.forget_attempts(index)

    def _give_back(self, run: RolloutRun) -> None:
        """A rollout was stopped: it waits again, with what it has."""
        self._manager.on_rollout_returned()
        self._schedule.add(run.pending, begun_version=run.begun_version)

    def _fail(self, run: RolloutRun, error: Exception) -> None:
        """The run is to end with this error. The prompt waits again, in case it goes on all the same."""
        self._schedule.forget_attempts(run.index)
        self._give_back(run)
        self._failures.append(error)

    def _handle_failure(self, run: RolloutRun, error: Exception) -> None:
        """A rollout was not generated: do as on_failure says."""
        policy, attempts = self._asynchronous.on_failure, self._asynchronous.max_attempts
        self._last_error = error
        self._counts["num_failures"] += 1
        if policy == "raise":
            self._fail(run, error)
        elif _may_be_outage(error) and run.num_ended_before == self._num_ended:
            self._retry_later(run, max(self._asynchronous.retry_delay_s, _OUTAGE_RETRY_S))
        elif policy == "drop":
            self._schedule.end(run.index)
            self._refuse(run.index, "num_groups_failed")
            self._pass_on()
        elif self._schedule.count_attempt(run.index) < attempts:
            self._retry_later(run, self._asynchronous.retry_delay_s)
        else:
            final = GenerationError(
                f"the rollout of prompt {run.index} failed in {attempts} attempts, the last time with {type(error).__name__}: {error}. "
                "Repair its cause, raise max_attempts, or set on_failure='drop' to go on without such prompts"
            )
            final.__cause__ = error
            self._fail(run, final)

    def _retry_later(self, run: RolloutRun, delay_s: float) -> None:
        self._counts["num_groups_retried"] += 1
        self._manager.on_rollout_rejected()
        self._manager.on_rollout_enqueued()
        self._schedule.add(run.pending, begun_version=run.begun_version, start_at=trio.current_time() + delay_s)

    # -- from outside

    async def interrupt(self) -> None:
        """Start no more rollouts, tell the engines to abort, and return when none runs.

        What has not returned after RolloutConfig.grace_s is cancelled. Unfinished groups then wait with the tokens they have, or with those
        that they began with where they were cancelled. Until resume() wait() returns only what is there. All requests of the engines are
        aborted, also those of others.
        """
        self._interrupted = True
        await self._runs.stop_all()

    def resume(self) -> None:
        """Start rollouts again after interrupt()."""
        self._interrupted = False
        self._wake()

    def set_version(self, version: int) -> None:
        """The engines generate with the weights of this version from now on; more rollouts may start, and some may be too old.

        Raises: ConfigError if the version goes backwards.
        """
        if version < self._version:
            raise ConfigError(
                f"the weight version was set to {version}, but it is {self._version} already: versions only rise. Count syncs from the "
                "version that the run was resumed at, or load the state of that version first"
            )
        self._version = version
        self._wake()

    def _wake(self) -> None:
        """Let those look who may have something to do now."""
        self._work.unpark_all()
        if self._wanted and (self._failures or self._may_collect() or self._is_starving()):
            self._arrival.unpark_all()

    # -- batches

    def _may_collect(self) -> bool:
        return not self._editing and (self._finished.num_ready >= self._wanted or self._collected_version != self._version)

    def _is_starving(self) -> bool:
        return self._counts["num_refused"] >= self._config.max_filter_attempts * self._batch_size

    async def wait(self, count: int, timeout_s: float | None = None) -> tuple[Group, ...]:
        """The `count` oldest finished groups: in the order in which they finished, at the same moment in that of their prompts.

        Args:
            count: groups; at least 1.
            timeout_s: to wait; None = AsyncConfig.patience_s.

        Returns: whole groups, none of them with a trained token more than max_staleness versions behind.
        Raises: GenerationTimeout that says how many are there; GenerationError if filter_fn refuses too many; what ended a rollout, as
            AsyncConfig.on_failure has it. Nothing is lost by any of them, and the next wait() goes on.
        """
        assert self._nursery is not None, "the executor's block is not open: async with executor: ..."
        assert not self._wanted, "wait() is already running; await it before the next call"
        if count < 1:
            raise ConfigError(f"{count} groups were asked for, expected at least 1")
        timeout_s = self._asynchronous.patience_s if timeout_s is None else timeout_s
        self._wanted, self._collected_version = count, -1
        try:
            with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
                while True:
                    self._raise_failure()
                    if self._may_collect():
                        self._collect()
                        if self._finished.num_ready >= count:
                            await self._let_arrivals_settle()
                            self._collect()
                    if self._finished.num_ready >= count and not self._editing:
                        return self._hand_out(count)
                    if self._is_starving():
                        raise self._create_starvation_error(count)
                    await self._arrival.park()
        finally:
            self._wanted = 0
        raise self._create_wait_error(count, timeout_s)

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
        metadata = {name: self._counts[name] for name in ("num_groups_filtered", "num_groups_purged", "num_groups_retried")}
        metadata["num_groups_failed"] = self._counts["num_groups_failed"]
        metadata["num_groups_ready"] = self._finished.num_ready
        metadata["num_groups_running"] = len(self._runs)
        metadata["num_groups_waiting"] = self._schedule.num_waiting
        batch = convert_to_batch(
            samples, metadata | {"engine_idle_s": self._runs.take_idle_s()} | summarize_staleness(samples, self._version)
        )
        self._counts.clear()
        self._refused.clear()
        self._num_batches += 1
        return batch

    def _collect(self) -> None:
        """Bring what is finished into the cache, without what is too old."""
        self._collected_version = self._version
        now = trio.current_time()
        try:
            dropped = self._finished.collect(self._version, now=now, first_open=self._schedule.first_open)
        except ConfigError as error:  # the queue is full
            self._failures.append(error)
            return
        if dropped:
            self._manager.on_rollout_dropped(len(dropped), self._version)
            for rollout in dropped:
                self._begin_anew(PendingGroup(rollout.prompt))
        self._work.unpark_all()  # the queue has room, and dropped groups have given theirs back

    def _hand_out(self, count: int) -> tuple[Group, ...]:
        taken = self._finished.take(count)
        for rollout in taken:
            self._schedule.forget_attempts(rollout.prompt.index)
        self._counts["num_refused"] = 0
        return tuple(rollout.group for rollout in taken)

    async def _let_arrivals_settle(self) -> None:
        """Let all rollouts that end at this moment arrive: trio runs their tasks in random order, and the order must not be chance."""
        quiet = 0
        for _ in range(_MOST_SETTLING_PASSES):
            before = self._num_ended
            await trio.lowlevel.checkpoint()
            quiet = quiet + 1 if self._num_ended == before else 0
            if quiet == _SETTLING_PASSES:
                return

    def _raise_failure(self) -> None:
        if not self._failures:
            return
        first, *others = self._failures
        self._failures.clear()
        if others:
            first.add_note(f"beside it, {len(others)} more rollouts failed; the last: {others[-1]!r}")
        self._wake()
        raise first

    def _create_wait_error(self, count: int, timeout_s: float | None) -> GenerationTimeout:
        capacity = self._manager.get_capacity(self._version)
        parts = [
            f"{self._finished.num_ready} of the {count} groups that were waited for are there after {timeout_s or 0:g} s: "
            f"{len(self._runs)} are running, {self._schedule.num_waiting} wait to be started"
        ]
        if self._finished.size > self._finished.num_ready:
            parts.append(f"{self._finished.size - self._finished.num_ready} finished ones wait for prompts before them")
        if self._interrupted:
            parts.append("nothing may start before resume()")
        elif not self._runs:
            parts.append(
                f"at version {self._version} the capacity is {capacity}; where it is not above 0, nothing starts before set_version() "
                "tells of newer weights, or dropped groups give their room back (register_capacity_modifiers)"
            )
        if self._last_error is not None:
            failures = self._counts["num_failures"]
            parts.append(
                f"{failures} rollouts failed since the last batch, the last with {type(self._last_error).__name__}: {self._last_error}"
            )
        error = GenerationTimeout("; ".join(parts) + ". Nothing is lost: wait again, or save the state and look at the engines")
        error.__cause__ = self._last_error
        return error

    def _create_starvation_error(self, count: int) -> GenerationError:
        num_dropped = self._counts["num_refused"] - len(self._refused)
        error = create_starvation_error(
            self._config,
            self._finished.num_ready,
            list(self._refused),
            num_dropped=max(0, num_dropped),
            num_rounds=self._config.max_filter_attempts,
        )
        self._counts["num_refused"] = 0
        self._refused.clear()
        return error

    # -- what is here

    async def edit_residents(self, edit: EditSamples) -> None:
        """Change the samples that are here: those of finished groups, and what stopped groups have. Rollouts go on meanwhile.

        Groups that finish during the edit are not in it; neither are those that run, so interrupt() before it brings all in. wait() hands
        nothing out, and stopped groups do not start, until it ends. If `edit` raises, nothing has changed.

        Args:
            edit: gets resident_samples and returns them in the same order, edited.

        Raises: GenerationError if other samples come back; what `edit` raises.
        """
        assert not self._editing, "edit_residents() is already running; await it before the next call"
        self._editing = True
        edited_pending: list[PendingGroup] = []
        pending = self._schedule.hold_back()
        try:
            rollouts = self._finished.rollouts
            groups = [*(rollout.group for rollout in rollouts), *(group.samples for group in pending)]
            samples = tuple(sample for group in groups for sample in group)
            edited = tuple(await edit(samples)) if samples else ()
            _check_same_samples(samples, edited)
            rest = iter(edited)
            edited_groups = [tuple(next(rest) for _ in group) for group in groups]
            finished = edited_groups[: len(rollouts)]
            self._finished.replace_groups({rollout.prompt.index: group for rollout, group in zip(rollouts, finished, strict=True)})
            edited_pending = [PendingGroup(old.prompt, group) for old, group in zip(pending, edited_groups[len(rollouts) :], strict=True)]
        finally:
            self._schedule.release(edited_pending)
            self._editing = False
            self._wake()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides which batches come next, as JSON values; at any moment.

        What runs counts as waiting, with the samples that it had when it was last stopped: interrupt() before it to have all of them.
        """
        return {
            **self._schedule.state_dict(self._runs.pending),
            "finished": self._finished.state_dict(),
            "manager": self._manager.state_dict(),
            "version": self._version,
            "num_batches": self._num_batches,
            "n_samples_per_prompt": self._config.n_samples_per_prompt,
            "n_baseline_samples": self._config.n_baseline_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict; moves the data buffer, too. Before the block, or after interrupt().

        Raises: CheckpointError if the state is not one, or is of another group size; DataError if the data differ.
        """
        assert not len(self._runs), f"load_state_dict was called while {len(self._runs)} rollouts run: interrupt() first"
        needed = {"buffer", "pending", "begun", "attempts", "finished", "manager", "version", "num_batches", "n_samples_per_prompt"}
        missing = sorted(needed - set(state))
        if missing:
            raise CheckpointError(f"the saved state of asynchronous rollouts lacks {missing}; it has {sorted(map(str, state))}")
        for name in ("n_samples_per_prompt", "n_baseline_samples"):
            saved, own = state.get(name, 0), getattr(self._config, name)
            if saved != own:
                raise CheckpointError(
                    f"the saved rollouts have {name} {saved}, but the config has {own}: groups that wait would not fit. Resume with the "
                    "saved value."
                )
        self._manager.load_state_dict(state["manager"])
        self._schedule.load_state_dict(state)
        self._finished.load_state_dict(state["finished"])
        self._version = int(state["version"])
        self._num_batches = int(state["num_batches"])
        self._failures.clear()
        self._counts.clear()
        self._refused.clear()
        self._last_error = None
        self._wake()


def summarize_staleness(samples: Iterable[Sample], version: int) -> dict[str, float]:
    """staleness_mean, staleness_max and staleness_<k>, the fraction of trained tokens that are k versions behind.

    Samples without weight_versions do not count; nothing is returned where no token counts.
    """
    ages = count_token_ages((sample for sample in samples if sample.weight_versions is not None), version)
    total = sum(ages.values())
    if not total:
        return {}
    mean = sum(age * n for age, n in ages.items()) / total
    return {"staleness_mean": mean, "staleness_max": float(max(ages)), **{f"staleness_{age}": n / total for age, n in ages.items()}}


def _create_timeout_error(run: RolloutRun, timeout_s: float | None) -> GenerationTimeout:
    num_tokens = sum(len(sample.tokens) for sample in run.pending.samples)
    return GenerationTimeout(
        f"the rollout of prompt {run.index} did not end within rollout_timeout_s ({timeout_s} s); it was aborted with {num_tokens} tokens, "
        "prompts included, which are kept. Raise rollout_timeout_s, or lower max_tokens"
    )


def _may_be_outage(error: Exception) -> bool:
    """Whether the error can come from an engine that is not there, rather than from what it was asked."""
    if isinstance(error, EngineStatusError):
        return error.status >= 500
    return isinstance(error, EngineError) and not isinstance(error, EngineProtocolError)


def _check_same_samples(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    found = [(sample.group_index, sample.index) for sample in after]
    if found != [(sample.group_index, sample.index) for sample in before]:
        raise GenerationError(
            f"an edit of {len(before)} resident samples returned {len(after)} samples, or others, or in another order: return each of them "
            "at its place"
        )


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
    manager = create_staleness_manager(config, asynchronous, batches_per_version, data_parallel_size)
    register_capacity_modifiers(manager, create_filtered_capacity_modifier())
    return WorkflowExecutor(
        data_buffer,
        config,
        asynchronous,
        engines=engines,
        queue=queue,
        cache=cache,
        manager=manager,
        strategy=strategy,
        version=version,
        batches_per_version=batches_per_version,
        data_parallel_size=data_parallel_size,
    )

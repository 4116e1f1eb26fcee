"""Tasks of rollouts, in the nursery of a block: one each, from its start to its end, its deadline or an interruption.

A rollout of a generate function with `begin_group` has a task only if it fails or is to be scored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import trio

from rollouts.asynchronous import transitions
from rollouts.asynchronous.messages import describe_cut
from rollouts.asynchronous.state import Failed, Scored, Stopped
from rollouts.asynchronous.store import RolloutStore
from rollouts.data.samples import ask_filter, describe_sample
from rollouts.data.segments import start_segments
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import (
    ConfigError,
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineStatusError,
    flatten_errors,
    raise_single_errors,
    reduce_alike,
)
from rollouts.generation.contract import (
    PendingGroup,
    bind_begin,
    bind_generate_fn,
    collect_requests,
    is_finished,
    note_prompt,
    score_generated_group,
)
from rollouts.generation.single_turn import make_request_id
from rollouts.types import Group, Status, change

_ABORT_AGAIN_S = 0.25  # seconds between two aborts: a rollout of several requests may send its next one after an abort
_ANSWER_S = 10.0  # seconds for a live engine to report its weight version


@dataclass(frozen=True)
class RolloutTask:
    """Handles of a running rollout."""

    request_ids: set[str]  # ids of its requests, in addition to those of its samples
    generated: trio.Event  # set when its generation is over
    scope: trio.CancelScope | None  # None = it generates without a task


class RolloutTasks:
    """Start rollouts while its block is open, when woken or when a prompt's time has come; parent of all their tasks.

    The store decides which prompts start and how a rollout ends. Rollouts that still run when the block ends wait again.
    """

    def __init__(self, store: RolloutStore, on_change: Callable[[], None]) -> None:
        """
        Args:
            on_change: called after each start and end of rollouts, and when a prompt was given up.
        """
        parts = store.parts
        assert parts.config.generate_fn is not None, "create_parts() refuses a config without generate_fn"
        self._store = store
        self._on_change = on_change
        self._generate = bind_generate_fn(
            parts.config.generate_fn,
            parts.config.n_samples_per_prompt,
            num_baseline=parts.config.n_baseline_samples,
            thread_limiter=trio.CapacityLimiter(max(1, parts.manager.limits.max_concurrent)),
        )
        config = parts.config
        self._begin = bind_begin(config.generate_fn, config.n_samples_per_prompt, num_baseline=config.n_baseline_samples)
        is_segment_wise = config.segment_log_probs or parts.rules.asynchronous.segment_wise
        self._is_scored_at_once = config.reward_fn is None and config.filter_fn is None and not is_segment_wise
        self._probe = _EngineProbe(parts.engines)
        self._tasks: dict[int, RolloutTask] = {}  # by index of the prompt
        self._nursery: trio.Nursery | None = None  # None = the block is not open
        self._work = trio.lowlevel.ParkingLot()  # the producer
        self._is_woken = False  # whether the producer was woken since it last began to look
        self._edited = trio.lowlevel.ParkingLot()  # rollouts that end while their samples are being edited

    @property
    def are_open(self) -> bool:
        """Whether rollouts can run."""
        return self._nursery is not None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Open the block in which rollouts run. At its end they are interrupted, and a failure not yet raised is raised."""
        self._store.update(interrupted=False, idle_since=trio.current_time(), idle_s=0.0)
        try:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._produce)
                    try:
                        yield
                        await self.interrupt()
                    except Exception as error:
                        try:
                            await self.interrupt()
                        except Exception as problem:  # from an engine's abort; it must not hide the reason for the end of the block
                            error.add_note(f"rollouts could not be stopped: {problem!r}")
                        failures = self._store.state.failures
                        if failures:
                            error.add_note(f"beside it, {len(failures)} rollouts failed; the first: {failures[0]!r}")
                        self._store.update(failures=())
                        raise
                    finally:
                        nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._tasks.clear()
            self._store.give_back()
        self._store.raise_failure()

    # -- how rollouts start

    def wake(self) -> None:
        """Check soon which rollouts may start: there may be capacity, or a waiting prompt."""
        self._is_woken = True
        self._work.unpark_all()

    def release(self) -> None:
        """Let rollouts end that waited for the end of an edit."""
        self._edited.unpark_all()

    async def _produce(self) -> None:
        while True:
            now, self._is_woken = trio.current_time(), False
            if not self._store.state.interrupted:
                for index in self._store.start_rollouts():
                    self._start(index)
                self._on_change()
            if self._is_woken:  # a group ended as it was begun, without a task
                await trio.lowlevel.checkpoint()
                continue
            # a group that was due before and did not start waits for capacity, not for a time that has passed
            due = transitions.find_next_start(self._store.state, now)
            if due == math.inf:  # a cancel scope costs more than the rest of this function
                await self._work.park()
                continue
            with trio.move_on_at(due):
                await self._work.park()

    def _start(self, index: int) -> None:
        assert self._nursery is not None, "rollouts start in the block only"
        pending = self._store.state.running[index].pending
        with collect_requests() as request_ids:  # the task begins with a copy of the context
            if self._begin is None or (pending.samples and is_finished(pending.samples)):  # it was stopped while it was scored
                task = self._start_task(index, request_ids, trio.Event())
            else:
                task = self._tasks[index] = RolloutTask(request_ids, trio.Event(), None)
                self._begin(pending, partial(self._end_generation, index, task))
        if self._store.parts.rules.asynchronous.rollout_timeout_s is not None:
            self._nursery.start_soon(self._watch, index, task, self._store.parts.rules.asynchronous.rollout_timeout_s)

    def _start_task(self, index: int, request_ids: set[str], generated: trio.Event, result: Group | Exception | None = None) -> RolloutTask:
        assert self._nursery is not None, "rollouts run in the block only"
        scope = trio.CancelScope()
        task = self._tasks[index] = RolloutTask(request_ids, generated, scope)
        self._nursery.start_soon(self._run, index, task, scope, result)
        return task

    # -- one rollout

    def _end_generation(self, index: int, task: RolloutTask, result: Group | Exception) -> None:
        """End a rollout without a task, or start one that scores it or asks which engines answer."""
        nursery = self._nursery
        if nursery is None or nursery.cancel_scope.cancel_called or self._tasks.get(index) is not task:  # it was cut, or the block ends
            return
        if not isinstance(result, Exception) and not is_finished(result):
            self._finish(index, task, self._take_unfinished(index, result))
        elif self._is_scored_at_once and not isinstance(result, Exception) and not any(s.status is Status.FAILED for s in result):
            self._finish(index, task, Scored(result, passes=True, before=self._store.state.running[index].pending.samples))
        else:
            self._start_task(index, task.request_ids, task.generated, result)

    async def _run(self, index: int, task: RolloutTask, scope: trio.CancelScope, result: Group | Exception | None) -> None:
        """Run a rollout to its end. result: what was generated without a task; None = it is still to be generated."""
        outcome: Stopped | Failed | Scored | None = None
        try:
            with scope:
                try:
                    outcome = await self._generate_and_score(index, task, result)
                except Exception as error:  # raised by users' functions; the transitions decide about it
                    outcome = self.set_error(index, reduce_alike(error))
                    if outcome.may_be_outage and not self._store.state.running[index].scoring and not scope.cancel_called:
                        outcome = await self._probe.complete(outcome)
                if self._store.state.edited:
                    await self._wait_for_edit(index)
        except Exception as error:  # raised in a nursery of the user while it was cancelled, so that it left the block beside Cancelled
            outcome = self.set_error(index, reduce_alike(error))
        if outcome is None or (scope.cancelled_caught and not isinstance(outcome, Failed)):
            outcome = Stopped(cancelled=True)
        if self._store.state.edited:
            await self._wait_for_edit(index)
        self._finish(index, task, outcome)

    def _finish(self, index: int, task: RolloutTask, outcome: Stopped | Failed | Scored) -> None:
        del self._tasks[index]
        self._store.end(index, outcome)
        task.generated.set()
        if self._store.may_start():
            self.wake()
        self._on_change()

    async def _wait_for_edit(self, index: int) -> None:
        while index in self._store.state.edited:
            await self._edited.park()

    def _take_unfinished(self, index: int, group: Group) -> Stopped:
        """Keep the samples of a rollout that stopped before its end."""
        store, run = self._store, self._store.state.running[index]
        store.set(transitions.update_run(store.state, index, change(run, pending=PendingGroup(run.pending.prompt, group))))
        was_told = run.timed_out or run.outdated or store.state.interrupted
        return Stopped(unchanged=group == run.pending.samples and not was_told)

    async def _generate_and_score(self, index: int, task: RolloutTask, result: Group | Exception | None) -> Stopped | Scored:
        store, config = self._store, self._store.parts.config
        pending = store.state.running[index].pending
        with note_prompt(pending.prompt):
            if isinstance(result, Exception):
                raise result
            group = pending.samples if result is None else result
            if not group or not is_finished(group):
                group = await self._generate(pending)
                if not is_finished(group):
                    return self._take_unfinished(index, group)
            run = change(store.state.running[index], pending=PendingGroup(pending.prompt, group), scoring=True)
            store.set(transitions.update_run(store.state, index, run))
            task.generated.set()
            self._check_versions(group)
            if config.segment_log_probs:
                group = tuple(start_segments(sample) for sample in group)
                run = change(store.state.running[index], pending=PendingGroup(pending.prompt, group))
                store.set(transitions.update_run(store.state, index, run))
            scored = await score_generated_group(group, config.reward_fn, config.reward)
            passes = scored is not None and await ask_filter(scored, config.filter_fn)
            return Scored(scored, passes, before=group)

    def _check_versions(self, group: Group) -> None:
        if any(sample.status is Status.FAILED for sample in group):  # the group is dropped
            return
        unknown = next((sample for sample in group if sample.weight_versions is None), None)
        if self._store.parts.rules.asynchronous.segment_wise and unknown is not None:
            raise ConfigError(
                f"enable_segment_wise_ppo is on, but {describe_sample(unknown)} has no weight_versions: use an engine that reports them "
                "and a generate_fn that keeps them, or set enable_segment_wise_ppo=False"
            )

    def set_error(self, index: int, error: Exception) -> Failed:
        """Note that a rollout raised; return its outcome."""
        run = change(self._store.state.running[index], failed=True)
        self._store.set(transitions.update_run(self._store.state, index, run))
        return Failed(error, may_be_outage=all(_may_be_outage(one) for one in flatten_errors(error)))

    # -- how rollouts are stopped

    async def interrupt(self) -> None:
        """Start no more rollouts, tell all engines to abort, and return when no rollout is being generated.

        Rollouts that have not returned after grace_s are cancelled. Scoring continues: it needs no engine, and its tokens are final.
        """
        self._store.update(interrupted=True)
        with trio.move_on_after(self._store.parts.config.grace_s):
            while generating := self._find_generating():
                await self._abort_engines()
                with trio.move_on_after(_ABORT_AGAIN_S):
                    for task in generating.values():
                        await task.generated.wait()
        generating = self._find_generating()
        for index in generating:
            self._cut(index)
        for task in generating.values():
            await task.generated.wait()

    def resume(self) -> None:
        """Start rollouts again after interrupt()."""
        self._store.update(interrupted=False)
        self.wake()

    def stop_outdated(self) -> None:
        """Abort rollouts that began too long ago."""
        if self._nursery is None:
            return
        for index in transitions.find_outdated(self._store.parts.rules, self._store.state):
            run, task = self._store.state.running[index], self._tasks[index]
            self._store.set(transitions.update_run(self._store.state, index, change(run, outdated=True)))
            if run.scoring and task.scope is not None:
                task.scope.cancel()
            else:
                self._nursery.start_soon(self._stop, index, task)

    async def _watch(self, index: int, task: RolloutTask, timeout_s: float) -> None:
        """Stop a rollout whose generation takes too long."""
        with trio.move_on_after(timeout_s):
            await task.generated.wait()
        if not task.generated.is_set():
            run = change(self._store.state.running[index], timed_out=True)
            self._store.set(transitions.update_run(self._store.state, index, run))
            await self._stop(index, task)

    async def _stop(self, index: int, task: RolloutTask) -> None:
        config = self._store.parts.config
        sample_ids = [make_request_id(index, k) for k in range(config.group_size)]
        with trio.move_on_after(config.grace_s):
            while not task.generated.is_set():
                try:
                    await self._abort_engines([*sample_ids, *sorted(task.request_ids.difference(sample_ids))])
                except Exception as error:  # from a user's engine: a rollout that cannot be stopped is cancelled
                    error.add_note(f"as the rollout of prompt {index} was to be aborted")
                    logging.getLogger(__name__).warning("an engine could not be told to abort", exc_info=error)
                with trio.move_on_after(_ABORT_AGAIN_S):
                    await task.generated.wait()
        if not task.generated.is_set():
            self._cut(index)

    def _find_generating(self) -> dict[int, RolloutTask]:
        return {index: task for index, task in self._tasks.items() if not task.generated.is_set()}

    def _cut(self, index: int) -> None:
        warning = describe_cut(index, self._store.parts.config.grace_s, has_engines=bool(self._store.parts.engines))
        self._store.set(transitions.cut(self._store.state, index, warning))
        task = self._tasks[index]
        if task.scope is None:
            self._finish(index, task, Stopped(cancelled=True))
        else:
            task.scope.cancel()

    async def _abort_engines(self, request_ids: Iterable[str] | None = None) -> None:
        async def abort(engine: InferenceEngine) -> None:
            try:
                await engine.abort(request_ids)
            except EngineError as error:  # a dead engine cannot be told; its rollouts are cancelled
                logging.getLogger(__name__).warning("an engine could not be told to abort: %s", error)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for engine in self._store.parts.engines:
                    nursery.start_soon(abort, engine)


class _EngineProbe:
    """Probe of all engines for their weight version, to tell dead engines from a request that they cannot answer."""

    def __init__(self, engines: Sequence[InferenceEngine]) -> None:
        self._engines = tuple(engines)
        self._asking = trio.Lock()
        self._asked_at = -math.inf
        self._answers: dict[str, Exception | None] = {}  # None = the engine answers

    async def complete(self, failed: Failed) -> Failed:
        """Return the failure with the engines that answer now; unchanged without engines."""
        if not self._engines:
            return failed
        failed_at = trio.current_time()
        async with self._asking:
            if self._asked_at < failed_at:  # else another rollout has probed since this one failed
                self._asked_at, self._answers = trio.current_time(), {}
                async with trio.open_nursery() as nursery:
                    for number, engine in enumerate(self._engines):
                        nursery.start_soon(self._ask, engine, f"{getattr(engine, 'name', type(engine).__name__)} (number {number})")
            silent = {name: error for name, error in self._answers.items() if error is not None}
        answer = None if 0 < len(silent) < len(self._answers) else not silent
        return replace(failed, engines_answer=answer, silent_engines=", ".join(f"{name}: {error}" for name, error in silent.items()))

    async def _ask(self, engine: InferenceEngine, name: str) -> None:
        self._answers[name] = EngineError(f"no answer within {_ANSWER_S:g} s")
        with trio.move_on_after(_ANSWER_S):
            try:
                await engine.get_weight_version()
            except Exception as error:  # this engine does not answer, whatever the error
                error.add_note("as it was asked for its weight version, after a rollout had failed")
                self._answers[name] = error
            else:
                self._answers[name] = None


def _may_be_outage(error: Exception) -> bool:
    if isinstance(error, EngineStatusError):
        return error.status >= 500
    return isinstance(error, EngineError) and not isinstance(error, EngineProtocolError | EngineRequestError)

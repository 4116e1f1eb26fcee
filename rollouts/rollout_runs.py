"""Rollouts that run: each in a task of its own, from its start to its end, its deadline, or the moment when all are stopped."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

import trio

from rollouts.config import RolloutConfig
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
from rollouts.generate_fns import GenerateFn, PendingGroup, bind_generate_fn, collect_requests, is_finished, note_prompt
from rollouts.generation import make_request_id, score_generated_group
from rollouts.proximal import start_segments
from rollouts.rollout_queue import find_oldest_version
from rollouts.samples import describe_sample, passes_filter
from rollouts.types import Group, Sample, Status

_ABORT_AGAIN_S = 0.25  # a rollout of several requests may send its next one after an abort
_ANSWER_S = 10.0  # in which an engine that lives says its weight version


class RolloutRun:
    """One rollout that runs, and how it ended."""

    __slots__ = (
        "begun_version",
        "cut",
        "deadline",
        "edited",
        "engines_answer",
        "error",
        "group",
        "outdated",
        "passes",
        "pending",
        "request_ids",
        "scope",
        "scoring",
        "silent_engines",
        "timed_out",
        "unchanged",
    )

    def __init__(self, pending: PendingGroup, begun_version: int, deadline: float) -> None:
        self.pending = pending  # what there is of it, should it be stopped now
        self.begun_version = begun_version  # of the weights when its first token was sampled, at the earliest
        self.deadline = deadline
        self.scope = trio.CancelScope()
        self.timed_out = False  # its deadline has passed
        self.outdated = False  # stopped because it may have tokens that are too old
        self.cut = False  # cancelled, because it did not obey an abort
        self.request_ids: set[str] = set()  # beside those of its samples
        self.edited: trio.Event | None = None  # set when its samples, which are being edited, may change places
        self.unchanged = False  # it came back unfinished and without anything new, although nothing here stopped it
        self.scoring = False  # generated; what fails now are rewards and filters
        self.group: Group | None = None  # with rewards; None = to be dropped, where it was not stopped and there is no error
        self.passes = False  # the filter
        self.error: Exception | None = None
        self.engines_answer: bool | None = None  # after an error: whether all do, or none does; None = some do, or it is not known
        self.silent_engines = ""  # those that do not, with their errors

    @property
    def index(self) -> int:
        """Of its prompt."""
        return self.pending.prompt.index

    @property
    def was_stopped(self) -> bool:
        """Whether it was aborted or cancelled before its end."""
        return self.scope.cancelled_caught or (self.group is not None and not is_finished(self.group))

    def set_error(self, error: Exception) -> None:
        """Keep what it raised; several errors of one class as the first of them, with a note."""
        self.error = reduce_alike(error)

    @property
    def may_be_outage(self) -> bool:
        """Whether its error can come from an engine that is not there, rather than from what the engine was asked."""
        return self.error is not None and all(_may_be_outage(error) for error in flatten_errors(self.error))


class RolloutRuns:
    """The rollouts that run now, in the order of their start."""

    def __init__(
        self,
        config: RolloutConfig,
        generate_fn: GenerateFn,
        engines: Sequence[InferenceEngine],
        on_end: Callable[[RolloutRun], None],
        *,
        max_concurrent: int,
        timeout_s: float | None,
        needs_versions: bool,
    ) -> None:
        """
        Args:
            on_end: told once of every rollout that does not run any more.
            max_concurrent: threads for a sync generate_fn.
            timeout_s: after which a rollout is aborted; None = never.
            needs_versions: refuse samples without weight_versions.
        """
        self._config = config
        self._engines = tuple(engines)
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._needs_versions = needs_versions
        self._generate = bind_generate_fn(
            generate_fn,
            config.n_samples_per_prompt,
            num_baseline=config.n_baseline_samples,
            thread_limiter=trio.CapacityLimiter(max(1, max_concurrent)),
        )
        self._runs: dict[int, RolloutRun] = {}
        self._watched: OrderedDict[int, RolloutRun] = OrderedDict()  # by deadline
        self._num_generating = 0  # those that run and are not being scored
        self._stopping = False
        self._has_warned_of_cut = False
        self._asking = trio.Lock()
        self._asked_at = -math.inf
        self._answers: dict[str, Exception | None] = {}
        self._idle_since: float | None = None  # while nothing runs, on trio's clock
        self._idle_s = 0.0  # before that
        self._started = trio.lowlevel.ParkingLot()
        self._ended = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def pending(self) -> tuple[tuple[PendingGroup, int], ...]:
        """What there is of each, should all of them be stopped now, and the version that its first token was sampled under."""
        return tuple((run.pending, run.begun_version) for run in self._runs.values())

    def take_idle_s(self) -> float:
        """Seconds since the last call in which no rollout ran; the first call counts from begin_idling()."""
        now = trio.current_time()
        idle_s, self._idle_s = self._idle_s + (0.0 if self._idle_since is None else now - self._idle_since), 0.0
        self._idle_since = None if self._idle_since is None else now
        return idle_s

    def begin_idling(self) -> None:
        """Count the time in which nothing runs, from now on."""
        self._idle_since, self._idle_s = trio.current_time(), 0.0

    def start(self, nursery: trio.Nursery, pending: PendingGroup, begun_version: int) -> None:
        """Start a rollout. begun_version: of the weights when its first token was sampled, or now."""
        if self._idle_since is not None:
            self._idle_s += trio.current_time() - self._idle_since
            self._idle_since = None
        deadline = math.inf if self._timeout_s is None else trio.current_time() + self._timeout_s
        run = RolloutRun(pending, begun_version, deadline)
        self._runs[run.index] = run
        self._num_generating += 1
        if self._timeout_s is not None:
            self._watched[run.index] = run
            self._started.unpark_all()
        nursery.start_soon(self._run, run)

    async def _run(self, run: RolloutRun) -> None:
        prompt = run.pending.prompt
        try:
            with run.scope, note_prompt(prompt), collect_requests() as run.request_ids:
                group = run.pending.samples
                if not group or not is_finished(group):
                    group = await self._generate(run.pending)
                    begun, run.pending = run.pending.samples, PendingGroup(prompt, group)
                    was_stopped = run.timed_out or run.outdated or self._stopping
                    run.unchanged = group == begun and not (was_stopped or is_finished(group))
                if is_finished(group):
                    await self._score(run, group)
                else:
                    run.group = group
        except Exception as error:  # what users' functions raise is theirs; on_end decides what becomes of it
            run.set_error(error)
        if run.may_be_outage and self._engines and not run.scoring and not run.scope.cancel_called:
            with trio.CancelScope() as run.scope:
                await self._find_silent_engines(run)
        while run.edited is not None:
            await run.edited.wait()
        self._end(run)

    async def _score(self, run: RolloutRun, group: Group) -> None:
        run.scoring = True
        self._num_generating -= 1
        self._ended.unpark_all()
        self._check_versions(group)
        if self._config.segment_log_probs:
            group = tuple(start_segments(sample) for sample in group)
            run.pending = PendingGroup(run.pending.prompt, group)
        scored = await score_generated_group(group, self._config.reward_fn, self._config.reward)
        run.passes = scored is not None and passes_filter(scored, self._config.filter_fn)
        while run.edited is not None:
            await run.edited.wait()
        run.group = None if scored is None else _add_edits(scored, group, run.pending.samples)

    def _check_versions(self, group: Group) -> None:
        if any(sample.status is Status.FAILED for sample in group):  # it is dropped
            return
        unknown = next((sample for sample in group if sample.weight_versions is None), None)
        if self._needs_versions and unknown is not None:
            raise ConfigError(
                f"enable_segment_wise_ppo is on, but {describe_sample(unknown)} has no weight_versions: use an engine that reports them "
                "and a generate_fn that keeps them, or set enable_segment_wise_ppo=False"
            )

    def _end(self, run: RolloutRun) -> None:
        del self._runs[run.index]
        self._watched.pop(run.index, None)
        self._num_generating -= not run.scoring
        if not self._runs:
            self._idle_since = trio.current_time()
        self._on_end(run)
        self._ended.unpark_all()

    def drop_cancelled(self) -> tuple[RolloutRun, ...]:
        """Forget the runs whose tasks were cancelled from outside, once these have ended."""
        runs = tuple(self._runs.values())
        self._runs.clear()
        self._watched.clear()
        self._num_generating = 0
        return runs

    # -- while rewards are asked for

    def hold_scoring(self) -> tuple[RolloutRun, ...]:
        """Those that are being scored, by index. They do not come to their end before release_scoring()."""
        scoring = tuple(run for _, run in sorted(self._runs.items()) if run.scoring)
        for run in scoring:
            run.edited = trio.Event()
        return scoring

    def release_scoring(self, scoring: Iterable[RolloutRun], edited: Mapping[int, Group]) -> None:
        """Let them end, those of these indices with what was edited."""
        for run in scoring:
            if run.index in edited:
                run.pending = PendingGroup(run.pending.prompt, edited[run.index])
            event, run.edited = run.edited, None
            if event is not None:
                event.set()

    @property
    def scoring(self) -> tuple[PendingGroup, ...]:
        """What is being scored, by index."""
        return tuple(run.pending for _, run in sorted(self._runs.items()) if run.scoring)

    # -- how they are stopped

    def stop_outdated(self, nursery: trio.Nursery, version: int, max_staleness: int) -> None:
        """Abort those that were begun more than max_staleness versions ago; they end as was_stopped and outdated."""
        for run in tuple(self._runs.values()):
            if version - run.begun_version <= max_staleness or run.outdated or run.error is not None:
                continue
            if not run.scoring:
                run.outdated = True
                nursery.start_soon(self._stop, run)
            elif version - find_oldest_version(run.pending.samples, begun=run.begun_version, newest=version) > max_staleness:
                run.outdated = True
                run.scope.cancel()

    async def watch_deadlines(self, nursery: trio.Nursery) -> None:
        """Stop the rollouts that run for too long. Never returns."""
        while True:
            run = next(iter(self._watched.values()), None)
            if run is None:
                await self._started.park()
            elif run.deadline > trio.current_time():
                await trio.sleep_until(run.deadline)
            else:
                del self._watched[run.index]
                run.timed_out = True
                nursery.start_soon(self._stop, run)

    async def _stop(self, run: RolloutRun) -> None:
        sample_ids = [make_request_id(run.index, k) for k in range(self._config.group_size)]
        with trio.move_on_after(self._config.grace_s):
            while self._is_generating(run):
                try:
                    await self._abort_engines([*sample_ids, *sorted(run.request_ids.difference(sample_ids))])
                except Exception as error:  # of a user's engine: one rollout that cannot be stopped must not end the run, it is cancelled
                    error.add_note(f"as the rollout of prompt {run.index} was to be aborted")
                    logging.getLogger(__name__).warning("an engine could not be told to abort", exc_info=error)
                with trio.move_on_after(_ABORT_AGAIN_S):
                    while self._is_generating(run):
                        await self._ended.park()
        if self._is_generating(run):
            self._cut(run)

    def _is_generating(self, run: RolloutRun) -> bool:
        """Whether there is something to stop: rewards have a limit of their own."""
        return self._runs.get(run.index) is run and not run.scoring

    async def stop_all(self) -> None:
        """Tell all engines to abort; return when no rollout is generated. What has not returned after grace_s is cancelled.

        What is being scored goes on: it needs no engine, and its tokens are final.
        """
        self._stopping = True
        try:
            with trio.move_on_after(self._config.grace_s):
                while self._num_generating:
                    await self._abort_engines()
                    with trio.move_on_after(_ABORT_AGAIN_S):
                        while self._num_generating:
                            await self._ended.park()
            for run in self._runs.values():
                if not run.scoring:
                    self._cut(run)
            while self._num_generating:
                await self._ended.park()
        finally:
            self._stopping = False

    def _cut(self, run: RolloutRun) -> None:
        run.scope.cancel()
        if run.scoring:
            return
        run.cut = True
        if not self._has_warned_of_cut:
            self._has_warned_of_cut = True
            advice = "raise grace_s" if self._engines else "pass the executor the engines= that generate_fn uses, so that they can be told"
            logging.getLogger(__name__).warning(
                "the rollout of prompt %d did not return within grace_s (%g s) of being told to stop: it was cancelled, and what it has "
                "generated since it was started is generated again. If this happens often (num_groups_cut), %s",
                run.index,
                self._config.grace_s,
                advice,
            )

    async def _abort_engines(self, request_ids: Iterable[str] | None = None) -> None:
        async def abort(engine: InferenceEngine) -> None:
            try:
                await engine.abort(request_ids)
            except EngineError as error:  # a dead engine cannot be told; what runs on it is cancelled
                logging.getLogger(__name__).warning("an engine could not be told to abort: %s", error)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for engine in self._engines:
                    nursery.start_soon(abort, engine)

    async def _find_silent_engines(self, run: RolloutRun) -> None:
        """Ask all engines for their weight version, to tell dead engines from a request that they cannot answer."""
        failed_at = trio.current_time()
        async with self._asking:
            if self._asked_at < failed_at:  # else somebody has asked since this rollout failed
                self._asked_at, self._answers = trio.current_time(), {}
                async with trio.open_nursery() as nursery:
                    for number, engine in enumerate(self._engines):
                        nursery.start_soon(self._ask, engine, f"{getattr(engine, 'name', type(engine).__name__)} (number {number})")
            silent = {name: error for name, error in self._answers.items() if error is not None}
            run.engines_answer = None if 0 < len(silent) < len(self._answers) else not silent
            run.silent_engines = ", ".join(f"{name}: {error}" for name, error in silent.items())

    async def _ask(self, engine: InferenceEngine, name: str) -> None:
        self._answers[name] = EngineError(f"no answer within {_ANSWER_S:g} s")
        with trio.move_on_after(_ANSWER_S):
            try:
                await engine.get_weight_version()
            except Exception as error:  # whatever it is, this engine does not answer
                error.add_note("as it was asked for its weight version, after a rollout had failed")
                self._answers[name] = error
            else:
                self._answers[name] = None


def _may_be_outage(error: Exception) -> bool:
    if isinstance(error, EngineStatusError):
        return error.status >= 500
    return isinstance(error, EngineError) and not isinstance(error, EngineProtocolError | EngineRequestError)


def _add_edits(scored: Group, before: Group, edited: Group) -> Group:
    """Scored samples with those fields of edited ones that differ from what they were before both."""
    if edited is before:
        return scored
    return tuple(_add_edit(*samples) for samples in zip(scored, before, edited, strict=True))


def _add_edit(scored: Sample, before: Sample, edited: Sample) -> Sample:
    names = (field.name for field in fields(Sample) if field.init)
    changes = {name: getattr(edited, name) for name in names if getattr(edited, name) is not getattr(before, name)}
    if "metadata" in changes:
        changes["metadata"] = {**scored.metadata, **edited.metadata}
    return replace(scored, **changes)

"""Rollouts that run: each in a task of its own, from its start to its end, its deadline, or the moment when all are stopped."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import trio

from rollouts.config import RolloutConfig
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, EngineError
from rollouts.generate_fns import GenerateFn, PendingGroup, bind_generate_fn, is_finished, note_prompt
from rollouts.generation import make_request_id, score_generated_group
from rollouts.samples import describe_sample, passes_filter
from rollouts.types import Group

_ABORT_AGAIN_S = 0.25  # a rollout of several requests may send its next one after an abort


class RolloutRun:
    """One rollout that runs, and how it ended."""

    __slots__ = (
        "begun_version",
        "deadline",
        "error",
        "group",
        "num_ended_before",
        "passes",
        "pending",
        "scope",
        "scoring",
        "timed_out",
        "unchanged",
    )

    def __init__(self, pending: PendingGroup, begun_version: int, num_ended_before: int, deadline: float) -> None:
        self.pending = pending  # what there is of it, should it be stopped now
        self.begun_version = begun_version  # of the weights when its first token was sampled, at the earliest
        self.num_ended_before = num_ended_before  # rollouts that had come to their end when this one was started
        self.deadline = deadline
        self.scope = trio.CancelScope()
        self.timed_out = False  # its deadline has passed
        self.unchanged = False  # it came back unfinished and without anything new, although nothing here stopped it
        self.scoring = False  # generated; what fails now are rewards and filters
        self.group: Group | None = None  # with rewards; None = to be dropped, where it was not stopped and there is no error
        self.passes = False  # the filter
        self.error: Exception | None = None

    @property
    def index(self) -> int:
        """Of its prompt."""
        return self.pending.prompt.index

    @property
    def was_stopped(self) -> bool:
        """Whether it was aborted or cancelled before its end."""
        return self.scope.cancelled_caught or (self.group is not None and not is_finished(self.group))

    def set_error(self, error: Exception) -> None:
        """Keep what it raised."""
        self.error = error


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
        self._stopping = False
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

    def start(self, nursery: trio.Nursery, pending: PendingGroup, begun_version: int, num_ended: int) -> None:
        """Start a rollout.

        Args:
            begun_version: of the weights when its first token was sampled, or now.
            num_ended: rollouts that have come to their end so far.
        """
        if self._idle_since is not None:
            self._idle_s += trio.current_time() - self._idle_since
            self._idle_since = None
        deadline = math.inf if self._timeout_s is None else trio.current_time() + self._timeout_s
        run = RolloutRun(pending, begun_version, num_ended, deadline)
        self._runs[run.index] = run
        if self._timeout_s is not None:
            self._watched[run.index] = run
            self._started.unpark_all()
        nursery.start_soon(self._run, run)

    async def _run(self, run: RolloutRun) -> None:
        prompt = run.pending.prompt
        try:
            with run.scope, note_prompt(prompt):
                group = run.pending.samples
                if not group or not is_finished(group):
                    group = await self._generate(run.pending)
                    begun, run.pending = run.pending.samples, PendingGroup(prompt, group)
                    run.unchanged = group == begun and not (run.timed_out or self._stopping or is_finished(group))
                run.scoring = True
                run.group = await score_generated_group(group, self._config.reward_fn, self._config.reward)
                if run.group is not None and is_finished(run.group):
                    self._check_versions(run.group)
                    run.passes = passes_filter(run.group, self._config.filter_fn)
        except Exception as error:  # what users' functions raise is theirs; on_end decides what becomes of it
            run.set_error(error)
        self._end(run)

    def _check_versions(self, group: Group) -> None:
        unknown = next((sample for sample in group if sample.weight_versions is None), None)
        if self._needs_versions and unknown is not None:
            raise ConfigError(
                f"enable_segment_wise_ppo is on, but {describe_sample(unknown)} has no weight_versions: use an engine that reports them "
                "and a generate_fn that keeps them, or set enable_segment_wise_ppo=False"
            )

    def _end(self, run: RolloutRun) -> None:
        del self._runs[run.index]
        self._watched.pop(run.index, None)
        if not self._runs:
            self._idle_since = trio.current_time()
        self._on_end(run)
        self._ended.unpark_all()

    def drop_cancelled(self) -> tuple[RolloutRun, ...]:
        """Forget the runs whose tasks were cancelled from outside, once these have ended."""
        runs = tuple(self._runs.values())
        self._runs.clear()
        self._watched.clear()
        return runs

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
        with trio.move_on_after(self._config.grace_s):
            await self._abort_engines([make_request_id(run.index, k) for k in range(self._config.group_size)])
            while self._runs.get(run.index) is run:
                await self._ended.park()
        run.scope.cancel()

    async def stop_all(self) -> None:
        """Tell all engines to abort; return when no rollout runs. What has not returned after grace_s is cancelled."""
        self._stopping = True
        try:
            with trio.move_on_after(self._config.grace_s):
                while self._runs:
                    await self._abort_engines()
                    with trio.move_on_after(_ABORT_AGAIN_S):
                        while self._runs:
                            await self._ended.park()
            for run in self._runs.values():
                run.scope.cancel()
            while self._runs:
                await self._ended.park()
        finally:
            self._stopping = False

    async def _abort_engines(self, request_ids: Iterable[str] | None = None) -> None:
        async def abort(engine: InferenceEngine) -> None:
            try:
                await engine.abort(request_ids)
            except EngineError as error:  # a dead engine cannot be told; what runs on it is cancelled
                logging.getLogger(__name__).warning("an engine could not be told to abort: %s", error)

        async with trio.open_nursery() as nursery:
            for engine in self._engines:
                nursery.start_soon(abort, engine)

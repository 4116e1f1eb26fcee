"""Simulated inference engines, which take virtual time and compute nothing: slots, a token rate, weight updates, failures.

One task serves all engines, and one heap holds the finish time of each group. This works because sequences do not slow each other down: the
end of a response is known as soon as it has a slot, and only a weight update, an abort or a failure moves it. A group under generation
costs one entry in the heap and a logarithm of the slots for each response, whatever its length; who generates it is called at its end.

A group is one Sample that represents all of its responses, with one token per weight version under which it was generated; loss_mask is the
number of real tokens that this token represents.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing
from torch import Tensor

from integration.simulate.lengths import ResponseLengths
from integration.simulate.settings import EngineSection
from rollouts.engines.protocol import EngineFeature
from rollouts.errors import EngineError
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status, change


@dataclass(eq=False)
class GroupRequest:
    """A group under generation. Times are on the fleet's clock, which stops during weight updates."""

    index: int  # index of its prompt
    sample: Sample  # initial sample: empty, or with the tokens of an earlier attempt
    done: list[int]  # initial tokens of each response
    targets: list[int]  # final tokens of each response
    fails_after: float  # fraction of its duration after which it fails; inf = never
    on_over: Callable[[GroupRequest], None]  # called when it has finished, failed or was aborted
    starts: list[float] = field(default_factory=list[float])  # time at which each response has a slot and its prompt is read
    ends: list[float] = field(default_factory=list[float])  # time at which each response ends
    finish: float = math.inf  # time at which the group ends or fails
    is_planned: bool = False
    stopped_at: float | None = None  # time at which it finished, failed or was aborted
    status: Status = Status.PENDING

    def active_seconds(self, now: float) -> float:
        """Return the slot seconds that its responses have used so far."""
        seconds = 0.0
        for start, end in zip(self.starts, self.ends, strict=True):
            if start < now:
                seconds += (end if end < now else now) - start
        return seconds


class EngineSlots:
    """The slots of one engine, as the times from which they are free, the first one first, and their requests in order of arrival."""

    def __init__(self, section: EngineSection) -> None:
        self._section = section
        self.free_from = [0.0] * section.slots
        self._read_until = 0.0  # time at which all known prompts have been read
        self.requests: dict[int, GroupRequest] = {}

    def plan(self, request: GroupRequest, now: float) -> None:
        """Assign each response to the earliest free slot, once the prompt has been read."""
        missing = [k for k, done in enumerate(request.done) if done < request.targets[k]]
        read = self._section.prompt_tokens + sum(request.done[k] for k in missing)
        self._read_until = max(self._read_until, now, self.free_from[0]) + read / self._section.prefill_rate
        request.starts, request.ends = [now] * len(request.targets), [now] * len(request.targets)
        self._give_slots(request, missing, self._read_until)
        request.is_planned = True

    def remove(self, requests: Iterable[GroupRequest], now: float) -> list[GroupRequest]:
        """Remove requests before their end. Returns the requests whose finish time has changed, because they wait less."""
        for request in requests:
            del self.requests[request.index]
        running = [end for r in self.requests.values() for start, end in zip(r.starts, r.ends, strict=True) if start <= now < end]
        self.free_from = [*running, *[now] * (self._section.slots - len(running))]
        self.free_from.sort()
        self._read_until = now
        moved: list[GroupRequest] = []
        for other in self.requests.values():
            before = other.finish
            waiting = [k for k, start in enumerate(other.starts) if start > now]
            if any(start <= now and start < end for start, end in zip(other.starts, other.ends, strict=True)):  # its prompt has been read
                self._give_slots(other, waiting, now)
            elif waiting:
                self.plan(other, now)
            if other.finish != before:
                moved.append(other)
        return moved

    def _give_slots(self, request: GroupRequest, responses: list[int], not_before: float) -> None:
        free_from, starts, ends, rate = self.free_from, request.starts, request.ends, self._section.token_rate
        for k in responses:
            first = free_from.pop(0)
            starts[k] = start = first if first > not_before else not_before
            ends[k] = end = start + (request.targets[k] - request.done[k]) / rate
            insort(free_from, end)
        self._finish_by_plan(request)

    def _finish_by_plan(self, request: GroupRequest) -> None:
        first, last = min(request.starts), max(request.ends)
        request.finish = last if request.fails_after == math.inf else first + request.fails_after * (last - first)


_ALMOST = 1e-3  # tokens of tolerance
_SAME_MOMENT = 1e-6  # seconds of tolerance, as sums of floats are inexact
_EMPTY = Sample(  # a group without tokens of responses; only its copies are used
    index=0,
    group_index=0,
    tokens=(0,),
    loss_mask=(0.0,),
    rollout_log_probs=(0.0,),
    weight_versions=(-1,),
    status=Status.ABORTED,
)


class SimulatedFleet:
    """All engines as one InferenceEngine that takes weights in memory. run() must be running while groups are generated."""

    features = frozenset({EngineFeature.MEMORY_UPDATES})

    def __init__(self, section: EngineSection, lengths: ResponseLengths, seed: int = 0, refused_fraction: float = 0.0) -> None:
        """
        Args:
            lengths: lengths of the responses.
            seed: seed of failures and rewards.
            refused_fraction: fraction of groups with reward 0 instead of 1, for a filter to refuse.
        """
        self.section = section
        self.version = 0
        self.paused_s = 0.0  # total seconds of pauses
        self.num_failures = 0
        self.num_begun_anew = 0  # groups whose earlier tokens were lost
        self._lengths, self._seed, self._refused_fraction = lengths, seed, refused_fraction
        self._engines = [EngineSlots(section) for _ in range(section.engines)]
        self._arrivals: dict[int, GroupRequest] = {}
        self._running: dict[int, GroupRequest] = {}
        self._finishes: list[tuple[float, int, int, GroupRequest]] = []  # heap; outdated entries are skipped
        self._serial = count()
        self._num_begun: dict[int, int] = {}  # attempts of each prompt that started over
        self._num_failures_of: dict[int, int] = {}
        self._changes = [0.0]  # start of version i on the fleet's clock
        self._paused_at: float | None = None
        self._stopping: list[GroupRequest] = []  # aborted or cancelled at this moment
        self._work = trio.lowlevel.ParkingLot()  # run(), when nothing is to come
        self._settling = trio.lowlevel.ParkingLot()  # settle()
        self._is_woken = False  # something has changed at this moment that run() has not seen yet
        self._active_s = 0.0  # slot seconds of finished requests
        self._resident: dict[int, tuple[int, int]] = {}  # by prompt, groups held by others: (tokens, oldest version)
        self._begun_tokens = self._begun_responses = 0  # totals of first attempts

    # -- time

    @property
    def now(self) -> float:
        """The fleet's clock: seconds without pauses."""
        return (trio.current_time() if self._paused_at is None else self._paused_at) - self.paused_s

    async def run(self) -> None:
        """Serve until cancelled, and move the clock: a cancel scope of trio for each event would cost more than the event.

        Whatever arrives, stops or ends at a moment is taken when all tasks are blocked, in the order of prompts, as trio runs tasks in
        random order. When nothing is left to do at the moment, the clock jumps to the next event or deadline of trio.
        """
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock), f"the clock is a {type(clock).__name__}, expected trio's MockClock"
        while True:
            await trio.testing.wait_all_tasks_blocked()
            while True:  # as long as it wakes no other task
                now, event = trio.current_time(), self._next_event()
                statistics = trio.lowlevel.current_statistics()
                if statistics.tasks_runnable or statistics.run_sync_soon_queue_size or statistics.seconds_to_next_deadline <= 0:
                    break
                if self._is_woken or event <= now:
                    self._take_turn()
                elif self._settling:
                    self._settling.unpark_all()
                elif (seconds := min(event - now, statistics.seconds_to_next_deadline)) < math.inf:
                    clock.jump(seconds)
                    if event <= trio.current_time():
                        self._take_turn()
                else:
                    await self._work.park()
                    break

    def _take_turn(self) -> None:
        self._is_woken = False
        if self._arrivals or self._stopping:
            self._stop_aborted()
            self._plan_arrivals()
        self._deliver()

    async def settle(self) -> None:
        """Wait until all that happens at this moment has happened. Several tasks wake together when all others are blocked."""
        self._work.unpark_all()
        await self._settling.park()

    def _next_event(self) -> float:
        if self._paused_at is not None or not self._finishes:
            return math.inf
        return self._finishes[0][0] + self.paused_s

    def _wake(self) -> None:
        self._is_woken = True
        if self._work:
            self._work.unpark_all()

    def _stop_aborted(self) -> None:
        """Stop what was aborted or cancelled at this moment, in the order of prompts: sums of floats depend on it."""
        stopping, self._stopping = sorted(self._stopping, key=lambda request: request.index), []
        self._remove([request for request in stopping if self._running.get(request.index) is request])
        for request in stopping:
            if request.stopped_at is None:
                self._stop(request, Status.ABORTED, self.now)

    def _plan_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, {}
        now = self.now
        for _, request in sorted(arrivals.items()):
            if request.stopped_at is None:
                self._engine_of(request).plan(request, now)
                self._engine_of(request).requests[request.index] = request
                self._running[request.index] = request
                self._expect(request)

    def _deliver(self) -> None:
        """Finish all requests whose time has come."""
        if self._paused_at is not None:
            return
        now = self.now
        while self._finishes and self._finishes[0][0] <= now + _SAME_MOMENT:
            finish, index, _, request = heapq.heappop(self._finishes)
            if self._running.get(index) is not request or request.finish != finish:
                continue
            if request.fails_after < math.inf:
                self.num_failures += 1
                self._num_failures_of[index] = self._num_failures_of.get(index, 0) + 1
                self._remove([request])
                self._stop(request, Status.FAILED, now)
            else:
                del self._running[index], self._engine_of(request).requests[index]
                self._stop(request, Status.COMPLETED, now)

    def _expect(self, request: GroupRequest) -> None:
        heapq.heappush(self._finishes, (request.finish, request.index, next(self._serial), request))

    def _engine_of(self, request: GroupRequest) -> EngineSlots:
        return self._engines[request.index % len(self._engines)]

    def _remove(self, requests: Sequence[GroupRequest]) -> None:
        """Remove running requests and move up those behind them."""
        removed: dict[int, dict[int, GroupRequest]] = {}  # by engine and prompt: one may have been aborted twice
        for request in requests:
            removed.setdefault(request.index % len(self._engines), {})[request.index] = request
            self._running.pop(request.index, None)
        for engine, leaving in sorted(removed.items()):
            for moved in self._engines[engine].remove(leaving.values(), self.now):
                self._expect(moved)

    def _stop(self, request: GroupRequest, status: Status, now: float) -> None:
        request.status, request.stopped_at = status, now
        self._active_s += request.active_seconds(now)
        request.on_over(request)

    # -- generation

    async def generate_group(self, prompt: Prompt, partial: Group = ()) -> Group:
        """Generate all responses to a prompt, or continue those of an interrupted group. Raises EngineError for a failing group."""
        over = trio.Event()
        request = self.submit(prompt, partial, lambda _: over.set())
        try:
            await over.wait()
        finally:
            if request.stopped_at is None:  # cancelled
                self._stopping.append(request)
                self._wake()
        return self.take_group(request)

    def submit(self, prompt: Prompt, partial: Group, on_over: Callable[[GroupRequest], None]) -> GroupRequest:
        """Begin to generate all responses to a prompt, or to continue those of an interrupted group; on_over is called at the end."""
        request = self._arrivals[prompt.index] = self._create_request(prompt.index, partial, on_over)
        self._wake()
        return request

    def take_group(self, request: GroupRequest) -> Group:
        """Return the group of a request that is over. Raises EngineError if it has failed."""
        if request.status is Status.FAILED:
            raise EngineError(f"prompt {request.index} failed, as a fraction of {self.section.failure_rate} does in this simulation")
        sample = self._to_sample(request)
        if sample.reward or request.status is Status.ABORTED:
            oldest = min((version for version in sample.weight_versions or () if version >= 0), default=self.version)
            self._resident[request.index] = int(sum(sample.loss_mask)), oldest
        return (sample,)

    def _create_request(self, index: int, partial: Group, on_over: Callable[[GroupRequest], None]) -> GroupRequest:
        self._resident.pop(index, None)
        if partial:
            sample = partial[0]
            attempt = sample.metadata["attempt"]
            done, targets = list(sample.metadata["done"]), list(sample.metadata["targets"])
        else:
            attempt = self._num_begun.get(index, 0)
            self._num_begun[index] = attempt + 1
            self.num_begun_anew += attempt > 0
            targets = self._lengths.of_group(index, attempt)
            if attempt == 0:
                self._begun_tokens += sum(targets)
                self._begun_responses += len(targets)
            done = [0] * len(targets)
            reward = float(self._refused_fraction == 0 or self._draw(index, attempt, 1) >= self._refused_fraction)
            # one Sample per group, so both have the same index
            metadata = {"attempt": attempt, "targets": targets, "done": done}
            sample = change(_EMPTY, index=index, group_index=index, reward=reward, metadata=metadata)
        key = (index, attempt, 2 + 2 * self._num_failures_of.get(index, 0))  # equal after an interruption, different after a failure
        fails = self.section.failure_rate > 0 and self._draw(*key) < self.section.failure_rate
        return GroupRequest(
            index=index,
            sample=sample,
            done=done,
            targets=targets,
            fails_after=self._draw(*key, 1) if fails else math.inf,
            on_over=on_over,
        )

    def _draw(self, *key: int) -> float:
        return derive_seed(self._seed, *key) / 2**63

    def _to_sample(self, request: GroupRequest) -> Sample:
        """Return the group so far: one token per weight version, and the progress of each response."""
        counts = self._count_tokens(request)
        versions = sorted(counts)
        if request.status is Status.COMPLETED:  # sums of floats are inexact
            progress = list(request.targets)
        else:
            progress = [done + self._tokens_at(request, k, request.stopped_at or 0.0) for k, done in enumerate(request.done)]
        start = request.sample
        assert start.rollout_log_probs is not None and start.weight_versions is not None
        more = (-0.5,) * len(versions)
        return change(  # valid by construction; checks would cost as much as all else here
            start,
            tokens=start.tokens + (0,) * len(versions),
            loss_mask=start.loss_mask + tuple(float(counts[version]) for version in versions),
            rollout_log_probs=start.rollout_log_probs + more,
            weight_versions=start.weight_versions + tuple(versions),
            segment_log_probs=None if start.segment_log_probs is None else start.segment_log_probs + more,
            segment_versions=None if start.segment_versions is None else start.segment_versions + (-1,) * len(versions),
            status=request.status,
            metadata={**start.metadata, "done": progress},
        )

    def _count_tokens(self, request: GroupRequest) -> dict[int, int]:
        """Return the tokens generated in this attempt, by weight version."""
        assert request.stopped_at is not None, f"prompt {request.index} is still under generation"
        counts: dict[int, int] = {}
        if not request.is_planned:
            return counts
        changes, newest, rate = self._changes, len(self._changes) - 1, self.section.token_rate
        for k, (start, end) in enumerate(zip(request.starts, request.ends, strict=True)):
            version, before = bisect_right(changes, start) - 1, 0
            if request.status is Status.COMPLETED:
                total = request.targets[k] - request.done[k]
            else:
                total = self._tokens_at(request, k, request.stopped_at)
            while before < total:
                is_last = version == newest or changes[version + 1] >= end
                until = total if is_last else min(total, int((changes[version + 1] - start) * rate + _ALMOST))
                if until > before:
                    counts[version] = counts.get(version, 0) + until - before
                before, version = until, version + 1
        return counts

    def _tokens_at(self, request: GroupRequest, k: int, moment: float) -> int:
        """Return the new tokens of response k at a time of the fleet's clock."""
        if not request.is_planned or moment <= request.starts[k]:
            return 0
        if moment >= request.ends[k]:
            return request.targets[k] - request.done[k]
        return int((moment - request.starts[k]) * self.section.token_rate + _ALMOST)

    # -- InferenceEngine

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Raise EngineError: these engines generate only whole groups."""
        raise EngineError("simulated engines generate groups: use generate_group")

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make generate_group return the tokens so far, for the groups of these requests (ids by make_request_id) or for all."""
        if request_ids is None:
            self._stopping += [*self._running.values(), *self._arrivals.values()]
        else:
            wanted = {int(request_id.split("-")[0]) for request_id in request_ids}
            for requests in (self._arrivals, self._running):
                self._stopping += [requests[index] for index in wanted & requests.keys()]
        self._wake()
        await trio.lowlevel.checkpoint()

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Pause for the update, after all else of this moment; then continue running sequences under the new version."""
        await self.settle()
        assert self._paused_at is None, "weights are being updated already"
        self._paused_at = trio.current_time()
        try:
            await trio.sleep(self.section.sync_s + self._recompute_seconds())
        finally:
            paused_at, self._paused_at = self._paused_at, None
            self.paused_s += trio.current_time() - paused_at
            self._wake()
        assert weight_version >= self.version, f"weight version {weight_version} is older than {self.version}"
        self._changes.extend([self.now] * (weight_version - self.version))
        self.version = weight_version
        return {"success": True, "weight_version": weight_version}

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Update as update_weights does, to the next version."""
        return await self.update_weights({}, self.version + 1)

    async def get_weight_version(self) -> int:
        """Return the version of the next token."""
        await trio.lowlevel.checkpoint()
        return self.version

    def _recompute_seconds(self) -> float:
        """Return the seconds in which engines recompute the caches of running sequences, in equal shares."""
        if self.section.kv_cache == "keep" or not self._running:
            return 0.0
        requests, now = self._running.values(), self.now
        starts = np.fromiter(chain.from_iterable(request.starts for request in requests), float)
        ends = np.fromiter(chain.from_iterable(request.ends for request in requests), float)
        before = np.fromiter(chain.from_iterable(request.done for request in requests), float)
        running = (starts < now) & (ends > now)
        tokens = np.sum((now - starts) * self.section.token_rate + before + self.section.prompt_tokens, where=running)
        return float(tokens) / (self.section.prefill_rate * self.section.engines)

    # -- figures

    def forget(self, index: int) -> None:
        """Forget the group of a prompt after it has been trained on."""
        self._resident.pop(index, None)
        self._num_begun.pop(index, None)

    def count_resident_tokens(self, oldest_kept: int) -> int:
        """Return the tokens that may still be trained on: of running and waiting groups without older versions."""
        now = self.now
        running = sum(done + self._tokens_at(request, k, now) for request in self._running.values() for k, done in enumerate(request.done))
        return running + sum(tokens for tokens, oldest in self._resident.values() if oldest >= oldest_kept)

    @property
    def mean_length_begun(self) -> float:
        """Return the mean tokens of started responses."""
        return self._begun_tokens / max(1, self._begun_responses)

    @property
    def num_running(self) -> int:
        """The number of groups under generation or waiting for a slot."""
        return len(self._running) + len(self._arrivals)

    @property
    def is_paused(self) -> bool:
        """Whether the engines pause for new weights."""
        return self._paused_at is not None

    def count_busy_slots(self) -> int:
        """Return the number of occupied slots."""
        now = self.now
        return sum(self.section.slots - bisect_right(engine.free_from, now) for engine in self._engines)

    def active_seconds(self) -> float:
        """Return the seconds of generation, summed over the slots."""
        now = self.now
        return self._active_s + sum(request.active_seconds(now) for request in self._running.values())

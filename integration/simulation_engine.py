"""Inference engines that cost virtual time and compute nothing: slots, a token rate, weight updates, failures.

One task serves all engines, and one heap knows when each group will be finished. That is possible because sequences do not slow each other
down: as soon as a response has a slot its end is known, and only a weight update, an abort or a failure moves it. A group under generation
costs one waiting task, one entry in the heap and a logarithm of the slots for each of its responses, whatever the length of these.

A group is one Sample that stands for all of its responses, with one token for each weight version under which it was generated;
loss_mask is the number of real tokens that it stands for.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing
from torch import Tensor

from integration.simulation_lengths import ResponseLengths
from integration.simulation_slots import EngineSection, EngineSlots, GroupRequest
from rollouts.errors import EngineError
from rollouts.samples import derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

_ALMOST = 1e-3  # of a token
_SAME_MOMENT = 1e-6  # seconds within which ends count as reached: sums of floats do not come out exact


class SimulatedFleet:
    """All engines as one InferenceEngine (and InMemoryWeightUpdates). run() must be running while groups are generated."""

    def __init__(self, section: EngineSection, lengths: ResponseLengths, seed: int = 0, refused_fraction: float = 0.0) -> None:
        """
        Args:
            lengths: of the responses.
            seed: of failures and rewards.
            refused_fraction: of groups that get reward 0 instead of 1, for a filter to refuse.
        """
        self.section = section
        self.version = 0
        self.paused_s = 0.0  # in which the engines stood still, in all
        self.num_failures = 0
        self.num_begun_anew = 0  # groups whose earlier tokens were lost
        self._lengths, self._seed, self._refused_fraction = lengths, seed, refused_fraction
        self._engines = [EngineSlots(section) for _ in range(section.engines)]
        self._arrivals: dict[int, GroupRequest] = {}
        self._running: dict[int, GroupRequest] = {}
        self._finishes: list[tuple[float, int, int, GroupRequest]] = []  # heap; entries of requests that were moved since are skipped
        self._serial = count()
        self._num_begun: dict[int, int] = {}  # attempts of each prompt that began anew
        self._num_failures_of: dict[int, int] = {}
        self._changes = [0.0]  # when version i began, on the fleet's clock
        self._paused_at: float | None = None
        self._alarm = trio.CancelScope()
        self._active_s = 0.0  # seconds of slots, of requests that are over
        self._resident: dict[int, tuple[int, int]] = {}  # of groups that somebody holds: tokens, the oldest version among them
        self._begun_tokens = self._begun_responses = 0  # of first attempts

    # -- time

    @property
    def now(self) -> float:
        """The fleet's clock: seconds in which engines did not stand still."""
        return (trio.current_time() if self._paused_at is None else self._paused_at) - self.paused_s

    async def run(self) -> None:
        """Serve for ever."""
        while True:
            with trio.CancelScope(deadline=self._next_event()) as self._alarm:
                await trio.sleep_forever()
            if self._arrivals:
                # who is about to ask for a group has done so before slots are given away, or trio's random order of tasks would decide
                await trio.testing.wait_all_tasks_blocked()
                self._plan_arrivals()
            self._deliver()

    def _next_event(self) -> float:
        if self._arrivals:
            return -math.inf
        if self._paused_at is not None or not self._finishes:
            return math.inf
        return self._finishes[0][0] + self.paused_s

    def _wake(self) -> None:
        self._alarm.deadline = -math.inf

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
        """Finish what has come to its end."""
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
                self._remove(request, now)
                self._stop(request, Status.FAILED, now)
            else:
                del self._running[index], self._engine_of(request).requests[index]
                self._stop(request, Status.COMPLETED, now)

    def _expect(self, request: GroupRequest) -> None:
        heapq.heappush(self._finishes, (request.finish, request.index, next(self._serial), request))

    def _engine_of(self, request: GroupRequest) -> EngineSlots:
        return self._engines[request.index % len(self._engines)]

    def _remove(self, request: GroupRequest, now: float) -> None:
        """Take a running request out and let those behind it move up."""
        del self._running[request.index]
        for moved in self._engine_of(request).remove(request, now):
            self._expect(moved)
        self._wake()

    def _stop(self, request: GroupRequest, status: Status, now: float) -> None:
        request.status, request.stopped_at = status, now
        self._active_s += request.active_seconds(now)
        request.over.set()

    # -- generation

    async def generate_group(self, prompt: Prompt, partial: Group = ()) -> Group:
        """Generate all responses to a prompt, or go on with those of an interrupted group. Raises EngineError for one that fails."""
        request = self._create_request(prompt, partial)
        self._arrivals[prompt.index] = request
        self._wake()
        try:
            await request.over.wait()
        finally:
            if request.stopped_at is None:  # cancelled
                now = self.now
                if request.is_planned:
                    self._remove(request, now)
                self._stop(request, Status.ABORTED, now)
        if request.status is Status.FAILED:
            raise EngineError(f"prompt {prompt.index} failed, as a fraction of {self.section.failure_rate} does in this simulation")
        sample = self._to_sample(request)
        if sample.reward or request.status is Status.ABORTED:
            oldest = min((version for version in sample.weight_versions or () if version >= 0), default=self.version)
            self._resident[prompt.index] = int(sum(sample.loss_mask)), oldest
        return (sample,)

    def _create_request(self, prompt: Prompt, partial: Group) -> GroupRequest:
        index = prompt.index
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
            sample = Sample(
                index=index,  # one Sample a group, and so the same number
                group_index=index,
                tokens=(0,),
                loss_mask=(0.0,),
                rollout_log_probs=(0.0,),
                weight_versions=(-1,),
                reward=reward,
                metadata={"attempt": attempt, "targets": targets, "done": done},
                status=Status.ABORTED,
            )
        key = (index, attempt, 2 + 2 * self._num_failures_of.get(index, 0))  # the same while it is interrupted, another after a failure
        fails = self.section.failure_rate > 0 and self._draw(*key) < self.section.failure_rate
        return GroupRequest(
            index=index,
            sample=sample,
            done=done,
            targets=targets,
            fails_after=self._draw(*key, 1) if fails else math.inf,
        )

    def _draw(self, *key: int) -> float:
        return derive_seed(self._seed, *key) / 2**63

    def _to_sample(self, request: GroupRequest) -> Sample:
        """The group so far: a token for each weight version, and how far each response is."""
        counts = self._count_tokens(request)
        versions = sorted(counts)
        produced = [self._tokens_at(request, k, request.stopped_at or 0.0) for k in range(len(request.targets))]
        if request.status is Status.COMPLETED:  # sums of floats do not come out exact
            produced = [target - done for target, done in zip(request.targets, request.done, strict=True)]
        start = request.sample
        assert start.rollout_log_probs is not None and start.weight_versions is not None
        more = (-0.5,) * len(versions)
        return replace(
            start,
            tokens=start.tokens + (0,) * len(versions),
            loss_mask=start.loss_mask + tuple(float(counts[version]) for version in versions),
            rollout_log_probs=start.rollout_log_probs + more,
            weight_versions=start.weight_versions + tuple(versions),
            segment_log_probs=None if start.segment_log_probs is None else start.segment_log_probs + more,
            segment_versions=None if start.segment_versions is None else start.segment_versions + (-1,) * len(versions),
            status=request.status,
            metadata={**start.metadata, "done": [done + new for done, new in zip(request.done, produced, strict=True)]},
        )

    def _count_tokens(self, request: GroupRequest) -> dict[int, int]:
        """Weight version -> tokens that this attempt has generated under it."""
        assert request.stopped_at is not None, f"prompt {request.index} is still under generation"
        counts: dict[int, int] = {}
        if not request.is_planned:
            return counts
        for k, start in enumerate(request.starts):
            version, before = bisect_right(self._changes, start) - 1, 0
            total = (
                request.targets[k] - request.done[k]
                if request.status is Status.COMPLETED
                else self._tokens_at(request, k, request.stopped_at)
            )
            while before < total:
                last = version + 1 == len(self._changes) or self._changes[version + 1] >= request.ends[k]
                until = total if last else min(total, self._tokens_at(request, k, self._changes[version + 1]))
                if until > before:
                    counts[version] = counts.get(version, 0) + until - before
                before, version = until, version + 1
        return counts

    def _tokens_at(self, request: GroupRequest, k: int, moment: float) -> int:
        """New tokens of response k at a moment of the fleet's clock."""
        if not request.is_planned or moment <= request.starts[k]:
            return 0
        if moment >= request.ends[k]:
            return request.targets[k] - request.done[k]
        return int((moment - request.starts[k]) * self.section.token_rate + _ALMOST)

    # -- InferenceEngine

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Raises EngineError: these engines generate whole groups."""
        raise EngineError("simulated engines generate groups: use generate_group")

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make generate_group return with the tokens so far, for the groups of these requests (ids by make_request_id) or for all."""
        now = self.now
        if request_ids is None:
            stopped = [*self._running.values(), *self._arrivals.values()]
            self._arrivals, self._finishes = {}, []
            self._running.clear()
            for engine in self._engines:
                engine.clear(now)
        else:
            wanted = {int(request_id.split("-")[0]) for request_id in request_ids}
            stopped = [self._arrivals[index] for index in sorted(wanted & self._arrivals.keys())]
            for request in [self._running[index] for index in sorted(wanted & self._running.keys())]:
                self._remove(request, now)
                stopped.append(request)
        for request in stopped:
            if request.stopped_at is None:
                self._stop(request, Status.ABORTED, now)
        await trio.lowlevel.checkpoint()

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Stand still for the update; then running sequences go on under the new version."""
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
        """As update_weights, to the next version."""
        return await self.update_weights({}, self.version + 1)

    async def get_weight_version(self) -> int:
        """Of the next token."""
        await trio.lowlevel.checkpoint()
        return self.version

    def _recompute_seconds(self) -> float:
        """In which engines read what they have generated so far again, each an equal share."""
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
        """The group of this prompt has been trained on."""
        self._resident.pop(index, None)
        self._num_begun.pop(index, None)

    def count_resident_tokens(self, oldest_kept: int) -> int:
        """Tokens that may still be trained on: of groups under generation, and of those that wait; not of such with older versions."""
        now = self.now
        running = sum(done + self._tokens_at(request, k, now) for request in self._running.values() for k, done in enumerate(request.done))
        return running + sum(tokens for tokens, oldest in self._resident.values() if oldest >= oldest_kept)

    @property
    def mean_length_begun(self) -> float:
        """Tokens of the responses that were begun."""
        return self._begun_tokens / max(1, self._begun_responses)

    @property
    def num_running(self) -> int:
        """Groups that are being generated or wait for a slot."""
        return len(self._running) + len(self._arrivals)

    @property
    def is_paused(self) -> bool:
        """Whether the engines stand still for new weights."""
        return self._paused_at is not None

    def count_busy_slots(self) -> int:
        """Slots with a response in them."""
        return sum(map(self.now.__lt__, chain.from_iterable(engine.free_from for engine in self._engines)))

    def active_seconds(self) -> float:
        """Seconds that slots were generating, added up over the slots."""
        now = self.now
        return self._active_s + sum(request.active_seconds(now) for request in self._running.values())

"""AsyncRolloutManager: batches of exactly batch_size whole groups, and the groups carried over from one batch to the next.

Each round of a batch is a race of many groups (collect_groups): the first ones win, the others are stopped, and their unfinished samples
are kept.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import trio

from rollouts.checks import describe_function, require_flag
from rollouts.config import RolloutConfig, take_apart
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import ask_filter, convert_to_batch, group_samples
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import CheckpointError, ConfigError, GenerationError, raise_single_errors
from rollouts.generation.contract import (
    PendingGroup,
    bind_generate_fn,
    check_saved_groups,
    is_finished,
    note_prompt,
    score_generated_group,
    take_counts,
)
from rollouts.types import FilterFn, Group, Prompt, RolloutBatch, Sample

RewardFn = Callable[[Sample], Any]
_Arrival: TypeAlias = "tuple[int, Group | None]"
_SETTLING_PASSES = 5


class AsyncRolloutManager:
    """Producer of batches from prompts: over-sampling, filtering, carrying over, abort and resume.

    A batch is produced in rounds. A round races ceil(batch_size * over_sampling_factor) groups, less the groups at hand; when batch_size
    groups have passed the filter, the engines are told to stop. The other groups are not lost:

    - groups that finished too late (overflow) are used first in the next batch,
    - groups that did not finish are continued in the next batch from their tokens, under the weights of that time (see their
      weight_versions), or begun anew if generate_fn has no parameter `partial`.

    A group is never split over two batches. No task outlives generate_batch, and the manager's state is consistent whenever
    generate_batch is not running, also after an error or a cancellation: groups in flight are then issued again, and because randomness
    is keyed by prompt.index they come out the same.

    With over_sampling_factor 1 a stream of batches depends on seeds alone. With more, the groups of a batch are the first to finish: same
    timing, same batches.
    """

    def __init__(
        self,
        data_buffer: DataBuffer,
        config: RolloutConfig,
        partial_samples: Iterable[Sample] = (),
        engines: Sequence[InferenceEngine] = (),
    ) -> None:
        """
        Args:
            data_buffer: source of prompts; its position is part of the manager's state.
            config: with generate_fn set.
            partial_samples: samples of an earlier manager, whole groups in any order; finished ones count as having passed.
            engines: engines of generate_fn; all of their requests are aborted when a batch is full. Without any, groups in flight have
                grace_s to end by themselves.

        Raises: ConfigError if generate_fn is missing; GenerationError for partial samples that are not whole groups.
        """
        config = take_apart(config)
        if config.generate_fn is None:
            raise ConfigError("RolloutConfig.generate_fn is None: set it, for example to create_generate_fn(engines, tokenizer, params)")
        self._data_buffer = data_buffer
        self._config = config
        self._generate_fn = config.generate_fn
        self._engines = tuple(engines)
        groups = group_samples(partial_samples, config.group_size)
        self._complete = [group for group in groups if is_finished(group)]  # passed the filter, in the order of use
        self._pending = [_to_pending(group) for group in groups if not is_finished(group)]  # in the order of their prompts
        self._num_batches = 0
        self._running = False
        self._abort = trio.Event()

    async def __aenter__(self) -> AsyncRolloutManager:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._running:
            self.request_abort()

    @property
    def config(self) -> RolloutConfig:
        """Configuration of its batches."""
        return self._config

    @property
    def partial_samples(self) -> tuple[Sample, ...]:
        """Samples that are carried over, of finished groups and of unfinished ones that have samples, in the order of index."""
        groups = [*self._complete, *(pending.samples for pending in self._pending)]
        return tuple(sorted((sample for group in groups for sample in group), key=lambda sample: sample.index))

    async def generate_batch(self, reward_fn: RewardFn | None = None) -> RolloutBatch:
        """Generate the next batch: exactly config.batch_size whole groups, rewarded, filtered, in the order of their prompts.

        Args:
            reward_fn: Sample -> reward, sync (runs in a thread) or async; default config.reward_fn. None in both places: the rewards
                of generate_fn stay. Carried-over finished groups keep their rewards.

        Returns: a batch whose metadata counts num_rounds, num_groups_generated, num_groups_filtered, num_groups_dropped (generation or
            reward failed), num_groups_carried_in (used from earlier), num_groups_carried_over (finished, for the next batch),
            num_groups_partial (unfinished, for the next batch) and filter_pass_rate.
        Raises: GenerationError if max_filter_attempts rounds do not fill the batch, or request_abort() ended it first; the groups so
            far are kept for the next call. Errors of generate_fn, reward_fn and filter_fn are raised as they are.
        """
        assert not self._running, "generate_batch is already running; await it before the next call"
        self._running = True
        try:
            return await self._generate_batch(reward_fn or self._config.reward_fn)
        finally:
            self._running = False
            self._abort = trio.Event()

    def request_abort(self) -> None:
        """Stop the running generate_batch, or else the next one, without losing anything.

        Engines are told to stop; groups get grace_s to return what they have. generate_batch returns normally if the batch is full by then
        and raises GenerationError otherwise; state_dict() holds the tokens so far, and the next generate_batch goes on from them.
        """
        self._abort.set()

    async def _generate_batch(self, reward_fn: RewardFn | None) -> RolloutBatch:
        size = self._config.batch_size
        num_carried_in = min(len(self._complete), size)
        counts: Counter[str] = Counter()
        rejected: list[Group] = []
        while len(self._complete) < size:
            if self._abort.is_set():
                raise GenerationError(
                    f"generation was stopped by request_abort() with {len(self._complete)} of {size} groups finished and "
                    f"{len(self._pending)} unfinished; they are kept, and the next generate_batch() goes on from there"
                )
            if counts["num_rounds"] == self._config.max_filter_attempts:
                num_passed = len(self._complete) - num_carried_in
                dropped, rounds = counts["num_groups_dropped"], counts["num_rounds"]
                raise create_starvation_error(self._config, num_passed, rejected, num_dropped=dropped, num_rounds=rounds)
            collected = await self._run_round(reward_fn)
            rejected.extend(collected.rejected)
            num_passed = len(collected.kept) + len(collected.overflow)
            counts["num_rounds"] += 1
            counts["num_groups_generated"] += num_passed + len(collected.rejected) + len(collected.dropped)
            counts["num_groups_passed"] += num_passed
            counts["num_groups_dropped"] += len(collected.dropped)
        groups, self._complete = self._complete[:size], self._complete[size:]
        self._num_batches += 1
        num_finished = counts["num_groups_passed"] + len(rejected)
        metadata = {
            **{name: counts[name] for name in ("num_rounds", "num_groups_generated", "num_groups_dropped")},
            "num_groups_filtered": len(rejected),
            "num_groups_carried_in": num_carried_in,
            "num_groups_carried_over": len(self._complete),
            "num_groups_partial": len(self._pending),
            "filter_pass_rate": counts["num_groups_passed"] / num_finished if num_finished else 1.0,
            **take_counts(self._config.generate_fn),
        }
        return convert_to_batch((sample for group in groups for sample in group), metadata)

    async def _run_round(self, reward_fn: RewardFn | None) -> CollectedGroups:
        """Race the missing groups, carried-over ones first. State changes before and after, never in between."""
        config = self._config
        num_wanted = config.batch_size - len(self._complete)
        # 50 * 1.1 is a hair above 55 in floating point, which is no reason for one more group
        num_issued = max(num_wanted, math.ceil(config.batch_size * config.over_sampling_factor - 1e-9) - len(self._complete))
        carried, waiting = self._pending[:num_issued], self._pending[num_issued:]
        issued = [*carried, *(PendingGroup(prompt) for prompt in self._data_buffer.get_prompts(num_issued - len(carried)))]
        self._pending = [*issued, *waiting]
        generate = bind_generate_fn(
            self._generate_fn,
            config.n_samples_per_prompt,
            num_baseline=config.n_baseline_samples,
            thread_limiter=trio.CapacityLimiter(num_issued),
        )

        async def generate_and_score(pending: PendingGroup) -> Group | None:
            return await score_generated_group(await generate(pending), reward_fn, config.reward)

        collected = await collect_groups(
            issued,
            generate_and_score,
            num_wanted=num_wanted,
            keep=partial(ask_filter, filter_fn=config.filter_fn),
            stop=self._abort_engines,
            grace_s=config.grace_s,
            abort=self._abort,
        )
        self._pending = [*collected.partial, *waiting]
        self._complete = [*self._complete, *collected.kept, *collected.overflow]
        return collected

    async def _abort_engines(self) -> None:
        async with trio.open_nursery() as nursery:
            for engine in self._engines:
                nursery.start_soon(engine.abort)

    def state_dict(self) -> dict[str, Any]:
        """Return position in the data, carried-over groups and counters as plain JSON values.

        After load_state_dict the stream of batches goes on unchanged. While generate_batch runs, its groups count as not begun.
        """
        return {
            "buffer": self._data_buffer.save_state(),
            "num_batches": self._num_batches,
            "n_samples_per_prompt": self._config.n_samples_per_prompt,
            "n_baseline_samples": self._config.n_baseline_samples,
            "complete": [[sample.to_dict() for sample in group] for group in self._complete],
            "pending": [pending.to_dict() for pending in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of state_dict, with the position of the data buffer.

        Raises: CheckpointError if the state is not one, or is of another group size; DataError if the data differ.
        """
        assert not self._running, "load_state_dict was called while generate_batch is running"
        missing = sorted({"buffer", "num_batches", "n_samples_per_prompt", "complete", "pending"} - set(state))
        if missing:
            raise CheckpointError(f"the saved state of the rollout manager lacks {missing}; it has {sorted(map(str, state))}")
        check_saved_groups(state, self._config)
        self._data_buffer.load_state(state["buffer"])
        self._num_batches = int(state["num_batches"])
        self._complete = [tuple(Sample.from_dict(sample) for sample in group) for group in state["complete"]]
        self._pending = [PendingGroup.from_dict(pending) for pending in state["pending"]]


def _to_pending(group: Group) -> PendingGroup:
    """Return an unfinished group with its Prompt, which is rebuilt from a sample."""
    first = group[0]
    return PendingGroup(Prompt(content=first.prompt, index=first.group_index, metadata=dict(first.metadata)), group)


def create_starvation_error(
    config: RolloutConfig, num_passed: int, rejected: Sequence[Group], *, num_dropped: int, num_rounds: int
) -> GenerationError:
    """Create the error for a batch that does not fill up, with the counts that explain it."""
    num_finished = num_passed + len(rejected)
    parts = [f"only {num_passed} of the {config.batch_size} groups of a batch were found in {num_rounds} rounds of generation"]
    if config.filter_fn is not None and num_finished:
        rate = num_passed / num_finished
        parts.append(f"filter_fn {describe_function(config.filter_fn)} passed {num_passed} of {num_finished} groups (pass rate {rate:.3g})")
    if num_dropped:
        parts.append(f"{num_dropped} groups were dropped because their generation or reward failed")
    rewards = [sample.reward for group in rejected for sample in group if sample.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        parts.append(f"rewards of the refused groups: min {min(rewards):.4g}, mean {mean:.4g}, max {max(rewards):.4g}")
    elif rejected:
        parts.append("the refused groups have no rewards: was reward_fn set?")
    return GenerationError(
        ". ".join(parts) + ". Look at the rewards of a few samples, ease the filter, raise n_samples_per_prompt or over_sampling_factor, "
        f"or raise max_filter_attempts ({config.max_filter_attempts})."
    )


@dataclass(frozen=True, kw_only=True)
class CollectedGroups:
    """Result of a race. Every group is in exactly one of the fields; each field is in the order of the prompts."""

    kept: tuple[Group, ...]  # first num_wanted groups that passed `keep`
    overflow: tuple[Group, ...]  # finished and passed too, but later
    rejected: tuple[Group, ...]  # finished, did not pass
    partial: tuple[PendingGroup, ...]  # unfinished: stopped with some of their tokens, or cancelled and as they were issued
    dropped: tuple[Prompt, ...]  # prompts for which `generate` returned None


async def collect_groups(
    issued: Sequence[PendingGroup],
    generate: Callable[[PendingGroup], Awaitable[Group | None]],
    *,
    num_wanted: int,
    keep: FilterFn | None = None,
    stop: Callable[[], Awaitable[object]] | None = None,
    grace_s: float = 0.0,
    abort: trio.Event | None = None,
) -> CollectedGroups:
    """Race all groups; when num_wanted have passed `keep`, stop the rest and return. No task outlives the call.

    Stopping means: `stop` is called, which makes pending generate() calls return unfinished groups; calls that have not returned grace_s
    later are cancelled. Groups that arrive at the same moment count as arrived in the order of `issued`.

    Args:
        issued: the groups to generate, in the order of their prompts.
        generate: function that makes a group, with its rewards if `keep` looks at them; None as its result = drop the group.
        num_wanted: in [1, len(issued)].
        keep: Group -> True if it counts; sync or async. Called once for each finished group, one after another in order of arrival
            (again for a group whose answer the grace period cut short); None = keep all.
        stop: for example engine.abort; None = nothing can be told to stop.
        grace_s: seconds between stop and cancellation.
        abort: event that stops the race as if num_wanted groups had arrived.

    Raises: the errors of generate, keep and stop, after all other groups are cancelled: the error itself, or an ExceptionGroup where
        several failed at once.
    """
    assert 0 < num_wanted <= len(issued), f"num_wanted is {num_wanted}, expected in [1, {len(issued)}], the number of issued groups"
    send, receive = trio.open_memory_channel[tuple[int, Group | None]](len(issued))
    arrivals: list[_Arrival] = []
    race = _Race(issued, num_wanted, keep)
    stopping = trio.Event()
    deadline = trio.CancelScope()

    async def run_one(position: int) -> None:
        with note_prompt(issued[position].prompt):
            group = await generate(issued[position])
        send.send_nowait((position, group))  # the channel has room for all: no result is lost to a cancellation

    async def end_race() -> None:
        if not stopping.is_set():
            stopping.set()
            deadline.deadline = trio.current_time() + grace_s
            if stop is not None:
                await stop()

    async def end_on(event: trio.Event) -> None:
        await event.wait()
        await end_race()

    with raise_single_errors(), deadline:
        async with trio.open_nursery() as nursery:
            for position in range(len(issued)):
                nursery.start_soon(run_one, position)
            if abort is not None:
                nursery.start_soon(end_on, abort)
            while race.num_outstanding:
                await _receive_settled(receive, arrivals)
                await race.take(arrivals)
                if race.is_won and race.num_outstanding:
                    await end_race()
            nursery.cancel_scope.cancel()  # only end_on can still be there
    _receive_waiting(receive, arrivals)
    await race.take(arrivals)
    return race.result()


class _Race:
    """State of one collect_groups call: the place of each group that has ended."""

    def __init__(self, issued: Sequence[PendingGroup], num_wanted: int, keep: FilterFn | None) -> None:
        self._issued, self._num_wanted, self._keep = issued, num_wanted, keep
        self._outstanding = set(range(len(issued)))
        self._kept: dict[int, Group] = {}
        self._overflow: dict[int, Group] = {}
        self._rejected: dict[int, Group] = {}
        self._stopped: dict[int, Group] = {}

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def is_won(self) -> bool:
        return len(self._kept) == self._num_wanted

    async def take(self, arrivals: list[_Arrival]) -> None:
        """Give each arrived group its place, and empty the list; after a cancellation the groups without a place stay in it."""
        arrivals.sort(key=lambda arrival: arrival[0])
        while arrivals:
            position, group = arrivals[0]
            if group is not None:
                with note_prompt(self._issued[position].prompt):
                    place = await self._choose_place(group)
                place[position] = group
            self._outstanding.remove(position)
            del arrivals[0]

    async def _choose_place(self, group: Group) -> dict[int, Group]:
        if not is_finished(group):
            return self._stopped
        if self._keep is not None:
            verdict: Any = self._keep(group)
            verdict = await verdict if inspect.isawaitable(verdict) else verdict
            if not require_flag(verdict, f"keep {describe_function(self._keep)}", error=GenerationError):
                return self._rejected
        return self._overflow if self.is_won else self._kept

    def result(self) -> CollectedGroups:
        partial = {position: self._issued[position] for position in self._outstanding}
        partial |= {position: replace(self._issued[position], samples=group) for position, group in self._stopped.items()}
        returned = (self._kept, self._overflow, self._rejected, partial)
        dropped = [pending.prompt for position, pending in enumerate(self._issued) if not any(position in place for place in returned)]
        return CollectedGroups(
            kept=_in_order(self._kept),
            overflow=_in_order(self._overflow),
            rejected=_in_order(self._rejected),
            partial=tuple(partial[position] for position in sorted(partial)),
            dropped=tuple(dropped),
        )


def _in_order(groups: Mapping[int, Group]) -> tuple[Group, ...]:
    return tuple(groups[position] for position in sorted(groups))


async def _receive_settled(receive: trio.MemoryReceiveChannel[_Arrival], arrivals: list[_Arrival]) -> None:
    """Wait for an arrival, then append all groups that arrive at the same moment to `arrivals`.

    Requests that end in one decode step end in tasks that trio runs in random order. A few passes of the scheduler let all of them
    through, so that their order is decided by the caller and not by chance.
    """
    arrivals.append(await receive.receive())
    quiet = 0
    while quiet < _SETTLING_PASSES:
        await trio.lowlevel.checkpoint()
        quiet = 0 if _receive_waiting(receive, arrivals) else quiet + 1


def _receive_waiting(receive: trio.MemoryReceiveChannel[_Arrival], arrivals: list[_Arrival]) -> int:
    """Append the groups that have arrived, without waiting; return their number."""
    count = receive.statistics().current_buffer_used
    arrivals.extend(receive.receive_nowait() for _ in range(count))
    return count

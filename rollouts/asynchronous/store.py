"""RolloutStore: the current RolloutState and the parts with the rest of the state, to which it applies the transitions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import trio

from rollouts.asynchronous import transitions
from rollouts.asynchronous.create import ExecutorParts
from rollouts.asynchronous.finished import drain, edit_result, edit_results, is_beyond, load_results, read_results, refuses, take_out
from rollouts.asynchronous.queue import FinishedRollout, TimedResult
from rollouts.asynchronous.state import Attempts, ByIndex, Failed, RolloutState, Scored, Stopped, Waiting
from rollouts.errors import CheckpointError, ConfigError
from rollouts.generation.contract import PendingGroup, check_saved_groups
from rollouts.types import Group, change


class RolloutStore:
    """State of an executor. Starts no task and waits for nothing."""

    def __init__(self, parts: ExecutorParts, version: int, clock: Callable[[], float] = trio.current_time) -> None:
        """
        Args:
            version: weight version that the engines hold.
            clock: returns the time in seconds.
        """
        counts = parts.manager.get_stats()
        self.parts = parts
        self._clock = clock
        self.state = RolloutState(version=version, accepted=counts.accepted, rejected=counts.rejected)

    def set(self, state: RolloutState) -> None:
        """Replace the state: log its warnings, and queue the held groups whose turn came because a prompt was finished or given up."""
        for warning in state.warnings:
            logging.getLogger(__name__).warning("%s", warning)
        has_closed = bool(state.held) and state.num_open < self.state.num_open
        self.state = change(state, warnings=()) if state.warnings else state
        if not self.state.agrees(self.parts.manager.get_stats()):
            self.parts.manager.follow(self.state.counts)
        if has_closed:
            self._pass_on()

    def update(self, **changes: Any) -> None:
        """Replace these fields of the state."""
        self.set(change(self.state, **changes))

    @property
    def num_ready(self) -> int:
        """Number of groups in queue and cache."""
        return self.parts.queue.qsize() + self.parts.cache.size()

    @property
    def num_finished(self) -> int:
        """Number of groups finished and not handed out."""
        return self.num_ready + len(self.state.held)

    @property
    def finished(self) -> tuple[FinishedRollout, ...]:
        """Finished groups: those of queue and cache first, by age; then those that wait for their turn."""
        return tuple(result.data for result in (*read_results(self.parts.queue, self.parts.cache), *self.state.held))

    @property
    def unfinished(self) -> dict[int, Group]:
        """Samples of unfinished groups not being generated: groups being scored first, then waiting ones, by index."""
        scoring = {index: run.pending.samples for index, run in self.state.running.items() if run.scoring}
        return scoring | {index: group.pending.samples for index, group in self.state.waiting.items()}

    # -- how rollouts start and end

    def may_start(self) -> bool:
        """Whether a rollout may start, now or when its delay has passed."""
        return bool(self.state.delayed) or self._count_room() > 0

    def _count_room(self) -> int:
        """Return the number of rollouts that may start now."""
        parts, rules, state = self.parts, self.parts.rules, self.state
        is_blocked = rules.asynchronous.when_queue_full == "wait" and parts.queue.full()
        if state.failures or state.interrupted or is_blocked:
            return 0
        room = parts.manager.get_usable_capacity(state.version)
        return max(0, min(room, state.num_wanted - len(state.running) - self.num_finished)) if rules.on_demand else room

    def start_rollouts(self) -> tuple[int, ...]:
        """Start all rollouts that may start now; return their indices."""
        parts, rules, now = self.parts, self.parts.rules, self._clock()
        room = self._count_room()
        if room <= 0:
            return ()
        state, started = transitions.start(rules, self.state, room, now)
        if state is not self.state:
            self.set(state)
        num_new = room - len(started) - len(state.waiting)
        if num_new <= 0:
            return started
        prompts = parts.data_buffer.get_prompts(num_new)
        state, new = transitions.start(rules, transitions.add_prompts(self.state, prompts), num_new, now)
        self.set(state)
        return (*started, *new)

    def end(self, index: int, outcome: Stopped | Failed | Scored) -> None:
        """End a rollout."""
        rules, state, now = self.parts.rules, self.state, self._clock()
        if isinstance(outcome, Stopped):
            self.set(transitions.stop(rules, state, index, outcome, now))
        elif isinstance(outcome, Failed):
            self.set(transitions.fail(rules, state, index, outcome, now))
        else:
            rollout, max_staleness = transitions.create_finished(state, index, outcome), rules.asynchronous.max_staleness
            is_stale = rollout is not None and refuses(self.parts.strategy, rollout, state.version, max_staleness)
            self.set(transitions.finish(rules, state, index, outcome.group if rollout is None else rollout, now, is_stale=is_stale))

    def give_back(self) -> None:
        """Make all running rollouts wait again."""
        for index in self.state.running:
            self.set(transitions.wait_again(self.state, index, self._clock()))

    # -- finished groups

    def _pass_on(self) -> None:
        queue, rules, num_passed = self.parts.queue, self.parts.rules, 0
        try:
            for result in transitions.find_due(rules, self.state, self._clock()):
                if rules.asynchronous.when_queue_full == "wait" and queue.full():
                    break
                try:
                    queue.put_nowait(result)
                except ConfigError as error:  # the queue is full
                    self.update(failures=(*self.state.failures, error))
                    break
                num_passed += 1
                if self.state.num_wanted and queue.full():  # wait() has requested more than is ready
                    drain(queue, self.parts.cache)
        finally:  # also after an error of a user's queue or cache: no group is in two places
            if num_passed:
                self.set(transitions.pass_on(self.state, num_passed))

    def collect(self) -> None:
        """Purge the queue (if the version rose), move it into the cache, filter the cache; begin stale groups anew, or give them up."""
        parts, rules, version = self.parts, self.parts.rules, self.state.version
        dropped, purged = parts.strategy.purge_stale_samples_from_queue(parts.queue, version, self.state.purged_version)
        self.update(purged_version=purged, collected_version=version)
        drain(parts.queue, parts.cache)
        num_passed = 0
        try:
            for result in transitions.find_due(rules, self.state, self._clock()):  # there is space for them
                parts.cache.add(result)
                num_passed += 1
        finally:  # also after an error of a user's cache: no group is in two places
            self.set(transitions.pass_on(self.state, num_passed))
        dropped += parts.strategy.filter_stale_from_cache(parts.cache, version)
        dropped += take_out(parts.cache, lambda rollout: is_beyond(rollout, version, rules.asynchronous.max_staleness))
        if dropped:
            parts.manager.on_rollout_dropped(len(dropped), version)
            self.set(transitions.purge(rules, self.state, dropped))
            if rules.in_order:
                self._recall()

    def _recall(self) -> None:
        """Hold groups of the cache again that come after a prompt begun anew."""
        early: list[TimedResult] = []
        first_open = self.state.first_open

        def keep(result: TimedResult) -> bool:
            is_due = result.data.prompt.index < first_open
            if not is_due:
                early.append(result)
            return is_due

        self.parts.cache.filter_inplace(keep)
        self.set(transitions.recall(self.parts.rules, self.state, early))

    def hand_out(self, count: int) -> tuple[Group, ...]:
        """Return the `count` oldest groups of the cache."""
        taken = [result.data for result in self.parts.cache.take_first_n(count)]
        self.set(transitions.hand_out(self.state, taken))
        return tuple(rollout.group for rollout in taken)

    def edit_finished(self, edited: Mapping[int, tuple[FinishedRollout, Group]]) -> None:
        """Replace these rollouts by their edited groups, if they are still here."""
        edit_results(self.parts.queue, self.parts.cache, lambda result: edit_result(result, edited))
        self.update(held=tuple(edit_result(result, edited) for result in self.state.held))

    def raise_failure(self) -> None:
        """Raise the error that is to end the run, if any; then forget it."""
        if self.state.failures:
            first, *others = self.state.failures
            self.update(failures=())
            if others:
                first.add_note(f"beside it, {len(others)} more rollouts failed; the last: {others[-1]!r}")
            raise first

    # -- the checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; running rollouts count as waiting; times, meaningless in another process, are left out."""
        parts, state = self.parts, self.state
        pending = {index: rollout.pending for place in (state.waiting, state.running) for index, rollout in place.items()}
        begun = {index: group.begun_version for index, group in state.waiting.items() if group.begun_version is not None}
        begun |= {index: run.begun_version for index, run in state.running.items() if run.pending.samples}
        ready, held = read_results(parts.queue, parts.cache), state.held
        if not parts.rules.in_order:  # they wait for space in the queue, which is not part of a checkpoint
            ready, held = [*ready, *held], ()
        return {
            "buffer": parts.data_buffer.save_state(),
            "pending": [pending[index].to_dict() for index in sorted(pending)],
            "begun": [list(item) for item in sorted(begun.items())],
            "attempts": [[index, attempts.failed] for index, attempts in state.attempts.items() if attempts.failed],
            "stale_attempts": [[index, attempts.stale] for index, attempts in state.attempts.items() if attempts.stale],
            "finished": {
                "ready": [result.data.to_dict() for result in ready],
                "held": [result.data.to_dict() for result in held],
            },
            "manager": parts.manager.state_dict(),
            "version": state.version,
            "n_samples_per_prompt": parts.config.n_samples_per_prompt,
            "n_baseline_samples": parts.config.n_baseline_samples,
            "num_batches": state.num_batches,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of state_dict; moves the data buffer, too."""
        needed = {"buffer", "pending", "begun", "attempts", "finished", "manager", "version", "n_samples_per_prompt"}
        missing = sorted(needed - set(saved))
        if missing:
            raise CheckpointError(f"the saved state of asynchronous rollouts lacks {missing}; it has {sorted(map(str, saved))}")
        parts = self.parts
        check_saved_groups(saved, parts.config)
        parts.manager.load_state_dict(saved["manager"])
        parts.data_buffer.load_state(saved["buffer"])
        ready, held = ([FinishedRollout.from_dict(entry) for entry in saved["finished"][name]] for name in ("ready", "held"))
        if not parts.rules.in_order:
            ready, held = [*ready, *held], []
        load_results(parts.queue, parts.cache, ready)
        counts = parts.manager.get_stats()
        begun, failed, stale = (_load_pairs(saved.get(name, ())) for name in ("begun", "attempts", "stale_attempts"))
        groups = [PendingGroup.from_dict(group) for group in saved["pending"]]
        self.state = RolloutState(
            version=int(saved["version"]),
            accepted=counts.accepted,
            rejected=counts.rejected,
            waiting=ByIndex((group.prompt.index, Waiting(group, begun.get(group.prompt.index))) for group in groups),
            held=tuple(TimedResult(-0.5, rollout) for rollout in held),
            attempts=ByIndex((index, Attempts(failed.get(index, 0), stale.get(index, 0))) for index in {*failed, *stale}),
            num_batches=int(saved.get("num_batches", 0)),
            interrupted=self.state.interrupted,
            idle_since=self.state.idle_since,
            idle_s=self.state.idle_s,
            warned=self.state.warned,
        )
        parts.manager.follow(self.state.counts)


def _load_pairs(pairs: Iterable[tuple[Any, Any]]) -> dict[int, int]:
    return {int(index): int(n) for index, n in pairs}

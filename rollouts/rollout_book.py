"""Where every prompt is that was taken from the data and not handed out yet, and what becomes of it when its rollout ends."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import trio

from rollouts.async_config import AsyncConfig
from rollouts.config import RolloutConfig
from rollouts.errors import (
    CheckpointError,
    ConfigError,
    GenerationError,
    GenerationTimeout,
    RewardError,
)
from rollouts.finished_rollouts import FinishedRollouts
from rollouts.generate_fns import PendingGroup, check_saved_groups
from rollouts.prompt_schedule import PromptSchedule
from rollouts.refused_groups import RefusedGroups
from rollouts.rollout_queue import FinishedRollout, find_oldest_version
from rollouts.rollout_runs import RolloutRun, RolloutRuns
from rollouts.staleness_control import StalenessManager
from rollouts.types import Group

_OUTAGE_RETRY_S = 0.5  # at least, between two attempts while no engine answers


class RolloutBook:
    """The bookkeeping of an executor: waiting prompts, finished groups, counts and failures. It starts nothing and waits for nothing."""

    def __init__(
        self,
        config: RolloutConfig,
        asynchronous: AsyncConfig,
        schedule: PromptSchedule,
        finished: FinishedRollouts,
        manager: StalenessManager,
        *,
        version: int,
        max_refused: int,
        starts_what_is_wanted: bool = False,
    ) -> None:
        """
        Args:
            version: of the weights that generate.
            max_refused: groups that may be refused for one batch before that is an error.
            starts_what_is_wanted: never start more than is waited for.
        """
        self._config = config
        self._asynchronous = asynchronous
        self._starts_what_is_wanted = starts_what_is_wanted
        self._first_failures: dict[int, int] = {}  # index of a prompt whose rollout failed -> num_ended then
        self._has_warned_of_given_up = False
        self._warned_of = ""  # engines that do not answer
        self._last_error: Exception | None = None
        self._refused = RefusedGroups(config, max_staleness=asynchronous.max_staleness, most=max_refused)
        self._unchanged: dict[int, int] = {}  # index of an unfinished rollout that came back without anything new -> version then
        self.schedule = schedule
        self.finished = finished
        self.manager = manager
        self.version = version
        self.num_wanted = 0  # groups that somebody waits for
        self.num_ended = 0  # rollouts that came to their end, whatever became of them
        self.last_end = -math.inf  # when the last one did
        self.failures: list[Exception] = []  # that are to be raised; until then nothing starts
        self.counts: Counter[str] = Counter()  # since take_counts()

    # -- how rollouts start

    def take_rollouts(self) -> list[tuple[PendingGroup, int]]:
        """All rollouts that may start now, with the weight version that their first token was or will be sampled under."""
        taken: list[tuple[PendingGroup, int]] = []
        all_started = bool(self.failures) or self.finished.is_blocked
        while not all_started:
            num_waiting = self.schedule.num_waiting
            candidates = self.schedule.take(self._find_room(), trio.current_time())
            self.manager.on_rollout_enqueued(len(candidates) - (num_waiting - self.schedule.num_waiting))  # those that are new
            all_started = True
            for pending in candidates:
                begun = self.schedule.find_begun_version(pending.prompt.index, self.version)
                if pending.samples and self._is_too_old(pending, begun):
                    self.schedule.end(pending.prompt.index)
                    self.manager.on_rollout_forgotten()
                    self._begin_anew(pending)
                    self._pass_on()
                    all_started = False
                else:
                    self.manager.on_rollout_submitted()
                    taken.append((pending, begun))
        return taken

    def _find_room(self) -> int:
        room = self.manager.get_usable_capacity(self.version)
        if self._starts_what_is_wanted:
            return max(0, min(room, self.num_wanted - self.manager.get_stats().running - self.finished.size))
        return room

    def _is_too_old(self, pending: PendingGroup, begun_version: int) -> bool:
        """Whether what there is of an unfinished group is beyond the allowed staleness already."""
        oldest = find_oldest_version(pending.samples, begun=begun_version, newest=self.version)
        return self.version - oldest > self._asynchronous.max_staleness

    # -- how rollouts end

    def settle(self, run: RolloutRun) -> None:
        """Give a rollout that does not run any more its place."""
        if run.cut and run.error is None and run.scope.cancelled_caught:
            self.counts["num_groups_cut"] += 1
        if run.error is not None and (run.scoring or isinstance(run.error, RewardError)):
            self._fail(run, run.error)  # of the reward function, which had its own attempts, or of the filter
        elif run.error is not None:
            self._handle_failure(run, run.error)
        elif run.was_stopped and run.outdated:
            self._stop_outdated(run)
        elif run.was_stopped and run.timed_out:
            self._handle_failure(run, _create_timeout_error(run, self._asynchronous.rollout_timeout_s))
        elif run.unchanged and self._unchanged.get(run.index) == self.version:
            self._handle_failure(run, _create_unchanged_error(run))
        elif run.was_stopped:
            if run.unchanged:
                self._unchanged[run.index] = self.version
            self.give_back(run)
        else:
            self.num_ended += 1
            self.last_end = trio.current_time()
            self._first_failures.pop(run.index, None)
            self.schedule.end(run.index)
            self._unchanged.pop(run.index, None)
            self._take_in(run)
            self._pass_on()

    def _take_in(self, run: RolloutRun) -> None:
        """A rollout has come to its end: accept or refuse it."""
        prompt, group = run.pending.prompt, run.group
        if group is None:
            self._refuse(run.index)
        elif not run.passes:
            self._refuse(run.index, group)
        else:
            oldest = find_oldest_version(group, begun=run.begun_version, newest=self.version)
            rollout = FinishedRollout(prompt, group, oldest)
            if self.finished.refuses(rollout, self.version):
                self.manager.on_rollout_rejected()
                self._begin_anew(run.pending)
            else:
                self.manager.on_rollout_accepted()
                self.finished.hold(rollout, trio.current_time())

    def _stop_outdated(self, run: RolloutRun) -> None:
        """A rollout was stopped because it was begun too long ago: it goes on only if its tokens are newer than that."""
        has_tokens = any(sample.tokens for sample in run.pending.samples)
        if has_tokens and not self._is_too_old(run.pending, run.begun_version):
            self.give_back(run)
        else:
            self.manager.on_rollout_rejected()
            self.schedule.end(run.index)
            self._begin_anew(run.pending)
            self._pass_on()

    def _refuse(self, index: int, filtered: Group | None = None) -> None:
        """Give up a rollout that ran: with the group that filter_fn refused, or without any that could be scored."""
        self._first_failures.pop(index, None)
        self.manager.on_rollout_rejected()
        self.schedule.forget_attempts(index)
        self.counts["num_groups_failed" if filtered is None else "num_groups_filtered"] += 1
        self._refused.add(filtered)

    def _pass_on(self) -> None:
        try:
            self.finished.pass_on(now=trio.current_time(), first_open=self.schedule.first_open, drains=self.num_wanted > 0)
        except ConfigError as error:  # the queue is full
            self.failures.append(error)

    def _begin_anew(self, pending: PendingGroup) -> None:
        """A group was too old: let its prompt wait again, without what there was, or give it up."""
        index, most = pending.prompt.index, self._asynchronous.max_stale_attempts
        self.counts["num_groups_purged"] += 1
        self._refused.add_stale()
        if self._asynchronous.on_stale == "retry" and (self.schedule.count_stale_attempt(index) < (math.inf if most is None else most)):
            self.counts["num_groups_retried"] += 1
            self.schedule.add(PendingGroup(pending.prompt))
            self.manager.on_rollout_enqueued()
            return
        self.schedule.forget_attempts(index)
        self.counts["num_groups_given_up"] += 1
        if not self._has_warned_of_given_up:
            self._has_warned_of_given_up = True
            logging.getLogger(__name__).warning(
                "prompt %d is given up: its group was more than max_staleness (%d) versions behind, and on_stale is %r with "
                "max_stale_attempts %s. Further ones are counted as num_groups_given_up; long answers are the first to be lost",
                index,
                self._asynchronous.max_staleness,
                self._asynchronous.on_stale,
                most,
            )

    def give_back(self, run: RolloutRun) -> None:
        """A rollout was stopped: it waits again, with what it has."""
        self.manager.on_rollout_returned()
        self.schedule.add(run.pending, begun_version=self._find_begun_version(run))

    def _find_begun_version(self, run: RolloutRun) -> int:
        """Of its first token, as exactly as that is known: it may have waited in its engine for a while."""
        return find_oldest_version(run.pending.samples, begun=run.begun_version, newest=self.version)

    def _fail(self, run: RolloutRun, error: Exception) -> None:
        """The run is to end with this error. The prompt waits again, in case it goes on all the same."""
        self.schedule.forget_attempts(run.index)
        self.give_back(run)
        self.failures.append(error)

    def _handle_failure(self, run: RolloutRun, error: Exception) -> None:
        """A rollout was not generated: do as on_failure says."""
        policy, attempts = self._asynchronous.on_failure, self._asynchronous.max_attempts
        self._last_error = error
        self.counts["num_failures"] += 1
        if policy == "raise":
            self._fail(run, error)
        elif self._is_outage(run):
            self._warn_of_silence(run)
            self._retry_later(run, max(self._asynchronous.retry_delay_s, _OUTAGE_RETRY_S))
        elif policy == "drop":
            self.schedule.end(run.index)
            self._refuse(run.index)
            self._pass_on()
        elif self.schedule.count_attempt(run.index) < attempts:
            self._retry_later(run, self._asynchronous.retry_delay_s)
        else:
            final = GenerationError(
                f"the rollout of prompt {run.index} failed in {attempts} attempts, the last time with {type(error).__name__}: {error}. "
                "Repair its cause, raise max_attempts, or set on_failure='drop' to go on without such prompts"
            )
            final.__cause__ = error
            self._fail(run, final)

    def _is_outage(self, run: RolloutRun) -> bool:
        """Whether engines are dead, which tells nothing of the prompt: one does not answer, or nobody can be asked and nothing ended."""
        if not run.may_be_outage or run.engines_answer:
            return False
        return bool(run.silent_engines) or self._first_failures.setdefault(run.index, self.num_ended) == self.num_ended

    def _warn_of_silence(self, run: RolloutRun) -> None:
        if run.silent_engines and run.silent_engines != self._warned_of:
            self._warned_of = run.silent_engines
            logging.getLogger(__name__).warning(
                "engines do not answer: %s. Their prompts are tried again until they do; the run ends if no rollout does for patience_s",
                run.silent_engines,
            )

    def _retry_later(self, run: RolloutRun, delay_s: float) -> None:
        self.counts["num_groups_retried"] += 1
        self.manager.on_rollout_rejected()
        self.manager.on_rollout_enqueued()
        self.schedule.add(run.pending, begun_version=self._find_begun_version(run), start_at=trio.current_time() + delay_s)

    # -- batches

    @property
    def is_starving(self) -> bool:
        """Whether too many groups were refused, dropped or too old since groups were last handed out."""
        return self._refused.are_too_many

    def take_counts(self) -> dict[str, int]:
        """What happened to groups since the last call."""
        names = ("filtered", "purged", "retried", "failed", "given_up", "cut")
        counts = {f"num_groups_{name}": self.counts[f"num_groups_{name}"] for name in names}
        self.counts.clear()
        return counts | {"num_groups_ready": self.finished.num_ready, "num_groups_waiting": self.schedule.num_waiting}

    def collect(self) -> None:
        """Bring what is finished into the cache, without what is too old."""
        dropped = self.finished.collect(self.version, now=trio.current_time(), first_open=self.schedule.first_open)
        if dropped:
            self.manager.on_rollout_dropped(len(dropped), self.version)
            for rollout in dropped:
                self._begin_anew(PendingGroup(rollout.prompt))
            self.finished.recall(self.schedule.first_open)

    def hand_out(self, count: int) -> tuple[Group, ...]:
        """The `count` oldest groups of the cache."""
        taken = self.finished.take(count)
        for rollout in taken:
            self.schedule.forget_attempts(rollout.prompt.index)
        self._refused.forget()
        return tuple(rollout.group for rollout in taken)

    def raise_failure(self) -> None:
        """Raise what is to end the run, if anything is; then it is forgotten."""
        if not self.failures:
            return
        first, *others = self.failures
        self.failures.clear()
        if others:
            first.add_note(f"beside it, {len(others)} more rollouts failed; the last: {others[-1]!r}")
        raise first

    def create_wait_error(self, count: int, timeout_s: float | None, *, num_running: int, interrupted: bool) -> GenerationTimeout:
        """The error for groups that do not come, with what its user needs to see why. timeout_s: None = patience_s has passed."""
        patience_s = self._asynchronous.patience_s or 0.0
        after = f"{patience_s:g} s in which no rollout ended (patience_s; rl.asynchronous.patience_s)"
        if timeout_s is not None:
            after = f"{timeout_s:g} s"
        capacity = self.manager.get_capacity(self.version)
        parts = [
            f"{self.finished.num_ready} of the {count} groups that were waited for are there after {after}: "
            f"{num_running} are running, {self.schedule.num_waiting} wait to be started"
        ]
        if self.finished.size > self.finished.num_ready:
            parts.append(f"{self.finished.size - self.finished.num_ready} finished ones wait for prompts before them")
        if interrupted:
            parts.append("nothing may start before resume()")
        elif not num_running:
            parts.append(
                f"at version {self.version} the capacity is {capacity}; where it is not above 0, nothing starts before set_version() "
                "tells of newer weights, or dropped groups give their room back (register_capacity_modifiers)"
            )
        failures = self.counts["num_failures"]
        if failures:
            parts.append(
                f"{failures} rollouts failed since the last batch, the last with {type(self._last_error).__name__}: {self._last_error}"
            )
        error = GenerationTimeout("; ".join(parts) + ". Nothing is lost: wait again, or save the state and look at the engines")
        error.__cause__ = self._last_error
        return error

    def create_starvation_error(self) -> GenerationError:
        """The error for a filter that refuses too much, or engines without new weights; counting begins anew."""
        error = self._refused.create_error(num_finished=self.finished.size, version=self.version)
        self._refused.forget()
        return error

    # -- state

    def state_dict(self, runs: RolloutRuns) -> dict[str, Any]:
        """Everything as JSON values; runs: what runs, which counts as waiting."""
        return {
            **self.schedule.state_dict(runs.pending),
            "finished": self.finished.state_dict(),
            "manager": self.manager.state_dict(),
            "version": self.version,
            "n_samples_per_prompt": self._config.n_samples_per_prompt,
            "n_baseline_samples": self._config.n_baseline_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict."""
        needed = {"buffer", "pending", "begun", "attempts", "finished", "manager", "version", "n_samples_per_prompt"}
        missing = sorted(needed - set(state))
        if missing:
            raise CheckpointError(f"the saved state of asynchronous rollouts lacks {missing}; it has {sorted(map(str, state))}")
        check_saved_groups(state, self._config)
        self.manager.load_state_dict(state["manager"])
        self.schedule.load_state_dict(state)
        self.finished.load_state_dict(state["finished"])
        self.version = int(state["version"])
        self.failures.clear()
        self.counts.clear()
        self._refused.forget()
        self._unchanged.clear()
        self._first_failures.clear()
        self._last_error = None


def _create_timeout_error(run: RolloutRun, timeout_s: float | None) -> GenerationTimeout:
    num_tokens = sum(len(sample.tokens) for sample in run.pending.samples)
    return GenerationTimeout(
        f"the rollout of prompt {run.index} did not end within rollout_timeout_s ({timeout_s} s); it was aborted with {num_tokens} tokens, "
        "prompts included, which are kept. Raise rollout_timeout_s, or lower max_tokens"
    )


def _create_unchanged_error(run: RolloutRun) -> GenerationError:
    return GenerationError(
        f"the rollout of prompt {run.index} came back unfinished and as it was, more than once under the same weights, although nothing "
        "stopped it: set the status of its samples to COMPLETED or TRUNCATED where they have ended"
    )

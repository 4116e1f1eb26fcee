"""Transitions of asynchronous rollouts: pure functions from a RolloutState to the next one. Times are seconds of trio's clock."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import islice, takewhile
from typing import Any

from rollouts.asynchronous.messages import (
    create_attempts_error,
    create_timeout_error,
    create_unchanged_error,
    describe_given_up,
    describe_silence,
)
from rollouts.asynchronous.queue import FinishedRollout, TimedResult, find_oldest_version
from rollouts.asynchronous.state import (
    Attempts,
    ByIndex,
    Failed,
    Refused,
    RolloutRules,
    RolloutState,
    Running,
    Scored,
    Stopped,
    Waiting,
)
from rollouts.errors import RewardError
from rollouts.generation.contract import PendingGroup
from rollouts.types import Group, Prompt, Sample, change

_OUTAGE_RETRY_S = 0.5  # minimum seconds between two attempts while no engine answers


def count(state: RolloutState, name: str) -> RolloutState:
    """Count one more event of this name since the last batch."""
    return change(state, events={**state.events, name: state.events.get(name, 0) + 1})


def warn(state: RolloutState, cause: str, text: str) -> RolloutState:
    """Add a warning to log, once for each cause."""
    if cause in state.warned:
        return state
    return change(state, warned=state.warned | {cause}, warnings=(*state.warnings, text))


# -- how rollouts start


def add_prompts(state: RolloutState, prompts: Iterable[Prompt]) -> RolloutState:
    """Add prompts from the data to the waiting ones."""
    return change(state, waiting=state.waiting.having({prompt.index: Waiting(PendingGroup(prompt)) for prompt in prompts}))


def start(rules: RolloutRules, state: RolloutState, room: int, now: float) -> tuple[RolloutState, tuple[int, ...]]:
    """Start up to `room` waiting groups whose time has come, in the order of index; stale ones are begun anew or given up.

    Groups whose time has not come keep their capacity, so that a retried prompt is not overtaken by later ones.

    Returns: the state, and the indices that started.
    """
    if not state.waiting:  # as before most prompts are taken from the data
        return state, ()
    started: list[int] = []
    while True:
        due = (i for i in state.waiting if i not in state.edited and state.delayed.get(i, now) <= now)
        ready = tuple(islice(due, max(0, room - len(started))))
        young = [index for index in ready if not _is_outdated(rules, state, state.waiting[index])]
        running = {index: _create_run(state.waiting[index], state.version) for index in young}
        if running and state.idle_since is not None:
            state = change(state, idle_s=state.idle_s + now - state.idle_since, idle_since=None)
        waiting, delayed = state.waiting.without(ready), state.delayed.without(ready)
        before, state = state.waiting, change(state, waiting=waiting, delayed=delayed, running=state.running.having(running))
        started += young
        if len(young) == len(ready):
            return state, tuple(started)
        for index in sorted(set(ready).difference(young)):
            state = begin_anew(rules, change(state, rejected=state.rejected + 1), before[index].pending.prompt)


def find_next_start(state: RolloutState, now: float) -> float:
    """Return the earliest time after now at which a waiting group may start; infinity if there is none."""
    if not state.delayed:
        return math.inf
    return min((start_at for start_at in state.delayed.values() if start_at > now), default=math.inf)


def _create_run(group: Waiting, version: int) -> Running:
    return Running(group.pending, version if group.begun_version is None else group.begun_version)


def _is_outdated(rules: RolloutRules, state: RolloutState, group: Waiting) -> bool:
    """Whether an unfinished group already has tokens beyond the allowed staleness."""
    if not group.pending.samples:
        return False
    return _exceeds(rules, state, _create_run(group, state.version))


def _exceeds(rules: RolloutRules, state: RolloutState, run: Running) -> bool:
    oldest = find_oldest_version(run.pending.samples, begun=run.begun_version, newest=state.version)
    return state.version - oldest > rules.asynchronous.max_staleness


# -- while they run


def update_run(state: RolloutState, index: int, run: Running) -> RolloutState:
    """Replace the record of a running rollout."""
    assert index in state.running, f"the rollout of prompt {index} does not run; those that do: {list(state.running)}"
    return change(state, running=state.running.having({index: run}))


def cut(state: RolloutState, index: int, warning: str) -> RolloutState:
    """Note that a rollout was cancelled because it did not obey an abort."""
    return warn(update_run(state, index, change(state.running[index], cut=True)), "cut", warning)


def find_outdated(rules: RolloutRules, state: RolloutState) -> tuple[int, ...]:
    """Return the indices of rollouts that began too long ago: by their begin during generation, by their tokens during scoring."""
    max_staleness = rules.asynchronous.max_staleness
    old = {index: run for index, run in state.running.items() if state.version - run.begun_version > max_staleness}
    return tuple(i for i, run in old.items() if not (run.outdated or run.failed) and (not run.scoring or _exceeds(rules, state, run)))


# -- how they end


def stop(rules: RolloutRules, state: RolloutState, index: int, stopped: Stopped, now: float) -> RolloutState:
    """End a stopped rollout: it waits again with its samples, unless they are too old or it took too long."""
    run, attempts = state.running[index], state.attempts.get(index, Attempts())
    if stopped.cancelled and run.cut:
        state = count(state, "cut")
    if run.outdated:
        if any(sample.tokens for sample in run.pending.samples) and not _exceeds(rules, state, run):
            return wait_again(state, index, now)
        return begin_anew(rules, _reject(state, index, now), run.pending.prompt)
    if run.timed_out:
        return fail(rules, state, index, Failed(create_timeout_error(run.pending, rules.asynchronous.rollout_timeout_s)), now)
    if stopped.unchanged and attempts.unchanged_at == state.version:
        return fail(rules, state, index, Failed(create_unchanged_error(index)), now)
    if stopped.unchanged:
        state = change(state, attempts=state.attempts.having({index: replace(attempts, unchanged_at=state.version)}))
    return wait_again(state, index, now)


def fail(rules: RolloutRules, state: RolloutState, index: int, failed: Failed, now: float) -> RolloutState:
    """End a rollout that raised, as AsyncConfig.on_failure decides. Errors of rewards and filters always end the run."""
    asynchronous, error = rules.asynchronous, failed.error
    if state.running[index].scoring or isinstance(error, RewardError):
        return _end_run(state, index, error, now)
    state = count(change(state, last_error=error), "failures")
    if asynchronous.on_failure == "raise":
        return _end_run(state, index, error, now)
    attempts = state.attempts.get(index, Attempts())
    if failed.may_be_outage and not failed.engines_answer:
        if not failed.silent_engines and attempts.silent_since is None:
            attempts = replace(attempts, silent_since=state.num_ended)
        if failed.silent_engines or attempts.silent_since == state.num_ended:  # a failure of dead engines is not the prompt's
            if failed.silent_engines:
                state = warn(state, failed.silent_engines, describe_silence(failed.silent_engines))
            delay_s = max(asynchronous.retry_delay_s, _OUTAGE_RETRY_S)
            return _retry_later(state, index, attempts, now=now, start_at=now + delay_s)
    if asynchronous.on_failure == "drop":
        return _refuse(rules, _reject(state, index, now), index)
    attempts = replace(attempts, failed=attempts.failed + 1)
    if attempts.failed < asynchronous.max_attempts:
        return _retry_later(state, index, attempts, now=now, start_at=now + asynchronous.retry_delay_s)
    return _end_run(state, index, create_attempts_error(index, asynchronous.max_attempts, error), now)


def finish(
    rules: RolloutRules, state: RolloutState, index: int, ended: FinishedRollout | Group | None, now: float, *, is_stale: bool = False
) -> RolloutState:
    """End a rollout that ended by itself: it is held until its turn, refused, or begun anew.

    Args:
        ended: result of create_finished; or else the group that filter_fn refused, or None for a group that is dropped.
        is_stale: whether the strategy refuses the group for its staleness.
    """
    changes = {**_leaving(state, index, now), "num_ended": state.num_ended + 1, "last_end": now}
    if index in state.attempts:
        changes["attempts"] = _with_attempts(state, index, replace(state.attempts[index], unchanged_at=None, silent_since=None))
    if not isinstance(ended, FinishedRollout):
        return _refuse(rules, change(state, **changes, rejected=state.rejected + 1), index, ended)
    if is_stale:
        return begin_anew(rules, change(state, **changes, rejected=state.rejected + 1), ended.prompt)
    held = list(state.held)
    insort(held, TimedResult(now, ended), key=lambda result: _turn(rules, result))
    return change(state, **changes, accepted=state.accepted + 1, held=tuple(held))


def create_finished(state: RolloutState, index: int, scored: Scored) -> FinishedRollout | None:
    """Return the rollout for training, with edits made while it was scored; None = dropped or refused."""
    if scored.group is None or not scored.passes:
        return None
    run = state.running[index]
    group = _add_edits(scored.group, scored.before, run.pending.samples)
    return FinishedRollout(run.pending.prompt, group, find_oldest_version(group, begun=run.begun_version, newest=state.version))


def wait_again(state: RolloutState, index: int, now: float, start_at: float | None = None) -> RolloutState:
    """Make a running rollout wait again, with its samples."""
    run, samples = state.running[index], state.running[index].pending.samples
    has_tokens = any(sample.tokens for sample in samples)
    begun = find_oldest_version(samples, begun=run.begun_version, newest=state.version) if has_tokens else None
    delayed = state.delayed if start_at is None else state.delayed.having({index: start_at})
    waiting = state.waiting.having({index: Waiting(run.pending, begun)})
    return change(state, **_leaving(state, index, now), waiting=waiting, delayed=delayed)


def begin_anew(rules: RolloutRules, state: RolloutState, prompt: Prompt) -> RolloutState:
    """Make a prompt whose group was too old wait again, without that group, or give it up."""
    asynchronous, attempts = rules.asynchronous, state.attempts.get(prompt.index, Attempts())
    state = count(change(state, refused=replace(state.refused, num_stale=state.refused.num_stale + 1)), "purged")
    most = math.inf if asynchronous.max_stale_attempts is None else asynchronous.max_stale_attempts
    if asynchronous.on_stale == "drop" or attempts.stale + 1 >= most:
        state = warn(state, "given up", describe_given_up(prompt.index, asynchronous))
        return count(change(state, attempts=state.attempts.without([prompt.index])), "given_up")
    attempts = _with_attempts(state, prompt.index, replace(attempts, stale=attempts.stale + 1))
    return count(replace(add_prompts(state, [prompt]), attempts=attempts), "retried")


def _leaving(state: RolloutState, index: int, now: float) -> dict[str, Any]:
    """Return the changes of the state when a rollout runs no longer."""
    running = state.running.without([index])
    return {"running": running, "idle_since": state.idle_since if running else now}


def _reject(state: RolloutState, index: int, now: float) -> RolloutState:
    return change(state, **_leaving(state, index, now), rejected=state.rejected + 1)


def _refuse(rules: RolloutRules, state: RolloutState, index: int, filtered: Group | None = None) -> RolloutState:
    """Give up a prompt: with the group that filter_fn refused, or without a group."""
    before, is_dropped = state.refused, filtered is None
    groups = before.filtered if filtered is None else (*before.filtered, filtered)[-rules.max_refused :]
    refused = replace(before, num_refused=before.num_refused + 1, num_dropped=before.num_dropped + is_dropped, filtered=groups)
    return count(change(state, refused=refused, attempts=state.attempts.without([index])), "failed" if is_dropped else "filtered")


def _end_run(state: RolloutState, index: int, error: Exception, now: float) -> RolloutState:
    """Record an error that is to end the run. The prompt waits again, in case the run continues."""
    attempts = replace(state.attempts.get(index, Attempts()), failed=0, stale=0)
    state = change(state, failures=(*state.failures, error), attempts=_with_attempts(state, index, attempts))
    return wait_again(state, index, now)


def _retry_later(state: RolloutState, index: int, attempts: Attempts, *, now: float, start_at: float) -> RolloutState:
    state = change(state, rejected=state.rejected + 1, attempts=_with_attempts(state, index, attempts))
    return count(wait_again(state, index, now, start_at), "retried")


def _with_attempts(state: RolloutState, index: int, attempts: Attempts) -> ByIndex[Attempts]:
    return state.attempts.without([index]) if attempts == Attempts() else state.attempts.having({index: attempts})


def _add_edits(scored: Group, before: Group, edited: Group) -> Group:
    """Apply to scored samples those fields of edited ones that differ from their values before both."""
    if edited is before:
        return scored
    return tuple(_add_edit(*samples) for samples in zip(scored, before, edited, strict=True))


def _add_edit(scored: Sample, before: Sample, edited: Sample) -> Sample:
    names = (field.name for field in fields(Sample) if field.init)
    changes = {name: getattr(edited, name) for name in names if getattr(edited, name) is not getattr(before, name)}
    if "metadata" in changes:
        changes["metadata"] = {**scored.metadata, **edited.metadata}
    return replace(scored, **changes)


# -- finished groups


def _turn(rules: RolloutRules, result: TimedResult) -> tuple[float, int]:
    return (0.0, result.data.prompt.index) if rules.in_order else result.order


def find_due(rules: RolloutRules, state: RolloutState, now: float) -> tuple[TimedResult, ...]:
    """Return the held groups whose turn has come. In strict order their time becomes `now`, which keeps the order of prompts."""
    if not rules.in_order:
        return state.held
    first_open = state.first_open
    due = takewhile(lambda result: result.data.prompt.index < first_open, state.held)
    return tuple(TimedResult(now, result.data) for result in due)


def pass_on(state: RolloutState, num_passed: int) -> RolloutState:
    """Remove the first held groups, which are in the queue or the cache."""
    return change(state, held=state.held[num_passed:])


def purge(rules: RolloutRules, state: RolloutState, dropped: Iterable[FinishedRollout]) -> RolloutState:
    """Begin the prompts of stale finished groups anew, or give them up."""
    for rollout in dropped:
        state = begin_anew(rules, state, rollout.prompt)
    return state


def recall(rules: RolloutRules, state: RolloutState, results: Iterable[TimedResult]) -> RolloutState:
    """Hold groups of the cache again that must wait for an earlier prompt begun anew."""
    return change(state, held=tuple(sorted((*state.held, *results), key=lambda result: _turn(rules, result))))


def hand_out(state: RolloutState, rollouts: Iterable[FinishedRollout]) -> RolloutState:
    """Forget the attempts at these prompts, and the refusals before them."""
    indices = [rollout.prompt.index for rollout in rollouts if rollout.prompt.index in state.attempts]
    return change(state, refused=Refused(), attempts=state.attempts.without(indices))


def is_starving(rules: RolloutRules, state: RolloutState) -> bool:
    """Whether too many groups were refused, dropped or too old since groups were last handed out."""
    return state.refused.num_refused + state.refused.num_stale >= rules.max_refused


# -- edits of resident samples


def begin_edit(state: RolloutState) -> RolloutState:
    """Keep the samples held here and not being generated in place until end_edit()."""
    scoring = {index for index, run in state.running.items() if run.scoring}
    return change(state, is_edited=True, edited=frozenset(scoring.union(i for i, group in state.waiting.items() if group.pending.samples)))


def end_edit(state: RolloutState, groups: Mapping[int, Group]) -> RolloutState:
    """Release the kept samples, edited, so that they can start and end again."""
    waiting = {
        i: replace(state.waiting[i], pending=_edit(state.waiting[i].pending, group)) for i, group in groups.items() if i in state.waiting
    }
    running = {
        i: replace(state.running[i], pending=_edit(state.running[i].pending, group)) for i, group in groups.items() if i in state.running
    }
    return change(state, waiting=state.waiting.having(waiting), running=state.running.having(running), is_edited=False, edited=frozenset())


def _edit(pending: PendingGroup, group: Group) -> PendingGroup:
    return replace(pending, samples=group)

"""Errors and warnings about asynchronous rollouts: the cause, the values found, and the remedy."""

from __future__ import annotations

from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.state import RolloutRules, RolloutState
from rollouts.config import RolloutConfig
from rollouts.errors import GenerationError, GenerationTimeout
from rollouts.generation.contract import PendingGroup
from rollouts.generation.manager import create_starvation_error as create_filter_error


def describe_given_up(index: int, asynchronous: AsyncConfig) -> str:
    """Return the warning for a prompt whose groups became too old."""
    return (
        f"prompt {index} is given up: its group was more than max_staleness ({asynchronous.max_staleness}) versions behind, and on_stale "
        f"is {asynchronous.on_stale!r} with max_stale_attempts {asynchronous.max_stale_attempts}. Further ones are counted as "
        "num_groups_given_up; long answers are the first to be lost"
    )


def describe_cut(index: int, grace_s: float, *, has_engines: bool) -> str:
    """Return the warning for a rollout that was cancelled because it did not obey an abort."""
    advice = "raise grace_s" if has_engines else "pass the executor the engines= that generate_fn uses, so that they can be told"
    return (
        f"the rollout of prompt {index} did not return within grace_s ({grace_s:g} s) of being told to stop: it was cancelled, and what it "
        f"has generated since it was started is generated again. If this happens often (num_groups_cut), {advice}"
    )


def describe_silence(silent_engines: str) -> str:
    """Return the warning for engines that do not answer."""
    return (
        f"engines do not answer: {silent_engines}. Their prompts are tried again until they do; the run ends if no rollout does for "
        "patience_s"
    )


def create_timeout_error(pending: PendingGroup, timeout_s: float | None) -> GenerationTimeout:
    """Create the error for a rollout that took longer than timeout_s seconds."""
    num_tokens = sum(len(sample.tokens) for sample in pending.samples)
    return GenerationTimeout(
        f"the rollout of prompt {pending.prompt.index} did not end within rollout_timeout_s ({timeout_s} s); it was aborted with "
        f"{num_tokens} tokens, prompts included, which are kept. Raise rollout_timeout_s, or lower max_tokens"
    )


def create_unchanged_error(index: int) -> GenerationError:
    """Create the error for a generate_fn that returns unfinished samples although nothing stopped it."""
    return GenerationError(
        f"the rollout of prompt {index} came back unfinished and as it was, more than once under the same weights, although nothing "
        "stopped it: set the status of its samples to COMPLETED or TRUNCATED where they have ended"
    )


def create_attempts_error(index: int, attempts: int, cause: Exception) -> GenerationError:
    """Create the error for a prompt whose last attempt failed with `cause`."""
    error = GenerationError(
        f"the rollout of prompt {index} failed in {attempts} attempts, the last time with {type(cause).__name__}: {cause}. "
        "Repair its cause, raise max_attempts, or set on_failure='drop' to go on without such prompts"
    )
    error.__cause__ = cause
    return error


def create_wait_error(
    rules: RolloutRules, state: RolloutState, count: int, timeout_s: float | None, *, num_ready: int, capacity: int
) -> GenerationTimeout:
    """Create the error for a wait without enough groups, with the facts that explain it.

    Args:
        count: groups requested.
        timeout_s: seconds waited; None = no rollout ended for AsyncConfig.patience_s.
        num_ready: groups in queue and cache.
        capacity: rollouts that may start.
    """
    patience_s = rules.asynchronous.patience_s or 0.0
    after = f"{patience_s:g} s in which no rollout ended (patience_s; rl.asynchronous.patience_s)"
    if timeout_s is not None:
        after = f"{timeout_s:g} s"
    parts = [
        f"{num_ready} of the {count} groups that were waited for are there after {after}: "
        f"{len(state.running)} are running, {len(state.waiting)} wait to be started"
    ]
    if state.held:
        parts.append(f"{len(state.held)} finished ones wait for prompts before them")
    if state.interrupted:
        parts.append("nothing may start before resume()")
    elif not state.running:
        parts.append(
            f"at version {state.version} the capacity is {capacity}; where it is not above 0, nothing starts before set_version() "
            "tells of newer weights, or dropped groups give their room back (register_capacity_modifiers)"
        )
    if state.events.get("failures"):
        last = state.last_error
        parts.append(f"{state.events['failures']} rollouts failed since the last batch, the last with {type(last).__name__}: {last}")
    error = GenerationTimeout("; ".join(parts) + ". Nothing is lost: wait again, or save the state and look at the engines")
    error.__cause__ = state.last_error
    return error


def create_starvation_error(rules: RolloutRules, state: RolloutState, config: RolloutConfig, num_finished: int) -> GenerationError:
    """Create the error for a filter that refuses too much, or engines without new weights.

    Args:
        num_finished: groups that passed and wait for the others of their batch.
    """
    refused = state.refused
    if refused.num_stale > refused.num_refused:
        return GenerationError(
            f"{refused.num_stale} groups in a row were more than max_staleness ({rules.asynchronous.max_staleness}) versions behind "
            f"version {state.version}: do the engines get the weights that set_version() tells of, and stamp tokens with their version? "
            "Else raise max_staleness, or lower max_concurrent_rollouts or max_tokens, so that rollouts end within so many steps"
        )
    rounds = config.max_filter_attempts
    return create_filter_error(config, num_finished, refused.filtered, num_dropped=refused.num_dropped, num_rounds=rounds)

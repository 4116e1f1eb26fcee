"""Calling reward functions: sync or async, a sample or a whole group at a time, with a deadline. Every failure is a RewardError."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import trio

from rollouts.checks import is_async_function
from rollouts.config import RewardConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.results import EvaluateResult, parse_result
from rollouts.samples import describe_sample
from rollouts.types import Sample

T = TypeVar("T")

RewardFn: TypeAlias = Callable[[Sample], Any]
"""Sample -> a finite number (float, int, bool, 0-d array or tensor) or an EvaluateResult, or an awaitable of one.

One with has_own_deadline = True bounds the time of its calls by itself: RewardConfig.timeout_s, which a call also spends waiting for a free
worker, is then not applied; if it has limit_calls(timeout_s), that gives the function that is called in its place, whose parts without
such a bound have this one. One with reward_name is called so in messages.
"""

Outcome: TypeAlias = "tuple[Any] | RewardError"
"""What a call gave: its value, in a box because it may be an awaitable, or why there is none."""

QUICK_S = 0.01  # how long one thread goes from sample to sample before the rest of a group gets threads of their own


@runtime_checkable
class GroupReward(Protocol):
    """A reward function that judges all samples of a group in one call, because it compares them or because one call is cheaper."""

    def score_samples(self, samples: Sequence[Sample]) -> Any:
        """What a RewardFn returns, for each of the samples, in their order; or an awaitable of all of them."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Settings of a reward that holds something open while it is used, such as processes or connections."""

    def open_reward(self) -> AbstractAsyncContextManager[RewardFn]:
        """`async with source.open_reward() as reward_fn`: the reward function works inside the block."""
        ...


class UnopenedReward:
    """For RewardSources to inherit: calling one says that it is to be opened first."""

    def __call__(self, sample: Sample) -> Any:
        """Raises ConfigError."""
        raise create_unopened_error(self)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of the reward of one sample: either result and scored, or error."""

    result: EvaluateResult | None = None
    scored: Sample | None = None  # the sample with it
    error: RewardError | None = None  # of the last try
    num_retries: int = 0  # tries after the first; of a call for several samples only in one of their judgements


async def judge_samples(reward_fn: RewardFn, samples: Sequence[Sample], config: RewardConfig) -> list[Judgement]:
    """The judgement of each sample, in order. Failures are tried again if that is the policy, and are never raised.

    Samples are judged concurrently; a sync function is called from several threads, except that the samples for which it needs less than
    QUICK_S in all are judged one after another in one thread. A GroupReward is called once for all, and again for all if one fails.

    Raises: ConfigError for a RewardSource that has not been opened.
    """
    check_opened(reward_fn)
    if not samples:
        return []
    if getattr(reward_fn, "has_own_deadline", False):
        limit_calls = getattr(reward_fn, "limit_calls", None)
        reward_fn = reward_fn if limit_calls is None else limit_calls(config.timeout_s)
        config = replace(config, timeout_s=None)
    if isinstance(reward_fn, GroupReward):
        return await _judge_together(reward_fn, samples, config)
    begun = [] if is_async_function(reward_fn) else await _call_in_turn(reward_fn, samples, config)
    if len(samples) == 1:
        return [await _judge_sample(reward_fn, samples[0], config, begun[0] if begun else None)]
    judgements: dict[int, Judgement] = {}

    async def judge(k: int, outcome: Outcome | None) -> None:
        judgements[k] = await _judge_sample(reward_fn, samples[k], config, outcome)

    async with trio.open_nursery() as nursery:
        for k, outcome in itertools.zip_longest(range(len(samples)), begun):
            nursery.start_soon(judge, k, outcome)
    return [judgements[k] for k in range(len(samples))]


def judge_now(reward_fn: RewardFn, samples: Sequence[Sample]) -> list[Any]:
    """What a sync reward function gives for samples, called here and now: no deadline, no threads, errors as they are."""
    check_opened(reward_fn)
    if not isinstance(reward_fn, GroupReward):
        return [reward_fn(sample) for sample in samples]
    return check_values(reward_fn.score_samples(samples), len(samples), describe_reward(reward_fn))


def check_opened(reward_fn: Any) -> None:
    """Raise ConfigError for a RewardSource: what it opens is the reward function."""
    if isinstance(reward_fn, RewardSource):
        raise create_unopened_error(reward_fn)


def create_unopened_error(source: object) -> ConfigError:
    """The error for a RewardSource that is called like what it opens."""
    name = type(source).__name__
    return ConfigError(
        f"{name} is to be opened first: `async with source.open_reward() as reward_fn`, and reward_fn is the reward function"
    )


def check_values(values: Any, num_samples: int, name: str) -> list[Any]:
    """What a function of a whole group returned, as a list of one value for each sample. Raises RewardError if it is something else."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise RewardError(f"reward function {name} returned {values!r:.200} ({type(values).__name__}), expected a list of {num_samples}")
    found = list(cast("Sequence[Any]", values))
    if len(found) != num_samples:
        raise RewardError(
            f"reward function {name} returned {len(found)} results for {num_samples} samples, expected one for each, in order"
        )
    return found


def describe_reward(function: Any) -> str:
    """The name by which messages call a reward function."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return str(getattr(function, "reward_name", None) or getattr(function, "__qualname__", type(function).__name__))


async def _judge_together(reward_fn: GroupReward, samples: Sequence[Sample], config: RewardConfig) -> list[Judgement]:
    """One call for all. The judgements are all of one call: those of two need not be comparable."""
    num_retries = config.max_retries if config.on_error == "retry" else 0
    name = describe_reward(reward_fn)
    where = f"{len(samples)} samples of group {samples[0].group_index}"
    counting = next((k for k, sample in enumerate(samples) if sample.metadata.get("trainable", True)), 0)  # metrics are of these
    for attempt in itertools.count():
        try:
            value = await _call_until(functools.partial(reward_fn.score_samples, samples), name, where, config)
            values = check_values(value, len(samples), name)
        except RewardError as error:
            judgements = [Judgement(error=error)] * len(samples)
        else:
            judgements = [_judge_value(v, sample, name, 0) for v, sample in zip(values, samples, strict=True)]
        judgements[counting] = replace(judgements[counting], num_retries=attempt)
        if attempt == num_retries or all(judgement.error is None for judgement in judgements):
            return judgements
    raise AssertionError("unreachable: the loop has no end")


async def _judge_sample(reward_fn: RewardFn, sample: Sample, config: RewardConfig, outcome: Outcome | None) -> Judgement:
    """The judgement of one; outcome: of a first call that has been made already."""
    num_retries = config.max_retries if config.on_error == "retry" else 0
    name = describe_reward(reward_fn)
    for attempt in itertools.count():
        try:
            value = await _call_until(functools.partial(reward_fn, sample), name, describe_sample(sample), config, outcome)
        except RewardError as error:
            judgement = Judgement(error=error, num_retries=attempt)
        else:
            judgement = _judge_value(value, sample, name, attempt)
        if attempt == num_retries or judgement.error is None:
            return judgement
        outcome = None
    raise AssertionError("unreachable: the loop has no end")


def _judge_value(value: Any, sample: Sample, name: str, attempt: int) -> Judgement:
    try:
        result = parse_result(value, sample, name)
    except RewardError as error:
        return Judgement(error=error, num_retries=attempt)
    try:
        return Judgement(result=result, scored=result.apply_to(sample), num_retries=attempt)
    except RewardError as error:
        return Judgement(error=RewardError(f"reward function {name}: {error}"), num_retries=attempt)


async def _call_until(call: Callable[[], Any], name: str, where: str, config: RewardConfig, outcome: Outcome | None = None) -> Any:
    """What a call returns, awaited if need be; it is made here unless there is an outcome already.

    Raises: RewardError if it raised, or took longer than the deadline.
    """
    with trio.move_on_after(_timeout(config)):
        if outcome is None:
            attempt = functools.partial(_attempt, call, name, where)
            outcome = attempt() if is_async_function(call) else await _run_in_thread(attempt)
        if isinstance(outcome, tuple) and inspect.isawaitable(outcome[0]):
            try:
                outcome = (await outcome[0],)
            except Exception as error:  # see _call
                raise _create_failure(name, where, error) from error
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome[0]
    raise _create_timeout_error(name, where, config)


async def _call_in_turn(reward_fn: RewardFn, samples: Sequence[Sample], config: RewardConfig) -> list[Outcome]:
    """Outcomes for the first of the samples: for as many as one thread gets through in QUICK_S, and at least for one.

    A thread for each sample costs more than most rewards do. No sample waits for a slow one: the caller gives the others their threads.
    Each sample has its deadline, give or take QUICK_S.
    """
    begun: list[Sample] = []
    outcomes: list[Outcome] = []
    quick = min(QUICK_S, _timeout(config) / 10)
    name = describe_reward(reward_fn)

    def work() -> None:
        started = time.monotonic()
        for sample in samples:
            begun.append(sample)
            outcomes.append(_attempt(functools.partial(reward_fn, sample), name, describe_sample(sample)))
            if time.monotonic() - started > quick:
                return

    with trio.move_on_after(_timeout(config) + quick) as scope:
        await _run_in_thread(work)
    finished = outcomes[:]  # the abandoned thread may add to it at any moment
    if scope.cancelled_caught and len(begun) > len(finished):
        finished.append(_create_timeout_error(name, describe_sample(begun[len(finished)]), config))
    return finished


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Run in a thread that starts at once: waiting for one of trio's limited number would count against the deadline."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


def _attempt(call: Callable[[], Any], name: str, where: str) -> Outcome:
    try:
        return (_call(call, name, where),)
    except RewardError as error:
        return error


def _call(call: Callable[[], Any], name: str, where: str) -> Any:
    try:
        return call()
    except Exception as error:  # the function is the user's: whatever it raises, the policy that the user chose decides
        raise _create_failure(name, where, error) from error


def _create_failure(name: str, where: str, error: Exception) -> RewardError:
    return RewardError(f"reward function {name} raised {type(error).__name__} for {where}: {error}")


def _create_timeout_error(name: str, where: str, config: RewardConfig) -> RewardError:
    return RewardError(
        f"reward function {name} did not return within {config.timeout_s:g} s for {where}: make it faster, or raise timeout_s"
    )


def _timeout(config: RewardConfig) -> float:
    return math.inf if config.timeout_s is None else config.timeout_s

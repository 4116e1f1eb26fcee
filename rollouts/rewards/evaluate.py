"""Scores of groups: reward functions are called, with a deadline, and a policy decides what happens if one fails.

A function may be sync or async, for a sample or a whole group. Every failure of a call is a RewardError, and never a silent 0.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import trio

from rollouts.checks import is_async_function
from rollouts.config import RewardConfig
from rollouts.data.samples import describe_sample, forget_turn_rewards
from rollouts.errors import ConfigError, RewardError, RolloutsError, is_own_code, locate_error, redact, reduce_alike
from rollouts.outcomes import RewardDetails
from rollouts.rewards.results import EvaluateResult, check_values, describe_reward, is_whole, name_reward, parse_result, throw_away
from rollouts.types import Group, Sample, Status
from rollouts.user_code import CodeBlocked, ThreadResults, finish, interrupt_blocking, is_passed_on

T = TypeVar("T")

RewardFn: TypeAlias = Callable[[Sample], Any]
"""f(sample) -> a finite number (float, int, bool, 0-d array or tensor) or an EvaluateResult, or an awaitable of one.

A function with has_own_deadline = True bounds its calls itself, and RewardConfig.timeout_s, which would include the wait for a free worker,
is not applied. If it also has limit_calls(timeout_s), the function that this returns is called instead; it applies timeout_s to its parts
without a bound of their own. Messages call a function by its reward_name, if it has one.
"""

Outcome: TypeAlias = "tuple[Any] | RewardError"
"""Outcome of a call: its value, in a box because it may be an awaitable, or the error."""

QUICK_S = 0.01  # seconds that one thread spends on samples in turn before the rest of a group gets threads of their own

UNSCORED = frozenset({Status.FAILED, Status.ABORTED})
"""Statuses of samples without a response to judge."""


@runtime_checkable
class GroupReward(Protocol):
    """A reward function that judges all samples of a group in one call, because it compares them or because one call is cheaper."""

    def score_samples(self, samples: Sequence[Sample]) -> Any:
        """Return a RewardFn's value for each of the samples, in their order, or an awaitable of all of them."""
        ...


@runtime_checkable
class RewardSource(Protocol):
    """Settings of a reward that holds something open while it is used, such as processes or connections."""

    def open_reward(self) -> AbstractAsyncContextManager[RewardFn]:
        """Open the reward: inside of `async with source.open_reward() as reward_fn` the reward function works."""
        ...


class UnopenedReward:
    """Base of RewardSources: calling one raises an error that says to open it first."""

    def __call__(self, sample: Sample) -> Any:
        """Raise ConfigError."""
        raise create_unopened_error(self)


@dataclass(frozen=True)
class _Function:
    """A user's function of a sample or of several, with the answers to questions that are asked once, not for each sample."""

    call: Callable[[Any], Any]
    name: str  # for messages, with the place of its definition
    short_name: str  # without it, for messages with the place where it raised
    is_async: bool


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Judgement of one sample: either result and scored, or error (with the result, if the function abstained)."""

    result: EvaluateResult | None = None
    scored: Sample | None = None  # the sample with its reward
    error: RewardError | None = None  # error of the last attempt
    num_retries: int = 0  # attempts after the first; a call for several samples counts them in one judgement only


async def score_group(group: Group, reward_fn: RewardFn, config: RewardConfig | None = None) -> Group | None:
    """Put a reward on every sample of a group; None if one failed and config.on_error is "drop".

    A reward function fails if it raises, takes longer than config.timeout_s, returns neither a finite number nor a valid EvaluateResult,
    or judges a step that the sample does not have. Then
        raise   the error ends the run;
        retry   it is called again, up to config.max_retries times, and then the error ends the run. reward_details.num_retries counts;
                for a call for the whole group, in its first sample that is trained on;
        drop    the whole group is dropped, because a group without one of its samples has another baseline;
        zero    the sample gets the reward 0 for its whole (samples.forget_turn_rewards), and reward_details.error; the others of its
                group stay as they are.
        Each dropped group and zeroed reward is logged as a warning.

    Samples with status FAILED or ABORTED, and those whose episode has a final reward, stay as they are. The others are scored
    concurrently; a sync function is called from several threads, except that the samples that take less than QUICK_S in total are scored in
    turn in one thread. A GroupReward (a batch reward function) is called once for all of them, and timeout_s is the deadline of that call.

    Raises: RewardError of the first sample (in the order of the group) that failed, if the policy is to raise or retries are used up;
        ConfigError if the reward is still to be opened (RewardSource).
    """
    config = config or RewardConfig()
    positions = [k for k, sample in enumerate(group) if _is_scored(sample)]
    judgements = await judge_samples(reward_fn, [group[k] for k in positions], config)
    scored = list(group)
    for k, judgement in zip(positions, judgements, strict=True):
        if judgement.error is None:
            scored[k] = _count_retries(judgement)
        elif config.on_error == "drop":
            logging.getLogger(__name__).warning("group %d is dropped: %s", group[k].group_index, judgement.error)
            return None
        elif config.on_error == "zero":
            logging.getLogger(__name__).warning("the reward of a sample is set to 0: %s", judgement.error)
            judged = forget_turn_rewards(group[k])
            details = replace(group[k].reward_details or RewardDetails(), error=redact(str(judgement.error)))
            scored[k] = replace(judged, reward=0.0, reward_details=details)
        else:
            raise judgement.error
    return tuple(scored)


def _is_scored(sample: Sample) -> bool:
    return sample.status not in UNSCORED and not (sample.episode is not None and sample.episode.has_final_reward)


def score_now(group: Group, reward_fn: RewardFn) -> Group:
    """Put a reward on every sample of a group by a sync function, called here: no deadline, and the first failure is raised."""
    name, values = name_reward(reward_fn), judge_now(reward_fn, group)
    return tuple(parse_result(value, sample, name).apply_to(sample) for sample, value in zip(group, values, strict=True))


def _count_retries(judgement: Judgement) -> Sample:
    scored = judgement.scored
    assert scored is not None, f"a judgement without an error has no sample: {judgement}"
    if judgement.num_retries == 0:
        return scored
    return replace(scored, reward_details=replace(scored.reward_details or RewardDetails(), num_retries=judgement.num_retries))


async def judge_samples(reward_fn: RewardFn, samples: Sequence[Sample], config: RewardConfig) -> list[Judgement]:
    """Return the judgement of each sample, in order. Failures are retried if that is the policy, and are never raised.

    Samples are judged concurrently; a sync function is called from several threads, except that the samples that take less than QUICK_S in
    total are judged in turn in one thread. A GroupReward is called once for all samples, and again for all if one fails.

    Raises: ConfigError for a RewardSource that has not been opened.
    """
    check_opened(reward_fn)
    if not samples:
        return []
    if getattr(reward_fn, "has_own_deadline", False):
        limit_calls = getattr(reward_fn, "limit_calls", None)
        reward_fn = reward_fn if limit_calls is None else limit_calls(config.timeout_s)
        config = replace(config, timeout_s=None)
    if is_group_reward(reward_fn):
        return await _judge_together(reward_fn, samples, config)
    function = _Function(reward_fn, name_reward(reward_fn), describe_reward(reward_fn), is_async_function(reward_fn))
    begun = [] if function.is_async else await _call_in_turn(function, samples, config)
    if len(samples) == 1:
        return [await _judge_sample(function, samples[0], config, begun[0] if begun else None)]
    if function.is_async:
        return await _judge_in_relay(function, samples, config)
    judgements: dict[int, Judgement] = {}

    async def judge(k: int, outcome: Outcome | None) -> None:
        judgements[k] = await _judge_sample(function, samples[k], config, outcome)

    async with trio.open_nursery() as nursery:
        for k, outcome in itertools.zip_longest(range(len(samples)), begun):
            nursery.start_soon(judge, k, outcome)
    return [judgements[k] for k in range(len(samples))]


async def _judge_in_relay(function: _Function, samples: Sequence[Sample], config: RewardConfig) -> list[Judgement]:
    """Judge samples concurrently by an async function, in the order of the samples, with no more tasks than calls that wait.

    One task makes one call after another, in one cancel scope. As soon as a call waits, it gets its deadline, and another task makes the
    next calls.
    """
    judgements: dict[int, Judgement] = {}
    remaining = deque(range(len(samples)))
    may_retry = config.on_error == "retry" and config.max_retries > 0

    async with trio.open_nursery() as nursery:

        async def judge_next() -> None:
            turn = _Turn(_timeout(config), lambda: nursery.start_soon(judge_next) if remaining else None)
            k = remaining.popleft()
            try:
                with turn.scope:
                    while True:
                        judgements[k] = await _judge_first(function, samples[k], config, turn)
                        if turn.waits or not remaining or (may_retry and judgements[k].error is not None):
                            break
                        k = remaining.popleft()
            except BaseException as error:  # left by a nursery of the function beside Cancelled, which the scope has taken out of it
                if is_passed_on(error) or not turn.scope.cancelled_caught:
                    raise
                judgements[k] = _judge_late(function, samples[k], config, error)
            else:
                if turn.scope.cancelled_caught:
                    judgements[k] = _judge_late(function, samples[k], config)
            finally:
                turn.alarm.stop()
            failure = judgements[k].error
            if may_retry and failure is not None:
                turn.hand_over()
                judgements[k] = await _judge_sample(function, samples[k], config, failure)

        await judge_next()
    return [judgements[k] for k in range(len(samples))]


class _Turn:
    """One task of a relay: the cancel scope and the alarm of its calls, of which only the last one waits."""

    def __init__(self, timeout_s: float, start_next: Callable[[], None]) -> None:
        self.scope = trio.CancelScope()
        self.alarm = interrupt_blocking(timeout_s, self.hand_over)
        self.begun = 0.0  # time at which the current call began
        self.waits = False  # another task goes on with the next samples
        self._start_next = start_next

    def hand_over(self) -> None:
        """Give the current call its deadline, and let another task go on; done once."""
        if not self.waits:
            self.waits = True
            self.scope.deadline = self.begun + self.alarm.timeout_s
            self._start_next()


async def _judge_first(function: _Function, sample: Sample, config: RewardConfig, turn: _Turn) -> Judgement:
    """Judge one sample by a first call in the scope of a relay's task. A deadline that passes while it waits leaves as Cancelled."""
    turn.begun, name = trio.current_time(), function.name
    try:
        value = function.call(sample)
        if inspect.isawaitable(value):
            value = await finish(value, turn.alarm.timeout_s, turn.alarm)
    except CodeBlocked as block:
        failure = _create_timeout_error(name, describe_sample(sample), config, block)
        failure.__cause__ = block
        return Judgement(error=failure)
    except BaseException as error:  # see _call
        if is_passed_on(error):
            raise
        failure = create_failure(function.short_name, describe_sample(sample), error)
        failure.__cause__ = error
        return Judgement(error=failure)
    if turn.waits:  # see _call_until
        turn.scope.deadline = math.inf
        if trio.current_time() > turn.begun + turn.alarm.timeout_s:
            return _judge_late(function, sample, config)
    return _judge_value(value, sample, name, 0)


def _judge_late(function: _Function, sample: Sample, config: RewardConfig, cause: BaseException | None = None) -> Judgement:
    """Return the judgement of a sample whose call did not return within its deadline."""
    failure = _create_timeout_error(function.name, describe_sample(sample), config)
    failure.__cause__ = cause
    return Judgement(error=failure)


def judge_now(reward_fn: RewardFn, samples: Sequence[Sample]) -> list[Any]:
    """Call a sync reward function for samples, here and now: no deadline, no threads; errors pass as they are."""
    check_opened(reward_fn)
    if not is_group_reward(reward_fn):
        return [reward_fn(sample) for sample in samples]
    return check_values(reward_fn.score_samples(samples), len(samples), name_reward(reward_fn))


def is_group_reward(reward_fn: Any) -> TypeGuard[GroupReward]:
    """Whether a reward function judges all samples of a group in one call; isinstance takes ten times as long."""
    return hasattr(reward_fn, "score_samples")


def check_opened(reward_fn: Any) -> None:
    """Raise ConfigError for a RewardSource: the reward function is the object that it opens."""
    if hasattr(reward_fn, "open_reward"):  # a RewardSource; isinstance takes ten times as long
        raise create_unopened_error(reward_fn)


def create_unopened_error(source: object) -> ConfigError:
    """Create the error for a RewardSource that is called like a reward function."""
    name = type(source).__name__
    return ConfigError(f"{name} must be opened first: `async with source.open_reward() as reward_fn`, and reward_fn is the reward function")


async def _judge_together(reward_fn: GroupReward, samples: Sequence[Sample], config: RewardConfig) -> list[Judgement]:
    """Judge all samples in one call. All judgements come from the same call: those of two calls need not be comparable."""
    num_retries = config.max_retries if config.on_error == "retry" else 0
    name = name_reward(reward_fn)
    function = _Function(reward_fn.score_samples, name, describe_reward(reward_fn), is_async_function(reward_fn.score_samples))
    where = f"{len(samples)} samples of group {samples[0].group_index}"
    counting = next((k for k, sample in enumerate(samples) if sample.trainable), 0)  # metrics count this sample
    for attempt in itertools.count():
        try:
            value = await _call_until(function, samples, where, config)
            values = check_values(value, len(samples), name)
        except RewardError as error:
            judgements = [Judgement(error=error)] * len(samples)
        else:
            judgements = [_judge_value(v, sample, name, 0) for v, sample in zip(values, samples, strict=True)]
        judgements[counting] = replace(judgements[counting], num_retries=attempt)
        if attempt == num_retries or all(judgement.error is None for judgement in judgements):
            return judgements
    raise AssertionError("unreachable: the loop has no end")


async def _judge_sample(
    function: _Function, sample: Sample, config: RewardConfig, outcome: Outcome | None, alarm: interrupt_blocking | None = None
) -> Judgement:
    """Judge one sample.

    Args:
        outcome: outcome of a first call that was made already.
        alarm: alarm of several samples; default: one of its own.
    """
    num_retries = config.max_retries if config.on_error == "retry" else 0
    for attempt in itertools.count():
        try:
            value = await _call_until(function, sample, describe_sample(sample), config, outcome, alarm)
        except RewardError as error:
            judgement = Judgement(error=error, num_retries=attempt)
        else:
            judgement = _judge_value(value, sample, function.name, attempt)
        if attempt == num_retries or judgement.error is None:
            return judgement
        outcome = None
    raise AssertionError("unreachable: the loop has no end")


def _judge_value(value: Any, sample: Sample, name: str, attempt: int) -> Judgement:
    try:
        result = parse_result(value, sample, name)
    except RewardError as error:
        abstains = isinstance(value, EvaluateResult) and value.abstains  # a composite is told so
        return Judgement(result=value if abstains else None, error=error, num_retries=attempt)
    try:
        return Judgement(result=result, scored=result.apply_to(sample), num_retries=attempt)
    except RewardError as error:
        return Judgement(error=RewardError(f"reward function {name}: {error}"), num_retries=attempt)


async def _call_until(
    function: _Function,
    subject: Any,
    where: str,
    config: RewardConfig,
    outcome: Outcome | None = None,
    alarm: interrupt_blocking | None = None,
) -> Any:
    """Return a function's result for a subject, awaited if need be; call it unless the outcome of its call is given.

    Args:
        where: description of the subject for messages.
        alarm: alarm of several calls, which their caller stops; default: one of its own.

    Raises: RewardError if it raised, or took longer than the deadline.
    """
    timeout_s, name = _timeout(config), function.name
    deadline, is_awaited = trio.move_on_after(timeout_s), False
    try:
        with deadline:
            if outcome is None:
                attempt = functools.partial(_attempt, function, subject, where)
                outcome = attempt() if function.is_async else await _attempt_in_thread(attempt)
            if isinstance(outcome, tuple) and inspect.isawaitable(outcome[0]):
                is_awaited = True
                outcome = (await finish(outcome[0], timeout_s, alarm),)
    except CodeBlocked as block:
        raise _create_timeout_error(name, where, config, block) from block
    except BaseException as error:  # see _call
        if is_passed_on(error):
            raise
        late = deadline.cancelled_caught  # it raised when it was told to end
        raise (_create_timeout_error(name, where, config) if late else create_failure(function.short_name, where, error)) from error
    # code that blocks inside of a nursery, or shields itself, returns after its deadline without having been told of it
    is_late = is_awaited and trio.current_time() > deadline.deadline
    if deadline.cancelled_caught or outcome is None or is_late:
        raise _create_timeout_error(name, where, config)
    if isinstance(outcome, RewardError):
        raise outcome
    return outcome[0]


async def _call_in_turn(function: _Function, samples: Sequence[Sample], config: RewardConfig) -> list[Outcome]:
    """Call the reward function for the first samples in one thread: as many as it finishes in QUICK_S, and at least one.

    A thread per sample costs more than most rewards do. No sample waits for a slow one: the caller gives the others their threads. Each
    sample has its deadline, up to QUICK_S.
    """
    begun: list[Sample] = []
    outcomes = ThreadResults(_throw_away)
    quick = min(QUICK_S, _timeout(config) / 10)

    def work() -> None:
        started = time.monotonic()
        for sample in samples:
            begun.append(sample)
            if not outcomes.add(_attempt(function, sample, describe_sample(sample))) or time.monotonic() - started > quick:
                return

    try:
        with trio.move_on_after(_timeout(config) + quick) as scope:
            await _run_in_thread(work)
    except BaseException:
        outcomes.drop()
        raise
    finished = outcomes.take()
    if scope.cancelled_caught and len(begun) > len(finished):
        finished.append(_create_timeout_error(function.name, describe_sample(begun[len(finished)]), config))
    return finished


async def _attempt_in_thread(attempt: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a call in a thread; one that comes when the deadline has passed is thrown away."""
    outcomes = ThreadResults(_throw_away)
    try:
        await _run_in_thread(lambda: outcomes.add(attempt()))
    except BaseException:
        outcomes.drop()
        raise
    (outcome,) = outcomes.take()
    return outcome


def _throw_away(outcome: Outcome) -> None:
    if isinstance(outcome, tuple):
        throw_away(outcome[0])


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread that starts at once: waiting for one of trio's limited threads would count against the deadline."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


def _attempt(function: _Function, subject: Any, where: str) -> Outcome:
    try:
        return (_call(function, subject, where),)
    except RewardError as error:
        return error


def _call(function: _Function, subject: Any, where: str) -> Any:
    try:
        return function.call(subject)
    except BaseException as error:  # the function is the user's: whatever it raises, the user's policy decides
        if is_passed_on(error):
            raise
        raise create_failure(function.short_name, where, error) from error


def create_failure(name: str, where: str, error: BaseException) -> RewardError:
    """Create the error for a reward function that raised: its name, the sample, the error and the line that raised it.

    An error of this library that names the function already stays as it is; of others the lines in this library say nothing to the user.
    """
    if isinstance(error, Exception):
        error = reduce_alike(error)
    if isinstance(error, RewardError) and is_whole(str(error)):
        return RewardError(str(error))
    place = locate_error(error)
    if isinstance(error, RolloutsError) and not is_own_code(place):
        return RewardError(f"reward function {name} failed for {where}: {error}")
    return RewardError(f"reward function {name} raised {type(error).__name__} for {where}: {error} ({place})")


def _create_timeout_error(name: str, where: str, config: RewardConfig, block: CodeBlocked | None = None) -> RewardError:
    failure = RewardError(
        f"reward function {name} did not return within {config.timeout_s:g} s for {where}: "
        "make it faster, or raise timeout_s (--reward.timeout-s)"
    )
    if block is not None:
        failure.add_note(
            f"it blocked the event loop at {block.place}: await there (trio.sleep, not time.sleep), or write it as a plain def, "
            "which runs in a thread"
        )
    return failure


def _timeout(config: RewardConfig) -> float:
    return math.inf if config.timeout_s is None else config.timeout_s

"""Calling reward functions: sync or async, with a deadline, and a policy for when they fail. A failure is never a silent 0."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, TypeAlias, TypeVar

import torch
import trio

from rollouts.advantages import penalize_overlong
from rollouts.config import RewardConfig, check_setting
from rollouts.errors import RewardError
from rollouts.samples import check_reward, compute_response_lengths, describe_sample, with_reward
from rollouts.types import Group, Sample, Status

T = TypeVar("T")

RewardFn: TypeAlias = Callable[[Sample], Any]
"""Sample -> a finite number (float, int, bool, 0-d array or tensor), or an awaitable of one."""

Outcome: TypeAlias = "tuple[Any] | RewardError"
"""What a call gave: its value, in a box because it may be an awaitable, or why there is none."""

UNSCORED = frozenset({Status.FAILED, Status.ABORTED})
"""Samples that have no response to judge."""

QUICK_S = 0.01  # how long one thread goes from sample to sample before the rest of a group gets threads of their own


def compute_reward(sample: Sample) -> float:
    """The default reward: 1.0 if metadata["correct"] is true, else 0.0."""
    return 1.0 if sample.metadata.get("correct") else 0.0


def parse_reward(value: Any, sample: Sample, name: str) -> float:
    """What a reward function returned, as a float. Raises RewardError if it is not a finite number."""
    try:
        reward = float(value) if isinstance(value, (float, SupportsFloat)) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays and tensors of several elements; integers beyond a float
        reward = None
    if reward is None:
        found = f"{value!r:.200} ({type(value).__name__})"
        raise RewardError(f"reward function {name} returned {found} for {describe_sample(sample)}, expected a number")
    if not math.isfinite(reward):
        raise RewardError(
            f"reward function {name} returned {reward} for {describe_sample(sample)}, expected a finite number: "
            "return one, or raise and choose on_error='drop'"
        )
    return reward


async def call_reward(reward_fn: RewardFn, sample: Sample, config: RewardConfig | None = None) -> float:
    """One reward, tried once.

    An async function is awaited here; a sync one runs in a thread, so that it blocks nothing. A sync function that exceeds its
    deadline is left behind in its (daemon) thread; the error comes at the deadline all the same. Virtual time does not wait for threads:
    in a test with an autojump clock use an async function, or timeout_s=None.

    Raises: RewardError naming the function, the sample, and what happened.
    """
    return await _complete(reward_fn, sample, config or RewardConfig(), None)


async def score_group(group: Group, reward_fn: RewardFn, config: RewardConfig | None = None) -> Group | None:
    """The group with a reward on every sample, or None if one failed and config.on_error is "drop".

    The whole group is dropped, and the reason logged as a warning, because a group without one of its samples has another baseline.
    Samples with status FAILED or ABORTED stay as they are. The others are scored concurrently; a sync function is called from several
    threads, except that the samples for which it needs less than QUICK_S in all are scored one after another in one thread.

    Raises: RewardError of the first sample (in the order of the group) that failed, if the policy is to raise or retries are used up.
    """
    config = config or RewardConfig()
    positions = [k for k, sample in enumerate(group) if sample.status not in UNSCORED]
    begun = [] if _is_async(reward_fn) else await _call_in_turn(reward_fn, [group[k] for k in positions], config)
    results: dict[int, float | RewardError] = {}

    async def score(k: int, outcome: Outcome | None) -> None:
        results[k] = await _score_sample(reward_fn, group[k], config, outcome)

    if len(positions) == 1:
        await score(positions[0], begun[0] if begun else None)
    else:
        async with trio.open_nursery() as nursery:
            for k, outcome in itertools.zip_longest(positions, begun):
                nursery.start_soon(score, k, outcome)
    for k in positions:
        result = results[k]
        if isinstance(result, RewardError):
            if config.on_error == "drop":
                logging.getLogger(__name__).warning("group %d is dropped: %s", group[k].group_index, result)
                return None
            raise result
    return tuple(with_reward(sample, results[k]) if k in results else sample for k, sample in enumerate(group))


def create_overlong_penalty(*, max_tokens: int, buffer: int, factor: float = 1.0) -> Callable[[Sample], float]:
    """The reward of a sample, less DAPO's soft punishment of long answers: for RLTrainingConfig.shape_reward.

    It comes after the filter: dynamic sampling drops groups that are all right or all wrong, which answers of different length would
    hide in rewards that the penalty has touched. See advantages.penalize_overlong.

    Args:
        max_tokens: length of a response (tokens with loss_mask > 0) from which on the whole penalty is given: the token budget.
        buffer: tokens before max_tokens in which it grows from 0, in [1, max_tokens].
        factor: the whole penalty, at least 0.

    Raises: ConfigError for a number out of range.
    """
    check_setting(1 <= buffer <= max_tokens, "buffer", buffer, f"in [1, max_tokens = {max_tokens}]")
    check_setting(0 <= factor < math.inf, "factor", factor, "a finite number, at least 0")
    return functools.partial(_penalize_overlong, max_tokens=max_tokens, buffer=buffer, factor=factor)


def _penalize_overlong(sample: Sample, *, max_tokens: int, buffer: int, factor: float) -> float:
    check_reward(sample)
    rewards = torch.tensor([sample.reward], dtype=torch.float64)
    lengths = torch.tensor(compute_response_lengths([sample.loss_mask]))
    return float(penalize_overlong(rewards, lengths, max_tokens=max_tokens, buffer=buffer, factor=factor))


async def _score_sample(reward_fn: RewardFn, sample: Sample, config: RewardConfig, outcome: Outcome | None) -> float | RewardError:
    """A reward, or the error of the last try; outcome: of a first call that has been made already."""
    num_retries = config.max_retries if config.on_error == "retry" else 0
    for attempt in itertools.count():
        try:
            return await _complete(reward_fn, sample, config, outcome)
        except RewardError as error:
            if attempt == num_retries:
                return error
        outcome = None
    raise AssertionError("unreachable: the loop has no end")


async def _complete(reward_fn: RewardFn, sample: Sample, config: RewardConfig, outcome: Outcome | None) -> float:
    """The reward of one call, which is made here unless there is an outcome already."""
    with trio.move_on_after(_timeout(config)):
        if outcome is None:
            attempt = functools.partial(_attempt, reward_fn, sample)
            outcome = attempt() if _is_async(reward_fn) else await _run_in_thread(attempt)
        if isinstance(outcome, tuple) and inspect.isawaitable(outcome[0]):
            try:
                outcome = (await outcome[0],)
            except Exception as error:  # see _call
                raise RewardError(_describe_failure(reward_fn, sample, error)) from error
        if isinstance(outcome, RewardError):
            raise outcome
        return parse_reward(outcome[0], sample, _describe(reward_fn))
    raise _create_timeout_error(reward_fn, sample, config)


async def _call_in_turn(reward_fn: RewardFn, samples: Sequence[Sample], config: RewardConfig) -> list[Outcome]:
    """Outcomes for the first of the samples: for as many as one thread gets through in QUICK_S, and at least for one.

    A thread for each sample costs more than most rewards do. No sample waits for a slow one: the caller gives the others their threads.
    Each sample has its deadline, give or take QUICK_S.
    """
    begun: list[Sample] = []
    outcomes: list[Outcome] = []
    quick = min(QUICK_S, _timeout(config) / 10)

    def work() -> None:
        started = time.monotonic()
        for sample in samples:
            begun.append(sample)
            outcomes.append(_attempt(reward_fn, sample))
            if time.monotonic() - started > quick:
                return

    with trio.move_on_after(_timeout(config) + quick) as scope:
        await _run_in_thread(work)
    finished = outcomes[:]  # the abandoned thread may add to it at any moment
    if scope.cancelled_caught and len(begun) > len(finished):
        finished.append(_create_timeout_error(reward_fn, begun[len(finished)], config))
    return finished


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Run in a thread that starts at once: waiting for one of trio's limited number would count against the deadline."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


def _attempt(reward_fn: RewardFn, sample: Sample) -> Outcome:
    try:
        return (_call(reward_fn, sample),)
    except RewardError as error:
        return error


def _call(reward_fn: RewardFn, sample: Sample) -> Any:
    try:
        return reward_fn(sample)
    except Exception as error:  # the function is the user's: whatever it raises, the policy that the user chose decides
        raise RewardError(_describe_failure(reward_fn, sample, error)) from error


def _describe_failure(reward_fn: RewardFn, sample: Sample, error: Exception) -> str:
    return f"reward function {_describe(reward_fn)} raised {type(error).__name__} for {describe_sample(sample)}: {error}"


def _create_timeout_error(reward_fn: RewardFn, sample: Sample, config: RewardConfig) -> RewardError:
    return RewardError(
        f"reward function {_describe(reward_fn)} did not return within {config.timeout_s:g} s for {describe_sample(sample)}: "
        "make it faster, or raise timeout_s"
    )


def _timeout(config: RewardConfig) -> float:
    return math.inf if config.timeout_s is None else config.timeout_s


def _is_async(function: RewardFn) -> bool:
    """Whether a call is sure to give a coroutine: an `async def`, a partial of one, or an object with an async __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _describe(function: RewardFn) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)

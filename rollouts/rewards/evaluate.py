"""Calling reward functions: sync or async, with a deadline, and a policy for when they fail. A failure is never a silent 0."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import trio

from rollouts.config import RewardConfig
from rollouts.errors import RewardError
from rollouts.samples import describe_sample, with_reward
from rollouts.types import Group, Sample

RewardFn: TypeAlias = Callable[[Sample], Any]
"""Sample -> a finite number (float, int, bool, 0-d array or tensor), or an awaitable of one."""


def compute_reward(sample: Sample) -> float:
    """The default reward: 1.0 if metadata["correct"] is true, else 0.0."""
    return 1.0 if sample.metadata.get("correct") else 0.0


def parse_reward(value: Any, sample: Sample, name: str) -> float:
    """What a reward function returned, as a float. Raises RewardError if it is not a finite number."""
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name} returned {value!r} ({type(value).__name__}) for {describe_sample(sample)}, expected a number"
        ) from error
    if not math.isfinite(reward):
        raise RewardError(
            f"reward function {name} returned {reward} for {describe_sample(sample)}, expected a finite number: "
            "return one, or raise and choose on_error='drop'"
        )
    return reward


async def call_reward(reward_fn: RewardFn, sample: Sample, config: RewardConfig | None = None) -> float:
    """One reward, tried once.

    An async function is awaited here; a sync one runs in a thread, so that it blocks nothing. A sync function that exceeds its
    deadline is left behind in its (daemon) thread; the error comes at the deadline all the same.

    Raises: RewardError naming the function, the sample, and what happened.
    """
    config = config or RewardConfig()
    name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
    timeout = math.inf if config.timeout_s is None else config.timeout_s
    try:
        with trio.fail_after(timeout):
            if inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(getattr(reward_fn, "__call__", None)):  # noqa: B004
                value = await reward_fn(sample)
            else:
                value = await _call_in_thread(reward_fn, sample)
    except trio.TooSlowError as error:
        raise RewardError(
            f"reward function {name} did not return within {timeout:g} s for {describe_sample(sample)}: make it faster, or raise timeout_s"
        ) from error
    except Exception as error:
        raise RewardError(f"reward function {name} raised {type(error).__name__} for {describe_sample(sample)}: {error}") from error
    return parse_reward(value, sample, name)


async def _call_in_thread(reward_fn: RewardFn, sample: Sample) -> Any:
    """Call a sync function in a thread of its own: waiting for a free one would count against the deadline."""
    boxed = await trio.to_thread.run_sync(lambda: (reward_fn(sample),), abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    # a partial, or a plain function that returns a coroutine; boxed, because trio refuses a thread that returns one
    return await boxed[0] if inspect.isawaitable(boxed[0]) else boxed[0]


async def call_reward_with_retries(reward_fn: RewardFn, sample: Sample, config: RewardConfig) -> float:
    """call_reward, tried again config.max_retries times if config.on_error is "retry"."""
    attempts = 1 + (config.max_retries if config.on_error == "retry" else 0)
    for _ in range(attempts - 1):
        try:
            return await call_reward(reward_fn, sample, config)
        except RewardError:
            continue
    return await call_reward(reward_fn, sample, config)


async def score_group(group: Group, reward_fn: RewardFn, config: RewardConfig | None = None) -> Group | None:
    """The group with a reward on every sample, or None if one failed and config.on_error is "drop".

    The whole group is dropped, because a group without one of its samples has another baseline. Samples are scored concurrently.

    Raises: RewardError of the first sample (in the order of the group) that failed, if the policy is to raise.
    """
    config = config or RewardConfig()
    outcomes: list[float | RewardError | None] = [None] * len(group)

    async def score(k: int) -> None:
        try:
            outcomes[k] = await call_reward_with_retries(reward_fn, group[k], config)
        except RewardError as error:
            outcomes[k] = error

    async with trio.open_nursery() as nursery:
        for k in range(len(group)):
            nursery.start_soon(score, k)
    scored: list[Sample] = []
    for sample, outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, RewardError):
            if config.on_error == "drop":
                return None
            raise outcome
        assert outcome is not None, f"{describe_sample(sample)} was not scored"
        scored.append(with_reward(sample, outcome))
    return tuple(scored)

"""Rewards that are weighted sums of rewards, each logged by its name."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import trio

from rollouts.checks import is_async_function
from rollouts.config import RewardConfig
from rollouts.data.samples import describe_sample
from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import MetricResult, StepOutput
from rollouts.rewards.evaluate import GroupReward, Judgement, RewardFn, RewardSource, UnopenedReward, create_failure, judge_samples
from rollouts.rewards.results import EvaluateResult, describe_reward, name_reward, parse_result
from rollouts.types import Sample

Components: TypeAlias = "Mapping[str, tuple[Any, float]]"
"""Reward function and weight of each part, by name."""


def create_composite_reward(components: Components, *, total: float | None = 1.0) -> Any:
    """Create the reward sum_k weight_k * reward_k of a sample, for RolloutConfig.reward_fn.

    Example: create_composite_reward({"right": (exact_match, 0.8), "format": (create_format_reward(pattern), 0.2)})

    Args:
        components: any rewards: of a sample or decorated, pointwise or batch, sync or async, or sources still to be opened.
        total: required sum of the weights, to find mistyped ones; None = any sum, for example with penalties.

    Returns: a reward function, called as its components need: sync and pointwise if all of them are, a GroupReward otherwise; a
        RewardSource, which opens them, if one of them is. Its results have each component's score as a metric with its name, and the
        component's own metrics as NAME/METRIC. Step outputs are weighted and added, too.
    Raises: ConfigError if a weight is not finite, or they do not add up to total.
    """
    weights = {name: weight for name, (_, weight) in components.items()}
    check_weights(weights, total)
    functions = {name: function for name, (function, _) in components.items()}
    for name, function in functions.items():
        if not callable(function) and not isinstance(function, RewardSource):
            raise ConfigError(f"component {name!r} is {function!r}, expected a reward function")
    if any(isinstance(function, RewardSource) for function in functions.values()):
        return CompositeSource(functions, weights)
    if any(
        isinstance(function, GroupReward)
        or is_async_function(function)
        or is_async_function(getattr(function, "function", function))  # in an adapter, whose own call is a plain one
        for function in functions.values()
    ):
        return CompositeGroupReward(functions, weights)
    return CompositeReward(functions, weights)


def check_weights(weights: Mapping[str, float], total: float | None = 1.0) -> None:
    """Raise ConfigError unless there are weights, all finite, with the sum total (up to 1e-6)."""
    if not weights:
        raise ConfigError("a weighted reward has no components (found 0): name at least one")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the weight of {name!r} is {weight!r}, expected a finite number")
    found = math.fsum(weights.values())
    if total is not None and abs(found - total) > 1e-6:
        raise ConfigError(
            f"the weights {dict(weights)} add up to {found:g}, expected {total:g}: change one, or pass total=None if they are meant so"
        )


def weigh_metrics(metrics: Mapping[str, MetricResult], weights: Mapping[str, float], *, total: float | None = 1.0) -> EvaluateResult:
    """Return a result with the weighted sum of its metrics as score, for reward functions that judge several things.

    Args:
        metrics: one for each weight; a metric for the log alone gets the weight 0.
        total: see create_composite_reward.

    Returns: a result without a valid score if a metric with a weight other than 0 has none.
    Raises: ConfigError if the weights do not fit.
    """
    check_weights(weights, total)
    if set(metrics) != set(weights):
        raise ConfigError(f"there are metrics {sorted(metrics)} and weights {sorted(weights)}, expected the same names")
    invalid = [f"{name}: {metric.reason}" for name, metric in metrics.items() if not metric.is_score_valid and weights[name] != 0]
    if invalid:
        return replace(EvaluateResult.from_error(f"metrics without a valid score: {'; '.join(invalid)}"), metrics=dict(metrics))
    try:
        score = math.fsum(weights[name] * metric.score for name, metric in metrics.items() if weights[name] != 0)
        return EvaluateResult(score, metrics=dict(metrics))
    except (OverflowError, ValueError, RewardError):
        return replace(EvaluateResult.from_error("the weighted sum of the metrics is beyond the range of floats"), metrics=dict(metrics))


def combine_results(results: Mapping[str, EvaluateResult], weights: Mapping[str, float]) -> EvaluateResult:
    """Combine the results of several components into one. See create_composite_reward.

    A component that abstains is left out, as TRL leaves out a function that returns None.

    Returns: a result without a valid score if a component has none, or if all abstain.
    """
    assert set(results) == set(weights), f"there are results {sorted(results)} and weights {sorted(weights)}"
    if not all(result.abstains for result in results.values()):
        results = {name: result for name, result in results.items() if not result.abstains}
    invalid = {name: result.error or result.reason or "is_score_valid is False" for name, result in results.items() if not result.is_valid}
    if invalid:
        return EvaluateResult.from_error("; ".join(f"component {name}: {why}" for name, why in invalid.items()))
    metrics: dict[str, MetricResult] = {}
    for name, result in results.items():
        metrics[name] = MetricResult(float(result.score), result.reason)
        metrics |= {f"{name}/{inner}": metric for inner, metric in result.metrics.items()}
    try:
        return EvaluateResult(
            math.fsum(weights[name] * result.score for name, result in results.items()),
            reason="; ".join(f"{name}: {result.reason}" for name, result in results.items() if result.reason),
            metrics=metrics,
            step_outputs=_combine_steps(results, weights),
        )
    except (OverflowError, ValueError, RewardError):
        return EvaluateResult.from_error("the weighted sum of the components is beyond the range of floats")


def _combine_steps(results: Mapping[str, EvaluateResult], weights: Mapping[str, float]) -> tuple[StepOutput, ...] | None:
    """Merge the step outputs of all components, adding up those with one step_index; None if no component judges steps."""
    if all(result.step_outputs is None for result in results.values()):
        return None
    combined: dict[int | str, StepOutput] = {}
    for name, result in results.items():
        for output in result.step_outputs or ():
            before = combined.get(output.step_index, StepOutput(output.step_index, 0.0))
            combined[output.step_index] = StepOutput(
                output.step_index,
                before.base_reward + weights[name] * output.base_reward,
                {**before.metrics, **{f"{name}/{inner}": metric for inner, metric in output.metrics.items()}},
                "; ".join(text for text in (before.reason, f"{name}: {output.reason}" if output.reason else "") if text),
            )
    return tuple(combined.values())


@dataclass(frozen=True)
class CompositeReward:
    """Composite of sync functions of one sample."""

    functions: Mapping[str, RewardFn]
    weights: Mapping[str, float]

    def __call__(self, sample: Sample) -> EvaluateResult:
        """Return the combined result. Raises RewardError naming the component that failed."""
        return combine_results({name: self._judge(name, function, sample) for name, function in self.functions.items()}, self.weights)

    def _judge(self, name: str, function: RewardFn, sample: Sample) -> EvaluateResult:
        try:
            value = function(sample)
        except (Exception, SystemExit) as error:  # the function is the user's
            failure = create_failure(describe_reward(function), describe_sample(sample), error)
            raise RewardError(f"component {name}: {failure}") from error
        if isinstance(value, EvaluateResult) and value.abstains:
            return value  # combine_results leaves it out
        try:
            return parse_result(value, sample, name_reward(function))
        except RewardError as error:
            raise RewardError(f"component {name}: {error}") from error


@dataclass(frozen=True)
class CompositeGroupReward:
    """Composite of any functions; its components run concurrently, each on the whole group."""

    functions: Mapping[str, RewardFn]
    weights: Mapping[str, float]
    timeout_s: float | None = None  # seconds for each call of a component without a deadline of its own

    @property
    def has_own_deadline(self) -> bool:
        """Whether a component has a deadline of its own, which may include a wait for a worker: the composite then waits for all."""
        return any(getattr(function, "has_own_deadline", False) for function in self.functions.values())

    def limit_calls(self, timeout_s: float | None) -> CompositeGroupReward:
        """Return the composite with a deadline for each component without one of its own; see evaluate.RewardFn."""
        return replace(self, timeout_s=timeout_s)

    async def __call__(self, sample: Sample) -> EvaluateResult:
        """Return the combined result for a group of one."""
        (result,) = await self.score_samples((sample,))
        return result

    async def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """Return the combined result of each sample, without a valid score if a component failed on it."""
        judgements: dict[str, list[Judgement]] = {}

        async def judge(name: str, function: RewardFn) -> None:
            judgements[name] = await judge_samples(function, samples, RewardConfig(timeout_s=self.timeout_s))

        async with trio.open_nursery() as nursery:
            for name, function in self.functions.items():
                nursery.start_soon(judge, name, function)
        return [
            combine_results({name: _as_result(judgements[name][k]) for name in self.functions}, self.weights) for k in range(len(samples))
        ]


@dataclass(frozen=True)
class CompositeSource(UnopenedReward):
    """Composite with components that are still to be opened: a evaluate.RewardSource."""

    functions: Mapping[str, Any]
    weights: Mapping[str, float]

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """Open the components and yield their composite."""
        async with AsyncExitStack() as stack:
            opened = {
                name: await stack.enter_async_context(function.open_reward()) if isinstance(function, RewardSource) else function
                for name, function in self.functions.items()
            }
            yield create_composite_reward({name: (opened[name], self.weights[name]) for name in opened}, total=None)


def _as_result(judgement: Judgement) -> EvaluateResult:
    return judgement.result if judgement.result is not None else EvaluateResult.from_error(str(judgement.error))

"""Outcomes of a sample besides its tokens: course and end of its episode, and the details of its reward. Fields of a Sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, cast

from rollouts.checks import is_finite, is_finite_number, show_value, take_int, take_number, take_text, take_tuple
from rollouts.errors import DataError, RewardError

# -- episodes


class StopReason(StrEnum):
    """Reason for the end of an episode. If several apply, it is the first in this order."""

    DONE = "done"  # reported by the environment
    AGENT = "agent"  # reported by the policy
    REGEX = "regex"  # EpisodeConfig.stop_regex was found in an action
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # tokens of all actions together
    CONTEXT = "context"  # the next action or observation does not fit into the context
    ERROR = "error"  # see Failure


class Failure(StrEnum):
    """Cause of a failed episode."""

    INFRASTRUCTURE = "infrastructure"  # the environment, a tool or a sandbox: raised, too slow, or returned a value that is not allowed
    DATA = "data"  # the prompt or the chat template: nothing can be generated from them
    POLICY = "policy"  # actions that the environment could not read; the episode is complete all the same


@dataclass(frozen=True, kw_only=True)
class EpisodeStep:
    """One environment step of an episode, as its sample stores it. JSON values."""

    observation: Any = None  # the observation before the action
    action: Any = None  # action as given to the environment: its text, or the result of a parser
    reward: float | None = None  # reward of this step alone; None = unknown
    done: bool = False  # whether the episode ended with this step
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the environment's info
    value: float | None = None  # estimate of a critic, before the action; None = no critic

    def __post_init__(self) -> None:
        info: Any = self.info
        if not isinstance(info, Mapping):
            raise DataError(f"EpisodeStep.info is {info!r}, expected a dict")

    def to_dict(self) -> dict[str, Any]:
        """Return the step as plain JSON values."""
        return {**vars(self), "info": dict(self.info)}


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """Course and end of a sample's episode."""

    stop_reason: StopReason
    environment_reward: float = 0.0  # sum of the rewards of all environment steps
    steps: tuple[EpisodeStep, ...] = ()  # one for each action
    num_cut_actions: int = 0  # actions that reached their token budget
    num_reformatted: int = 0  # answers that the chat template renders differently than sampled
    failure: Failure | None = None  # None = no failure
    error: str | None = None  # description of the failure
    has_final_reward: bool = False  # whether the reward is that of a failure, which no reward function replaces

    def __post_init__(self) -> None:
        take: dict[str, Any] = {
            "stop_reason": _take_choice("EpisodeOutcome.stop_reason", self.stop_reason, StopReason),
            "environment_reward": take_number("EpisodeOutcome.environment_reward", self.environment_reward, finite=False),
            "steps": take_tuple("EpisodeOutcome.steps", self.steps, _take_step, "a sequence of EpisodeStep"),
        }
        if self.failure is not None:
            take["failure"] = _take_choice("EpisodeOutcome.failure", self.failure, Failure)
        for name in ("num_cut_actions", "num_reformatted"):
            take[name] = take_int(f"EpisodeOutcome.{name}", getattr(self, name))
        final: Any = self.has_final_reward
        if not isinstance(final, bool):
            raise DataError(f"EpisodeOutcome.has_final_reward is {final!r}, expected True or False")
        if self.error is not None:
            take_text("EpisodeOutcome.error", self.error)
        for name, value in take.items():
            object.__setattr__(self, name, value)

    @property
    def num_turns(self) -> int:
        """Number of actions."""
        return len(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        out = dict(vars(self))
        out["stop_reason"] = self.stop_reason.value
        out["failure"] = None if self.failure is None else self.failure.value
        out["steps"] = [step.to_dict() for step in self.steps]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeOutcome:
        """Return the outcome of to_dict's values."""
        return cls(**data)


def _take_step(step: Any) -> EpisodeStep:
    if isinstance(step, EpisodeStep):
        return step
    known = {f.name for f in fields(EpisodeStep)}
    if not isinstance(step, Mapping) or not set(cast("Mapping[str, Any]", step)) <= known:
        raise DataError(f"EpisodeOutcome.steps holds {step!r:.200}, expected an EpisodeStep, or a dict of its fields {sorted(known)}")
    return EpisodeStep(**cast("Mapping[str, Any]", step))


def _take_choice(where: str, value: Any, choices: type[StrEnum]) -> StrEnum:
    try:
        return choices(value)
    except ValueError as error:
        raise DataError(f"{where} is {value!r}, expected one of {', '.join(choices)}") from error


# -- rewards


@dataclass(frozen=True)
class MetricResult:
    """One part of an evaluation, for the log: it enters the score only if the reward function includes it."""

    score: float
    reason: str = ""
    is_score_valid: bool = True

    def __post_init__(self) -> None:
        check_texts(self, "reason")
        check_flag(self)
        check_number("MetricResult.score", self.score, required=self.is_score_valid)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values; a score that is not finite becomes None."""
        return {"score": score_to_json(self.score), "reason": self.reason, "is_score_valid": self.is_score_valid}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MetricResult:
        """Return the result of to_dict's values. Raises RewardError for another shape."""
        return cls(**parse_fields(cls, data, "score"))


@dataclass(frozen=True)
class StepOutput:
    """Reward of one step of an episode."""

    step_index: int | str  # position among the assistant's messages, from 0; a text is the name of a step, see rewards/results.py
    base_reward: float
    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])
    reason: str = ""

    def __post_init__(self) -> None:
        index: Any = self.step_index
        if isinstance(index, bool) or not isinstance(index, (int, str)):
            raise RewardError(
                f"StepOutput.step_index is {show_value(index)}, expected the number of an assistant message, from 0, or a name"
            )
        check_texts(self, "reason")
        check_number("StepOutput.base_reward", self.base_reward)
        check_metrics("StepOutput.metrics", self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """Return the output as plain JSON values."""
        return {
            "step_index": self.step_index,
            "base_reward": self.base_reward,
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepOutput:
        """Return the output of to_dict's values. Raises RewardError for another shape."""
        values = parse_fields(cls, data, "step_index", "base_reward")
        values["metrics"] = parse_metrics(values.get("metrics"))
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class RewardDetails:
    """Explanation of a sample's reward besides the number, from its reward function."""

    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])  # by name
    steps: tuple[StepOutput, ...] = ()  # rewards of single steps
    reason: str = ""
    error: str | None = None  # failure of the reward function that RewardConfig.on_error "zero" turned into the reward 0
    num_retries: int = 0  # calls of the reward function that failed before the one that counts

    def __post_init__(self) -> None:
        check_metrics("RewardDetails.metrics", self.metrics)
        outputs = take_tuple("RewardDetails.steps", self.steps, _take_output, "a sequence of StepOutput")
        object.__setattr__(self, "steps", outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the details as plain JSON values."""
        out = dict(vars(self))
        out["metrics"] = {name: metric.to_dict() for name, metric in self.metrics.items()}
        out["steps"] = [step.to_dict() for step in self.steps]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RewardDetails:
        """Return the details of to_dict's values."""
        values = dict(data)
        values["metrics"] = parse_metrics(values.get("metrics"))
        values["steps"] = tuple(StepOutput.from_dict(step) for step in values.get("steps", ()))
        return cls(**values)


def _take_output(output: Any) -> StepOutput:
    if not isinstance(output, StepOutput):
        raise DataError(f"RewardDetails.steps holds {output!r:.200}, expected a StepOutput")
    return output


def parse_fields(cls: type[Any], data: Any, *required: str) -> dict[str, Any]:
    """Return the fields of a JSON value; None for a score means that it is not finite.

    Raises: RewardError for an unknown field, or if a required one is missing.
    """
    known = {f.name for f in fields(cls)}
    if not isinstance(data, Mapping) or set(cast("Mapping[str, Any]", data)) - known or not set(required) <= set(cast("Any", data)):
        raise RewardError(f"{show_value(data)} is no {cls.__name__}: expected an object with {sorted(required)}, and of {sorted(known)}")
    values = dict(cast("Mapping[str, Any]", data))
    if "score" in values and values["score"] is None:
        values["score"] = math.nan
    return values


def parse_metrics(data: Any) -> dict[str, MetricResult]:
    """Return metrics by name from an object of them; {} for None. Raises RewardError for another shape."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise RewardError(f"metrics is {show_value(data)}, expected an object of metrics by name")
    return {str(name): MetricResult.from_dict(metric) for name, metric in cast("Mapping[Any, Any]", data).items()}


def check_metrics(name: str, metrics: Any) -> None:
    """Raise RewardError unless the value called `name` is a mapping from names to MetricResult."""
    good = isinstance(metrics, Mapping) and all(
        isinstance(key, str) and isinstance(value, MetricResult) for key, value in cast("Mapping[Any, Any]", metrics).items()
    )
    if not good:
        raise RewardError(f"{name} is {show_value(metrics)}, expected a mapping from names to MetricResult")


def check_number(name: str, value: Any, *, required: bool = True) -> None:
    """Raise RewardError unless the value called `name` is a number, and finite if required."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"{name} is {show_value(value)} ({type(value).__name__}), expected a number")
    if required and not is_finite_number(value):
        raise RewardError(f"{name} is {show_value(value)}, expected a finite number: give one, or set is_score_valid=False")


def check_texts(result: Any, *names: str) -> None:
    """Raise RewardError unless these fields of a result are texts."""
    for name in names:
        value: Any = getattr(result, name)
        if not isinstance(value, str):
            raise RewardError(f"{type(result).__name__}.{name} is {show_value(value)} ({type(value).__name__}), expected a text")


def check_flag(result: Any) -> None:
    """Raise RewardError unless is_score_valid of a result is a bool."""
    valid: Any = result.is_score_valid
    if not isinstance(valid, bool):
        raise RewardError(f"{type(result).__name__}.is_score_valid is {show_value(valid)}, expected True or False")


def score_to_json(value: float) -> float | None:
    """Return the score, or None for one that is not finite: JSON has no NaN."""
    return value if is_finite(value) else None


# -- files

_OWN_FIELDS = ("trainable", "truncated_sampling", "log_prob_kind", "untempered_log_probs", "messages", "action_messages")
_DETAIL_KEYS = MappingProxyType({f.name: f"reward_{f.name}" for f in fields(RewardDetails)} | {"num_retries": "num_reward_retries"})

FIELD_OF_KEY: Mapping[str, str] = MappingProxyType(
    {name: f"Sample.{name}" for name in _OWN_FIELDS}
    | {
        name: f"Sample.episode, an EpisodeOutcome with {name}"
        for name in ("stop_reason", "environment_reward", "num_cut_actions", "num_reformatted")
    }
    | {key: f"Sample.reward_details, a RewardDetails with {name}" for name, key in _DETAIL_KEYS.items()}
)
"""Keys that the metadata of a sample in an old file has for what is a field, with the field. In the metadata of a generated sample they
would be read by nothing, and generation/contract.py refuses them. The words steps, error and failure are left to the user."""


def read_metadata_of_old_files(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a sample from a file, each under its own field.

    Files written before `trainable`, `messages`, `episode`, `reward_details` and the like were fields have them in the metadata,
    under the keys below. They have no entry "trainable" of their own; values with that entry are returned as they are.

    Args:
        data: the sample as plain JSON values. It is not changed.
    """
    values = dict(data)
    if "trainable" in values or not values.get("metadata"):
        return values
    old = values["metadata"] = dict(values["metadata"])
    for name in _OWN_FIELDS:
        if name in old:
            values[name] = old.pop(name)
    if "stop_reason" in old:
        old.pop("num_turns", None)  # the number of steps
        names = [f.name for f in fields(EpisodeOutcome) if f.name in old]
        values["episode"] = {name: old.pop(name) for name in names}
    details = {name: old.pop(key) for name, key in _DETAIL_KEYS.items() if key in old}
    if details:
        values["reward_details"] = details
    return values

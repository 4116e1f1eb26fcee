"""What a reward function says about an answer or an episode, beyond one number."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, SupportsFloat, cast

from rollouts.errors import RewardError
from rollouts.samples import describe_sample, is_finite, is_finite_number, sample_messages, show_value
from rollouts.types import Sample, Turn

_logger = logging.getLogger(__name__)

METADATA_OF_REWARDS = frozenset({"reward_metrics", "reward_steps", "reward_reason", "reward_error", "num_reward_retries"})
"""Keys of Sample.metadata that scoring writes."""


@dataclass(frozen=True)
class MetricResult:
    """One part of an evaluation, for the log: it enters the score only as far as the reward function says so."""

    score: float
    reason: str = ""
    is_score_valid: bool = True

    def __post_init__(self) -> None:
        _check_texts(self, "reason")
        _check_flag(self)
        _check_number("MetricResult.score", self.score, required=self.is_score_valid)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; a score that is not finite is None there."""
        return {"score": _json_number(self.score), "reason": self.reason, "is_score_valid": self.is_score_valid}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MetricResult:
        """The inverse of to_dict. Raises RewardError for another shape."""
        return cls(**_parse_fields(cls, data, "score"))


@dataclass(frozen=True)
class StepOutput:
    """What one step of an episode earned by itself."""

    step_index: int | str  # position among the assistant's messages, from 0; a text is the name of a step, see alignment.py
    base_reward: float
    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])
    reason: str = ""

    def __post_init__(self) -> None:
        index: Any = self.step_index
        if isinstance(index, bool) or not isinstance(index, (int, str)):
            raise RewardError(
                f"StepOutput.step_index is {show_value(index)}, expected the number of an assistant message, from 0, or a name"
            )
        _check_texts(self, "reason")
        _check_number("StepOutput.base_reward", self.base_reward)
        _check_metrics("StepOutput.metrics", self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """The output as plain JSON values."""
        return {
            "step_index": self.step_index,
            "base_reward": self.base_reward,
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepOutput:
        """The inverse of to_dict. Raises RewardError for another shape."""
        values = _parse_fields(cls, data, "step_index", "base_reward")
        values["metrics"] = _parse_metrics(values.get("metrics"))
        return cls(**values)


@dataclass(frozen=True)
class EvaluateResult:
    """What a reward function returns. One with a score alone is complete: EvaluateResult(1.0)."""

    score: float  # of the whole answer or episode: the reward of its Sample
    reason: str = ""
    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])
    step_outputs: tuple[StepOutput, ...] | None = None  # rewards of single steps; None = the function judges the whole only
    is_score_valid: bool = True  # False: there is no judgement, and the policy for failed rewards decides what becomes of the group
    error: str | None = None  # why there is none

    def __post_init__(self) -> None:
        _check_texts(self, "reason")
        if self.error is not None:
            _check_texts(self, "error")
        _check_flag(self)
        _check_number("EvaluateResult.score", self.score, required=self.is_score_valid and self.error is None)
        _check_metrics("EvaluateResult.metrics", self.metrics)
        outputs: Any = self.step_outputs
        if outputs is not None:
            if not isinstance(outputs, Sequence) or not all(isinstance(output, StepOutput) for output in cast("Sequence[Any]", outputs)):
                raise RewardError(f"EvaluateResult.step_outputs is {show_value(outputs)}, expected a sequence of StepOutput, or None")
            object.__setattr__(self, "step_outputs", tuple(cast("Sequence[StepOutput]", outputs)))

    @property
    def is_valid(self) -> bool:
        """Whether the score is a judgement."""
        return self.is_score_valid and self.error is None

    def apply_to(self, sample: Sample) -> Sample:
        """The sample with this as its reward: with_reward(sample, result) does the same.

        The score is sample.reward. With step_outputs each is the reward of the turn that it names, and turns that none names keep theirs.
        Without, the whole episode is all that is judged: its turns have reward 0, and what the environment paid is left in
        metadata["environment_reward"]. metadata gets "reward_metrics", "reward_steps" and "reward_reason", as far as there are any.

        Raises: RewardError if the result is not valid, or a step output names no step of the sample or one that another names, too.
        """
        if not self.is_valid:
            raise RewardError(f"there is no reward for {describe_sample(sample)}: {self.error or self.reason or 'is_score_valid is False'}")
        metadata = {key: value for key, value in sample.metadata.items() if key not in METADATA_OF_REWARDS}
        if self.metrics:
            metadata["reward_metrics"] = {name: metric.to_dict() for name, metric in self.metrics.items()}
        if self.step_outputs:
            metadata["reward_steps"] = [output.to_dict() for output in self.step_outputs]
        if self.reason:
            metadata["reward_reason"] = self.reason
        turns = _reward_turns(sample, self.step_outputs)
        return replace(sample, reward=float(self.score), turns=turns, metadata=metadata)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values; a score that is not finite is None there."""
        return {
            "score": _json_number(self.score),
            "reason": self.reason,
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "step_outputs": None if self.step_outputs is None else [output.to_dict() for output in self.step_outputs],
            "is_score_valid": self.is_score_valid,
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvaluateResult:
        """The inverse of to_dict. Raises RewardError for another shape."""
        values = _parse_fields(cls, data, "score")
        outputs = values.get("step_outputs")
        if outputs is not None:
            if not isinstance(outputs, list):
                raise RewardError(f"step_outputs is {show_value(outputs)}, expected a list of objects, or null")
            values["step_outputs"] = tuple(StepOutput.from_dict(output) for output in cast("list[Any]", outputs))
        values["metrics"] = _parse_metrics(values.get("metrics"))
        return cls(**values)

    @classmethod
    def from_error(cls, error: str) -> EvaluateResult:
        """A result without a judgement: what it is worth, the policy for failed rewards decides."""
        return cls(math.nan, is_score_valid=False, error=error)


def parse_result(value: Any, sample: Sample, name: str) -> EvaluateResult:
    """What a reward function returned for a sample, as a valid EvaluateResult.

    Args:
        value: an EvaluateResult, or a finite number (float, int, bool, 0-d array or tensor).
        name: of the function, for messages.

    Raises: RewardError saying what was returned instead.
    """
    result = as_result(value, name, describe_sample(sample))
    if not result.is_valid:
        why = result.error or result.reason or "is_score_valid is False"
        raise RewardError(f"reward function {name} gave no score for {describe_sample(sample)}: {why}")
    return result


def as_result(value: Any, name: str, where: str) -> EvaluateResult:
    """An EvaluateResult as it is, valid or not; a finite number as the score of one.

    Raises: RewardError saying what was returned instead, by the function called name, for what is called where.
    """
    if isinstance(value, EvaluateResult):
        return value
    try:
        number = float(value) if isinstance(value, (float, SupportsFloat)) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays and tensors of several elements; integers beyond a float
        number = None
    if number is None:
        found = f"{show_value(value)} ({type(value).__name__})"
        raise RewardError(f"reward function {name} returned {found} for {where}, expected a number or an EvaluateResult")
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name} returned {number} for {where}, expected a finite number: "
            "return one, or raise and choose on_error='drop'"
        )
    return EvaluateResult(number)


def _reward_turns(sample: Sample, outputs: Sequence[StepOutput] | None) -> tuple[Turn, ...] | None:
    """The turns of a sample with the rewards of the steps that are named, or 0 where no steps are judged; None for one without turns."""
    if outputs is None and sample.turns is not None:
        return tuple(replace(turn, reward=0.0) for turn in sample.turns)
    if not outputs:
        return sample.turns
    steps = name_turns(sample)
    places, problems = match_steps(outputs, steps)
    if problems:
        raise RewardError(f"step outputs do not fit {describe_sample(sample)}: {'; '.join(problems.values())}")
    for number, place in places.items():
        output = outputs[number]
        _logger.debug(
            "%s: step_index %r is turn %d (assistant message %d), reward %g",
            describe_sample(sample), output.step_index, place, steps[place][0], output.base_reward,
        )  # fmt: skip
    if sample.turns is None:
        return None
    rewards = {place: float(outputs[number].base_reward) for number, place in places.items()}
    return tuple(replace(turn, reward=rewards.get(k, turn.reward)) for k, turn in enumerate(sample.turns))


def name_turns(sample: Sample) -> list[tuple[int, str | None]]:
    """What step outputs call the turns of a sample: (number among the assistant's messages, name), for each turn.

    The policy wrote the last of the assistant's messages; earlier ones are part of the prompt. The name is that of the message, if it has
    one. The response of a sample that is no episode is one turn.
    """
    num_turns = 1 if sample.turns is None else len(sample.turns)
    names = [message.name for message in sample_messages(sample) if message.role == "assistant"]
    if "messages" not in sample.metadata and sample.turns is not None:  # the conversation is not there: the prompt is
        names = [*names[:-1], *(None for _ in sample.turns)]
    if len(names) < num_turns:
        raise RewardError(
            f"{describe_sample(sample)} has {num_turns} turns, but metadata['messages'] has {len(names)} messages of the assistant: "
            "which turn a step output is about cannot be known"
        )
    start = len(names) - num_turns
    return [(start + k, names[start + k]) for k in range(num_turns)]


def match_steps(outputs: Sequence[StepOutput], steps: Sequence[tuple[int, str | None]]) -> tuple[dict[int, int], dict[int, str]]:
    """Which step each output is about.

    Args:
        steps: (number, name) of each; see name_turns.

    Returns: places of steps by the place of the output that is about each, and what is wrong with the other outputs, by their place: no
        step has the number or name, several have, or several outputs are about the same step (none of them counts).
    """
    found: dict[int, int] = {}
    problems: dict[int, str] = {}
    for number, output in enumerate(outputs):
        wanted = output.step_index
        candidates = [k for k, (index, name) in enumerate(steps) if wanted == (name if isinstance(wanted, str) else index)]
        if len(candidates) == 1:
            found[number] = candidates[0]
        elif candidates:
            problems[number] = f"step_index {wanted!r} is the name of {len(candidates)} steps"
        else:
            kind = [name for _, name in steps if name is not None] if isinstance(wanted, str) else [index for index, _ in steps]
            problems[number] = f"step_index {wanted!r} is unknown; there are {kind or 'none'}"
    counts = Counter(found.values())
    for number, place in list(found.items()):
        if counts[place] > 1:
            problems[number] = f"step_index {outputs[number].step_index!r} names a step that {counts[place]} step outputs are about"
            del found[number]
    return found, dict(sorted(problems.items()))


def _parse_fields(cls: type[Any], data: Any, *required: str) -> dict[str, Any]:
    """The fields of a value that came as JSON; None for a score means that there is none."""
    known = {f.name for f in fields(cls)}
    if not isinstance(data, Mapping) or set(cast("Mapping[str, Any]", data)) - known or not set(required) <= set(cast("Any", data)):
        raise RewardError(f"{show_value(data)} is no {cls.__name__}: expected an object with {sorted(required)}, and of {sorted(known)}")
    values = dict(cast("Mapping[str, Any]", data))
    if "score" in values and values["score"] is None:
        values["score"] = math.nan
    return values


def _parse_metrics(data: Any) -> dict[str, MetricResult]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise RewardError(f"metrics is {show_value(data)}, expected an object of metrics by name")
    return {str(name): MetricResult.from_dict(metric) for name, metric in cast("Mapping[Any, Any]", data).items()}


def _check_metrics(name: str, metrics: Any) -> None:
    good = isinstance(metrics, Mapping) and all(
        isinstance(key, str) and isinstance(value, MetricResult) for key, value in cast("Mapping[Any, Any]", metrics).items()
    )
    if not good:
        raise RewardError(f"{name} is {show_value(metrics)}, expected a mapping from names to MetricResult")


def _check_number(name: str, value: Any, *, required: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"{name} is {show_value(value)} ({type(value).__name__}), expected a number")
    if required and not is_finite_number(value):
        raise RewardError(f"{name} is {show_value(value)}, expected a finite number: give one, or set is_score_valid=False")


def _check_texts(result: Any, *names: str) -> None:
    for name in names:
        value: Any = getattr(result, name)
        if not isinstance(value, str):
            raise RewardError(f"{type(result).__name__}.{name} is {show_value(value)} ({type(value).__name__}), expected a text")


def _check_flag(result: Any) -> None:
    valid: Any = result.is_score_valid
    if not isinstance(valid, bool):
        raise RewardError(f"{type(result).__name__}.is_score_valid is {show_value(valid)}, expected True or False")


def _json_number(value: float) -> float | None:
    return value if is_finite(value) else None

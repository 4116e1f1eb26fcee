"""What a reward function says about an answer or an episode, beyond one number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollouts.errors import RewardError


@dataclass(frozen=True)
class MetricResult:
    """One part of an evaluation, for the log: it enters the score only as far as the reward function says so."""

    score: float
    reason: str = ""
    is_score_valid: bool = True

    def __post_init__(self) -> None:
        _check_number("MetricResult.score", self.score, required=self.is_score_valid)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class StepOutput:
    """What one step of an episode earned by itself."""

    step_index: int | str  # position among the assistant's messages, from 0; a text is a name that the aligner is told to look up
    base_reward: float
    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])
    reason: str = ""

    def __post_init__(self) -> None:
        index: Any = self.step_index
        if isinstance(index, bool) or not isinstance(index, (int, str)):
            raise RewardError(f"StepOutput.step_index is {index!r}, expected the number of an assistant message, from 0, or a name")
        _check_number("StepOutput.base_reward", self.base_reward)


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
        _check_number("EvaluateResult.score", self.score, required=self.is_score_valid and self.error is None)
        object.__setattr__(self, "step_outputs", None if self.step_outputs is None else tuple(self.step_outputs))


def _check_number(name: str, value: Any, *, required: bool = True) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"{name} is {value!r:.200} ({type(value).__name__}), expected a number")
    if required and not math.isfinite(value):
        raise RewardError(f"{name} is {value}, expected a finite number: give one, or set is_score_valid=False")

"""Rewards by rule: numbers, form, length. Exact comparison and GSM8K are in answers.py, LaTeX in math_answers.py, code in code_tests.py."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.config import check_setting
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.answers import extract_gsm8k_answer, ground_truth, normalize_number
from rollouts.rewards.results import EvaluateResult, MetricResult
from rollouts.samples import compute_response_lengths, describe_sample
from rollouts.types import Sample


def create_numeric_reward(
    *, rel_tol: float = 1e-6, abs_tol: float = 0.0, extract: Callable[[str], str | None] = extract_gsm8k_answer
) -> Callable[[Sample], float]:
    """1 if the number that a response ends with is that of the ground truth, up to a tolerance; else 0.

    Args:
        rel_tol, abs_tol: |a - b| <= max(rel_tol * max(|a|, |b|), abs_tol).
        extract: the number in a text as text, or None; default: the one behind the last "####", else the last one.
    """
    for name, value in (("rel_tol", rel_tol), ("abs_tol", abs_tol)):
        check_setting(0 <= value < math.inf, name, value, "a finite number, at least 0")
    return functools.partial(_match_numbers, rel_tol=rel_tol, abs_tol=abs_tol, extract=extract)


def _match_numbers(sample: Sample, *, rel_tol: float, abs_tol: float, extract: Callable[[str], str | None]) -> float:
    truth = ground_truth(sample)
    wanted = normalize_number(str(truth)) or extract(str(truth))
    if wanted is None:
        raise RewardError(f"the ground truth of {describe_sample(sample)} has no number: {truth!r}")
    found = extract(sample.response)
    return 0.0 if found is None else float(math.isclose(float(found), float(wanted), rel_tol=rel_tol, abs_tol=abs_tol))


def create_format_reward(pattern: str) -> Callable[[Sample], float]:
    r"""1 if the whole response has the form of a regular expression, in which "." is also the end of a line; else 0.

    Example: create_format_reward(r"<think>.+</think>\s*<answer>.+</answer>")

    Raises: ConfigError if it is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    return functools.partial(_match_format, pattern=compiled)


def _match_format(sample: Sample, *, pattern: re.Pattern[str]) -> float:
    return float(pattern.fullmatch(sample.response.strip()) is not None)


def create_length_penalty(*, free_tokens: int, per_token: float, most: float = math.inf) -> Callable[[Sample], float]:
    """-per_token for each token of a response beyond the first free_tokens, at least -most. For the last tokens of a budget see
    evaluate.create_overlong_penalty.

    Raises: ConfigError for a number out of range.
    """
    check_setting(free_tokens >= 0, "free_tokens", free_tokens, "at least 0")
    check_setting(0 <= per_token < math.inf, "per_token", per_token, "a finite number, at least 0")
    check_setting(most >= 0, "most", most, "at least 0")
    return functools.partial(_penalize_length, free_tokens=free_tokens, per_token=per_token, most=most)


def _penalize_length(sample: Sample, *, free_tokens: int, per_token: float, most: float) -> float:
    (length,) = compute_response_lengths([sample.loss_mask])
    return -min(most, per_token * max(0, length - free_tokens))


@dataclass(frozen=True)
class RelativeLengthReward:
    """Short right answers before long ones, by comparing the samples of a group (a calls.GroupReward).

    With l the length in tokens, lambda = 0.5 - (l - min l) / (max l - min l): a right answer gets lambda, a wrong one min(0, lambda); all
    get 0 where all are equally long. Add it to a reward of correctness (composite.py).

    Source: Kimi Team 2025 (Kimi k1.5), section 2.3.3.
    """

    is_right: Callable[[Sample], Any]  # a sync reward that is more than 0 for right answers, for example exact_match

    def __call__(self, sample: Sample) -> EvaluateResult:
        """Of a group of one: 0."""
        return self.score_samples((sample,))[0]

    def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """Of each sample of a group."""
        lengths = compute_response_lengths([sample.loss_mask for sample in samples])
        shortest, longest = min(lengths), max(lengths)
        out: list[EvaluateResult] = []
        for sample, length in zip(samples, lengths, strict=True):
            relative = 0.0 if longest == shortest else 0.5 - (length - shortest) / (longest - shortest)
            reward = relative if self.is_right(sample) > 0 else min(0.0, relative)
            out.append(EvaluateResult(reward, metrics={"length": MetricResult(length)}))
        return out

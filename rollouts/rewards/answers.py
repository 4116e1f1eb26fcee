"""Rewards that compare answers or judge their lengths, and lookup of functions by name."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import math
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.checks import show_value
from rollouts.config import check_setting
from rollouts.data.samples import check_reward, compute_response_lengths, describe_sample
from rollouts.errors import ConfigError, RewardError, locate_error
from rollouts.outcomes import MetricResult
from rollouts.rewards.results import EvaluateResult
from rollouts.steps import Trajectory
from rollouts.types import Sample, Status

# a minus is a sign only if no number or word stands before it: "9-4" ends with 4
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\$\s?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)\]])-)?\$?\.\d+", re.ASCII)


def ground_truth(sample: Sample) -> Any:
    """Return metadata["ground_truth"] of a sample. Raises RewardError if there is none."""
    if "ground_truth" not in sample.metadata:
        raise RewardError(
            f"sample {sample.index} has no metadata['ground_truth'] (keys: {sorted(sample.metadata)}): "
            "give each prompt an answer, or use a reward that needs none"
        )
    return sample.metadata["ground_truth"]


def exact_match(sample: Sample) -> float:
    """Return 1 if the response, without white space at its ends, is the ground truth and ended by itself; else 0.

    A response that was cut off does not count, even if its text is right: the model has not learned where to end.
    """
    right = sample.response.strip() == str(ground_truth(sample)).strip()
    return float(right and sample.status is Status.COMPLETED)


def normalize_number(text: str) -> str | None:
    """Return a number as written by people in one form: "$1,234.50" -> "1234.5", "-7." -> "-7"; None if it is not a number."""
    cleaned = text.replace("\N{MINUS SIGN}", "-").replace(",", "").replace("$", "").strip().rstrip(".").rstrip("%")
    cleaned = re.sub(r"\s", "", cleaned)
    if not re.fullmatch(r"[-+]?(?:\d+\.?\d*|\.\d+)", cleaned, re.ASCII):
        return None
    sign = "-" if cleaned.startswith("-") else ""
    whole, _, fraction = cleaned.lstrip("+-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    if whole == "0" and not fraction:
        sign = ""
    return sign + whole + (f".{fraction}" if fraction else "")


def extract_gsm8k_answer(text: str, *, strict: bool = False) -> str | None:
    """Return the final answer of a GSM8K solution, normalised.

    The answer is the first number behind the last "####"; without such a mark, unless strict, the last number in the text.

    Returns: for example "1234.5", or None if there is no number.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = text.rpartition("####")
    if marked[1]:
        found = _NUMBER.search(marked[2])
        return None if found is None else normalize_number(found.group())
    if strict:
        return None
    numbers = _NUMBER.findall(text)
    return normalize_number(numbers[-1]) if numbers else None


def _write_truth(truth: Any) -> str:
    """Return a ground truth as text; a float without an exponent, whose digits would be taken for the number."""
    return f"{Decimal(repr(float(truth))):f}" if isinstance(truth, float) and math.isfinite(truth) else str(truth)


def gsm8k_reward(sample: Sample) -> float:
    """Return 1 if the response's final answer equals that of the ground truth (a number, or a whole GSM8K solution); else 0.

    Source: Cobbe et al. 2021, with the last number as fallback as in common evaluation harnesses.
    """
    truth = extract_gsm8k_answer(_write_truth(ground_truth(sample)))
    if truth is None:
        raise RewardError(f"the ground truth of sample {sample.index} has no number: {ground_truth(sample)!r}")
    return float(extract_gsm8k_answer(sample.response) == truth)


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a new module. Raises ConfigError if it is not there or cannot be imported."""
    if not path.is_file():
        seen_from = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"there is no file {path}{seen_from}: correct its path")
    # a unique name, under which dataclasses and pickle find the module
    name = f"{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} has no import loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the file is the user's: whatever is wrong in it, tell the place
        del sys.modules[name]
        install = "; install the module in this environment, or correct its name" if isinstance(error, ImportError) else ""
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error} ({locate_error(error)}){install}") from error
    return module


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function, or the RewardSource, named by "package.module:name" or "path/to/file.py:name".

    The module is imported, so its code runs: name only code you trust.

    Raises: ConfigError saying which part was not found.
    """
    location, separator, name = reference.rpartition(":")
    if not separator or not location or not name:
        raise ConfigError(f"{reference!r} does not name a function: write 'package.module:name' or 'path/to/file.py:name'")
    if location.endswith(".py"):
        module = load_module(Path(location))
    else:
        try:
            module = importlib.import_module(location)
        except (ImportError, TypeError, ValueError) as error:  # TypeError and ValueError: relative and empty names
            advice = "install or correct the module, or name a file, FILE.py:NAME"
            raise ConfigError(f"cannot import {location!r} (from {reference!r}): {error}; {advice}") from error
        except (Exception, SystemExit) as error:  # see load_module
            what = f"{type(error).__name__}: {error} ({locate_error(error)})"
            raise ConfigError(f"cannot import {location!r} (from {reference!r}): {what}") from error
    function: Any = getattr(module, name, None)
    if not callable(function) and not hasattr(function, "open_reward"):
        public = {n: value for n, value in vars(module).items() if callable(value) and not n.startswith("_")}
        available = sorted(n for n, value in public.items() if getattr(value, "__module__", None) == module.__name__)  # not its imports
        close = difflib.get_close_matches(name, available, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(available) or 'none'}"
        found = f"{name!r} in {location} is {show_value(function)} ({type(function).__name__}), no function"
        raise ConfigError(f"{found if hasattr(module, name) else f'{location} has no function {name!r}'}: {hint}")
    return function


def create_numeric_reward(
    *, rel_tol: float = 1e-6, abs_tol: float = 0.0, extract: Callable[[str], str | None] = extract_gsm8k_answer
) -> Callable[[Sample], float]:
    """Create a reward: 1 if the last number of a response is that of the ground truth, up to a tolerance; else 0.

    Args:
        rel_tol, abs_tol: |a - b| <= max(rel_tol * max(|a|, |b|), abs_tol).
        extract: text -> the number in it as text, or None; default: the one behind the last "####", else the last one.
    """
    for name, value in (("rel_tol", rel_tol), ("abs_tol", abs_tol)):
        check_setting(0 <= value < math.inf, name, value, "a finite number, at least 0")
    return functools.partial(_match_numbers, rel_tol=rel_tol, abs_tol=abs_tol, extract=extract)


def _match_numbers(sample: Sample, *, rel_tol: float, abs_tol: float, extract: Callable[[str], str | None]) -> float:
    truth = ground_truth(sample)
    text = _write_truth(truth)
    wanted = normalize_number(text) or extract(text)
    if wanted is None:
        raise RewardError(f"the ground truth of {describe_sample(sample)} has no number: {truth!r}")
    found = extract(sample.response)
    return 0.0 if found is None else float(math.isclose(float(found), float(wanted), rel_tol=rel_tol, abs_tol=abs_tol))


def create_format_reward(pattern: str) -> Callable[[Sample], float]:
    r"""Create a reward: 1 if the whole response matches a regular expression, in which "." also matches line ends; else 0.

    Example: create_format_reward(r"<think>.+</think>\s*<answer>.+</answer>")

    Raises: ConfigError for an invalid regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is not a regular expression: {error}") from error
    return functools.partial(_match_format, pattern=compiled)


def _match_format(sample: Sample, *, pattern: re.Pattern[str]) -> float:
    return float(pattern.fullmatch(sample.response.strip()) is not None)


def create_length_penalty(*, free_tokens: int, per_token: float, most: float = math.inf) -> Callable[[Sample], float]:
    """Create a reward of -per_token for each token of a response beyond the first free_tokens, at least -most.

    See create_overlong_penalty for a penalty on the last tokens of a budget.

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
    """Preference for short right answers by comparing the samples of a group (a calls.GroupReward).

    With l the length in tokens and lambda = 0.5 - (l - min l) / (max l - min l), a right answer gets lambda and a wrong one min(0, lambda);
    all get 0 if they are equally long. Add it to a reward of correctness (composite.py).

    Source: Kimi Team 2025 (Kimi k1.5), section 2.3.3.
    """

    is_right: Callable[[Sample], Any]  # sync reward, more than 0 for right answers, for example exact_match

    def __call__(self, sample: Sample) -> EvaluateResult:
        """Score a group of one: 0."""
        return self.score_samples((sample,))[0]

    def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """Score each sample of a group."""
        lengths = compute_response_lengths([sample.loss_mask for sample in samples])
        shortest, longest = min(lengths), max(lengths)
        out: list[EvaluateResult] = []
        for sample, length in zip(samples, lengths, strict=True):
            relative = 0.0 if longest == shortest else 0.5 - (length - shortest) / (longest - shortest)
            reward = relative if self.is_right(sample) > 0 else min(0.0, relative)
            out.append(EvaluateResult(reward, metrics={"length": MetricResult(length)}))
        return out


def compute_reward(subject: Sample | Trajectory, environment: Any = None) -> float:
    """Default reward: for a sample 1.0 if metadata["correct"] is true, else 0.0; for a trajectory the sum of its rewards.

    Args:
        environment: not read: its payments are in the trajectory. The parameter makes this a reward of the form compute_reward(trajectory,
            environment); see trajectory_rewards.adapt_trajectory_reward for your own.
    """
    if isinstance(subject, Trajectory):
        return math.fsum(subject.rewards)
    return 1.0 if subject.metadata.get("correct") else 0.0


def create_overlong_penalty(*, max_tokens: int, buffer: int, factor: float = 1.0) -> Callable[[Sample], float]:
    """Create the reward of a sample minus DAPO's soft penalty of long answers, for RLTrainingConfig.shape_reward.

    It acts after the filter: dynamic sampling drops groups that are all right or all wrong, and different lengths would hide these in
    rewards with the penalty. See advantages.penalize_overlong.

    Args:
        max_tokens: length of a response (tokens with loss_mask > 0) from which on the whole penalty applies: the token budget.
        buffer: tokens before max_tokens in which it grows from 0, in [1, max_tokens].
        factor: the whole penalty, at least 0.

    Raises: ConfigError for a number out of range.
    """
    check_setting(1 <= buffer <= max_tokens, "buffer", buffer, f"in [1, max_tokens = {max_tokens}]")
    check_setting(0 <= factor < math.inf, "factor", factor, "a finite number, at least 0")
    return functools.partial(_penalize_overlong, max_tokens=max_tokens, buffer=buffer, factor=factor)


def _penalize_overlong(sample: Sample, *, max_tokens: int, buffer: int, factor: float) -> float:
    import torch  # not at the top: code in a sandbox has the rewards of this file without torch

    from rollouts.algorithms.advantages import penalize_overlong

    check_reward(sample)
    rewards = torch.tensor([sample.reward], dtype=torch.float64)
    lengths = torch.tensor(compute_response_lengths([sample.loss_mask]))
    return float(penalize_overlong(rewards, lengths, max_tokens=max_tokens, buffer=buffer, factor=factor))

"""Results of reward functions for an answer or an episode, beyond one number."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, SupportsFloat, cast

from rollouts.checks import iterate_awaitable, show_value
from rollouts.config_files import suggest
from rollouts.data.samples import count_spoken, describe_sample, find_actions, forget_turn_rewards, sample_messages
from rollouts.errors import ConfigError, RewardError, is_own_code
from rollouts.outcomes import (
    MetricResult,
    RewardDetails,
    StepOutput,
    check_flag,
    check_metrics,
    check_number,
    check_texts,
    parse_fields,
    parse_metrics,
    score_to_json,
)
from rollouts.steps import StepData, Steps
from rollouts.types import Sample, Turn, change

_logger = logging.getLogger(__name__)
_alignment_logger = logging.getLogger("rollouts.rewards.alignment")  # one name for the alignment of samples and of StepData


@dataclass(frozen=True)
class EvaluateResult:
    """Result of a reward function. A score alone is enough: EvaluateResult(1.0)."""

    score: float  # score of the whole answer or episode: the reward of its Sample
    reason: str = ""
    metrics: Mapping[str, MetricResult] = field(default_factory=dict[str, MetricResult])
    step_outputs: tuple[StepOutput, ...] | None = None  # rewards of single steps; None and () = only the whole is judged
    is_score_valid: bool = True  # False: there is no judgement, and the policy for failed rewards decides on the group
    error: str | None = None  # reason for the missing judgement
    abstains: bool = False  # the function does not judge this sample: a composite leaves it out, alone it counts as an error

    def __post_init__(self) -> None:
        check_texts(self, "reason")
        if self.error is not None:
            check_texts(self, "error")
        check_flag(self)
        check_number("EvaluateResult.score", self.score, required=self.is_score_valid and self.error is None)
        check_metrics("EvaluateResult.metrics", self.metrics)
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
        """Return the sample with this result as its reward; with_reward(sample, result) does the same.

        The score becomes sample.reward. Each of step_outputs becomes the reward of the turn that it names; other turns keep theirs. Without
        step_outputs (None or empty) only the whole episode is judged: the rewards of its turns become None, and the environment's payments
        stay in sample.episode.environment_reward. sample.reward_details become the metrics, step outputs and reason, or None without any.

        Raises: RewardError if the result is not valid, or a step output names no step of the sample or the same one as another output.
        """
        if not self.is_valid:
            raise RewardError(f"there is no reward for {describe_sample(sample)}: {self.error or self.reason or 'is_score_valid is False'}")
        details = None
        if self.metrics or self.step_outputs or self.reason:
            details = RewardDetails(metrics=dict(self.metrics), steps=self.step_outputs or (), reason=self.reason)
        return change(sample, reward=float(self.score), reward_details=details, turns=_reward_turns(sample, self.step_outputs))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values; a score that is not finite becomes None."""
        return {
            "score": score_to_json(self.score),
            "reason": self.reason,
            "metrics": {name: metric.to_dict() for name, metric in self.metrics.items()},
            "step_outputs": None if self.step_outputs is None else [output.to_dict() for output in self.step_outputs],
            "is_score_valid": self.is_score_valid,
            "error": self.error,
        } | ({"abstains": True} if self.abstains else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvaluateResult:
        """Build a result from what to_dict returned. Raises RewardError for another shape."""
        values = parse_fields(cls, data, "score")
        outputs = values.get("step_outputs")
        if outputs is not None:
            if not isinstance(outputs, list):
                raise RewardError(f"step_outputs is {show_value(outputs)}, expected a list of objects, or null")
            values["step_outputs"] = tuple(StepOutput.from_dict(output) for output in cast("list[Any]", outputs))
        values["metrics"] = parse_metrics(values.get("metrics"))
        return cls(**values)

    @classmethod
    def from_error(cls, error: str) -> EvaluateResult:
        """Create a result without a judgement; the policy for failed rewards decides on its worth."""
        return cls(math.nan, is_score_valid=False, error=error)


def parse_result(value: Any, sample: Sample, name: str) -> EvaluateResult:
    """Return a reward function's value for a sample as a valid EvaluateResult.

    Args:
        value: an EvaluateResult, or a finite number (float, int, bool, 0-d array or tensor).
        name: name of the function, for messages; see name_reward.

    Raises: RewardError with the found and the expected value.
    """
    result = as_result(value, name, describe_sample(sample))
    if not result.is_valid:
        why = result.error or result.reason or "is_score_valid is False"
        raise RewardError(why if is_whole(why) else f"reward function {name} gave no score for {describe_sample(sample)}: {why}")
    return result


def as_result(value: Any, name: str, where: str) -> EvaluateResult:
    """Return an EvaluateResult as it is, valid or not; wrap a finite number in one.

    Raises: RewardError for another value, naming the function by `name` and its subject by `where`.
    """
    if isinstance(value, EvaluateResult):
        return value
    try:
        number = float(value) if isinstance(value, (float, SupportsFloat)) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays and tensors of several elements; integers beyond a float
        number = None
    if number is None:
        found = f"{show_value(value)} ({type(value).__name__})"
        raise RewardError(f"reward function {name} returned {found} for {where}: {_advise(value)}")
    if not math.isfinite(number):
        raise RewardError(
            f"reward function {name} returned {number} for {where}: return a finite number, or raise an error and choose what happens then "
            "with on_error (--reward.on-error drop)"
        )
    return EvaluateResult(number)


def _advise(value: Any) -> str:
    """Return advice on what to return instead of a value that is no score."""
    score = "a number such as 1.0, or an EvaluateResult"
    if value is None:
        return f"return {score}; does a return statement miss?"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return f"the function has a yield, which makes it a generator; return {score}"
    if isinstance(value, Mapping):
        return "return one number of it, or EvaluateResult(score, metrics={NAME: MetricResult(number)})"
    return f"return {score}"


def check_values(values: Any, num_samples: int, name: str) -> list[Any]:
    """Return a group function's value as a list with one entry per sample. Raises RewardError if it is something else."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        found = f"{show_value(values)} ({type(values).__name__})"
        raise RewardError(
            f"reward function {name} returned {found} for {num_samples} samples: return a list of {num_samples} numbers, one for each, in "
            "order"
        )
    found = list(cast("Sequence[Any]", values))
    if len(found) != num_samples:
        raise RewardError(f"reward function {name} returned {len(found)} results for {num_samples} samples: return one for each, in order")
    return found


def describe_reward(function: Any) -> str:
    """Return the name of a reward function for messages."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return str(getattr(function, "reward_name", None) or getattr(function, "__qualname__", type(function).__name__))


def name_reward(function: Any) -> str:
    """Return the name of a reward function with the place of its definition, for messages: "f (FILE.py:LINE)".

    The place is left out for functions of installed packages, and for objects without Python code.
    """
    name, inner = describe_reward(function), function
    while inner is not None:
        function = inner
        parts = (function.func if isinstance(function, functools.partial) else None, *(getattr(function, a, None) for a in _INNER))
        inner = next((part for part in parts if callable(part)), None)
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    if not isinstance(code, CodeType) or not is_own_code(code.co_filename):
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


_INNER = ("__wrapped__", "function")  # attributes of decorators and adapters that hold the user's function


def is_whole(text: str) -> bool:
    """Whether the text of an error already names the reward function that it is about, so that a caller adds nothing to it."""
    return text.startswith(("reward function ", "component "))  # the latter in a composite


def then(value: Any, finish: Callable[[Any], Any]) -> Any:
    """Return finish(value); for an awaitable, an awaitable of that."""
    return _Finished(value, finish) if inspect.isawaitable(value) else finish(value)


@dataclass(frozen=True)
class _Finished:
    """An awaitable of finish(await value). It is no coroutine, which, thrown away before its start, would leave `value` as it is."""

    value: Awaitable[Any]
    finish: Callable[[Any], Any]

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.finish((yield from iterate_awaitable(self.value)))


def throw_away(value: object) -> None:
    """Close a result of a reward function that nobody will await: Python warns of a coroutine that never began."""
    while isinstance(value, _Finished):
        value = value.value
    if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        value.close()


def _reward_turns(sample: Sample, outputs: Sequence[StepOutput] | None) -> tuple[Turn, ...] | None:
    """Return a sample's turns with the rewards of the named steps, or None for each without outputs; None for one without turns."""
    if not outputs:
        return forget_turn_rewards(sample).turns
    steps = name_turns(sample)
    numbers = [number for number, _ in steps]
    turns = sample.turns or ()
    log_alignment("in", outputs, {describe_sample(sample): {n: turn.reward for n, turn in zip(numbers, turns, strict=False)}})
    places, problems = match_steps(outputs, steps)
    given = {numbers[place]: float(outputs[number].base_reward) for number, place in places.items()}
    log_alignment("out", list(problems.values()), {describe_sample(sample): given})
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


def log_alignment(direction: str, what: Sequence[Any], rewards: Mapping[str, Mapping[int, float | None]]) -> None:
    """Log the input or output of an alignment of step outputs and steps, at DEBUG, to the logger rollouts.rewards.alignment.

    Args:
        direction: in or out.
        what: results of reward functions, or outputs that are the reward of no step.
        rewards: base rewards by step index, of each episode by its name.
    """
    if not _alignment_logger.isEnabledFor(logging.DEBUG):
        return
    for value in what:
        _alignment_logger.debug("alignment %s: %s", direction, value)
    for name, by_step in rewards.items():
        _alignment_logger.debug("alignment %s: %s has base rewards %s by step index", direction, name, dict(by_step))


def name_turns(sample: Sample) -> list[tuple[int, str | None]]:
    """Return (number among the assistant's messages, name) of each turn of a sample, by which step outputs call it.

    The number counts all earlier messages of the assistant, also in the prompt and from environments that speak as the assistant. The name
    is the message's, if it has one. The response of a sample that is no episode is one turn. See samples.find_actions.
    """
    num_turns = 1 if sample.turns is None else len(sample.turns)
    messages = sample_messages(sample)
    if sample.messages is None and sample.turns is not None:  # without the conversation only the prompt is known
        start = count_spoken(messages, len(messages) - 1)
        return [(start + k, None) for k in range(num_turns)]
    places = find_actions(sample)
    if len(places) < num_turns:
        raise RewardError(
            f"{describe_sample(sample)} has {num_turns} turns, but its conversation has {len(places)} messages of the assistant: "
            "the turns of step outputs cannot be found"
        )
    return [(count_spoken(messages, place), messages[place].name) for place in places[:num_turns]]


def match_steps(outputs: Sequence[StepOutput], steps: Sequence[tuple[int, str | None]]) -> tuple[dict[int, int], dict[int, str]]:
    """Find the step that each output is about.

    Args:
        steps: (number, name) of each step; see name_turns.

    Returns: the step's position for each matched output's position, and the faults of the other outputs by their positions: no step has
        the number or name, several have it, or several outputs are about the same step (none of them counts).
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


@dataclass(frozen=True, kw_only=True)
class UnmatchedStep:
    """A step output that is not the reward of any step, and the reason."""

    episode: int  # position of its EvaluateResult in the batch; 0 for a single one
    output: StepOutput | None  # None = the whole result has no valid score, so none of its step outputs counts
    reason: str


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Steps with their base rewards, and the step outputs that could not be mapped."""

    steps: tuple[Any, ...]  # for one result: StepData; for a batch: a tuple of them per episode
    unmatched: tuple[UnmatchedStep, ...]  # in the order of episodes and step outputs; () = all are mapped

    def raise_unmatched(self) -> Alignment:
        """Return the alignment itself. Raises RewardError if anything is unmatched."""
        if self.unmatched:
            reasons = "; ".join(f"episode {step.episode}: {step.reason}" for step in self.unmatched)
            raise RewardError(f"{len(self.unmatched)} step outputs are the reward of no step: {reasons}")
        return self


def align_rewards_with_step_data(
    eval_results: EvaluateResult | Sequence[EvaluateResult],
    step_data: Steps | Sequence[Steps],
    mode: str = "pointwise",
    *,
    name_of: Callable[[StepData], str | None] | None = None,
) -> Alignment:
    """Return copies of steps with the base_reward of their step outputs. Nothing is changed in place or silently left out.

    A numeric step_index is a position among the assistant's messages of the conversation, from 0: after examples by the assistant in the
    prompt, the first action has a higher one, and an environment's messages as the assistant count, too. A step's number is read off its
    resulting_messages_history, where the action is at action_message (None = the assistant's last message); if the history is empty, the
    number is system_step_index. A step_index that is a text is the step's name.
    Steps that no output names keep their base_reward. Without step outputs (None or ()), only the whole is judged: the steps of the episode
    get base_reward None, like the turns of its sample (EvaluateResult.apply_to). The score is no step's reward; anchors.py puts it
    at the end of the episodes of a group in which no step's reward is known.

    Args:
        eval_results: a reward function's result for an episode; with mode "batch", for several.
        step_data: the steps of that episode; with mode "batch", of as many episodes, in the same order.
        mode: "pointwise" or "batch", as in the reward function.
        name_of: step -> its name; None = step_info["name"] if it is a text.

    Returns: the steps, and the step outputs that are the reward of none of them: an unknown step_index, a name that several steps have, a
        step that several outputs are about (none of these counts), or a result without a valid score.
    Raises: ConfigError for an unknown mode; RewardError if the number of results is not the number of episodes.
    """
    if mode not in ("pointwise", "batch"):
        raise ConfigError(f"mode is {mode!r}: {suggest(str(mode), ('pointwise', 'batch'))}")
    if mode == "pointwise":
        results, episodes = (cast("EvaluateResult", eval_results),), (cast("Steps", step_data),)
    else:
        results, episodes = tuple(cast("Sequence[EvaluateResult]", eval_results)), tuple(cast("Sequence[Steps]", step_data))
    if len(results) != len(episodes):
        raise RewardError(f"there are {len(results)} evaluation results for {len(episodes)} episodes, expected one for each")
    log_alignment("in", results, _list_rewards(episodes))
    unmatched: list[UnmatchedStep] = []
    aligned: list[Steps] = []
    for number, (result, steps) in enumerate(zip(results, episodes, strict=True)):
        rewarded, problems = _align_episode(result, steps, name_of or _read_name)
        aligned.append(rewarded)
        unmatched.extend(UnmatchedStep(episode=number, output=output, reason=reason) for output, reason in problems)
    log_alignment("out", unmatched, _list_rewards(aligned))
    return Alignment(steps=aligned[0] if mode == "pointwise" else tuple(aligned), unmatched=tuple(unmatched))


def _align_episode(
    result: EvaluateResult, steps: Steps, name_of: Callable[[StepData], str | None]
) -> tuple[Steps, list[tuple[StepOutput | None, str]]]:
    if not isinstance(cast("Any", result), EvaluateResult):
        raise RewardError(f"{result!r:.200} ({type(result).__name__}) is not an EvaluateResult: see rewards.results.as_result")
    if not result.is_valid:
        return tuple(steps), [(None, f"the result has no valid score: {result.error or result.reason or 'is_score_valid is False'}")]
    outputs = result.step_outputs or ()
    if not outputs:
        return tuple(replace(step, base_reward=None) for step in steps), []
    places, problems = match_steps(outputs, [(number_step(step), name_of(step)) for step in steps])
    rewards = {place: float(outputs[number].base_reward) for number, place in places.items()}
    rewarded = tuple(replace(step, base_reward=rewards[k]) if k in rewards else step for k, step in enumerate(steps))
    return rewarded, [(outputs[number], problem) for number, problem in problems.items()]


def number_step(step: StepData) -> int:
    """Return the position of a step's action among the assistant's messages, from 0."""
    history = step.resulting_messages_history
    if step.action_message is not None:
        return count_spoken(history, step.action_message)
    num_spoken = count_spoken(history, len(history))
    return num_spoken - 1 if num_spoken else step.system_step_index


def _read_name(step: StepData) -> str | None:
    name = step.step_info.get("name")
    return name if isinstance(name, str) else None


def _list_rewards(episodes: Sequence[Steps]) -> dict[str, dict[int, float | None]]:
    """Return the base rewards of each episode by step index, for the log."""
    return {f"episode {number}": {number_step(step): step.base_reward for step in steps} for number, steps in enumerate(episodes)}

"""From what a reward function said about steps to the steps themselves: step outputs become base rewards of StepData."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rollouts.config import suggest
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.results import EvaluateResult, StepOutput, match_steps
from rollouts.steps import StepData, Steps


@dataclass(frozen=True, kw_only=True)
class UnmatchedStep:
    """A step output that is not the reward of any step, and why."""

    episode: int  # place of its EvaluateResult in the batch; 0 for a single one
    output: StepOutput | None  # None = the whole result has no valid score, so none of its step outputs counts
    reason: str


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The steps with their base rewards, and what could not be mapped."""

    steps: tuple[Any, ...]  # of one result: StepData; of a batch: a tuple of them for each episode
    unmatched: tuple[UnmatchedStep, ...]  # in the order of episodes and step outputs; () = everything is in its place

    def raise_unmatched(self) -> Alignment:
        """The alignment itself. Raises RewardError if there is anything unmatched."""
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
    """Copies of steps with the base_reward that step outputs give them. Nothing is changed, and nothing is silently left out.

    A step_index that is a number is a place among the assistant's messages of the conversation, from 0: with examples by the assistant in
    the prompt, the first action has a higher one. A step's number is read off its resulting_messages_history, whose last message by the
    assistant is the action; where that is empty, it is system_step_index. A step_index that is a text is the step's name.
    Steps that no output names keep the base_reward that they have; the score is no step's reward (gigpo.py puts it at the end of an
    episode where step rewards are sparse).

    Args:
        eval_results: what a reward function said of an episode; with mode "batch", of several.
        step_data: the steps of that episode; with mode "batch", of as many episodes, in the same order.
        mode: "pointwise" or "batch", as of the reward function.
        name_of: the name of a step; None = step_info["name"] where it is a text.

    Returns: the steps, and the step outputs that are the reward of none of them: step_index unknown, name that several steps have, a step
        that several outputs are about (none of these counts), or a result without a valid score.
    Raises: ConfigError for another mode; RewardError for a number of results that is not the number of episodes.
    """
    if mode not in ("pointwise", "batch"):
        raise ConfigError(f"mode is {mode!r}: {suggest(str(mode), ('pointwise', 'batch'))}")
    if mode == "pointwise":
        results, episodes = (cast("EvaluateResult", eval_results),), (cast("Steps", step_data),)
    else:
        results, episodes = tuple(cast("Sequence[EvaluateResult]", eval_results)), tuple(cast("Sequence[Steps]", step_data))
    if len(results) != len(episodes):
        raise RewardError(f"there are {len(results)} evaluation results for {len(episodes)} episodes, expected one for each")
    _log("in", results, episodes)
    unmatched: list[UnmatchedStep] = []
    aligned: list[Steps] = []
    for number, (result, steps) in enumerate(zip(results, episodes, strict=True)):
        rewarded, problems = _align_episode(result, steps, name_of or _read_name)
        aligned.append(rewarded)
        unmatched.extend(UnmatchedStep(episode=number, output=output, reason=reason) for output, reason in problems)
    _log("out", unmatched, aligned)
    return Alignment(steps=aligned[0] if mode == "pointwise" else tuple(aligned), unmatched=tuple(unmatched))


def _align_episode(
    result: EvaluateResult, steps: Steps, name_of: Callable[[StepData], str | None]
) -> tuple[Steps, list[tuple[StepOutput | None, str]]]:
    if not isinstance(cast("Any", result), EvaluateResult):
        raise RewardError(f"{result!r:.200} ({type(result).__name__}) is no EvaluateResult: see rewards.results.as_result")
    if not result.is_valid:
        return tuple(steps), [(None, f"the result has no valid score: {result.error or result.reason or 'is_score_valid is False'}")]
    outputs = result.step_outputs or ()
    if not outputs:
        return tuple(steps), []
    places, problems = match_steps(outputs, [(number_step(step), name_of(step)) for step in steps])
    rewards = {place: float(outputs[number].base_reward) for number, place in places.items()}
    rewarded = tuple(replace(step, base_reward=rewards[k]) if k in rewards else step for k, step in enumerate(steps))
    return rewarded, [(outputs[number], problem) for number, problem in problems.items()]


def number_step(step: StepData) -> int:
    """The place of a step's action among the assistant's messages, from 0."""
    num_messages = sum(message.role == "assistant" for message in step.resulting_messages_history)
    return num_messages - 1 if num_messages else step.system_step_index


def _read_name(step: StepData) -> str | None:
    name = step.step_info.get("name")
    return name if isinstance(name, str) else None


def _log(direction: str, what: Sequence[Any], episodes: Sequence[Steps]) -> None:
    """At DEBUG: what goes into an alignment and what comes out of it."""
    logger = logging.getLogger(__name__)
    if not logger.isEnabledFor(logging.DEBUG):
        return
    for value in what:
        logger.debug("alignment %s: %s", direction, value)
    for number, steps in enumerate(episodes):
        rewards = {number_step(step): step.base_reward for step in steps}
        logger.debug("alignment %s: episode %d has base rewards %s by step index", direction, number, rewards)

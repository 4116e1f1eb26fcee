"""From groups to scored groups: a reward function is called, and a policy says what happens where it fails. Never a silent 0."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollouts.advantages import penalize_overlong
from rollouts.config import RewardConfig, check_setting
from rollouts.rewards.calls import Judgement, RewardFn, describe_reward, judge_now, judge_samples
from rollouts.rewards.results import parse_result
from rollouts.samples import check_reward, compute_response_lengths
from rollouts.steps import Trajectory
from rollouts.types import Group, Sample, Status

UNSCORED = frozenset({Status.FAILED, Status.ABORTED})
"""Samples that have no response to judge."""


def compute_reward(subject: Sample | Trajectory, environment: Any = None) -> float:
    """The default reward. Of a sample 1.0 if metadata["correct"] is true, else 0.0; of a trajectory the sum of its rewards.

    Args:
        environment: not read: what it pays is in the trajectory. It is here because rewards of the form compute_reward(trajectory,
            environment) have it; see trajectory_rewards.adapt_trajectory_reward for your own.
    """
    if isinstance(subject, Trajectory):
        return math.fsum(subject.rewards)
    return 1.0 if subject.metadata.get("correct") else 0.0


def parse_reward(value: Any, sample: Sample, name: str) -> float:
    """The score of what a reward function returned. Raises RewardError if it is neither a finite number nor a valid EvaluateResult."""
    return float(parse_result(value, sample, name).score)


async def call_reward(reward_fn: RewardFn, sample: Sample, config: RewardConfig | None = None) -> float:
    """One reward, tried once.

    An async function is awaited here; a sync one runs in a thread, so that it blocks nothing. A sync function that exceeds its
    deadline is left behind in its (daemon) thread; the error comes at the deadline all the same. Virtual time does not wait for threads:
    in a test with an autojump clock use an async function, or timeout_s=None.

    Raises: RewardError naming the function, the sample, and what happened.
    """
    (judgement,) = await judge_samples(reward_fn, (sample,), replace(config or RewardConfig(), on_error="raise"))
    if judgement.error is not None:
        raise judgement.error
    assert judgement.result is not None
    return float(judgement.result.score)


async def score_group(group: Group, reward_fn: RewardFn, config: RewardConfig | None = None) -> Group | None:
    """The group with a reward on every sample, or None if one failed and config.on_error is "drop".

    A reward function fails if it raises, takes longer than config.timeout_s, returns neither a finite number nor a valid EvaluateResult,
    or judges a step that the sample does not have. Then
        raise   the error ends the run;
        retry   it is called again, up to config.max_retries times, and then the error ends the run. metadata["num_reward_retries"] counts,
                of a call for the whole group in its first sample that is trained on;
        drop    the whole group is dropped, because a group without one of its samples has another baseline;
        zero    the sample gets the reward 0 and metadata["reward_error"]; the others of its group are what they are.
    What is dropped or zeroed is logged as a warning.

    Samples with status FAILED or ABORTED stay as they are. The others are scored concurrently; a sync function is called from several
    threads, except that the samples for which it needs less than calls.QUICK_S in all are scored one after another in one thread. A
    GroupReward (a batch reward function) is called once for all of them, and timeout_s is the deadline of that call.

    Raises: RewardError of the first sample (in the order of the group) that failed, if the policy is to raise or retries are used up;
        ConfigError if the reward is yet to be opened (calls.RewardSource).
    """
    config = config or RewardConfig()
    positions = [k for k, sample in enumerate(group) if sample.status not in UNSCORED]
    judgements = await judge_samples(reward_fn, [group[k] for k in positions], config)
    scored = list(group)
    for k, judgement in zip(positions, judgements, strict=True):
        if judgement.error is None:
            scored[k] = _count_retries(judgement)
        elif config.on_error == "drop":
            logging.getLogger(__name__).warning("group %d is dropped: %s", group[k].group_index, judgement.error)
            return None
        elif config.on_error == "zero":
            logging.getLogger(__name__).warning("the reward of a sample is set to 0: %s", judgement.error)
            scored[k] = replace(group[k], reward=0.0, metadata={**group[k].metadata, "reward_error": str(judgement.error)})
        else:
            raise judgement.error
    return tuple(scored)


def score_now(group: Group, reward_fn: RewardFn) -> Group:
    """The group with a reward on every sample, by a sync function that is called here: no deadline, and the first failure is raised."""
    name, values = describe_reward(reward_fn), judge_now(reward_fn, group)
    return tuple(parse_result(value, sample, name).apply_to(sample) for sample, value in zip(group, values, strict=True))


def summarize_rewards(samples: Sequence[Sample]) -> dict[str, float]:
    """What reward functions said about samples besides their scores; only what there is.

    Returns: reward/NAME, the mean score of each metric over the samples that have a valid one; num_invalid/NAME, those that have one that
        is not valid; num_rewards_zeroed, of failed rewards that count as 0 by policy; num_reward_retries.
    """
    scores: dict[str, list[float]] = {}
    counts: dict[str, float] = {}
    for sample in samples:
        for name, metric in sample.metadata.get("reward_metrics", {}).items():
            if metric["is_score_valid"]:
                scores.setdefault(f"reward/{name}", []).append(metric["score"])
            else:
                counts[f"num_invalid/{name}"] = counts.get(f"num_invalid/{name}", 0.0) + 1.0
        for name, count in (
            ("num_rewards_zeroed", float("reward_error" in sample.metadata)),
            ("num_reward_retries", float(sample.metadata.get("num_reward_retries", 0))),
        ):
            if count:
                counts[name] = counts.get(name, 0.0) + count
    return {name: _mean(values) for name, values in scores.items()} | counts


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


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # of the sum alone: the mean of floats is one
        return math.fsum(value / len(values) for value in values)


def _count_retries(judgement: Judgement) -> Sample:
    scored = judgement.scored
    assert scored is not None, f"a judgement without an error has no sample: {judgement}"
    if judgement.num_retries == 0:
        return scored
    return replace(scored, metadata={**scored.metadata, "num_reward_retries": judgement.num_retries})

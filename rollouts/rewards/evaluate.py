"""Scores of groups: a reward function is called, and a policy decides what happens if it fails. A failure is never a silent 0."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rollouts.algorithms.advantages import penalize_overlong
from rollouts.config import RewardConfig, check_setting
from rollouts.data.samples import check_reward, compute_response_lengths, forget_turn_rewards
from rollouts.outcomes import RewardDetails
from rollouts.rewards.calls import Judgement, RewardFn, describe_reward, judge_now, judge_samples
from rollouts.rewards.results import parse_result
from rollouts.steps import Trajectory
from rollouts.types import Group, Sample, Status

UNSCORED = frozenset({Status.FAILED, Status.ABORTED})
"""Statuses of samples without a response to judge."""


def compute_reward(subject: Sample | Trajectory, environment: Any = None) -> float:
    """Default reward: for a sample 1.0 if metadata["correct"] is true, else 0.0; for a trajectory the sum of its rewards.

    Args:
        environment: not read: its payments are in the trajectory. The parameter makes this a reward of the form compute_reward(trajectory,
            environment); see trajectory_rewards.adapt_trajectory_reward for your own.
    """
    if isinstance(subject, Trajectory):
        return math.fsum(subject.rewards)
    return 1.0 if subject.metadata.get("correct") else 0.0


async def score_group(group: Group, reward_fn: RewardFn, config: RewardConfig | None = None) -> Group | None:
    """Put a reward on every sample of a group; None if one failed and config.on_error is "drop".

    A reward function fails if it raises, takes longer than config.timeout_s, returns neither a finite number nor a valid EvaluateResult,
    or judges a step that the sample does not have. Then
        raise   the error ends the run;
        retry   it is called again, up to config.max_retries times, and then the error ends the run. reward_details.num_retries counts;
                for a call for the whole group, in its first sample that is trained on;
        drop    the whole group is dropped, because a group without one of its samples has another baseline;
        zero    the sample gets the reward 0 for its whole (samples.forget_turn_rewards), and reward_details.error; the others of its
                group stay as they are.
        Each dropped group and zeroed reward is logged as a warning.

    Samples with status FAILED or ABORTED stay as they are. The others are scored concurrently; a sync function is called from several
    threads, except that the samples that take less than calls.QUICK_S in total are scored in turn in one thread. A GroupReward (a batch
    reward function) is called once for all of them, and timeout_s is the deadline of that call.

    Raises: RewardError of the first sample (in the order of the group) that failed, if the policy is to raise or retries are used up;
        ConfigError if the reward is still to be opened (calls.RewardSource).
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
            judged = forget_turn_rewards(group[k])
            details = replace(group[k].reward_details or RewardDetails(), error=str(judgement.error))
            scored[k] = replace(judged, reward=0.0, reward_details=details)
        else:
            raise judgement.error
    return tuple(scored)


def score_now(group: Group, reward_fn: RewardFn) -> Group:
    """Put a reward on every sample of a group by a sync function, called here: no deadline, and the first failure is raised."""
    name, values = describe_reward(reward_fn), judge_now(reward_fn, group)
    return tuple(parse_result(value, sample, name).apply_to(sample) for sample, value in zip(group, values, strict=True))


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
    check_reward(sample)
    rewards = torch.tensor([sample.reward], dtype=torch.float64)
    lengths = torch.tensor(compute_response_lengths([sample.loss_mask]))
    return float(penalize_overlong(rewards, lengths, max_tokens=max_tokens, buffer=buffer, factor=factor))


def _count_retries(judgement: Judgement) -> Sample:
    scored = judgement.scored
    assert scored is not None, f"a judgement without an error has no sample: {judgement}"
    if judgement.num_retries == 0:
        return scored
    return replace(scored, reward_details=replace(scored.reward_details or RewardDetails(), num_retries=judgement.num_retries))

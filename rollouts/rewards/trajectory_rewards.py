"""Rewards of episodes in the form of reinforcement learning: functions of a Trajectory, and rewards given by the environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rollouts.checks import is_async_function
from rollouts.data.samples import describe_sample, find_actions, sample_messages
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.results import describe_reward
from rollouts.steps import Trajectory
from rollouts.types import Sample


def environment_reward(sample: Sample) -> float:
    """Return the environment's reward of an episode: sample.episode.environment_reward, or the sum of the rewards of its turns.

    Raises: RewardError for a sample that is no episode, or whose turns have no rewards.
    """
    if sample.episode is not None:
        return float(sample.episode.environment_reward)
    if sample.turns is None:
        raise RewardError(f"{describe_sample(sample)} is no episode: Sample.episode and Sample.turns are None")
    known = [turn.reward for turn in sample.turns if turn.reward is not None]
    if sample.turns and not known:
        raise RewardError(f"{describe_sample(sample)}: none of its {len(sample.turns)} turns has a reward (all are None)")
    return sum(known)


def sample_trajectory(sample: Sample) -> Trajectory:
    """Return a sample as a trajectory.

    States are the texts that the policy saw since its last action (before the first, the whole prompt), actions its texts, rewards those of
    its turns, 0 if unknown. A sample that is no episode is one step, with its reward if it has one.
    """
    places = frozenset(() if sample.turns == () else find_actions(sample))
    states: list[str] = []
    actions: list[str] = []
    seen: list[str] = []
    for place, message in enumerate(sample_messages(sample)):
        if place in places:
            states.append("\n".join(seen))
            actions.append(message.content or "")
            seen = []
        else:
            seen.append(message.content or "")
    rewards = (sample.reward or 0.0,) if sample.turns is None else tuple(turn.reward or 0.0 for turn in sample.turns)
    dones = tuple(k == len(actions) - 1 for k in range(len(actions)))
    if len(rewards) != len(actions):
        raise RewardError(
            f"{describe_sample(sample)} has {len(rewards)} turns, but {len(actions)} actions in its conversation: keep the whole "
            "conversation in Sample.messages"
        )
    return Trajectory(states=tuple(states), actions=tuple(actions), rewards=rewards, dones=dones)


def adapt_trajectory_reward(reward_fn: Callable[..., Any], environment: Any = None) -> Callable[[Sample], Any]:
    """Adapt compute_reward(trajectory, environment) or compute_reward(trajectory) to a reward of samples, for RolloutConfig.reward_fn.

    Args:
        reward_fn: function of two arguments, or of one such as `lambda trajectory: trajectory.rewards[-1]`; sync or async.
        environment: the second argument: an environment, or its settings. It is the same for all samples: an episode's own environment is
            closed when its sample is scored, and facts that only it knows belong into the info of its steps.

    Raises: ConfigError if the function takes another number of arguments, or two and there is no environment.
    """
    name = describe_reward(reward_fn)
    signature = inspect.signature(reward_fn)
    if _takes(signature, 2) and environment is not None:
        arguments = (environment,)
    elif _takes(signature, 1):
        arguments = ()
    elif _takes(signature, 2):
        raise ConfigError(f"reward function {name}{signature} takes an environment, but environment is None: pass the second argument")
    else:
        raise ConfigError(f"reward function {name}{signature} must take (trajectory, environment) or (trajectory)")

    def reward(sample: Sample) -> Any:
        return reward_fn(sample_trajectory(sample), *arguments)

    async def reward_async(sample: Sample) -> Any:
        return await reward(sample)

    chosen = reward_async if is_async_function(reward_fn) else reward
    chosen.__qualname__ = name
    return chosen


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*(None,) * num_arguments)
    except TypeError:
        return False
    return True

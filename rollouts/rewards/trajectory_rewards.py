"""Rewards of episodes as reinforcement learning writes them: functions of a Trajectory, and rewards that the environment has given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rollouts.checks import is_async_function
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.calls import describe_reward
from rollouts.rewards.results import name_turns
from rollouts.samples import describe_sample, sample_messages
from rollouts.steps import Trajectory
from rollouts.types import Sample


def environment_reward(sample: Sample) -> float:
    """What the environment paid for an episode: metadata["environment_reward"], else the sum of the rewards of its turns.

    Raises: RewardError for a sample that is no episode.
    """
    if "environment_reward" in sample.metadata:
        return float(sample.metadata["environment_reward"])
    if sample.turns is None:
        raise RewardError(f"{describe_sample(sample)} is no episode: it has neither turns nor metadata['environment_reward']")
    return sum(turn.reward for turn in sample.turns)


def sample_trajectory(sample: Sample) -> Trajectory:
    """A sample as a trajectory: states are the texts that the policy saw since its last action (before the first, the whole prompt),
    actions what it wrote, rewards those of its turns. A sample that is no episode is one step, paid with its reward if it has one.
    """
    first = name_turns(sample)[0][0] if sample.turns != () else 0
    states: list[str] = []
    actions: list[str] = []
    seen: list[str] = []
    number = 0
    for message in sample_messages(sample):
        if message.role == "assistant" and number >= first and sample.turns != ():
            states.append("\n".join(seen))
            actions.append(message.content or "")
            seen = []
        else:
            seen.append(message.content or "")
        number += message.role == "assistant"
    rewards = (sample.reward or 0.0,) if sample.turns is None else tuple(turn.reward for turn in sample.turns)
    dones = tuple(k == len(actions) - 1 for k in range(len(actions)))
    if len(rewards) != len(actions):
        raise RewardError(
            f"{describe_sample(sample)} has {len(rewards)} turns, but {len(actions)} actions in its conversation: keep the whole "
            "conversation in metadata['messages']"
        )
    return Trajectory(states=tuple(states), actions=tuple(actions), rewards=rewards, dones=dones)


def adapt_trajectory_reward(reward_fn: Callable[..., Any], environment: Any = None) -> Callable[[Sample], Any]:
    """A reward of samples, for RolloutConfig.reward_fn, of compute_reward(trajectory, environment) or compute_reward(trajectory).

    Args:
        reward_fn: of two arguments, or of one such as `lambda trajectory: trajectory.rewards[-1]`; sync or async.
        environment: the second argument: an environment, or its settings. It is the same for all samples: an episode's own is closed when
            its sample is scored, and what only that knows belongs into the info of its steps.

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
        raise ConfigError(f"reward function {name}{signature} is to be called with (trajectory, environment) or (trajectory)")

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

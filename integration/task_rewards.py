"""The reward of a task: the user's instead of the task's own, and opened where it is something that holds processes or connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from integration.sections import RewardSection
from integration.tasks import Task
from rollouts.errors import ConfigError
from rollouts.rewards.calls import RewardSource
from rollouts.rewards.reward_functions import load_reward
from rollouts.rewards.sandboxed import SandboxedReward


def use_own_reward(section: RewardSection, task: Task) -> Task:
    """The task with the reward function that the user named, if there is one. Raises as load_task_reward."""
    reward_fn = load_task_reward(section)
    return task if reward_fn is None else replace(task, reward_fn=reward_fn)


def load_task_reward(section: RewardSection) -> Any:
    """The reward function that the user named, or None.

    Raises: ConfigError if it is not there, or there is none to put into a sandbox.
    """
    if section.function is None:
        if section.sandboxed:
            raise ConfigError("reward.sandboxed is True, but reward.function is None: name the function, --reward.function file.py:name")
        return None
    return SandboxedReward(section.function) if section.sandboxed else load_reward(section.function)


@asynccontextmanager
async def open_task(task: Task) -> AsyncGenerator[Task]:
    """The task with a reward that works inside the block: one that is a RewardSource is opened, and closed afterwards."""
    source = task.reward_fn
    if not isinstance(source, RewardSource):
        yield task
        return
    async with source.open_reward() as reward_fn:
        yield replace(task, reward_fn=reward_fn)

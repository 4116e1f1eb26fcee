"""The reward function of the RL stage: the task's rule, or what stands in its place and is open while the stage lasts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.command_line import MODEL_DIRECTORY, RUN_FILE
from integration.config import Config
from integration.tasks import Task
from rollouts.backends.reward_models import check_reward_model
from rollouts.errors import ConfigError
from rollouts.rewards.reward_model import open_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@asynccontextmanager
async def open_training_reward(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> AsyncGenerator[Callable[..., Any] | None]:
    """What scores rollouts: config.reward.model, or the task's own reward. Evaluations take the task's own all the same.

    Args:
        tokenizer: the policy's.
    """
    section = config.reward
    if section.model is None:
        yield task.reward_fn
        return
    async with open_reward_model(
        find_reward_model(section.model),
        policy_tokenizer=tokenizer,
        dtype=section.model_dtype,
        device=config.model.device if section.model_device is None else section.model_device,
        max_tokens_per_batch=section.model_tokens_per_batch,
        trust_remote_code=config.model.trust_remote_code,
    ) as reward:
        yield reward


def check_reward(config: Config) -> None:
    """Raise ConfigError if config.reward.model is no reward model. Loads no weights."""
    if config.reward.model is not None:
        check_reward_model(find_reward_model(config.reward.model), trust_remote_code=config.model.trust_remote_code)


def find_reward_model(path: str | Path) -> Path:
    """The model directory that a path means: itself, or `model` in the directory of a run of integration.train_reward_model.

    Raises: ConfigError for a run that has not ended.
    """
    directory = Path(path)
    if not (directory / RUN_FILE).is_file():
        return directory
    if not (directory / MODEL_DIRECTORY).is_dir():
        again = f"python -m integration.train_reward_model --output-dir {directory} --resume"
        raise ConfigError(f"{directory} is a run that has no {MODEL_DIRECTORY} yet: `{again}` goes on with it")
    return directory / MODEL_DIRECTORY

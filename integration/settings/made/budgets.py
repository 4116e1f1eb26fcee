"""Token budgets of responses, actions, episodes and the built-in model's context: the user's, or the task's defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.settings.sections.episodes import (
    EPISODE_TASKS,
    default_turns,
    observation_tokens,
    resolve_episode_config,
)
from rollouts.agents.config import EpisodeConfig

if TYPE_CHECKING:
    from integration.settings.config import Config

RESPONSE_TOKENS = {"sort": 8, "sort-long": 10}  # default token budget of a response
OWN_DATA_RESPONSE_TOKENS = 512  # default token budget of a response to the user's data
LARGEST_CONTEXT = 4096  # largest default context of the built-in model, in tokens
CONTEXT_TOKENS = 128  # default context of the built-in model for tasks with a single turn, in tokens


def response_tokens(config: Config) -> int:
    """Return the token budget of a response, or of all actions of an episode: the user's, or the task's default."""
    if config.task in EPISODE_TASKS:
        limits = episode_config(config)
        actions = limits.max_turns * turn_tokens(config)
        return actions if limits.max_tokens is None else min(actions, limits.max_tokens)
    return config.generation.max_tokens or RESPONSE_TOKENS.get(config.task, OWN_DATA_RESPONSE_TOKENS)


def turn_tokens(config: Config) -> int:
    """Return the token budget of an action in a task with several turns: the user's, or the task's default."""
    return config.generation.max_tokens or EPISODE_TASKS[config.task].turn_tokens


def episode_config(config: Config, *, chat: bool | None = None) -> EpisodeConfig:
    """Return the limits and error policy of an episode. chat: the default of episode.chat."""
    return resolve_episode_config(config.episode, max_turns=default_turns(config.task, config.environment), chat=chat)


def episode_tokens(config: Config) -> int:
    """Return the maximum tokens of an episode with the built-in model: actions and, if the task knows them, observations."""
    return response_tokens(config) + (episode_config(config).max_turns + 1) * observation_tokens(config.task, config.environment)


def context_tokens(config: Config) -> int:
    """Return the context of the built-in model in tokens: the user's, or the task's need."""
    if config.task not in EPISODE_TASKS:
        return config.model.max_length or CONTEXT_TOKENS
    return config.model.max_length or max(EPISODE_TASKS[config.task].context, min(episode_tokens(config), LARGEST_CONTEXT))

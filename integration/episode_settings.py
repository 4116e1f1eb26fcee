"""Settings of tasks that are played in several turns: how an episode goes on, and the world that it goes on in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from rollouts.config import check_setting
from rollouts.environments.tool_environment import OnToolError
from rollouts.episode_config import EpisodeConfig, OnEpisodeError, OnRewrite
from rollouts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EpisodeDefaults:
    """What a task's episodes are like where the user says nothing."""

    max_turns: int
    turn_tokens: int  # most tokens of an action
    context: int  # tokens of the built-in model, which hold an episode of max_turns
    observation: int = 0  # tokens that the built-in model is shown before an action, errors aside; 0 = the environment is not known
    settings: tuple[str, ...] = ()  # of the environment section
    has_tools: bool = False


EPISODE_TASKS: Mapping[str, EpisodeDefaults] = MappingProxyType(
    {
        "grid_world": EpisodeDefaults(
            max_turns=12, turn_tokens=4, context=256, observation=8, settings=("size", "num_holes", "step_reward")
        ),
        "calculator": EpisodeDefaults(
            max_turns=5, turn_tokens=24, context=256, observation=16, settings=("max_digits", "max_operations"), has_tools=True
        ),
        "environment": EpisodeDefaults(max_turns=8, turn_tokens=32, context=1024, settings=("factory", "expert")),
    }
)


@dataclass(frozen=True, kw_only=True)
class EpisodeSection:
    """How an episode goes on, and where it ends; of tasks with several turns. generation.max_tokens is of each action."""

    max_turns: int | None = None  # actions of an episode; None = the task's own
    max_tokens: int | None = None  # of all actions together; None = no other limit than that of each
    max_context: int | None = None  # tokens that the model may see and write at once; None = what the engine allows
    stop_regex: str | None = None  # an action in whose text it is found is the last one
    cut_is_truncated: bool = False  # an episode whose last action reached its token budget counts as truncated, whatever ended it
    system_prompt: str | None = None  # before a conversation that has none
    chat: bool | None = None  # whether the chat template is used; None = if the model has one of its own
    on_rewrite: OnRewrite = "branch"  # the chat template changes what was said before: a further context, or an error
    on_environment_error: OnEpisodeError = "raise"  # end the run, begin the episode again, or drop its group
    max_retries: int = 2  # with "retry"
    on_tool_error: OnToolError = "observe"  # a tool that fails: the model is told, or it is an error of the environment
    timeout_s: float | None = 60.0  # of each call of the environment
    in_thread: bool = False  # call the environment in threads, so that a slow one does not stop everything

    def __post_init__(self) -> None:
        check_setting(self.max_turns is None or self.max_turns >= 1, "episode.max_turns", self.max_turns, "at least 1, or None")
        resolve_episode_config(self, max_turns=1)  # which knows what is wrong with the others


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """The world of a task with several turns. None = the task's own; each task has only some of these."""

    factory: str | None = None  # of task environment: file.py:name or module:name of what makes an environment for each episode
    expert: str | None = None  # of task environment: a function of an ActionRequest that says what a demonstration does
    size: int | None = None  # of grid_world: cells in a row and in a column
    num_holes: int | None = None  # of grid_world: cells that end the episode without reward
    step_reward: float | None = None  # of grid_world: of every action that does not reach the goal
    max_digits: int | None = None  # of calculator: of each number
    max_operations: int | None = None  # of calculator: most operators of a problem

    def __post_init__(self) -> None:
        check_setting(self.size is None or 2 <= self.size <= 10, "environment.size", self.size, "2 to 10, or None")
        check_setting(self.step_reward is None or self.step_reward <= 0, "environment.step_reward", self.step_reward, "at most 0, or None")
        for name, least in (("num_holes", 0), ("max_digits", 1), ("max_operations", 1)):
            value = getattr(self, name)
            check_setting(value is None or value >= least, f"environment.{name}", value, f"at least {least}, or None")

    def choose(self, name: str, default: Any) -> Any:
        """The user's number, or the task's."""
        value = getattr(self, name)
        return default if value is None else value


def default_turns(task: str, environment: EnvironmentSection) -> int:
    """Actions of an episode where the user says nothing.

    More of them on a larger map, half as many again as its longest way has, and for more operations, two beside calls and answer.
    """
    return max(EPISODE_TASKS[task].max_turns, 3 * ((environment.size or 1) - 1), (environment.max_operations or 0) + 3)


def observation_tokens(task: str, environment: EnvironmentSection) -> int:
    """Tokens that the built-in model is shown before an action: a problem with longer numbers has more of them. 0 = it is not known."""
    digits, operations = environment.max_digits or 1, environment.max_operations or 1
    written = (digits + 1) * (operations + 1) + 2  # numbers, operators, = and line ends
    return max(EPISODE_TASKS[task].observation, written if task == "calculator" else 0)


def resolve_episode_config(section: EpisodeSection, *, max_turns: int, chat: bool | None = None) -> EpisodeConfig:
    """What the library's episodes get.

    Args:
        max_turns: of the task, where the user gave none.
        chat: likewise.
    """
    return EpisodeConfig(
        max_turns=section.max_turns or max_turns,
        max_tokens=section.max_tokens,
        max_context=section.max_context,
        stop_regex=section.stop_regex,
        cut_is_truncated=section.cut_is_truncated,
        system_prompt=section.system_prompt,
        chat=chat if section.chat is None else section.chat,
        on_rewrite=section.on_rewrite,
        on_error=section.on_environment_error,
        max_retries=section.max_retries,
        timeout_s=section.timeout_s,
        in_thread=section.in_thread,
    )


def check_episode_sections(task: str, episode: EpisodeSection, environment: EnvironmentSection) -> None:
    """Raise ConfigError for settings of another task than this."""
    known = EPISODE_TASKS[task].settings if task in EPISODE_TASKS else ()
    for name in _find_changes(environment):
        if name not in known:
            owners = " or ".join(name_ for name_, defaults in EPISODE_TASKS.items() if name in defaults.settings)
            raise ConfigError(
                f"environment.{name} is {getattr(environment, name)!r}, but the task is {task!r}, which has no such setting: "
                f"add --task {owners}, or leave --environment.{name.replace('_', '-')} out"
            )
    changed = _find_changes(episode)
    if changed and task not in EPISODE_TASKS:
        raise ConfigError(
            f"episode.{changed[0]} is {getattr(episode, changed[0])!r}, but an episode of the task {task!r} is one answer: choose a task "
            f"with several turns (--task {', '.join(EPISODE_TASKS)}), or leave --episode.{changed[0].replace('_', '-')} out"
        )
    if "on_tool_error" in changed and not EPISODE_TASKS[task].has_tools:
        owners = " or ".join(name for name, defaults in EPISODE_TASKS.items() if defaults.has_tools)
        raise ConfigError(
            f"episode.on_tool_error is {episode.on_tool_error!r}, but the command gives the task {task!r} no tools: add --task {owners}, "
            "say it to the ToolEnvironment of your own environment, or leave --episode.on-tool-error out"
        )


def _find_changes(section: EpisodeSection | EnvironmentSection) -> list[str]:
    """Settings that are not the default."""
    return [field.name for field in fields(section) if getattr(section, field.name) != field.default]

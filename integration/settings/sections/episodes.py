"""Settings of tasks with several turns: the limits of an episode and its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from rollouts.agents.config import EpisodeConfig, OnEpisodeError, OnRewrite
from rollouts.checks import parse_json, refuse_constant
from rollouts.config import check_setting
from rollouts.environments.protocol import OnToolError
from rollouts.errors import ConfigError, redact


@dataclass(frozen=True, kw_only=True)
class EpisodeDefaults:
    """Defaults of a task's episodes."""

    max_turns: int  # maximum actions of an episode
    turn_tokens: int  # maximum tokens of an action
    context: int  # context of the built-in model in tokens; fits an episode of max_turns
    observation: int = 0  # tokens of an observation for the built-in model, errors aside; 0 = unknown environment
    settings: tuple[str, ...] = ()  # fields of EnvironmentSection that the task reads
    has_tools: bool = False  # the environment offers tools


EPISODE_TASKS: Mapping[str, EpisodeDefaults] = MappingProxyType(
    {
        "grid_world": EpisodeDefaults(
            max_turns=12, turn_tokens=4, context=256, observation=8, settings=("size", "num_holes", "step_reward")
        ),
        "calculator": EpisodeDefaults(
            max_turns=5, turn_tokens=24, context=256, observation=16, settings=("max_digits", "max_operations"), has_tools=True
        ),
        "environment": EpisodeDefaults(
            max_turns=8, turn_tokens=32, context=1024, settings=("factory", "expert", "parameters", "state_key", "similarity")
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class EpisodeSection:
    """Limits and error policy of an episode, for tasks with several turns. generation.max_tokens limits each action."""

    max_turns: int | None = None  # maximum actions of an episode; None = the task's default
    max_tokens: int | None = None  # maximum tokens of all actions together; None = no limit beyond that of each action
    max_context: int | None = None  # maximum tokens of context and action together; None = the engine's limit
    stop_regex: str | None = None  # regular expression; an action that contains a match ends the episode
    cut_is_truncated: bool = False  # count an episode whose last action reached its token budget as truncated, whatever ended it
    system_prompt: str | None = None  # system prompt of conversations without one
    chat: bool | None = None  # apply the chat template; None = only if the model has one
    # reaction to a chat template that rewrites earlier messages: branch = start a further context; raise = end the run with an error
    on_rewrite: OnRewrite = "branch"
    # reaction to a failing environment: raise = end the run; retry = play the episode again; drop = drop the group of the episode
    on_environment_error: OnEpisodeError = "raise"
    max_retries: int = 2  # further attempts of an episode, with on_environment_error retry
    on_tool_error: OnToolError = "observe"  # reaction to a failing tool: observe = tell the model; raise = count as an environment error
    timeout_s: float | None = 60.0  # seconds to wait for each call of the environment; None = no limit
    in_thread: bool = False  # call the environment in threads, so that a slow one does not block the others

    def __post_init__(self) -> None:
        check_setting(self.max_turns is None or self.max_turns >= 1, "episode.max_turns", self.max_turns, "at least 1, or None")
        resolve_episode_config(self, max_turns=1)  # EpisodeConfig checks the other fields


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """The environment of a task with several turns. Each task reads some of the fields; None = the task's default."""

    factory: str | None = None  # task environment: file.py:name or module:name of a function that creates an environment for each episode
    expert: str | None = None  # task environment: function ActionRequest -> action of a demonstration, for SFT
    parameters: tuple[str, ...] = ()  # task environment: NAME=VALUE ... for config.parameters of reset; VALUE is JSON, or else text
    state_key: str | None = None  # task environment: function observation -> key of its anchor state, for gigpo
    similarity: float | None = None  # task environment: minimum similarity, in (0, 1], of keys that share an anchor state, for gigpo
    size: int | None = None  # task grid_world: cells per row and column, 2 to 10
    num_holes: int | None = None  # task grid_world: cells that end the episode without reward
    step_reward: float | None = None  # task grid_world: reward of an action that does not reach the goal, at most 0
    max_digits: int | None = None  # task calculator: maximum digits of a number
    max_operations: int | None = None  # task calculator: maximum operators of a problem

    def __post_init__(self) -> None:
        parse_parameters(self.parameters)
        similar = self.similarity is None or 0 < self.similarity <= 1
        check_setting(similar, "environment.similarity", self.similarity, "more than 0, at most 1, or None")
        check_setting(self.size is None or 2 <= self.size <= 10, "environment.size", self.size, "2 to 10, or None")
        check_setting(self.step_reward is None or self.step_reward <= 0, "environment.step_reward", self.step_reward, "at most 0, or None")
        for name, least in (("num_holes", 0), ("max_digits", 1), ("max_operations", 1)):
            value = getattr(self, name)
            check_setting(value is None or value >= least, f"environment.{name}", value, f"at least {least}, or None")

    def choose(self, name: str, default: Any) -> Any:
        """Return the user's value of the field `name`, or `default`."""
        value = getattr(self, name)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class AgentSection:
    """A program of yours that plays the rollouts of RL and evaluation through a gateway. generation.max_tokens limits each answer."""

    command: str | None = None  # program with its arguments, such as 'python my_agent.py', started once for each sample; None = no program
    function: str | None = None  # function of an AgentTask, plain or async, in place of a program: file.py:name or module:name; None = none
    max_answers: int | None = None  # maximum number of answers of the model to a program; None = no limit
    max_tokens: int | None = None  # maximum number of tokens sampled for a program, checked before each request; None = no limit
    timeout_s: float | None = 600.0  # seconds until a program is stopped; None = no limit
    max_programs: int = 64  # maximum number of programs that run at the same time
    on_error: OnEpisodeError = "raise"  # after a program failed: raise = end training; retry = start it again; drop = leave its group out
    max_retries: int = 2  # further attempts of a program that failed, with on_error retry
    failed_reward: float | None = None  # reward of a program that failed after an answer, whatever judges others; None = on_error decides
    chat: bool | None = None  # apply the chat template; None = only with a model of your own that has one

    def __post_init__(self) -> None:
        both = self.command is not None and self.function is not None
        check_setting(not both, "agent.function", self.function, "None beside agent.command: leave one of them out")
        if self.command is not None:
            from rollouts.gateway.processes import split_command  # imports trio, which the help does not need

            try:
                split_command(self.command)
            except ConfigError as error:
                raise ConfigError(f"agent.command is {redact(self.command)!r}: {error}") from error
            if redact(self.command) != self.command:
                raise ConfigError(
                    f"agent.command is {redact(self.command)!r}, with a key, a password or a query of an address, which the files of a run "
                    "and the list of processes would show: export it as a variable, which the program gets as it is"
                )
        for name in ("max_answers", "max_tokens", "max_programs"):
            value = getattr(self, name)
            good = (value is None and name != "max_programs") or (isinstance(value, int) and value >= 1)
            check_setting(good, f"agent.{name}", value, "at least 1" if name == "max_programs" else "at least 1, or None")
        check_setting(self.max_retries >= 0, "agent.max_retries", self.max_retries, "at least 0")
        check_setting(self.timeout_s is None or self.timeout_s > 0, "agent.timeout_s", self.timeout_s, "seconds above 0, or None")

    @property
    def is_used(self) -> bool:
        """Whether a program or a function plays the rollouts."""
        return self.command is not None or self.function is not None


def check_agent(task: str, agent: AgentSection) -> None:
    """Raise ConfigError for a task whose environment makes its own problems, which a program cannot be given."""
    if agent.is_used and task in ("grid_world", "environment"):
        name = "command" if agent.command is not None else "function"
        raise ConfigError(
            f"agent.{name} is {getattr(agent, name)!r}, but the problems of the task {task!r} are those of its environment: add --task "
            f"calculator, or your own rows with --task jsonl, or leave --agent.{name} out"
        )


def parse_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Return NAME=VALUE texts as a mapping. A VALUE that is JSON is decoded; any other stays text.

    Raises: ConfigError for a pair without a name, or for a name given twice.
    """
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not (separator and name):
            raise ConfigError(
                f"environment.parameters has {pair!r}: write --environment.parameters NAME=VALUE ..., such as depth=3 or names='[\"a\"]'"
            )
        if name in parameters:
            raise ConfigError(f"environment.parameters has {name!r} twice: leave one of them out")
        try:
            parameters[name] = parse_json(text, parse_constant=refuse_constant)
        except ValueError:
            parameters[name] = text
    return parameters


def default_turns(task: str, environment: EnvironmentSection) -> int:
    """Return the default maximum of actions of an episode.

    It grows with the map (1.5 times its longest path) and with the number of operations (two more than calls and answer).
    """
    return max(EPISODE_TASKS[task].max_turns, 3 * ((environment.size or 1) - 1), (environment.max_operations or 0) + 3)


def observation_tokens(task: str, environment: EnvironmentSection) -> int:
    """Return the tokens of an observation for the built-in model, which grow with the numbers of a problem. 0 = unknown."""
    digits, operations = environment.max_digits or 1, environment.max_operations or 1
    written = (digits + 1) * (operations + 1) + 2  # numbers, operators, = and line ends
    return max(EPISODE_TASKS[task].observation, written if task == "calculator" else 0)


def resolve_episode_config(section: EpisodeSection, *, max_turns: int, chat: bool | None = None) -> EpisodeConfig:
    """Return the library's configuration of an episode.

    Args:
        max_turns: the task's default, used if the section has none.
        chat: the task's default, used if the section has none.
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
    """Raise ConfigError for settings of another task."""
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
            f"episode.{changed[0]} is {getattr(episode, changed[0])!r}, but the task {task!r} has a single turn: choose a task "
            f"with several turns (--task {', '.join(EPISODE_TASKS)}), or leave --episode.{changed[0].replace('_', '-')} out"
        )
    if "on_tool_error" in changed and not EPISODE_TASKS[task].has_tools:
        owners = " or ".join(name for name, defaults in EPISODE_TASKS.items() if defaults.has_tools)
        raise ConfigError(
            f"episode.on_tool_error is {episode.on_tool_error!r}, but this command gives the task {task!r} no tools: add --task {owners}, "
            "set on_tool_error of the ToolEnvironment in your own environment, or leave --episode.on-tool-error out"
        )


def _find_changes(section: EpisodeSection | EnvironmentSection) -> list[str]:
    """Return the names of settings that differ from their defaults."""
    return [field.name for field in fields(section) if getattr(section, field.name) != field.default]

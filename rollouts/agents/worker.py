"""RLRolloutWorker: one task, one policy, one environment. Its run_episode returns steps, messages and the ground truth.

task = TaskDefinitionModel.from_dict({"task": "What is 2+3*4?", "ground_truth": "14", "max_turns": 4})
worker = RLRolloutWorker(policy, create_calculator_environment(), task)
steps, messages, ground_truth = await worker.run_episode()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Episode
from rollouts.agents.policies import AgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.tokenize import parse_prompt_content
from rollouts.checks import parse_json
from rollouts.config import check_positive
from rollouts.config_files import from_dict
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.errors import ConfigError
from rollouts.rewards.reward_functions import load_reward
from rollouts.steps import StepData
from rollouts.types import Message, Prompt


@dataclass(frozen=True, kw_only=True)
class TaskDefinitionModel:
    """Definition of a task: the question, its limits and its judgement, for a rollout worker. JSON values throughout."""

    task: Any = ""  # question for the model: a text, or a list of messages; "" = the environment asks
    ground_truth: Any = None  # right answer, for the reward and, in EnvironmentConfig.parameters, for environments
    max_turns: int | None = None  # maximum number of actions; None = the worker's EpisodeConfig decides, also for the next two
    termination_regex: str | None = None  # regular expression; an action with a match is the last one
    system_prompt: str | None = None
    reward: str | None = None  # reward function, "module:name" or "file.py:name"; None = the environment's rewards
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further parameters, for environment and reward

    def __post_init__(self) -> None:
        if self.max_turns is not None:
            check_positive(self, "max_turns")
        if self.task not in ("", (), []):
            parse_prompt_content(self.task, "TaskDefinitionModel.task")
        self.episode_config()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskDefinitionModel:
        """Return the definition of JSON values. Raises ConfigError for unknown names and wrong types."""
        return from_dict(cls, dict(data))

    @classmethod
    def from_json(cls, path: Path | str) -> TaskDefinitionModel:
        """Read a definition from a file. Raises ConfigError naming it."""
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read a task definition from {path}: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a JSON {type(data).__name__}, expected an object with 'task' and 'ground_truth'")
        return cls.from_dict(data)

    def episode_config(self, config: EpisodeConfig | None = None) -> EpisodeConfig:
        """Return the limits of its episodes. config: values for the limits that are None. Raises ConfigError for a bad expression."""
        base = config or EpisodeConfig()
        own = {"max_turns": self.max_turns, "stop_regex": self.termination_regex, "system_prompt": self.system_prompt}
        return replace(base, **{name: value for name, value in own.items() if value is not None})

    def prompt(self, index: int = 0) -> Prompt:
        """Return the task as a prompt, with the ground truth in its metadata."""
        content = parse_prompt_content(self.task, "TaskDefinitionModel.task") if self.task else ""
        return Prompt(content=content, index=index, metadata={**self.metadata, "ground_truth": self.ground_truth})

    def load_reward(self) -> Callable[..., Any] | None:
        """Load the named reward function for RolloutConfig.reward_fn; None without a name. Raises ConfigError if it does not exist."""
        return None if self.reward is None else load_reward(self.reward)


class RLRolloutWorker:
    """Worker that plays episodes of one task, one after another or many at once."""

    def __init__(
        self,
        policy: AgentPolicy,
        environment_factory: EnvironmentFactory,
        task: TaskDefinitionModel,
        *,
        config: EpisodeConfig | None = None,
        seed: int = 0,
        index: int = 0,
    ) -> None:
        """
        Args:
            config: values for the limits that the task leaves open.
            seed, index: keys of the environment's first state and of sampling.
        """
        self._policy, self._task, self._prompt = policy, task, task.prompt(index)
        self._setting = EpisodeSetting(environment_factory=environment_factory, config=task.episode_config(config), seed=seed)
        self._num_episodes = 0
        self.last_episode: Episode | None = None

    async def run_episode(self, sample_number: int | None = None) -> tuple[list[StepData], list[Message], Any]:
        """Play an episode from the task's first state.

        Args:
            sample_number: key of the sampling; None = the number of the call, so that each call plays another episode.

        Returns: the steps, the whole conversation, and the ground truth. last_episode has the rest: sample, stop reason, reward.
        Raises: see episodes.run_episode.
        """
        number = self._num_episodes if sample_number is None else sample_number
        self._num_episodes += sample_number is None
        episode = await run_episode(self._policy, self._setting, self._prompt, sample_number=number)
        self.last_episode = episode
        return list(episode.steps), list(episode.messages), self._task.ground_truth

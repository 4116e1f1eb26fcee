"""Settings of a run as one frozen tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from integration.settings.checks import check_cuda_graphs, check_episode_settings, check_head_size, check_router_replay
from integration.settings.made.budgets import response_tokens
from integration.settings.made.library import (
    create_rl_algorithm,
    preference_training_config,
    reward_config,
    rl_training_config,
    sft_training_config,
)
from integration.settings.option_effects import check_mistakes
from integration.settings.sections.backend import BackendSection, HardwareSection
from integration.settings.sections.data import SELF_MADE_TASKS, DataSection, EvaluationSection
from integration.settings.sections.descriptions import describe_section
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.episodes import (
    EPISODE_TASKS,
    AgentSection,
    EnvironmentSection,
    EpisodeSection,
    check_agent,
    check_episode_sections,
)
from integration.settings.sections.generation import GenerationSection, RewardSection
from integration.settings.sections.model import CriticSection, LoRASection, ModelSection, ReferenceSection
from integration.settings.sections.preference import PreferenceSection
from integration.settings.sections.records import CRASH_BUNDLES, ProfileSection, TrajectorySection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.settings.sections.teacher import TeacherSection
from integration.settings.segment_wise import derive_algorithm_call, resolve_async_config
from rollouts.asynchronous.config import AsyncConfig, check_async_config
from rollouts.config import BadNumbers, CheckpointConfig, RolloutConfig, check_choice, check_setting
from rollouts.config_files import suggest
from rollouts.errors import ConfigError
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from integration.expressions.algorithm import PresetCall
    from rollouts.models.linear import Kernels

OWN_DATA_TASKS = ("gsm8k", "jsonl")  # tasks that need the user's data
TASKS = (*SELF_MADE_TASKS, *OWN_DATA_TASKS, "environment")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    task: str = "sort"  # single turn: sort, sort-long, gsm8k, jsonl; several turns: grid_world, calculator, environment
    seed: int = 0  # seed of the built-in model's weights, the order of data and every sampled token
    output_dir: str | None = None  # directory of the run; None = a new runs/<time>-<task>
    # loggers of metrics besides metrics.jsonl and the display: wandb, tensorboard, trackio, mlflow, with arguments as in
    # wandb(project='mine'); jsonl('copy.jsonl'), or module:function; --log is short for it
    loggers: tuple[str, ...] = ()
    # seconds for the start, a line, and the end of a logger; one that does not return by then is given up, and the run goes on
    logger_timeout_s: float = 60.0
    num_threads: int | None = None  # CPU threads of torch; None = torch's default
    # crash bundle of the step that a bad number ends the run at: auto = with weights that fit in a quarter of the free space, or else a
    # link to the last checkpoint; full = always with weights; linked = never with others than that checkpoint's; none = no bundle
    crash_bundles: Literal["auto", "full", "linked", "none"] = "auto"
    # compute the same bits on a CPU whatever its maker: model.kernels auto means torch, as in versions without that setting
    deterministic: bool = False
    enable_segment_wise_ppo: bool = False  # compute a proximal policy for each token of asynchronous rollouts; wraps the algorithm
    model: ModelSection = field(default_factory=ModelSection, metadata=describe_section(ModelSection))
    data: DataSection = field(default_factory=DataSection, metadata=describe_section(DataSection))
    sft: SFTSection = field(default_factory=SFTSection, metadata=describe_section(SFTSection))
    rl: RLSection = field(default_factory=RLSection, metadata=describe_section(RLSection))
    preference: PreferenceSection = field(default_factory=PreferenceSection, metadata=describe_section(PreferenceSection))
    reference: ReferenceSection = field(default_factory=ReferenceSection, metadata=describe_section(ReferenceSection))
    teacher: TeacherSection = field(default_factory=TeacherSection, metadata=describe_section(TeacherSection))
    critic: CriticSection = field(default_factory=CriticSection, metadata=describe_section(CriticSection))
    generation: GenerationSection = field(default_factory=GenerationSection, metadata=describe_section(GenerationSection))
    episode: EpisodeSection = field(default_factory=EpisodeSection, metadata=describe_section(EpisodeSection))
    environment: EnvironmentSection = field(default_factory=EnvironmentSection, metadata=describe_section(EnvironmentSection))
    agent: AgentSection = field(default_factory=AgentSection, metadata=describe_section(AgentSection))
    reward: RewardSection = field(default_factory=RewardSection, metadata=describe_section(RewardSection))
    backend: BackendSection = field(default_factory=BackendSection, metadata=describe_section(BackendSection))
    lora: LoRASection = field(default_factory=LoRASection, metadata=describe_section(LoRASection))
    engine: EngineSection = field(default_factory=EngineSection, metadata=describe_section(EngineSection))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=describe_section(CheckpointConfig))
    evaluation: EvaluationSection = field(default_factory=EvaluationSection, metadata=describe_section(EvaluationSection))
    trajectories: TrajectorySection = field(default_factory=TrajectorySection, metadata=describe_section(TrajectorySection))
    profile: ProfileSection = field(default_factory=ProfileSection, metadata=describe_section(ProfileSection))
    on_bad: BadNumbers = field(default_factory=BadNumbers, metadata=describe_section(BadNumbers))
    hardware: HardwareSection = field(default_factory=HardwareSection, metadata=describe_section(HardwareSection))

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"unknown task {self.task!r}: {suggest(self.task, TASKS)}")
        given = self.data.path is not None or self.data.mixture or self.data.rollouts is not None or self.preference.path is not None
        if self.task in OWN_DATA_TASKS and not given:
            raise ConfigError(f"the task {self.task!r} reads the user's data: give --data.path FILE.jsonl")
        if self.task in OWN_DATA_TASKS and self.model.path is None:
            raise ConfigError(f"the task {self.task!r} needs a model with a tokenizer of its own: give --model.path DIR")
        check_setting(self.num_threads is None or self.num_threads >= 1, "Config.num_threads", self.num_threads, "at least 1, or None")
        check_choice(self, "crash_bundles", CRASH_BUNDLES)
        good = 0 < self.logger_timeout_s < math.inf
        check_setting(good, "logger_timeout_s", self.logger_timeout_s, "a positive number of seconds")
        check_setting(0 <= self.seed < 2**63, "Config.seed", self.seed, "a whole number from 0 to 2**63 - 1")
        good = not self.deterministic or self.model.kernels in ("auto", "torch")
        check_setting(good, "model.kernels", self.model.kernels, "auto or torch with --deterministic")
        if self.loggers:
            from integration.expressions.loggers import parse_loggers

            parse_loggers(self.loggers)
        check_router_replay(self)
        check_head_size(self)
        check_cuda_graphs(self)
        check_episode_sections(self.task, self.episode, self.environment)
        check_agent(self.task, self.agent)
        if self.task in EPISODE_TASKS or self.agent.is_used:
            check_episode_settings(self)
        if self.task not in EPISODE_TASKS and self.trajectories.steps:
            raise ConfigError(f"trajectories.steps is True, but the task {self.task!r} has a single turn: leave it out")
        sft_training_config(self)
        preference_training_config(self)
        budget = response_tokens(self)
        buffer = self.rl.overlong_buffer
        check_setting(buffer <= budget, "rl.overlong_buffer", buffer, f"at most the token budget of a response, {budget}")
        rl_training_config(self, None)
        reward_config(self)
        if self.asynchronous.enabled:
            batch = RolloutConfig(batch_size=self.rl.prompts_per_step, over_sampling_factor=self.rl.over_sampling_factor)
            check_async_config(self.asynchronous, batch)
            if self.engine.sleep:
                raise ConfigError(
                    "engine.sleep is True, but servers generate while the policy is trained, with --rl.asynchronous.enabled: leave one out"
                )
        if self.enable_segment_wise_ppo or self.rl.algorithm != type(self.rl).algorithm:
            _ = self.algorithm_call  # the default algorithm needs no check, which would import torch
        check_mistakes(self)

    @cached_property
    def kernels(self) -> Kernels:
        """Kernels of linear layers on model.device: model.kernels, with auto resolved for this machine."""
        return find_kernels(self.model, deterministic=self.deterministic)

    @cached_property
    def asynchronous(self) -> AsyncConfig:
        """rl.asynchronous under the switch enable_segment_wise_ppo."""
        return resolve_async_config(self.rl.asynchronous, segment_wise=self.enable_segment_wise_ppo)

    @cached_property
    def algorithm_call(self) -> PresetCall:
        """The parsed rl.algorithm under the switch enable_segment_wise_ppo."""
        return derive_algorithm_call(self.rl.parsed_algorithm, self.asynchronous)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm under the run's token budget, created on first use; a run without RL never uses it.

        Raises: ConfigError if it cannot be created, or trained with these settings.
        """
        return create_rl_algorithm(self, response_tokens(self))


def find_kernels(model: ModelSection, *, deterministic: bool = False) -> Kernels:
    """Return the kernels of linear layers on a model's device, with auto resolved for this machine."""
    if model.kernels != "auto":
        return model.kernels
    if deterministic:
        return "torch"
    from rollouts.models.linear import choose_kernels
    from rollouts.models.loading import find_device_name

    return choose_kernels(find_device_name(model.device))


def create_output_dir(config: Config, timestamp: str) -> Path:
    """Return the run directory: the configured one, or a new runs/<timestamp>-<task>, numbered if that exists."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    for number in range(1, 1 << 16):
        path = Path("runs") / (f"{timestamp}-{config.task}" + ("" if number == 1 else f"-{number}"))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"{path} cannot be created ({error}): give --output-dir, a writable directory") from error
        return path
    raise ConfigError("cannot find a free name under runs/: give --output-dir")

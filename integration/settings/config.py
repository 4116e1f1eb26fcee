"""Settings of a run as one frozen tree, and the library's configurations made from them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    default_turns,
    observation_tokens,
    resolve_episode_config,
)
from integration.settings.sections.generation import GenerationSection, RewardSection
from integration.settings.sections.model import OWN_MODEL_CRITIC, CriticSection, LoRASection, ModelSection, ReferenceSection
from integration.settings.sections.preference import PreferenceSection
from integration.settings.sections.records import CRASH_BUNDLES, ProfileSection, TrajectorySection
from integration.settings.sections.stages import KLControlSection, RLSection, SFTSection
from integration.settings.sections.teacher import TeacherSection
from integration.settings.segment_wise import OPTION, SWITCH, derive_algorithm_call, resolve_async_config
from rollouts.agents.config import EpisodeConfig
from rollouts.asynchronous.config import AsyncConfig, check_async_config
from rollouts.config import (
    BadNumbers,
    CheckpointConfig,
    GenerationConfig,
    PreferenceTrainingConfig,
    RewardConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    check_choice,
    check_setting,
)
from rollouts.config_files import suggest
from rollouts.errors import ConfigError
from rollouts.rewards.answers import create_overlong_penalty
from rollouts.types import Algorithm, KLControl

if TYPE_CHECKING:
    from integration.expressions.algorithm import PresetCall
    from rollouts.models.linear import Kernels

OWN_DATA_TASKS = ("gsm8k", "jsonl")  # tasks that need the user's data
TASKS = (*SELF_MADE_TASKS, *OWN_DATA_TASKS, "environment")
RESPONSE_TOKENS = {"sort": 8, "sort-long": 10}  # default token budget of a response
OWN_DATA_RESPONSE_TOKENS = 512  # default token budget of a response to the user's data
LARGEST_CONTEXT = 4096  # largest default context of the built-in model, in tokens
CONTEXT_TOKENS = 128  # default context of the built-in model for tasks with a single turn, in tokens

VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Numbers in a head of attention that vLLM 0.32.0 computes on a CPU; others end the server at its first request."""


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


def create_rl_algorithm(config: Config, max_tokens: int) -> Algorithm:
    """Create the algorithm of a configuration under a token budget and check its settings. Calls the user's functions, if any."""
    from integration.expressions.algorithm import create_algorithm

    algorithm = create_algorithm(config.algorithm_call, max_tokens)
    training = rl_training_config(config, algorithm, max_tokens)
    if config.rl.baseline is None:
        check_algorithm_settings(config, algorithm)
    else:
        from rollouts.training.rl_run import resolve_algorithm  # the import takes a second

        check_algorithm_settings(config, resolve_algorithm(training))
    return algorithm


def check_algorithm_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if a run cannot provide the fields that the algorithm requires, or if a setting is of an unused model."""
    from integration.expressions.algorithm import learns_from_single_samples
    from rollouts.training.requirements import FILLABLE

    name, critic = config.rl.algorithm, config.critic
    if "segment_log_probs" in algorithm.requires and not config.asynchronous.segment_wise:
        raise ConfigError(
            f"rl.algorithm {name!r} requires segment_log_probs, which rollouts have only with segment-wise PPO: add "
            f"--rl.asynchronous.enabled {OPTION}"
        )
    unknown = sorted(algorithm.requires - FILLABLE)
    if unknown:
        raise ConfigError(
            f"rl.algorithm {name!r} requires {', '.join(unknown)}, which the rollouts of this command do not have; they have "
            f"{', '.join(sorted(FILLABLE))}. Choose another algorithm, or call run_rl_training with samples that have them"
        )
    if config.rl.samples_per_prompt == 1 and not learns_from_single_samples(algorithm):
        raise ConfigError(
            f"rl.samples_per_prompt is 1, but rl.algorithm {name!r} compares each response with the others of its group, and would learn "
            "nothing: give at least 2, or choose an algorithm without groups (reinforce, remax, reinforce_plus_plus, ppo)"
        )
    if "turns" in algorithm.requires and config.task not in EPISODE_TASKS:
        raise ConfigError(
            f"rl.algorithm {name!r} compares the steps of episodes, but the task {config.task!r} has a single turn: choose a "
            f"task with several turns (--task {', '.join(EPISODE_TASKS)}), or another algorithm, such as --algorithm grpo"
        )
    for option in ("state_key", "similarity"):
        value = getattr(config.environment, option)
        if value is not None and "turns" not in algorithm.requires:
            raise ConfigError(
                f"environment.{option} is {value!r}, but rl.algorithm {name!r} compares no steps of equal states: add --algorithm gigpo, "
                f"or leave --environment.{option.replace('_', '-')} out"
            )
    if config.reference.path is not None and "ref_log_probs" not in algorithm.requires:
        raise ConfigError(
            f"reference.path is {config.reference.path!r}, but rl.algorithm {name!r} has no KL term: "
            "give it a kl_coef, such as grpo(kl_coef=0.04), or leave --reference.path out"
        )
    check_teacher_settings(config, algorithm)
    if critic not in (CriticSection(), OWN_MODEL_CRITIC) and "values" not in algorithm.requires:
        known = [vars(CriticSection()), vars(OWN_MODEL_CRITIC)]
        changed = next(f"critic.{key} is {value!r}" for key, value in vars(critic).items() if all(value != own[key] for own in known))
        raise ConfigError(f"{changed}, but rl.algorithm {name!r} has no critic: choose one with a critic, such as ppo(), or leave it out")
    if critic.warmup_steps >= config.rl.num_steps:
        raise ConfigError(
            f"critic.warmup_steps is {critic.warmup_steps} of rl.num_steps = {config.rl.num_steps}: the policy would never be trained"
        )


def check_teacher_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if an algorithm of distillation has no teacher that fits, or a teacher has no such algorithm."""
    name, teacher = config.rl.algorithm, config.teacher
    tops = "teacher_tops" in algorithm.requires
    if not tops and "teacher_log_probs" not in algorithm.requires:
        if teacher.is_given:
            option = next(name for name in ("path", "url", "each", "context") if getattr(teacher, name))
            raise ConfigError(
                f"--teacher.{option} is given, but rl.algorithm {name!r} has no teacher: add --algorithm opd or gkd, or leave it out"
            )
        return
    if not teacher.is_given:
        raise ConfigError(
            f"rl.algorithm {name!r} needs a teacher: give --teacher.path DIR, --teacher.url http://host:port, --teacher.by FIELD with "
            "--teacher.each, or --teacher.context '{prompt} Answer: {answer}', with which the policy is its own teacher"
        )
    if tops and (teacher.is_policy or teacher.url or teacher.servers):
        who = "the policy itself" if teacher.is_policy else "a server"
        raise ConfigError(
            f"rl.algorithm {name!r} needs a teacher's most probable tokens, which {who} does not give here: name model directories "
            "(--teacher.path, --teacher.each) in place of --teacher.url or --teacher.context, or take --algorithm opd, which reads the "
            "sampled tokens alone"
        )
    if tops and config.backend.kind not in ("pytorch", "fsdp"):
        raise ConfigError(
            f"backend.kind is {config.backend.kind!r}, but the divergence of rl.algorithm {name!r} is computed with pytorch and fsdp: "
            "choose one of them, or --algorithm opd"
        )
    if teacher.context is not None:
        from rollouts.training.distillation.context import check_context

        check_context(teacher.context)
        if config.task in EPISODE_TASKS or config.agent.is_used:
            raise ConfigError("teacher.context is given, but a context has a place in answers to single prompts only: leave it out")
    sampling = config.generation
    truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if (teacher.url or teacher.servers) and (sampling.temperature != 1 or truncates):
        raise ConfigError(
            f"a server of a teacher scores at temperature 1 and over the whole vocabulary, but generation.temperature is "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}: leave them out, or "
            "give the teacher as a directory (--teacher.path)"
        )
    if tops and truncates:
        raise ConfigError(
            f"rl.algorithm {name!r} compares whole distributions, but generation.top_p, top_k or min_p cut them: leave these out, or take "
            "--algorithm opd"
        )


def find_teacher_models(config: Config, requires: Collection[str]) -> dict[str, str]:
    """Return the directories of teachers that are models of this run, by name, if the algorithm needs teachers."""
    return dict(config.teacher.models) if {"teacher_log_probs", "teacher_tops"} & set(requires) else {}


def count_tops(config: Config, requires: Collection[str]) -> int:
    """Return the number of most probable tokens that a teacher names: the whole vocabulary counts as more than any has; 0 = none."""
    if "teacher_tops" not in requires:
        return 0
    return config.teacher.top_k or 2**24


def sft_training_config(config: Config) -> SFTTrainingConfig:
    """Return the configuration for run_sft_training."""
    return SFTTrainingConfig(
        num_steps=config.sft.num_steps,
        batch_size=config.sft.batch_size,
        log_every=config.sft.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=config.checkpoint.sft_every,
        eval_every=config.sft.eval_every,
        max_tokens_per_microbatch=config.sft.max_tokens_per_microbatch,
        seed=config.seed,
        dropout=config.sft.dropout,
        router_balance_coef=config.sft.router_balance_coef,
    )


def preference_training_config(config: Config) -> PreferenceTrainingConfig:
    """Return the configuration for train_preferences."""
    section = config.preference
    return PreferenceTrainingConfig(
        num_steps=section.num_steps,
        batch_size=section.batch_size,
        log_every=section.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=section.checkpoint_every,
        eval_every=section.eval_every,
        max_tokens_per_microbatch=section.max_tokens_per_microbatch,
        seed=config.seed,
        dropout=section.dropout,
    )


def turn_tokens(config: Config) -> int:
    """Return the token budget of an action in a task with several turns: the user's, or the task's default."""
    return config.generation.max_tokens or EPISODE_TASKS[config.task].turn_tokens


def episode_config(config: Config, *, chat: bool | None = None) -> EpisodeConfig:
    """Return the limits and error policy of an episode. chat: the default of episode.chat."""
    return resolve_episode_config(config.episode, max_turns=default_turns(config.task, config.environment), chat=chat)


def context_tokens(config: Config) -> int:
    """Return the context of the built-in model in tokens: the user's, or the task's need."""
    if config.task not in EPISODE_TASKS:
        return config.model.max_length or CONTEXT_TOKENS
    return config.model.max_length or max(EPISODE_TASKS[config.task].context, min(episode_tokens(config), LARGEST_CONTEXT))


def episode_tokens(config: Config) -> int:
    """Return the maximum tokens of an episode with the built-in model: actions and, if the task knows them, observations."""
    return response_tokens(config) + (episode_config(config).max_turns + 1) * observation_tokens(config.task, config.environment)


def check_router_replay(config: Config) -> None:
    """Raise ConfigError if rl.router_replay is set for rollouts that carry no record of their experts."""
    if not config.rl.router_replay:
        return
    from rollouts.models.loading import find_device_name

    if config.engine.kind == "vllm" and config.engine.launch and find_device_name(config.model.device) == "cpu":
        raise ConfigError(
            "rl.router_replay is True, but vLLM returns the experts that it chooses on GPUs only: use the embedded engine "
            "(--engine.kind inprocess), or leave it out"
        )
    if config.backend.kind == "jax":
        raise ConfigError("rl.router_replay is True, but backend.kind 'jax' computes no mixture of experts: leave it out")


def check_head_size(config: Config) -> None:
    """Raise ConfigError for a built-in model whose attention a vLLM server that this run launches on a CPU would end at."""
    section = config.model
    if section.path is not None or config.engine.kind != "vllm" or not config.engine.launch:
        return
    from rollouts.models.loading import find_device_name

    size = section.hidden_size // section.num_heads
    if size not in VLLM_CPU_HEAD_SIZES and find_device_name(section.device) == "cpu":
        raise ConfigError(
            f"model.hidden_size is {section.hidden_size} and model.num_heads {section.num_heads}, so a head has {size} numbers, but vLLM "
            f"on a CPU computes heads of {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}: set --model.hidden-size "
            f"{VLLM_CPU_HEAD_SIZES[0] * section.num_heads}, or use the embedded engine (--engine.kind inprocess)"
        )


def check_truncated_sampling(config: Config) -> None:
    """Raise ConfigError if RL would train on answers of a truncated distribution without a record of the tokens that were left."""
    section = config.generation
    if not section.truncates or config.algorithm.compares_pairs:  # likelihoods of whole answers, whatever they were drawn from
        return
    shown = f"generation.top_p is {section.top_p:g}, generation.top_k {section.top_k} and generation.min_p {section.min_p:g}"
    advice = "set them to 1, 0 and 0, and lower --generation.temperature for less random answers"
    if config.engine.is_server:
        raise ConfigError(
            f"{shown}, but the sets of tokens that a server draws from, over which log-probs of training are computed, are not read "
            f"from its answers: use the embedded engine (--engine.kind inprocess), or {advice}"
        )
    if config.backend.kind == "jax":
        raise ConfigError(f"{shown}, but backend.kind 'jax' computes log-probs over the whole vocabulary alone: {advice}")
    if config.enable_segment_wise_ppo:
        raise ConfigError(f"{shown}, but the log-probs of segments are computed over the whole vocabulary: leave {SWITCH} out, or {advice}")


def check_cuda_graphs(config: Config) -> None:
    """Raise ConfigError if engine.cuda_graphs is set where no step is recorded as a graph."""
    if not config.engine.cuda_graphs:
        return
    from rollouts.models.loading import find_device_name

    device = find_device_name(config.model.device)
    if not device.startswith("cuda"):
        raise ConfigError(
            f"engine.cuda_graphs is True, but the device of the model is {device!r} (model.device {config.model.device!r}), "
            "which has no CUDA graphs: leave --engine.cuda-graphs out, or give --model.device cuda"
        )
    if config.rl.router_replay:
        raise ConfigError(
            "engine.cuda_graphs and rl.router_replay are both True, but steps whose experts are recorded are not run by CUDA graphs: leave "
            "one of them out"
        )


def check_episode_settings(config: Config) -> None:
    """Raise ConfigError for settings that a task with several turns, or a program of the user, does not support, or that conflict."""
    what = "a program of yours (agent.command, agent.function)" if config.agent.is_used else f"the task {config.task!r}"
    if config.engine.one_request_per_group:
        raise ConfigError(
            f"engine.one_request_per_group is True, but the samples of a prompt diverge in {what} and need separate requests: leave it out"
        )
    if config.enable_segment_wise_ppo:
        raise ConfigError(
            f"{SWITCH} is True, but an episode of {what} restarts after a weight sync and has no segments: leave it out, "
            "or use decoupled(...) without it"
        )
    if config.task not in EPISODE_TASKS:
        return
    actions, needed = response_tokens(config), episode_tokens(config)
    if config.model.path is None and (actions >= context_tokens(config) or needed > context_tokens(config)):
        is_known = EPISODE_TASKS[config.task].observation > 0
        shown = f"and its observations up to {needed - actions}" if is_known else "and its observations come on top"
        raise ConfigError(
            f"the actions of an episode may have {actions} tokens ({episode_config(config).max_turns} turns of {turn_tokens(config)}), "
            f"{shown}, but the built-in model's context has {context_tokens(config)}: give --model.max-length "
            f"{needed if is_known else 4 * actions}, or lower --episode.max-turns, --episode.max-tokens or --generation.max-tokens"
        )


def response_tokens(config: Config) -> int:
    """Return the token budget of a response, or of all actions of an episode: the user's, or the task's default."""
    if config.task in EPISODE_TASKS:
        limits = episode_config(config)
        actions = limits.max_turns * turn_tokens(config)
        return actions if limits.max_tokens is None else min(actions, limits.max_tokens)
    return config.generation.max_tokens or RESPONSE_TOKENS.get(config.task, OWN_DATA_RESPONSE_TOKENS)


def count_greedy_samples(algorithm: Algorithm) -> int:
    """Return the number of greedy samples per group that an algorithm uses as a baseline only: 1 for ReMax."""
    return int("greedy_rows" in algorithm.requires)


def create_kl_control(config: Config, algorithm: Algorithm) -> KLControl | None:
    """Create the controller of the algorithm's KL term; None if rl.kl_control has only defaults.

    A controller sets the coefficient of every KL term. It starts at the user's coefficient or, without one, at the algorithm's.
    """
    section, name = config.rl.kl_control, config.rl.algorithm
    if section == KLControlSection():
        return None
    if "ref_log_probs" not in algorithm.requires or algorithm.compares_pairs:
        raise ConfigError(f"rl.kl_control is set, but rl.algorithm {name!r} has no KL term: give it a kl_coef, such as ppo(kl_coef=0.05)")
    from integration.expressions.algorithm import find_kl_coefs

    places = find_kl_coefs(algorithm)
    found = sorted({coefficient for coefficients in places.values() for coefficient in coefficients})
    if len(found) > 1:
        terms = " and ".join(f"{coefficient:g} {place}" for place, coefficients in places.items() for coefficient in coefficients)
        raise ConfigError(
            f"rl.kl_control is set, but rl.algorithm {name!r} has KL terms with different coefficients ({terms}), and a controller would "
            "set all of them to one number: leave out rl.kl_control, or one of the terms"
        )
    if section.kl_coef is None and not found:
        raise ConfigError(f"rl.algorithm {name!r} does not state its kl_coef: give --rl.kl-control.kl-coef, the initial coefficient")
    kl_coef = found[0] if section.kl_coef is None else section.kl_coef
    if section.target is not None and kl_coef == 0:
        raise ConfigError("rl.kl_control.target is set, but kl_coef is 0, which no factor can change: give one above 0")
    return KLControl(kl_coef=float(kl_coef), target=section.target, horizon=section.horizon)


def rl_training_config(config: Config, algorithm: Algorithm | None, max_tokens: int | None = None) -> RLTrainingConfig:
    """Return the configuration for run_rl_training.

    Args:
        algorithm: None = only check the other settings.
        max_tokens: the token budget of a response; None = response_tokens(config).
    """
    budget, buffer = response_tokens(config) if max_tokens is None else max_tokens, config.rl.overlong_buffer
    overlong = create_overlong_penalty(max_tokens=budget, buffer=buffer, factor=config.rl.overlong_penalty) if buffer else None
    return RLTrainingConfig(
        num_steps=config.rl.num_steps,
        sync_every=config.rl.sync_every,
        num_epochs=config.rl.num_epochs,
        num_minibatches=config.rl.num_minibatches,
        algorithm=algorithm,
        baseline=config.rl.baseline,
        log_every=config.rl.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=config.checkpoint.rl_every,
        eval_every=config.rl.eval_every,
        max_tokens_per_microbatch=config.rl.max_tokens_per_microbatch,
        dropout=config.rl.dropout,
        skip_redundant=config.rl.skip_redundant,
        router_balance_coef=config.rl.router_balance_coef,
        router_replay=config.rl.router_replay,
        sleep_engines=config.engine.sleep is True,
        export_dtype=config.engine.precision(config.model.device) if config.engine.launch or config.engine.dtype != "auto" else None,
        weight_sync=config.engine.weight_sync_mode,
        parity=config.engine.parity(),
        probe_tolerance=config.engine.tolerance(config.model.device),
        seed=config.seed,
        shape_reward=overlong,
        mask_truncated=config.rl.mask_truncated,
        value_clip=config.critic.value_clip,
        critic_warmup_steps=config.critic.warmup_steps,
        kl_control=None if algorithm is None else create_kl_control(config, algorithm),
        bad_numbers=config.on_bad,
    )


def reward_config(config: Config) -> RewardConfig:
    """Return the timeout and error policy of rewards."""
    reward = config.reward
    return RewardConfig(timeout_s=reward.timeout_s, on_error=reward.on_error, max_retries=reward.max_retries)


def generation_config(config: Config, max_tokens: int) -> GenerationConfig:
    """Return the sampling configuration, with `max_tokens` as the budget if the user set none."""
    generation = config.generation
    return GenerationConfig(
        n_samples=config.rl.samples_per_prompt,
        max_tokens=generation.max_tokens or max_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        enable_thinking=generation.enable_thinking,
        stop=generation.stop,
    )


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


def count_rl_updates(config: Config) -> int:
    """Return the number of optimizer steps of the policy in the RL stage."""
    return (config.rl.num_steps - config.critic.warmup_steps) * config.rl.num_epochs * config.rl.num_minibatches


def count_critic_updates(config: Config) -> int:
    """Return the number of optimizer steps of the critic, warm-up included."""
    return config.rl.num_steps * config.rl.num_epochs * config.rl.num_minibatches


def create_model_config(section: ModelSection, max_length: int = CONTEXT_TOKENS) -> Any:
    """Return the Hugging Face configuration of the built-in model, with the special tokens of the character tokenizer.

    Args:
        max_length: context in tokens if the section has none.
    """
    from transformers import Qwen3Config

    return Qwen3Config(**list_model_numbers(section, max_length), eos_token_id=1, pad_token_id=0, bos_token_id=None)


def list_model_numbers(section: ModelSection, max_length: int) -> dict[str, Any]:
    """Return the numbers of the built-in model by their names in its Hugging Face configuration; see create_model_config."""
    return {
        "vocab_size": section.vocab_size,
        "hidden_size": section.hidden_size,
        "intermediate_size": section.intermediate_size,
        "num_hidden_layers": section.num_layers,
        "num_attention_heads": section.num_heads,
        "num_key_value_heads": section.num_kv_heads,
        "head_dim": section.hidden_size // section.num_heads,
        "max_position_embeddings": section.max_length or max_length,
        "tie_word_embeddings": True,
    }

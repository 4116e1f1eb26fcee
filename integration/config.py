"""One frozen tree of settings for a run, and what the library's parts get of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from integration.algorithm_expression import PresetCall, create_algorithm, parse_algorithm
from integration.algorithm_facts import find_kl_coefs, learns_from_single_samples
from integration.async_settings import SWITCH, derive_algorithm_call, resolve_async_config
from integration.episode_settings import (
    EPISODE_TASKS,
    EnvironmentSection,
    EpisodeSection,
    check_episode_sections,
    default_turns,
    observation_tokens,
    resolve_episode_config,
)
from rollouts.async_config import AsyncConfig, check_async_config
from rollouts.backends.factory import parse_device
from rollouts.config import (
    CheckpointConfig,
    GenerationConfig,
    OptimizerConfig,
    ParityConfig,
    RewardConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
    check_count,
    check_not_negative,
    check_positive,
    check_setting,
    suggest,
)
from rollouts.episode_config import EpisodeConfig
from rollouts.errors import ConfigError
from rollouts.filters import check_any_success, check_response_diversity, check_reward_nonzero_std
from rollouts.kl_control import KLControl
from rollouts.requirements import FILLABLE
from rollouts.rewards.answers import load_function
from rollouts.rewards.evaluate import create_overlong_penalty
from rollouts.types import Algorithm, Group

SELF_MADE_TASKS = ("sort", "sort-long", "grid_world", "calculator")  # these need no data
OWN_DATA_TASKS = ("gsm8k", "jsonl")  # these cannot be without
TASKS = (*SELF_MADE_TASKS, *OWN_DATA_TASKS, "environment")
RESPONSE_TOKENS = {"sort": 8, "sort-long": 10}  # most tokens of a response, unless the user sets it
OWN_DATA_RESPONSE_TOKENS = 512
LARGEST_CONTEXT = 4096  # that the built-in model is given where the user says nothing
CONTEXT_TOKENS = 128  # of the built-in model, where an answer is all
ENGINE_KINDS = ("inprocess", "vllm", "sglang")
FILTERS = ("none", "nonzero_std", "any_success", "diversity")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a directory, or the small built-in one from random weights."""

    path: str | None = None  # Hugging Face model directory; None = the built-in model
    device: str = "cpu"  # cpu, cuda, cuda:N, mps, auto
    trust_remote_code: bool = False  # run Python files of the model directory; only for one you trust
    vocab_size: int = 64  # of the built-in model, a Qwen3 architecture
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    max_length: int | None = None  # context of the built-in model, in tokens; None = 128, or what an episode of the task needs

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_positive(self, *sizes)
        check_setting(self.max_length is None or self.max_length >= 1, "model.max_length", self.max_length, "at least 1, or None")
        known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None  # whether it is there is asked when a run starts
        check_setting(known, "model.device", self.device, "cpu, cuda, cuda:N, mps or auto")
        check_setting(
            self.hidden_size % self.num_heads == 0, "model.hidden_size", self.hidden_size, f"a multiple of {self.num_heads} heads"
        )
        check_setting(
            self.num_heads % self.num_kv_heads == 0, "model.num_heads", self.num_heads, f"a multiple of {self.num_kv_heads} kv heads"
        )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The user's own data; the built-in tasks need none, and an environment may make its own."""

    path: str | None = None  # JSONL
    eval_path: str | None = None  # held-out JSONL; None = the last rows of path
    max_length: int | None = None  # most tokens of an SFT row; None = no limit
    truncate: bool = False  # cut longer rows off instead of refusing them
    skip_bad_rows: bool = False  # count rows that cannot be read and go on

    def __post_init__(self) -> None:
        check_setting(self.max_length is None or self.max_length >= 1, "data.max_length", self.max_length, "at least 1, or None")


@dataclass(frozen=True, kw_only=True)
class SFTSection:
    """Supervised fine-tuning."""

    num_steps: int = 180
    batch_size: int = 64  # rows per optimizer step
    log_every: int = 1
    eval_every: int = 30  # steps between two evaluations; 0 = only at the end
    max_tokens_per_microbatch: int = 16384
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.05, weight_decay=0.01)
    )


@dataclass(frozen=True, kw_only=True)
class KLControlSection:
    """The coefficient of the algorithm's KL term from step to step. As long as nothing is set here, the algorithm's own number counts."""

    kl_coef: float | None = None  # at the beginning; None = the algorithm's own
    target: float | None = None  # KL per token in nats that the coefficient is adapted to; None = it stays as it is
    horizon: float = 10_000.0  # samples over which the coefficient changes by at most a fifth


@dataclass(frozen=True, kw_only=True)
class RLSection:
    """Reinforcement learning."""

    num_steps: int = 12  # rollout batches
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    num_epochs: int = 1  # passes over each rollout batch
    num_minibatches: int = 2  # optimizer steps in each pass
    algorithm: str = "grpo"  # an expression of presets, as grpo, dapo(clip_high=0.28) or module:function that returns an Algorithm
    kl_control: KLControlSection = field(default_factory=KLControlSection)
    mask_truncated: bool = False  # answers cut by the token budget are not trained on; their rewards still count in their groups
    overlong_buffer: int = 0  # last tokens of the budget in which a penalty for long answers grows (DAPO); 0 = no penalty
    overlong_penalty: float = 1.0  # the whole penalty of an answer that uses up the budget; the filter sees rewards without it
    filter: str = "none"  # groups to train on: none, nonzero_std, any_success, diversity, or module:function
    over_sampling_factor: float = 1.0  # groups in flight per group wanted
    max_filter_attempts: int = 10  # rounds of generation for one batch
    sync_every: int = 1  # steps between two weight syncs
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)  # rollouts that are generated while training goes on
    log_every: int = 1
    eval_every: int = 1
    max_tokens_per_microbatch: int = 16384
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))

    def __post_init__(self) -> None:
        check_positive(self, "prompts_per_step", "samples_per_prompt", "num_minibatches", "max_filter_attempts")
        check_setting(self.over_sampling_factor >= 1, "rl.over_sampling_factor", self.over_sampling_factor, "at least 1.0")
        rows = self.prompts_per_step * self.samples_per_prompt
        if rows % self.num_minibatches:
            raise ConfigError(
                f"rl.prompts_per_step x rl.samples_per_prompt = {self.prompts_per_step} x {self.samples_per_prompt} = {rows} rows do not "
                f"divide into rl.num_minibatches = {self.num_minibatches}: choose a divisor of {rows}"
            )
        check_count(self, "overlong_buffer")
        check_not_negative(self, "overlong_penalty")
        _ = self.parsed_algorithm  # a misspelt name must not be found out after the SFT stage
        resolve_filter(self.filter)

    @cached_property
    def parsed_algorithm(self) -> PresetCall:
        """The expression `algorithm`, parsed: nothing of it has been called."""
        return parse_algorithm(self.algorithm)


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The frozen model of a KL term; loaded only if the algorithm has one."""

    path: str | None = None  # Hugging Face model directory; None = the policy as it is when RL begins


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The model behind an algorithm's values (ppo); made only if the algorithm requires them."""

    path: str | None = None  # directory of a saved critic or of a language model; None = the policy as it is when RL begins
    warmup_steps: int = 0  # first RL steps in which only the critic is trained
    value_clip: float | None = 0.2  # how far values may move from those at collection time, in reward units; None = no clipping
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))

    def __post_init__(self) -> None:
        check_count(self, "warmup_steps")


@dataclass(frozen=True, kw_only=True)
class GenerationSection:
    """How responses are sampled in RL and in sampled evaluation."""

    max_tokens: int | None = None  # of a response, in tasks with several turns of each; None = the task's own
    temperature: float = 1.0
    enable_thinking: bool | None = None  # for the chat template; None = the template's default
    stop: tuple[str, ...] = ()  # strings that end a response
    top_p: float = 1.0  # for training only 1: log-probs of a cut distribution are not those that the trainer computes
    top_k: int = 0  # for training only 0

    def __post_init__(self) -> None:
        check_setting(
            self.max_tokens is None or self.max_tokens >= 1, "generation.max_tokens", self.max_tokens, "at least 1, or None for the task's"
        )
        check_setting(
            self.temperature > 0, "generation.temperature", self.temperature, "more than 0: greedy samples of a group are all equal"
        )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ConfigError(
                f"generation.top_p is {self.top_p} and generation.top_k is {self.top_k}, but training needs rollouts from the whole "
                "distribution: log-probs of a truncated one are not those the trainer computes. Use 1.0 and 0; lower the temperature"
            )


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The reward function and what happens when it fails."""

    function: str | None = None  # "file.py:name" or "module:name", of a sample or decorated, or a RewardSource; None = the task's own
    sandboxed: bool = False  # the function is of a file that nobody trusts: call it in a sandbox
    timeout_s: float | None = 30.0
    on_error: Literal["raise", "retry", "drop", "zero"] = "raise"  # zero: a failed reward counts as 0, is marked and counted
    max_retries: int = 2
    model: str | None = None  # reward model whose scores are trained on in place of `function`, by which evaluations still go
    model_device: str | None = None  # None = that of the policy
    model_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of its weights
    model_tokens_per_batch: int = 16384  # in one of its forward passes

    def __post_init__(self) -> None:
        check_positive(self, "model_tokens_per_batch")


@dataclass(frozen=True, kw_only=True)
class BackendSection:
    """The training backend."""

    kind: str = "pytorch"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; weights and log-probs are float32

    def __post_init__(self) -> None:
        if self.kind != "pytorch":
            raise ConfigError(f"backend.kind is {self.kind!r}: only 'pytorch' (one process, one device) is available in this version")


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The inference engine: embedded in this process, or a server of SGLang or vLLM, started here or running already."""

    kind: str = "inprocess"  # inprocess (the embedded engine), vllm, sglang
    max_slots: int = 512  # sequences at the same time in the embedded engine
    urls: tuple[str, ...] = ()  # servers that run already, http://host:port; each prompt goes to one of them
    launch: bool = False  # start a server for this run, and stop it at the end
    python: str | None = None  # of the environment that has the server; None = VLLM_PYTHON or SGLANG_PYTHON, else this one
    api_key_variable: str | None = None  # environment variable that holds the key of servers that ask for one
    port: int | None = None  # of a server that is started; None = a free one
    dtype: str = "auto"  # of a server's weights: float32, bfloat16, float16; auto = float32 on a CPU, bfloat16 on a GPU
    tensor_parallel_size: int = 1  # GPUs that share the model
    context_length: int | None = None  # tokens of prompt and response together; None = the model's own
    max_num_seqs: int | None = None  # sequences at the same time in a server; None = the server's own
    memory_fraction: float | None = None  # of a GPU's memory that a server takes, all in all; None = the server's own, which is nearly all
    in_flight: Literal["continue", "abort"] = "continue"  # requests during a weight sync: go on under the new weights, or are sent again
    one_request_per_group: bool = False  # ask a server for all samples of a prompt at once, which costs less per sample
    startup_timeout_s: float = 900.0  # until a server that is started must be healthy
    extra_args: tuple[str, ...] = ()  # for the command line of a server that is started; here as --engine.extra-args=--flag=value
    parity_rows: int | None = None  # rows of each batch on which log-probs of engine and trainer are compared; None = 8 for servers, else 0
    parity_threshold: float = 0.1  # nats, of the mean difference per token, beyond which parity_action is taken
    parity_action: Literal["warn", "correct", "stop"] = "warn"  # correct = truncated importance sampling for that batch
    probe_tolerance: float | None = None  # nats, of a server's log-probs after each sync; None = 1e-3 in float32, else 0.3; 0 = do not ask

    def __post_init__(self) -> None:
        check_positive(self, "max_slots", "tensor_parallel_size")
        check_setting(self.kind in ENGINE_KINDS, "engine.kind", self.kind, " or ".join(ENGINE_KINDS))
        if self.kind == "inprocess":
            names = "urls launch python port context_length max_num_seqs memory_fraction extra_args api_key_variable"
            for name in names.split():
                check_setting(
                    not getattr(self, name),
                    f"engine.{name}",
                    getattr(self, name),
                    "nothing, as the embedded engine is no server: set engine.kind",
                )
            check_setting(
                not self.one_request_per_group, "engine.one_request_per_group", True, "False: the embedded engine shares prompts by itself"
            )
        elif self.launch == bool(self.urls):
            what = "both are given" if self.launch else "neither is given"
            raise ConfigError(
                f"engine.kind is {self.kind!r}, and of engine.launch and engine.urls {what}: give --engine.launch to start a server for "
                "this run, or --engine.urls http://host:port of one that runs"
            )
        good = self.memory_fraction is None or 0 < self.memory_fraction < 1
        check_setting(good, "engine.memory_fraction", self.memory_fraction, "between 0 and 1, or None")
        check_setting(self.startup_timeout_s > 0, "engine.startup_timeout_s", self.startup_timeout_s, "more than 0")
        check_setting(self.parity_rows is None or self.parity_rows >= 0, "engine.parity_rows", self.parity_rows, "at least 0, or None")
        check_setting(self.parity_threshold > 0, "engine.parity_threshold", self.parity_threshold, "more than 0")
        good = self.probe_tolerance is None or self.probe_tolerance >= 0
        check_setting(good, "engine.probe_tolerance", self.probe_tolerance, "at least 0, or None")

    @property
    def is_server(self) -> bool:
        """Whether requests go over HTTP."""
        return self.kind != "inprocess"

    def parity(self) -> ParityConfig | None:
        """What the RL loop compares on each batch."""
        rows = (8 if self.is_server else 0) if self.parity_rows is None else self.parity_rows
        return ParityConfig(num_rows=rows, threshold=self.parity_threshold, action=self.parity_action) if rows else None

    def precision(self, device: str) -> str:
        """The dtype of a server whose model is on the device of this name: cpu, cuda, cuda:N, auto."""
        return ("float32" if parse_device(device).type == "cpu" else "bfloat16") if self.dtype == "auto" else self.dtype

    def tolerance(self, device: str) -> float | None:
        """What the RL loop allows engines to be off after a sync. device: as for precision."""
        if self.probe_tolerance is None:
            return (1e-3 if self.precision(device) == "float32" else 0.3) if self.is_server else None
        return self.probe_tolerance or None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Accuracy on held-out problems."""

    num_prompts: int = 256
    sampled: bool = True  # also at generation.temperature, beside greedy

    def __post_init__(self) -> None:
        check_positive(self, "num_prompts")


@dataclass(frozen=True, kw_only=True)
class TrajectorySection:
    """Rollouts written to rl/trajectories/step_NNNN.jsonl, for people to read."""

    every: int = 64  # every n-th sample, by index; 0 = none
    condition: str | None = None  # module:function or file.py:function, Sample -> bool: of every n-th sample those for which it is true

    def __post_init__(self) -> None:
        check_not_negative(self, "every")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    task: str = "sort"  # sort, sort-long, gsm8k, jsonl; with several turns: grid_world, calculator, environment
    seed: int = 0  # of the built-in model's weights, the order of data and every sampled token
    output_dir: str | None = None  # None = runs/<time>-<task>, new for every run
    num_threads: int | None = None  # CPU threads of torch; None = as torch chooses
    enable_segment_wise_ppo: bool = False  # each token of asynchronous rollouts gets a proximal policy of its own; wraps the algorithm
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    sft: SFTSection = field(default_factory=SFTSection)
    rl: RLSection = field(default_factory=RLSection)
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    critic: CriticSection = field(default_factory=CriticSection)
    generation: GenerationSection = field(default_factory=GenerationSection)
    episode: EpisodeSection = field(default_factory=EpisodeSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    reward: RewardSection = field(default_factory=RewardSection)
    backend: BackendSection = field(default_factory=BackendSection)
    engine: EngineSection = field(default_factory=EngineSection)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    trajectories: TrajectorySection = field(default_factory=TrajectorySection)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"unknown task {self.task!r}: {suggest(self.task, TASKS)}")
        if self.task in OWN_DATA_TASKS and self.data.path is None:
            raise ConfigError(f"the task {self.task!r} reads the user's data: give --data.path FILE.jsonl")
        if self.task in OWN_DATA_TASKS and self.model.path is None:
            raise ConfigError(f"the task {self.task!r} needs a model with a tokenizer of its own: give --model.path DIR")
        check_setting(self.num_threads is None or self.num_threads >= 1, "num_threads", self.num_threads, "at least 1, or None")
        check_not_negative(self, "seed")
        check_episode_sections(self.task, self.episode, self.environment)
        if self.task in EPISODE_TASKS:
            check_episode_settings(self)
        sft_training_config(self)
        budget = response_tokens(self)
        buffer = self.rl.overlong_buffer
        check_setting(buffer <= budget, "rl.overlong_buffer", buffer, f"at most the token budget of a response, {budget}")
        rl_training_config(self, None)
        reward_config(self)
        if self.asynchronous.enabled:
            batch = RolloutConfig(batch_size=self.rl.prompts_per_step, over_sampling_factor=self.rl.over_sampling_factor)
            check_async_config(self.asynchronous, batch)
        _ = self.algorithm_call

    @cached_property
    def asynchronous(self) -> AsyncConfig:
        """rl.asynchronous with what follows from the switch enable_segment_wise_ppo."""
        return resolve_async_config(self.rl.asynchronous, segment_wise=self.enable_segment_wise_ppo)

    @cached_property
    def algorithm_call(self) -> PresetCall:
        """rl.algorithm, parsed, with what follows from the switch."""
        return derive_algorithm_call(self.rl.parsed_algorithm, self.asynchronous)

    @cached_property
    def algorithm(self) -> Algorithm:
        """What rl.algorithm means under the run's token budget. Made when it is first asked for, which a run without RL never does.

        Raises: ConfigError if it cannot be made, or not be trained with these settings.
        """
        return create_rl_algorithm(self, response_tokens(self))


def create_rl_algorithm(config: Config, max_tokens: int) -> Algorithm:
    """The algorithm of a configuration under a token budget, checked against its settings. Calls the user's functions, if it has any."""
    algorithm = create_algorithm(config.algorithm_call, max_tokens)
    check_algorithm_settings(config, algorithm)
    rl_training_config(config, algorithm, max_tokens)
    return algorithm


def check_algorithm_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if a run cannot give the algorithm what it requires, or if a setting is of a model that it does not use."""
    name, critic = config.rl.algorithm, config.critic
    if "segment_log_probs" in algorithm.requires and not config.asynchronous.segment_wise:
        raise ConfigError(
            f"rl.algorithm {name!r} requires segment_log_probs, which rollouts have only where the switch is on: add "
            f"--rl.asynchronous.enabled --{SWITCH}"
        )
    unknown = sorted(algorithm.requires - FILLABLE)
    if unknown:
        raise ConfigError(
            f"rl.algorithm {name!r} requires {', '.join(unknown)}, which the rollouts of this command do not have; they have "
            f"{', '.join(sorted(FILLABLE))}. Choose another, or call run_rl_training with samples that carry it"
        )
    if config.rl.samples_per_prompt == 1 and not learns_from_single_samples(algorithm):
        raise ConfigError(
            f"rl.samples_per_prompt is 1, but rl.algorithm {name!r} compares each answer with the others to its prompt, and would learn "
            "nothing: give at least 2, or choose an algorithm that needs no others (reinforce, remax, reinforce_plus_plus, ppo)"
        )
    if "turns" in algorithm.requires and config.task not in EPISODE_TASKS:
        raise ConfigError(
            f"rl.algorithm {name!r} compares the steps of episodes, but an episode of the task {config.task!r} is one answer: choose a "
            f"task with several turns (--task {', '.join(EPISODE_TASKS)}), or another algorithm, as --algorithm grpo"
        )
    if config.reference.path is not None and "ref_log_probs" not in algorithm.requires:
        raise ConfigError(
            f"reference.path is {config.reference.path!r}, but rl.algorithm {name!r} has no KL term: "
            "give it a kl_coef, as in grpo(kl_coef=0.04), or leave --reference.path out"
        )
    if critic != CriticSection() and "values" not in algorithm.requires:
        changed = next(f"critic.{key} is {value!r}" for key, value in vars(critic).items() if value != getattr(CriticSection(), key))
        raise ConfigError(f"{changed}, but rl.algorithm {name!r} has no critic: choose one that has, as ppo(), or leave it out")
    if critic.warmup_steps >= config.rl.num_steps:
        raise ConfigError(
            f"critic.warmup_steps is {critic.warmup_steps} of rl.num_steps = {config.rl.num_steps}: the policy would never be trained"
        )


def sft_training_config(config: Config) -> SFTTrainingConfig:
    """What run_sft_training gets."""
    return SFTTrainingConfig(
        num_steps=config.sft.num_steps,
        batch_size=config.sft.batch_size,
        log_every=config.sft.log_every,
        checkpoint_every=config.checkpoint.sft_every,
        eval_every=config.sft.eval_every,
        max_tokens_per_microbatch=config.sft.max_tokens_per_microbatch,
        seed=config.seed,
    )


def turn_tokens(config: Config) -> int:
    """Most tokens of one action in a task with several turns: the user's, or the task's."""
    return config.generation.max_tokens or EPISODE_TASKS[config.task].turn_tokens


def episode_config(config: Config, *, chat: bool | None = None) -> EpisodeConfig:
    """The limits and policies of an episode. chat: whether the chat template is used, where the user does not say."""
    return resolve_episode_config(config.episode, max_turns=default_turns(config.task, config.environment), chat=chat)


def context_tokens(config: Config) -> int:
    """Context of the built-in model: the user's, or what the task needs."""
    if config.task not in EPISODE_TASKS:
        return config.model.max_length or CONTEXT_TOKENS
    return config.model.max_length or max(EPISODE_TASKS[config.task].context, min(episode_tokens(config), LARGEST_CONTEXT))


def episode_tokens(config: Config) -> int:
    """Most tokens of an episode with the built-in model: its actions and, where the task knows them, observations."""
    return response_tokens(config) + (episode_config(config).max_turns + 1) * observation_tokens(config.task, config.environment)


def check_episode_settings(config: Config) -> None:
    """Raise ConfigError for settings that a task with several turns cannot have, or that do not fit together."""
    if config.engine.one_request_per_group:
        raise ConfigError(
            f"engine.one_request_per_group is True, but the samples of a prompt go different ways in the task {config.task!r}, and need "
            "requests of their own: leave it out"
        )
    if config.enable_segment_wise_ppo:
        raise ConfigError(
            f"{SWITCH} is True, but an episode of the task {config.task!r} is begun anew where a weight sync stops it, and has no "
            "segments: leave it out, or compose decoupled(...) without it"
        )
    actions, needed = response_tokens(config), episode_tokens(config)
    if config.model.path is None and (actions >= context_tokens(config) or needed > context_tokens(config)):
        is_known = EPISODE_TASKS[config.task].observation > 0
        shown = f"and what is observed up to {needed - actions}" if is_known else "and what is observed comes on top"
        raise ConfigError(
            f"the actions of an episode may have {actions} tokens ({episode_config(config).max_turns} turns of {turn_tokens(config)}), "
            f"{shown}, but the built-in model's context has {context_tokens(config)}: give --model.max-length "
            f"{needed if is_known else 4 * actions}, or less of --episode.max-turns, --episode.max-tokens or --generation.max-tokens"
        )


def response_tokens(config: Config) -> int:
    """Most tokens of a response, or of all actions of an episode: the user's, or the task's."""
    if config.task in EPISODE_TASKS:
        limits = episode_config(config)
        actions = limits.max_turns * turn_tokens(config)
        return actions if limits.max_tokens is None else min(actions, limits.max_tokens)
    return config.generation.max_tokens or RESPONSE_TOKENS.get(config.task, OWN_DATA_RESPONSE_TOKENS)


def count_greedy_samples(algorithm: Algorithm) -> int:
    """Greedy samples in each group that an algorithm compares with and does not train on: 1 for ReMax."""
    return int("greedy_rows" in algorithm.requires)


def create_kl_control(config: Config, algorithm: Algorithm) -> KLControl | None:
    """The controller of the algorithm's KL term; None unless the user set something in rl.kl_control.

    A controller sets the coefficient of every KL term. Where it begins is the user's number or, without one, the algorithm's own.
    """
    section, name = config.rl.kl_control, config.rl.algorithm
    if section == KLControlSection():
        return None
    if "ref_log_probs" not in algorithm.requires:
        raise ConfigError(f"rl.kl_control is set, but rl.algorithm {name!r} has no KL term: give it a kl_coef, as in ppo(kl_coef=0.05)")
    places = find_kl_coefs(algorithm)
    found = sorted({coefficient for coefficients in places.values() for coefficient in coefficients})
    if len(found) > 1:
        terms = " and ".join(f"{coefficient:g} {place}" for place, coefficients in places.items() for coefficient in coefficients)
        raise ConfigError(
            f"rl.kl_control is set, but rl.algorithm {name!r} has KL terms of different coefficients ({terms}), and a controller would "
            "set them all to one number: leave out rl.kl_control, or one of the terms"
        )
    if section.kl_coef is None and not found:
        raise ConfigError(f"rl.algorithm {name!r} does not say its kl_coef: give --rl.kl-control.kl-coef, where it begins")
    kl_coef = found[0] if section.kl_coef is None else section.kl_coef
    if section.target is not None and kl_coef == 0:
        raise ConfigError("rl.kl_control.target is set, but kl_coef is 0, from where no factor leads away: give one above 0")
    return KLControl(kl_coef=float(kl_coef), target=section.target, horizon=section.horizon)


def rl_training_config(config: Config, algorithm: Algorithm | None, max_tokens: int | None = None) -> RLTrainingConfig:
    """What run_rl_training gets. The embedded engine takes its weights in memory, servers from the disk.

    Args:
        algorithm: None = to check the other settings.
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
        log_every=config.rl.log_every,
        checkpoint_every=config.checkpoint.rl_every,
        eval_every=config.rl.eval_every,
        max_tokens_per_microbatch=config.rl.max_tokens_per_microbatch,
        weight_sync="checkpoint" if config.engine.is_server else "memory",
        parity=config.engine.parity(),
        probe_tolerance=config.engine.tolerance(config.model.device),
        seed=config.seed,
        shape_reward=overlong,
        mask_truncated=config.rl.mask_truncated,
        value_clip=config.critic.value_clip,
        critic_warmup_steps=config.critic.warmup_steps,
        kl_control=None if algorithm is None else create_kl_control(config, algorithm),
    )


def reward_config(config: Config) -> RewardConfig:
    """Deadline and error policy of rewards."""
    reward = config.reward
    return RewardConfig(timeout_s=reward.timeout_s, on_error=reward.on_error, max_retries=reward.max_retries)


def generation_config(config: Config, max_tokens: int) -> GenerationConfig:
    """How responses are sampled, with the task's budget where the user gave none."""
    generation = config.generation
    return GenerationConfig(
        n_samples=config.rl.samples_per_prompt,
        max_tokens=generation.max_tokens or max_tokens,
        temperature=generation.temperature,
        enable_thinking=generation.enable_thinking,
        stop=generation.stop,
    )


def resolve_filter(name: str) -> Callable[[Group], bool] | None:
    """The filter of a name, or of "module:function"; None for "none"."""
    filters: dict[str, Callable[[Group], bool] | None] = {
        "none": None,
        "nonzero_std": check_reward_nonzero_std,
        "any_success": check_any_success,
        "diversity": check_response_diversity,
    }
    if name in filters:
        return filters[name]
    if ":" not in name:
        raise ConfigError(f"unknown filter {name!r}: {suggest(name, FILTERS)}; or write module:function")
    return load_function(name)


def create_output_dir(config: Config, timestamp: str) -> Path:
    """The run directory: as configured, or runs/<timestamp>-<task>, numbered where another run was as quick."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    for number in range(1, 1 << 16):
        path = Path("runs") / (f"{timestamp}-{config.task}" + ("" if number == 1 else f"-{number}"))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError("cannot find a free name under runs/: give --output-dir")


def count_rl_updates(config: Config) -> int:
    """Optimizer steps of the policy in the RL stage."""
    return (config.rl.num_steps - config.critic.warmup_steps) * config.rl.num_epochs * config.rl.num_minibatches


def count_critic_updates(config: Config) -> int:
    """Optimizer steps of the critic, which is also trained while the policy waits for it."""
    return config.rl.num_steps * config.rl.num_epochs * config.rl.num_minibatches


def create_model_config(section: ModelSection, max_length: int = CONTEXT_TOKENS) -> Any:
    """The Hugging Face configuration of the built-in model; its special tokens are those of the character tokenizer.

    Args:
        max_length: where the section has none.
    """
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=section.vocab_size,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_hidden_layers=section.num_layers,
        num_attention_heads=section.num_heads,
        num_key_value_heads=section.num_kv_heads,
        head_dim=section.hidden_size // section.num_heads,
        max_position_embeddings=section.max_length or max_length,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )

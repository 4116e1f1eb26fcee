"""The sections of a run's settings, each checked by itself; integration.config puts them together."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal
from urllib.parse import urlsplit

from integration.algorithm_expression import PresetCall, parse_algorithm
from rollouts.async_config import AsyncConfig
from rollouts.backends.factory import parse_device
from rollouts.backends.fsdp_config import FSDPConfig
from rollouts.backends.lora import ALL_LINEAR, LoRAConfig
from rollouts.char_tokenizer import ALPHABET
from rollouts.config import (
    OptimizerConfig,
    ParityConfig,
    check_count,
    check_not_negative,
    check_positive,
    check_setting,
    suggest,
)
from rollouts.engines.path_map import PathMap
from rollouts.errors import ConfigError
from rollouts.filters import check_any_success, check_response_diversity, check_reward_nonzero_std
from rollouts.rewards.answers import load_function
from rollouts.types import Group

BACKEND_KINDS = ("pytorch", "fsdp", "torch_func", "jax")
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
        most = 3 + len(ALPHABET)
        known = self.path is not None or 4 <= self.vocab_size <= most
        check_setting(known, "model.vocab_size", self.vocab_size, f"4 to {most}, as the built-in model reads single characters")
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

    kind: str = "pytorch"  # pytorch (one process, one device), fsdp (several processes, each with a part of the model), torch_func and jax
    # (one process, the state of training is a value)
    num_processes: int | None = None  # of fsdp; None = those that torchrun started, else one for each GPU, or 1
    timeout_s: float = 600.0  # of fsdp: that one operation of all processes may take
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)  # how fsdp spreads the model
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # of matrix products; weights and log-probs are float32

    def __post_init__(self) -> None:
        if self.kind not in BACKEND_KINDS:
            raise ConfigError(f"unknown backend.kind {self.kind!r}: {suggest(self.kind, BACKEND_KINDS)}")
        count = self.num_processes
        check_setting(count is None or count >= 1, "backend.num_processes", count, "at least 1, or None")
        check_setting(self.timeout_s > 0, "backend.timeout_s", self.timeout_s, "more than 0")
        good = self.kind != "jax" or self.compute_dtype == "float32"
        check_setting(good, "backend.compute_dtype", self.compute_dtype, "float32 with backend.kind 'jax'")
        if self.kind != "fsdp":
            for name, default in (("num_processes", None), ("fsdp", FSDPConfig())):
                value = getattr(self, name)
                check_setting(
                    value == default, f"backend.{name}", value, f"nothing with backend.kind {self.kind!r}: add --backend.kind fsdp"
                )


@dataclass(frozen=True, kw_only=True)
class LoRASection:
    """Low-rank adapters, trained in place of the policy's weights in every stage; see LoRAConfig."""

    rank: int = 0  # of the adapters; 0 = there are none, all weights are trained
    alpha: float | None = None  # the change is scaled by alpha / rank; None = 2 * rank
    dropout: float = 0.0  # of an adapter's input, in training only
    target_modules: tuple[str, ...] = (ALL_LINEAR,)  # names of layers, as q_proj v_proj; all-linear = all but the output layer
    use_rslora: bool = False  # scale by alpha / sqrt(rank)
    save_base: bool = False  # write the frozen weights into each checkpoint, too

    def __post_init__(self) -> None:
        check_count(self, "rank")
        if self.rank:
            self.create(0)
        else:
            changed = [name for name, value in vars(self).items() if value != getattr(type(self), name)]
            if changed:
                raise ConfigError(
                    f"lora.{changed[0]} is {getattr(self, changed[0])!r}, but lora.rank is 0, so there are no adapters: give "
                    "--lora.rank, for example 16"
                )

    def create(self, seed: int) -> LoRAConfig | None:
        """What a backend is given. seed: of the run."""
        return LoRAConfig(**vars(self), seed=seed) if self.rank else None


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The inference engine: embedded in this process, or a server of SGLang or vLLM, started here or running already."""

    kind: str = "inprocess"  # inprocess (the embedded engine), vllm, sglang
    max_slots: int = 512  # sequences at the same time in the embedded engine
    urls: tuple[str, ...] = ()  # servers that run already, http://host:port; several are used as one
    launch: bool = False  # start a server for this run, and stop it at the end
    num_servers: int = 1  # that are started; several are used as one
    gpus: tuple[str, ...] = ()  # of the servers that are started, in order, tensor_parallel_size for each; () = the visible ones
    on_server_death: Literal["restart", "go_on", "stop"] = "restart"  # of one of several that are started; one alone ends the run
    max_restarts: int = 3  # of each server that is started
    updates_at_once: int | None = None  # of several servers, those that take new weights while others generate; None = all together
    python: str | None = None  # of the environment that has the server; None = VLLM_PYTHON or SGLANG_PYTHON, else this one
    api_key_variable: str | None = None  # environment variable that holds the key of servers that ask for one
    port: int | None = None  # of a server that is started; None = a free one
    dtype: str = "auto"  # of a server's weights: float32, bfloat16, float16; auto = float32 on a CPU, bfloat16 on a GPU
    tensor_parallel_size: int = 1  # GPUs that share the model
    context_length: int | None = None  # tokens of prompt and response together; None = the model's own
    max_num_seqs: int | None = None  # sequences at the same time in a server; None = the server's own
    memory_fraction: float | None = None  # of a GPU's memory that a server takes, all in all; None = the server's own, which is nearly all
    in_flight: Literal["continue", "abort"] = "continue"  # requests during a weight sync: go on under the new weights, or are sent again
    weight_sync: Literal["auto", "disk", "memory", "group", "ipc"] = "auto"  # of new weights to engines; auto = memory, servers from disk
    weight_sync_address: str = "127.0.0.1"  # of this machine as servers see it, for group
    weight_sync_mib: int = 256  # of weights that travel at a time, in MiB; twice as much is needed for them
    path_map: tuple[str, ...] = ()  # where servers have a shared disk at another place: /prefix/here=/prefix/there, for disk
    one_request_per_group: bool = False  # ask a server for all samples of a prompt at once, which costs less per sample
    startup_timeout_s: float = 900.0  # until a server that is started must be healthy
    extra_args: tuple[str, ...] = ()  # for the command line of a server that is started; here as --engine.extra-args=--flag=value
    parity_rows: int | None = None  # rows of each batch on which log-probs of engine and trainer are compared; None = 8 for servers, else 0
    parity_threshold: float = 0.1  # nats, of the mean difference per token, beyond which parity_action is taken
    parity_action: Literal["warn", "correct", "stop"] = "warn"  # correct = truncated importance sampling for that batch
    probe_tolerance: float | None = None  # nats, of a server's log-probs after each sync; None = 1e-3 in float32, else 0.3; 0 = do not ask

    def __post_init__(self) -> None:
        check_positive(self, "max_slots", "tensor_parallel_size", "num_servers")
        check_count(self, "max_restarts")
        good = self.updates_at_once is None or self.updates_at_once >= 1
        check_setting(good, "engine.updates_at_once", self.updates_at_once, "at least 1, or None for all together")
        if not self.launch and (self.num_servers > 1 or self.gpus):
            name = "num_servers" if self.num_servers > 1 else "gpus"
            raise ConfigError(
                f"engine.{name} is {getattr(self, name)}, but no server is started: give --engine.launch, or --engine.urls alone"
            )
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
        self._check_weight_sync()
        good = self.memory_fraction is None or 0 < self.memory_fraction < 1
        check_setting(good, "engine.memory_fraction", self.memory_fraction, "between 0 and 1, or None")
        check_setting(self.startup_timeout_s > 0, "engine.startup_timeout_s", self.startup_timeout_s, "more than 0")
        check_setting(self.parity_rows is None or self.parity_rows >= 0, "engine.parity_rows", self.parity_rows, "at least 0, or None")
        check_setting(self.parity_threshold > 0, "engine.parity_threshold", self.parity_threshold, "more than 0")
        good = self.probe_tolerance is None or self.probe_tolerance >= 0
        check_setting(good, "engine.probe_tolerance", self.probe_tolerance, "at least 0, or None")

    def _check_weight_sync(self) -> None:
        """Refuse what the engines cannot do, whatever they run on."""
        how, reason = self.weight_sync, ""
        check_setting(how in ("auto", "disk", "memory", "group", "ipc"), "engine.weight_sync", how, "auto, disk, memory, group or ipc")
        check_positive(self, "weight_sync_mib")
        PathMap.parse(self.path_map)
        if self.kind == "inprocess" and how in ("group", "ipc"):
            reason = "the embedded engine is in the trainer's process: use memory"
        elif self.kind == "vllm" and how == "memory":
            reason = "vLLM takes no weights inside of requests: use disk, group or ipc"
        elif how == "ipc" and not all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in self.urls):
            reason = "memory is shared on one machine only, and engine.urls names others: use group or disk"
        elif how in ("group", "ipc") and self.updates_at_once is not None:
            reason = f"it reaches all servers at once, and engine.updates_at_once is {self.updates_at_once}: leave that out, or use disk"
        elif how in ("group", "ipc") and self.num_servers > 1 and self.on_server_death != "stop":
            reason = "a server that is started again is not part of it: set engine.on_server_death to stop, or use disk"
        elif how in ("group", "ipc", "memory") and self.path_map:
            reason = "engine.path_map is about directories: leave it out, or use disk"
        if reason:
            raise ConfigError(f"engine.weight_sync is {how!r}, but {reason}")

    @property
    def weight_sync_mode(self) -> Literal["checkpoint", "memory", "channel"]:
        """What RLTrainingConfig.weight_sync is."""
        if self.weight_sync == "auto":
            return "checkpoint" if self.is_server else "memory"
        if self.weight_sync == "memory":  # several servers keep what they were given, for one that is started again
            return "channel" if self.is_server and self.num_servers == 1 and len(self.urls) <= 1 else "memory"
        return "checkpoint" if self.weight_sync == "disk" else "channel"

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
        if self.dtype != "auto":
            return self.dtype
        is_cpu = parse_device(device).type == "cpu" if device == "auto" else device == "cpu"  # a dry run may be of a GPU that is elsewhere
        return "float32" if is_cpu else "bfloat16"

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

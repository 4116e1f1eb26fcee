"""Sections of the settings of a run. Each checks itself; integration.settings.config combines them."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from integration.settings.deadlines import DeadlinesSection
from rollouts.asynchronous.config import AsyncConfig
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.lora.config import ALL_LINEAR, BaseDtype, LoRAConfig
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.config import LEAST_TEMPERATURE, OptimizerConfig, ParityConfig, check_count, check_not_negative, check_positive, check_setting
from rollouts.config_files import suggest
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import ConfigError, redact

if TYPE_CHECKING:
    from integration.expressions.algorithm import PresetCall

SELF_MADE_TASKS = ("sort", "sort-long", "grid_world", "calculator")  # tasks that generate their own problems
BACKEND_KINDS = ("pytorch", "fsdp", "torch_func", "jax")
ENGINE_KINDS = ("inprocess", "vllm", "sglang")


def describe_section(section: type | str) -> dict[str, str]:
    """Return the metadata of a field with a section: its help, which tyro would else look for in the source at every start.

    Args:
        section: the class whose docstring is the help, or the help.
    """
    return {"help": section if isinstance(section, str) else inspect.cleandoc(section.__doc__ or "")}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model to train or evaluate: a Hugging Face directory, or the small built-in model with random weights."""

    # Hugging Face model directory, or the name of a model on the hub, ORG/NAME, such as Qwen/Qwen3-0.6B; None = the built-in model
    path: str | None = None
    revision: str | None = None  # branch, tag or commit of a model on the hub; None = main. A run records the commit and resumes with it
    device: str = "auto"  # torch device: cpu, cuda, cuda:N, mps, or auto = cuda where torch sees a GPU, else cpu
    # kernels of linear layers on a CPU, in training by one process and in the embedded engine: torch (its own), onednn (in float32 about
    # twice as fast on AMD processors with AVX-512, other last bits), or packed (in the engine, oneDNN's for a second copy of weights of
    # 2^19 numbers or more: up to a fifth faster on Intel's); auto = the faster one with AVX-512, else torch; a resumed run keeps its choice
    kernels: Literal["auto", "torch", "onednn", "packed"] = "auto"
    trust_remote_code: bool = False  # run Python files of the model directory; only for directories you trust
    vocab_size: int = 64  # vocabulary size of the built-in model, a Qwen3 architecture over characters
    hidden_size: int = 128  # hidden size of the built-in model
    intermediate_size: int = 384  # MLP size of the built-in model
    num_layers: int = 4  # decoder layers of the built-in model
    num_heads: int = 4  # attention heads of the built-in model
    num_kv_heads: int = 2  # key-value heads of the built-in model
    max_length: int | None = None  # context of the built-in model in tokens; None = 128, or the length of the task's episodes

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_positive(self, *sizes)
        most = 3 + len(ALPHABET)
        known = self.path is not None or 4 <= self.vocab_size <= most
        check_setting(known, "model.vocab_size", self.vocab_size, f"4 to {most}, as the built-in model reads single characters")
        check_setting(self.max_length is None or self.max_length >= 1, "model.max_length", self.max_length, "at least 1, or None")
        if self.revision is not None and self.path is None:
            raise ConfigError(f"model.revision is {self.revision!r}, but there is no --model.path ORG/NAME that it would be of: give one")
        known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None  # its presence is checked when a run starts
        check_setting(known, "model.device", self.device, "cpu, cuda, cuda:N, mps or auto")
        check_setting(
            self.hidden_size % self.num_heads == 0, "model.hidden_size", self.hidden_size, f"a multiple of {self.num_heads} heads"
        )
        check_setting(
            self.num_heads % self.num_kv_heads == 0, "model.num_heads", self.num_heads, f"a multiple of {self.num_kv_heads} kv heads"
        )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The user's data. Built-in tasks need none; an environment may generate its own."""

    path: str | None = None  # rows to train on: a JSONL, JSON, CSV or Parquet file, a folder, or hf://ORG/NAME; None = no data
    # columns of --data.path (of --data.mixture without it) to read under another name, NEW=COLUMN: prompt=question,answer=meta.label;
    # () = all under their own names
    columns: tuple[str, ...] = ()
    # data sets to mix for SFT, without --data.path also for RL: a.jsonl 'b.jsonl(repeat=2)' 'c.jsonl(weight=0.3)'
    # 'folder(max_samples=1000, split="test", subset="main", columns="prompt=question")'; () = --data.path alone
    mixture: tuple[str, ...] = ()
    # rollouts that were generated and scored elsewhere, to train on in RL instead of generating: JSONL with tokens, log-probs and rewards
    rollouts: str | None = None
    eval_path: str | None = None  # file, folder or hf:// name of held-out rows; None = rows split off by eval_fraction
    # share of the rows that is held out without eval_path, at most evaluation.num_prompts rows, chosen by a hash of their prompts; 0 = none
    eval_fraction: float = 0.1
    streaming: bool = False  # read rows from their JSONL or Parquet files when they are needed, instead of keeping all in memory
    max_length: int | None = None  # maximum tokens of an SFT row; None = no limit
    truncate: bool = False  # truncate rows longer than max_length instead of refusing them
    skip_bad_rows: bool = False  # skip and count unreadable rows instead of ending the run

    def __post_init__(self) -> None:
        check_setting(self.max_length is None or self.max_length >= 1, "data.max_length", self.max_length, "at least 1, or None")
        check_setting(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0 and less than 1")
        if self.columns:
            from integration.expressions.mixture import parse_columns

            parse_columns(self.columns)
        if self.mixture:
            from integration.expressions.mixture import parse_mixture

            parse_mixture(self.mixture)


@dataclass(frozen=True, kw_only=True)
class SFTSection:
    """Supervised fine-tuning."""

    num_steps: int = 180  # optimizer steps
    batch_size: int = 64  # rows per optimizer step
    log_every: int = 1  # steps between two log entries
    eval_every: int = 30  # steps between two evaluations; 0 = only at the end
    max_tokens_per_microbatch: int = 16384  # maximum tokens of one forward and backward pass, padding excluded; bounds memory only
    dropout: bool = True  # apply the dropout of the model's configuration and lora.dropout; False = no dropout
    router_balance_coef: float = 0.0  # coefficient of the load-balancing loss of a mixture of experts; 0 = none
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.05, weight_decay=0.01),
        metadata=describe_section(OptimizerConfig),
    )

    def __post_init__(self) -> None:
        check_not_negative(self, "router_balance_coef")


@dataclass(frozen=True, kw_only=True)
class KLControlSection:
    """The coefficient of the algorithm's KL term. With all defaults the algorithm's own kl_coef holds."""

    kl_coef: float | None = None  # initial coefficient; None = the algorithm's kl_coef
    target: float | None = None  # KL per token, in nats, towards which the coefficient is adapted; None = constant coefficient
    horizon: float = 10_000.0  # samples over which the coefficient changes by at most 20 %


@dataclass(frozen=True, kw_only=True)
class RLSection:
    """Reinforcement learning."""

    num_steps: int = 12  # rollout batches to train on
    prompts_per_step: int = 64  # groups (prompts) per rollout batch
    samples_per_prompt: int = 8  # rollouts per group
    num_epochs: int = 1  # passes over each rollout batch
    num_minibatches: int = 2  # optimizer steps per pass; divides prompts_per_step * samples_per_prompt
    algorithm: str = "grpo"  # preset expression such as grpo or dapo(clip_high=0.28), or module:function that returns an Algorithm
    kl_control: KLControlSection = field(default_factory=KLControlSection, metadata=describe_section(KLControlSection))
    baseline: float | None = None  # constant baseline: advantages = rewards - baseline; None = the algorithm's advantages
    mask_truncated: bool = False  # do not train on responses cut by the token budget; their rewards still count in their groups
    overlong_buffer: int = 0  # last tokens of the budget over which a penalty for long responses grows (DAPO); 0 = no penalty
    overlong_penalty: float = 1.0  # penalty of a response that uses the whole budget; the filter sees rewards without it
    # filter of groups to train on: none, nonzero_std, min_reward(0.5), any_success(1.0), diversity(0.5), length(1, 200),
    # quality_and_diversity(0.5, 0.5), or module:function of a group
    filter: str = "none"
    over_sampling_factor: float = 1.0  # groups in flight per group wanted; at least 1
    max_filter_attempts: int = 10  # maximum rounds of generation per batch
    sync_every: int = 1  # steps between two weight syncs
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig, metadata=describe_section("rollouts generated during training"))
    # source of the segment log-probs of segment-wise PPO: trainer = same numerics as the loss; engines = no extra trainer time, but the
    # engines' rounding
    segment_scores: Literal["trainer", "engines"] = "trainer"
    log_every: int = 1  # steps between two log entries
    eval_every: int = 1  # steps between two evaluations; 0 = only at the end
    max_tokens_per_microbatch: int = 16384  # maximum tokens of one forward and backward pass, padding excluded; bounds memory only
    dropout: bool = False  # apply the dropout of the model's configuration and lora.dropout; makes policy ratios noisy
    # compute a prompt once for all rows of its group (on a CPU), and no backward pass for rows whose gradient is zero; the same numbers up
    # to rounding; False = bit for bit those of each row by itself
    skip_redundant: bool = True
    router_balance_coef: float = 0.0  # coefficient of the load-balancing loss of a mixture of experts; 0 = none
    # train a mixture of experts with the experts that the engine chose for each token (R3) instead of the trainer's own choice; embedded
    # engine
    router_replay: bool = False
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=1e-4), metadata=describe_section("AdamW, gradient clipping and the schedule of lr")
    )

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
        check_not_negative(self, "overlong_penalty", "router_balance_coef")
        # report a misspelt name now, not after the SFT stage; the default values need no check, which would import torch
        if self.algorithm != type(self).algorithm:
            _ = self.parsed_algorithm
        if self.filter != type(self).filter:
            from integration.expressions.filters import parse_filter

            parse_filter(self.filter)

    @cached_property
    def parsed_algorithm(self) -> PresetCall:
        """The parsed expression `algorithm`; none of its functions have been called."""
        from integration.expressions.algorithm import parse_algorithm

        return parse_algorithm(self.algorithm)


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The frozen reference model; loaded only if the algorithm has a KL term."""

    path: str | None = None  # Hugging Face model directory, or ORG/NAME on the hub; None = the policy at the start of RL
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the reference's weights; bfloat16 needs --backend.compute-dtype bfloat16


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _strip_user(url: str) -> str:
    scheme, separator, place = url.rpartition("://")
    return scheme + separator + place.rpartition("@")[2].partition("?")[0]


def _check_teacher_url(option: str, url: str) -> None:
    """Raise ConfigError for an address of a server that is none, or has a secret."""
    if not _is_url(url):
        raise ConfigError(f"{option} has {_strip_user(url).lstrip('/')!r}, which has no scheme http or https: give http://host:port")
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port  # a port that is no number is an error only when it is read
    except ValueError as error:
        raise ConfigError(f"{option} has {_strip_user(url)!r}, which is no address ({error}): give http://host:port") from error
    if not has_host:
        raise ConfigError(f"{option} has {_strip_user(url)!r}, which names no host: give http://host:port")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"{option} has {redact(url)!r}, with a user, a password or a query, which files of a run would hold: give http://host:port, "
            "and a key by --teacher.api-key-variable"
        )


@dataclass(frozen=True, kw_only=True)
class TeacherSection:
    """The teacher of distillation, for algorithms that need one (opd, gkd): a frozen model, a server, or the policy with a context."""

    path: str | None = None  # Hugging Face model directory, or ORG/NAME on the hub; None = the teacher is not a single model of this run
    url: tuple[str, ...] = ()  # running servers that score tokens, http://host:port; several serve the same model
    kind: Literal["vllm", "sglang"] = "vllm"  # kind of the servers of teacher.url and teacher.each
    api_key_variable: str | None = None  # environment variable with the API key of the teacher's servers; None = no key
    tokenizer: str | None = None  # model directory with the servers' tokenizer, to compare it with the policy's; None = not compared
    by: str | None = None  # field of a row of data that names its teacher among teacher.each; None = one teacher for all rows
    # teachers by the value of the field teacher.by: NAME=DIR, or NAME=http://host:port of a server
    each: tuple[str, ...] = ()
    # text that the teacher reads in place of the prompt, with {prompt} and fields of the row in braces, as '{prompt} Answer: {answer}', the
    # reward's {feedback} or the policy's {response}; without another teacher the policy itself, reading it, is the teacher; None = the
    # policy's own prompt
    context: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the weights of models; bfloat16 needs --backend.compute-dtype bfloat16
    # tokens that a model names as the most probable in place of each, for gkd; all others count as one; 0 = the whole vocabulary
    top_k: int = 64

    def __post_init__(self) -> None:
        check_count(self, "top_k")
        given = [f"--teacher.{name}" for name in ("path", "url", "each") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} is given beside {given[1]}: give one of them")
        if bool(self.each) != (self.by is not None):
            what = ("teacher.each", "--teacher.by FIELD") if self.each else ("teacher.by", "--teacher.each NAME=DIR NAME=DIR")
            raise ConfigError(f"{what[0]} is given alone: add {what[1]}")
        for entry in self.each:
            name, separator, place = entry.partition("=")
            if not (name and separator and place):
                raise ConfigError(f"teacher.each has {entry!r}, expected NAME=DIR or NAME=http://host:port")
        if len({entry.partition("=")[0] for entry in self.each}) < len(self.each):
            raise ConfigError(f"teacher.each names a teacher twice: {', '.join(self.each)}")
        if self.path is not None and "://" in self.path:
            raise ConfigError(f"teacher.path is {_strip_user(self.path)!r}, which is no directory: give a server by --teacher.url")
        for url in self.url:
            _check_teacher_url("teacher.url", url)
        for _, place in self._each:
            if "://" in place:
                _check_teacher_url("teacher.each", place)
        if self.context is not None and (self.url or self.servers):
            raise ConfigError("teacher.context is given with servers: a context is for models of this run, --teacher.path or the policy")

    @property
    def models(self) -> dict[str, str]:
        """Directories of models of this run, by the name of the teacher; "" = the only one."""
        return ({} if self.path is None else {"": self.path}) | {name: place for name, place in self._each if not _is_url(place)}

    @property
    def servers(self) -> dict[str, str]:
        """Servers of teacher.each, by the name of the teacher."""
        return {name: place for name, place in self._each if _is_url(place)}

    @property
    def is_given(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.path or self.url or self.each or self.context)

    @property
    def is_policy(self) -> bool:
        """Whether the teacher is the policy itself with a context."""
        return self.context is not None and not self.models

    @property
    def _each(self) -> list[tuple[str, str]]:
        return [(name, place) for name, _, place in (entry.partition("=") for entry in self.each)]


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The value model; created only if the algorithm requires values (ppo)."""

    path: str | None = None  # directory of a saved critic or a language model; None = the policy at the start of RL
    warmup_steps: int = 0  # initial RL steps that train only the critic
    value_clip: float | None = 0.2  # maximum change of values since collection, in reward units; None = no clipping
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3), metadata=describe_section(OptimizerConfig))

    def __post_init__(self) -> None:
        check_count(self, "warmup_steps")


CRASH_BUNDLES = ("auto", "full", "linked", "none")  # choices of crash_bundles
OWN_MODEL_CRITIC = CriticSection(optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0))
"""Defaults of a critic of the user's own model, with the learning rate of verl's critics."""


@dataclass(frozen=True, kw_only=True)
class GenerationSection:
    """Sampling of responses, in RL and in sampled evaluation."""

    max_tokens: int | None = None  # token budget of a response, or of each action of an episode; None = the task's default
    temperature: float = 1.0  # sampling temperature, at least 1e-6
    enable_thinking: bool | None = None  # enable_thinking argument of the chat template; None = the template's default
    stop: tuple[str, ...] = ()  # strings that end a response
    # sample from the fewest tokens whose probability together reaches this, more than 0; 1 = from all. Training then compares log-probs
    # over the same tokens, which the embedded engine records; with servers such answers are not trained on
    top_p: float = 1.0
    top_k: int = 0  # number of most probable tokens to sample from; 0 = all. Answers are trained on as with top_p
    # smallest probability of a token that is sampled, as a share of the largest one; 0 = all tokens. Answers are trained on as with top_p
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_setting(self.max_tokens is None or self.max_tokens >= 1, "generation.max_tokens", self.max_tokens, "at least 1, or None")
        check_setting(
            LEAST_TEMPERATURE <= self.temperature < math.inf,
            "generation.temperature",
            self.temperature,
            f"a finite number, at least {LEAST_TEMPERATURE:g}: greedy samples of a group are all equal",
        )
        check_setting(0 < self.top_p <= 1, "generation.top_p", self.top_p, "more than 0, at most 1")
        check_setting(self.top_k >= 0, "generation.top_k", self.top_k, "at least 0")
        check_setting(0 <= self.min_p < 1, "generation.min_p", self.min_p, "at least 0, less than 1")

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The reward function and its error policy."""

    # reward function, file.py:name or module:name, also of TRL or verl; several with weights: 'a.py:right*0.8,a.py:brief*0.2'; None = the
    # task's reward
    function: str | None = None
    sandboxed: bool = False  # call the reward function in a sandbox, for files you do not trust
    timeout_s: float | None = 30.0  # seconds to wait for a reward; None = no limit
    # reaction to a reward that fails: raise = end the run; retry = call the function again, up to max_retries times; drop = drop the group
    # of the answer; zero = count it as reward 0, and mark it
    on_error: Literal["raise", "retry", "drop", "zero"] = "raise"
    max_retries: int = 2  # further calls after a failure, with on_error retry
    model: str | None = None  # directory of a reward model to train on instead of `function`; evaluations still use `function`
    model_device: str | None = None  # torch device of the reward model; None = the policy's device
    model_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # dtype of the reward model's weights
    model_tokens_per_batch: int = 16384  # maximum tokens of one forward pass of the reward model

    def __post_init__(self) -> None:
        check_positive(self, "model_tokens_per_batch")


@dataclass(frozen=True, kw_only=True)
class BackendSection:
    """The training backend."""

    # pytorch = one process, one device; fsdp = several processes, each with a shard of the model; torch_func, jax = one process, functional
    # training state
    kind: str = "pytorch"
    # processes of fsdp; None = those torchrun started, else one per GPU that no launched server needs, or 1
    num_processes: int | None = None
    timeout_s: float = 600.0  # seconds to wait for one collective operation of fsdp
    fsdp: FSDPConfig = field(
        default_factory=FSDPConfig, metadata=describe_section("sharding of the model over processes (backend.kind fsdp)")
    )
    # dtype of matrix products, float32 or bfloat16; weights and log-probs stay float32; auto = bfloat16 on a CUDA GPU that has it, else
    # float32
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # dtype of the trained weights; bfloat16 takes half the memory, needs --backend.compute-dtype bfloat16 and optimizers with moments of 8
    # bits, which round stochastically
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    # keep the inputs of layers alone and recompute activations in the backward pass: less memory, and a third more time
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.kind not in BACKEND_KINDS:
            raise ConfigError(f"unknown backend.kind {self.kind!r}: {suggest(self.kind, BACKEND_KINDS)}")
        count = self.num_processes
        check_setting(count is None or count >= 1, "backend.num_processes", count, "at least 1, or None")
        check_setting(self.timeout_s > 0, "backend.timeout_s", self.timeout_s, "more than 0")
        good = self.kind != "jax" or self.compute_dtype != "bfloat16"
        check_setting(good, "backend.compute_dtype", self.compute_dtype, "float32 with backend.kind 'jax'")
        check_setting(
            self.master_dtype == "float32" or self.kind == "pytorch",
            "backend.master_dtype",
            self.master_dtype,
            f"float32 with backend.kind {self.kind!r}: only 'pytorch' rounds stochastically",
        )
        check_setting(
            not self.gradient_checkpointing or self.kind in ("pytorch", "fsdp"),
            "backend.gradient_checkpointing",
            True,
            f"False with backend.kind {self.kind!r}, whose functions cannot keep a layer's input alone: use 'pytorch' or 'fsdp'",
        )
        if self.kind != "fsdp":
            others = {"num_processes": (self.num_processes, None)}
            others |= {f"fsdp.{f.name}": (getattr(self.fsdp, f.name), f.default) for f in fields(FSDPConfig)}
            for name, (value, default) in others.items():
                expected = f"nothing with backend.kind {self.kind!r}: add --backend.kind fsdp"
                check_setting(value == default, f"backend.{name}", value, expected)

    @property
    def recomputes_activations(self) -> bool:
        """Whether activations are recomputed in the backward pass, by either option."""
        return self.gradient_checkpointing or self.fsdp.gradient_checkpointing

    def precision(self, device: str) -> str:
        """Return the dtype of matrix products of a model on `device`: cpu, cuda, cuda:N, mps, auto."""
        if self.compute_dtype != "auto":
            return self.compute_dtype
        if self.kind == "jax":
            return "float32"
        from rollouts.models.loading import find_compute_dtype

        return find_compute_dtype(device)


@dataclass(frozen=True, kw_only=True)
class LoRASection:
    """Low-rank adapters, trained instead of the policy's weights in every stage; see LoRAConfig."""

    rank: int = 0  # rank of the adapters; 0 = no adapters, all weights are trained
    alpha: float | None = None  # adapters are scaled by alpha / rank; None = 2 * rank
    dropout: float = 0.0  # dropout of an adapter's input, in training only
    target_modules: tuple[str, ...] = (ALL_LINEAR,)  # layers with adapters, such as q_proj v_proj; all-linear = all but the output layer
    use_rslora: bool = False  # scale adapters by alpha / sqrt(rank)
    # dtype of the frozen weights; bfloat16 takes half the memory, nf4 4.5 bits for each weight with an adapter (package bitsandbytes); both
    # need --backend.compute-dtype bfloat16
    base_dtype: BaseDtype = "float32"
    save_base: bool = False  # include the frozen base weights in each checkpoint

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
        """Return the adapters' configuration for a backend, None without adapters. seed: the run's seed."""
        return LoRAConfig(**vars(self), seed=seed) if self.rank else None


_KEY_FLAGS = ("--api-key", "--admin-api-key", "--hf-token")


def _names_key(argument: str) -> bool:
    """Whether an argument of a server is a flag for a key; servers take underscores and abbreviations, too."""
    name = argument.split("=")[0].lower().replace("_", "-")
    return len(name) >= len("--api") and any(flag.startswith(name) for flag in _KEY_FLAGS)


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The inference engine: embedded in this process, or SGLang or vLLM servers, launched by the run or already running."""

    kind: str = "inprocess"  # inprocess (the embedded engine), vllm, or sglang
    max_slots: int = 512  # maximum concurrent sequences of the embedded engine
    # tokens of prompts whose keys and values the embedded engine keeps for prompts that begin alike, such as the next turn; 0 = none
    prefix_cache_tokens: int = 65_536
    cuda_graphs: bool = False  # record the decode steps of the embedded engine on a GPU as CUDA graphs
    urls: tuple[str, ...] = ()  # running servers, http://host:port; several serve as one engine
    launch: bool = False  # launch servers for this run and stop them at its end
    num_servers: int = 1  # servers to launch; several serve as one engine
    # GPU ids of the launched servers in order, tensor_parallel_size for each; () = the visible GPUs behind those of training
    gpus: tuple[str, ...] = ()
    # reaction to the death of one of several launched servers: restart = restart it; go_on = go on with the others; stop = end the run, as
    # the death of a single server always does
    on_server_death: Literal["restart", "go_on", "stop"] = "restart"
    max_restarts: int = 3  # maximum restarts of each launched server
    updates_at_once: int | None = None  # servers that load new weights at a time while the others generate; None = all at once
    python: str | None = None  # Python interpreter with the server package; None = VLLM_PYTHON or SGLANG_PYTHON, else this one
    api_key_variable: str | None = None  # environment variable with the API key of the servers; None = no key
    port: int | None = None  # port of the launched server; None = a free port
    # dtype of the engine's weights and caches, embedded or launched: auto = float32 on a CPU, bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: int = 1  # GPUs per server
    context_length: int | None = None  # maximum tokens of prompt and response together; None = the model's context
    max_num_seqs: int | None = None  # maximum concurrent sequences of a server; None = the server's default
    # fraction of GPU memory for a server, weights included; None = the server's default, nearly all; required on a GPU of training
    memory_fraction: float | None = None
    # let servers release the memory of their GPU while the policy is trained; None = True for launched servers on a GPU of training with
    # synchronous rollouts
    sleep: bool | None = None
    # requests in progress at a weight sync: continue = they go on under the new weights; abort = they are aborted and sent again
    in_flight: Literal["continue", "abort"] = "continue"
    # transport of new weights to the engines: disk, memory, group (a process group), ipc (shared memory of one machine); auto = memory for
    # the embedded engine, group for launched servers on GPUs of their own with the trainer's NCCL, ipc for SGLang on the trainer's GPU, and
    # disk otherwise
    weight_sync: Literal["auto", "disk", "memory", "group", "ipc"] = "auto"
    weight_sync_address: str = "127.0.0.1"  # address of this machine as seen by the servers, for weight_sync group
    weight_sync_mib: int = 256  # MiB of weights sent at a time; uses twice as much memory
    path_map: tuple[str, ...] = ()  # mount points of a shared disk, /prefix/here=/prefix/on-server, for weight_sync disk
    one_request_per_group: bool = False  # request all samples of a prompt at once, which costs less per sample
    startup_timeout_s: float = 900.0  # seconds to wait for a launched server to become healthy
    generate_timeout_s: float = 3600.0  # seconds to wait for the answer of a server to one request of rollouts
    sync_timeout_s: float = 600.0  # seconds to wait for a server to load new weights
    deadlines: DeadlinesSection = field(
        default_factory=DeadlinesSection, metadata=describe_section("seconds to wait for everything else that a server does")
    )
    extra_args: tuple[str, ...] = ()  # further arguments of the launched server; write --engine.extra-args=--flag=value
    # rows of each batch on which engine and trainer log-probs are compared; None = 8 for servers, 0 for the embedded engine
    parity_rows: int | None = None
    parity_threshold: float = 0.1  # mean difference per token in nats above which parity_action is taken
    # action on a batch above parity_threshold: warn; correct = truncated importance sampling for that batch; stop = end the run
    parity_action: Literal["warn", "correct", "stop"] = "warn"
    # maximum error of a server's log-probs after each sync, in nats; None = 1e-3 in float32, else 0.3; 0 = no probe
    probe_tolerance: float | None = None

    def __post_init__(self) -> None:
        self._check_credentials()
        check_positive(self, "max_slots", "tensor_parallel_size", "num_servers")
        check_count(self, "max_restarts", "prefix_cache_tokens")
        good = self.updates_at_once is None or self.updates_at_once >= 1
        check_setting(good, "engine.updates_at_once", self.updates_at_once, "at least 1, or None for all together")
        if not self.launch and (self.num_servers > 1 or self.gpus):
            name = "num_servers" if self.num_servers > 1 else "gpus"
            raise ConfigError(
                f"engine.{name} is {getattr(self, name)}, but no server is launched: give --engine.launch, or --engine.urls alone"
            )
        check_setting(self.kind in ENGINE_KINDS, "engine.kind", self.kind, " or ".join(ENGINE_KINDS))
        if self.kind == "inprocess":
            names = "urls launch python port context_length max_num_seqs memory_fraction sleep extra_args api_key_variable"
            for name in names.split():
                check_setting(
                    not getattr(self, name),
                    f"engine.{name}",
                    getattr(self, name),
                    "no value, as the embedded engine is not a server: set engine.kind",
                )
            check_setting(
                not self.one_request_per_group, "engine.one_request_per_group", True, "False: the embedded engine shares prompts by itself"
            )
        elif self.cuda_graphs:
            raise ConfigError(
                f"engine.cuda_graphs is True, but engine.kind is {self.kind!r}, a server, which has settings of its own for graphs: leave "
                "--engine.cuda-graphs out, or set --engine.kind inprocess"
            )
        elif self.launch == bool(self.urls):
            found = "both given" if self.launch else "neither given"
            raise ConfigError(
                f"engine.kind is {self.kind!r}, and engine.launch and engine.urls are {found}: give either --engine.launch to start a "
                "server for this run, or --engine.urls http://host:port of a running server"
            )
        self._check_weight_sync()
        good = self.memory_fraction is None or 0 < self.memory_fraction < 1
        check_setting(good, "engine.memory_fraction", self.memory_fraction, "between 0 and 1, or None")
        for name in ("startup_timeout_s", "generate_timeout_s", "sync_timeout_s"):
            check_setting(getattr(self, name) > 0, f"engine.{name}", getattr(self, name), "more than 0")
        check_setting(self.parity_rows is None or self.parity_rows >= 0, "engine.parity_rows", self.parity_rows, "at least 0, or None")
        check_setting(self.parity_threshold > 0, "engine.parity_threshold", self.parity_threshold, "more than 0")
        good = self.probe_tolerance is None or self.probe_tolerance >= 0
        check_setting(good, "engine.probe_tolerance", self.probe_tolerance, "at least 0, or None")

    def _check_credentials(self) -> None:
        """Refuse secrets among the settings: they would show in config.json, in messages and in the list of processes."""
        for url in self.urls:
            if not url.lower().startswith(("http://", "https://")):
                raise ConfigError(f"engine.urls has {url.rpartition('@')[2].lstrip('/')!r}, which has no scheme: give http://host:port")
            if redact(url) != url:
                raise ConfigError(
                    f"engine.urls has {redact(url)!r}, a user, a password or a query in an address, which the files and messages of a run "
                    "would show: give http://host:port, export the key as a variable, and name it by --engine.api-key-variable"
                )
        if any(_names_key(argument) or redact(argument) != argument for argument in self.extra_args):
            raise ConfigError(
                "engine.extra_args has a key, which the files of a run and the list of processes would show: export it as the variable "
                "that the server reads (VLLM_API_KEY, HF_TOKEN), and name it by --engine.api-key-variable if requests need it"
            )

    def _check_weight_sync(self) -> None:
        """Refuse transports of weights that the engines do not support on any device."""
        how = self.weight_sync
        check_setting(how in ("auto", "disk", "memory", "group", "ipc"), "engine.weight_sync", how, "auto, disk, memory, group or ipc")
        check_positive(self, "weight_sync_mib")
        PathMap.parse(self.path_map)
        if reason := self.explain_refusal(how):
            raise ConfigError(f"engine.weight_sync is {how!r}, but {reason}")

    def explain_refusal(self, how: str) -> str:
        """Explain why the engines do not support a transport of weights on any device; "" if they may."""
        reason = ""
        if self.kind == "inprocess" and how in ("group", "ipc"):
            reason = "the embedded engine is in the trainer's process: use memory"
        elif self.kind == "vllm" and how == "memory":
            reason = "vLLM accepts no weights in requests: use disk, group or ipc"
        elif how == "ipc" and not all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in self.urls):
            reason = "memory is shared within one machine, and engine.urls names other machines: use group or disk"
        elif how in ("group", "ipc") and self.updates_at_once is not None:
            reason = f"it reaches all servers at once, and engine.updates_at_once is {self.updates_at_once}: leave that out, or use disk"
        elif how in ("group", "ipc") and self.num_servers > 1 and self.on_server_death != "stop":
            reason = "a restarted server is not part of it: set engine.on_server_death to stop, or use disk"
        elif how in ("group", "ipc", "memory") and self.path_map:
            reason = "engine.path_map applies to directories: leave it out, or use disk"
        return reason

    @property
    def weight_sync_mode(self) -> Literal["checkpoint", "memory", "channel"]:
        """The value of RLTrainingConfig.weight_sync."""
        if self.weight_sync == "auto":
            return "checkpoint" if self.is_server else "memory"
        if self.weight_sync == "memory":  # several servers: weights are kept in memory for a restarted server
            return "channel" if self.is_server and self.num_servers == 1 and len(self.urls) <= 1 else "memory"
        return "checkpoint" if self.weight_sync == "disk" else "channel"

    @property
    def is_server(self) -> bool:
        """Whether requests go over HTTP."""
        return self.kind != "inprocess"

    def parity(self) -> ParityConfig | None:
        """Return the comparison of engine and trainer log-probs on each batch; None = no comparison."""
        rows = (8 if self.is_server else 0) if self.parity_rows is None else self.parity_rows
        return ParityConfig(num_rows=rows, threshold=self.parity_threshold, action=self.parity_action) if rows else None

    def precision(self, device: str) -> str:
        """Return the dtype of an engine whose model is on `device`: cpu, cuda, cuda:N, auto."""
        if self.dtype != "auto":
            return self.dtype
        from rollouts.models.loading import find_device_name

        return "float32" if find_device_name(device) == "cpu" else "bfloat16"

    def tolerance(self, device: str) -> float | None:
        """Return the tolerated error of log-probs after a sync, in nats; None = no probe. device: as for precision."""
        if self.probe_tolerance is None:
            return (1e-3 if self.precision(device) == "float32" else 0.3) if self.is_server else None
        return self.probe_tolerance or None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Evaluation of accuracy on held-out problems."""

    num_prompts: int = 256  # held-out problems
    sampled: bool = True  # evaluate sampling at generation.temperature besides greedy decoding

    def __post_init__(self) -> None:
        check_positive(self, "num_prompts")


@dataclass(frozen=True, kw_only=True)
class TrajectorySection:
    """Rollouts written to rl/trajectories/step_NNNN.jsonl for inspection: whole groups of each step, or every n-th sample."""

    groups: int = 4  # write this many whole groups of each step, spread evenly over it; 0 = none
    every: int | None = None  # write every n-th sample instead of whole groups: 1 = all, 0 = none; None = whole groups
    # module:function or file.py:function, Sample -> bool: only samples for which it is true are written, or groups that have such a sample
    condition: str | None = None
    steps: bool = False  # include the steps of episodes: observation, action, reward, return, advantage and its parts

    def __post_init__(self) -> None:
        check_not_negative(self, "groups")
        check_setting(self.every is None or self.every >= 0, "trajectories.every", self.every, "at least 0, or None")
        alone = self.every is None or self.groups in (0, type(self).groups)
        asked = f"it left out beside trajectories.every {self.every}: a file holds whole groups or every n-th sample"
        check_setting(alone, "trajectories.groups", self.groups, asked)
        none = f"False where trajectories.{'groups' if self.every is None else 'every'} is 0"
        check_setting(self.writes or not self.steps, "trajectories.steps", self.steps, none)

    @property
    def writes(self) -> bool:
        """Whether any rollouts are written."""
        return (self.groups if self.every is None else self.every) > 0


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    """A profile of some steps of each stage, written to profile/<stage>: a trace in Chrome's format, and a table."""

    steps: int = 0  # steps to profile, which take longer meanwhile; 0 = none
    skip: int = 2  # steps at the beginning of each stage that are not profiled, as they fill memory and caches

    def __post_init__(self) -> None:
        check_not_negative(self, "steps")
        check_positive(self, "skip")


@dataclass(frozen=True, kw_only=True)
class HardwareSection:
    """The hardware that --dry-run assumes; a run ignores it."""

    memory_gib: float | None = None  # GiB of memory of a GPU, or of the machine if the model is on the CPU; None = detected
    ranks_per_node: int = 8  # processes per node
    node_gb_per_s: float = 200.0  # GB/s a process receives within its node; default: half of NVLink 4's 450 GB/s per direction
    network_gb_per_s: float = 25.0  # GB/s a process receives from other nodes; default: half of 400 Gbit/s per GPU

    def __post_init__(self) -> None:
        check_positive(self, "ranks_per_node")
        for name in ("memory_gib", "node_gb_per_s", "network_gb_per_s"):
            value = getattr(self, name)
            check_setting(value is None or value > 0, f"hardware.{name}", value, "more than 0")

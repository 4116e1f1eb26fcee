"""Frozen configurations, validated when made. Their way to and from JSON, which can be imported from here, too, is in config_json.py."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from rollouts.config_json import FUNCTIONS_KEY as FUNCTIONS_KEY
from rollouts.config_json import from_dict as from_dict
from rollouts.config_json import is_number
from rollouts.config_json import load_config as load_config
from rollouts.config_json import save_config as save_config
from rollouts.config_json import suggest as suggest
from rollouts.config_json import to_dict as to_dict
from rollouts.errors import ConfigError
from rollouts.kl_control import KLControl
from rollouts.types import Algorithm, Group, Sample, SamplingParams

Schedule = Literal["constant", "linear", "cosine"]
OnRewardError = Literal["raise", "retry", "drop", "zero"]
WeightSync = Literal["checkpoint", "memory", "channel"]
ParityAction = Literal["warn", "correct", "stop"]


def check_setting(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError unless the condition holds: what was wrong, the value found, what to do."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


def check_positive(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        check_setting(_is_whole(value) and value >= 1, f"{type(config).__name__}.{name}", value, "a whole number, at least 1")


def check_count(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a whole number of at least 0."""
    for name in names:
        value = getattr(config, name)
        check_setting(_is_whole(value) and value >= 0, f"{type(config).__name__}.{name}", value, "a whole number, at least 0")


def check_not_negative(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a finite number of at least 0."""
    for name in names:
        value = getattr(config, name)
        good = is_number(value) and math.isfinite(value) and value >= 0
        check_setting(good, f"{type(config).__name__}.{name}", value, "a finite number, at least 0")


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, with a suggestion, unless the named field is one of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: {suggest(str(value), choices)}")


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig:
    """How run_sft_training goes through its samples."""

    num_steps: int = 100  # optimizer steps
    batch_size: int = 32  # rows per optimizer step
    log_every: int = 1  # steps between two lines of metrics; the last step is always logged
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward; bounds memory, never changes a result
    seed: int = 0  # of the order of samples

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_count(self, "checkpoint_every", "eval_every")


@dataclass(frozen=True, kw_only=True)
class RewardModelTrainingConfig:
    """How train_reward_model goes through its pairs."""

    num_steps: int = 100  # optimizer steps
    batch_size: int = 64  # pairs per optimizer step
    log_every: int = 1  # steps between two lines of metrics; the last step is always logged
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations on held-out pairs; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward, pairs whole; bounds memory, never changes a result
    seed: int = 0  # of the order of pairs

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_count(self, "checkpoint_every", "eval_every")


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """A look at every batch whose weights the engines have just been given: does the trainer give its tokens the same log-probs?"""

    num_rows: int = 8  # of the batch that the trainer computes again; more cost time and find rarer differences
    threshold: float = 0.1  # nats, of the mean |difference| per token: 1e-5 is usual in float32, 0.01 to 0.05 with bfloat16 engines
    action: ParityAction = "warn"  # beyond it: a warning; truncated importance sampling for this batch; or an error
    cap: float = 2.0  # of the importance weights of "correct"

    def __post_init__(self) -> None:
        check_positive(self, "num_rows")
        for name in ("threshold", "cap"):
            value = getattr(self, name)
            check_setting(is_number(value) and value > 0, f"ParityConfig.{name}", value, "more than 0")
        check_choice(self, "action", get_args(ParityAction))


@dataclass(frozen=True, kw_only=True)
class RLTrainingConfig:
    """How run_rl_training trains. One step is one rollout batch."""

    num_steps: int = 10  # rollout batches
    sync_every: int = 1  # steps between two weight syncs
    num_epochs: int = 1  # passes over each rollout batch
    num_minibatches: int = 1  # optimizer steps in each pass
    algorithm: Algorithm | None = None  # None = algorithms.grpo()
    baseline: float | None = None  # a number instead of the algorithm's baseline: advantages = rewards - baseline
    log_every: int = 1  # steps between two lines of metrics; the last step is always logged
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward
    weight_sync: WeightSync = (
        "checkpoint"  # how engines get new weights: from a directory, handed over in this process, or through a weight_channel
    )
    seed: int = 0  # of the order of rows in minibatches
    shape_reward: Callable[[Sample], float] | None = None  # the reward that is trained on, of a sample whose own reward filters have seen
    mask_truncated: bool = False  # leave samples that ran out of tokens out of the loss; their rewards count in their groups (DAPO)
    value_clip: float | None = 0.2  # how far values may move from those at collection time, in reward units; None = no clipping
    critic_warmup_steps: int = 0  # first steps in which only the critic is trained
    parity: ParityConfig | None = None  # compare log-probs of engines and trainer; None = do not
    probe_tolerance: float | None = None  # nats: after each sync engines must give probe_tokens tokens of a rollout the trainer's
    # log-probs, up to this: 1e-3 in float32, about 0.3 where the engine is bfloat16; None = trust what they say
    probe_tokens: int = 64
    kl_control: KLControl | None = None  # coefficient of the algorithm's KL term from step to step; None = the algorithm's own number

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "sync_every", "num_epochs", "num_minibatches", "log_every", "max_tokens_per_microbatch")
        check_count(self, "checkpoint_every", "eval_every", "critic_warmup_steps")
        check_choice(self, "weight_sync", get_args(WeightSync))
        check_setting(self.probe_tokens >= 2, "RLTrainingConfig.probe_tokens", self.probe_tokens, "at least 2")
        tolerance = self.probe_tolerance
        good = tolerance is None or (is_number(tolerance) and tolerance > 0)
        check_setting(good, "RLTrainingConfig.probe_tolerance", tolerance, "more than 0, or None")
        clip = self.value_clip
        check_setting(clip is None or (is_number(clip) and clip > 0), "RLTrainingConfig.value_clip", clip, "more than 0, or None")
        finite = self.baseline is None or (is_number(self.baseline) and math.isfinite(self.baseline))
        check_setting(finite, "RLTrainingConfig.baseline", self.baseline, "a finite number or None")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What happens when a reward function fails: raises, takes too long, or returns something that is not a finite number."""

    timeout_s: float | None = 30.0  # for one call: a sample, or a whole group in batch mode; None = wait for ever
    on_error: OnRewardError = "raise"  # end the run | try again | drop the group and count it | reward 0, marked and counted
    max_retries: int = 2  # with "retry"; then the run ends

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        positive = timeout is None or (is_number(timeout) and timeout > 0)
        check_setting(positive, "RewardConfig.timeout_s", timeout, "more than 0 seconds, or None")
        check_choice(self, "on_error", get_args(OnRewardError))
        check_count(self, "max_retries")


@runtime_checkable
class ScoringGenerateFn(Protocol):
    """A generate function that scores its groups and can be taken apart.

    RolloutConfig puts its parts in their places. A group is then in hand before its rewards are asked for, so an interruption costs no
    tokens, and a reward that fails is treated as one and not as a failed rollout.
    """

    unscored: Callable[..., Any]  # the generate function without the rewards
    reward_fn: Callable[[Sample], Any]
    reward: RewardConfig | None  # None = that of RolloutConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How batches of rollouts are produced. A group is all samples of one prompt.

    A generate_fn that is a ScoringGenerateFn brings reward_fn, and maybe reward, with it.
    """

    batch_size: int  # groups per batch
    n_samples_per_prompt: int = 1  # that are trained on
    n_baseline_samples: int = 0  # further ones in each group that only count in its statistics, for example ReMax's one greedy sample
    segment_log_probs: bool = False  # whether samples carry them, for decoupled(..., segment_wise=True); see proximal.py
    over_sampling_factor: float = 1.0  # groups in flight per group wanted; what finishes too late is used in the next batch
    generate_fn: Callable[..., Any] | None = None  # (prompt, n[, partial]) -> group; sync or async
    reward_fn: Callable[[Sample], Any] | None = None  # sample -> float or EvaluateResult; sync or async; or a rewards.calls.GroupReward
    filter_fn: Callable[[Group], bool] | None = None  # group -> keep it; sees rewards, and no baseline samples
    max_filter_attempts: int = 10  # rounds of generation for one batch before a filter that passes too little is an error
    grace_s: float = 5.0  # for unfinished groups to return what they have, once the batch is full
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "n_samples_per_prompt", "max_filter_attempts")
        check_count(self, "n_baseline_samples")
        factor = self.over_sampling_factor
        enough = is_number(factor) and math.isfinite(factor) and factor >= 1.0
        check_setting(enough, "RolloutConfig.over_sampling_factor", factor, "a finite number, at least 1.0")
        check_not_negative(self, "grace_s")
        for name in ("generate_fn", "reward_fn", "filter_fn"):
            function = getattr(self, name)
            check_setting(function is None or callable(function), f"RolloutConfig.{name}", function, "a function or None")
        if hasattr(self.reward_fn, "open_reward"):  # rewards.calls.RewardSource
            source = type(self.reward_fn).__name__
            raise ConfigError(f"RolloutConfig.reward_fn is a {source}: `async with source.open_reward() as reward_fn`, and pass that")
        if isinstance(self.generate_fn, ScoringGenerateFn):
            self._take_apart(self.generate_fn)

    def _take_apart(self, scoring: ScoringGenerateFn) -> None:
        if self.reward_fn is not None:
            raise ConfigError("RolloutConfig.reward_fn is given, but generate_fn scores its groups itself: leave one of the two out")
        if scoring.reward is not None and self.reward not in (RewardConfig(), scoring.reward):
            raise ConfigError(
                f"RolloutConfig.reward is {self.reward}, but generate_fn has {scoring.reward} for its own rewards: leave one of them out"
            )
        object.__setattr__(self, "generate_fn", scoring.unscored)
        object.__setattr__(self, "reward_fn", scoring.reward_fn)
        object.__setattr__(self, "reward", scoring.reward or self.reward)

    @property
    def group_size(self) -> int:
        """Samples in a group, baseline samples included."""
        return self.n_samples_per_prompt + self.n_baseline_samples


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    n_samples: int = 1  # samples per prompt
    max_tokens: int = 256  # most tokens of a response
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    greedy: bool = False  # take the most probable token whatever temperature says
    enable_thinking: bool | None = None  # passed to the chat template; None = the template's own default
    stop: tuple[str, ...] = ()  # strings that end a response
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's end of text

    def __post_init__(self) -> None:
        check_positive(self, "n_samples", "max_tokens")
        check_not_negative(self, "temperature")
        check_count(self, "top_k")
        check_setting(is_number(self.top_p) and 0 < self.top_p <= 1, "GenerationConfig.top_p", self.top_p, "more than 0, at most 1")
        check_setting(is_number(self.min_p) and 0 <= self.min_p <= 1, "GenerationConfig.min_p", self.min_p, "at least 0, at most 1")

    def new(self, **changes: Any) -> GenerationConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p cut the distribution, so that its log-probs are not those that a trainer computes."""
        return self.sampling_params().truncates

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """The parameters of one request."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if self.greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: float = 1e-5  # peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # on matrices only
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm
    warmup_steps: int = 0  # optimizer steps from 0 to lr
    schedule: Schedule = "constant"  # after the warm-up
    min_lr_ratio: float = 0.0  # lr at the end of a linear or cosine schedule, relative to the peak

    def __post_init__(self) -> None:
        check_not_negative(self, "lr", "eps", "weight_decay", "min_lr_ratio")
        check_count(self, "warmup_steps")
        norm = self.max_grad_norm
        check_setting(is_number(norm) and norm > 0, "OptimizerConfig.max_grad_norm", norm, "more than 0 (inf = no clipping)")
        good = len(self.betas) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        check_setting(good, "OptimizerConfig.betas", self.betas, "two numbers in [0, 1)")
        check_choice(self, "schedule", get_args(Schedule))
        check_setting(self.min_lr_ratio <= 1, "OptimizerConfig.min_lr_ratio", self.min_lr_ratio, "a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    sft_every: int = 60  # SFT steps; 0 = only after the last
    rl_every: int = 1  # RL steps; 0 = only after the last
    keep_last_n: int = 2  # older ones are deleted once a new one is complete

    def __post_init__(self) -> None:
        check_count(self, "sft_every", "rl_every")
        check_positive(self, "keep_last_n")


def check_rl_batch_sizes(rollout: RolloutConfig, training: RLTrainingConfig) -> None:
    """Raise ConfigError if a rollout batch cannot be divided into minibatches of one size, which would weigh rows unequally."""
    rows = rollout.batch_size * rollout.n_samples_per_prompt
    if rows % training.num_minibatches:
        raise ConfigError(
            f"a rollout batch of {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} samples = {rows} rows does not divide into "
            f"num_minibatches = {training.num_minibatches}: choose a divisor of {rows}"
        )

"""Frozen configurations, validated at construction. config_files.py, re-exported here, converts them to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, runtime_checkable

from rollouts.config_files import is_number, is_whole, suggest
from rollouts.errors import ConfigError
from rollouts.types import Algorithm, FilterFn, KLControl, Sample, SamplingParams

C = TypeVar("C")

LEAST_TEMPERATURE = 1e-6
"""Least temperature above 0: logits divided by less run over in float32."""

Schedule = Literal["constant", "linear", "cosine"]
Moments = Literal["float32", "8bit"]
OnRewardError = Literal["raise", "retry", "drop", "zero"]
HISTORY_STEPS = 1000
"""Steps whose metrics are kept in memory unless a configuration says otherwise: that memory does not grow with the length of a run."""

WeightSync = Literal["checkpoint", "memory", "channel"]
ParityAction = Literal["warn", "correct", "stop"]


def check_setting(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError with the setting's name, its value and the expected one unless the condition holds."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


def check_positive(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        check_setting(is_whole(value) and value >= 1, f"{type(config).__name__}.{name}", value, "a whole number, at least 1")


def check_history_steps(value: int | None) -> None:
    """Raise ConfigError unless history_steps is a whole number of at least 1, or None."""
    check_setting(value is None or (is_whole(value) and value >= 1), "history_steps", value, "a whole number, at least 1, or None")


def check_count(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a whole number of at least 0."""
    for name in names:
        value = getattr(config, name)
        check_setting(is_whole(value) and value >= 0, f"{type(config).__name__}.{name}", value, "a whole number, at least 0")


def check_not_negative(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a finite number of at least 0."""
    for name in names:
        value = getattr(config, name)
        good = is_number(value) and math.isfinite(value) and value >= 0
        check_setting(good, f"{type(config).__name__}.{name}", value, "a finite number, at least 0")


def check_flags(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is True or False; a text such as "False" would count as True."""
    for name in names:
        value = getattr(config, name)
        check_setting(isinstance(value, bool), f"{type(config).__name__}.{name}", value, "True or False")


def check_seed(config: object) -> None:
    """Raise ConfigError unless the seed is a whole number."""
    value = getattr(config, "seed", None)
    check_setting(is_whole(value), f"{type(config).__name__}.seed", value, "a whole number")


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, with a suggestion, unless the named field is one of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: {suggest(str(value), choices)}")


def convert_fields(**converters: Callable[[Any], Any]) -> Callable[[type[C]], type[C]]:
    """Decorate a dataclass that takes keyword arguments only: values given for these fields are converted before it is made.

    A frozen value then never changes, not even in its own __post_init__.
    """

    def decorate(cls: type[C]) -> type[C]:
        make = cls.__init__

        @wraps(make)
        def convert_and_make(self: C, **values: Any) -> None:
            make(self, **{name: converters[name](value) if name in converters else value for name, value in values.items()})

        cls.__init__ = convert_and_make
        return cls

    return decorate


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(cast("Any", value)) == 2 and all(is_number(b) and 0 <= b < 1 for b in cast("Any", value))


def _freeze_betas(value: Any) -> Any:
    return tuple(value) if _are_betas(value) else value  # a wrong value stays as it was given, for the error


SMALLER_IS_BETTER: Mapping[str, bool] = MappingProxyType(
    {
        "eval_accuracy": False,
        "eval_accuracy_sampled": False,
        "eval_margin": False,
        "eval_pair_accuracy": False,
        "eval_pair_margin": False,
        "eval_loss": True,
        "eval_perplexity": True,
    }
)
"""Sense of the metrics that the commands measure on held-out rows, by name: whether a smaller value is better."""

HELDOUT_PREFIX = "eval_"
"""Prefix of the metrics of held-out rows; held_out_ is understood as well."""


OnBadUpdate = Literal["skip", "stop"]
OnBadMeasure = Literal["ignore", "skip", "stop"]
OnBadRow = Literal["ignore", "drop", "skip", "stop"]

_BAD_POLICIES: Mapping[tuple[str, ...], tuple[str, ...]] = MappingProxyType({
    ("loss", "gradient", "all_masked"): get_args(OnBadUpdate),
    ("gradient_spike", "ratio"): get_args(OnBadMeasure),
    ("log_prob", "empty_answer"): get_args(OnBadRow),
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BadNumbers:
    """Rules for numbers of training that go bad, by kind: stop = end the run, skip = leave the update out, drop = leave the rows out.

    An update that is left out changes neither parameters nor the optimizer's moments; the schedule advances if the update had been
    computed, and not if its rows were refused before. Each case is counted in metrics as num_bad_<kind>. The rules for rewards and
    parameters are elsewhere: RewardConfig.on_error, and a parameter that is not finite always ends the run.
    """

    loss: OnBadUpdate = "skip"  # a loss that is NaN or infinite
    gradient: OnBadUpdate = "skip"  # a gradient whose norm is NaN or infinite
    max_skipped: int = 10  # updates left out in a row after which the run ends; steps of RL left out for their rows count by themselves
    gradient_spike: OnBadMeasure = "ignore"  # a norm of the gradient above spike_factor times its running mean, after 10 updates
    spike_factor: float = 10.0  # multiple of the running mean of the norms of applied updates (weight 0.1 for each new one)
    ratio: OnBadMeasure = "ignore"  # an importance ratio of a trained token above ratio_limit
    ratio_limit: float = 1000.0  # largest importance ratio, of the log-probs of the update to those it is anchored to
    # RL: a log-prob of engine, policy or reference that is not finite at a trained token, known before the update; ignore = it makes the
    # loss or the gradient bad
    log_prob: OnBadRow = "ignore"
    empty_answer: OnBadRow = "ignore"  # RL: an answer of at most one trained token; if dropped, its reward still counts in its group
    all_masked: OnBadUpdate = "skip"  # RL: a batch in which masks left no trained token; rows without any are always an error

    def __post_init__(self) -> None:
        for names, choices in _BAD_POLICIES.items():
            for name in names:
                check_choice(self, name, choices)
        check_positive(self, "max_skipped")
        for name, low in (("spike_factor", 1.0), ("ratio_limit", 1.0)):
            value = getattr(self, name)
            check_setting(is_number(value) and value > low, f"BadNumbers.{name}", value, f"a number above {low:g}")


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig:
    """Schedule of run_sft_training."""

    num_steps: int = 100  # optimizer steps
    batch_size: int = 32  # samples per optimizer step
    log_every: int = 1  # steps between two lines of metrics; steps with an evaluation, and the last one, are always logged
    history_steps: int | None = HISTORY_STEPS  # last steps whose metrics the loop keeps in memory and returns; None = all
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward; bounds memory, never changes a result
    seed: int = 0  # seed of the order of samples
    dropout: bool = True  # train with the dropout that the model's configuration and its adapters have; False = without any
    router_balance_coef: float = 0.0  # coefficient of the load-balancing loss of a mixture of experts; 0 = none

    def __post_init__(self) -> None:
        check_not_negative(self, "router_balance_coef")
        check_positive(self, "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_flags(self, "dropout")
        check_history_steps(self.history_steps)
        check_count(self, "checkpoint_every", "eval_every")
        check_seed(self)


@dataclass(frozen=True, kw_only=True)
class RewardModelTrainingConfig:
    """Schedule of train_reward_model."""

    num_steps: int = 100  # optimizer steps
    batch_size: int = 64  # pairs per optimizer step
    log_every: int = 1  # steps between two lines of metrics; steps with an evaluation, and the last one, are always logged
    history_steps: int | None = HISTORY_STEPS  # last steps whose metrics the loop keeps in memory and returns; None = all
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations on held-out pairs; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward, pairs whole; bounds memory, never changes a result
    seed: int = 0  # seed of the order of pairs

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_history_steps(self.history_steps)
        check_count(self, "checkpoint_every", "eval_every")
        check_seed(self)


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainingConfig:
    """Schedule of train_preferences."""

    num_steps: int = 100  # optimizer steps
    batch_size: int = 32  # pairs per optimizer step; answers of an objective without pairs (KTO)
    log_every: int = 1  # steps between two lines of metrics; steps with an evaluation, and the last one, are always logged
    history_steps: int | None = HISTORY_STEPS  # last steps whose metrics the loop keeps in memory and returns; None = all
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations on held-out rows; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward, pairs whole; bounds memory, never changes a result
    seed: int = 0  # seed of the order of rows
    dropout: bool = False  # train with the dropout that the model's configuration and its adapters have; makes log-ratios noisy

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_history_steps(self.history_steps)
        check_count(self, "checkpoint_every", "eval_every")
        check_flags(self, "dropout")
        check_seed(self)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Parity check of each batch that was sampled with the engines' newest weights: trainer and engines must agree on its log-probs."""

    num_rows: int = 8  # rows of the batch that the trainer recomputes; more rows cost time and find rarer differences
    threshold: float = 0.1  # nats, bound of the mean |difference| per token: 1e-5 is usual in float32, 0.01 to 0.05 with bfloat16 engines
    action: ParityAction = "warn"  # beyond the threshold: warn; correct this batch by truncated importance sampling; or stop with an error
    cap: float = 2.0  # bound of the importance weights of "correct"

    def __post_init__(self) -> None:
        check_positive(self, "num_rows")
        for name in ("threshold", "cap"):
            value = getattr(self, name)
            check_setting(is_number(value) and value > 0, f"ParityConfig.{name}", value, "more than 0")
        check_choice(self, "action", get_args(ParityAction))


@dataclass(frozen=True, kw_only=True)
class RLTrainingConfig:
    """Schedule and options of run_rl_training and run_async_rl_training. One step is one rollout batch."""

    num_steps: int = 10  # rollout batches
    sync_every: int = 1  # steps between two weight syncs
    num_epochs: int = 1  # passes over each rollout batch
    num_minibatches: int = 1  # optimizer steps in each pass
    algorithm: Algorithm | None = None  # None = algorithms.grpo()
    baseline: float | None = None  # fixed number in place of the algorithm's baseline: advantages = rewards - baseline
    log_every: int = 1  # steps between two lines of metrics; steps with an evaluation, and the last one, are always logged
    history_steps: int | None = HISTORY_STEPS  # last steps whose metrics the loop keeps in memory and returns; None = all
    checkpoint_every: int = 0  # steps between two checkpoints; 0 = only after the last step
    eval_every: int = 0  # steps between two evaluations; 0 = only after the last step
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward
    dropout: bool = False  # train with the dropout that the models and adapters have: importance ratios are then partly noise
    skip_redundant: bool = True  # compute prompts that rows of a group share once, and no backward pass where the gradient is zero; the
    # same numbers up to rounding; False = bit for bit those of each row by itself
    router_balance_coef: float = 0.0  # coefficient of the load-balancing loss of a mixture of experts; 0 = none
    export_dtype: str | None = None  # dtype of weights that engines load from the disk, checkpoints apart; None = as they are trained
    sleep_engines: bool = False  # engines release the memory of their GPU while the policy is trained; they need EngineFeature.SLEEP
    router_replay: bool = False  # train with the experts that the engine chose for each token, instead of the trainer's own choice
    weight_sync: WeightSync = "checkpoint"  # way to the engines: files in a directory, memory of this process, or a weight_channel
    seed: int = 0  # seed of the order of rows in minibatches
    shape_reward: Callable[[Sample], float] | None = None  # reward for training, from a sample whose own reward the filters have seen
    mask_truncated: bool = False  # leave samples that ran out of tokens out of the loss; their rewards count in their groups (DAPO)
    value_clip: float | None = 0.2  # bound of a value's change since collection, in reward units; None = no clipping
    critic_warmup_steps: int = 0  # first steps in which only the critic is trained
    parity: ParityConfig | None = None  # compare log-probs of engines and trainer; None = do not
    probe_tolerance: float | None = None  # nats: largest difference of log-probs in the probe of engines after each sync;
    # 1e-3 in float32, about 0.3 with bfloat16 engines; None = no probe
    probe_tokens: int = 64  # tokens of one rollout in that probe, at least 2
    first_version: int = 0  # weight version of the policy before the first step; above 0 with rollouts recorded under versions up to it
    kl_control: KLControl | None = None  # schedule of the KL term's coefficient; None = the algorithm's own constant
    bad_numbers: BadNumbers = field(default_factory=BadNumbers)  # policy for log_prob, empty_answer and all_masked

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "sync_every", "num_epochs", "num_minibatches", "log_every", "max_tokens_per_microbatch")
        check_history_steps(self.history_steps)
        check_count(self, "checkpoint_every", "eval_every", "critic_warmup_steps", "first_version")
        check_not_negative(self, "router_balance_coef")
        check_seed(self)
        check_flags(self, "dropout", "mask_truncated", "router_replay", "sleep_engines", "skip_redundant")
        dtypes = (None, "float32", "bfloat16", "float16")
        check_setting(self.export_dtype in dtypes, "RLTrainingConfig.export_dtype", self.export_dtype, "float32, bfloat16, float16 or None")
        check_choice(self, "weight_sync", get_args(WeightSync))
        check_setting(
            is_whole(self.probe_tokens) and self.probe_tokens >= 2, "RLTrainingConfig.probe_tokens", self.probe_tokens, "at least 2"
        )
        tolerance = self.probe_tolerance
        good = tolerance is None or (is_number(tolerance) and tolerance > 0)
        check_setting(good, "RLTrainingConfig.probe_tolerance", tolerance, "more than 0, or None")
        clip = self.value_clip
        check_setting(clip is None or (is_number(clip) and clip > 0), "RLTrainingConfig.value_clip", clip, "more than 0, or None")
        finite = self.baseline is None or (is_number(self.baseline) and math.isfinite(self.baseline))
        check_setting(finite, "RLTrainingConfig.baseline", self.baseline, "a finite number or None")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Handling of a reward function that fails: it raises, takes too long, or returns anything other than a finite number."""

    timeout_s: float | None = 30.0  # seconds for one call: a sample, or a whole group in batch mode; None = no limit
    on_error: OnRewardError = "raise"  # end the run | try again | drop the group and count it | reward 0, marked and counted
    max_retries: int = 2  # retries with "retry" before the run ends

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        positive = timeout is None or (is_number(timeout) and timeout > 0)
        check_setting(positive, "RewardConfig.timeout_s", timeout, "more than 0 seconds, or None")
        check_choice(self, "on_error", get_args(OnRewardError))
        check_count(self, "max_retries")


@runtime_checkable
class ScoringGenerateFn(Protocol):
    """A generate function that scores its groups; take_apart() separates generation from rewards.

    A group then exists before its rewards are computed, so an interruption costs no tokens, and a failed reward is no failed rollout.
    """

    unscored: Callable[..., Any]  # the generate function without the rewards
    reward_fn: Callable[[Sample], Any]
    reward: RewardConfig | None  # None = that of RolloutConfig


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Production of rollout batches. A group is all samples of one prompt.

    A generate_fn that is a ScoringGenerateFn brings its reward_fn, and maybe its reward settings, along: see take_apart.
    """

    batch_size: int  # groups per batch
    n_samples_per_prompt: int = 1  # trained samples per group
    n_baseline_samples: int = 0  # untrained samples per group that count only in its statistics, for example ReMax's one greedy sample
    segment_log_probs: bool = False  # samples carry segment log-probs, for decoupled(..., segment_wise=True); see data/segments.py
    over_sampling_factor: float = 1.0  # groups in flight per group wanted; a group that finishes too late is used in the next batch
    generate_fn: Callable[..., Any] | None = None  # (prompt, n[, partial]) -> group; sync or async
    reward_fn: Callable[[Sample], Any] | None = None  # sample -> float or EvaluateResult; sync or async; or a rewards.evaluate.GroupReward
    filter_fn: FilterFn | None = None  # group -> keep it, True or False; sync or async; sees rewards, and no baseline samples
    max_filter_attempts: int = 10  # rounds of generation for one batch before a filter that passes too little is an error
    grace_s: float = 5.0  # seconds for unfinished groups to return their samples once the batch is full
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "n_samples_per_prompt", "max_filter_attempts")
        check_count(self, "n_baseline_samples")
        check_flags(self, "segment_log_probs")
        factor = self.over_sampling_factor
        enough = is_number(factor) and math.isfinite(factor) and factor >= 1.0
        check_setting(enough, "RolloutConfig.over_sampling_factor", factor, "a finite number, at least 1.0")
        check_not_negative(self, "grace_s")
        for name in ("generate_fn", "reward_fn", "filter_fn"):
            function = getattr(self, name)
            check_setting(function is None or callable(function), f"RolloutConfig.{name}", function, "a function or None")
        if hasattr(self.reward_fn, "open_reward"):  # rewards.evaluate.RewardSource
            source = type(self.reward_fn).__name__
            raise ConfigError(f"RolloutConfig.reward_fn is a {source}: `async with source.open_reward() as reward_fn`, and pass that")
        scoring = self.generate_fn
        if not isinstance(scoring, ScoringGenerateFn):
            return
        if self.reward_fn is not None:
            raise ConfigError("RolloutConfig.reward_fn is given, but generate_fn scores its groups itself: leave one of the two out")
        if scoring.reward is not None and self.reward not in (RewardConfig(), scoring.reward):
            raise ConfigError(
                f"RolloutConfig.reward is {self.reward}, but generate_fn has {scoring.reward} for its own rewards: leave one of them out"
            )

    @property
    def group_size(self) -> int:
        """Samples in a group, baseline samples included."""
        return self.n_samples_per_prompt + self.n_baseline_samples


def take_apart(config: RolloutConfig) -> RolloutConfig:
    """Return the config with the parts of a ScoringGenerateFn in generate_fn, reward_fn and reward; others as they are."""
    scoring = config.generate_fn
    if not isinstance(scoring, ScoringGenerateFn):
        return config
    return replace(config, generate_fn=scoring.unscored, reward_fn=scoring.reward_fn, reward=scoring.reward or config.reward)


@convert_fields(
    stop=lambda stop: SamplingParams(stop=stop).stop,  # raises ConfigError for one text, and the like
    stop_token_ids=lambda ids: SamplingParams(stop_token_ids=ids).stop_token_ids,
)
@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling of responses."""

    n_samples: int = 1  # samples per prompt
    max_tokens: int = 256  # most tokens of a response
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    greedy: bool = False  # take the most probable token at any temperature
    enable_thinking: bool | None = None  # passed to the chat template; None = the template's own default
    stop: tuple[str, ...] = ()  # strings that end a response
    stop_token_ids: tuple[int, ...] = ()  # end a response, besides the tokenizer's end of text

    def __post_init__(self) -> None:
        check_positive(self, "n_samples", "max_tokens")
        good = is_number(self.temperature) and (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf)
        check_setting(good, "GenerationConfig.temperature", self.temperature, f"0 for greedy, or at least {LEAST_TEMPERATURE:g}")
        check_count(self, "top_k")
        check_setting(is_number(self.top_p) and 0 < self.top_p <= 1, "GenerationConfig.top_p", self.top_p, "more than 0, at most 1")
        check_setting(is_number(self.min_p) and 0 <= self.min_p <= 1, "GenerationConfig.min_p", self.min_p, "at least 0, at most 1")
        check_flags(self, "greedy")

    def new(self, **changes: Any) -> GenerationConfig:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def truncates(self) -> bool:
        """Whether top_p, top_k or min_p cut the distribution, whose log-probs a trainer computes only where the kept sets are recorded."""
        return self.sampling_params().truncates

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """Return the parameters of one request."""
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


@convert_fields(betas=_freeze_betas)
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: float = 1e-5  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of Adam's first and second moments per step, each in [0, 1)
    eps: float = 1e-8  # term added to the root of Adam's second moment, at least 0
    weight_decay: float = 0.0  # decoupled weight decay of matrices, times lr per step; vectors have none
    max_grad_norm: float = 1.0  # norm to which larger gradients are scaled down
    warmup_steps: int = 0  # optimizer steps over which the learning rate grows from 0 to lr
    schedule: Schedule = "constant"  # course of the learning rate after the warm-up; linear and cosine fall to min_lr_ratio
    min_lr_ratio: float = 0.0  # lr at the end of a linear or cosine schedule, relative to the peak
    moments: Moments = "float32"  # the two moments of each weight: float32, or blocks in 8 bits, a quarter of the memory (package torchao)

    def __post_init__(self) -> None:
        check_not_negative(self, "lr", "eps", "weight_decay", "min_lr_ratio")
        check_count(self, "warmup_steps")
        norm = self.max_grad_norm
        check_setting(is_number(norm) and norm > 0, "OptimizerConfig.max_grad_norm", norm, "more than 0 (inf = no clipping)")
        check_setting(_are_betas(self.betas), "OptimizerConfig.betas", self.betas, "two numbers in [0, 1)")
        check_choice(self, "schedule", get_args(Schedule))
        check_choice(self, "moments", get_args(Moments))
        check_setting(self.min_lr_ratio <= 1, "OptimizerConfig.min_lr_ratio", self.min_lr_ratio, "a number in [0, 1]")


def parse_metric(text: str, option: str = "checkpoint.best") -> tuple[str, bool]:
    """Parse the name of an evaluation's metric.

    Args:
        text: a name as in metrics.jsonl, or with held_out_ for eval_; a sign in front of it, - (smaller is better) or + (larger is
            better), is needed for names that SMALLER_IS_BETTER lacks.
        option: name of the setting, for the message.

    Returns: the name as in metrics.jsonl, and whether smaller values are better.
    Raises: ConfigError for a name without a known sense.
    """
    name = text.lstrip("+-").strip()
    name = HELDOUT_PREFIX + name.removeprefix("held_out_") if name.startswith("held_out_") else name
    if name and text[:1] in ("+", "-"):
        return name, text[0] == "-"
    if name not in SMALLER_IS_BETTER:
        raise ConfigError(
            f"{option} is {text!r}, and whether larger or smaller values of it are better is not known: give one of "
            f"{', '.join(SMALLER_IS_BETTER)}, or put a sign before your own metric, behind an equals sign: =+{name or 'NAME'} if "
            f"larger values are better, =-{name or 'NAME'} if smaller ones are"
        )
    return name, SMALLER_IS_BETTER[name]


def check_patience(best: str | None, patience: int, section: str) -> None:
    """Raise ConfigError for a patience without a metric, or a metric of which it is not known whether larger values are better."""
    if best is not None:
        parse_metric(best, f"{section}.best")
    elif patience:
        raise ConfigError(
            f"{section}.patience is {patience}, but no metric says which evaluation is better: add --{section}.best, such as eval_accuracy"
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Frequency and retention of checkpoints."""

    sft_every: int = 60  # SFT steps between two checkpoints; 0 = only after the last
    rl_every: int = 1  # RL steps between two checkpoints; 0 = only after the last
    keep_last_n: int = 2  # checkpoints to keep; older ones are deleted once a new one is complete
    # metric of evaluations whose best checkpoint is kept besides these, in each stage that measures it: eval_accuracy (also called
    # held_out_accuracy), eval_accuracy_sampled, eval_loss, eval_perplexity, ...; with a sign, =+NAME or =-NAME, a metric of your own, of
    # which larger or smaller values are better; None = the newest ones alone
    best: str | None = None
    patience: int = 0  # evaluations without a better one after which a stage ends early; 0 = never; needs `best`

    def __post_init__(self) -> None:
        check_count(self, "sft_every", "rl_every", "patience")
        check_patience(self.best, self.patience, "checkpoint")
        check_positive(self, "keep_last_n")

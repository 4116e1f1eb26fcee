"""Frozen configurations, validated when made, and their way to and from JSON.

to_dict and from_dict work on any tree of frozen dataclasses, so an application's own configuration uses them, too. Functions in a
configuration (a generate_fn, a reward_fn, an Algorithm) are not data: to_dict leaves them out, lists the names of those that were set, and
from_dict demands these again, so that none is lost unnoticed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rollouts.errors import ConfigError
from rollouts.kl_control import KLControl
from rollouts.types import Algorithm, Group, Sample, SamplingParams

C = TypeVar("C")

Schedule = Literal["constant", "linear", "cosine"]
OnRewardError = Literal["raise", "retry", "drop"]
WeightSync = Literal["checkpoint", "memory"]
ParityAction = Literal["warn", "correct", "stop"]

FUNCTIONS_KEY = "functions"
"""Where to_dict lists the fields that held functions."""

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


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
        good = _is_number(value) and math.isfinite(value) and value >= 0
        check_setting(good, f"{type(config).__name__}.{name}", value, "a finite number, at least 0")


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError, with a suggestion, unless the named field is one of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{type(config).__name__}.{name} is {value!r}: {suggest(str(value), choices)}")


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


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
            check_setting(_is_number(value) and value > 0, f"ParityConfig.{name}", value, "more than 0")
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
    weight_sync: WeightSync = "checkpoint"  # how engines get new weights: from a directory, or handed over in this process
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
        good = tolerance is None or (_is_number(tolerance) and tolerance > 0)
        check_setting(good, "RLTrainingConfig.probe_tolerance", tolerance, "more than 0, or None")
        clip = self.value_clip
        check_setting(clip is None or (_is_number(clip) and clip > 0), "RLTrainingConfig.value_clip", clip, "more than 0, or None")
        finite = self.baseline is None or (_is_number(self.baseline) and math.isfinite(self.baseline))
        check_setting(finite, "RLTrainingConfig.baseline", self.baseline, "a finite number or None")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What happens when a reward function fails: raises, takes too long, or returns something that is not a finite number."""

    timeout_s: float | None = 30.0  # for one sample; None = wait for ever
    on_error: OnRewardError = "raise"  # end the run | try again | drop the group and count it
    max_retries: int = 2  # with "retry"; then the run ends

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        positive = timeout is None or (_is_number(timeout) and timeout > 0)
        check_setting(positive, "RewardConfig.timeout_s", timeout, "more than 0 seconds, or None")
        check_choice(self, "on_error", get_args(OnRewardError))
        check_count(self, "max_retries")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How batches of rollouts are produced. A group is all samples of one prompt."""

    batch_size: int  # groups per batch
    n_samples_per_prompt: int = 1  # that are trained on
    n_baseline_samples: int = 0  # further ones in each group that only count in its statistics, for example ReMax's one greedy sample
    segment_log_probs: bool = False  # whether samples carry them, for decoupled(..., segment_wise=True); see proximal.py
    over_sampling_factor: float = 1.0  # groups in flight per group wanted; what finishes too late is used in the next batch
    generate_fn: Callable[..., Any] | None = None  # (prompt, n[, partial]) -> group; sync or async
    reward_fn: Callable[[Sample], Any] | None = None  # sample -> float; sync or async
    filter_fn: Callable[[Group], bool] | None = None  # group -> keep it; sees rewards, and no baseline samples
    max_filter_attempts: int = 10  # rounds of generation for one batch before a filter that passes too little is an error
    grace_s: float = 5.0  # for unfinished groups to return what they have, once the batch is full
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "n_samples_per_prompt", "max_filter_attempts")
        check_count(self, "n_baseline_samples")
        factor = self.over_sampling_factor
        enough = _is_number(factor) and math.isfinite(factor) and factor >= 1.0
        check_setting(enough, "RolloutConfig.over_sampling_factor", factor, "a finite number, at least 1.0")
        check_not_negative(self, "grace_s")
        for name in ("generate_fn", "reward_fn", "filter_fn"):
            function = getattr(self, name)
            check_setting(function is None or callable(function), f"RolloutConfig.{name}", function, "a function or None")

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
        check_setting(_is_number(self.top_p) and 0 < self.top_p <= 1, "GenerationConfig.top_p", self.top_p, "more than 0, at most 1")
        check_setting(_is_number(self.min_p) and 0 <= self.min_p <= 1, "GenerationConfig.min_p", self.min_p, "at least 0, at most 1")

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
        check_setting(_is_number(norm) and norm > 0, "OptimizerConfig.max_grad_norm", norm, "more than 0 (inf = no clipping)")
        good = len(self.betas) == 2 and all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas)
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


# -- to and from plain values


def to_dict(config: Any) -> dict[str, Any]:
    """A tree of dataclasses as JSON values.

    Fields that hold functions are left out; the names of those that are not None stand in a list under FUNCTIONS_KEY. Infinities and NaN,
    which JSON does not have, become strings.

    Raises: ConfigError for a value that JSON cannot hold.
    """
    return _section_to_plain(config, "")


def from_dict(cls: type[C], data: Mapping[str, Any], **functions: Any) -> C:
    """The inverse of to_dict.

    Args:
        cls: a dataclass.
        data: nested mappings; missing keys take their defaults.
        functions: the fields that hold functions, by name; those of an inner section by dotted name, as in **{"rl.algorithm": grpo()}.

    Raises: ConfigError naming the dotted path of an unknown key (with a suggestion), of a missing field or function, or of a value of
        the wrong type.
    """
    return _build(cls, data, "", functions)


def save_config(config: Any, path: Path) -> None:
    """Write a configuration as indented JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp_{path.name}")
    temporary.write_text(json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load_config(cls: type[C], path: Path, **functions: Any) -> C:
    """Read what save_config wrote. Raises ConfigError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds a {type(data).__name__}, expected an object of sections")
    return from_dict(cls, typing.cast("dict[str, Any]", data), **functions)


def suggest(name: str, known: collections.abc.Iterable[str]) -> str:
    """A question after the most similar known name, else all known names, for a message about an unknown one."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def _build(cls: type[C], data: object, where: str, functions: Mapping[str, Any]) -> C:
    assert is_dataclass(cls), f"{cls} is not a dataclass"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where.rstrip('.') or cls.__name__} is {data!r}, expected a section with the fields of {cls.__name__}")
    section = dict(typing.cast("Mapping[str, Any]", data))
    demanded = section.pop(FUNCTIONS_KEY, ())
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.init]
    plain = [name for name in names if not _is_function_type(hints[name])]
    fields_of_functions = [name for name in names if name not in plain]
    for key in section:
        if key in fields_of_functions:
            raise ConfigError(f"{where + key} is a function, which a file cannot hold: pass it as an argument")
        if key not in plain:
            raise ConfigError(f"unknown setting {where + str(key)!r}: {suggest(str(key), plain)}")
    inner = tuple(f"{name}." for name in plain if is_dataclass(hints[name]))
    for name in functions:
        if name not in fields_of_functions and not name.startswith(inner):
            raise ConfigError(f"unknown function {where + name!r}: {suggest(name, fields_of_functions)}")
    values: dict[str, Any] = {name: value for name, value in functions.items() if name in fields_of_functions}
    for name in plain:
        passed = {key.removeprefix(name + "."): function for key, function in functions.items() if key.startswith(name + ".")}
        if passed:
            values[name] = _build(hints[name], section.get(name, {}), f"{where}{name}.", passed)
        elif name in section:
            values[name] = _convert(hints[name], section[name], where + name)
    for f in fields(cls):
        if f.name in values or not f.init:
            continue
        if f.name in demanded:
            raise ConfigError(f"{where + f.name} was set when this was saved, but is a function, which is not saved: pass it again")
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where + f.name} is missing: {cls.__name__} has no default for it")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert_union([a for a in args if a is not type(None)], value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}: {suggest(str(value), map(str, args))}")
        return value
    if is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where + ".", {})
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin in (collections.abc.Mapping, dict):
        if isinstance(value, Mapping):
            items = typing.cast("Mapping[str, Any]", value).items()
            return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in items}
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is float and (_is_number(value) or value in _NON_FINITE):
        return float(value)
    elif hint is Any or (isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
        return value
    raise ConfigError(f"{where} is {value!r}, expected {getattr(hint, '__name__', str(hint)) if origin is None else hint}")


def _convert_union(options: list[Any], value: Any, where: str) -> Any:
    problems: list[ConfigError] = []
    for option in options:
        try:
            return _convert(option, value, where)
        except ConfigError as problem:
            problems.append(problem)
    raise problems[0]


def _convert_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is {value!r}, expected a list")
    items = list(typing.cast("collections.abc.Iterable[Any]", value))
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(items) != len(args):
        raise ConfigError(f"{where} has {len(items)} entries, expected {len(args)}")
    return tuple(_convert(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, items, strict=True)))


def _is_function_type(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_function_type(arg) for arg in get_args(hint))
    return hint is Algorithm or get_origin(hint) is collections.abc.Callable


def _section_to_plain(config: Any, where: str) -> dict[str, Any]:
    assert is_dataclass(config) and not isinstance(config, type), f"expected a dataclass instance, found {config!r}"
    hints = typing.get_type_hints(type(config))
    names = [f.name for f in fields(config) if f.init]
    assert FUNCTIONS_KEY not in names, f"{type(config).__name__} has a field {FUNCTIONS_KEY!r}, a name that is reserved"
    plain = {name: _to_plain(getattr(config, name), where + name) for name in names if not _is_function_type(hints[name])}
    set_functions = [name for name in names if name not in plain and getattr(config, name) is not None]
    return plain | ({FUNCTIONS_KEY: set_functions} if set_functions else {})


def _to_plain(value: Any, where: str) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _section_to_plain(value, where + ".")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, f"{where}[{i}]") for i, item in enumerate(typing.cast("list[Any]", value))]
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v, f"{where}.{k}") for k, v in typing.cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"{where} is a {type(value).__name__}, which a configuration file cannot hold")

"""Frozen configurations, validated when made, and their way to and from JSON.

to_dict and from_dict work on any tree of frozen dataclasses, so an application's own configuration uses them, too. Functions in a
configuration (a generate_fn, a reward_fn, an Algorithm) are not data: to_dict leaves them out and from_dict asks for those that are
needed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rollouts.errors import ConfigError
from rollouts.types import Algorithm, Group, Sample, SamplingParams

C = TypeVar("C")

Schedule = Literal["constant", "linear", "cosine"]
OnRewardError = Literal["raise", "retry", "drop"]
WeightSync = Literal["checkpoint", "memory"]


def check_setting(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError unless the condition holds: what was wrong, the value found, what to do."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}, expected {expected}")


def check_positive(config: object, *names: str) -> None:
    """Raise ConfigError unless each named integer field is at least 1."""
    for name in names:
        check_setting(getattr(config, name) >= 1, f"{type(config).__name__}.{name}", getattr(config, name), "at least 1")


def check_not_negative(config: object, *names: str) -> None:
    """Raise ConfigError unless each named field is a finite number >= 0."""
    for name in names:
        value = getattr(config, name)
        check_setting(math.isfinite(value) and value >= 0, f"{type(config).__name__}.{name}", value, "a finite number, at least 0")


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
        check_not_negative(self, "checkpoint_every", "eval_every")


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

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "sync_every", "num_epochs", "num_minibatches", "log_every", "max_tokens_per_microbatch")
        check_not_negative(self, "checkpoint_every", "eval_every")
        check_setting(self.weight_sync in get_args(WeightSync), "weight_sync", self.weight_sync, f"one of {get_args(WeightSync)}")
        check_setting(self.baseline is None or math.isfinite(self.baseline), "baseline", self.baseline, "a finite number or None")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What happens when a reward function fails: raises, takes too long, or returns something that is not a finite number."""

    timeout_s: float | None = 30.0  # for one sample; None = wait for ever
    on_error: OnRewardError = "raise"  # end the run | try again | drop the group and count it
    max_retries: int = 2  # with "retry"; then the run ends

    def __post_init__(self) -> None:
        timeout = self.timeout_s
        check_setting(timeout is None or timeout > 0, "RewardConfig.timeout_s", timeout, "more than 0 seconds, or None")
        check_setting(self.on_error in get_args(OnRewardError), "on_error", self.on_error, f"one of {get_args(OnRewardError)}")
        check_not_negative(self, "max_retries")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How batches of rollouts are produced. A group is the n_samples_per_prompt samples of one prompt."""

    batch_size: int  # groups per batch
    n_samples_per_prompt: int = 1  # G
    over_sampling_factor: float = 1.0  # groups in flight per group wanted; what finishes too late is used in the next batch
    generate_fn: Callable[..., Any] | None = None  # (prompt, n[, partial]) -> group; sync or async
    reward_fn: Callable[[Sample], Any] | None = None  # sample -> float; sync or async
    filter_fn: Callable[[Group], bool] | None = None  # group -> keep it; sees rewards
    max_filter_attempts: int = 10  # rounds of generation for one batch before a filter that passes too little is an error
    grace_s: float = 5.0  # for unfinished groups to return what they have, once the batch is full
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        check_positive(self, "batch_size", "n_samples_per_prompt", "max_filter_attempts")
        factor = self.over_sampling_factor
        check_setting(math.isfinite(factor) and factor >= 1.0, "RolloutConfig.over_sampling_factor", factor, "at least 1.0")
        check_not_negative(self, "grace_s")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    n_samples: int = 1  # samples per prompt
    max_tokens: int = 256  # most tokens of a response
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    greedy: bool = False  # take the most probable token whatever temperature says
    enable_thinking: bool | None = None  # passed to the chat template; None = the template's own default
    stop: tuple[str, ...] = ()  # strings that end a response
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's end of text

    def __post_init__(self) -> None:
        check_positive(self, "n_samples", "max_tokens")
        check_not_negative(self, "temperature", "top_k")
        check_setting(0 < self.top_p <= 1, "GenerationConfig.top_p", self.top_p, "more than 0, at most 1")

    def new(self, **changes: Any) -> GenerationConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def truncates(self) -> bool:
        """Whether top_p or top_k cut the distribution, so that its log-probs are not those that a trainer computes."""
        return not self.greedy and self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """The parameters of one request."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0 if self.greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
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
        check_not_negative(self, "lr", "eps", "weight_decay", "warmup_steps")
        check_setting(self.max_grad_norm > 0, "OptimizerConfig.max_grad_norm", self.max_grad_norm, "more than 0 (inf = no clipping)")
        check_setting(all(0 <= b < 1 for b in self.betas), "OptimizerConfig.betas", self.betas, "two numbers in [0, 1)")
        check_setting(self.schedule in get_args(Schedule), "OptimizerConfig.schedule", self.schedule, f"one of {get_args(Schedule)}")
        check_setting(0 <= self.min_lr_ratio <= 1, "OptimizerConfig.min_lr_ratio", self.min_lr_ratio, "a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    sft_every: int = 60  # SFT steps; 0 = only after the last
    rl_every: int = 1  # RL steps; 0 = only after the last
    keep_last_n: int = 2  # older ones are deleted once a new one is complete

    def __post_init__(self) -> None:
        check_not_negative(self, "sft_every", "rl_every")
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
    """A tree of dataclasses as JSON values; fields that hold functions are left out.

    Raises: ConfigError for a value that JSON cannot hold.
    """
    assert is_dataclass(config) and not isinstance(config, type), f"expected a dataclass instance, found {config!r}"
    hints = typing.get_type_hints(type(config))
    return {f.name: _to_plain(getattr(config, f.name), f.name) for f in fields(config) if not _is_function_type(hints[f.name])}


def from_dict(cls: type[C], data: Mapping[str, Any], **functions: Any) -> C:
    """The inverse of to_dict.

    Args:
        cls: a dataclass.
        data: nested mappings; missing keys take their defaults.
        functions: the fields that to_dict left out, by name, for the outermost dataclass.

    Raises: ConfigError naming the dotted path of an unknown key (with a suggestion), a missing field, or a value of the wrong type.
    """
    return _build(cls, data, "", functions)


def save_config(config: Any, path: Path) -> None:
    """Write a configuration as indented JSON."""
    path.write_text(json.dumps(to_dict(config), indent=2) + "\n")


def load_config(cls: type[C], path: Path, **functions: Any) -> C:
    """Read what save_config wrote. Raises ConfigError naming the file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds a {type(data).__name__}, expected an object of sections")
    return from_dict(cls, typing.cast("dict[str, Any]", data), **functions)


def suggest(name: str, known: collections.abc.Iterable[str]) -> str:
    """ " Did you mean ...?" for a misspelt name, else the names there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def _build(cls: type[C], data: object, where: str, functions: Mapping[str, Any]) -> C:
    assert is_dataclass(cls), f"{cls} is not a dataclass"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__} is {data!r}, expected a section with the fields of {cls.__name__}")
    data = typing.cast("Mapping[str, Any]", data)
    hints = typing.get_type_hints(cls)
    by_name = {f.name: f for f in fields(cls)}
    plain = [name for name in by_name if not _is_function_type(hints[name])]
    for key in data:
        if key not in plain:
            raise ConfigError(f"unknown setting {where + str(key)!r}: {suggest(str(key), plain)}")
    values: dict[str, Any] = {name: _convert(hints[name], value, where + name) for name, value in data.items()}
    for name, f in by_name.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if name in functions:
            values[name] = functions[name]
        elif name not in values and required:
            raise ConfigError(f"{where + name} is missing: {cls.__name__} has no default for it")
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
            return dict(typing.cast("Mapping[str, Any]", value))
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is Any or (isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
        return value
    raise ConfigError(f"{where} is {value!r}, expected {getattr(hint, '__name__', str(hint))}")


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


def _to_plain(value: Any, where: str) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item, where) for item in typing.cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(k): _to_plain(v, where) for k, v in typing.cast("Mapping[Any, Any]", value).items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"{where} is a {type(value).__name__}, which a configuration file cannot hold")

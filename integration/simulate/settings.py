"""The settings of a simulated run, as one frozen tree. Imports no torch, which the help does not need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from rollouts.asynchronous.config import AsyncConfig
from rollouts.config import check_not_negative, check_positive, check_setting


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The speed and failures of the engines."""

    engines: int = 8  # inference engines with the same weights; prompt i goes to engine i % engines
    slots: int = 64  # concurrent sequences per engine
    token_rate: float = 50.0  # tokens per second of each sequence, whatever the load
    prefill_rate: float = 20000.0  # tokens per second of an engine for prompts and tokens of continued sequences
    prompt_tokens: int = 512  # tokens of a prompt
    sync_s: float = 2.0  # seconds that engines pause for a weight sync
    kv_cache: Literal["recompute", "keep"] = "recompute"  # cache of running sequences after a weight sync: recompute it, or keep it
    failure_rate: float = 0.0  # fraction of groups that fail, at a random moment
    keep_partial: bool = True  # interrupted groups continue from their tokens; False = they start over

    def __post_init__(self) -> None:
        check_positive(self, "engines", "slots", "prompt_tokens")
        check_not_negative(self, "sync_s", "failure_rate")
        for name in ("token_rate", "prefill_rate"):
            value = getattr(self, name)
            check_setting(0 < value < math.inf, f"EngineSection.{name}", value, "a finite number above 0")
        check_setting(self.failure_rate < 1, "EngineSection.failure_rate", self.failure_rate, "less than 1")


@dataclass(frozen=True, kw_only=True)
class LengthSection:
    """The distribution of response lengths."""

    distribution: Literal["lognormal", "pareto", "constant"] = "lognormal"  # shape of the lengths of responses
    mean_tokens: float = 8000.0  # mean tokens of a response, before truncation to max_tokens
    sigma: float = 0.8  # lognormal: standard deviation of the logarithm; 0.8 = the longest of 8 is about 2.3 times the mean
    tail: float = 2.0  # Pareto: exponent, more than 1; smaller = heavier tail
    max_tokens: int = 32768  # longer responses are truncated
    file: str | None = None  # file of measured lengths: one number or sample of a run (rl/trajectories/*.jsonl) per line; None = none

    def __post_init__(self) -> None:
        check_positive(self, "max_tokens")
        check_setting(
            self.mean_tokens >= 1 and math.isfinite(self.mean_tokens), "LengthSection.mean_tokens", self.mean_tokens, "at least 1"
        )
        check_setting(self.sigma >= 0 and math.isfinite(self.sigma), "LengthSection.sigma", self.sigma, "at least 0")
        check_setting(self.tail > 1 and math.isfinite(self.tail), "LengthSection.tail", self.tail, "more than 1, or the mean is infinite")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """The batch size and speed of the trainer."""

    batch_size: int | None = None  # groups per step; None = as many as fill the slots of all engines
    samples_per_prompt: int = 8  # responses per group
    train_s: float = 30.0  # fixed seconds of a step
    train_rate: float | None = None  # tokens per second of training in addition to train_s; None = no cost per token
    score_rate: float | None = None  # tokens per second of a forward pass, for proximal log-probs; None = no cost
    sync_every: int = 1  # steps between two weight syncs

    def __post_init__(self) -> None:
        check_positive(self, "samples_per_prompt", "sync_every")
        check_not_negative(self, "train_s")
        if self.batch_size is not None:
            check_positive(self, "batch_size")
        for name in ("train_rate", "score_rate"):
            value = getattr(self, name)
            check_setting(value is None or 0 < value < math.inf, f"TrainerSection.{name}", value, "a finite number above 0, or None")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The settings of a simulated run."""

    engine: Annotated[EngineSection, tyro.conf.arg(name="")] = field(default_factory=EngineSection)
    length: Annotated[LengthSection, tyro.conf.arg(name="")] = field(default_factory=LengthSection)
    trainer: Annotated[TrainerSection, tyro.conf.arg(name="")] = field(default_factory=TrainerSection)
    asynchronous: Annotated[AsyncConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: AsyncConfig(enabled=True))
    hours: float = 1.0  # hours of virtual time; the run ends with the step in progress
    synchronous: bool = False  # use the synchronous loop: generate, train, generate, ...
    over_sampling_factor: float = 1.0  # synchronous loop: groups in flight per group wanted; surplus groups are carried over
    refused_fraction: float = 0.0  # fraction of finished groups that a filter refuses, 0 to less than 1
    seed: int = 0  # seed of lengths, failures and rewards

    def __post_init__(self) -> None:
        check_setting(0 < self.hours < math.inf, "Simulation.hours", self.hours, "a finite number above 0")
        check_setting(0 <= self.refused_fraction < 1, "Simulation.refused_fraction", self.refused_fraction, "at least 0 and less than 1")

    @property
    def batch_size(self) -> int:
        """The number of groups per step."""
        slots = self.engine.engines * self.engine.slots
        return self.trainer.batch_size or max(1, slots // self.trainer.samples_per_prompt)

"""Stages of a run: supervised fine-tuning and reinforcement learning. The stage of preferences is in preference.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from integration.settings.sections.descriptions import describe_section
from rollouts.asynchronous.config import AsyncConfig
from rollouts.config import OptimizerConfig, check_count, check_not_negative, check_positive, check_setting
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from integration.expressions.algorithm import PresetCall


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

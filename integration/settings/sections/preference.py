"""Settings of training on preferences: the loss, its numbers, the pairs, the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from integration.settings.sections.descriptions import describe_section
from rollouts.config import OptimizerConfig, check_count, check_flags, check_not_negative, check_positive, check_setting
from rollouts.config_files import suggest
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from rollouts.algorithms.preference_objectives import PreferenceObjective

PreferenceLoss = Literal["dpo", "cdpo", "robust", "ipo", "slic", "kto", "orpo", "simpo"]
PAIR_TASKS = ("sort", "sort-long")  # tasks for which wrong answers can be generated
SMOOTHED, MARGINS, LIKELY = ("cdpo", "robust"), ("simpo",), ("dpo", "slic")  # losses that read label_smoothing, gamma and nll_coef
REFERENCE_FREE = ("orpo", "simpo")
SIMPO_BETA = 2.0


@dataclass(frozen=True, kw_only=True)
class PreferenceSection:
    """Training on preferences: pairs of answers to a prompt, the first preferred."""

    # loss: dpo, cdpo (label smoothing), robust, ipo, slic (hinge), kto (good and bad answers one by one), orpo or simpo (no reference)
    loss: PreferenceLoss = "dpo"
    beta: float | None = None  # strength of the pull to the reference; orpo: weight of the odds ratio; None = 0.1, and 2.0 with simpo
    label_smoothing: float = 0.1  # cdpo and robust: share of pairs expected to be the wrong way round; at least 0, less than 0.5
    gamma: float = 1.0  # simpo: margin of the rewards
    nll_coef: float = 0.0  # dpo and slic: weight of the negative log-likelihood of chosen answers, per token; 0 = none
    desirable_weight: float = 1.0  # kto: weight of good answers
    undesirable_weight: float = 1.0  # kto: weight of bad answers
    # reference log-probs: model = computed at each step by the model that stays in memory; precomputed = once, before the first step, and
    # kept in the run directory
    reference: Literal["model", "precomputed"] = "model"
    path: str | None = None  # pairs: a JSONL, JSON, CSV or Parquet file, a folder, or hf://ORG/NAME; None = data.path, or generated pairs
    # rows of held-out pairs, in the formats of preference.path; None = data.eval_path in mode dpo, and without it pairs of preference.path,
    # chosen by their prompts
    eval_path: str | None = None
    num_heldout: int = 256  # maximum number of held-out pairs; without a file of them at most a tenth of all pairs
    num_pairs: int = 12800  # training pairs generated from a built-in task
    num_steps: int = 100  # optimizer steps
    batch_size: int = 64  # pairs per optimizer step; kto: answers
    log_every: int = 1  # steps between two log entries
    eval_every: int = 25  # steps between two evaluations; 0 = only at the end
    checkpoint_every: int = 50  # steps between two checkpoints; 0 = only at the end
    max_tokens_per_microbatch: int = 16384  # maximum tokens of one forward and backward pass, padding excluded; bounds memory only
    dropout: bool = False  # apply the dropout of the model's configuration and lora.dropout; makes log-ratios noisy
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-4, warmup_steps=10, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0),
        metadata=describe_section(OptimizerConfig),
    )

    def __post_init__(self) -> None:
        if self.loss not in get_args(PreferenceLoss):
            raise ConfigError(f"preference.loss is {self.loss!r}: {suggest(self.loss, get_args(PreferenceLoss))}")
        check_positive(self, "num_heldout", "num_pairs", "num_steps", "batch_size", "log_every", "max_tokens_per_microbatch")
        check_count(self, "eval_every", "checkpoint_every")
        check_not_negative(self, "nll_coef", "desirable_weight", "undesirable_weight", "gamma")
        check_flags(self, "dropout")
        check_setting(self.beta is None or 0 < self.beta < math.inf, "preference.beta", self.beta, "a finite number above 0")
        good = 0 <= self.label_smoothing < 0.5
        check_setting(good, "preference.label_smoothing", self.label_smoothing, "at least 0 and less than 0.5")
        if self.loss == "kto" and self.batch_size < 2:
            raise ConfigError(
                f"preference.batch_size is {self.batch_size}, but kto compares each prompt with the answer of another one: give at least 2"
            )
        if self.loss == "kto" and self.reference == "precomputed":
            raise ConfigError(
                "preference.reference is 'precomputed', but kto joins prompts to the answers of other prompts anew at each step, whose "
                "reference log-probs are not known before: leave it out"
            )
        if self.path is None and self.eval_path is not None:
            raise ConfigError(
                f"preference.eval_path is {self.eval_path!r}, but there is no preference.path: give both, or --data.eval-path"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        return self.loss not in REFERENCE_FREE

    def create_objective(self) -> PreferenceObjective:
        """Create the objective that the loss names."""
        from rollouts.algorithms import preference_objectives as objectives  # imports torch, which the help does not need

        beta = self.beta or (SIMPO_BETA if self.loss == "simpo" else 0.1)
        if self.loss == "kto":
            return objectives.kto(beta=beta, desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)
        if self.loss in LIKELY:
            return {"dpo": objectives.dpo, "slic": objectives.slic}[self.loss](beta=beta, nll_coef=self.nll_coef)
        if self.loss in SMOOTHED:
            create = {"cdpo": objectives.cdpo, "robust": objectives.robust_dpo}[self.loss]
            return create(beta=beta, label_smoothing=self.label_smoothing)
        if self.loss == "simpo":
            return objectives.simpo(beta=beta, gamma=self.gamma)
        return objectives.ipo(beta=beta) if self.loss == "ipo" else objectives.orpo(beta=beta)

"""Settings of the training of a reward model, as one frozen tree."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from integration.settings.sections.backend import BackendSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.records import CRASH_BUNDLES
from rollouts.config import (
    BadNumbers,
    OptimizerConfig,
    RewardModelTrainingConfig,
    check_choice,
    check_count,
    check_patience,
    check_positive,
    check_setting,
)
from rollouts.config_files import suggest
from rollouts.errors import ConfigError

PAIR_TASKS = ("sort", "sort-long")  # tasks for which integration/tasks/preference_pairs.py can generate wrong answers

MEASURED = ("eval_accuracy", "eval_loss", "eval_margin", "eval_score_chosen", "eval_score_rejected")
"""Metrics of evaluate_reward_model."""


@dataclass(frozen=True, kw_only=True)
class PairSection:
    """Preference pairs: the user's, or generated from a built-in task."""

    # rows with chosen and rejected, or with labelled answers: a file, a folder or hf://ORG/NAME; None = pairs generated from the task
    path: str | None = None
    columns: tuple[str, ...] = ()  # columns to read under another name, such as chosen=better,rejected=worse; () = the rows' own names
    eval_path: str | None = None  # rows of held-out pairs, in the formats of data.path; None = pairs of data.path, chosen by their prompts
    num_heldout: int = 512  # maximum number of held-out pairs; of data.path at most a tenth
    num_pairs: int = 25600  # training pairs generated from a built-in task
    pairs_per_problem: int = 2  # pairs per problem of a built-in task, each with another wrong answer
    max_length: int | None = None  # maximum tokens of a prompt with its answer; None = no limit
    skip_bad_rows: bool = False  # skip and count unreadable rows instead of ending the run

    def __post_init__(self) -> None:
        check_positive(self, "num_heldout", "num_pairs", "pairs_per_problem")
        if self.columns:
            from integration.expressions.mixture import parse_columns  # imports torch, which the help does not need

            parse_columns(self.columns)


@dataclass(frozen=True, kw_only=True)
class PairTrainingSection:
    """Schedule and optimizer of the training."""

    num_steps: int = 400  # optimizer steps
    batch_size: int = 64  # pairs per optimizer step
    eval_every: int = 50  # steps between two evaluations; 0 = only at the end
    log_every: int = 1  # steps between two log entries
    checkpoint_every: int = 100  # steps between two checkpoints; 0 = only at the end
    keep_last_n: int = 2  # checkpoints to keep; older ones are deleted
    # metric of evaluations, eval_accuracy, eval_loss or eval_margin: the checkpoint of its best value is kept besides the newest ones and
    # becomes the result; None = the last weights are the result
    best: str | None = None
    patience: int = 0  # evaluations in a row without a better one after which training ends early; 0 = never; needs training.best
    max_tokens_per_microbatch: int = 16384  # maximum tokens of one forward and backward pass, padding excluded; bounds memory only
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.05, weight_decay=0.01)
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_steps", "batch_size", "keep_last_n")
        check_count(self, "patience")
        if self.best is not None and self.best.lstrip("+-").replace("held_out_", "eval_", 1) not in MEASURED:
            raise ConfigError(
                f"training.best is {self.best!r}, but held-out pairs are measured by {', '.join(MEASURED)}: choose one of them"
            )
        check_patience(self.best, self.patience, "training")
        check_count(self, "eval_every", "checkpoint_every")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """All settings of the training of a reward model."""

    task: str = "sort"  # built-in task to generate pairs from if data.path is not given: sort or sort-long
    seed: int = 0  # seed of the built-in model's weights, the head, the wrong answers and the order of pairs
    output_dir: str | None = None  # directory of the run; None = a new runs/<time>-reward-model
    # loggers of metrics besides metrics.jsonl and the display: wandb, tensorboard, trackio, mlflow, with arguments as in
    # wandb(project='mine'); jsonl('copy.jsonl'), or module:function; --log is short for it
    loggers: tuple[str, ...] = ()
    # seconds for the start, a line, and the end of a logger; one that does not return by then is given up, and the run goes on
    logger_timeout_s: float = 60.0
    num_threads: int | None = None  # CPU threads of torch; None = torch's default
    # crash bundle of the step that a bad number ends the run at: auto = with weights that fit in a quarter of the free space, or else a
    # link to the last checkpoint; full = always with weights; linked = never with others than that checkpoint's; none = no bundle
    crash_bundles: Literal["auto", "full", "linked", "none"] = "auto"
    model: ModelSection = field(default_factory=ModelSection)  # the initial model: a language model, or a reward model to train further
    data: PairSection = field(default_factory=PairSection)
    training: PairTrainingSection = field(default_factory=PairTrainingSection)
    backend: BackendSection = field(default_factory=BackendSection)
    on_bad: BadNumbers = field(default_factory=BadNumbers)  # policy for a loss or gradient that goes bad; the kinds of RL are refused

    def __post_init__(self) -> None:
        check_choice(self, "crash_bundles", CRASH_BUNDLES)
        good = 0 < self.logger_timeout_s < math.inf
        check_setting(good, "logger_timeout_s", self.logger_timeout_s, "a positive number of seconds")
        if self.data.path is None and self.task not in PAIR_TASKS:
            raise ConfigError(f"there are no pairs of the task {self.task!r}: {suggest(self.task, PAIR_TASKS)}; or give --data.path")
        if self.data.path is None and self.data.eval_path is not None:
            raise ConfigError(f"data.eval_path is {self.data.eval_path!r}, but there is no data.path to train on: give both")
        if self.backend.kind != "pytorch":
            raise ConfigError(
                f"backend.kind is {self.backend.kind!r}, but this command trains a reward model in one process: leave it out, or call "
                "train_reward_model with create_fsdp_reward_model_backend in a program of your own"
            )
        usual = BadNumbers()
        for name in ("ratio", "ratio_limit", "log_prob", "empty_answer", "all_masked"):
            if (value := getattr(self.on_bad, name)) != getattr(usual, name):
                raise ConfigError(
                    f"on_bad.{name} is {value!r}, but it is about rollouts, and a reward model is trained on pairs: leave it out"
                )
        if self.loggers:
            from integration.expressions.loggers import parse_loggers  # imports torch, which the help does not need

            parse_loggers(self.loggers)
        _ = self.loop

    @property
    def loop(self) -> RewardModelTrainingConfig:
        """The configuration for train_reward_model."""
        training = self.training
        return RewardModelTrainingConfig(
            num_steps=training.num_steps,
            batch_size=training.batch_size,
            log_every=training.log_every,
            history_steps=1,  # the metrics are in the run directory
            checkpoint_every=training.checkpoint_every,
            eval_every=training.eval_every,
            max_tokens_per_microbatch=training.max_tokens_per_microbatch,
            seed=self.seed,
        )

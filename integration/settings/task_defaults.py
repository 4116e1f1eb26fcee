"""Default settings: those of the built-in model on each task, those of a model of the user's own, and the learning rates of online DPO and
of reward models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from integration.settings.config import Config
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.model import OWN_MODEL_CRITIC, ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.checks import parse_json
from rollouts.config import CheckpointConfig, OptimizerConfig

LEARNING_RATES = {False: (1e-5, 1e-6), True: (1e-4, 1e-5)}
"""Learning rates of SFT and RL of a pretrained model, by whether adapters are trained.

SFT is between Tulu 3 (5e-6, 8 billion parameters) and TRL (2e-5); RL is that of TRL's GRPOTrainer, verl's examples and DAPO; adapters take
ten times as much ("LoRA Without Regret", Schulman et al., 2025).
"""

PAIRS_LEARNING_RATES = {False: 5e-7, True: 5e-6}
"""Learning rates of RL of a pretrained model where the algorithm compares pairs of answers, by whether adapters are trained.

All weights take that of TRL's OnlineDPOTrainer; adapters ten times as much.
"""
REWARD_MODEL_LEARNING_RATE = 1e-5
"""Learning rate of a reward model made from a pretrained model, as in TRL's example of reward modeling; OpenRLHF has 9e-6."""
_PAIRS_SHARE = 0.3  # share of a task's learning rate, with the built-in model: whole answers make larger steps (docs/preferences.md)
_COMPARES_PAIRS = re.compile(r"\s*online_dpo\s*(\(|$)")


def create_default_config(
    task: str | None, *, model_path: str | None = None, adapters: bool = False, algorithm: str = RLSection.algorithm
) -> Config:
    """Return the default configuration of a task, a model and an algorithm, which files and flags then change.

    Args:
        task: None or an unknown name = the sort task.
        model_path: model directory of the user; None = the built-in model.
        adapters: whether adapters are trained instead of all weights.
        algorithm: expression of the algorithm of RL, of which the learning rate depends on whether it is online_dpo.
    """
    config, pairs = _create_task_config(task), _COMPARES_PAIRS.match(algorithm) is not None
    if is_own_model(model_path):
        config = _fit_own_model(config, *LEARNING_RATES[adapters])
        return _set_rl_rate(config, PAIRS_LEARNING_RATES[adapters]) if pairs else config
    return _set_rl_rate(config, float(f"{_PAIRS_SHARE * config.rl.optimizer.lr:.3g}")) if pairs and not adapters else config


def create_reward_model_default(model_path: str | None) -> RewardModelConfig:
    """Return the default configuration of the training of a reward model, which files and flags then change.

    Args:
        model_path: model directory of the user; None = the built-in model.
    """
    config = RewardModelConfig()
    if not is_own_model(model_path):
        return config
    optimizer = replace(config.training.optimizer, lr=REWARD_MODEL_LEARNING_RATE, weight_decay=0.0)
    return replace(config, training=replace(config.training, optimizer=optimizer))


def find_default(config: Config) -> Config:
    """Return the default configuration of the task, the model and the algorithm that a configuration has."""
    return create_default_config(config.task, model_path=config.model.path, adapters=config.lora.rank > 0, algorithm=config.rl.algorithm)


def is_own_model(model_path: str | None) -> bool:
    """Whether a model directory is the user's own: neither the built-in model nor a checkpoint of it, which knows characters alone."""
    if model_path is None:
        return False
    try:
        vocab_size: Any = parse_json((Path(model_path) / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return True  # whatever is wrong with it is told when it is loaded
    return not (isinstance(vocab_size, int) and vocab_size <= 3 + len(ALPHABET))


def _create_task_config(task: str | None) -> Config:
    """Return the defaults of a task with the built-in model, which is trained from random weights."""
    if task == "sort-long":  # see integration/configs/sort_long.toml for the reasons
        return Config(task=task, rl=RLSection(num_minibatches=4, eval_every=3, optimizer=OptimizerConfig(lr=1e-4, schedule="linear")))
    if task == "grid_world":
        return Config(
            task=task,
            model=ModelSection(hidden_size=64, intermediate_size=128, num_layers=2),
            sft=SFTSection(num_steps=240, eval_every=60, optimizer=_falling(3e-3)),
            rl=RLSection(
                num_steps=20, prompts_per_step=16, eval_every=2, optimizer=OptimizerConfig(lr=1e-3, schedule="linear", min_lr_ratio=0.05)
            ),
            checkpoint=CheckpointConfig(rl_every=4),
        )
    if task == "environment":
        return Config(task=task)
    if task == "calculator":
        return Config(
            task=task,
            model=ModelSection(hidden_size=96, intermediate_size=192, num_layers=2),
            sft=SFTSection(num_steps=800, eval_every=200, optimizer=_falling(3e-3)),
            rl=RLSection(num_steps=10, prompts_per_step=32, eval_every=2, optimizer=OptimizerConfig(lr=5e-4)),
            checkpoint=CheckpointConfig(rl_every=4),
            evaluation=EvaluationSection(num_prompts=64),
        )
    return Config()


def _fit_own_model(config: Config, sft_lr: float, rl_lr: float) -> Config:
    """Return the defaults of a task with a pretrained model: its learning rates, and fewer evaluations and checkpoints.

    Weight decay is 0, as in TRL and Tulu 3. A step has 32 prompts with 8 answers each, where the task's defaults have more.
    """
    return replace(
        config,
        preference=replace(
            config.preference,
            batch_size=32,
            eval_every=50,
            checkpoint_every=100,
            optimizer=OptimizerConfig(lr=rl_lr, warmup_steps=10, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0),
        ),
        sft=replace(
            config.sft,
            eval_every=60,
            optimizer=OptimizerConfig(lr=sft_lr, warmup_steps=10, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0),
        ),
        rl=replace(
            config.rl,
            num_steps=100,
            prompts_per_step=min(config.rl.prompts_per_step, 32),
            eval_every=10,
            optimizer=OptimizerConfig(lr=rl_lr, warmup_steps=5, weight_decay=0.0),
        ),
        critic=OWN_MODEL_CRITIC,
        checkpoint=replace(config.checkpoint, rl_every=10),
    )


def _set_rl_rate(config: Config, lr: float) -> Config:
    return replace(config, rl=replace(config.rl, optimizer=replace(config.rl.optimizer, lr=lr)))


def _falling(lr: float) -> OptimizerConfig:
    """Return the optimizer for SFT from random weights, with a decaying learning rate."""
    return OptimizerConfig(lr=lr, warmup_steps=20, schedule="linear", min_lr_ratio=0.05, weight_decay=0.01)

"""Default settings of the tasks whose defaults differ from those of the sort task."""

from __future__ import annotations

from integration.settings.config import Config
from integration.settings.sections import EvaluationSection, ModelSection, RLSection, SFTSection
from rollouts.config import CheckpointConfig, OptimizerConfig


def create_default_config(task: str | None) -> Config:
    """Return the default configuration of a task, which flags then change. task: None or an unknown name = the sort task."""
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


def _falling(lr: float) -> OptimizerConfig:
    """Return the optimizer for SFT from random weights, with a decaying learning rate."""
    return OptimizerConfig(lr=lr, warmup_steps=20, schedule="linear", min_lr_ratio=0.05, weight_decay=0.01)

"""The parts of a replay: settings, backend and loss of the step that a bundle holds, made for one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from integration.crash.bundle import WEIGHTS, CrashBundle, describe_function
from integration.crash.recorder import RecordedUpdate
from integration.parts.model_settings import create_tokenizer
from integration.parts.models import create_backend, create_companions, create_model
from integration.run.reward_model import create_reward_backend, create_start
from integration.settings.command_line import CONFIG_FILE, read_saved
from integration.settings.config import Config
from integration.settings.made.library import count_critic_updates, count_rl_updates, create_rl_algorithm, rl_training_config
from integration.settings.reward_model import RewardModelConfig
from rollouts.algorithms.losses import sft_loss, value_loss
from rollouts.algorithms.preferences import score_loss
from rollouts.backends.protocol import BackendFeature, TrainingBackend, require_backend_feature
from rollouts.config import OptimizerConfig
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.loading import parse_device
from rollouts.training.parity import correct
from rollouts.training.rollout_batch import anchor_to_self
from rollouts.types import LossFn


def read_settings(path: Path, bundle: CrashBundle) -> Config | RewardModelConfig:
    """Read the settings of a bundle, for one process; a device that this machine lacks is replaced by the CPU."""
    config = read_saved(RewardModelConfig if bundle.stage == "reward_model" else Config, path / CONFIG_FILE)
    try:
        parse_device(config.model.device)
    except ConfigError:
        print(f"this machine has no {config.model.device}, the device of the run: the step is replayed on the CPU", flush=True)
        config = replace(config, model=replace(config.model, device="cpu", kernels="auto"))
    return config


def find_weights(path: Path, bundle: CrashBundle) -> tuple[Path | None, Path | None]:
    """Return the directory of the weights before the updates of a bundle, and the directory to create the model from.

    The first is None for weights of the start of the stage, the second is None for the model of the settings.
    """
    start = None if bundle.start is None else Path(bundle.start)
    if bundle.weights == "lost":
        raise CheckpointError(
            f"{path} cannot be replayed: the update overwrote the weights, and no checkpoint is there from which all updates were kept. "
            "Its batches and numbers can be read. Write checkpoints more often to replay such a step"
        )
    if bundle.weights == "start":
        return None, start
    directory = path / WEIGHTS if bundle.weights == "saved" else Path(bundle.weights_from or "")
    if not directory.is_dir():
        raise CheckpointError(f"the weights of {path} are not there: it names {directory}, which is no directory. Restore it from a copy")
    return directory, start


def create_replayed_backend(config: Config | RewardModelConfig, bundle: CrashBundle, weights: Path | None, start: Path | None) -> Any:
    """Create the backend of the model whose update failed, with its weights before the updates of the bundle."""
    if isinstance(config, RewardModelConfig):
        began = config if weights is None else replace(config, model=replace(config.model, path=str(weights)))
        backend: TrainingBackend = create_reward_backend(config, *create_start(began))
    elif bundle.role == "critic":
        source = config if weights is None else replace(config, critic=replace(config.critic, path=str(weights)))
        policy = cast("Any", None) if source.critic.path is not None else create_model(config, start)[0]
        tokenizer = create_tokenizer(config, weights or start)
        found = create_companions(source, {"values"}, policy, tokenizer, count_critic_updates(config)).critic
        assert found is not None, "values need a critic"
        backend = found
    else:
        # adapters need the weights below them, and those of their checkpoint are merged
        source_directory = start if weights is None or config.lora.rank > 0 else weights
        model, tokenizer = create_model(config, source_directory)
        torch.manual_seed(config.seed)
        backend = create_backend(config, model, tokenizer, *_find_optimizer(config, bundle.stage))
    if weights is not None:
        require_backend_feature(backend, BackendFeature.CHECKPOINTS, "a replay").load_checkpoint(weights)
    return backend


def _find_optimizer(config: Config, stage: str) -> tuple[OptimizerConfig, int]:
    """Return the optimizer of a stage's policy and the number of its updates."""
    optimizer, steps = {
        "sft": (config.sft.optimizer, config.sft.num_steps),
        "dpo": (config.preference.optimizer, config.preference.num_steps),
        "rl": (config.rl.optimizer, count_rl_updates(config)),
    }[stage]
    clip = config.backend.fsdp.clip_grad
    if config.backend.kind == "fsdp" and clip is not None:
        optimizer = replace(optimizer, max_grad_norm=clip)
    return optimizer, steps


def create_loss(config: Config | RewardModelConfig, bundle: CrashBundle, update: RecordedUpdate) -> LossFn:
    """Create the loss of an update of the bundle from the settings.

    Raises: ConfigError if it is not the one that the bundle describes, for example because a function of the user's has changed.
    """
    corrected: LossFn | None = None  # loss where the log-probs of the engine and the trainer did not agree
    if isinstance(config, RewardModelConfig):
        loss: LossFn = partial(score_loss, margin_from_rewards=True)
    elif bundle.role == "critic":
        loss = partial(value_loss, clip=config.critic.value_clip)
    elif bundle.stage == "sft":
        loss = sft_loss
    elif bundle.stage == "dpo":
        loss = config.preference.create_objective().loss
    else:
        algorithm = config.algorithm if bundle.max_tokens is None else create_rl_algorithm(config, bundle.max_tokens)
        training = rl_training_config(config, algorithm, bundle.max_tokens)
        algorithm = training.algorithm or algorithm
        loss = algorithm.loss
        if training.parity is not None and training.parity.action == "correct":
            corrected = correct(algorithm, training.parity).loss
    found = {describe_function(one): one for one in (loss, corrected) if one is not None}
    if update.loss not in found:
        raise ConfigError(
            f"the loss of the step was {update.loss}, but the settings of the bundle now give {' or '.join(found)}: replay it with its code"
        )
    return anchor_to_self(found[update.loss], update.own_columns) if update.own_columns else found[update.loss]

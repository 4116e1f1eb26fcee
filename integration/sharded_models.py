"""The models of a run on several processes: what each rank is told to make, from the settings and directories that all of them see.

No rank sends a model to another: each reads its slices of a directory or, of the built-in model, makes it from the seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from integration.config import Config
from integration.models import (
    Companions,
    create_backend,
    create_companions,
    create_model,
    create_tokenizer,
    find_directory,
)
from rollouts.backends.factory import load_critic_model, load_hf_model, parse_device
from rollouts.backends.fsdp import FSDPTrainingBackend
from rollouts.backends.fsdp_config import FSDPConfig
from rollouts.backends.fsdp_factory import create_fsdp_backend, create_fsdp_critic_backend, create_fsdp_reference_backend
from rollouts.backends.protocol import TrainingBackend
from rollouts.backends.rank_group import RankGroup, check_sendable
from rollouts.backends.sharded_weights import load_hf_model_on_meta
from rollouts.chat import ensure_pad_token
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"


def fsdp_config(config: Config) -> FSDPConfig:
    """backend.fsdp, with what follows from backend.compute_dtype."""
    section = config.backend
    return replace(section.fsdp, mixed_precision="bfloat16") if section.compute_dtype == "bfloat16" else section.fsdp


def build_policy(config: Config, source: Path | None, optimizer: OptimizerConfig, total_steps: int) -> FSDPTrainingBackend:
    """This rank's part of the policy. source: the directory that it begins from; None = config.model."""
    seed_dropout(config, dist.get_rank())
    return create_fsdp_backend(
        _find_model(config, source),
        total_steps=total_steps,
        device=parse_device(config.model.device),
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
        lora=config.lora.create(config.seed),
        **vars(optimizer),
    )


def seed_dropout(config: Config, rank: int) -> None:
    """Let the global generator, from which dropout draws, begin by the seed; each rank draws other numbers, for it has other rows."""
    torch.manual_seed(config.seed + 1_000_003 * rank)


def build_reference(config: Config, source: Path | None) -> FSDPTrainingBackend:
    """This rank's part of the reference. source: as for the policy."""
    origin = source if config.reference.path is None else Path(config.reference.path)
    return create_fsdp_reference_backend(
        _find_model(config, origin),
        device=parse_device(config.model.device),
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
    )


def build_critic(config: Config, source: Path | None, total_steps: int) -> FSDPTrainingBackend:
    """This rank's part of the critic. source: as for the policy."""
    origin = source if config.critic.path is None else Path(config.critic.path)
    return create_fsdp_critic_backend(
        _find_model(config, origin, partial(load_critic_model, seed=config.seed)),
        seed=config.seed,
        total_steps=total_steps,
        device=parse_device(config.model.device),
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
        **vars(config.critic.optimizer),
    )


def _find_model(config: Config, path: Path | None, load: Callable[..., PreTrainedModel] = load_hf_model) -> Path | PreTrainedModel:
    """A directory to read slices of; the whole model where it is built in, or a directory's own code makes it (by `load`)."""
    directory = find_directory(config, path)
    if directory is None:
        return create_model(config)[0]
    trusted = config.model.trust_remote_code
    return load(directory, trust_remote_code=trusted) if trusted else directory


def _create_padded_tokenizer(config: Config, source: Path | None) -> PreTrainedTokenizerBase:
    """The policy's, with the pad token that the stages give it."""
    tokenizer = create_tokenizer(config, source)
    with warnings.catch_warnings(action="ignore"):  # the stages say it
        ensure_pad_token(tokenizer)
    return tokenizer


def create_sampling_model(config: Config, source: Path | None, group: RankGroup | None, *, whole: bool) -> PreTrainedModel:
    """The model that rank 0 gives to the engines at the beginning of a stage.

    Args:
        whole: whether the embedded engine samples with it; else, on several processes, its shapes are enough.
    """
    directory = find_directory(config, source)
    if group is None or whole or directory is None or config.model.trust_remote_code:
        return create_model(config, source)[0]
    return load_hf_model_on_meta(directory)


def create_policy(
    config: Config,
    group: RankGroup | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    optimizer: OptimizerConfig,
    total_steps: int,
) -> TrainingBackend:
    """The policy's backend: over this model in one process, or of each rank's making."""
    if group is None:
        seed_dropout(config, 0)
        return create_backend(config, model, tokenizer, optimizer, total_steps)
    return group.create_backend(POLICY, partial(build_policy, replace(config), source, optimizer, total_steps))


def create_beside(
    config: Config,
    group: RankGroup | None,
    algorithm: Algorithm,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    critic_steps: int,
) -> Companions:
    """models.create_companions, over several processes where there are some."""
    if group is None:
        return create_companions(config, algorithm, model, tokenizer, critic_steps)
    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    is_base = "ref_log_probs" in algorithm.requires and config.lora.rank > 0 and config.reference.path is None
    if "ref_log_probs" in algorithm.requires and not is_base:
        reference = group.create_backend(REFERENCE, partial(build_reference, replace(config), source))
    if "values" in algorithm.requires:
        critic = group.create_backend(CRITIC, partial(build_critic, replace(config), source, critic_steps))
    return Companions(reference, critic, reference_is_base=is_base)


def check_loss_travels(config: Config) -> None:
    """Raise ConfigError if the other processes cannot be told which loss rl.algorithm has."""
    check_sendable(f"the loss of rl.algorithm {config.rl.algorithm!r}", config.algorithm.loss)


def check_rank_settings(config: Config) -> None:
    """Raise ConfigError for settings that several processes cannot have."""
    device = parse_device(config.model.device)
    if device.type == "mps" or (device.type == "cuda" and device.index is not None):
        raise ConfigError(
            f"model.device is {config.model.device!r} with backend.kind 'fsdp': use cpu, or cuda, of which each process takes its own GPU"
        )

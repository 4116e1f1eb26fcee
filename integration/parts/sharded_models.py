"""The models of a run on several processes: each rank creates its shard from the settings and directories that all ranks see.

No rank sends a model to another: each reads its slices of a directory, or creates the built-in model from the seed.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from integration.parts.model_settings import create_tokenizer, find_directory
from integration.parts.models import Companions, create_backend, create_companions, create_model
from integration.settings.config import Config
from integration.settings.made.library import count_tops, find_teacher_models
from integration.settings.sections.stages import RLSection, SFTSection
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend, create_fsdp_critic_backend, create_fsdp_reference_backend
from rollouts.backends.fsdp.load import load_hf_model_on_meta
from rollouts.backends.protocol import TrainingBackend
from rollouts.backends.ranks.group import RankGroup, check_sendable
from rollouts.backends.ranks.leading import drop_backend, lead_backend
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.models.heads import load_critic_model
from rollouts.models.loading import load_hf_model, parse_device
from rollouts.training.steps import require_balance, require_replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


POLICY, REFERENCE, CRITIC, TEACHER = "policy", "reference", "critic", "teacher"


def fsdp_config(config: Config) -> FSDPConfig:
    """Return backend.fsdp with what follows from backend.compute_dtype and backend.gradient_checkpointing."""
    section = config.backend
    fsdp = replace(section.fsdp, gradient_checkpointing=section.recomputes_activations)
    return replace(fsdp, mixed_precision="bfloat16") if section.precision(config.model.device) == "bfloat16" else fsdp


def build_policy(
    config: Config, source: Path | None, optimizer: OptimizerConfig, total_steps: int, rows_per_unit: int = 1
) -> FSDPTrainingBackend:
    """Create this rank's shard of the policy. source: the directory to start from; None = config.model."""
    seed_dropout(config, dist.get_rank())
    return create_fsdp_backend(
        _find_model(config, source),
        total_steps=total_steps,
        device=parse_device(config.model.device),
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
        lora=config.lora.create(config.seed),
        bad_numbers=config.on_bad,
        rows_per_unit=rows_per_unit,
        **vars(optimizer),
    )


def check_experts(backend: TrainingBackend, section: SFTSection | RLSection, place: str) -> None:
    """Raise ConfigError, with the setting's name, unless the backend and its model can do with experts what a stage asks for.

    Args:
        place: name of the section.
    """
    try:
        if section.router_balance_coef:
            require_balance(backend)
        if isinstance(section, RLSection) and section.router_replay:
            require_replay(backend)
    except ConfigError as error:
        raise ConfigError(re.sub(r"(\w+\.)?(?=router_(balance_coef|replay)\b)", f"{place}.", str(error), count=1)) from error


def seed_dropout(config: Config, rank: int) -> None:
    """Seed the global generator, which dropout uses; each rank draws different numbers, as it has different rows."""
    torch.manual_seed(config.seed + 1_000_003 * rank)


def build_reference(config: Config, source: Path | None) -> FSDPTrainingBackend:
    """Create this rank's shard of the reference. source: as for the policy."""
    origin = source if config.reference.path is None else Path(config.reference.path)
    return create_fsdp_reference_backend(
        _find_model(config, origin),
        device=parse_device(config.model.device),
        dtype=config.reference.dtype,
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
    )


def build_teacher(config: Config, path: str, num_tops: int, vocab_size: int) -> FSDPTrainingBackend:
    """Create this rank's shard of a teacher. num_tops: see models.count_tops; vocab_size: embeddings of the policy."""
    return create_fsdp_reference_backend(
        _find_model(config, Path(path)),
        device=parse_device(config.model.device),
        dtype=config.teacher.dtype,
        tokenizer=_create_padded_tokenizer(config, Path(path)),
        config=fsdp_config(config),
        num_tops=num_tops,
        tops_vocab_size=vocab_size,
    )


def build_critic(config: Config, source: Path | None, total_steps: int) -> FSDPTrainingBackend:
    """Create this rank's shard of the critic. source: as for the policy."""
    origin = source if config.critic.path is None else Path(config.critic.path)
    return create_fsdp_critic_backend(
        _find_model(config, origin, partial(load_critic_model, seed=config.seed)),
        seed=config.seed,
        total_steps=total_steps,
        device=parse_device(config.model.device),
        tokenizer=_create_padded_tokenizer(config, source),
        config=fsdp_config(config),
        bad_numbers=config.on_bad,
        **vars(config.critic.optimizer),
    )


def _find_model(config: Config, path: Path | None, load: Callable[..., PreTrainedModel] = load_hf_model) -> Path | PreTrainedModel:
    """Return a directory to read slices of, or the whole model (by `load`) if it is built in or created by a directory's code."""
    directory = find_directory(config, path)
    if directory is None:
        return create_model(config)[0]
    trusted = config.model.trust_remote_code
    return load(directory, trust_remote_code=trusted) if trusted else directory


def _create_padded_tokenizer(config: Config, source: Path | None) -> PreTrainedTokenizerBase:
    """Create the policy's tokenizer, with the pad token that the stages add."""
    tokenizer = create_tokenizer(config, source)
    with warnings.catch_warnings(action="ignore"):  # the stages warn
        ensure_pad_token(tokenizer)
    return tokenizer


def create_sampling_model(config: Config, source: Path | None, group: RankGroup | None, *, whole: bool) -> PreTrainedModel:
    """Create the model that rank 0 gives to the engines at the start of a stage.

    Args:
        whole: whether the embedded engine samples with it; otherwise, on several processes, its shapes suffice.
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
    rows_per_unit: int = 1,
) -> TrainingBackend:
    """Create the policy's backend: over this model in one process, or over the shards of several.

    Args:
        rows_per_unit: consecutive rows that one process computes together: 2 for losses that compare the two answers of a pair.
    """
    if group is None:
        seed_dropout(config, 0)
        return create_backend(config, model, tokenizer, optimizer, total_steps)
    return lead_backend(group, POLICY, partial(build_policy, replace(config), source, optimizer, total_steps, rows_per_unit))


def create_beside(
    config: Config,
    group: RankGroup | None,
    requires: Collection[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Path | None,
    critic_steps: int,
) -> Companions:
    """Create the backends of models.create_companions, on one process or several."""
    if group is None:
        return create_companions(config, requires, model, tokenizer, critic_steps)
    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    is_base = "ref_log_probs" in requires and config.lora.rank > 0 and config.reference.path is None
    if "ref_log_probs" in requires and not is_base:
        reference = lead_backend(group, REFERENCE, partial(build_reference, replace(config), source))
    if "values" in requires:
        critic = lead_backend(group, CRITIC, partial(build_critic, replace(config), source, critic_steps))
    tops = count_tops(config, requires), int(model.config.get_text_config().vocab_size)
    teachers: dict[str, TrainingBackend] = {
        name: lead_backend(group, f"{TEACHER} {name}", partial(build_teacher, replace(config), path, *tops))
        for name, path in find_teacher_models(config, requires).items()
    }
    return Companions(reference, critic, teachers, reference_is_base=is_base)


def drop_reference(group: RankGroup | None) -> None:
    """Free the memory of a reference that the caller has let go of, on one process or several."""
    if group is not None:
        drop_backend(group, REFERENCE)
    gc.collect()  # a model may be part of a cycle


def check_loss_travels(config: Config) -> None:
    """Raise ConfigError if the loss of rl.algorithm cannot be sent to the other processes."""
    check_sendable(f"the loss of rl.algorithm {config.rl.algorithm!r}", config.algorithm.loss)


def check_rank_settings(config: Config) -> None:
    """Raise ConfigError for settings that several processes do not support."""
    device = parse_device(config.model.device)
    if device.type == "mps" or (device.type == "cuda" and device.index is not None):
        raise ConfigError(
            f"model.device is {config.model.device!r} with backend.kind 'fsdp': use cpu, or cuda, of which each process takes its own GPU"
        )

"""One-liners for backends over several processes: every rank calls the same function with the same arguments.

No rank ever holds the whole model of a directory: shapes come first, then sharding, then each rank reads its slices of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import torch

from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.load import load_critic_on_meta, load_hf_model_on_meta, materialize_critic, materialize_from_hf
from rollouts.backends.fsdp.model import create_mesh, shard_model
from rollouts.backends.lora.adapters import add_adapters, freeze_weights, init_adapters
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.optim.optimizers import AdamW, ScheduledAdamWArguments, create_idle_optimizer, create_rule, takes
from rollouts.backends.ranks.distributed import Ranks, init_distributed
from rollouts.errors import ConfigError
from rollouts.models.forward.outputs import ComputeOutputs, compute_log_probs, compute_scores, compute_tops, compute_values
from rollouts.models.heads import open_critic, open_reward_model
from rollouts.models.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@takes(ScheduledAdamWArguments)
def create_fsdp_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: FSDPConfig | None = None,
    ranks: Ranks | None = None,
    rows_per_unit: int = 1,
    save_in_background: bool = False,
    lora: LoRAConfig | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> FSDPTrainingBackend:
    """Create a backend as create_pytorch_backend or create_backend_with_scheduler, over all ranks: a policy, AdamW, a schedule.

    Args:
        model: the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given), or a model, whole and the same on
            every rank.
        device: device of this rank, if ranks is None; "cuda" = one GPU for each rank.
        config: None = FSDPConfig(). Set its mixed_precision for bfloat16.
        ranks: None = init_distributed(device).
        rows_per_unit: 2 for losses that compare the two rows of a pair, such as preferences.preference_loss.
        save_in_background: write checkpoints during training, see FSDPTrainingBackend.
        lora: train adapters on the frozen model instead of its weights; they are added to the model in place.
        lr and the other arguments of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.
    """
    rule = create_rule(**adamw)
    rule.require_float32_moments("FSDP")
    if lora is not None and lora.base_dtype == "nf4":
        raise ConfigError(
            "LoRAConfig.base_dtype is 'nf4', and FSDP does not shard weights in 4 bits: take bfloat16, or train on one GPU with "
            "create_pytorch_backend"
        )
    place = _arrange(model, tokenizer, device, ranks, config)
    if isinstance(model, str | Path):
        empty = load_hf_model_on_meta(model)
        if lora is not None:
            add_adapters(empty, lora)
        model = _load_sharded(empty, place, partial(materialize_from_hf, directory=model))
        if lora is not None:
            init_adapters(model, lora.seed)
    elif lora is not None:
        add_adapters(model, lora)
    return _assemble(model, rule, place, rows_per_unit=rows_per_unit, save_in_background=save_in_background, lora=lora)


@takes(ScheduledAdamWArguments)
def create_fsdp_critic_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: FSDPConfig | None = None,
    ranks: Ranks | None = None,
    save_in_background: bool = False,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> FSDPTrainingBackend:
    """Create a critic as create_critic_backend does, over all ranks.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head), of a saved critic or of a reward model, or a model,
            whole and the same on every rank; a language model is copied.
        seed, head_std: initialization of a fresh head, the same for any number of ranks; see init_value_head.
        Other arguments: as in create_fsdp_backend.
    """
    rule = create_rule(**adamw)
    rule.require_float32_moments("FSDP")
    place = _arrange(model, tokenizer, device, ranks, config)
    if isinstance(model, str | Path):
        fill = partial(materialize_critic, directory=model, seed=seed, head_std=head_std)
        model = _load_sharded(load_critic_on_meta(model), place, fill)
    else:
        model, _ = open_critic(model, place.tokenizer, seed=seed, head_std=head_std)
    return _assemble(model, rule, place, compute_outputs=compute_values, save_in_background=save_in_background)


def create_fsdp_reference_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: FSDPConfig | None = None,
    ranks: Ranks | None = None,
    num_tops: int = 0,
    tops_vocab_size: int | None = None,
) -> FSDPTrainingBackend:
    """Create a reference as create_reference_backend does, over all ranks: log-probs only, no gradients, no optimizer state.

    Args:
        model: a directory, or a model. The model is frozen: pass a copy of a policy.
        dtype: dtype of its weights; bfloat16 takes half the memory and needs a config with mixed_precision bfloat16.
        num_tops, tops_vocab_size: as in create_reference_backend.
        Other arguments: as in create_fsdp_backend.
    """
    place = _arrange(model, tokenizer, device, ranks, config)
    if isinstance(model, str | Path):
        empty = load_hf_model_on_meta(model)
        freeze_weights(empty, dtype)
        model = _load_sharded(empty, place, partial(materialize_from_hf, directory=model))
    else:
        freeze_weights(model, dtype)
    return FSDPTrainingBackend(
        model,
        create_idle_optimizer,
        config=place.config,
        ranks=place.ranks,
        tokenizer=place.tokenizer,
        compute_outputs=partial(compute_tops, k=num_tops, vocab_size=tops_vocab_size) if num_tops else compute_log_probs,
    )


@takes(ScheduledAdamWArguments)
def create_fsdp_reward_model_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: FSDPConfig | None = None,
    ranks: Ranks | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> FSDPTrainingBackend:
    """Create a reward model as create_reward_model_backend does, over all ranks. The two rows of a pair go to one rank together.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a reward model, or a model. Each rank has it
            whole in host memory until it is sharded.
        seed, head_std: initialization of a fresh head, see init_value_head.
        Other arguments: as in create_fsdp_backend.
    """
    rule = create_rule(**adamw)
    rule.require_float32_moments("FSDP")
    place = _arrange(model, tokenizer, device, ranks, config)
    model, _ = open_reward_model(model, place.tokenizer, seed=seed, head_std=head_std)
    return _assemble(model, rule, place, compute_outputs=compute_scores, rows_per_unit=2)


@dataclass(frozen=True, eq=False)
class _Place:
    """Ranks that hold a model, its sharding among them, and its tokenizer: arguments of a factory, with defaults for those not given."""

    ranks: Ranks
    config: FSDPConfig
    tokenizer: PreTrainedTokenizerBase | None


def _arrange(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device,
    ranks: Ranks | None,
    config: FSDPConfig | None,
) -> _Place:
    ranks = init_distributed(device) if ranks is None else ranks
    if tokenizer is None and isinstance(model, str | Path):
        tokenizer = load_tokenizer(model)
    return _Place(ranks, FSDPConfig() if config is None else config, tokenizer)


def _load_sharded(model: PreTrainedModel, place: _Place, materialize: Callable[..., object]) -> PreTrainedModel:
    """Shard a model on meta, then give each rank its part of the weights.

    Args:
        materialize: called with the model and device=, the device of the shards.
    """
    model = shard_model(model, create_mesh(place.config, place.ranks.device, place.ranks.world_size), place.config)
    materialize(model, device=torch.device("cpu") if place.config.cpu_offload else place.ranks.device)
    return model


def _assemble(
    model: PreTrainedModel,
    rule: AdamW,
    place: _Place,
    *,
    compute_outputs: ComputeOutputs = compute_log_probs,
    rows_per_unit: int = 1,
    save_in_background: bool = False,
    lora: LoRAConfig | None = None,
) -> FSDPTrainingBackend:
    """Create a backend that trains a model, or adapters on it, by a rule."""
    return FSDPTrainingBackend(
        model,
        rule.create_optimizer,
        create_schedule=rule.create_scheduler,
        max_grad_norm=rule.max_grad_norm,
        bad_numbers=rule.bad_numbers,
        config=place.config,
        ranks=place.ranks,
        tokenizer=place.tokenizer,
        compute_outputs=compute_outputs,
        rows_per_unit=rows_per_unit,
        save_in_background=save_in_background,
        lora=lora,
    )

"""One-liners for backends over several processes: every rank calls the same function with the same arguments.

No rank ever holds the whole model of a directory: shapes come first, then sharding, then each rank reads its slices of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

import torch

from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.load import load_critic_on_meta, load_hf_model_on_meta, materialize_critic, materialize_from_hf
from rollouts.backends.fsdp.model import create_mesh, shard_model
from rollouts.backends.lora.adapters import LoRAConfig, add_adapters, init_adapters
from rollouts.backends.optim.optimizers import ScheduledAdamWArguments, create_idle_optimizer, create_rule, takes
from rollouts.backends.ranks.distributed import Ranks, init_distributed
from rollouts.backends.weights.read import merge_adapters
from rollouts.models.heads import create_critic_model, create_reward_model, load_reward_start
from rollouts.models.loading import load_tokenizer, open_model
from rollouts.models.outputs import compute_scores, compute_values

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
    ranks, config = _arrange(device, ranks, config)
    if isinstance(model, str | Path):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        empty = load_hf_model_on_meta(model)
        if lora is not None:
            add_adapters(empty, lora)
        model = _load_sharded(empty, ranks, config, partial(materialize_from_hf, directory=model))
        if lora is not None:
            init_adapters(model, lora.seed)
    elif lora is not None:
        add_adapters(model, lora)
    return FSDPTrainingBackend(
        model,
        rule.create_optimizer,
        create_schedule=rule.create_scheduler,
        max_grad_norm=rule.max_grad_norm,
        config=config,
        ranks=ranks,
        tokenizer=tokenizer,
        rows_per_unit=rows_per_unit,
        save_in_background=save_in_background,
        lora=lora,
    )


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
    ranks, config = _arrange(device, ranks, config)
    if isinstance(model, str | Path):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        fill = partial(materialize_critic, directory=model, seed=seed, head_std=head_std)
        model = _load_sharded(load_critic_on_meta(model), ranks, config, fill)
    elif model.get_output_embeddings() is not None:
        model = create_critic_model(model, seed=seed, head_std=head_std, merged=merge_adapters(model))
    return FSDPTrainingBackend(
        model,
        rule.create_optimizer,
        create_schedule=rule.create_scheduler,
        max_grad_norm=rule.max_grad_norm,
        config=config,
        ranks=ranks,
        tokenizer=tokenizer,
        compute_outputs=compute_values,
        save_in_background=save_in_background,
    )


def create_fsdp_reference_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: FSDPConfig | None = None,
    ranks: Ranks | None = None,
) -> FSDPTrainingBackend:
    """Create a reference as create_reference_backend does, over all ranks: log-probs only, no gradients, no optimizer state.

    Args:
        model: a directory, or a model. The model is frozen: pass a copy of a policy.
        Other arguments: as in create_fsdp_backend.
    """
    ranks, config = _arrange(device, ranks, config)
    if isinstance(model, str | Path):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        frozen = _freeze(load_hf_model_on_meta(model))
        model = _load_sharded(frozen, ranks, config, partial(materialize_from_hf, directory=model))
    return FSDPTrainingBackend(_freeze(model), create_idle_optimizer, config=config, ranks=ranks, tokenizer=tokenizer)


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
    ranks, config = _arrange(device, ranks, config)
    model, tokenizer = open_model(model, tokenizer, partial(load_reward_start, seed=seed, head_std=head_std))
    if model.get_output_embeddings() is not None:
        model = create_reward_model(model, seed=seed, head_std=head_std, merged=merge_adapters(model))
    return FSDPTrainingBackend(
        model,
        rule.create_optimizer,
        create_schedule=rule.create_scheduler,
        max_grad_norm=rule.max_grad_norm,
        config=config,
        ranks=ranks,
        tokenizer=tokenizer,
        compute_outputs=compute_scores,
        rows_per_unit=2,
    )


def _arrange(device: str | torch.device, ranks: Ranks | None, config: FSDPConfig | None) -> tuple[Ranks, FSDPConfig]:
    """Fill in the arguments that were not given."""
    return init_distributed(device) if ranks is None else ranks, FSDPConfig() if config is None else config


def _load_sharded(model: PreTrainedModel, ranks: Ranks, config: FSDPConfig, materialize: Callable[..., object]) -> PreTrainedModel:
    """Shard a model on meta, then give each rank its part of the weights.

    Args:
        materialize: called with the model and device=, the device of the shards.
    """
    model = shard_model(model, create_mesh(config, ranks.device, ranks.world_size), config)
    materialize(model, device=torch.device("cpu") if config.cpu_offload else ranks.device)
    return model


def _freeze(model: PreTrainedModel) -> PreTrainedModel:
    return cast("PreTrainedModel", cast("torch.nn.Module", model).requires_grad_(False))

"""Create backends from paths and numbers: tier-1 parts that stand alone, and one-liners made of them."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, cast

import torch

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.lora.adapters import add_adapters, freeze_weights
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.optim.optimizers import (
    AdamW,
    AdamWArguments,
    EndingAdamWArguments,
    ScheduledAdamWArguments,
    create_idle_optimizer,
    create_rule,
    takes,
)
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.backends.ranks.distributed import count_launched
from rollouts.models.forward.outputs import ComputeOutputs, compute_log_probs, compute_scores, compute_tops, compute_values
from rollouts.models.heads import open_critic, open_reward_model
from rollouts.models.linear import Kernels, use_kernels
from rollouts.models.loading import open_model, parse_dtype
from rollouts.types import LossFn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def create_cross_entropy_loss() -> LossFn:
    """Create the SFT loss: cross entropy of the tokens with loss_weights > 0."""
    return sft_loss


@takes(AdamWArguments)
def create_pytorch_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    kernels: Kernels = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: LoRAConfig | None = None,
    **adamw: Unpack[AdamWArguments],
) -> PyTorchTrainingBackend:
    """Create a backend with AdamW at a constant learning rate.

    Args:
        model: a model, or the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given).
        kernels: kernels of linear layers on a CPU, such as choose_kernels chooses.
        lora: train adapters on the frozen model instead of its weights; they are added to the model in place.
        lr and the other arguments of AdamW: see optimizers.AdamWArguments.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer)
    backend = assemble_backend(model, rule, device, compute_dtype, tokenizer, lora=lora, scheduled=False)
    use_kernels(backend.model, kernels)
    return backend


@takes(EndingAdamWArguments, schedule="cosine")
def create_backend_with_scheduler(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    kernels: Kernels = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: LoRAConfig | None = None,
    **adamw: Unpack[EndingAdamWArguments],
) -> PyTorchTrainingBackend:
    """Create a backend as create_pytorch_backend does, with a learning-rate schedule over total_steps optimizer steps: a cosine, unless
    another is named.
    """
    adamw.setdefault("schedule", "cosine")
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer)
    backend = assemble_backend(model, rule, device, compute_dtype, tokenizer, lora=lora)
    use_kernels(backend.model, kernels)
    return backend


@takes(ScheduledAdamWArguments)
def create_critic_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    kernels: Kernels = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> PyTorchTrainingBackend:
    """Create a backend whose model has a value head, for the critic= of run_rl_training.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a saved critic (as it is), or such a model. A
            language model is copied, so the policy may be made from the same object.
        seed, head_std: initialization of a fresh head, see init_value_head.
        kernels: as in create_pytorch_backend.
        tokenizer: None with a directory = the directory's own.
        lr and the other arguments of AdamW and its schedule: see optimizers.ScheduledAdamWArguments; steps are the critic's.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_critic(model, tokenizer, seed=seed, head_std=head_std)
    backend = assemble_backend(model, rule, device, compute_dtype, tokenizer, compute_outputs=compute_values)
    use_kernels(backend.model, kernels)
    return backend


@takes(ScheduledAdamWArguments)
def create_reward_model_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    kernels: Kernels = "torch",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> PyTorchTrainingBackend:
    """Create a backend for train_reward_model: its outputs.values are scores, of tokens[:, :t + 1] at position t.

    Its exports and checkpoints are complete directories of a sequence-classification model.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a reward model (as it is), or such a model. A
            language model is copied.
        Other arguments: as in create_critic_backend.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_reward_model(model, tokenizer, seed=seed, head_std=head_std)
    backend = assemble_backend(model, rule, device, compute_dtype, tokenizer, compute_outputs=compute_scores)
    use_kernels(backend.model, kernels)
    return backend


def create_reference_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    kernels: Kernels = "torch",
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_tops: int = 0,
    tops_vocab_size: int | None = None,
) -> PyTorchTrainingBackend:
    """Create a backend that only computes log-probs, for the reference= of run_rl_training and for a teacher: no gradients, no optimizer
    state.

    Args:
        model: a directory (its tokenizer is loaded, too, unless one is given) or a model. The model is frozen: pass a copy of a policy.
        kernels: as in create_pytorch_backend.
        dtype: dtype of its weights; bfloat16 takes half the memory and needs compute_dtype bfloat16.
        num_tops: tokens that it names as the most probable in place of each, for a divergence from a teacher; the vocabulary at most. 0 =
            none.
        tops_vocab_size: embeddings of the policy, if they may be fewer (some models pad them): num_tops are among them; None = all.
    """
    model, tokenizer = open_model(model, tokenizer)
    freeze_weights(model, dtype)
    use_kernels(cast("torch.nn.Module", model), kernels)
    model = cast("PreTrainedModel", cast("torch.nn.Module", model).to(device))
    optimizer = create_idle_optimizer(cast("torch.nn.Module", model))
    return PyTorchTrainingBackend(
        model,
        optimizer,
        device=device,
        compute_dtype=parse_dtype(compute_dtype),
        tokenizer=tokenizer,
        compute_outputs=partial(compute_tops, k=num_tops, vocab_size=tops_vocab_size) if num_tops else compute_log_probs,
    )


def assemble_backend(
    model: PreTrainedModel,
    rule: AdamW,
    device: str | torch.device,
    compute_dtype: str | torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    compute_outputs: ComputeOutputs = compute_log_probs,
    lora: LoRAConfig | None = None,
    scheduled: bool = True,
) -> PyTorchTrainingBackend:
    """Create a backend that trains a model, or adapters on it, by a rule.

    Args:
        scheduled: False = keep the optimizer's learning rate.

    Warns if a launcher has started several processes: each would train a model of its own.
    """
    if (launched := count_launched()) > 1:
        warnings.warn(
            f"WORLD_SIZE is {launched}: a launcher has started so many processes, and this backend trains the whole model in each of them "
            "without the others. create_fsdp_backend and its companions train one model over all; or start one process",
            stacklevel=4,
        )
    if lora is not None:
        add_adapters(model, lora)
    module = cast("torch.nn.Module", model).to(device)  # before the optimizer takes its parameters
    optimizer = rule.create_optimizer(module)
    return PyTorchTrainingBackend(
        model,
        optimizer,
        scheduler=rule.create_scheduler(optimizer) if scheduled else None,
        device=device,
        compute_dtype=parse_dtype(compute_dtype),
        max_grad_norm=rule.max_grad_norm,
        bad_numbers=rule.bad_numbers,
        tokenizer=tokenizer,
        compute_outputs=compute_outputs,
        lora=lora,
    )

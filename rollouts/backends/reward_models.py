"""Backends of reward models: sequence-classification models with one label, trained on pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from rollouts.backends.factory import assemble_backend
from rollouts.backends.optim.optimizers import ScheduledAdamWArguments, create_rule, takes
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.backends.weights.read import merge_adapters
from rollouts.models.heads import create_reward_model, load_reward_start
from rollouts.models.loading import open_model
from rollouts.models.outputs import compute_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@takes(ScheduledAdamWArguments)
def create_reward_model_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> PyTorchTrainingBackend:
    """Create a backend for train_reward_model: its outputs.values are scores, of tokens[:, :t + 1] at position t.

    Its exports and checkpoints are complete directories of a sequence-classification model.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a reward model (as it is), or such a model. A
            language model is copied.
        seed, head_std: initialization of a fresh head, see init_value_head.
        tokenizer: None with a directory = the directory's own.
        lr and the other arguments of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer, partial(load_reward_start, seed=seed, head_std=head_std))
    if model.get_output_embeddings() is not None:
        model = create_reward_model(model, seed=seed, head_std=head_std, merged=merge_adapters(model))
    return assemble_backend(model, rule, device, compute_dtype, tokenizer, compute_outputs=compute_scores)

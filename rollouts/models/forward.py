"""Forward pass of a model over the rows of a batch, for all torch backends: packed, on the batch's device, read by compute_outputs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.batches import map_turns
from rollouts.data.model_limits import ModelLimits
from rollouts.errors import DataError
from rollouts.models.outputs import ComputeOutputs, OutputOptions
from rollouts.models.packing import pack_padded, run_packed
from rollouts.types import TokenOutputs, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_rows(model: PreTrainedModel, batch: TrainBatch, compute_outputs: ComputeOutputs, options: OutputOptions) -> TokenOutputs:
    """Run a packed forward pass and return the result of compute_outputs, placed in [B, T].

    Args:
        model: prepared by packing.use_packed_attention.
        batch: on the model's device.
        options: compute_dtype bfloat16 runs the model's matrix products in bfloat16 (autocast).
    """
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=options.compute_dtype == torch.bfloat16):
        hidden = run_packed(model, packed)  # [N, H]
    return compute_outputs(model, hidden, packed, batch.temperatures, options)


@contextmanager
def training_mode(model: PreTrainedModel, *, dropout: bool) -> Generator[None]:
    """Run a pass that is trained on, and its backward pass, with or without dropout.

    Without dropout the model is in eval mode, which also keeps the routers of some models from adding noise. Layers that recompute their
    activations in the backward pass stay in training mode, since transformers recomputes in no other; their dropout rates are 0 meanwhile.
    """
    module = cast("torch.nn.Module", model)
    module.train(dropout)
    rates: list[tuple[torch.nn.Module, str, float]] = []
    if not dropout:
        for layer in module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True
                rates += [(layer, name, value) for name, value in vars(layer).items() if isinstance(value, float) and "drop" in name]
    for layer, name, _ in rates:
        setattr(layer, name, 0.0)
    try:
        yield
    finally:
        for layer, name, value in rates:
            setattr(layer, name, value)


def check_head(model: PreTrainedModel, compute_outputs: ComputeOutputs, options: OutputOptions, device: torch.device) -> None:
    """Raise ConfigError, before anything is trained, if the model lacks the head that compute_outputs reads."""
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    packed = pack_padded(tokens, torch.full((1,), 2, device=device))
    hidden = torch.zeros((2, model.config.get_text_config().hidden_size), device=device)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        compute_outputs(model, hidden, packed, None, options)


def check_batch(batch: TrainBatch, limits: ModelLimits) -> None:
    """Raise DataError, with the position in the batch, for the first row beyond the limits of the model."""
    rows, width = batch.tokens.shape
    too_long = limits.context_length is not None and width > limits.context_length
    if not too_long and int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < limits.num_embeddings:
        return
    for i in range(rows):
        tokens = batch.tokens[i, : int(batch.lengths[i])]
        longest = len(tokens)
        if batch.context_ids is not None:  # each context is computed as a sequence of its own
            longest = int(batch.context_ids[i, : len(tokens)].unique(return_counts=True)[1].max())
        why = limits.explain(longest, int(tokens.min()), int(tokens.max()))
        if why is not None:
            raise DataError(f"row {i} of {rows} of a batch {why}")


def admit_batch(batch: TrainBatch, limits: ModelLimits, device: torch.device) -> TrainBatch:
    """Check a batch against the model's limits and move it. Raises DataError naming the row that the model cannot take."""
    check_batch(batch, limits)
    return move_batch(batch, device)


def move_batch(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """Return the batch with every column on the device."""
    if batch.tokens.device == device:
        return batch
    moved: dict[str, Any] = {f.name: getattr(batch, f.name).to(device) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    if batch.turns is not None:
        moved["turns"] = map_turns(batch.turns, lambda column: column.to(device))
    if batch.reward_components is not None:
        moved["reward_components"] = replace(batch.reward_components, scores=batch.reward_components.scores.to(device))
    return replace(batch, **moved)

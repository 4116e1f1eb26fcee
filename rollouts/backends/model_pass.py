"""One pass of a model over the rows of a batch, as every torch backend makes it: packed, on its device, read off by compute_outputs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.backends.outputs import ComputeOutputs, OutputOptions
from rollouts.episode_columns import map_turns
from rollouts.packing import pack_padded, run_packed
from rollouts.types import TokenOutputs, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_rows(model: PreTrainedModel, batch: TrainBatch, compute_outputs: ComputeOutputs, options: OutputOptions) -> TokenOutputs:
    """Packed forward pass, then what compute_outputs reads off it, at its place in [B, T].

    Args:
        model: prepared by packing.use_packed_attention.
        batch: on the model's device.
        options: with compute_dtype bfloat16 the matrix products of the model run in it (autocast).
    """
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=options.compute_dtype == torch.bfloat16):
        hidden = run_packed(model, packed)  # [N, H]
    return compute_outputs(model, hidden, packed, batch.temperatures, options)


def check_head(model: PreTrainedModel, compute_outputs: ComputeOutputs, options: OutputOptions, device: torch.device) -> None:
    """Raise ConfigError, before anything is trained, if the model has not the head that compute_outputs reads."""
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    packed = pack_padded(tokens, torch.full((1,), 2, device=device))
    hidden = torch.zeros((2, model.config.get_text_config().hidden_size), device=device)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        compute_outputs(model, hidden, packed, None, options)


def move_batch(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """The batch with every column on the device."""
    if batch.tokens.device == device:
        return batch
    moved: dict[str, Any] = {f.name: getattr(batch, f.name).to(device) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    if batch.turns is not None:
        moved["turns"] = map_turns(batch.turns, lambda column: column.to(device))
    return replace(batch, **moved)

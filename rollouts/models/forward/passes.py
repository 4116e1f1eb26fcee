"""A pass of a model over the rows of a batch, from the check of the batch to outputs [B, T]: packed, or with the model's own attention."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollouts.batches import map_kept, map_turns
from rollouts.data.model_limits import ModelLimits
from rollouts.errors import DataError
from rollouts.models.forward.attention import AttendFn, attend_packed, name_boundaries
from rollouts.models.forward.output_layers import get_decoder
from rollouts.models.forward.outputs import ComputeOutputs, OutputOptions
from rollouts.models.forward.packing import PackedRows, pack_batch, send_values
from rollouts.models.replay import check_replayed, replay_experts, select_routers
from rollouts.models.routers import LoadRecord, record_choices
from rollouts.types import TokenOutputs, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_rows(
    model: PreTrainedModel, batch: TrainBatch, compute_outputs: ComputeOutputs, options: OutputOptions, packed: PackedRows | None = None
) -> TokenOutputs:
    """Run a packed forward pass and return the result of compute_outputs, placed in [B, T].

    Args:
        model: prepared by prepare.prepare_attention.
        batch: on the model's device.
        options: compute_dtype bfloat16 runs the model's matrix products in bfloat16 (autocast).
        packed: the batch's rows, planned by pack_batch before they were moved, so that nothing waits for the device; None = plan them here.
    """
    packed = pack_batch(batch, batch.tokens.device, share=options.shares_prompts) if packed is None else packed
    record = LoadRecord(options.routers, with_gradient=batch.router_balance is not None and torch.is_grad_enabled())
    with torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=options.compute_dtype == torch.bfloat16):
        with record_choices(options.routers, record.note):
            hidden = (run_native if options.native_attention else run_packed)(model, packed)  # [N, H]
        hidden = add_idle_passes(model, hidden, packed, options.native_passes)
    outputs = compute_outputs(model, hidden, packed, batch.temperatures, options)
    return replace(outputs, expert_load=record.sum_up()) if options.routers.modules else outputs


def is_gradient_zero(loss: Tensor, outputs: TokenOutputs) -> bool:
    """Whether a loss has a gradient of exactly zero with respect to all outputs, so that a backward pass would add nothing.

    Args:
        loss: a function of the outputs, not yet differentiated.
    """
    found = [x for x in (outputs.log_probs, outputs.entropy, outputs.values, outputs.divergence) if x is not None and x.requires_grad]
    if not found or not loss.requires_grad:
        return False
    gradients = cast("tuple[Tensor | None, ...]", torch.autograd.grad(loss, found, retain_graph=True, allow_unused=True))
    return all(gradient is None or not bool(gradient.any()) for gradient in gradients)


@contextmanager
def replaying(batch: TrainBatch, options: OutputOptions, packed: PackedRows | None = None) -> Generator[None]:
    """Make the routers of passes of this batch, and of recomputed layers, choose its recorded experts; without any, do nothing.

    Args:
        batch, packed: as in run_rows.

    Raises: ConfigError for a model that cannot replay; DataError for a record of another model.
    """
    calls: dict[tuple[int, int], Tensor] = {}
    if batch.routed_experts is not None:
        options.routers.check_replay()
        recorded = select_routers(options.routers, batch.routed_experts)
        check_replayed(options.routers, recorded)
        packed = pack_batch(batch, batch.tokens.device) if packed is None else packed
        experts = recorded.flatten(0, 1)[packed.flat_index].long()  # [N, routers, k]
        calls = {(1, len(experts)): experts}
        if options.native_attention:
            calls = {(1, 1): torch.full_like(experts[:1], -1)}  # a pass of add_idle_passes
            calls |= dict(zip(packed.same_length, (part.flatten(0, 1) for part in packed.split_lengths(experts)), strict=True))
    with replay_experts(options.routers, calls):
        yield


def check_batch(batch: TrainBatch, limits: ModelLimits) -> None:
    """Raise DataError, with the position in the batch, for the first row beyond the limits of the model."""
    rows, width = batch.tokens.shape
    if batch.teacher_beta is not None and batch.teacher_ids is not None and int(batch.teacher_ids.max()) >= limits.num_embeddings:
        raise DataError(
            f"the teacher names the token {int(batch.teacher_ids.max())}, but the policy has {limits.num_embeddings} embeddings: make the "
            f"teacher with create_reference_backend(..., tops_vocab_size={limits.num_embeddings})"
        )
    if batch.targets is not None and not 0 <= int(batch.targets.min()) <= int(batch.targets.max()) < limits.num_embeddings:
        bad = batch.targets[(batch.targets < 0) | (batch.targets >= limits.num_embeddings)]
        raise DataError(f"a batch has the target {int(bad[0])}, outside the model's {limits.num_embeddings} embeddings")
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
    send = partial(send_values, device=device)
    moved: dict[str, Any] = {f.name: send(getattr(batch, f.name)) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    if batch.turns is not None:
        moved["turns"] = map_turns(batch.turns, send)
    if batch.kept is not None:
        moved["kept"] = map_kept(batch.kept, send)
    if batch.reward_components is not None:
        moved["reward_components"] = replace(batch.reward_components, scores=send(batch.reward_components.scores))
    return replace(batch, **moved)


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


def run_packed(model: PreTrainedModel, packed: PackedRows, attend_fn: AttendFn | None = None, **more: Any) -> Tensor:
    """Return the last hidden states of packed rows, after the final norm and before the output layer: # [N, H].

    Args:
        model: prepared by prepare.use_packed_attention.
        attend_fn: attention function for the layers, with the signature of attend_packed without `packed`.
        more: further keywords for the attention function that transformers calls.
    """
    output = cast("Any", get_decoder(model))(
        input_ids=packed.tokens[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        attend_fn=attend_fn or partial(attend_packed, packed=packed),
        **name_boundaries(model, packed),
        **more,
    )
    return output.last_hidden_state[0]


def run_native(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return what run_packed returns, from the model's own forward passes: one for each distinct length, over all sequences of that length.

    Args:
        model: prepared by prepare.prepare_attention, with its own attention.
    """
    decoder = cast("Any", get_decoder(model))
    rows = packed.split_lengths(packed.tokens)  # [S, L] each
    return packed.join_lengths([decoder(input_ids=tokens, use_cache=False).last_hidden_state for tokens in rows])


def add_idle_passes(model: PreTrainedModel, hidden: Tensor, packed: PackedRows, num_passes: int) -> Tensor:
    """Return the hidden states of run_native after passes of one token that count nothing, until num_passes were made."""
    decoder, token = cast("Any", get_decoder(model)), packed.tokens[:1][None]
    missing = range(num_passes - len(packed.same_length))
    idle = [decoder(input_ids=token, use_cache=False).last_hidden_state.sum() for _ in missing]
    return hidden + 0.0 * torch.stack(idle).sum() if idle else hidden

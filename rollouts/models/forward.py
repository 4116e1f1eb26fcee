"""Forward pass of a model over the rows of a batch: packed behind each other, attention inside each row, outputs read by a head.

The rows of a micro-batch become one sequence [1, N] whose position ids restart at each row, so no pad token is computed. Attention is the
only part of a transformer that mixes positions, and it stays inside a row: everything else needs no change. Rows of one length share one
batched attention call without pads: a micro-batch with few distinct lengths makes few calls. A row of several contexts is packed as if each
of them were a row. prepare.py makes a model ready for this, or refuses it.

A head turns the last hidden states into log-probs of a language model, values of a critic or scores of a reward model. A backend takes one
of the three functions as its compute_outputs; everything else about it is the same for all three.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.algorithms.logprobs import LogitTransform, chunked_log_probs, shift_packed
from rollouts.batches import find_context_starts, map_turns
from rollouts.data.model_limits import ModelLimits
from rollouts.errors import ConfigError, DataError
from rollouts.models.replay import check_replayed, replay_experts
from rollouts.models.routers import LoadRecord, Routers, record_choices
from rollouts.types import TokenOutputs, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION_NAME = "rollouts"
"""Name of attend in transformers' registry."""

USE_ANOTHER = "Use another model, or one of this family without that"
_PASSED_ON = ("scaling", "dropout", "sliding_window")  # keywords of attention that an AttendFn gets
_UNRELATED = ("position_ids", "use_cache", "output_router_logits")  # keywords that do not concern attention


AttendFn: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, "float | None", float, "int | None"], Tensor]
"""f(module, query [B, Hq, N, D], key [B, Hk, N, D], value, scaling, dropout, window) -> [B, N, Hq, D].

window: most tokens that a token attends to, itself included; None = all before it.
"""

ComputeOutputs: TypeAlias = "Callable[[PreTrainedModel, Tensor, PackedRows, Tensor | None, OutputOptions], TokenOutputs]"
"""f(model, hidden [N, H], packed, temperatures [B] or None, options) -> outputs [B, T]. ConfigError for a model without that head."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The real tokens of a batch behind each other, in R sequences: the contexts of its rows."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restarting at each sequence
    cu_seqlens: Tensor  # [R + 1] int64: sequence r occupies [cu_seqlens[r], cu_seqlens[r + 1])
    flat_index: Tensor  # [N] int64: position of each packed token in the flattened [B * T] batch
    shape: tuple[int, int]  # (B, T)
    same_length: tuple[Tensor, ...]  # for each distinct length L: [S, L] packed positions of its S sequences
    order: Tensor  # [N] position of each packed token in the concatenation of same_length's entries

    def unpack(self, values: Tensor) -> Tensor:
        """Unpack [N] -> [B, T], 0 on pads; keeps the gradient."""
        flat = torch.zeros(self.shape[0] * self.shape[1], dtype=values.dtype, device=values.device)
        return flat.index_copy(0, self.flat_index, values).view(self.shape)


@dataclass(frozen=True)
class OutputOptions:
    """Options of the computation of outputs; none changes their meaning."""

    compute_dtype: torch.dtype = torch.float32  # dtype of matrix products with the vocabulary
    chunk_size: int = 1024  # tokens whose logits exist at the same time
    with_entropy: bool = False
    native_attention: bool = False  # run rows of one length at a time with the model's own attention instead of packed rows
    routers: Routers = field(default_factory=Routers)  # routers of the model; their load is measured


def run_rows(model: PreTrainedModel, batch: TrainBatch, compute_outputs: ComputeOutputs, options: OutputOptions) -> TokenOutputs:
    """Run a packed forward pass and return the result of compute_outputs, placed in [B, T].

    Args:
        model: prepared by prepare.prepare_attention.
        batch: on the model's device.
        options: compute_dtype bfloat16 runs the model's matrix products in bfloat16 (autocast).
    """
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    record = LoadRecord(options.routers, with_gradient=batch.router_balance is not None and torch.is_grad_enabled())
    with (
        torch.autocast(batch.tokens.device.type, dtype=torch.bfloat16, enabled=options.compute_dtype == torch.bfloat16),
        record_choices(options.routers, record.note),
    ):
        hidden = (run_native if options.native_attention else run_packed)(model, packed)  # [N, H]
    outputs = compute_outputs(model, hidden, packed, batch.temperatures, options)
    return replace(outputs, expert_load=record.sum_up()) if options.routers.modules else outputs


@contextmanager
def replaying(batch: TrainBatch, options: OutputOptions) -> Generator[None]:
    """Make the routers of passes of this batch, and of recomputed layers, choose its recorded experts; without any, do nothing.

    Raises: ConfigError for a model that cannot replay; DataError for a record of another model.
    """
    calls: dict[tuple[int, int], Tensor] = {}
    if batch.routed_experts is not None:
        options.routers.check_replay()
        check_replayed(options.routers, batch.routed_experts)
        packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
        experts = batch.routed_experts.flatten(0, 1)[packed.flat_index].long()  # [N, routers, k]
        calls = {(1, len(experts)): experts}
        if options.native_attention:
            calls = {(positions.shape[0], positions.shape[1]): experts[positions.flatten()] for positions in packed.same_length}
    with replay_experts(options.routers, calls):
        yield


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


def pack_padded(tokens: Tensor, lengths: Tensor, context_ids: Tensor | None = None) -> PackedRows:
    """Plan the packing of padded rows.

    Args:
        tokens: # [B, T] int64, padded on the right.
        lengths: # [B] int64, at least 1.
        context_ids: # [B, T] int64, see TrainBatch; None = each row is one context.

    Returns: PackedRows with N = sum of lengths and R = number of contexts in all rows.
    """
    rows, width = tokens.shape
    assert bool((lengths >= 1).all()), f"every row needs at least one token, found lengths {lengths.tolist()}"
    columns = torch.arange(width, device=tokens.device)
    flat_index = (columns < lengths[:, None]).flatten().nonzero().squeeze(-1)
    begins = (columns == 0).expand(rows, width) if context_ids is None else find_context_starts(context_ids)
    starts = begins.flatten()[flat_index].nonzero().squeeze(-1)  # [R]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=flat_index.numel())
    sizes = cu_seqlens.diff()
    same_length = tuple(
        starts[sizes == size][:, None] + torch.arange(size, device=tokens.device) for size in sorted(set(cast("list[int]", sizes.tolist())))
    )
    gathered = torch.cat([positions.flatten() for positions in same_length])
    return PackedRows(
        tokens=tokens.flatten()[flat_index],
        position_ids=torch.arange(flat_index.numel(), device=tokens.device) - starts.repeat_interleave(sizes),
        cu_seqlens=cu_seqlens,
        flat_index=flat_index,
        shape=(rows, width),
        same_length=same_length,
        order=torch.argsort(gathered),
    )


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
        **more,
    )
    return output.last_hidden_state[0]


def run_native(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Return what run_packed returns, from the model's own forward passes: one for each distinct length, over all sequences of that length.

    Args:
        model: prepared by prepare.prepare_attention, with its own attention.
    """
    decoder = cast("Any", get_decoder(model))
    outputs: list[Tensor] = []
    for positions in packed.same_length:  # [S, L]
        hidden = decoder(input_ids=packed.tokens[positions], use_cache=False).last_hidden_state  # [S, L, H]
        outputs.append(hidden.flatten(0, 1))
    return torch.cat(outputs)[packed.order]


def attend(
    module: Any,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hk, N, D]
    value: Tensor,  # [1, Hk, N, D]
    attention_mask: Tensor | None,
    attend_fn: AttendFn | None = None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer; calls the attend_fn that the model's caller passed.

    Training and decoding share this entry, because two models made from one config object share its attention setting.

    Raises: ConfigError for a keyword that no attend_fn supports, or a mask of the model's own.
    """
    assert attend_fn is not None, (
        f"a model with attention {ATTENTION_NAME!r} was called without attend_fn: it belongs to a backend or engine. "
        'Use their methods, or model.set_attn_implementation("sdpa") first'
    )
    for name, found in call.items():
        if found is not None and name not in (*_PASSED_ON, *_UNRELATED) and not (name == "is_causal" and found is True):
            raise ConfigError(_explain_refusal(module, name, found))
    if attention_mask is not None:
        raise ConfigError(f"{name_layer(module)} has a mask of its own, which is not computed here: {USE_ANOTHER}")
    return attend_fn(module, query, key, value, call.get("scaling"), call.get("dropout", 0.0), call.get("sliding_window")), None


def attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None, *, packed: PackedRows
) -> Tensor:
    """Causal attention inside each sequence. query: # [1, Hq, N, D]; key, value: # [1, Hk, N, D]. Returns # [1, N, Hq, D]."""
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    for positions in packed.same_length:  # [S, L]
        q, k, v = (x[0][:, positions].transpose(0, 1) for x in (query, key, value))  # [S, H, L, D]
        length = positions.shape[1]
        seen = None if window is None or length <= window else _see_window(length, window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [S * L, Hq, D]
    return torch.cat(outputs)[packed.order].unsqueeze(0)


def _see_window(length: int, window: int, device: torch.device) -> Tensor:
    """Mark the positions that each one attends to: itself and the window - 1 before it. Returns # [L, L] bool."""
    whole = torch.ones(length, length, dtype=torch.bool, device=device)
    return whole.tril() & whole.triu(1 - window)


def compute_log_probs(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a policy: log p(tokens[:, t] | tokens[:, :t]) and, on request, the entropy, computed in chunks of tokens.

    In a row of several contexts a token is conditioned on its own context; both outputs are 0 at the first token of each.
    """
    layer = get_output_layer(model)
    shift = shift_packed(packed.tokens, packed.cu_seqlens)
    if temperatures is not None:
        row_of_token = packed.flat_index // packed.shape[1]
        temperatures = temperatures[row_of_token[shift.positions]]
    log_probs, entropy = chunked_log_probs(
        hidden[shift.predictors].to(options.compute_dtype),
        layer.weight,
        shift.targets,
        bias=layer.bias,
        temperatures=temperatures,
        chunk_size=options.chunk_size,
        with_entropy=options.with_entropy,
        transform=layer.transform,
    )
    return TokenOutputs(
        log_probs=_place(log_probs, packed, shift.positions),
        entropy=None if entropy is None else _place(entropy, packed, shift.positions),
    )


def compute_values(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a critic: V(tokens[:, :t]) from the hidden state at t - 1, in float32; 0 at the first token of a context and on pads.

    The value at t does not depend on tokens[:, t], so it can be a baseline of that token. log_probs are zeros: a critic has none. The
    head's dropout, which token-classification models have, is left out.
    """
    head = get_value_head(model)
    shift = shift_packed(packed.tokens, packed.cu_seqlens)
    values = torch.nn.functional.linear(hidden[shift.predictors].float(), head.weight, head.bias).squeeze(-1)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=_place(values, packed, shift.positions))


def compute_scores(
    model: PreTrainedModel, hidden: Tensor, packed: PackedRows, temperatures: Tensor | None, options: OutputOptions
) -> TokenOutputs:
    """Head of a reward model: score of the text up to and including tokens[:, t], from the hidden state at t, float32; 0 on pads.

    Unlike a value it depends on tokens[:, t], so the score of a text is the one at its last token (preferences.score_loss).
    """
    head = get_value_head(model)
    scores = torch.nn.functional.linear(hidden.float(), head.weight, head.bias).squeeze(-1)
    return TokenOutputs(log_probs=torch.zeros(packed.shape, device=hidden.device), values=packed.unpack(scores))


def describe_outputs(compute_outputs: ComputeOutputs) -> frozenset[str] | None:
    """Return the kinds of outputs of one of these functions; None for any other function.

    Scores are not values: they depend on the token that a value must not depend on.
    """
    if compute_outputs is compute_log_probs:
        return frozenset({"log_probs", "entropy"})
    if compute_outputs is compute_values:
        return frozenset({"values"})
    return frozenset({"scores"}) if compute_outputs is compute_scores else None


def _place(values: Tensor, packed: PackedRows, positions: Tensor) -> Tensor:
    """Scatter values of packed positions into [B, T], 0 elsewhere; keeps the gradient."""
    flat = torch.zeros(packed.tokens.shape, dtype=values.dtype, device=values.device)
    return packed.unpack(flat.index_copy(0, positions, values))


def get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the transformer below the output layer. Raises ConfigError for a model without one."""
    decoder = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)  # Llama 4's prefix is that of a larger model
    if not isinstance(decoder, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder below its output layer, so log-probs cannot be computed in chunks")
    return decoder


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The step from last hidden states to logits: one linear layer, and a change of its results."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    transform: LogitTransform | None  # None = no change

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from hidden states [..., H], in float32 if they are changed."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.transform is None else self.transform.apply(logits.float())


def get_output_layer(model: PreTrainedModel) -> OutputLayer:
    """Return the output layer, with the change of logits that the configuration names. Raises ConfigError if it is not linear.

    prepare.check_output_layer compares the result with the model's own logits.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__})")
    config: Any = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= 1.0 if getattr(config, name, None) is None else float(getattr(config, name))
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides by it, HyperCLOVA X multiplies
        scale *= float(config.logits_scaling) ** (1 if str(config.model_type).startswith("hyperclovax") else -1)
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    soft_cap = next((cap for cap in caps if cap is not None), None)
    transform = LogitTransform(scale, soft_cap)
    return OutputLayer(head.weight, head.bias, None if transform == LogitTransform() else transform)


def get_value_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Return the layer [1, H] from hidden states to values of a token-classification model. Raises ConfigError if there is none."""
    for name in ("score", "classifier"):  # the names in transformers
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear) and head.out_features == 1:
            return head
    raise ConfigError(
        f"{type(model).__name__} has no value head (a linear layer with one output): "
        "make the backend with create_critic_backend, from a causal language model or from a saved critic"
    )


def name_layer(module: Any) -> str:
    """Name an attention layer and its model, for messages."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    index = getattr(module, "layer_idx", None)
    return f"layer {index} of a model of type {kind!r} ({type(module).__name__})"


def _explain_refusal(module: Any, name: str, found: Any) -> str:
    field = "attn_logit_softcapping" if name == "softcap" else "sinks" if name == "s_aux" else name  # names in configurations
    value = getattr(getattr(module, "config", None), field, None)
    shown = (
        f"{field} = {value!r}"
        if value is not None
        else f"{field} (learned, {list(found.shape)})"
        if isinstance(found, Tensor)
        else f"{field} = {found!r}"
    )
    return f"{name_layer(module)} asks its attention for {shown}, which is not computed here. {USE_ANOTHER}"

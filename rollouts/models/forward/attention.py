"""Attention inside of packed rows: the function that transformers calls in every layer, and what it calls.

On a GPU in half precision one call attends in all rows; elsewhere rows of one length share a batched call without pads: a micro-batch with
few distinct lengths makes few calls. models/prepare.py makes a model ready for this, or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.errors import ConfigError
from rollouts.models.forward.packing import PackedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION_NAME = "rollouts"
"""Name of attend in transformers' registry."""

USE_ANOTHER = "Use another model, or one of this family without that"
_PASSED_ON = ("scaling", "dropout", "sliding_window")  # keywords of attention that an AttendFn gets
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # keywords of name_boundaries
_UNRELATED = ("position_ids", "use_cache", "output_router_logits", *_BOUNDARIES)  # keywords that our attention does not need


AttendFn: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, "float | None", float, "int | None"], Tensor]
"""f(module, query [B, Hq, N, D], key [B, Hk, N, D], value, scaling, dropout, window) -> [B, N, Hq, D].

window: most tokens that a token attends to, itself included; None = all before it.
"""


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
    """Causal attention inside each sequence and the prompt before it. query: # [1, Hq, N, D]; key, value: # [1, Hk, N, D].

    Returns: # [1, N, Hq, D].
    """
    query = tune_queries(module, query, packed.position_ids)
    chunk = find_chunk(module)
    packed = packed if chunk is None else packed.cut(chunk)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, H, D]
    grouped = query.shape[1] != key.shape[1]
    if has_varlen(query, value, dropout):
        return attend_varlen(rows, scaling, window, packed).unsqueeze(0)
    outputs: list[Tensor] = []
    queries, keys, values = packed.split_lengths(rows[0]), packed.split_keys(rows[1]), packed.split_keys(rows[2])
    for parts in zip(queries, keys, values, strict=True):  # [S, L, Hq, D], [S, P + L, Hk, D]
        q, k, v = (x.transpose(1, 2) for x in parts)
        length, whole = q.shape[2], k.shape[2]
        is_plain = length == whole and (window is None or length <= window)
        seen = None if is_plain else _see_before(length, whole, window, query.device)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2))  # [S, L, Hq, D]
    return packed.join_lengths(outputs).unsqueeze(0)


def find_chunk(module: Any) -> int | None:
    """Return the size in tokens of the chunks that an attention layer stays inside, as Llama 4's do; None for any other layer."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = cast("Sequence[str]", getattr(config, "layer_types", None) or ())
    if not isinstance(layer, int) or layer >= len(kinds) or kinds[layer] != "chunked_attention":
        return None
    return cast("int", cast("Any", config).attention_chunk_size)


def tune_queries(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Give queries the temperature of their positions in their own sequences (arXiv 2501.19399), in layers of Llama 4 without rotation.

    transformers takes the place in the pass for the position. prepare.early_temperatures makes checks see this.

    Args:
        query: # [B, Hq, N, D].
        positions: # [N] or [B, N].
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def compute_scale(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    factor = compute_scale(positions) / compute_scale(torch.arange(query.shape[2], device=query.device))
    return (query * factor[..., None, :, None]).to(query.dtype)


def has_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch has one attention call for all rows on this device, in this dtype and head size; it knows no dropout."""
    if query.device.type != "cuda" or find_attention_dtype(query) not in (torch.bfloat16, torch.float16) or dropout > 0:
        return False
    sizes_fit = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return sizes_fit and torch.cuda.get_device_capability(query.device) >= (8, 0)


def find_attention_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in: that of autocast, where rotated queries and keys are float32, or the query's."""
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def attend_varlen(rows: Sequence[Tensor], scaling: float | None, window: int | None, packed: PackedRows) -> Tensor:
    """Attend in all rows by one call (FlashAttention-2, arXiv 2307.08691).

    Args:
        rows: query # [N, Hq, D], key and value # [N, Hk, D].

    Returns: # [N, Hq, D], in the dtype of attention.
    """
    from torch.nn.attention.varlen import varlen_attn  # since torch 2.10; this backend runs without it elsewhere

    query, key, value = (x.to(find_attention_dtype(rows[0])) for x in rows)
    ends, longest = packed.cu_seqlens.int(), packed.same_length[-1][1]
    left = -1 if window is None or window >= longest else window - 1  # tokens before a position that it attends to
    grouped = query.shape[1] != key.shape[1]
    attend_rows: Callable[..., Any] = varlen_attn
    return attend_rows(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=grouped)


def _see_before(length: int, whole: int, window: int | None, device: torch.device) -> Tensor:
    """Mark the positions that the last `length` of `whole` positions attend to: each to itself and those before it, `window` at most.

    Returns: # [L, W] bool.
    """
    seen = torch.ones(length, whole, dtype=torch.bool, device=device).tril(whole - length)
    return seen if window is None else seen.triu(whole - length + 1 - window)


def name_boundaries(model: PreTrainedModel, packed: PackedRows) -> dict[str, Any]:
    """Name the boundaries of packed rows as transformers does, for kernels of linear attention; empty for a model without such layers.

    transformers raises ValueError, naming the package to install, where only its own implementation is there, which mixes rows.
    """
    if "linear_attention" not in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return {}
    ends, num_tokens = packed.cu_seqlens.int(), packed.tokens.numel()
    rows = torch.arange(len(ends) - 1, dtype=torch.int32, device=ends.device).repeat_interleave(ends.diff(), output_size=num_tokens)
    longest = packed.same_length[-1][1]
    return dict(zip(_BOUNDARIES, (ends, ends, longest, longest, rows[None]), strict=True))


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

"""Rows packed behind each other, so that a model computes no pad token.

The rows of a micro-batch become one sequence [1, N] whose position ids restart at each row, and attention stays inside a row. Attention is
the only part of a transformer that mixes positions, so everything else needs no change. Rows of one length share one batched attention
call without pads: a micro-batch with few distinct lengths makes few calls. A row of several contexts is packed as if each of them were a
row.

Attention is causal, over the whole row or a sliding window. use_packed_attention refuses a model that asks for more, instead of dropping
it: an attention keyword unknown here, or another mask than the one computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.batches import find_context_starts
from rollouts.data.model_limits import find_context_length
from rollouts.errors import ConfigError
from rollouts.models.weights import check_finite_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION_NAME = "rollouts"
"""Name of attend in transformers' registry."""

PROBE_NAME = "rollouts_probe"
"""Name of attend_probe in transformers' registry: attend, with the masks that the model makes."""

LONGEST_CHECK = 512
"""Widest window, in tokens, that is compared with transformers' own attention on longer rows; for wider ones the masks are read."""

FARTHEST_MASK = 1 << 20
"""Position up to which masks are read if a model has no context length or a longer one."""

_KINDS = ("full_attention", "sliding_attention")  # layer types that are computed
_UNRELATED = ("position_ids", "use_cache", "output_router_logits")  # keywords that do not concern attention


AttendFn: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, "float | None", float, "int | None"], Tensor]
"""f(module, query [B, Hq, N, D], key [B, Hk, N, D], value, scaling, dropout, window) -> [B, N, Hq, D].

window: most tokens that a token attends to, itself included; None = all before it.
"""


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


def attend(
    module: Any,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hk, N, D]
    value: Tensor,  # [1, Hk, N, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attend_fn: AttendFn | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in every layer; calls the attend_fn that the model's caller passed.

    Training and decoding share this entry, because two models made from one config object share its attention setting.

    Raises: ConfigError for a keyword that no attend_fn supports, or a mask of the model's own.
    """
    assert attend_fn is not None, (
        f"a model with attention {ATTENTION_NAME!r} was called without attend_fn: it belongs to a backend or engine now. "
        'Use their methods, or model.set_attn_implementation("sdpa") first'
    )
    for name, found in others.items():
        if found is not None and name not in _UNRELATED and not (name == "is_causal" and found is True):
            raise ConfigError(_explain_refusal(module, name, found))
    if attention_mask is not None:
        raise ConfigError(f"{_name_layer(module)} has a mask of its own, which is not computed here: {_USE_ANOTHER}")
    return attend_fn(module, query, key, value, scaling, dropout, sliding_window), None


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


class ProbedMasks:
    """Mask functions that a model makes for a pass, compared with causal attention; remembers the proven ones."""

    def __init__(self, config: Any) -> None:
        self._end = min(find_context_length(config) or FARTHEST_MASK, FARTHEST_MASK)
        self._config = config
        self._proven: set[tuple[int, int | None]] = set()

    def check(self, module: Any, mask: Any, window: int | None) -> None:
        """Raise ConfigError unless a layer's mask is that of causal attention over its window, as far as the model's context goes."""
        if mask is None:  # the model leaves masking to the attention function
            if getattr(module, "is_causal", True) is not True:
                raise ConfigError(f"{_name_layer(module)} is not causal (is_causal = False). {_USE_ANOTHER}")
            if window is not None:
                raise ConfigError(f"{_name_layer(module)} has sliding_window = {window} and no mask for it. {_USE_ANOTHER}")
            return
        sees = cast("Callable[..., Any] | None", getattr(mask, "sees", None))
        if sees is None:  # not made by probe_mask
            raise ConfigError(f"{_name_layer(module)} changes its attention mask by itself{_quote_fields(self._config)}. {_USE_ANOTHER}")
        if (id(mask), window) in self._proven:
            return
        columns = torch.arange(self._end, device=mask.device)
        zero = columns.new_zeros(())
        edges = {0, self._end - 1, *(1 << i for i in range(21)), *((window - 1, window, window + 1) if window else ())}
        for row in sorted(edge for edge in edges if 0 <= edge < self._end):
            expected = (columns <= row) & (columns > row - (window or self._end))
            if not torch.broadcast_to(sees(zero, zero, zero + row, columns), columns.shape).equal(expected):
                where = "whole rows" if window is None else f"sliding_window = {window}"
                raise ConfigError(
                    f"{_name_layer(module)} attends in another way than causally over {where}: the mask that transformers makes is "
                    f"different at position {row}{_quote_fields(self._config)}. {_USE_ANOTHER}"
                )
        self._proven.add((id(mask), window))


def attend_probe(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, masks: ProbedMasks | None = None, **call: Any
) -> tuple[Tensor, None]:
    """attend for a pass of probe_attention, in which models make their masks, too."""
    assert masks is not None, f"a model with attention {PROBE_NAME!r} was called outside of probe_attention"
    masks.check(module, attention_mask, call.get("sliding_window"))
    return attend(module, query, key, value, None, **call)


def probe_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: torch.device, **_: Any) -> Tensor:
    """Mask factory that transformers calls in such a pass; the mask carries the function that tells which positions attend to which."""
    mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=device).tril()[None, None]
    cast("Any", mask).sees = mask_function
    return mask


@contextmanager
def native_attention(model: PreTrainedModel) -> Generator[None]:
    """Run the block with transformers' own attention, for comparison; afterwards the model has ours.

    Raises: ConfigError if the model cannot run with another attention function; then it has its own again.
    """
    _restore_attention(model)
    yield
    model.set_attn_implementation(ATTENTION_NAME)


def run_packed(model: PreTrainedModel, packed: PackedRows, attend_fn: AttendFn | None = None, **more: Any) -> Tensor:
    """Return the last hidden states of packed rows, after the final norm and before the output layer: # [N, H].

    Args:
        model: prepared by use_packed_attention.
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


def get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the transformer below the output layer. Raises ConfigError for a model without one."""
    decoder = getattr(model, model.base_model_prefix, None)
    if not isinstance(decoder, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder below its output layer, so log-probs cannot be computed in chunks")
    return decoder


def get_output_layer(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return weight [V, H] and bias [V] of the output layer. Raises ConfigError if logits are more than one linear layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__})")
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, name, None) not in (None, 0, 1, 1.0):
            raise ConfigError(f"{type(model).__name__} changes its logits by {name}, which chunked log-probs do not do: use another model")
    return head.weight, head.bias


def use_packed_attention(model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
    """Make a model attend inside packed rows, and check that on random tokens, in rows longer than its windows.

    Args:
        compute_dtype: dtype of matrix products in later passes (autocast); None = the caller's setting.

    Raises: ConfigError naming a feature of the model besides causal attention over whole rows or sliding windows, or if packed rows give
        other hidden states or logits than the same rows one by one; CheckpointError for a model with a NaN weight.
    """
    check_finite_weights(model.named_parameters(), f"this {type(model).__name__}")
    device = next(model.parameters()).device
    rounded = compute_dtype == torch.bfloat16
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=True) if rounded else nullcontext():
            window = probe_attention(model)
            longest = find_check_length(model, window, at_least=9)
            tokens = draw_check_tokens(model, (3, longest))
            lengths = torch.tensor([longest, 4, longest], device=device)
            has_logits = model.get_output_embeddings() is not None
            head = get_output_layer(model) if has_logits else None
            with native_attention(model):
                run = cast("Any", model if has_logits else get_decoder(model))
                outputs = [run(input_ids=tokens[i : i + 1, : int(n)], use_cache=False) for i, n in enumerate(lengths)]
            rows = [(output.logits if has_logits else output.last_hidden_state)[0] for output in outputs]
            packed = run_packed(model, pack_padded(tokens, lengths))
            found = packed if head is None else torch.nn.functional.linear(packed, *head)
    except ConfigError:
        raise
    except (TypeError, AssertionError, RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{type(model).__name__} cannot run packed rows{_quote_fields(model.config)}: {error}") from error
    finally:
        model.train(was_training)
    what = "logits" if head is not None else "hidden states"
    what = f"{type(model).__name__} gives other {what} for packed than for single rows"
    check_same(found, torch.cat(rows), what, find_dtype(model, found))


def probe_attention(model: PreTrainedModel) -> int | None:
    """Run a model on one short row and read the attention settings of each layer.

    Returns: the widest sliding window of its layers; None if all attend to whole rows. The model has transformers' attention afterwards.
    Raises: ConfigError for a layer with any other attention than causal over whole rows or a sliding window.
    """
    check_layer_kinds(model)
    masks = ProbedMasks(model.config.get_text_config())
    windows: set[int] = set()
    tokens = draw_check_tokens(model, (1, 5))
    packed = pack_padded(tokens, torch.full((1,), 5, device=tokens.device))

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
        windows.update(() if window is None else (window,))
        return attend_packed(module, query, key, value, scaling, dropout, window, packed=packed)

    _restore_attention(model)
    before = cast("Any", model.config)._attn_implementation
    model.set_attn_implementation(PROBE_NAME)
    try:
        run_packed(model, packed, note, masks=masks)
    finally:
        model.set_attn_implementation(before)
    return max(windows, default=None)


def check_layer_kinds(model: PreTrainedModel) -> None:
    """Raise ConfigError if the configuration names layers of an unsupported kind."""
    config: Any = model.config.get_text_config()
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - set(_KINDS)
    if kinds:
        raise ConfigError(
            f"{type(model).__name__} has layers that are not computed here: layer_types of its configuration (model_type "
            f"{config.model_type!r}) has {', '.join(map(repr, sorted(kinds)))}, and known are {', '.join(_KINDS)}. {_USE_ANOTHER}"
        )


def find_check_length(model: PreTrainedModel, window: int | None, *, at_least: int) -> int:
    """Return the length in tokens of a row longer than the window, within LONGEST_CHECK and the model's context."""
    wanted = at_least if window is None or window > LONGEST_CHECK else max(at_least, window + 9)
    return min(wanted, find_context_length(model.config) or wanted)


def draw_check_tokens(model: PreTrainedModel, shape: tuple[int, int]) -> Tensor:
    """Draw random tokens of the model's vocabulary, always the same ones, on its device."""
    vocab_size = int(cast("Any", model).config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def find_dtype(model: PreTrainedModel, found: Tensor) -> torch.dtype:
    """Return the least exact dtype that a model computes in: that of its weights, its results, or autocast."""
    device = found.device.type
    dtypes = [found.dtype, next(model.parameters()).dtype]
    dtypes += [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def check_same(found: Tensor, expected: Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Raise ConfigError if two results of a model differ by more than rounding.

    Args:
        dtype: dtype of the computation; None = that of the results.
    """
    difference = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))
    if not difference <= (1e-3 if (dtype or found.dtype) == torch.float32 else 5e-2):
        raise ConfigError(
            f"{what} (relative difference {difference:.2g}): its layers mix positions in another way than full causal attention, "
            "which this code cannot run"
        )


_USE_ANOTHER = "Use another model, or one of this family without that"


def _register() -> None:
    """Register the attention functions with transformers; repeating it is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, cast("Callable[..., Any]", attend))
    AttentionInterface.register(PROBE_NAME, cast("Callable[..., Any]", attend_probe))
    AttentionMaskInterface.register(PROBE_NAME, cast("Callable[..., Any]", probe_mask))


def _restore_attention(model: PreTrainedModel) -> None:
    """Give a model with our attention transformers' own: it was made from a config that one of our models uses."""
    _register()
    if cast("Any", model.config)._attn_implementation in (ATTENTION_NAME, PROBE_NAME):
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:  # only the plain implementation computes this attention
            model.set_attn_implementation("eager")


def _name_layer(module: Any) -> str:
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
    return f"{_name_layer(module)} asks its attention for {shown}, which is not computed here. {_USE_ANOTHER}"


def _quote_fields(config: Any) -> str:
    """Format a config's windows, chunks and kinds of layers, for messages."""
    config = config.get_text_config()
    names = ("sliding_window", "attention_chunk_size", "layer_types", "layers_block_type", "index_topk")
    told = {name: getattr(config, name, None) for name in names}
    shown = [
        f"{name} = {sorted(set(value)) if isinstance(value, list | tuple) else value!r}"
        for name, value in told.items()
        if value is not None
    ]
    return f" (model_type {config.model_type!r}" + "".join(f", {text}" for text in shown) + ")"

"""Rows packed behind each other: a model computes no pad token.

The rows of a micro-batch become one sequence [1, N] whose position ids restart at each row, and attention stays inside a row. Attention is
the only part of a transformer that mixes positions, so everything else needs no change. Rows of the same length are attended to
together in one batched call, without any pad: a micro-batch with few distinct lengths makes few calls. A row of several contexts is packed
as if each of them were a row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.episode_columns import find_context_starts
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "rollouts"
"""Name under which attend is known to transformers."""


AttendFn: TypeAlias = Callable[[Any, Tensor, Tensor, Tensor, "float | None", float], Tensor]
"""f(module, query [B, Hq, N, D], key [B, Hk, N, D], value, scaling, dropout) -> [B, N, Hq, D]."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The real tokens of a batch behind each other, in R sequences: the contexts of its rows."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restarting at each sequence
    cu_seqlens: Tensor  # [R + 1] int64: sequence r occupies [cu_seqlens[r], cu_seqlens[r + 1])
    flat_index: Tensor  # [N] int64: where each packed token is in the flattened [B * T] batch
    shape: tuple[int, int]  # (B, T)
    same_length: tuple[Tensor, ...]  # for each distinct length L: [S, L] packed positions of the S sequences that have it
    order: Tensor  # [N] position in the concatenation of same_length's entries, for each packed token

    def unpack(self, values: Tensor) -> Tensor:
        """[N] -> [B, T], 0 on pads; keeps the gradient."""
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
    attend_fn: AttendFn | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: hands over to the function that the caller of the model passed as attend_fn.

    One entry for training and for decoding, because two models made from one config object share its attention setting.
    """
    assert attend_fn is not None, (
        f"a model with attention {ATTENTION_NAME!r} was called without attend_fn: it belongs to a backend or engine now. "
        'Use their methods, or model.set_attn_implementation("sdpa") first'
    )
    return attend_fn(module, query, key, value, scaling, dropout), None


def attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, *, packed: PackedRows
) -> Tensor:
    """Causal attention inside each sequence. query: # [1, Hq, N, D]; key, value: # [1, Hk, N, D]. Returns # [1, N, Hq, D]."""
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    for positions in packed.same_length:  # [S, L]
        q, k, v = (x[0][:, positions].transpose(0, 1) for x in (query, key, value))  # [S, H, L, D]
        out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [S * L, Hq, D]
    return torch.cat(outputs)[packed.order].unsqueeze(0)


@contextmanager
def native_attention(model: PreTrainedModel) -> Generator[None]:
    """Run the block with an attention of transformers' own, for comparison; afterwards the model has ours.

    Raises: ConfigError if the model cannot run with another attention function; then it has its own again.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, cast("Callable[..., Any]", attend))
    config = cast("Any", model.config)
    if config._attn_implementation == ATTENTION_NAME:  # made from a config that another model of ours uses
        model.set_attn_implementation("sdpa")
    yield
    model.set_attn_implementation(ATTENTION_NAME)


def run_packed(model: PreTrainedModel, packed: PackedRows, attend_fn: AttendFn | None = None) -> Tensor:
    """Last hidden states of packed rows, after the final norm and before the output layer. Returns # [N, H].

    Args:
        model: prepared by use_packed_attention.
        attend_fn: another function for the layers, in the signature of attend_packed without `packed`.
    """
    output = cast("Any", get_decoder(model))(
        input_ids=packed.tokens[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        attend_fn=attend_fn or partial(attend_packed, packed=packed),
    )
    return output.last_hidden_state[0]


def get_decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The transformer below the output layer. Raises ConfigError for a model that has none."""
    decoder = getattr(model, model.base_model_prefix, None)
    if not isinstance(decoder, torch.nn.Module):
        raise ConfigError(f"{type(model).__name__} has no decoder below its output layer, so log-probs cannot be computed in chunks")
    return decoder


def get_output_layer(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias [V] of the output layer. Raises ConfigError where logits are more than one linear layer."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"{type(model).__name__} has no linear output layer (found {type(head).__name__})")
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, name, None) not in (None, 0, 1, 1.0):
            raise ConfigError(f"{type(model).__name__} changes its logits by {name}, which chunked log-probs do not do: use another model")
    return head.weight, head.bias


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model attend inside packed rows, and prove on random tokens that it does.

    Raises: ConfigError if packed rows give other hidden states than the same rows one by one, as with layers that mix positions in
        another way than full causal attention.
    """
    device = next(model.parameters()).device
    vocab_size = int(cast("int", model.config.vocab_size))
    tokens = torch.randint(0, vocab_size, (3, 9), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.tensor([9, 4, 9], device=device)
    decoder = cast("Any", get_decoder(model))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with native_attention(model):
                rows = [decoder(input_ids=tokens[i : i + 1, : int(n)]).last_hidden_state[0] for i, n in enumerate(lengths)]
            packed = run_packed(model, pack_padded(tokens, lengths))
    except (TypeError, AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{type(model).__name__} cannot run packed rows: {error}") from error
    finally:
        model.train(was_training)
    check_same(packed, torch.cat(rows), f"{type(model).__name__} gives other hidden states for packed than for single rows")


def check_same(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise ConfigError if two results of a model differ by more than rounding."""
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= (1e-3 if found.dtype == torch.float32 else 5e-2):
        raise ConfigError(
            f"{what} (relative difference {difference:.2g}): its layers mix positions in another way than full causal attention, "
            "which this code cannot run"
        )

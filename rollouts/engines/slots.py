"""Keys and values of running sequences in slots, and the two ways a model runs over them: prefill of prompts, one token for every slot.

The model is a Hugging Face decoder whose attention is replaced by attend_slots; no cache object of transformers is involved. Running
sequences occupy slots 0 .. A - 1, so a decode step computes nothing for free slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.errors import ConfigError
from rollouts.packing import (
    PackedRows,
    attend_packed,
    check_same,
    get_decoder,
    get_output_layer,
    native_attention,
    pack_padded,
    run_packed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUND = 16  # live lengths are rounded up to this many tokens, so that shapes repeat


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """What attention needs to know in one decode step over A sequences."""

    keys: Tensor  # [layers, S, Hk, T, D]
    values: Tensor  # [layers, S, Hk, T, D]
    rows: Tensor  # [A] int64, 0 .. A - 1
    positions: Tensor  # [A] int64, where the new token stands
    mask: Tensor  # [A, 1, 1, L] bool, True = attend; L = longest live length, rounded up


@dataclass(frozen=True, eq=False)
class Prefix:
    """A prompt that has gone through the model."""

    keys: Tensor  # [layers, Hk, n, D]
    values: Tensor  # [layers, Hk, n, D]
    logits: Tensor  # [V] float32, for the token behind it

    @property
    def length(self) -> int:
        """n."""
        return self.keys.shape[2]


def attend_and_capture(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    *,
    packed: PackedRows,
    captured: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    """attend_packed that keeps each layer's keys and values, # [Hk, N, D], in `captured`."""
    captured[cast("int", module.layer_idx)] = (key[0], value[0])
    return attend_packed(module, query, key, value, scaling, dropout, packed=packed)


def attend_slots(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, *, step: DecodeStep
) -> Tensor:
    """One new token for each slot: write its key and value, attend to what the slot holds.

    query: # [A, Hq, 1, D]; key, value: # [A, Hk, 1, D]. Returns # [A, 1, Hq, D].
    """
    layer = cast("int", module.layer_idx)
    keys, values = step.keys[layer], step.values[layer]
    keys[step.rows, :, step.positions] = key[:, :, 0]
    values[step.rows, :, step.positions] = value[:, :, 0]
    num_rows, num_heads, _, width = query.shape
    num_kv_heads, live = keys.shape[1], step.mask.shape[-1]
    # the heads that share a key are queries of one attention call: no key is copied
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, width)
    out = scaled_dot_product_attention(grouped, keys[:num_rows, :, :live], values[:num_rows, :, :live], attn_mask=step.mask, scale=scaling)
    return out.reshape(num_rows, 1, num_heads, width)


class SlotModel:
    """A model with slots. Holds weights, keys and values; knows nothing of requests."""

    def __init__(self, model: PreTrainedModel, *, max_slots: int, name: str) -> None:
        """
        Args:
            model: used by this object alone from now on; its attention is replaced.
            max_slots: most sequences at the same time; memory grows with those that really run.

        Raises: ConfigError if decoding over slots gives other logits than the model's own forward pass.
        """
        self.model = model.eval()
        self.max_slots = max_slots
        self.device = next(model.parameters()).device
        self._name = name
        self._decoder: Any = get_decoder(model)
        self._head, self._bias = get_output_layer(model)
        self._keys = self._values = torch.empty(0)
        self._check()

    @property
    def num_allocated(self) -> tuple[int, int]:
        """Slots and tokens a slot for which there is memory."""
        return (self._keys.shape[1], self._keys.shape[3]) if self._keys.numel() else (0, 0)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Prefix]:
        """Run several prompts, packed behind each other."""
        packed = self._pack(prompts)
        captured: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.inference_mode():
            hidden = run_packed(self.model, packed, partial(attend_and_capture, packed=packed, captured=captured))  # [N, H]
            logits = self.compute_logits(hidden[packed.cu_seqlens[1:] - 1])
            keys = torch.stack([captured[layer][0] for layer in sorted(captured)])  # [layers, Hk, N, D]
            values = torch.stack([captured[layer][1] for layer in sorted(captured)])
        bounds = cast("list[int]", packed.cu_seqlens.tolist())
        return [
            Prefix(keys=keys[:, :, start:end], values=values[:, :, start:end], logits=logits[i])
            for i, (start, end) in enumerate(pairwise(bounds))
        ]

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Last hidden states of one row. Returns # [N, H]."""
        with torch.inference_mode():
            return run_packed(self.model, self._pack([tokens]))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] -> logits [..., V] in float32."""
        with torch.inference_mode():
            return torch.nn.functional.linear(hidden, self._head, self._bias).float()

    def fill(self, slots: Sequence[int], prefix: Prefix) -> None:
        """Put a prefix into several slots."""
        self._reserve(max(slots) + 1, prefix.length + 1)
        index = torch.tensor(slots, device=self.device)
        with torch.inference_mode():
            self._keys[:, index, :, : prefix.length] = prefix.keys[:, None]
            self._values[:, index, :, : prefix.length] = prefix.values[:, None]

    def decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append one token to each of the first A slots and give the logits behind it.

        Args:
            tokens: # [A] int64.
            positions: # [A] int64, where each stands in its sequence.

        Returns: # [A, V] float32.
        """
        num_rows, longest = tokens.numel(), int(positions.max()) + 1
        self._reserve(num_rows, longest)
        live = min(self._keys.shape[3], -(-longest // _ROUND) * _ROUND)
        with torch.inference_mode():
            mask = torch.arange(live, device=self.device) <= positions[:, None]
            rows = torch.arange(num_rows, device=self.device)
            step = DecodeStep(self._keys, self._values, rows, positions, mask[:, None, None])
            output = self._decoder(
                input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, attend_fn=partial(attend_slots, step=step)
            )
            return self.compute_logits(output.last_hidden_state[:, 0])

    def move(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy slots to other slots (distinct from all sources); longest: tokens in the fullest of them."""
        if sources:
            source, target = torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
            with torch.inference_mode():
                self._keys[:, target, :, :longest] = self._keys[:, source, :, :longest]
                self._values[:, target, :, :longest] = self._values[:, source, :, :longest]

    def _pack(self, rows: Sequence[Sequence[int]]) -> PackedRows:
        width = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        return pack_padded(padded, torch.tensor([len(row) for row in rows], device=self.device))

    def _reserve(self, num_slots: int, num_tokens: int) -> None:
        """Grow the memory to at least so many slots of at least so many tokens, keeping what is there."""
        have_slots, have_tokens = self.num_allocated
        if num_slots <= have_slots and num_tokens <= have_tokens:
            return
        slots = have_slots if num_slots <= have_slots else min(self.max_slots, max(num_slots, 2 * have_slots))
        tokens = have_tokens if num_tokens <= have_tokens else max(2 * _ROUND, -(-num_tokens // _ROUND) * _ROUND, have_tokens * 3 // 2)
        tokens = -(-tokens // _ROUND) * _ROUND
        shape = self._kv_shape
        with torch.inference_mode():
            # zeros, not uninitialised memory: a NaN behind the mask would still spoil a sum
            keys = torch.zeros(shape[0], slots, shape[1], tokens, shape[2], dtype=self._kv_dtype, device=self.device)
            values = torch.zeros_like(keys)
            if have_slots:
                keys[:, :have_slots, :, :have_tokens] = self._keys
                values[:, :have_slots, :, :have_tokens] = self._values
        self._keys, self._values = keys, values

    def _check(self) -> None:
        """Compare decoding over slots with the model's own forward pass on random tokens."""
        vocabulary = self._head.shape[0]
        rows = torch.randint(0, vocabulary, (2, 7), generator=torch.Generator().manual_seed(0))
        tokens = cast("list[list[int]]", rows.tolist())
        try:
            with torch.inference_mode():
                with native_attention(self.model):
                    expected = self.model(input_ids=rows.to(self.device)).logits.float()
                prefixes = self.prefill([tokens[0][:4], tokens[1][:5]])
                self._kv_shape = (prefixes[0].keys.shape[0], prefixes[0].keys.shape[1], prefixes[0].keys.shape[3])
                self._kv_dtype = prefixes[0].keys.dtype
                for slot, prefix in enumerate(prefixes):
                    self.fill([slot], prefix)
                first = torch.tensor([tokens[0][4], tokens[1][5]], device=self.device)
                second = torch.tensor([tokens[0][5], tokens[1][6]], device=self.device)
                positions = torch.tensor([4, 5], device=self.device)
                self.decode(first, positions)
                found = self.decode(second, positions + 1)
        except (TypeError, RuntimeError, AssertionError, AttributeError, KeyError, ValueError) as error:
            raise ConfigError(f"{self._name}: {type(self.model).__name__} cannot decode over slots: {error}") from error
        wanted = torch.stack([expected[0, 5], expected[1, 6]])
        check_same(found, wanted, f"{self._name}: {type(self.model).__name__} gives other logits when it decodes over slots")
        self._keys = self._values = torch.empty(0)

"""Keys and values of the beginnings of sequences, in blocks of tokens, kept for later prompts that begin alike: turns of a conversation.

On a CPU each block is computed by a pass over its own tokens alone, whatever is kept and whatever else is asked for. So its keys and
values have the same bits each time, and what is kept changes the time of a run but none of its numbers. On a GPU all tokens of a prompt
that are not kept are one pass, and the last bits depend on what was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollouts.models.forward.attention import find_chunk, tune_queries

BLOCK_TOKENS = 64
"""Tokens of a block. A longer one costs more tokens to compute again in each turn, a shorter one more passes for a new prompt."""


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of neighbouring tokens of a sequence."""

    keys: Tensor  # [layers, Hk, b, D]
    values: Tensor  # [layers, Hk, b, D]
    experts: Tensor | None  # [b, routers, k] int16; None = not recorded


class KeptBlocks:
    """Blocks of the weights in use; the least recently used is dropped first. A block is found by the one before it and its tokens."""

    def __init__(self, *, most_tokens: int, size: int = BLOCK_TOKENS) -> None:
        """
        Args:
            most_tokens: maximum number of tokens kept; 0 = none.
            size: tokens of a block.
        """
        self.size = size
        self._most_blocks = most_tokens // size
        self._numbers = count(1)  # each block has a number of its own, never used again, by which the blocks after it are found
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, Block]] = OrderedDict()

    def count_whole(self, tokens: Sequence[int]) -> int:
        """Return the number of blocks of a prompt; at least its last token is in none, since a pass must give the logits after it."""
        return (len(tokens) - 1) // self.size

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """Return the longest row of kept blocks with which a prompt begins."""
        keys: list[tuple[int, tuple[int, ...]]] = []
        found: list[Block] = []
        number = 0
        for place in range(self.count_whole(tokens)):
            key = (number, tuple(tokens[place * self.size : (place + 1) * self.size]))
            if key not in self._blocks:
                break
            number, block = self._blocks[key]
            keys.append(key)
            found.append(block)
        for key in reversed(keys):  # a block is useless without those before it, so they are dropped after it
            self._blocks.move_to_end(key)
        return found

    def keep(self, tokens: Sequence[int], blocks: Sequence[Block]) -> None:
        """Keep the first blocks of a prompt."""
        keys: list[tuple[int, tuple[int, ...]]] = []
        number = 0
        for place, block in enumerate(blocks):
            keys.append((number, tuple(tokens[place * self.size : (place + 1) * self.size])))
            number, _ = self._blocks.setdefault(keys[-1], (next(self._numbers), block))
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()


@dataclass(eq=False)
class Beginning:
    """A sequence whose first tokens have been computed."""

    tokens: Sequence[int]  # all of them
    keys: Tensor  # [layers, Hk, T, D], of which the first `length` are computed
    values: Tensor  # [layers, Hk, T, D]
    experts: Tensor | None = None  # [length, routers, k] int16; None = not recorded
    length: int = 0

    def put(self, block: Block) -> None:
        """Copy the next block from what is kept."""
        end = self.length + block.keys.shape[2]
        self.keys[:, :, self.length : end] = block.keys
        self.values[:, :, self.length : end] = block.values
        self.note_experts(block.experts)
        self.length = end

    def note_experts(self, experts: Tensor | None) -> None:
        """Add the experts of the next tokens # [n, routers, k]."""
        self.experts = experts if experts is None or self.experts is None else torch.cat([self.experts, experts])


def cut_blocks(keys: Tensor, values: Tensor, experts: Tensor | None, places: range, size: int) -> list[Block]:
    """Copy blocks of a sequence, those at the given places."""
    blocks: list[Block] = []
    for start in (place * size for place in places):
        part = slice(start, start + size)
        record = None if experts is None else experts[part].clone()
        blocks.append(Block(keys[:, :, part].clone(), values[:, :, part].clone(), record))
    return blocks


@dataclass(frozen=True, eq=False)
class Extension:
    """Input of attention over the next tokens of several beginnings, packed."""

    rows: Sequence[tuple[Beginning, int]]  # each with the end of its next tokens
    positions: Tensor  # [N] int64, of all next tokens in their sequences
    masks: dict[tuple[int, int, int | None, int | None], Tensor] = field(
        default_factory=dict[tuple[int, int, "int | None", "int | None"], Tensor]
    )

    def see(self, start: int, end: int, window: int | None, chunk: int | None) -> tuple[int, Tensor]:
        """Return the first position that tokens start .. end - 1 attend to, and those of each from there # [n, end - first] bool.

        Args:
            window: most tokens attended to; None = all.
            chunk: size of the chunks of positions that attention stays inside; None = no chunks.
        """
        first = 0 if window is None else max(0, start - window + 1)
        first = first if chunk is None else max(first, start - start % chunk)
        key = (start, end, window, chunk)
        if key not in self.masks:
            device = self.positions.device
            own, places = torch.arange(start, end, device=device)[:, None], torch.arange(first, end, device=device)
            seen = places <= own
            seen = seen if window is None else seen & (places > own - window)
            self.masks[key] = seen if chunk is None else seen & (places >= own - own % chunk)
        return first, self.masks[key]


def attend_after(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None, *, step: Extension
) -> Tensor:
    """Write the keys and values of the next tokens, and attend from them to all tokens so far, row by row.

    query: # [1, Hq, N, D]; key, value: # [1, Hk, N, D]. Returns # [1, N, Hq, D].
    """
    layer, chunk = cast("int", module.layer_idx), find_chunk(module)
    query = tune_queries(module, query, step.positions)
    outputs: list[Tensor] = []
    place = 0
    for row, end in step.rows:
        start, behind = row.length, place + end - row.length
        keys, values = row.keys[layer], row.values[layer]
        keys[:, start:end] = key[0, :, place:behind]
        values[:, start:end] = value[0, :, place:behind]
        first, seen = step.see(start, end, window, chunk)
        attended = scaled_dot_product_attention(
            query[:, :, place:behind],
            keys[None, :, first:end],
            values[None, :, first:end],
            attn_mask=seen,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2))
        place = behind
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def depends_on_length(config: Any) -> bool:
    """Whether the rotation of a token's key depends on the length of the pass, so that keys of a part are not those of the whole."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # for all layers, or by kind of layer
    return any(kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope") for kind in kinds)

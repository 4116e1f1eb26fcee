"""Packed rows of a batch: its real tokens behind each other in one sequence, and the plan that puts results back in their places.

Position ids restart at each row, so no pad token is computed. A row of several contexts is packed as if each of them were a row. A prompt
that the rows of a group share can be packed once, as a sequence of its own; the rest of each row is then a sequence whose tokens attend to
the prompt, too (pack_shared).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rollouts.algorithms.distillation.divergences import TeacherTops
from rollouts.algorithms.logprobs import PackedShift, shift_packed
from rollouts.batches import SharedPrompts, find_context_starts, find_shared_prompts, map_kept, select_kept
from rollouts.types import KeptSets, TrainBatch


@dataclass(frozen=True, eq=False)
class Continuations:
    """Sequences of PackedRows that begin behind a prompt which is a sequence of its own. M = real tokens of the rows, more than N."""

    sources: Tensor  # [M] int64: packed position of each token of the rows
    flat_index: Tensor  # [M] int64: position of each token of the rows in the flattened [B * T] batch
    prompts: tuple[int, ...]  # tokens of the prompts before the sequences of each entry of same_length; 0 = none
    keys: Tensor  # [K] int64: packed positions that sequences attend to, in the order of by_length: of the prompt, then its own


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The real tokens of a batch behind each other, in R sequences: the contexts of its rows, or shared prompts and what follows them."""

    tokens: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restarting at each context
    cu_seqlens: Tensor  # [R + 1] int64: sequence r occupies [cu_seqlens[r], cu_seqlens[r + 1])
    flat_index: Tensor  # [N] int64: position of each packed token in the flattened [B * T] batch; of a shared one, in the first row
    shape: tuple[int, int]  # (B, T)
    same_length: tuple[tuple[int, int], ...]  # (S, L): number of sequences of each distinct length L, the shortest first; those behind
    # prompts of different lengths apart
    by_length: Tensor  # [N] int64: packed positions, sequences of the first length first
    order: Tensor  # [N] int64: position of each packed token in by_length
    shift: PackedShift  # predictors and predicted positions
    cuts: dict[int, PackedRows] = field(default_factory=dict[int, "PackedRows"])  # results of cut
    continuations: Continuations | None = None  # None = no prompt is shared, and the packed tokens are those of the rows
    kept: KeptSets | None = None  # [M] sets that the predicted tokens were drawn from; None = all of the whole vocabulary
    tops: TeacherTops | None = None  # [M] what a teacher finds most probable there; None = no divergence is computed

    def unpack(self, values: Tensor) -> Tensor:
        """Unpack [N, ...] -> [B, T, ...], 0 on pads, a shared token in each of its rows; keeps the gradient."""
        flat = torch.zeros((self.shape[0] * self.shape[1], *values.shape[1:]), dtype=values.dtype, device=values.device)
        if self.continuations is not None:
            values = values.index_select(0, self.continuations.sources)
            return flat.index_copy(0, self.continuations.flat_index, values).view(*self.shape, *values.shape[1:])
        return flat.index_copy(0, self.flat_index, values).view(*self.shape, *values.shape[1:])

    def split_lengths(self, values: Tensor) -> list[Tensor]:
        """Split values [N, ...] of packed tokens into one [S, L, ...] for each distinct length; the gradient is gathered, not scattered."""
        sizes = [count * length for count, length in self.same_length]
        parts = values[None] if len(sizes) == 1 else _Permuted.apply(values, self.by_length, self.order).split(sizes)
        return [part.reshape(*shape, *values.shape[1:]) for part, shape in zip(parts, self.same_length, strict=True)]

    def split_keys(self, values: Tensor) -> list[Tensor]:
        """Split keys or values [N, ...] as split_lengths, those of a shared prompt before those of a sequence: [S, P + L, ...]."""
        if self.continuations is None:
            return self.split_lengths(values)
        prompts = self.continuations.prompts
        shapes = [(count, prompt + length) for (count, length), prompt in zip(self.same_length, prompts, strict=True)]
        parts = values.index_select(0, self.continuations.keys).split([count * length for count, length in shapes])
        return [part.reshape(*shape, *values.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]

    def join_lengths(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of split_lengths to values [N, ...] of packed tokens."""
        flat = [part.flatten(0, 1) for part in parts]
        return flat[0] if len(flat) == 1 else _Permuted.apply(torch.cat(flat), self.order, self.by_length)

    def cut(self, size: int) -> PackedRows:
        """Return the rows with each sequence cut behind every `size` tokens, as attention in chunks sees them; planned once."""
        assert self.continuations is None, f"sequences with shared prompts are not cut, as into chunks of {size}"
        if self.same_length[-1][1] <= size:
            return self
        if size not in self.cuts:
            numbers = (self.position_ids % size == 0).cumsum(0)
            lengths = torch.full((1,), self.tokens.numel(), device=self.tokens.device)
            self.cuts[size] = pack_padded(self.tokens[None], lengths, numbers[None])
        return self.cuts[size]

    def to(self, device: torch.device) -> PackedRows:
        """Return the rows with every tensor on the device."""
        if self.tokens.device == device:
            return self
        assert self.continuations is None, f"shared prompts are packed on the CPU alone, not for {device}"
        moved: dict[str, Any] = {f.name: send_values(x, device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        kept = None if self.kept is None else map_kept(self.kept, partial(send_values, device=device))
        tops = self.tops
        if tops is not None:
            rest = None if tops.rest is None else send_values(tops.rest, device)
            tops = replace(tops, ids=send_values(tops.ids, device), log_probs=send_values(tops.log_probs, device), rest=rest)
        return replace(self, **moved, shift=PackedShift(*(send_values(x, device) for x in self.shift)), cuts={}, kept=kept, tops=tops)


class _Permuted(torch.autograd.Function):
    """values[index] for a permutation whose inverse is known: the gradient is gathered by the inverse, where autograd would scatter it."""

    @staticmethod
    def forward(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


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
    distinct, counts = sizes.unique(return_counts=True)  # ascending
    by_length = torch.argsort(sizes.repeat_interleave(sizes), stable=True)
    packed_tokens = tokens.flatten()[flat_index]
    return PackedRows(
        tokens=packed_tokens,
        position_ids=torch.arange(flat_index.numel(), device=tokens.device) - starts.repeat_interleave(sizes),
        cu_seqlens=cu_seqlens,
        flat_index=flat_index,
        shape=(rows, width),
        same_length=tuple(zip(cast("list[int]", counts.tolist()), cast("list[int]", distinct.tolist()), strict=True)),
        by_length=by_length,
        order=torch.argsort(by_length),
        shift=shift_packed(packed_tokens, cu_seqlens),
    )


def pack_shared(tokens: Tensor, lengths: Tensor, shared: SharedPrompts) -> PackedRows:
    """Plan the packing of padded rows, with the tokens that rows of a group share packed once, in the first of these rows.

    Args:
        tokens, lengths: as in pack_padded.
        shared: result of find_shared_prompts.

    Returns: PackedRows with a sequence for each shared prompt and one for the rest of each row; a row that shares nothing is one sequence.
    """
    rows, width = tokens.shape
    columns, row_ids = torch.arange(width), torch.arange(rows)
    prompts, leads = shared.lengths, shared.leaders == row_ids
    is_real = columns < lengths[:, None]
    is_own = columns >= torch.where(leads, 0, prompts)[:, None]  # [B, T]
    flat_index = (is_real & is_own).flatten().nonzero().squeeze(-1)
    position_ids, row_of = flat_index % width, flat_index // width
    starts = ((position_ids == 0) | (position_ids == prompts[row_of])).nonzero().squeeze(-1)  # [R]
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=flat_index.numel())
    sizes, offsets = cu_seqlens.diff(), position_ids[starts]  # offsets [R]: tokens of the prompt before a sequence
    packed_at = torch.zeros(rows * width, dtype=torch.int64).index_copy(0, flat_index, torch.arange(flat_index.numel())).view(rows, width)
    sources = packed_at[torch.where(is_own, row_ids[:, None], shared.leaders[:, None]), columns]  # [B, T]
    kinds = sizes * (width + 1) + offsets
    distinct, counts = kinds.unique(return_counts=True)  # ascending: by length, then by the prompt's length
    order = torch.argsort(kinds, stable=True)  # sequences by kind
    keys: list[Tensor] = []
    for kind, same in zip(distinct.tolist(), order.split(cast("list[int]", counts.tolist())), strict=True):
        end = kind % (width + 1) + kind // (width + 1)
        keys.append(sources[row_of[starts[same]], :end].flatten())
    by_length = torch.argsort(kinds.repeat_interleave(sizes), stable=True)
    packed_tokens = tokens.flatten()[flat_index]
    before = torch.where(offsets > 0, sources[row_of[starts], (offsets - 1).clamp(min=0)], -1)
    flat_rows = is_real.flatten().nonzero().squeeze(-1)
    lengths_of_kinds, prompts_of_kinds = (
        cast("list[int]", (distinct // (width + 1)).tolist()),
        cast("list[int]", (distinct % (width + 1)).tolist()),
    )
    return PackedRows(
        tokens=packed_tokens,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        flat_index=flat_index,
        shape=(rows, width),
        same_length=tuple(zip(cast("list[int]", counts.tolist()), lengths_of_kinds, strict=True)),
        by_length=by_length,
        order=torch.argsort(by_length),
        shift=shift_packed(packed_tokens, cu_seqlens, before),
        continuations=Continuations(sources.flatten()[flat_rows], flat_rows, tuple(prompts_of_kinds), torch.cat(keys)),
    )


def pack_batch(batch: TrainBatch, device: torch.device, *, share: bool = False) -> PackedRows:
    """Plan the packing of a batch's rows where they are, and move the plan to the device of the pass.

    Args:
        share: pack shared prompts once, if the batch has any (find_shared_prompts).
    """
    shared = find_shared_prompts(batch) if share else None
    if shared is not None:
        return pack_shared(batch.tokens, batch.lengths, shared)
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    if batch.targets is not None:
        targets = batch.targets.flatten()[packed.flat_index[packed.shift.positions]]
        packed = replace(packed, shift=packed.shift._replace(targets=targets))
    if batch.kept is not None:
        predicted = packed.flat_index[packed.shift.positions]
        packed = replace(packed, kept=select_kept(batch.kept, lambda column: column.flatten()[predicted]))
    if batch.teacher_beta is not None and batch.teacher_ids is not None and batch.teacher_tops is not None:
        predicted = packed.flat_index[packed.shift.positions]
        ids, theirs = batch.teacher_ids.flatten(0, 1)[predicted], batch.teacher_tops.flatten(0, 1)[predicted]
        packed = replace(packed, tops=TeacherTops(ids, theirs[:, :-1], float(batch.teacher_beta[0]), theirs[:, -1]))
    return packed.to(device)


def send_values(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device; to a GPU from pinned memory, behind the work already submitted, so that the caller need not wait."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)

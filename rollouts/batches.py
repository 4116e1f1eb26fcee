"""Rows of a TrainBatch: selected, and split into mini-batches, micro-batches and shards.

Every row ends up in exactly one part, and the loss is a weighted sum over tokens, so no split changes a gradient.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rollouts.types import KeptSets, TrainBatch, TurnLevels, Turns


def select_turns(turns: Turns, rows: Tensor, width: int) -> Turns:
    """Return the turns of some rows # [R] int64, in that order, cut to `width` token columns; state ids stay as they are."""
    selected = map_turns(turns, lambda column: column[rows])
    return replace(selected, ids=selected.ids[:, :width])


def map_turns(turns: Turns, function: Callable[[Tensor], Tensor]) -> Turns:
    """Return the turns with every tensor replaced by the function's result."""
    levels = turns.levels
    if levels is not None:
        levels = TurnLevels(**{f.name: function(getattr(levels, f.name)) for f in fields(levels)})
    return Turns(ids=function(turns.ids), states=function(turns.states), rewards=function(turns.rewards), levels=levels)


def find_context_starts(context_ids: Tensor) -> Tensor:
    """Mark the first token of each context, which nothing predicts. # [B, T] int64 -> [B, T] bool; not defined on pads."""
    before = torch.nn.functional.pad(context_ids[:, :-1], (1, 0), value=-1)
    return context_ids != before


_COMPOUND = ("turns", "reward_components", "kept", "dropout", "skip_redundant")
"""Fields of TrainBatch that are no tensors of [B] or [B, T], handled by name."""

SHARED_FROM = 16
"""Rows of a group share a prompt if the longest of them has at most this many times its tokens: sharing less saves nothing."""


def select_rows(batch: TrainBatch, index: Sequence[int] | Tensor) -> TrainBatch:
    """Return the rows of a batch at the given positions, in that order, trimmed to the longest of them. group_ids stay as they are.

    Args:
        batch: B rows, T tokens.
        index: positions in [0, B), at least one.

    Returns: a batch with len(index) rows and as many token columns as its longest row has tokens.
    """
    rows = torch.as_tensor(index, dtype=torch.int64, device=batch.tokens.device)
    assert rows.dim() == 1, f"index has shape {tuple(rows.shape)}, expected [rows]"
    assert rows.numel() > 0, "index is empty, expected at least one row"
    assert int(rows.min()) >= 0, f"index {int(rows.min())} is negative"
    assert int(rows.max()) < batch.num_rows, f"index {int(rows.max())} is out of range for {batch.num_rows} rows"
    width = int(batch.lengths[rows].max())

    def select(column: Tensor) -> Tensor:
        return column[rows] if column.dim() == 1 else column[rows, :width]

    components, kept = batch.reward_components, batch.kept
    return replace(
        _map_columns(batch, select),
        turns=None if batch.turns is None else select_turns(batch.turns, rows, width),
        reward_components=None if components is None else replace(components, scores=components.scores[rows]),
        kept=None if kept is None else select_kept(kept, select),
    )


def select_kept(kept: KeptSets, function: Callable[[Tensor], Tensor]) -> KeptSets:
    """Return the sets of some of the tokens, as a function of tensors of the tokens' shape selects them, without the ids of the others."""
    starts, counts = function(kept.starts), function(kept.counts)
    ids = kept.ids[place_kept(starts.flatten(), counts.flatten())]
    return KeptSets(ids=ids, starts=(counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape), counts=counts)


def map_kept(kept: KeptSets, function: Callable[[Tensor], Tensor]) -> KeptSets:
    """Return the sets with every tensor replaced by the function's result."""
    return KeptSets(ids=function(kept.ids), starts=function(kept.starts), counts=function(kept.counts))


def place_kept(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the places of the ids of sets # [N], set after set. # [sum of counts] int64"""
    shift = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)  # place of a set, minus its place in the result
    return shift + torch.arange(len(shift), device=shift.device)


def _map_columns(batch: TrainBatch, function: Callable[[Tensor], Tensor]) -> TrainBatch:
    """Apply a function to every tensor column; the caller handles the compound ones."""
    columns: dict[str, Tensor | None] = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in _COMPOUND}
    mapped: dict[str, Any] = {name: None if column is None else function(column) for name, column in columns.items()}
    return TrainBatch(**mapped, dropout=batch.dropout, skip_redundant=batch.skip_redundant)


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """Tokens at the beginning of rows that are the same in all rows of a group."""

    leaders: Tensor  # [B] int64: first row of each row's group
    lengths: Tensor  # [B] int64, less than the length of the row: tokens that it shares with its group; 0 = none


def find_shared_prompts(batch: TrainBatch) -> SharedPrompts | None:
    """Find the longest beginning that the rows of each group have in common. A pure function of the batch.

    A row keeps at least its last token for itself. Outputs at a shared token are the same in all rows, and gradients add up, so it does
    not matter whether the token is trained on. Nothing is shared where that would change more than rounding: other targets than the
    tokens, rows of several contexts, replayed experts, a load-balancing loss, sets that tokens were drawn from, divergences from a
    teacher, temperatures that differ within a group.

    Returns: None if no rows share anything, or the batch does not allow it (TrainBatch.skip_redundant).
    """
    own = (batch.targets, batch.context_ids, batch.routed_experts, batch.router_balance, batch.kept, batch.teacher_beta)
    if not batch.skip_redundant or batch.num_rows < 2 or any(column is not None for column in own):
        return None
    rows, width = batch.tokens.shape
    device = batch.tokens.device
    _, group = batch.group_ids.unique(return_inverse=True)  # [B] in [0, P)
    num_groups = int(group.max()) + 1

    def reduce(values: Tensor, how: str) -> Tensor:
        """Reduce values [B] over each group, and return the result at each of its rows."""
        empty = torch.zeros(num_groups, dtype=values.dtype, device=device)
        return empty.scatter_reduce(0, group, values, how, include_self=False)[group]

    leaders = reduce(torch.arange(rows, device=device), "amin")
    differs = batch.tokens != batch.tokens[leaders]
    columns = torch.arange(width, device=device)
    differs |= columns >= batch.lengths[:, None] - 1
    common = torch.where(differs, columns, width).amin(1)  # [B] tokens that each row has in common with its leader
    shared = reduce(common, "amin")
    sizes = reduce(torch.ones_like(group), "sum")
    fits = (sizes > 1) & (shared * SHARED_FROM >= reduce(batch.lengths, "amax"))
    if batch.temperatures is not None:
        fits &= reduce(batch.temperatures, "amin") == reduce(batch.temperatures, "amax")
    shared = torch.where(fits, shared, 0)
    return SharedPrompts(leaders, shared) if bool((shared > 0).any()) else None


def plan_minibatches(group_ids: Sequence[int], num_minibatches: int, *, seed: int, whole_groups: bool = False) -> list[list[int]]:
    """Deal rows at random to mini-batches of nearly equal size. A pure function of its arguments.

    Args:
        group_ids: group of each row; read only if whole_groups.
        num_minibatches: in [1, number of rows (groups, if whole_groups)].
        seed: seed of the shuffle, for example derive_seed(run seed, step, epoch).
        whole_groups: keep the rows of a group together; sizes then differ by whole groups. Advantages are estimated before the split, so
            splitting a group loses nothing.

    Returns: the positions of each mini-batch's rows, every row exactly once; without whole_groups sizes differ by at most 1.
    """
    units: list[list[int]] = [[row] for row in range(len(group_ids))]
    if whole_groups:
        members: dict[int, list[int]] = {}
        for row, group in enumerate(group_ids):
            members.setdefault(group, []).append(row)
        units = list(members.values())
    kind = "groups" if whole_groups else "rows"
    assert 1 <= num_minibatches <= len(units), f"num_minibatches is {num_minibatches}, expected between 1 and the {len(units)} {kind}"
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [len(units) * i // num_minibatches for i in range(num_minibatches + 1)]
    return [[row for unit in order[start:end] for row in units[unit]] for start, end in pairwise(bounds)]


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int | None = None, max_rows: int | None = None) -> list[list[int]]:
    """Pack rows into few micro-batches of balanced size. A pure function of its arguments.

    First-fit over rows sorted by length, longest first, finds the number of micro-batches; then each row goes to the one with the fewest
    tokens. If that breaks a limit, the first packing stands.

    Args:
        lengths: real tokens of each row; pad tokens are never computed and do not count.
        max_tokens: most tokens in a micro-batch; a longer row gets one of its own. None = no limit.
        max_rows: most rows in a micro-batch; None = no limit.

    Returns: the positions of each micro-batch's rows, ascending; every row exactly once; micro-batches in the order of their first row.
    """
    assert max_tokens is None or max_tokens >= 1, f"max_tokens is {max_tokens}, expected at least 1"
    assert max_rows is None or max_rows >= 1, f"max_rows is {max_rows}, expected at least 1"
    token_limit = sum(lengths) if max_tokens is None else max_tokens
    row_limit = len(lengths) if max_rows is None else max_rows
    order = _sort_rows(lengths)
    packed = _pack_rows(lengths, order, token_limit, row_limit)
    balanced = _deal_rows(lengths, order, len(packed))
    if all(len(rows) == 1 or (len(rows) <= row_limit and sum(lengths[r] for r in rows) <= token_limit) for rows in balanced):
        packed = balanced
    return sorted(sorted(rows) for rows in packed)


def _sort_rows(lengths: Sequence[int]) -> list[int]:
    """Return the rows in the order of their lengths, longest first, equal ones in their own order."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def _pack_rows(lengths: Sequence[int], order: Sequence[int], token_limit: int, row_limit: int) -> list[list[int]]:
    """Give each row, in this order, to the first part with space for it, or to a new part.

    A binary tree over the parts holds the largest space below each of its nodes, so a row is placed in log(rows) steps.
    """
    parts: list[list[int]] = []
    size = 1 << max(0, len(order) - 1).bit_length()
    spaces: list[float] = [math.inf] * (2 * size)  # tokens; children of node k are 2 k and 2 k + 1; leaf of part i is size + i
    for row in order:
        length, node = lengths[row], 1
        while node < size:
            node *= 2
            if spaces[node] < length:
                node += 1
        if node - size == len(parts):
            parts.append([])
            spaces[node] = token_limit
        part = parts[node - size]
        part.append(row)
        spaces[node] = spaces[node] - length if len(part) < row_limit else -1  # no row fits
        while node > 1:
            node //= 2
            largest = max(spaces[2 * node], spaces[2 * node + 1])
            if spaces[node] == largest:
                break
            spaces[node] = largest
    return parts


def _deal_rows(lengths: Sequence[int], order: Sequence[int], num_parts: int) -> list[list[int]]:
    """Give each row, longest first, to the part with the fewest tokens (then the fewest rows)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, place) for place in range(num_parts)]  # tokens, rows, part: already a heap
    for row in order:
        tokens, count, place = heap[0]
        parts[place].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], count + 1, place))
    return parts


def split_microbatches(batch: TrainBatch, *, max_tokens: int | None = None, max_rows: int | None = None) -> list[TrainBatch]:
    """Split a batch by plan_microbatches, one forward_backward each, every part trimmed to its longest row."""
    plan = plan_microbatches(batch.lengths.tolist(), max_tokens=max_tokens, max_rows=max_rows)
    return [select_rows(batch, rows) for rows in plan]


def plan_shards(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Deal rows to data-parallel ranks with a small maximum of tokens: the longest first, each to the rank with the fewest.

    Args:
        lengths: real tokens of each row.
        num_shards: at least 1; with fewer rows than that the last shards are empty.

    Returns: the positions of each shard's rows, ascending. A pure function, so that every rank can compute it alone.
    """
    assert num_shards >= 1, f"num_shards is {num_shards}, expected at least 1"
    return [sorted(rows) for rows in _deal_rows(lengths, _sort_rows(lengths), num_shards)]


def plan_shared_microbatches(lengths: Sequence[int], shared: SharedPrompts, *, max_tokens: int) -> list[list[int]]:
    """Plan micro-batches as plan_microbatches, with rows that share a prompt together and its tokens counted once.

    A group is cut where it alone has more than max_tokens. If single rows, each with its prompt, need fewer micro-batches, their plan
    stands.
    """
    units: list[list[int]] = []
    sizes: list[int] = []
    last: dict[int, int] = {}  # leader -> its last unit
    leaders, prompts = shared.leaders.tolist(), shared.lengths.tolist()
    for row, length in enumerate(lengths):
        unit, own = last.get(leaders[row]), length - prompts[row]
        if prompts[row] and unit is not None and sizes[unit] + own <= max_tokens:
            units[unit].append(row)
            sizes[unit] += own
        else:
            last[leaders[row]] = len(units)
            units.append([row])
            sizes.append(length)
    together = [[row for unit in part for row in units[unit]] for part in plan_microbatches(sizes, max_tokens=max_tokens)]
    alone = plan_microbatches(lengths, max_tokens=max_tokens)
    return alone if len(alone) < len(together) else sorted(sorted(rows) for rows in together)


def plan_sharded_microbatches(lengths: Sequence[int], *, max_tokens: int, num_shards: int) -> list[list[int]]:
    """Plan micro-batches for data-parallel ranks: as few as possible, so that no rank has more than max_tokens in any of them.

    Args:
        lengths: real tokens of each row.
        max_tokens: most tokens of one rank's part; a longer row is alone in its part.
        num_shards: ranks that a micro-batch is dealt to by plan_shards.

    Returns: the positions of each micro-batch's rows, ascending; every row exactly once. With one shard the result of plan_microbatches.
    """
    if num_shards == 1:
        return plan_microbatches(lengths, max_tokens=max_tokens)

    def fits(rows: Sequence[int]) -> bool:
        sizes = [lengths[row] for row in rows]
        return all(len(part) <= 1 or sum(sizes[i] for i in part) <= max_tokens for part in plan_shards(sizes, num_shards))

    order = _sort_rows(lengths)
    fewest = -(-sum(lengths) // (max_tokens * num_shards))  # lower bound: rows that could be cut
    for place, row in enumerate(order, start=1):  # `place` rows have this length or more, and a part has space for so many of them
        num_parts = -(-place // max(1, max_tokens // max(1, lengths[row])))
        fewest = max(fewest, -(-num_parts // num_shards))
    for count in range(min(max(1, fewest), len(lengths)), len(lengths) + 1):
        plan = sorted(sorted(rows) for rows in _deal_rows(lengths, order, count))
        if all(fits(rows) for rows in plan):
            return plan
    raise AssertionError(f"single rows always fit, expected a plan for {len(lengths)} of them")

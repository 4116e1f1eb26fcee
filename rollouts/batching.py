"""From ragged samples to tensors, and from a batch to mini-batches, micro-batches, shards and packed rows.

Every row ends up in exactly one part, and the loss is a weighted sum over tokens, so no split changes a gradient.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rollouts.checks import check_mask, check_shapes
from rollouts.episode_columns import collate_context_ids, collate_turns, concat_turns, select_turns
from rollouts.errors import DataError
from rollouts.samples import check_reward, check_training_sample, describe_sample
from rollouts.types import Sample, TrainBatch

PaddingSide: TypeAlias = Literal["right", "left"]


def collate_samples(samples: Sequence[Sample], pad_id: int = 0, *, require_rewards: bool = False) -> TrainBatch:
    """Make a TrainBatch of B samples, padded on the right to the longest of them.

    group_ids number the distinct group_index values from 0, in the order of their first appearance. The first token of a row, and of each
    further context in it, has loss_mask 0, since nothing predicts it. A row is trainable if one of its other tokens has loss_mask > 0 and
    metadata["trainable"] is not False; the loss_mask of other rows becomes 0, their rewards still count in group statistics. temperatures
    is None if all are 1. weight_versions and rollout_log_probs are columns if every sample has them; segment_log_probs and segment_mask if
    one has them, with rollout_log_probs and False in the rows of the others; turns if one has them (collate_turns); context_ids if one has
    several contexts (collate_context_ids).

    Args:
        samples: tokens and loss_mask of each, at least one token in each.
        pad_id: fills tokens behind the end of a row.
        require_rewards: every sample must have a reward. Otherwise (supervised data) all of them or none may have; none gives reward 0.

    Returns: float32 and int64 tensors; behind the end of a row stand pad_id, mask 0, log-prob 0, version -1.
    Raises: DataError for an empty list, a sample without tokens, or when no token of the batch is trained on; RewardError for a missing
        or not finite reward. The message names the sample.
    Asserts: equal lengths of per-token fields; rollout_log_probs and weight_versions on all samples or on none.
    """
    if not samples:
        raise DataError("there are no samples to make a batch of (found 0)")
    scored = require_rewards or any(sample.reward is not None for sample in samples)
    for sample in samples:
        where = describe_sample(sample)
        if not sample.tokens:
            raise DataError(f"{where} has no tokens (status {sample.status.value}): generate or tokenize it before it becomes a batch")
        assert len(sample.loss_mask) == len(sample.tokens), f"{where}: {len(sample.loss_mask)} mask entries for {len(sample.tokens)} tokens"
        check_reward(sample, required=scored)
    masks = [_mask_unpredicted(s) if s.metadata.get("trainable", True) else (0.0,) * len(s.tokens) for s in samples]
    if not any(value > 0 for mask in masks for value in mask):
        raise DataError(
            f"none of the {len(samples)} samples, from {describe_sample(samples[0])} on, has a predicted token with loss_mask > 0"
        )
    group_ids: dict[int, int] = {}
    for sample in samples:
        group_ids.setdefault(sample.group_index, len(group_ids))
    temperatures = [sample.temperature for sample in samples]
    width = max(len(sample.tokens) for sample in samples)
    return TrainBatch(
        tokens=_pad_rows([s.tokens for s in samples], pad_id, torch.int64),
        lengths=torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
        loss_mask=_pad_rows(masks, 0.0, torch.float32),
        rewards=torch.tensor([0.0 if s.reward is None else s.reward for s in samples], dtype=torch.float32),
        group_ids=torch.tensor([group_ids[s.group_index] for s in samples], dtype=torch.int64),
        trainable=torch.tensor([any(value > 0 for value in mask) for mask in masks]),
        rollout_log_probs=_optional_column(samples, "rollout_log_probs", 0.0, torch.float32),
        segment_log_probs=_segment_column(samples),
        segment_mask=_segment_mask(samples),
        weight_versions=_optional_column(samples, "weight_versions", -1, torch.int64),
        temperatures=None if all(t == 1.0 for t in temperatures) else torch.tensor(temperatures, dtype=torch.float32),
        context_ids=collate_context_ids(samples, width),
        turns=collate_turns(samples, width),
    )


def _mask_unpredicted(sample: Sample) -> tuple[float, ...]:
    """The loss mask with 0 on the first token of each context."""
    starts = {0, *sample.context_starts}
    return tuple(0.0 if t in starts else value for t, value in enumerate(sample.loss_mask))


def _optional_column(samples: Sequence[Sample], name: str, pad: float, dtype: torch.dtype) -> Tensor | None:
    rows = [getattr(sample, name) for sample in samples]
    if all(row is None for row in rows):
        return None
    for sample, row in zip(samples, rows, strict=True):
        assert row is not None, f"{describe_sample(sample)} has no {name} while other samples of the batch have them"
        assert len(row) == len(sample.tokens), f"{describe_sample(sample)}: {len(row)} {name} for {len(sample.tokens)} tokens"
    return _pad_rows(rows, pad, dtype)


def _segment_column(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.segment_log_probs is None for sample in samples):
        return None
    filled = [replace(s, segment_log_probs=s.segment_log_probs or s.rollout_log_probs) for s in samples]
    return _optional_column(filled, "segment_log_probs", 0.0, torch.float32)


def _segment_mask(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.segment_versions is None for sample in samples):
        return None
    rows = [[v >= 0 for v in s.segment_versions] if s.segment_versions is not None else [False] * len(s.tokens) for s in samples]
    return _pad_rows(rows, False, torch.bool)


def _pad_rows(rows: Sequence[Sequence[float]], pad: float, dtype: torch.dtype) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=dtype)


def select_rows(batch: TrainBatch, index: Sequence[int] | Tensor) -> TrainBatch:
    """The rows of a batch at the given positions, in that order, trimmed to the longest of them. group_ids stay as they are.

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

    return replace(_map_columns(batch, select), turns=None if batch.turns is None else select_turns(batch.turns, rows, width))


def _map_columns(batch: TrainBatch, function: Callable[[Tensor], Tensor]) -> TrainBatch:
    """Apply a function to every tensor column; turns are left to the caller."""
    columns: dict[str, Tensor | None] = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "turns"}
    mapped: dict[str, Any] = {name: None if column is None else function(column) for name, column in columns.items()}
    return TrainBatch(**mapped)


def concat_batches(batches: Sequence[TrainBatch], pad_id: int = 0, *, distinct_groups: bool = True) -> TrainBatch:
    """Stack the rows of batches of different widths, padded on the right to the widest.

    Args:
        batches: at least one.
        pad_id: fills tokens behind the end of a row.
        distinct_groups: number the groups of each batch apart, as for batches of different rollouts. False keeps group_ids, which undoes
            a split.

    Returns: the rows in the order of the batches.
    Asserts: an optional column is in all batches or in none; except temperatures, which are 1 where they are missing, context_ids, which
        are 0 there, and turns, of which such rows have none.
    """
    assert batches, "expected at least one batch"
    width = max(batch.tokens.shape[1] for batch in batches)
    names = [f.name for f in fields(TrainBatch) if f.name != "turns"]
    if any(batch.temperatures is not None for batch in batches):
        batches = [b if b.temperatures is not None else replace(b, temperatures=torch.ones_like(b.rewards)) for b in batches]
    if any(batch.context_ids is not None for batch in batches):
        batches = [b if b.context_ids is not None else replace(b, context_ids=torch.zeros_like(b.tokens)) for b in batches]
    if distinct_groups:
        batches = _separate_groups(batches)
    columns: dict[str, Any] = {}
    for name in names:
        parts: list[Tensor | None] = [getattr(batch, name) for batch in batches]
        present = [part for part in parts if part is not None]
        assert len(present) in (0, len(parts)), f"{name} is in {len(present)} of {len(parts)} batches, expected all or none"
        pad = {"tokens": pad_id, "weight_versions": -1}.get(name, 0)
        columns[name] = torch.cat([_widen(part, width, pad) for part in present]) if present else None
    return TrainBatch(**columns, turns=concat_turns([b.turns for b in batches], [b.num_rows for b in batches], width))


def _separate_groups(batches: Sequence[TrainBatch]) -> list[TrainBatch]:
    out: list[TrainBatch] = []
    offset = 0
    for batch in batches:
        out.append(replace(batch, group_ids=batch.group_ids + offset))
        offset += int(batch.group_ids.max()) + 1
    return out


def _widen(column: Tensor, width: int, pad: float) -> Tensor:
    if column.dim() == 1 or column.shape[1] == width:
        return column
    return torch.nn.functional.pad(column, (0, width - column.shape[1]), value=pad)


def plan_minibatches(group_ids: Sequence[int], num_minibatches: int, *, seed: int, whole_groups: bool = False) -> list[list[int]]:
    """Deal rows at random to mini-batches of nearly equal size. A pure function of its arguments.

    Args:
        group_ids: of each row; read only if whole_groups.
        num_minibatches: in [1, number of rows (groups, if whole_groups)].
        seed: of the shuffle, for example derive_seed(run seed, step, epoch).
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


def split_minibatches(batch: TrainBatch, num_minibatches: int, *, seed: int, whole_groups: bool = False) -> list[TrainBatch]:
    """The mini-batches of plan_minibatches, one optimizer step each, every one trimmed to its longest row."""
    plan = plan_minibatches(batch.group_ids.tolist(), num_minibatches, seed=seed, whole_groups=whole_groups)
    return [select_rows(batch, rows) for rows in plan]


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int | None = None, max_rows: int | None = None) -> list[list[int]]:
    """Pack rows into few micro-batches of balanced size. A pure function of its arguments.

    First-fit over rows sorted by length, longest first, finds how many micro-batches are needed; then each row goes to the one
    with the fewest tokens. Where that breaks a limit, the first packing stands.

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
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    packed: list[list[int]] = []
    totals: list[int] = []
    for row in order:
        fits = (i for i, total in enumerate(totals) if total + lengths[row] <= token_limit and len(packed[i]) < row_limit)
        place = next(fits, len(packed))
        if place == len(packed):
            packed.append([])
            totals.append(0)
        packed[place].append(row)
        totals[place] += lengths[row]
    balanced = _deal_rows(lengths, order, len(packed))
    if all(len(rows) == 1 or (len(rows) <= row_limit and sum(lengths[r] for r in rows) <= token_limit) for rows in balanced):
        packed = balanced
    return sorted(sorted(rows) for rows in packed)


def _deal_rows(lengths: Sequence[int], order: Sequence[int], num_parts: int) -> list[list[int]]:
    """Give each row, longest first, to the part with the fewest tokens (then the fewest rows)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, place) for place in range(num_parts)]  # tokens, rows, part: a heap already
    for row in order:
        tokens, count, place = heap[0]
        parts[place].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], count + 1, place))
    return parts


def split_microbatches(batch: TrainBatch, *, max_tokens: int | None = None, max_rows: int | None = None) -> list[TrainBatch]:
    """The micro-batches of plan_microbatches, one forward_backward each, every one trimmed to its longest row."""
    plan = plan_microbatches(batch.lengths.tolist(), max_tokens=max_tokens, max_rows=max_rows)
    return [select_rows(batch, rows) for rows in plan]


def plan_shards(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Deal rows to data-parallel ranks so that the largest number of tokens is small: the longest first, each to the rank with the fewest.

    Args:
        lengths: real tokens of each row.
        num_shards: at least 1; with fewer rows than that the last shards are empty.

    Returns: the positions of each shard's rows, ascending. A pure function, so that every rank can compute it alone.
    """
    assert num_shards >= 1, f"num_shards is {num_shards}, expected at least 1"
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [sorted(rows) for rows in _deal_rows(lengths, order, num_shards)]


def shard_rows(batch: TrainBatch, num_shards: int) -> list[TrainBatch]:
    """Split a batch over data-parallel ranks by plan_shards.

    Args:
        num_shards: in [1, B]; each shard gets at least one row.

    Returns: num_shards batches, each trimmed to its longest row; rows keep their order.
    """
    assert 1 <= num_shards <= batch.num_rows, f"num_shards is {num_shards}, expected between 1 and the {batch.num_rows} rows"
    return [select_rows(batch, rows) for rows in plan_shards(batch.lengths.tolist(), num_shards)]


def plan_sharded_microbatches(lengths: Sequence[int], *, max_tokens: int, num_shards: int) -> list[list[int]]:
    """Micro-batches for data-parallel ranks: as few as can be, so that no rank has more than max_tokens in any of them.

    Args:
        lengths: real tokens of each row.
        max_tokens: most tokens of one rank's part; a longer row is alone in its part.
        num_shards: ranks that a micro-batch is dealt to by plan_shards.

    Returns: the positions of each micro-batch's rows, ascending; every row exactly once. With one shard what plan_microbatches gives.
    """
    if num_shards == 1:
        return plan_microbatches(lengths, max_tokens=max_tokens)

    def fits(rows: Sequence[int]) -> bool:
        sizes = [lengths[row] for row in rows]
        return all(len(part) <= 1 or sum(sizes[i] for i in part) <= max_tokens for part in plan_shards(sizes, num_shards))

    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    fewest = -(-sum(lengths) // (max_tokens * num_shards))  # as if rows could be cut
    for count in range(min(max(1, fewest), len(lengths)), len(lengths) + 1):
        plan = sorted(sorted(rows) for rows in _deal_rows(lengths, order, count))
        if all(fits(rows) for rows in plan):
            return plan
    raise AssertionError(f"single rows always fit, expected a plan for {len(lengths)} of them")


def cumulative_lengths(lengths: Tensor) -> Tensor:
    """cu_seqlens of packed rows: row b occupies [cu_seqlens[b], cu_seqlens[b + 1]).

    Args:
        lengths: # [B] int64, at least 0.

    Returns: [B + 1] int64, starting with 0.
    """
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def pack_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Put the real entries of padded rows behind each other.

    Args:
        values: # [B, T, ...]
        lengths: # [B] int64 in [0, T]

    Returns: [N, ...] with N = sum(lengths), row by row.
    """
    check_shapes(lengths=(lengths, (values.shape[0],)))
    return values[torch.arange(values.shape[1], device=values.device) < lengths[:, None]]


def unpack_rows(values: Tensor, cu_seqlens: Tensor, *, width: int | None = None, pad: float = 0) -> Tensor:
    """The inverse of pack_rows.

    Args:
        values: # [N, ...]
        cu_seqlens: # [B + 1] int64, from cumulative_lengths
        width: T of the result; None = longest row.
        pad: what stands behind the end of a row.

    Returns: [B, T, ...]
    """
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    total, longest = int(cu_seqlens[-1]), int(lengths.max())
    assert total == values.shape[0], f"cu_seqlens ends at {total}, but there are {values.shape[0]} values"
    assert width is None or width >= longest, f"width is {width}, but the longest row has {longest} tokens"
    width = longest if width is None else width
    out = values.new_full((lengths.shape[0], width, *values.shape[1:]), pad)
    out[torch.arange(width, device=values.device) < lengths[:, None]] = values
    return out


def prepare_sft_batch(samples: Sequence[Sample], pad_id: int = 0, padding_side: PaddingSide = "right") -> dict[str, Tensor]:
    """Supervised samples as the inputs of a model and of a loss on its logits.

    All columns are aligned with input_ids, and labels ARE input_ids: token_log_probs, and with it every loss on logits in this library,
    compares logits[:, t - 1] with labels[:, t]. Labels shifted here as well would train each token to predict the one after the next.

    Args:
        samples: each with at least one token with loss_mask > 0.
        pad_id: fills input_ids and labels.
        padding_side: "right", or "left" as for generation.

    Returns: input_ids, labels, attention_mask, position_ids [B, T] int64; loss_mask [B, T] float32, 0 on the first token of a row, which
        nothing predicts; position_ids count from 0 at the first real token.
    Raises: DataError that names the sample.
    """
    for sample in samples:
        check_training_sample(sample, require_reward=False)
        _check_one_context(sample)
    return _to_model_inputs(collate_samples(samples, pad_id), {}, padding_side)


def prepare_grpo_batch(
    samples: Sequence[Sample], advantages: Sequence[float] | Tensor, pad_id: int = 0, padding_side: PaddingSide = "right"
) -> dict[str, Tensor]:
    """Scored samples and their advantages as the inputs of a model and of a loss on its logits.

    Aligned as in prepare_sft_batch; then grpo_loss(logits, labels, loss_mask, advantages).

    Args:
        samples: each with a reward; for a RolloutBatch its .samples.
        advantages: # [B], one of each sample; spread over its tokens with loss_mask > 0, 0 elsewhere.

    Returns: what prepare_sft_batch returns; advantages [B, T] float32; if the samples have them, old_log_probs [B, T] float32 and versions
        [B, T] int64 (0 and -1 on tokens that the policy did not sample).
    Raises: DataError or RewardError that names the sample.
    """
    for sample in samples:
        _check_one_context(sample)
    batch = collate_samples(samples, pad_id, require_rewards=True)
    per_row = torch.as_tensor(advantages, dtype=torch.float32)
    check_shapes(advantages=(per_row, (batch.num_rows,)))
    columns = {"advantages": per_row[:, None] * (batch.loss_mask > 0)}
    if batch.rollout_log_probs is not None:
        columns["old_log_probs"] = batch.rollout_log_probs
    if batch.weight_versions is not None:
        columns["versions"] = batch.weight_versions
    return _to_model_inputs(batch, columns, padding_side)


def _check_one_context(sample: Sample) -> None:
    if sample.context_starts:
        raise DataError(
            f"{describe_sample(sample)} has {1 + len(sample.context_starts)} contexts, which an attention mask [B, T] cannot keep apart: "
            "use collate_samples and a training backend, or make a sample of each context"
        )


def _to_model_inputs(batch: TrainBatch, extra: Mapping[str, Tensor], padding_side: PaddingSide) -> dict[str, Tensor]:
    assert padding_side in ("right", "left"), f"padding_side is {padding_side!r}, expected 'right' or 'left'"
    width = batch.tokens.shape[1]
    positions = torch.arange(width)
    real = positions < batch.lengths[:, None]
    inputs = {
        "input_ids": batch.tokens,
        "labels": batch.tokens,
        "attention_mask": real.long(),
        "position_ids": positions * real,
        "loss_mask": batch.loss_mask,
        **extra,
    }
    if padding_side == "left":
        source = (positions - (width - batch.lengths[:, None])) % width  # pads come round from the end of the row
        inputs = {name: column.gather(1, source) for name, column in inputs.items()}
    check_model_inputs(inputs)
    return inputs


def check_model_inputs(inputs: Mapping[str, Tensor]) -> None:
    """Assert the contract of prepare_sft_batch and prepare_grpo_batch: one shape [B, T]; int64 for input_ids, labels, attention_mask,
    position_ids, versions; float32 for loss_mask, advantages, old_log_probs; attention_mask 0 or 1; masks not negative, not NaN.

    A message names the column and what was found.
    """
    integers = ("input_ids", "labels", "attention_mask", "position_ids", "versions")
    floats = ("loss_mask", "advantages", "old_log_probs")
    assert "input_ids" in inputs, f"input_ids is missing; found {sorted(inputs)}"
    assert inputs["input_ids"].dim() == 2, f"input_ids has shape {tuple(inputs['input_ids'].shape)}, expected [B, T]"
    check_shapes(**{name: (inputs.get(name), tuple(inputs["input_ids"].shape)) for name in integers + floats})
    for name, column in inputs.items():
        assert name in integers + floats, f"{name} is no model input; known are {sorted(integers + floats)}"
        expected = torch.int64 if name in integers else torch.float32
        assert column.dtype == expected, f"{name} has dtype {column.dtype}, expected {expected}"
    if "attention_mask" in inputs:
        attention_mask = inputs["attention_mask"]
        assert bool(((attention_mask == 0) | (attention_mask == 1)).all()), "attention_mask holds entries besides 0 and 1"
    if "loss_mask" in inputs:
        check_mask("loss_mask", inputs["loss_mask"])

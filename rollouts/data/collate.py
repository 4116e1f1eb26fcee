"""Collation of ragged samples into the columns of a TrainBatch, with the turns and contexts of episodes.

A row with several contexts is one trajectory whose tokens see those of their own context only. It stays one row, so group statistics and
rewards count it once; a backend computes each of its contexts as a sequence of its own (models/forward/packing.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rollouts.checks import check_mask, check_shapes
from rollouts.data.samples import check_reward, check_training_sample, describe_sample
from rollouts.errors import DataError
from rollouts.types import KeptSets, KeptTokens, RewardComponents, Sample, TrainBatch, Turns


def collate_turns(samples: Sequence[Sample], width: int) -> Turns:
    """Return the turns of B samples.

    Equal state keys get equal ids, numbered in the order of first appearance over the whole batch. A turn with state None gets an id of
    its own. A sample without turns has a row without turns.

    Args:
        samples: one for each row, in order.
        width: T, at least the tokens of the longest sample.

    Returns: K = most turns of a sample; -1 in ids outside of turns and in states where there is no turn, reward 0 there; NaN is the reward
        of a turn that has none.
    Raises: DataError for a turn's reward that is not finite.
    Asserts: turns do not overlap and lie inside the sample's tokens, and no context begins inside a turn.
    """
    ids = [[-1] * len(sample.tokens) for sample in samples]
    states: list[list[int]] = [[] for _ in samples]
    rewards: list[list[float]] = [[] for _ in samples]
    numbers: dict[object, int] = {}
    for row, sample in enumerate(samples):
        _check_turns(sample)
        for k, turn in enumerate(sample.turns or ()):
            ids[row][turn.start : turn.end] = [k] * (turn.end - turn.start)
            states[row].append(numbers.setdefault((row, k) if turn.state is None else turn.state, len(numbers)))
            if turn.reward is not None and not math.isfinite(turn.reward):
                raise DataError(f"{describe_sample(sample)}: the reward of turn {k} is {turn.reward}: rewards of turns are finite, or None")
            rewards[row].append(math.nan if turn.reward is None else turn.reward)
    return Turns(
        ids=_pad_rows(ids, -1, torch.int64, width),
        states=_pad_rows(states, -1, torch.int64),
        rewards=_pad_rows(rewards, 0.0, torch.float32),
    )


def _check_turns(sample: Sample) -> None:
    position = 0
    for turn in sample.turns or ():
        where = f"{describe_sample(sample)}: {turn}"
        assert position <= turn.start < turn.end, f"{where} does not lie behind the turn before it"
        assert turn.end <= len(sample.tokens), f"{where} reaches beyond the {len(sample.tokens)} tokens"
        inside = [start for start in sample.context_starts if turn.start < start < turn.end]
        assert not inside, f"{where} spans the beginning of a context at token {inside[0]}"
        position = turn.end


def collate_context_ids(samples: Sequence[Sample], width: int) -> Tensor:
    """Return the context of each token, numbered from 0 in each row, 0 behind its end. # [B, T]."""
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        for start in sample.context_starts:
            ids[row, start : len(sample.tokens)] += 1
    return ids


def split_contexts(sample: Sample) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of each context of a sample in its tokens; () for a sample without tokens."""
    bounds = (0, *sample.context_starts, len(sample.tokens))
    return tuple(pairwise(bounds)) if sample.tokens else ()


PaddingSide: TypeAlias = Literal["right", "left"]


def collate_samples(samples: Sequence[Sample], pad_id: int = 0, *, require_rewards: bool = False, with_experts: bool = False) -> TrainBatch:
    """Make a TrainBatch of B samples, padded on the right to the longest of them.

    group_ids number the distinct pairs of group_index and subgroup from 0, in the order of their first appearance. The first token of a
    row, and of each further context in it, has loss_mask 0, since nothing predicts it. A row is trainable if one of its other tokens has
    loss_mask > 0 and its sample is trainable; the loss_mask of other rows becomes 0, their rewards still count in group statistics.
    temperatures is None if all are 1. weight_versions and rollout_log_probs are columns if every sample has them; segment_log_probs and
    segment_mask if one has them, with rollout_log_probs and False in the rows of the others; turns if one has them (collate_turns);
    context_ids if one has several contexts (collate_context_ids); kept if one has kept_tokens; reward_components if one has reward_details
    with metrics, one component a metric.

    Args:
        samples: tokens and loss_mask of each, at least one token in each.
        pad_id: fills tokens behind the end of a row.
        require_rewards: every sample must have a reward. Otherwise (supervised data) all of them or none may have; none gives reward 0.

        with_experts: make a column of recorded experts, which a trainer then replays; without any record there is none.

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
    masks = [_mask_unpredicted(s) if s.trainable else [0.0] * len(s.tokens) for s in samples]
    trainable = [max(mask) > 0 for mask in masks]
    if not any(trainable):
        raise DataError(
            f"none of the {len(samples)} samples, from {describe_sample(samples[0])} on, has a predicted token with loss_mask > 0"
        )
    group_ids: dict[tuple[int, str | None], int] = {}
    for sample in samples:
        group_ids.setdefault((sample.group_index, sample.subgroup), len(group_ids))
    temperatures = [sample.temperature for sample in samples]
    width = max(len(sample.tokens) for sample in samples)
    return TrainBatch(
        tokens=_pad_rows([s.tokens for s in samples], pad_id, torch.int64),
        lengths=torch.tensor([len(s.tokens) for s in samples], dtype=torch.int64),
        loss_mask=_pad_rows(masks, 0.0, torch.float32),
        rewards=torch.tensor([0.0 if s.reward is None else s.reward for s in samples], dtype=torch.float32),
        group_ids=torch.tensor([group_ids[s.group_index, s.subgroup] for s in samples], dtype=torch.int64),
        trainable=torch.tensor(trainable),
        rollout_log_probs=_optional_column(samples, "rollout_log_probs", 0.0, torch.float32),
        segment_log_probs=_segment_column(samples) if any(s.segment_log_probs is not None for s in samples) else None,
        segment_mask=_segment_mask(samples) if any(s.segment_versions is not None for s in samples) else None,
        weight_versions=_optional_column(samples, "weight_versions", -1, torch.int64),
        routed_experts=_collate_experts(samples, width) if with_experts else None,
        kept=_collate_kept(samples, width) if any(s.kept_tokens is not None and s.kept_tokens.cuts for s in samples) else None,
        temperatures=None if all(t == 1.0 for t in temperatures) else torch.tensor(temperatures, dtype=torch.float32),
        context_ids=collate_context_ids(samples, width) if any(s.context_starts for s in samples) else None,
        turns=collate_turns(samples, width) if any(s.turns is not None for s in samples) else None,
        reward_components=_collate_components(samples) if any(s.reward_details is not None for s in samples) else None,
    )


def _collate_components(samples: Sequence[Sample]) -> RewardComponents | None:
    """Return the metrics of the samples' reward functions, in the order of their first appearance; invalid ones are NaN."""
    rows: list[dict[str, float]] = []
    for sample in samples:
        metrics = {} if sample.reward_details is None else sample.reward_details.metrics
        rows.append({name: float(metric.score) for name, metric in metrics.items() if metric.is_score_valid})
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return None
    scores = torch.tensor([[row.get(name, math.nan) for name in names] for row in rows], dtype=torch.float32)
    return RewardComponents(names=names, scores=scores)


def _collate_experts(samples: Sequence[Sample], width: int) -> Tensor | None:
    """Return the recorded experts # [B, T, routers, k], -1 behind the end of a row and in rows without a record; None if none has one."""
    records = [sample.routed_experts for sample in samples]
    first = next((record for record in records if record is not None), None)
    if first is None:
        return None
    out = torch.full((len(samples), width, first.num_routers, first.top_k), -1, dtype=torch.int16)
    for i, (sample, record) in enumerate(zip(samples, records, strict=True)):
        if record is None:
            continue
        if (record.num_routers, record.top_k) != (first.num_routers, first.top_k):
            raise DataError(
                f"{describe_sample(sample)} has recorded experts of {record.num_routers} routers with {record.top_k} experts of a token, "
                f"and another sample of {first.num_routers} with {first.top_k}: they were sampled with different models"
            )
        out[i, : len(record)] = torch.frombuffer(bytearray(record.data), dtype=torch.int16).view(-1, first.num_routers, first.top_k)
    return out


def _collate_kept(samples: Sequence[Sample], width: int) -> KeptSets:
    """Return the sets that tokens were drawn from; the whole vocabulary in samples without a record. Raises DataError."""
    records = [sample.kept_tokens or KeptTokens.whole(len(sample.tokens)) for sample in samples]
    counts = _pad_rows([record.counts for record in records], 0, torch.int64).clamp(min=0)
    ends = counts.flatten().cumsum(0).view(counts.shape)
    ids = torch.frombuffer(bytearray(b"".join(record.data for record in records)) or bytearray(4), dtype=torch.int32)
    drawn = _pad_rows([sample.tokens for sample in samples], 0, torch.int64)
    is_kept = torch.zeros(counts.numel(), dtype=torch.bool)
    owner = torch.arange(counts.numel()).repeat_interleave(counts.flatten())
    is_kept[owner[ids[: len(owner)] == drawn.flatten()[owner]]] = True
    strange = ((counts > 0) & ~is_kept.view(counts.shape)).nonzero()
    if len(strange):
        row, place = strange[0].tolist()
        raise DataError(
            f"{describe_sample(samples[row])}: token {place} is {samples[row].tokens[place]}, which is not in the set that kept_tokens "
            "says it was drawn from: the two are of different samples"
        )
    return KeptSets(ids=ids, starts=ends - counts, counts=counts)


def _mask_unpredicted(sample: Sample) -> list[float]:
    """Return the loss mask with 0 on the first token of each context."""
    mask = list(sample.loss_mask)
    for start in (0, *sample.context_starts):
        mask[start] = 0.0
    return mask


def _optional_column(samples: Sequence[Sample], name: str, pad: float, dtype: torch.dtype) -> Tensor | None:
    rows = [getattr(sample, name) for sample in samples]
    if all(row is None for row in rows):
        return None
    for sample, row in zip(samples, rows, strict=True):
        assert row is not None, f"{describe_sample(sample)} has no {name} while other samples of the batch have them"
        assert len(row) == len(sample.tokens), f"{describe_sample(sample)}: {len(row)} {name} for {len(sample.tokens)} tokens"
    return _pad_rows(rows, pad, dtype)


def _segment_column(samples: Sequence[Sample]) -> Tensor | None:
    filled = [replace(s, segment_log_probs=s.segment_log_probs or s.rollout_log_probs) for s in samples]
    return _optional_column(filled, "segment_log_probs", 0.0, torch.float32)


def _segment_mask(samples: Sequence[Sample]) -> Tensor:
    rows = [[v >= 0 for v in s.segment_versions] if s.segment_versions is not None else [False] * len(s.tokens) for s in samples]
    return _pad_rows(rows, False, torch.bool)


def _pad_rows(rows: Sequence[Sequence[float]], pad: float, dtype: torch.dtype, width: int = 0) -> Tensor:
    """Return rows as one tensor, padded on the right to the longest of them, or to `width`.

    Pads never exist as Python values: beside one long row they are many more than all tokens.
    """
    padded = torch.full((len(rows), max(width, *map(len, rows))), pad, dtype=dtype)
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, as by torch
        for place, row in zip(padded.numpy(), rows, strict=True):  # numpy reads Python's numbers in a third of torch's time
            place[: len(row)] = row
    return padded


def prepare_sft_batch(samples: Sequence[Sample], pad_id: int = 0, padding_side: PaddingSide = "right") -> dict[str, Tensor]:
    """Return supervised samples as the inputs of a model and of a loss on its logits.

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
    """Return scored samples and their advantages as the inputs of a model and of a loss on its logits.

    Aligned as in prepare_sft_batch; then grpo_loss(logits, labels, loss_mask, advantages).

    Args:
        samples: each with a reward; for a RolloutBatch its .samples.
        advantages: # [B], one for each sample; spread over its tokens with loss_mask > 0, 0 elsewhere.

    Returns: the columns of prepare_sft_batch; advantages [B, T] float32; if the samples have them, old_log_probs [B, T] float32 and
        versions [B, T] int64 (0 and -1 on tokens that the policy did not sample).
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

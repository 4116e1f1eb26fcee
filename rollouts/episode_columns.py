"""Turns and contexts of episodes as columns of a batch.

A row with several contexts is one trajectory whose tokens see those of their own context only. It stays one row, so group statistics and
rewards count it once; a backend computes each of its contexts as a sequence of its own (packing.pack_padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from rollouts.samples import describe_sample
from rollouts.types import Sample, TurnLevels, Turns


def collate_turns(samples: Sequence[Sample], width: int) -> Turns | None:
    """The turns of B samples; None if no sample has any (Sample.turns None in all of them).

    Equal state keys get equal ids, numbered in the order of first appearance over the whole batch. A turn whose state is None gets an id
    that no other turn has. A sample without turns has a row of none.

    Args:
        samples: of the rows, in order.
        width: T, at least the tokens of the longest sample.

    Returns: K = most turns of a sample; -1 in ids outside of turns and in states where there is no turn, reward 0 there.
    Asserts: turns lie behind each other and inside the sample's tokens, and no context begins inside a turn.
    """
    if all(sample.turns is None for sample in samples):
        return None
    num_turns = max(len(sample.turns or ()) for sample in samples)
    ids = [[-1] * width for _ in samples]
    states = [[-1] * num_turns for _ in samples]
    rewards = [[0.0] * num_turns for _ in samples]
    numbers: dict[object, int] = {}
    for row, sample in enumerate(samples):
        _check_turns(sample)
        for k, turn in enumerate(sample.turns or ()):
            ids[row][turn.start : turn.end] = [k] * (turn.end - turn.start)
            states[row][k] = numbers.setdefault((row, k) if turn.state is None else turn.state, len(numbers))
            rewards[row][k] = turn.reward
    return Turns(
        ids=torch.tensor(ids, dtype=torch.int64),
        states=torch.tensor(states, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float32),
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


def select_turns(turns: Turns, rows: Tensor, width: int) -> Turns:
    """The turns of some rows # [R] int64, in that order, with as many token columns as `width` says; state ids stay as they are."""
    selected = map_turns(turns, lambda column: column[rows])
    return replace(selected, ids=selected.ids[:, :width])


def map_turns(turns: Turns, function: Callable[[Tensor], Tensor]) -> Turns:
    """The turns with every tensor replaced by what the function makes of it."""
    levels = turns.levels
    if levels is not None:
        levels = TurnLevels(**{f.name: function(getattr(levels, f.name)) for f in fields(levels)})
    return Turns(ids=function(turns.ids), states=function(turns.states), rewards=function(turns.rewards), levels=levels)


def concat_turns(parts: Sequence[Turns | None], num_rows: Sequence[int], width: int) -> Turns | None:
    """The turns of batches stacked behind each other; None if none of them has any. Rows of a part that is None have no turns.

    Args:
        parts: of each batch.
        num_rows: B of each batch.
        width: T of the result.

    Returns: state ids as they are: those of parts that were not collated together mean nothing to each other. No levels, which are about
        a whole rollout batch.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    num_turns = max(part.states.shape[1] for part in present)
    whole = [part or create_empty_turns(rows, present[0].ids.device) for part, rows in zip(parts, num_rows, strict=True)]

    def widen(column: Tensor, size: int, pad: float) -> Tensor:
        return torch.nn.functional.pad(column, (0, size - column.shape[1]), value=pad)

    return Turns(
        ids=torch.cat([widen(part.ids, width, -1) for part in whole]),
        states=torch.cat([widen(part.states, num_turns, -1) for part in whole]),
        rewards=torch.cat([widen(part.rewards, num_turns, 0) for part in whole]),
    )


def create_empty_turns(num_rows: int, device: torch.device) -> Turns:
    """Turns of rows that have none: no token column, K = 0."""
    nothing = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    return Turns(ids=nothing, states=nothing, rewards=nothing.float())


def collate_context_ids(samples: Sequence[Sample], width: int) -> Tensor | None:
    """Number of the context of each token, from 0 on in each row and 0 behind its end; None if every sample is one context. # [B, T]."""
    if not any(sample.context_starts for sample in samples):
        return None
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        for start in sample.context_starts:
            ids[row, start : len(sample.tokens)] += 1
    return ids


def find_context_starts(context_ids: Tensor) -> Tensor:
    """Whether a token is the first one of its context: nothing predicts it. # [B, T] int64 -> [B, T] bool; not defined on pads."""
    before = torch.nn.functional.pad(context_ids[:, :-1], (1, 0), value=-1)
    return context_ids != before


def split_contexts(sample: Sample) -> tuple[tuple[int, int], ...]:
    """(start, end) of each context of a sample in its tokens; () for a sample without tokens."""
    bounds = (0, *sample.context_starts, len(sample.tokens))
    return tuple(pairwise(bounds)) if sample.tokens else ()

"""Turns and contexts as columns: nothing is lost by a split, and several contexts in a row are what the same contexts are as rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.batches import (
    find_context_starts,
    plan_minibatches,
    plan_shards,
    select_rows,
    split_microbatches,
)
from rollouts.data.collate import collate_context_ids, collate_samples, collate_turns, prepare_grpo_batch, prepare_sft_batch, split_contexts
from rollouts.data.samples import completion_to_sample, convert_to_batch, mask_truncated, with_reward
from rollouts.data.segments import find_missed_tokens, start_segments, with_segment_log_probs
from rollouts.errors import DataError
from rollouts.models.forward.packing import pack_padded
from rollouts.types import Completion, Sample, Status, TrainBatch, Turn


def make_episode(lengths=(4, 3), turns=((1, 3, "a", 1.0),), **changes) -> Sample:
    """One context of each length; turns as (start, end, state, reward), None = no episode."""
    n = sum(lengths)
    values = {
        "tokens": tuple(range(3, 3 + n)),
        "loss_mask": (1.0,) * n,
        "reward": 1.0,
        "turns": None if turns is None else tuple(Turn(start=a, end=b, state=state, reward=reward) for a, b, state, reward in turns),
        "context_starts": tuple(sum(lengths[: i + 1]) for i in range(len(lengths) - 1)),
    }
    return Sample(**(values | changes))


@st.composite
def episodes(draw, index: int = 0) -> Sample:
    """One to three contexts of 1 to 5 tokens, up to two turns in each."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if sum(lengths) == 1:
        lengths = [2]
    turns, start = [], 0
    for length in lengths:
        cuts = sorted(draw(st.sets(st.integers(start, start + length), max_size=4)))
        cuts = cuts[: len(cuts) // 2 * 2]
        states = [draw(st.none() | st.sampled_from("ab")) for _ in cuts]
        turns += [(a, b, s, float(a)) for a, b, s in zip(cuts[::2], cuts[1::2], states[::2], strict=True)]
        start += length
    n = sum(lengths)
    mask = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n).map(tuple))
    return make_episode(
        tuple(lengths), turns, index=index, group_index=index // 2, loss_mask=mask, tokens=tuple((7 * index + t) % 61 + 3 for t in range(n))
    )


BATCHES = (
    st.integers(1, 6)
    .flatmap(lambda n: st.tuples(*(episodes(i) for i in range(n))))
    .filter(lambda rows: any(value > 0 for s in rows for t, value in enumerate(s.loss_mask) if t not in {0, *s.context_starts}))
)


def rows_of(batch: TrainBatch) -> list[tuple[object, ...]]:
    """Everything about each row that a split must keep, without its pads."""
    out = []
    for row, n in enumerate(batch.lengths.tolist()):
        contexts = [0] * n if batch.context_ids is None else batch.context_ids[row, :n].tolist()
        assert batch.turns is not None
        count = int((batch.turns.states[row] >= 0).sum())
        turns = (batch.turns.ids[row, :n].tolist(), batch.turns.states[row, :count].tolist(), batch.turns.rewards[row, :count].tolist())
        assert (batch.turns.ids[row, n:] == -1).all() and (batch.turns.states[row, count:] == -1).all()
        out.append((batch.tokens[row, :n].tolist(), batch.loss_mask[row, :n].tolist(), contexts, *turns))
    return out


def test_columns_by_hand():
    a = make_episode((4, 3), ((1, 3, "door", 0.5), (5, 7, None, 2.0)))
    b = make_episode((3,), ((1, 2, "key", 0.0), (2, 3, "door", 1.0)))
    c = make_episode((2,), None)
    batch = collate_samples([a, b, c])
    assert batch.context_ids is not None and batch.turns is not None
    assert batch.context_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1], [0] * 7, [0] * 7]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.turns.ids.tolist() == [[-1, 0, 0, -1, -1, 1, 1], [-1, 0, 1, -1, -1, -1, -1], [-1] * 7]
    assert batch.turns.states.tolist() == [[0, 1], [2, 0], [-1, -1]], "equal keys are one id, None one of its own"
    assert batch.turns.rewards.tolist() == [[0.5, 2.0], [0.0, 1.0], [0.0, 0.0]]


def test_without_episodes_there_are_no_such_columns():
    batch = collate_samples([make_episode((3,), None)])
    assert batch.turns is None and batch.context_ids is None
    assert collate_samples([make_episode((3,), ())]).turns is not None, "an episode without a turn is an episode"


def test_states_without_a_key_are_never_equal():
    rows = [make_episode((4,), ((0, 1, None, 0.0), (1, 2, None, 0.0), (2, 3, "a", 0.0))) for _ in range(2)]
    turns = collate_turns(rows, 4)
    assert turns is not None
    assert turns.states.tolist() == [[0, 1, 2], [3, 4, 2]]


def test_turns_that_slipped_past_construction_are_found_when_they_become_columns():
    sample = make_episode((3,), ((0, 3, "a", 0.0),))
    object.__setattr__(sample, "turns", (Turn(start=1, end=4),))
    with pytest.raises(AssertionError, match=r"sample 0 .*reaches beyond the 3 tokens"):
        collate_samples([sample])
    object.__setattr__(sample, "turns", (Turn(start=1, end=3), Turn(start=2, end=3)))
    with pytest.raises(AssertionError, match="does not lie behind"):
        collate_samples([sample])
    with pytest.raises(AssertionError, match="spans the beginning of a context at token 2"):
        collate_samples([make_episode((2, 2), ((1, 3, "a", 0.0),))])


@given(BATCHES, st.integers(0, 99))
def test_no_split_loses_a_turn_or_a_context(samples, seed):
    batch = collate_samples(samples)
    expected = sorted(map(str, rows_of(batch)))
    for parts in (
        split_microbatches(batch, max_tokens=6),
        [select_rows(batch, rows) for rows in plan_minibatches(batch.group_ids.tolist(), min(2, len(samples)), seed=seed)],
        [select_rows(batch, rows) for rows in plan_shards(batch.lengths.tolist(), min(3, len(samples)))],
    ):
        assert sorted(str(row) for part in parts for row in rows_of(part)) == expected


@given(BATCHES)
def test_each_context_is_packed_as_a_row_of_its_own(samples):
    batch = collate_samples(samples)
    parts = [sample.tokens[a:b] for sample in samples for a, b in split_contexts(sample)]
    packed = pack_padded(batch.tokens, batch.lengths, batch.context_ids)
    assert packed.tokens.tolist() == [token for part in parts for token in part]
    assert packed.position_ids.tolist() == [t for part in parts for t in range(len(part))]
    assert packed.cu_seqlens.tolist() == [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    groups = packed.split_lengths(torch.arange(packed.tokens.numel()))
    bounds = packed.cu_seqlens.tolist()
    assert [tuple(group.shape) for group in groups] == list(packed.same_length)
    assert sorted(tuple(row) for group in groups for row in group.tolist()) == [tuple(range(a, b)) for a, b in pairwise(bounds)]
    assert packed.join_lengths(groups).tolist() == list(range(packed.tokens.numel()))
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    assert packed.unpack(packed.tokens).equal(batch.tokens * real)


def test_the_first_token_of_each_context_is_found():
    ids = collate_context_ids([make_episode((2, 1, 3)), make_episode((4,))], 6)
    assert find_context_starts(ids).int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert split_contexts(Sample()) == ()


def test_a_plain_attention_mask_cannot_hold_several_contexts():
    sample = make_episode((4, 3), index=5)
    for prepare in (prepare_sft_batch, lambda rows: prepare_grpo_batch(rows, [1.0])):
        with pytest.raises(DataError, match=r"sample 5 .* has 2 contexts"):
            prepare([sample])
        prepare([replace(sample, context_starts=())])


def test_selected_rows_keep_their_numbers():
    batch = collate_samples([make_episode((2,), ((1, 2, state, 0.0),), index=i) for i, state in enumerate("aba")])
    part = select_rows(batch, [2, 1])
    assert part.turns is not None and part.turns.states.tolist() == [[0], [1]]


def test_edits_of_samples_keep_turns_and_contexts():
    n = 7
    sample = make_episode(rollout_log_probs=(0.0,) * n, weight_versions=(3,) * n, status=Status.TRUNCATED)
    edits = (
        lambda s: with_reward(s, 2),
        mask_truncated,
        start_segments,
        lambda s: with_segment_log_probs(s, (-1.0,) * n, 4),
        lambda s: convert_to_batch([s]).samples[0],
        lambda s: Sample.from_dict(s.to_dict()),
    )
    for edit in edits:
        edited = edit(sample)
        assert (edited.turns, edited.context_starts) == (sample.turns, sample.context_starts)
    computed = with_segment_log_probs(sample, (-1.0,) * n, 4)
    assert computed.segment_versions == (-1, 4, 4, 4, -1, 4, 4), "nothing predicts the first token of a context"
    assert find_missed_tokens(sample, 5) == (1, 2, 3, 5, 6)


def test_a_completion_continues_one_context_only():
    begun = make_episode(rollout_log_probs=(0.0,) * 7, weight_versions=(0,) * 7, status=Status.ABORTED, turns=None)
    completion = Completion(
        request_id="x", input_tokens=begun.tokens, output_tokens=(9,), output_log_probs=(-1.0,), output_versions=(0,), finish_reason="stop"
    )
    with pytest.raises(AssertionError, match="2 contexts: a completion continues a single one"):
        completion_to_sample(begun, begun.tokens[:1], completion, "")

"""Proximal log-probs: which tokens are due, what the edit writes, and the interpolations by version."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import corrections as oracles
from samples import make_versioned_sample

from rollouts.algorithms.corrections import anchor_to_proximal
from rollouts.algorithms.proximal import approximate_proximal, interpolate_log_probs, interpolate_probs, proximal_fraction
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample
from rollouts.data.segments import find_segment_tokens, with_segment_log_probs
from rollouts.types import Completion, Sample, Status


def test_tokens_of_the_version_before_are_due():
    sample = make_versioned_sample((-1, -1, 1, 2, 3, 3, 4))
    assert find_segment_tokens(sample, 4) == (4, 5)
    assert find_segment_tokens(sample, 3) == (3,)
    assert find_segment_tokens(sample, 7) == ()


def test_masked_tokens_and_the_first_of_a_row_are_never_due():
    sample = make_versioned_sample((3, 3, 3, 3), loss_mask=(1.0, 0.0, 1.0, 0.5))
    assert find_segment_tokens(sample, 4) == (2, 3)


def test_the_edit_writes_due_tokens_and_keeps_the_others():
    sample = make_versioned_sample((-1, 2, 3, 3, 4))
    edited = with_segment_log_probs(sample, [-9.0, -8.0, -7.0, -6.0, -5.0], 4)
    assert edited.segment_log_probs == (0.0, -1.0, -7.0, -6.0, -4.0)
    assert edited.recompute_version == 4
    assert edited.rollout_log_probs == sample.rollout_log_probs
    assert sample.segment_log_probs is None


def test_a_sample_without_due_tokens_stays_the_very_same():
    sample = make_versioned_sample((-1, 2, 3))
    assert with_segment_log_probs(sample, [0.0] * 3, 7) is sample
    assert sample.recompute_version == -1


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=8))
def test_after_all_versions_each_token_has_the_log_prob_of_the_one_after_its_own(versions: list[int]):
    sample = make_versioned_sample((-1, *versions))
    for current in range(1, 6):
        sample = with_segment_log_probs(sample, [-100.0 * current - t for t in range(len(sample.tokens))], current)
    expected = [0.0] + [-100.0 * (v + 1) - t if v >= 0 else 0.0 for t, v in enumerate(versions, start=1)]
    if any(v >= 0 for v in versions):
        assert sample.segment_log_probs == tuple(expected)
        assert sample.recompute_version == max(versions) + 1
    else:
        assert sample.segment_log_probs is None


def test_log_probs_of_another_length_are_refused():
    with pytest.raises(AssertionError, match="2 log_probs for 3 tokens"):
        with_segment_log_probs(make_versioned_sample((-1, 2, 3)), [0.0, 0.0], 4)


def test_a_sample_round_trips_with_its_segments():
    sample = with_segment_log_probs(make_versioned_sample((-1, 2, 3)), [0.0, -1.5, -2.5], 4)
    assert Sample.from_dict(sample.to_dict()) == sample
    with pytest.raises(AssertionError, match="segment_log_probs has 1 entries for 3 tokens"):
        replace(sample, segment_log_probs=(0.0,))


def test_a_continued_sample_keeps_its_segments_and_starts_new_ones_from_the_rollout():
    aborted = replace(make_versioned_sample((-1, 2, 3)), status=Status.ABORTED, reward=None)
    patched = with_segment_log_probs(aborted, [0.0, -1.5, -2.5], 4)
    completion = Completion(
        request_id="a",
        input_tokens=(0, 1, 2),
        output_tokens=(5,),
        output_log_probs=(-0.25,),
        output_versions=(4,),
        finish_reason="stop",
    )
    assert completion_to_sample(patched, (0,), completion, "x").segment_log_probs == (0.0, -1.0, -2.5, -0.25)
    assert completion_to_sample(aborted, (0,), completion, "x").segment_log_probs is None


def test_tokens_that_were_not_recomputed_fall_back_to_the_rollout_and_get_weight_1():
    plain = make_versioned_sample((-1, 4, 4))
    patched = with_segment_log_probs(make_versioned_sample((-1, 3, 4)), [0.0, -1.25, 0.0], 4)
    assert collate_samples([plain, plain]).segment_log_probs is None
    batch = collate_samples([plain, patched])
    assert batch.segment_log_probs is not None
    assert batch.segment_log_probs.tolist() == [[0.0, -1.0, -2.0], [0.0, -1.25, -2.0]]
    anchored = anchor_to_proximal(replace(batch, prox_log_probs=torch.full((2, 3), -3.0)), segment_wise=True)
    assert anchored.importance_weights is not None
    assert anchored.importance_weights[:, 1:].flatten().tolist() == pytest.approx([1.0, 1.0, math.exp(-0.25), 1.0])


def test_interpolations_equal_a_loop():
    g = torch.Generator().manual_seed(0)
    versions = torch.tensor([[-1, 0, 1, 2, 3, 4], [3, 3, 0, -1, 5, 4]])
    rollout = -torch.randn(2, 6, generator=g, dtype=torch.float64).abs()
    trainer = -torch.randn(2, 6, generator=g, dtype=torch.float64).abs()
    fraction = proximal_fraction(versions, 4)
    for interpolate, geometric in ((interpolate_log_probs, True), (interpolate_probs, False)):
        found = interpolate(rollout, trainer, fraction)
        for i in range(2):
            for t in range(6):
                expected = oracles.proximal(float(rollout[i, t]), float(trainer[i, t]), int(versions[i, t]), 4, geometric)
                assert float(found[i, t]) == pytest.approx(expected, abs=1e-12)


def test_fractions():
    assert proximal_fraction(torch.tensor([[-1, 0, 3, 4, 5]]), 4).tolist() == [[0.0, 0.75, 0.0, 0.0, 0.0]]


def test_approximate_proximal_detaches_and_needs_its_columns():
    batch = collate_samples([make_versioned_sample((-1, 0, 2)), make_versioned_sample((-1, 1, 1))])
    leaf = torch.zeros(2, 3, requires_grad=True)
    made = approximate_proximal(replace(batch, old_log_probs=leaf), current_version=4)
    assert made.prox_log_probs is not None
    assert not made.prox_log_probs.requires_grad
    assert made.prox_log_probs.flatten().tolist() == pytest.approx([0.0, -0.25, -1.0, 0.0, -1 / 3, -2 / 3])
    for column in ("rollout_log_probs", "old_log_probs", "weight_versions"):
        with pytest.raises(AssertionError, match=column):
            approximate_proximal(replace(batch, **{"old_log_probs": leaf, column: None}), current_version=4)

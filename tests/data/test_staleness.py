"""Capacity and the age of samples: tables of the formula, conservation, and a run that would stop without its filtered samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.asynchronous.capacity import (
    RolloutCounts,
    StalenessLimits,
    clamp_capacity,
    compute_capacity,
    compute_pending_limit,
    with_accepted,
    with_consumed,
    with_enqueued,
    with_filtered,
    with_recovered,
    with_rejected,
    with_submitted,
)
from rollouts.data.samples import check_versions, count_token_ages
from rollouts.data.staleness import compute_allowed_staleness, compute_staleness, drop_stale_groups, is_too_stale, summarize_staleness
from rollouts.errors import EngineProtocolError
from rollouts.types import Sample

LIMITS = StalenessLimits(max_concurrent=8, batch_size=4, max_staleness=1)


@pytest.mark.parametrize(
    ("running", "accepted", "version", "expected"),
    [
        (0, 0, 0, 8),  # concurrency
        (8, 0, 0, 0),
        (3, 0, 0, 5),
        (0, 6, 0, 2),  # two batches may be under way at version 0
        (2, 6, 0, 0),
        (2, 7, 0, -1),
        (2, 7, 1, 3),  # a version gives a batch
        (0, 8, 1, 4),
    ],
)
def test_capacity_is_the_smaller_of_two_limits(running: int, accepted: int, version: int, expected: int):
    assert compute_capacity(LIMITS, RolloutCounts(running=running, accepted=accepted), version) == expected


def test_limits_below_1_count_as_1():
    limits = StalenessLimits(max_concurrent=0, batch_size=0, max_staleness=2)
    assert compute_capacity(limits, RolloutCounts(), 0) == 1
    assert compute_capacity(limits, RolloutCounts(accepted=3), 0) == 0


def test_the_queue_is_as_long_as_the_batches_that_may_wait():
    assert compute_pending_limit(LIMITS) == 8


@given(st.lists(st.sampled_from(["enqueue", "submit", "accept", "reject", "filter", "consume"]), max_size=40))
def test_every_rollout_is_counted_once(events: list[str]):
    counts, known = RolloutCounts(), 0
    for event in events:
        if event == "enqueue":
            counts, known = with_enqueued(counts), known + 1
        elif event == "submit":
            known += counts.enqueued == 0
            counts = with_submitted(counts)
        elif event in ("accept", "reject") and counts.running > 0:
            counts = (with_accepted if event == "accept" else with_rejected)(counts)
        elif event == "filter":
            counts = with_filtered(counts, 2)
        elif event == "consume":
            counts = with_consumed(counts, 3)
        assert counts.enqueued + counts.running + counts.accepted + counts.rejected == known
        assert counts.filtered >= 0


def test_more_cannot_finish_than_run():
    with pytest.raises(AssertionError, match="1 rollouts accepted, but 0 are running"):
        with_accepted(RolloutCounts())
    with pytest.raises(AssertionError, match="2 rollouts rejected, but 1 are running"):
        with_rejected(RolloutCounts(running=1), 2)


def run_with_filter(give_back: Callable[[RolloutCounts, int], RolloutCounts] | None) -> tuple[int, int]:
    """(batches trained, most rollouts at once) in 60 rounds where every second accepted rollout is dropped before training."""
    counts, version, usable, finished, most = RolloutCounts(), 0, 0, 0, 0
    for _ in range(60):
        while compute_capacity(LIMITS, counts, version) > 0:
            counts = with_submitted(counts)
        most = max(most, counts.running)
        while counts.running:
            counts, finished = with_accepted(counts), finished + 1
            if finished % 2:
                usable += 1
            elif give_back is not None:
                counts = give_back(counts, 1)
        if usable >= LIMITS.batch_size:
            usable, version = usable - LIMITS.batch_size, version + 1
    return version, most


def test_a_filtered_run_stops_unless_dropped_samples_give_their_room_back():
    assert run_with_filter(None)[0] < 5
    assert run_with_filter(with_filtered)[0] >= 59


def test_dropped_samples_do_not_lift_the_limit_of_concurrency():
    full = with_filtered(RolloutCounts(running=LIMITS.max_concurrent, accepted=3), 3)
    capacity = compute_capacity(LIMITS, full, 5)
    assert (capacity, clamp_capacity(capacity, LIMITS, full)) == (3, 0)


@pytest.mark.parametrize("version", [0, 1, 7])
def test_a_resumed_run_has_the_capacity_of_a_fresh_one(version: int):
    wide = replace(LIMITS, max_concurrent=100)
    counts = with_recovered(RolloutCounts(), wide, version)
    assert compute_capacity(wide, counts, version) == (wide.max_staleness + 1) * wide.batch_size


def test_filtering_nothing_changes_nothing():
    counts = RolloutCounts(filtered=2)
    assert with_filtered(counts, 0) == with_filtered(counts, -3) == with_consumed(counts, 0) == counts
    assert with_consumed(counts, 9).filtered == 0


def make_aged_sample(versions: tuple[int, ...], recompute_version: int = -1, index: int = 0) -> Sample:
    return Sample(
        tokens=(0,) * len(versions),
        loss_mask=tuple(float(v != -2) for v in versions),
        weight_versions=tuple(max(v, -1) for v in versions),
        recompute_version=recompute_version,
        index=index,
    )


@pytest.mark.parametrize(
    ("versions", "recompute_version", "current", "max_staleness", "staleness", "allowed"),
    [
        ((-2, 3, 5), -1, 6, 4, 1, 1),  # the newest token counts
        ((-2, 3, 5), 6, 6, 4, 3, 4),  # segment-wise the oldest
        ((-2, 3, 5), 0, 6, 2, 3, 2),  # recomputed at version 0 is recomputed
        ((-2, 3, 5), 6, 6, None, 3, 1),
        ((-2, 3, 5), 6, 6, 0, 3, 1),
        ((-2, -1), -1, 6, 4, 0, 1),  # nothing that the policy sampled
        ((-2, -1), 6, 6, 4, 0, 1),
    ],
)
def test_staleness(
    versions: tuple[int, ...], recompute_version: int, current: int, max_staleness: int | None, staleness: int, allowed: int
):
    sample = make_aged_sample(versions, recompute_version)
    assert compute_staleness(sample, current) == staleness
    assert compute_allowed_staleness(sample, max_staleness) == allowed
    assert is_too_stale(sample, current, max_staleness) == (staleness > allowed)


def test_a_stale_sample_drops_its_whole_group():
    fresh, old = make_aged_sample((5, 5)), make_aged_sample((1, 1), index=1)
    assert drop_stale_groups([(fresh, old), (fresh, fresh)], 5) == (((fresh, fresh),), ((fresh, old),))


def test_ages_of_tokens():
    assert count_token_ages([make_aged_sample((-2, 3, 5)), make_aged_sample((5, -1))], 5) == {0: 2, 2: 1}


def test_tokens_that_are_not_trained_do_not_count():
    sample = replace(make_aged_sample((1, 3, 4)), loss_mask=(0.0, 1.0, 0.0))
    assert compute_staleness(sample, 5) == 2
    assert compute_staleness(replace(sample, recompute_version=5), 5) == 2
    assert count_token_ages([sample], 5) == {2: 1}


def test_versions_are_needed():
    with pytest.raises(AssertionError, match=r"sample 4 .* has no weight_versions"):
        compute_staleness(replace(make_aged_sample((1,), index=4), weight_versions=None), 2)


def test_versions_after_the_newest_are_refused():
    known = make_aged_sample((-1, 0, 3)), make_aged_sample((4, 4)), replace(make_aged_sample((9,)), weight_versions=None)
    check_versions(known, 4)
    with pytest.raises(EngineProtocolError, match=r"sample 8 .* of weight version 4, but the engines were given none after 3"):
        check_versions((make_aged_sample((3, 3)), make_aged_sample((2, 4, 1), index=8)), 3)
    check_versions([replace(make_aged_sample((2, 4)), loss_mask=(1.0, 0.0))], 3)  # what is not trained on has no age
    check_versions([replace(make_aged_sample((2, 4)), trainable=False)], 3)


def test_samples_that_are_not_trained_on_are_no_part_of_the_staleness_of_a_batch():
    trained, greedy = make_aged_sample((3, 4)), replace(make_aged_sample((0, 0)), trainable=False)
    assert summarize_staleness((trained, greedy), 4) == summarize_staleness((trained,), 4)
    assert summarize_staleness((trained, greedy), 4)["staleness_max"] == 1.0
    assert drop_stale_groups([(trained, greedy)], 4) == (((trained, greedy),), ()), "nor a reason to drop its group"

"""staleness: our compositions for the vectors of this group."""

from __future__ import annotations

from typing import Any

from parity.mapping import Parity, Rule
from rollouts.asynchronous.capacity import (
    RolloutCounts,
    StalenessLimits,
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
from rollouts.data.staleness import compute_allowed_staleness, compute_staleness, is_too_stale
from rollouts.types import Sample

UPDATES = {
    "enqueue": with_enqueued,
    "submit": with_submitted,
    "accept": with_accepted,
    "reject": with_rejected,
    "filter": with_filtered,
    "consume": with_consumed,
}


def replay(max_concurrent_rollouts: int, consumer_batch_size: int, max_staleness: int, events: list[tuple[str, int]]) -> dict[str, Any]:
    limits = StalenessLimits(max_concurrent=max_concurrent_rollouts, batch_size=consumer_batch_size, max_staleness=max_staleness)
    counts, version = RolloutCounts(), 0
    seen: list[tuple[int, RolloutCounts]] = []
    for name, n in events:
        if name in ("set_version", "recover"):
            version = n
        if name == "recover":
            counts = with_recovered(counts, limits, n)
        elif name != "set_version":
            counts = UPDATES[name](counts, n)
        seen.append((compute_capacity(limits, counts, version), counts))
    return {
        "capacity": [capacity for capacity, _ in seen],
        "accepted": [c.accepted for _, c in seen],
        "running": [c.running for _, c in seen],
        "filtered_count": [c.filtered for _, c in seen],
        "pending_limit": compute_pending_limit(limits),
    }


def areal_staleness_capacity_table(states: list[tuple[int, int, int, int, int, int]]) -> dict[str, Any]:
    found: list[int] = []
    for accepted, running, version, max_staleness, max_concurrent, batch_size in states:
        limits = StalenessLimits(max_concurrent=max_concurrent, batch_size=batch_size, max_staleness=max_staleness)
        found.append(compute_capacity(limits, RolloutCounts(accepted=accepted, running=running), version))
    return {"capacity": found}


def areal_fork_segment_staleness_check(
    versions: list[int], loss_mask: list[int], current_version: int, recompute_version: int, max_head_offpolicyness: int | None
) -> dict[str, Any]:
    sample = Sample(
        tokens=(0,) * len(versions),
        loss_mask=tuple(map(float, loss_mask)),
        weight_versions=tuple(versions),
        recompute_version=recompute_version,
    )
    return {
        "staleness": compute_staleness(sample, current_version),
        "allowed": compute_allowed_staleness(sample, max_head_offpolicyness),
        "too_stale": is_too_stale(sample, current_version, max_head_offpolicyness),
    }


RECOMPUTED_AT_0 = Rule(
    reason="the peer takes a recomputation at version 0 for none at all; here it counts",
    applies=lambda kwargs, _: (
        kwargs["recompute_version"] == 0 and any(v >= 0 and m for v, m in zip(kwargs["versions"], kwargs["loss_mask"], strict=True))
    ),
    given={"recompute_version": 0},
)


MAPPINGS: dict[str, Parity] = {
    "areal_staleness_capacity": Parity(
        run=replay, ours="staleness.compute_capacity after with_submitted, with_accepted, ...", optional=("filtered_count",)
    ),
    "areal_fork_filtered_capacity": Parity(
        run=replay,
        ours="staleness.compute_capacity after with_filtered, with_consumed, ...",
        optional=("accepted", "running", "pending_limit"),
    ),
    "areal_staleness_capacity_table": Parity(run=areal_staleness_capacity_table, ours="staleness.compute_capacity"),
    "areal_fork_segment_staleness_check": Parity(
        run=areal_fork_segment_staleness_check,
        ours="staleness.compute_staleness, compute_allowed_staleness, is_too_stale",
        rules=(RECOMPUTED_AT_0,),
        left_out={"max_version": "a part of the staleness, which is compared"},
    ),
}
NOT_OFFERED: dict[str, str] = {}

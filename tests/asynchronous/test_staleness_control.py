"""The shells over the arithmetic of staleness: recorded cases of another framework, conservation, and the two strategies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.asynchronous.capacity import (
    FilteredSamplesCapacityModifier,
    RolloutCounts,
    StalenessLimits,
    StalenessManager,
    clamp_capacity,
    divide_limits,
)
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.create import (
    create_filtered_capacity_modifier,
    create_queue,
    create_staleness_manager,
    create_staleness_strategy,
    register_capacity_modifiers,
)
from rollouts.asynchronous.finished import SegmentWisePPOStrategy, StalenessControlStrategy, StandardPPOStrategy, refuses
from rollouts.asynchronous.queue import FinishedRollout, LocalRolloutCache, LocalRolloutQueue, TimedResult, find_oldest_version
from rollouts.config import RolloutConfig
from rollouts.data.staleness import compute_allowed_staleness
from rollouts.errors import CheckpointError, ConfigError
from rollouts.types import Prompt, Sample

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "staleness"


def cases(name: str) -> list[Any]:
    return [
        pytest.param(case["kwargs"], case["outputs"], id=case["id"]) for case in json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    ]


def replay(kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
    manager = StalenessManager(kwargs["max_concurrent_rollouts"], kwargs["consumer_batch_size"], kwargs["max_staleness"])
    modifier = create_filtered_capacity_modifier()
    register_capacity_modifiers(manager, modifier)
    version = 0
    found: dict[str, list[int]] = {"capacity": [], "accepted": [], "running": [], "filtered_count": []}
    for name, n in kwargs["events"]:
        if name == "set_version":
            version = n
        elif name == "recover":
            version = n
            manager.on_version_recovered(n)
        elif name == "filter":
            modifier.on_samples_filtered(n, version)
        elif name == "consume":
            modifier.on_capacity_consumed(n)
        else:
            event = {
                "enqueue": manager.on_rollout_enqueued,
                "submit": manager.on_rollout_submitted,
                "accept": manager.on_rollout_accepted,
                "reject": manager.on_rollout_rejected,
            }[name]
            event(n)
        found["capacity"].append(manager.get_capacity(version))
        found["accepted"].append(manager.get_stats().accepted)
        found["running"].append(manager.get_stats().running)
        found["filtered_count"].append(modifier.get_filtered_count())
    return found


@pytest.mark.parametrize(("kwargs", "outputs"), cases("areal_staleness_capacity") + cases("areal_fork_filtered_capacity"))
def test_the_manager_replays_recorded_events(kwargs: dict[str, Any], outputs: dict[str, Any]):
    found = replay(kwargs)
    assert {name: found[name] for name in outputs if name in found} == {name: value for name, value in outputs.items() if name in found}
    if "pending_limit" in outputs:
        manager = StalenessManager(kwargs["max_concurrent_rollouts"], kwargs["consumer_batch_size"], kwargs["max_staleness"])
        assert manager.get_pending_limit() == outputs["pending_limit"]


@pytest.mark.parametrize(("kwargs", "outputs"), cases("areal_staleness_capacity_table"))
def test_the_manager_gives_the_recorded_table(kwargs: dict[str, Any], outputs: dict[str, Any]):
    found = []
    for accepted, running, version, max_staleness, max_concurrent, batch_size in kwargs["states"]:
        manager = StalenessManager(max_concurrent, batch_size, max_staleness)
        manager.on_rollout_submitted(accepted + running)
        manager.on_rollout_accepted(accepted)
        found.append(manager.get_capacity(version))
    assert found == outputs["capacity"]


@pytest.mark.parametrize(("kwargs", "outputs"), cases("areal_fork_segment_staleness_check"))
def test_the_segment_wise_strategy_gives_the_recorded_decisions(kwargs: dict[str, Any], outputs: dict[str, Any]):
    versions, now, allowed = kwargs["versions"], kwargs["current_version"], kwargs["max_head_offpolicyness"]
    expected = outputs["staleness"], outputs["allowed"], bool(outputs["too_stale"])
    trained = [version for version, mask in zip(versions, kwargs["loss_mask"], strict=True) if version >= 0 and mask > 0]
    if kwargs["recompute_version"] == 0 and trained:
        # the peer asks `recompute_version or -1`, so that a recomputation at version 0 is none to it: it measures from the newest token,
        # and allows 1. Here it is one like any other, and the row is as old as its oldest token
        assert expected == (now - max(trained), 1, now - max(trained) > 1)
        expected = now - min(trained), max(1, allowed or 0), now - min(trained) > max(1, allowed or 0)
        assert expected[0] > outputs["staleness"], "a row of several versions shows the difference"
    sample = Sample(
        tokens=(0,) * len(versions),
        loss_mask=tuple(map(float, kwargs["loss_mask"])),
        weight_versions=tuple(versions),
        recompute_version=kwargs["recompute_version"],
    )
    strategy = SegmentWisePPOStrategy(allowed)
    found = strategy.calculate_staleness(sample, now), compute_allowed_staleness(sample, allowed), strategy.is_sample_too_stale(sample, now)
    assert found == expected
    rollout = FinishedRollout(Prompt(content="?"), (sample,), find_oldest_version((sample,), begun=0, newest=now))
    assert strategy.should_enqueue_sample(rollout, now) is not expected[2]


def test_some_recorded_decisions_are_those_of_a_recomputation_at_version_0():
    recorded = [case.values[0] for case in cases("areal_fork_segment_staleness_check")]
    assert sum(kwargs["recompute_version"] == 0 and max(kwargs["versions"]) >= 0 for kwargs in recorded) >= 2


# the manager


@given(st.lists(st.sampled_from(["enqueue", "submit", "accept", "reject", "return", "forget", "drop"]), max_size=40))
def test_every_rollout_is_counted_once(events: list[str]):
    manager, known, version = StalenessManager(4, 3, 1), 0, 2
    for event in events:
        counts = manager.get_stats()
        if event == "enqueue":
            manager.on_rollout_enqueued()
            known += 1
        elif event == "submit":
            manager.on_rollout_submitted()
            known += counts.enqueued == 0
        elif event == "forget" and counts.enqueued:
            manager.on_rollout_forgotten()
        elif event == "drop":
            manager.on_rollout_dropped(1, version)
        elif counts.running and event in ("accept", "reject", "return"):
            {"accept": manager.on_rollout_accepted, "reject": manager.on_rollout_rejected, "return": manager.on_rollout_returned}[event]()
        counts = manager.get_stats()
        assert counts.enqueued + counts.running + counts.accepted + counts.rejected == known
        assert 0 <= manager.get_usable_capacity(version) <= max(0, 4 - counts.running)


class Constant:
    """A modifier that always adds the same."""

    def __init__(self, delta: int) -> None:
        self.delta = delta

    def get_capacity_delta(self, version: int) -> int:
        return self.delta

    def on_samples_filtered(self, n: int, version: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def test_modifiers_add_up_and_what_may_be_used_is_never_negative():
    manager = StalenessManager(8, 4, 0)
    register_capacity_modifiers(manager, Constant(3), Constant(-2))
    assert manager.get_capacity(0) == manager.get_usable_capacity(0) == 5
    register_capacity_modifiers(manager, Constant(-20))
    assert manager.get_capacity(0) == -15
    assert manager.get_usable_capacity(0) == 0


def test_room_that_was_given_back_does_not_lift_the_limit_of_concurrency():
    limits = StalenessLimits(max_concurrent=8, batch_size=4, max_staleness=0)
    assert clamp_capacity(11, limits, RolloutCounts(running=5)) == 3
    assert clamp_capacity(-4, limits, RolloutCounts(running=5)) == 0


def test_the_modifier_counts_by_version_and_keeps_its_state():
    modifier = FilteredSamplesCapacityModifier()
    for n, version in ((2, 1), (0, 1), (-4, 2), (3, 2), (1, 1)):
        modifier.on_samples_filtered(n, version)
    assert modifier.get_stats() == {1: 3, 2: 3}
    modifier.on_capacity_consumed(2)
    copy = FilteredSamplesCapacityModifier()
    copy.load_state_dict(json.loads(json.dumps(modifier.state_dict())))
    assert (copy.get_filtered_count(), copy.get_capacity_delta(9), copy.get_stats()) == (4, 4, {1: 3, 2: 3})
    copy.reset()
    assert (copy.get_filtered_count(), copy.get_stats()) == (0, {})


@pytest.mark.parametrize("version", [0, 1, 7])
def test_a_run_that_is_resumed_has_the_capacity_that_it_had(version: int):
    manager = StalenessManager(100, 4, 2)
    register_capacity_modifiers(manager, create_filtered_capacity_modifier())
    manager.on_version_recovered(version)
    assert manager.get_capacity(version) == 12
    manager.on_rollout_submitted(6)
    manager.on_rollout_accepted(5)
    manager.on_rollout_dropped(2, version)
    before = manager.get_capacity(version)
    resumed = StalenessManager(100, 4, 2)
    register_capacity_modifiers(resumed, create_filtered_capacity_modifier())
    resumed.load_state_dict(json.loads(json.dumps(manager.state_dict())))
    assert resumed.get_capacity(version) == before + 1, "what ran waits, and its room is free"
    assert (resumed.get_stats().enqueued, resumed.get_stats().running) == (1, 0)


def test_a_state_of_other_modifiers_is_refused():
    state = StalenessManager(1, 1, 0).state_dict()
    manager = StalenessManager(1, 1, 0)
    register_capacity_modifiers(manager, Constant(1))
    with pytest.raises(CheckpointError, match="have 0 capacity modifiers, but 1 are registered"):
        manager.load_state_dict(state)


def test_a_negative_staleness_is_refused():
    with pytest.raises(ConfigError, match="max_staleness is -1, expected at least 0"):
        StalenessManager(1, 1, -1)


# shares of several trainers


def test_limits_are_divided_among_trainers():
    config, asynchronous = RolloutConfig(batch_size=16), AsyncConfig(max_staleness=1, queue_size=40, max_concurrent_rollouts=24)
    limits = create_staleness_manager(config, asynchronous, batches_per_version=2, data_parallel_size=4).limits
    assert limits == StalenessLimits(max_concurrent=6, batch_size=8, max_staleness=1)
    assert create_queue(asynchronous, 8, 4).maxsize == 10
    assert create_queue(AsyncConfig(max_staleness=1), limits.batch_size, 4).maxsize == 16
    assert divide_limits(StalenessLimits(max_concurrent=3, batch_size=2, max_staleness=1), 8).max_concurrent == 1


@pytest.mark.parametrize("name", ["batches_per_version", "data_parallel_size"])
def test_a_share_of_nobody_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name} is 0, expected at least 1"):
        create_staleness_manager(RolloutConfig(batch_size=1), AsyncConfig(), **{name: 0})


# strategies


def make_rollout(index: int, *versions: int, recompute_version: int = -1) -> FinishedRollout:
    sample = Sample(
        tokens=(0,) * len(versions),
        loss_mask=(1.0,) * len(versions),
        weight_versions=versions,
        recompute_version=recompute_version,
        index=index,
    )
    return FinishedRollout(Prompt(content="?", index=index), (sample,), min(versions))


def fill(*rollouts: FinishedRollout) -> tuple[LocalRolloutQueue, LocalRolloutCache]:
    queue, cache = LocalRolloutQueue(9), LocalRolloutCache()
    for rollout in rollouts:
        queue.put_nowait(TimedResult(0.0, rollout))
        cache.add(TimedResult(0.0, rollout))
    return queue, cache


def indices(rollouts: tuple[FinishedRollout, ...]) -> list[int]:
    return [rollout.prompt.index for rollout in rollouts]


ROLLOUTS = (make_rollout(0, 1, 1), make_rollout(1, 3, 4), make_rollout(2, 1, 3), make_rollout(3, 2, 3, recompute_version=3))


def test_the_segment_wise_strategy_takes_out_what_is_too_old():
    queue, cache = fill(*ROLLOUTS)
    strategy = SegmentWisePPOStrategy(2)
    dropped, purged = strategy.purge_stale_samples_from_queue(queue, 4, 3)
    assert (indices(dropped), purged) == ([0], 4), "segment log-probs allow two versions, and else the newest token counts"
    assert [queue.get_nowait().data.prompt.index for _ in range(queue.qsize())] == [1, 2, 3]
    assert indices(strategy.filter_stale_from_cache(cache, 5)) == [0, 2, 3]
    assert [result.data.prompt.index for result in cache.take_first_n(9)] == [1]
    assert strategy.should_filter_before_enqueue()
    assert [strategy.should_enqueue_sample(rollout, 4) for rollout in ROLLOUTS] == [False, True, True, True]


def test_a_strategy_of_ones_own_answers_with_true_or_false():
    class Remote(SegmentWisePPOStrategy):
        async def should_enqueue_sample(self, rollout, current_version):
            return False

        def is_sample_too_stale(self, sample, current_version):
            return "no"

    _, cache = fill(*ROLLOUTS)
    with pytest.raises(ConfigError, match=r"Remote\.should_enqueue_sample returned <coroutine .* for the group of prompt 1.*it is async"):
        refuses(Remote(2), ROLLOUTS[1], 4, max_staleness=9)
    with pytest.raises(ConfigError, match=r"Remote\.is_sample_too_stale returned 'no'"):
        Remote(2).filter_stale_from_cache(cache, 9)


def test_a_second_purge_at_the_same_version_does_nothing():
    queue, _ = fill(ROLLOUTS[0])
    assert SegmentWisePPOStrategy(2).purge_stale_samples_from_queue(queue, 4, 4) == ((), 4)
    assert queue.qsize() == 1


def test_the_standard_strategy_looks_at_nothing():
    queue, cache = fill(*ROLLOUTS)
    strategy = StandardPPOStrategy()
    assert strategy.purge_stale_samples_from_queue(queue, 9, 3) == ((), 9)
    assert strategy.filter_stale_from_cache(cache, 9) == ()
    assert not strategy.should_filter_before_enqueue()
    assert strategy.should_enqueue_sample(ROLLOUTS[0], 9)
    assert not strategy.is_sample_too_stale(ROLLOUTS[0].group[0], 9)
    assert strategy.calculate_staleness(ROLLOUTS[0].group[0], 9) == 8
    assert (queue.qsize(), cache.size()) == (4, 4)


@pytest.mark.parametrize(("switch", "kind"), [(True, SegmentWisePPOStrategy), (False, StandardPPOStrategy), (None, StandardPPOStrategy)])
def test_the_switch_chooses_the_strategy(switch: bool | None, kind: type[StalenessControlStrategy]):
    assert isinstance(create_staleness_strategy(AsyncConfig(enable_segment_wise_ppo=switch)), kind)

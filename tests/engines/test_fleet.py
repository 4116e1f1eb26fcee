"""A fleet of engines: the choice of a member, requests whose engine dies, engines that recover, and the weights of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig, MemberState, Roster
from rollouts.engines.fleet.routing import Ask, Cost, FleetView, MemberLoad, choose_member, group_by_prompt, group_by_request_id
from rollouts.engines.protocol import (
    WEIGHT_VERSION_FILE,
    EngineFeature,
    get_engine_features,
)
from rollouts.errors import ConfigError, EngineError, EngineRequestError, EngineStatusError
from rollouts.generation.single_turn import create_generate_fn
from rollouts.testing import FakeBackend, FakeEngine, random_answer, script_answer
from rollouts.training.weight_sync import WeightProbe, sync_weights_in_memory, sync_weights_to_engines
from rollouts.types import Completion, RolloutBatch, Sample, SamplingParams

PARAMS = SamplingParams(max_tokens=10)
LONG = script_answer(range(10, 20))


def load(num_requests: int = 0, num_tokens: int = 0, **changes: Any) -> MemberLoad:
    return MemberLoad(**{"is_serving": True, "num_requests": num_requests, "num_tokens": num_tokens, "max_requests": 10, **changes})


def choose(loads: Sequence[MemberLoad], homes: Mapping[Any, int] | None = None, slack: int = 3, size: int = 1, **ask: Any) -> int | None:
    return choose_member(FleetView(dict(enumerate(loads)), homes or {}), Ask(Cost(size, 5 * size), **ask), slack=slack)


def fakes(n: int, answer: Any = LONG, **options: Any) -> list[FakeEngine]:
    return [FakeEngine(answer, name="abcdefgh"[i], **{"seconds_per_token": 1.0, **options}) for i in range(n)]


def fleet_of(engines: Sequence[Any], said: list[str] | None = None, **settings: Any) -> EngineFleet:
    return EngineFleet(engines, config=FleetConfig(**settings), say=(said if said is not None else []).append)


async def generate_all(fleet: Any, num: int, prompt_of=lambda i: (3 + i,), found: dict[int, Completion] | None = None, params=PARAMS):
    found = {} if found is None else found

    async def one(i: int) -> None:
        found[i] = await fleet.generate(prompt_of(i), params.new(seed=i), request_id=f"{i:04d}-0000")

    async with trio.open_nursery() as nursery:
        for i in range(num):
            nursery.start_soon(one, i)
    return found


def count_requests(engine: FakeEngine) -> int:
    """Those of the tests: a fleet asks for one token where an engine comes back."""
    return sum(call.method == "generate" and call.arguments["params"].max_tokens > 1 for call in engine.calls)


async def sync(fleet: EngineFleet, version: int) -> Mapping[str, Any]:
    """Sync from memory, because virtual time continues while a thread reads a file."""
    return await fleet.update_weights({}, version)


# -- routing


def test_a_request_goes_to_the_member_with_the_most_room_and_ties_to_the_first():
    assert choose([load(2), load(1), load(1)]) == 1
    assert choose([load(4, max_requests=100), load(1, max_requests=10)]) == 0
    assert choose([load(1, 50), load(1, 40)]) == 1
    assert choose([load(1, 90, max_tokens=100), load(5, 10, max_tokens=100)]) == 1


def test_a_group_stays_together_unless_its_member_is_far_more_loaded():
    homes = {"g": 1}
    assert choose([load(0), load(3)], homes, group="g") == 1
    assert choose([load(0), load(4)], homes, group="g") == 0
    assert choose([load(0), load(3, is_serving=False)], homes, group="g") == 0
    assert choose([load(9), load(10)], homes, group="g") == 0
    assert choose([load(0), load(3)], homes, group="other") == 0


def test_full_members_and_those_that_do_not_serve_get_nothing():
    assert choose([load(10), load(0, is_serving=False)]) is None
    assert choose([load(8)], size=3) is None
    assert choose([load(0)], size=30) == 0, "what is too large for any member goes to an empty one"
    assert choose([load(1, 96, max_tokens=100)]) is None
    assert choose([]) is None


def test_those_that_failed_a_request_and_those_with_older_weights_come_last():
    assert choose([load(0), load(5)], avoided=frozenset({0})) == 1
    assert choose([load(0), load(10)], avoided=frozenset({0})) is None, "it waits for the other one"
    assert choose([load(0), load(5, is_serving=False)], avoided=frozenset({0})) == 0
    assert choose([load(0, version=1), load(5, version=2)], min_version=2) == 1
    assert choose([load(0, version=1), load(5, version=1)], min_version=2) == 0


def test_groups_are_known_by_their_prompt_or_by_the_first_number_of_the_id():
    assert group_by_prompt((1, 2), "a") == group_by_prompt((1, 2), "b") != group_by_prompt((1, 3), "a")
    ids = ["000000000012-0003", "000000000012-0004-0001", "eval-000000000012-0003", "request-000000000001", "free"]
    assert [group_by_request_id((1,), i) for i in ids] == ["000000000012", "000000000012", "eval-000000000012", None, None]


def test_settings_that_make_no_sense_are_refused():
    for field, value in {"max_requests": 0, "max_retries": -1, "wait_s": 0.0, "longest_wait_s": 0.1, "updates_at_once": 0}.items():
        with pytest.raises(ConfigError, match=f"fleet's {field} is {value}"):
            FleetConfig(**{field: value})
    with pytest.raises(ConfigError, match="no engines"):
        EngineFleet([])
    engine = FakeEngine()
    with pytest.raises(ConfigError, match="given twice"):
        EngineFleet([engine, engine])


# -- load and lines


async def test_groups_share_a_member_and_members_share_the_load(autojump_clock):
    engines = fakes(3)
    async with fleet_of(engines) as fleet, trio.open_nursery() as nursery:
        for i in range(24):
            nursery.start_soon(fleet.generate, (3 + i // 4,), PARAMS)
            await trio.sleep(0.01)
    assert [count_requests(engine) for engine in engines] == [8, 8, 8]
    for engine in engines:
        prompts = Counter(call.arguments["prompt_tokens"] for call in engine.calls if call.method == "generate")
        assert set(prompts.values()) == {4}
    assert trio.current_time() == pytest.approx(10.23)


async def test_where_all_are_full_requests_wait_and_nobody_overtakes(autojump_clock):
    engines = fakes(2)
    ended: list[int] = []
    async with fleet_of(engines, max_requests=2) as fleet, trio.open_nursery() as nursery:

        async def one(i: int) -> None:
            await fleet.generate((3 + i,), PARAMS, request_id=f"{i}")
            ended.append(i)

        for i in range(8):
            nursery.start_soon(one, i)
            await trio.sleep(0.1)
        assert sum(len(engine.pending_requests) for engine in engines) == 4
    assert ended == list(range(8))
    assert trio.current_time() == pytest.approx(20.3)


async def test_a_large_request_in_line_is_not_overtaken_for_ever(autojump_clock):
    (engine,) = fakes(1)
    when: dict[str, float] = {}
    async with fleet_of([engine], max_tokens=25) as fleet, trio.open_nursery() as nursery:

        async def one(name: str, max_tokens: int) -> None:
            await fleet.generate((3,), PARAMS.new(max_tokens=max_tokens), request_id=name)
            when[name] = trio.current_time()

        for name, max_tokens in [("a", 9), ("b", 9), ("large", 20), ("c", 2)]:
            nursery.start_soon(one, name, max_tokens)
            await trio.sleep(0.1)
    assert when["large"] > when["b"]
    assert when["c"] > when["large"] - 10, when
    assert when["c"] > when["b"], "the small one waited behind the large one"


async def test_a_wait_in_line_can_be_cancelled_and_aborted_and_is_bounded(autojump_clock):
    (engine,) = fakes(1)
    async with fleet_of([engine], max_requests=1, wait_s=5.0, max_waiting=2) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(partial(fleet.generate, (3,), PARAMS, request_id="first"))
        await trio.sleep(0.5)
        with trio.move_on_after(1.0) as cancelled:
            await fleet.generate((4,), PARAMS)
        assert cancelled.cancelled_caught

        aborted: list[Completion] = []

        async def wait_for_abort() -> None:
            aborted.append(await fleet.generate((5,), PARAMS, request_id="aborted"))

        async def wait_too_long() -> None:
            with pytest.raises(EngineError, match="no place for late within 5 s"):
                await fleet.generate((6,), PARAMS, request_id="late")

        nursery.start_soon(wait_for_abort)
        nursery.start_soon(wait_too_long)
        await trio.sleep(0.5)
        with pytest.raises(EngineError, match="is full: 2 requests wait in line before one-too-many"):
            await fleet.generate((7,), PARAMS, request_id="one-too-many")
        await fleet.abort(["aborted"])
        await trio.sleep(0)
        assert (aborted[0].finish_reason, aborted[0].output_len) == ("abort", 0)
    assert count_requests(engine) == 1
    assert trio.current_time() == 10.0


async def test_a_place_that_was_promised_to_a_cancelled_request_is_given_back():
    """The place becomes free after the request in line was cancelled, but before that request has noticed."""
    roster, ask = Roster("the fleet", FleetConfig(max_requests=1)), Ask(Cost(1, 5))
    member = roster.add(FakeEngine())
    roster.set_state(member, MemberState.SERVING)
    for is_aborted in (False, True):
        running = await roster.take_place(ask, "running", lambda scope: None)
        assert running is not None
        outer, waits, ended = trio.CancelScope(), list[trio.CancelScope](), list[Any]()

        async def wait(outer: Any = outer, waits: Any = waits, ended: Any = ended) -> None:
            with outer:
                ended.append(await roster.take_place(ask, "waiting", waits.append))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            (waits[0] if is_aborted else outer).cancel()
            roster.end_call(running)
        assert ended == ([None] if is_aborted else [])
        assert (member.num_requests, member.num_tokens, roster.num_waiting) == (0, 0, 0)


async def test_an_abort_brings_what_there_is(autojump_clock):
    engines = fakes(2)
    found: dict[int, Completion] = {}
    async with fleet_of(engines) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(partial(generate_all, fleet, 4, found=found))
        await trio.sleep(3.5)
        await fleet.abort(["0001-0000"])
        await trio.sleep(0)
        assert {i: c.output_tokens for i, c in found.items()} == {1: (10, 11, 12)}
        await fleet.abort()
    assert sorted(c.output_len for c in found.values()) == [3, 3, 3, 3]
    assert {c.finish_reason for c in found.values()} == {"abort"}


async def test_new_weights_end_the_affinity_as_they_end_the_caches(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines) as fleet:
        await generate_all(fleet, 4, lambda i: (3,))
        assert [count_requests(engine) for engine in engines] == [4, 0]
        await sync(fleet, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, (4,), PARAMS)
            await trio.sleep(0.1)
            nursery.start_soon(fleet.generate, (3,), PARAMS)
    assert [count_requests(engine) for engine in engines] == [5, 1]


# -- failures


async def test_what_a_dead_member_had_begins_anew_at_another(autojump_clock):
    engines, said = fakes(2, random_answer()), list[str]()
    async with fleet_of(engines, said, patience_s=0.0) as fleet, trio.open_nursery() as nursery:
        found: dict[int, Completion] = {}
        nursery.start_soon(partial(generate_all, fleet, 8, found=found))
        await trio.sleep(0.5)
        engines[0].kill("killed by signal 9")
        await trio.sleep(30.0)
        assert fleet.metrics()["num_engines_up"] == 1
        assert fleet.metrics()["num_requests_retried"] == 4
    assert {i: c.output_tokens for i, c in found.items()} == {i: random_answer()((3 + i,), i)[:10] for i in range(8)}
    assert count_requests(engines[1]) == 8
    assert "engine 0 (a) is down, 1 of 2 engines of the fleet serve: EngineError: a cannot be reached: killed by signal 9" in said[0]


async def test_without_any_member_the_error_says_which_died_of_what(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, patience_s=7.0, max_retries=5) as fleet:
        engines[0].kill("out of memory")
        engines[1].kill("killed by signal 9")
        words = r"no engine of the fleet serves, for 7 s \(FleetConfig.patience_s\): engine 0 \(a\).*out of memory.*killed by signal 9"
        with pytest.raises(EngineError, match=words):
            await fleet.generate((3,), PARAMS)
        with pytest.raises(EngineError, match="out of memory"):
            await fleet.get_weight_version()
        assert 7.0 <= trio.current_time() < 8.0
        fleet.remove(engines[0], "its server is not started again")
        fleet.remove(engines[1], "its server is not started again")
        with pytest.raises(EngineError, match=r"no engine of the fleet serves: engine 0 \(a\) left the fleet: its server"):
            await fleet.generate((3,), PARAMS)


async def test_a_request_that_ends_servers_does_not_end_them_all(autojump_clock):
    poison = EngineError("the server died")
    engines = fakes(5, error_for=lambda prompt, seed: poison if prompt == (66,) else None)
    async with fleet_of(engines, max_retries=2) as fleet:
        with pytest.raises(EngineError, match="failed 3 times and is not tried again") as caught:
            await fleet.generate((66,), PARAMS, request_id="poison")
        assert caught.value.__cause__ is poison
        assert sum(count_requests(engine) for engine in engines) == 3
        await trio.sleep(3.0)
        assert fleet.metrics()["num_engines_up"] == 5, "they answer, so they are used again"


@pytest.mark.parametrize("error", [EngineRequestError("too long"), EngineStatusError(400, "http://a", "", "bad request")])
async def test_a_request_that_is_wrong_is_not_tried_elsewhere(autojump_clock, error):
    engines = fakes(2, error_for=lambda prompt, seed: error)
    async with fleet_of(engines) as fleet:
        with pytest.raises(type(error)):
            await fleet.generate((3,), PARAMS)
        assert fleet.metrics() == {
            "num_engines_up": 2, "num_engines_down": 0, "num_engine_failures": 0, "num_requests_retried": 0, "num_requests_moved": 0,
        }  # fmt: skip
    assert sum(map(count_requests, engines)) == 1


async def test_a_member_that_is_silent_is_found_out_and_its_requests_are_taken_from_it(autojump_clock):
    class Silent(FakeEngine):
        is_silent = False

        async def get_weight_version(self) -> int:
            if self.is_silent:
                await trio.sleep_forever()
            return await super().get_weight_version()

        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            if self.is_silent:
                await trio.sleep_forever()
            return await super().generate(*args, **kwargs)

    silent, other = Silent(LONG, name="silent"), FakeEngine(LONG, name="other")
    async with fleet_of([silent, other], check_every_s=5.0, check_s=2.0) as fleet:
        silent.is_silent = True
        with trio.fail_after(20.0):
            found = await generate_all(fleet, 4)
        assert {c.output_tokens for c in found.values()} == {tuple(range(10, 20))}
        assert 5.0 < trio.current_time() < 10.0
        assert "did not say its weight version within 2 s" in fleet.members[0].reason
        silent.is_silent = False
        await trio.sleep(30.0)
        assert fleet.members[0].state is MemberState.SERVING


async def test_a_member_that_comes_back_gets_the_weights_before_it_is_used(autojump_clock):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said, first_wait_s=1.0) as fleet:
        engines[0].kill()
        assert (await fleet.generate((3,), PARAMS)).output_versions == (0,) * 10
        await sync(fleet, 5)
        assert engines[0].weight_version == 0
        engines[0].revive(weight_version=0)
        await trio.sleep(60.0)
        assert [member.version for member in fleet.members] == [5, 5]
        found = await generate_all(fleet, 4)
        assert {c.output_versions for c in found.values()} == {(5,) * 10}
        assert {count_requests(engine) for engine in engines} == {3}
    assert said[-1] == "engine 0 (a) is back with weight version 5"


async def test_a_member_that_has_other_weights_than_it_was_given_is_given_them_again(autojump_clock):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said, check_every_s=5.0) as fleet:
        await sync(fleet, 2)
        engines[1].weight_version = 0  # started again, unnoticed
        await trio.sleep(20.0)
        assert engines[1].weight_version == 2
    assert "has weight version 0, but 2 was confirmed" in said[0]
    assert [member.state for member in fleet.members] == [MemberState.SERVING] * 2


async def test_a_flapping_member_is_tried_less_and_less_often(autojump_clock):
    bad = FakeEngine(LONG, error_for=lambda prompt, seed: EngineStatusError(500, "http://a", "") if len(prompt) > 1 else None, name="bad")
    good = FakeEngine(LONG, name="good")
    async with fleet_of([bad, good], first_wait_s=1.0, longest_wait_s=64.0) as fleet:
        for i in range(127):
            await fleet.generate((3, i), PARAMS)
            await trio.sleep(1.0)
    assert 5 <= count_requests(bad) <= 8
    assert count_requests(good) == 127


async def test_a_member_that_is_known_to_be_back_is_tried_at_once(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, first_wait_s=30.0) as fleet:
        engines[0].kill()
        fleet.report_down(engines[0], "its process has ended")
        await trio.sleep(1.0)
        engines[0].revive(0)
        fleet.try_now(engines[0])
        await trio.sleep(1.5)
        assert fleet.status_of(engines[0]).state is MemberState.SERVING


# -- joining and leaving


async def test_a_new_member_gets_the_weights_first_and_then_requests(autojump_clock):
    engines = fakes(2, seconds_per_update=5.0)
    async with fleet_of(engines[:1], max_requests=1) as fleet, trio.open_nursery() as nursery:
        await sync(fleet, 3)
        found: dict[int, Completion] = {}
        nursery.start_soon(partial(generate_all, fleet, 3, found=found))
        await trio.sleep(1.0)
        await fleet.add(engines[1])
        assert trio.current_time() == pytest.approx(12.0)  # its token takes a second, too
        await trio.sleep(0.1)
        assert engines[1].pending_requests, "the next in line goes to it at once"
    assert {c.output_versions for c in found.values()} == {(3,) * 10}


async def test_an_engine_that_cannot_do_what_the_others_can_or_get_the_weights_does_not_join(autojump_clock):
    class Plain:
        name = "plain"
        generate, abort = FakeEngine.generate, FakeEngine.abort
        update_weights_from_checkpoint, get_weight_version = FakeEngine.update_weights_from_checkpoint, FakeEngine.get_weight_version

    (engine, stubborn) = fakes(2)
    async with fleet_of([engine]) as fleet:
        assert get_engine_features(fleet) == {EngineFeature.MEMORY_UPDATES, EngineFeature.METRICS, EngineFeature.MEMBER_CHECKS}
        with pytest.raises(ConfigError, match=r"the fleet lacks the feature scores .* it has member_checks, memory_updates, metrics"):
            await fleet.recompute_output_log_probs((3, 4), 1)
        with pytest.raises(ConfigError, match=r"the fleet lacks the feature groups .* Each engine of a fleet must declare it"):
            await fleet.generate_group((3, 4), SamplingParams(), 2)
        with pytest.raises(ConfigError, match="Plain cannot join the fleet, whose engines all have the feature memory_updates"):
            await fleet.add(Plain())
        with pytest.raises(ConfigError, match="is a member"):
            await fleet.add(engine)
        await sync(fleet, 1)
        stubborn._update_error = EngineError("no space left")
        with pytest.raises(EngineError, match="no space left"):
            await fleet.add(stubborn)
        assert len(fleet.members) == 1
    assert get_engine_features(fleet_of([Plain()])) == {EngineFeature.METRICS, EngineFeature.MEMBER_CHECKS}


async def test_what_a_leaving_member_does_not_finish_goes_on_elsewhere_with_what_it_has(autojump_clock):
    engines = fakes(2)
    found: dict[int, Completion] = {}
    async with fleet_of(engines) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(partial(generate_all, fleet, 2, found=found))
        await trio.sleep(2.5)
        await fleet.drain(engines[0], within_s=2.0)
        assert trio.current_time() == pytest.approx(4.5)
        assert [member.name for member in fleet.members] == ["engine 1 (b)"]
        assert fleet.metrics()["num_requests_moved"] == 1
    (moved,) = [call.arguments for call in engines[1].calls if len(call.arguments.get("prompt_tokens", ())) > 1]
    assert moved["prompt_tokens"][1:] == (10, 11, 12, 13)
    assert moved["params"].max_tokens == 6
    (sample,) = [c for c in found.values() if c.input_tokens == moved["prompt_tokens"][:1]]
    assert sample.output_tokens == (10, 11, 12, 13, 10, 11, 12, 13, 14, 15)
    assert (sample.finish_reason, len(sample.output_log_probs), sample.request_id) == (
        "length",
        10,
        f"{sample.input_tokens[0] - 3:04d}-0000",
    )


async def test_a_moved_sample_never_goes_on_under_older_weights(autojump_clock):
    """No member has weights as new as the request's tokens, so it starts again."""
    engines = fakes(2, seconds_per_update=5.0)
    found: dict[int, Completion] = {}
    async with fleet_of(engines, updates_at_once=1, exclude_failed=True) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(sync, fleet, 1)
        await trio.sleep(5.5)  # the first has the new weights, and the second is taking them
        nursery.start_soon(partial(generate_all, fleet, 1, found=found))
        await trio.sleep(2.0)
        assert engines[0].pending_requests
        engines[1].kill()
        nursery.start_soon(fleet.drain, engines[0])
        await trio.sleep(4.0)
        engines[1].revive(0)
        fleet._health.weights = type(fleet._health.weights)(0, tensors={})  # as if an older policy were put back
        await trio.sleep(60.0)
    assert found[0].output_tokens == tuple(range(10, 20))
    assert found[0].output_versions == (0,) * 10


# -- weights


async def test_an_update_of_all_at_once_is_all_or_an_error_that_says_who_has_what(autojump_clock):
    engines, said = fakes(3, seconds_per_update=5.0), list[str]()
    engines[1]._update_error = EngineError("disk full")
    async with fleet_of(engines, said, first_wait_s=1.0) as fleet:
        with pytest.raises(
            EngineError, match=r"1 of 3 engines .* did not take weight version 1\. engine 1 \(b\).*disk full.*engine 0"
        ) as caught:
            await sync_weights_in_memory([fleet], {}, 1)
        assert "exclude_failed" in str(caught.value)
        assert trio.current_time() == 5.0
        assert await fleet.get_weight_version() == 1
        assert [member.state for member in fleet.members] == [MemberState.SERVING, MemberState.DOWN, MemberState.SERVING]
        engines[1]._update_error = None
        await trio.sleep(30.0)
        assert [engine.weight_version for engine in engines] == [1, 1, 1]
        assert [member.state for member in fleet.members] == [MemberState.SERVING] * 3


async def test_weights_that_no_member_takes_leave_all_with_the_old_ones(autojump_clock):
    engines = fakes(2, update_error=EngineError("they do not fit"))
    async with fleet_of(engines) as fleet:
        with pytest.raises(EngineError, match=r"2 of 2 engines.*they do not fit.*All go on with the weights that they had"):
            await sync(fleet, 1)
        assert await fleet.get_weight_version() == 0
        assert (await fleet.generate((3,), PARAMS)).output_versions == (0,) * 10
        assert fleet.metrics()["num_engine_failures"] == 0


async def test_a_rolling_update_never_stops_the_fleet_and_every_token_has_its_version(autojump_clock):
    engines = fakes(3, seconds_per_update=4.0)
    serving: list[int] = []
    found: dict[int, Completion] = {}
    async with fleet_of(engines, updates_at_once=1) as fleet, trio.open_nursery() as nursery:

        async def keep_generating() -> None:
            for i in range(30):
                nursery.start_soon(one, i)
                serving.append(sum(member.state is MemberState.SERVING for member in fleet.members))
                await trio.sleep(1.5)

        async def one(i: int) -> None:
            begin = trio.current_time()
            found[i] = await fleet.generate((3 + i,), PARAMS)
            assert trio.current_time() == pytest.approx(begin + 10.0), "it waited"

        nursery.start_soon(keep_generating)
        await trio.sleep(5.0)
        (answer,) = await sync_weights_in_memory([fleet], {}, 1)
        assert answer["num_engines"] == 3
        assert trio.current_time() == pytest.approx(17.0)
        assert await fleet.get_weight_version() == 1
    assert min(serving) == 2
    assert all(list(c.output_versions) == sorted(c.output_versions) for c in found.values())
    assert {version for c in found.values() for version in c.output_versions} == {0, 1}
    assert any(len(set(c.output_versions)) == 2 for c in found.values())


async def test_in_the_middle_of_a_rolling_update_the_version_is_the_lowest(autojump_clock):
    engines = fakes(2, seconds_per_update=10.0)
    async with fleet_of(engines, updates_at_once=1) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(sync, fleet, 4)
        await trio.sleep(15.0)
        assert [member.version for member in fleet.members] == [4, 0]
        assert await fleet.get_weight_version() == 0
        await trio.sleep(10.0)
        assert await fleet.get_weight_version() == 4


async def test_a_rolling_update_can_let_requests_end_first(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, updates_at_once=1, drain_s=30.0) as fleet, trio.open_nursery() as nursery:
        found: dict[int, Completion] = {}
        nursery.start_soon(partial(generate_all, fleet, 4, found=found))
        await trio.sleep(1.0)
        await sync(fleet, 1)
    assert {c.output_versions for c in found.values()} == {(0,) * 10}


async def test_a_member_that_fails_an_update_is_left_out_where_that_is_the_policy(autojump_clock):
    engines, said = fakes(3), list[str]()
    engines[2]._update_error = EngineError("disk full")
    async with fleet_of(engines, said, exclude_failed=True) as fleet:
        (answer,) = await sync_weights_in_memory([fleet], {}, 1)
        assert (answer["num_engines"], list(answer["failed"])) == (2, ["engine 2 (c)"])
        found = await generate_all(fleet, 6)
    assert {c.output_versions for c in found.values()} == {(1,) * 10}
    assert "engine 2 (c) is down" in said[0]
    assert "disk full" in said[0]


async def test_a_member_that_dies_in_the_middle_of_an_update_does_not_keep_the_others_from_it(autojump_clock):
    engines = fakes(2, seconds_per_update=10.0)
    async with fleet_of(engines, exclude_failed=True) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(sync, fleet, 1)
        await trio.sleep(3.0)
        engines[0].kill()
        found = await generate_all(fleet, 2)  # waits for the end of the update
        assert trio.current_time() == pytest.approx(20.0)
    assert {c.output_versions for c in found.values()} == {(1,) * 10}


async def test_after_a_cancelled_update_every_member_gets_to_one_version(autojump_clock):
    engines = fakes(3, seconds_per_update=10.0)
    async with fleet_of(engines, updates_at_once=1) as fleet:
        with trio.move_on_after(15.0):
            await sync(fleet, 1)
        assert [engine.weight_version for engine in engines] == [1, 0, 0]
        found = await generate_all(fleet, 3)
        assert {c.output_versions for c in found.values()} == {(1,) * 10}
        await trio.sleep(60.0)
        assert [(member.version, member.state) for member in fleet.members] == [(1, MemberState.SERVING)] * 3
        assert [engine.weight_version for engine in engines] == [1, 1, 1]


async def test_a_directory_without_a_version_is_the_next_one_and_one_that_cannot_be_read_is_refused(tmp_path: Path):
    async with fleet_of(fakes(2, seconds_per_token=0.0)) as fleet:
        await sync_weights_to_engines([fleet], tmp_path)
        assert await fleet.get_weight_version() == 1
        (tmp_path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 9}))
        await sync_weights_to_engines([fleet], tmp_path)
        assert [member.version for member in fleet.members] == [9, 9]
        (tmp_path / WEIGHT_VERSION_FILE).write_text("nine")
        with pytest.raises(EngineError, match="cannot be read as"):
            await fleet.update_weights_from_checkpoint(tmp_path)


async def test_weights_in_memory_reach_members_and_those_that_come_back(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines) as fleet:
        weights = {"w": torch.ones(1)}
        await fleet.update_weights(weights, 7)
        engines[1].kill()
        await generate_all(fleet, 2)
        engines[1].revive(0)
        engines[1].weights = None
        await trio.sleep(60.0)
        assert engines[1].weights == weights
        assert await fleet.get_weight_version() == 7


async def test_each_member_is_checked_after_a_sync(autojump_clock):
    engines = fakes(3)
    asked: list[str] = []

    async def check(engine: Any) -> None:
        asked.append(engine.name)
        if engine.name == "b":
            raise EngineError("it is off by 3 nats")

    async with fleet_of(engines, exclude_failed=True) as fleet:
        await fleet.check_each(check)
        assert sorted(asked) == ["a", "b", "c"]
        assert fleet.members[1].state is MemberState.DOWN
    async with fleet_of(engines) as fleet:
        with pytest.raises(EngineError, match=r"1 of 3 engines .*engine 1 \(b\): it is off by 3 nats"):
            await fleet.check_each(check)


async def test_the_probe_of_a_sync_is_answered_by_every_member(autojump_clock):
    class Scoring(FakeEngine):
        features = FakeEngine.features | {EngineFeature.SCORES}

        async def recompute_output_log_probs(self, tokens: Any, start_index: int, temperature: float = 1.0) -> tuple[float, ...]:
            await trio.lowlevel.checkpoint()
            return (-3.0 if self.name == "liar" else -0.5,) * (len(tokens) - start_index)

    probe = WeightProbe((3, 4, 5), (-0.5, -0.5), tolerance=0.1)
    async with fleet_of([Scoring(name="good"), Scoring(name="liar")]) as fleet:
        with pytest.raises(EngineError, match=r"engine 1 \(liar\): it reports the new version, but its log-probs of a probe are off by"):
            await sync_weights_in_memory([fleet], {}, 1, probe=probe)
        assert [member.state for member in fleet.members] == [MemberState.SERVING, MemberState.DOWN]


async def test_a_fleet_begins_with_one_version_or_not_at_all(autojump_clock):
    with pytest.raises(EngineError, match=r"different weight versions \(engine 0 \(x\): 1, engine 1 \(y\): 2\)"):
        async with EngineFleet([FakeEngine(weight_version=1, name="x"), FakeEngine(weight_version=2, name="y")]):
            pass
    dead, alive = fakes(2)
    dead.kill()
    async with fleet_of([dead, alive]) as fleet:
        assert fleet.metrics()["num_engines_up"] == 1
    with pytest.raises(EngineError, match="no engine of the fleet answers"):
        async with fleet_of([dead]):
            pass


# -- in the loops


@pytest.mark.parametrize("at_once", [None, 1], ids=["together", "rolling"])
async def test_staleness_bounds_and_metrics_hold_over_a_fleet_whose_members_die(autojump_clock, at_once):
    engines = [FakeEngine(random_answer(mean_length=8), seconds_per_token=1.0, seconds_per_update=3.0, name=f"{i}") for i in range(3)]
    backend, batches = FakeBackend(seconds_per_job=3.0), list[RolloutBatch]()

    async def reward(sample: Sample) -> float:
        return float(sum(sample.tokens) % 2)

    async with fleet_of(engines, updates_at_once=at_once, exclude_failed=True) as fleet:
        buffer = DataBuffer([f"s{i}=" for i in range(1000)])
        rollout = RolloutConfig(
            batch_size=4, n_samples_per_prompt=2, reward_fn=reward,
            generate_fn=create_generate_fn([fleet], create_char_tokenizer(), SamplingParams(max_tokens=12)),
        )  # fmt: skip
        asynchronous = AsyncConfig(enabled=True, max_staleness=1, patience_s=1000.0, on_failure="raise")

        async def note(step: int, batch: RolloutBatch) -> None:
            batches.append(batch)
            if step == 2:
                engines[0].kill()
            if step == 5:
                engines[0].revive(0)

        async with create_workflow_executor(buffer, rollout, asynchronous, engines=[fleet]) as executor:
            history = await run_async_rl_training(
                backend, buffer, executor, [fleet], RLTrainingConfig(num_steps=8, weight_sync="memory"), clock=trio.current_time,
                on_rollouts=note,
            )  # fmt: skip
    for step, batch in enumerate(batches):
        for sample in batch.samples:
            versions = [version for version in sample.weight_versions or () if version >= 0]
            assert versions == sorted(versions)
            assert 0 <= step - versions[0] <= 1
            assert step - versions[-1] >= 0
    assert [line["weight_version"] for line in history] == list(range(8))
    up = [line["num_engines_up"] for line in history]
    assert (up[0], min(up), up[-1]) == (3, 2, 3)
    assert history[-1]["num_requests_retried"] > 0
    trained = [sample.group_index for batch in batches for sample in batch.samples]
    assert set(Counter(trained).values()) == {2}, "a group was trained on twice"


# -- any schedule

TIMES = st.integers(0, 60).map(lambda tenths: tenths / 10)


@given(
    num_engines=st.integers(1, 4),
    begins=st.lists(TIMES, min_size=1, max_size=12),
    faults=st.lists(st.tuples(TIMES, st.integers(0, 3), st.booleans()), max_size=8),
    syncs=st.lists(TIMES, max_size=2),
    max_requests=st.integers(1, 4),
    at_once=st.sampled_from([None, 1]),
)
def test_no_request_is_lost_or_answered_twice_whatever_dies_when(num_engines, begins, faults, syncs, max_requests, at_once):
    """Engines die and are started again, with their first weights, in any order, while weights change."""
    answer = random_answer(mean_length=6)
    finished: dict[str, list[Completion]] = {}

    class Counting(FakeEngine):
        async def generate(self, prompt_tokens: Any, params: Any, *, request_id: str | None = None) -> Completion:
            completion = await super().generate(prompt_tokens, params, request_id=request_id)
            finished.setdefault(completion.request_id, []).append(completion)
            return completion

    found: dict[int, Completion] = {}

    async def run() -> None:
        engines = [Counting(answer, seconds_per_token=0.1, seconds_per_update=0.3, name=f"{i}") for i in range(num_engines)]
        config = FleetConfig(max_requests=max_requests, max_retries=100, patience_s=1000.0, longest_wait_s=2.0, updates_at_once=at_once)
        async with EngineFleet(engines, config=config, say=lambda message: None) as fleet, trio.open_nursery() as nursery:

            async def one(i: int, begin: float) -> None:
                await trio.sleep(begin)
                found[i] = await fleet.generate((3 + i % 3,), PARAMS.new(seed=i), request_id=f"r{i}")

            async def fault(at: float, number: int, revives: bool) -> None:
                await trio.sleep(at)
                engine = engines[number % num_engines]
                if revives and engine._death is not None:
                    engine.revive(0)
                elif not revives:
                    engine.kill()

            async def sync() -> None:
                for version, at in enumerate(sorted(syncs), start=1):
                    await trio.sleep_until(at)
                    with suppress(EngineError):  # nobody was alive, or not all
                        await fleet.update_weights({}, version)

            for i, begin in enumerate(begins):
                nursery.start_soon(one, i, begin)
            for event in faults:
                nursery.start_soon(fault, *event)
            nursery.start_soon(sync)
            await trio.sleep(8.0)
            for engine in engines:
                if engine._death is not None:
                    engine.revive(0)
            with trio.fail_after(200.0):
                while len(found) < len(begins):
                    await trio.sleep(0.1)
            assert sum(member.num_requests for member in fleet.members) == 0
            assert fleet._roster.num_waiting == 0

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    for i, completion in found.items():
        assert completion.output_tokens == answer((3 + i % 3,), i)[:10]
        assert list(completion.output_versions) == sorted(completion.output_versions)
        assert completion.request_id == f"r{i}"
        # an engine that is started again between two requests answers with its first weights: it is refused and asked again
        refused = [other for other in finished[f"r{i}"] if min(other.output_versions) < min(completion.output_versions)]
        assert len(finished[f"r{i}"]) == 1 + len(refused)
    assert {name for name in finished if name.startswith("r") and "-" not in name} == {f"r{i}" for i in found}

"""Requests of a fleet whose members fail, leave or are lost: which member is asked next, and which is not asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from test_fleet import LONG, PARAMS, count_requests, fakes, fleet_of, sync

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import MOST_HOMES, FleetConfig, MemberState, Roster
from rollouts.engines.fleet.routing import Ask, Cost
from rollouts.engines.protocol import EngineFeature, get_engine_features
from rollouts.errors import EngineError
from rollouts.testing import FakeEngine
from rollouts.types import Completion, SamplingParams

PAIR = (3, 4)  # a prompt that engines below fail


def fails_pairs(prompt: tuple[int, ...], seed: int | None) -> EngineError | None:
    return EngineError("it does not like pairs") if prompt == PAIR else None


async def test_a_request_waits_for_another_member_and_is_not_sent_again_to_the_one_that_failed_it(autojump_clock):
    engines = [FakeEngine(LONG, seconds_per_token=1.0, error_for=fails_pairs, name="a"), *fakes(1)]
    async with fleet_of(engines, max_requests=1, first_wait_s=0.5) as fleet, trio.open_nursery() as nursery:
        await fleet.drain(engines[0])  # so that the other is busy
        nursery.start_soon(fleet.generate, (9,), PARAMS)
        await trio.sleep(0.1)
        await fleet.add(engines[0])
        begin = trio.current_time()
        assert (await fleet.generate(PAIR, PARAMS)).output_len == 10
        assert fleet.metrics()["num_engines_up"] == 2
        assert trio.current_time() > begin + 18.0, "the member that failed it is back, and has room, long before the other is free"
    assert [count_requests(engine) for engine in engines] == [1, 2]


async def test_a_request_that_several_members_failed_goes_to_one_that_has_not(autojump_clock):
    """When the second fails it, the first is back and comes first by its number."""
    bad = [FakeEngine(LONG, seconds_per_token=seconds, error_for=fails_pairs, name=f"bad-{seconds:g}") for seconds in (0.1, 5.0)]
    good = FakeEngine(LONG, seconds_per_token=6.0, name="good")
    async with fleet_of([*bad, good], first_wait_s=0.5) as fleet:
        assert (await fleet.generate(PAIR, PARAMS)).output_len == 10
        assert fleet.metrics()["num_requests_retried"] == 2
    assert [count_requests(engine) for engine in (*bad, good)] == [1, 1, 1]


class Hanging(FakeEngine):
    """Answers its first request, and the single tokens by which a fleet finds out whether it is well."""

    async def generate(self, prompt_tokens: Any, params: SamplingParams, *, request_id: str | None = None) -> Completion:
        if params.max_tokens > 1 and count_requests(self):
            await trio.sleep_forever()
        return await super().generate(prompt_tokens, params, request_id=request_id)


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda fleet, engine: fleet.report_down(engine, "its process has ended"), id="down"),
        pytest.param(lambda fleet, engine: fleet.remove(engine, "its process has ended"), id="gone"),
    ],
)
async def test_a_member_that_is_lost_after_its_place_was_promised_is_not_waited_for(
    autojump_clock, lose: Callable[[EngineFleet, Any], None]
):
    """The place becomes free, and its member is lost before the request in line has taken it: nobody interrupts it there."""
    first, other = Hanging(LONG, seconds_per_token=1.0, name="first"), FakeEngine(LONG, seconds_per_token=3.0, name="other")
    async with fleet_of([first, other], max_requests=1) as fleet, trio.open_nursery() as nursery:

        async def hold_and_lose() -> None:
            await fleet.generate((3,), PARAMS)
            lose(fleet, first)

        nursery.start_soon(hold_and_lose)
        await trio.sleep(0.1)
        nursery.start_soon(fleet.generate, (4,), PARAMS)
        await trio.sleep(0.1)
        with trio.fail_after(100.0):
            completion = await fleet.generate((5,), PARAMS)
        assert completion.output_tokens == tuple(range(10, 20))
    assert [call.arguments["prompt_tokens"] for call in other.calls if call.method == "generate"] == [(4,), (5,)]


class Grouping(FakeEngine):
    """Generates the samples of a group together. The seeds of a group are those of its samples."""

    features = FakeEngine.features | {EngineFeature.GROUPS}

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        found: dict[int, Completion] = {}

        async def one(sample: int) -> None:
            own = f"{request_id}-{sample}"
            found[sample] = await self.generate(prompt_tokens, params.new(seed=sample), request_id=own)

        async with trio.open_nursery() as nursery:
            for sample in range(n):
                nursery.start_soon(one, sample)
        return tuple(found[sample] for sample in range(n))

    async def abort(self, request_ids: Any = None) -> None:
        wanted = [
            own for own in self.pending_requests if request_ids is None or own.rpartition("-")[0] in request_ids or own in request_ids
        ]
        await super().abort(wanted)


async def test_the_samples_of_a_group_that_a_leaving_member_has_not_finished_go_on_elsewhere(autojump_clock):
    def seconds_per_token(prompt: tuple[int, ...], seed: int | None) -> float:
        return 0.1 if seed == 1 else 1.0

    engines = [Grouping(LONG, seconds_per_token=seconds_per_token, name=name) for name in "ab"]
    found: list[tuple[Completion, ...]] = []
    async with fleet_of(engines) as fleet, trio.open_nursery() as nursery:
        assert EngineFeature.GROUPS in get_engine_features(fleet)

        async def ask() -> None:
            found.append(await fleet.generate_group((3,), PARAMS, 3, request_id="group"))

        nursery.start_soon(ask)
        await trio.sleep(4.5)
        await fleet.drain(engines[0])
    assert [c.output_tokens for c in found[0]] == [(*range(10, 14), *range(10, 16)), tuple(range(10, 20)), (*range(10, 14), *range(10, 16))]
    assert {(c.request_id, c.finish_reason) for c in found[0][::2]} == {("group", "length")}
    assert count_requests(engines[1]) == 2, "the finished one is not generated again"


async def test_log_probs_of_two_kinds_do_not_make_one_sample(autojump_clock):
    class Untempered(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            return replace(await super().generate(*args, **kwargs), log_prob_kind="untempered", temperature=1.0)

    engines = [FakeEngine(LONG, seconds_per_token=1.0, name="a"), Untempered(LONG, seconds_per_token=1.0, name="b")]
    found: list[Completion] = []
    async with fleet_of(engines) as fleet, trio.open_nursery() as nursery:

        async def ask() -> None:
            found.append(await fleet.generate((3,), PARAMS))

        nursery.start_soon(ask)
        await trio.sleep(4.5)
        await fleet.drain(engines[0])
    assert (found[0].output_tokens, found[0].input_tokens) == (tuple(range(10, 20)), (3,)), "it began anew"


async def test_a_success_between_two_failures_makes_the_next_wait_short_again(autojump_clock):
    engine = FakeEngine(LONG, error_for=fails_pairs, name="a")
    async with fleet_of([engine], first_wait_s=0.5, max_retries=0) as fleet:
        for _ in range(8):
            with pytest.raises(EngineError, match="pairs"):
                await fleet.generate(PAIR, PARAMS)
            begin = trio.current_time()
            await fleet.generate((3,), PARAMS)
            assert trio.current_time() == pytest.approx(begin + 0.5)


async def test_those_in_line_when_the_last_member_goes_down_wait_for_the_patience_only(autojump_clock):
    (engine,) = fakes(1)
    failed_at: list[float] = []
    async with fleet_of([engine], max_requests=1, patience_s=7.0) as fleet, trio.open_nursery() as nursery:

        async def ask(prompt: tuple[int, ...]) -> None:
            with pytest.raises(EngineError, match="serves, for 7 s"):
                await fleet.generate(prompt, PARAMS)
            failed_at.append(trio.current_time())

        for i in range(3):
            nursery.start_soon(ask, (3 + i,))
        await trio.sleep(2.5)
        engine.kill()
    assert failed_at == [pytest.approx(9.5)] * 3


async def test_a_long_update_is_no_outage(autojump_clock):
    engines = fakes(2, seconds_per_update=30.0)
    async with fleet_of(engines, patience_s=1.0) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(partial(sync, fleet, 1))
        await trio.sleep(1.0)
        assert (await fleet.generate((3,), PARAMS)).output_versions == (1,) * 10


async def test_the_groups_that_are_remembered_are_limited_to_those_asked_for_last():
    roster = Roster("the fleet", FleetConfig())
    roster.set_state(roster.add(FakeEngine()), MemberState.SERVING)
    for group in (*range(MOST_HOMES), 0, MOST_HOMES):
        call = await roster.take_place(Ask(Cost(1, 1), group), "r", lambda scope: None)
        assert call is not None
        roster.end_call(call)
    homes = roster.get_view().homes
    assert (len(homes), 0 in homes, 1 in homes, MOST_HOMES in homes) == (MOST_HOMES, True, False, True)

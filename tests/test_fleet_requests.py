"""What becomes of a request whose members fail, leave or are lost: who is asked next, and who is not asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from test_fleet import LONG, PARAMS, count_requests, fakes, fleet_of

from rollouts.engines.fleet import EngineFleet
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

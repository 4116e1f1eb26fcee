"""A transfer to all members of a fleet at once, where the members are not those that the channel was opened for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import trio
from test_fleet import PARAMS, fakes, fleet_of

from rollouts.engines.fleet.channel import FleetChannel
from rollouts.engines.fleet.members import MemberState
from rollouts.errors import EngineError
from rollouts.testing import FakeEngine


class Group:
    """A WeightChannel to fake engines that takes a second."""

    wants_device = False

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = engines

    async def send_weights(self, specs: Any, read: Any, weight_version: int) -> list[Mapping[str, Any]]:
        await trio.sleep(1.0)
        return [await engine.update_weights({}, weight_version) for engine in self.engines]


async def read(bucket: Any) -> Mapping[str, Any]:
    raise AssertionError("fakes read nothing")


async def test_an_engine_that_joined_is_named_before_anything_is_sent(autojump_clock):
    engines, new = fakes(2), FakeEngine(name="new")
    async with fleet_of(engines) as fleet:
        channel = FleetChannel(fleet, fleet.engines, Group(engines))
        await fleet.add(new)
        with pytest.raises(EngineError, match=r"engine 2 \(new\) joined the fleet after its group was made.*drain it"):
            await channel.send_weights([], read, 1)
        assert [member.state for member in fleet.members] == [MemberState.SERVING] * 3
        assert [engine.weight_version for engine in engines] == [0, 0]
        await fleet.drain(new)
        assert (await channel.send_weights([], read, 1))[0]["num_engines"] == 2
        assert await fleet.get_weight_version() == 1


@pytest.mark.parametrize("how", ["removed", "drained"])
async def test_an_engine_that_left_is_named_at_once_and_the_others_go_on(autojump_clock, how: str):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said) as fleet, trio.open_nursery() as nursery:
        channel = FleetChannel(fleet, fleet.engines, Group(engines))
        if how == "removed":
            fleet.remove(engines[1], "it ended")
            words = r"1 of 2 engines of a group have left the fleet \(b\)"
        else:
            await generate_in(fleet, engines[1], nursery)
            nursery.start_soon(fleet.drain, engines[1], 60.0)
            await trio.sleep(0.5)
            words = r"1 of 2 engines are down or leave \(engine 1 \(b\): it is to leave\)"
        begin = trio.current_time()
        with pytest.raises(EngineError, match=words):
            await channel.send_weights([], read, 1)
        assert trio.current_time() == begin
        assert fleet.members[0].state is MemberState.SERVING
        nursery.cancel_scope.cancel()


async def generate_in(fleet: Any, engine: FakeEngine, nursery: trio.Nursery) -> None:
    """Keep an engine busy."""
    engine._seconds_per_token = 50.0
    for i in range(2):
        nursery.start_soon(fleet.generate, (3 + i,), PARAMS)
    await trio.sleep(1.0)
    assert engine.pending_requests


async def test_the_others_do_not_wait_for_one_that_dies_before_the_transfer(autojump_clock):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said, drain_s=60.0) as fleet, trio.open_nursery() as nursery:
        channel = FleetChannel(fleet, fleet.engines, Group(engines))
        await generate_in(fleet, engines[1], nursery)

        async def die() -> None:
            await trio.sleep(5.0)
            fleet.remove(engines[1], "it ended")

        nursery.start_soon(die)
        begin = trio.current_time()
        with pytest.raises(EngineError, match=r"have left the fleet \(b\)"), trio.fail_after(20.0):
            await channel.send_weights([], read, 1)
        assert trio.current_time() < begin + 15.0
        assert fleet.members[0].state is MemberState.SERVING
        nursery.cancel_scope.cancel()


async def test_an_engine_that_is_about_to_join_does_not_end_a_transfer(autojump_clock):
    engines, new, said = fakes(2), FakeEngine(name="new"), list[str]()
    async with fleet_of(engines, said, drain_s=5.0) as fleet, trio.open_nursery() as nursery:
        channel = FleetChannel(fleet, fleet.engines, Group(engines))
        await generate_in(fleet, engines[1], nursery)

        async def join() -> None:
            await trio.sleep(1.0)
            with pytest.raises(EngineError, match="cannot be given weight version 1"):
                await fleet.add(new)

        nursery.start_soon(join)
        assert (await channel.send_weights([], read, 1))[0]["num_engines"] == 2
        await trio.sleep(1.0)
        nursery.cancel_scope.cancel()

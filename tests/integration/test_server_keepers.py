"""The watch over a launched server: one that loads for long is left alone, and one whose engine has left the fleet is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio
from test_fleet import LONG, fakes, fleet_of, sync

from integration.parts.server_fleet import ServerUpkeep, _keep_server, _Post
from rollouts.engines.fleet.members import MemberState
from rollouts.errors import EngineError
from rollouts.testing import FakeEngine


class Process:
    """A server's process: killed, and a minute until it is there again, with the weights it was started with."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.num_starts, self.is_stopped = engine, 0, False

    async def restart(self) -> None:
        self.num_starts += 1
        self.engine.kill()
        await trio.sleep(60.0)
        self.engine.revive(0)

    async def stop(self) -> None:
        self.is_stopped = True


def create_post(process: Any) -> _Post:
    config: Any = None
    return _Post(config, Path("log"), "vllm server 0", process)


async def test_a_server_that_loads_the_weights_for_long_is_not_taken_for_one_that_hangs(autojump_clock):
    engines, said = fakes(2), list[str]()
    process = Process(engines[0])
    post = create_post(process)
    async with fleet_of(engines, said) as fleet, trio.open_nursery() as nursery:
        await sync(fleet, 5)
        engines[0]._seconds_per_update = 400.0
        nursery.start_soon(_keep_server, post, engines[0], fleet, ServerUpkeep(max_restarts=3, hang_s=180.0), said.append)
        engines[0].kill()
        post.note_death(EngineError("killed"))
        await trio.sleep(900.0)
        assert [(member.state, member.version) for member in fleet.members] == [(MemberState.SERVING, 5)] * 2
        nursery.cancel_scope.cancel()
    assert process.num_starts == 1, said


async def test_a_server_that_answers_nothing_is_still_taken_for_one_that_hangs(autojump_clock):
    class Silent(FakeEngine):
        async def get_weight_version(self) -> int:
            await trio.sleep(1e9 if trio.current_time() > 10.0 else 0.0)
            return await super().get_weight_version()

    engines, said = [Silent(LONG, name="silent"), *fakes(1)], list[str]()
    process = Process(engines[0])
    async with fleet_of(engines, said) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(_keep_server, create_post(process), engines[0], fleet, ServerUpkeep(max_restarts=3, hang_s=180.0), said.append)
        await trio.sleep(360.0)
        nursery.cancel_scope.cancel()
    assert process.num_starts == 1, said


async def test_a_server_whose_engine_has_left_is_stopped_and_nothing_else(autojump_clock):
    engines, said = fakes(2), list[str]()
    process = Process(engines[0])
    async with fleet_of(engines, said) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(_keep_server, create_post(process), engines[0], fleet, ServerUpkeep(max_restarts=3, hang_s=180.0), said.append)
        await fleet.drain(engines[0])
        await trio.sleep(10.0)
    assert (process.is_stopped, process.num_starts) == (True, 0)
    assert said[-1] == "vllm server 0 is stopped: its engine has left the fleet"

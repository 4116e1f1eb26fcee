"""Weight syncs of a fleet that half succeed, at every stage: no sample is accepted of weights that its engine did not confirm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import trio
from test_fleet import LONG, PARAMS, fleet_of

from benchmarks.reliability.fleet_syncs import ask_all_the_time, sync_with_faults
from rollouts.errors import EngineError
from rollouts.testing import FakeEngine
from rollouts.types import Completion

Stage = Literal["before", "middle", "lost", "unconfirmed", "misnamed"]
STAGES: tuple[Stage, ...] = ("before", "middle", "lost", "unconfirmed", "misnamed")


class HalfWay(FakeEngine):
    """Applies weights and names them at once, and confirms them later, or fails at one stage of it. Keeps what it confirmed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(LONG, seconds_per_token=1.0, **options)
        self.stage: Stage | None = None
        self.confirmed = {0}
        self._given: int | None = None

    async def update_weights(self, weights: Mapping[str, Any], weight_version: int) -> Mapping[str, Any]:
        old, self._given = self.weight_version, None
        await trio.sleep(1.0)
        if self.stage == "before":
            raise EngineError("refused")
        self.weight_version = weight_version
        await trio.sleep(6.0)
        if self.stage == "middle":
            self.weight_version = old
            raise EngineError("the load failed, and the old weights are back")
        await trio.sleep(6.0)
        if self.stage == "lost":
            raise EngineError("the answer was lost")
        self._given = weight_version
        return {"success": True, "weight_version": weight_version}

    async def get_weight_version(self) -> int:
        await trio.sleep(3.0 if self._given is not None else 0.0)
        if self.stage == "unconfirmed":
            raise EngineError("it does not say")
        version = await super().get_weight_version() - (self.stage == "misnamed")
        if version == self._given:
            self.confirmed.add(version)
        return version


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("stage", STAGES)
async def test_no_sample_is_accepted_of_a_version_that_its_engine_did_not_confirm(autojump_clock, stage: Stage, at_once: int | None):
    engines = [HalfWay(name=name) for name in "abcd"]
    by_request: dict[str, HalfWay] = {}
    for engine in engines:  # the engine that answered last, by request

        async def generate(tokens: Any, params: Any, *, request_id: str | None = None, engine: HalfWay = engine) -> Completion:
            completion = await FakeEngine.generate(engine, tokens, params, request_id=request_id)
            by_request[completion.request_id] = engine
            return completion

        engine.generate = generate  # type: ignore[method-assign]
    found: Counter[str] = Counter()
    draw = random.Random(0)
    async with fleet_of(engines, exclude_failed=True, updates_at_once=at_once, first_wait_s=1.0, max_retries=50) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_all_the_time, fleet, engines, lambda c: by_request[c.request_id].confirmed, found, PARAMS)
            for version in range(1, 9):
                bad = draw.choice(engines)
                bad.stage = stage
                with suppress(EngineError), trio.move_on_after(draw.choice([3.0, 9.0, 14.0, 100.0])):  # some are cancelled, too
                    await fleet.update_weights({}, version)
                await trio.sleep(5.0)
                bad.stage = None
                await trio.sleep(60.0)
            nursery.cancel_scope.cancel()
    assert found["accepted"] > 250
    assert found["unconfirmed"] == 0, f"{found['unconfirmed']} of {found['accepted']} samples"


@pytest.mark.parametrize(
    ("num_syncs", "num_directories"),
    [(8, 1000), pytest.param(40, 2, marks=pytest.mark.slow)],  # benchmarks.reliability has 200
)
@pytest.mark.timeout(1000)
async def test_servers_that_take_weights_half_way_answer_with_none_that_they_did_not_confirm(
    tmp_path: Path, num_syncs: int, num_directories: int
):
    with trio.fail_after(900.0):
        found = await sync_with_faults(tmp_path, num_syncs, num_directories, seed=1)
    assert found["accepted"] > 4 * num_syncs
    assert found["unconfirmed"] == 0, f"{found['unconfirmed']} of {found['accepted']} samples"
    assert found["wrong"] == 0, f"{found['wrong']} of {found['accepted']} samples have tokens of other weights than they name"
    assert found["took the last"] == 4
    if num_directories > num_syncs:
        assert found["all serve again"] == num_syncs
    else:  # what the fleet served was overwritten, so that nothing but the next sync can bring its members back
        assert found["succeeded where nobody served"] > 0

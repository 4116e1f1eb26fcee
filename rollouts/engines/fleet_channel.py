"""A WeightChannel to the members of a fleet: all take the weights in the same transfer, and the fleet knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from rollouts.engines.fleet import EngineFleet
from rollouts.engines.fleet_members import MemberState
from rollouts.engines.protocol import InferenceEngine, ReadBucket, WeightChannel
from rollouts.errors import EngineError, raise_single_errors
from rollouts.weight_plan import WeightSpec

PATIENCE_S = 300.0
"""Until every member is ready for a transfer. Members drain first, where the fleet says so."""


class FleetChannel:
    """The members of a fleet as one engine of a channel.

    A group has all of its members in every transfer: one that is down keeps the others from getting weights, and the error says so. A
    member that is started again is not part of the group any more.
    """

    def __init__(
        self, fleet: EngineFleet, engines: Sequence[InferenceEngine], inner: WeightChannel, *, patience_s: float = PATIENCE_S
    ) -> None:
        """
        Args:
            fleet: which updates all of its members at once.
            engines: its members, in the order of the inner channel.
        """
        self._fleet, self._engines, self._inner, self._patience_s = fleet, tuple(engines), inner, patience_s

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        return self._inner.wants_device

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """See WeightChannel. Returns: one answer, of the fleet."""
        down = [f"{member.name}: {member.reason}" for member in self._fleet.members if member.state is MemberState.DOWN]
        if down:
            raise EngineError(
                f"{len(down)} of {len(self._engines)} engines are down ({'; '.join(down)}), and a transfer is to all of them: start them "
                "again and resume the run, or sync weights from a directory"
            )
        missing = set(map(id, self._engines))
        everyone, done = trio.Event(), trio.Event()
        answers: dict[int, Mapping[str, Any]] = {}
        failures: list[EngineError] = []

        async def give(engine: InferenceEngine) -> Mapping[str, Any]:
            missing.discard(id(engine))
            if not missing:
                everyone.set()
            await done.wait()
            if failures:
                raise EngineError(str(failures[0])) from failures[0]
            return answers[id(engine)]

        async def transfer() -> None:
            try:
                with trio.move_on_after(self._patience_s):
                    await everyone.wait()
                if missing:
                    raise EngineError(
                        f"{len(missing)} of {len(self._engines)} engines were not ready for a transfer to all of them within "
                        f"{self._patience_s:g} s. Members: {', '.join(map(str, self._fleet.members))}"
                    )
                found = await self._inner.send_weights(specs, read, weight_version)
                answers.update({id(engine): answer for engine, answer in zip(self._engines, found, strict=True)})
            except EngineError as error:
                failures.append(error)
            done.set()

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(transfer)
                answer = await self._fleet.update_weights_with(give, weight_version)
                nursery.cancel_scope.cancel()
        return [answer]

"""A WeightChannel to the members of a fleet: all take the weights in the same transfer, known to the fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import MemberState
from rollouts.engines.protocol import InferenceEngine, ReadBucket, WeightChannel
from rollouts.errors import EngineError, EngineTimeout, raise_single_errors
from rollouts.weight_specs import WeightSpec


class FleetChannel:
    """Present the members of a fleet as one engine to a channel.

    A group needs all of its members in every transfer: a member that is down keeps the others from getting weights, and the error names
    it. A member that is restarted is no longer part of the group.
    """

    def __init__(self, fleet: EngineFleet, engines: Sequence[InferenceEngine], inner: WeightChannel) -> None:
        """
        Args:
            fleet: the fleet, which updates all of its members at once; FleetConfig.ready_s of it limits the wait for them.
            engines: its members, in the order of the inner channel.
        """
        self._fleet, self._engines, self._inner = fleet, tuple(engines), inner

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        return self._inner.wants_device

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """See WeightChannel. Returns: one answer, from the fleet."""
        self._check_members()
        missing = set(map(id, self._engines))
        everyone, done = trio.Event(), trio.Event()
        answers: dict[int, Mapping[str, Any]] = {}
        failures: list[EngineError] = []

        async def give(engine: InferenceEngine) -> Mapping[str, Any]:
            if not self._has(engine):
                raise EngineError(f"it joined {self._fleet.name} during a transfer that is not to it")
            missing.discard(id(engine))
            if not missing:
                everyone.set()
            await done.wait()
            if failures:
                raise EngineError(str(failures[0])) from failures[0]
            return answers[id(engine)]

        async def transfer() -> None:
            try:
                await self._wait_ready(everyone)
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

    async def _wait_ready(self, everyone: trio.Event) -> None:
        """Wait until every member is ready for the transfer. Raises EngineError as soon as one cannot be, EngineTimeout after ready_s."""
        failures: list[EngineError] = []
        config = self._fleet.config
        with trio.move_on_after(config.ready_s):
            async with trio.open_nursery() as nursery:

                async def look() -> None:
                    try:
                        while True:
                            self._check_members(joining_is_fine=True)
                            await self._fleet.wait_change()
                    except EngineError as error:
                        failures.append(error)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(look)
                await everyone.wait()
                nursery.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if not everyone.is_set():
            members = ", ".join(f"{member.name} is {member.state.value}" for member in self._fleet.members)
            raise EngineTimeout(
                f"not all of {len(self._engines)} engines were ready for a transfer to all of them within {config.ready_s:g} s "
                f"({config.name('ready_s')}): {members}"
            )

    def _has(self, engine: InferenceEngine) -> bool:
        return any(own is engine for own in self._engines)

    def _check_members(self, *, joining_is_fine: bool = False) -> None:
        """Raise EngineError unless the members of the fleet are exactly those of the group, and all of them can take weights."""
        present = self._fleet.engines
        gone = [_name(engine) for engine in self._engines if not any(engine is other for other in present)]
        if gone:
            raise EngineError(
                f"{len(gone)} of {len(self._engines)} engines of a group have left {self._fleet.name} ({', '.join(gone)}), and a transfer "
                "is to all of them: resume the run with the engines that there are, or sync weights from a directory"
            )
        new = [self._fleet.status_of(engine).name for engine in present if not self._has(engine)]
        if new and not joining_is_fine:
            raise EngineError(
                f"{', '.join(new)} joined {self._fleet.name} after its group was made, and a transfer does not reach it: resume the run "
                "with all engines, drain it, or sync weights from a directory"
            )
        states = [self._fleet.status_of(engine) for engine in self._engines]
        out = [f"{member.name}: {member.reason}" for member in states if member.state not in (MemberState.SERVING, MemberState.UPDATING)]
        if out:
            raise EngineError(
                f"{len(out)} of {len(self._engines)} engines are down or leave ({'; '.join(out)}), and a transfer is to all of them: start "
                "them again and resume the run, or sync weights from a directory"
            )


def _name(engine: InferenceEngine) -> str:
    return str(getattr(engine, "name", type(engine).__name__))

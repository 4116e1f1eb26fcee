"""New weights for a fleet: all members at once, or some at a time while the others generate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import trio

from rollouts.engines.fleet_health import FleetHealth, FleetWeights, confirm_update
from rollouts.engines.fleet_members import FleetConfig, Member, MemberState, Roster
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import EngineError, raise_single_errors

Give = Callable[[InferenceEngine], Awaitable[Mapping[str, Any]]]
"""Let an engine take the new weights, and return its answer. Raises EngineError."""


class FleetUpdates:
    """The updates of one fleet, one after another."""

    def __init__(self, roster: Roster, config: FleetConfig, health: FleetHealth) -> None:
        self._roster = roster
        self._config = config
        self._health = health

    async def update(self, weights: FleetWeights, give: Give) -> Mapping[str, Any]:
        """Bring new weights to every member that serves. Members that are down get them when they come back.

        Returns: {"success": True, "weight_version", "num_engines", "update_s", "failed": {name: reason}}.
        Raises: EngineError if no member took them, and all that did not die serve the old ones; or if one did not and failures are not
            excluded: then those that did serve the new ones, and the others are down until they have them.
        """
        begin = trio.current_time()
        members: list[Member] = []
        updated: list[Member] = []
        failures: dict[Member, EngineError] = {}
        while not members:
            # not under the lock, which a member needs to come back
            await self._roster.wait_serving(f"weight version {weights.version} was given to nobody")
            async with self._health.updating:
                members = self._roster.serving()
                if members:
                    await self._update_members(members, weights, give, updated, failures)
        self._check(members, failures, weights.version)
        return {
            "success": True,
            "weight_version": weights.version,
            "num_engines": len(updated),
            "update_s": trio.current_time() - begin,
            "failed": {member.name: str(error) for member, error in failures.items()},
        }

    async def _update_members(
        self,
        members: Sequence[Member],
        weights: FleetWeights,
        give: Give,
        updated: list[Member],
        failures: dict[Member, EngineError],
    ) -> None:
        try:
            await self._update_all(members, weights, give, updated, failures)
        finally:
            if updated:
                self._health.weights = weights
                self._roster.forget_homes()
            self._settle(members, updated, failures, weights.version)
        if not updated:
            await self._keep_serving(failures)

    async def _update_all(
        self,
        members: Sequence[Member],
        weights: FleetWeights,
        give: Give,
        updated: list[Member],
        failures: dict[Member, EngineError],
    ) -> None:
        waiting = iter(members)
        together = self._config.updates_at_once is None

        async def work() -> None:
            for member in waiting:
                if member.state is not MemberState.SERVING:  # it died, or left, while others were updated
                    continue
                self._roster.set_state(member, MemberState.UPDATING, "it is being given new weights")
                if self._config.drain_s:
                    with trio.move_on_after(self._config.drain_s):
                        await member.wait_idle()
                try:
                    answer = await give(member.engine)
                    await confirm_update(member, answer, weights.version)
                except EngineError as error:
                    failures[member] = error
                    continue
                member.version = weights.version
                updated.append(member)
                if not together:
                    self._roster.set_state(member, MemberState.SERVING)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for _ in range(len(members) if self._config.updates_at_once is None else min(self._config.updates_at_once, len(members))):
                    nursery.start_soon(work)

    def _settle(self, members: Sequence[Member], updated: Sequence[Member], failures: Mapping[Member, EngineError], version: int) -> None:
        """Let those serve that have the weights of the fleet, also where an update was cancelled; the others are looked at."""
        for member in updated:
            if member.state is MemberState.UPDATING:
                self._roster.set_state(member, MemberState.SERVING)
        for member in members:
            if member in updated:
                continue
            if member in failures:
                if updated:  # else _keep_serving decides
                    self._health.take_down(member, f"it did not take weight version {version}: {failures[member]}", needs_weights=True)
            elif member.state is MemberState.UPDATING:
                self._health.take_down(member, f"its update to weight version {version} was cancelled")
            elif updated and member.state is MemberState.SERVING:
                self._health.take_down(member, f"an update to weight version {version} was cancelled before it had these weights")

    async def _keep_serving(self, failures: Mapping[Member, EngineError]) -> None:
        """No member took the weights: those that still have the old ones go on with them."""

        async def keep(member: Member, failure: EngineError) -> None:
            try:
                found = await self._health.check(member)
            except EngineError as error:
                self._health.take_down(member, f"it did not take new weights ({failure}), and then: {error}")
                return
            if found == member.version:
                if member.state is MemberState.UPDATING:
                    self._roster.set_state(member, MemberState.SERVING)
            else:
                self._health.take_down(member, f"it says to have weight version {found}, but: {failure}", needs_weights=True)

        async with trio.open_nursery() as nursery:
            for member, failure in failures.items():
                nursery.start_soon(keep, member, failure)

    def _check(self, members: Sequence[Member], failures: Mapping[Member, EngineError], version: int) -> None:
        """Raise EngineError if the failures are too many."""
        has_new = [member for member in members if member.version == version and member not in failures]
        if has_new and (self._config.exclude_failed or not failures):
            return
        causes = (
            "; ".join(f"{member.name}: {type(error).__name__}: {error}" for member, error in failures.items()) or self._roster.describe()
        )
        state = "All go on with the weights that they had, as far as they live"
        if has_new:
            state = (
                f"{', '.join(member.name for member in has_new)} serve the new weights; the others get no requests until they have them. "
                "Where that is enough, set exclude_failed"
            )
        error = EngineError(
            f"{len(failures)} of {len(members)} engines of {self._roster.name} did not take weight version {version}. {causes}. {state}"
        )
        raise error from next(iter(failures.values()), None)

"""Weight updates of a fleet: all members at once, or some at a time while the others generate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from rollouts.engines.fleet.health import FleetHealth, FleetWeights, confirm_update
from rollouts.engines.fleet.members import FleetConfig, Member, MemberState, Roster
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import EngineError, raise_single_errors

Give = Callable[[InferenceEngine], Awaitable[Mapping[str, Any]]]
"""Update the weights of an engine, and return its answer. Raises EngineError."""


@dataclass(eq=False)
class _Progress:
    """Progress of an update."""

    members: Sequence[Member] = ()  # members to update
    was_out: bool = False  # whether no member served, so that these are down: they serve only if they take the weights
    begun: set[Member] = field(default_factory=set[Member])  # members that may have been told of the weights
    updated: list[Member] = field(default_factory=list[Member])
    failures: dict[Member, EngineError] = field(default_factory=dict[Member, EngineError])


class FleetUpdates:
    """Updates of one fleet, one after another."""

    def __init__(self, roster: Roster, config: FleetConfig, health: FleetHealth) -> None:
        self._roster = roster
        self._config = config
        self._health = health

    async def update(self, weights: FleetWeights, give: Give) -> Mapping[str, Any]:
        """Update every member that serves. Members that are down get the weights when they come back.

        If no member serves, those that are down but answer are updated: they may lack nothing but weights, because an earlier update
        failed half-way and what they had before cannot be given again.

        Returns: {"success": True, "weight_version", "num_engines", "update_s", "failed": {name: reason}}.
        Raises: EngineError if no member took the weights, and then all that served, and did not die, serve the old ones; or if one did not
            and failures are not excluded: then members that took them serve the new ones, and the others are down until they have them;
            or if no member answered for patience_s.
        """
        begin = trio.current_time()
        progress, num_tries = _Progress(), 0
        while not progress.begun:  # members that serve may go down before they are told
            alive = [] if self._roster.serving() else await self._health.find_alive()  # not under the lock, which a member needs, too
            async with self._health.updating:
                progress.members = self._roster.serving()
                progress.was_out = not progress.members
                if progress.was_out:
                    progress.members = [member for member in alive if member.state is MemberState.DOWN]
                if progress.members:
                    await self._update_members(progress, weights, give)
            if not progress.begun:  # not under the lock, which a member needs to come back
                num_tries += 1
                wait_s = self._config.wait_before_try(num_tries)
                await self._roster.wait_serving(f"weight version {weights.version} was given to nobody", wait_s)
        self._check(progress, weights.version)
        return {
            "success": True,
            "weight_version": weights.version,
            "num_engines": len(progress.updated),
            "update_s": trio.current_time() - begin,
            "failed": {member.name: str(error) for member, error in progress.failures.items()},
        }

    async def _update_members(self, progress: _Progress, weights: FleetWeights, give: Give) -> None:
        try:
            try:
                await self._update_all(progress, weights, give)
            finally:
                self._settle(progress, weights)
            if not progress.updated and not progress.was_out:
                await self._keep_serving(progress.failures)
        finally:
            for member, failure in progress.failures.items():
                if member.state is MemberState.UPDATING:  # the version of this member was not asked
                    reason = f"it did not take weight version {weights.version}: {failure}"
                    self._health.take_down(member, reason, needs_weights=progress.was_out)

    async def _update_all(self, progress: _Progress, weights: FleetWeights, give: Give) -> None:
        waiting = iter(progress.members)
        at_once = self._config.updates_at_once

        async def work() -> None:
            for member in waiting:
                if member.state is not (MemberState.DOWN if progress.was_out else MemberState.SERVING):
                    continue  # it died, or left, while others were updated
                self._roster.set_state(member, MemberState.UPDATING, "it is being given new weights")
                if progress.was_out:
                    await self._health.end_attempt(member)
                if self._config.drain_s:
                    with trio.move_on_after(self._config.drain_s):
                        await member.wait_idle()
                progress.begun.add(member)
                try:
                    with member.take_weights(weights.version):
                        answer = await give(member.engine)
                        await confirm_update(member, answer, weights.version)
                    if progress.was_out:
                        await self._health.generate_token(member, weights.version)
                except EngineError as error:
                    progress.failures[member] = error
                    continue
                member.version, member.needs_weights = weights.version, False
                progress.updated.append(member)
                if at_once is not None:
                    self._serve(progress, member)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for _ in range(len(progress.members) if at_once is None else min(at_once, len(progress.members))):
                    nursery.start_soon(work)

    def _settle(self, progress: _Progress, weights: FleetWeights) -> None:
        """Let members with the weights of the fleet serve, also after a cancelled update; the others are probed."""
        updated, failures, version = progress.updated, progress.failures, weights.version
        interrupted = [member for member in progress.begun if member not in updated and member not in failures]
        # no member has the new weights, but some may have a part of them, and the old ones cannot be given again: these take the new ones
        if updated or (interrupted and weights.can_be_given and not self._health.weights.can_be_given):
            self._health.weights = weights
            self._roster.forget_homes()
        for member in updated:
            self._serve(progress, member)
        is_new = self._health.weights is weights
        for member in progress.members:
            if member in updated:
                continue
            if member in failures:
                if is_new:  # else _keep_serving decides
                    self._health.take_down(member, f"it did not take weight version {version}: {failures[member]}", needs_weights=True)
            elif member in progress.begun:  # a part of the weights may be in place, whatever version it reports
                self._health.take_down(member, f"its update to weight version {version} was cancelled", needs_weights=True)
            elif is_new and member.state in (MemberState.SERVING, MemberState.UPDATING):
                self._health.take_down(member, f"an update to weight version {version} was cancelled before it had these weights")
            elif member.state is MemberState.UPDATING and progress.was_out:
                self._health.take_down(member, f"an update to weight version {version} was cancelled before it had begun")
            elif member.state is MemberState.UPDATING:  # its requests were still ending
                self._roster.set_state(member, MemberState.SERVING)

    def _serve(self, progress: _Progress, member: Member) -> None:
        if member.state is not MemberState.UPDATING:  # it serves already, was told to leave, or was found dead
            return
        self._roster.set_state(member, MemberState.SERVING)
        if progress.was_out:
            self._health.note_return(member)

    async def _keep_serving(self, failures: Mapping[Member, EngineError]) -> None:
        """After an update that no member took, keep members serving that still have the old weights."""

        async def keep(member: Member, failure: EngineError) -> None:
            try:
                found = await self._health.check(member)
            except EngineError as error:
                self._health.take_down(member, f"it did not take new weights ({failure}), and then: {error}")
                return
            if member.needs_weights:
                self._health.take_down(member, f"it sampled with weights that it did not confirm, and: {failure}", needs_weights=True)
            elif found == member.version:
                if member.state is MemberState.UPDATING:
                    self._roster.set_state(member, MemberState.SERVING)
            else:
                self._health.take_down(member, f"it says to have weight version {found}, but: {failure}", needs_weights=True)

        async with trio.open_nursery() as nursery:
            for member, failure in failures.items():
                nursery.start_soon(keep, member, failure)

    def _check(self, progress: _Progress, version: int) -> None:
        """Raise EngineError if there are too many failures."""
        members, failures = progress.members, progress.failures
        has_new = [member for member in members if member.version == version and member not in failures]
        if has_new and (self._config.exclude_failed or not failures):
            return
        causes = (
            "; ".join(f"{member.name}: {type(error).__name__}: {error}" for member, error in failures.items()) or self._roster.describe()
        )
        state = "All go on with the weights that they had, as far as they live"
        if progress.was_out:
            state = "None of them served before, and none does now: the next sync is given to all that answer"
        if has_new:
            state = (
                f"{', '.join(member.name for member in has_new)} serve the new weights; the others get no requests until they have them. "
                "Where that is enough, set exclude_failed"
            )
        error = EngineError(
            f"{len(failures)} of {len(members)} engines of {self._roster.name} did not take weight version {version}. {causes}. {state}"
        )
        raise error from next(iter(failures.values()), None)

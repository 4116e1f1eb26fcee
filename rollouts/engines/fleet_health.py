"""Whether the members of a fleet are alive, and how one that was not comes back.

Each member has a task that looks at it. A member that failed gets no requests; it is asked for its version at once, and if it does not
answer, what it has in flight is taken from it. Then it is tried again, less and less often: it must answer, have the weights of the fleet
or take them, and generate a token that carries their version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from torch import Tensor

from rollouts.engines.fleet_members import FleetConfig, Member, MemberState, Roster
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, InMemoryWeightUpdates
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout
from rollouts.types import SamplingParams

_TEST_TOKEN = 3
"""Any token: a model of 4 tokens has it."""


@dataclass(frozen=True, eq=False)
class FleetWeights:
    """The weights that members serve, as far as they can be given again. Neither source: those the engines came with."""

    version: int
    directory: Path | None = None
    tensors: Mapping[str, Tensor] | None = None

    @property
    def can_be_given(self) -> bool:
        """Whether a member that lost them can have them again."""
        return self.directory is not None or self.tensors is not None


async def ask_version(member: Member, check_s: float) -> int:
    """What version the member says it has. Raises EngineError, EngineTimeout."""
    with trio.move_on_after(check_s):
        return await member.engine.get_weight_version()
    raise EngineTimeout(f"{member.name} did not say its weight version within {check_s:g} s")


async def give_weights(member: Member, weights: FleetWeights) -> None:
    """Let the member load the weights of the fleet. Raises EngineError if it does not have them afterwards."""
    member.note_update(weights.version)
    if weights.tensors is not None:
        assert isinstance(member.engine, InMemoryWeightUpdates), f"{member.name} takes no weights in memory"
        answer = await member.engine.update_weights(weights.tensors, weights.version)
    elif weights.directory is not None:
        answer = await member.engine.update_weights_from_checkpoint(weights.directory)
    else:
        raise EngineError(
            f"{member.name} cannot be given weight version {weights.version}: the fleet was not told where these weights are. Sync the "
            "weights, or pass initial_weights="
        )
    await confirm_update(member, answer, weights.version)


async def confirm_update(member: Member, answer: Mapping[str, Any], version: int) -> None:
    """Compare what the member answered to an update, what it says when asked, and what was meant. Raises EngineError."""
    if answer.get("success") is not True or "weight_version" not in answer:
        raise EngineProtocolError(f'its answer is {dict(answer)!r}, expected {{"success": True, "weight_version": int}}')
    actual = await member.engine.get_weight_version()
    for found in (answer["weight_version"], actual):
        if found != version:
            raise EngineProtocolError(
                f"it reports weight version {found} after an update to {version}: name the version in a {WEIGHT_VERSION_FILE} beside the "
                "weights, and let nobody else update this engine"
            )


class FleetHealth:
    """The tasks that look at the members."""

    def __init__(self, roster: Roster, config: FleetConfig, say: Callable[[str], None], initial: FleetWeights) -> None:
        self.weights = initial  # that a member must have to serve
        self.updating = trio.Lock()  # held while weights change: nobody begins to serve in the middle
        self.num_failures = 0  # of members, so far
        self.num_returns = 0
        self._roster = roster
        self._config = config
        self._say = say

    def note_failure(self, member: Member, error: Exception) -> None:
        """A member failed a request or an update: it gets no more until it was looked at."""
        if member.state is not MemberState.SERVING:
            return  # whoever changed its state looks at it
        member.num_failures += 1
        self.take_down(member, f"{type(error).__name__}: {error}")

    def take_down(self, member: Member, reason: str, *, needs_weights: bool = False) -> None:
        """Send it nothing until it has been looked at.

        Args:
            needs_weights: whether it must be given weights whatever version it names. What it has in flight then goes elsewhere: nobody
                knows which weights sample it.
        """
        if needs_weights:
            member.interrupt()
        if member.state in (MemberState.GONE, MemberState.DRAINING):
            return
        self.num_failures += 1
        member.needs_weights |= needs_weights
        member.num_failures = max(member.num_failures, 1)
        self._roster.set_state(member, MemberState.DOWN, reason)
        left = len(self._roster.serving())
        self._say(f"{member.name} is down, {left} of {len(self._roster.members)} engines of {self._roster.name} serve: {reason}")

    async def watch(self, member: Member) -> None:
        """Look at a member until it has left."""
        while member.state is not MemberState.GONE:
            if member.state is MemberState.DOWN:
                await self._bring_back(member)
                continue
            member.woken = trio.Event()
            with trio.move_on_after(self._config.check_every_s) as waited:
                await member.woken.wait()
            if waited.cancelled_caught and member.state is MemberState.SERVING:
                try:
                    await self.check(member)
                except EngineError as error:
                    self.note_failure(member, error)

    async def check(self, member: Member) -> int:
        """Ask a member for its version; it must be the one that was confirmed. Raises EngineError."""
        before = member.version
        found = await ask_version(member, self._config.check_s)
        if found not in (before, member.version) and member.state is MemberState.SERVING:
            raise EngineProtocolError(
                f"{member.name} has weight version {found}, but {member.version} was confirmed: it was started again, or another program "
                "updates it"
            )
        return found

    async def join(self, member: Member) -> None:
        """Give a member that does not serve the weights of the fleet, if it has others, and let it serve. Raises EngineError."""
        member.is_returning = True
        try:
            await self._join(member)
        finally:
            member.is_returning = False

    async def _join(self, member: Member) -> None:
        while True:
            async with self.updating:  # a sync that is under way decides which weights those are
                weights = self.weights
            found = await self._try_version(member)
            if member.needs_weights or found != weights.version:
                await give_weights(member, weights)
            await self._generate_token(member, weights.version)
            async with self.updating:
                if weights is self.weights:
                    member.version, member.needs_weights = weights.version, False
                    if member.state in (MemberState.JOINING, MemberState.DOWN):  # else it was told to leave meanwhile
                        self._roster.set_state(member, MemberState.SERVING)
                    return

    async def _try_version(self, member: Member) -> int | None:
        """The version that it says it has; None = none that can be understood, as after a restart."""
        try:
            return await ask_version(member, self._config.check_s)
        except EngineProtocolError:
            return None

    async def _generate_token(self, member: Member, version: int) -> None:
        params = SamplingParams(max_tokens=1)
        completions: list[tuple[int, ...]] = []
        try:
            with trio.move_on_after(self._config.check_s):
                found = await member.engine.generate((_TEST_TOKEN,), params)
                completions.append(found.output_versions)
        except EngineError:
            member.needs_weights = True  # perhaps that helps, the next time
            raise
        if not completions:
            raise EngineTimeout(f"{member.name} generated no token within {self._config.check_s:g} s")
        if any(found != version for found in completions[0]):
            member.needs_weights = True
            raise EngineProtocolError(f"{member.name} generated with weight version {completions[0]}, expected {version}")

    async def _bring_back(self, member: Member) -> None:
        """Look at once; then try again and again, until it serves or has left."""
        try:
            await self._try_version(member)
        except EngineError as error:
            member.reason = f"{member.reason}; asked for its version: {error}" if str(error) not in member.reason else member.reason
            member.interrupt()
        while member.state is MemberState.DOWN:
            member.woken = trio.Event()
            with trio.move_on_after(self._config.wait_before_try(member.num_failures)):
                await member.woken.wait()
            if member.state is not MemberState.DOWN:
                return
            try:
                await self.join(member)
            except EngineError as error:
                member.num_failures += 1
                member.reason = f"{type(error).__name__}: {error}"
                member.interrupt()
            else:
                if not member.is_in(MemberState.SERVING):
                    return
                self.num_returns += 1
                self._say(f"{member.name} is back with weight version {member.version}")

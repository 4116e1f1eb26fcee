"""Health checks of the members of a fleet, and recovery after failures.

Each member has a task that probes it. A member that failed gets no requests; it is asked for its version at once, and if it does not
answer, its requests in flight are moved. Then it is probed again, at growing intervals: it must answer, have the weights of the fleet
or take them, and generate a token that carries their version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from torch import Tensor

from rollouts.engines.fleet.members import FleetConfig, Member, MemberState, Roster
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, EngineFeature, require_engine_feature
from rollouts.engines.weights.checkpoint_check import Fingerprint, read_fingerprint
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout, raise_single_errors
from rollouts.types import SamplingParams

_TEST_TOKEN = 3
"""Any token id below 4: the smallest models have 4 tokens."""


@dataclass(frozen=True, eq=False)
class FleetWeights:
    """The weights that members serve, and their source, to give them again. Without either source: the weights at the engines' start."""

    version: int
    directory: Path | None = None
    fingerprint: Fingerprint | None = None  # fingerprint of the directory's files; None = do not compare it before they are given again
    tensors: Mapping[str, Tensor] | None = None

    @property
    def can_be_given(self) -> bool:
        """Whether a member that lost them can be given them again."""
        return self.directory is not None or self.tensors is not None


async def ask_version(member: Member, config: FleetConfig) -> int:
    """Return the version that the member reports. Raises EngineError, EngineTimeout."""
    with trio.move_on_after(config.check_s):
        return await member.engine.get_weight_version()
    raise EngineTimeout(f"{member.name} did not say its weight version within {config.check_s:g} s ({config.name('check_s')})")


async def give_weights(member: Member, weights: FleetWeights) -> None:
    """Load the weights of the fleet on the member. Raises EngineError if it does not have them afterwards."""
    with member.take_weights(weights.version):
        if weights.tensors is not None:
            taker = require_engine_feature(member.engine, EngineFeature.MEMORY_UPDATES, "an update of a fleet in memory")
            answer = await taker.update_weights(weights.tensors, weights.version)
        elif weights.directory is not None:
            await _check_files(member, weights, weights.directory)
            answer = await member.engine.update_weights_from_checkpoint(weights.directory)
        else:
            raise EngineError(
                f"{member.name} cannot be given weight version {weights.version}: the fleet was not told where these weights are. Sync "
                "the weights, or pass initial_weights="
            )
        await confirm_update(member, answer, weights.version)


async def _check_files(member: Member, weights: FleetWeights, directory: Path) -> None:
    """Raise EngineError if the files of the weights were replaced or removed since the fleet was given them."""
    if weights.fingerprint is not None and await _find_fingerprint(directory) != weights.fingerprint:
        raise EngineError(
            f"{member.name} cannot be given weight version {weights.version} again: {directory} no longer holds the files that were "
            "synced. Sync the weights, and export each version to a directory of its own, which stays until the next sync has succeeded"
        )


async def _find_fingerprint(directory: Path) -> Fingerprint | None:
    try:
        return await trio.to_thread.run_sync(read_fingerprint, directory)
    except OSError:  # the export of a version that is no longer needed is being removed
        return None


async def confirm_update(member: Member, answer: Mapping[str, Any], version: int) -> None:
    """Check that a member's answer to an update and the version that it then reports equal `version`, which makes it a confirmed one.

    Raises: EngineError.
    """
    if answer.get("success") is not True or "weight_version" not in answer:
        raise EngineProtocolError(f'its answer is {dict(answer)!r}, expected {{"success": True, "weight_version": int}}')
    actual = await member.engine.get_weight_version()
    for found in (answer["weight_version"], actual):
        if found != version:
            raise EngineProtocolError(
                f"it reports weight version {found} after an update to {version}: name the version in a {WEIGHT_VERSION_FILE} beside the "
                "weights, and let nobody else update this engine"
            )
    member.note_confirmed(version)


class FleetHealth:
    """Tasks that probe the members."""

    def __init__(self, roster: Roster, config: FleetConfig, say: Callable[[str], None], initial: FleetWeights) -> None:
        self.weights = initial  # weights that a member must have to serve
        self.updating = trio.Lock()  # held while weights change: no member begins to serve in between
        self.num_failures = 0  # failures of members so far
        self.num_returns = 0
        self._roster = roster
        self._config = config
        self._say = say

    def note_failure(self, member: Member, error: Exception) -> None:
        """Note that a member failed a request or an update: it gets no requests until it is probed."""
        if member.state is not MemberState.SERVING:
            return  # the task that changed its state probes it
        member.num_failures += 1
        self.take_down(member, f"{type(error).__name__}: {error}")

    def take_down(self, member: Member, reason: str, *, needs_weights: bool = False) -> None:
        """Send the member no requests until it has been probed.

        Args:
            needs_weights: whether it must be given weights whatever version it reports. Its requests in flight then go elsewhere: the
                weights that sample them are unknown.
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
        """Probe a member until it has left."""
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
        """Ask a member for its version, which must be the confirmed one. Raises EngineError."""
        before = member.version
        found = await ask_version(member, self._config)
        if found not in (before, member.version) and member.state is MemberState.SERVING:
            raise EngineProtocolError(
                f"{member.name} has weight version {found}, but {member.version} was confirmed: it was started again, or another program "
                "updates it"
            )
        return found

    async def join(self, member: Member) -> None:
        """Give a member that does not serve the weights of the fleet, unless it has them, and let it serve. Raises EngineError."""
        async with member.returning:
            await self._join(member)

    async def _join(self, member: Member) -> None:
        while True:
            async with self.updating:  # a sync in progress decides the weights
                weights = self.weights
            found = await self._try_version(member)
            if member.needs_weights or found != weights.version:
                await give_weights(member, weights)
            await self.generate_token(member, weights.version)
            async with self.updating:
                if weights is self.weights:
                    member.version, member.needs_weights = weights.version, False
                    if member.state in (MemberState.JOINING, MemberState.DOWN):  # else it was told to leave meanwhile
                        self._roster.set_state(member, MemberState.SERVING)
                    return

    async def _try_version(self, member: Member) -> int | None:
        """Return the version that the member reports; None = not intelligible, as after a restart."""
        try:
            return await ask_version(member, self._config)
        except EngineProtocolError:
            return None

    async def generate_token(self, member: Member, version: int) -> None:
        """Let a member that comes back generate a token, which must carry the version. Raises EngineError."""
        params = SamplingParams(max_tokens=1)
        completions: list[tuple[int, ...]] = []
        try:
            with trio.move_on_after(self._config.check_s):
                found = await member.engine.generate((_TEST_TOKEN,), params)
                completions.append(found.output_versions)
        except EngineError:
            member.needs_weights = True  # may help at the next try
            raise
        if not completions:
            limit = f"{self._config.check_s:g} s ({self._config.name('check_s')})"
            raise EngineTimeout(f"{member.name} generated no token within {limit}")
        if any(found != version for found in completions[0]):
            member.needs_weights = True
            raise EngineProtocolError(f"{member.name} generated with weight version {completions[0]}, expected {version}")

    async def _bring_back(self, member: Member) -> None:
        """Probe at once, then repeatedly, until the member serves or has left."""
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
                with trio.CancelScope() as member.attempt:
                    await self.join(member)
                if member.attempt.cancelled_caught:
                    continue
            except EngineError as error:
                if member.is_in(MemberState.UPDATING):  # a sync has taken it over
                    return
                member.num_failures += 1
                member.reason = f"{type(error).__name__}: {error}"
                member.interrupt()
            else:
                if not member.is_in(MemberState.SERVING):
                    return
                self.note_return(member)

    def note_return(self, member: Member) -> None:
        """Note that a member that was down serves again."""
        self.num_returns += 1
        self._say(f"{member.name} is back with weight version {member.version}")

    async def find_alive(self) -> list[Member]:
        """Return the members that are down but answer, by number: weights may be all that they lack."""
        alive: set[Member] = set()

        async def ask(member: Member) -> None:
            with suppress(EngineError):
                await self._try_version(member)
                alive.add(member)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for member in self._roster.members.values():
                    if member.state is MemberState.DOWN:
                        nursery.start_soon(ask, member)
        return [member for member in self._roster.members.values() if member in alive and member.state is MemberState.DOWN]

    async def end_attempt(self, member: Member) -> None:
        """End a member's attempt to come back, so that it can be given other weights. Its state is no longer DOWN: no other begins."""
        member.attempt.cancel()
        async with member.returning:
            pass

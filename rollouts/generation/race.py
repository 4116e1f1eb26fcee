"""Race of many groups: the first ones win, the others are stopped, and their unfinished samples are kept."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import trio

from rollouts.checks import describe_function, require_flag
from rollouts.errors import GenerationError, raise_single_errors
from rollouts.generation.contract import PendingGroup, is_finished, note_prompt
from rollouts.types import FilterFn, Group, Prompt

_Arrival: TypeAlias = "tuple[int, Group | None]"
_SETTLING_PASSES = 5


@dataclass(frozen=True, kw_only=True)
class CollectedGroups:
    """Result of a race. Every group is in exactly one of the fields; each field is in the order of the prompts."""

    kept: tuple[Group, ...]  # first num_wanted groups that passed `keep`
    overflow: tuple[Group, ...]  # finished and passed too, but later
    rejected: tuple[Group, ...]  # finished, did not pass
    partial: tuple[PendingGroup, ...]  # unfinished: stopped with some of their tokens, or cancelled and as they were issued
    dropped: tuple[Prompt, ...]  # prompts for which `generate` returned None


async def collect_groups(
    issued: Sequence[PendingGroup],
    generate: Callable[[PendingGroup], Awaitable[Group | None]],
    *,
    num_wanted: int,
    keep: FilterFn | None = None,
    stop: Callable[[], Awaitable[object]] | None = None,
    grace_s: float = 0.0,
    abort: trio.Event | None = None,
) -> CollectedGroups:
    """Race all groups; when num_wanted have passed `keep`, stop the rest and return. No task outlives the call.

    Stopping means: `stop` is called, which makes pending generate() calls return unfinished groups; calls that have not returned grace_s
    later are cancelled. Groups that arrive at the same moment count as arrived in the order of `issued`.

    Args:
        issued: the groups to generate, in the order of their prompts.
        generate: function that makes a group, with its rewards if `keep` looks at them; None as its result = drop the group.
        num_wanted: in [1, len(issued)].
        keep: Group -> True if it counts; sync or async. Called once for each finished group, one after another in order of arrival
            (again for a group whose answer the grace period cut short); None = keep all.
        stop: for example engine.abort; None = nothing can be told to stop.
        grace_s: seconds between stop and cancellation.
        abort: event that stops the race as if num_wanted groups had arrived.

    Raises: the errors of generate, keep and stop, after all other groups are cancelled: the error itself, or an ExceptionGroup where
        several failed at once.
    """
    assert 0 < num_wanted <= len(issued), f"num_wanted is {num_wanted}, expected in [1, {len(issued)}], the number of issued groups"
    send, receive = trio.open_memory_channel[tuple[int, Group | None]](len(issued))
    arrivals: list[_Arrival] = []
    race = _Race(issued, num_wanted, keep)
    stopping = trio.Event()
    deadline = trio.CancelScope()

    async def run_one(position: int) -> None:
        with note_prompt(issued[position].prompt):
            group = await generate(issued[position])
        send.send_nowait((position, group))  # the channel has room for all: no result is lost to a cancellation

    async def end_race() -> None:
        if not stopping.is_set():
            stopping.set()
            deadline.deadline = trio.current_time() + grace_s
            if stop is not None:
                await stop()

    async def end_on(event: trio.Event) -> None:
        await event.wait()
        await end_race()

    with raise_single_errors(), deadline:
        async with trio.open_nursery() as nursery:
            for position in range(len(issued)):
                nursery.start_soon(run_one, position)
            if abort is not None:
                nursery.start_soon(end_on, abort)
            while race.num_outstanding:
                await _receive_settled(receive, arrivals)
                await race.take(arrivals)
                if race.is_won and race.num_outstanding:
                    await end_race()
            nursery.cancel_scope.cancel()  # only end_on can still be there
    _receive_waiting(receive, arrivals)
    await race.take(arrivals)
    return race.result()


class _Race:
    """State of one collect_groups call: the place of each group that has ended."""

    def __init__(self, issued: Sequence[PendingGroup], num_wanted: int, keep: FilterFn | None) -> None:
        self._issued, self._num_wanted, self._keep = issued, num_wanted, keep
        self._outstanding = set(range(len(issued)))
        self._kept: dict[int, Group] = {}
        self._overflow: dict[int, Group] = {}
        self._rejected: dict[int, Group] = {}
        self._stopped: dict[int, Group] = {}

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def is_won(self) -> bool:
        return len(self._kept) == self._num_wanted

    async def take(self, arrivals: list[_Arrival]) -> None:
        """Give each arrived group its place, and empty the list; after a cancellation the groups without a place stay in it."""
        arrivals.sort(key=lambda arrival: arrival[0])
        while arrivals:
            position, group = arrivals[0]
            if group is not None:
                with note_prompt(self._issued[position].prompt):
                    place = await self._choose_place(group)
                place[position] = group
            self._outstanding.remove(position)
            del arrivals[0]

    async def _choose_place(self, group: Group) -> dict[int, Group]:
        if not is_finished(group):
            return self._stopped
        if self._keep is not None:
            verdict: Any = self._keep(group)
            verdict = await verdict if inspect.isawaitable(verdict) else verdict
            if not require_flag(verdict, f"keep {describe_function(self._keep)}", error=GenerationError):
                return self._rejected
        return self._overflow if self.is_won else self._kept

    def result(self) -> CollectedGroups:
        partial = {position: self._issued[position] for position in self._outstanding}
        partial |= {position: replace(self._issued[position], samples=group) for position, group in self._stopped.items()}
        returned = (self._kept, self._overflow, self._rejected, partial)
        dropped = [pending.prompt for position, pending in enumerate(self._issued) if not any(position in place for place in returned)]
        return CollectedGroups(
            kept=_in_order(self._kept),
            overflow=_in_order(self._overflow),
            rejected=_in_order(self._rejected),
            partial=tuple(partial[position] for position in sorted(partial)),
            dropped=tuple(dropped),
        )


def _in_order(groups: Mapping[int, Group]) -> tuple[Group, ...]:
    return tuple(groups[position] for position in sorted(groups))


async def _receive_settled(receive: trio.MemoryReceiveChannel[_Arrival], arrivals: list[_Arrival]) -> None:
    """Wait for an arrival, then append all groups that arrive at the same moment to `arrivals`.

    Requests that end in one decode step end in tasks that trio runs in random order. A few passes of the scheduler let all of them
    through, so that their order is decided by the caller and not by chance.
    """
    arrivals.append(await receive.receive())
    quiet = 0
    while quiet < _SETTLING_PASSES:
        await trio.lowlevel.checkpoint()
        quiet = 0 if _receive_waiting(receive, arrivals) else quiet + 1


def _receive_waiting(receive: trio.MemoryReceiveChannel[_Arrival], arrivals: list[_Arrival]) -> int:
    """Append the groups that have arrived, without waiting; return their number."""
    count = receive.statistics().current_buffer_used
    arrivals.extend(receive.receive_nowait() for _ in range(count))
    return count

"""A race of many groups: the first that are wanted win, the rest is stopped, and what it returns is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import trio

from rollouts.errors import raise_single_errors
from rollouts.generate_fns import PendingGroup, is_finished, note_prompt
from rollouts.types import Group, Prompt

_Arrival: TypeAlias = "tuple[int, Group | None]"
_SETTLING_PASSES = 5


@dataclass(frozen=True, kw_only=True)
class CollectedGroups:
    """How a race ended. Every group that was in it is in exactly one of the fields; each field is in the order of the prompts."""

    kept: tuple[Group, ...]  # the first num_wanted that passed `keep`
    overflow: tuple[Group, ...]  # finished and passed too, but later
    rejected: tuple[Group, ...]  # finished, did not pass
    partial: tuple[PendingGroup, ...]  # unfinished: stopped with some of their tokens, or cancelled and as they were issued
    dropped: tuple[Prompt, ...]  # whose generation gave None


async def collect_groups(
    issued: Sequence[PendingGroup],
    generate: Callable[[PendingGroup], Awaitable[Group | None]],
    *,
    num_wanted: int,
    keep: Callable[[Group], bool] | None = None,
    stop: Callable[[], Awaitable[object]] | None = None,
    grace_s: float = 0.0,
    abort: trio.Event | None = None,
) -> CollectedGroups:
    """Race all groups; when num_wanted have passed `keep`, stop the rest and return. No task outlives the call.

    Stopping means: `stop` is called, which makes pending generate() calls return unfinished groups; what has not returned grace_s
    later is cancelled. Groups that arrive at the same moment count as arrived in the order of `issued`.

    Args:
        issued: the groups to generate, in the order of their prompts.
        generate: makes a group, with its rewards if `keep` looks at them; None = drop this group.
        num_wanted: in [1, len(issued)].
        keep: called once for each finished group, in order of arrival; None = keep all.
        stop: for example engine.abort; may be None if nothing can be told to stop.
        grace_s: seconds between stop and cancellation.
        abort: once set, the race is stopped as if num_wanted groups had arrived.

    Raises: what generate, keep or stop raises, after all other groups are cancelled: the error itself, or an ExceptionGroup where
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
        send.send_nowait((position, group))  # there is room for all: a result that is there is never lost to a cancellation

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
                race.take(arrivals)
                if race.is_won and race.num_outstanding:
                    await end_race()
            nursery.cancel_scope.cancel()  # only end_on can still be there
    _receive_waiting(receive, arrivals)
    race.take(arrivals)
    return race.result()


class _Race:
    """The state of one collect_groups call: which group ended how."""

    def __init__(self, issued: Sequence[PendingGroup], num_wanted: int, keep: Callable[[Group], bool] | None) -> None:
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

    def take(self, arrivals: list[_Arrival]) -> None:
        """Give each arrived group its place, and empty the list."""
        for position, group in sorted(arrivals, key=lambda arrival: arrival[0]):
            self._outstanding.remove(position)
            if group is not None:
                with note_prompt(self._issued[position].prompt):
                    self._choose_place(group)[position] = group
        arrivals.clear()

    def _choose_place(self, group: Group) -> dict[int, Group]:
        if not is_finished(group):
            return self._stopped
        if self._keep is not None and not self._keep(group):
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
    """Wait for an arrival, then append to `arrivals` what arrives at the same moment.

    Requests that end in one decode step end in tasks that trio runs in random order. A few passes of the scheduler let all of them
    through, so that their order is decided by the caller and not by chance.
    """
    arrivals.append(await receive.receive())
    quiet = 0
    while quiet < _SETTLING_PASSES:
        await trio.lowlevel.checkpoint()
        quiet = 0 if _receive_waiting(receive, arrivals) else quiet + 1


def _receive_waiting(receive: trio.MemoryReceiveChannel[_Arrival], arrivals: list[_Arrival]) -> int:
    """Append what is there without waiting; return how many."""
    count = receive.statistics().current_buffer_used
    arrivals.extend(receive.receive_nowait() for _ in range(count))
    return count

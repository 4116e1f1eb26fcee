"""Asynchronous rollouts as one value: RolloutState, and the small values that it consists of. The functions of transitions.py change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollouts.asynchronous.capacity import RolloutCounts
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.queue import TimedResult
from rollouts.generation.contract import PendingGroup
from rollouts.types import Group

Value = TypeVar("Value")

_LEAF, _BRANCH = 5, 10  # bits of an index within a leaf, and within a branch


class ByIndex(Mapping[int, Value], Generic[Value]):
    """Immutable mapping from the index of a prompt, iterated in the order of index.

    A changed copy shares all leaves and branches without a changed index, so that a change costs the same with a hundred thousand entries.
    """

    __slots__ = ("_branches", "_size")

    def __init__(self, items: Iterable[tuple[int, Value]] = ()) -> None:
        # leaves by index >> _LEAF, in branches by index >> _BRANCH; none is empty
        self._branches: dict[int, dict[int, dict[int, Value]]] = {}
        for index, value in items:
            self._branches.setdefault(index >> _BRANCH, {}).setdefault(index >> _LEAF, {})[index] = value
        self._size = sum(len(leaf) for branch in self._branches.values() for leaf in branch.values())

    def __getitem__(self, index: int) -> Value:
        return self._branches[index >> _BRANCH][index >> _LEAF][index]

    def __iter__(self) -> Iterator[int]:
        branches = (branch for _, branch in sorted(self._branches.items()))
        return (index for branch in branches for number in sorted(branch) for index in sorted(branch[number]))

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    @property
    def first(self) -> float:
        """Lowest index; infinity if there is none."""
        if not self._branches:
            return math.inf
        branch = self._branches[min(self._branches)]
        return min(branch[min(branch)])

    def having(self, items: Mapping[int, Value]) -> ByIndex[Value]:
        """Return the mapping with these items added or replaced."""
        edited, copied = self._copy(), dict[int, dict[int, Value]]()
        for index, value in items.items():
            leaf = edited._open(index, copied)
            edited._size += index not in leaf
            leaf[index] = value
        return edited

    def without(self, indices: Iterable[int]) -> ByIndex[Value]:
        """Return the mapping without those of these indices that it has."""
        if not self._size:
            return self
        edited, copied = self._copy(), dict[int, dict[int, Value]]()
        for index in indices:
            leaf = edited._open(index, copied)
            if index in leaf:
                del leaf[index]
                edited._size -= 1
        for number, leaf in copied.items():
            if not leaf:
                above = number >> (_BRANCH - _LEAF)
                del edited._branches[above][number]
                if not edited._branches[above]:
                    del edited._branches[above]
        return edited

    def _copy(self) -> ByIndex[Value]:
        """Return a copy that shares all branches, to be edited by the method that made it."""
        edited: ByIndex[Value] = object.__new__(ByIndex)
        edited._branches, edited._size = self._branches.copy(), self._size
        return edited

    def _open(self, index: int, copied: dict[int, dict[int, Value]]) -> dict[int, Value]:
        """Return the leaf of an index in this copy: its own, which is among those that were copied from now on."""
        number = index >> _LEAF
        leaf = copied.get(number)
        if leaf is None:
            above = index >> _BRANCH
            branch = self._branches[above] = self._branches.get(above, {}).copy()
            leaf = copied[number] = branch[number] = branch.get(number, {}).copy()
        return leaf


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    """Policies of the transitions; constant during a run."""

    asynchronous: AsyncConfig
    max_refused: int  # groups that may be refused, dropped or too old for one batch before it is an error
    on_demand: bool = False  # start no more rollouts than wait() has requested

    @property
    def in_order(self) -> bool:
        """Whether groups are handed out strictly in the order of their prompts."""
        return self.asynchronous.order == "submitted" or self.asynchronous.max_staleness == 0


@dataclass(frozen=True)
class Waiting:
    """A prompt that waits for its start."""

    pending: PendingGroup
    begun_version: int | None = None  # lower bound of the first token's weight version; None = there is no token


@dataclass(frozen=True)
class Running:
    """A running rollout."""

    pending: PendingGroup  # samples that wait again if the rollout is stopped now
    begun_version: int  # lower bound of the first token's weight version
    scoring: bool = False  # generated; rewards and filter are running
    failed: bool = False  # raised an error; engines are probed
    timed_out: bool = False  # told to stop because rollout_timeout_s has passed
    outdated: bool = False  # told to stop because its tokens may be too old
    cut: bool = False  # cancelled because it did not obey an abort


@dataclass(frozen=True)
class Attempts:
    """Failed attempts at one prompt."""

    failed: int = 0
    stale: int = 0
    unchanged_at: int | None = None  # weight version under which the rollout returned unfinished and unchanged
    silent_since: int | None = None  # num_ended when the rollout first failed with an error typical of dead engines


@dataclass(frozen=True)
class Refused:
    """Groups refused since groups were last handed out."""

    num_refused: int = 0  # refused by filter_fn, or dropped
    num_dropped: int = 0  # part of num_refused: groups that could not be generated or scored
    num_stale: int = 0
    filtered: tuple[Group, ...] = ()  # the newest groups that filter_fn refused


@dataclass(frozen=True)
class Stopped:
    """Outcome of a rollout that was aborted or cancelled before its end."""

    cancelled: bool = False
    unchanged: bool = False  # returned unfinished and without new tokens, although nothing here stopped it


@dataclass(frozen=True)
class Failed:
    """Outcome of a rollout that raised."""

    error: Exception
    may_be_outage: bool = False  # the error may come from a dead engine
    engines_answer: bool | None = None  # True = all answer; False = none does; None = some do, or unknown
    silent_engines: str = ""  # engines that do not answer, with their errors


@dataclass(frozen=True)
class Scored:
    """Outcome of a rollout that ended by itself."""

    group: Group | None  # with rewards; None = a sample or its reward failed, and the group is dropped
    passes: bool  # whether filter_fn accepts the group
    before: Group = ()  # the group as it was when scoring began


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """State that decides the next groups, besides the contents of queue and cache and the position in the data.

    A prompt taken from the data is in one place until its group is handed out or given up: waiting, running, held, queue or cache.
    """

    version: int = 0  # weight version that generates
    waiting: ByIndex[Waiting] = field(default_factory=ByIndex[Waiting])
    # earliest starts of waiting rollouts, where they have one, in seconds of trio's clock
    delayed: ByIndex[float] = field(default_factory=ByIndex[float])
    running: ByIndex[Running] = field(default_factory=ByIndex[Running])
    held: tuple[TimedResult, ...] = ()  # finished groups that wait for their turn or for space in the queue, the next one first
    attempts: ByIndex[Attempts] = field(default_factory=ByIndex[Attempts])  # only prompts that have any
    edited: frozenset[int] = frozenset()  # indices whose samples are being edited: they neither start nor end
    is_edited: bool = False  # an edit is in progress: nothing is collected or handed out
    interrupted: bool = False  # no rollout starts
    accepted: int = 0  # rollouts that finished and were kept, over the whole run
    rejected: int = 0  # rollouts that finished and were not kept, over the whole run
    events: Mapping[str, int] = field(default_factory=dict[str, int])  # counts of events of groups since the last batch, by name
    refused: Refused = Refused()
    failures: tuple[Exception, ...] = ()  # errors to raise; until then no rollout starts
    last_error: Exception | None = None  # error of the last rollout that failed
    num_wanted: int = 0  # groups that a wait() has requested
    num_batches: int = 0  # batches that were handed out
    num_ended: int = 0  # rollouts that ended by themselves, kept or not
    last_end: float = -math.inf  # time of the last end, in seconds of trio's clock
    purged_version: int = -1  # weight version at which the queue was last purged
    collected_version: int = -1  # weight version at which finished groups were last collected for the current wait
    idle_since: float | None = None  # time since which no rollout runs; None = a rollout runs
    idle_s: float = 0.0  # seconds without a rollout before that, since the last batch
    warnings: tuple[str, ...] = ()  # warnings to log
    warned: frozenset[str] = frozenset()  # causes of the warnings so far

    @property
    def counts(self) -> RolloutCounts:
        """Number of rollouts in each state."""
        return RolloutCounts(enqueued=len(self.waiting), running=len(self.running), accepted=self.accepted, rejected=self.rejected)

    def agrees(self, counts: RolloutCounts) -> bool:
        """Whether these are the numbers of rollouts in each state; cheaper than a comparison with `counts`."""
        return (
            counts.running == len(self.running)
            and counts.enqueued == len(self.waiting)
            and counts.accepted == self.accepted
            and counts.rejected == self.rejected
        )

    @property
    def first_open(self) -> float:
        """Lowest index that waits or runs: no group before it can still arrive. Infinity if there is none."""
        return min(self.waiting.first, self.running.first)

    @property
    def num_open(self) -> int:
        """Number of prompts that wait or run."""
        return len(self.waiting) + len(self.running)

"""Which prompt is generated next: those that were stopped or failed first, in the order of index, then new ones from the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

from rollouts.data_buffer import DataBuffer
from rollouts.generate_fns import PendingGroup


class PromptSchedule:
    """The prompts that were taken from the data and have not ended: waiting ones as values, running ones by index.

    Each step costs at most the logarithm of what waits.
    """

    def __init__(self, data_buffer: DataBuffer) -> None:
        self._data_buffer = data_buffer
        self._waiting: dict[int, PendingGroup] = {}  # by index
        self._ready: list[int] = []  # heap of indices
        self._delayed: list[tuple[float, int]] = []  # heap of (time from which it may start, index)
        self._held_back: dict[int, float] = {}  # waiting, and not to be started now -> when it may start after that
        self._running: set[int] = set()
        self._open: list[int] = []  # heap of indices that wait or run, and of some that no longer do
        self._attempts: dict[int, int] = {}  # failed ones, of prompts that have any
        self._stale_attempts: dict[int, int] = {}  # that became too old, of prompts that have any
        self._begun: dict[int, int] = {}  # weight version when the first token was sampled, of waiting groups that have samples

    @property
    def waiting(self) -> tuple[PendingGroup, ...]:
        """Those that wait, in the order of index."""
        return tuple(self._waiting[index] for index in sorted(self._waiting))

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def next_time(self) -> float:
        """When the first of those that wait for a moment may start; infinity if none does."""
        return self._delayed[0][0] if self._delayed else math.inf

    @property
    def first_open(self) -> float:
        """The lowest index that waits or runs: no group before it can still come. Infinity if there is none."""
        while self._open and self._open[0] not in self._waiting and self._open[0] not in self._running:
            heappop(self._open)
        return self._open[0] if self._open else math.inf

    def add(self, pending: PendingGroup, *, begun_version: int | None = None, start_at: float = -math.inf) -> None:
        """Let a group wait that is not running any more, or never did.

        Args:
            begun_version: of the weights when its first token was sampled, at the earliest; not kept for a group without any token.
            start_at: not before this time of trio's clock.
        """
        index = pending.prompt.index
        self._running.discard(index)
        self._waiting[index] = pending
        if begun_version is not None and any(sample.tokens for sample in pending.samples):
            self._begun[index] = begun_version
        heappush(self._open, index)
        if start_at > -math.inf:
            heappush(self._delayed, (start_at, index))
        else:
            heappush(self._ready, index)

    def take(self, room: int, now: float) -> list[PendingGroup]:
        """Up to `room` groups to start: waiting ones whose moment has come, then new ones.

        Those whose moment has not come keep room for themselves, so that a prompt that is tried again is not overtaken by later ones.
        """
        while self._delayed and self._delayed[0][0] <= now:
            heappush(self._ready, heappop(self._delayed)[1])
        taken: list[PendingGroup] = []
        while self._ready and len(taken) < room:
            taken.append(self._waiting.pop(heappop(self._ready)))
        num_new = room - len(taken) - len(self._delayed) - len(self._held_back)
        if num_new > 0:
            prompts = self._data_buffer.get_prompts(num_new)
            taken.extend(PendingGroup(prompt) for prompt in prompts)
            for prompt in prompts:
                heappush(self._open, prompt.index)
        self._running.update(pending.prompt.index for pending in taken)
        return taken

    def find_begun_version(self, index: int, version: int) -> int:
        """Under which version the first token of a group that was taken was sampled; `version` for one that has none. Ask once."""
        return self._begun.pop(index, version)

    def end(self, index: int) -> None:
        """A group that was taken has come to its end."""
        self._running.discard(index)

    def forget_attempts(self, index: int) -> None:
        """The prompt needs no more attempts, or may have as many as a new one."""
        self._attempts.pop(index, None)
        self._stale_attempts.pop(index, None)

    def count_stale_attempt(self, index: int) -> int:
        """One more attempt at this prompt became too old; returns how many did."""
        self._stale_attempts[index] = self._stale_attempts.get(index, 0) + 1
        return self._stale_attempts[index]

    def count_attempt(self, index: int) -> int:
        """One more attempt at this prompt has failed; returns how many have."""
        self._attempts[index] = self._attempts.get(index, 0) + 1
        return self._attempts[index]

    def hold_back(self) -> tuple[PendingGroup, ...]:
        """Do not start groups that have samples until release(); returns them in the order of index."""
        held = {index: -math.inf for index, pending in self._waiting.items() if pending.samples}
        held |= {index: start_at for start_at, index in self._delayed if index in held}
        self._held_back = held
        self._ready = sorted(index for index in self._ready if index not in held)
        self._delayed = sorted(entry for entry in self._delayed if entry[1] not in held)
        return tuple(self._waiting[index] for index in sorted(held))

    def release(self, edited: Iterable[PendingGroup] = ()) -> None:
        """Let those that were held back start again, when they could have, some of them with other samples."""
        for pending in edited:
            self._waiting[pending.prompt.index] = pending
        for index, start_at in self._held_back.items():
            if start_at > -math.inf:
                heappush(self._delayed, (start_at, index))
            else:
                heappush(self._ready, index)
        self._held_back = {}

    def state_dict(self, running: Iterable[tuple[PendingGroup, int]]) -> dict[str, Any]:
        """Position in the data, and all groups that have not ended, as JSON values.

        Args:
            running: with the samples that they begin with when they are started again, and the version of the first token.
        """
        started = {pending.prompt.index: (pending, version) for pending, version in running}
        groups = self._waiting | {index: pending for index, (pending, _) in started.items()}
        begun = self._begun | {index: version for index, (pending, version) in started.items() if pending.samples}
        return {
            "buffer": self._data_buffer.save_state(),
            "pending": [groups[index].to_dict() for index in sorted(groups)],
            "begun": [list(item) for item in sorted(begun.items())],
            "attempts": [list(item) for item in sorted(self._attempts.items())],
            "stale_attempts": [list(item) for item in sorted(self._stale_attempts.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict; moves the data buffer, too."""
        self._data_buffer.load_state(state["buffer"])
        self._waiting, self._ready, self._delayed, self._open = {}, [], [], []
        self._held_back, self._running = {}, set()
        for pending in state["pending"]:
            self.add(PendingGroup.from_dict(pending))
        self._attempts = {int(index): int(n) for index, n in state["attempts"]}
        self._stale_attempts = {int(index): int(n) for index, n in state.get("stale_attempts", ())}
        self._begun = {int(index): int(version) for index, version in state["begun"]}

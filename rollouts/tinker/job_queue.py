"""Models in training with their jobs, which run in the order of their numbers, whatever the order in which they arrive."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from rollouts.tinker.trained import TrainedModel
from rollouts.tinker.wire.requests import ModelRequest

Job: TypeAlias = Callable[[], Awaitable[None]]


class JobQueue:
    """Jobs by number, from 1 on. A client sends the parts of a large request side by side, the first one last."""

    def __init__(self) -> None:
        self.next_number = 1  # number of the job that runs, or is waited for
        self._jobs: dict[int, Job] = {}
        self._arrived = trio.Event()

    def put(self, number: int, job: Job) -> None:
        """Add a job; one whose number has passed or is taken is left out."""
        if not self.is_taken(number):
            self._jobs[number] = job
            self._arrived.set()

    def is_taken(self, number: int) -> bool:
        """Whether a job has this number, or had it."""
        return number < self.next_number or number in self._jobs

    async def run(self, patience_s: float, give_up: Callable[[range], None]) -> None:
        """Run the jobs, one at a time, until this is cancelled.

        Args:
            patience_s: seconds that jobs wait for one before them that does not arrive.
            give_up: called with the numbers of the jobs, one after another, that were waited for so long, and are left out.
        """
        while True:
            await self._wait(patience_s)
            job = self._jobs.pop(self.next_number, None)
            if job is None:
                lost = range(self.next_number, min(self._jobs))
                give_up(lost)
                self.next_number = lost.stop
            else:
                await job()
                self.next_number += 1

    async def _wait(self, patience_s: float) -> None:
        """Wait for the next job, or until others have waited for it for too long."""
        deadline = math.inf
        while self.next_number not in self._jobs and trio.current_time() < deadline:
            if self._jobs:
                deadline = min(deadline, trio.current_time() + patience_s)
            self._arrived = trio.Event()
            with trio.move_on_at(deadline):
                await self._arrived.wait()


@dataclass(eq=False)
class Training:
    """A model in training: its requests by number, which run in the order of these."""

    model_id: str
    session_id: str
    request: ModelRequest
    queue: JobQueue = field(default_factory=JobQueue)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    model: TrainedModel | None = None  # None = not made yet

    async def run(self, patience_s: float) -> None:
        """Run the jobs until this is cancelled; a request that others have waited for, for patience_s seconds, is given up."""

        def give_up(lost: range) -> None:
            which, it = (f"request {lost[0]}", "it") if len(lost) == 1 else (f"requests {lost[0]} to {lost[-1]}", "them")
            was = "it was refused before it was read, or got lost" if it == "it" else "they were refused before they were read, or got lost"
            missing = f"{which} of {self.model_id} did not arrive, though later ones waited {patience_s:g} s for {it}: {was}"
            self.note_failure(f"a part of the gradient may be missing, since {missing}")

        await self.queue.run(patience_s, give_up)

    def note_failure(self, reason: str) -> None:
        """Note that a part of the gradient is missing, or may be, so that the next update is refused with this sentence."""
        if self.model is not None:
            self.model.note_failure(reason)

"""Jobs of a model in the order of their numbers, whatever the order in which they arrive."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

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

    async def run(self) -> None:
        """Run the jobs, one at a time, until this is cancelled."""
        while True:
            while self.next_number not in self._jobs:
                self._arrived = trio.Event()
                await self._arrived.wait()
            await self._jobs.pop(self.next_number)()
            self.next_number += 1

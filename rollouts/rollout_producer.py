"""RolloutProducer: what starts rollouts in the background of a block, and stops them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import trio

from rollouts.errors import raise_single_errors
from rollouts.rollout_book import RolloutBook
from rollouts.rollout_runs import RolloutRuns


class RolloutProducer:
    """Starts rollouts while its block is open, whenever it is woken or a prompt's moment has come; parent of all their tasks.

    What may start is the book's decision, how one runs that of the runs. What is still running when the block ends waits again.
    """

    def __init__(self, book: RolloutBook, runs: RolloutRuns, on_start: Callable[[], None]) -> None:
        """
        Args:
            on_start: told after each look at what may start: a prompt may have been given up then, and those after it need not wait for it
                any more.
        """
        self._book = book
        self._runs = runs
        self._on_start = on_start
        self._interrupted = False
        self._nursery: trio.Nursery | None = None
        self._work = trio.lowlevel.ParkingLot()

    @property
    def is_open(self) -> bool:
        """Whether rollouts can run."""
        return self._nursery is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether nothing starts before resume()."""
        return self._interrupted

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """The block in which rollouts run. At its end they are interrupted, and a failure that nobody was told of is raised."""
        self._interrupted = False
        self._runs.begin_idling()
        try:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._produce)
                    nursery.start_soon(self._runs.watch_deadlines, nursery)
                    try:
                        yield
                        await self.interrupt()
                    except Exception as error:
                        try:
                            await self.interrupt()
                        except Exception as problem:  # of an engine's abort: it must not hide why the block ended
                            error.add_note(f"rollouts could not be stopped: {problem!r}")
                        for failure in self._book.failures[:1]:
                            error.add_note(f"beside it, {len(self._book.failures)} rollouts failed; the first: {failure!r}")
                        self._book.failures.clear()
                        raise
                    finally:
                        nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            for run in self._runs.drop_cancelled():
                self._book.give_back(run)
        self._book.raise_failure()

    async def _produce(self) -> None:
        while True:
            now = trio.current_time()
            self._start_rollouts()
            # what was due before and did not start must wait for whoever lets it, not for a moment that has passed
            next_time = self._book.schedule.next_time
            due = next_time if next_time > now else math.inf
            if due == math.inf:  # a cancel scope costs more than the rest of this
                await self._work.park()
                continue
            with trio.move_on_at(due):
                await self._work.park()

    def _start_rollouts(self) -> None:
        """Start as many rollouts as may start now."""
        if self._nursery is not None and not self._interrupted:
            for pending, begun_version in self._book.take_rollouts():
                self._runs.start(self._nursery, pending, begun_version)
            self._on_start()

    def wake(self) -> None:
        """Look at what may start now, soon: there may be room, or a prompt that waits."""
        self._work.unpark_all()

    # -- how rollouts are stopped

    async def interrupt(self) -> None:
        """Start no more rollouts, and return when none is generated. What is being scored goes on."""
        self._interrupted = True
        await self._runs.stop_all()

    def resume(self) -> None:
        """Start rollouts again after interrupt()."""
        self._interrupted = False
        self.wake()

    def stop_outdated(self, max_staleness: int) -> None:
        """Abort those that were begun more than max_staleness versions before the book's."""
        if self._nursery is not None:
            self._runs.stop_outdated(self._nursery, self._book.version, max_staleness)

"""Write a checkpoint beside training: what is written was copied before, and the write that runs is waited for before the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import trio

from rollouts.backends.distributed import Ranks


class WriteFuture:
    """A write that may still run; the Future that an asynchronous save_checkpoint returns."""

    def __init__(self, job: Future[None], operation: str) -> None:
        self.operation = operation
        self._job = job

    def done(self) -> bool:
        """Whether result() returns or raises at once."""
        return self._job.done()

    def wait(self) -> None:
        """Block until everything is written on all ranks; raise what went wrong on any of them."""
        self._job.result()

    async def result(self) -> None:
        """wait() for tasks. Waiting can be cancelled; the write goes on."""
        await trio.to_thread.run_sync(self.wait, abandon_on_cancel=True)


class AsyncWriter:
    """Runs one write at a time in a thread, on every rank. Its exchanges have a process group of their own, beside those of training."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: Ranks | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._current: WriteFuture | None = None

    def start(self, write: Callable[[Ranks], None], operation: str) -> WriteFuture:
        """Wait for the write before, then begin this one. All ranks call it.

        Args:
            write: is given the ranks to exchange messages with, over gloo.

        Raises: what the write before raised.
        """
        self.wait()
        if self._own is None:
            self._own = _separate(self._ranks)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._current = WriteFuture(self._thread.submit(write, self._own), operation)
        return self._current

    def wait(self) -> None:
        """Wait for the write that runs, if there is one, and raise what went wrong in it, once."""
        current, self._current = self._current, None
        if current is not None:
            current.wait()

    def close(self) -> None:
        """wait(), and end the thread. The process group stays for the next start(): all ranks would have to meet to let it go."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None


def _separate(ranks: Ranks) -> Ranks:
    """The same ranks with a new group for host memory; all call it."""
    group = None
    if ranks.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=ranks.timeout_s))
    return replace(ranks, group=group, device=torch.device("cpu"))

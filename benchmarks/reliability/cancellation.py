"""Cancelling a task at each step that it takes, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope just before the task that created this, or any task, runs for the n-th time."""

    def __init__(self, scope: trio.CancelScope, num_steps: int, any_task: bool) -> None:
        self.scope, self.num_steps, self.task = scope, num_steps, None if any_task else trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.task is None or task is self.task:
            self.num_steps -= 1
            if self.num_steps == 0:
                self.scope.cancel()


@contextmanager
def cancel_at_step(num_steps: int, *, any_task: bool = False) -> Iterator[trio.CancelScope]:
    """A scope that is cancelled just before this task's n-th step in it, or the n-th of any task."""
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(scope, num_steps, any_task)
        trio.lowlevel.add_instrument(instrument)
        try:
            yield scope
        finally:
            trio.lowlevel.remove_instrument(instrument)

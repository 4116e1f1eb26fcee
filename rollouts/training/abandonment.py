"""Abandonment of work under way at the request of another task, for a run that is to end soon and lose nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import trio


class Abandonment:
    """Request, made by another task, to give up what loses the step under way, or its evaluation, and nothing else: never an update."""

    def __init__(self) -> None:
        self.is_requested = False
        self._guards: list[AbandonedWork] = []
        self._tell: Callable[[str], None] = lambda work: None

    def request(self, tell: Callable[[str], None] | None = None) -> None:
        """Cancel the guarded work, and all that comes.

        Args:
            tell: called with the name of each work that is given up, once it has ended; not for work that ends by itself.
        """
        self.is_requested = True
        if tell is not None:
            self._tell = tell
        for guard in tuple(self._guards):
            guard.cancel()

    @contextmanager
    def guard(self, work: str, take_state: Callable[[], Mapping[str, Any]] = dict[str, Any]) -> Generator[AbandonedWork]:
        """Guard the block: a request cancels it.

        Args:
            work: name of what the block does, for messages.
            take_state: called before the block is cancelled; its result is the state to go on from.
        """
        scope = trio.CancelScope()
        guarded = AbandonedWork(scope, take_state)
        with scope:
            self._guards.append(guarded)
            if self.is_requested:
                guarded.cancel()
            try:
                yield guarded
            finally:
                self._guards.remove(guarded)
        if guarded.is_abandoned:
            self._tell(work)


class AbandonedWork:
    """Work in a block that may be given up."""

    def __init__(self, scope: trio.CancelScope, take_state: Callable[[], Mapping[str, Any]]) -> None:
        self._scope, self._take_state = scope, take_state
        self.state: Mapping[str, Any] | None = None  # result of take_state, once the block is cancelled

    @property
    def is_abandoned(self) -> bool:
        """Whether the block was cancelled before its end."""
        return self._scope.cancelled_caught

    def cancel(self) -> None:
        """Take the state, and cancel the block."""
        if self.state is None:
            self.state = self._take_state()
        self._scope.cancel()

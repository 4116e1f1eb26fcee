"""RefusedGroups: what came to nothing since groups were last handed out, and the error for too much of it."""

from __future__ import annotations

from collections import deque

from rollouts.config import RolloutConfig
from rollouts.errors import GenerationError
from rollouts.generation import create_starvation_error
from rollouts.types import Group


class RefusedGroups:
    """Groups that were generated in vain: so many of them, and no batch between, that going on would be waste."""

    def __init__(self, config: RolloutConfig, *, max_staleness: int, most: int) -> None:
        """
        Args:
            max_staleness: named in the error for groups that were too old.
            most: groups that may come to nothing for one batch before that is an error.
        """
        self._config = config
        self._max_staleness = max_staleness
        self._most = most
        self._num_refused = 0  # by filter_fn, or dropped
        self._num_dropped = 0  # of these, because they could not be generated or not be scored
        self._num_stale = 0
        self._filtered: deque[Group] = deque(maxlen=most)  # those that filter_fn refused

    @property
    def are_too_many(self) -> bool:
        """Whether what was refused, dropped or too old is an error by now."""
        return self._num_refused + self._num_stale >= self._most

    def add(self, filtered: Group | None) -> None:
        """filter_fn has refused this one; None: one was dropped, because it could not be generated or not be scored."""
        self._num_refused += 1
        self._num_dropped += filtered is None
        if filtered is not None:
            self._filtered.append(filtered)

    def add_stale(self) -> None:
        """One was too old."""
        self._num_stale += 1

    def forget(self) -> None:
        """Count anew: groups were handed out, or somebody was told."""
        self._num_refused = self._num_dropped = self._num_stale = 0
        self._filtered.clear()

    def create_error(self, *, num_finished: int, version: int) -> GenerationError:
        """The error for a filter that refuses too much, or engines without new weights.

        Args:
            num_finished: groups that passed and wait for the others of their batch.
            version: of the weights that the engines should have.
        """
        if self._num_stale > self._num_refused:
            return GenerationError(
                f"{self._num_stale} groups in a row were more than max_staleness ({self._max_staleness}) versions behind version "
                f"{version}: do the engines get the weights that set_version() tells of, and stamp tokens with their version? Else "
                "raise max_staleness, or lower max_concurrent_rollouts or max_tokens, so that rollouts end within so many steps"
            )
        return create_starvation_error(
            self._config,
            num_finished,
            list(self._filtered),
            num_dropped=self._num_dropped,
            num_rounds=self._config.max_filter_attempts,
        )

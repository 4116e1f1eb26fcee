"""What failed on which rank, as a value that travels, and which of several failures is the one that the others follow from."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from rollouts.backends.rank_watch import Trouble
from rollouts.errors import BackendError, CheckpointError, ConfigError, DataError, RolloutsError

EXPLAIN_LOSS = "it was killed, or ran out of memory. Its output and the log of the system say why"

_SIGNS = (
    *("timed out", "timeout", "connection closed", "connection reset", "connection was closed", "broken pipe"),
    "connection to another rank",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception of a rank."""

    rank: int
    kind: type[RolloutsError] | None  # the library's error that it is; None = another exception
    name: str  # of its class
    message: str
    trace: str
    is_consequence: bool  # an exchange with another rank that failed, most likely because that rank did


def describe_failure(rank: int, error: BaseException) -> Failure:
    """An exception as a value."""
    kinds = (CheckpointError, ConfigError, DataError, BackendError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), None)
    return Failure(
        rank=rank,
        kind=kind,
        name=type(error).__name__,
        message="\n".join([str(error), *getattr(error, "__notes__", ())]),
        trace="".join(traceback.format_exception(error)),
        is_consequence=_is_consequence(error),
    )


def _is_consequence(error: BaseException) -> bool:
    """Whether an exchange with another rank failed, as far as errors of torch.distributed can be told from others."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__
    return any(
        isinstance(e, dist.DistError) or (isinstance(e, RuntimeError) and any(sign in str(e).lower() for sign in _SIGNS)) for e in chain
    )


def are_alike(failures: Mapping[int, Failure], num_ranks: int) -> bool:
    """Whether every rank met the same error by itself, or every one a broken exchange; not one the error and the others its consequence."""
    return len(failures) == num_ranks and len({(failure.name, failure.is_consequence) for failure in failures.values()}) == 1


def find_cause(
    operation: str,
    failures: Mapping[int, Failure],
    missing: Sequence[int],
    trouble: Trouble,
    timeout_s: float,
    *,
    closed: Sequence[int] = (),
    waited_s: float | None = None,
) -> Failure:
    """The failure that the others follow from.

    Args:
        failures: of the ranks that answered with one.
        missing: ranks that have not answered.
        trouble: what the watch saw.
        closed: ranks whose connection ended while an answer was awaited, in this order.
        waited_s: how long the operation took until answers were given up; None = timeout_s.
    """
    own = [failures[rank] for rank in sorted(failures) if not failures[rank].is_consequence]
    if own:  # rank 0's first: its traceback is at hand
        order = {rank: place for place, rank in enumerate(trouble.reports)}
        return min(own, key=lambda failure: -1 if failure.rank == 0 else order.get(failure.rank, len(order)))
    gone = [rank for rank in trouble.gone if rank in missing]
    if gone:
        return _without_word(gone[0], f"its process is gone: {EXPLAIN_LOSS}")
    silent = [rank for rank in trouble.silent if rank in missing]
    if silent:
        return _without_word(silent[0], "its process gives no sign of life: it is stopped, or its machine cannot be reached")
    if closed:
        return _without_word(
            closed[0], "it has closed the connection to rank 0 without an answer, so its process ends. Its output says why"
        )
    if missing and waited_s is not None and waited_s < timeout_s:
        return _without_word(
            missing[0],
            f"it has not come to the end of {operation} within {waited_s:.1f} s, in which other ranks have failed waiting for it",
        )
    if missing:
        return _without_word(
            missing[0], f"it has not come to the end of {operation} within {timeout_s:g} s. Raise the timeout if that may take so long"
        )
    return failures[min(failures)]


def _without_word(rank: int, message: str) -> Failure:
    return Failure(rank=rank, kind=BackendError, name="BackendError", message=message, trace="", is_consequence=False)


def make_error(failure: Failure, operation: str) -> RolloutsError:
    """What rank 0 raises for a failure of another rank: names rank and operation; a note has the traceback where it is a surprise."""
    if failure.kind is not None:
        return failure.kind(f"rank {failure.rank} failed in {operation}: {failure.message}")
    error = BackendError(f"rank {failure.rank} failed in {operation}: {failure.name}: {failure.message}")
    error.add_note(f"there:\n{failure.trace.rstrip()}")
    return error

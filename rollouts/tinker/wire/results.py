"""Results of requests that take time: a client gets an id at once, and asks for the result until it is there."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio

from rollouts.errors import BackendError, CheckpointError, ConfigError, DataError, EngineRequestError, flatten_errors, redact
from rollouts.gateway.refusals import Refusal
from rollouts.tinker.wire.messages import PROTOBUF

_KEPT = 4096  # results that were read, kept in case that the answer was lost
_KEPT_BYTES = 2**26  # their bodies together; those read longest ago go first
_USERS = (Refusal, DataError, ConfigError, EngineRequestError, CheckpointError, BackendError)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The end of a request: a message, or JSON that says what went wrong."""

    body: bytes
    content_type: str = "application/json"


@dataclass(eq=False)
class PendingResult:
    """A request and, once it has ended, its outcome."""

    request_id: str
    session_id: str
    sequence_ids: tuple[str, ...] = ()  # ids of the samples that are asked for
    finished: trio.Event = field(default_factory=trio.Event)
    outcome: Outcome | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # scope of the work

    def finish(self, outcome: Outcome) -> None:
        """End the request; a second end is left out."""
        if self.outcome is None:
            self.outcome = outcome
            self.finished.set()


class Results:
    """The results of a server by the ids of their requests."""

    def __init__(self) -> None:
        self._open: dict[str, PendingResult] = {}  # not read yet
        self._read: OrderedDict[str, PendingResult] = OrderedDict()
        self._read_bytes = 0  # bodies of those

    def find(self, request_id: str) -> PendingResult | None:
        """Return a result that is kept, or that will be; None if there is none of this id."""
        return self._open.get(request_id) or self._read.get(request_id)

    def open(self, request_id: str, session_id: str, sequence_ids: tuple[str, ...] = ()) -> PendingResult:
        """Begin a request."""
        assert self.find(request_id) is None, f"there is a request {request_id} already"
        pending = self._open[request_id] = PendingResult(request_id, session_id, sequence_ids)
        return pending

    def note_read(self, pending: PendingResult) -> None:
        """Note that a client was sent the outcome: from now on it is kept for a while only."""
        if self._open.pop(pending.request_id, None) is not None:
            self._read[pending.request_id] = pending
            self._read_bytes += _count_bytes(pending)
            while len(self._read) > 1 and (len(self._read) > _KEPT or self._read_bytes > _KEPT_BYTES):
                self._read_bytes -= _count_bytes(self._read.popitem(last=False)[1])

    def forget_session(self, session_id: str) -> None:
        """Cancel and forget the requests of a session."""
        for results in (self._open, self._read):
            for pending in [one for one in results.values() if one.session_id == session_id]:
                pending.scope.cancel()
                del results[pending.request_id]
                if results is self._read:
                    self._read_bytes -= _count_bytes(pending)

    def end_running(self, prefix: str, outcome: Outcome) -> None:
        """End the requests without an outcome whose ids begin so."""
        for pending in self._open.values():
            if pending.request_id.startswith(prefix):
                pending.finish(outcome)

    def count_running(self) -> int:
        """Count the requests without an outcome."""
        return sum(one.outcome is None for one in self._open.values())


def _count_bytes(pending: PendingResult) -> int:
    return 0 if pending.outcome is None else len(pending.outcome.body)


def write_json(value: Mapping[str, Any]) -> Outcome:
    """Return the outcome that is a JSON object."""
    return Outcome(json.dumps(value).encode())


def write_protobuf(body: bytes) -> Outcome:
    """Return the outcome that is a message in Protocol Buffers."""
    return Outcome(body, PROTOBUF)


def write_failure(error: Exception) -> Outcome:
    """Return the outcome of a request that failed; a fault that is not the request's is logged, too."""
    found = flatten_errors(error)  # samples of one request often fail together, for one reason
    if all(isinstance(one, _USERS) for one in found):
        return write_json({"error": redact(str(found[0])), "category": "user"})
    _logger.error("a request to the server failed", exc_info=error)
    return write_json(
        {"error": f"the server failed at this request: {type(error).__name__}: {redact(str(error))[:500]}", "category": "server"}
    )

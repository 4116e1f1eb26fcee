"""Deadlines of the section `engine`: seconds to wait for inference servers, besides those for a start, an answer and new weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from rollouts.config import check_setting
from rollouts.config_files import is_number

ENGINE_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "startup_s": "--engine.startup-timeout-s",
        "generate_s": "--engine.generate-timeout-s",
        "sync_s": "--engine.sync-timeout-s",
        "control_s": "--engine.deadlines.control-s",
        "health_s": "--engine.deadlines.health-s",
        "connect_s": "--engine.deadlines.connect-s",
        "join_s": "--engine.deadlines.join-s",
    }
)
"""Options of the fields of Deadlines, and of the limits of a start and of meeting in a process group, for messages."""

FLEET_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "check_s": "--engine.deadlines.health-s",
        "wait_s": "--engine.deadlines.queue-s",
        "patience_s": "--engine.deadlines.outage-s",
        "ready_s": "--engine.deadlines.ready-s",
    }
)
"""Options of the fields of FleetConfig, for messages."""


@dataclass(frozen=True, kw_only=True)
class DeadlinesSection:
    """Deadlines of calls to servers, in seconds; those of an answer, of new weights and of a start are engine.*_timeout_s."""

    connect_s: float = 10.0  # seconds for a connection to a server
    control_s: float = 60.0  # seconds for a server to pause, resume, abort, flush its cache, or tell the version of its weights
    health_s: float = 30.0  # seconds for a health check, and for each probe of one of several servers, which is left out if it fails
    join_s: float = 120.0  # seconds until trainer and servers have met in a process group, and for each bucket of weights sent over it
    queue_s: float = 3600.0  # seconds that a request may wait for a place at one of several servers
    # seconds that requests and weight syncs wait while none of several servers answers; None = 60, or engine.startup_timeout_s where the
    # run restarts servers
    outage_s: float | None = None
    ready_s: float = 300.0  # seconds until all of several servers are ready for weights over a process group or through shared memory

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "outage_s" and value is None:
                continue
            good = is_number(value) and 0.0 < value < math.inf
            check_setting(good, f"engine.deadlines.{field.name}", value, "a finite number of seconds above 0")

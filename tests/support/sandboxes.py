"""Levels of the sandbox for tests, and a look for processes that are left."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import needs
import pytest

from rollouts.sandbox.confinement import bubblewrap, namespaces, plain

MARKER = "SANDBOX_TEST"
PATIENCE_S = 60.0


ISOLATED = [
    pytest.param(bubblewrap(), id="bubblewrap", marks=needs.bubblewrap()),
    pytest.param(namespaces(), id="namespaces", marks=needs.namespaces()),
]
ALL_LEVELS = [*ISOLATED, pytest.param(plain(), id="plain")]
GUARDED_LEVELS = [*ISOLATED, pytest.param(plain(), id="plain", marks=needs.landlock())]
"""Those that protect files and other processes from reading."""


def marked(marker: str) -> list[int]:
    """Processes with a marker in their command or environment."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            for part in ("cmdline", "environ"):
                with suppress(OSError):
                    if marker.encode() in Path("/proc", name, part).read_bytes():
                        found.append(int(name))
                        break
    return found


@contextmanager
def no_survivors() -> Iterator[dict[str, str]]:
    """Environment for sandboxes in the block; afterwards no process may have it."""
    marker = uuid.uuid4().hex
    yield {MARKER: marker}
    assert marked(marker) == []


def first_process(marker: str) -> int:
    """The first process of the one namespace whose processes have the marker, as seen from here."""
    for pid in marked(marker):
        with suppress(OSError):
            line = next(line for line in Path("/proc", str(pid), "status").read_text().splitlines() if line.startswith("NSpid:"))
            if len(ids := line.split()[1:]) > 1 and ids[-1] == "1":
                return pid
    raise AssertionError(f"no first process of a namespace among {marked(marker)}")


def wait_until_gone(marker: str) -> None:
    """Wait until no process has the marker."""
    deadline = time.monotonic() + PATIENCE_S
    while left := marked(marker):
        assert time.monotonic() < deadline, [Path("/proc", str(pid), "cmdline").read_bytes() for pid in left]
        time.sleep(0.05)

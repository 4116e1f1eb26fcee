"""Large sets of cases, of which slow tests take a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_parts(cases: Iterable[Any], *, every: int, first: int = 0) -> list[Any]:
    """Mark one of every so many cases as slow, beginning with `first`, and the others as long. A case is a value, or a tuple of values."""
    found: list[Any] = []
    for i, case in enumerate(cases):
        mark = pytest.mark.slow if (i - first) % every == 0 else pytest.mark.long
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark))
    return found

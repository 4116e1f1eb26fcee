"""Calls of both kinds of server through a proxy that damages what it carries: each completes right, or fails by an error of the library."""

from __future__ import annotations

import pytest
import trio

from benchmarks.reliability.calls import FAULTS, SERVERS, call_through_faults


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_calls", [60, pytest.param(250, marks=pytest.mark.slow)])  # benchmarks.reliability has 1,000
@pytest.mark.parametrize("kind", list(SERVERS))
async def test_a_call_through_a_damaged_network_completes_right_or_fails_typed(kind: str, num_calls: int):
    with trio.fail_after(500.0):
        found = await call_through_faults(kind, num_calls, seed=num_calls)
    surprises = {outcome: n for outcome, n in found.items() if outcome.startswith(("UNEXPECTED", "WRONG"))}
    assert not surprises, "\n".join(surprises)
    assert found["tasks left"] == found["faults that hit nothing"] == 0
    assert found["kinds of faults"] == len(FAULTS) - 1
    assert sum(n for outcome, n in found.items() if outcome.startswith(("completes", "fails"))) == num_calls

"""When a call is sent again, after how long, and when it is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import KeptConnectionLost, ServerHungUp
from rollouts.engines.http.endpoint import HTTPEndpoint, RetryPolicy, is_safe_to_repeat, parse_retry_after
from rollouts.errors import EngineError, EngineStatusError


class Steady(random.Random):
    """Draws the same number always: waits before repeats are three quarters of their step."""

    def random(self) -> float:
        return 0.5


def create_endpoint(respond: Callable[[httpx.Request], Any], **settings: Any) -> HTTPEndpoint:
    return HTTPEndpoint("http://server:1", transport=httpx.MockTransport(respond), rng=Steady(), **settings)


class Script:
    """A server that does one thing after another; the last for ever. An exception is raised as if the transport had."""

    def __init__(self, *steps: httpx.Response | httpx.TransportError) -> None:
        self.steps = steps
        self.times: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        step = self.steps[min(len(self.times), len(self.steps) - 1)]
        self.times.append(round(trio.current_time(), 6))
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)

    @property
    def waits(self) -> list[float]:
        return [round(b - a, 6) for a, b in itertools.pairwise(self.times)]


OK = httpx.Response(200, json={"ok": True})
BUSY = httpx.Response(503, json={"error": {"message": "engine busy", "code": 503}})
LOST = ServerHungUp("the server closed the connection without an answer")


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.WriteError("broke"), httpx.ConnectTimeout("none")])
async def test_what_cannot_have_been_read_is_sent_again(error: httpx.TransportError, autojump_clock: trio.testing.MockClock):
    script = Script(error, error, OK)
    async with create_endpoint(script) as endpoint:
        assert await endpoint.post_json("/generate", {}) == {"ok": True}
    assert script.waits == [0.075, 0.15]


async def test_attempts_end_and_the_last_error_is_raised(autojump_clock: trio.testing.MockClock):
    script = Script(httpx.ConnectError("refused"))
    async with create_endpoint(script, retry=RetryPolicy(attempts=4, first_wait_s=1.0, longest_wait_s=2.0)) as endpoint:
        with pytest.raises(EngineError, match="cannot be reached: refused") as caught:
            await endpoint.post_json("/generate", {})
    assert script.waits == [0.75, 1.5, 1.5]
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


@pytest.mark.parametrize(
    "error", [LOST, httpx.ReadError("reset"), KeptConnectionLost("lost", request=httpx.Request("POST", "http://x"), is_unread=False)]
)
async def test_a_lost_answer_is_asked_for_again_only_where_twice_is_the_same_as_once(
    error: httpx.TransportError, autojump_clock: trio.testing.MockClock
):
    for idempotent in (False, True):
        script = Script(error, OK)
        async with create_endpoint(script) as endpoint:
            if idempotent:
                assert await endpoint.post_json("/generate", {}, idempotent=True) == {"ok": True}
            else:
                with pytest.raises(EngineError, match="The server may have died"):
                    await endpoint.post_json("/generate", {})
        assert len(script.times) == 1 + idempotent
    script = Script(error, OK)
    async with create_endpoint(script) as endpoint:
        assert await endpoint.get_json("/model_info") == {"ok": True}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again_until_the_budget_is_used_up(status: int, autojump_clock: trio.testing.MockClock):
    busy = httpx.Response(status, json={"error": {"message": "queue full"}})
    script = Script(*[busy] * 9, OK)
    async with create_endpoint(script, retry=RetryPolicy(attempts=2)) as endpoint:  # attempts are for connections
        assert await endpoint.post_json("/generate", {}) == {"ok": True}
    assert script.waits == [0.075, 0.15, 0.3, 0.6, 1.2, 2.4, 3.75, 3.75, 3.75]
    script = Script(busy)
    async with create_endpoint(script, retry=RetryPolicy(budget_s=10.0)) as endpoint:
        with pytest.raises(EngineStatusError, match="queue full") as caught:
            await endpoint.post_json("/generate", {})
    assert caught.value.status == status
    assert script.times[-1] - script.times[0] <= 10.0 < script.times[-1] - script.times[0] + 3.75


async def test_the_budget_counts_what_attempts_take(autojump_clock: trio.testing.MockClock):
    calls = 0

    async def slowly_busy(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        assert calls < 10, "there is no end to it"
        await trio.sleep(50.0)
        return httpx.Response(503)

    async with create_endpoint(slowly_busy, retry=RetryPolicy(budget_s=120.0)) as endpoint:
        with pytest.raises(EngineStatusError):
            await endpoint.post_json("/generate", {})
    assert calls == 4  # busy after about 50, 100, 150 and 200 s; a fifth would begin more than 120 s after the first of these


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "Sat, 21 Nov 2026 00:24:20 GMT", "Date": "Sat, 21 Nov 2026 00:23:20 GMT"}, 60.0),
        ({"Retry-After": "Sat, 21 Nov 2026 00:23:00 GMT", "Date": "Sat, 21 Nov 2026 00:23:20 GMT"}, 0.0),
        ({"Retry-After": "Sat, 21 Nov 2026 00:24:20 GMT"}, None),
        ({"Retry-After": "soon", "Date": "today"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "²"}, None),
        ({}, None),
    ],
)
async def test_a_server_can_say_when_to_come_back(headers: dict, seconds: float | None, autojump_clock: trio.testing.MockClock):
    encoded = httpx.Headers(headers, encoding="utf-8")
    assert parse_retry_after(encoded) == seconds
    script = Script(httpx.Response(503, headers=encoded), OK)
    async with create_endpoint(script) as endpoint:
        await endpoint.post_json("/generate", {})
    assert script.waits == [0.075 if seconds is None else seconds + 0.05]


async def test_a_server_that_wants_more_time_than_the_budget_fails_at_once(autojump_clock: trio.testing.MockClock):
    script = Script(httpx.Response(503, headers={"Retry-After": "3600"}, text="down for maintenance"))
    async with create_endpoint(script) as endpoint:
        with pytest.raises(EngineStatusError, match="down for maintenance"):
            await endpoint.post_json("/generate", {})
    assert len(script.times) == 1


@pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 500, 502, 504])
async def test_other_errors_are_final_but_for_gateways_where_twice_is_once(status: int, autojump_clock: trio.testing.MockClock):
    for idempotent in (False, True):
        script = Script(httpx.Response(status, json={"detail": "no such thing"}), OK)
        async with create_endpoint(script) as endpoint:
            if idempotent and status in (502, 504):
                await endpoint.post_json("/x", {}, idempotent=True)
            else:
                with pytest.raises(EngineStatusError, match="no such thing"):
                    await endpoint.post_json("/x", {}, idempotent=idempotent)
        assert len(script.times) == 1 + (idempotent and status in (502, 504))


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), LOST, BUSY])
async def test_a_health_check_is_one_question(failure: httpx.Response | httpx.TransportError):
    script = Script(failure)
    async with create_endpoint(script) as endpoint:
        with pytest.raises(EngineError):
            await endpoint.get_text("/health", kind="health")
    assert len(script.times) == 1


async def test_waiting_for_a_repeat_can_be_cancelled(autojump_clock: trio.testing.MockClock):
    async with create_endpoint(Script(BUSY), max_connections=1) as endpoint:
        with trio.move_on_after(3.0) as scope:
            await endpoint.post_json("/generate", {})
        assert scope.cancelled_caught
        assert endpoint.num_generating == 0


@given(st.integers(0, 10_000), st.floats(0.0, 1.0, exclude_max=True), st.none() | st.floats(0.0, 1e6))
def test_waits_grow_to_a_limit_with_room_for_chance(repeat: int, draw: float, retry_after: float | None):
    policy = RetryPolicy(first_wait_s=0.1, longest_wait_s=5.0)
    step = min(5.0, 0.1 * 2.0 ** min(repeat, 100))
    least = step / 2 if retry_after is None else retry_after
    assert least <= policy.wait_before(repeat, draw, retry_after) <= least + step


def test_only_errors_that_name_the_phase_are_safe():
    request = httpx.Request("POST", "http://x")
    safe = [httpx.ConnectError(""), httpx.ConnectTimeout(""), httpx.PoolTimeout(""), httpx.WriteError("")]
    safe.append(KeptConnectionLost("", request=request, is_unread=True))
    unsafe = [
        httpx.WriteTimeout(""),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError(""),
        httpx.LocalProtocolError(""),
        httpx.CloseError(""),
    ]
    lost = [httpx.ReadError(""), ServerHungUp(""), KeptConnectionLost("", request=request, is_unread=False)]
    assert [is_safe_to_repeat(error, False) for error in (*safe, *unsafe, *lost)] == [True] * 5 + [False] * 8
    assert [is_safe_to_repeat(error, True) for error in (*safe, *unsafe, *lost)] == [True] * 5 + [False] * 5 + [True] * 3

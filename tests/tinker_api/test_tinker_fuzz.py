"""Requests of the real tinker client, damaged in every way, get an answer without a failure of the server, which goes on."""

from __future__ import annotations

import logging
from random import Random

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from recordings import SESSION, read_rows

from benchmarks.reliability.damage import damage
from rollouts.errors import RolloutsError
from rollouts.gateway.refusals import Refusal
from rollouts.testing import create_tiny_model
from rollouts.tinker import open_tinker_server
from rollouts.tinker.wire.messages import read_pass_request

PASSES = [body for _, path, kind, body in read_rows(SESSION) if path.endswith("/forward_backward") and "protobuf" in kind]


class Drawn:
    """Choices of a random generator."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def below(self, number: int) -> int:
        return self._random.randrange(number)


def test_the_passes_that_are_damaged_are_whole():
    assert len(PASSES) > 5 and all(read_pass_request(body).problem is None for body in PASSES)


@given(st.sampled_from(PASSES), st.randoms(use_true_random=False))
def test_a_damaged_pass_is_read_or_refused(body: bytes, random: Random):
    try:
        read_pass_request(damage(body, Drawn(random)))
    except (Refusal, RolloutsError) as error:
        assert str(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the rank of the adapters")
async def test_damaged_requests_are_answered_and_the_server_goes_on(tmp_path, caplog: pytest.LogCaptureFixture):
    draw, statuses = Drawn(Random(0)), list[int]()

    async def settle(client: httpx.AsyncClient, answer: httpx.Response) -> int:
        """Return the status of an answer, or of the outcome that it promises."""
        told = answer.json() if answer.status_code == 200 and "json" in answer.headers["content-type"] else {}
        while isinstance(told, dict) and "request_id" in told:
            answer = await client.post("/api/v1/retrieve_future", json={"request_id": told["request_id"], "allow_metadata_only": True})
            if answer.status_code != 408:
                break
        return answer.status_code

    options = {"directory": tmp_path, "poll_s": 20, "max_models": 64, "max_samplers": 16}
    with caplog.at_level(logging.WARNING, logger="rollouts"), trio.fail_after(100):
        async with (
            open_tinker_server(create_tiny_model(), **options) as server,
            httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        ):
            answer = await client.post(
                "/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
            )
            for method, path, kind, body in read_rows(answer.json()["session_id"]):
                headers = {"content-type": kind} if kind else {}
                for content in [damage(body, draw) for _ in range(3 if body else 0)]:
                    if not path.endswith("/retrieve_future"):
                        statuses.append(await settle(client, await client.request(method, path, content=content, headers=headers)))
                    else:
                        with trio.move_on_after(1):
                            statuses.append((await client.request(method, path, content=content, headers=headers)).status_code)
                await client.request(method, path, content=body or None, headers=headers)
            assert (await client.get("/api/v1/healthz")).status_code == 200
    assert {status for status in statuses if status >= 500} == set() and len(statuses) > 30, statuses
    assert {200, 400} <= set(statuses)
    assert [record.getMessage() for record in caplog.records if "failed" in record.getMessage()] == []

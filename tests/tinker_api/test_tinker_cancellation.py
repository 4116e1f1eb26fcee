"""A server that is cancelled at any scheduling point leaves no listener, no thread at work and no half of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
from test_tinker_server import ADAM, DATA, TOKENS, ask, begin_model, open_client, retrieve, run_pass

from benchmarks.reliability.cancellation import cancel_at_step
from benchmarks.reliability.listeners import find_listening_sockets
from rollouts.testing import create_tiny_model
from rollouts.tinker import open_tinker_server
from rollouts.tinker.saved import read_adapters_of


async def use_server(directory: Path) -> None:
    """Train, save, and sample from a server."""
    async with open_tinker_server(create_tiny_model(), directory=directory) as server, open_client(server) as client:
        model_id = await begin_model(client)
        await run_pass(client, model_id, 1, DATA)
        await client.post("/api/v1/optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": ADAM})
        await ask(client, "save_weights", model_id=model_id, seq_id=3, path="a")
        _, told = await ask(client, "save_weights_for_sampler", model_id=model_id, seq_id=4, sampling_session_seq_id=1)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        body = {"sampling_session_id": told["sampling_session_id"], "seq_id": 1, "num_samples": 2, "prompt": prompt}
        await retrieve(client, await client.post("/api/v1/asample", json={**body, "sampling_params": {"max_tokens": 2}}))
        await client.post(f"/api/v1/sessions/{model_id.partition(':')[0]}/finish")


async def cancel_at(points: Iterable[int], directory: Path) -> int:
    """Cancel a server at points, and look for what it leaves. Returns how many points were before its end."""
    threads, ended = trio.to_thread.current_default_thread_limiter(), 0
    for point in points:
        before, listening = threads.borrowed_tokens, find_listening_sockets([os.getpid()]).keys()  # those of other tests
        with cancel_at_step(point, any_task=True) as scope:
            await use_server(directory / str(point))
        ended += scope.cancelled_caught
        assert find_listening_sockets([os.getpid()]).keys() <= listening, f"cancelled at point {point}"
        assert threads.borrowed_tokens == before, f"cancelled at point {point}"
        assert [path for path in directory.rglob("*") if path.name.startswith((".tmp", "replaced"))] == []
    return ended


async def test_a_server_that_is_cancelled_while_it_opens_leaves_no_listener(tmp_path: Path):
    assert await cancel_at(range(1, 6), tmp_path) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Async generator 'httpx")  # of the client, which is cancelled with the server
async def test_a_server_that_is_cancelled_at_any_point_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="rollouts"):
        assert await cancel_at(range(60, 210, 30), tmp_path) >= 3
    saved = list(tmp_path.rglob("step_0000"))
    assert saved and all(read_adapters_of(checkpoint) is not None for checkpoint in saved)
    assert [record.getMessage() for record in caplog.records if "failed" in record.getMessage()] == []

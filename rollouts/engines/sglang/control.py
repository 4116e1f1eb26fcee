"""Pause, weight update and resume of one SGLang server: its control routes in the orders that were found safe.

Paused by "retract", running requests give up their keys and values and keep their tokens; under new weights the prefix is computed again,
so that each log-prob is that of a full forward pass. Paused by "abort", they return with the tokens they have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trio
from torch import Tensor

from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.sglang.protocol import PauseMode, is_updated_but_not_flushed, parse_update_answer, sglang_tensor_payload
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import EngineError, EngineProtocolError, EngineStatusError, EngineTimeout
from rollouts.weight_specs import WeightPlan

_POLL_S = 0.05
_ABORT_S = 1.0  # seconds that the server sleeps if a pause has to abort a request
_CLEANUP_S = 10.0


class SGLangWeights:
    """Weights of one server. Stateless apart from the server's address."""

    def __init__(self, name: str, server: HTTPEndpoint, pause_mode: PauseMode, count_in_flight: Callable[[], int], paths: PathMap) -> None:
        """
        Args:
            name: name of the engine, for messages.
            pause_mode: effect of a pause on running requests.
            count_in_flight: returns the number of this client's requests that the server has not answered.
            paths: map from local directories to those of the server.
        """
        self._name = name
        self._server = server
        self._pause_mode = pause_mode
        self._count_in_flight = count_in_flight
        self._paths = paths

    async def pause(self) -> None:
        """Stop generating. New requests wait at the server. Idempotent."""
        if self._pause_mode == "abort":
            await self._abort_all()
        await self._server.post_json("/pause_generation", {"mode": self._pause_mode}, kind="control", idempotent=True)
        if self._pause_mode == "abort":
            await self.flush()

    async def resume(self) -> None:
        """Continue generating. Idempotent."""
        await self._server.post_json("/continue_generation", {}, kind="control", idempotent=True)

    async def sleep(self) -> None:
        """Move the weights to the host and drop keys and values. No request may run: the server would die of it."""
        await self.flush()  # succeeds only if the server is idle
        await self._server.post_json("/release_memory_occupation", {}, kind="sync")

    async def wake_up(self) -> None:
        """Move the weights back and make room for keys and values."""
        await self._server.post_json("/resume_memory_occupation", {}, kind="sync")

    async def flush(self) -> None:
        """Drop keys and values of the old weights, once no request runs. Raises EngineTimeout."""
        deadlines = self._server.deadlines
        with trio.move_on_after(deadlines.control_s):
            while True:
                try:
                    # without ?timeout, which after a retract waits for requests that themselves wait for the end of the pause
                    await self._server.post_text("/flush_cache", kind="control", idempotent=True)
                except EngineStatusError as error:
                    if error.status != 400:
                        raise
                    await trio.sleep(_POLL_S)
                else:
                    return
        raise EngineTimeout(
            f"{self._name} did not flush its cache within {deadlines.control_s:g} s: requests are still running, or the deadline "
            f"{deadlines.name('control_s')} is too short"
        )

    async def load_directory(self, path: Path, label: str) -> None:
        """Load the weights in a directory and label them. An unchecked directory may kill the server."""
        there = str(self._paths.to_server(path))
        body = {"model_path": there, "weight_version": label, "flush_cache": True, "abort_all_requests": False}
        await self.update("/update_weights_from_disk", body)
        served = (await self._read_info())["model_path"]
        if served != there:
            raise EngineProtocolError(f"{self._name} says that it serves {served!r} after loading {there!r}")

    async def send_tensors(self, label: str, *, num_ranks: int, plan: WeightPlan, weights: Mapping[str, Tensor]) -> None:
        """Send weights over HTTP, bucket by bucket, and label them.

        Args:
            num_ranks: tensor parallel processes; each gets all weights and takes its share.
        """
        async with self.open_session():
            for bucket in plan.buckets:
                named = [(name, weights[name]) for name in bucket.names]
                is_last = bucket.index + 1 == len(plan.buckets)
                payload = partial(sglang_tensor_payload, named, num_ranks, is_last=is_last, label=label)
                await self.update("/update_weights_from_tensor", await trio.to_thread.run_sync(payload))

    @asynccontextmanager
    async def open_session(self) -> AsyncGenerator[None]:
        """Open an update session on the server for the block. A session that another client left open is closed first."""
        try:
            await self.update("/begin_weight_update", {})
        except EngineStatusError as error:
            if "already open" not in error.body:
                raise
            await self.update("/end_weight_update", {})
            await self.update("/begin_weight_update", {})
        is_over = False
        try:
            yield
            await self.update("/end_weight_update", {})
            is_over = True
        finally:
            if not is_over:  # an open session would refuse the next one
                with trio.move_on_after(_CLEANUP_S, shield=True), suppress(EngineError):
                    await self.update("/end_weight_update", {})

    async def update(self, route: str, body: Mapping[str, Any]) -> None:
        """Call a weight route once. Raises EngineError unless it succeeded.

        The server may answer 400 although the weights are new, because a request that was just ending kept it from flushing its cache: then
        the cache is flushed and the call repeated, which also completes the first call's updates.
        """
        for _ in range(3):
            try:
                return parse_update_answer(route, await self._server.post_json(route, body, kind="sync"))
            except EngineStatusError as error:
                if not is_updated_but_not_flushed(error.status, error.body):
                    raise
                await self.flush()
        raise EngineError(f"{self._name} has new weights, but does not flush the cache of the old ones")

    async def set_label(self, label: str) -> None:
        """Do nothing: every load route sets the label at the moment when the weights change."""
        await trio.lowlevel.checkpoint()

    async def write_label(self, label: str) -> None:
        """Label the server's current weights; running requests continue."""
        await self.update("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def read_label(self) -> str:
        """Return the server's label of its weights."""
        return (await self._read_info())["weight_version"]

    async def compute_checksum(self) -> str:
        """Return a checksum over all weights: equal on two servers if and only if their weights are."""
        route = "/weights_checker"
        response = await self._server.post_json(route, {"action": "checksum"}, kind="sync", idempotent=True)
        parse_update_answer(route, response)
        return str(response["per_engine_checksum"])

    async def _abort_all(self) -> None:
        """Abort running requests and wait for their return: a pause that has to abort takes a second, one without requests takes none."""
        await self._server.post_text("/abort_request", {"abort_all": True}, kind="control", idempotent=True)
        with trio.move_on_after(_ABORT_S):
            while self._count_in_flight():
                await trio.sleep(_POLL_S / 5)

    async def _read_info(self) -> dict[str, str]:
        info = await self._server.get_json("/model_info")
        try:
            return {name: str(info[name]) for name in ("model_path", "weight_version")}
        except (KeyError, TypeError) as error:
            raise EngineProtocolError(f"{self._name}: /model_info lacks {error}, it is {str(info)[:500]}") from error

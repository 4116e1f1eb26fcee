"""Pause, weight update and resume of one vLLM server: its control routes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import trio

from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.vllm.output_head import stage_output_head
from rollouts.engines.vllm.protocol import parse_load_answer
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import CheckpointError, EngineError, EngineProtocolError

PauseMode = Literal["keep", "abort"]
"""Effect of a pause on running requests: they continue afterwards, or return with the tokens they have."""


class VLLMWeights:
    """Weights of one server. Stateless apart from the server's address."""

    def __init__(self, name: str, server: HTTPEndpoint, pause_mode: PauseMode, is_on_cpu: Callable[[], bool], paths: PathMap) -> None:
        """
        Args:
            name: name of the engine, for messages.
            is_on_cpu: whether the server computes on a CPU, where it keeps the old output head unless the weights have one.
            paths: map from local directories to those of the server.
        """
        self._name = name
        self._server = server
        self._pause_mode = pause_mode
        self._is_on_cpu = is_on_cpu
        self._paths = paths

    async def pause(self) -> None:
        """Stop generating. New requests wait at the server. Idempotent."""
        # not mode=wait, which returns without requests that are still queued; not clear_cache=false, which mixes two policies in one cache
        params = {"mode": self._pause_mode, "clear_cache": "true"}
        await self._server.post_json("/pause", None, kind="control", idempotent=True, params=params)

    async def resume(self) -> None:
        """Continue generating. Idempotent."""
        await self._server.post_json("/resume", None, kind="control", idempotent=True)

    async def sleep(self) -> None:
        """Move the weights to the host and drop keys and values. No request of this client may run."""
        params = {"level": "1", "mode": "wait"}  # level 2 would drop the weights as well
        self._expect_status("/sleep", await self._server.post_json("/sleep", None, kind="sync", params=params), "sleeping")

    async def wake_up(self) -> None:
        """Move the weights back, make room for keys and values, and continue generating."""
        self._expect_status("/wake_up", await self._server.post_json("/wake_up", None, kind="sync"), "awake")

    def _expect_status(self, route: str, answer: Any, expected: str) -> None:
        if not isinstance(answer, dict) or answer.get("status") != expected:
            raise EngineProtocolError(f"{self._name}: {route} answered {str(answer)[:500]}, expected the status {expected!r}")

    async def load_directory(self, path: Path, _label: str) -> None:
        """Load the weights in a directory; set_label follows. An unchecked directory may kill the server."""
        stage = None
        try:
            stage = await trio.to_thread.run_sync(stage_output_head, path) if self._is_on_cpu() else None
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._paths.to_server(stage or path))}}
            parse_load_answer(await self._server.post_json("/collective_rpc", body, kind="sync", idempotent=True))
        except CheckpointError as error:
            raise EngineError(str(error)) from error
        finally:
            if stage is not None:
                shutil.rmtree(stage, ignore_errors=True)
        await self.reset_cache()

    async def reset_cache(self) -> None:
        """Drop keys and values of the old weights. The pause has done so, unless the server ignores clear_cache with mode=keep."""
        params = {"reset_running_requests": "true"}
        answer = await self._server.post_json("/reset_prefix_cache", None, kind="control", idempotent=True, params=params)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineProtocolError(f"/reset_prefix_cache answered {answer!r}: keys and values of the old weights may still be in use")

    async def set_label(self, label: str) -> None:
        """Label the server's current weights."""
        await self._server.post_json("/update_weight_version", {"new_version": label}, kind="control", idempotent=True)

    async def read_label(self) -> str:
        """Return the server's label of its weights."""
        answer = await self._server.get_json("/weight_info")
        if not isinstance(answer, dict) or "weight_version" not in answer:
            raise EngineProtocolError(f"{self._name}: /weight_info answered {answer!r}, expected a weight_version")
        return str(answer["weight_version"])

    async def call(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Call a route for weight transfer; see channels.py."""
        return await self._server.post_json(route, body, kind="sync")

    async def count_workers(self) -> int:
        """Return the number of processes of the server's model, its replicas included."""
        answer = await self._server.get_json("/get_world_size", params={"include_dp": "true"})
        if not isinstance(answer, dict) or not isinstance(answer.get("world_size"), int):
            raise EngineProtocolError(f"{self._name}: /get_world_size answered {answer!r}, expected a world_size")
        return answer["world_size"]

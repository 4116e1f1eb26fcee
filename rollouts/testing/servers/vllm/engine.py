"""The engine of the fake vLLM: a scheduler over weights that may be missing or not fit, and the control routes for a trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import trio

from rollouts.errors import RolloutsError
from rollouts.testing.servers.http import Answer, Request, json_response
from rollouts.testing.servers.models import FakeModel, LoadError, describe_missing, hash_weights
from rollouts.testing.servers.payloads import Refused
from rollouts.testing.servers.routes import Routes
from rollouts.testing.servers.scheduler import Scheduler
from rollouts.testing.servers.vllm.payloads import error_response, read_json, refuse_field

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class EngineDead(RolloutsError):
    """A forward pass would run over missing weights."""


class VLLMEngineCore:
    """Single instances of the server: scheduler, weights, pause, weight-transfer session."""

    def __init__(self, model: FakeModel, scheduler: Scheduler, *, can_sleep: bool, seconds_per_update: float) -> None:
        """
        Args:
            can_sleep: whether memory is released in sleep.
            seconds_per_update: seconds that loading weights takes.
        """
        self.model = model
        self.scheduler = scheduler
        self.is_paused = False
        self.is_sleeping = False
        self.can_sleep = can_sleep
        self.is_dead = False
        self.weights: Literal["good", "absent", "misfit"] = "good"
        self.session_is_open = False
        self._last_path = model.path
        self._loading = trio.Lock()
        self._seconds_per_update = seconds_per_update

    def check_weights(self) -> None:
        """Raise EngineDead, now and from now on, if a forward pass would run over missing weights."""
        if self.is_dead or self.weights != "good" or self.has_no_memory:
            self.is_dead = True
            self.scheduler.abort([])
            raise EngineDead(DEAD)

    @property
    def has_no_memory(self) -> bool:
        """Whether the memory for weights, keys and values is released."""
        return self.is_sleeping and self.can_sleep

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Pause. abort: all requests return the tokens they have. wait: running ones finish, queued ones stay. keep: all are frozen."""
        self.is_paused = True
        self.scheduler.admitting = False
        if mode == "keep":
            self.scheduler.freeze()
            if clear_cache:
                self.scheduler.drop_kv()
        else:
            if mode == "abort":
                self.scheduler.abort(tuple(self.scheduler.sequences))
            await self.scheduler.wait_until_none_runs()
            if not self.is_paused:
                return  # resumed during the wait of this call
            self.scheduler.freeze()
        if clear_cache:
            self.scheduler.cache.reset()

    def resume(self) -> None:
        """Resume, also if nothing is paused."""
        self.is_paused = False
        self.scheduler.thaw()

    def abort(self, request_ids: list[str] | None) -> int:
        """Abort requests by exact id, with the server's prefix; None = all. Return the number for the answer."""
        found = [s for s in self.scheduler.sequences if request_ids is None or s.rid in request_ids]
        self.scheduler.abort(found)
        if request_ids is not None:
            return len(request_ids)
        parents = {s.rid for s in found if sum(t.rid == s.rid for t in found) > 1}
        return len(found) + len(parents)

    async def reload(self, path: str | None) -> None:
        """Load a directory between two steps, one at a time. Raises Refused, with the model in the same state as the real server's."""
        async with self._loading:
            if self.has_no_memory:
                self.check_weights()
            self._last_path = path or self._last_path
            await trio.sleep(self._seconds_per_update)
            if self.weights == "misfit":
                raise worker_failed("start (0) + length (512) exceeds dimension size (511).")
            try:
                self.model.load(Path(self._last_path))
            except LoadError as error:
                self.weights = "misfit" if error.kind == "shape" else "absent"
                raise worker_failed(describe_missing(self._last_path) if error.kind == "missing" else str(error)) from error
            self.weights = "good"


def worker_failed(message: str) -> Refused:
    """Return status 500 of a control route; the connection closes after it."""
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace above for the root cause"
    )
    return Refused(error_response(500, text, "InternalServerError", hang_up=True))


class VLLMControl:
    """Routes that exist with VLLM_SERVER_DEV_MODE=1."""

    def __init__(
        self,
        core: VLLMEngineCore,
        server_info: Callable[[str], Mapping[str, Any]],
        worker_methods: Mapping[str, Callable[..., Any]],
        *,
        on_cpu: bool,
    ) -> None:
        """
        Args:
            worker_methods: methods for /collective_rpc besides the server's own.
            server_info: config_format -> the body of /server_info.
            on_cpu: linear weights are packed and have the checksum of nothing.
        """
        self._core = core
        self._server_info = server_info
        self._worker_methods = worker_methods
        self._on_cpu = on_cpu

    def routes(self) -> Routes:
        """Return the routes."""
        return {
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/is_paused": {"GET": self._get_is_paused},
            "/abort_requests": {"POST": self._abort},
            "/collective_rpc": {"POST": self._call_workers},
            "/update_weight_version": {"POST": self._update_version},
            "/weight_info": {"GET": self._get_weight_info},
            "/weight_checker": {"POST": self._check_weights},
            "/get_world_size": {"GET": self._get_world_size},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/server_info": {"GET": self._get_server_info},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._get_is_sleeping},
        }

    async def _pause(self, request: Request) -> Answer:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            text = (
                "1 validation error:\n  {'type': 'literal_error', 'loc': 'query.mode', "
                f"'msg': \"Input should be 'abort', 'wait' or 'keep'\", 'input': '{mode}', "
                "'ctx': {'expected': \"'abort', 'wait' or 'keep'\"}}"
            )
            raise Refused(error_response(400, text, "Bad Request", "query.mode"))
        await self._core.pause(mode, _is_true(request.query.get("clear_cache", "true")))
        return json_response({"status": "paused"})

    async def _resume(self, request: Request) -> Answer:
        self._core.resume()
        return json_response({"status": "resumed"})

    async def _get_is_paused(self, request: Request) -> Answer:
        return json_response({"is_paused": self._core.is_paused})

    async def _abort(self, request: Request) -> Answer:
        try:
            body = request.json()
        except json.JSONDecodeError as error:
            raise Refused(error_response(400, "Invalid JSON format", "Bad Request")) from error
        if not isinstance(body, dict):
            raise Refused(error_response(400, "Request body must be a JSON object", "Bad Request"))
        return json_response({"status": "aborted", "aborted": self._core.abort(cast("dict[str, Any]", body).get("request_ids") or None)})

    async def _call_workers(self, request: Request) -> Answer:
        body = read_json(request)
        if "method" not in body:
            raise Refused(error_response(400, "Missing 'method' in request body", "Bad Request"))
        method, kwargs = body["method"], body.get("kwargs") or {}
        if method == "check_health":
            return json_response({"results": [None]})
        if method in self._worker_methods:
            return json_response({"results": [self._worker_methods[method](**kwargs)]})
        if method != "reload_weights":
            raise worker_failed(f"'CPUWorker' object has no attribute '{method}'")
        unknown = sorted(set(kwargs) - {"weights_path", "weights_iterator", "is_checkpoint_format"})
        if unknown:
            raise worker_failed(f"GPUModelRunner.reload_weights() got an unexpected keyword argument '{unknown[0]}'")
        await self._core.reload(kwargs.get("weights_path"))
        return json_response({"results": [None]})

    async def _update_version(self, request: Request) -> Answer:
        body = read_json(request) if request.body else {}
        if "new_version" not in body:
            raise refuse_field("missing", "body.new_version", "Field required", None)
        version = body["new_version"]
        if not isinstance(version, str):
            raise refuse_field("string_type", "body.new_version", "Input should be a valid string", version)
        self._core.scheduler.label = version
        return json_response({"success": True, "new_version": version})

    async def _get_weight_info(self, request: Request) -> Answer:
        return json_response({"weight_version": self._core.scheduler.label})

    async def _check_weights(self, request: Request) -> Answer:
        body = read_json(request)
        if body.get("action") not in ("checksum", "reset", "compare"):
            raise refuse_field("literal_error", "body.action", "Input should be 'checksum', 'reset' or 'compare'", body.get("action"))
        found = hash_weights(self._core.model, is_hidden=lambda name: self._on_cpu and ".layers." in name and "_proj." in name)
        checksums = {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in found.items()}
        if body.get("action") == "checksum":
            return json_response({"checksums": checksums})
        baseline = body.get("baseline") or {}
        mismatches = sorted(key for key in checksums.keys() | baseline.keys() if checksums.get(key) != baseline.get(key))
        return json_response({"match": not mismatches, "mismatches": mismatches})

    async def _get_world_size(self, request: Request) -> Answer:
        return json_response({"world_size": 1})

    async def _reset_prefix_cache(self, request: Request) -> Answer:
        scheduler = self._core.scheduler
        if scheduler.running and not _is_true(request.query.get("reset_running_requests", "false")):
            return json_response({"success": False})
        scheduler.drop_kv()
        scheduler.cache.reset()
        return json_response({"success": True})

    async def _get_server_info(self, request: Request) -> Answer:
        return json_response(self._server_info(request.query.get("config_format", "text")))

    async def _sleep(self, request: Request) -> Answer:
        level = int(request.query.get("level", "1"))
        await self._core.pause(request.query.get("mode", "abort"), level >= 1)
        self._core.is_sleeping = True
        return json_response({"status": "sleeping", "level": level})

    async def _wake_up(self, request: Request) -> Answer:
        self._core.is_sleeping = False
        self._core.resume()
        return json_response({"status": "awake", "tags": None})

    async def _get_is_sleeping(self, request: Request) -> Answer:
        return json_response({"is_sleeping": self._core.is_sleeping})


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "yes", "on")

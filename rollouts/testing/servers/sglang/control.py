"""Control routes of the fake SGLang, for a trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from rollouts.testing.servers.http import Answer, Request, Response, ServerDied, json_response
from rollouts.testing.servers.models import LoadError, describe_missing, hash_weights
from rollouts.testing.servers.payloads import is_base64, read_named_tensors
from rollouts.testing.servers.routes import Routes
from rollouts.testing.servers.sglang.engine import SGLangCore, describe_model
from rollouts.testing.servers.sglang.payloads import read_json, refuse, refuse_body
from rollouts.testing.servers.weight_groups import WeightGroup

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be "
    "performed.)\n"
)


class SGLangControl:
    """All routes except generation and health."""

    def __init__(self, core: SGLangCore, server_info: Callable[[], Mapping[str, Any]]) -> None:
        """server_info: returns the body of /server_info."""
        self._core = core
        self._server_info = server_info

    def routes(self) -> Routes:
        """Return the routes."""
        return {
            "/abort_request": {"POST": self._abort},
            "/pause_generation": {"POST": self._pause},
            "/continue_generation": {"POST": self._continue},
            "/flush_cache": {"POST": self._flush, "GET": self._flush},
            "/update_weights_from_disk": {"POST": self._update_from_disk},
            "/begin_weight_update": {"POST": self._begin},
            "/end_weight_update": {"POST": self._end},
            "/update_weights_from_tensor": {"POST": self._update_from_tensor},
            "/init_weights_update_group": {"POST": self._join_group},
            "/destroy_weights_update_group": {"POST": self._leave_group},
            "/update_weights_from_distributed": {"POST": self._update_from_group},
            "/update_weight_version": {"POST": self._update_version},
            "/weights_checker": {"POST": self._check_weights},
            "/get_weights_by_name": {"POST": self._get_weights, "GET": self._get_weights},
            "/release_memory_occupation": {"POST": self._release_memory},
            "/resume_memory_occupation": {"POST": self._resume_memory},
            "/model_info": {"GET": self._get_model_info},
            "/get_model_info": {"GET": self._get_model_info},
            "/server_info": {"GET": self._get_server_info},
            "/get_server_info": {"GET": self._get_server_info},
        }

    async def _abort(self, request: Request) -> Answer:
        body = read_json(request)
        if body.get("abort_all"):
            self._core.abort_all()
        elif body.get("rid"):
            self._core.abort(body["rid"])
        return Response(200, content_type=None)

    async def _pause(self, request: Request) -> Answer:
        mode = read_json(request).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            message = "Input should be 'abort', 'retract' or 'in_place'"
            raise refuse_body("literal_error", "('body', 'PauseGenerationReqInput', 'mode')", message, mode, request)
        await self._core.pause(mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Answer:
        read_json(request)
        await self._core.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Answer:
        text = request.query.get("timeout", "0")
        try:
            timeout_s = float(text)
        except ValueError as error:
            message = "Input should be a valid number, unable to parse string as a number"
            raise refuse_body("float_parsing", "('query', 'timeout')", message, text, request) from error
        if timeout_s > 0:
            with trio.move_on_after(timeout_s) as scope:
                await self._core.scheduler.wait_until_idle()
            if scope.cancelled_caught:
                return Response(400, b"Timed out waiting for idle state.", None)
        return Response(200, FLUSHED.encode(), None) if self._core.flush() else Response(400, b"Flush cache failed.\n", None)

    async def _update_from_disk(self, request: Request) -> Answer:
        body = read_json(request, ["model_path"])
        core, path = self._core, body["model_path"]
        if body.get("abort_all_requests"):
            core.abort_all()
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise ServerDied(f"unknown load format {body['load_format']}")

        async def apply() -> None:
            try:
                core.model.load(Path(path))
            except LoadError as error:
                if error.kind in ("damaged", "shape"):
                    raise ServerDied(str(error)) from error
                raise

        try:
            is_success, message = await core.load(apply, body, "Succeeded to update model weights.")
        except LoadError as error:
            reason = str(error)
            if error.kind == "missing":
                reason = describe_missing(path)
            is_success, message = False, f"Failed to get weights iterator: {reason}."
        if is_success:
            core.model_path = path
        return _report(is_success, message, num_paused_requests=0)

    async def _begin(self, request: Request) -> Answer:
        read_json(request)
        async with self._core.update():
            if self._core.session_is_open:
                return _report(False, "a weight-update session is already open; call end_weight_update() first")
            self._core.session_is_open = True
        return _report(True, "Success")

    async def _end(self, request: Request) -> Answer:
        read_json(request)
        async with self._core.update():
            if not self._core.session_is_open:
                return _report(False, "no weight-update session is open; call begin_weight_update() first")
            self._core.session_is_open = False
        return _report(True, "Success")

    async def _update_from_tensor(self, request: Request) -> Answer:
        body = read_json(request, ["serialized_named_tensors"])
        core = self._core
        if body.get("abort_all_requests"):
            core.abort_all()
        payload = body["serialized_named_tensors"][0]
        if not is_base64(payload):
            message = "Value error, Expected base64-encoded bytes"
            raise refuse_body("value_error", "('body', 'serialized_named_tensors')", message, payload[:100], request)
        if not core.session_is_open:
            return _report(False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")

        async def apply() -> None:
            try:
                core.model.load_tensors(read_named_tensors(payload))
            except LoadError as error:
                raise ServerDied(str(error)) from error

        return _report(*await core.load(apply, body, "Success"))

    async def _join_group(self, request: Request) -> Answer:
        body = read_json(request, ["master_address", "master_port", "rank_offset", "world_size"])
        name = body.get("group_name", "weight_update_group")
        try:
            if body.get("backend", "nccl") != "gloo":
                raise LoadError("missing", "no GPU here: use the backend gloo")
            place = (body["master_address"], int(body["master_port"]), int(body["rank_offset"]), int(body["world_size"]))
            self._core.groups[name] = await WeightGroup.join(*place, name)
        except LoadError as error:
            return _report(False, f"Failed to initialize custom process group: {error}.")
        return _report(True, "Succeeded to initialize custom process group.")

    async def _leave_group(self, request: Request) -> Answer:
        if self._core.groups.pop(read_json(request).get("group_name", "weight_update_group"), None) is None:
            return _report(False, "The group to be destroyed does not exist.")
        return _report(True, "Succeeded to destroy custom process group.")

    async def _update_from_group(self, request: Request) -> Answer:
        body = read_json(request, ["names", "dtypes", "shapes"])
        core = self._core
        if body.get("abort_all_requests"):
            core.abort_all()
        if not core.session_is_open:
            return _report(False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        group = core.groups.get(body.get("group_name", "weight_update_group"))

        async def apply() -> None:
            if group is None:
                raise LoadError("missing", "the group is not there. Please call `init_weights_update_group` first.")
            is_bucket = body.get("load_format") == "flattened_bucket"
            tensors = await group.receive(body["names"], body["dtypes"], body["shapes"], is_bucket=is_bucket)
            core.model.load_tensors(tensors)

        try:
            return _report(*await core.load(apply, body, "Succeeded to update parameter online."))
        except LoadError as error:
            if error.kind == "shape":
                text = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
                return _report(False, f"Failed to update parameter online: {error}. {text}")
            return _report(False, f"Failed to receive weights: {error}")

    async def _update_version(self, request: Request) -> Answer:
        body = read_json(request, ["new_version"])
        if body.get("abort_all_requests", True):
            self._core.abort_all()
        version = body["new_version"]
        if not isinstance(version, str):
            raise refuse_body("string_type", "('body', 'new_version')", "Input should be a valid string", version, request)
        self._core.label = self._core.scheduler.label = version
        return json_response({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _check_weights(self, request: Request) -> Answer:
        read_json(request)
        checksums = {name: digest[:16] for name, digest in hash_weights(self._core.model).items()}
        overall = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
        ranks = [{"checksums": checksums, "per_gpu_checksum": overall, "parallelism_info": [place]}]
        return json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall})

    async def _get_weights(self, request: Request) -> Answer:
        raise refuse("Get parameter by name failed")

    async def _release_memory(self, request: Request) -> Answer:
        if self._core.scheduler.running:
            raise ServerDied("release_memory_occupation should be called only when server is idle.")
        self._core.has_memory = not self._core.can_sleep
        return json_response(None)

    async def _resume_memory(self, request: Request) -> Answer:
        self._core.has_memory = True
        return json_response(None)

    async def _get_model_info(self, request: Request) -> Answer:
        return json_response(describe_model(self._core))

    async def _get_server_info(self, request: Request) -> Answer:
        return json_response(self._server_info())


def _report(is_success: bool, message: str, **fields: Any) -> Response:
    return json_response({"success": is_success, "message": message, **fields}, 200 if is_success else 400)

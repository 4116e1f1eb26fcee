"""The weight-transfer routes of the fake vLLM, for the transports that work without a GPU."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollouts.testing.servers.http import Answer, Request, json_response
from rollouts.testing.servers.models import LoadError, read_safetensors
from rollouts.testing.servers.payloads import read_buffers
from rollouts.testing.servers.routes import Routes
from rollouts.testing.servers.vllm.engine import VLLMEngineCore, worker_failed
from rollouts.testing.servers.vllm.payloads import read_json
from rollouts.testing.servers.vllm.settings import Transport
from rollouts.testing.servers.weight_groups import WeightGroup

GROUP_NAME = "vllm"
"""Name of the group over gloo; NCCL has no such name."""

GPU = "GPU-of-a-fake"
"""Uuid of the server's GPU."""

_NCCL_FIELDS = frozenset({
    "master_address", "master_port", "rank_offset", "world_size", "packed", "packed_buffer_size_bytes", "packed_num_buffers",
    "nccl_unique_id_b64",
})  # fmt: skip

Receive: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[dict[str, Tensor]]]
"""update_info -> the tensors of one bucket. Raises LoadError."""


class VLLMWeightTransfer:
    """Weight-transfer routes over one transport."""

    def __init__(self, core: VLLMEngineCore, transport: Transport | None, *, allows_pickles: bool) -> None:
        """allows_pickles: as with VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
        self._core, self._transport, self._allows_pickles = core, transport, allows_pickles
        self._group: WeightGroup | None = None
        self._is_ready = transport == "disk"
        self._is_packed = False
        self._received: dict[str, Tensor] = {}  # tensors received since the start of an update
        receivers: dict[str, Receive] = {"nccl": self._receive_over_nccl, "gloo": self._receive_broadcast, "ipc": self._open_buffer}
        self._receive = receivers.get(str(transport), self._receive_over_nccl)

    def routes(self) -> Routes:
        """Return the routes."""
        return {
            "/init_weight_transfer_engine": {"POST": self._init},
            "/start_weight_update": {"POST": self._start},
            "/update_weights": {"POST": self._update},
            "/finish_weight_update": {"POST": self._finish},
            "/shutdown_weight_transfer_engine": {"POST": self._shut_down},
        }

    def _require_backend(self) -> None:
        if self._transport is None:
            raise worker_failed("Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.")

    async def _init(self, request: Request) -> Answer:
        info = read_json(request).get("init_info", {})
        self._require_backend()
        known = {"nccl": _NCCL_FIELDS, "gloo": _NCCL_FIELDS, "ipc": {"packed"}}.get(str(self._transport))
        unknown = sorted(set(info) - known) if known is not None else []
        if unknown:
            name = "IPC" if self._transport == "ipc" else "NCCL"
            text = f"{name}WeightTransferInitInfo.__init__() got an unexpected keyword argument '{unknown[0]}'"
            raise worker_failed(f"Invalid init_info for {name}WeightTransferEngine: {text}")
        if self._transport == "nccl":
            raise worker_failed("Cannot access accelerator device when none is available.")
        if self._transport == "gloo":
            place = (info["master_address"], int(info["master_port"]), int(info["rank_offset"]), int(info["world_size"]))
            try:
                self._group = await WeightGroup.join(*place, GROUP_NAME)
            except LoadError as error:
                raise worker_failed(str(error)) from error
        self._is_packed, self._is_ready = bool(info.get("packed", False)), True
        return json_response({"message": "Weight transfer initialized"})

    async def _start(self, request: Request) -> Answer:
        self._require_backend()
        if self._core.session_is_open:
            raise worker_failed("start_weight_update called while a weight update is already active. Call finish_weight_update first.")
        self._core.session_is_open = True
        self._received = {}
        if self._transport != "disk":
            self._core.weights = "absent"  # tensors of a checkpoint are received into an empty model
        return json_response({"message": "Weight update started"})

    async def _update(self, request: Request) -> Answer:
        info = read_json(request).get("update_info", {})
        self._require_backend()
        if not self._core.session_is_open:
            raise worker_failed("start_weight_update must be called before update_weights.")
        if self._transport == "disk":
            self._load_directory(Path(str(info.get("path"))))
            return json_response({"message": "Weights updated"})
        try:
            tensors = await self._receive(info)
            misfits = [name for name in self._core.model.find_misfits(tensors) if name in tensors]
            if misfits:
                raise LoadError("shape", f"start (0) + length (8) exceeds dimension size (4) of {misfits[0]}.")
        except LoadError as error:
            self._core.session_is_open = False
            raise worker_failed(str(error)) from error
        self._received.update(tensors)
        return json_response({"message": "Weights updated"})

    def _load_directory(self, path: Path) -> None:
        try:
            tensors = read_safetensors(path)
        except LoadError as error:
            texts = {"missing": f"[Errno 2] No such file or directory: '{path}'", "empty": f"{path}: no .safetensors"}
            raise worker_failed(texts.get(error.kind) or _describe_damage(path)) from error
        misfits = self._core.model.find_misfits(tensors)
        if misfits:
            raise worker_failed(f"checkpoint {path} does not match: {misfits}")
        self._core.model.load_tensors(tensors)

    async def _receive_over_nccl(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        raise LoadError("missing", "NCCL weight transfer not initialized. Call init_transfer_engine() first.")

    async def _receive_broadcast(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        if self._group is None:
            raise LoadError("missing", "NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        _check_lengths(info)
        return await self._group.receive(info["names"], info["dtype_names"], info["shapes"], is_bucket=self._is_packed)

    async def _open_buffer(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        if not self._is_ready or not self._is_packed:
            raise LoadError("missing", "this server takes packed buffers only")
        if not self._allows_pickles:
            raise LoadError("missing", "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE_SERIALIZATION=1")
        _check_lengths(info)
        if info.get("tensor_sizes") is None:
            raise LoadError("missing", "`tensor_sizes` is required when packed=True")
        handles = read_buffers(info["ipc_handles_pickled"])
        if GPU not in handles:
            raise LoadError("missing", f"IPC handle not found for GPU UUID {GPU}. Available UUIDs: {list(handles)}")
        packed = torch.frombuffer(bytearray(handles[GPU]), dtype=torch.uint8)
        parts = packed[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        found = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
        try:
            return {name: part.clone().view(getattr(torch, dtype)).view(shape) for name, dtype, shape, part in found}
        except RuntimeError as error:
            raise LoadError("damaged", str(error)) from error

    async def _finish(self, request: Request) -> Answer:
        self._require_backend()
        if not self._core.session_is_open:
            raise worker_failed("finish_weight_update called without a matching start_weight_update.")
        self._core.session_is_open = False
        if self._transport != "disk":
            is_whole = not self._core.model.find_misfits(self._received)
            self._core.model.load_tensors(self._received)
            self._core.weights = "good" if is_whole else "absent"
        version = read_json(request).get("weight_version") if request.body else None
        if version is not None:
            self._core.scheduler.label = version
        return json_response({"message": "Weight update finished"})

    async def _shut_down(self, request: Request) -> Answer:
        self._require_backend()
        if self._core.session_is_open:
            raise worker_failed("Cannot release a trainer connection during a weight update")
        self._group = None
        return json_response({"message": "Weight transfer shut down"})


def _check_lengths(info: Mapping[str, Any]) -> None:
    count = len(info["names"])
    for name in ("dtype_names", "shapes"):
        if len(info[name]) != count:
            raise LoadError("damaged", f"`{name}` should be of the same size as `names`: got {len(info[name])} and {count}")


def _describe_damage(directory: Path) -> str:
    """Describe the file whose size differs from its header."""
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        offsets = [entry["data_offsets"][1] for key, entry in json.loads(data[8:end]).items() if key != "__metadata__"]
        if len(data) != end + max(offsets, default=0):
            return f"{path}: truncated ({len(data)} of {end + max(offsets, default=0)} bytes)"
    return f"{directory}: damaged"

"""How a run brings new weights to its engines: the setting engine.weight_sync as an object.

disk    the trainer writes a directory, every server loads it: any servers, on a disk that all of them see
memory  handed over in this process, or sent inside of requests (SGLang)
group   broadcast from the trainer to all servers: NCCL between GPUs, gloo between CPUs (SGLang)
ipc     read from memory that trainer and servers share on one machine: CUDA IPC, or on a CPU shared memory (SGLang)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch

from integration.config import Config
from integration.sections import EngineSection
from rollouts.backends.factory import parse_device
from rollouts.engines.distributed_weights import open_http_channel, open_shared_memory, open_weight_group
from rollouts.engines.fleet import EngineFleet
from rollouts.engines.fleet_channel import FleetChannel
from rollouts.engines.nccl import load_nccl
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm_transfer import open_vllm_group, open_vllm_ipc
from rollouts.errors import ConfigError, EngineError

MIB = 2**20


@asynccontextmanager
async def open_weight_channel(
    config: Config, engines: Sequence[InferenceEngine], environment: Mapping[str, str]
) -> AsyncGenerator[WeightChannel | None]:
    """The channel to a run's engines; None where they get weights without one. Raises ConfigError, EngineError."""
    section = config.engine
    if section.weight_sync_mode != "channel":
        yield None
        return
    fleet = engines[0] if isinstance(engines[0], EngineFleet) else None
    members: Sequence[InferenceEngine] = engines if fleet is None else fleet.engines
    sglang = [engine for engine in members if isinstance(engine, SGLangEngine)]
    vllm = [engine for engine in members if isinstance(engine, VLLMEngine)]
    assert len(sglang) == len(members) or len(vllm) == len(members), "the engines of a run are of one kind"
    where, how = parse_device(config.model.device), section.weight_sync
    common: dict[str, Any] = {"bucket_bytes": section.weight_sync_mib * MIB, "dtype": section.precision(config.model.device)}
    async with AsyncExitStack() as stack:
        if how == "memory":
            opened = open_http_channel(sglang, **common)
        elif how == "ipc":
            devices = find_server_devices(section, where, environment)
            opened = open_vllm_ipc(vllm, devices, **common) if vllm else open_shared_memory(sglang, devices, **common)
        elif vllm:
            opened = open_vllm_group(vllm, device=where, **common)
        else:
            backend = "gloo" if where.type == "cpu" else "nccl"
            opened = open_weight_group(sglang, backend=backend, master_address=section.weight_sync_address, device=where, **common)
        channel = await stack.enter_async_context(opened)
        yield channel if fleet is None else FleetChannel(fleet, members, channel)


def check_weight_sync(section: EngineSection, *, device: str) -> None:
    """Find out before anything is trained what the engines cannot do. device: of the model section. Raises ConfigError."""
    where, how = parse_device(device).type, section.weight_sync
    if section.kind == "vllm" and how in ("group", "ipc"):
        if where == "cpu":
            what = "over NCCL" if how == "group" else "through memory of its GPU"
            raise ConfigError(
                f"engine.weight_sync is {how!r}, but vLLM takes weights {what} only, and the model is on the CPU: use disk, or "
                "--model.device cuda"
            )
        if how == "group":
            try:
                load_nccl()
            except EngineError as error:
                raise ConfigError(f"engine.weight_sync is {how!r}, but {error}") from error


def find_server_devices(section: EngineSection, device: torch.device, environment: Mapping[str, str]) -> list[torch.device]:
    """The devices that a run's servers on this machine have, as this process numbers them. Raises ConfigError for one it cannot see."""
    if device.type == "cpu":
        return [device]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(torch.cuda.device_count()))) if visible is None else [name for name in visible.split(",") if name]
    wanted = section.gpus or tuple(names[: section.tensor_parallel_size * section.num_servers])
    hidden = [name for name in wanted if name not in names]
    if hidden:
        raise ConfigError(
            f"engine.gpus has {hidden[0]!r}, which this process does not see ({', '.join(names) or 'none'}): with engine.weight_sync ipc "
            "the trainer writes into memory of every GPU of the servers"
        )
    return [torch.device("cuda", names.index(name)) for name in wanted]

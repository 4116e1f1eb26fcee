"""Weight transfer into the memory of SGLang servers: over a process group, through shared memory, or over HTTP.

    async with open_weight_group(engines, backend="nccl", master_address="10.0.0.1") as group:
        await group.update_weights(weights, weight_version=7)

In a group each tensor is sent once to all servers together; SGLang's package is not needed. The tests run gloo over CPUs against the real
server. NCCL takes the same path with another class of torch.distributed and was never run on a GPU by this project.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import torch
import trio
from torch import Tensor

from rollouts.engines.sglang.control import SGLangWeights
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.sglang.protocol import sglang_tensor_payload
from rollouts.engines.weights.channel import BucketRounds, Receiver, WeightTransfer
from rollouts.engines.weights.cuda_ipc import SharedBucket, SharedMemorySender, serialize_handles
from rollouts.engines.weights.membership import LEAVE_S, CreateBody, leave_all, open_membership, place_ranks
from rollouts.engines.weights.torch_groups import GroupBackend, GroupSender, find_device, open_rendezvous
from rollouts.errors import EngineError
from rollouts.weight_specs import Bucket, WeightSpec, cast_bucket

_TENSORS = "/update_weights_from_tensor"


def sglang_group_payload(
    master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: GroupBackend
) -> dict[str, Any]:
    """Return the body of SGLang's /init_weights_update_group. The server's processes get the ranks from rank_offset on."""
    return {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }


def sglang_bucket_payload(bucket: Bucket, group_name: str) -> dict[str, Any]:
    """Return the body of SGLang's /update_weights_from_distributed for a bucket whose bytes are broadcast.

    Neither is the cache flushed nor the label set: both follow after the last bucket.
    """
    return {
        "names": list(bucket.names),
        "dtypes": [spec.dtype for spec in bucket.specs],
        "shapes": [list(spec.shape) for spec in bucket.specs],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def create_sglang_receiver(
    engine: SGLangEngine, route: str, create_body: CreateBody, *, leave: Callable[[], Awaitable[None]] | None = None
) -> Receiver:
    """Return an SGLang server's part in a transfer.

    Args:
        route: route that takes one bucket.
        leave: called when the server did not take all buckets, so that no member waits for it.
    """

    async def receive(routes: SGLangWeights, label: str, rounds: BucketRounds) -> None:
        async with routes.open_session():
            is_over = has_begun = False
            try:
                for bucket in rounds.plan.buckets:
                    parcel = await rounds.take(bucket)
                    has_begun = True
                    await routes.update(route, create_body(bucket, parcel))
                await rounds.finish()
                is_over = True
            finally:
                if has_begun and not is_over and leave is not None:  # also if cancelled: the trainer's thread waits for this server
                    with trio.move_on_after(LEAVE_S, shield=True), suppress(EngineError):
                        await leave()
        await routes.flush()
        await routes.write_label(label)

    async def update(rounds: BucketRounds, specs: Sequence[WeightSpec], weight_version: int) -> Mapping[str, Any]:
        return await engine.update_weights_with(partial(receive, rounds=rounds), specs, weight_version)

    return Receiver(engine.name, engine.check_weights, update, engine.weights.describe)


@asynccontextmanager
async def open_weight_group(
    engines: Sequence[SGLangEngine],
    *,
    backend: GroupBackend = "nccl",
    master_address: str = "127.0.0.1",
    device: torch.device | str | None = None,
    timeout_s: float = 120.0,
    option: str = "timeout_s",
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
) -> AsyncGenerator[WeightTransfer]:
    """Open a process group of this process and all processes of the engines' servers, for the duration of the block.

    Args:
        engines: engines inside of their `async with` blocks; their servers must reach master_address.
        master_address: address of this machine, as the servers see it. The port is chosen.
        device: device to broadcast from; default: the current GPU for nccl, the CPU for gloo.
        timeout_s: seconds until all have joined, and for one broadcast.
        option: name under which the user sets timeout_s, for messages.
        bucket_bytes: size of a bucket; a transfer needs twice this on the device besides the weights.
        dtype: see WeightTransfer.

    Yields: a WeightChannel. After a failed transfer the group is unusable, and engines whose weights are unknown refuse to generate until
        their next update.
    Raises: EngineError if a server does not join.
    """
    assert engines, "a weight group needs at least one engine"
    name = f"rollouts-{uuid.uuid4().hex}"
    num_ranks = [engine.tensor_parallel_size for engine in engines]
    where = find_device(device if device is not None else "cuda" if backend == "nccl" else "cpu")
    offsets, world_size = place_ranks(num_ranks)
    rendezvous = await open_rendezvous(master_address, backend, name, world_size, timeout_s, option)

    async def join(engine: SGLangEngine, offset: int) -> None:
        body = sglang_group_payload(master_address, rendezvous.port, offset, rendezvous.world_size, name, backend)
        await engine.routes.update("/init_weights_update_group", body)  # returns when all members have joined

    async def leave(engine: SGLangEngine) -> None:
        await engine.routes.update("/destroy_weights_update_group", {"group_name": name})

    joins = [partial(join, engine, offset) for engine, offset in zip(engines, offsets, strict=True)]
    leaves = [partial(leave, engine) for engine in engines]
    async with open_membership(joins, leaves, rendezvous.join) as process_group:
        receivers = [
            create_sglang_receiver(
                engine,
                "/update_weights_from_distributed",
                lambda bucket, _: sglang_bucket_payload(bucket, name),
                leave=partial(leave, engine),
            )
            for engine in engines
        ]
        sender = GroupSender(process_group, where, timeout_s, option)
        transfer = WeightTransfer(receivers, sender, bucket_bytes=bucket_bytes, dtype=dtype)
        del process_group, sender
        try:
            yield transfer
        finally:
            with trio.CancelScope(shield=True):
                await leave_all(leaves)
            transfer.close()


@asynccontextmanager
async def open_shared_memory(
    engines: Sequence[SGLangEngine],
    devices: Sequence[torch.device | str] = ("cpu",),
    *,
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
) -> AsyncGenerator[WeightTransfer]:
    """Open a transfer through memory that this process and the servers' share, on one machine: on GPUs by CUDA IPC.

    Args:
        engines: engines inside of their `async with` blocks.
        devices: devices to write buckets on: the GPU of each tensor parallel rank of the first engine, of the second, ..., the same number
            for each; or one for each engine or for all, whose ranks then copy from it.
        bucket_bytes: size of a shared bucket; a transfer needs twice this on each device.
        dtype: see WeightTransfer.

    Yields: a WeightChannel.
    """

    def create_body(index: int, bucket: Bucket, shared: SharedBucket) -> Mapping[str, Any]:
        own = shared.of_engine(index, len(engines))
        return {"serialized_named_tensors": serialize_handles(bucket, own, engines[index].tensor_parallel_size), "flush_cache": False}

    sender = SharedMemorySender([find_device(device) for device in devices])
    receivers = [create_sglang_receiver(engine, _TENSORS, partial(create_body, i)) for i, engine in enumerate(engines)]
    try:
        yield WeightTransfer(receivers, sender, bucket_bytes=bucket_bytes, dtype=dtype)
    finally:
        sender.give_up()


class _HTTPSender:
    """Send weights inside of the requests: slow, but between any two machines, without a group."""

    wants_device = False
    is_usable = True

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> str:
        """Return a pickle of the tensors, in base64."""
        named = list(cast_bucket(bucket, tensors).items())
        body = await trio.to_thread.run_sync(partial(sglang_tensor_payload, named, 1, is_last=False, label=None))
        return body["serialized_named_tensors"][0]

    async def transmit(self, parcel: str) -> None:
        await trio.lowlevel.checkpoint()

    def give_up(self) -> None:
        pass


@asynccontextmanager
async def open_http_channel(
    engines: Sequence[SGLangEngine], *, bucket_bytes: int = 32 * 2**20, dtype: str | None = None
) -> AsyncGenerator[WeightTransfer]:
    """Open a transfer inside of HTTP requests, one copy for each server. Arguments as of open_shared_memory. Yields: a WeightChannel."""

    def create_body(engine: SGLangEngine, bucket: Bucket, text: str) -> Mapping[str, Any]:
        return {"serialized_named_tensors": [text] * engine.tensor_parallel_size, "flush_cache": False}

    receivers = [create_sglang_receiver(engine, _TENSORS, partial(create_body, engine)) for engine in engines]
    await trio.lowlevel.checkpoint()
    yield WeightTransfer(receivers, _HTTPSender(), bucket_bytes=bucket_bytes, dtype=dtype)

"""New weights straight into the memory of SGLang servers: over a process group, through memory that both can see, or over HTTP.

    async with open_weight_group(engines, backend="nccl", master_address="10.0.0.1") as group:
        await group.update_weights(weights, weight_version=7)

In a group each tensor travels once to all servers together; SGLang's package is not needed. Gloo over CPUs is what the tests run, against
the real server. NCCL takes the same path with another class of torch.distributed and was never run on a GPU by this project.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import trio
from torch import Tensor

from rollouts.engines.cuda_ipc import SharedBucket, SharedMemorySender, serialize_handles
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.sglang_protocol import sglang_tensor_payload
from rollouts.engines.sglang_weights import SGLangWeights
from rollouts.engines.torch_groups import GroupBackend, GroupSender, find_device, open_rendezvous
from rollouts.engines.weight_transfer import BucketRounds, Receiver, WeightTransfer
from rollouts.errors import EngineError, raise_single_errors
from rollouts.weight_plan import Bucket, WeightSpec, cast_bucket

LEAVE_S = 10.0
"""Most time for leaving a group, of a server or the trainer."""

_TENSORS = "/update_weights_from_tensor"

CreateBody: TypeAlias = Callable[[Bucket, Any], Mapping[str, Any]]
"""(bucket, what the sender prepared for it) -> the body of the route that takes it."""


def sglang_group_payload(
    master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: GroupBackend
) -> dict[str, Any]:
    """The body of SGLang's /init_weights_update_group. Its processes get the ranks from rank_offset on."""
    return {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
        "backend": backend,
    }


def sglang_bucket_payload(bucket: Bucket, group_name: str) -> dict[str, Any]:
    """The body of SGLang's /update_weights_from_distributed for a bucket whose bytes are broadcast.

    Neither the cache is flushed nor the label set: both follow when the last bucket is there.
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
    """How an SGLang server takes part in a transfer.

    Args:
        route: that takes one bucket.
        leave: called when the server did not take all buckets, so that nobody waits for it.
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
                if has_begun and not is_over and leave is not None:  # cancelled, too: the trainer's thread waits for this server
                    with trio.move_on_after(LEAVE_S, shield=True), suppress(EngineError):
                        await leave()
        await routes.flush()
        await routes.write_label(label)

    async def update(rounds: BucketRounds, specs: Sequence[WeightSpec], weight_version: int) -> Mapping[str, Any]:
        return await engine.update_weights_with(partial(receive, rounds=rounds), specs, weight_version)

    return Receiver(engine.name, engine.check_weights, update, engine.describe_weights)


@asynccontextmanager
async def open_weight_group(
    engines: Sequence[SGLangEngine],
    *,
    backend: GroupBackend = "nccl",
    master_address: str = "127.0.0.1",
    device: torch.device | str | None = None,
    timeout_s: float = 120.0,
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
) -> AsyncGenerator[WeightTransfer]:
    """A process group of this process and all processes of the engines' servers, for as long as the block is open.

    Args:
        engines: entered; their servers must reach master_address.
        master_address: of this machine, as the servers see it. The port is chosen.
        device: that tensors are broadcast from; default: the current GPU for nccl, the CPU for gloo.
        timeout_s: until all have joined, and of one broadcast.
        bucket_bytes: that travel at a time, and are needed twice on the device besides the weights.
        dtype: see WeightTransfer.

    Yields: a WeightChannel. After a failure on the way the group is of no more use, and engines whose weights are not known refuse to
        generate until they get others.
    Raises: EngineError if a server does not join.
    """
    assert engines, "a weight group needs at least one engine"
    name = f"rollouts-{uuid.uuid4().hex}"
    num_ranks = [engine.tensor_parallel_size for engine in engines]
    where = find_device(device if device is not None else "cuda" if backend == "nccl" else "cpu")
    offsets, world_size = place_ranks(num_ranks)
    rendezvous = await open_rendezvous(master_address, backend, name, world_size, timeout_s)

    async def join(engine: SGLangEngine, offset: int) -> None:
        await engine.join_weight_group(sglang_group_payload(master_address, rendezvous.port, offset, rendezvous.world_size, name, backend))

    joins = [partial(join, engine, offset) for engine, offset in zip(engines, offsets, strict=True)]
    leaves = [partial(engine.leave_weight_group, name) for engine in engines]
    async with open_membership(joins, leaves, rendezvous.join) as process_group:
        receivers = [
            create_sglang_receiver(
                engine, "/update_weights_from_distributed", lambda bucket, _: sglang_bucket_payload(bucket, name), leave=leave
            )
            for engine, leave in zip(engines, leaves, strict=True)
        ]
        transfer = WeightTransfer(receivers, GroupSender(process_group, where, timeout_s), bucket_bytes=bucket_bytes, dtype=dtype)
        del process_group
        try:
            yield transfer
        finally:
            with trio.CancelScope(shield=True):
                await _leave_all(leaves)
            transfer.close()


@asynccontextmanager
async def open_shared_memory(
    engines: Sequence[SGLangEngine],
    devices: Sequence[torch.device | str] = ("cpu",),
    *,
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
) -> AsyncGenerator[WeightTransfer]:
    """Weights through memory that this process and the servers' share, on one machine: on GPUs by CUDA IPC.

    Args:
        engines: entered.
        devices: where buckets are written: the GPU of each tensor parallel rank of the first engine, of the second, ..., as many for each;
            or one for each engine or for all, whose ranks then copy from it.
        bucket_bytes: that are shared at a time, and needed twice on each device.
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
    """Weights inside of the requests: slow, but from any machine to any other, and nothing has to be joined."""

    wants_device = False
    is_usable = True

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> str:
        """A pickle of the tensors, in base64."""
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
    """Weights inside of HTTP requests, each server getting its own copy. Arguments as of open_shared_memory. Yields: a WeightChannel."""

    def create_body(engine: SGLangEngine, bucket: Bucket, text: str) -> Mapping[str, Any]:
        return {"serialized_named_tensors": [text] * engine.tensor_parallel_size, "flush_cache": False}

    receivers = [create_sglang_receiver(engine, _TENSORS, partial(create_body, engine)) for engine in engines]
    await trio.lowlevel.checkpoint()
    yield WeightTransfer(receivers, _HTTPSender(), bucket_bytes=bucket_bytes, dtype=dtype)


def place_ranks(num_ranks: Sequence[int]) -> tuple[list[int], int]:
    """Where servers stand in a group whose rank 0 is the trainer, one after another.

    Args:
        num_ranks: processes of each server.

    Returns: the first rank of each server; the size of the group.
    """
    *offsets, world_size = accumulate(num_ranks, initial=1)
    return offsets, world_size


@asynccontextmanager
async def open_membership(
    joins: Sequence[Callable[[], Awaitable[None]]], leaves: Sequence[Callable[[], Awaitable[None]]], join_here: Callable[[], Awaitable[Any]]
) -> AsyncGenerator[Any]:
    """Let servers and this process join a group at the same time.

    Args:
        joins: of each server; returns when all members are there.
        leaves: of the same servers; called for those that joined, if the others did not.
        join_here: this process's part.

    Yields: what join_here returns.
    Raises: EngineError of whoever could not join.
    """
    joined: list[Callable[[], Awaitable[None]]] = []
    groups: list[Any] = []

    async def join(i: int) -> None:
        await joins[i]()
        joined.append(leaves[i])

    async def meet() -> None:
        groups.append(await join_here())

    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for i in range(len(joins)):
                    nursery.start_soon(join, i)
                nursery.start_soon(meet)
    except BaseException:
        with trio.CancelScope(shield=True):
            await _leave_all(joined)
        raise
    yield groups.pop()


async def _leave_all(leaves: Sequence[Callable[[], Awaitable[None]]]) -> None:
    async def leave(one: Callable[[], Awaitable[None]]) -> None:
        with suppress(EngineError):  # a server that is gone has left
            await one()

    with trio.move_on_after(LEAVE_S):
        async with trio.open_nursery() as nursery:
            for one in leaves:
                nursery.start_soon(leave, one)

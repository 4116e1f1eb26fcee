"""Weight transfer into the memory of vLLM servers: over NCCL, or through GPU memory that trainer and server share.

    async with open_vllm_group(engines) as channel:                     # vllm serve ... --weight-transfer-config '{"backend": "nccl"}'
        await channel.update_weights(weights, weight_version=7)

Order of the servers' routes: init once, then for each update start, update for each bucket, finish. Between start and finish a server's
model is empty, and a generation would kill it: the server is paused meanwhile, and after a failure it loads its last directory again.

Written against the schema of vLLM 0.32 and tested against a loopback server that checks names, shapes, order and bytes; NCCL and CUDA
IPC were never run on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
import trio

from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.weights.channel import BucketRounds, Receiver, Sender, WeightTransfer
from rollouts.engines.weights.cuda_ipc import Export, SharedBucket, SharedMemorySender, export_cuda, vllm_handles
from rollouts.engines.weights.membership import LEAVE_S, CreateBody, open_membership, place_ranks
from rollouts.engines.weights.nccl import NCCLSender, create_communicator, join_communicator
from rollouts.engines.weights.torch_groups import find_device
from rollouts.errors import EngineError, EngineStatusError
from rollouts.weight_specs import Bucket, WeightSpec

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
SHUT_DOWN = "/shutdown_weight_transfer_engine"

_MESSAGES = (
    (INIT, "Weight transfer initialized"),
    (START, "Weight update started"),
    (UPDATE, "Weights updated"),
    (FINISH, "Weight update finished"),
)


class Meeting:
    """Rank 0 of a group that servers are about to join: its address, and the wait for them."""

    def __init__(self, address: Mapping[str, Any], join: Callable[[], Awaitable[Sender]]) -> None:
        """
        Args:
            address: fields of init_info: nccl_unique_id_b64, or master_address and master_port.
            join: wait for the servers. Raises EngineError.
        """
        self.address, self.join = address, join


CreateMeeting: TypeAlias = Callable[[int], Awaitable[Meeting]]
"""(number of members) -> their meeting."""


def vllm_group_payload(address: Mapping[str, Any], rank_offset: int, world_size: int, buffer_bytes: int) -> dict[str, Any]:
    """Return the body of vLLM's /init_weight_transfer_engine, for a server with --weight-transfer-config '{"backend": "nccl"}'.

    Args:
        address: see Meeting.
        rank_offset: rank of the server's first process; the trainer is rank 0.
        buffer_bytes: at least the bytes of a bucket of more than one tensor, so that each bucket is one broadcast.
    """
    packed = {"packed": True, "packed_buffer_size_bytes": buffer_bytes, "packed_num_buffers": 2}
    return {"init_info": {**address, "rank_offset": rank_offset, "world_size": world_size, **packed}}


def vllm_bucket_payload(bucket: Bucket) -> dict[str, Any]:
    """Return the body of vLLM's /update_weights for a bucket whose bytes are broadcast."""
    return {
        "update_info": {
            "names": list(bucket.names),
            "dtype_names": [spec.dtype for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
        }
    }


def vllm_ipc_payload(bucket: Bucket, handles: str) -> dict[str, Any]:
    """Return the body of /update_weights for a bucket in memory of the server's GPU. handles: see vllm_handles."""
    body = vllm_bucket_payload(bucket)
    sizes = [spec.num_bytes for spec in bucket.specs]
    return {"update_info": {**body["update_info"], "tensor_sizes": sizes, "ipc_handles_pickled": handles}}


@asynccontextmanager
async def open_vllm_group(
    engines: Sequence[VLLMEngine],
    *,
    device: torch.device | str = "cuda",
    timeout_s: float = 120.0,
    option: str = "timeout_s",
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
    create_meeting: CreateMeeting | None = None,
) -> AsyncGenerator[WeightTransfer]:
    """Open an NCCL group of this process and all processes of the engines' servers, for the duration of the block.

    Args:
        engines: engines inside of their `async with` blocks; their servers run with --weight-transfer-config '{"backend": "nccl"}'.
        device: device to broadcast from.
        timeout_s: seconds until all have joined, and for one broadcast.
        option: name under which the user sets timeout_s, for messages.
        bucket_bytes: size of a bucket; a transfer needs twice this on the device besides the weights.
        dtype: see WeightTransfer.
        create_meeting: creates the meeting; None = over NCCL.

    Yields: a WeightChannel.
    Raises: EngineError if a server does not join, or NCCL is not available here.
    """
    assert engines, "a weight group needs at least one engine"
    where = find_device(device)
    offsets, world_size = place_ranks([await engine.routes.count_workers() for engine in engines])
    meeting = await (partial(_meet_over_nccl, where, timeout_s, option) if create_meeting is None else create_meeting)(world_size)
    joins = [
        partial(_call, engine, INIT, vllm_group_payload(meeting.address, offset, world_size, bucket_bytes))
        for engine, offset in zip(engines, offsets, strict=True)
    ]
    leaves = [partial(_shut_down, engine) for engine in engines]
    async with open_membership(joins, leaves, meeting.join) as sender:
        receivers = [
            create_vllm_receiver(engine, lambda bucket, _: vllm_bucket_payload(bucket), leave=leave)
            for engine, leave in zip(engines, leaves, strict=True)
        ]
        transfer = WeightTransfer(receivers, sender, bucket_bytes=bucket_bytes, dtype=dtype)
        try:
            yield transfer
        finally:
            await _shut_down_all(engines)
            transfer.close()


@asynccontextmanager
async def open_vllm_ipc(
    engines: Sequence[VLLMEngine],
    devices: Sequence[torch.device | str],
    *,
    bucket_bytes: int = 2**28,
    dtype: str | None = None,
    export: Export = export_cuda,
) -> AsyncGenerator[WeightTransfer]:
    """Open a transfer through GPU memory, for servers on this machine whose processes run on `devices`.

    Args:
        engines: engines inside of their `async with` blocks; their servers run with --weight-transfer-config '{"backend": "ipc"}' and
            VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        devices: every GPU that a process of a server runs on, as this process numbers them: those of the first engine, of the second, ...,
            the same number for each; or one that all share.
        bucket_bytes: size of a shared bucket; a transfer needs twice this on each device.
        dtype: see WeightTransfer.
        export: export of handles, for tests.

    Yields: a WeightChannel.
    Raises: EngineError.
    """

    def create_body(index: int, bucket: Bucket, shared: SharedBucket) -> Mapping[str, Any]:
        return vllm_ipc_payload(bucket, vllm_handles(shared.of_engine(index, len(engines)), export))

    for engine in engines:
        await _call(engine, INIT, {"init_info": {"packed": True}})
    sender = SharedMemorySender([find_device(device) for device in devices])
    receivers = [create_vllm_receiver(engine, partial(create_body, i)) for i, engine in enumerate(engines)]
    try:
        yield WeightTransfer(receivers, sender, bucket_bytes=bucket_bytes, dtype=dtype)
    finally:
        await _shut_down_all(engines)
        sender.give_up()


def create_vllm_receiver(engine: VLLMEngine, create_body: CreateBody, *, leave: Callable[[], Awaitable[Any]] | None = None) -> Receiver:
    """Return a vLLM server's part in a transfer.

    Args:
        create_body: returns the body of /update_weights for one bucket.
        leave: called when the server did not take all buckets, so that no member waits for it.
    """

    async def receive(_server: HTTPEndpoint, label: str, rounds: BucketRounds) -> None:
        await _start(engine)
        is_over = has_begun = False
        try:
            for bucket in rounds.plan.buckets:
                parcel = await rounds.take(bucket)
                has_begun = True
                await _call(engine, UPDATE, create_body(bucket, parcel))
            await rounds.finish()
            await _call(engine, FINISH, {"weight_version": label})
            is_over = True
        finally:
            if not is_over:  # an open update would refuse the next one
                with trio.move_on_after(LEAVE_S, shield=True), suppress(EngineError):
                    await engine.routes.call(FINISH)
                if has_begun and leave is not None:
                    with trio.move_on_after(LEAVE_S, shield=True), suppress(EngineError):
                        await leave()

    async def update(rounds: BucketRounds, specs: Sequence[WeightSpec], weight_version: int) -> Mapping[str, Any]:
        return await engine.update_weights_with(partial(receive, rounds=rounds), specs, weight_version)

    return Receiver(engine.name, engine.check_weights, update, engine.weights.describe)


async def _start(engine: VLLMEngine) -> None:
    """Begin an update. An update that another client left open is finished first: all of its weights are about to be replaced."""
    try:
        await _call(engine, START, None)
    except EngineStatusError as error:
        if "already active" not in error.body:
            raise
        await _call(engine, FINISH, None)
        await _call(engine, START, None)


async def _call(engine: VLLMEngine, route: str, body: Mapping[str, Any] | None) -> None:
    """Call a route once. Raises EngineError unless it reports success."""
    answer, expected = await engine.routes.call(route, body), dict(_MESSAGES)[route]
    if not isinstance(answer, dict) or answer.get("message") != expected:
        raise EngineError(f"{engine.name}: {route} answered {str(answer)[:500]}, expected the message {expected!r}")


async def _shut_down(engine: VLLMEngine) -> None:
    await engine.routes.call(SHUT_DOWN)


async def _shut_down_all(engines: Sequence[VLLMEngine]) -> None:
    with trio.move_on_after(LEAVE_S, shield=True):
        for engine in engines:
            with suppress(EngineError):  # a server that is gone has left
                await _shut_down(engine)


async def _meet_over_nccl(device: torch.device, timeout_s: float, option: str, world_size: int) -> Meeting:
    communicator = await trio.to_thread.run_sync(create_communicator, world_size, device)

    async def join() -> Sender:
        await join_communicator(communicator, timeout_s, option)
        return NCCLSender(communicator, device, timeout_s, option)

    return Meeting({"nccl_unique_id_b64": communicator.unique_id}, join)

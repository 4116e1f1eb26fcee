"""New weights straight into the memory of inference servers, over a process group of the trainer (rank 0) and all processes of all servers.

    async with open_weight_group(engines, backend="nccl", master_address="10.0.0.1") as group:
        await group.update_weights(weights, weight_version=7)

Each tensor travels once to all servers together. SGLang is driven here; its package is not needed. Gloo over CPUs is what the tests run,
against the real server. NCCL takes the same path with another class of torch.distributed and was never run on a GPU by this project.

vLLM takes weights over NCCL only, through communicators that its own package makes on the trainer's side. Here are the bodies of its routes
(vllm_*) and the buffers that it expects; they are checked as values, and were not run either.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed
import trio
from torch import Tensor

from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.sglang_protocol import split_into_buckets
from rollouts.engines.sglang_weights import SGLangWeights
from rollouts.errors import EngineError, raise_single_errors

GroupBackend = Literal["nccl", "gloo"]

Bucket = Sequence[tuple[str, Tensor]]
"""Named tensors of one dtype that travel as one."""

_LEAVE_S = 10.0
_OTHERS_S = 1.0  # that a server has to say itself what went wrong, before a broadcast that failed is all that is known


# -- bodies of routes, pure


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
    """The body of SGLang's /update_weights_from_distributed for a bucket that is broadcast by flatten_bucket.

    Neither the cache is flushed nor the label set: both follow when the last bucket is there.
    """
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [_dtype_name(tensor) for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def flatten_bucket(bucket: Bucket, device: torch.device | str) -> Tensor:
    """The bytes of all tensors of a bucket, one after the other: # [bytes] uint8."""
    return torch.cat([tensor.detach().to(device).contiguous().flatten().view(torch.uint8) for _, tensor in bucket])


def vllm_group_payload(
    master_address: str, master_port: int, rank_offset: int, world_size: int, *, buffer_bytes: int = 2**30, num_buffers: int = 2
) -> dict[str, Any]:
    """The body of vLLM's /init_weight_transfer_engine, for a server with --weight-transfer-config '{"backend": "nccl"}'. Packed buffers.

    Args:
        rank_offset: of the server's first process; the trainer is rank 0.
    """
    return {
        "init_info": {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": buffer_bytes,
            "packed_num_buffers": num_buffers,
        }
    }


def vllm_update_payload(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The body of vLLM's /update_weights, which stands between /start_weight_update and /finish_weight_update, for all weights at once."""
    return {
        "update_info": {
            "names": list(weights),
            "dtype_names": [_dtype_name(tensor) for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }
    }


def pack_for_vllm(weights: Mapping[str, Tensor], buffer_bytes: int) -> list[list[str]]:
    """Names of the tensors in each of vLLM's packed buffers: each takes tensors in their order until it holds more than buffer_bytes."""
    buffers: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if size > buffer_bytes:
            buffers.append([])
            size = 0
        buffers[-1].append(name)
        size += tensor.nbytes
    return [names for names in buffers if names]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- SGLang


class WeightGroup:
    """The trainer's end of a group, made by open_weight_group."""

    def __init__(self, engines: Sequence[SGLangEngine], name: str, process_group: Any, device: torch.device, bucket_bytes: int) -> None:
        self._engines = engines
        self._name = name
        self._process_group: Any = process_group  # None once it broke or was closed
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._is_broken = False

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> list[Mapping[str, Any]]:
        """Replace the weights of all engines. What runs goes on or is sent again, as each engine was told.

        Args:
            weights: by parameter name, on any device; must not be written to meanwhile.

        Returns: what each engine answers to update_weights_from_checkpoint, in the order of the engines.
        Raises: EngineError. What does not fit the model is not sent. After a failure on the way the group is of no more use, and engines
            whose weights are not known refuse to generate until they get others.
        """
        if self._process_group is None:
            raise EngineError(f"the weight group {self._name} broke in an earlier update, or was closed: open a new one")
        for engine in self._engines:
            engine.check_weights(weights)
        buckets = split_into_buckets(weights, self._bucket_bytes)
        meeting = _Meeting(len(self._engines))
        answers: dict[int, Mapping[str, Any]] = {}
        failures: list[EngineError] = []

        async def update(i: int) -> None:
            load = partial(self._receive, buckets=buckets, meeting=meeting)
            try:
                answers[i] = await self._engines[i].update_weights_with(load, weights, weight_version)
            except EngineError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async def broadcast() -> None:
            try:
                await self._broadcast(buckets, meeting)
            except EngineError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for i in range(len(self._engines)):
                nursery.start_soon(update, i)
            nursery.start_soon(broadcast)
        if failures:
            raise EngineError(
                f"weight version {weight_version} did not reach all {len(self._engines)} servers of a group: {failures[0]}"
            ) from failures[0]
        return [answers[i] for i in range(len(self._engines))]

    async def _receive(self, routes: SGLangWeights, label: str, *, buckets: Sequence[Bucket], meeting: _Meeting) -> None:
        """One server's part. Nothing is broadcast before every server is paused and ready."""
        async with routes.open_session():
            meeting.arrive()
            await meeting.complete.wait()
            try:
                for bucket in buckets:
                    await routes.update("/update_weights_from_distributed", sglang_bucket_payload(bucket, self._name))
            except EngineError:
                self._is_broken = True
                with trio.move_on_after(_LEAVE_S, shield=True), suppress(EngineError):
                    await routes.update("/destroy_weights_update_group", {"group_name": self._name})  # which ends a broadcast to it
                raise
        await routes.flush()
        await routes.write_label(label)

    async def _broadcast(self, buckets: Sequence[Bucket], meeting: _Meeting) -> None:
        await meeting.complete.wait()
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0

        def broadcast(bucket: Bucket) -> None:
            data = flatten_bucket(bucket, self._device)
            self._process_group.broadcast([data], options).wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        is_over = False
        try:
            for bucket in buckets:
                # not abandoned when cancelled: it ends when all servers have the bucket, when one of them is gone, or when its time is over
                await trio.to_thread.run_sync(broadcast, bucket)
            is_over = True
        except RuntimeError as error:
            if not self._is_broken:
                await trio.sleep(_OTHERS_S)
                raise EngineError(f"the weights could not be broadcast to the servers in the group {self._name}: {error}") from error
        finally:
            if not is_over:
                self.close()

    def close(self) -> None:
        """Leave the group, while nothing is broadcast. A server that waits for a broadcast stops waiting as the connections close."""
        self._process_group = None


class _Meeting:
    """Where a number of tasks wait for one another, once."""

    def __init__(self, num_tasks: int) -> None:
        self._num_missing = num_tasks
        self.complete = trio.Event()

    def arrive(self) -> None:
        """One more is there."""
        self._num_missing -= 1
        if self._num_missing == 0:
            self.complete.set()


@asynccontextmanager
async def open_weight_group(
    engines: Sequence[SGLangEngine],
    *,
    backend: GroupBackend = "nccl",
    master_address: str = "127.0.0.1",
    device: torch.device | str | None = None,
    timeout_s: float = 120.0,
    bucket_bytes: int = 2**28,
) -> AsyncGenerator[WeightGroup]:
    """A process group of this process and all processes of the engines' servers, for as long as the block is open.

    Args:
        engines: entered; their servers must reach master_address.
        master_address: of this machine, as the servers see it. The port is chosen.
        device: that tensors are broadcast from; default: the current GPU for nccl, the CPU for gloo.
        timeout_s: until all have joined, and of one broadcast.
        bucket_bytes: that travel at a time, and are needed on the device besides the weights.

    Raises: EngineError if a server does not join.
    """
    assert engines, "a weight group needs at least one engine"
    name = f"rollouts-{uuid.uuid4().hex}"
    num_ranks = [engine.tensor_parallel_size for engine in engines]
    world_size = 1 + sum(num_ranks)
    where = torch.device(device if device is not None else "cuda" if backend == "nccl" else "cpu")
    # connected before any server is asked: a server may refuse before this process, which would then look for a store that is gone
    stores = list(await trio.to_thread.run_sync(partial(_create_stores, master_address, world_size, timeout_s)))
    port, own_store = stores[0].port, stores.pop()
    joined: list[SGLangEngine] = []
    process_groups: list[Any] = []  # at most this one

    async def join(i: int) -> None:
        offset = 1 + sum(num_ranks[:i])
        await engines[i].join_weight_group(sglang_group_payload(master_address, port, offset, world_size, name, backend))
        joined.append(engines[i])

    async def join_here(nursery: trio.Nursery) -> None:
        create = partial(_create_process_group, backend, own_store, name, world_size, timeout_s)
        try:
            process_groups.append(await trio.to_thread.run_sync(create))
        except RuntimeError as error:
            if not stores:
                return  # given up already, for a reason that is raised elsewhere
            raise EngineError(f"the {backend} group of trainer and servers did not come about: {error}") from error
        nursery.cancel_scope.cancel()

    async def hold_store() -> None:
        """Without the store, whoever waits in it for the others gives up at once."""
        try:
            await trio.sleep_forever()
        finally:
            if not process_groups:
                stores.clear()

    group: WeightGroup | None = None
    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for i in range(len(engines)):
                    nursery.start_soon(join, i)
                async with trio.open_nursery() as inner:
                    inner.start_soon(hold_store)
                    inner.start_soon(join_here, inner)
        group = WeightGroup(engines, name, process_groups.pop(), where, bucket_bytes)
        yield group
    finally:
        with trio.move_on_after(_LEAVE_S, shield=True):
            async with trio.open_nursery() as nursery:
                for engine in joined:
                    nursery.start_soon(_leave, engine, name)
        if group is not None:
            group.close()


async def _leave(engine: SGLangEngine, name: str) -> None:
    with suppress(EngineError):  # a server that is gone has left
        await engine.leave_weight_group(name)


def _create_stores(address: str, world_size: int, timeout_s: float) -> tuple[Any, Any]:
    """The place where the members of a group find one another, and a connection to it."""
    distributed: Any = torch.distributed
    timeout = timedelta(seconds=timeout_s)
    try:
        master = distributed.TCPStore(address, 0, world_size, True, timeout, wait_for_workers=False)
        return master, distributed.TCPStore(address, master.port, world_size, False, timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"this process cannot be reached as {address}: {error}. Give the master_address of this machine") from error


def _create_process_group(backend: GroupBackend, store: Any, name: str, world_size: int, timeout_s: float) -> Any:
    """Rank 0 of a group, apart from torch.distributed's default group, which the trainer may have for itself."""
    distributed: Any = torch.distributed
    # the prefixes under which a server that makes a group of this name looks for the others
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = distributed.PrefixStore(f"{device}/", distributed.PrefixStore(f"{name}/", distributed.PrefixStore(name, store)))
    group_class = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    return group_class(prefixed, 0, world_size, timedelta(seconds=timeout_s))

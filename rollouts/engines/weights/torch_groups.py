"""Process groups of torch.distributed between the trainer (rank 0) and servers, apart from the trainer's own default group."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed
import trio
from torch import Tensor

from rollouts.errors import EngineError, raise_single_errors
from rollouts.weight_specs import Bucket, flatten_bucket

GroupBackend = Literal["nccl", "gloo"]


def find_device(device: torch.device | str) -> torch.device:
    """Return a device with its number: for "cuda" the current one of this thread, unknown to other threads."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


class TorchRendezvous:
    """Store through which the members of a future group find one another. Made by open_rendezvous."""

    def __init__(self, stores: list[Any], backend: GroupBackend, name: str, world_size: int, timeout_s: float, option: str) -> None:
        self.backend: GroupBackend = backend
        self._stores, self.name, self.world_size, self._timeout_s, self._option = stores, name, world_size, timeout_s, option
        self.port: int = stores[0].port
        self._own = stores.pop()  # this process's connection, beside the store itself

    async def join(self) -> Any:
        """Join the servers. If the wait is cancelled, all members waiting in the store give up at once. Raises EngineError."""
        groups: list[Any] = []

        async def meet() -> None:
            create = partial(_create_process_group, self.backend, self._own, self.name, self.world_size, self._timeout_s)
            try:
                groups.append(await trio.to_thread.run_sync(create))
            except RuntimeError as error:
                if not self._stores:
                    return  # given up already; the cause is raised elsewhere
                raise EngineError(
                    f"the {self.backend} group of trainer and servers did not come about within {self._timeout_s:g} s "
                    f"({self._option}): {error}"
                ) from error
            nursery.cancel_scope.cancel()

        async def hold_store() -> None:
            try:
                await trio.sleep_forever()
            finally:
                if not groups:
                    self._stores.clear()

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold_store)
                nursery.start_soon(meet)
        await trio.lowlevel.checkpoint_if_cancelled()
        return groups[0]


async def open_rendezvous(
    address: str, backend: GroupBackend, name: str, world_size: int, timeout_s: float, option: str = "timeout_s"
) -> TorchRendezvous:
    """Open a store for world_size members, this process being rank 0.

    It connects before any server is asked: a server may refuse earlier, and this process would then look for a store that is gone.

    Args:
        option: name under which the user sets timeout_s, for messages.

    Raises: EngineError if this process cannot be reached at the address.
    """
    stores = await trio.to_thread.run_sync(partial(_create_stores, address, world_size, timeout_s))
    return TorchRendezvous(list(stores), backend, name, world_size, timeout_s, option)


class GroupSender:
    """Broadcast buckets to the members of a process group; servers get names, dtypes and shapes separately."""

    def __init__(self, process_group: Any, device: torch.device, timeout_s: float, option: str = "timeout_s") -> None:
        self._process_group: Any = process_group  # None once it broke or was closed
        self._device, self._timeout_s, self._option = device, timeout_s, option

    @property
    def wants_device(self) -> bool:
        """Whether tensors are broadcast from a GPU."""
        return self._device.type != "cpu"

    @property
    def is_usable(self) -> bool:
        """See Sender."""
        return self._process_group is not None

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the bytes of the bucket. # [bytes] uint8"""
        return await trio.to_thread.run_sync(flatten_bucket, bucket, tensors, self._device)

    async def transmit(self, parcel: Tensor) -> None:
        """See Sender. Not abandoned when cancelled: it ends when all have it, when one of them is gone, or at its timeout."""
        try:
            await trio.to_thread.run_sync(self._broadcast, parcel)
        except RuntimeError as error:
            await trio.lowlevel.checkpoint_if_cancelled()  # servers that left because of a cancellation have not failed
            raise EngineError(
                f"the weights could not be broadcast to the servers (deadline: {self._timeout_s:g} s for each bucket, "
                f"{self._option}): {error}"
            ) from error

    def _broadcast(self, data: Tensor) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._process_group.broadcast([data], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def give_up(self) -> None:
        """Leave the group, while no broadcast runs. A server that waits for a broadcast stops waiting as the connections close."""
        self._process_group = None


def _create_stores(address: str, world_size: int, timeout_s: float) -> tuple[Any, Any]:
    """Create the store through which the members of a group find one another, and a connection to it."""
    distributed: Any = torch.distributed
    timeout = timedelta(seconds=timeout_s)
    try:
        master = distributed.TCPStore(address, 0, world_size, True, timeout, wait_for_workers=False)
        return master, distributed.TCPStore(address, master.port, world_size, False, timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"this process cannot be reached as {address}: {error}. Give the master_address of this machine") from error


def _create_process_group(backend: GroupBackend, store: Any, name: str, world_size: int, timeout_s: float) -> Any:
    """Create rank 0 of a group, apart from torch.distributed's default group, which the trainer may use."""
    distributed: Any = torch.distributed
    # prefixes under which a server that makes a group of this name looks for the others
    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = distributed.PrefixStore(f"{device}/", distributed.PrefixStore(f"{name}/", distributed.PrefixStore(name, store)))
    group_class = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    return group_class(prefixed, 0, world_size, timedelta(seconds=timeout_s))

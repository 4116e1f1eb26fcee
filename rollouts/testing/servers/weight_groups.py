"""Process groups through which a fake server receives weights: gloo, joined as a server in another process would join them.

The group does not use torch.distributed's global state, so that the trainer's side may live in the same process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import trio
from torch import Tensor

from rollouts.testing.servers.models import LoadError

_TIMEOUT_S = 60.0
_INTERVAL_S = 0.05  # seconds between two attempts to reach the group's address


class WeightGroup:
    """One rank of a group whose rank 0 broadcasts weights."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @staticmethod
    async def join(address: str, port: int, rank: int, world_size: int, name: str) -> WeightGroup:
        """Join the group at the address. Blocks until all members are there. Raises LoadError if they are not in time."""

        def meet() -> Any:
            distributed: Any = torch.distributed
            prefix = distributed.PrefixStore
            timeout = timedelta(seconds=_TIMEOUT_S)
            store = distributed.TCPStore(address, port, world_size, False, timeout)
            # prefixes that torch.distributed gives to a group of this name, and to its devices
            store = prefix("cpu/", prefix(f"{name}/", prefix(name, store)))
            return distributed.ProcessGroupGloo(store, rank, world_size, timeout)

        try:
            await _wait_for_listener(address, port)
            return WeightGroup(await trio.to_thread.run_sync(meet, abandon_on_cancel=True))
        except (OSError, RuntimeError, ValueError) as error:
            raise LoadError("missing", str(error)) from error

    async def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, is_bucket: bool
    ) -> dict[str, Tensor]:
        """Receive one broadcast for each tensor, or one of all their bytes. Raises LoadError."""
        kinds: list[torch.dtype] = [getattr(torch, dtype) for dtype in dtypes]
        empty = [torch.empty(tuple(shape), dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in empty]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        for name, offset, kind in zip(names, offsets, kinds, strict=True):
            if is_bucket and offset % kind.itemsize:
                raise LoadError("damaged", f"Unaligned received tensor {name}: byte offset {offset}, dtype {kind}")
        received = [torch.empty(sum(sizes), dtype=torch.uint8)] if is_bucket else empty

        def take() -> None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank = 0
            works = [self._group.broadcast([tensor], options) for tensor in received]
            for work in works:
                work.wait()

        try:
            await trio.to_thread.run_sync(take, abandon_on_cancel=True)
        except RuntimeError as error:
            raise LoadError("damaged", str(error)) from error
        if is_bucket:
            parts = zip(offsets, sizes, kinds, empty, strict=True)
            return dict(
                zip(
                    names, (received[0][start : start + size].view(kind).view(like.shape) for start, size, kind, like in parts), strict=True
                )
            )
        return dict(zip(names, received, strict=True))


async def _wait_for_listener(address: str, port: int) -> None:
    """Wait until somebody listens there. A TCPStore that waited would go on in its thread for a minute after a cancellation."""
    for left in reversed(range(int(_TIMEOUT_S / _INTERVAL_S))):
        try:
            stream = await trio.open_tcp_stream(address, port)
        except OSError:
            if left == 0:
                raise
            await trio.sleep(_INTERVAL_S)
        else:
            await stream.aclose()
            return

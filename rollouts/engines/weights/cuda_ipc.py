"""Weight transfer through memory shared by trainer and server on one host: only handles are sent, a server copies from the buffers.

On GPUs these are CUDA IPC handles of buffers; on a CPU, for SGLang, shared memory. Checked as values and, on a CPU, against servers on
loopback; the CUDA handles were never run on a GPU by this project.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch
import torch.multiprocessing.reductions as reductions
import trio
from torch import Tensor

from rollouts.weight_specs import Bucket, flatten_bucket, unflatten_bucket

_DEVICE_INDEX = 6  # index, in the arguments of rebuild_cuda_tensor, of the device's number in this process

Export: TypeAlias = Callable[[Tensor], tuple[str, tuple[Any, ...]]]
"""(tensor on a GPU) -> (uuid of the GPU, arguments from which another process rebuilds the tensor)."""


@dataclass(frozen=True)
class SharedBucket:
    """A bucket that other processes can open, as long as this object exists."""

    flats: tuple[Tensor, ...]  # its bytes, once on each device

    def of_engine(self, index: int, num_engines: int) -> SharedBucket:
        """Return the buffers on one engine's devices: its share of them in order, or all if they cannot be divided evenly.

        An engine is given handles of its own devices only: memory whose handle is never opened is never released.
        """
        per_engine, rest = divmod(len(self.flats), num_engines)
        return self if rest else SharedBucket(self.flats[index * per_engine : (index + 1) * per_engine])


class SharedMemorySender:
    """Write each bucket into a new buffer on each of the devices; the servers' messages are made from the buffers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """
        Args:
            devices: devices of the servers' processes, as this process numbers them; each gets a copy of the bucket.
        """
        assert devices, "a transfer through shared memory needs a device"
        self._devices = tuple(devices)
        self._latest: list[SharedBucket] = []

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        return self._devices[0].type != "cpu"

    @property
    def is_usable(self) -> bool:
        """Always true: a failed transfer leaves no state behind."""
        return True

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> SharedBucket:
        """Write the bucket."""
        shared = await trio.to_thread.run_sync(partial(_write, bucket, tensors, self._devices))
        self._latest = [*self._latest[-1:], shared]  # the buffer before may still be read
        return shared

    async def transmit(self, parcel: SharedBucket) -> None:
        """Do nothing: servers read by themselves."""
        await trio.lowlevel.checkpoint()

    def give_up(self) -> None:
        """Release the buffers; memory that a server still has open stays until it closes it."""
        self._latest = []


def _write(bucket: Bucket, tensors: Mapping[str, Tensor], devices: Sequence[torch.device]) -> SharedBucket:
    first = flatten_bucket(bucket, tensors, devices[0])
    flats = (first, *(first.to(device) for device in devices[1:]))
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a process that opens a handle must see a written buffer
    return SharedBucket(flats)


def export_cuda(tensor: Tensor) -> tuple[str, tuple[Any, ...]]:
    """Return the IPC handle of a tensor on a GPU."""
    _, arguments = reductions.reduce_tensor(tensor)
    return str(torch.cuda.get_device_properties(tensor.device).uuid), tuple(arguments)


def serialize_handles(bucket: Bucket, shared: SharedBucket, num_ranks: int) -> list[str]:
    """Return SGLang's serialized_named_tensors: for each tensor parallel rank a pickle of (name, tensor), in which tensors are handles.

    Args:
        num_ranks: rank i is given the buffer on device i if there are as many, else all are given the first.
    """
    flats = shared.flats if len(shared.flats) == num_ranks else shared.flats[:1] * num_ranks
    # one pickle for each rank, also for the same buffer: opening a handle releases the one reference that was counted for it
    return [_pickle_handles(list(unflatten_bucket(bucket, flat).items())) for flat in flats]


def vllm_handles(shared: SharedBucket, export: Export = export_cuda) -> str:
    """Return vLLM's ipc_handles_pickled for a packed bucket: the handle of its buffer on each GPU, by the GPU's uuid."""
    return base64.b64encode(pickle.dumps(dict(export(flat) for flat in shared.flats))).decode()


class _HandlePickler(ForkingPickler):
    """Pickles tensors as handles. GPUs are named by their uuid, since another process may number them differently; the memory of CPU
    tensors by a file's name, since a server is no child of this process that could inherit a descriptor."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(obj)
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            storage: Any = obj
            metadata = storage._share_filename_cpu_()
            storage._shared_incref()
            return reductions.rebuild_storage_filename, (type(obj), *metadata)
        return NotImplemented


def _pickle_handles(named: list[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    _HandlePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()

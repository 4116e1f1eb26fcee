"""Rank 0 of an NCCL communicator that servers of vLLM join, over NCCL's own library: neither vLLM nor a process group of torch is needed.

vLLM's workers create their communicators themselves, so a process group of torch.distributed cannot join them. They can be given NCCL's
unique id instead of an address; this process then does the same as they do: ncclCommInitRank, an all-reduce of one element, broadcasts.

Written against the header of NCCL 2 and the source of vLLM 0.32; never run on a GPU by this project.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import trio
from torch import Tensor

from rollouts.engines.weights.torch_groups import find_device
from rollouts.errors import EngineError, EngineTimeout
from rollouts.weight_specs import Bucket, flatten_bucket

LIBRARY = "libnccl.so.2"
"""Library name under which torch for CUDA loads NCCL; its package is nvidia-nccl."""

_FLOAT32, _UINT8, _SUM = 7, 1, 0  # ncclDataType_t, ncclRedOp_t
_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """ncclUniqueId, by which the members of a communicator find one another."""

    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class NCCLCommunicator:
    """Rank 0 of a communicator."""

    def __init__(self, library: Any, world_size: int, device: torch.device) -> None:
        """library: see load_nccl. Raises EngineError."""
        self._library, self._world_size, self._device = library, world_size, find_device(device)
        self._id = UniqueId()
        self._comm = ctypes.c_void_p()
        self._check("ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(self._id)))

    @property
    def unique_id(self) -> str:
        """Unique id in base64, for the other members."""
        return base64.b64encode(bytes(self._id)).decode()

    def join(self) -> None:
        """Join the communicator. Blocks until all members are there. Raises EngineError."""
        library = self._library
        with self._on_device():
            self._check("ncclCommInitRank", library.ncclCommInitRank(ctypes.byref(self._comm), self._world_size, self._id, 0))
            one = torch.zeros(1, device=self._device)  # all members do this once, or none
            place = ctypes.c_void_p(one.data_ptr())
            self._check("ncclAllReduce", library.ncclAllReduce(place, place, 1, _FLOAT32, _SUM, self._comm, self._stream()))
            self._synchronize()

    def broadcast(self, data: Tensor) -> None:
        """Send bytes to all others. data: # [bytes] uint8, on the device. Blocks until they are sent. Raises EngineError."""
        assert data.dtype == torch.uint8, f"data is {data.dtype}, expected bytes"
        place = ctypes.c_void_p(data.data_ptr())
        with self._on_device():
            self._check("ncclBroadcast", self._library.ncclBroadcast(place, place, data.numel(), _UINT8, 0, self._comm, self._stream()))
            self._synchronize()

    def abort(self) -> None:
        """End all operations, in other threads too, and leave."""
        if self._comm:
            self._library.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the communicator's device current: the current device is a state of each thread."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _check(self, name: str, result: int) -> None:
        if result != 0:
            text = self._library.ncclGetErrorString(result)
            raise EngineError(f"{name} failed: {text.decode() if isinstance(text, bytes) else text}")


class NCCLSender:
    """Broadcast buckets to the members of a communicator."""

    def __init__(self, communicator: NCCLCommunicator, device: torch.device, timeout_s: float, option: str = "timeout_s") -> None:
        self._communicator: NCCLCommunicator | None = communicator
        self._device, self._timeout_s, self._option = device, timeout_s, option

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        return True

    @property
    def is_usable(self) -> bool:
        """See Sender."""
        return self._communicator is not None

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the bytes of the bucket. # [bytes] uint8"""
        return await trio.to_thread.run_sync(flatten_bucket, bucket, tensors, self._device)

    async def transmit(self, parcel: Tensor) -> None:
        """See Sender. If a member is gone a broadcast does not end by itself: its thread is left running, and ends with give_up()."""
        assert self._communicator is not None, "the communicator was given up"
        try:
            with trio.fail_after(self._timeout_s):
                await trio.to_thread.run_sync(self._communicator.broadcast, parcel, abandon_on_cancel=True)
        except trio.TooSlowError as error:
            raise EngineTimeout(f"a bucket was not broadcast to all servers within {self._timeout_s:g} s ({self._option})") from error

    def give_up(self) -> None:
        """Abort the communicator."""
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator = None


async def join_communicator(communicator: NCCLCommunicator, timeout_s: float, option: str = "timeout_s") -> None:
    """Join the communicator within a time, which the user sets as `option`. Raises EngineError."""
    try:
        with trio.fail_after(timeout_s):
            await trio.to_thread.run_sync(communicator.join, abandon_on_cancel=True)
    except trio.TooSlowError as error:
        raise EngineTimeout(
            f"the NCCL group of trainer and servers did not come about within {timeout_s:g} s ({option}): look at "
            "the servers' logs, and whether they reach this machine on the interface that NCCL_SOCKET_IFNAME names"
        ) from error


def load_nccl() -> Any:
    """Load NCCL's library. Raises EngineError if there is none."""
    try:
        library: Any = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise EngineError(
            f"{LIBRARY} cannot be loaded ({error}): vLLM takes weights over NCCL only. Install torch for CUDA, or sync weights from a "
            "directory"
        ) from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    signatures = (
        ("ncclGetErrorString", ctypes.c_char_p, (number,)),
        ("ncclGetUniqueId", number, (ctypes.POINTER(UniqueId),)),
        ("ncclCommInitRank", number, (ctypes.POINTER(pointer), number, UniqueId, number)),
        ("ncclAllReduce", number, (pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer)),
        ("ncclBroadcast", number, (pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer)),
        ("ncclCommAbort", number, (pointer,)),
    )
    for name, result, arguments in signatures:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def create_communicator(world_size: int, device: torch.device) -> NCCLCommunicator:
    """Create rank 0 of a communicator of world_size members. Raises EngineError."""
    return NCCLCommunicator(load_nccl(), world_size, device)

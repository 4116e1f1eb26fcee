"""Process groups: joining, exchanges between ranks, and statistics over the rows of all ranks.

Every function works with any number of ranks, one included, and every failure names the operation, its rank and the rank it waited for.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.utils.api import get_env_variable_or_raise

from rollouts.algorithms.statistics import masked_mean, masked_var, whiten
from rollouts.backends.ranks.values import DamagedError, dump_value, load_value
from rollouts.errors import BackendError

T = TypeVar("T")

_SIGNS_OF_TIMEOUT = ("timed out", "timeout")
_SIGNS_OF_LOSS = ("connection closed", "connection reset", "connection was closed", "broken pipe", "connection refused", "unreachable")


@dataclass(frozen=True)
class Ranks:
    """Processes of a run, as seen by one of them. Made by init_distributed."""

    rank: int  # rank of this process, from 0
    world_size: int
    device: torch.device  # device of this process
    timeout_s: float  # seconds that an exchange may take
    group: dist.ProcessGroup | None = None  # None = all processes

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, f"rank is {self.rank} of {self.world_size}"


def init_distributed(
    device: str | torch.device = "cpu",
    *,
    timeout_s: float = 1800.0,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Ranks:
    """Join the other processes, or start alone if there are no others. A second call returns the same ranks.

    Exchanges go over gloo for tensors in host memory and over NCCL for tensors on CUDA devices.

    Args:
        device: device of this process; "cuda" without a number = GPU (rank modulo the number of GPUs here), which becomes the current
            device.
        timeout_s: seconds that joining and each later exchange may take before it is an error.
        init_method: None = "env://" under torchrun or if WORLD_SIZE is more than 1; otherwise no rendezvous at all. See
            torch.distributed.init_process_group.
        rank, world_size: None = read from torchrun's environment.

    Raises: BackendError if the other processes do not join.
    """
    device = torch.device(device)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if init_method is None and _is_one_of_several():
            init_method = "env://"
        try:
            if init_method is None:
                assert world_size in (None, 1), f"world_size is {world_size}, but no init_method says where the ranks meet"
                dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1, timeout=timeout)
            else:
                numbers = (-1 if rank is None else rank), (-1 if world_size is None else world_size)  # -1 = from the environment
                dist.init_process_group(kind, init_method=init_method, timeout=timeout, rank=numbers[0], world_size=numbers[1])
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"joining the other processes failed (rendezvous {init_method}, rank {rank}, timeout {timeout_s:g} s): {error}. "
                "Look whether every process was started, reaches the address, and was told the same number of processes"
            ) from error
    found = dist.get_rank()
    if device.type == "cuda":
        if device == torch.device("cuda"):
            device = torch.device("cuda", found % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return Ranks(rank=found, world_size=dist.get_world_size(), device=device, timeout_s=timeout_s)


def _is_one_of_several() -> bool:
    """Whether a launcher, torchrun or another with its variables, has started this process as one of several."""
    return dist.is_torchelastic_launched() or count_launched() > 1


def count_launched() -> int:
    """Count the processes started by a launcher, torchrun or another with its variables; 1 without a launcher."""
    try:
        return int(get_env_variable_or_raise("WORLD_SIZE"))
    except ValueError:
        return 1


def leave_distributed() -> None:
    """Leave the process group, if there is one. No exchange may be running: synchronize, then barrier."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def explain_failures(ranks: Ranks, operation: str) -> Generator[None]:
    """Raise a failed exchange in the block as a BackendError that names the operation; other errors pass.

    Args:
        operation: name of the exchange, for example "gathering the metrics".
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        lost = any(sign in text for sign in _SIGNS_OF_LOSS)
        late = any(sign in text for sign in _SIGNS_OF_TIMEOUT)
        if isinstance(error, BackendError) or not (lost or late or isinstance(error, dist.DistError)):
            raise
        where = f"{operation} on rank {ranks.rank} of {ranks.world_size}"
        if lost:
            raise BackendError(
                f"{where}: the connection to another rank is lost, its process has ended. Its output says why ({error})"
            ) from error
        if late:
            raise BackendError(
                f"{where} was not finished within {ranks.timeout_s:g} s: another rank has not come to the same operation. Look at the "
                f"output of all ranks; raise the timeout if one of them may take so long ({error})"
            ) from error
        raise BackendError(f"{where} failed: {error}") from error


def barrier(ranks: Ranks, operation: str = "waiting for all ranks") -> None:
    """Wait until every rank has called it and the work of its device is done."""
    synchronize(ranks.device)
    if ranks.world_size > 1:
        # a sum in host memory goes over gloo, which reports a timeout as an error; NCCL would end the process
        all_reduce(ranks, torch.zeros(1), operation=operation)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its queued work. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def all_reduce(ranks: Ranks, x: Tensor, *, operation: str = "adding up a tensor over ranks") -> Tensor:
    """Sum over ranks, elementwise; x is not changed. # any shape, the same on every rank."""
    x = x.detach().clone()
    if ranks.world_size > 1:
        with explain_failures(ranks, operation):
            dist.all_reduce(x, group=ranks.group)
    return x


def all_gather(ranks: Ranks, x: Tensor, *, operation: str = "gathering a tensor from all ranks") -> list[Tensor]:
    """Gather the tensor of every rank, by rank. x: # any shape and dtype, the same on every rank."""
    x = x.detach().contiguous()
    if ranks.world_size == 1:
        return [x.clone()]
    out = [torch.empty_like(x) for _ in range(ranks.world_size)]
    with explain_failures(ranks, operation):
        dist.all_gather(out, x, group=ranks.group)
    return out


def broadcast(ranks: Ranks, x: Tensor, *, source: int = 0, operation: str = "sending a tensor to all ranks") -> Tensor:
    """Return the tensor of rank `source`; x is not changed. x: # shape and dtype the same on every rank, values read on `source` only."""
    assert 0 <= source < ranks.world_size, f"source is {source}, expected a rank below {ranks.world_size}"
    x = x.detach().clone()
    if ranks.world_size > 1:
        with explain_failures(ranks, operation):
            dist.broadcast(x, group=ranks.group, group_src=source)
    return x


def gather_values(ranks: Ranks, value: T, *, operation: str = "gathering values from all ranks") -> list[T]:
    """Gather the value of every rank, by rank: plain values and tensors, see values.py. Received values run and import nothing.

    Raises: NotPlainError for any other value; BackendError for received bytes that are no value.
    """
    if ranks.world_size == 1:
        return [value]
    data = torch.frombuffer(bytearray(dump_value(value)), dtype=torch.uint8).to(_messages_device(ranks))
    sizes = [int(size) for size in all_gather(ranks, torch.tensor([len(data)], device=data.device), operation=operation)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    parts = all_gather(ranks, padded, operation=operation)
    try:
        return [load_value(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
    except DamagedError as error:
        raise BackendError(f"{operation} on rank {ranks.rank} of {ranks.world_size}: {error}") from error


def _messages_device(ranks: Ranks) -> torch.device:
    """Return the device for exchanged bytes: the CPU if the group has gloo, as every group of this module does."""
    return torch.device("cpu") if "gloo" in dist.get_backend_config(ranks.group) else ranks.device


def masked_whiten(
    ranks: Ranks, x: Tensor, mask: Tensor, *, shift_mean: bool = True, unbiased: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """Whiten as statistics.whiten, with mean and variance over the entries of all ranks, as one process with all rows would.

    Args:
        x, mask: # [B, T], rows of this rank; shapes may differ between ranks, and a rank may have no rows.
        shift_mean, unbiased, epsilon: as in whiten.
    """
    add_up = partial(all_reduce, ranks, operation="adding up the moments of masked entries")
    return whiten(x, mask, shift_mean=shift_mean, unbiased=unbiased, epsilon=epsilon, all_reduce=add_up)


def masked_normalization(x: Tensor, mask: Tensor, *, unbiased: bool = False, epsilon: float = 1e-5, ranks: Ranks | None = None) -> Tensor:
    """(x - mean) / (std + epsilon) over the entries with mask > 0, computed in float64; 0 elsewhere.

    Args:
        x, mask: # [B, T].
        unbiased: divisor n - 1 or n.
        ranks: compute mean and std over the entries of all ranks; None = of this process.

    Returns: # [B, T] in the dtype of x.
    Source: AReaL's function of this name; there masked entries are (0 - mean) / std instead.
    """
    precise, on = x.to(torch.float64), (mask > 0).to(torch.float64)
    add_up = None if ranks is None else partial(all_reduce, ranks, operation="adding up the moments of masked entries")
    mean = masked_mean(precise, on, all_reduce=add_up)
    std = masked_var(precise, on, unbiased=unbiased, all_reduce=add_up).sqrt()
    return ((precise - mean) / (std + epsilon) * on).to(x.dtype)

"""Matrix products of linear layers on a CPU by oneDNN, an alternative to torch's own kernels (MKL's sgemm in builds for x86).

MKL picks its slower kernels on processors of other makers than Intel. On an AMD processor with AVX-512 products by oneDNN take 0.3 to 0.6
of the time in float32 (benchmarks.linear prints them), and differ in the last bits: sums are formed in another order. Products of fewer
than 2^20 multiplications stay with torch, as a call of oneDNN costs 10 microseconds.

The kernel of a product is a function of its shapes, and the numbers are a function of the machine, its number of threads and the choice of
kernels: no measurement is made, as one could end differently in a run that is resumed. choose_kernels decides by the processor.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Kernels = Literal["torch", "onednn"]
"""Kernels of linear layers on a CPU: torch's own, or oneDNN's where they are there and the product is large enough."""

_LEAST_MULTIPLICATIONS = 2**20
_ROWS_OF_PACKING = 64  # rows that the layout of a packed weight is made for; it is right for any number


@functools.cache
def has_onednn() -> bool:
    """Whether this build of torch has the operators, and they compute what torch does; not on ARM, for example."""
    if not torch.backends.mkldnn.is_available():
        return False
    rows, weight = (torch.arange(float(n * 32)).reshape(n, 32) % 7 for n in (48, 16))
    try:
        with torch.no_grad():
            found = [multiply(rows, w) for w in (weight, pack(weight))] + [multiply(rows, weight.t().contiguous().t())]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # another version of torch, another processor
        return False
    return all(torch.equal(product, rows @ weight.t()) for product in found)  # small whole numbers: sums are exact


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether oneDNN has instructions for products in bfloat16 on this processor: AVX512-BF16 or AMX."""
    found = any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return has_onednn() and found


def choose_kernels(device: str | torch.device) -> Kernels:
    """Choose kernels for a device: "onednn" on a CPU of AMD with AVX-512 under a torch with MKL, else "torch".

    The rule reads the processor and measures nothing: it cannot change from one start to the next on a busy machine. It is as narrow as
    what was measured. On Intel's processors MKL has its best kernels, and AMD's older ones were not measured.
    """
    on_cpu = torch.device(device).type == "cpu" and torch.backends.mkl.is_available()
    return "onednn" if on_cpu and read_vendor() == "AuthenticAMD" and _has_avx512() and has_onednn() else "torch"


@functools.cache
def read_vendor() -> str:
    """Return the vendor id of this machine's processor, such as GenuineIntel; "" = unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in platform.processor()), "")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_worth_onednn(rows: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.float32) -> bool:
    """Whether oneDNN computes rows @ weight.T: both are plain tensors on a CPU, outside autocast, and the product is large enough.

    Args:
        rows: # [..., K].
        weight: # [N, K].
        dtype: dtype that both must have; torch itself calls oneDNN for bfloat16, so there no product of a packed weight is too small.
    """
    return (
        (rows.numel() * weight.shape[0] >= _LEAST_MULTIPLICATIONS or dtype == torch.bfloat16)
        and rows.dtype == weight.dtype == dtype
        and rows.device.type == weight.device.type == "cpu"
        and type(rows) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.is_autocast_enabled("cpu")
    )


_PLAIN = (Tensor, torch.nn.Parameter)  # not DTensor and other subclasses


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a weight # [N, K] in the layout of oneDNN's kernels, for multiply. It is opaque and takes as much memory."""
    operators: Any = torch.ops.mkldnn
    return operators._reorder_linear_weight(weight.detach(), _ROWS_OF_PACKING)


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ weight.T + bias by oneDNN, without a gradient of its own.

    Args:
        rows: # [..., K]; copied if not contiguous.
        weight: # [N, K] of any strides, or a result of pack.
        bias: # [N] or None.

    Returns: # [..., N].
    """
    operators: Any = torch.ops.mkldnn
    return operators._linear_pointwise(rows, weight, bias, "none", [], "")


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a.T @ b by oneDNN: the gradient of a weight # [N, K] from those of the outputs a # [R, N] and the inputs b # [R, K]."""
    # the operand in the place of the weight is read with its strides, the other is copied: let that be the smaller one
    return multiply(b.t(), a.t()).t() if a.shape[1] > b.shape[1] else multiply(a.t(), b.t())

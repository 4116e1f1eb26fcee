"""Linear layers of a model whose products oneDNN computes on a CPU: forward, both gradients, and from packed weights in an engine.

use_kernels changes the class of a model's layers of class torch.nn.Linear, and nothing else: parameters, their names, hooks and adapters
above them stay as they are, so state dicts, optimizers, exports and code that reads `module.weight` see what they saw. Layers of any other
class keep their own products.

MKL picks its slower kernels on processors of other makers than Intel. On an AMD processor with AVX-512 products by oneDNN take 0.3 to 0.6
of MKL's time in float32, and differ in the last bits: sums are formed in another order. Products of fewer than 2^21 multiplications stay
with torch: a call of oneDNN costs 10 microseconds, and at 2^20 both take as long.

The kernel of a product is a function of its shapes, and the numbers are a function of the machine, its number of threads and the choice of
kernels: no measurement is made, as one could end differently in a run that is resumed. choose_kernels decides by the processor.

On Intel's processors MKL is as fast as oneDNN where a weight fits into the caches or the rows are many. With few rows, as in decoding, a
product with a weight of 2^19 numbers or more from a copy in oneDNN's layout takes 0.6 to 0.8 of the time of MKL's.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import Products

Kernels = Literal["torch", "onednn", "packed"]
"""Kernels of linear layers on a CPU: torch's own, oneDNN's where they are there and the product is large enough, or those of oneDNN for the
large weights of an engine alone, and torch's elsewhere."""

_LEAST_MULTIPLICATIONS = 2**21
LARGE_WEIGHT = 2**19  # numbers of a weight from which "packed" packs it
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
    except (AttributeError, RuntimeError, TypeError):  # another version of torch, another processor
        return False
    return all(torch.equal(product, rows @ weight.t()) for product in found)  # small whole numbers: sums are exact


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether oneDNN has instructions for products in bfloat16 on this processor: AVX512-BF16 or AMX."""
    found = any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return has_onednn() and found


def choose_kernels(device: str | torch.device) -> Kernels:
    """Choose kernels for a device: on a CPU with AVX-512 under a torch with MKL "onednn" if AMD's and "packed" if Intel's, else "torch".

    The rule reads the processor and measures nothing: it cannot change from one start to the next on a busy machine. It is as narrow as
    what was measured: older processors without AVX-512 were not.
    """
    on_cpu = torch.device(device).type == "cpu" and torch.backends.mkl.is_available()
    if not (on_cpu and _has_avx512() and has_onednn()):
        return "torch"
    vendor = read_vendor()
    return "onednn" if vendor == "AuthenticAMD" else "packed" if vendor == "GenuineIntel" else "torch"


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


ONEDNN = Products(is_worth_onednn, multiply, multiply_transposed)
"""Products with an output layer by oneDNN."""

_PACKING = ("packs_weight", "_packed")  # attributes of a layer that are its owner's choice


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose products are oneDNN's where is_worth_onednn, else torch's.

    With packs_weight a pass without gradients reads a packed copy of the weight, made on first use and anew whenever the weight is another
    tensor or was written to in place, which torch counts. Two writes are not counted: one through `weight.data`, and that of a fused
    optimizer. So only an engine packs, whose weights nobody else writes, and forgets what it packed at each update (forget_packed); a layer
    in training reads its weight, and so does a copy of a layer until its owner says otherwise.
    """

    packs_weight: bool = False
    _packed: tuple[Tensor, int, Tensor] | None = None  # the numbers that were packed, their version, the copy

    def forward(self, input: Tensor) -> Tensor:
        """Compute x W^T + b. input: # [..., in]; returns # [..., out]"""
        weight, bias = self.weight, self.bias
        if input.numel() * self.out_features < _LEAST_MULTIPLICATIONS and weight.dtype == torch.float32:  # most calls of a small model
            return torch.nn.functional.linear(input, weight, bias)
        packs = self.packs_weight and not torch.is_grad_enabled() and not weight.is_inference()  # whose writes are not counted
        dtype = torch.bfloat16 if packs and weight.dtype == torch.bfloat16 and has_fast_bfloat16() else torch.float32
        if not is_worth_onednn(input, weight, dtype=dtype):
            return torch.nn.functional.linear(input, weight, bias)
        if packs:
            return multiply(input, self.read_packed(), bias)
        return multiply(input, weight, bias) if not torch.is_grad_enabled() else _Product.apply(input, weight, bias)

    def read_packed(self) -> Tensor:
        """Return a packed copy of the weight as it is now."""
        weight = self.weight
        found = self._packed
        if found is None or found[0].data_ptr() != weight.data_ptr() or found[1] != weight._version:
            found = self._packed = (weight.detach(), weight._version, pack(weight))
        return found[2]

    def __getstate__(self) -> dict[str, Any]:
        """Leave packing out of copies and pickles of the layer: a copy may be for training."""
        return {name: value for name, value in self.__dict__.items() if name not in _PACKING}


class _Product(torch.autograd.Function):
    """x W^T + b, keeping for the backward pass what torch's linear layer keeps."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for_inputs, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if for_weight else None, weight if for_inputs else None)
        return multiply(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weight = ctx.saved_tensors
        grad = grads[0]
        rows = grad.flatten(0, -2)
        return (
            None if weight is None else multiply(grad, weight.t()),
            None if inputs is None else multiply_transposed(rows, inputs.flatten(0, -2)),
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )


def use_kernels(model: torch.nn.Module, kernels: Kernels, *, packs_weights: bool = False) -> None:
    """Let the linear layers of a model use these kernels from now on, in place; where oneDNN is not, they keep torch's.

    Args:
        packs_weights: an engine's model, whose weights change rarely: keep packed copies, which take the memory of the weights again.
    """
    there = kernels != "torch" and has_onednn()
    for module in model.modules():
        if type(module) not in (torch.nn.Linear, OneDNNLinear):
            continue
        layer: Any = module
        if there and (kernels == "onednn" or (packs_weights and layer.weight.numel() >= LARGE_WEIGHT)):
            layer.__class__, layer.packs_weight = OneDNNLinear, packs_weights
        elif type(module) is OneDNNLinear:
            layer.__class__ = torch.nn.Linear
            for name in _PACKING:
                layer.__dict__.pop(name, None)


def forget_packed(model: torch.nn.Module) -> None:
    """Forget packed copies of a model's weights, which were or will be written."""
    for module in model.modules():
        if isinstance(module, OneDNNLinear):
            vars(module).pop("_packed", None)

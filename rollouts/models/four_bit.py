"""Frozen linear layers in 4 bits: QLoRA's NormalFloat (Dettmers et al. 2023, section 3), without double quantization.

A weight is rounded to bfloat16, and then each block of 64 numbers in it is held as one absolute maximum and 64 of the 16 quantiles of a
normal distribution: 4.5 bits a number. Rounding the numbers read out of such a layer again gives the same bits, so a base that was
exported and read again is the same base. The kernels are those of bitsandbytes, on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rollouts.errors import ConfigError

BLOCK = 64
"""Numbers of a weight that share an absolute maximum."""
BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK
"""Memory of a number: a half byte, and its share of a float32."""


class FourBitLinear(torch.nn.Module):
    """A frozen linear layer whose weight is held in 4 bits and computed with in the dtype of the inputs, or that of autocast.

    Its parameter `weight` has name, shape and dtype (bfloat16) of the weight, but is on meta: read_weight returns the numbers.
    """

    weight: torch.nn.Parameter
    _codes: Tensor  # [ceil(out * in / 2), 1] uint8, two numbers each
    _scales: Tensor  # [4 * ceil(out * in / BLOCK)] uint8, the bytes of float32, which no change of the module's dtype rounds

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """
        Args:
            weight: # [out, in] floating point, finite.
            bias: # [out]

        Raises: ConfigError if bitsandbytes is missing.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(torch.empty(weight.shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        codes, scales = quantize(weight)
        self.register_buffer("_codes", codes, persistent=False)
        self.register_buffer("_scales", scales, persistent=False)

    def read_weight(self) -> Tensor:
        """Return the weight. # [out, in] bfloat16"""
        return dequantize(self._codes, self._scales, self.weight.shape)

    def write_weight(self, weight: Tensor) -> None:
        """Replace the weight. weight: # [out, in] floating point, finite"""
        assert weight.shape == self.weight.shape, f"weight has shape {tuple(weight.shape)}, expected {tuple(self.weight.shape)}"
        codes, scales = quantize(weight.to(self._codes.device))
        self._codes.copy_(codes)
        self._scales.copy_(scales)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute x W^T + b. inputs: # [..., in]; returns # [..., out]"""
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        out = cast("Tensor", _Product.apply(inputs.to(dtype), self._codes, self._scales, self.weight.shape))
        return out if self.bias is None else out + self.bias.to(dtype)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FourBitLinear:
        """Move the layer without its weight on meta, which cannot be moved."""
        weight = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = {"weight": weight, **self._parameters}  # first again: the order of the state dict
        return self


class _Product(torch.autograd.Function):
    """x W^T whose backward pass reads W out of its 4 bits again, so that no whole weight is kept between the passes."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        with torch.autocast(inputs.device.type, enabled=False):
            return torch.nn.functional.linear(inputs, dequantize(codes, scales, shape).to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        codes, scales = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ dequantize(codes, scales, ctx.shape).to(gradient.dtype), None, None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to 4 bits. Returns the codes and the bytes of the absolute maxima, as FourBitLinear holds them."""
    with torch.no_grad():
        rounded = weight.to(torch.bfloat16).float().contiguous()  # the maxima are then numbers of bfloat16, and exact when they are read
        codes, state = import_bitsandbytes().quantize_4bit(rounded, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
        return codes, state.absmax.contiguous().view(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the numbers of the result of quantize. # shape, bfloat16"""
    functional = import_bitsandbytes()
    code = functional.get_4bit_type("nf4", device=codes.device)
    state = functional.QuantState(
        absmax=scales.view(torch.float32), shape=shape, code=code, blocksize=BLOCK, quant_type="nf4", dtype=torch.float32
    )
    return functional.dequantize_4bit(codes, state).to(torch.bfloat16)


def import_bitsandbytes() -> Any:
    """Import bitsandbytes.functional. Raises ConfigError if it is missing."""
    try:
        import bitsandbytes.functional as functional  # pyright: ignore[reportMissingImports]  # an extra; takes seconds
    except ImportError as error:
        raise ConfigError(
            f"weights in 4 bits need the package bitsandbytes, which cannot be imported ({error}): pip install 'rollouts-rl[low-memory]'"
        ) from error
    return functional

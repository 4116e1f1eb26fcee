"""Linear layers of a model whose products oneDNN computes on a CPU: forward, both gradients, and from packed weights in an engine.

use_kernels changes the class of a model's layers of class torch.nn.Linear, and nothing else: parameters, their names, hooks and adapters
above them stay as they are, so state dicts, optimizers, exports and code that reads `module.weight` see what they saw. Layers of any other
class keep their own products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollouts.algorithms.products import Kernels, has_fast_bfloat16, has_onednn, is_worth_onednn, multiply, multiply_transposed, pack

_PACKING = ("packs_weight", "_packed")  # attributes of a layer that are its owner's choice


class OneDNNLinear(torch.nn.Linear):
    """A linear layer whose products are oneDNN's where products.is_worth_onednn, else torch's.

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
    for module in model.modules():
        if type(module) is OneDNNLinear and (kernels == "torch" or not has_onednn()):
            module.__class__ = torch.nn.Linear
            for name in _PACKING:
                vars(module).pop(name, None)
        elif type(module) in (torch.nn.Linear, OneDNNLinear) and kernels == "onednn" and has_onednn():
            module.__class__ = OneDNNLinear
            module.packs_weight = packs_weights


def forget_packed(model: torch.nn.Module) -> None:
    """Forget packed copies of a model's weights, which were or will be written."""
    for module in model.modules():
        if isinstance(module, OneDNNLinear):
            vars(module).pop("_packed", None)

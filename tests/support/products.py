"""A count of matrix products, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountedProducts(TorchDispatchMode):
    """Count the multiplications of products [a, b] x [b, c] in one of whose dimensions there are `size` numbers; None = of all products."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self._size = size
        self.multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            sizes = (*a.shape, b.shape[1])
            if self._size is None or self._size in sizes:
                self.multiplications += sizes[0] * sizes[1] * sizes[2]
        return func(*args, **(kwargs or {}))

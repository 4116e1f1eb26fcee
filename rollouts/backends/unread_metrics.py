"""Metrics that stay on their device until they are read, those of all micro-batches of an optimizer step by one copy.

Reading a number of a GPU waits for all work submitted to it. A backend that reads the metrics of each micro-batch waits as many times in a
step; here the norm of the gradient, which every update must know, is read together with all metrics before it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from rollouts.backends.optim.updates import read_scalar
from rollouts.types import TrainBatch


class UnreadMetrics:
    """Metrics of one forward_backward. Made by MetricReads.add."""

    def __init__(self, reads: MetricReads, values: Mapping[str, float | Tensor], device: torch.device) -> None:
        self._reads = reads
        self._values = dict(values)
        self._names = [
            name for name, value in values.items() if isinstance(value, Tensor) and value.device == device and value.numel() == 1
        ]
        # one copy, which keeps no larger tensor alive and sees no later change; exact in float64, which MPS lacks
        dtype = torch.float32 if device.type == "mps" else torch.float64
        numbers = [cast("Tensor", values[name]).detach().reshape(()).to(dtype) for name in self._names]
        self.waiting: Tensor | None = torch.stack(numbers)  # [names]; None = read
        for name, value in values.items():
            self._values[name] = value if name in self._names else float(value)

    @property
    def is_read(self) -> bool:
        """Whether read() returns without waiting for the device."""
        return self.waiting is None

    def fill(self, numbers: list[float]) -> None:
        """Set the numbers that were read, in the order of `waiting`."""
        self._values |= dict(zip(self._names, numbers, strict=True))
        self.waiting = None

    def read(self) -> dict[str, float]:
        """Return the metrics as numbers; if they are on their device, read them and all others that are."""
        if not self.is_read:
            self._reads.read()
        return cast("dict[str, float]", dict(self._values))


class MetricReads:
    """The metrics of a backend that were not read. Several threads may read them."""

    def __init__(self) -> None:
        self._waiting: list[UnreadMetrics] = []
        self._lock = threading.Lock()

    def add(self, loss: Tensor, metrics: Mapping[str, float | Tensor], batch: TrainBatch) -> UnreadMetrics:
        """Keep the result of a forward_backward: {"loss", "num_tokens", the metrics of the loss}. Raises for a metric that is no number."""
        values = {"loss": loss.detach(), "num_tokens": (batch.loss_mask > 0).sum(), **metrics}
        added = UnreadMetrics(self, values, loss.device)
        with self._lock:
            self._waiting.append(added)
        return added

    def read(self, more: Tensor | None = None) -> float:
        """Read all metrics, and one more number, by one copy.

        Args:
            more: a number on the metrics' device; None = none.

        Returns: that number; 0 for None.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            parts = [cast("Tensor", metrics.waiting) for metrics in waiting]
            together = more is not None and bool(parts) and more.device == parts[0].device
            if more is not None and together:
                parts.append(more.detach().to(parts[0].dtype).reshape(1))
            numbers = cast("list[float]", torch.cat(parts).tolist()) if parts else []
            for metrics in waiting:
                count = cast("Tensor", metrics.waiting).numel()
                metrics.fill(numbers[:count])
                del numbers[:count]
        return numbers[0] if together else 0.0 if more is None else read_scalar(more)

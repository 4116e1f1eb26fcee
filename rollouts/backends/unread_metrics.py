"""Metrics that stay on their device until they are read, those of all micro-batches of an optimizer step by one copy.

Reading a number of a GPU waits for all work submitted to it. A backend that reads the metrics of each micro-batch waits as many times in a
step; here the norm of the gradient, which every update must know, is read together with all metrics before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rollouts.backends.optim.updates import Worst, read_scalar
from rollouts.types import TOKEN_PREFIX, TrainBatch

Metrics = dict[str, float]


class UnreadMetrics:
    """Metrics of one forward_backward, which are read when somebody asks for them, or with those of others before."""

    def __init__(self, read_all: Callable[[], object], finish: Callable[[Metrics], Metrics] = dict) -> None:
        """
        Args:
            read_all: reads all metrics that are not read, and calls fill of these.
            finish: makes the metrics of the numbers that were read.
        """
        self._read_all, self._finish = read_all, finish
        self._values: Metrics | None = None

    @property
    def is_read(self) -> bool:
        """Whether read() returns without waiting for the device."""
        return self._values is not None

    def fill(self, values: Metrics) -> None:
        """Set the numbers that were read."""
        self._values = self._finish(values)

    def read(self) -> Metrics:
        """Return the metrics as numbers; if they are on their device, read them and all others that are."""
        if self._values is None:
            self._read_all()
        assert self._values is not None, "the metrics were not read with the others"
        return dict(self._values)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """Metrics on their device."""

    metrics: UnreadMetrics
    values: Mapping[str, float | Tensor]  # in order; tensors are those in `numbers`
    numbers: Tensor  # [tensors of values]


@dataclass(frozen=True, eq=False)
class RecordedTokens:
    """Values of single tokens that a loss told of the recorded rows of a batch, see TrainBatch.recorded."""

    numbers: tuple[int, ...]  # R numbers of rows
    columns: Mapping[str, Tensor]  # [R, T] each, on the CPU, by its name without TOKEN_PREFIX
    call: int = 0  # place of the batch among those of a backend since the last take_recorded


def list_recorded(batch: TrainBatch) -> dict[int, int]:
    """Return the positions of the recorded rows of a batch, with their numbers; read before the batch is moved to a device."""
    return {} if batch.recorded is None else {row: n for row, n in enumerate(cast("list[int]", batch.recorded.tolist())) if n >= 0}


class MetricReads:
    """The metrics of a backend that were not read. Several threads may read them."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._recorded: list[RecordedTokens] = []  # on their device
        self._num_calls = 0  # calls of keep_recorded since records were taken
        self._worst = Worst()  # numbers read since take_worst
        self._lock = threading.Lock()

    def keep_recorded(self, metrics: Mapping[str, float | Tensor], recorded: Mapping[int, int]) -> dict[str, float | Tensor]:
        """Keep the columns of single tokens that are among the metrics of a loss; return the others. Each forward_backward calls it once.

        Args:
            recorded: as list_recorded.
        """
        told = {name: value for name, value in metrics.items() if name.startswith(TOKEN_PREFIX) and isinstance(value, Tensor)}
        columns = {name: value for name, value in told.items() if value.dim() == 2}
        if columns and recorded:
            rows, device = torch.tensor(list(recorded)), next(iter(columns.values())).device
            rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)
            kept = {name.removeprefix(TOKEN_PREFIX): value.detach().index_select(0, rows) for name, value in columns.items()}
            with self._lock:
                self._recorded.append(RecordedTokens(tuple(recorded.values()), kept, self._num_calls))
        self._num_calls += 1
        return {name: value for name, value in metrics.items() if name not in columns}

    def take_recorded(self) -> tuple[RecordedTokens, ...]:
        """Return what was kept since the last call, copied from its device."""
        with self._lock:
            taken, self._recorded, self._num_calls = self._recorded, [], 0
        return tuple(replace(one, columns={name: value.cpu() for name, value in one.columns.items()}) for one in taken)

    def take_worst(self) -> Worst:
        """Return the worst of the numbers that were read since the last call."""
        with self._lock:
            taken, self._worst = self._worst, Worst()
        return taken

    def __reduce__(self) -> tuple[type[MetricReads], tuple[()]]:
        """A copy of a backend has no results that wait to be read."""
        return MetricReads, ()

    def add(self, values: Mapping[str, float | Tensor], finish: Callable[[Metrics], Metrics] = dict) -> UnreadMetrics:
        """Keep the result of a forward_backward, see list_metrics. Raises for a metric that is no number.

        Args:
            values: with "loss"; numbers of other devices than the loss's are read at once.
            finish: as in UnreadMetrics.
        """
        loss = values["loss"]
        device = loss.device if isinstance(loss, Tensor) else torch.device("cpu")
        kept = {
            name: value if isinstance(value, Tensor) and value.device == device and value.numel() == 1 else float(value)
            for name, value in values.items()
        }
        # one copy, which keeps no larger tensor alive and sees no later change; exact in float64, which MPS lacks
        dtype = torch.float32 if device.type == "mps" else torch.float64
        numbers = [value.detach().reshape(()).to(dtype) for value in kept.values() if isinstance(value, Tensor)]
        added = UnreadMetrics(self.read, finish)
        with self._lock:
            self._waiting.append(_Waiting(added, kept, torch.stack(numbers) if numbers else torch.zeros(0, dtype=dtype, device=device)))
        return added

    def read(self, more: Tensor | None = None) -> float:
        """Read all metrics, and one more number, by one copy.

        Args:
            more: a number on the metrics' device; None = none.

        Returns: that number; 0 for None.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            parts = [one.numbers for one in waiting if one.numbers.numel()]
            together = more is not None and bool(parts) and more.device == parts[0].device
            if more is not None and together:
                parts.append(more.detach().to(parts[0].dtype).reshape(1))
            numbers = cast("list[float]", torch.cat(parts).tolist()) if parts else []
            for one in waiting:
                read = iter(numbers[: one.numbers.numel()])
                del numbers[: one.numbers.numel()]
                values = {name: next(read) if isinstance(value, Tensor) else value for name, value in one.values.items()}
                one.metrics.fill(values)
                self._worst = self._worst.add(values)
        return numbers[0] if together else 0.0 if more is None else read_scalar(more)

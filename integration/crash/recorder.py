"""Record of the calls that make up the updates of a backend, from its last checkpoint on: what it takes to execute a failed one again.

Nothing is copied: batches are values that nobody changes, and weights are those of the last checkpoint, or those in memory, which an update
that was refused has not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.backends.pytorch.files import take_random_state
from rollouts.backends.unread_metrics import UnreadMetrics
from rollouts.errors import BackendError, BadNumberError
from rollouts.training.saving.checkpoints import directory_size
from rollouts.types import LossFn, TrainBatch

HISTORY_BYTES = 256 << 20
"""Bytes of the batches that are kept of the updates since the last checkpoint."""
HISTORY_UPDATES = 256
"""Updates since the last checkpoint that are kept."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of forward_backward, or of count_experts, which has no loss."""

    batch: TrainBatch
    loss: LossFn | None
    with_entropy: bool
    random: Mapping[str, Tensor | None]  # state of torch's generators before the call, as take_random_state returns it
    metrics: Mapping[str, float] | UnreadMetrics | None = None  # result; None = the call has none, or failed


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """The calls of one update, and what optim_step returned."""

    calls: tuple[RecordedCall, ...]
    metrics: Mapping[str, float] | None = None  # None = it raised
    loss: str = ""  # description of the loss function, once read from a bundle
    own_columns: tuple[str, ...] = ()  # log-prob columns that the loss takes from its own pass, likewise


def count_bytes(batch: object) -> int:
    """Return the bytes of the tensors of a batch, those of its nested columns included."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    return (
        sum(count_bytes(getattr(batch, field.name)) for field in fields(batch))
        if is_dataclass(batch) and not isinstance(batch, type)
        else 0
    )


class UpdateRecorder:
    """Recorder of a backend's updates. After one that a bad number ended, the backend runs no further ones.

    The calls come from one thread at a time, that of the backend's pipeline.
    """

    def __init__(self, backend: Any) -> None:
        """Record the calls of a backend from now on, by replacing its methods; later ones call the earlier ones."""
        self._backend = backend
        self.error: BadNumberError | None = None  # the error that ended the last update
        self.failed: RecordedUpdate | None = None  # the update that raised it
        self.base: Path | None = None  # directory that the weights before `updates` were saved to or loaded from; None = those of the start
        self.updates: tuple[RecordedUpdate, ...] = ()  # updates applied since then
        self.is_complete = True  # whether `updates` are all of them
        self._device = torch.device(getattr(backend, "device", "cpu"))
        self._calls: list[RecordedCall] = []
        self._num_bytes = 0
        for name in (
            "forward_backward",
            "count_experts",
            "optim_step",
            "save_checkpoint",
            "stage_checkpoint",
            "load_checkpoint",
            "load_weights",
        ):
            if hasattr(backend, name):
                own = getattr(backend, name)
                setattr(backend, name, functools.wraps(own)(functools.partial(getattr(self, f"_{name}"), own)))

    def estimate_checkpoint(self, last: Path | None) -> int | None:
        """Estimate the bytes of a checkpoint: those of the last one, or of parameters and two moments; None = not known."""
        if last is not None and last.is_dir():
            return directory_size(last)
        model = getattr(self._backend, "model", None)
        if not isinstance(model, torch.nn.Module):
            return None
        return sum(p.nbytes * (3 if p.requires_grad else 1) for p in model.parameters())

    def _refuse_after_failure(self) -> None:
        if self.error is not None:
            raise BackendError("this update was not computed, since a bad number ended the one before it")

    def _forward_backward(self, own: Callable[..., Any], batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Any:
        self._refuse_after_failure()
        call = RecordedCall(batch, loss_fn, with_entropy, take_random_state(self._device))
        future = own(batch, loss_fn, with_entropy=with_entropy)
        self._calls.append(replace(call, metrics=getattr(future, "outcome", None)))
        return future

    def _count_experts(self, own: Callable[..., Any], batch: TrainBatch) -> Any:
        self._refuse_after_failure()
        self._calls.append(RecordedCall(batch, None, False, take_random_state(self._device)))
        return own(batch)

    def _optim_step(self, own: Callable[..., Any]) -> Any:
        self._refuse_after_failure()
        calls, self._calls = tuple(self._calls), []
        try:
            future = own()
        except BadNumberError as error:
            self.error, self.failed = error, RecordedUpdate(calls)
            raise
        self._keep(RecordedUpdate(calls, dict(getattr(future, "value", {}))))
        return future

    def _keep(self, update: RecordedUpdate) -> None:
        self._num_bytes += sum(count_bytes(call.batch) for call in update.calls)
        if not self.is_complete or self._num_bytes > HISTORY_BYTES or len(self.updates) >= HISTORY_UPDATES:
            self.updates, self.is_complete = (), False
        else:
            self.updates = (*self.updates, update)

    def _begin_from(self, base: Path) -> None:
        self.base, self.updates, self.is_complete, self._num_bytes = base, (), True, 0

    def _save_checkpoint(self, own: Callable[..., Any], directory: Path | str) -> Any:
        future = own(directory)
        self._begin_from(Path(directory))
        return future

    def _stage_checkpoint(self, own: Callable[..., Any], directory: Path | str) -> Any:
        future = own(directory)
        self._begin_from(Path(directory))
        return future

    def _load_checkpoint(self, own: Callable[..., Any], directory: Path | str) -> Any:
        future = own(directory)
        self._begin_from(Path(directory))
        return future

    def _load_weights(self, own: Callable[..., Any], weights: Mapping[str, Tensor]) -> Any:
        self.updates, self.is_complete = (), False  # these weights are in no directory
        return own(weights)

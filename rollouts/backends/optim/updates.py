"""One update of a torch optimizer: clip, skip non-finite gradients, advance the schedule. Shared by all backends with a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollouts.checks import find_non_finite
from rollouts.errors import BackendError


class Scheduler(Protocol):
    """Learning-rate schedule as in torch.optim.lr_scheduler."""

    def step(self) -> None:
        """Advance by one optimizer step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position returned by state_dict."""
        ...


@dataclass(frozen=True)
class UpdateCounts:
    """Counts of updates."""

    num_updates: int = 0  # optimizer steps, skipped ones included
    num_skipped_in_a_row: int = 0


def update_parameters(
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    counts: UpdateCounts,
    *,
    max_grad_norm: float,
    read: Callable[[Tensor], float] | None = None,
) -> tuple[dict[str, float], UpdateCounts]:
    """Clip the gradient, update, advance the schedule, clear the gradient.

    A non-finite gradient is not applied: parameters and optimizer state are unchanged, and update_skipped is 1. For sharded parameters
    (DTensor) the norm is the whole gradient's, so every rank does the same; all ranks must call it.

    Args:
        read: reads the norm, and whatever else is to be read of the device with it; None = read_scalar.

    Returns: grad_norm (before clipping), lr (of this update) and update_skipped; the counts with this update.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = read_scalar(total) if read is None else read(total)
    lr = float(optimizer.param_groups[0]["lr"])
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    return {"grad_norm": norm, "lr": lr, "update_skipped": float(not finite)}, count_update(counts, finite=finite)


def count_update(counts: UpdateCounts, *, finite: bool) -> UpdateCounts:
    """Count an update that was applied or, its gradient not being finite, skipped."""
    skipped = 0 if finite else counts.num_skipped_in_a_row + 1
    return replace(counts, num_updates=counts.num_updates + 1, num_skipped_in_a_row=skipped)


def read_counts(state: Mapping[str, Any]) -> UpdateCounts:
    """Read the counts from the state of a checkpoint that has them as dataclasses.asdict writes them, among others."""
    return UpdateCounts(**{field.name: int(state[field.name]) for field in fields(UpdateCounts)})


def check_updated(parameters: Iterable[tuple[str, Tensor]], counts: UpdateCounts) -> None:
    """Raise BackendError if an update has left a non-finite parameter: such weights cannot be trained on.

    Each rank checks its own part of sharded parameters.
    """
    bad = find_non_finite(parameters)
    if bad is not None:
        raise BackendError(
            f"update {counts.num_updates} made the parameter {bad} NaN or infinite, though the gradient was finite: the learning rate is "
            "too high, or a moment of the optimizer ran over. The weights in memory are lost, and no checkpoint is written of them. Lower "
            "the learning rate, or use float32"
        )


def trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters that an update may change, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def check_skipped_updates(counts: UpdateCounts, norm: float, *, max_skipped_updates: int) -> None:
    """Raise BackendError after max_skipped_updates skipped updates in a row."""
    if counts.num_skipped_in_a_row >= max_skipped_updates:
        raise BackendError(
            f"the gradient was not finite in {counts.num_skipped_in_a_row} updates in a row (norm {norm}): "
            "look for infinite log-probs or rewards, lower the learning rate, or use float32"
        )


def read_scalar(value: Tensor) -> float:
    """Read a number; for a DTensor the whole value, so all ranks must call it."""
    full = getattr(value, "full_tensor", None)
    return float(value if full is None else cast("Tensor", full()))

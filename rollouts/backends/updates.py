"""One update of a torch optimizer: clip, skip what is not finite, advance the schedule. The same for every backend that has one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollouts.errors import BackendError


class Scheduler(Protocol):
    """A learning-rate schedule as in torch.optim.lr_scheduler."""

    def step(self) -> None:
        """Advance by one optimizer step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""
        ...


@dataclass(frozen=True)
class UpdateCounts:
    """How many updates there have been."""

    num_updates: int = 0  # optimizer steps, skipped ones included
    num_skipped_in_a_row: int = 0


def update_parameters(
    optimizer: torch.optim.Optimizer, scheduler: Scheduler | None, counts: UpdateCounts, *, max_grad_norm: float
) -> tuple[dict[str, float], UpdateCounts]:
    """Clip the gradient, update, advance the schedule, clear the gradient.

    A non-finite gradient is not applied: parameters and optimizer state stay as they are, metrics say update_skipped = 1. Of sharded
    parameters (DTensor) the norm is that of the whole gradient, so every rank does the same; all ranks must call it.

    Returns: grad_norm (before clipping), lr (of this update) and update_skipped; the counts with this update.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = read_scalar(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    lr = float(optimizer.param_groups[0]["lr"])
    finite = math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    return {"grad_norm": norm, "lr": lr, "update_skipped": float(not finite)}, count_update(counts, finite=finite)


def count_update(counts: UpdateCounts, *, finite: bool) -> UpdateCounts:
    """The counts after an update that was applied, or, where its gradient was not finite, skipped."""
    skipped = 0 if finite else counts.num_skipped_in_a_row + 1
    return replace(counts, num_updates=counts.num_updates + 1, num_skipped_in_a_row=skipped)


def check_skipped_updates(counts: UpdateCounts, norm: float, *, max_skipped_updates: int) -> None:
    """Raise BackendError after max_skipped_updates skipped updates in a row."""
    if counts.num_skipped_in_a_row >= max_skipped_updates:
        raise BackendError(
            f"the gradient was not finite in {counts.num_skipped_in_a_row} updates in a row (norm {norm}): "
            "look for infinite log-probs or rewards, lower the learning rate, or use float32"
        )


def read_scalar(value: Tensor) -> float:
    """A number; of a DTensor the whole one, for which all ranks must call."""
    full = getattr(value, "full_tensor", None)
    return float(value if full is None else cast("Tensor", full()))

"""One update of a torch optimizer: clip, judge its numbers, advance the schedule; and the judgement, which all backends share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from rollouts.checks import find_non_finite
from rollouts.config import BadNumbers
from rollouts.errors import BadNumberError
from rollouts.models.weights import identify_tensors


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
    usual_norm: float = 0.0  # running mean of the norms of applied updates; 0 = there was none


@dataclass(frozen=True)
class Worst:
    """Worst numbers among the metrics of the passes of an update."""

    is_loss_finite: bool = True
    max_ratio: float = 0.0  # largest importance ratio; 0 = none was told

    def add(self, metrics: Mapping[str, float]) -> Worst:
        """Return the worst with those of one more pass."""
        return self.merge(Worst(math.isfinite(metrics.get("loss", 0.0)), metrics.get("max_ratio", 0.0)))

    def merge(self, other: Worst) -> Worst:
        """Return the worst of both; a ratio that is NaN is worse than any number."""
        ratios = (self.max_ratio, other.max_ratio)
        ratio = math.nan if any(map(math.isnan, ratios)) else max(ratios)
        return Worst(self.is_loss_finite and other.is_loss_finite, ratio)


Judge: TypeAlias = Callable[[float, UpdateCounts], "str | None"]
"""(norm of the gradient, counts before the update) -> the kind of number for which the update is left out, None = it is applied."""

_COUNTED: Mapping[str, str] = MappingProxyType({
    "loss": "num_bad_loss",
    "gradient": "num_bad_gradient",
    "ratio": "num_bad_ratio",
    "gradient_spike": "num_bad_gradient_spike",
})  # fmt: skip

SPIKE_AFTER = 10
"""Updates before a spike of the gradient is looked for."""


def judge_update(norm: float, counts: UpdateCounts, *, worst: Worst, policy: BadNumbers) -> str | None:
    """Return the kind of bad number for which an update is left out, a field of BadNumbers; None if it is to be applied.

    Raises: BadNumberError if the policy for the kind is to stop, or if this is the last of policy.max_skipped updates left out in a row.
    """
    usual = counts.usual_norm
    found = {
        "loss": not worst.is_loss_finite,
        "gradient": not math.isfinite(norm),
        "ratio": policy.ratio != "ignore" and not worst.max_ratio <= policy.ratio_limit,
        "gradient_spike": policy.gradient_spike != "ignore"
        and counts.num_updates >= SPIKE_AFTER
        and usual > 0
        and norm > policy.spike_factor * usual,
    }
    kind = next((name for name, is_bad in found.items() if is_bad), None)
    if kind is None:
        return None
    numbers = {"grad_norm": norm, "max_ratio": worst.max_ratio, "usual_norm": usual}
    if getattr(policy, kind) == "skip":
        check_skipped(replace(counts, num_skipped_in_a_row=counts.num_skipped_in_a_row + 1), kind, numbers, policy.max_skipped)
        return kind
    told = {
        "loss": "the loss is not finite",
        "gradient": f"the gradient is not finite (norm {norm})",
        "ratio": f"an importance ratio is {worst.max_ratio:.6g}, above the limit of {policy.ratio_limit:g}",
        "gradient_spike": f"the norm of the gradient is {norm:.6g}, more than {policy.spike_factor:g} times its mean so far, {usual:.6g}",
    }[kind]
    raise BadNumberError(
        f"update {counts.num_updates + 1}: {told}, and the policy for {kind} is to stop. It was not applied. Look at the rewards and "
        f"log-probs of the step, lower the learning rate, or set on_bad.{kind} to skip",
        kind,
        numbers,
    )


def check_skipped(counts: UpdateCounts, kind: str, numbers: Mapping[str, float], max_skipped: int) -> None:
    """Raise BadNumberError if this many updates in a row are left out. Nothing has changed by then: the step can be repeated."""
    if counts.num_skipped_in_a_row >= max_skipped:
        norm = numbers["grad_norm"]
        what = "the gradient was not finite in" if not math.isfinite(norm) else "a bad number (num_bad_... in the metrics) left out"
        raise BadNumberError(
            f"{what} {counts.num_skipped_in_a_row} updates in a row (norm {norm}): "
            "look for infinite log-probs or rewards, lower the learning rate, or use float32",
            kind,
            numbers,
        )


def describe_bad(kind: str | None) -> dict[str, float]:
    """Return the metric that counts an update left out for a kind of bad number; none if it was applied."""
    return {} if kind is None else {_COUNTED[kind]: 1.0}


def update_parameters(
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    counts: UpdateCounts,
    *,
    max_grad_norm: float,
    read: Callable[[Tensor], float] | None = None,
    judge: Judge | None = None,
) -> tuple[dict[str, float], UpdateCounts]:
    """Clip the gradient, update, advance the schedule, clear the gradient.

    An update that the judge leaves out is not applied: parameters and optimizer state are unchanged, and update_skipped is 1. For
    sharded parameters (DTensor) the norm is the whole gradient's, so every rank does the same; all ranks must call it.

    Args:
        read: reads the norm, and whatever else is to be read of the device with it; None = read_scalar.
        judge: called after read; None = leave out a gradient that is not finite.

    Returns: grad_norm (before clipping), lr (of this update), update_skipped, and of an update left out num_bad_<kind>; the counts with
        this update.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    norm = read_scalar(total) if read is None else read(total)
    lr = float(optimizer.param_groups[0]["lr"])
    try:
        kind = judge(norm, counts) if judge is not None else None if math.isfinite(norm) else "gradient"
        if kind is None:
            optimizer.step()
    finally:  # also if the judge ends the run: a caller that goes on begins anew
        optimizer.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    metrics = {"grad_norm": norm, "lr": lr, "update_skipped": float(kind is not None)} | describe_bad(kind)
    return metrics, count_update(counts, norm, applied=kind is None)


def count_update(counts: UpdateCounts, norm: float, *, applied: bool) -> UpdateCounts:
    """Count an update with this norm of its gradient that was applied or left out."""
    if not applied:
        return replace(counts, num_updates=counts.num_updates + 1, num_skipped_in_a_row=counts.num_skipped_in_a_row + 1)
    usual = norm if counts.usual_norm == 0 else 0.9 * counts.usual_norm + 0.1 * norm
    return UpdateCounts(num_updates=counts.num_updates + 1, num_skipped_in_a_row=0, usual_norm=usual)


def read_counts(state: Mapping[str, Any]) -> UpdateCounts:
    """Read the counts from the state of a checkpoint that has them as dataclasses.asdict writes them, among others."""
    usual = float(state.get("usual_norm", 0.0))  # checkpoints of earlier versions have none
    return UpdateCounts(int(state["num_updates"]), int(state["num_skipped_in_a_row"]), usual)


def check_updated(parameters: Iterable[tuple[str, Tensor]], counts: UpdateCounts, metrics: Mapping[str, float]) -> frozenset[object]:
    """Raise BadNumberError if an update has left a non-finite parameter: such weights cannot be trained on.

    Each rank checks its own part of sharded parameters.

    Args:
        metrics: those of the update, for the error.

    Returns: the parameters as models.weights.CheckedWeights names those that were found finite.
    """
    named = tuple(parameters)
    bad = find_non_finite(named)
    if bad is not None:
        raise BadNumberError(
            f"update {counts.num_updates} made the parameter {bad} NaN or infinite, though the gradient was finite: the learning rate is "
            "too high, or a moment of the optimizer ran over. The weights in memory are lost, and no checkpoint is written of them. Lower "
            "the learning rate, or use float32",
            "parameter",
            {name: metrics[name] for name in ("grad_norm", "lr")},
        )
    return identify_tensors(parameter for _, parameter in named)


def trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters that an update may change, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def read_scalar(value: Tensor) -> float:
    """Read a number; for a DTensor the whole value, so all ranks must call it."""
    full = getattr(value, "full_tensor", None)
    return float(value if full is None else cast("Tensor", full()))

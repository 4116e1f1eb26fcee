"""Learning-rate schedules: factors as pure functions of the optimizer step, and torch schedules made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from rollouts.config import Schedule
from rollouts.config_files import suggest
from rollouts.errors import ConfigError


def warmup_cosine(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float = 0.0,
    warmup_from: float | None = None,
    num_cycles: float = 0.5,
    periodic: bool = False,
) -> float:
    """Factor of the learning rate: up to 1 in warmup_steps, then along a cosine down to min_lr_ratio.

    Args:
        step: 0-based optimizer step; from total_steps on the factor stays at the end of the curve.
        warmup_from: factor at step 0; step k of the warm-up has warmup_from + (1 - warmup_from) * k / warmup_steps. transformers and verl
            start at 0, so that their first update changes nothing. None = (k + 1) / warmup_steps, nonzero from the first update.
        num_cycles: full turns of the cosine; 0.5 goes down once.
        periodic: follow the cosine past total_steps, as torch's and transformers' schedules do: the learning rate rises again.
    """
    if step < warmup_steps:
        return _warm_up(step, warmup_steps, warmup_from)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    angle = 2 * math.pi * num_cycles * (progress if periodic else min(1.0, progress))
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(angle))


def warmup_linear(step: int, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0, warmup_from: float | None = None) -> float:
    """As warmup_cosine, with a straight line down to min_lr_ratio."""
    if step < warmup_steps:
        return _warm_up(step, warmup_steps, warmup_from)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1 - (1 - min_lr_ratio) * progress


def warmup_constant(step: int, *, warmup_steps: int, warmup_from: float | None = None) -> float:
    """Up to 1 in warmup_steps as in warmup_cosine, then 1."""
    return _warm_up(step, warmup_steps, warmup_from) if step < warmup_steps else 1.0


def warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    stable_ratio: float = 0.9,
    min_lr_ratio: float = 0.0,
    warmup_from: float | None = None,
) -> float:
    """Up to 1 in warmup_steps, 1 for stable_ratio of the rest, then half a cosine down to min_lr_ratio (WSD).

    Args:
        stable_ratio: in [0, 1]; int(stable_ratio * (total_steps - warmup_steps)) steps have factor 1.
        step, warmup_from: as in warmup_cosine.

    Source: Hu et al. 2024 (MiniCPM), section 4, with verl's cosine for the decay.
    """
    assert 0 <= stable_ratio <= 1, f"stable_ratio is {stable_ratio}, expected in [0, 1]"
    stable_until = warmup_steps + int(stable_ratio * max(0, total_steps - warmup_steps))
    if step < stable_until:
        return warmup_constant(step, warmup_steps=warmup_steps, warmup_from=warmup_from)
    return warmup_cosine(step, warmup_steps=stable_until, total_steps=total_steps, min_lr_ratio=min_lr_ratio)


def _warm_up(step: int, warmup_steps: int, warmup_from: float | None) -> float:
    return (step + 1) / warmup_steps if warmup_from is None else warmup_from + (1 - warmup_from) * step / warmup_steps


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Create a torch schedule of warmup_cosine for an optimizer."""
    return create_scheduler(optimizer, "cosine", warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=min_lr_ratio)


def create_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, *, warmup_steps: int = 0, total_steps: int = 1, min_lr_ratio: float = 0.0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Create a schedule by name; total_steps counts optimizer steps, warm-up included."""
    factor = choose_factor(schedule, warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=min_lr_ratio)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def choose_factor(schedule: Schedule, *, warmup_steps: int = 0, total_steps: int = 1, min_lr_ratio: float = 0.0) -> Callable[[int], float]:
    """Choose the learning-rate factor of each optimizer step, by the name of its curve; see create_scheduler.

    Raises: ConfigError for another name.
    """
    if schedule not in get_args(Schedule):
        raise ConfigError(f"schedule is {schedule!r}: {suggest(schedule, get_args(Schedule))}")
    decay = partial(warmup_cosine if schedule == "cosine" else warmup_linear, total_steps=total_steps, min_lr_ratio=min_lr_ratio)
    return partial(warmup_constant if schedule == "constant" else decay, warmup_steps=warmup_steps)

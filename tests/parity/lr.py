"""lr: our compositions for the vectors of this group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from parity.mapping import Parity
from rollouts.backends.optim.schedules import warmup_constant, warmup_cosine, warmup_linear, warmup_stable_decay

PAST_THE_END = 3  # updates behind num_training_steps that are recorded of transformers


def learning_rates(factor: Callable[[int], float], lr: float, num_updates: int) -> Mapping[str, Any]:
    """The learning rate of each update of an optimizer with a schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rates: list[float] = []
    for _ in range(num_updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return {"lrs": rates}


def transformers_schedules(
    kind: str,
    lr: float,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float | None = None,
    min_lr_rate: float | None = None,
) -> Mapping[str, Any]:
    cosine = partial(warmup_cosine, total_steps=num_training_steps, num_cycles=0.5 if num_cycles is None else num_cycles, periodic=True)
    factor = {
        "constant": warmup_constant,
        "linear": partial(warmup_linear, total_steps=num_training_steps),
        "cosine": cosine,
        "cosine_min": partial(cosine, min_lr_ratio=0.0 if min_lr_rate is None else min_lr_rate),
    }[kind]
    return learning_rates(partial(factor, warmup_steps=num_warmup_steps, warmup_from=0.0), lr, num_training_steps + PAST_THE_END)


def other_schedules(
    kind: str,
    lr: float,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = None,
    stable_ratio: float | None = None,
) -> Mapping[str, Any]:
    lowest = 0.0 if min_lr_ratio is None else min_lr_ratio
    start = {"verl_cosine": 0.0, "verl_wsd": 0.0, "areal_cosine": lowest, "prime_cosine": lowest or 1e-8}[kind]
    stable = partial(warmup_stable_decay, stable_ratio=0.9 if stable_ratio is None else stable_ratio)
    factor = partial(
        stable if kind == "verl_wsd" else warmup_cosine,
        warmup_steps=num_warmup_steps,
        total_steps=num_training_steps,
        min_lr_ratio=lowest,
        warmup_from=start,
    )
    return learning_rates(factor, lr, num_training_steps)


FIRST_UPDATE = "our default warm-up gives the first of W updates lr / W"
MAPPINGS: dict[str, Parity] = {
    "transformers_schedules": Parity(
        run=transformers_schedules,
        ours="backends.schedules.warmup_constant, warmup_linear, warmup_cosine(num_cycles=..., periodic=True), each with warmup_from=0",
        note=f"{FIRST_UPDATE}, theirs 0; our default cosine stays at its end, theirs rises again",
    ),
    "verl_areal_prime_cosine": Parity(
        run=other_schedules,
        ours="backends.schedules.warmup_cosine, warmup_stable_decay, each with warmup_from",
        note=f"{FIRST_UPDATE}; verl's gives it 0, AReaL's the lowest rate, prime-rl's the lowest rate or 1e-8 of the peak",
    ),
}
NOT_OFFERED: dict[str, str] = {}

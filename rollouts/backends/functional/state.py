"""Training as pure functions over values: take parameters and the optimizer's moments, return new ones. Nothing is written in place.

    state = create_state(parameters)
    state, metrics = train_step(state, micro_batches, loss_fn, forward, AdamW(lr=1e-5))

`forward` is any pure function (parameters, batch, with_entropy) -> TokenOutputs; backend.create_forward makes one from a Hugging Face
model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.backends.optim.optimizers import AdamW
from rollouts.backends.optim.updates import UpdateCounts, Worst, count_update, describe_bad, judge_update, read_scalar
from rollouts.backends.protocol import list_metrics
from rollouts.backends.unread_metrics import MetricReads, UnreadMetrics
from rollouts.models.expert_load import add_balance, add_loads, stack_load, summarize_load, unstack_load
from rollouts.types import ExpertLoad, LossFn, TokenOutputs, TrainBatch

Parameters: TypeAlias = Mapping[str, Tensor]

ForwardFn: TypeAlias = Callable[[Parameters, TrainBatch, bool], TokenOutputs]
"""f(parameters, batch, with_entropy) -> outputs [B, T]; a pure function of its arguments."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """State that training changes. Mappings by parameter name; `parameters` has all of them, the others only the trained ones."""

    parameters: Parameters
    first_moments: Parameters
    second_moments: Parameters
    gradients: Parameters | None = None  # sum since the last update; None = none yet
    num_applied: int = 0  # updates that were not skipped; the bias correction of the moments uses it
    num_passes: int = 0  # calls of accumulate_gradient; dropout is drawn from it and the seed
    seed: int = 0
    counts: UpdateCounts = field(default_factory=UpdateCounts)
    expert_load: ExpertLoad | None = None  # load of the passes since the last update; None = no routers that can be recorded
    counted_load: ExpertLoad | None = None  # load that count_experts has counted since the last update


def create_state(parameters: Parameters, trained: Sequence[str] | None = None, *, seed: int = 0) -> TrainState:
    """Create the state before the first update.

    Args:
        parameters: by name, detached; copied.
        trained: names of the trained parameters; None = all.
        seed: seed of dropout, if the model has any.
    """
    own = {name: value.detach().clone() for name, value in parameters.items()}
    zeros = {name: torch.zeros_like(own[name]) for name in (own if trained is None else trained)}
    return TrainState(MappingProxyType(own), MappingProxyType(zeros), MappingProxyType(zeros), seed=seed)


def accumulate_gradient(
    state: TrainState, batch: TrainBatch, loss_fn: LossFn, forward: ForwardFn, *, with_entropy: bool = False
) -> tuple[TrainState, dict[str, float | Tensor]]:
    """Add the gradient of loss_fn on this batch. Losses are weighted sums, so micro-batches add up to the gradient of the whole batch.

    Returns: the state with the sum; loss, num_tokens and the metrics of the loss, on their device (MetricReads reads them).
    """
    fixed = {name: value for name, value in state.parameters.items() if name not in state.first_moments}

    def evaluate(trained: Parameters) -> tuple[Tensor, tuple[Mapping[str, Tensor], list[Tensor]]]:
        outputs = forward({**fixed, **trained}, batch, with_entropy)
        loss, metrics = loss_fn(outputs, batch)
        loss = add_balance(loss, batch, outputs.expert_load, state.counted_load)
        loads = [] if outputs.expert_load is None else [stack_load(outputs.expert_load)]
        return loss, ({name: torch.as_tensor(value) for name, value in metrics.items()}, loads)

    trained = {name: state.parameters[name] for name in state.first_moments}
    with _drawing_from(state, batch.tokens.device):
        found, (loss, (metrics, loads)) = torch.func.grad_and_value(evaluate, has_aux=True)(trained)
    before = state.gradients
    gradients = found if before is None else {name: before[name] + value for name, value in found.items()}
    expert_load = add_loads(state.expert_load, unstack_load(loads[0]) if loads else None)
    state = replace(state, gradients=MappingProxyType(gradients), num_passes=state.num_passes + 1, expert_load=expert_load)
    return state, list_metrics(loss, metrics, batch)


def count_experts(state: TrainState, batch: TrainBatch, forward: ForwardFn) -> TrainState:
    """Add the load of the experts on this batch to that of the step, which a load-balancing loss reads."""
    with torch.no_grad():
        outputs = forward(state.parameters, batch, False)
    return replace(state, counted_load=add_loads(state.counted_load, outputs.expert_load))


def apply_update(
    state: TrainState, rule: AdamW, read: Callable[[Tensor], float] = read_scalar, find_worst: Callable[[], Worst] = Worst
) -> tuple[TrainState, dict[str, float]]:
    """Update the trained parameters once by the accumulated gradient.

    m' = b1 m + (1 - b1) g;  v' = b2 v + (1 - b2) g^2;  p' = p - lr (wd p + m' / (1 - b1^n) / (sqrt(v' / (1 - b2^n)) + eps))

    with g the gradient, scaled down to max_grad_norm if its norm is larger, and wd = 0 for parameters that are no matrix. An update
    with a bad number is not applied: only the counts of the state change, and update_skipped is 1.

    Args:
        read: reads the norm, and whatever else is to be read of the device with it.
        find_worst: returns the worst of the numbers that were read.

    Returns: the state without gradient; grad_norm (before clipping), lr (of this update), update_skipped; for a mixture of experts those of
        summarize_load.
    Source: Loshchilov and Hutter 2019, algorithm 2, with the decay times the learning rate, as torch.optim.AdamW has it.
    """
    assert state.gradients is not None, "optim_step was called without a forward_backward since the last one"
    norm = read(global_norm(state.gradients))
    lr, kind = rule.rate(state.counts), judge_update(norm, state.counts, worst=find_worst(), policy=rule.bad_numbers)
    metrics = {"grad_norm": norm, "lr": lr, "update_skipped": float(kind is not None)} | describe_bad(kind)
    metrics |= summarize_load(state.expert_load)
    state = replace(state, counts=count_update(state.counts, norm, applied=kind is None), expert_load=None, counted_load=None)
    if kind is not None:
        return replace(state, gradients=None), metrics
    scale = min(1.0, rule.max_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    gradients = {name: value * scale for name, value in (state.gradients or {}).items()}
    return _apply_gradient(state, gradients, rule, lr), metrics


def train_step(
    state: TrainState, batches: Sequence[TrainBatch], loss_fn: LossFn, forward: ForwardFn, rule: AdamW, *, with_entropy: bool = False
) -> tuple[TrainState, dict[str, float]]:
    """Run one optimizer step over the micro-batches of a batch: accumulate_gradient on each, then apply_update.

    Returns: the next state; loss and num_tokens of the step (sums), and the metrics of apply_update.
    """
    reads, parts = MetricReads(), list[UnreadMetrics]()
    for batch in batches:
        state, metrics = accumulate_gradient(state, batch, loss_fn, forward, with_entropy=with_entropy)
        parts.append(reads.add(metrics))
    state, update = apply_update(state, rule, reads.read, reads.take_worst)
    found = [part.read() for part in parts]
    return state, {name: sum((part[name] for part in found), 0.0) for name in ("loss", "num_tokens")} | update


def global_norm(values: Parameters) -> Tensor:
    """Return the Euclidean norm of all values together."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in values.values()]))


@contextmanager
def _drawing_from(state: TrainState, device: torch.device) -> Generator[None]:
    """Draw random numbers from the state in the block; torch's generators are restored afterwards."""
    drawn = 1_000_003 * state.seed + state.num_passes
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(drawn)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(drawn)
        yield


def _apply_gradient(state: TrainState, gradients: Parameters, rule: AdamW, lr: float) -> TrainState:
    (b1, b2), count = rule.betas, state.num_applied + 1
    parameters = dict(state.parameters)
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        first[name] = torch.lerp(state.first_moments[name], gradient, 1 - b1)
        second[name] = b2 * state.second_moments[name] + (1 - b2) * gradient.square()
        decay = rule.weight_decay if gradient.dim() >= 2 else 0.0
        direction = first[name] / (1 - b1**count) / ((second[name] / (1 - b2**count)).sqrt() + rule.eps)
        parameters[name] = state.parameters[name] * (1 - lr * decay) - lr * direction
    return replace(
        state,
        parameters=MappingProxyType(parameters),
        first_moments=MappingProxyType(first),
        second_moments=MappingProxyType(second),
        gradients=None,
        num_applied=count,
    )

"""Load of the experts of a mixture-of-experts model: added over the parts of a step, balanced by a loss, summarized for the log.

The load-balancing loss is transformers' load_balancing_loss_func (Switch Transformer, equations 4 to 6, over all routers at once):

    E * sum over e of f_e * P_e

with f_e the number of choices of expert e, and P_e the sum of its probabilities, both over M = routers * tokens and divided by M. It is a
product of two means, so means over micro-batches would not add up to it. Here f_e and M are those of the whole optimizer step, over
all micro-batches and processes, as in "Demons in the Detail" (arXiv 2501.11873): f_e has no gradient, and a micro-batch's part is the sum
of its probabilities with given factors. The parts then add up to the loss of the step whatever the split, and experts are balanced over a
step instead of within each micro-batch, which leaves them free to specialize in kinds of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from rollouts.types import ExpertLoad, TrainBatch


def add_loads(first: ExpertLoad | None, second: ExpertLoad | None) -> ExpertLoad | None:
    """Add the loads of two parts of a step, without gradient; None = a part without tokens."""
    present = [detach_load(load) for load in (first, second) if load is not None]
    return reduce(_add, present) if present else None


def _add(first: ExpertLoad, second: ExpertLoad) -> ExpertLoad:
    return unstack_load(stack_load(first) + stack_load(second))


def detach_load(load: ExpertLoad) -> ExpertLoad:
    """Return the load without gradient."""
    return unstack_load(stack_load(load).detach())


def stack_load(load: ExpertLoad) -> Tensor:
    """Return the load as one tensor # [L, 2 E + 2], to be added over processes."""
    tokens = load.num_tokens.to(load.entropy).expand_as(load.entropy)
    return torch.cat([load.counts, load.probs, load.entropy[:, None], tokens[:, None]], dim=1)


def unstack_load(stacked: Tensor) -> ExpertLoad:
    """Return the load of stack_load's tensor."""
    num_experts = (stacked.shape[1] - 2) // 2
    return ExpertLoad(counts=stacked[:, :num_experts], probs=stacked[:, num_experts:-2], entropy=stacked[:, -2], num_tokens=stacked[0, -1])


def balance_loss(part: ExpertLoad, step: ExpertLoad) -> Tensor:
    """Compute a part's share of the load-balancing loss of a step; the shares of all parts add up to it.

    Args:
        part: load of a micro-batch; its probs have a gradient.
        step: load of the whole step.

    Returns: at perfect balance the number of experts of a token, in the sum over all parts.
    """
    num_routers, num_experts = step.counts.shape
    total = num_routers * step.num_tokens
    fractions = step.counts.sum(0) / total
    return num_experts * (fractions * part.probs.sum(0)).sum() / total


def summarize_load(load: ExpertLoad | None) -> dict[str, float]:
    """Summarize the load of a step for the log; nothing for None.

    Returns: expert_load_max, the largest load of an expert relative to the mean load of its router's experts, mean over routers (1 =
        balanced); max_expert_load, the same of the worst router; experts_unused, the share of experts that no token chose; router_entropy,
        mean over routers and tokens, nats; router_balance_loss, the load-balancing loss of the step, without its coefficient.
    """
    if load is None:
        return {}
    relative = load.counts.amax(1) / load.counts.mean(1).clamp(min=1e-9)
    values = (
        relative.mean(),
        relative.max(),
        (load.counts == 0).float().mean(),
        load.entropy.mean() / load.num_tokens,
        balance_loss(load, load),
    )
    names = ("expert_load_max", "max_expert_load", "experts_unused", "router_entropy", "router_balance_loss")
    return dict(zip(names, _read(values), strict=True))


def _read(values: Sequence[Tensor]) -> list[float]:
    return torch.stack([value.float() for value in values]).tolist()  # one transfer from the device


def add_balance(loss: Tensor, batch: TrainBatch, part: ExpertLoad | None, counted: ExpertLoad | None) -> Tensor:
    """Add the batch's part of the load-balancing loss, times its coefficient, to a loss; without TrainBatch.router_balance, do nothing.

    Args:
        part: load of the batch, with gradient.
        counted: load of the whole step; None = that of the batch.
    """
    if batch.router_balance is None:
        return loss
    assert part is not None, "the batch has router_balance, but the model has no routers that can be recorded: call check_balance first"
    return loss + batch.router_balance[0] * balance_loss(part, detach_load(part) if counted is None else counted)

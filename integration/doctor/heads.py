"""Checks of models with a head of one number: the critic of PPO, and a reward model that is to be trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from integration.doctor.findings import Finding, judge
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import value_loss
from rollouts.backends.protocol import TrainingBackend
from rollouts.data.collate import collate_samples
from rollouts.errors import BadNumberError
from rollouts.training.rollout_batch import select_values
from rollouts.training.steps import submit_forward
from rollouts.types import LossFn, Sample, TrainBatch

MOST_TOKENS = 8192
"""Real tokens of a forward pass."""


async def check_critic(critic: TrainingBackend, model: Any, samples: Sequence[Sample]) -> Finding:
    """Check that a critic gives each token one finite value, and that the gradient of its loss reaches its weights.

    Args:
        model: the backend's module.
    """
    batch = collate_samples(samples, pad_id=0)
    values = await submit_forward(critic, batch, select_values, max_tokens_per_microbatch=MOST_TOKENS).result()
    on = batch.loss_mask > 0
    advice = "give --critic.path a critic or a language model of the policy's family, or leave it out: the critic is then the policy's copy"
    if values.shape != batch.tokens.shape:
        found = f"values of shape {tuple(values.shape)} for tokens of shape {tuple(batch.tokens.shape)}, expected one for each token"
        return judge("critic", found, fails=True, advice=advice)
    bad = int((~torch.isfinite(values[on])).sum())
    if bad:
        return judge("critic", f"{bad} of {int(on.sum())} values are not finite", fails=True, advice=advice)
    batch = replace(batch, values=values, returns=(values + 1) * on, loss_weights=token_mean(batch))
    told = f"{int(on.sum())} values from {float(values[on].min()):.3g} to {float(values[on].max()):.3g}"
    return await check_gradient("critic", critic, model, batch, partial(value_loss, clip=None), told=told, broken=advice)


async def check_gradient(
    name: str, backend: TrainingBackend, model: Any, batch: TrainBatch, loss: LossFn, *, told: str, broken: str
) -> Finding:
    """Check that the gradient of a loss reaches all weights of a model, and is finite. The weights are restored.

    Args:
        name: name of the check.
        told: beginning of the finding.
        broken: advice for a model of which no weight can be trained.
    """
    await backend.forward_backward(batch, loss).result()
    weights = dict(model.named_parameters())
    unreached = [key for key, weight in weights.items() if weight.grad is None or not bool(weight.grad.any())]
    lost = [key for key, weight in weights.items() if weight.grad is not None and not bool(torch.isfinite(weight.grad).all())]
    await _forget_gradient(backend)
    if lost:
        found = f"{told}; the gradient of their loss is not finite at {len(lost)} of {len(weights)} weights, first {lost[0]}"
        advice = "no update could be applied: look for weights that are huge or not finite, or train in float32 (--backend.compute-dtype)"
        return judge(name, found, fails=True, advice=advice)
    reached = len(weights) - len(unreached)
    found = f"{told}; the gradient of their loss reaches {reached} of {len(weights)} weights"
    if reached == 0:
        return judge(name, found, fails=True, advice=broken)
    found += f", not {unreached[0]}" if unreached else ""
    advice = f"the weights without a gradient would stay as they are, and what the {name} says with them: train all of them"
    return judge(name, found, warns=bool(unreached), advice=advice)


async def _forget_gradient(backend: TrainingBackend) -> None:
    """Take the update of the gradient, and the weights from before it."""
    weights = dict(await backend.get_weights().result())
    with suppress(BadNumberError):  # a policy for bad numbers refused the update
        await backend.optim_step().result()
    await backend.load_weights(weights).result()

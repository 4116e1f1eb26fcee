"""Losses by the names of Tinker: sums over all positions of all sequences, never means, so that parts of a batch add up.

    cross_entropy         -w log p
    importance_sampling   -r A                               r = p / q, q = the sampler's probability
    ppo                   -min(r A, clip(r, low, high) A)    low 0.8, high 1.2
    cispo                 -sg(clip(r, low, high)) A log p    low 0, high 4
    dro                   -(A log p - beta / 2 (log r)^2)    beta 0.05
    gspo                  ppo with the geometric mean of r over the positions that sequence_ratio_mask marks

Source: https://tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import finite_exp
from rollouts.algorithms.surrogates import dro, importance_weighted
from rollouts.errors import DataError
from rollouts.types import TOKEN_PREFIX, LossFn, LossOutput, TokenOutputs, TrainBatch

Settings: TypeAlias = "Mapping[str, float]"
Elementwise: TypeAlias = "Callable[[Tensor, TrainBatch, Settings], Tensor]"
"""f(log_probs [B, T], batch, settings) -> loss of each position [B, T]."""

LOG_PROBS = "log_probs"
"""Name of the column of log-probs that each loss tells of the tokens of recorded rows."""


@dataclass(frozen=True)
class NamedLoss:
    """A loss, the arrays that each datum must have for it besides target_tokens, and its settings."""

    inputs: tuple[str, ...]
    settings: Mapping[str, float | None]  # default of each; None = must be given
    compute: Elementwise


def bind_loss(name: str, config: Mapping[str, float | str]) -> tuple[NamedLoss, LossFn]:
    """Return a loss by its name with its settings. Raises DataError for a name or a setting that is not computed here."""
    loss = LOSSES.get(name)
    if loss is None:
        advice = _NOT_HERE.get(name, "")
        raise DataError(f"loss_fn is {name!r}, which this server does not compute: it has {', '.join(LOSSES)}{advice}")
    unknown = sorted(set(config) - set(loss.settings))
    if unknown:
        known = ", ".join(loss.settings) or "none"
        raise DataError(f"loss_fn_config has {unknown[0]!r}, which is no setting of {name!r} here: its settings are {known}")
    settings: dict[str, float] = {}
    for key, default in loss.settings.items():
        value = config.get(key, default)
        if value is None:
            raise DataError(f"loss_fn_config has no {key!r}, which {name!r} needs here: give {', '.join(loss.settings)}")
        if isinstance(value, str) or not 0 <= value < float("inf"):
            raise DataError(f"loss_fn_config[{key!r}] is {value!r}, expected a number from 0 on")
        settings[key] = value
    if settings.get("clip_low_threshold", 0.0) > settings.get("clip_high_threshold", float("inf")):
        raise DataError(
            f"loss_fn_config has clip_low_threshold {settings['clip_low_threshold']:g} above clip_high_threshold "
            f"{settings['clip_high_threshold']:g}: they are bounds of the ratio, as 0.8 and 1.2"
        )
    return loss, partial(sum_loss, compute=loss.compute, settings=settings)


def sum_loss(outputs: TokenOutputs, batch: TrainBatch, *, compute: Elementwise, settings: Settings) -> LossOutput:
    """Sum the loss of each position of each sequence; tell the log-probs of recorded rows."""
    elements = torch.where(batch.loss_mask > 0, compute(outputs.log_probs, batch, settings), 0.0)
    return LossOutput(elements.sum(), {f"{TOKEN_PREFIX}{LOG_PROBS}": outputs.log_probs.detach()})


def _column(column: Tensor | None) -> Tensor:
    assert column is not None, "the batch lacks a column that its loss reads"
    return column


def _log_ratio(log_probs: Tensor, batch: TrainBatch) -> Tensor:
    return torch.where(batch.loss_mask > 0, log_probs - _column(batch.old_log_probs), 0.0)


def _cross_entropy(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    return -_column(batch.loss_weights) * log_probs


def _importance_sampling(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    return importance_weighted(_log_ratio(log_probs, batch), log_probs, _column(batch.advantages))


def _clip(log_ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    ratio = finite_exp(log_ratio)
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ppo(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    return _clip(_log_ratio(log_probs, batch), _column(batch.advantages), settings)


def _cispo(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    ratio = finite_exp(_log_ratio(log_probs, batch)).clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -ratio.detach() * _column(batch.advantages) * log_probs


def _dro(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    return dro(_log_ratio(log_probs, batch), log_probs, _column(batch.advantages), beta=settings["beta"])


def _gspo(log_probs: Tensor, batch: TrainBatch, settings: Settings) -> Tensor:
    marked = _column(batch.selected)
    total = torch.where(marked, _log_ratio(log_probs, batch), 0.0).sum(1, keepdim=True)
    mean = (total / marked.sum(1, keepdim=True)).detach()
    return _clip(mean + log_probs - log_probs.detach(), _column(batch.advantages), settings)


_POLICY = ("logprobs", "advantages")

LOSSES: Mapping[str, NamedLoss] = MappingProxyType({
    "cross_entropy": NamedLoss(("weights",), {}, _cross_entropy),
    "importance_sampling": NamedLoss(_POLICY, {}, _importance_sampling),
    "ppo": NamedLoss(_POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, _ppo),
    "cispo": NamedLoss(_POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "dro": NamedLoss(_POLICY, {"beta": 0.05}, _dro),
    "gspo": NamedLoss((*_POLICY, "sequence_ratio_mask"), {"clip_low_threshold": None, "clip_high_threshold": None}, _gspo),
})  # fmt: skip
"""Losses by the name that clients ask for."""

_NOT_HERE: Mapping[str, str] = MappingProxyType({
    "stable_reinforce": ". It needs records of Tinker's own sampler; importance_sampling and cispo take the same data without provenance",
    "custom": ". forward_backward_custom works with a Python function, which runs in the client",
})  # fmt: skip

"""A simulated training backend, which takes virtual time and computes nothing, and an algorithm without requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch
import trio
from torch import Tensor

from integration.simulate.settings import TrainerSection
from rollouts.algorithms.loss_weights import token_mean
from rollouts.backends.protocol import OutputFn
from rollouts.types import Algorithm, LossFn, LossOutput, TokenOutputs, TrainBatch

T = TypeVar("T")


class _Job(Generic[T]):
    """A value available from a moment of virtual time."""

    def __init__(self, value: T, ready_at: float) -> None:
        self._value, self._ready_at = value, ready_at

    def done(self) -> bool:
        return trio.current_time() >= self._ready_at

    async def result(self) -> T:
        if self.done():
            await trio.lowlevel.checkpoint()
        else:
            await trio.sleep_until(self._ready_at)
        return self._value


class SimulatedBackend:
    """A TrainingBackend whose jobs take virtual time, one after another. A token counts loss_mask times."""

    def __init__(self, section: TrainerSection) -> None:
        self.busy_s = 0.0  # seconds of all jobs so far, pending ones included
        self._section = section
        self._free_at = 0.0

    @property
    def idle_since(self) -> float:
        """The end of the last job."""
        return self._free_at

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> _Job[Tensor]:
        """Score tokens."""
        return self._submit(output_fn(_outputs(batch, with_entropy)), _seconds(batch, self._section.score_rate))

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> _Job[dict[str, float]]:
        """Train on tokens."""
        output = loss_fn(_outputs(batch, with_entropy), batch)
        metrics = {name: float(value) for name, value in output.metrics.items()}
        metrics |= {"loss": float(output.loss), "num_tokens": float((batch.loss_mask > 0).sum())}
        return self._submit(metrics, _seconds(batch, self._section.train_rate))

    def optim_step(self) -> _Job[dict[str, float]]:
        """Take the fixed time of a step."""
        return self._submit({"grad_norm": 0.0, "lr": 0.0}, self._section.train_s)

    def get_weights(self) -> _Job[Mapping[str, Tensor]]:
        """Return nothing: engines account for the time of a sync."""
        return self._submit({}, 0.0)

    def load_weights(self, weights: Mapping[str, Tensor]) -> _Job[None]:
        """Do nothing."""
        return self._submit(None, 0.0)

    def _submit(self, value: T, seconds: float) -> _Job[T]:
        self.busy_s += seconds
        self._free_at = max(self._free_at, trio.current_time()) + seconds
        return _Job(value, self._free_at)


def _seconds(batch: TrainBatch, rate: float | None) -> float:
    return 0.0 if rate is None else float(batch.loss_mask.sum()) / rate


def _outputs(batch: TrainBatch, with_entropy: bool) -> TokenOutputs:
    zeros = torch.zeros_like(batch.loss_mask)
    return TokenOutputs(log_probs=zeros - 0.5 * (batch.loss_mask > 0), entropy=zeros if with_entropy else None)


def create_idle_algorithm(*, segment_wise: bool = False) -> Algorithm:
    """Create an algorithm that trains nothing. segment_wise: require the log-probs of segment-wise PPO."""
    return Algorithm(
        estimate=_fill_advantages,
        weigh=token_mean,
        loss=_lose_nothing,
        requires=frozenset({"segment_log_probs"} if segment_wise else ()),
    )


def _fill_advantages(batch: TrainBatch) -> TrainBatch:
    return replace(batch, advantages=torch.zeros_like(batch.loss_mask))


def _lose_nothing(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    return LossOutput(outputs.log_probs.sum() * 0.0, {})

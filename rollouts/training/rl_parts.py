"""RLParts, the parts of a reinforcement-learning run, with its hooks and the protocol of its source of rollouts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rollouts.backends.protocol import TrainingBackend
from rollouts.data.prompts import DataBuffer
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.training.abandonment import Abandonment
from rollouts.training.distillation.teachers import Teacher
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rollout_batch import RecordedColumns
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import EvaluateFn
from rollouts.types import RolloutBatch, TrainBatch

OnRollouts: TypeAlias = Callable[[int, RolloutBatch], "Awaitable[None] | None"]
"""(step, its rollouts), before training; sync or async."""

OnEstimates: TypeAlias = Callable[[int, RolloutBatch, TrainBatch], "Awaitable[None] | None"]
"""(step, its rollouts, their batch of tensors with advantages), before any update; sync or async."""

BeforeSave: TypeAlias = Callable[[], "Awaitable[None] | None"]
"""(), before a checkpoint that counts the last finished step; sync or async. Its error prevents the checkpoint."""


@dataclass(frozen=True)
class RecordUpdates:
    """Record of what the updates of each step see of some of its rollouts, see RecordRequest."""

    select: Callable[[int, RolloutBatch], Sequence[int]]  # (step, its rollouts) -> positions of samples, before training
    write: Callable[[int, RolloutBatch, Mapping[int, RecordedColumns]], Awaitable[None] | None]  # (step, its rollouts, columns of tokens by
    # position), after the last update of the step; sync or async


class RolloutSource(Protocol):
    """Source of rollout batches. One that is also a requirements.ConfiguredSource can serve every algorithm."""

    async def generate_batch(self) -> RolloutBatch:
        """Return the next batch: rewarded, filtered, whole groups in the order of their prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the next batches, data position included, as JSON values."""
        ...


class RestorableRolloutSource(RolloutSource, Protocol):
    """Rollout source that can be restored to an earlier state_dict()."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of state_dict()."""
        ...


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class RLParts:
    """Parts of a reinforcement-learning run, besides its source of rollouts and its RLTrainingConfig."""

    backend: TrainingBackend  # policy; a backend or its `open_pipeline` pipeline
    data_buffer: DataBuffer  # prompts of the rollout source; its epoch is logged
    engines: Sequence[InferenceEngine]  # inference engines; get the new weights every config.sync_every steps
    metrics_logger: MetricsLogger | None = None  # gets a line every config.log_every steps, with each evaluation and after the last step
    reference: TrainingBackend | None = None  # frozen model of a KL term; ignored by an algorithm without one
    critic: TrainingBackend | None = None  # model with a value head, for an algorithm that requires values; trained beside the policy,
    # alone in the first config.critic_warmup_steps steps, and saved in the directory "critic" of each checkpoint
    teacher: Teacher | None = None  # teacher of distillation; ignored by an algorithm without one
    pad_id: int = 0  # token that pads rows; never computed
    evaluate: EvaluateFn | None = None  # called every config.eval_every steps, after the sync; its metrics are added to that step's line
    checkpoint_dir: Path | None = None  # gets step_NNNN folders, every config.checkpoint_every steps and after the last; None = none
    keep_last_n: int = 2  # number of newest checkpoints to keep
    should_stop: Callable[[], bool] = _never  # called after each step; True ends the run with a checkpoint of that step
    abandonment: Abandonment | None = None  # its request ends the run with a checkpoint of the last finished step; None = never
    on_rollouts: OnRollouts | None = None  # called with each step's rollouts before training, for example to write some of them to a file
    on_estimates: OnEstimates | None = None  # called with the same rollouts and the batch that algorithm.estimate returned
    record: RecordUpdates | None = None  # called for the record of updates, for example to write it to a file
    before_save: BeforeSave | None = None  # called before the state of a step is taken for a checkpoint, for example to wait for files
    clock: Callable[[], float] = time.monotonic  # time in seconds, for keys that end in `_s`
    weight_channel: WeightChannel | None = None  # open channel into the memory of the engines, if config.weight_sync is "channel"
    best: BestCheckpoint | None = None  # keeps the checkpoint of the best evaluation, and may end the run; needs evaluate
    inputs: RunInputs | None = None  # marks of data and settings, written to each checkpoint

"""What both loops are made of: one optimizer step, a forward pass over a batch of any size, a checkpoint of the run.

Everything is submitted before anything is awaited, so a pipelined backend goes from job to job without waiting for the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rollouts.backends.protocol import CheckpointingBackend, Future, OutputFn, ShardsRows, TrainingBackend
from rollouts.batching import plan_sharded_microbatches, select_rows
from rollouts.checkpoints import save_checkpoint
from rollouts.errors import ConfigError
from rollouts.losses import merge_metrics
from rollouts.types import LossFn, TrainBatch

Metrics: TypeAlias = dict[str, float]
EvaluateFn: TypeAlias = Callable[[], Awaitable[Mapping[str, float]]]
"""Measures the model as it is now, for example evaluate_prompts on held-out prompts; its keys are logged as they are."""


@dataclass(frozen=True)
class PendingOptimizerStep:
    """The submitted jobs of one optimizer step."""

    parts: tuple[Future[dict[str, float]], ...]
    update: Future[dict[str, float]]

    async def result(self) -> Metrics:
        """Metrics of the whole step: loss (a sum over micro-batches), num_tokens, the loss's means, grad_norm and lr."""
        return merge_step_metrics([await part.result() for part in self.parts]) | await self.update.result()


def submit_optimizer_step(
    backend: TrainingBackend,
    batch: TrainBatch,
    loss: LossFn,
    *,
    weigh: Callable[[TrainBatch], Tensor],
    max_tokens_per_microbatch: int,
    with_entropy: bool = False,
) -> PendingOptimizerStep:
    """Submit the forward_backward calls of a batch, split into micro-batches, and the update that follows them.

    The loss weights are computed on the whole batch before it is split, so the gradient does not depend on the split. Rows without a
    trained token, which have no gradient, are then left out.

    Args:
        batch: the rows of one optimizer step, advantages filled where the loss reads them.
        loss: (TokenOutputs, TrainBatch) -> LossOutput.
        weigh: TrainBatch -> loss_weights [B, T].
        max_tokens_per_microbatch: most real tokens that one process has in a forward_backward; a longer row is alone there.
    """
    batch = select_trained_rows(replace(batch, loss_weights=weigh(batch)))
    plan = plan_backend_microbatches(backend, batch.lengths.tolist(), max_tokens_per_microbatch)
    parts = tuple(backend.forward_backward(select_rows(batch, rows), loss, with_entropy=with_entropy) for rows in plan)
    return PendingOptimizerStep(parts=parts, update=backend.optim_step())


def plan_backend_microbatches(backend: TrainingBackend, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of the rows of each call, so that no process of the backend has more than max_tokens at once."""
    num_shards = backend.num_shards if isinstance(backend, ShardsRows) else 1
    return plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards)


def find_trained_rows(batch: TrainBatch) -> list[int]:
    """Positions of the rows that a gradient comes from: trainable, and with a token that has loss_mask > 0."""
    on = (batch.loss_mask > 0).any(1) & batch.trainable
    return [row for row, is_trained in enumerate(on.tolist()) if is_trained]


def select_trained_rows(batch: TrainBatch) -> TrainBatch:
    """The batch without the rows that no gradient comes from; as it is where none or all are such rows."""
    rows = find_trained_rows(batch)
    return batch if len(rows) in (0, batch.num_rows) else select_rows(batch, rows)


def merge_step_metrics(parts: Sequence[Mapping[str, float]]) -> Metrics:
    """One step's metrics from those of its forward_backward calls: losses and token counts add, means are weighted by tokens."""
    assert parts, "an optimizer step needs at least one forward_backward result"
    means = [({k: v for k, v in part.items() if k not in ("loss", "num_tokens")}, int(part["num_tokens"])) for part in parts]
    totals = {key: sum(part[key] for part in parts) for key in ("loss", "num_tokens")}
    return totals | merge_metrics(means)


def mean_step_metrics(steps: Sequence[Mapping[str, float]]) -> Metrics:
    """Metrics of several optimizer steps as one line: token-weighted means; num_tokens adds; lr is the last one's."""
    assert steps, "expected the metrics of at least one optimizer step"
    skip = ("num_tokens", "lr")
    # a skipped update still counts as one step; without a token its weight would vanish from every mean
    means = [({k: v for k, v in step.items() if k not in skip}, max(1, int(step["num_tokens"]))) for step in steps]
    return merge_metrics(means) | {"num_tokens": sum(s["num_tokens"] for s in steps)} | {k: v for k, v in steps[-1].items() if k == "lr"}


@dataclass(frozen=True, eq=False)
class PendingForward:
    """A pass over a batch that has been submitted."""

    batch: TrainBatch
    parts: tuple[tuple[int, ...], ...]  # rows of each micro-batch
    futures: tuple[Future[Tensor], ...]  # one a micro-batch

    async def result(self) -> Tensor:
        """[B, T] in the row order of the batch; 0 on pads, and in all of a row that is not trained on."""
        out = torch.zeros(self.batch.tokens.shape, dtype=torch.float32)
        for rows, future in zip(self.parts, self.futures, strict=True):
            part = await future.result()  # [rows, T of the micro-batch <= T]
            out[torch.tensor(rows), : part.shape[1]] = part
        return out


def submit_forward(
    backend: TrainingBackend, batch: TrainBatch, output_fn: OutputFn, *, max_tokens_per_microbatch: int, with_entropy: bool = False
) -> PendingForward:
    """backend.forward over a batch of any size, micro-batch by micro-batch. Rows without a trained token are not computed."""
    trained = find_trained_rows(batch)
    plan = plan_backend_microbatches(backend, [int(batch.lengths[row]) for row in trained], max_tokens_per_microbatch) if trained else []
    parts = tuple(tuple(trained[i] for i in part) for part in plan)
    futures = tuple(backend.forward(select_rows(batch, rows), output_fn, with_entropy=with_entropy) for rows in parts)
    return PendingForward(batch, parts, futures)


def require_checkpointing(backend: TrainingBackend) -> CheckpointingBackend:
    """The backend as one that saves and restores. Raises ConfigError if it cannot, before anything is trained."""
    if not isinstance(backend, CheckpointingBackend):
        raise ConfigError(
            f"checkpoints were asked for, but {type(backend).__name__} has no save_checkpoint, load_checkpoint and export_weights. "
            "Add them to the backend, or pass checkpoint_dir=None."
        )
    return backend


async def save_training_checkpoint(
    backend: CheckpointingBackend,
    checkpoint_dir: Path,
    step: int,
    run_state: Mapping[str, Any],
    *,
    keep_last_n: int,
    protected: Collection[Path] = (),
    write_more: Callable[[Path], Awaitable[None]] | None = None,
) -> Path:
    """Write checkpoint_dir/step_NNNN with everything that is needed to go on exactly: backend state and run_state.

    Args:
        step: number of finished steps.
        run_state: JSON values: data position, partial samples, byte offset of the metrics file, ...
        write_more: writes further files into the (still temporary) directory.

    Raises: CheckpointError; older checkpoints are untouched then.
    """

    async def write(directory: Path) -> None:
        await backend.save_checkpoint(directory).result()
        if write_more is not None:
            await write_more(directory)

    return await save_checkpoint(
        checkpoint_dir, step, write=write, run_state={"step": step, **run_state}, keep_last_n=keep_last_n, protected=protected
    )


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether something that happens every `every` finished steps is due after `step` of them; 0 = only after the last."""
    return step == num_steps or (every > 0 and step % every == 0)

"""Training a reward model on pairs of answers: collate -> forward_backward -> optim_step -> log -> checkpoint, once per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollouts.backends.protocol import DescribesOutputs, ShardsRows, TrainingBackend
from rollouts.config import RewardModelTrainingConfig
from rollouts.data_buffer import stream_positions
from rollouts.errors import ConfigError, DataError
from rollouts.metrics import MetricsLogger, log_offset
from rollouts.preferences import PreferencePair, bradley_terry_loss, collate_pairs, last_scores, pair_mean, score_loss, split_pairs
from rollouts.training_steps import (
    Metrics,
    PendingOptimizerStep,
    is_due,
    require_checkpointing,
    save_training_checkpoint,
    submit_forward,
)
from rollouts.types import TokenOutputs, TrainBatch

STAGE = "reward_model"


def select_pairs(pairs: Sequence[PreferencePair], step: int, batch_size: int, seed: int) -> tuple[PreferencePair, ...]:
    """The pairs of one step: a pure function of the step, so a resumed run sees the same data.

    Args:
        pairs: the whole data set; not reordered.
        step: 0-based.
        batch_size: pairs per step; may exceed the data set.
        seed: of the permutation of each epoch.

    Returns: batch_size pairs; every one once per epoch, in an order drawn anew for each epoch.
    """
    return tuple(pairs[position] for position in stream_positions(len(pairs), start=step * batch_size, count=batch_size, seed=seed))


async def score_pairs(
    backend: TrainingBackend, pairs: Sequence[PreferencePair], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected answers by the model as it is now. # [P] each, float32."""
    batch = collate_pairs(pairs, pad_id)
    values = await submit_forward(backend, batch, _select_scores, max_tokens_per_microbatch=max_tokens_per_microbatch).result()
    scores = last_scores(values, batch.loss_mask)
    return scores[0::2], scores[1::2]


async def evaluate_reward_model(
    backend: TrainingBackend, pairs: Sequence[PreferencePair], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> Metrics:
    """How the model ranks pairs that it is not trained on.

    Returns: eval_loss, and the metrics of bradley_terry_loss as eval_accuracy, eval_margin, eval_score_chosen and eval_score_rejected.
    """
    chosen, rejected = await score_pairs(backend, pairs, pad_id=pad_id, max_tokens_per_microbatch=max_tokens_per_microbatch)
    loss, metrics = bradley_terry_loss(chosen, rejected, torch.tensor([pair.margin for pair in pairs]))
    return {
        "eval_loss": float(loss),
        "eval_accuracy": float(metrics["score_accuracy"]),
        "eval_margin": float(metrics["score_margin"]),
        "eval_score_chosen": float(metrics["score_chosen"]),
        "eval_score_rejected": float(metrics["score_rejected"]),
    }


async def train_reward_model(
    backend: TrainingBackend,
    pairs: Sequence[PreferencePair],
    config: RewardModelTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    heldout: Sequence[PreferencePair] = (),
    pad_id: int = 0,
    start_step: int = 0,
    checkpoint_dir: Path | None = None,
    keep_last_n: int = 2,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> list[Metrics]:
    """Train a model to score the chosen answer of each pair above the rejected one, for config.num_steps optimizer steps.

    The loss is preferences.score_loss, the mean over the pairs of a step of -log sigmoid(r(chosen) - r(rejected) - margin). Everything the
    function needs is an argument and nothing is kept between calls: same arguments, same metrics (timings aside).

    Args:
        backend: of create_reward_model_backend; direct, or the pipeline of `open_pipeline` to keep the event loop free.
        metrics_logger: gets one line every config.log_every steps and after the last one; None = no logging.
        heldout: pairs of evaluate_reward_model every config.eval_every steps and after the last one; () = no evaluation.
        pad_id: fills rows behind their end; never computed.
        start_step: finished steps of the run that is being resumed (the backend already restored).
        checkpoint_dir: where step_NNNN folders go, each a complete model directory; None = none.
        should_stop: asked after each step; True ends the run with a checkpoint of that step.
        clock: seconds, for keys that end in `_s`.

    Returns: one dict per step, those before start_step not included: loss, score_accuracy, score_margin, score_chosen, score_rejected,
        num_pairs, grad_norm, lr, step_s; where evaluated, the keys of evaluate_reward_model.
    Raises: DataError (nothing to train on), ConfigError (the backend computes no scores, or cannot checkpoint), and what the backend's
        futures raise.
    """
    if not pairs:
        raise DataError("there are no pairs to train on (found 0): check the data path and its filters")
    _require_scores(backend)
    saver = None if checkpoint_dir is None else require_checkpointing(backend)
    history: list[Metrics] = []
    for step in range(start_step, config.num_steps):
        started = clock()
        batch = collate_pairs(select_pairs(pairs, step, config.batch_size, config.seed), pad_id)
        metrics = await _submit_step(backend, batch, config.max_tokens_per_microbatch).result()
        finished = step + 1
        stopping = should_stop()
        metrics["num_pairs"] = float(config.batch_size)
        metrics["step_s"] = clock() - started
        if heldout and is_due(finished, config.eval_every, config.num_steps):
            limit = config.max_tokens_per_microbatch
            metrics.update(await evaluate_reward_model(backend, heldout, pad_id=pad_id, max_tokens_per_microbatch=limit))
            metrics["evaluate_s"] = clock() - started - metrics["step_s"]
        history.append(metrics)
        if metrics_logger is not None and (stopping or is_due(finished, config.log_every, config.num_steps)):
            metrics_logger.log(metrics, finished)
        if saver is not None and checkpoint_dir is not None and (stopping or is_due(finished, config.checkpoint_every, config.num_steps)):
            run_state = {"stage": STAGE, "metrics_bytes": log_offset(metrics_logger)}
            await save_training_checkpoint(saver, checkpoint_dir, finished, run_state, keep_last_n=keep_last_n)
        if stopping:
            break
    return history


def _submit_step(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> PendingOptimizerStep:
    """submit_optimizer_step that keeps the two answers of a pair in one micro-batch: the loss compares them."""
    batch = replace(batch, loss_weights=pair_mean(batch))
    loss = partial(score_loss, margin_from_rewards=True)
    num_shards = backend.num_shards if isinstance(backend, ShardsRows) else 1
    pairs = split_pairs(batch, max_tokens=max_tokens, num_shards=num_shards)
    parts = tuple(backend.forward_backward(part, loss) for part in pairs)
    return PendingOptimizerStep(parts=parts, update=backend.optim_step())


def _select_scores(outputs: TokenOutputs) -> Tensor:
    assert outputs.values is not None, "the backend gave no scores"
    return outputs.values


def _require_scores(backend: TrainingBackend) -> None:
    computes = backend.computes if isinstance(backend, DescribesOutputs) else None
    if computes is not None and "scores" not in computes:
        raise ConfigError(
            f"the backend computes {', '.join(sorted(computes))}, expected scores: make it with create_reward_model_backend "
            "(a critic's value at a token does not know that token)"
        )

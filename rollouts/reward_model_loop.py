"""Train a reward model on pairs of answers: collate -> forward_backward -> optim_step -> log -> checkpoint, once per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollouts.algorithms.preferences import bradley_terry_loss, last_scores, pair_mean, score_loss, split_pairs
from rollouts.backends.protocol import TrainingBackend, count_shards, find_limits, find_outputs
from rollouts.config import RewardModelTrainingConfig
from rollouts.data.model_limits import check_samples
from rollouts.data.preference_pairs import PreferencePair, collate_pairs
from rollouts.data.prompts import stream_positions
from rollouts.errors import ConfigError, DataError
from rollouts.supervised_loop import SupervisedRun, run_supervised
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import MetricsLogger
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import Metrics, PendingOptimizerStep, submit_forward
from rollouts.types import TokenOutputs, TrainBatch

STAGE = "reward_model"


def select_pairs(pairs: Sequence[PreferencePair], step: int, batch_size: int, seed: int) -> tuple[PreferencePair, ...]:
    """Select the pairs of one step: a pure function of the step, so a resumed run sees the same data.

    Args:
        pairs: the whole data set; not reordered.
        step: 0-based.
        batch_size: pairs per step; may exceed the data set.
        seed: seed of the permutation of each epoch.

    Returns: batch_size pairs; every pair once per epoch, in a new random order each epoch.
    """
    return tuple(pairs[position] for position in stream_positions(len(pairs), start=step * batch_size, count=batch_size, seed=seed))


async def score_pairs(
    backend: TrainingBackend, pairs: Sequence[PreferencePair], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> tuple[Tensor, Tensor]:
    """Score the chosen and the rejected answers by the current model. # [P] each, float32."""
    batch = collate_pairs(pairs, pad_id)
    values = await submit_forward(backend, batch, _select_scores, max_tokens_per_microbatch=max_tokens_per_microbatch).result()
    scores = last_scores(values, batch.loss_mask)
    return scores[0::2], scores[1::2]


async def evaluate_reward_model(
    backend: TrainingBackend, pairs: Sequence[PreferencePair], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> Metrics:
    """Measure the ranking of held-out pairs.

    Returns: eval_loss, and the metrics of bradley_terry_loss as eval_accuracy, eval_margin, eval_score_chosen and eval_score_rejected;
        eval_num_pairs, the pairs that were measured.
    """
    chosen, rejected = await score_pairs(backend, pairs, pad_id=pad_id, max_tokens_per_microbatch=max_tokens_per_microbatch)
    loss, metrics = bradley_terry_loss(chosen, rejected, torch.tensor([pair.margin for pair in pairs]))
    return {
        "eval_loss": float(loss),
        "eval_accuracy": float(metrics["score_accuracy"]),
        "eval_margin": float(metrics["score_margin"]),
        "eval_score_chosen": float(metrics["score_chosen"]),
        "eval_score_rejected": float(metrics["score_rejected"]),
        "eval_num_pairs": float(len(pairs)),
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
    checkpoint_dir: Path | str | None = None,
    keep_last_n: int = 2,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    best: BestCheckpoint | None = None,
    inputs: RunInputs | None = None,
    abandonment: Abandonment | None = None,
    unfinished: Mapping[str, float] | None = None,
) -> list[Metrics]:
    """Train a model to score the chosen answer of each pair above the rejected one, for config.num_steps optimizer steps.

    The loss is preferences.score_loss, the mean over the pairs of a step of -log sigmoid(r(chosen) - r(rejected) - margin). No state is
    kept between calls: same arguments, same metrics (timings aside).

    Args:
        backend: result of create_reward_model_backend, or its `open_pipeline` pipeline to keep the event loop free.
        metrics_logger: gets one line every config.log_every steps, with each evaluation and after the last step; None = no logging.
        heldout: pairs for evaluate_reward_model every config.eval_every steps and after the last one; () = no evaluation.
        pad_id: token that pads rows; never computed.
        start_step: finished steps of the resumed run (the backend already restored).
        checkpoint_dir: gets step_NNNN folders, each a complete model directory; None = none.
        should_stop: called after each step; True ends the run with a checkpoint of that step.
        clock: time in seconds, for keys that end in `_s`.
        best: keeps the checkpoint of the best evaluation, and may end the run; a resumed run passes it with its state restored.
        inputs: marks of data and settings, written to each checkpoint.
        abandonment: its request ends the run with a checkpoint of the last finished step, also within an evaluation; None = never.
        unfinished: metrics of step start_step, whose evaluation was given up (RunState.metrics); it is made first. None = it was not.

    Returns: one dict per step from start_step on: loss, score_accuracy, score_margin, score_chosen, score_rejected, num_pairs, grad_norm,
        lr, step_s; if evaluated, the keys of evaluate_reward_model.
    Raises: DataError (nothing to train on), ConfigError (the backend computes no scores, or cannot checkpoint), and the errors of the
        backend's futures.
    """
    _check(backend, pairs, heldout)
    limit = config.max_tokens_per_microbatch
    run = SupervisedRun(
        backend=backend,
        config=config,
        stage=STAGE,
        train_step=partial(_train_step, backend, pairs, config, pad_id),
        evaluate=partial(evaluate_reward_model, backend, heldout, pad_id=pad_id, max_tokens_per_microbatch=limit) if heldout else None,
        metrics_logger=metrics_logger,
        checkpoint_dir=checkpoint_dir,
        keep_last_n=keep_last_n,
        should_stop=should_stop,
        clock=clock,
        best=best,
        inputs=inputs,
        abandonment=abandonment,
    )
    return await run_supervised(run, start_step=start_step, unfinished=unfinished)


def _check(backend: TrainingBackend, pairs: Sequence[PreferencePair], heldout: Sequence[PreferencePair]) -> None:
    if not pairs:
        raise DataError("there are no pairs to train on (found 0): check the data path and its filters")
    _require_scores(backend)
    limits = find_limits(backend)
    for what, some in (("pair", pairs), ("held-out pair", heldout)):
        check_samples((pair.chosen for pair in some), limits, f"the chosen answer of {what}")
        check_samples((pair.rejected for pair in some), limits, f"the rejected answer of {what}")


async def _train_step(
    backend: TrainingBackend, pairs: Sequence[PreferencePair], config: RewardModelTrainingConfig, pad_id: int, step: int
) -> tuple[Metrics, int]:
    """Train on the pairs of a step, 0-based. Returns its metrics and the number of tokens of its rows."""
    batch = collate_pairs(select_pairs(pairs, step, config.batch_size, config.seed), pad_id)
    metrics = await _submit_step(backend, batch, config.max_tokens_per_microbatch).result()
    return {**metrics, "num_pairs": float(config.batch_size)}, int(batch.lengths.sum())


def _submit_step(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> PendingOptimizerStep:
    """Submit an optimizer step with the two answers of a pair in one micro-batch, since the loss compares them."""
    batch = replace(batch, loss_weights=pair_mean(batch))
    loss = partial(score_loss, margin_from_rewards=True)
    pairs = split_pairs(batch, max_tokens=max_tokens, num_shards=count_shards(backend))
    parts = tuple(backend.forward_backward(part, loss) for part in pairs)
    return PendingOptimizerStep(parts=parts, update=backend.optim_step())


def _select_scores(outputs: TokenOutputs) -> Tensor:
    assert outputs.values is not None, "the backend gave no scores"
    return outputs.values


def _require_scores(backend: TrainingBackend) -> None:
    computes = find_outputs(backend)
    if computes is not None and "scores" not in computes:
        raise ConfigError(
            f"the backend computes {', '.join(sorted(computes))}, expected scores: make it with create_reward_model_backend "
            "(a critic's value at a token does not know that token)"
        )

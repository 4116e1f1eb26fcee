"""Supervised fine-tuning: collate -> forward_backward -> optim_step -> log -> checkpoint, once per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.protocol import TrainingBackend, find_limits
from rollouts.config import SFTTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.model_limits import check_samples
from rollouts.data.prompts import stream_positions
from rollouts.data.rows.loaded import LazyRows
from rollouts.errors import DataError
from rollouts.supervised_loop import SupervisedRun, run_supervised
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import EvaluateFn, Metrics, require_balance, submit_forward, submit_optimizer_step
from rollouts.training.summaries import Stage, look
from rollouts.types import Sample

STAGE: Stage = "sft"
_EVALUATED_AT_ONCE = 256  # held-out samples in one [rows, tokens] tensor


def select_sft_rows(samples: Sequence[Sample], step: int, batch_size: int, seed: int) -> tuple[Sample, ...]:
    """Select the samples of one step: a pure function of the step, so a resumed run sees the same data.

    Args:
        samples: the whole data set; not reordered.
        step: 0-based.
        batch_size: rows per step; may exceed the data set.
        seed: seed of the permutation of each epoch.

    Returns: batch_size samples; every sample once per epoch, in a new random order each epoch.
    """
    positions = stream_positions(len(samples), start=step * batch_size, count=batch_size, seed=seed)
    return tuple(samples[position] for position in positions)


async def evaluate_sft(
    backend: TrainingBackend, samples: Sequence[Sample], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> Metrics:
    """Measure the loss of held-out samples, without dropout.

    Args:
        samples: each with tokens and loss_mask; a fractional mask counts its token by that fraction.
        max_tokens_per_microbatch: real tokens in one forward pass; bounds memory, never changes a result.

    Returns: eval_loss, the mean negative log-likelihood of the trained tokens of all samples together, in nats; eval_perplexity,
        exp(eval_loss); eval_num_tokens, the sum of the masks; eval_num_demonstrations, the samples with a token to measure.
    Raises: DataError if no sample has a token with loss_mask > 0, or for a sample outside the model's limits.
    """
    trained = [sample for sample in samples if any(mask > 0 for mask in sample.loss_mask[1:])]
    if not trained:
        raise DataError(f"{len(samples)} held-out samples have no token with loss_mask > 0, so there is no loss to measure: check the data")
    check_samples(samples, find_limits(backend), "held-out sample")
    total, num_tokens = 0.0, 0.0
    for start in range(0, len(trained), _EVALUATED_AT_ONCE):
        batch = replace(collate_samples(trained[start : start + _EVALUATED_AT_ONCE], pad_id=pad_id), kept=None)  # over all tokens
        pending = submit_forward(backend, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch)
        log_probs, mask = (await pending.result()).double(), batch.loss_mask.double()
        total -= float(torch.where(mask > 0, log_probs * mask, 0.0).sum())
        num_tokens += float(mask.sum())
    loss = total / num_tokens
    counts = {"eval_num_tokens": num_tokens, "eval_num_demonstrations": float(len(trained))}
    return {"eval_loss": loss, "eval_perplexity": perplexity(loss), **counts}


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


async def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Sample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    pad_id: int = 0,
    start_step: int = 0,
    evaluate: EvaluateFn | None = None,
    checkpoint_dir: Path | str | None = None,
    keep_last_n: int = 2,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    best: BestCheckpoint | None = None,
    inputs: RunInputs | None = None,
    abandonment: Abandonment | None = None,
    unfinished: Mapping[str, float] | None = None,
) -> list[Metrics]:
    """Train on samples for config.num_steps optimizer steps. The loss is the mean negative log-likelihood of the trained tokens.

    No state is kept between calls: same arguments, same metrics (timings aside).

    Args:
        backend: a backend, or its `open_pipeline` pipeline to keep the event loop free.
        samples: each with tokens and loss_mask; at least one token of each batch must have loss_mask > 0. LazyRows are read as the steps
            need them.
        metrics_logger: gets one line every config.log_every steps, with each evaluation and after the last step; None = no logging.
        pad_id: token that pads rows; never computed.
        start_step: finished steps of the resumed run (the backend already restored).
        evaluate: called every config.eval_every steps; its metrics are part of that step's line.
        checkpoint_dir: gets step_NNNN folders, every config.checkpoint_every steps and after the last; None = none.
        should_stop: called after each step; True ends the run with a checkpoint of that step.
        clock: time in seconds, for keys that end in `_s`.
        best: keeps the checkpoint of the best evaluation, and may end the run; a resumed run passes it with its state restored.
        inputs: marks of data and settings, written to each checkpoint.
        abandonment: its request ends the run with a checkpoint of the last finished step, also within an evaluation; None = never.
        unfinished: metrics of step start_step, whose evaluation was given up (RunState.metrics); it is made first. None = it was not.

    Returns: one dict per step from start_step on, or of the last config.history_steps ones.
    Raises: DataError (nothing to train on, a sample outside the model's limits), ConfigError (the backend cannot checkpoint, or cannot
        balance experts), and the errors of the backend's futures.
    """
    _check(backend, samples, config)
    run = SupervisedRun(
        backend=backend,
        config=config,
        stage=STAGE,
        train_step=partial(_train_step, backend, samples, config, pad_id),
        look=partial(look, stage=STAGE),
        evaluate=evaluate,
        num_rows=len(samples),
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


async def _train_step(
    backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig, pad_id: int, step: int
) -> tuple[Metrics, int]:
    """Train on the rows of a step, 0-based. Returns its metrics and the number of tokens of its rows."""
    rows = select_sft_rows(samples, step, config.batch_size, config.seed)
    if isinstance(samples, LazyRows):
        check_samples(rows, find_limits(backend))
    batch = replace(collate_samples(rows, pad_id=pad_id), dropout=config.dropout, kept=None)  # the likelihood is that of all tokens
    pending = submit_optimizer_step(
        backend,
        batch,
        sft_loss,
        weigh=token_mean,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        with_entropy=True,
        router_balance_coef=config.router_balance_coef,
    )
    return await pending.result(), int(batch.lengths.sum())


def _check(backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig) -> None:
    if not samples:
        raise DataError("there are no samples to train on (found 0): check the data path and its filters")
    if not isinstance(samples, LazyRows):  # these are checked as they are read
        check_samples(samples, find_limits(backend))
    if config.router_balance_coef:
        require_balance(backend)

"""Supervised fine-tuning: collate -> forward_backward -> optim_step -> log -> checkpoint, once per step."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.protocol import TrainingBackend, find_limits
from rollouts.checks import require_flag
from rollouts.config import SFTTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.model_limits import check_samples
from rollouts.data.prompts import stream_positions
from rollouts.data.rows.loaded import LazyRows
from rollouts.errors import DataError
from rollouts.training.best import BestCheckpoint, add_to, protect, state_of
from rollouts.training.metrics import MetricsLogger, log_offset
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.run_state import RunInputs, RunState
from rollouts.training.steps import (
    Abandonment,
    EvaluateFn,
    Metrics,
    is_checkpoint_due,
    is_due,
    measure_throughput,
    note_checkpoint,
    open_checkpoints,
    require_balance,
    submit_forward,
    submit_optimizer_step,
)
from rollouts.training.summaries import Signs, look
from rollouts.types import Sample

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
    Raises: DataError (nothing to train on, a sample outside the model's limits), ConfigError (backend cannot checkpoint, or not
            balance experts), and the errors
        of the backend's futures.
    """
    _check(backend, samples, config)
    history, signs, abandonment = deque[Metrics](maxlen=config.history_steps), Signs(), abandonment or Abandonment()
    async with open_checkpoints(backend, checkpoint_dir, keep_last_n) as checkpoints:
        for step in range(start_step if unfinished is None else start_step - 1, config.num_steps):
            if best is not None and best.has_ended:
                break
            if checkpoints is not None:
                checkpoints.check()  # a run that cannot be saved ends soon
            started, finished, stopping = clock(), step + 1, False
            if unfinished is None:
                async with note_checkpoint(finished, checkpoints):
                    metrics, num_tokens = await _train_step(backend, samples, config, step, pad_id)
                signs, found = look(signs, metrics, stage="sft")
                _warn(found)
                stopping = require_flag(should_stop(), "should_stop")
                metrics["step_s"] = clock() - started
                measure_throughput(metrics, num_tokens)
            else:
                metrics, unfinished = dict(unfinished), None
            guarded = None
            if evaluate is not None and is_due(finished, config.eval_every, config.num_steps):
                trained = clock()
                with abandonment.guard(f"the evaluation of step {finished}") as guarded:
                    metrics.update(await evaluate())
                    metrics["evaluate_s"] = clock() - trained
                    stopping = add_to(best, metrics, finished) or stopping
            history.append(metrics)
            gives_up = guarded is not None and guarded.is_abandoned
            is_line = stopping or "evaluate_s" in metrics or is_due(finished, config.log_every, config.num_steps)
            if metrics_logger is not None and is_line and not gives_up:
                metrics_logger.log(metrics, finished)
            stopping = stopping or gives_up
            due = is_checkpoint_due(finished, config.checkpoint_every, config.num_steps, metrics, stopping=stopping)
            if checkpoints is not None and (due or (best is not None and best.is_best(finished))):
                state = _describe_run(finished, len(samples), metrics_logger, best, inputs)
                state = replace(state, metrics=metrics) if gives_up else state
                await checkpoints.save(state, metrics, protected=protect(best, checkpoint_dir))
            if stopping:
                break
    return list(history)


async def _train_step(
    backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig, step: int, pad_id: int
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


def _warn(found: Sequence[str]) -> None:
    for text in found:
        logging.getLogger(__name__).warning("%s", text)


def _describe_run(
    finished: int, num_rows: int, logger: MetricsLogger | None, best: BestCheckpoint | None, inputs: RunInputs | None
) -> RunState:
    """Return the state of a run after `finished` steps."""
    offset, of_best = log_offset(logger), state_of(best)
    return RunState(stage="sft", step=finished, metrics_bytes=offset, num_rows=num_rows, best=of_best, inputs=inputs)


def _check(backend: TrainingBackend, samples: Sequence[Sample], config: SFTTrainingConfig) -> None:
    if not samples:
        raise DataError("there are no samples to train on (found 0): check the data path and its filters")
    if not isinstance(samples, LazyRows):  # these are checked as they are read
        check_samples(samples, find_limits(backend))
    if config.router_balance_coef:
        require_balance(backend)

"""The loop of training on given rows, of which SFT, preferences and reward models are each a step: train, evaluate, log, save."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from rollouts.backends.protocol import TrainingBackend
from rollouts.checks import require_flag
from rollouts.config import PreferenceTrainingConfig, RewardModelTrainingConfig, SFTTrainingConfig
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import MetricsLogger, log_offset
from rollouts.training.saving.best import BestCheckpoint, add_to, protect, state_of
from rollouts.training.saving.run_checkpoints import RunCheckpoints, is_checkpoint_due, note_checkpoint, open_checkpoints
from rollouts.training.saving.run_state import RunInputs, RunState
from rollouts.training.steps import EvaluateFn, Metrics, is_due, measure_throughput
from rollouts.training.summaries import Signs

TrainStep: TypeAlias = Callable[[int], Awaitable[tuple[Metrics, int]]]
"""f(step, 0-based) -> (metrics of its update, tokens of its rows). The rows depend on the step alone: a resumed run sees the same."""

LookFn: TypeAlias = Callable[[Signs, Metrics], tuple[Signs, Sequence[str]]]
"""f(signs so far, metrics of a step) -> signs, and warnings of a run that goes wrong: training.summaries.look of a stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SupervisedRun:
    """A run on given rows: what one step of it is, and where its results go."""

    backend: TrainingBackend
    config: SFTTrainingConfig | PreferenceTrainingConfig | RewardModelTrainingConfig  # number of steps, and what is due after them
    stage: str  # RunState.stage
    train_step: TrainStep
    look: LookFn | None = None  # None = metrics are not looked at
    evaluate: EvaluateFn | None = None  # called every config.eval_every steps and after the last; None = no evaluation
    num_rows: int | None = None  # RunState.num_rows
    metrics_logger: MetricsLogger | None = None  # gets one line every config.log_every steps, with each evaluation and after the last step
    checkpoint_dir: Path | str | None = None  # gets step_NNNN folders, every config.checkpoint_every steps and after the last; None = none
    keep_last_n: int = 2  # checkpoints to keep
    should_stop: Callable[[], bool] = lambda: False  # called after each step; True ends the run with a checkpoint of that step
    clock: Callable[[], float] = time.monotonic  # time in seconds, for keys that end in `_s`
    best: BestCheckpoint | None = None  # keeps the checkpoint of the best evaluation, and may end the run
    inputs: RunInputs | None = None  # marks of data and settings, written to each checkpoint
    abandonment: Abandonment | None = None  # its request ends the run with a checkpoint of the last finished step; None = never


async def run_supervised(run: SupervisedRun, *, start_step: int = 0, unfinished: Mapping[str, float] | None = None) -> list[Metrics]:
    """Train for config.num_steps steps.

    Args:
        start_step: finished steps of the resumed run (the backend already restored).
        unfinished: metrics of step start_step, whose evaluation was given up (RunState.metrics); it is made first. None = it was not.

    Returns: one dict per step from start_step on, or of the last config.history_steps ones.
    Raises: ConfigError for a backend that cannot save, and the errors of train_step and evaluate.
    """
    config, best, abandonment = run.config, run.best, run.abandonment or Abandonment()
    history, signs = deque[Metrics](maxlen=config.history_steps), Signs()
    async with open_checkpoints(run.backend, run.checkpoint_dir, run.keep_last_n) as checkpoints:
        for step in range(start_step if unfinished is None else start_step - 1, config.num_steps):
            if best is not None and best.has_ended:
                break
            if checkpoints is not None:
                checkpoints.check()  # a run that cannot be saved ends soon
            finished, stopping = step + 1, False
            if unfinished is None:
                metrics, signs = await _train(run, step, signs, checkpoints)
                stopping = require_flag(run.should_stop(), "should_stop")
            else:
                metrics, unfinished = dict(unfinished), None
            guarded = None
            if run.evaluate is not None and is_due(finished, config.eval_every, config.num_steps):
                trained = run.clock()
                with abandonment.guard(f"the evaluation of step {finished}") as guarded:
                    metrics.update(await run.evaluate())
                    metrics["evaluate_s"] = run.clock() - trained
                    stopping = add_to(best, metrics, finished) or stopping
            history.append(metrics)
            gives_up = guarded is not None and guarded.is_abandoned
            is_line = stopping or "evaluate_s" in metrics or is_due(finished, config.log_every, config.num_steps)
            if run.metrics_logger is not None and is_line and not gives_up:
                run.metrics_logger.log(metrics, finished)
            stopping = stopping or gives_up
            due = is_checkpoint_due(finished, config.checkpoint_every, config.num_steps, metrics, stopping=stopping)
            if checkpoints is not None and (due or (best is not None and best.is_best(finished))):
                state = replace(_describe(run, finished), metrics=metrics if gives_up else None)
                await checkpoints.save(state, metrics, protected=protect(best, run.checkpoint_dir))
            if stopping:
                break
    return list(history)


async def _train(run: SupervisedRun, step: int, signs: Signs, checkpoints: RunCheckpoints | None) -> tuple[Metrics, Signs]:
    """Train one step, 0-based. Returns its metrics, with its time and throughput, and the signs so far."""
    started = run.clock()
    async with note_checkpoint(step + 1, checkpoints):
        metrics, num_tokens = await run.train_step(step)
    if run.look is not None:
        signs, found = run.look(signs, metrics)
        for text in found:
            logging.getLogger(__name__).warning("%s", text)
    metrics["step_s"] = run.clock() - started
    measure_throughput(metrics, num_tokens)
    return metrics, signs


def _describe(run: SupervisedRun, finished: int) -> RunState:
    """Return the state of a run after `finished` steps."""
    return RunState(
        stage=run.stage,
        step=finished,
        metrics_bytes=log_offset(run.metrics_logger),
        num_rows=run.num_rows,
        best=state_of(run.best),
        inputs=run.inputs,
    )

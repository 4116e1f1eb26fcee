"""Reinforcement learning with rollouts that are generated during training, so tokens may be some weight versions old.

train_async_rl takes the parts of a run as one value; run_async_rl_training takes them as keywords.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import trio

from rollouts.asynchronous.config import check_async_config
from rollouts.asynchronous.executor import WorkflowExecutor
from rollouts.asynchronous.recompute import ProximalRecomputer, Score, create_proximal_recomputer
from rollouts.backends.protocol import TrainingBackend
from rollouts.checks import require_flag
from rollouts.config import RLTrainingConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import select_trainable
from rollouts.data.segments import find_missed_tokens
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.errors import CheckpointError, ConfigError, GenerationTimeout, RolloutsError, raise_single_errors
from rollouts.training.abandonment import Abandonment
from rollouts.training.distillation.teachers import Teacher
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rl_parts import BeforeSave, OnEstimates, OnRollouts, RecordUpdates, RLParts
from rollouts.training.rl_run import RLRun
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.rl_checkpoints import ResumePoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import EvaluateFn, Metrics, measure_throughput
from rollouts.training.summaries import summarize_mismatch
from rollouts.types import RolloutBatch

_STOP_S = 30.0  # seconds for rollouts and evaluations to stop when a run has failed


async def train_async_rl(
    parts: RLParts,
    executor: WorkflowExecutor,
    config: RLTrainingConfig,
    resume: ResumePoint | None = None,
    segment_score: Score | None = None,
) -> list[Metrics]:
    """Train as train_rl, with rollouts generated during training: tokens may be executor.asynchronous.max_staleness versions behind.

    Each step: take the finished groups, or wait for them -> shape rewards -> train -> checkpoint (if due) -> sync weights (if due)
    -> segment log-probs of all waiting rollouts (if configured) -> open capacity under the new weights -> evaluate (if due), beside the
    next step. A sync interrupts rollouts if executor.asynchronous.interrupts, a checkpoint if checkpoint_in_flight; they continue from
    their tokens. Otherwise a checkpoint holds running rollouts as they were when last stopped.
    With max_staleness=0 nothing overlaps and the numbers equal those of train_rl. With a filter_fn, refused groups are then replaced
    one by one, and the numbers are equal up to the rounding of differently composed engine batches.

    A line of metrics is logged when its evaluation is done, before the next step's checkpoint. The run ends if an evaluation is still
    running AsyncConfig.patience_s seconds after the training of the next step.

    Args:
        executor: opened, with batches_per_version = config.sync_every.
        resume: result of restore_rl_run, which also restores the backend and the executor; None = a new run.
        segment_score: computes segment log-probs, for example score_with_engines(engines); None = computed by the trainer.

    Returns: one dict per step done in this call, or of the last config.history_steps ones.
    Raises: as train_rl. If rollouts, an evaluation or a sync fails and checkpoint_dir is set, a checkpoint of the last finished step with
        all waiting rollouts is written first, and a note on the error names it.
    """
    run = RLRun(parts, executor, config)
    if config.sleep_engines:
        raise ConfigError("sleep_engines is set, but the engines generate while the policy is trained: set it to False, or call train_rl")
    check_async_config(executor.asynchronous, executor.config, replace(config, algorithm=run.algorithm))
    if executor.batches_per_version != config.sync_every:
        raise ConfigError(
            f"the executor was made with batches_per_version={executor.batches_per_version}, but sync_every is {config.sync_every}: its "
            f"capacity would be that of another run. Pass batches_per_version={config.sync_every}"
        )
    recomputer = create_proximal_recomputer(
        executor.asynchronous,
        parts.backend,
        num_steps=0 if resume is None else resume.step,
        sync_every=config.sync_every,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        pad_id=parts.pad_id,
        score=segment_score,
    )
    with raise_single_errors():
        async with run.writing(), trio.open_nursery() as nursery:
            loop = _AsyncLoop(run, executor, recomputer, nursery, resume)
            await loop.run()
    return list(loop.history)


async def run_async_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    executor: WorkflowExecutor,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    reference: TrainingBackend | None = None,
    critic: TrainingBackend | None = None,
    teacher: Teacher | None = None,
    pad_id: int = 0,
    evaluate: EvaluateFn | None = None,
    checkpoint_dir: Path | str | None = None,
    keep_last_n: int = 2,
    resume: ResumePoint | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    abandonment: Abandonment | None = None,
    on_rollouts: OnRollouts | None = None,
    on_estimates: OnEstimates | None = None,
    record: RecordUpdates | None = None,
    before_save: BeforeSave | None = None,
    clock: Callable[[], float] = time.monotonic,
    weight_channel: WeightChannel | None = None,
    best: BestCheckpoint | None = None,
    inputs: RunInputs | None = None,
    segment_score: Score | None = None,
) -> list[Metrics]:
    """Call train_async_rl with the parts as keywords; see RLParts for the parts, train_async_rl for the other arguments."""
    parts = RLParts(
        backend=backend, data_buffer=data_buffer, engines=inference_engines, metrics_logger=metrics_logger, reference=reference,
        critic=critic, teacher=teacher, pad_id=pad_id, evaluate=evaluate,
        checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir), keep_last_n=keep_last_n,
        should_stop=should_stop, on_rollouts=on_rollouts, on_estimates=on_estimates, record=record,
        before_save=before_save, clock=clock, weight_channel=weight_channel, best=best, inputs=inputs, abandonment=abandonment,
    )  # fmt: skip
    return await train_async_rl(parts, executor, config, resume, segment_score)


class _Line:
    """Metrics line of a finished step whose evaluation runs beside the next step."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.evaluating = trio.CancelScope()
        self.waiting = trio.CancelScope()  # scope of waits that a failed evaluation makes pointless

    def set_error(self, error: Exception) -> None:
        """Record a failed evaluation. It is raised once the step beside it reaches a point that can be saved."""
        self.error = error
        self.waiting.cancel()


class _AsyncLoop:
    """State of one train_async_rl call: the last finished step, and the metrics line not logged yet."""

    def __init__(
        self,
        run: RLRun,
        executor: WorkflowExecutor,
        recomputer: ProximalRecomputer | None,
        nursery: trio.Nursery,
        resume: ResumePoint | None,
    ) -> None:
        self._run, self._executor, self._recomputer, self._nursery = run, executor, recomputer, nursery
        self._resume = resume
        self._line: _Line | None = None
        self._updating = False  # whether a step is training: the weights then belong to no finished step
        self._finished = 0 if resume is None else resume.step
        self._metrics: Metrics = {} if resume is None else dict(resume.metrics or {})
        self._metrics_bytes = run.log_offset
        self.history: deque[Metrics] = deque(maxlen=run.config.history_steps)

    async def run(self) -> None:
        """Do all steps; if one fails, write a checkpoint of the last finished one."""
        await self._run.begin(self._resume)  # before the engines' weights are known there is nothing new to save
        try:
            await self._begin()
            for step in range(self._finished, self._run.config.num_steps):
                if self._has_ended or await self._run_step(step):
                    break
        except Exception as error:  # finished work must not be lost after any error
            await self._save_after(error)
            raise

    @property
    def _has_ended(self) -> bool:
        """Whether the run ends without patience, as far as its finished lines tell: one that is evaluated beside the next step does not."""
        return self._line is None and self._run.has_ended

    async def _begin(self) -> None:
        metrics = dict(self._metrics)
        if self._run.has_ended:  # before the step of this checkpoint, which was the last
            await self._finish_step(metrics, stopping=True)
            return
        if self._resume is not None and self._recomputer is not None:
            await self._executor.interrupt()
            await self._recompute(metrics)
        if metrics:  # the checkpoint was written before this line, so that it could serve the sync
            await self._go_on(metrics)
        else:
            self._open_version()

    async def _run_step(self, step: int) -> bool:
        """Run one step. Return whether it is the last one."""
        run, executor, clock = self._run, self._executor, self._run.parts.clock
        started = clock()
        with run.abandonment.guard("the wait for rollouts") as guarded:
            rollouts = await self._wait_for_batch()
        if guarded.is_abandoned:
            await self._save_abandoned()
            return True
        generated = clock()
        self._updating = True
        metrics = await run.train(step, rollouts)
        trained = clock()
        metrics |= summarize_mismatch(metrics)
        if self._recomputer is not None:
            missed = (len(find_missed_tokens(sample, run.served.version)) for sample in select_trainable(rollouts.samples))
            metrics["num_missed_tokens"] = float(sum(missed))
        error = await self._finish_line()
        evaluated = clock()
        metrics |= {"trainer_wait_s": generated - started, "train_s": trained - generated, "evaluate_wait_s": evaluated - trained}
        self._finished, self._metrics, self._metrics_bytes = step + 1, metrics, run.log_offset
        self._updating = False  # from here on the weights are those of the finished step
        if error is not None:
            raise error
        stopping = require_flag(run.parts.should_stop(), "should_stop") or self._has_ended
        in_flight = executor.asynchronous
        saves, syncs = run.is_checkpoint_due(self._finished, metrics, stopping), run.is_sync_due(self._finished)
        is_last = stopping or self._finished == run.config.num_steps
        if is_last or (syncs and in_flight.interrupts) or (saves and in_flight.checkpoint_in_flight == "interrupt"):
            await executor.interrupt()
        if saves:
            await run.save(self._finished, metrics, self._metrics_bytes)
        saved = clock()
        if syncs:
            await run.sync(self._finished, rollouts, saved=saves)
            await self._recompute(metrics, is_last=is_last)
        metrics |= {"checkpoint_s": saved - evaluated, "sync_s": clock() - saved, "step_s": clock() - started}
        measure_throughput(metrics, sum(len(sample.tokens) for sample in rollouts.samples))
        self.history.append(metrics)
        if is_last:  # no rollout starts, and stopped ones stay in the executor for the caller to save
            await self._finish_step(metrics, stopping)
        else:
            await self._go_on(metrics)
        return is_last

    async def _go_on(self, metrics: Metrics) -> None:
        """Log the line of the last finished step and let rollouts start under the new weights; in this order if max_staleness is 0."""
        run, finished = self._run, self._finished
        if self._executor.asynchronous.max_staleness == 0 or not run.is_evaluation_due(finished):
            await self._finish_step(metrics, stopping=False)
            if not run.has_ended:
                self._open_version()
        else:
            self._open_version()
            self._line = _Line()
            self._nursery.start_soon(self._evaluate_beside, finished, metrics, self._line)

    async def _finish_step(self, metrics: Metrics, stopping: bool) -> None:
        """Evaluate and log the last finished step; save it if its evaluation is given up, which the resumed run makes."""
        with self._run.abandonment.guard(f"the evaluation of step {self._finished}") as guarded:
            await self._run.finish_step(self._finished, metrics, stopping)
        if guarded.is_abandoned:
            await self._save_abandoned()

    def _open_version(self) -> None:
        if self._run.served.version > self._executor.version:
            self._executor.set_version(self._run.served.version)
        self._executor.resume()

    async def _recompute(self, metrics: Metrics, *, is_last: bool = False) -> None:
        """Compute segment log-probs of all waiting rollouts, while nothing runs and trainer and engines hold the same weights.

        Skipped after the last step, whose waiting rollouts are not trained on; a run resumed from its checkpoint begins with it.
        """
        if self._recomputer is not None:
            num_tokens = 0 if is_last else await self._recomputer.recompute_all(self._executor, self._run.served.version)
            metrics["num_segment_tokens"] = float(num_tokens)

    async def _evaluate_beside(self, finished: int, metrics: Metrics, line: _Line) -> None:
        try:
            try:
                with line.evaluating:
                    await self._run.evaluate(finished, metrics)
            finally:  # log the line even without these numbers
                self._run.log(finished, metrics, stopping=False)
        except Exception as error:  # evaluations are user code and may raise anything
            line.set_error(error)
        finally:
            line.done.set()

    async def _finish_line(self) -> Exception | None:
        """Wait until the line of the previous step is logged. Return the error of its evaluation."""
        line, self._line = self._line, None
        if line is None:
            return None
        patience_s = self._executor.asynchronous.patience_s
        with trio.move_on_after(math.inf if patience_s is None else patience_s):
            await line.done.wait()
        if not line.done.is_set():
            await _stop_evaluation(line)
            return GenerationTimeout(
                f"the evaluation of step {self._finished} did not end within patience_s ({patience_s:g} s) after the training of the next "
                "step: look at the engines, evaluate on fewer problems, or raise patience_s"
            )
        return line.error

    async def _wait_for_batch(self) -> RolloutBatch:
        if self._line is None:
            return await self._executor.generate_batch()
        with self._line.waiting:
            return await self._executor.generate_batch()
        error = await self._finish_line()
        assert error is not None, "only a failed evaluation cancels the wait for a batch"
        raise error

    async def _save_abandoned(self) -> None:
        """Save the last finished step, with all waiting rollouts, if it is not saved."""
        line, self._line = self._line, None
        if line is not None:
            await _stop_evaluation(line)
        if not self._run.is_saved(self._finished):
            with trio.move_on_after(_STOP_S):  # a rollout that does not stop must not prevent the checkpoint
                await self._executor.interrupt()
            await self._run.save(self._finished, self._metrics, self._metrics_bytes)

    async def _save_after(self, error: Exception) -> None:
        """Save the last finished step with all waiting rollouts, and note the checkpoint's path on the error."""
        line, self._line = self._line, None
        if line is not None:  # otherwise its requests would be aborted below and unfinished answers scored
            await _stop_evaluation(line)
            if line.error is not None and line.error is not error:
                error.add_note(f"beside it, the evaluation of step {self._finished} failed: {line.error!r}")
        if self._updating or not self._run.saves or isinstance(error, CheckpointError):
            return
        try:
            with trio.move_on_after(_STOP_S):  # a rollout that does not stop must not prevent the checkpoint
                await self._executor.interrupt()
        except Exception as problem:  # nor must an engine that cannot be stopped; its error must not hide the first one
            error.add_note(f"beside it, rollouts could not be stopped: {problem!r}")
        try:
            await self._run.save(self._finished, self._metrics, self._metrics_bytes)
            path = await self._run.wait_saved()
        except (RolloutsError, OSError) as problem:
            error.add_note(f"step {self._finished} could not be saved: {problem}")
        else:
            error.add_note(f"step {self._finished} and all rollouts that wait or were under way are saved in {path}: resume from there")


async def _stop_evaluation(line: _Line) -> None:
    line.evaluating.cancel()
    with trio.move_on_after(_STOP_S):  # a user's thread may not stop
        await line.done.wait()

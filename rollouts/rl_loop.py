"""Reinforcement learning: generate -> reward -> advantages -> train -> sync weights, once per step.

One step is one rollout batch. It is trained on with num_epochs x num_minibatches optimizer steps. The weight version counts syncs.

Two loops: run_rl_training generates, then trains; run_async_rl_training trains while the next rollouts are generated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import trio

from rollouts.async_config import check_async_config
from rollouts.async_rollouts import WorkflowExecutor
from rollouts.backends.protocol import TrainingBackend
from rollouts.config import RLTrainingConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.errors import CheckpointError, ConfigError, GenerationTimeout, RolloutsError, raise_single_errors
from rollouts.metrics import MetricsLogger, summarize_mismatch
from rollouts.proximal import find_missed_tokens
from rollouts.proximal_recompute import ProximalRecomputer, create_proximal_recomputer
from rollouts.rl_run import OnEstimates, OnRollouts, ResumePoint, RLRun, RolloutSource
from rollouts.rl_run import resolve_algorithm as resolve_algorithm
from rollouts.rl_run import restore_rl_run as restore_rl_run
from rollouts.rollout_training import train_on_rollouts as train_on_rollouts
from rollouts.samples import select_trainable
from rollouts.training_steps import EvaluateFn, Metrics
from rollouts.types import RolloutBatch

_STOP_S = 30.0  # for rollouts and evaluations to stop when a run has failed


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: RolloutSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    reference: TrainingBackend | None = None,
    critic: TrainingBackend | None = None,
    pad_id: int = 0,
    evaluate: EvaluateFn | None = None,
    checkpoint_dir: Path | None = None,
    keep_last_n: int = 2,
    resume: ResumePoint | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_rollouts: OnRollouts | None = None,
    on_estimates: OnEstimates | None = None,
    clock: Callable[[], float] = time.monotonic,
    weight_channel: WeightChannel | None = None,
) -> list[Metrics]:
    """Train for config.num_steps rollout batches.

    Each step: generate, reward and filter -> shape rewards (if configured) -> train -> checkpoint (if due) -> sync weights (if due) ->
    evaluate (if due) -> log. reward_mean is that of the rewards that filters saw, shaped_reward_mean of those that were trained on.
    Nothing is kept between calls: same arguments, same metrics (timings aside). At step 0 the engines are expected to hold the
    backend's weights; the weight version after s steps is s // config.sync_every.

    Args:
        backend: the policy; direct, or the pipeline of `open_pipeline`.
        data_buffer: the manager's source of prompts; its epoch is logged.
        rollout_manager: gives one RolloutBatch a step.
        inference_engines: get the new weights every config.sync_every steps.
        metrics_logger: one line every config.log_every steps and after the last one; None = no logging.
        reference: the frozen model, where the algorithm has a KL term; not used otherwise, so there is no need to load it then.
        critic: the model with a value head, where the algorithm requires values; trained beside the policy, alone in the first
            config.critic_warmup_steps steps, and saved in the directory "critic" of each checkpoint.
        evaluate: called every config.eval_every steps, after the sync; its metrics are part of that step's line.
        checkpoint_dir: where step_NNNN folders go, every config.checkpoint_every steps and after the last; None = none.
        resume: from restore_rl_run: the backend and the manager already restored.
        should_stop: asked after each step; True ends the run with a checkpoint of that step.
        on_rollouts: given each step's rollouts before training, for example to write some of them to a file; sync or async.
        on_estimates: given the same rollouts and their batch as algorithm.estimate returned it, row by row, before the first update.
        clock: seconds, for keys that end in `_s`.
        weight_channel: where config.weight_sync is "channel", the open way into the memory of inference_engines.

    Returns: one dict per step done in this call.
    Raises: ConfigError before the first rollout; what the manager, the engines and the backend raise.
    """
    run = RLRun(
        backend,
        data_buffer,
        rollout_manager,
        inference_engines,
        config,
        metrics_logger,
        reference=reference,
        critic=critic,
        pad_id=pad_id,
        evaluate=evaluate,
        checkpoint_dir=checkpoint_dir,
        keep_last_n=keep_last_n,
        on_rollouts=on_rollouts,
        on_estimates=on_estimates,
        clock=clock,
        weight_channel=weight_channel,
    )
    first = await run.begin(resume)
    history: list[Metrics] = []
    if resume is not None:  # the checkpoint was written before this line, so that it could serve the sync
        await run.finish_step(resume.step, dict(resume.metrics), stopping=False)
    for step in range(first, config.num_steps):
        started = clock()
        rollouts = await rollout_manager.generate_batch()
        generated = clock()
        metrics = await run.train(step, rollouts)
        trained, finished = clock(), step + 1
        metrics |= {"generate_s": generated - started, "train_s": trained - generated}
        stopping = should_stop()
        checkpoint: Path | None = None
        if run.is_checkpoint_due(finished, stopping):
            checkpoint = await run.save(finished, metrics, run.log_offset)
        saved = clock()
        if run.is_sync_due(finished):
            await run.sync(finished, rollouts, checkpoint)
        metrics |= {"checkpoint_s": saved - trained, "sync_s": clock() - saved, "step_s": clock() - started}
        await run.finish_step(finished, metrics, stopping)
        history.append(metrics)
        if stopping:
            break
    return history


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
    pad_id: int = 0,
    evaluate: EvaluateFn | None = None,
    checkpoint_dir: Path | None = None,
    keep_last_n: int = 2,
    resume: ResumePoint | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_rollouts: OnRollouts | None = None,
    on_estimates: OnEstimates | None = None,
    clock: Callable[[], float] = time.monotonic,
    weight_channel: WeightChannel | None = None,
) -> list[Metrics]:
    """run_rl_training, with rollouts that are generated while training goes on: tokens may be executor.asynchronous.max_staleness behind.

    Each step: take the groups that are finished, or wait for them -> shape rewards -> train -> checkpoint (if due) -> sync weights (if due)
    -> segment log-probs of everything that waits (if configured) -> open capacity under the new weights -> evaluate (if due), beside the
    next step. Rollouts are interrupted, and go on from their tokens, for a sync where executor.asynchronous.interrupts, and for a
    checkpoint where checkpoint_in_flight says so; else a checkpoint has of those that run what they had when they were last stopped.
    With max_staleness=0 nothing overlaps and the numbers are those of run_rl_training; with a filter_fn, whose refused groups are then
    replaced one by one, they are so up to the rounding of another make-up of the engine's batches.

    A line of metrics is logged when its evaluation is done, before the next step's checkpoint. An evaluation that has not ended
    AsyncConfig.patience_s after the training of the next step ends the run.

    Args: as of run_rl_training, besides:
        executor: opened, with batches_per_version = config.sync_every.

    Returns: one dict per step done in this call.
    Raises: as run_rl_training. If rollouts, an evaluation or a sync fails, a checkpoint of the last finished step with everything that
        waits is written first, where there is a checkpoint_dir, and a note on the error says where.
    """
    run = RLRun(
        backend,
        data_buffer,
        executor,
        inference_engines,
        config,
        metrics_logger,
        reference=reference,
        critic=critic,
        pad_id=pad_id,
        evaluate=evaluate,
        checkpoint_dir=checkpoint_dir,
        keep_last_n=keep_last_n,
        on_rollouts=on_rollouts,
        on_estimates=on_estimates,
        clock=clock,
        weight_channel=weight_channel,
    )
    check_async_config(executor.asynchronous, executor.config, replace(config, algorithm=run.algorithm))
    if executor.batches_per_version != config.sync_every:
        raise ConfigError(
            f"the executor was made with batches_per_version={executor.batches_per_version}, but sync_every is {config.sync_every}: its "
            f"capacity would be that of another run. Pass batches_per_version={config.sync_every}"
        )
    recomputer = create_proximal_recomputer(
        executor.asynchronous,
        backend,
        num_steps=0 if resume is None else resume.step,
        sync_every=config.sync_every,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        pad_id=pad_id,
    )
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            loop = _AsyncLoop(run, executor, recomputer, nursery, should_stop, clock, resume)
            await loop.run()
    return loop.history


class _Line:
    """The line of a finished step, while its evaluation goes on beside the next step."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.evaluating = trio.CancelScope()
        self.waiting = trio.CancelScope()  # round what would wait in vain once the evaluation has failed

    def set_error(self, error: Exception) -> None:
        """The evaluation failed. It is raised where the step that runs beside it has come to a point that can be saved."""
        self.error = error
        self.waiting.cancel()


class _AsyncLoop:
    """The state of one run_async_rl_training call: the last finished step, and the line that is not logged yet."""

    def __init__(
        self,
        run: RLRun,
        executor: WorkflowExecutor,
        recomputer: ProximalRecomputer | None,
        nursery: trio.Nursery,
        should_stop: Callable[[], bool],
        clock: Callable[[], float],
        resume: ResumePoint | None,
    ) -> None:
        self._run, self._executor, self._recomputer, self._nursery = run, executor, recomputer, nursery
        self._should_stop, self._clock, self._resume = should_stop, clock, resume
        self._line: _Line | None = None
        self._updating = False  # while a step trains: the weights of that moment are of no finished step
        self._finished = 0 if resume is None else resume.step
        self._metrics = Metrics() if resume is None else dict(resume.metrics)
        self._metrics_bytes = run.log_offset
        self.history: list[Metrics] = []

    async def run(self) -> None:
        """All steps; if one fails, a checkpoint of the last finished one."""
        await self._run.begin(self._resume)  # before it is known what the engines hold there is nothing new to save
        try:
            await self._begin()
            for step in range(self._finished, self._run.config.num_steps):
                if await self._run_step(step):
                    break
        except Exception as error:  # whatever it is, what is finished must not be lost with it
            await self._save_after(error)
            raise

    async def _begin(self) -> None:
        metrics = dict(self._metrics)
        if self._resume is not None and self._recomputer is not None:
            await self._executor.interrupt()
            await self._recompute(metrics)
        if metrics:  # the checkpoint was written before this line, so that it could serve the sync
            await self._go_on(metrics)
        else:
            self._open_version()

    async def _run_step(self, step: int) -> bool:
        """One step. Returns whether it is the last one."""
        run, executor, clock = self._run, self._executor, self._clock
        started = clock()
        rollouts = await self._wait_for_batch()
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
        self._updating = False  # from here on, and not before, the weights are those of the step that is called finished
        if error is not None:
            raise error
        stopping, in_flight = self._should_stop(), executor.asynchronous
        saves, syncs = run.is_checkpoint_due(self._finished, stopping), run.is_sync_due(self._finished)
        is_last = stopping or self._finished == run.config.num_steps
        if is_last or (syncs and in_flight.interrupts) or (saves and in_flight.checkpoint_in_flight == "interrupt"):
            await executor.interrupt()
        checkpoint = await run.save(self._finished, metrics, self._metrics_bytes) if saves else None
        saved = clock()
        if syncs:
            await run.sync(self._finished, rollouts, checkpoint)
            await self._recompute(metrics, is_last=is_last)
        metrics |= {"checkpoint_s": saved - evaluated, "sync_s": clock() - saved, "step_s": clock() - started}
        self.history.append(metrics)
        if is_last:  # nothing new starts, and what was stopped stays where the caller can save it
            await run.finish_step(self._finished, metrics, stopping)
        else:
            await self._go_on(metrics)
        return is_last

    async def _go_on(self, metrics: Metrics) -> None:
        """Log the line of the last finished step, and let rollouts start under the new weights: with max_staleness 0 in this order."""
        run, finished = self._run, self._finished
        if self._executor.asynchronous.max_staleness == 0 or not run.is_evaluation_due(finished):
            await run.finish_step(finished, metrics, stopping=False)
            self._open_version()
        else:
            self._open_version()
            self._line = _Line()
            self._nursery.start_soon(self._evaluate_beside, finished, metrics, self._line)

    def _open_version(self) -> None:
        if self._run.served.version > self._executor.version:
            self._executor.set_version(self._run.served.version)
        self._executor.resume()

    async def _recompute(self, metrics: Metrics, *, is_last: bool = False) -> None:
        """Segment log-probs for everything that waits. Nothing runs, and the trainer holds the weights that the engines have just got.

        After the last step nobody trains on what waits; a run that goes on from its checkpoint begins with this.
        """
        if self._recomputer is not None:
            num_tokens = 0 if is_last else await self._recomputer.recompute_all(self._executor, self._run.served.version)
            metrics["num_segment_tokens"] = float(num_tokens)

    async def _evaluate_beside(self, finished: int, metrics: Metrics, line: _Line) -> None:
        try:
            try:
                with line.evaluating:
                    await self._run.evaluate(finished, metrics)
            finally:  # a line without these numbers is better than none
                self._run.log(finished, metrics, stopping=False)
        except Exception as error:  # evaluations are the user's
            line.set_error(error)
        finally:
            line.done.set()

    async def _finish_line(self) -> Exception | None:
        """Wait until the line of the step before is logged. Returns the error that its evaluation ended with."""
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

    async def _save_after(self, error: Exception) -> None:
        """Save the last finished step with everything that waits, and note on the error where."""
        line, self._line = self._line, None
        if line is not None:  # its requests would be aborted below, and unfinished answers judged
            await _stop_evaluation(line)
            if line.error is not None and line.error is not error:
                error.add_note(f"beside it, the evaluation of step {self._finished} failed: {line.error!r}")
        if self._updating or not self._run.saves or isinstance(error, CheckpointError):
            return
        try:
            with trio.move_on_after(_STOP_S):  # what does not stop must not keep the checkpoint from being written
                await self._executor.interrupt()
        except Exception as problem:  # nor must an engine that cannot be told; it must not take the place of the error either
            error.add_note(f"beside it, rollouts could not be stopped: {problem!r}")
        try:
            path = await self._run.save(self._finished, self._metrics, self._metrics_bytes)
        except (RolloutsError, OSError) as problem:
            error.add_note(f"step {self._finished} could not be saved: {problem}")
        else:
            error.add_note(f"step {self._finished} and all rollouts that wait or were under way are saved in {path}: resume from there")


async def _stop_evaluation(line: _Line) -> None:
    line.evaluating.cancel()
    with trio.move_on_after(_STOP_S):  # a thread of the user's may not stop
        await line.done.wait()

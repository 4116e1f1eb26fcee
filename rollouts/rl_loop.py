"""Reinforcement learning: generate -> reward -> advantages -> train -> sync weights, once per step.

One step is one rollout batch, trained on with num_epochs x num_minibatches optimizer steps. The weight version counts syncs.
train_rl takes the parts of a run as one value; run_rl_training takes them as keywords. The loop of rollouts.async_rl_loop generates the
next rollouts during training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rollouts.backends.protocol import TrainingBackend
from rollouts.checks import require_flag
from rollouts.config import RLTrainingConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.training.abandonment import Abandonment
from rollouts.training.distillation.teachers import Teacher
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rl_parts import BeforeSave, OnEstimates, OnRollouts, RecordUpdates, RLParts, RolloutSource
from rollouts.training.rl_run import RLRun
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.rl_checkpoints import ResumePoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import EvaluateFn, Metrics, measure_throughput
from rollouts.training.summaries import summarize_mismatch


async def train_rl(parts: RLParts, source: RolloutSource, config: RLTrainingConfig, resume: ResumePoint | None = None) -> list[Metrics]:
    """Train for config.num_steps rollout batches.

    Each step: generate, reward and filter -> shape rewards (if configured) -> train -> checkpoint (if due) -> sync weights (if due) ->
    evaluate (if due) -> log. reward_mean is the mean of the rewards that filters see, shaped_reward_mean of the rewards trained on.
    No state is kept between calls: same arguments, same metrics (timings aside). At step 0 the engines must hold the backend's weights;
    the weight version after s steps is config.first_version + s // config.sync_every.

    Args:
        source: generates one RolloutBatch per step, for example an AsyncRolloutManager.
        resume: result of restore_rl_run, which also restores the backend and the source; None = a new run.

    Returns: one dict per step done in this call, or of the last config.history_steps ones.
    Raises: ConfigError before the first rollout; the errors of the source, the engines and the backend.
    """
    run = RLRun(parts, source, config)
    async with run.writing():
        return await _train(run, source, resume)


async def _train(run: RLRun, source: RolloutSource, resume: ResumePoint | None) -> list[Metrics]:
    config, parts, clock = run.config, run.parts, run.parts.clock
    first = await run.begin(resume)
    history: deque[Metrics] = deque(maxlen=config.history_steps)
    metrics, metrics_bytes = Metrics(), run.log_offset
    if resume is not None and resume.metrics is not None:  # the checkpoint was taken before this line, so that it could serve the sync
        with run.abandonment.guard(f"the evaluation of step {resume.step}"):  # the loop then ends, and the next resumed run makes it
            await run.finish_step(resume.step, dict(resume.metrics), stopping=False)
    for step in range(first, config.num_steps):
        if run.has_ended:
            break
        started = clock()
        with run.abandonment.guard("the wait for rollouts", source.state_dict) as guarded:
            rollouts = await source.generate_batch()
        if guarded.is_abandoned:
            if not run.is_saved(step):
                await run.save(step, metrics, metrics_bytes, guarded.state)
            break
        generated = clock()
        async with run.engines_asleep():
            metrics = await run.train(step, rollouts)
        trained, finished = clock(), step + 1
        metrics |= summarize_mismatch(metrics) | {"generate_s": generated - started, "train_s": trained - generated}
        stopping = require_flag(parts.should_stop(), "should_stop")
        saves = run.is_checkpoint_due(finished, metrics, stopping)
        if saves:
            await run.save(finished, metrics, run.log_offset)
        saved = clock()
        if run.is_sync_due(finished):
            await run.sync(finished, rollouts, saved=saves)
        metrics |= {"checkpoint_s": saved - trained, "sync_s": clock() - saved, "step_s": clock() - started}
        measure_throughput(metrics, sum(len(sample.tokens) for sample in rollouts.samples))
        metrics_bytes = run.log_offset
        with run.abandonment.guard(f"the evaluation of step {finished}") as guarded:
            await run.finish_step(finished, metrics, stopping)
        history.append(metrics)
        if guarded.is_abandoned and not run.is_saved(finished):
            await run.save(finished, metrics, metrics_bytes)
        if stopping or guarded.is_abandoned:
            break
    return list(history)


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
) -> list[Metrics]:
    """Call train_rl with the parts as keywords; see RLParts for the parts, train_rl for the other arguments."""
    parts = RLParts(
        backend=backend, data_buffer=data_buffer, engines=inference_engines, metrics_logger=metrics_logger, reference=reference,
        critic=critic, teacher=teacher, pad_id=pad_id, evaluate=evaluate,
        checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir), keep_last_n=keep_last_n,
        should_stop=should_stop, on_rollouts=on_rollouts, on_estimates=on_estimates, record=record,
        before_save=before_save, clock=clock, weight_channel=weight_channel, best=best, inputs=inputs, abandonment=abandonment,
    )  # fmt: skip
    return await train_rl(parts, rollout_manager, config, resume)

"""Reinforcement learning: generate -> reward -> advantages -> train -> sync weights, once per step.

One step is one rollout batch. It is trained on with num_epochs x num_minibatches optimizer steps. The weight version counts syncs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollouts.backends.protocol import TrainingBackend
from rollouts.config import RLTrainingConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.metrics import MetricsLogger
from rollouts.rl_run import ResumePoint, RLRun, RolloutSource
from rollouts.rl_run import resolve_algorithm as resolve_algorithm
from rollouts.rl_run import restore_rl_run as restore_rl_run
from rollouts.train_on_rollouts import train_on_rollouts as train_on_rollouts
from rollouts.training_steps import EvaluateFn, Metrics
from rollouts.types import RolloutBatch


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
    on_rollouts: Callable[[int, RolloutBatch], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
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
        on_rollouts: given each step's rollouts before training, for example to write some of them to a file.
        clock: seconds, for keys that end in `_s`.

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
        clock=clock,
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

"""Reinforcement learning: generate -> reward -> advantages -> train -> sync weights, once per step.

One step is one rollout batch. It is trained on with num_epochs x num_minibatches optimizer steps. The weight version counts syncs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rollouts.advantages import compute_advantages
from rollouts.algorithms import grpo
from rollouts.backends.protocol import TrainingBackend
from rollouts.batching import collate_samples, split_minibatches
from rollouts.checkpoints import load_run_state
from rollouts.config import RLTrainingConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import CheckpointError, ConfigError
from rollouts.metrics import MetricsLogger, log_offset, summarize_samples
from rollouts.samples import derive_seed
from rollouts.served_weights import ServedWeights, hold_weights, publish_weights, restore_served_weights, write_served_weights
from rollouts.training_steps import (
    EvaluateFn,
    Metrics,
    forward_batch,
    is_due,
    mean_step_metrics,
    require_checkpointing,
    save_training_checkpoint,
    submit_optimizer_step,
)
from rollouts.types import Algorithm, RolloutBatch, TokenOutputs, TrainBatch

FORWARD_COLUMNS = ("old_log_probs", "prox_log_probs", "ref_log_probs")


class RolloutSource(Protocol):
    """What the loop needs of a rollout manager."""

    async def generate_batch(self) -> RolloutBatch:
        """The next batch: rewarded, filtered, whole groups in the order of their prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides which batches come next, as JSON values; the data position included."""
        ...


class RestorableRolloutSource(RolloutSource, Protocol):
    """A rollout source that can be put back to where state_dict() was taken."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of state_dict."""
        ...


@dataclass(frozen=True)
class ResumePoint:
    """Where an interrupted run goes on."""

    step: int  # finished steps
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of that step; its line is written again
    served: ServedWeights | None = None  # what the engines sample with, where that is older than the backend's weights


async def restore_rl_run(
    checkpoint: Path,
    backend: TrainingBackend,
    rollout_manager: RestorableRolloutSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
) -> ResumePoint:
    """Bring backend, manager (with its data position) and engines to where a checkpoint of run_rl_training was written.

    Raises: CheckpointError if the checkpoint is damaged, of another stage or of another architecture.
    """
    run_state = load_run_state(checkpoint)
    if run_state.get("stage") != "rl":
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of stage {run_state.get('stage')!r}, expected 'rl': resume it with its own stage"
        )
    await require_checkpointing(backend).load_checkpoint(checkpoint).result()
    rollout_manager.load_state_dict(run_state["rollouts"])
    served = await restore_served_weights(backend, inference_engines, checkpoint, in_memory=config.weight_sync == "memory")
    return ResumePoint(step=int(run_state["step"]), metrics=run_state["metrics"], served=served)


def select_log_probs(outputs: TokenOutputs) -> torch.Tensor:
    """The output function of a log-prob pass."""
    return outputs.log_probs


def estimate_with_baseline(batch: TrainBatch, baseline: float) -> TrainBatch:
    """advantages = rewards - baseline for a number given beforehand, on every trained token."""
    advantages = compute_advantages(batch.rewards, baseline=baseline)
    return replace(batch, advantages=advantages[:, None] * (batch.loss_mask > 0))


def resolve_algorithm(config: RLTrainingConfig) -> Algorithm:
    """The configured algorithm (default: GRPO); a scalar config.baseline replaces its estimator."""
    algorithm = grpo() if config.algorithm is None else config.algorithm
    if config.baseline is None:
        return algorithm
    return replace(algorithm, estimate=partial(estimate_with_baseline, baseline=config.baseline))


def check_requirements(algorithm: Algorithm, reference: TrainingBackend | None) -> None:
    """Raise ConfigError if the loop cannot fill a column that the algorithm requires. Called before the first rollout."""
    fillable = {*FORWARD_COLUMNS, "rollout_log_probs", "entropy"}
    unknown = sorted(algorithm.requires - fillable)
    if unknown:
        raise ConfigError(f"the algorithm requires {unknown}, which this loop cannot fill; it can fill {sorted(fillable)}")
    if "ref_log_probs" in algorithm.requires and reference is None:
        raise ConfigError(
            "the algorithm requires ref_log_probs (it has a KL term): pass reference=backend of the frozen model, or set kl_coef=0"
        )


async def fill_columns(
    batch: TrainBatch,
    algorithm: Algorithm,
    backend: TrainingBackend,
    reference: TrainingBackend | None,
    *,
    max_tokens_per_microbatch: int,
) -> TrainBatch:
    """The batch with the log-prob columns that the algorithm requires, each from one forward pass before the update."""
    filled: dict[str, torch.Tensor] = {}
    own: torch.Tensor | None = None
    for column in FORWARD_COLUMNS:
        if column not in algorithm.requires:
            continue
        if column == "ref_log_probs":
            assert reference is not None, "check_requirements admits ref_log_probs only with a reference"
            filled[column] = await forward_batch(reference, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch)
            continue
        if own is None:  # the policy before its update: the same numbers serve as old and as proximal log-probs
            own = await forward_batch(backend, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch)
        filled[column] = own
    return replace(batch, **filled)


async def train_on_rollouts(
    backend: TrainingBackend,
    batch: TrainBatch,
    algorithm: Algorithm,
    *,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    max_tokens_per_microbatch: int = 16384,
    seed: int = 0,
    reference: TrainingBackend | None = None,
) -> Metrics:
    """Train on one rollout batch: estimate once, then num_epochs x num_minibatches optimizer steps.

    Args:
        batch: rewards and rollout_log_probs filled; the columns in algorithm.requires are filled here.
        seed: of the order of rows in each epoch.
        reference: the frozen model of a KL term.

    Returns: token-weighted means over the optimizer steps; num_tokens is their sum; lr is the last one's; num_updates.
    """
    batch = await fill_columns(batch, algorithm, backend, reference, max_tokens_per_microbatch=max_tokens_per_microbatch)
    batch = algorithm.estimate(batch)
    pending = [
        submit_optimizer_step(
            backend,
            minibatch,
            algorithm.loss,
            weigh=algorithm.weigh,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            with_entropy="entropy" in algorithm.requires,
        )
        for epoch in range(num_epochs)
        for minibatch in split_minibatches(batch, num_minibatches, seed=derive_seed(seed, epoch))
    ]
    updates = [await update.result() for update in pending]
    return mean_step_metrics(updates) | {"num_updates": float(len(updates))}


async def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    rollout_manager: RolloutSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
    *,
    reference: TrainingBackend | None = None,
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

    Each step: generate and reward -> train -> checkpoint (if due) -> sync weights (if due) -> evaluate (if due) -> log.
    Nothing is kept between calls: same arguments, same metrics (timings aside). At step 0 the engines are expected to hold the
    backend's weights; the weight version after s steps is s // config.sync_every.

    Args:
        backend: the policy; direct, or the pipeline of `open_pipeline`.
        data_buffer: the manager's source of prompts; its epoch is logged.
        rollout_manager: gives one RolloutBatch a step.
        inference_engines: get the new weights every config.sync_every steps.
        metrics_logger: one line every config.log_every steps and after the last one; None = no logging.
        reference: the frozen model, where the algorithm has a KL term.
        evaluate: called every config.eval_every steps, after the sync; its metrics are part of that step's line.
        checkpoint_dir: where step_NNNN folders go, every config.checkpoint_every steps and after the last; None = none.
        resume: from restore_rl_run: the backend and the manager already restored.
        should_stop: asked after each step; True ends the run with a checkpoint of that step.
        on_rollouts: given each step's rollouts before training, for example to write some of them to a file.
        clock: seconds, for keys that end in `_s`.

    Returns: one dict per step done in this call.
    Raises: ConfigError before the first rollout; what the manager, the engines and the backend raise.
    """
    algorithm = resolve_algorithm(config)
    check_requirements(algorithm, reference)
    saver = None if checkpoint_dir is None and config.weight_sync == "memory" else require_checkpointing(backend)
    if config.weight_sync == "checkpoint" and checkpoint_dir is None:
        raise ConfigError('weight_sync="checkpoint" writes weights to the disk: pass checkpoint_dir, or set weight_sync="memory"')
    first = 0 if resume is None else resume.step
    sync_dir = None if config.weight_sync == "memory" else checkpoint_dir
    if resume is not None and resume.served is not None:
        served = resume.served
    elif saver is not None and config.sync_every > 1:
        served = await hold_weights(backend, version=first // config.sync_every, directory=sync_dir)
    else:
        served = ServedWeights(version=first // config.sync_every)
    history: list[Metrics] = []

    async def finish_step(finished: int, metrics: Metrics, stopping: bool) -> None:
        if evaluate is not None and is_due(finished, config.eval_every, config.num_steps):
            started = clock()
            metrics.update(await evaluate())
            metrics["evaluate_s"] = clock() - started
        if metrics_logger is not None and (stopping or is_due(finished, config.log_every, config.num_steps)):
            metrics_logger.log(metrics, finished)

    if resume is not None:  # the checkpoint was written before this line, so that it could serve the sync
        await finish_step(resume.step, dict(resume.metrics), stopping=False)
    for step in range(first, config.num_steps):
        started = clock()
        rollouts = await rollout_manager.generate_batch()
        generated = clock()
        if on_rollouts is not None:
            on_rollouts(step + 1, rollouts)
        batch = collate_samples(rollouts.samples, pad_id=pad_id, require_rewards=True)
        metrics = await train_on_rollouts(
            backend,
            batch,
            algorithm,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            seed=derive_seed(config.seed, step),
            reference=reference,
        )
        trained = clock()
        finished = step + 1
        metrics |= summarize_rollouts(rollouts, weight_version=served.version) | {"epoch": float(data_buffer.state.epoch_id)}
        metrics |= {"generate_s": generated - started, "train_s": trained - generated}
        stopping = should_stop()
        sync_due = finished % config.sync_every == 0
        checkpoint: Path | None = None
        if saver is not None and checkpoint_dir is not None and (stopping or is_due(finished, config.checkpoint_every, config.num_steps)):
            run_state = {
                "stage": "rl",
                "rollouts": rollout_manager.state_dict(),
                "metrics": metrics,
                "metrics_bytes": log_offset(metrics_logger),
                "weight_version": finished // config.sync_every,
            }
            checkpoint = await save_training_checkpoint(
                saver,
                checkpoint_dir,
                finished,
                run_state,
                keep_last_n=keep_last_n,
                protected=() if served.directory is None else (served.directory,),
                write_more=partial(write_served_weights, served=None if sync_due else served, version=finished // config.sync_every),
            )
        saved = clock()
        if sync_due:
            served = await publish_weights(
                backend,
                inference_engines,
                version=finished // config.sync_every,
                directory=sync_dir,
                checkpoint=checkpoint,
                keep_snapshot=config.sync_every > 1,
            )
        metrics |= {"checkpoint_s": saved - trained, "sync_s": clock() - saved, "step_s": clock() - started}
        await finish_step(finished, metrics, stopping)
        history.append(metrics)
        if stopping:
            break
    return history


def summarize_rollouts(rollouts: RolloutBatch, weight_version: int) -> Metrics:
    """Reward and length statistics, the manager's counts, and how many weight versions behind the oldest token is."""
    oldest = [min((v for v in s.weight_versions if v >= 0), default=weight_version) for s in rollouts.samples if s.weight_versions]
    counts = {key: float(value) for key, value in rollouts.metadata.items() if isinstance(value, int | float)}
    staleness = {"max_staleness": float(weight_version - min(oldest))} if oldest else {}
    return summarize_samples(rollouts.samples) | counts | staleness | {"weight_version": float(weight_version)}

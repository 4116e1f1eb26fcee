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
from rollouts.backends.protocol import CheckpointingBackend, TrainingBackend
from rollouts.batching import collate_samples
from rollouts.checkpoints import load_run_state
from rollouts.config import RLTrainingConfig, check_rl_batch_sizes
from rollouts.data_buffer import DataBuffer
from rollouts.engine_parity import act_on_difference, create_weight_probe, measure_difference, select_rows_of_version
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import CheckpointError, ConfigError, DataError
from rollouts.estimators import estimate_group_relative
from rollouts.kl_control import KLControl, update_kl_control
from rollouts.metrics import MetricsLogger, log_offset, summarize_samples
from rollouts.requirements import ConfiguredSource, check_requirements
from rollouts.samples import derive_seed, select_trainable, with_reward
from rollouts.served_weights import ServedWeights, hold_weights, publish_weights, restore_served_weights, write_served_weights
from rollouts.train_on_rollouts import train_on_rollouts as train_on_rollouts
from rollouts.training_steps import (
    EvaluateFn,
    Metrics,
    find_trained_rows,
    is_due,
    require_checkpointing,
    save_training_checkpoint,
)
from rollouts.types import Algorithm, RolloutBatch, Sample, Status, TrainBatch

CRITIC_DIRECTORY = "critic"
"""Where in a checkpoint the critic is."""


class RolloutSource(Protocol):
    """What the loop needs of a rollout manager. One that is also a requirements.ConfiguredSource can serve every algorithm."""

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
    kl_control: KLControl | None = None  # after that step, where the run has one


async def restore_rl_run(
    checkpoint: Path,
    backend: TrainingBackend,
    rollout_manager: RestorableRolloutSource,
    inference_engines: Sequence[InferenceEngine],
    config: RLTrainingConfig,
    *,
    critic: TrainingBackend | None = None,
) -> ResumePoint:
    """Bring backend, critic, manager (with its data position) and engines to where a checkpoint of run_rl_training was written.

    Raises: CheckpointError if the checkpoint is damaged, of another stage or of another architecture, or if it has a critic and none is
        given or the reverse.
    """
    run_state = load_run_state(checkpoint)
    if run_state.get("stage") != "rl":
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of stage {run_state.get('stage')!r}, expected 'rl': resume it with its own stage"
        )
    critic_directory = checkpoint / CRITIC_DIRECTORY
    if critic_directory.is_dir() != (critic is not None):
        found, needed = (
            ("no critic", "leave out critic=") if critic is not None else ("a critic", "pass critic= as in the run that wrote it")
        )
        raise CheckpointError(f"{checkpoint} holds {found}: {needed}, or start a new run")
    await require_checkpointing(backend).load_checkpoint(checkpoint).result()
    if critic is not None:
        await require_checkpointing(critic).load_checkpoint(critic_directory).result()
    rollout_manager.load_state_dict(run_state["rollouts"])
    served = await restore_served_weights(backend, inference_engines, checkpoint, in_memory=config.weight_sync == "memory")
    kl_coef = run_state.get("kl_coef")
    kl_control = config.kl_control if config.kl_control is None or kl_coef is None else replace(config.kl_control, kl_coef=kl_coef)
    return ResumePoint(step=int(run_state["step"]), metrics=run_state["metrics"], served=served, kl_control=kl_control)


def estimate_with_baseline(batch: TrainBatch, baseline: float) -> TrainBatch:
    """advantages = rewards - baseline for a number given beforehand, on every trained token."""
    advantages = compute_advantages(batch.rewards, baseline=baseline)
    return replace(batch, advantages=advantages[:, None] * (batch.loss_mask > 0))


def resolve_algorithm(config: RLTrainingConfig) -> Algorithm:
    """The configured algorithm (default: GRPO). A scalar config.baseline takes the place of its estimator: A = rewards - baseline.

    Raises: ConfigError for a scalar baseline beside an estimator that does more than compare rewards with those of their group (a critic,
        returns along tokens, a KL penalty, ...): all of that would be lost.
    """
    algorithm = grpo() if config.algorithm is None else config.algorithm
    if config.baseline is None:
        return algorithm
    estimate = algorithm.estimate.func if isinstance(algorithm.estimate, partial) else algorithm.estimate
    if estimate is not estimate_group_relative:
        name = getattr(estimate, "__name__", type(estimate).__name__)
        raise ConfigError(
            f"baseline is {config.baseline}, but the algorithm's estimator, {name}, does more than compare rewards with those of their "
            "group, and all of it would be lost: set baseline=None, or choose an algorithm as grpo(), dr_grpo(), dapo() or rloo()"
        )
    return replace(algorithm, estimate=partial(estimate_with_baseline, baseline=config.baseline))


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
    algorithm = resolve_algorithm(config)
    controls_kl = config.kl_control is not None
    check_requirements(algorithm, reference, critic, backend=backend, source=rollout_manager, controls_kl=controls_kl)
    if isinstance(rollout_manager, ConfiguredSource):
        check_rl_batch_sizes(rollout_manager.config, config)
    if config.critic_warmup_steps and critic is None:
        raise ConfigError(f"critic_warmup_steps is {config.critic_warmup_steps}, but there is no critic: pass critic=, or set it to 0")
    saver = None if checkpoint_dir is None and config.weight_sync == "memory" else require_checkpointing(backend)
    critic_saver = None if checkpoint_dir is None or critic is None else require_checkpointing(critic)
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
    kl_control = config.kl_control if resume is None or resume.kl_control is None else resume.kl_control
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
        samples = shape_rewards(rollouts.samples, config.shape_reward)
        check_sampled_whole(samples, algorithm)
        batch = collate_samples(samples, pad_id=pad_id, require_rewards=True)
        if config.mask_truncated:
            batch = mask_truncated_rows(batch, samples)
        only_critic = step < config.critic_warmup_steps
        parity, step_algorithm = Metrics(), algorithm
        if config.parity is not None and step % config.sync_every == 0:  # else the backend is ahead of the engines on purpose
            rows = select_rows_of_version(batch, rollouts.samples, served.version, config.parity.num_rows)
            if rows is not None:
                difference = await measure_difference(backend, rows, max_tokens_per_microbatch=config.max_tokens_per_microbatch)
                parity, step_algorithm = difference.as_metrics(), act_on_difference(difference, config.parity, algorithm)
                check_sampled_whole(samples, step_algorithm)  # which may now read log-probs that the algorithm does not
        metrics = parity | await train_on_rollouts(
            backend,
            batch,
            step_algorithm,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            seed=derive_seed(config.seed, step),
            reference=reference,
            critic=critic,
            value_clip=config.value_clip,
            only_critic=only_critic,
            kl_coef=None if kl_control is None else kl_control.kl_coef,
        )
        if kl_control is not None and "reference_kl" in metrics and not only_critic:
            kl_control = update_kl_control(kl_control, metrics["reference_kl"], len(find_trained_rows(batch)))
        trained = clock()
        finished = step + 1
        metrics |= summarize_rollouts(rollouts, weight_version=served.version) | {"epoch": float(data_buffer.state.epoch_id)}
        if config.shape_reward is not None:
            metrics["shaped_reward_mean"] = summarize_samples(select_trainable(samples) or samples)["reward_mean"]
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
                "kl_coef": None if kl_control is None else kl_control.kl_coef,
            }
            checkpoint = await save_training_checkpoint(
                saver,
                checkpoint_dir,
                finished,
                run_state,
                keep_last_n=keep_last_n,
                protected=() if served.directory is None else (served.directory,),
                write_more=partial(
                    _write_beside_policy,
                    served=None if sync_due else served,
                    version=finished // config.sync_every,
                    critic=critic_saver,
                ),
            )
        saved = clock()
        if sync_due:
            probe = None
            if config.probe_tolerance is not None:
                probed = rollouts.samples[0].tokens[: config.probe_tokens]
                probe = await create_weight_probe(backend, probed, tolerance=config.probe_tolerance, pad_id=pad_id)
            served = await publish_weights(
                backend,
                inference_engines,
                version=finished // config.sync_every,
                directory=sync_dir,
                checkpoint=checkpoint,
                keep_snapshot=config.sync_every > 1,
                probe=probe,
            )
        metrics |= {"checkpoint_s": saved - trained, "sync_s": clock() - saved, "step_s": clock() - started}
        await finish_step(finished, metrics, stopping)
        history.append(metrics)
        if stopping:
            break
    return history


def shape_rewards(samples: tuple[Sample, ...], shape_reward: Callable[[Sample], float] | None) -> tuple[Sample, ...]:
    """The samples with the rewards that are trained on. The rollouts keep those of the task, which filters, metrics and files are about."""
    return samples if shape_reward is None else tuple(with_reward(sample, shape_reward(sample)) for sample in samples)


def check_sampled_whole(samples: tuple[Sample, ...], algorithm: Algorithm) -> None:
    """Raise DataError if samples that are trained on were drawn from a cut distribution and the algorithm reads their log-probs.

    The trainer computes log-probs of the whole distribution: a ratio of the two would be of different things.
    """
    if "rollout_log_probs" not in algorithm.requires:
        return
    cut = [sample for sample in select_trainable(samples) if sample.metadata.get("truncated_sampling")]
    if cut:
        raise DataError(
            f"{len(cut)} of {len(samples)} samples (the first is sample {cut[0].index}) were drawn with top_p, top_k or min_p, and the "
            "trainer cannot compute the log-probs that the algorithm compares with: sample with top_p=1, top_k=0 and min_p=0, or use an "
            "algorithm that does not read rollout_log_probs, for example recomputed(...)"
        )


def mask_truncated_rows(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    """samples.mask_truncated on the rows of a batch. They stay trainable, so nobody takes them for an algorithm's baseline samples."""
    ended = torch.tensor([sample.status is not Status.TRUNCATED for sample in samples])
    return replace(batch, loss_mask=batch.loss_mask * ended[:, None])


async def _write_beside_policy(directory: Path, *, served: ServedWeights | None, version: int, critic: CheckpointingBackend | None) -> None:
    """What a checkpoint of the RL stage holds besides the policy."""
    await write_served_weights(directory, served=served, version=version)
    if critic is not None:
        (directory / CRITIC_DIRECTORY).mkdir()
        await critic.save_checkpoint(directory / CRITIC_DIRECTORY).result()


def summarize_rollouts(rollouts: RolloutBatch, weight_version: int) -> Metrics:
    """Reward and length statistics, the manager's counts, and how many weight versions behind the oldest token is.

    They are of the samples that are trained on; of the others there is baseline_reward_mean, where there are any.
    """
    trained = select_trainable(rollouts.samples)
    others = [sample.reward or 0.0 for sample in rollouts.samples if not sample.metadata.get("trainable", True)]
    baseline = {"baseline_reward_mean": sum(others) / len(others)} if others else {}
    oldest = [min((v for v in s.weight_versions if v >= 0), default=weight_version) for s in rollouts.samples if s.weight_versions]
    counts = {key: float(value) for key, value in rollouts.metadata.items() if isinstance(value, int | float)}
    staleness = {"max_staleness": float(weight_version - min(oldest))} if oldest else {}
    counts.update(summarize_samples(trained or rollouts.samples))  # num_samples, which both know, without baseline samples
    return counts | baseline | staleness | {"weight_version": float(weight_version)}

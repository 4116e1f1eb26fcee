"""RLRun: what both RL loops do with a batch of rollouts: train on it, write a checkpoint, sync weights, evaluate, log."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from rollouts.advantages import compute_advantages
from rollouts.algorithms import grpo
from rollouts.backends.protocol import CheckpointingBackend, TrainingBackend
from rollouts.batching import collate_samples
from rollouts.checkpoints import load_run_state
from rollouts.config import RLTrainingConfig, check_rl_batch_sizes
from rollouts.data_buffer import DataBuffer
from rollouts.engine_parity import ParityWarning, act_on_difference, create_weight_probe, measure_difference, select_rows_of_version
from rollouts.engines.protocol import InferenceEngine, ReportsMetrics, WeightChannel
from rollouts.episode_summaries import summarize_episodes
from rollouts.errors import CheckpointError, ConfigError, DataError
from rollouts.estimators import estimate_group_relative
from rollouts.kl_control import KLControl, update_kl_control
from rollouts.metrics import MetricsLogger, log_offset, summarize_samples
from rollouts.requirements import ConfiguredSource, check_requirements
from rollouts.rewards.evaluate import summarize_rewards
from rollouts.rollout_training import train_on_rollouts
from rollouts.samples import derive_seed, select_trainable, with_reward
from rollouts.served_weights import ServedWeights, hold_weights, publish_weights, restore_served_weights, write_served_weights
from rollouts.staleness import count_token_ages
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

OnRollouts: TypeAlias = Callable[[int, RolloutBatch], "Awaitable[None] | None"]
"""(step, its rollouts), before training; sync or async."""

OnEstimates: TypeAlias = Callable[[int, RolloutBatch, TrainBatch], "Awaitable[None] | None"]
"""(step, its rollouts, the same as rows of tensors with their advantages), before any update; sync or async."""


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
    weight_channel: WeightChannel | None = None,
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
    served = await restore_served_weights(
        backend,
        inference_engines,
        checkpoint,
        in_memory=config.weight_sync == "memory",
        channel=check_weight_channel(config, weight_channel),
    )
    kl_coef = run_state.get("kl_coef")
    kl_control = config.kl_control if config.kl_control is None or kl_coef is None else replace(config.kl_control, kl_coef=kl_coef)
    return ResumePoint(step=int(run_state["step"]), metrics=run_state["metrics"], served=served, kl_control=kl_control)


def check_weight_channel(config: RLTrainingConfig, channel: WeightChannel | None) -> WeightChannel | None:
    """The channel of a run. Raises ConfigError for one without the setting, or the reverse."""
    if (config.weight_sync == "channel") != (channel is not None):
        given = "no weight_channel was given: pass an open one" if channel is None else "a weight_channel was given: leave it out"
        raise ConfigError(f'weight_sync is {config.weight_sync!r}, but {given}, or set weight_sync="memory" or "channel" to match')
    return channel


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


class RLRun:
    """The parts of one run, and what changes from step to step: the weights that the engines hold and the KL coefficient."""

    def __init__(
        self,
        backend: TrainingBackend,
        data_buffer: DataBuffer,
        source: RolloutSource,
        engines: Sequence[InferenceEngine],
        config: RLTrainingConfig,
        metrics_logger: MetricsLogger | None,
        *,
        reference: TrainingBackend | None,
        critic: TrainingBackend | None,
        pad_id: int,
        evaluate: EvaluateFn | None,
        checkpoint_dir: Path | None,
        keep_last_n: int,
        on_rollouts: OnRollouts | None,
        on_estimates: OnEstimates | None,
        clock: Callable[[], float],
        weight_channel: WeightChannel | None = None,
    ) -> None:
        """Args: as in rl_loop.run_rl_training. Raises: ConfigError for parts that do not fit together."""
        self.config = config
        self.algorithm = resolve_algorithm(config)
        controls_kl = config.kl_control is not None
        check_requirements(self.algorithm, reference, critic, backend=backend, source=source, controls_kl=controls_kl)
        if isinstance(source, ConfiguredSource):
            check_rl_batch_sizes(source.config, config)
        if config.critic_warmup_steps and critic is None:
            raise ConfigError(f"critic_warmup_steps is {config.critic_warmup_steps}, but there is no critic: pass critic=, or set it to 0")
        self._weight_channel = check_weight_channel(config, weight_channel)
        self._saver = None if checkpoint_dir is None and config.weight_sync != "checkpoint" else require_checkpointing(backend)
        self._critic_saver = None if checkpoint_dir is None or critic is None else require_checkpointing(critic)
        if config.weight_sync == "checkpoint" and checkpoint_dir is None:
            raise ConfigError('weight_sync="checkpoint" writes weights to the disk: pass checkpoint_dir, or set weight_sync="memory"')
        self._backend, self._data_buffer, self._source, self._engines = backend, data_buffer, source, engines
        self._reference, self._critic = reference, critic
        self._metrics_logger, self._evaluate, self._on_rollouts = metrics_logger, evaluate, on_rollouts
        self._on_estimates = on_estimates
        self._checkpoint_dir, self._keep_last_n = checkpoint_dir, keep_last_n
        self._pad_id, self._clock = pad_id, clock
        self._sync_dir = None if config.weight_sync == "memory" else checkpoint_dir
        self._kl_control = config.kl_control
        self._warned_of_parity = False
        self.served = ServedWeights(version=0)

    async def begin(self, resume: ResumePoint | None) -> int:
        """Find out, or keep, what the engines hold. Returns the number of finished steps."""
        first = 0 if resume is None else resume.step
        if resume is not None and resume.served is not None:
            self.served = resume.served
        elif self._saver is not None and self.config.sync_every > 1:
            self.served = await hold_weights(self._backend, version=first // self.config.sync_every, directory=self._sync_dir)
        else:
            self.served = ServedWeights(version=first // self.config.sync_every)
        self._kl_control = self.config.kl_control if resume is None or resume.kl_control is None else resume.kl_control
        return first

    async def train(self, step: int, rollouts: RolloutBatch) -> Metrics:
        """Train on one batch. step: that were finished before it. Returns the metrics of training and of the rollouts."""
        config, kl_control = self.config, self._kl_control
        if self._on_rollouts is not None:
            written = self._on_rollouts(step + 1, rollouts)
            if inspect.isawaitable(written):
                await written
        samples = shape_rewards(rollouts.samples, config.shape_reward)
        check_sampled_whole(samples, self.algorithm)
        batch = collate_samples(samples, pad_id=self._pad_id, require_rewards=True)
        if config.mask_truncated:
            batch = mask_truncated_rows(batch, samples)
        only_critic = step < config.critic_warmup_steps
        parity, algorithm = Metrics(), self.algorithm
        if config.parity is not None and step % config.sync_every == 0:  # else the backend is ahead of the engines on purpose
            rows = select_rows_of_version(batch, rollouts.samples, self.served.version, config.parity.num_rows)
            if rows is None:
                parity = {"num_parity_rows": 0.0}
                self._warn_of_parity(step)
            else:
                difference = await measure_difference(self._backend, rows, max_tokens_per_microbatch=config.max_tokens_per_microbatch)
                parity = {"num_parity_rows": float(len(rows.tokens)), **difference.as_metrics()}
                algorithm = act_on_difference(difference, config.parity, self.algorithm)
                check_sampled_whole(samples, algorithm)  # which may now read log-probs that the algorithm does not
        metrics = parity | await train_on_rollouts(
            self._backend,
            batch,
            algorithm,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            seed=derive_seed(config.seed, step),
            reference=self._reference,
            critic=self._critic,
            value_clip=config.value_clip,
            only_critic=only_critic,
            kl_coef=None if kl_control is None else kl_control.kl_coef,
            current_version=self.served.version + step % config.sync_every / config.sync_every,
            on_estimate=None if self._on_estimates is None else partial(self._on_estimates, step + 1, rollouts),
            samples=samples,
        )
        if kl_control is not None and "reference_kl" in metrics and not only_critic:
            self._kl_control = update_kl_control(kl_control, metrics["reference_kl"], len(find_trained_rows(batch)))
        metrics |= summarize_rollouts(rollouts, weight_version=self.served.version)
        for engine in self._engines:
            if isinstance(engine, ReportsMetrics):
                metrics |= engine.metrics()
        metrics["epoch"] = float(max(sample.group_index for sample in rollouts.samples) // len(self._data_buffer))
        if config.shape_reward is not None:
            metrics["shaped_reward_mean"] = summarize_samples(select_trainable(samples) or samples)["reward_mean"]
        return metrics

    def _warn_of_parity(self, step: int) -> None:
        """Say, the first time, that a batch has nothing to compare: oldest groups come first, so it may be the same in every step."""
        if not self._warned_of_parity:
            text = (
                f"the rollouts of step {step + 1} have no row that weight version {self.served.version} sampled alone, so that the engine "
                "cannot be compared with the trainer, and nothing is corrected; num_parity_rows says of each step how many there are. "
                "Compare by hand with check_parity(engine, backend, prompts), or lower max_staleness"
            )
            warnings.warn(ParityWarning(text), stacklevel=2)
        self._warned_of_parity = True

    def version_after(self, finished: int) -> int:
        """The weight version that engines hold once `finished` steps are done and synced."""
        return finished // self.config.sync_every

    def is_sync_due(self, finished: int) -> bool:
        """Whether engines get new weights after this step."""
        return finished % self.config.sync_every == 0

    def is_checkpoint_due(self, finished: int, stopping: bool) -> bool:
        """Whether a checkpoint is written after this step."""
        return self.saves and (stopping or is_due(finished, self.config.checkpoint_every, self.config.num_steps))

    @property
    def saves(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._saver is not None and self._checkpoint_dir is not None

    @property
    def log_offset(self) -> int | None:
        """How long the file of metrics is, in bytes."""
        return log_offset(self._metrics_logger)

    async def save(self, finished: int, metrics: Mapping[str, float], metrics_bytes: int | None) -> Path:
        """Write the checkpoint of a finished step, which is resumed with its sync and its line of metrics.

        Args:
            metrics_bytes: how long the file of metrics was before the line of this step.
        """
        assert self._saver is not None, "save() without a backend that saves"
        assert self._checkpoint_dir is not None, "save() without a place for checkpoints"
        kl_control, version = self._kl_control, self.version_after(finished)
        run_state = {
            "stage": "rl",
            "rollouts": self._source.state_dict(),
            "metrics": metrics,
            "metrics_bytes": metrics_bytes,
            "weight_version": version,
            "kl_coef": None if kl_control is None else kl_control.kl_coef,
        }
        return await save_training_checkpoint(
            self._saver,
            self._checkpoint_dir,
            finished,
            run_state,
            keep_last_n=self._keep_last_n,
            protected=() if self.served.directory is None else (self.served.directory,),
            write_more=partial(
                _write_beside_policy,
                served=None if self.is_sync_due(finished) else self.served,
                version=version,
                critic=self._critic_saver,
            ),
        )

    async def sync(self, finished: int, rollouts: RolloutBatch, checkpoint: Path | None) -> None:
        """Bring the weights after a step to the engines. checkpoint: of that step, where there is one; rollouts: to probe them with."""
        probe = None
        if self.config.probe_tolerance is not None:
            probed = rollouts.samples[0].tokens[: self.config.probe_tokens]
            probe = await create_weight_probe(self._backend, probed, tolerance=self.config.probe_tolerance, pad_id=self._pad_id)
        self.served = await publish_weights(
            self._backend,
            self._engines,
            version=self.version_after(finished),
            directory=self._sync_dir,
            checkpoint=checkpoint,
            keep_snapshot=self.config.sync_every > 1,
            probe=probe,
            channel=self._weight_channel,
        )

    async def finish_step(self, finished: int, metrics: Metrics, stopping: bool) -> None:
        """Evaluate, into the same dict, and log, each if it is due."""
        await self.evaluate(finished, metrics)
        self.log(finished, metrics, stopping)

    def is_evaluation_due(self, finished: int) -> bool:
        """Whether the model is evaluated after this step."""
        return self._evaluate is not None and is_due(finished, self.config.eval_every, self.config.num_steps)

    async def evaluate(self, finished: int, metrics: Metrics) -> None:
        """Add the numbers of the evaluation after this step, if it is due."""
        if self._evaluate is not None and self.is_evaluation_due(finished):
            started = self._clock()
            metrics.update(await self._evaluate())
            metrics["evaluate_s"] = self._clock() - started

    def log(self, finished: int, metrics: Metrics, stopping: bool) -> None:
        """Log the line of a step, if it is due."""
        if self._metrics_logger is not None and (stopping or is_due(finished, self.config.log_every, self.config.num_steps)):
            self._metrics_logger.log(metrics, finished)


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
    """Reward and length statistics, the manager's counts, and staleness_max: how many weight versions behind the oldest token is.

    They are of the samples that are trained on; of the others there is baseline_reward_mean, where there are any.
    """
    trained = select_trainable(rollouts.samples)
    others = [sample.reward or 0.0 for sample in rollouts.samples if not sample.metadata.get("trainable", True)]
    baseline = {"baseline_reward_mean": sum(others) / len(others)} if others else {}
    ages = count_token_ages((sample for sample in trained if sample.weight_versions is not None), weight_version)
    counts = {key: float(value) for key, value in rollouts.metadata.items() if isinstance(value, int | float)}
    staleness = {"staleness_max": float(max(ages))} if ages else {}
    counts.update(summarize_samples(trained or rollouts.samples))  # num_samples, which both know, without baseline samples
    counts.update(summarize_rewards(trained or rollouts.samples))
    counts.update(summarize_episodes(trained or rollouts.samples))
    return counts | baseline | staleness | {"weight_version": float(weight_version)}

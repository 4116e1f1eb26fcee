"""RLRun, the work of a reinforcement-learning run on one batch: train, write a checkpoint, sync weights, evaluate, log."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from rollouts.algorithms.advantages import compute_advantages
from rollouts.algorithms.estimators import estimate_group_relative
from rollouts.algorithms.kl_control import update_kl_control
from rollouts.algorithms.presets import grpo
from rollouts.config import RLTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.filters import describe_left_out, find_empty_answers, sift_rows
from rollouts.data.samples import check_versions, select_trainable, with_reward
from rollouts.engines.protocol import (
    EngineFeature,
    get_engine_features,
    require_engine_feature,
)
from rollouts.errors import BadNumberError, ConfigError, raise_alike_errors
from rollouts.seeds import derive_seed
from rollouts.training.abandonment import Abandonment
from rollouts.training.distillation.teachers import TEACHER_COLUMNS
from rollouts.training.metrics import log_offset
from rollouts.training.parity import ParityWarning, act_on_difference, create_weight_probe, measure_difference, select_rows_of_version
from rollouts.training.requirements import (
    ConfiguredSource,
    check_recorded_experts,
    check_records_experts,
    check_requirements,
    check_rl_batch_sizes,
    check_sampled_whole,
    check_weight_channel,
)
from rollouts.training.rl_parts import RLParts, RolloutSource
from rollouts.training.rollout_batch import RecordRequest, UpdatePlan, train_on_rollouts
from rollouts.training.saving.best import add_to, protect, state_of
from rollouts.training.saving.rl_checkpoints import ResumePoint, stage_beside_policy
from rollouts.training.saving.run_checkpoints import (
    RunCheckpoints,
    is_checkpoint_due,
    note_checkpoint,
    open_checkpoints,
    require_checkpointing,
)
from rollouts.training.saving.run_state import RunState
from rollouts.training.steps import Metrics, find_trained_rows, is_due, require_balance, require_replay
from rollouts.training.summaries import Signs, look, summarize_rollouts, summarize_samples
from rollouts.training.weight_sync import (
    Exports,
    ServedWeights,
    hold_weights,
    publish_weights,
)
from rollouts.types import Algorithm, RolloutBatch, Sample, Status, TrainBatch

_MOST_NAMED = 8  # prompts in a message


def estimate_with_baseline(batch: TrainBatch, baseline: float) -> TrainBatch:
    """Fill advantages = rewards - baseline, for a fixed baseline, at every trained token."""
    advantages = compute_advantages(batch.rewards, baseline=baseline)
    return replace(batch, advantages=advantages[:, None] * (batch.loss_mask > 0))


def resolve_algorithm(config: RLTrainingConfig) -> Algorithm:
    """Return the configured algorithm (default: GRPO). A scalar config.baseline replaces its estimator: A = rewards - baseline.

    Raises: ConfigError for a scalar baseline beside an estimator that does more than compare rewards within a group (a critic, returns
        along tokens, a KL penalty, ...), since the baseline would replace it.
    """
    algorithm = grpo() if config.algorithm is None else config.algorithm
    if config.baseline is None:
        return algorithm
    estimate = algorithm.estimate.func if isinstance(algorithm.estimate, partial) else algorithm.estimate
    if estimate is not estimate_group_relative:
        name = getattr(estimate, "__name__", type(estimate).__name__)
        raise ConfigError(
            f"baseline is {config.baseline}, but the algorithm's estimator, {name}, does more than compare rewards with those of their "
            "group, and all of it would be lost: leave the baseline (--rl.baseline) out, or choose an algorithm as grpo(), dr_grpo(), "
            "dapo() or rloo()"
        )
    return replace(algorithm, estimate=partial(estimate_with_baseline, baseline=config.baseline))


class RLRun:
    """State of one run: its parts, the weights that the engines hold, and the KL coefficient."""

    def __init__(self, parts: RLParts, source: RolloutSource, config: RLTrainingConfig) -> None:
        """Check the parts. Raises ConfigError if they do not fit together."""
        self.parts, self.config = parts, config
        self.algorithm = resolve_algorithm(config)
        check_requirements(
            self.algorithm,
            parts.reference,
            parts.critic,
            backend=parts.backend,
            source=source,
            controls_kl=config.kl_control is not None,
            teacher=parts.teacher,
        )
        if config.router_balance_coef:
            require_balance(parts.backend)
        if config.router_replay:
            require_replay(parts.backend)
            check_records_experts(parts.engines)
            if "segment_log_probs" in self.algorithm.requires:
                raise ConfigError(
                    "RLTrainingConfig.router_replay is set, but the algorithm requires segment_log_probs, which are computed without "
                    "recorded experts: set router_replay or segment_wise to False"
                )
        if config.sleep_engines:
            for engine in parts.engines:
                require_engine_feature(engine, EngineFeature.SLEEP, "sleep_engines", instead="Set sleep_engines to False.")
        if isinstance(source, ConfiguredSource):
            check_rl_batch_sizes(source.config, config)
        if parts.best is not None and parts.evaluate is None:
            raise ConfigError("best is given, but there is no evaluation to find the best by: pass evaluate=, or leave it out")
        if config.critic_warmup_steps and parts.critic is None:
            raise ConfigError(f"critic_warmup_steps is {config.critic_warmup_steps}, but there is no critic: pass critic=, or set it to 0")
        self._channel = check_weight_channel(config, parts.weight_channel)
        keeps = parts.checkpoint_dir is not None
        self._saver = require_checkpointing(parts.backend) if keeps or config.weight_sync == "checkpoint" else None
        self._critic_saver = require_checkpointing(parts.critic) if keeps and parts.critic is not None else None
        if config.weight_sync == "checkpoint" and not keeps:
            raise ConfigError('weight_sync="checkpoint" writes weights to the disk: pass checkpoint_dir, or set weight_sync="memory"')
        self._source = source
        self._checkpoints: RunCheckpoints | None = None
        directory = None if config.weight_sync == "memory" else parts.checkpoint_dir
        self._exports = None if directory is None else Exports(directory, config.export_dtype)
        self._kl_control = config.kl_control
        self._warned_of_parity = False
        self._signs = Signs()
        self._saved_step = 0
        self._num_left_out = 0
        self.abandonment = Abandonment() if parts.abandonment is None else parts.abandonment
        self.served = ServedWeights(version=0)

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[None]:
        """Write the run's checkpoints beside the block, whose end waits for them."""
        async with open_checkpoints(self.parts.backend, self.parts.checkpoint_dir, self.parts.keep_last_n) as self._checkpoints:
            yield

    async def begin(self, resume: ResumePoint | None) -> int:
        """Determine, or keep, the weights that the engines hold. Returns the number of finished steps."""
        first = self._saved_step = 0 if resume is None else resume.step
        if resume is not None and resume.served is not None:
            self.served = resume.served
        elif self._saver is not None and self.config.sync_every > 1:
            self.served = await hold_weights(self.parts.backend, version=self.version_after(first), exports=self._exports)
        else:
            self.served = ServedWeights(version=self.version_after(first))
        self._kl_control = self.config.kl_control if resume is None or resume.kl_control is None else resume.kl_control
        if resume is not None and self.parts.best is not None:
            self.parts.best.load_state_dict(resume.best)
        async with self.engines_asleep():  # before the first rollout, which a server that cannot sleep would waste
            pass
        return first

    @asynccontextmanager
    async def engines_asleep(self) -> AsyncGenerator[None]:
        """Let the engines sleep in the block, if config.sleep_engines. Raises EngineError."""
        if not self.config.sleep_engines:
            yield
            return
        engines = [require_engine_feature(engine, EngineFeature.SLEEP, "sleep_engines") for engine in self.parts.engines]
        try:
            await _call_each(engine.sleep for engine in engines)
            yield
        finally:
            await _call_each(engine.wake_up for engine in engines)

    async def train(self, step: int, rollouts: RolloutBatch) -> Metrics:
        """Train on one batch, after `step` finished steps. Returns the metrics of training and of the rollouts."""
        if self._checkpoints is not None:
            self._checkpoints.check()  # a run that cannot be saved ends soon
        async with note_checkpoint(step + 1, self._checkpoints):
            try:
                return await self._train(step, rollouts)
            except BadNumberError as error:
                error.add_note(f"its rollouts are those of the prompts {_name_prompts(rollouts)}")
                raise

    async def _ask_teacher(self, batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
        """Fill the columns that the algorithm requires of a teacher."""
        wanted = self.algorithm.requires & frozenset(TEACHER_COLUMNS)
        if not wanted or not find_trained_rows(batch):
            return batch
        assert self.parts.teacher is not None, "check_requirements admits columns of a teacher only with one"
        return await self.parts.teacher.fill(batch, samples, wanted, max_tokens=self.config.max_tokens_per_microbatch)

    async def _train(self, step: int, rollouts: RolloutBatch) -> Metrics:
        config, parts, kl_control = self.config, self.parts, self._kl_control
        if parts.on_rollouts is not None:
            await _finish(parts.on_rollouts(step + 1, rollouts))
        check_versions(rollouts.samples, self.served.version)  # a sync has ended, so no answer has a later version
        samples = shape_rewards(rollouts.samples, config.shape_reward)
        check_sampled_whole(samples, self.algorithm)
        needs_rewards = self.algorithm.reads_rewards
        batch = collate_samples(samples, pad_id=parts.pad_id, require_rewards=needs_rewards, with_experts=config.router_replay)
        if config.router_replay:
            check_recorded_experts(batch, samples)
        sifted, bad = sift_rows(batch, find_empty_answers(batch), "empty_answer", config.bad_numbers, samples)
        batch = batch if sifted is None else sifted
        if config.mask_truncated:
            batch = mask_truncated_rows(batch, samples)
        parity, algorithm = await self._compare(step, batch, rollouts)
        check_sampled_whole(samples, algorithm)  # a corrected algorithm may read log-probs that the configured one does not
        left_out = [batch]  # the last one is the batch as it was judged
        plan = replace(self._plan_updates(step), on_left_out=left_out.append)
        if sifted is not None:
            batch = await self._ask_teacher(batch, samples)
        if parts.record is not None:
            chosen = tuple(parts.record.select(step + 1, rollouts))
            plan = replace(plan, record=RecordRequest(rows=chosen, on_update=partial(parts.record.write, step + 1, rollouts)))
        trained = (
            describe_left_out()
            if sifted is None
            else await train_on_rollouts(
                parts.backend,
                batch,
                algorithm,
                plan,
                reference=parts.reference,
                critic=parts.critic,
                on_estimate=None if parts.on_estimates is None else partial(parts.on_estimates, step + 1, rollouts),
                samples=samples,
            )
        )
        metrics = parity | trained | bad
        self._count_left_out(metrics, left_out[-1])
        if kl_control is not None and "reference_kl" in metrics and not plan.only_critic:
            self._kl_control = update_kl_control(kl_control, metrics["reference_kl"], len(find_trained_rows(batch)))
        summary = summarize_rollouts(rollouts, weight_version=self.served.version)
        metrics |= {name: value for name, value in summary.items() if self.algorithm.reads_rewards or not math.isnan(value)}
        for engine in parts.engines:
            if EngineFeature.METRICS in get_engine_features(engine):
                metrics |= require_engine_feature(engine, EngineFeature.METRICS, "the line of metrics").metrics()
        metrics["epoch"] = float(max(sample.group_index for sample in rollouts.samples) // len(parts.data_buffer))
        if config.shape_reward is not None:
            metrics["shaped_reward_mean"] = summarize_samples(select_trainable(samples) or samples)["reward_mean"]
        read = metrics
        if not self.algorithm.reads_rewards:  # equal ones say nothing of what it learns
            read = {name: value for name, value in metrics.items() if not name.startswith(("reward_", "zero_std"))}
        self._signs, found = look(self._signs, read, stage="rl")
        for text in found:
            logging.getLogger(__name__).warning("%s", text)
        return metrics

    def _count_left_out(self, metrics: Metrics, batch: TrainBatch) -> None:
        """Count steps in a row whose update was left out for bad rows, before it was computed: the backend counts the others.

        Raises: BadNumberError after max_skipped of them.
        """
        is_left_out = metrics.get("num_updates") == 0.0 and metrics.get("update_skipped") == 1.0
        self._num_left_out = self._num_left_out + 1 if is_left_out else 0
        if self._num_left_out >= self.config.bad_numbers.max_skipped:
            kind = "empty_answer" if "num_bad_empty_answer" in metrics else "log_prob"
            raise BadNumberError(
                f"the updates of {self._num_left_out} steps in a row were left out for bad rows (num_bad_{kind} in the metrics): look at "
                f"their rollouts, or set on_bad.{kind} to drop (the rows)",
                kind,
                batch=batch,
            )

    def _plan_updates(self, step: int) -> UpdatePlan:
        """Return the plan of the updates after `step` finished steps."""
        config = self.config
        return UpdatePlan(
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            seed=derive_seed(config.seed, step),
            value_clip=config.value_clip,
            only_critic=step < config.critic_warmup_steps,
            kl_coef=None if self._kl_control is None else self._kl_control.kl_coef,
            current_version=self.served.version + step % config.sync_every / config.sync_every,
            router_balance_coef=config.router_balance_coef,
            dropout=config.dropout,
            skip_redundant=config.skip_redundant,
            bad_numbers=config.bad_numbers,
        )

    async def _compare(self, step: int, batch: TrainBatch, rollouts: RolloutBatch) -> tuple[Metrics, Algorithm]:
        """Compare the log-probs of engines and trainer, if due. Returns metrics, and the algorithm for this batch."""
        config = self.config
        if config.parity is None or step % config.sync_every:  # between two syncs the backend is ahead of the engines on purpose
            return {}, self.algorithm
        rows = select_rows_of_version(batch, rollouts.samples, self.served.version, config.parity.num_rows)
        if rows is None:
            self._warn_of_parity(step)
            return {"num_parity_rows": 0.0}, self.algorithm
        difference = await measure_difference(self.parts.backend, rows, max_tokens_per_microbatch=config.max_tokens_per_microbatch)
        metrics = {"num_parity_rows": float(len(rows.tokens)), **difference.as_metrics()}
        return metrics, act_on_difference(difference, config.parity, self.algorithm)

    def _warn_of_parity(self, step: int) -> None:
        """Warn once of a batch with nothing to compare: oldest groups come first, so it may happen in every step."""
        if not self._warned_of_parity:
            text = (
                f"the rollouts of step {step + 1} have no row that weight version {self.served.version} sampled alone, so that the engine "
                "cannot be compared with the trainer, and nothing is corrected; num_parity_rows says of each step how many there are. "
                "Compare by hand with check_parity(engine, backend, prompts), or lower max_staleness"
            )
            warnings.warn(ParityWarning(text), stacklevel=2)
        self._warned_of_parity = True

    def version_after(self, finished: int) -> int:
        """Return the weight version of the engines after `finished` steps and their syncs."""
        return self.config.first_version + finished // self.config.sync_every

    def is_sync_due(self, finished: int) -> bool:
        """Whether engines get new weights after this step."""
        return finished % self.config.sync_every == 0

    def is_checkpoint_due(self, finished: int, metrics: Mapping[str, float], stopping: bool) -> bool:
        """Whether a checkpoint is written after this step, given its metrics."""
        config = self.config
        due = is_checkpoint_due(finished, config.checkpoint_every, config.num_steps, metrics, stopping=stopping)
        may_be_best = self.parts.best is not None and self.is_evaluation_due(finished)  # the evaluation is after the sync
        return self.saves and (due or may_be_best)

    @property
    def saves(self) -> bool:
        """Whether the run has a directory for checkpoints."""
        return self._saver is not None and self.parts.checkpoint_dir is not None

    @property
    def log_offset(self) -> int | None:
        """Length of the metrics file, in bytes."""
        return log_offset(self.parts.metrics_logger)

    async def save(
        self, finished: int, metrics: Mapping[str, float], metrics_bytes: int | None, rollouts: Mapping[str, Any] | None = None
    ) -> None:
        """Take the state of a finished step, given the bytes of the metrics file before its line, and begin to write its checkpoint.

        Args:
            rollouts: state of the source of rollouts; None = its present one.
        """
        assert self._checkpoints is not None, "save() outside of writing(), or without a place for checkpoints"
        if self.parts.before_save is not None:
            await _finish(self.parts.before_save())
        kl_control, version = self._kl_control, self.version_after(finished)
        state = RunState(
            stage="rl",
            step=finished,
            metrics_bytes=metrics_bytes,
            metrics=metrics,
            rollouts=self._source.state_dict() if rollouts is None else rollouts,
            weight_version=version,
            kl_coef=None if kl_control is None else kl_control.kl_coef,
            best=state_of(self.parts.best),
            inputs=self.parts.inputs,
        )
        self._saved_step = finished
        # weights of a run that was resumed between two syncs are inside of a checkpoint, which stays as a whole
        served = () if self.served.directory is None else (self.served.directory, self.served.directory.parent)
        await self._checkpoints.save(
            state,
            metrics,
            protected=(*served, *protect(self.parts.best, self.parts.checkpoint_dir)),
            stage_more=partial(
                stage_beside_policy,
                served=None if self.is_sync_due(finished) else self.served,
                version=version,
                critic=self._critic_saver,
            ),
        )

    def is_saved(self, finished: int) -> bool:
        """Whether nothing would be gained by a checkpoint of this step: there is one, or it is the beginning, or none is kept."""
        return not self.saves or self._saved_step == finished

    async def wait_saved(self) -> Path:
        """Wait until the checkpoint of the last save() is complete; return its path. Raises its error."""
        path = None if self._checkpoints is None else await self._checkpoints.wait()
        assert path is not None, "wait_saved() before save()"
        return path

    async def sync(self, finished: int, rollouts: RolloutBatch, *, saved: bool) -> None:
        """Bring the weights after a step to the engines.

        Args:
            rollouts: tokens to probe the engines with.
            saved: whether the last save() was of this step; engines that read from the disk then read that checkpoint.
        """
        probe = None
        if self.config.probe_tolerance is not None:
            probed = rollouts.samples[0].tokens[: self.config.probe_tokens]
            probe = await create_weight_probe(self.parts.backend, probed, tolerance=self.config.probe_tolerance, pad_id=self.parts.pad_id)
        checkpoint: Path | None = None
        if self._checkpoints is not None and self._exports is not None:  # also an earlier one may copy weights that are deleted here
            written = await self._checkpoints.wait()
            checkpoint = written if saved else None
        self.served = await publish_weights(
            self.parts.backend,
            self.parts.engines,
            version=self.version_after(finished),
            exports=self._exports,
            checkpoint=checkpoint,
            keep_snapshot=self.config.sync_every > 1,
            probe=probe,
            channel=self._channel,
        )

    async def finish_step(self, finished: int, metrics: Metrics, stopping: bool) -> None:
        """Evaluate into the same dict, and log, each if due. Afterwards has_ended tells whether the run ends here without patience."""
        await self.evaluate(finished, metrics)
        self.log(finished, metrics, stopping)

    def is_evaluation_due(self, finished: int) -> bool:
        """Whether the model is evaluated after this step."""
        return self.parts.evaluate is not None and is_due(finished, self.config.eval_every, self.config.num_steps)

    async def evaluate(self, finished: int, metrics: Metrics) -> None:
        """Add the metrics of the evaluation after this step, if it is due."""
        parts = self.parts
        if parts.evaluate is not None and self.is_evaluation_due(finished):
            started = parts.clock()
            metrics.update(await parts.evaluate())
            metrics["evaluate_s"] = parts.clock() - started
            add_to(parts.best, metrics, finished)

    @property
    def has_ended(self) -> bool:
        """Whether the run has used up its patience for evaluations that are no better."""
        return self.parts.best is not None and self.parts.best.has_ended

    def log(self, finished: int, metrics: Metrics, stopping: bool) -> None:
        """Log the line of a step, if it is due, or if the step was evaluated."""
        logger, due = self.parts.metrics_logger, is_due(finished, self.config.log_every, self.config.num_steps)
        if logger is not None and (stopping or self.has_ended or due or self.is_evaluation_due(finished)):
            logger.log(metrics, finished)


async def _finish(work: Awaitable[None] | None) -> None:
    """Wait for what a hook returned, if it is async."""
    if inspect.isawaitable(work):
        await work


def _name_prompts(rollouts: RolloutBatch) -> str:
    """Name the prompts of a batch by their numbers, as in the ledger of a run."""
    numbers = sorted({sample.group_index for sample in rollouts.samples})
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return ", ".join(map(str, numbers[:_MOST_NAMED])) + more


def shape_rewards(samples: tuple[Sample, ...], shape_reward: Callable[[Sample], float] | None) -> tuple[Sample, ...]:
    """Return the samples with shaped rewards to train on. The rollouts keep the task's rewards, for filters, metrics and files."""
    return samples if shape_reward is None else tuple(with_reward(sample, shape_reward(sample)) for sample in samples)


def mask_truncated_rows(batch: TrainBatch, samples: Sequence[Sample]) -> TrainBatch:
    """Mask the rows of truncated samples. They stay trainable: an algorithm takes other rows for baseline samples."""
    ended = torch.tensor([sample.status is not Status.TRUNCATED for sample in samples])
    return replace(batch, loss_mask=batch.loss_mask * ended[:, None])


async def _call_each(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    with raise_alike_errors():
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(call)

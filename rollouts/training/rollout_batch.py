"""Training on one rollout batch: the columns that an algorithm requires, its estimate, and the optimizer steps of policy and critic."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import trio
from torch import Tensor

from rollouts.algorithms.anchors import summarize_anchors
from rollouts.algorithms.distillation.signals import measure_teacher
from rollouts.algorithms.estimators import check_advantages
from rollouts.algorithms.gigpo_steps import describe_turns, word_turn
from rollouts.algorithms.kl_control import measure_kl
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import value_loss
from rollouts.algorithms.preferences import measure_pairs
from rollouts.backends.protocol import BackendFeature, TrainingBackend, get_backend_features, require_backend_feature
from rollouts.batches import plan_minibatches, select_rows
from rollouts.config import BadNumbers
from rollouts.data.filters import describe_left_out, find_bad_log_probs, refuse_all_masked, sift_rows
from rollouts.data.samples import describe_sample
from rollouts.errors import ConfigError, DataError, raise_single_errors
from rollouts.seeds import derive_seed
from rollouts.training.distillation.teachers import TEACHER_COLUMNS
from rollouts.training.requirements import POLICY_COLUMNS, SAMPLE_COLUMNS
from rollouts.training.steps import (
    Metrics,
    PendingForward,
    PendingOptimizerStep,
    find_trained_rows,
    mean_step_metrics,
    submit_forward,
    submit_optimizer_step,
)
from rollouts.types import TOKEN_PREFIX, Algorithm, LossFn, LossOutput, Sample, TokenOutputs, TrainBatch, TurnLevels

_logger = logging.getLogger(__name__)

OnEstimate: TypeAlias = Callable[[TrainBatch], "Awaitable[None] | None"]
"""Called with the batch and its advantages, before any update; sync or async."""


RecordedColumns: TypeAlias = Mapping[str, Tensor]
"""Columns of the tokens of one row # [T] each, at least as long as the row: log_prob and loss_weight as the loss read them, and what the
loss tells besides, see losses.mark_tokens."""


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """Request to keep what the policy's updates compute for the tokens of some rows; it costs no further pass."""

    rows: tuple[int, ...]  # positions in the batch
    on_update: Callable[[Mapping[int, RecordedColumns]], Awaitable[None] | None]  # called after the last update with the columns of
    # each of the rows, as the last update on it saw them; sync or async. Rows without a trained token, and all rows of a backend without
    # BackendFeature.RECORDS, are missing


def select_log_probs(outputs: TokenOutputs) -> Tensor:
    """Select log-probs: the output function of a log-prob pass."""
    return outputs.log_probs


def select_values(outputs: TokenOutputs) -> Tensor:
    """Select values: the output function of a critic's pass. Raises ConfigError if the backend has no value head."""
    if outputs.values is None:
        raise ConfigError("critic= computes no values: it needs a value head, make it with create_critic_backend(...)")
    return outputs.values


def anchor_to_self(loss: LossFn, columns: Collection[str]) -> LossFn:
    """Return the loss with these log-prob columns taken from its own pass: column = log_probs without gradient.

    In the first update on a batch this equals columns filled by an earlier forward pass, since the weights are the same.
    """
    return partial(_loss_anchored_to_self, loss=loss, columns=tuple(sorted(columns)))


def _loss_anchored_to_self(outputs: TokenOutputs, batch: TrainBatch, *, loss: LossFn, columns: tuple[str, ...]) -> LossOutput:
    own = outputs.log_probs.detach()
    return loss(outputs, replace(batch, **dict.fromkeys(columns, own)))


def _is_foreign_column(name: str, value: float | Tensor, batch: TrainBatch) -> bool:
    if TOKEN_PREFIX not in name or not isinstance(value, Tensor) or value.dim() != 2:
        return False
    return not name.startswith(TOKEN_PREFIX) or value.shape != batch.tokens.shape


def _loss_with_tokens(outputs: TokenOutputs, batch: TrainBatch, *, loss: LossFn) -> LossOutput:
    """Compute the loss, and add log-probs and loss weights to the columns that it gives of the tokens (losses.mark_tokens)."""
    value, metrics = loss(outputs, batch)
    if batch.recorded is None or batch.loss_weights is None:
        return LossOutput(value, metrics)
    # a loss of one's own may have renamed the columns of ours, or have called it on some rows
    metrics = {name: x for name, x in metrics.items() if not _is_foreign_column(name, x, batch)}
    columns = {"log_prob": outputs.log_probs.detach(), "loss_weight": batch.loss_weights}
    return LossOutput(value, {**metrics, **{TOKEN_PREFIX + name: column for name, column in columns.items()}})


async def fill_columns(
    batch: TrainBatch,
    algorithm: Algorithm,
    backend: TrainingBackend,
    reference: TrainingBackend | None,
    critic: TrainingBackend | None = None,
    *,
    max_tokens_per_microbatch: int,
    skip: Collection[str] = (),
    current_version: float | None = None,
) -> TrainBatch:
    """Fill the log-prob and value columns that the algorithm requires, with one pass of each model, before any update.

    Args:
        skip: columns to leave to the loss.
        current_version: weight version of the trainer, see UpdatePlan.

    Raises: DataError if the samples lack a column that they must bring; ConfigError if the algorithm requires policy_versions and
        current_version is None.
    """
    wanted = algorithm.requires - frozenset(skip)
    batch = fill_versions(batch, wanted, current_version)
    missing = [column for column in (*SAMPLE_COLUMNS, *TEACHER_COLUMNS) if column in wanted and getattr(batch, column) is None]
    if missing:
        advice = "fill them where the samples are generated"
        if missing == ["reward_components"]:
            advice = "score them by a reward of named parts: create_composite_reward, or EvaluateResult(..., metrics={name: MetricResult})"
        if set(missing) <= set(TEACHER_COLUMNS):
            advice = "a teacher fills them before: await teacher.fill(batch, samples, ...)"
        raise DataError(f"the algorithm requires {missing}, which the samples do not have: {advice}")
    others = replace(batch, routed_experts=None)  # the experts of another model are its own
    forward = partial(submit_forward, max_tokens_per_microbatch=max_tokens_per_microbatch)
    own_columns = [column for column in POLICY_COLUMNS if column in wanted]
    passes: dict[tuple[str, ...], PendingForward] = {}  # models with a pipeline each compute at the same time
    if own_columns:  # the policy before its update gives both old and proximal log-probs
        passes[tuple(own_columns)] = forward(backend, batch, output_fn=select_log_probs)
    if "ref_log_probs" in wanted:
        assert reference is not None, "check_requirements admits ref_log_probs only with a reference"
        passes["ref_log_probs",] = forward(reference, others, output_fn=select_log_probs)
    if "values" in wanted:
        assert critic is not None, "check_requirements admits values only with a critic"
        passes["values",] = forward(critic, others, output_fn=select_values)
    filled: dict[str, Tensor] = {}
    for columns, pending in passes.items():
        filled |= dict.fromkeys(columns, await pending.result())
    return replace(batch, **filled)


def fill_versions(batch: TrainBatch, wanted: Collection[str], current_version: float | None) -> TrainBatch:
    """Fill policy_versions, and segment_log_probs if no token has been due for one: then they equal the rollout's.

    Raises: ConfigError if policy_versions are wanted and current_version is None; DataError if segment_log_probs are wanted and the version
        that sampled a trained token is unknown.
    """
    if "segment_log_probs" in wanted and batch.weight_versions is not None:
        unknown = (batch.weight_versions < 0) & (batch.loss_mask > 0)
        if bool(unknown.any()):
            raise DataError(
                f"{int(unknown.sum())} trained tokens have no weight version, but segment-wise corrections need the version that sampled "
                "each: use an engine that reports versions, or set segment_wise (enable_segment_wise_ppo) to False"
            )
    if "policy_versions" in wanted and current_version is None:
        raise ConfigError("the algorithm requires policy_versions: pass current_version=, the weight version that trains")
    if current_version is not None and not {"policy_versions", "segment_log_probs"}.isdisjoint(wanted):
        batch = replace(batch, policy_versions=torch.full_like(batch.rewards, current_version, dtype=torch.float32))
    if "segment_log_probs" in wanted and batch.segment_log_probs is None and batch.policy_versions is not None:
        batch = replace(batch, segment_log_probs=batch.rollout_log_probs, segment_mask=torch.zeros_like(batch.tokens, dtype=torch.bool))
    return batch


def columns_from_loss(algorithm: Algorithm, *, num_updates: int, measures_kl: bool = False) -> frozenset[str]:
    """Find the required log-prob columns that the loss can fill from its own pass, without a forward pass before the update.

    They are the policy's own columns, if only the loss reads them and there is at most one update.

    Args:
        num_updates: optimizer steps on the batch.
        measures_kl: whether a controller measures the KL to the reference, which reads old_log_probs.
    """
    own = algorithm.requires & frozenset(POLICY_COLUMNS)
    read_elsewhere = own - algorithm.loss_only or (measures_kl and "old_log_probs" in own)
    return frozenset() if num_updates > 1 or read_elsewhere else own


def deal_minibatches(batch: TrainBatch, num_minibatches: int, *, seed: int) -> list[TrainBatch]:
    """Deal rows at random to mini-batches with nearly equal numbers of trained rows, and nearly equal numbers of other rows.

    The two rows of a pair stay together. Rows without a trained token have no gradient, but may count in an algorithm's denominators. There
    are at most as many mini-batches as trained rows, or pairs: an update without any gradient would only move the optimizer's averages.
    """
    trained = find_trained_rows(batch)
    others = sorted(set(range(batch.num_rows)) - set(trained))
    assert trained, "no row of the batch has a token to train on"
    units: list[int] = trained if batch.pair_ids is None else batch.pair_ids[trained].tolist()
    plan = plan_minibatches(units, min(num_minibatches, len(set(units))), seed=seed, whole_groups=True)
    return [select_rows(batch, [*(trained[k] for k in part), *others[i :: len(plan)]]) for i, part in enumerate(plan)]


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """Plan of the optimizer steps on one rollout batch: num_epochs x num_minibatches of the policy, and as many of the critic."""

    num_epochs: int = 1  # passes over the batch
    num_minibatches: int = 1  # optimizer steps in each pass
    max_tokens_per_microbatch: int = 16384  # real tokens in one forward_backward; bounds memory, never changes a result
    seed: int = 0  # seed of the order of rows in each epoch
    value_clip: float | None = 0.2  # clip range of values, see losses.value_loss
    only_critic: bool = False  # train only the critic
    kl_coef: float | None = None  # coefficient of a KL controller; fills the column of that name and overrides the algorithm's own
    current_version: float | None = None  # weight version of the trainer, for algorithms that read the age of tokens: the version of the
    # engines, plus the fraction of steps done between the last sync and the next; see TrainBatch.policy_versions
    router_balance_coef: float = 0.0  # coefficient of the policy's load-balancing loss, see submit_optimizer_step
    dropout: bool = False  # train policy and critic with their dropout; off by default, since ratios are to passes without dropout
    skip_redundant: bool = True  # compute prompts that rows of a group share once, and run no backward pass for rows without a gradient:
    # the same numbers up to rounding; False = bit for bit those of each row by itself
    record: RecordRequest | None = None  # request for what the updates see of some rows; its call is waited for
    bad_numbers: BadNumbers = field(default_factory=BadNumbers)  # rules for log_prob and all_masked
    on_left_out: Callable[[TrainBatch], None] | None = None  # called with the filled batch whose update is left out for its log-probs


async def train_on_rollouts(
    backend: TrainingBackend,
    batch: TrainBatch,
    algorithm: Algorithm,
    plan: UpdatePlan | None = None,
    *,
    reference: TrainingBackend | None = None,
    critic: TrainingBackend | None = None,
    on_estimate: OnEstimate | None = None,
    samples: Sequence[Sample] = (),
) -> Metrics:
    """Train on one rollout batch: estimate once, then take the optimizer steps of the plan.

    The ratio is anchored to the log-probs before the first of these steps. If there is only one step and only the loss reads them
    (Algorithm.loss_only), they are taken from its own pass, which saves a forward pass; without dropout the numbers are the same. A batch
    without a trained token changes nothing; its metrics are num_tokens and num_updates, both 0, and num_bad_all_masked, 1.

    Args:
        batch: rows with rewards and rollout_log_probs; the columns in algorithm.requires are filled here, but for those of a teacher
            (distillation.teachers.Teacher.fill).
        plan: plan of the optimizer steps; default: one.
        reference: frozen model of a KL term.
        critic: model behind the values of algorithm.estimate; trained on the same mini-batches towards the returns, mean over tokens.
        on_estimate: called with the checked result of algorithm.estimate before the first step, for example to write some of it to a
            file. If it waits, the steps go on beside it; it has ended when this function returns.
        samples: samples of the rows, in their order: read only for DEBUG logs of their names, groups and states.

    Returns: token-weighted means over the optimizer steps; num_tokens is their sum; lr is the last one's; num_updates. With a critic:
        critic_loss, critic_grad_norm, critic_lr, value_mean, value_clip_fraction, and explained_variance of the values before the
        update. With a reference: reference_kl, see measure_kl, from old_log_probs or, if only the loss fills these, from
        rollout_log_probs. With a teacher: the metrics of measure_teacher. With pairs: those of measure_pairs. With plan.kl_coef: kl_coef.
        With an algorithm that compares turns: those of summarize_anchors; this module's logger logs the terms of each advantage at DEBUG.
    """
    plan = plan or UpdatePlan()
    if not find_trained_rows(batch):
        return {"num_tokens": 0.0, "num_updates": 0.0} | refuse_all_masked(plan.bad_numbers, "the rollout batch", batch)
    num_updates = 0 if plan.only_critic else plan.num_epochs * plan.num_minibatches
    skipped = columns_from_loss(algorithm, num_updates=num_updates, measures_kl=plan.kl_coef is not None)
    batch = await fill_columns(
        replace(batch, skip_redundant=plan.skip_redundant, kept=None if algorithm.compares_pairs else batch.kept),
        algorithm,
        backend,
        reference,
        critic,
        max_tokens_per_microbatch=plan.max_tokens_per_microbatch,
        skip=skipped,
        current_version=plan.current_version,
    )
    sifted, bad = sift_rows(batch, find_bad_log_probs(batch), "log_prob", plan.bad_numbers, samples)
    if sifted is None or not find_trained_rows(sifted):
        if plan.on_left_out is not None:
            plan.on_left_out(batch)
        return describe_left_out() | bad
    batch = sifted
    batch, metrics = _estimate(replace(batch, dropout=plan.dropout), algorithm, plan.kl_coef, samples)
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            if on_estimate is not None:
                await _begin(on_estimate(batch), nursery)
            metrics |= await _take_steps(backend, critic, _mark_recorded(batch, backend, plan.record), algorithm, plan, skipped)
    if plan.record is not None:
        told = plan.record.on_update(await _take_recorded(backend) if plan.record.rows else {})
        if inspect.isawaitable(told):
            await told
    return metrics | bad


def _mark_recorded(batch: TrainBatch, backend: TrainingBackend, record: RecordRequest | None) -> TrainBatch:
    """Return the batch with the requested rows as recorded ones, if the backend keeps any."""
    if record is None or not record.rows or BackendFeature.RECORDS not in get_backend_features(backend):
        return batch
    numbers = torch.full((batch.num_rows,), -1, dtype=torch.int64)
    numbers[list(record.rows)] = torch.tensor(record.rows, dtype=torch.int64)
    return replace(batch, recorded=numbers)


async def _take_recorded(backend: TrainingBackend) -> dict[int, RecordedColumns]:
    """Take the columns of each recorded row from the backend."""
    if BackendFeature.RECORDS not in get_backend_features(backend):
        return {}
    parts = await require_backend_feature(backend, BackendFeature.RECORDS, "a record of the update").take_recorded().result()
    return {
        number: {name: column[place] for name, column in part.columns.items()}
        for part in parts
        for place, number in enumerate(part.numbers)
    }


async def _begin(work: Any, nursery: trio.Nursery) -> None:
    """Start `work` in a nursery, if it is an awaitable, and return once it has ended or waits for something."""
    if not inspect.isawaitable(work):
        return

    async def finish() -> None:
        await work

    nursery.start_soon(finish)
    for _ in range(2):  # trio runs the tasks of one pass in any order
        await trio.lowlevel.checkpoint()


async def _take_steps(
    backend: TrainingBackend,
    critic: TrainingBackend | None,
    batch: TrainBatch,
    algorithm: Algorithm,
    plan: UpdatePlan,
    skipped: frozenset[str],
) -> Metrics:
    """Submit the optimizer steps of a plan, and return their metrics when they have been taken.

    Args:
        skipped: columns that the loss takes from its own pass.
    """
    submit = partial(submit_optimizer_step, max_tokens_per_microbatch=plan.max_tokens_per_microbatch)
    loss = anchor_to_self(algorithm.loss, skipped) if skipped else algorithm.loss
    if batch.recorded is not None:
        loss = partial(_loss_with_tokens, loss=loss)
    policy_steps: list[PendingOptimizerStep] = []
    critic_steps: list[PendingOptimizerStep] = []
    for epoch in range(plan.num_epochs if find_trained_rows(batch) else 0):  # no row is left where all groups are tied
        rows = batch if epoch == plan.num_epochs - 1 else replace(batch, recorded=None)  # the last update on a row is recorded
        for minibatch in deal_minibatches(rows, plan.num_minibatches, seed=derive_seed(plan.seed, epoch)):
            if not plan.only_critic:
                step = submit(
                    backend,
                    minibatch,
                    loss,
                    weigh=algorithm.weigh,
                    with_entropy=True,
                    router_balance_coef=plan.router_balance_coef,
                )
                policy_steps.append(step)
            if critic is not None:
                # a value has a gradient also where there is no advantage
                values = replace(minibatch, routed_experts=None, advantages=None, recorded=None)
                critic_steps.append(submit(critic, values, partial(value_loss, clip=plan.value_clip), weigh=token_mean))
    metrics = await _mean_results(policy_steps)
    if critic is not None:
        critic_metrics = await _mean_results(critic_steps)
        metrics |= name_critic_metrics(critic_metrics) | summarize_values(batch) | {"num_tokens": critic_metrics["num_tokens"]}
    return metrics | {"num_updates": float(len(policy_steps))}


def _estimate(batch: TrainBatch, algorithm: Algorithm, kl_coef: float | None, samples: Sequence[Sample]) -> tuple[TrainBatch, Metrics]:
    """Return the batch with checked advantages, and the metrics known before the update."""
    metrics: Metrics = {}
    if batch.ref_log_probs is not None:
        metrics |= _measure_reference_kl(batch)
    metrics |= measure_teacher(batch)
    if kl_coef is not None:
        if "reference_kl" not in metrics:
            raise DataError("a KL controller measures the KL of the policy that sampled, but the samples have no rollout_log_probs")
        batch = replace(batch, kl_coef=torch.full_like(batch.rewards, kl_coef))
        metrics["kl_coef"] = kl_coef
    batch = algorithm.estimate(batch)
    if batch.advantages is not None:
        batch = check_advantages(batch)  # a user's estimator may not have checked them
    metrics |= measure_pairs(batch, compares_pairs=algorithm.compares_pairs)
    if batch.turns is not None and batch.turns.levels is not None:
        metrics |= summarize_anchors(batch.turns.levels.anchors)
        _tell_turns(batch.turns.levels, samples)
    return batch, metrics


def _tell_turns(levels: TurnLevels, samples: Sequence[Sample]) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    assert not samples or len(samples) == len(levels.episode), f"{len(samples)} samples for {len(levels.episode)} rows"
    for row in range(len(levels.episode)):
        name = describe_sample(samples[row]) if samples else f"row {row}"
        states = [turn.state for turn in samples[row].turns or ()] if samples else []
        for turn, told in enumerate(describe_turns(levels, row)):
            state = {"state": states[turn]} if turn < len(states) else {}
            _logger.debug("%s turn %d: %s", name, turn, word_turn(told | state))


async def _mean_results(steps: Sequence[PendingOptimizerStep]) -> Metrics:
    results = [await step.result() for step in steps]
    return mean_step_metrics(results) if results else {"num_tokens": 0.0}


def _measure_reference_kl(batch: TrainBatch) -> Metrics:
    """Measure the KL per token from the sampling policy (before its update) to the reference, over the trained rows.

    Returns: reference_kl; empty if the log-probs of that policy are not known.
    """
    sampled = batch.old_log_probs if batch.old_log_probs is not None else batch.rollout_log_probs
    if sampled is None or batch.ref_log_probs is None:
        return {}
    mask = batch.loss_mask * batch.trainable[:, None]
    return {"reference_kl": float(measure_kl(sampled, batch.ref_log_probs, mask, count_empty_rows=False))}


def name_critic_metrics(metrics: Metrics) -> Metrics:
    """Rename the metrics of a critic's optimizer steps: prefix critic_, except for value_* metrics."""
    return {name if name.startswith("value_") else f"critic_{name}": value for name, value in metrics.items() if name != "num_tokens"}


def summarize_values(batch: TrainBatch) -> Metrics:
    """explained_variance = 1 - var(returns - values) / var(returns) over trained tokens: 1 = perfect, 0 = no better than a constant.

    Returns: explained_variance; 0 if the returns do not vary.
    """
    assert batch.values is not None, "the batch has no values"
    assert batch.returns is not None, "algorithm.estimate required values, but filled no returns, which the critic is trained towards"
    on = (batch.loss_mask > 0) & batch.trainable[:, None]
    returns, values = batch.returns[on], batch.values[on]
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return {"explained_variance": 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0}

"""Train a policy on preferences: collate -> reference -> forward_backward -> optim_step -> log -> checkpoint, once per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

import torch

from rollouts.algorithms.kto import kto_reference_point, mismatch_answers
from rollouts.algorithms.loss_weights import sample_mean
from rollouts.algorithms.preference_objectives import PreferenceObjective
from rollouts.algorithms.preferences import pair_mean, sequence_log_probs, split_pairs
from rollouts.backends.protocol import TrainingBackend, count_shards, find_limits
from rollouts.batches import select_rows
from rollouts.config import PreferenceTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.model_limits import check_samples
from rollouts.data.preference_pairs import PreferencePair, collate_pairs
from rollouts.data.prompts import stream_positions
from rollouts.errors import BackendError, ConfigError, DataError
from rollouts.supervised_loop import SupervisedRun, run_supervised
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import MetricsLogger
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.run_state import RunInputs
from rollouts.training.steps import EvaluateFn, Metrics, PendingOptimizerStep, plan_backend_microbatches, submit_forward
from rollouts.training.summaries import Stage, look
from rollouts.types import Sample, TokenOutputs, TrainBatch

STAGE: Stage = "dpo"
_SCORED_AT_ONCE = 256  # pairs or answers in one [rows, tokens] tensor

PreferenceRow: TypeAlias = PreferencePair | Sample
"""A pair, or for an objective without pairs (KTO) an answer with reward 1, good, or 0, bad."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceParts:
    """The parts that train_preferences works with."""

    backend: TrainingBackend  # the policy, or its `open_pipeline` pipeline to keep the event loop free
    reference: TrainingBackend | None = (
        None  # frozen policy (create_reference_backend, create_lora_reference); None = pairs know its log-probs
    )
    metrics_logger: MetricsLogger | None = None  # gets one line every log_every steps, with each evaluation and after the last step
    pad_id: int = 0  # token that pads rows; never computed
    evaluate: EvaluateFn | None = None  # measures more than the held-out rows, for example accuracy on problems
    checkpoint_dir: Path | None = None  # gets step_NNNN folders, each a complete model directory; None = none
    keep_last_n: int = 2  # checkpoints to keep
    should_stop: Callable[[], bool] = lambda: False  # called after each step; True ends the run with a checkpoint of that step
    clock: Callable[[], float] = time.monotonic  # time in seconds, for keys that end in `_s`
    best: BestCheckpoint | None = None  # keeps the checkpoint of the best evaluation, and may end the run
    inputs: RunInputs | None = None  # marks of data and settings, written to each checkpoint
    abandonment: Abandonment | None = None  # its request ends the run with a checkpoint of the last finished step, also within an
    # evaluation; None = never


async def score_reference(
    reference: TrainingBackend, pairs: Sequence[PreferencePair], *, pad_id: int = 0, max_tokens_per_microbatch: int = 16384
) -> tuple[PreferencePair, ...]:
    """Return the pairs with the log-probs of their answers under the reference, which is then no longer needed.

    Pairs that know theirs keep them. With the policy itself as reference, before its first step, no second model is ever in memory.
    Raises BackendError for log-probs that are not finite.
    """
    missing = [i for i, pair in enumerate(pairs) if pair.ref_log_probs is None]
    scored = list(pairs)
    for start in range(0, len(missing), _SCORED_AT_ONCE):
        some = missing[start : start + _SCORED_AT_ONCE]
        batch = collate_pairs([pairs[i] for i in some], pad_id)
        pending = submit_forward(reference, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch)
        sums = sequence_log_probs((await pending.result()).double(), batch.loss_mask).tolist()
        for k, i in enumerate(some):
            if not all(map(math.isfinite, sums[2 * k : 2 * k + 2])):
                raise BackendError(
                    f"the log-probs of pair {i} under the reference are {sums[2 * k]} and {sums[2 * k + 1]}, expected finite numbers: see "
                    "that its weights are whole, or compute in float32"
                )
            scored[i] = replace(pairs[i], ref_log_probs=(sums[2 * k], sums[2 * k + 1]))
    return tuple(scored)


async def prepare_preferences(
    parts: PreferenceParts, rows: Sequence[PreferenceRow], objective: PreferenceObjective, max_tokens: int
) -> TrainBatch:
    """Collate rows and add all that the objective's loss reads: reference log-probs, KTO's reference point, and weights."""
    if objective.compares_pairs:
        batch = collate_pairs(cast("Sequence[PreferencePair]", rows), parts.pad_id)
    else:
        answers = [replace(cast("Sample", row), group_index=i, index=i) for i, row in enumerate(rows)]
        batch = replace(collate_samples(answers, pad_id=parts.pad_id), kept=None)  # likelihoods of texts, whatever they were drawn from
    if objective.needs_reference and batch.ref_log_probs is None:
        assert parts.reference is not None, "check_preferences admits pairs without log-probs only with a reference"
        scored = submit_forward(parts.reference, batch, select_log_probs, max_tokens_per_microbatch=max_tokens)
        batch = replace(batch, ref_log_probs=await scored.result())
    if objective.compares_pairs:
        return replace(batch, loss_weights=pair_mean(batch))
    assert parts.reference is not None, "check_preferences admits objectives without pairs only with a reference"
    limits = find_limits(parts.backend)
    other = mismatch_answers(batch, max_length=None if limits is None else limits.context_length)
    pending = [
        submit_forward(backend, other, select_log_probs, max_tokens_per_microbatch=max_tokens)
        for backend in (parts.backend, parts.reference)
    ]
    own, reference = [await one.result() for one in pending]
    point = float(kto_reference_point(own.double(), reference.double(), other.loss_mask))
    return replace(batch, values=torch.full_like(batch.loss_mask, point), loss_weights=sample_mean(batch))


async def evaluate_preferences(
    parts: PreferenceParts, rows: Sequence[PreferenceRow], objective: PreferenceObjective, *, max_tokens_per_microbatch: int = 16384
) -> Metrics:
    """Measure the loss and the implicit rewards of held-out rows, without dropout; every pair, or answer, counts the same.

    Returns: eval_loss; eval_pair_accuracy, the share of pairs whose chosen answer has the larger reward (of answers on their side of the
        reference point for KTO); eval_pair_margin, the mean difference of the rewards; eval_reward_chosen and eval_reward_rejected;
        eval_num_pairs, the pairs, or labelled answers, that were measured.
        If labelled answers are all good, or all bad, the reward of the others and the margin are not known: the keys are left out.
    """
    assert rows, "there are no rows to measure"
    found: list[dict[str, float]] = []
    for start in range(0, len(rows), _SCORED_AT_ONCE):
        batch = await prepare_preferences(parts, rows[start : start + _SCORED_AT_ONCE], objective, max_tokens_per_microbatch)
        pending = submit_forward(parts.backend, batch, select_log_probs, max_tokens_per_microbatch=max_tokens_per_microbatch)
        log_probs, unit = await pending.result(), 2 if objective.compares_pairs else 1
        for row in range(0, batch.num_rows, unit):
            some = select_rows(batch, list(range(row, row + unit)))
            weigh = pair_mean if objective.compares_pairs else sample_mean
            own = TokenOutputs(log_probs=log_probs[row : row + unit, : some.tokens.shape[1]])
            loss, metrics = objective.loss(own, replace(some, loss_weights=weigh(some)))
            found.append(
                {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}, "is_good": float(some.rewards[0])}
            )
    return _summarize(found, objective)


def _summarize(found: Sequence[dict[str, float]], objective: PreferenceObjective) -> Metrics:
    def mean(name: str, lines: Sequence[dict[str, float]] = found) -> float:
        return sum(line[name] for line in lines) / len(lines)

    rewards: Metrics = {}
    if objective.compares_pairs:
        rewards = {f"eval_reward_{kind}": mean(f"reward_{kind}") for kind in ("chosen", "rejected")}
    else:
        for kind, sign in (("chosen", 1), ("rejected", -1)):
            if some := [line for line in found if (line["is_good"] > 0) is (sign > 0)]:
                rewards[f"eval_reward_{kind}"] = sign * mean("reward_signed", some)
    if len(rewards) == 2:
        rewards["eval_pair_margin"] = rewards["eval_reward_chosen"] - rewards["eval_reward_rejected"]
    return {"eval_loss": mean("loss"), "eval_pair_accuracy": mean("reward_accuracy"), **rewards, "eval_num_pairs": float(len(found))}


async def train_preferences(
    parts: PreferenceParts,
    rows: Sequence[PreferenceRow],
    objective: PreferenceObjective,
    config: PreferenceTrainingConfig,
    *,
    heldout: Sequence[PreferenceRow] = (),
    start_step: int = 0,
    unfinished: Mapping[str, float] | None = None,
) -> list[Metrics]:
    """Train a policy on preferences for config.num_steps optimizer steps. No state is kept between calls: same arguments, same metrics.

    Args:
        rows: pairs whose answers are trained on as a whole (load_preference_pairs with whole_answers), or labelled answers.
        objective: result of preference_objectives.dpo, simpo, kto, ...
        heldout: rows for evaluate_preferences every config.eval_every steps and after the last one; () = no evaluation.
        start_step: finished steps of the resumed run (the backend already restored).
        unfinished: metrics of step start_step, whose evaluation was given up (RunState.metrics); it is made first. None = it was not.

    Returns: one dict per step from start_step on: loss, the metrics of the loss, num_pairs or num_answers, grad_norm, lr, step_s; if
        evaluated, the keys of evaluate_preferences and of parts.evaluate.
    Raises: DataError (nothing to train on, a row outside the model's limits), ConfigError (no reference, or the backend cannot
        checkpoint), and the errors of the backend's futures.
    """
    check_preferences(parts, rows, heldout, objective, config)
    run = SupervisedRun(
        backend=parts.backend,
        config=config,
        stage=STAGE,
        train_step=partial(_train_step, parts, rows, objective, config),
        look=partial(look, stage=STAGE),
        evaluate=partial(measure_preferences, parts, heldout, objective, config) if heldout or parts.evaluate is not None else None,
        num_rows=len(rows),
        metrics_logger=parts.metrics_logger,
        checkpoint_dir=parts.checkpoint_dir,
        keep_last_n=parts.keep_last_n,
        should_stop=parts.should_stop,
        clock=parts.clock,
        best=parts.best,
        inputs=parts.inputs,
        abandonment=parts.abandonment,
    )
    return await run_supervised(run, start_step=start_step, unfinished=unfinished)


async def measure_preferences(
    parts: PreferenceParts, heldout: Sequence[PreferenceRow], objective: PreferenceObjective, config: PreferenceTrainingConfig
) -> Metrics:
    """Measure the held-out rows, and what parts.evaluate does."""
    limit = config.max_tokens_per_microbatch
    found = await evaluate_preferences(parts, heldout, objective, max_tokens_per_microbatch=limit) if heldout else Metrics()
    return found if parts.evaluate is None else {**found, **await parts.evaluate()}


async def _train_step(
    parts: PreferenceParts, rows: Sequence[PreferenceRow], objective: PreferenceObjective, config: PreferenceTrainingConfig, step: int
) -> tuple[Metrics, int]:
    """Train on the rows of a step, 0-based. Returns its metrics and the number of tokens of its rows."""
    positions = stream_positions(len(rows), start=step * config.batch_size, count=config.batch_size, seed=config.seed)
    limit, backend = config.max_tokens_per_microbatch, parts.backend
    batch = await prepare_preferences(parts, [rows[position] for position in positions], objective, limit)
    batch = replace(batch, dropout=config.dropout)
    if objective.compares_pairs:  # the loss compares the two answers of a pair, so they are computed together
        micro = split_pairs(batch, max_tokens=limit, num_shards=count_shards(backend))
    else:
        micro = [select_rows(batch, part) for part in plan_backend_microbatches(backend, batch, limit)]
    pending = PendingOptimizerStep(
        parts=tuple(backend.forward_backward(part, objective.loss) for part in micro), update=backend.optim_step()
    )
    counted = {"num_pairs" if objective.compares_pairs else "num_answers": float(config.batch_size)}
    return {**await pending.result(), **counted}, int(batch.lengths.sum())


def check_preferences(
    parts: PreferenceParts,
    rows: Sequence[PreferenceRow],
    heldout: Sequence[PreferenceRow],
    objective: PreferenceObjective,
    config: PreferenceTrainingConfig,
) -> None:
    """Raise DataError or ConfigError for rows that the objective cannot be trained on with these parts."""
    if not rows:
        raise DataError("there are no preferences to train on (found 0): check the data path and its filters")
    wanted = PreferencePair if objective.compares_pairs else Sample
    limits = find_limits(parts.backend)
    for what, some in (("row", rows), ("held-out row", heldout)):
        for row in some:
            assert isinstance(row, wanted), f"a {what} is a {type(row).__name__}, but the objective is trained on {wanted.__name__}s"
            needs = objective.needs_reference and parts.reference is None
            if needs and (isinstance(row, Sample) or row.ref_log_probs is None):
                raise ConfigError(
                    f"the objective compares with a reference policy, but there is none, and a {what} does not know its log-probs: pass "
                    "reference=create_reference_backend(...), or pairs of score_reference"
                )
        answers = [answer for row in some for answer in ((row,) if isinstance(row, Sample) else (row.chosen, row.rejected))]
        check_samples(answers, limits, f"the answer of a {what}, number")
    if not objective.compares_pairs and config.batch_size < 2:
        raise ConfigError(
            f"batch_size is {config.batch_size}, but KTO compares each prompt with the answer of another one: give at least 2"
        )

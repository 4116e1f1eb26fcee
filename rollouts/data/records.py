"""Records of samples after a training step: the sample, its estimate by the algorithm, and the steps of its episode."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rollouts.data.samples import describe_sample, find_actions
from rollouts.outcomes import EpisodeStep
from rollouts.steps import StepData, Steps
from rollouts.types import Sample, TrainBatch, Turns


@dataclass(frozen=True, kw_only=True)
class TurnEstimate:
    """Parts of the advantage of one turn, where the estimator compares turns (GiGPO)."""

    step_reward: float  # reward of the turn, with the estimator's additions
    return_to_go: float  # G_k, discounted rewards from the turn on
    anchor: int  # number of its anchor, valid in this training step only: the turns of its group from the same state
    anchor_size: int  # turns of the anchor in the whole training step, itself included
    episode_advantage: float  # A_E
    step_advantage: float  # A_S
    advantage: float  # both combined


TOKEN_COLUMNS = ("advantages", "returns", "values", "old_log_probs", "prox_log_probs", "segment_log_probs", "ref_log_probs",
                 "teacher_log_probs", "loss_weights", "importance_weights")  # fmt: skip
"""Fields of an Estimate with one number a token, each named as its column of the TrainBatch."""

UPDATE_COLUMNS = ("log_probs", "ratios", "loss_weights")
"""Fields of an UpdateRecord with one number a token."""

_MOST_TOKENS = 2**24  # tokens of a column written as runs; more is a damaged file


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate of one sample in a training step: its row of the TrainBatch that Algorithm.estimate returned, without padding.

    TOKEN_COLUMNS are aligned with Sample.tokens; None = the step has no such column. In the update of the step they are constants.
    """

    reward: float  # reward in training: the sample's, unless rewards were shaped
    advantages: tuple[float, ...] | None = None
    returns: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None  # values of a critic, before the step
    old_log_probs: tuple[float, ...] | None = None  # the trainer's policy before the step; None = taken from the update's own pass
    prox_log_probs: tuple[float, ...] | None = None  # the proximal policy of decoupled objectives
    segment_log_probs: tuple[float, ...] | None = None  # under the weights one version after those that sampled the token
    ref_log_probs: tuple[float, ...] | None = None  # the reference policy
    teacher_log_probs: tuple[float, ...] | None = None  # the teacher of distillation
    loss_weights: tuple[float, ...] | None = None  # weight of the token in the loss; None = not known, as where a step has mini-batches
    importance_weights: tuple[float, ...] | None = None  # factor of the policy term; 0 = left out as too far off policy
    group_rewards: tuple[float, ...] = ()  # trained on, of all samples of its group and subgroup, its own too: a file may hold some
    turns: tuple[TurnEstimate, ...] | None = None  # one for each of Sample.turns; None = the algorithm compares no turns

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain JSON values, without what is None; a column of few runs is {"runs": [[count, value], ...]}."""
        out: dict[str, Any] = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if self.turns is not None:
            out["turns"] = [dict(vars(turn)) for turn in self.turns]
        out |= {name: _pack(out[name]) for name in TOKEN_COLUMNS if name in out}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in out.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Estimate:
        """Return the estimate of to_dict's values."""
        values: dict[str, Any] = {name: _unpack(value) if name in TOKEN_COLUMNS else value for name, value in data.items()}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if values.get("turns") is not None:
            values["turns"] = tuple(turn if isinstance(turn, TurnEstimate) else TurnEstimate(**turn) for turn in values["turns"])
        return cls(**values)


def _pack(values: Sequence[float]) -> Any:
    """Return the values, as runs of equal ones where this is shorter."""
    runs = _find_runs(values)
    return {"runs": runs} if 3 * len(runs) <= len(values) else list(values)


def _find_runs(values: Sequence[Any]) -> list[list[Any]]:
    """Return [count, value] of each run of equal values."""
    return [[len([*same]), value] for value, same in groupby(values)]


def _unpack(value: Any) -> Any:
    """Return the values of _pack's result. Raises AssertionError for counts that no file of this library has."""
    if not isinstance(value, Mapping):
        return value
    runs = cast("Mapping[str, list[tuple[int, Any]]]", value)["runs"]
    counts = [count for count, _ in runs]
    assert all(type(count) is int and count > 0 for count in counts), f"runs of {counts} tokens"
    assert sum(counts) <= _MOST_TOKENS, f"a column of {sum(counts)} tokens"
    return [number for count, number in runs for _ in range(count)]


KEPT = "kept"  # reason of a token that the loss neither clips nor leaves out


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """Record of the last update of a training step on one sample: each token as its pass saw it, before it changed the weights.

    Columns are aligned with Sample.tokens, numbers have five digits; None = not known.
    """

    log_probs: tuple[float, ...] | None = None  # the trainer's policy, to 1e-5 nats; 0 where nothing is trained
    ratios: tuple[float, ...] | None = None  # as the loss read them, of tokens or sequences; 1 where nothing is trained
    loss_weights: tuple[float, ...] | None = None  # weight of the token in the loss of its mini-batch
    reasons: tuple[str, ...] | None = None  # verdict of the loss on each token: "kept", or names of losses.mark_tokens with ", " between
    # them, as clip_high; "" where nothing is trained

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values, without what is None; columns as in Estimate.to_dict, reasons always in runs."""
        out: dict[str, Any] = {name: _pack(value) for name in UPDATE_COLUMNS if (value := getattr(self, name)) is not None}
        return out if self.reasons is None else out | {"reasons": {"runs": _find_runs(self.reasons)}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> UpdateRecord:
        """Return the record of to_dict's values."""
        return cls(**{name: None if value is None else tuple(_unpack(value)) for name, value in data.items()})


@dataclass(frozen=True, kw_only=True)
class TrajectoryRecord:
    """A sample with its estimate and steps. A record of single steps in a file has an empty sample with their indices."""

    sample: Sample
    estimate: Estimate | None = None
    steps: Steps = field(default_factory=tuple)
    update: UpdateRecord | None = None  # None = not recorded

    def __post_init__(self) -> None:
        columns = [(name, None if self.estimate is None else getattr(self.estimate, name)) for name in TOKEN_COLUMNS]
        columns += [] if self.update is None else list(vars(self.update).items())
        for name, column in columns:
            n = len(self.sample.tokens)
            assert column is None or len(column) == n, f"{describe_sample(self.sample)}: {len(column)} {name} for {n} tokens"
        turns, of_sample = None if self.estimate is None else self.estimate.turns, self.sample.turns or ()
        assert turns is None or len(turns) == len(of_sample), (
            f"{describe_sample(self.sample)}: estimates of {len(turns)} turns for {len(of_sample)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values: those of the sample, with "estimate", "steps" and "update" where there are any."""
        out = self.sample.to_dict()
        if self.estimate is not None:
            out["estimate"] = self.estimate.to_dict()
        if self.steps:
            out["steps"] = [step.to_dict() for step in self.steps]
        if self.update is not None:
            out["update"] = self.update.to_dict()
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrajectoryRecord:
        """Return the record of to_dict's values; those of a sample alone are a record, too."""
        values = dict(data)
        estimate, steps, update = values.pop("estimate", None), values.pop("steps", ()), values.pop("update", None)
        return cls(
            sample=Sample.from_dict(values),
            estimate=None if estimate is None else Estimate.from_dict(estimate),
            steps=tuple(StepData.from_dict(step) for step in steps),
            update=None if update is None else UpdateRecord.from_dict(update),
        )


def group_steps(steps: Iterable[StepData]) -> tuple[Steps, ...]:
    """Return the steps of each episode in order; episodes in the order of (group_index, sample_index)."""
    episodes: dict[tuple[int, int], list[StepData]] = {}
    for step in steps:
        episodes.setdefault((step.group_index, step.sample_index), []).append(step)
    return tuple(tuple(sorted(episodes[key], key=lambda step: step.system_step_index)) for key in sorted(episodes))


# -- what a training step made of samples


def describe_estimate(batch: TrainBatch, row: int) -> Estimate:
    """Return the estimate of the sample in a row of the batch.

    Args:
        batch: as Algorithm.estimate returned it.
    """
    length = int(batch.lengths[row])
    group = batch.group_ids == batch.group_ids[row]
    return Estimate(
        reward=_to_floats(batch.rewards[row : row + 1])[0],
        group_rewards=_to_floats(batch.rewards[group]),
        turns=_describe_turns(batch.turns, row),
        **{name: _to_row(getattr(batch, name), row, length) for name in TOKEN_COLUMNS},
    )


def describe_update(sample: Sample, columns: Mapping[str, Tensor]) -> UpdateRecord:
    """Return the record of a sample's update.

    Args:
        columns: # [T] each, at least as long as the sample, as train_on_rollouts tells them (RecordRequest). Those besides log_prob,
            loss_weight and ratio are marks of 0 and 1. A column with a number that is not finite is not kept.
    """
    trained = np.asarray(sample.loss_mask) > 0
    known = {name: _to_array(column)[: len(trained)] for name, column in columns.items()}
    log_probs, ratios, weights = (known.pop(name, None) for name in ("log_prob", "ratio", "loss_weight"))
    reasons: list[str] | None = None
    if known:
        reasons = [KEPT if on else "" for on in trained.tolist()]
        for name, values in known.items():
            for at in (values > 0).nonzero()[0].tolist():
                if reasons[at]:  # the sample has a loss mask there
                    reasons[at] = name if reasons[at] == KEPT else f"{reasons[at]}, {name}"
    return UpdateRecord(
        log_probs=None if log_probs is None else _to_numbers(np.round(np.where(trained, log_probs.astype(np.float64), 0.0), 5)),
        ratios=None if ratios is None else _to_numbers(_round_digits(ratios)),
        loss_weights=None if weights is None else _to_numbers(_round_digits(weights)),
        reasons=None if reasons is None else tuple(reasons),
    )


def _to_array(column: Tensor) -> Any:
    """Return the numbers of a column without a copy, where numpy has its dtype."""
    return (column.float() if column.dtype is torch.bfloat16 else column).numpy()


def _round_digits(values: Any) -> Any:
    """Round to five significant digits."""
    values = values.astype(np.float64)
    if (values == values[:1]).all():  # as the ratios of a single update, and most loss weights
        number = float(values[0]) if len(values) else 0.0
        return np.full(len(values), float(f"{number:.5g}"))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** np.clip(4 - np.floor(np.log10(np.abs(values))), -300, 300)
        return np.where(values == 0, 0.0, np.round(values * scale) / scale)


def _to_numbers(values: Any) -> tuple[float, ...] | None:
    """Return the numbers of an array; None if one of them is not finite, which JSON cannot hold."""
    return tuple((values + 0.0).tolist()) if np.isfinite(values).all() else None


def _describe_turns(turns: Turns | None, row: int) -> tuple[TurnEstimate, ...] | None:
    levels = None if turns is None else turns.levels
    if levels is None:
        return None
    anchors = levels.anchors[row]
    count = int((anchors >= 0).sum())  # turns are the first columns of a row
    columns = {
        "step_reward": levels.rewards,
        "return_to_go": levels.returns,
        "step_advantage": levels.step,
        "advantage": levels.combined,
    }
    numbers = {name: _to_floats(column[row, :count]) for name, column in columns.items()}
    (episode,) = _to_floats(levels.episode[row : row + 1])
    return tuple(
        TurnEstimate(
            anchor=anchor,
            anchor_size=int((levels.anchors == anchor).sum()),
            episode_advantage=episode,
            **{name: column[k] for name, column in numbers.items()},
        )
        for k, anchor in enumerate(anchors[:count].tolist())
    )


def _to_row(column: Tensor | None, row: int, length: int) -> tuple[float, ...] | None:
    return None if column is None else _to_floats(column[row, :length])


def _to_floats(values: Tensor) -> tuple[float, ...]:
    return _shorten(values.detach().float().cpu().numpy())


def _shorten(values: Any) -> tuple[float, ...]:
    """Return the shortest numbers that are equal in float32: 0.3, not 0.30000001192092896."""
    return tuple(float(str(value)) for value in np.asarray(values, dtype=np.float32))


def shorten_log_probs(sample: Sample) -> Sample:
    """Return the sample with the shortest rollout_log_probs that are equal in float32, in which they are trained on."""
    return sample if sample.rollout_log_probs is None else replace(sample, rollout_log_probs=_shorten(sample.rollout_log_probs))


def derive_steps(record: TrajectoryRecord) -> Steps:
    """Return the steps of a record: its own, or steps derived from its sample; none for a sample that is no episode.

    Each turn of the sample gives its tokens, log-probs and reward, and the mean advantage of its trained tokens. Sample.messages give the
    text of the action and the messages before it. Sample.episode gives observation, action, info and the critic's value. step_info has the
    state key of the turn as "state", and the parts of its advantage as "gigpo" where the algorithm compares turns: see TurnEstimate and
    gigpo_steps.describe_turns.
    """
    sample, estimate = record.sample, record.estimate
    if record.steps or not sample.turns:
        return record.steps
    kept = () if sample.episode is None else sample.episode.steps
    messages = sample.messages or ()
    spoken = find_actions(sample) if messages else ()
    of_turns = (None,) * len(sample.turns) if estimate is None or estimate.turns is None else estimate.turns
    steps: list[StepData] = []
    for k, (turn, known) in enumerate(zip(sample.turns, of_turns, strict=True)):
        place = slice(turn.start, turn.end)
        at = spoken[k] if len(spoken) == len(sample.turns) else None
        before = () if at is None else messages[spoken[k - 1] + 1 if k else 0 : at]
        text = "" if at is None else str(messages[at].content or "")
        answered = None if at is None else spoken[k + 1] if k + 1 < len(spoken) else len(messages)
        trained = [p for p in range(turn.start, turn.end) if sample.loss_mask[p] > 0]
        advantages = None if estimate is None or estimate.advantages is None else [estimate.advantages[p] for p in trained]
        seen = before[0].content if len(before) == 1 else [message.to_dict() for message in before] or None
        own = kept[k] if k < len(kept) else EpisodeStep(observation=seen, action=text or None, done=k == len(sample.turns) - 1)
        steps.append(
            StepData(
                system_step_index=k,
                observation_data=own.observation,
                action_taken=own.action,
                raw_policy_output=text,
                resulting_messages_history=messages[:answered] if answered is not None else (),
                action_message=at,
                policy_tokens=sample.tokens[place],
                policy_logprobs=None if sample.rollout_log_probs is None else sample.rollout_log_probs[place],
                policy_value_estimate=own.value,
                is_done=own.done,
                step_info=dict(own.info)
                | ({} if turn.state is None else {"state": turn.state})
                | ({} if known is None else {"gigpo": dict(vars(known))}),
                base_reward=turn.reward,
                return_to_go=None if known is None else known.return_to_go,
                advantage=math.fsum(advantages) / len(advantages) if advantages else None,
                sample_index=sample.index,
                group_index=sample.group_index,
            )
        )
    return tuple(steps)


def attach_estimates(samples: Sequence[Sample], wanted: Iterable[Sample], batch: TrainBatch | None) -> tuple[TrajectoryRecord, ...]:
    """Return records of some samples of a rollout batch.

    Args:
        samples: all samples of the rollout batch, in the order of the rows of `batch`.
        wanted: samples to make records of.
        batch: as Algorithm.estimate returned it; None = not known.
    """
    rows = {id(sample): row for row, sample in enumerate(samples)}
    records = (TrajectoryRecord(sample=sample) for sample in wanted)
    if batch is None:
        return tuple(records)
    assert batch.num_rows == len(samples), f"{batch.num_rows} rows of a batch for {len(samples)} samples"
    return tuple(replace(record, estimate=describe_estimate(batch, rows[id(record.sample)])) for record in records)

"""Rollouts as the report sees them: chosen groups of each step, text and numbers of their tokens, and why a group has no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from integration.view.source import find_decoder, find_reward, find_step_files, read_file
from integration.view.tokens import Decode, Token, read_step_tokens, read_tokens
from rollouts.data.records import TrajectoryRecord, derive_steps
from rollouts.types import Message, Status

COLUMNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "advantage": ("advantage", "above 0: the update makes the token more likely; below 0: less likely; 0: it leaves it alone"),
        "log_prob": ("log-prob when sampled", "natural logarithm of the probability with which the engine drew the token"),
        "return_": ("return", "rewards from this token on, which a critic learns to predict"),
        "value": ("value", "the critic's estimate of the return before the step"),
        "mask": ("loss mask", "1: trained on; 0: given by the prompt, the environment or a tool, and not trained on"),
        "version": ("weight version", "number of weight syncs before the token was sampled; -1: not sampled"),
    }
)
"""Label and explanation of each number of a token, by the key that the page uses."""

_PREVIEW = 90  # characters of a response in the list
_SAME = 1e-6  # difference below which rewards are equal


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Records of one step of one run that the page unpacks together."""

    run: int  # index of the run in the report
    step: int
    rows: tuple[tuple[Any, ...], ...]  # for the list: group, sample, reward, number of trained tokens, status, preview of the response
    groups: Mapping[str, Sequence[str]]  # sentences about the gradient of each group, by its number
    records: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The rollouts of a run that fit into the report."""

    chunks: tuple[Chunk, ...]
    num_shown: int
    num_total: int  # in the trajectory files
    notes: tuple[str, ...] = ()  # rollouts that are left out, with the reason


def choose_rollouts(path: Path, run: int, *, max_tokens: int, mask_truncated: bool = False) -> Chosen:
    """Choose whole groups of the trajectory files of a run, spread evenly over its steps, and make them ready for the page.

    Args:
        path: directory of the run.
        run: index of the run in the report.
        max_tokens: most tokens of all chosen rollouts; 0 = no bound.
        mask_truncated: see explain_gradient.

    Raises: DataError naming file and line of a damaged file.
    """
    files = find_step_files(path)
    if not files:
        return Chosen(
            chunks=(),
            num_shown=0,
            num_total=0,
            notes=(f"{path.name} wrote no rollouts: --trajectories.groups 4 records four groups of each step, --trajectories.every 1 all",),
        )
    decode = find_decoder(next(iter(files.values())), None)
    share = max_tokens // len(files) if max_tokens else 0
    chunks: list[Chunk] = []
    total = 0
    for step, file in files.items():
        records = read_file(file)
        total += len(records)
        chosen = take_groups(records, share)
        if chosen:
            chunks.append(create_chunk(chosen, run, step, decode, mask_truncated=mask_truncated))
    shown = sum(len(chunk.records) for chunk in chunks)
    notes: list[str] = []
    if shown < total:
        notes.append(
            f"{shown:,} of the {total:,} recorded rollouts of {path.name} are in this file, in whole groups; --max-tokens 0 takes all"
        )
    if decode is None:
        notes.append(f"{path.name} has no tokenizer that could be read: tokens are shown by their ids")
    return Chosen(chunks=tuple(chunks), num_shown=shown, num_total=total, notes=tuple(notes))


def take_groups(records: Sequence[TrajectoryRecord], max_tokens: int) -> list[TrajectoryRecord]:
    """Take whole groups of one step, evenly spaced, with at most max_tokens together; at least one group. 0 = all."""
    groups = list(split_groups(records))
    sizes = [sum(len(record.sample.tokens) for record in group) for group in groups]
    if not groups or not max_tokens or sum(sizes) <= max_tokens:
        return [record for group in groups for record in group]
    count = max(1, min(len(groups), max_tokens * len(groups) // sum(sizes)))
    return [record for k in range(count) for record in groups[k * len(groups) // count]]


def split_groups(records: Iterable[TrajectoryRecord]) -> Iterator[list[TrajectoryRecord]]:
    """Yield the records of each group, by the number of the group, samples in order."""
    in_order = sorted(records, key=lambda record: (record.sample.group_index, record.sample.index))
    for _, members in groupby(in_order, key=lambda record: record.sample.group_index):
        yield list(members)


def create_chunk(records: Sequence[TrajectoryRecord], run: int, step: int, decode: Decode | None, *, mask_truncated: bool = False) -> Chunk:
    """Return the chunk of records of a step. decode: None = tokens are shown as ids."""
    rows = tuple(
        (
            record.sample.group_index,
            record.sample.index,
            find_reward(record),
            sum(mask > 0 for mask in record.sample.loss_mask),
            record.sample.status.value,
            " ".join(find_text(record).split())[:_PREVIEW],
        )
        for record in records
    )
    groups = {str(group[0].sample.group_index): explain_gradient(group, mask_truncated=mask_truncated) for group in split_groups(records)}
    return Chunk(run=run, step=step, rows=rows, groups=groups, records=tuple(describe_record(record, decode) for record in records))


def find_text(record: TrajectoryRecord) -> str:
    """Return the response of a record, or the actions of its steps."""
    return record.sample.response or " / ".join(step.raw_policy_output or str(step.action_taken or "") for step in record.steps)


def describe_record(record: TrajectoryRecord, decode: Decode | None) -> dict[str, Any]:
    """Return a record as JSON values: texts, numbers of its tokens as columns, and the steps of an episode."""
    sample, estimate = record.sample, record.estimate
    tokens, steps, turns = read_tokens(record, decode), derive_steps(record), sample.turns or ()
    prompt = sample.prompt if isinstance(sample.prompt, str) else [describe_message(message) for message in sample.prompt or ()]
    reward, found = find_reward(record), dict[str, Any]()
    if estimate is not None and reward is not None and abs(estimate.reward - reward) > _SAME * max(1.0, abs(reward)):
        found["trained_reward"] = estimate.reward
    if sample.reward_details is not None:
        found["details"] = to_json(vars(sample.reward_details))
    if sample.metadata:
        found["metadata"] = to_json(sample.metadata)
    if sample.messages:
        found["messages"] = [describe_message(message) for message in sample.messages]
    if steps:
        with_turns = len(turns) == len(steps)
        found["steps"] = [
            {
                "observation": to_json(step.observation_data),
                "action": to_json(step.action_taken),
                "output": step.raw_policy_output,
                "reward": step.base_reward,
                "return_to_go": step.return_to_go,
                "advantage": step.advantage,
                "done": step.is_done,
                "info": to_json(step.step_info),
                "span": [turns[k].start, turns[k].end] if with_turns else None,
                "tokens": None if with_turns else describe_tokens(read_step_tokens(step, decode)),
            }
            for k, step in enumerate(steps)
        ]
    return {
        "group": sample.group_index,
        "sample": sample.index,
        "reward": reward,
        "status": sample.status.value,
        "trainable": sample.trainable,
        "temperature": sample.temperature,
        "prompt": prompt,
        "response": sample.response,
        "group_rewards": [] if estimate is None else list(estimate.group_rewards),
        "tokens": describe_tokens(tokens),
        **found,
    }


def describe_tokens(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return tokens as columns: ids, pieces of text, and each known number of COLUMNS, with four significant digits."""
    columns: dict[str, Any] = {"ids": [token.id for token in tokens], "pieces": [token.piece for token in tokens]}
    for key in COLUMNS:
        values = [getattr(token, key) for token in tokens]
        if any(value is not None for value in values):
            columns[key] = [round_number(value) for value in values]
    return columns


def describe_message(message: Message) -> dict[str, Any]:
    """Return role, text and tool calls of a message."""
    kept = message.to_dict()
    role, content = kept.pop("role", ""), kept.pop("content", None)
    rest = {key: value for key, value in kept.items() if value not in (None, [], (), "")}
    return {"role": role, "content": "" if content is None else str(content), **({"more": to_json(rest)} if rest else {})}


def round_number(value: float | None) -> float | None:
    """Round to four significant digits; None where a number is missing or not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")


def to_json(value: Any) -> Any:
    """Return a value made of JSON's types, others as their text, numbers that are not finite as text too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in cast("Sequence[Any]", value)]
    return str(value)


# -- why a group has a gradient, or none


def explain_gradient(group: Sequence[TrajectoryRecord], *, mask_truncated: bool = False) -> tuple[str, ...]:
    """Explain in sentences whether the update had a gradient from these samples of one group, and why not.

    Args:
        mask_truncated: whether the run leaves truncated samples out of training.
    """
    estimates = [record.estimate for record in group if record.estimate is not None]
    if not estimates:
        return ("No advantages were recorded: the step did not reach its estimate, or these samples were not trained on.",)
    rewards = max((estimate.group_rewards for estimate in estimates), key=len) or tuple(e.reward for e in estimates)
    told: list[str] = []
    if not any(record.sample.trainable for record in group):
        told.append("No gradient: none of these samples is trainable (trainable is False: failed, or kept only as a baseline).")
    elif not any(mask > 0 for record in group for mask in record.sample.loss_mask):
        told.append("No gradient: no token of these samples has a loss mask above 0.")
    elif mask_truncated and all(record.sample.status is Status.TRUNCATED for record in group):
        told.append("No gradient: each of these samples was cut by the token budget.")
    elif all(estimate.advantages is None for estimate in estimates):
        told.append("The algorithm estimates no advantages; its loss reads other columns.")
    else:
        told.append(_explain_advantages(group, rewards))
    cut = sum(record.sample.status is Status.TRUNCATED for record in group)
    if cut:
        then = ": rl.mask_truncated leaves them out of training." if mask_truncated else "."
        told.append(f"{cut} of {len(group)} samples were cut by the token budget{then}")
    hidden = len(rewards) - len(group)
    if hidden > 0:
        told.append(f"The group has {len(rewards)} samples, of which {len(group)} were recorded.")
    return tuple(told)


def _explain_advantages(group: Sequence[TrajectoryRecord], rewards: Sequence[float]) -> str:
    largest: list[float] = []  # largest advantage of each sample, by absolute value
    for record in group:
        advantages = None if record.estimate is None else record.estimate.advantages
        if advantages is not None and record.sample.trainable:
            largest.append(max((a for a, m in zip(advantages, record.sample.loss_mask, strict=True) if m > 0), key=abs, default=0.0))
    equal = max(rewards) - min(rewards) <= _SAME * max(1.0, *(abs(reward) for reward in rewards))
    zero = sum(value == 0 for value in largest)
    if zero == len(largest) and equal:
        return (
            f"No gradient: all {len(rewards)} rewards of the group are {rewards[0]:g}, so that none is better than the group's mean and "
            "each advantage is 0. A KL term or an entropy bonus may still give one."
        )
    if zero == len(largest):
        return (
            f"No gradient: each advantage is 0, although rewards go from {min(rewards):g} to {max(rewards):g}. Look at reward shaping and "
            "at the algorithm's estimate."
        )
    nothing = f"; {zero} of {len(largest)} recorded samples have an advantage of 0" if zero else ""
    ends = f"{min(largest):.3g} to {max(largest):.3g}, rewards from {min(rewards):g} to {max(rewards):g}"
    return f"The group has a gradient: advantages go from {ends}{nothing}."

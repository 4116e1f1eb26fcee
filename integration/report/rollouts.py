"""Rollouts as the report sees them: chosen groups of each step, and text and numbers of their tokens."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from integration.view.gradient import explain_gradient, find_key, name_group, split_groups
from integration.view.source import find_decoder, find_reward, find_step_files, iterate_file, measure_file
from integration.view.tokens import Decode, Token, count_clipped, read_step_tokens, read_tokens
from rollouts.data.records import TrajectoryRecord, derive_steps
from rollouts.types import Message

COLUMNS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "advantage": ("advantage", "above 0: the update makes the token more likely; below 0: less likely; 0: it leaves it alone"),
        "log_prob": ("log-prob when sampled", "natural logarithm of the probability with which the engine drew the token"),
        "choices": (
            "tokens to draw from",
            "number of tokens that top-p, top-k and min-p left where this one was drawn: its log-probs are those within this set; 0: all",
        ),
        "return_": ("return", "rewards from this token on, which a critic learns to predict"),
        "value": ("value", "the critic's estimate of the return before the step"),
        "trainer": ("trainer log-prob", "natural logarithm of the probability that the trainer gave the token before the update"),
        "reference": ("reference log-prob", "natural logarithm of the probability that the frozen reference gives the token"),
        "ratio": (
            "ratio of trainer to rollout",
            "the trainer's probability before the update divided by the engine's; 1: the engine had the weights and the arithmetic of the "
            "trainer; the further from 1, the staler or the less exact",
        ),
        "weight": ("loss weight", "share of the token in the loss of the step; 0 with a loss mask of 1: the algorithm leaves it out"),
        "importance": ("importance weight", "factor of the token's policy term; 0: left out, as too far from the policy that sampled it"),
        "proximal": ("proximal log-prob", "natural logarithm of the probability under the policy that a decoupled objective clips around"),
        "segment": ("segment log-prob", "natural logarithm of the probability one weight version after the one that sampled the token"),
        "reason": (
            "clipped or left out",
            "what the loss of the update made of the token; clipped and left-out tokens have no gradient from the policy term (with CISPO, "
            "one of bounded weight)",
        ),
        "update_ratio": (
            "ratio in the update",
            "the ratio that the loss read: the trained policy's probability to that of the policy it is anchored to; clipped tokens are "
            "beyond the clip range",
        ),
        "updated": ("log-prob in the update", "natural logarithm of the probability that the trainer gave the token in its last update"),
        "mask": ("loss mask", "1: trained on; 0: given by the prompt, the environment or a tool, and not trained on"),
        "version": ("weight version", "number of weight syncs before the token was sampled; -1: not sampled"),
    }
)
"""Label and explanation of each number of a token, by the key that the page uses."""

_PREVIEW = 90  # characters of a response in the list
_CHUNK_TOKENS = 50_000  # tokens of a chunk, about: half a second of unpacking in a browser
_SAME = 1e-6  # difference below which rewards are equal


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Whole groups of one step of one run that the page unpacks together."""

    run: int  # index of the run in the report
    step: int
    rows: tuple[tuple[Any, ...], ...]  # for the list: group, sample, reward, number of trained tokens, status, preview of the response,
    # number of tokens that the update clipped or left out (None = not known), name of the group with its subgroup
    groups: Mapping[str, Sequence[str]]  # sentences about the gradient of each group, or subgroup, by its name
    packed: str  # records of describe_record as pack_text packs them
    columns: frozenset[str]  # keys of COLUMNS that their tokens have


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
        mask_truncated: whether the run leaves truncated samples out of training.

    Raises: DataError naming file and line of a damaged file.
    """
    files = find_step_files(path)
    if not files:
        return Chosen(
            chunks=(),
            num_shown=0,
            num_total=0,
            notes=(
                f"{path.name} wrote no rollouts. In RL --trajectories.groups 4 records four groups of each step, --trajectories.every 1 "
                "all; SFT, training on preferences and reward models generate none",
            ),
        )
    decode = find_decoder(next(iter(files.values())), None)
    share = max_tokens // len(files) if max_tokens else 0
    chunks: list[Chunk] = []
    total = 0
    for step, file in files.items():
        sizes = measure_file(file)
        total += sum(count for count, _ in sizes.values())
        groups = take_groups({group: tokens for group, (_, tokens) in sizes.items()}, share)
        if groups:
            whole = gather_groups(iterate_file(file, groups), {group: sizes[group][0] for group in groups})
            for part in split_evenly(whole):
                chunks.append(create_chunk(part, run, step, decode, mask_truncated=mask_truncated))
    shown = sum(len(chunk.rows) for chunk in chunks)
    notes: list[str] = []
    if shown < total:
        notes.append(
            f"{shown:,} of the {total:,} recorded rollouts of {path.name} are in this file, in whole groups; --max-tokens 0 takes all"
        )
    if decode is None:
        notes.append(f"{path.name} has no tokenizer that could be read: tokens are shown by their ids")
    return Chosen(chunks=tuple(chunks), num_shown=shown, num_total=total, notes=tuple(notes))


def take_groups(sizes: Mapping[int, int], max_tokens: int) -> frozenset[int]:
    """Take groups of one step, evenly spaced, with at most about max_tokens together; at least one group.

    Args:
        sizes: number of tokens of each group, by its number.
        max_tokens: 0 = all groups.
    """
    groups, total = sorted(sizes), sum(sizes.values())
    if not groups or not max_tokens or total <= max_tokens:
        return frozenset(groups)
    count = max(1, min(len(groups), max_tokens * len(groups) // total))
    return frozenset(groups[k * len(groups) // count] for k in range(count))


def gather_groups(records: Iterable[TrajectoryRecord], counts: Mapping[int, int]) -> Iterator[list[TrajectoryRecord]]:
    """Yield the records of each group, samples in order, as soon as there are as many as `counts` has for it; others are not kept."""
    waiting: dict[int, list[TrajectoryRecord]] = {}
    for record in records:
        group = waiting.setdefault(record.sample.group_index, [])
        group.append(record)
        if len(group) == counts[record.sample.group_index]:
            yield sorted(waiting.pop(record.sample.group_index), key=lambda record: record.sample.index)
    for group in waiting.values():
        yield sorted(group, key=lambda record: record.sample.index)


def split_evenly(groups: Iterable[list[TrajectoryRecord]]) -> Iterator[list[list[TrajectoryRecord]]]:
    """Yield groups in parts that end with the group which makes _CHUNK_TOKENS full, since the page unpacks a part as a whole."""
    part: list[list[TrajectoryRecord]] = []
    size = 0
    for group in groups:
        part.append(group)
        size += sum(len(record.sample.tokens) for record in group)
        if size >= _CHUNK_TOKENS:
            yield part
            part, size = [], 0
    if part:
        yield part


def create_chunk(
    groups: Iterable[Sequence[TrajectoryRecord]], run: int, step: int, decode: Decode | None, *, mask_truncated: bool = False
) -> Chunk:
    """Return a chunk of whole groups of a step. decode: None = tokens are shown as ids."""
    rows: list[tuple[tuple[Any, ...], str]] = []  # row of the list, and text of the packed data
    in_groups = [members for group in groups for members in split_groups(group)]
    explained: dict[str, Sequence[str]] = {}
    columns: set[str] = set()
    for group in sorted(in_groups, key=lambda members: find_key(members[0].sample)):
        explained[name_group(group[0].sample)] = explain_gradient(group, mask_truncated=mask_truncated)
        for record in group:
            described = describe_record(record, decode)
            columns |= find_columns(described)
            rows.append((_list_row(record), dump_json(described)))
    packed = pack_text(f"[{','.join(text for _, text in rows)}]")
    return Chunk(run=run, step=step, rows=tuple(row for row, _ in rows), groups=explained, packed=packed, columns=frozenset(columns))


def _list_row(record: TrajectoryRecord) -> tuple[Any, ...]:
    return (
        record.sample.group_index,
        record.sample.index,
        find_reward(record),
        sum(mask > 0 for mask in record.sample.loss_mask),
        record.sample.status.value,
        " ".join(find_text(record).split())[:_PREVIEW],
        count_clipped(record),
        name_group(record.sample),
    )


def dump_json(value: Any) -> str:
    """Return JSON without spaces; a number that is not finite is an error."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def pack_text(text: str) -> str:
    """Pack text for the page: gzip, in base64, so that nothing in it can end its block or be run."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


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
        "group": name_group(sample),
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
            columns[key] = values if key == "reason" else [round_number(value) for value in values]
    return columns


def find_columns(record: Mapping[str, Any]) -> set[str]:
    """Return the keys of the numbers that tokens of a described record have."""
    of_steps = (step["tokens"] or {} for step in record.get("steps", ()))
    return {key for tokens in (record["tokens"], *of_steps) for key in tokens if key in COLUMNS}


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

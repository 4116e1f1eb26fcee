"""Records of trajectory files as lines of text: prompt, response and result, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np
from rich.text import Text

from integration.view.gradient import find_key, name_group
from integration.view.source import find_reward
from integration.view.tokens import (
    Decode,
    Palette,
    Token,
    format_number,
    format_signed,
    lay_out,
    make_line,
    read_step_tokens,
    read_tokens,
    tabulate,
)
from rollouts.data.records import TrajectoryRecord, derive_steps
from rollouts.steps import StepData, Steps
from rollouts.types import Message, Sample

_LABEL = 12  # width of a label in columns
_NAMED_INFO = frozenset({"state", "gigpo"})  # keys of step_info with a display of their own


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A record with its tokens as text."""

    record: TrajectoryRecord
    tokens: tuple[Token, ...]
    steps: Steps
    of_steps: tuple[tuple[Token, ...], ...]  # the tokens of each step's action
    by_ids: bool  # tokens are shown as ids, as no tokenizer is known


def prepare(record: TrajectoryRecord, decode: Decode | None) -> Shown:
    """Return a record with its tokens as text. decode: None = no tokenizer is known."""
    tokens, steps, turns = read_tokens(record, decode), derive_steps(record), record.sample.turns or ()
    if len(turns) == len(steps):
        of_steps = tuple(tokens[turn.start : turn.end] for turn in turns)
    else:
        of_steps = tuple(read_step_tokens(step, decode) for step in steps)
    return Shown(record=record, tokens=tokens, steps=steps, of_steps=of_steps, by_ids=decode is None)


def summarize(records: Iterable[TrajectoryRecord]) -> str:
    """Summarize records on one line: 8 samples of 2 groups, reward mean 0.5, std 0.5, from 0 to 1. Keeps none of them."""
    facts = [(record.sample.group_index, find_reward(record)) for record in records]
    rewards = [reward for _, reward in facts if reward is not None]
    return f"{_count(len(facts), 'sample')} of {_count(len({group for group, _ in facts}), 'group')}{describe_rewards(rewards)}"


def describe_rewards(rewards: Sequence[float]) -> str:
    """Describe mean, population standard deviation and range of rewards; "" for none."""
    if not rewards:
        return ""
    if min(rewards) == max(rewards):
        return f", reward {format_number(rewards[0])}{' in all' if len(rewards) > 1 else ''}"
    with np.errstate(invalid="ignore"):  # a file may contain any numbers
        mean, std = format_number(float(np.mean(rewards))), format_number(float(np.std(rewards)))
    return f", reward mean {mean}, std {std}, from {format_number(min(rewards))} to {format_number(max(rewards))}"


def show_group(of_group: Sequence[Shown], reasons: Sequence[str]) -> list[Text]:
    """Return the head of a group: its rewards, and why it has a gradient or none. reasons: see gradient.explain_gradient."""
    head = Text(_describe_group([one.record for one in of_group]), style="bold")
    return [Text(), head, *(Text(f"  {make_line(reason)}") for reason in reasons)]


def show_prompt(one: Shown) -> list[Text]:
    """Return what the samples of a group have in common: the wanted answer and the prompt."""
    sample, lines = one.record.sample, list[Text]()
    if sample.metadata.get("ground_truth") is not None:
        lines += _field("wanted", _to_text(sample.metadata["ground_truth"]))
    messages = () if one.steps and not isinstance(sample.prompt, str) else _read_prompt(sample)
    return lines + [line for message in messages for line in _show_message(message)]


def describe_parts(record: TrajectoryRecord) -> list[str]:
    """Describe the parts of a sample's reward, each with its reason, and a failure of the reward function."""
    details = record.sample.reward_details
    if details is None:
        return []
    told = [
        f"{name} {format_number(part.score) if part.is_score_valid else 'invalid'}{f': {part.reason}' if part.reason else ''}"
        for name, part in details.metrics.items()
    ]
    told += [f"reason: {details.reason}"] if details.reason else []
    told += [f"the reward function failed: {details.error}"] if details.error is not None else []
    return told + ([f"after {_count(details.num_retries, 'failed call')}"] if details.num_retries else [])


def split_shown(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Return the records of each group, of each of its subgroups by itself, by number and name."""
    return [list(members) for _, members in groupby(sorted(shown, key=_group_of), key=_group_of)]


def show_records(
    shown: Sequence[Shown], palette: Palette, reasons: Mapping[tuple[int, str], Sequence[str]], *, with_tokens: bool
) -> list[Text]:
    """Return the lines of all records.

    Args:
        reasons: of the gradient of each group, by gradient.find_key.
        with_tokens: add a table of each sample's tokens.
    """
    lines: list[Text] = []
    for of_group in split_shown(shown):
        lines += show_group(of_group, reasons.get(_group_of(of_group[0]), ()))
        for one in of_group:
            lines += [Text(), *_show_record(one, palette)]
            if with_tokens and one.tokens:
                lines += [Text(), *tabulate(one.tokens, palette)]
    return lines


def _group_of(one: Shown) -> tuple[int, str]:
    return find_key(one.record.sample)


def _describe_group(records: Sequence[TrajectoryRecord]) -> str:
    """Describe the statistics of the whole group if the file has them, else of its shown samples."""
    name = make_line(name_group(records[0].sample))
    known = next((r.estimate.group_rewards for r in records if r.estimate is not None and r.estimate.group_rewards), None)
    if known is not None:
        part = "" if len(known) == len(records) else f"; {len(records)} shown"
        return f"{name}: {_count(len(known), 'sample')}{describe_rewards(known)}{part}"
    rewards = [reward for record in records if (reward := find_reward(record)) is not None]
    return f"{name}: {_count(len(records), 'sample')} shown{describe_rewards(rewards)}"


def _show_record(one: Shown, palette: Palette) -> list[Text]:
    sample = one.record.sample
    lines = [Text(f"  sample {sample.index}: ", style="bold").append(make_line(", ".join(_describe_sample(one))), style="not bold")]
    if sample.metadata.get("ground_truth") is not None:
        lines += _field("wanted", _to_text(sample.metadata["ground_truth"]))
    parts = describe_parts(one.record)
    lines += _field("parts", "\n".join(parts)) if parts else []
    if one.steps:
        return lines + _show_steps(one, palette)
    messages = _read_prompt(sample)
    for message in messages:
        lines += _show_message(message)
    return lines + _show_written("response", sample.response, find_response_tokens(one.tokens), palette, by_ids=one.by_ids)


def _describe_sample(one: Shown) -> list[str]:
    record, sample = one.record, one.record.sample
    parts = [sample.status.value] if sample.tokens or not one.steps else []
    reward = find_reward(record)
    parts.append("no reward" if reward is None else f"reward {format_number(reward)}")
    if record.estimate is not None and reward is not None and abs(record.estimate.reward - reward) > 1e-6 * max(1.0, abs(reward)):
        parts.append(f"shaped to {format_number(record.estimate.reward)}")
    if not sample.trainable:
        parts.append("a baseline, not trained on")
    else:
        advantages = [token.advantage for token in one.tokens if token.advantage is not None and token.mask > 0]
        parts += [f"advantage {describe_range(advantages)}"] if advantages else []
    if one.steps:
        parts.append(_count(len(one.steps), "step"))
    if sample.episode is not None:
        parts.append(f"ended by {sample.episode.stop_reason}")
        parts += [f"failure: {sample.episode.failure}"] if sample.episode.failure is not None else []
    if one.tokens:
        parts.append(f"{_count(len(one.tokens), 'token')}, {sum(token.mask > 0 for token in one.tokens)} trained")
    versions = sorted({token.version for token in one.tokens if token.version is not None and token.version >= 0})
    if versions:
        parts.append(f"weights {versions[0]}" if len(versions) == 1 else f"weights {versions[0]} to {versions[-1]}")
    return parts


def describe_range(values: Sequence[float]) -> str:
    """Describe numbers by their range, or by the number that all equal."""
    low, high = min(values), max(values)
    return format_signed(low) if high - low <= 1e-6 * max(1.0, abs(high)) else f"{format_signed(low)} to {format_signed(high)}"


def _read_prompt(sample: Sample) -> tuple[Message, ...]:
    """Return the messages of the prompt."""
    if isinstance(sample.prompt, str):
        return (Message(role="prompt", content=sample.prompt),)
    return sample.prompt if sample.messages is None else sample.messages[:-1]


def find_response_tokens(tokens: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens from the first one that was sampled or is trained on."""
    first = next((k for k, token in enumerate(tokens) if token.mask > 0 or (token.version is not None and token.version >= 0)), len(tokens))
    return tokens[first:]


# -- steps


def _show_steps(one: Shown, palette: Palette) -> list[Text]:
    lines: list[Text] = []
    for step, tokens in zip(one.steps, one.of_steps, strict=True):
        lines.append(Text(f"    step {step.system_step_index}", style="bold").append(make_line(_describe_step(step)), style="not bold"))
        lines += _show_observation(step.observation_data)
        text = step.raw_policy_output
        lines += _show_written("action", text, tokens, palette, by_ids=one.by_ids)
        if step.action_taken is not None and step.action_taken != text:
            lines += _field("taken as", _to_text(step.action_taken))
        info = {name: value for name, value in step.step_info.items() if name not in _NAMED_INFO}
        lines += _field("info", _to_text(info)) if info else []
    history, last = one.steps[-1].resulting_messages_history, one.steps[-1].action_message
    if last is None:
        last = max((k for k, message in enumerate(history) if message.role == "assistant"), default=len(history))
    for message in history[last + 1 :]:
        lines += _show_message(message)
    return lines


def _describe_step(step: StepData) -> str:
    made_of = step.step_info.get("gigpo")
    info = step.step_info | (cast("dict[str, Any]", made_of) if isinstance(made_of, dict) else {})
    numbers = {"reward": step.base_reward, "return": step.return_to_go, "value": step.policy_value_estimate}
    parts = [f"{name} {format_number(value)}" for name, value in numbers.items() if value is not None]
    signed = {"advantage": step.advantage, "of the episode": info.get("episode_advantage"), "of the step": info.get("step_advantage")}
    parts += [f"{name} {format_signed(value)}" for name, value in signed.items() if isinstance(value, int | float)]
    visits = f", visited {_count(info['anchor_size'], 'time')}" if isinstance(info.get("anchor_size"), int) else ""
    parts += [f"state {_shorten(str(info['state']))}{visits}"] if info.get("state") is not None else []
    parts += ["the last"] if step.is_done else []
    return f": {', '.join(parts)}" if parts else ""


def _shorten(key: str, most: int = 16) -> str:
    """Shorten a key, often a hash, to a distinctive prefix."""
    return key if len(key) <= most else f"{key[: most // 2]}..."


def _show_observation(observation: Any) -> list[Text]:
    if observation is None:
        return []
    if isinstance(observation, list) and all(
        isinstance(m, Mapping) and "role" in m and "content" in m for m in cast("list[Any]", observation)
    ):
        messages = cast("list[Mapping[str, Any]]", observation)
        return [line for m in messages for line in _field(str(m["role"]), _to_text(m["content"]))]
    return _field("observation", _to_text(observation))


# -- fields


def _show_message(message: Message) -> list[Text]:
    calls = [f"calls {_to_text(call)}" for call in message.tool_calls or ()]
    return _field(message.role, "\n".join([*([_to_text(message.content)] if message.content else []), *calls]))


def _show_written(label: str, text: str, tokens: Sequence[Token], palette: Palette, *, by_ids: bool) -> list[Text]:
    """Return the response as tokens or, without a tokenizer, as the recorded text and token ids."""
    if not tokens:
        return _field(label, text)
    parts = [(token.piece, palette.style(token)) for token in tokens]
    as_tokens = _put_label("tokens" if by_ids and text else label, lay_out(parts, " " * (4 + _LABEL)))
    return _field(label, text) + as_tokens if by_ids and text else as_tokens


def _field(label: str, text: str) -> list[Text]:
    return _put_label(label, lay_out([(text, "")], " " * (4 + _LABEL)))


def _put_label(label: str, lines: list[Text]) -> list[Text]:
    head = Text("    ").append(f"{make_line(str(label)):<{_LABEL - 1}}"[: _LABEL - 1], style="cyan").append(" ")
    return [head + lines[0][4 + _LABEL :], *lines[1:]]


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

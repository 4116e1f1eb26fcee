"""Answers of a group side by side: one column each, as many as the width allows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from integration.view.text import Shown, describe_parts, describe_range, find_response_tokens
from integration.view.tokens import Palette, Token, format_number, make_line
from rollouts.data.records import TrajectoryRecord
from rollouts.errors import make_safe

_NARROWEST = 24  # cells of a column; fewer columns stand side by side where they would be narrower
_GAP = "  "


def show_side_by_side(members: Sequence[Shown], palette: Palette, *, width: int) -> list[Text]:
    """Return the lines of the answers of one group, each with its reward and advantage on top.

    Args:
        width: cells of a line.
    """
    count = min(len(members), max(1, (width + len(_GAP)) // (_NARROWEST + len(_GAP))))
    rows = -(-len(members) // count)
    count = -(-len(members) // rows)  # equally many in each row
    cells = max(1, (width - len(_GAP) * (count - 1)) // count)
    console = Console(file=io.StringIO(), width=cells)
    lines: list[Text] = []
    for start in range(0, len(members), count):
        columns = [_fold(one, palette, console) for one in members[start : start + count]]
        lines.append(Text())
        for parts in zip_longest(*columns, fillvalue=Text()):
            line = Text()
            for k, part in enumerate(parts):
                padded = part.copy()
                padded.align("left", cells)
                line.append(_GAP if k else "").append(padded)
            line.rstrip()
            lines.append(line)
    return lines


def _fold(one: Shown, palette: Palette, console: Console) -> list[Text]:
    """Return the lines of a column."""
    folded: list[Text] = []
    for text in [*_head(one), *_body(one, palette)]:
        text.expand_tabs(4)
        folded += [*text.wrap(console, console.width, overflow="fold")] or [Text()]
    return folded


def _head(one: Shown) -> list[Text]:
    sample = one.record.sample
    advantages = [token.advantage for token in _trained(one) if token.advantage is not None]
    told = [_reward_of(one.record), *([f"advantage {describe_range(advantages)}"] if advantages else [])]
    more = [sample.status.value, *(["not trained on"] if not sample.trainable else []), f"{len(_trained(one))} tokens trained"]
    lines = [Text(f"sample {sample.index}", style="bold"), *(Text(part, style="bold") for part in told), Text(", ".join(more), style="dim")]
    return [*lines, *(Text(make_line(part), style="dim") for part in describe_parts(one.record))]


def _reward_of(record: TrajectoryRecord) -> str:
    reward, trained = record.sample.reward, None if record.estimate is None else record.estimate.reward
    if reward is None:
        return "no reward"
    shaped = trained is not None and abs(trained - reward) > 1e-6 * max(1.0, abs(reward))
    return f"reward {format_number(reward)}{f', shaped to {format_number(trained)}' if shaped else ''}"


def _trained(one: Shown) -> list[Token]:
    tokens = one.tokens or tuple(token for step in one.of_steps for token in step)
    return [token for token in tokens if token.mask > 0]


def _body(one: Shown, palette: Palette) -> list[Text]:
    if not one.steps:
        return [Text(), *_write(find_response_tokens(one.tokens), one.record.sample.response, palette, by_ids=one.by_ids)]
    lines: list[Text] = []
    for step, tokens in zip(one.steps, one.of_steps, strict=True):
        numbers = {"reward": step.base_reward, "return": step.return_to_go, "advantage": step.advantage}
        told = [f"step {step.system_step_index}", *(f"{name} {format_number(n)}" for name, n in numbers.items() if n is not None)]
        lines += [Text(), Text(", ".join(told), style="bold"), *_write(tokens, step.raw_policy_output, palette, by_ids=one.by_ids)]
    return lines


def _write(tokens: Sequence[Token], text: str, palette: Palette, *, by_ids: bool) -> list[Text]:
    """Return tokens in their colours or, without a tokenizer or tokens, the recorded text."""
    if not tokens or (by_ids and text):
        return [*Text(make_safe(text)).split("\n", allow_blank=True)]
    written = Text()
    for token in tokens:
        written.append(make_safe(token.piece), style=palette.style(token))
    return [*written.split("\n", allow_blank=True)]

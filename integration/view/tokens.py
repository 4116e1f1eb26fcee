"""Display of tokens: their pieces of text and their colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

from rich.style import Style
from rich.text import Text

from integration.view.arguments import ColorBy
from rollouts.data.records import TrajectoryRecord
from rollouts.errors import make_safe
from rollouts.steps import StepData
from rollouts.types import Sample

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens included."""

Rgb: TypeAlias = "tuple[int, int, int]"

_PALE: Rgb = (235, 235, 235)
_BLUE: Rgb = (60, 130, 235)
_RED: Rgb = (225, 85, 75)
_ORANGE: Rgb = (240, 150, 40)
_GREEN: Rgb = (110, 190, 120)
_LEAST_LOG_PROB = -4.0  # nats at and below which a token has the full colour
_MOST_RATIO = 0.2  # nats between trainer and rollout at and above which a token has the full colour: the usual clip range
_OTHER = Style(dim=True)  # style of tokens that are not trained on


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a record with its recorded data."""

    position: int  # position in the sample, or in the action of a single step
    id: int
    piece: str  # text; "" for a token that ends within a character, which the next piece contains
    mask: float  # 0 = not trained on
    version: int | None = None  # weight version that sampled it
    log_prob: float | None = None
    choices: int | None = None  # ids that top-p, top-k and min-p left to draw it from; 0 = the whole vocabulary
    advantage: float | None = None
    return_: float | None = None
    value: float | None = None
    trainer: float | None = None  # log-prob of the trainer's policy before the step
    reference: float | None = None  # log-prob of the reference policy
    proximal: float | None = None  # log-prob of the proximal policy
    segment: float | None = None  # log-prob under the weights one version after those that sampled it
    ratio: float | None = None  # the trainer's probability before the step, divided by the engine's
    weight: float | None = None  # weight in the loss
    importance: float | None = None  # factor of its policy term
    updated: float | None = None  # log-prob of the trainer's policy in the pass of its last update
    update_ratio: float | None = None  # ratio of that update, as the loss read it
    reason: str | None = None  # verdict of the loss of that update, see REASONS


UNTOUCHED = ("", "kept", "no_advantage")
"""Reasons of tokens that the loss neither clips nor leaves out."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "kept": "neither clipped nor left out",
        "no_advantage": "its advantage is 0",
        "clip_low": "clipped: it has already become too much rarer (CISPO: its weight is bounded)",
        "clip_high": "clipped: it has already become too much more frequent (CISPO: its weight is bounded)",
        "dual_clip": "clipped by the dual clip: an advantage below 0 and too large a ratio",
        "outside_low": "its probability has fallen out of the trust region",
        "outside_high": "its probability has risen out of the trust region",
        "dropped": "left out: its importance weight is 0, too far from the policy that sampled it",
        "masked": "left out by a mask of the algorithm",
        "no_weight": "left out: its loss weight is 0",
    }
)
"""Meaning of each reason, see losses.mark_tokens; a loss of one's own may have others."""


SHORT_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "clip_low": "too rare already",
        "clip_high": "too frequent already",
        "dual_clip": "an advantage below 0 and too large a ratio",
        "outside_low": "fallen out of the trust region",
        "outside_high": "risen out of the trust region",
        "dropped": "too far from the policy that sampled it",
        "masked": "masked by the algorithm",
        "no_weight": "a loss weight of 0",
    }
)
"""Meaning of the reasons of tokens that are clipped or left out, in a few words for a sentence that counts them."""


def explain_reason(reason: str) -> str:
    """Return the meaning of a token's reasons, which have ", " between them."""
    return "; ".join(REASONS.get(part, "a mark of the loss") for part in reason.split(", "))


COLOR_FIELDS: Mapping[ColorBy, str] = MappingProxyType(
    {
        "advantage": "advantage",
        "log-prob": "log_prob",
        "trainer": "trainer",
        "reference": "reference",
        "ratio": "ratio",
        "weight": "weight",
        "update-ratio": "update_ratio",
        "reason": "reason",
    }
)
"""Field of Token behind each colour that shows a number."""


def split_text(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to those before it, also for characters that span tokens; joined they are the whole text."""
    pieces: list[str] = []
    begin = known = 0  # tokens[begin:known] are enough context for correct spaces
    for end in range(1, len(tokens) + 1):
        before, after = decode(tokens[begin:known]), decode(tokens[begin:end])
        if after.endswith("\ufffd") and end < len(tokens):  # probably an incomplete character
            pieces.append("")
            continue
        held = known < end - 1
        pieces.append(after[len(before) :] or ("" if held else f"<{tokens[end - 1]}>"))  # ids without text
        begin, known = known, end
    return pieces


def name_ids(tokens: Sequence[int]) -> list[str]:
    """Return the ids as pieces, for tokens without a tokenizer."""
    return [f"{token} " for token in tokens]


def read_tokens(record: TrajectoryRecord, decode: Decode | None) -> tuple[Token, ...]:
    """Return the tokens of a record's sample. decode: None = no tokenizer is known."""
    sample, known = record.sample, record.estimate
    columns: dict[str, Sequence[Any] | None] = {
        "version": sample.weight_versions,
        "log_prob": sample.rollout_log_probs,
        "choices": None if sample.kept_tokens is None else [None if n < 0 else n for n in sample.kept_tokens.counts],
        "advantage": None if known is None else known.advantages,
        "return_": None if known is None else known.returns,
    }
    if known is not None:
        columns |= {"value": known.values, "trainer": known.old_log_probs, "reference": known.ref_log_probs}
        columns |= {"proximal": known.prox_log_probs, "segment": known.segment_log_probs}
        columns |= {"ratio": _find_ratios(record), "weight": known.loss_weights, "importance": known.importance_weights}
    if record.update is not None:
        update = record.update
        columns |= {"updated": update.log_probs, "update_ratio": _of_trained(update.ratios, sample)}
        columns |= {"reason": _of_trained(update.reasons, sample)}
        columns |= {} if update.loss_weights is None else {"weight": update.loss_weights}
    return _make_tokens(sample.tokens, sample.loss_mask, decode, columns)


def _of_trained(column: Sequence[Any] | None, sample: Sample) -> tuple[Any, ...] | None:
    """Return a column with None where nothing is trained."""
    return None if column is None else tuple(value if mask > 0 else None for value, mask in zip(column, sample.loss_mask, strict=True))


def count_clipped(record: TrajectoryRecord) -> int | None:
    """Return how many tokens of a record the update clipped or left out, other than for an advantage of 0; None = not known."""
    reasons = None if record.update is None else record.update.reasons
    return None if reasons is None else sum(any(part not in UNTOUCHED for part in reason.split(", ")) for reason in reasons)


def _find_ratios(record: TrajectoryRecord) -> tuple[float | None, ...] | None:
    """Return exp(trainer's log-prob - engine's) of each trained token, None of the others; None where one of both is unknown."""
    sample, trainer = record.sample, None if record.estimate is None else record.estimate.old_log_probs
    if trainer is None or sample.rollout_log_probs is None:
        return None
    pairs = zip(trainer, sample.rollout_log_probs, sample.loss_mask, strict=True)
    return tuple(math.exp(min(own - engine, 700.0)) if mask > 0 else None for own, engine, mask in pairs)


def read_step_tokens(step: StepData, decode: Decode | None) -> tuple[Token, ...]:
    """Return the tokens of a single step's action, with all of them assumed to be trained on."""
    tokens = step.policy_tokens or ()
    advantages = None if step.advantage is None else (step.advantage,) * len(tokens)
    return _make_tokens(tokens, (1.0,) * len(tokens), decode, {"log_prob": step.policy_logprobs, "advantage": advantages})


def _make_tokens(
    tokens: Sequence[int], masks: Sequence[float], decode: Decode | None, columns: dict[str, Sequence[Any] | None]
) -> tuple[Token, ...]:
    pieces = name_ids(tokens) if decode is None else split_text(decode, tokens)
    return tuple(
        Token(
            position=k,
            id=tokens[k],
            piece=pieces[k],
            mask=masks[k],
            **{name: column[k] for name, column in columns.items() if column is not None},
        )
        for k in range(len(tokens))
    )


# -- text


def make_line(text: str) -> str:
    """Return the text on one line."""
    return make_safe(text).replace("\n", "\\n")


@dataclass(frozen=True)
class Palette:
    """The colouring of tokens."""

    by: ColorBy
    most: float = 1.0  # advantage with the full colour

    def style(self, token: Token) -> Style:
        """Return the style of a token; dim = not trained on."""
        if token.mask == 0 or self.by == "none":
            return _OTHER if token.mask == 0 and self.by != "none" else Style()
        if self.by == "mask":
            return _fill(_PALE, _GREEN, min(token.mask, 1.0))
        if self.by == "reason":
            reason = token.reason
            return Style() if reason is None else _fill(_PALE, _color_reason(reason), 1.0)
        value: float | None = getattr(token, COLOR_FIELDS[self.by])
        if value is None:
            return Style()
        if self.by in ("log-prob", "trainer", "reference"):
            return _fill(_PALE, _ORANGE, min(value / _LEAST_LOG_PROB, 1.0))
        if self.by == "weight":
            return _fill(_PALE, _GREEN, value / self.most) if value else _fill(_PALE, _RED, 1.0)
        if self.by in ("ratio", "update-ratio"):
            value = math.log(value) / _MOST_RATIO * self.most if value > 0 else -math.inf
        return _fill(_PALE, _BLUE if value > 0 else _RED, min(abs(value) / self.most, 1.0))

    def legend(self) -> Text:
        """Return a line that explains the colours."""
        steps = (-1.0, -0.5, 0.0, 0.5, 1.0)
        parts: list[tuple[str, dict[str, Any]]]
        if self.by == "advantage":
            parts = [(f" {format_signed(fraction * self.most)} ", {"advantage": fraction * self.most}) for fraction in steps]
        elif self.by in ("log-prob", "trainer", "reference"):
            parts = [(f" {value:g} ", {COLOR_FIELDS[self.by]: value}) for value in (0.0, -1.0, -2.0, _LEAST_LOG_PROB)]
        elif self.by in ("ratio", "update-ratio"):
            parts = [(f" {value:g} ", {COLOR_FIELDS[self.by]: value}) for value in (0.8, 0.9, 1.0, 1.1, 1.2)]
        elif self.by == "reason":
            parts = [(f" {reason} ", {"reason": reason}) for reason in ("kept", "no_advantage", "clip_low", "clip_high", "masked")]
        elif self.by == "weight":
            parts = [(f" {format_number(value)} ", {"weight": value}) for value in (0.0, self.most / 2, self.most)]
        else:
            parts = [(" trained ", {})]
        text = Text(f"{self.by}: ", style="bold")
        for label, known in parts:
            text.append(label, style=self.style(Token(position=0, id=0, piece="", mask=1.0, **known)))
        text.append("  ")
        return text.append("not trained on", style=_OTHER)


def _color_reason(reason: str) -> Rgb:
    """Return the colour of a token's reasons: red where the loss left it out, orange and blue where it clipped it."""
    if reason in UNTOUCHED:
        return _GREEN if reason == "kept" else _PALE
    if "low" in reason or "high" in reason or "dual_clip" in reason:
        return _ORANGE if "low" in reason else _BLUE
    return _RED


def _fill(pale: Rgb, full: Rgb, fraction: float) -> Style:
    fraction = fraction if math.isfinite(fraction) else 1.0
    red, green, blue = (round(a + (b - a) * max(0.0, fraction)) for a, b in zip(pale, full, strict=True))
    return Style.parse(f"#101010 on #{red:02x}{green:02x}{blue:02x}")


def choose_palette(by: ColorBy, tokens: Sequence[Token]) -> Palette:
    """Choose the colours of the shown tokens. by="auto": advantage if recorded, else log-prob, else mask."""
    trained = [token for token in tokens if token.mask > 0]
    advantages = [abs(token.advantage) for token in trained if token.advantage is not None and math.isfinite(token.advantage)]
    if by == "auto":
        by = "advantage" if advantages else "log-prob" if any(token.log_prob is not None for token in tokens) else "mask"
    weights = [abs(token.weight) for token in trained if token.weight is not None and math.isfinite(token.weight)]
    return Palette(by, max(weights if by == "weight" else advantages, default=0.0) or 1.0)


def lay_out(parts: Sequence[tuple[str, Style | str]], indent: str) -> list[Text]:
    """Return the lines of styled parts, split at newlines, each with the indent."""
    lines = [Text(indent)]
    for part, style in parts:
        first, *others = make_safe(part).split("\n")
        lines[-1].append(first, style=style)
        for other in others:
            lines.append(Text(indent).append(other, style=style))
    return lines


def tabulate(tokens: Sequence[Token], palette: Palette) -> list[Text]:
    """Return a table with one line per token: position, id, text, and the columns of the file."""
    names = [f.name for f in fields(Token) if any(getattr(token, f.name) is not None for token in tokens)]
    shown = {"return_": "return", "log_prob": "log-prob", "update_ratio": "update-ratio"}
    rows = [[shown.get(name, name) for name in names], *([_cell(name, getattr(token, name)) for name in names] for token in tokens)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    lines: list[Text] = []
    for number, row in enumerate(rows):
        line = Text("    ")
        for name, cell, width in zip(names, row, widths, strict=True):
            text = cell.ljust(width) if name in ("piece", "reason") else cell.rjust(width)
            style = "bold" if number == 0 else palette.style(tokens[number - 1]) if name == "piece" else ""
            line.append(text, style=style).append("  ")
        line.rstrip()
        lines.append(line)
    return lines


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str):
        return make_line(repr(value) if name == "piece" else value)
    return format_number(value)


def format_number(value: float | None) -> str:
    """Format a number with at most four significant digits; "" for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) or not math.isfinite(value) else f"{value:.4g}"


def format_signed(value: float) -> str:
    """Format a number with its sign and at most three significant digits."""
    return f"{value:+.3g}" if value else "0"

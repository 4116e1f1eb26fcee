"""The options of the viewer. Imports no torch, which the help does not need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

ColorBy = Literal["auto", "advantage", "log-prob", "trainer", "reference", "ratio", "weight", "update-ratio", "reason", "mask", "none"]
"""Quantity that the colour of a token shows."""


def _one(metavar: str | None = None) -> Any:
    """Return the style of an option that takes one line of the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show the rollouts of a run: prompts, responses, and the training data of each token.

    Colours of tokens (--color); text for a pipe has none:
    - auto: advantage where it is recorded, else log-prob, else mask; none: no colours
    - log-prob, trainer, reference: log-probs when sampled, by the trainer, by the reference
    - ratio, update-ratio: of trainer to sampling, before the update, and in the update
    - weight: in the loss; reason: why the update clipped or left out; mask: trained or not
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FILE", help_behavior_hint="")]
    """directory of a run, or a file of rollouts"""
    step: Annotated[int | None, _one("N")] = None
    """show this training step of the run; default: the newest"""
    group: Annotated[int | None, _one("N")] = None
    """show only this group, the samples of one prompt"""
    sample: Annotated[int | None, _one("N")] = None
    """show only the sample of this index"""
    min_reward: Annotated[float | None, _one("X")] = None
    """show only samples with at least this reward"""
    max_reward: Annotated[float | None, _one("X")] = None
    """show only samples with at most this reward"""
    search: Annotated[str | None, _one("TEXT")] = None
    """show only samples with this text; capitals do not matter"""
    limit: Annotated[int, _one("N")] = 10
    """show at most this many samples; 0 = all; default: 10"""
    side_by_side: Annotated[bool, tyro.conf.FlagCreatePairsOff, _one()] = False
    """show the answers of a group in columns beside each other"""
    color: Annotated[ColorBy, _one("NAME")] = "auto"
    """quantity shown as colour, listed above; default: auto"""
    tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff, _one()] = False
    """show a table of each sample's tokens with all numbers"""
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff, _one()] = False
    """list the steps of a run, one line each, and no samples"""
    tokenizer: Annotated[Path | None, _one("DIR")] = None
    """model directory to decode tokens with; default: the run's"""
    svg: Annotated[Path | None, _one("FILE")] = None
    """write a picture to this SVG file instead of text"""

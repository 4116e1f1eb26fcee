"""An experiment as a value: its promise, its bar, the naive variant that must miss the bar, and the function that tries both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, float | int | str]
"""Figures by what they count: {"prompts lost": 0}."""


class Skipped(Exception):
    """The experiment cannot be run on this machine; the message says what it needs."""


@dataclass(frozen=True)
class Amount:
    """How much an experiment does, and with what."""

    is_full: bool
    seed: int
    folder: Path  # empty, for the experiment's files
    share: float = 1.0  # fraction of the full counts, in (0, 1]; short counts are taken as they are

    def count(self, short: int, full: int) -> int:
        """Return how often to do something; at least as often as in a short run."""
        return max(short, round(full * self.share)) if self.is_full else short

    @property
    def draw(self) -> Random:
        """A new generator of random numbers, the same each time."""
        return Random(self.seed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an experiment found."""

    size: str  # what was done, with counts
    measured: Figures
    holds: bool  # whether the figures are within the bar
    control: Figures = field(default_factory=dict[str, Any])  # figures of the naive variant
    control_fails: bool = True  # whether the naive variant misses the bar, as it must: else the experiment shows nothing


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A promise and how it is tried."""

    name: str
    promise: str
    bar: str
    naive: str  # the variant that must miss the bar
    attempt: Callable[[Amount], Outcome]
    measures_time: bool = False  # its bar is one of time or memory, which says nothing on a busy machine: does not decide the exit status

    def describe(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Return the object that is printed, from what its process reports: the fields of an Outcome, a reason to skip it, or an error."""
        told = {"experiment": self.name, "promise": self.promise, "bar": self.bar}
        for name in ("skipped", "error"):
            if name in outcome:
                return told | {"size": None, "measured": None, "control": None, "met": None, name: outcome[name]}
        control = {"variant": self.naive, "measured": outcome["control"], "fails": outcome["control_fails"]}
        met = bool(outcome["holds"] and outcome["control_fails"])
        return told | {"size": outcome["size"], "measured": outcome["measured"], "control": control, "met": met}

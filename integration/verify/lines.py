"""Checks of the files that grow by a line with each step: metrics.jsonl and the ledger. Pure but for the reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from integration.doctor.findings import Finding, judge, skip
from rollouts.checks import parse_json

_MOST_NAMED = 5  # problems of a kind that are named one by one


@dataclass(frozen=True)
class Lines:
    """A file of metrics as it lies on the disk."""

    path: Path
    content: bytes | None  # None = there is no file
    rows: tuple[Mapping[str, Any], ...] = ()  # whole lines that are JSON objects with a step
    problems: tuple[str, ...] = ()  # one for each other line
    torn_bytes: int = 0  # bytes of a last line without its end

    def steps_of(self, stage: str) -> list[int]:
        """Return the steps of a stage, in the order of the file."""
        return [int(row["step"]) for row in self.rows if row.get("stage", "") == stage]


def read_lines(path: Path) -> Lines:
    """Read a file of metrics; damaged lines become problems."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Lines(path, None)
    rows: list[Mapping[str, Any]] = []
    problems: list[str] = []
    *whole, rest = content.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            problems.append(f"{path}:{number} is not JSON: {error}")
            continue
        if isinstance(row, dict) and isinstance(cast("dict[str, Any]", row).get("step"), int):
            rows.append(cast("dict[str, Any]", row))
        else:
            problems.append(f"{path}:{number} is no object with a step")
    return Lines(path, content, tuple(rows), tuple(problems), len(rest))


_SECTIONS = {"dpo": "preference", "reward_model": "training", "": "training"}
"""Section of the settings of a stage, where its name is another one."""


def check_metrics(lines: Lines, config: Mapping[str, Any]) -> list[Finding]:
    """Check that lines are whole, and that the steps of each stage rise without a gap."""
    if lines.content is None:
        return [judge("metrics", f"{lines.path} is missing", warns=True, advice="nothing, if no step has ended yet; else they are lost")]
    findings: list[Finding] = []
    for stage in sorted({str(row.get("stage", "")) for row in lines.rows}):
        section = config.get(_SECTIONS.get(stage, stage))
        every = int(cast("Mapping[str, Any]", section).get("log_every", 1)) if isinstance(section, Mapping) else 1
        findings.append(_check_steps(stage, lines.steps_of(stage), every))
    if lines.problems:
        findings.append(judge("metrics", _name(lines.problems), fails=True, advice="restore these lines from a copy, or delete them"))
    if lines.torn_bytes:
        told = f"{lines.path} ends in the middle of a line, of which it has {lines.torn_bytes} bytes"
        findings.append(judge("metrics", told, warns=True, advice="a kill cut it off: a resumed run removes and repeats it"))
    return findings or [skip("metrics", f"{lines.path} has no line yet")]


def _check_steps(stage: str, steps: Sequence[int], every: int) -> Finding:
    counts = Counter(steps)
    twice = [str(step) for step, count in counts.items() if count > 1]
    falls = [f"{later} after {earlier}" for earlier, later in pairwise(steps) if later < earlier]
    missing = [str(step) for step in range(every, max(steps), every) if step not in counts]
    problems = [f"step {_name(twice)} stands there twice"] * bool(twice) + [f"step {_name(falls)}"] * bool(falls)
    problems += [f"step {_name(missing)} is missing"] * bool(missing)
    name = f"metrics{' of ' + stage if stage else ''}"
    found = "; ".join(problems) or f"{len(steps)} lines, steps {min(steps)} to {max(steps)}"
    return judge(name, found, fails=bool(problems), advice="restore the file from a copy: the curves of these steps are wrong")


def compare_ledger(path: Path, entries: Sequence[Mapping[str, Any]], lines: Lines) -> Finding:
    """Compare the lines of a ledger with each other and with the metrics of RL."""
    steps = [int(entry["step"]) for entry in entries]
    counts = Counter(prompt for entry in entries for prompt in entry["prompts"])
    twice = [str(prompt) for prompt, count in counts.items() if count > 1]
    problems = [f"prompt {_name(twice)} was trained on twice"] * bool(twice)
    expected = list(range(1, len(steps) + 1))
    if steps != expected:
        wrong = next((found, due) for found, due in zip(steps, expected, strict=True) if found != due)
        problems.append(f"{path} has step {wrong[0]} where step {wrong[1]} is due")
    logged = [step for step in lines.steps_of("rl") if step > 0]
    absent = [str(step) for step in logged if step not in set(steps)]
    problems += [f"step {_name(absent)} has metrics and no line in the ledger"] * bool(absent)
    found = "; ".join(problems) or f"{len(steps)} steps, {len(counts)} prompts, each once"
    return judge("ledger", found, fails=bool(problems), advice="restore it from a copy; which prompts these steps had is not known")


def _name(items: Sequence[str]) -> str:
    """Name the first of several."""
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + more

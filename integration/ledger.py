"""The ledger of an RL stage: which prompts each step was trained on, one JSON line a step.

    {"step": 3, "prompts": [128, 130, 131]}

A prompt's number is its place in the stream of prompts, epochs included: with n training problems, number i is of epoch i // n. Each stands
in the ledger once, however often a run is interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.errors import DataError
from rollouts.types import RolloutBatch


class Ledger:
    """Appends the lines of a run that begins, or goes on, after some finished steps."""

    def __init__(self, path: Path, *, finished_steps: int) -> None:
        """Cut the file back to the lines of those steps: an interrupted run may have written more, and not all of it whole.

        Raises: DataError for a damaged line that is not behind those of the finished steps.
        """
        self._path = path
        kept = _read_finished(path, finished_steps) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp_{path.name}")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(temporary, path)

    def add(self, step: int, rollouts: RolloutBatch) -> None:
        """Note what a step is trained on."""
        prompts = sorted({sample.group_index for sample in rollouts.samples})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompts": prompts}) + "\n")


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger; a last one that a kill cut off is left out. Raises DataError naming file and line."""
    return list(_iterate(path))


def _read_finished(path: Path, finished_steps: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    try:
        for entry in _iterate(path):
            if entry["step"] > finished_steps:
                break
            kept.append(entry)
    except DataError:  # after a power loss a file may end in bytes that nobody wrote
        if [entry["step"] for entry in kept] != list(range(1, finished_steps + 1)):
            raise
    return kept


def _iterate(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            yield {"step": int(entry["step"]), "prompts": [int(prompt) for prompt in entry["prompts"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is no line of a ledger: {error!r}") from error

"""The ledger of an RL stage: the prompts that each step was trained on, one JSON line per step.

    {"step": 3, "prompts": [128, 130, 131]}

A prompt's number is its position in the stream of prompts, epochs included: with n training problems, number i belongs to epoch i // n.
Each number occurs once, however often a run is interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollouts.errors import DataError
from rollouts.output_files import append_text, replace_file
from rollouts.types import RolloutBatch


class Ledger:
    """Writer of the ledger of a new or resumed run."""

    def __init__(self, path: Path, *, finished_steps: int) -> None:
        """Truncate the file to the lines of the finished steps: an interrupted run may have written more, the last one incomplete.

        Raises: DataError for a damaged line among those of the finished steps.
        """
        self._path = path
        kept = _read_finished(path, finished_steps) if path.exists() else []
        replace_file(path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def add(self, step: int, rollouts: RolloutBatch) -> None:
        """Append the prompts of a step. Raises OutputError if the disk refuses the line."""
        prompts = sorted({sample.group_index for sample in rollouts.samples})
        append_text(self._path, json.dumps({"step": step, "prompts": prompts}) + "\n", flush=True)  # checkpoints rely on it


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ledger, without an incomplete last line. Raises DataError with file and line."""
    return list(_iterate(path))


def _read_finished(path: Path, finished_steps: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    try:
        for entry in _iterate(path):
            if entry["step"] > finished_steps:
                break
            kept.append(entry)
    except DataError:  # after a power loss a file may end in arbitrary bytes
        if [entry["step"] for entry in kept] != list(range(1, finished_steps + 1)):
            raise
    return kept


def _iterate(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            yield {"step": int(entry["step"]), "prompts": [int(prompt) for prompt in entry["prompts"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is not a line of a ledger: {error!r}") from error

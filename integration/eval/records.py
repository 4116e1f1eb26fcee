"""The samples of an evaluation as JSON lines, one file for each model and task: written prompt by prompt, and read to go on.

    {"prompt": 3, "sample": 0, "reward": 1.0, "right": true, "answer": "42", "length": 17, "status": "completed", "response": "...", ...}
    {"prompt": 4, "dropped": 8}

A prompt counts as done if all of its samples are there, so an evaluation that was killed in the middle loses the prompts under way alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rollouts.checks import parse_json
from rollouts.errors import DataError
from rollouts.output_files import append_text, replace_file
from rollouts.types import Group, Sample

Record: TypeAlias = Mapping[str, Any]


def describe_group(prompt: int, group: Group | None, n: int, *, threshold: float, answers: list[str | None]) -> list[Record]:
    """Return the records of a prompt.

    Args:
        group: its samples; None = it was dropped.
        n: samples that were asked for.
        threshold: smallest reward that counts as right.
        answers: what each sample votes for.
    """
    if group is None:
        return [{"prompt": prompt, "dropped": n}]
    return [_describe(prompt, k, sample, threshold, answer) for k, (sample, answer) in enumerate(zip(group, answers, strict=True))]


def _describe(prompt: int, number: int, sample: Sample, threshold: float, answer: str | None) -> Record:
    reward = sample.reward
    assert reward is not None, f"sample {number} of prompt {prompt} has no reward"
    return {
        "prompt": prompt,
        "sample": number,
        "reward": reward,
        "right": reward >= threshold,
        "answer": answer,
        "length": sum(mask > 0 for mask in sample.loss_mask),
        "status": sample.status.value,
        "problem": sample.prompt if isinstance(sample.prompt, str) else [message.to_dict() for message in sample.prompt],
        "ground_truth": sample.metadata.get("ground_truth"),
        "response": sample.response,
    }


class Records:
    """The records of one model on one task."""

    def __init__(self, path: Path, n: int) -> None:
        """Read what is there, and keep the prompts that are done.

        Args:
            path: file of JSON lines, created if missing. An unfinished last line, and unfinished prompts, are removed.
            n: samples for each prompt.

        Raises: DataError for a damaged line; OutputError if the file cannot be written.
        """
        self.path, self._n = path, n
        found = _read(path) if path.exists() else {}
        self.groups: dict[int, list[Record]] = {prompt: records for prompt, records in found.items() if self._is_done(records)}
        self._write_all()

    def add(self, prompt: int, records: list[Record]) -> None:
        """Append the records of a prompt. Raises OutputError if the disk refuses them."""
        append_text(self.path, "".join(_dump(record) for record in records))
        self.groups[prompt] = records

    def finish(self) -> None:
        """Write the file in the order of the prompts, which no interruption changes."""
        self.groups = dict(sorted(self.groups.items()))
        self._write_all()

    def _is_done(self, records: list[Record]) -> bool:
        return "dropped" in records[0] or sorted(record["sample"] for record in records) == list(range(self._n))

    def _write_all(self) -> None:
        replace_file(self.path, "".join(_dump(record) for records in self.groups.values() for record in records))


def _dump(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _read(path: Path) -> dict[int, list[Record]]:
    groups: defaultdict[int, list[Record]] = defaultdict(list)
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = parse_json(line)
            groups[int(record["prompt"])].append(record)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number} is not a line of an evaluation ({error!r}): remove the file, and its prompts are done again"
            ) from error
    return dict(groups)

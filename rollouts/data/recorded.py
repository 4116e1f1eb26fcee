"""Rollouts that were generated and scored elsewhere, as the source of batches of a run: tokens, log-probs, weight versions and rewards.

A file has a line for each sample, in one of two forms. One has what another program knows about a response:

    {"prompt_tokens": [5, 6], "response_tokens": [7, 1], "log_probs": [-0.1, -0.5], "reward": 1.0, "group": "a", "weight_version": 3}

The other is a sample as write_samples writes it, whose columns are aligned with its tokens:

    {"tokens": [5, 6, 7, 1], "loss_mask": [0, 0, 1, 1], "rollout_log_probs": [0, 0, -0.1, -0.5], "reward": 1.0, "group_index": 0, ...}

Samples of a group (of one prompt, where no group is named) are compared with each other, wherever they stand in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from rollouts.checks import is_finite_number, show_value
from rollouts.data.datasets import load_rows
from rollouts.data.model_limits import ModelLimits, explain_sample
from rollouts.data.prompts import stream_positions
from rollouts.data.rows.files import Row
from rollouts.errors import DataError
from rollouts.types import Group, Prompt, RolloutBatch, Sample, Status

_LISTS = ("prompt_tokens", "response_tokens", "log_probs", "tokens", "loss_mask", "rollout_log_probs")


@dataclass(frozen=True, kw_only=True)
class RecordedGroups:
    """The groups of a file of recorded rollouts, in the order in which they begin there."""

    groups: tuple[Group, ...]
    sources: tuple[str, ...]  # "file, line n" of the first sample of each group
    fingerprint: str  # hash of tokens, rewards and versions: a resumed run must go on with the same rollouts

    @property
    def newest_version(self) -> int:
        """The newest weight version of any token; 0 if none is recorded."""
        return max((max(sample.weight_versions or (0,)) for group in self.groups for sample in group), default=0)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each group."""
        return tuple(Prompt(content=group[0].prompt, metadata=group[0].metadata) for group in self.groups)


def load_recorded_groups(path: str, *, limits: ModelLimits | None = None, smallest_group: int = 1) -> RecordedGroups:
    """Load recorded rollouts.

    Args:
        path: file of JSONL or Parquet.
        limits: limits of the trained model: longer samples and unknown tokens are refused.
        smallest_group: fewest samples of a group; 2 for algorithms that compare the samples of a group.

    Raises: DataError, with file and line, for a sample without tokens, log-probs or reward, with columns of other lengths or bad values, or
        for a group that is too small.
    """

    def parse(row: Row, where: str) -> tuple[str, Sample]:
        sample = read_recorded_sample(row, where)
        why = None if limits is None else explain_sample(sample, limits)
        if why is not None:
            raise DataError(f"{where}: the sample {why}")
        return _find_group(row, sample), sample

    loaded = load_rows(path, parse)
    members: dict[str, list[int]] = {}
    for i, (key, _) in enumerate(loaded.rows):
        members.setdefault(key, []).append(i)
    for key, places in members.items():
        if len(places) < smallest_group:
            raise DataError(
                f"{loaded.sources[places[0]]}: the group {key:.60} has {len(places)} sample, but the algorithm compares those of a group "
                f'and needs at least {smallest_group}: name groups ("group"), or choose an algorithm without groups (reinforce)'
            )
    digest = blake2b(digest_size=16)
    for key, sample in loaded.rows:
        digest.update(json.dumps([key, sample.tokens, sample.reward, sample.weight_versions]).encode())
    return RecordedGroups(
        groups=tuple(tuple(loaded.rows[i][1] for i in places) for places in members.values()),
        sources=tuple(loaded.sources[places[0]] for places in members.values()),
        fingerprint=digest.hexdigest(),
    )


def read_recorded_sample(row: Row, where: str) -> Sample:
    """Return the sample of a line. Raises DataError that begins with `where`."""
    reward = row.get("reward")
    if not is_finite_number(reward):
        raise DataError(
            f"{where}: reward is {show_value(reward)}, expected a finite number: score the samples before, or leave the row out"
        )
    for name in _LISTS:
        if name in row and not isinstance(row[name], list):
            raise DataError(f"{where}: {name} is {show_value(row[name], 60)}, expected a list of numbers")
    values = _align(row, where) if "response_tokens" in row else {**row, "metadata": row.get("metadata") or {}}
    missing = [name for name in ("tokens", "loss_mask", "rollout_log_probs") if values.get(name) is None]
    if missing:
        raise DataError(
            f"{where}: the row has no {', '.join(missing)} (it has {', '.join(row)}): give prompt_tokens, response_tokens and log_probs, "
            "or tokens, loss_mask and rollout_log_probs, all of these aligned with tokens"
        )
    known = {name: values[name] for name in values if name in Sample.__dataclass_fields__}
    try:
        sample = Sample.from_dict({**known, "status": known.get("status", Status.COMPLETED)})
    except (AssertionError, DataError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: no sample: {error}") from error
    if sum(mask > 0 for mask in sample.loss_mask) == 0:
        raise DataError(f"{where}: no token of the sample has loss_mask > 0: nothing of it is trained on")
    above = [value for value in sample.rollout_log_probs or () if value > 1e-4]
    if above:
        raise DataError(f"{where}: a log-prob is {above[0]}, expected at most 0: natural logarithms of probabilities")
    return sample


def _align(row: Row, where: str) -> dict[str, Any]:
    """Return the fields of a sample for a prompt and its response."""
    prompt, response, log_probs = (row.get(name) or [] for name in ("prompt_tokens", "response_tokens", "log_probs"))
    if not prompt or not response:
        raise DataError(f"{where}: {len(prompt)} prompt_tokens and {len(response)} response_tokens, expected at least one of each")
    if len(log_probs) != len(response):
        raise DataError(
            f"{where}: {len(log_probs)} log_probs for {len(response)} response_tokens, expected one for each, of the policy that sampled it"
        )
    mask: Any = row.get("response_mask") or [1] * len(response)
    version: Any = row.get("weight_version")
    versions: Any = [version] * len(response) if isinstance(version, int) else version
    for name, column in (("response_mask", mask), ("weight_version", versions)):
        if column is not None and (not isinstance(column, list) or len(column) != len(response)):
            raise DataError(f"{where}: {name} is {show_value(column, 60)}, expected {len(response)} values, one for each response token")
    before = len(prompt)
    return {
        **{name: row[name] for name in ("prompt", "response", "status", "temperature") if row.get(name) is not None},
        "tokens": [*prompt, *response],
        "loss_mask": [0] * before + list(mask),
        "rollout_log_probs": [0] * before + [value if m else 0 for value, m in zip(log_probs, mask, strict=True)],
        "weight_versions": None if versions is None else [-1] * before + list(versions),
        "reward": row["reward"],
        "metadata": row.get("metadata") or {},
    }


def _find_group(row: Mapping[str, Any], sample: Sample) -> str:
    """Return the key of the sample's group: "group" or "group_index", else the tokens before the first that is trained on."""
    named = row.get("group", row.get("group_index"))
    if named is not None:
        return json.dumps(named)
    start = next(i for i, mask in enumerate(sample.loss_mask) if mask > 0)
    return f"of the prompt {list(sample.tokens[:start])}"


class RecordedRollouts:
    """A rollout source over recorded groups: shuffled anew in every epoch, a function of seed and position, so it can be resumed."""

    def __init__(self, recorded: RecordedGroups, batch_size: int, seed: int = 0) -> None:
        """
        Args:
            batch_size: groups of a batch; may exceed the file, whose groups are then used again.
            seed: seed of the order of each epoch.
        """
        self._recorded, self._batch_size, self._seed = recorded, batch_size, seed
        self._position = 0  # groups taken so far

    async def __aenter__(self) -> RecordedRollouts:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    async def generate_batch(self) -> RolloutBatch:
        """Return the next groups. Each use of a group is a group of its own, with its place in the stream as group_index."""
        start = self._position
        places = stream_positions(len(self._recorded.groups), start=start, count=self._batch_size, seed=self._seed)
        self._position += self._batch_size
        samples = [(start + k, sample) for k, place in enumerate(places) for sample in self._recorded.groups[place]]
        numbered = (replace(sample, index=i, group_index=group) for i, (group, sample) in enumerate(samples))
        return RolloutBatch(samples=tuple(numbered))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what gives it its meaning, as JSON values."""
        return {"position": self._position, "seed": self._seed, "fingerprint": self._recorded.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of state_dict(). Raises DataError for another file or seed."""
        own = self.state_dict()
        if set(state) != set(own):
            raise DataError(f"the checkpoint is of a run that generates its rollouts (its state has {sorted(state)}), not of recorded ones")
        for name in ("seed", "fingerprint"):
            if state[name] != own[name]:
                raise DataError(
                    f"the recorded rollouts have the {name} {own[name]}, the checkpoint {state[name]}: use the same file and seed"
                )
        self._position = int(state["position"])


def describe_recorded(recorded: RecordedGroups) -> str:
    """Return a sentence about the groups of a file, for the start of a run."""
    sizes: Sequence[int] = sorted({len(group) for group in recorded.groups})
    size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{len(recorded.groups):,} recorded groups of {size} samples, of weight versions up to {recorded.newest_version}"

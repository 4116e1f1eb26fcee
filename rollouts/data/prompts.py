"""An endless stream of prompts: shuffled anew in every epoch, a pure function of seed and position, so it can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from rollouts.chat.tokenize import Messages, parse_prompt_content
from rollouts.data.rows.loaded import LazyRows
from rollouts.errors import DataError
from rollouts.seeds import derive_seed
from rollouts.types import Prompt, change

NUM_SEEDS = 1 << 31
"""Prompts of an epoch where there is no data set."""


@dataclass(frozen=True, kw_only=True)
class BufferState:
    """A position in the stream: the next prompt is number sample_offset of epoch epoch_id."""

    epoch_id: int = 0
    sample_offset: int = 0  # in [0, number of prompts)


@lru_cache(maxsize=2)  # this epoch and the next: prompts may be taken one at a time
def epoch_order(length: int, epoch_id: int, seed: int) -> np.ndarray:
    """Return the permutation of [0, length) of one epoch: positions sorted by 64-bit random keys. # [length] int64, read only

    The keys are the raw output of Philox keyed by (seed, epoch), which no numpy release may change, unlike its shuffles.
    """
    keys = np.random.Philox(key=derive_seed(seed, epoch_id)).random_raw(length)
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order


def stream_positions(length: int, *, start: int, count: int, seed: int) -> tuple[int, ...]:
    """Return the items at the places start, start + 1, ..., start + count - 1 of the endless stream over `length` items.

    Args:
        length: number of items, at least 1.
        start: place in the stream; epoch = start // length.
        count: may exceed length.
        seed: seed of the permutations.

    Returns: count positions in [0, length).
    """
    assert length >= 1, f"length is {length}, expected at least one item"
    assert start >= 0, f"start is {start}, expected at least 0"
    assert count >= 0, f"count is {count}, expected at least 0"
    positions: list[int] = []
    while len(positions) < count:
        epoch_id, offset = divmod(start + len(positions), length)
        positions.extend(epoch_order(length, epoch_id, seed)[offset : offset + count - len(positions)].tolist())
    return tuple(positions)


def take_prompts(state: BufferState, prompts: Sequence[Prompt] | None, n: int, seed: int) -> tuple[tuple[Prompt, ...], BufferState]:
    """Return the next n prompts of the stream, and the state after them. Pure.

    Args:
        state: position of the first prompt.
        prompts: the data set; read only. None = no data set: each prompt is empty and has an index only.
        n: at least 0; may exceed the data set.
        seed: seed of the order.

    Returns: prompts whose index is their place in the stream (epoch_id * len(prompts) + offset), and the next state.
    """
    length = NUM_SEEDS if prompts is None else len(prompts)
    assert 0 <= state.sample_offset < length, f"sample_offset is {state.sample_offset}, expected in [0, {length})"
    start = state.epoch_id * length + state.sample_offset
    epoch_id, sample_offset = divmod(start + n, length)
    if prompts is None:
        taken = tuple(Prompt(content="", index=start + i) for i in range(n))
        return taken, BufferState(epoch_id=epoch_id, sample_offset=sample_offset)
    positions = stream_positions(length, start=start, count=n, seed=seed)
    taken = tuple(change(prompts[position], index=start + i) for i, position in enumerate(positions))
    return taken, BufferState(epoch_id=epoch_id, sample_offset=sample_offset)


def parse_prompt(item: str | Messages | Mapping[str, Any] | Prompt, where: str = "prompt") -> Prompt:
    """Return a Prompt for an item in one of the forms that users have.

    Args:
        item: a str or list of messages (the content), a Prompt, or a mapping with "prompt" (or "messages") whose other keys become
            metadata; metadata["ground_truth"] is "answer" if there is no "ground_truth".
        where: name of the item in error messages.

    Raises: DataError for anything else.
    """
    if isinstance(item, Prompt):
        return item
    if not isinstance(item, Mapping):
        return Prompt(content=parse_prompt_content(item, where))
    key = next((key for key in ("prompt", "messages") if key in item), None)
    if key is None:
        raise DataError(f"{where} has the keys {sorted(map(str, item))}, expected 'prompt' or 'messages' among them")
    metadata = {name: value for name, value in item.items() if name != key}
    content = parse_prompt_content(item[key], where)
    if "answer" in metadata:
        metadata.setdefault("ground_truth", metadata["answer"])
    return Prompt(content=content, metadata=metadata)


class DataBuffer:
    """The cursor in a stream of prompts. The caller's list is copied and never reordered; prompts that are read when taken stay so."""

    def __init__(self, prompts: Sequence[str | Messages | Mapping[str, Any] | Prompt] | None, seed: int = 0) -> None:
        """Args:
            prompts: see parse_prompt; at least one. LazyRows of Prompts are read as they are taken. None = an environment makes the
                tasks, from a seed for each index.
            seed: seed of the order of each epoch.

        Raises: DataError for an empty data set or an item that is no prompt.
        """
        if prompts is not None and not prompts:
            raise DataError("there are no prompts (found 0): check the data path and its filters")
        self._prompts: Sequence[Prompt] | None = None
        if isinstance(prompts, LazyRows):
            self._prompts = cast("LazyRows[Prompt]", prompts)
        elif prompts is not None:
            self._prompts = tuple(parse_prompt(item, f"prompt {i}") for i, item in enumerate(prompts))
        self._seed = seed
        self._state = BufferState()

    def __len__(self) -> int:
        return NUM_SEEDS if self._prompts is None else len(self._prompts)

    @property
    def state(self) -> BufferState:
        """Position of the next prompt."""
        return self._state

    def get_prompts(self, n: int) -> tuple[Prompt, ...]:
        """Return the next n prompts and move the cursor."""
        taken, self._state = take_prompts(self._state, self._prompts, n, self._seed)
        return taken

    def save_state(self) -> dict[str, int]:
        """Return the position as plain JSON values, with the seed and size that give it its meaning."""
        state = self._state
        return {"epoch_id": state.epoch_id, "sample_offset": state.sample_offset, "seed": self._seed, "num_prompts": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Move the cursor to the position of save_state: the rest of the stream is the same, value for value.

        Raises: DataError if the state is of another seed or of a data set of another size.
        """
        missing = sorted({"epoch_id", "sample_offset", "seed", "num_prompts"} - set(state))
        if missing:
            raise DataError(f"the saved position in the data lacks {missing}; it has {sorted(map(str, state))}")
        for name, own in (("seed", self._seed), ("num_prompts", len(self))):
            if state[name] != own:
                raise DataError(
                    f"the saved position in the data has {name} {state[name]}, but this buffer has {own}: the order would not go on as it "
                    "began. Use the data and seed of the saved run, or start anew."
                )
        epoch_id, sample_offset = int(state["epoch_id"]), int(state["sample_offset"])
        if epoch_id < 0 or not 0 <= sample_offset < len(self):
            raise DataError(f"the saved position in the data is epoch {epoch_id}, offset {sample_offset}, of {len(self)} prompts")
        self._state = BufferState(epoch_id=epoch_id, sample_offset=sample_offset)

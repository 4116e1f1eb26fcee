"""Saved weights of clients, below the directory of a server: each name is a directory with one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from rollouts.backends.lora.config import ALL_LINEAR, LoRAConfig
from rollouts.checks import parse_json
from rollouts.errors import CheckpointError, DataError
from rollouts.gateway.refusals import Refusal
from rollouts.tinker.trained import is_attention
from rollouts.tinker.wire.paths import SavedPath, parse_path
from rollouts.training.saving.checkpoints import RUN_STATE_FILE, checkpoint_name, load_run_state, save_checkpoint


def find_saved(path: str, root: Path) -> Path:
    """Return the checkpoint of a path. Raises Refusal: 400 for what is no path, 404 if nothing was saved there."""
    try:
        directory = parse_path(path, ("weights", "sampler_weights")).locate(root) / checkpoint_name(0)
    except DataError as error:
        raise Refusal(400, str(error), param="path", code="invalid_value") from None
    if not directory.is_dir():
        raise Refusal(404, f"nothing is saved as {path} in the directory of this server, {root}", param="path", code="not_found")
    return directory


async def write_saved(path: SavedPath, root: Path, write: Callable[[Path], None], run_state: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a checkpoint whole or not at all.

    Args:
        write: writes into the directory that it is given, in a thread.
        run_state: what is told of the model, see TrainedModel.describe.

    Raises: DataError if the name is taken and may not be overwritten; CheckpointError.
    """
    target = path.locate(root)
    if not overwrite and (target / checkpoint_name(0)).exists():
        raise DataError(f"{path} exists already: choose another name, or save_state(..., overwrite=True)")

    async def write_there(temporary: Path) -> None:
        await trio.to_thread.run_sync(write, temporary)

    await save_checkpoint(target, 0, write=write_there, run_state=run_state, keep_last_n=1)


def read_adapters_of(directory: Path) -> LoRAConfig | None:
    """Verify a checkpoint and return its adapters; None = all weights were trained. Raises CheckpointError, also for that of a run."""
    return _read_adapters(load_run_state(directory), directory)


def _read_adapters(run_state: Mapping[str, Any], directory: Path) -> LoRAConfig | None:
    if "base_model" not in run_state:
        raise CheckpointError(f"{directory} is a checkpoint of a run, and none that a client of this server has saved")
    lora: dict[str, Any] | None = run_state["lora"]
    if lora is None:
        return None
    lora["target_modules"] = tuple(lora["target_modules"])
    return LoRAConfig(**lora)


def describe_saved(directory: Path) -> dict[str, Any]:
    """Return what clients want to know of a checkpoint, whose weights are not read. Raises CheckpointError."""
    try:
        run_state: dict[str, Any] = parse_json((directory / RUN_STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / RUN_STATE_FILE} cannot be read: {error}") from error
    lora = _read_adapters(run_state, directory)
    names = (ALL_LINEAR,) if lora is None else lora.target_modules
    whole = names == (ALL_LINEAR,)
    return {
        "base_model": run_state["base_model"],
        "is_lora": lora is not None,
        "lora_rank": None if lora is None else lora.rank,
        "train_unembed": lora is None,
        "train_attn": whole or any(map(is_attention, names)),
        "train_mlp": whole or not all(map(is_attention, names)),
    }

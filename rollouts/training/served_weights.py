"""Weights that the engines sample with: published after a sync step, kept for a checkpoint, restored on resume.

They are the backend's weights of the last sync. If weights are not synced after every step, a checkpoint between two syncs must hold
them, too, or the resumed run would sample its next rollouts from a newer policy than the uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.backends.protocol import BackendFeature, TrainingBackend, require_backend_feature
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, InferenceEngine, WeightChannel
from rollouts.output_files import explain_writes
from rollouts.training.weight_sync import (
    WeightProbe,
    stream_backend,
    stream_directory,
    sync_weights_in_memory,
    sync_weights_over_channel,
    sync_weights_to_engines,
)

SERVED_FILE = "served_weights.safetensors"
SERVED_DIRECTORY = "served_weights"
EXPORT_PREFIX = "weights_v"


@dataclass(frozen=True, eq=False)
class ServedWeights:
    """Weights that the engines sample with. With neither field set: the backend's weights of the last sync, not kept."""

    version: int
    snapshot: Mapping[str, Tensor] | None = None  # weights kept in memory, by parameter name
    directory: Path | None = None  # directory of weights kept on the disk


async def publish_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    *,
    version: int,
    directory: Path | None,
    checkpoint: Path | None = None,
    keep_snapshot: bool = False,
    probe: WeightProbe | None = None,
    channel: WeightChannel | None = None,
) -> ServedWeights:
    """Bring the backend's weights to every engine, as `version`.

    Args:
        directory: export here as weights_vNNNNNN and let the engines load from the disk; None = pass them in memory. With a channel, only
            kept weights are exported.
        checkpoint: a checkpoint of these weights, used instead of a second export.
        channel: send the weights through it, a few at a time, instead of either.
        keep_snapshot: keep the weights for a checkpoint between this sync and the next.
        probe: probe of the new weights, see sync_weights_to_engines.

    Raises: EngineError; its message names the engines that already have the new weights.
    """
    if channel is not None:
        specs, read = await stream_backend(backend, keep_device=channel.wants_device)
        await sync_weights_over_channel(engines, channel, specs, read, version, probe=probe)
        if directory is None or not keep_snapshot:
            return ServedWeights(version=version)
        kept = await _export(backend, directory, version) if checkpoint is None else checkpoint
        await trio.to_thread.run_sync(partial(_remove_exports, directory, keep=kept))
        return ServedWeights(version=version, directory=kept)
    if directory is None:
        weights = await backend.get_weights().result()
        await sync_weights_in_memory(engines, weights, version, probe=probe)
        return ServedWeights(version=version, snapshot=weights if keep_snapshot else None)
    source = await _export(backend, directory, version) if checkpoint is None else checkpoint
    await sync_weights_to_engines(engines, source, probe=probe)
    await trio.to_thread.run_sync(partial(_remove_exports, directory, keep=source))
    return ServedWeights(version=version, directory=source if keep_snapshot else None)


async def hold_weights(backend: TrainingBackend, *, version: int, directory: Path | None) -> ServedWeights:
    """Return the backend's current weights as the engines' weights, kept for checkpoints before the first sync."""
    if directory is None:
        return ServedWeights(version=version, snapshot=await backend.get_weights().result())
    return ServedWeights(version=version, directory=await _export(backend, directory, version))


async def _export(backend: TrainingBackend, directory: Path, version: int) -> Path:
    exporter = require_backend_feature(backend, BackendFeature.CHECKPOINTS, "an export of weights")
    target = directory / f"{EXPORT_PREFIX}{version:06d}"
    with explain_writes(target):
        await trio.to_thread.run_sync(partial(_make_empty, target))
        await exporter.export_weights(target).result()
        write_weight_version(target, version)
    return target


async def write_served_weights(checkpoint: Path, *, served: ServedWeights | None, version: int) -> None:
    """Add to a checkpoint being written its weight version and, if given, the older weights that the engines hold."""
    write_weight_version(checkpoint, version)
    if served is None:
        return
    if served.snapshot is not None:
        await trio.to_thread.run_sync(save_file, dict(served.snapshot), checkpoint / SERVED_FILE)
    elif served.directory is not None:
        await trio.to_thread.run_sync(shutil.copytree, served.directory, checkpoint / SERVED_DIRECTORY)


async def restore_served_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    checkpoint: Path,
    *,
    in_memory: bool,
    channel: WeightChannel | None = None,
) -> ServedWeights:
    """Load into the engines their weights at the time of the checkpoint. The backend is already restored from it."""
    version = read_weight_version(checkpoint)
    kept_file, kept_directory = checkpoint / SERVED_FILE, checkpoint / SERVED_DIRECTORY
    if channel is not None:
        is_older = kept_directory.exists()
        specs, read = (
            await stream_directory(kept_directory) if is_older else await stream_backend(backend, keep_device=channel.wants_device)
        )
        await sync_weights_over_channel(engines, channel, specs, read, version)
        return ServedWeights(version=version, directory=kept_directory if is_older else checkpoint)
    if in_memory:
        kept = await trio.to_thread.run_sync(load_file, kept_file) if kept_file.exists() else None
        weights = await backend.get_weights().result() if kept is None else kept
        await sync_weights_in_memory(engines, weights, version)
        return ServedWeights(version=version, snapshot=kept)
    source = kept_directory if kept_directory.exists() else checkpoint
    await sync_weights_to_engines(engines, source)
    return ServedWeights(version=version, directory=source)


def write_weight_version(directory: Path, version: int) -> None:
    """Write the weight version into a directory of weights."""
    (directory / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}) + "\n")


def read_weight_version(directory: Path) -> int:
    """Read the version written by write_weight_version."""
    return int(json.loads((directory / WEIGHT_VERSION_FILE).read_text())["weight_version"])


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _remove_exports(parent: Path, keep: Path) -> None:
    """Delete earlier exports; keep the newest, because a server may open its files again."""
    for export in parent.glob(f"{EXPORT_PREFIX}*"):
        if export != keep:
            shutil.rmtree(export)

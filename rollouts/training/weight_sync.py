"""Weights that the engines sample with: published after a sync step, verified on every engine, kept for a checkpoint, restored on resume.

All engines are updated in one nursery, so a sync takes as long as the slowest engine. An engine is updated if it confirms the update AND
then reports the intended version. A failure of one does not stop the others; it becomes one EngineError that names the engines with and
without the new weights, because a batch from two policies must never go unnoticed.

If weights are not synced after every step, a checkpoint between two syncs must hold those of the last sync, too, or the resumed run would
sample its next rollouts from a newer policy than the uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import trio
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.backends.protocol import BackendFeature, TrainingBackend, get_backend_features, require_backend_feature
from rollouts.checks import parse_json
from rollouts.engines.protocol import (
    WEIGHT_VERSION_FILE,
    EngineFeature,
    InferenceEngine,
    ReadBucket,
    WeightChannel,
    get_engine_features,
    require_engine_feature,
)
from rollouts.errors import CheckpointError, ConfigError, EngineError, EngineProtocolError
from rollouts.output_files import explain_writes
from rollouts.training.weight_streams import stream_backend, stream_directory
from rollouts.weight_specs import WeightSpec

SERVED_FILE = "served_weights.safetensors"
SERVED_DIRECTORY = "served_weights"
EXPORT_PREFIX = "weights_v"


@dataclass(frozen=True)
class WeightProbe:
    """Log-probs to verify that an engine computes with the new weights; from training.parity.create_weight_probe."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]  # nats, of tokens[1:] given the tokens before, at temperature 1, by the new weights
    tolerance: float  # largest difference, in nats

    def __post_init__(self) -> None:
        assert len(self.log_probs) == len(self.tokens) - 1 >= 1, f"{len(self.log_probs)} log-probs for {len(self.tokens)} tokens"
        assert self.tolerance > 0, f"tolerance is {self.tolerance}, expected more than 0"


@dataclass(frozen=True, eq=False)
class ServedWeights:
    """Weights that the engines sample with. With neither field set: the backend's weights of the last sync, not kept."""

    version: int
    snapshot: Mapping[str, Tensor] | None = None  # weights kept in memory, by parameter name
    directory: Path | None = None  # directory of weights kept on the disk


@dataclass(frozen=True)
class Exports:
    """Place and format of weights that engines load from the disk."""

    directory: Path  # gets weights_vNNNNNN
    dtype: str | None = None  # float32, bfloat16 or float16; None = as they are trained


async def publish_weights(
    backend: TrainingBackend,
    engines: Sequence[InferenceEngine],
    *,
    version: int,
    exports: Exports | None,
    checkpoint: Path | None = None,
    keep_snapshot: bool = False,
    probe: WeightProbe | None = None,
    channel: WeightChannel | None = None,
) -> ServedWeights:
    """Bring the backend's weights to every engine, as `version`.

    Args:
        exports: export here and let the engines load from the disk; None = pass them in memory. With a channel, only kept weights are
            exported.
        checkpoint: a checkpoint of these weights, used instead of a second export.
        channel: send the weights through it, a few at a time, instead of either.
        keep_snapshot: keep the weights for a checkpoint between this sync and the next.
        probe: probe of the new weights, see sync_weights_to_engines.

    Raises: EngineError; its message names the engines that already have the new weights.
    """
    if channel is not None:
        specs, read = await stream_backend(backend, keep_device=channel.wants_device)
        await sync_weights_over_channel(engines, channel, specs, read, version, probe=probe)
        if exports is None or not keep_snapshot:
            return ServedWeights(version=version)
        kept = await _export(backend, exports, version) if checkpoint is None else checkpoint
        await trio.to_thread.run_sync(partial(_remove_exports, exports.directory, keep=kept))
        return ServedWeights(version=version, directory=kept)
    if exports is None:
        weights = await _read_weights(backend, engines, keep_snapshot=keep_snapshot)
        await sync_weights_in_memory(engines, weights, version, probe=probe)
        return ServedWeights(version=version, snapshot=weights if keep_snapshot else None)
    source = await _export(backend, exports, version) if checkpoint is None else checkpoint
    await sync_weights_to_engines(engines, source, probe=probe)
    await trio.to_thread.run_sync(partial(_remove_exports, exports.directory, keep=source))
    return ServedWeights(version=version, directory=source if keep_snapshot else None)


async def _read_weights(backend: TrainingBackend, engines: Sequence[InferenceEngine], *, keep_snapshot: bool) -> Mapping[str, Tensor]:
    """Return the weights that are trained if nobody keeps them and every engine copies them at once; else copies on the CPU."""
    copied = keep_snapshot or not all(EngineFeature.WEIGHT_VIEWS in get_engine_features(engine) for engine in engines)
    if copied or BackendFeature.WEIGHT_VIEWS not in get_backend_features(backend):
        return await backend.get_weights().result()
    return await require_backend_feature(backend, BackendFeature.WEIGHT_VIEWS, "a sync of weights").view_weights().result()


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine], checkpoint_path: Path | str, *, probe: WeightProbe | None = None
) -> list[Mapping[str, Any]]:
    """Let every engine load the weights of a directory.

    Args:
        engines: may be empty.
        checkpoint_path: a Hugging Face directory that each engine can open under this path. If it has a WEIGHT_VERSION_FILE, every engine
            must report that version afterwards; else the version that it answered with.
        probe: expected outputs afterwards; detects engines that confirm the weights but do not use them.

    Returns: answers of the engines, in the order of `engines`.
    Raises: CheckpointError if the path is not a directory or its version file cannot be read, and ConfigError if an engine cannot answer
        the probe, before any request; EngineError if an engine failed, naming its position and type, the cause, and the engines
        that have the new weights. An engine that fails the probe refuses, if it can, to generate until it gets weights that pass.
    """
    path = Path(checkpoint_path)
    version = await trio.to_thread.run_sync(_read_expected_version, path)
    updates = [partial(engine.update_weights_from_checkpoint, path) for engine in engines]
    return await _update_all(engines, updates, version, f"the weights in {path}", probe)


async def sync_weights_in_memory(
    engines: Sequence[InferenceEngine],
    weights: Mapping[str, Tensor],
    weight_version: int,
    *,
    probe: WeightProbe | None = None,
) -> list[Mapping[str, Any]]:
    """Pass the same weights to every engine in memory, without the disk.

    Args:
        engines: engines with EngineFeature.MEMORY_UPDATES; may be empty.
        weights: weights by parameter name; must not be written to while engines hold them.
        weight_version: version that every engine must report afterwards.
        probe: see sync_weights_to_engines.

    Returns: answers of the engines, in the order of `engines`.
    Raises: ConfigError if an engine cannot take weights in memory, before any request; EngineError as sync_weights_to_engines.
    """
    advice = 'Set weight_sync="checkpoint", or export the weights to a directory and use sync_weights_to_engines.'
    takers = [
        require_engine_feature(
            engine, EngineFeature.MEMORY_UPDATES, "a sync of weights in memory", instead=advice, name=_describe(position, engine)
        )
        for position, engine in enumerate(engines)
    ]
    updates = [partial(taker.update_weights, weights, weight_version) for taker in takers]
    return await _update_all(engines, updates, weight_version, f"weight version {weight_version}", probe)


async def sync_weights_over_channel(
    engines: Sequence[InferenceEngine],
    channel: WeightChannel,
    specs: Sequence[WeightSpec],
    read: ReadBucket,
    weight_version: int,
    *,
    probe: WeightProbe | None = None,
) -> list[Mapping[str, Any]]:
    """Send weights to the engines of a channel, bucket by bucket, and verify their arrival on each engine.

    Args:
        engines: engines of the channel, in its order.
        specs, read: the weights, see WeightChannel.send_weights.
        weight_version: version that every engine must report afterwards.
        probe: see sync_weights_to_engines.

    Returns: answers of the engines, in the order of `engines`.
    Raises: EngineError as WeightChannel.send_weights and sync_weights_to_engines; ConfigError if an engine cannot answer the probe, before
        any engine is updated.
    """
    _check_can_probe(engines, probe)
    answers = await channel.send_weights(specs, read, weight_version)
    if len(answers) != len(engines):
        raise ConfigError(f"the weight channel has {len(answers)} engines, but the run has {len(engines)}: open it with the run's engines")

    async def repeat(answer: Mapping[str, Any]) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        return answer

    updates = [partial(repeat, answer) for answer in answers]
    return await _update_all(engines, updates, weight_version, f"weight version {weight_version}", probe)


def _check_can_probe(engines: Sequence[InferenceEngine], probe: WeightProbe | None) -> None:
    for position, engine in enumerate(engines if probe is not None else ()):
        name = _describe(position, engine)
        require_engine_feature(engine, EngineFeature.SCORES, "a probe of its weights", instead="Sync without a probe.", name=name)


async def _update_all(
    engines: Sequence[InferenceEngine],
    updates: Sequence[Callable[[], Awaitable[Mapping[str, Any]]]],
    version: int | None,
    what: str,
    probe: WeightProbe | None,
) -> list[Mapping[str, Any]]:
    """Run all updates at once; return the answers in order, or raise one error about all failed engines."""
    _check_can_probe(engines, probe)
    answers: dict[int, Mapping[str, Any]] = {}
    failures: dict[int, Exception] = {}

    async def update_one(position: int) -> None:
        with _RecordFailure(failures, position):
            answer = await updates[position]()
            await _check_version(engines[position], answer, version)
            if probe is not None:
                await _check_outputs(engines[position], probe)
            answers[position] = answer

    async with trio.open_nursery() as nursery:
        for position in range(len(engines)):
            nursery.start_soon(update_one, position)
    if failures:
        causes = [failures[position] for position in sorted(failures)]
        error = EngineError(_describe_failures(engines, failures, what))
        raise error from (causes[0] if len(causes) == 1 else ExceptionGroup("updates that failed", causes))
    return [answers[position] for position in range(len(engines))]


class _RecordFailure:
    """Record an error of the block in `failures`, so that it does not cancel the updates of the other engines.

    Cancellation and Ctrl-C pass through.
    """

    def __init__(self, failures: dict[int, Exception], position: int) -> None:
        self._failures, self._position = failures, position

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._failures[self._position] = error
            return True
        return False


async def _check_version(engine: InferenceEngine, answer: Mapping[str, Any], expected: int | None) -> None:
    """Compare the version in the engine's answer, the version it reports, and the intended version."""
    if answer.get("success") is not True or "weight_version" not in answer:
        raise EngineProtocolError(f'its answer is {dict(answer)!r}, expected {{"success": True, "weight_version": int}}')
    reported = answer["weight_version"]
    if expected is not None and reported != expected:
        raise EngineError(f"it reports weight version {reported} after the update, expected {expected}")
    actual = await engine.get_weight_version()
    if actual != reported:
        raise EngineError(f"it answered with weight version {reported}, but get_weight_version() gives {actual}")


async def _check_outputs(engine: InferenceEngine, probe: WeightProbe) -> None:
    """Compare the log-probs of the probe's tokens by the engine, or each of many behind it, with the new weights' log-probs."""
    features = get_engine_features(engine)
    if EngineFeature.MEMBER_CHECKS in features:
        fleet = require_engine_feature(engine, EngineFeature.MEMBER_CHECKS, "a probe of its weights")
        return await fleet.check_each(partial(_check_outputs, probe=probe))
    found = await require_engine_feature(engine, EngineFeature.SCORES, "a probe of its weights").recompute_output_log_probs(probe.tokens, 1)
    if len(found) != len(probe.log_probs):
        raise EngineProtocolError(f"it gave {len(found)} log-probs for the {len(probe.log_probs)} tokens of a probe")
    differences = [abs(a - b) for a, b in zip(found, probe.log_probs, strict=True)]
    worst = max(differences)
    if not worst <= probe.tolerance:  # NaN included
        reason = (
            f"it reports the new version, but its log-probs of a probe are off by up to {worst:.3g} nats, more than {probe.tolerance:g}: "
            "it serves other weights, a stale prefix cache, or a lower precision than the tolerance allows for"
        )
        if EngineFeature.DISTRUST in features:
            require_engine_feature(engine, EngineFeature.DISTRUST, "a probe of its weights").distrust_weights(reason)
        raise EngineError(reason)
    return None


def _describe(position: int, engine: object) -> str:
    return f"engine {position} ({type(engine).__name__})"


def _describe_failures(engines: Sequence[object], failures: Mapping[int, Exception], what: str) -> str:
    causes = [(position, failures[position]) for position in sorted(failures)]
    failed = "; ".join(f"{_describe(position, engines[position])}: {type(error).__name__}: {error}" for position, error in causes)
    updated = [_describe(position, engine) for position, engine in enumerate(engines) if position not in failures]
    state = "No engine is sure to have the new weights."
    if updated:
        state = f"These engines already have the new weights: {', '.join(updated)}."
    return (
        f"{len(failures)} of {len(engines)} engines did not take {what}. {failed}. {state} "
        "Do not generate until a sync of all engines succeeds: their samples would come from different policies."
    )


def _read_expected_version(path: Path) -> int | None:
    """Read the weight version of a directory; None if it has no version file."""
    if not path.is_dir():
        raise CheckpointError(f"cannot sync weights from {path}: it is not a directory. Export the weights there first.")
    version_file = path / WEIGHT_VERSION_FILE
    if not version_file.exists():
        return None
    try:
        version = parse_json(version_file.read_text())["weight_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f'{version_file} cannot be read as {{"weight_version": int}}: {error}. Export the weights again.') from error
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f"{version_file} has weight_version {version!r}, expected an integer. Export the weights again.")
    return version


async def hold_weights(backend: TrainingBackend, *, version: int, exports: Exports | None) -> ServedWeights:
    """Return the backend's current weights as the engines' weights, kept for checkpoints before the first sync."""
    if exports is None:
        return ServedWeights(version=version, snapshot=await backend.get_weights().result())
    return ServedWeights(version=version, directory=await _export(backend, exports, version))


async def _export(backend: TrainingBackend, exports: Exports, version: int) -> Path:
    exporter = require_backend_feature(backend, BackendFeature.CHECKPOINTS, "an export of weights")
    target = exports.directory / f"{EXPORT_PREFIX}{version:06d}"
    options = {} if exports.dtype is None else {"dtype": exports.dtype}
    with explain_writes(target):
        await trio.to_thread.run_sync(partial(_make_empty, target))
        await exporter.export_weights(target, **options).result()
        write_weight_version(target, version)
    return target


def write_served_weights(checkpoint: Path, *, served: ServedWeights | None, version: int) -> None:
    """Add to a checkpoint being written its weight version and, if given, the older weights that the engines hold."""
    write_weight_version(checkpoint, version)
    if served is None:
        return
    if served.snapshot is not None:
        save_file(dict(served.snapshot), checkpoint / SERVED_FILE)
    elif served.directory is not None:
        shutil.copytree(served.directory, checkpoint / SERVED_DIRECTORY)


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
    return int(parse_json((directory / WEIGHT_VERSION_FILE).read_text())["weight_version"])


def _make_empty(directory: Path) -> None:
    _remove_export(directory)
    directory.mkdir(parents=True)


def _remove_exports(parent: Path, keep: Path) -> None:
    """Delete earlier exports; keep the newest, because a server may open its files again."""
    for export in parent.glob(f"{EXPORT_PREFIX}*"):
        if export != keep:
            _remove_export(export)


def _remove_export(path: Path) -> None:
    """Remove a directory of weights, or whatever bears its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

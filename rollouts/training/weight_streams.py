"""Weights to read bucket by bucket, for a channel: of a backend, or of a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.backends.protocol import BackendFeature, TrainingBackend, get_backend_features, require_backend_feature
from rollouts.checks import find_non_finite
from rollouts.engines.protocol import ReadBucket
from rollouts.errors import CheckpointError
from rollouts.weight_specs import Bucket, WeightSpec, describe_weights

_DTYPES = (
    ("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"),
    ("F8_E5M2", "float8_e5m2"), ("I64", "int64"), ("I32", "int32"), ("I16", "int16"), ("I8", "int8"), ("U8", "uint8"), ("BOOL", "bool"),
)  # fmt: skip


async def stream_backend(backend: TrainingBackend, *, keep_device: bool) -> tuple[tuple[WeightSpec, ...], ReadBucket]:
    """Return a backend's current weights: their specs, and a function that reads a bucket. Update nothing before the last is read.

    If a backend has no weight stream, all of its weights are copied first.

    Args:
        keep_device: leave tensors on the model's device.

    Raises: CheckpointError, also when a bucket is read, for non-finite weights: no engine gets them.
    """
    if BackendFeature.WEIGHT_STREAM in get_backend_features(backend):
        stream = require_backend_feature(backend, BackendFeature.WEIGHT_STREAM, "a stream of weights")

        async def gather(bucket: Bucket) -> Mapping[str, Tensor]:
            found = await stream.gather_weights(bucket.names, keep_device=keep_device).result()
            _check_finite(found)
            return found

        return await stream.describe_weights().result(), gather
    weights = await backend.get_weights().result()
    _check_finite(weights)

    async def select(bucket: Bucket) -> Mapping[str, Tensor]:
        await trio.lowlevel.checkpoint()
        return {name: weights[name] for name in bucket.names}

    return describe_weights(weights), select


def _check_finite(weights: Mapping[str, Tensor]) -> None:
    bad = find_non_finite(weights.items())
    if bad is not None:
        raise CheckpointError(f"the weight {bad} of the backend is NaN or infinite: no engine gets it. Go on from the last checkpoint")


async def stream_directory(directory: Path) -> tuple[tuple[WeightSpec, ...], ReadBucket]:
    """Return the weights of a model directory, one file of safetensors or many, read on demand. Raises CheckpointError."""
    specs, files = await trio.to_thread.run_sync(_list_directory, directory)

    async def read(bucket: Bucket) -> Mapping[str, Tensor]:
        return await trio.to_thread.run_sync(partial(_read_tensors, {name: files[name] for name in bucket.names}))

    return specs, read


def _list_directory(directory: Path) -> tuple[tuple[WeightSpec, ...], dict[str, Path]]:
    names = dict(_DTYPES)
    specs: list[WeightSpec] = []
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    specs.append(WeightSpec(name, names[part.get_dtype()], tuple(part.get_shape())))
                    files[name] = path
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}. Export the weights again") from error
    if not specs:
        raise CheckpointError(f"{directory} has no model.safetensors: it is not a model directory, or its weights are in another format")
    return tuple(specs), files


def _read_tensors(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Read the tensors with these names, each from its file."""
    found: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in files if files[name] == path})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found

"""Weights of a backend, or of a directory, a few at a time: what a WeightChannel reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trio
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.backends.protocol import StreamsWeights, TrainingBackend
from rollouts.engines.protocol import ReadBucket
from rollouts.errors import CheckpointError
from rollouts.weight_plan import Bucket, WeightSpec, describe_weights

_DTYPES = (
    ("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"),
    ("F8_E5M2", "float8_e5m2"), ("I64", "int64"), ("I32", "int32"), ("I16", "int16"), ("I8", "int8"), ("U8", "uint8"), ("BOOL", "bool"),
)  # fmt: skip


async def stream_backend(backend: TrainingBackend, *, keep_device: bool) -> tuple[tuple[WeightSpec, ...], ReadBucket]:
    """A backend's weights of this moment: what there is, and how to read a bucket of it. No update may come before the last is read.

    Of a backend that cannot hand over a part of its weights, all of them are copied first.

    Args:
        keep_device: leave tensors on the model's device.
    """
    if isinstance(backend, StreamsWeights):
        stream: StreamsWeights = backend

        async def gather(bucket: Bucket) -> Mapping[str, Tensor]:
            return await stream.gather_weights(bucket.names, keep_device=keep_device).result()

        return await stream.describe_weights().result(), gather
    weights = await backend.get_weights().result()

    async def select(bucket: Bucket) -> Mapping[str, Tensor]:
        await trio.lowlevel.checkpoint()
        return {name: weights[name] for name in bucket.names}

    return describe_weights(weights), select


async def stream_directory(directory: Path) -> tuple[tuple[WeightSpec, ...], ReadBucket]:
    """The weights of a model directory, one file of safetensors or many, read when they are asked for. Raises CheckpointError."""
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
            raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
    if not specs:
        raise CheckpointError(f"{directory} has no model.safetensors: it is not a model directory, or its weights are in another format")
    return tuple(specs), files


def _read_tensors(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors of these names, each from its file."""
    found: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in files if files[name] == path})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found

"""Plans by which the weights of a model travel to engines: buckets computed on both sides alike, before anything moves.

    plan = plan_weights(describe_weights(weights), max_bytes=2**28)
    for bucket in plan.buckets: ...

A plan depends on names, dtypes and shapes alone. A bad set of weights is therefore refused, and every server knows what it will get,
while the old weights are still in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollouts.errors import BackendError

_NAMED = 3  # wrong tensors that an error names


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of a model, without its values."""

    name: str  # in the checkpoint
    dtype: str  # torch's name: "float32", "bfloat16"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel as one block, in this order, without gaps."""

    index: int  # in the plan
    specs: tuple[WeightSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its tensors, in their order."""
        return tuple(spec.name for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True)
class WeightPlan:
    """All weights of a model, each in one bucket."""

    buckets: tuple[Bucket, ...]

    @property
    def specs(self) -> tuple[WeightSpec, ...]:
        """Specs of all tensors, in the order of transfer."""
        return tuple(spec for bucket in self.buckets for spec in bucket.specs)

    @property
    def num_bytes(self) -> int:
        """Bytes sent to each engine."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype with a name such as "float32"."""
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"{name!r} is no dtype of torch"
    return dtype


def describe_tensor(name: str, tensor: Tensor) -> WeightSpec:
    """Return the spec of a tensor; for a sharded one the spec of the whole."""
    return WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def describe_weights(weights: Mapping[str, Tensor]) -> tuple[WeightSpec, ...]:
    """Return the specs of weights, in their order."""
    return tuple(describe_tensor(name, tensor) for name, tensor in weights.items())


def cast_specs(specs: Sequence[WeightSpec], dtype: str | None) -> tuple[WeightSpec, ...]:
    """Return the specs with floating-point tensors in another precision; None keeps their own."""
    return tuple(replace(spec, dtype=dtype) if dtype is not None and torch_dtype(spec.dtype).is_floating_point else spec for spec in specs)


def plan_weights(specs: Sequence[WeightSpec], max_bytes: int) -> WeightPlan:
    """Divide tensors into consecutive buckets of one dtype and at most max_bytes each; a larger tensor gets its own.

    Tensors of several dtypes never share a bucket: the later ones could start at offsets that are no multiple of their item size.

    Args:
        specs: specs with distinct names. Their order within a dtype stays.
        max_bytes: bytes in a bucket, at least 1.
    """
    assert max_bytes >= 1, f"max_bytes is {max_bytes}, expected at least 1"
    assert len({spec.name for spec in specs}) == len(specs), "two weights have the same name"
    groups: list[list[WeightSpec]] = []
    size = 0
    for spec in sorted(specs, key=lambda spec: spec.dtype):  # a stable sort
        if not groups or size + spec.num_bytes > max_bytes or groups[-1][0].dtype != spec.dtype:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    return WeightPlan(tuple(Bucket(i, tuple(group)) for i, group in enumerate(groups)))


def cast_bucket(bucket: Bucket, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a bucket in its order and precision.

    Args:
        weights: the tensors that came for it: exactly its names.

    Raises: BackendError for tensors other than the planned ones; none may then be sent, because the engines cut the bytes by the plan.
    """
    faults = [f"no {name}" for name in bucket.names if name not in weights] + [
        f"unplanned {name}" for name in weights if name not in bucket.names
    ]
    for spec in bucket.specs:
        tensor = weights.get(spec.name)
        if tensor is not None and tuple(tensor.shape) != spec.shape:
            faults.append(f"{spec.name} is {list(tensor.shape)}, planned {list(spec.shape)}")
        elif (
            tensor is not None
            and str(tensor.dtype) != f"torch.{spec.dtype}"
            and not (tensor.is_floating_point() and torch_dtype(spec.dtype).is_floating_point)
        ):
            faults.append(f"{spec.name} is {tensor.dtype}, planned {spec.dtype}")
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise BackendError(
            f"the trainer's weights changed under a transfer: bucket {bucket.index} came with {'; '.join(faults[:_NAMED])}{more}. "
            "describe_weights() and gather_weights() of the backend must agree"
        )
    return {spec.name: weights[spec.name].detach().to(torch_dtype(spec.dtype)) for spec in bucket.specs}


def flatten_bucket(bucket: Bucket, weights: Mapping[str, Tensor], device: torch.device | str) -> Tensor:
    """Concatenate the bytes of a bucket's tensors: # [bytes] uint8. Raises BackendError as cast_bucket does."""
    tensors = cast_bucket(bucket, weights).values()
    return torch.cat([tensor.to(device).contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unflatten_bucket(bucket: Bucket, data: Tensor) -> dict[str, Tensor]:
    """Return a bucket's tensors as views of its bytes, the inverse of flatten_bucket. data: # [bytes] uint8."""
    assert data.numel() == bucket.num_bytes, f"{data.numel()} bytes came for a bucket of {bucket.num_bytes}"
    parts = data.split([spec.num_bytes for spec in bucket.specs])
    return {spec.name: part.view(torch_dtype(spec.dtype)).view(spec.shape) for spec, part in zip(bucket.specs, parts, strict=True)}

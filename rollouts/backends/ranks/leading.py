"""Rank 0's backend if several processes train together: a TrainingBackend that leads the backends of all ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.lora.adapters import adapters_off
from rollouts.backends.protocol import BackendFeature, Future, OutputFn, find_outputs, find_token_spec, get_backend_features
from rollouts.backends.ranks.group import RankGroup
from rollouts.backends.ranks.rows import (
    combine_metrics,
    combine_recorded,
    combine_rows,
    count_unit_rows,
    pack_recorded,
    plan_rank_rows,
    select_part,
)
from rollouts.backends.unread_metrics import RecordedTokens, UnreadMetrics
from rollouts.models.forward.passes import check_batch
from rollouts.models.tokens import TokenSpec
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_specs import WeightSpec

T = TypeVar("T")


class RankBackend(Protocol):
    """One rank's part of a backend of all ranks, for example FSDPTrainingBackend. All ranks call the same methods in the same order."""

    unread: dict[int, UnreadMetrics]  # metrics of this rank that the leading rank has not asked for; empty at first

    def forward_shard(self, shard: TrainBatch | None, output_fn: OutputFn, *, with_entropy: bool = False) -> Tensor | None:
        """Run forward on this rank's rows; None = it has none."""
        ...

    def forward_backward_shard(self, shard: TrainBatch | None, loss_fn: LossFn, *, with_entropy: bool = False) -> UnreadMetrics:
        """Run forward_backward on this rank's rows; the resulting gradient covers the rows of all ranks."""
        ...

    def take_recorded_shard(self) -> tuple[RecordedTokens, ...]:
        """Return the records of this rank's rows, see RecordsUpdates; needed only by backends with BackendFeature.RECORDS."""
        ...

    def count_experts_shard(self, shard: TrainBatch | None) -> None:
        """Run count_experts on this rank's rows; the count covers the rows of all ranks."""
        ...

    def optim_step(self) -> Future[dict[str, float]]:
        """Update as TrainingBackend.optim_step; done when it returns, and the same on every rank."""
        ...

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, whole tensor) of each weight; every rank iterates to the end."""
        ...

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """See StreamsWeights; sends nothing."""
        ...

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """See StreamsWeights; every rank passes the same names."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """See TrainingBackend; every rank is given all weights."""
        ...

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend; each rank writes its own files into a shared directory."""
        ...

    def close(self) -> None:
        """Wait for background writes; needed only by backends that write during training."""
        ...

    def stage_checkpoint(self, directory: Path) -> ImmediateTrainFuture[Callable[[], None]]:
        """See StagesCheckpoints; each rank copies its part, and its function waits for all parts."""
        ...

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        ...

    def export_weights(self, directory: Path, *, dtype: str | None = None) -> Future[None]:
        """See CheckpointingBackend."""
        ...


class LeadingBackend:
    """TrainingBackend on rank 0 that leads the backends of all ranks. Made by lead_backend.

    Each call deals the rows of its batch to the ranks, sends every rank its rows, computes rank 0's, and combines the answers. Every
    method runs at once and returns an ImmediateTrainFuture. Loss and output functions are defined at the top of a module (or are a
    functools.partial of such a function), because they are sent by name.
    """

    def __init__(self, group: RankGroup, name: str, own: Any) -> None:
        """Args: own: rank 0's part, a RankBackend."""
        self._group, self._name, self._own = group, name, own
        self._unread: dict[int, UnreadMetrics] = {}  # by the number of their forward_backward
        self._num_passes = 0
        self._lock = RLock()  # one read of metrics at a time

    @property
    def features(self) -> frozenset[BackendFeature]:
        """Features of rank 0's part, and the features that leading adds."""
        return get_backend_features(self._own) | {BackendFeature.CHECKPOINTS, BackendFeature.WEIGHT_STREAM, BackendFeature.SHARDS}

    @property
    def num_shards(self) -> int:
        """Number of ranks."""
        return self._group.num_ranks

    @property
    def token_spec(self) -> TokenSpec | None:
        """Vocabulary of the model; None = not known."""
        return find_token_spec(self._own)

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that the backend fills; None = not known."""
        return find_outputs(self._own)

    @property
    def weight_version(self) -> int:
        """Weight version of the last loaded checkpoint, or the one that the backend was made with."""
        return int(self._own.weight_version)

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Evaluate without gradient; returns [B, T] on the CPU."""
        plan, shards = self._deal(batch, 1)
        parts = self._group.run("forward", _forward, self._name, output_fn, with_entropy, own=shards)
        return ImmediateTrainFuture(combine_rows(parts, plan, (batch.tokens.shape[0], batch.tokens.shape[1])), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch. Ranks keep their metrics until optim_step, or until somebody asks for one."""
        _, shards = self._deal(batch)
        with self._lock:
            number = self._num_passes = self._num_passes + 1
            self._group.run("forward_backward", _forward_backward, self._name, loss_fn, with_entropy, number, own=shards)
            metrics = self._unread[number] = UnreadMetrics(self._read_metrics)
        return ImmediateTrainFuture(metrics, "forward_backward")

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Run forward without the adapters."""
        assert BackendFeature.ADAPTERS in self.features, f"{type(self._own).__name__} trains no adapters"
        plan, shards = self._deal(batch, 1)
        parts = self._group.run("forward_base", _forward_base, self._name, output_fn, with_entropy, own=shards)
        return ImmediateTrainFuture(combine_rows(parts, plan, (batch.tokens.shape[0], batch.tokens.shape[1])), "forward_base")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Clip, update, advance the schedule, clear gradients, on every rank."""
        with self._lock:
            answers = self._group.run("optim_step", _optim_step, self._name)
            self._fill([metrics for _, metrics in answers])
        return ImmediateTrainFuture(answers[0][0], "optim_step")

    def _read_metrics(self) -> None:
        with self._lock:
            if self._unread:
                self._fill(self._group.run("reading the metrics", _read_metrics, self._name))

    def _fill(self, parts: Sequence[Mapping[int, Mapping[str, float]]]) -> None:
        """Combine the metrics of all ranks, by rank; those of a forward_backward that failed on one of them are dropped."""
        for number, metrics in self._unread.items():
            metrics.fill(combine_metrics([part[number] for part in parts]))
        self._unread = {}

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copy the weights to the CPU of rank 0; the other ranks keep none."""
        return ImmediateTrainFuture(self.consume_weights(dict).value, "get_weights")

    def consume_weights(self, consume: Callable[[Iterator[tuple[str, Tensor]]], T]) -> ImmediateTrainFuture[T]:
        """Call consume, on rank 0, with an iterator over (name, whole tensor on the CPU) of each weight, to send them one by one.

        Weights that consume leaves over are gathered and dropped, also if it raises.
        """
        own: list[tuple[object, ...]] = [(consume if rank == 0 else None,) for rank in range(self._group.num_ranks)]
        return ImmediateTrainFuture(self._group.run("gathering the weights", _stream_weights, self._name, own=own)[0], "consume_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. All of them are sent to every rank: for a large model, load a checkpoint instead."""
        self._group.run("load_weights", _load_weights, self._name, dict(weights))
        return ImmediateTrainFuture(None, "load_weights")

    # -- BackendFeature.RECORDS

    def take_recorded(self) -> ImmediateTrainFuture[tuple[RecordedTokens, ...]]:
        """Return what losses told of the tokens of recorded rows, on all ranks, since the last call."""
        return ImmediateTrainFuture(combine_recorded(self._group.run("take_recorded", _take_recorded, self._name)), "take_recorded")

    # -- BackendFeature.WEIGHT_STREAM

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Return names, dtypes and whole shapes of the weights, without a command to the other ranks."""
        return ImmediateTrainFuture(self._own.describe_weights().value, "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Return copies of the whole weights with these names, on rank 0; the other ranks keep none."""
        gathered = self._group.run("gather_weights", _gather_weights, self._name, tuple(names), keep_device, own=self._only_here())[0]
        return ImmediateTrainFuture(gathered, "gather_weights")

    # -- BackendFeature.EXPERTS

    def check_balance(self) -> None:
        """Run check_balance of rank 0's part, without a command to the other ranks."""
        self._own.check_balance()

    def check_replay(self) -> None:
        """Run check_replay of rank 0's part, without a command to the other ranks."""
        self._own.check_replay()

    def count_experts(self, batch: TrainBatch) -> ImmediateTrainFuture[None]:
        """Count the load of the experts, on every rank."""
        _, shards = self._deal(batch)
        self._group.run("count_experts", _count_experts, self._name, own=shards)
        return ImmediateTrainFuture(None, "count_experts")

    # -- BackendFeature.CHECKPOINTS

    def save_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Write all state, every rank its part, into a shared directory."""
        self._group.run("save_checkpoint", _save_checkpoint, self._name, directory)
        return ImmediateTrainFuture(None, "save_checkpoint")

    def stage_checkpoint(self, directory: Path) -> ImmediateTrainFuture[Callable[[], None]]:
        """Copy all state on every rank, and begin to write it; the function that is returned waits for the parts of all ranks."""
        waits = self._group.run("stage_checkpoint", _stage_checkpoint, self._name, directory, own=self._only_here())[0]

        def wait() -> None:
            with self._group.name_lost_rank(f"writing the checkpoint {directory}"):
                cast("Callable[[], None]", waits)()

        return ImmediateTrainFuture(wait, "stage_checkpoint")

    def load_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Restore a checkpoint written on any number of ranks. Raises CheckpointError if the directory does not fit this model."""
        self._group.run("load_checkpoint", _load_checkpoint, self._name, directory)
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path, *, dtype: str | None = None) -> ImmediateTrainFuture[None]:
        """Write the weights alone (Hugging Face layout), for an engine to load."""
        self._group.run("export_weights", _export_weights, self._name, directory, dtype)
        return ImmediateTrainFuture(None, "export_weights")

    def _only_here(self) -> list[tuple[object, ...]]:
        """Return an argument for each rank: whether it is this one."""
        return [(rank == 0,) for rank in range(self._group.num_ranks)]

    def _deal(self, batch: TrainBatch, rows_per_unit: int | None = None) -> tuple[list[list[int]], Sequence[tuple[object, ...]]]:
        """Deal the rows to the ranks; return each rank's rows and the arguments to send.

        Args:
            rows_per_unit: consecutive rows that one rank computes together; None = as many as losses compare.
        """
        limits = getattr(self._own, "limits", None)
        if limits is not None:  # checked here, since the others would wait for a rank that raises alone
            check_batch(batch, limits)
        if batch.routed_experts is not None:
            self._own.check_rows(batch)
        unit = count_unit_rows(batch, getattr(self._own, "rows_per_unit", 1)) if rows_per_unit is None else rows_per_unit
        plan = plan_rank_rows(batch.lengths.tolist(), self._group.num_ranks, unit)
        return plan, [(select_part(batch, rows),) for rows in plan]


def lead_backend(group: RankGroup, name: str, builder: Callable[[], RankBackend]) -> LeadingBackend:
    """Create a backend on every rank, and one on rank 0 that leads them. An earlier one of the same name is dropped first.

    Args:
        builder: called on every rank; defined at the top of a module, or a functools.partial of such a function and of values.
    """
    group.run(f"creating the backend {name!r}", _create_backend, name, builder)
    return LeadingBackend(group, name, group.get_backend(name))


def drop_backend(group: RankGroup, name: str) -> None:
    """Drop the backend of this name on every rank. The one that led them must not be used again."""
    group.run(f"dropping the backend {name!r}", _drop_backend, name)


_Backends = Mapping[str, Any]


def _create_backend(backends: MutableMapping[str, Any], name: str, builder: Callable[[], Any]) -> None:
    backends.pop(name, None)  # before the new one allocates memory
    backends[name] = builder()


def _drop_backend(backends: MutableMapping[str, Any], name: str) -> None:
    backends.pop(name, None)
    gc.collect()


def _forward(backends: _Backends, name: str, output_fn: OutputFn, with_entropy: bool, shard: TrainBatch | None) -> Tensor | None:
    return backends[name].forward_shard(shard, output_fn, with_entropy=with_entropy)


def _forward_base(backends: _Backends, name: str, output_fn: OutputFn, with_entropy: bool, shard: TrainBatch | None) -> Tensor | None:
    with adapters_off(backends[name].model):
        return _forward(backends, name, output_fn, with_entropy, shard)


def _forward_backward(backends: _Backends, name: str, loss_fn: LossFn, with_entropy: bool, number: int, shard: TrainBatch | None) -> None:
    metrics = backends[name].forward_backward_shard(shard, loss_fn, with_entropy=with_entropy)
    backends[name].unread[number] = metrics


def _read_metrics(backends: _Backends, name: str) -> dict[int, dict[str, float]]:
    unread = backends[name].unread
    found = {number: metrics.read() for number, metrics in unread.items()}
    unread.clear()
    return found


def _take_recorded(backends: _Backends, name: str) -> list[tuple[int, tuple[int, ...], dict[str, Tensor]]]:
    return pack_recorded(backends[name].take_recorded_shard())


def _count_experts(backends: _Backends, name: str, shard: TrainBatch | None) -> None:
    backends[name].count_experts_shard(shard)


def _optim_step(backends: _Backends, name: str) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    metrics = backends[name].optim_step().value
    return metrics, _read_metrics(backends, name)


def _stream_weights(backends: _Backends, name: str, consume: Callable[[Iterator[tuple[str, Tensor]]], Any] | None) -> Any:
    stream = backends[name].stream_weights()
    try:
        return None if consume is None else consume(stream)
    finally:  # every rank iterates to the end, or the others would wait for it
        for _ in stream:
            pass


def _gather_weights(backends: _Backends, name: str, names: Sequence[str], keep_device: bool, keep: bool) -> Mapping[str, Tensor]:
    gathered = backends[name].gather_weights(names, keep_device=keep_device and keep).value
    return gathered if keep else {}


def _load_weights(backends: _Backends, name: str, weights: Mapping[str, Tensor]) -> None:
    backends[name].load_weights(weights)


def _save_checkpoint(backends: _Backends, name: str, directory: Path) -> None:
    backend = backends[name]
    if not isinstance(backend.save_checkpoint(directory), ImmediateTrainFuture):
        backend.close()  # background writes are finished or failed when this returns: the loops then rename the directory


def _stage_checkpoint(backends: _Backends, name: str, directory: Path, keep: bool) -> Callable[[], None] | None:
    waits = backends[name].stage_checkpoint(directory).value
    return waits if keep else None


def _load_checkpoint(backends: _Backends, name: str, directory: Path) -> None:
    backends[name].load_checkpoint(directory)


def _export_weights(backends: _Backends, name: str, directory: Path, dtype: str | None) -> None:
    backends[name].export_weights(directory, dtype=dtype)

"""The backend that rank 0 has where several processes train together: a TrainingBackend like any other, which leads those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rollouts.backends.fsdp import combine_metrics, combine_rows, plan_rank_rows, select_part
from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.lora import adapters_off
from rollouts.backends.protocol import DescribesOutputs, Future, OutputFn, TrainsAdapters
from rollouts.backends.rank_group import RankGroup
from rollouts.backends.token_spec import DescribesTokens, TokenSpec
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_plan import WeightSpec

T = TypeVar("T")


class RankBackend(Protocol):
    """What one rank has of a backend of all ranks, for example FSDPTrainingBackend. All ranks call the same methods in the same order."""

    def forward_shard(self, shard: TrainBatch | None, output_fn: OutputFn, *, with_entropy: bool = False) -> Tensor | None:
        """forward for this rank's rows; None = it has none."""
        ...

    def forward_backward_shard(self, shard: TrainBatch | None, loss_fn: LossFn, *, with_entropy: bool = False) -> Mapping[str, float]:
        """forward_backward for this rank's rows; the gradient that it leaves is that of the rows of all."""
        ...

    def optim_step(self) -> Future[dict[str, float]]:
        """See TrainingBackend; done when it returns, and the same on every rank."""
        ...

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each weight; every rank iterates to the end."""
        ...

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """See StreamsWeights; sends nothing."""
        ...

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """See StreamsWeights; every rank asks for the same names."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """See TrainingBackend; every rank is given all of them."""
        ...

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend; ranks write files of their own into a directory that all of them see."""
        ...

    def close(self) -> None:
        """Wait for what is written beside training; needed only of a backend that does so."""
        ...

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        ...

    def export_weights(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        ...


class LeadingBackend:
    """A TrainingBackend and CheckpointingBackend on rank 0, made by RankGroup.create_backend.

    Each call deals the rows of its batch to the ranks, sends every rank its own, computes rank 0's, and puts the answers together. Every
    method runs at once and returns an ImmediateTrainFuture. Loss and output functions are defined at the top of a module (or a
    functools.partial of such), because they are sent by name.
    """

    def __init__(self, group: RankGroup, name: str, own: Any) -> None:
        """Args: own: rank 0's part, a RankBackend."""
        self._group, self._name, self._own = group, name, own

    @property
    def num_shards(self) -> int:
        """See ShardsRows."""
        return self._group.num_ranks

    @property
    def token_spec(self) -> TokenSpec | None:
        """See DescribesTokens."""
        return self._own.token_spec if isinstance(self._own, DescribesTokens) else None

    @property
    def computes(self) -> frozenset[str] | None:
        """See DescribesOutputs."""
        return self._own.computes if isinstance(self._own, DescribesOutputs) else None

    @property
    def weight_version(self) -> int:
        """That of the last checkpoint that was loaded, or what the backend was made with."""
        return int(self._own.weight_version)

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """Evaluate without gradient; [B, T] on the CPU."""
        plan, shards = self._deal(batch)
        parts = self._group.run("forward", _forward, self._name, output_fn, with_entropy, own=shards)
        return ImmediateTrainFuture(combine_rows(parts, plan, (batch.tokens.shape[0], batch.tokens.shape[1])), "forward")

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[dict[str, float]]:
        """Add the gradient of loss_fn on this batch."""
        _, shards = self._deal(batch)
        parts = self._group.run("forward_backward", _forward_backward, self._name, loss_fn, with_entropy, own=shards)
        return ImmediateTrainFuture(combine_metrics(parts), "forward_backward")

    @property
    def trains_adapters(self) -> bool:
        """See TrainsAdapters."""
        return isinstance(self._own, TrainsAdapters) and self._own.trains_adapters

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> ImmediateTrainFuture[Tensor]:
        """See TrainsAdapters: forward without the adapters."""
        assert self.trains_adapters, "forward_base is of a backend with adapters"
        plan, shards = self._deal(batch)
        parts = self._group.run("forward_base", _forward_base, self._name, output_fn, with_entropy, own=shards)
        return ImmediateTrainFuture(combine_rows(parts, plan, (batch.tokens.shape[0], batch.tokens.shape[1])), "forward_base")

    def optim_step(self) -> ImmediateTrainFuture[dict[str, float]]:
        """Clip, update, advance the schedule, clear gradients, on every rank."""
        return ImmediateTrainFuture(self._group.run("optim_step", _optim_step, self._name)[0], "optim_step")

    def get_weights(self) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """A copy of the weights on the CPU of rank 0; the other ranks keep none."""
        return ImmediateTrainFuture(self.consume_weights(dict).value, "get_weights")

    def consume_weights(self, consume: Callable[[Iterator[tuple[str, Tensor]]], T]) -> ImmediateTrainFuture[T]:
        """Call consume, on rank 0, with (name, whole tensor on the CPU) of each weight in turn: to send them somewhere one by one.

        Weights that consume leaves over are gathered and dropped, also where it raises.
        """
        own: list[tuple[object, ...]] = [(consume if rank == 0 else None,) for rank in range(self._group.num_ranks)]
        return ImmediateTrainFuture(self._group.run("gathering the weights", _stream_weights, self._name, own=own)[0], "consume_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> ImmediateTrainFuture[None]:
        """Replace the weights. All of them are sent to every rank: of a large model load a checkpoint."""
        self._group.run("load_weights", _load_weights, self._name, dict(weights))
        return ImmediateTrainFuture(None, "load_weights")

    # -- StreamsWeights

    def describe_weights(self) -> ImmediateTrainFuture[tuple[WeightSpec, ...]]:
        """Names, dtypes and whole shapes of the weights; no rank is asked."""
        return ImmediateTrainFuture(self._own.describe_weights().value, "describe_weights")

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> ImmediateTrainFuture[Mapping[str, Tensor]]:
        """Copies of the whole weights of these names, on rank 0; the other ranks keep none."""
        own: list[tuple[object, ...]] = [(rank == 0,) for rank in range(self._group.num_ranks)]
        gathered = self._group.run("gather_weights", _gather_weights, self._name, tuple(names), keep_device, own=own)[0]
        return ImmediateTrainFuture(gathered, "gather_weights")

    # -- CheckpointingBackend

    def save_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Write all state; every rank its part, into a directory that all of them see."""
        self._group.run("save_checkpoint", _save_checkpoint, self._name, directory)
        return ImmediateTrainFuture(None, "save_checkpoint")

    def load_checkpoint(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Restore what save_checkpoint wrote, on any number of ranks. Raises CheckpointError if the directory does not fit this model."""
        self._group.run("load_checkpoint", _load_checkpoint, self._name, directory)
        return ImmediateTrainFuture(None, "load_checkpoint")

    def export_weights(self, directory: Path) -> ImmediateTrainFuture[None]:
        """Write the weights alone (Hugging Face layout), for an engine to load."""
        self._group.run("export_weights", _export_weights, self._name, directory)
        return ImmediateTrainFuture(None, "export_weights")

    def _deal(self, batch: TrainBatch) -> tuple[list[list[int]], Sequence[tuple[object, ...]]]:
        """The rows of each rank, and what each is sent."""
        plan = plan_rank_rows(batch.lengths.tolist(), self._group.num_ranks, getattr(self._own, "rows_per_unit", 1))
        return plan, [(select_part(batch, rows),) for rows in plan]


_Backends = Mapping[str, Any]


def _forward(backends: _Backends, name: str, output_fn: OutputFn, with_entropy: bool, shard: TrainBatch | None) -> Tensor | None:
    return backends[name].forward_shard(shard, output_fn, with_entropy=with_entropy)


def _forward_base(backends: _Backends, name: str, output_fn: OutputFn, with_entropy: bool, shard: TrainBatch | None) -> Tensor | None:
    with adapters_off(backends[name].model):
        return _forward(backends, name, output_fn, with_entropy, shard)


def _forward_backward(backends: _Backends, name: str, loss_fn: LossFn, with_entropy: bool, shard: TrainBatch | None) -> dict[str, float]:
    return dict(backends[name].forward_backward_shard(shard, loss_fn, with_entropy=with_entropy))


def _optim_step(backends: _Backends, name: str) -> dict[str, float]:
    return backends[name].optim_step().value


def _stream_weights(backends: _Backends, name: str, consume: Callable[[Iterator[tuple[str, Tensor]]], Any] | None) -> Any:
    stream = backends[name].stream_weights()
    try:
        return None if consume is None else consume(stream)
    finally:  # every rank comes to the end, or the others would wait for it
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
        backend.close()  # one that writes beside training has written when this returns, or failed: the loops then rename the directory


def _load_checkpoint(backends: _Backends, name: str, directory: Path) -> None:
    backends[name].load_checkpoint(directory)


def _export_weights(backends: _Backends, name: str, directory: Path) -> None:
    backends[name].export_weights(directory)

"""Protocol of training backends: five methods, and the features that a backend may declare beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from rollouts.backends.unread_metrics import RecordedTokens
from rollouts.data.model_limits import ModelLimits
from rollouts.features import read_features, refuse_without_feature
from rollouts.models.tokens import TokenSpec
from rollouts.types import LossFn, TokenOutputs, TrainBatch
from rollouts.weight_specs import WeightSpec

T_co = TypeVar("T_co", covariant=True)

OutputFn: TypeAlias = Callable[[TokenOutputs], Tensor]
"""Chooses the [B, T] column that a forward pass returns, for example `lambda outputs: outputs.log_probs`."""


class Future(Protocol[T_co]):
    """A handle to a submitted job."""

    async def result(self) -> T_co:
        """Wait for the job; return its value or raise its error."""
        ...

    def done(self) -> bool:
        """Whether result() returns or raises at once."""
        ...


class TrainingBackend(Protocol):
    """Training backend: five operations. Jobs run in the order of submission.

    forward_backward accumulates: the loss is a weighted sum over the tokens of the whole optimizer step, so one call per micro-batch adds
    up to exactly the gradient of the whole batch.

    A backend declares further features in an attribute or property `features: frozenset[BackendFeature]`.
    """

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Evaluate without gradient; the future's result is output_fn's [B, T] tensor, on the CPU."""
        ...

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """Add the gradient of loss_fn to the sum since the last step; the result is {"loss", "num_tokens", the metrics of the loss}."""
        ...

    def optim_step(self) -> Future[dict[str, float]]:
        """Clip, update, advance the schedule, clear gradients; the result is {"grad_norm", "lr", ...}."""
        ...

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """Take a snapshot of the weights by parameter name; later steps do not change it."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """Replace the weights; names and shapes must match."""
        ...


class BackendFeature(StrEnum):
    """Feature of a backend beside the five methods of TrainingBackend."""

    CHECKPOINTS = "checkpoints"  # saves and restores all of its state: CheckpointingBackend
    STAGED_CHECKPOINTS = "staged_checkpoints"  # copies its state for a checkpoint and writes it later: StagesCheckpoints
    WEIGHT_STREAM = "weight_stream"  # gathers its weights a few at a time: StreamsWeights
    WEIGHT_VIEWS = "weight_views"  # lends its weights without a copy: LendsWeights
    ADAPTERS = "adapters"  # trains adapters on a frozen model, and can compute without them: TrainsAdapters
    OUTPUTS = "outputs"  # declares the fields that it computes: BackendFacts.computes
    TOKENS = "tokens"  # declares the vocabulary of its model: BackendFacts.token_spec
    EXPERTS = "experts"  # balances and replays the experts of a mixture of experts: RoutesExperts
    SHARDS = "shards"  # deals the rows of each call to several processes: BackendFacts.num_shards
    RECORDS = "records"  # keeps what a loss tells of single tokens of recorded rows: RecordsUpdates
    REDUNDANCY = "redundancy"  # skips what TrainBatch.skip_redundant says it may: prompts that rows share, backward passes of zero


_ATTRIBUTES: Mapping[BackendFeature, tuple[str, ...]] = MappingProxyType({
    BackendFeature.CHECKPOINTS: ("save_checkpoint", "load_checkpoint", "export_weights"),
    BackendFeature.STAGED_CHECKPOINTS: ("stage_checkpoint",),
    BackendFeature.WEIGHT_STREAM: ("describe_weights", "gather_weights"),
    BackendFeature.WEIGHT_VIEWS: ("view_weights",),
    BackendFeature.ADAPTERS: ("forward_base",),
    BackendFeature.OUTPUTS: ("computes",),
    BackendFeature.TOKENS: ("token_spec",),
    BackendFeature.EXPERTS: ("check_balance", "count_experts", "check_replay"),
    BackendFeature.SHARDS: ("num_shards",),
    BackendFeature.RECORDS: ("take_recorded",),
    BackendFeature.REDUNDANCY: (),
})  # fmt: skip


class CheckpointingBackend(Protocol):
    """Backend with BackendFeature.CHECKPOINTS, for typing only. The loops check the feature before they promise a checkpoint."""

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write weights (Hugging Face layout, at the top of the directory), optimizer, schedule and counters into an existing directory."""
        ...

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """Restore a checkpoint of save_checkpoint. Raises CheckpointError if the directory does not fit this model."""
        ...

    def export_weights(self, directory: Path, *, dtype: str | None = None) -> Future[None]:
        """Write the weights alone (Hugging Face layout), for an engine to load.

        Args:
            dtype: float32, bfloat16 or float16; None = as they are trained.
        """
        ...


class StagesCheckpoints(Protocol):
    """Backend with BackendFeature.STAGED_CHECKPOINTS, for typing only: the loops write its checkpoints beside training."""

    def stage_checkpoint(self, directory: Path) -> Future[Callable[[], None]]:
        """Copy all that save_checkpoint writes to host memory.

        Args:
            directory: existing directory.

        Returns: a function that writes the files of save_checkpoint, or waits until they are written: to be called once, in any thread,
            while later jobs run, and before the next checkpoint is staged. It raises the errors of save_checkpoint.
        """
        ...


class LendsWeights(Protocol):
    """Backend with BackendFeature.WEIGHT_VIEWS, for typing only."""

    def view_weights(self) -> Future[Mapping[str, Tensor]]:
        """Return the weights that are trained, on their device, by the names of get_weights: not to be changed, nor kept beyond the next
        step. Adapters are merged into copies.
        """
        ...


class StreamsWeights(Protocol):
    """Backend with BackendFeature.WEIGHT_STREAM, for typing only: no process ever holds the whole model for a transfer.

    A transfer describes the weights, then gathers one bucket of names after another, awaiting each. Submit no update of the weights in
    between, or engines would get a mixture. The transfer pulls buckets instead of being called with them, so the backend's thread and
    its collectives stay free while engines are slow.
    """

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """Return names, dtypes and shapes of all weights; tied ones once, under their first name."""
        ...

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """Copy the whole tensors of these names, in this order; later steps do not change the copies.

        Args:
            keep_device: leave the copies on the model's device, for a transfer from GPU to GPU; otherwise they are on the CPU.
        """
        ...


class TrainsAdapters(Protocol):
    """Backend with BackendFeature.ADAPTERS, for typing only; see create_lora_reference."""

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Run forward with the model below the adapters."""
        ...


class RoutesExperts(Protocol):
    """Backend with BackendFeature.EXPERTS, for typing only; see models/expert_load.py and models/replay.py.

    forward_backward of a batch with TrainBatch.router_balance adds this coefficient times the part of the batch in the load-balancing loss
    of the step. The load of the step is what count_experts has counted since the last update; if it has counted nothing, the load of the
    batch itself, so a step of one micro-batch in one process needs no count. A batch with TrainBatch.routed_experts is computed with these
    experts by every method.
    """

    def check_balance(self) -> None:
        """Raise ConfigError, with the reason, unless the model has a load-balancing loss that is computed here."""
        ...

    def check_replay(self) -> None:
        """Raise ConfigError, with the reason, unless the model can replay recorded experts."""
        ...

    def count_experts(self, batch: TrainBatch) -> Future[None]:
        """Run forward and add the load of the experts to that of the step; optim_step clears it."""
        ...


class RecordsUpdates(Protocol):
    """Backend with BackendFeature.RECORDS, for typing only.

    forward_backward of a batch with recorded rows (TrainBatch.recorded) keeps the columns of single tokens that the loss gives beside its
    metrics (LossOutput), of these rows alone. A backend without the feature is given no such batch.
    """

    def take_recorded(self) -> Future[tuple[RecordedTokens, ...]]:
        """Return what was kept since the last call, in the order of the calls of forward_backward."""
        ...


class BackendFacts(Protocol):
    """Properties of backends with OUTPUTS, TOKENS and SHARDS, for typing only; a backend has the ones it declares."""

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that the backend fills, for example log_probs and entropy, or values; None = not known."""
        ...

    @property
    def token_spec(self) -> TokenSpec | None:
        """Vocabulary of the model; None = not known."""
        ...

    @property
    def num_shards(self) -> int:
        """Number of processes that share the rows of a call; each has the capacity of a single process."""
        ...


def get_backend_features(backend: object) -> frozenset[BackendFeature]:
    """Return the features that a backend declares; none without an attribute `features`. Asserts that it has their methods."""
    return read_features(backend, _ATTRIBUTES)


@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.CHECKPOINTS], needed_by: str, *, instead: str = ""
) -> CheckpointingBackend: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.STAGED_CHECKPOINTS], needed_by: str, *, instead: str = ""
) -> StagesCheckpoints: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.WEIGHT_STREAM], needed_by: str, *, instead: str = ""
) -> StreamsWeights: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.WEIGHT_VIEWS], needed_by: str, *, instead: str = ""
) -> LendsWeights: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.EXPERTS], needed_by: str, *, instead: str = ""
) -> RoutesExperts: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.RECORDS], needed_by: str, *, instead: str = ""
) -> RecordsUpdates: ...
@overload
def require_backend_feature(
    backend: object, feature: Literal[BackendFeature.ADAPTERS], needed_by: str, *, instead: str = ""
) -> TrainsAdapters: ...
def require_backend_feature(backend: object, feature: BackendFeature, needed_by: str, *, instead: str = "") -> Any:
    """Return the backend with the methods of a feature.

    Args:
        needed_by: subject of "needs" in the error.
        instead: a sentence of advice at the end of the error.

    Raises: ConfigError if the backend does not declare the feature.
    """
    if feature not in get_backend_features(backend):
        raise refuse_without_feature(backend, feature, _ATTRIBUTES, needed_by=needed_by, name=None, instead=instead)
    return backend


def find_outputs(backend: object) -> frozenset[str] | None:
    """Return the fields of TokenOutputs that a backend computes; None if not declared."""
    return cast("BackendFacts", backend).computes if BackendFeature.OUTPUTS in get_backend_features(backend) else None


def find_token_spec(backend: object) -> TokenSpec | None:
    """Return the vocabulary of a backend's model; None if not declared."""
    return cast("BackendFacts", backend).token_spec if BackendFeature.TOKENS in get_backend_features(backend) else None


def find_limits(backend: object) -> ModelLimits | None:
    """Return the input limits of a backend's model; None if not declared."""
    spec = find_token_spec(backend)
    return None if spec is None else spec.limits


def count_shards(backend: object) -> int:
    """Return the number of processes that share the rows of a call; 1 if not declared."""
    return cast("BackendFacts", backend).num_shards if BackendFeature.SHARDS in get_backend_features(backend) else 1


def list_metrics(loss: Tensor, metrics: Mapping[str, float | Tensor], batch: TrainBatch) -> dict[str, float | Tensor]:
    """List the result of a forward_backward, without reading it: {"loss", "num_tokens", the metrics of the loss}."""
    return {"loss": loss.detach(), "num_tokens": (batch.loss_mask > 0).sum(), **metrics}


def collect_metrics(loss: Tensor, metrics: Mapping[str, float | Tensor], batch: TrainBatch) -> dict[str, float]:
    """Collect the result of a forward_backward at once: {"loss", "num_tokens", the metrics of the loss}."""
    values = list_metrics(loss, metrics, batch)
    on_device = {name: value.detach().double() for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
    if on_device:  # one copy, since each waits for the device
        values |= dict(zip(on_device, cast("list[float]", torch.stack(list(on_device.values())).tolist()), strict=True))
    return {name: float(value) for name, value in values.items()}

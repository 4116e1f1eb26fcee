"""What the loops need of a training backend, and what they can use where a backend has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor

from rollouts.types import LossFn, TokenOutputs, TrainBatch
from rollouts.weight_plan import WeightSpec

T_co = TypeVar("T_co", covariant=True)

OutputFn: TypeAlias = Callable[[TokenOutputs], Tensor]
"""Chooses the [B, T] column that a forward pass returns, for example `lambda outputs: outputs.log_probs`."""


class Future(Protocol[T_co]):
    """A handle to a submitted job."""

    async def result(self) -> T_co:
        """Wait for the job; return its value or raise its error."""
        ...

    def done(self) -> bool:
        """Whether result() would return or raise at once."""
        ...


class TrainingBackend(Protocol):
    """The five operations that training is made of. Jobs run in the order of submission.

    forward_backward accumulates: the loss is a weighted sum over the tokens of the whole optimizer step, so calling it once per
    micro-batch adds exactly the gradient of the whole.
    """

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Evaluate without gradient; resolves to output_fn's [B, T] tensor, on the CPU."""
        ...

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """Add the gradient of loss_fn to what is there; resolves to {"loss", "num_tokens", and the loss's metrics}."""
        ...

    def optim_step(self) -> Future[dict[str, float]]:
        """Clip, update, advance the schedule, clear gradients; resolves to {"grad_norm", "lr", ...}."""
        ...

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """Resolves to a snapshot of the weights by parameter name, which later steps do not change."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """Replace the weights; names and shapes must match."""
        ...


@runtime_checkable
class DescribesOutputs(Protocol):
    """A backend that can say what it computes."""

    @property
    def computes(self) -> frozenset[str] | None:
        """Which fields of TokenOutputs mean something, for example log_probs and entropy, or values; None if it is not known."""
        ...


@runtime_checkable
class ShardsRows(Protocol):
    """A backend that deals the rows of each call to several processes, which compute at the same time."""

    @property
    def num_shards(self) -> int:
        """Into how many parts the rows of a call are dealt; what fits into one process fits into each of them."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A backend that may train adapters on a frozen model, and can then compute without them: see create_lora_reference."""

    @property
    def trains_adapters(self) -> bool:
        """Whether it does; otherwise forward_base must not be called."""
        ...

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """forward by the model below the adapters."""
        ...


@runtime_checkable
class StreamsWeights(Protocol):
    """A backend that hands its weights over a few at a time, so that no process ever holds the whole model for a transfer.

    Who transfers asks: what there is, then for one bucket of names after another, awaiting each. No update of the weights may be submitted
    in between, or engines would get a mixture. Asking, instead of being called with each bucket, keeps the backend's thread and its
    collectives free while engines take their time.
    """

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """Resolves to names, dtypes and shapes of all weights; tied ones once, under their first name."""
        ...

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """Resolves to whole tensors of these names, in this order, which later steps do not change.

        Args:
            keep_device: leave them on the model's device, for a transfer from GPU to GPU; else they are on the CPU.
        """
        ...


@runtime_checkable
class CheckpointingBackend(Protocol):
    """A backend that can save and restore all of its state. The loops check for it before they promise a checkpoint."""

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write weights (Hugging Face layout, at the top of the directory), optimizer, schedule and counters into an existing directory."""
        ...

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """Restore what save_checkpoint wrote. Raises CheckpointError if the directory does not fit this model."""
        ...

    def export_weights(self, directory: Path) -> Future[None]:
        """Write the weights alone (Hugging Face layout), for an engine to load."""
        ...

"""Futures of training jobs, and the pipeline that runs the jobs in order beside the event loop.

async with open_pipeline(backend) as pipeline:
    loss = pipeline.forward_backward(batch, loss_fn)     # returns at once
    update = pipeline.optim_step()
    ...                                                  # generate, collate, log
    metrics = await loss.result() | await update.result()
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import trio
from torch import Tensor

from rollouts.backends.protocol import (
    BackendFeature,
    CheckpointingBackend,
    Future,
    OutputFn,
    StreamsWeights,
    TrainingBackend,
    count_shards,
    find_outputs,
    find_token_spec,
    get_backend_features,
    require_backend_feature,
)
from rollouts.backends.unread_metrics import RecordedTokens, UnreadMetrics
from rollouts.errors import BackendError, raise_single_errors
from rollouts.models.tokens import TokenSpec
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_specs import WeightSpec

T = TypeVar("T")


class TrainFuture(Generic[T]):
    """Result or error of a submitted job. None is a valid result. Any number of tasks may wait; waiting can be cancelled."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.was_awaited = False  # whether a task has seen the outcome; errors not seen are raised at the end
        self._finished = trio.Event()
        self._value: T | UnreadMetrics | None = None
        self._error: BaseException | None = None

    def set_result(self, value: T | UnreadMetrics) -> None:
        """Finish with a value, or with metrics that result() reads. A future is finished once."""
        assert not self.done(), f"the future of {self.operation} is finished already"
        self._value = value
        self._finished.set()

    def set_error(self, error: BaseException) -> None:
        """Finish with an exception, which gets a note naming the operation."""
        assert not self.done(), f"the future of {self.operation} is finished already"
        error.add_note(f"raised in the training job {self.operation!r}")
        self._error = error
        self._finished.set()

    @property
    def error(self) -> BaseException | None:
        """Exception of the job, if it has failed."""
        return self._error

    def done(self) -> bool:
        """Whether result() returns or raises at once."""
        return self._finished.is_set()

    async def result(self) -> T:
        """Wait for the job; return its value or raise its error."""
        await self._finished.wait()
        self.was_awaited = True
        if self._error is not None:
            raise self._error
        if isinstance(self._value, UnreadMetrics):
            read = self._value.read
            return cast("T", read() if self._value.is_read else await trio.to_thread.run_sync(read))
        return cast("T", self._value)


class ImmediateTrainFuture(Generic[T]):
    """Result of a job that ran during its submission."""

    def __init__(self, value: T | UnreadMetrics, operation: str = "") -> None:
        self.operation = operation
        self.outcome = value  # metrics that nobody has read are still on their device

    @property
    def value(self) -> T:
        """Value of the job; metrics are read now."""
        return cast("T", self.outcome.read() if isinstance(self.outcome, UnreadMetrics) else self.outcome)

    def done(self) -> bool:
        """Return True."""
        return True

    async def result(self) -> T:
        """Return the value after a trio checkpoint, which lets other tasks run."""
        await trio.lowlevel.checkpoint()
        return self.value


class Pipeline:
    """TrainingBackend whose jobs run one after another in a worker thread. Made by open_pipeline.

    It has the features of its backend. A method of another feature raises ConfigError.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend
        self._futures: list[TrainFuture[Any]] = []
        self._open = True
        self._send, self._receive = trio.open_memory_channel[tuple[Callable[[], Future[Any]], TrainFuture[Any]]](math.inf)

    # -- features, read at once, since they never change

    @property
    def features(self) -> frozenset[BackendFeature]:
        """Features of the backend."""
        return get_backend_features(self.backend)

    @property
    def token_spec(self) -> TokenSpec | None:
        """Vocabulary of the model; None = not known."""
        return find_token_spec(self.backend)

    @property
    def computes(self) -> frozenset[str] | None:
        """Fields of TokenOutputs that the backend fills; None = not known."""
        return find_outputs(self.backend)

    @property
    def num_shards(self) -> int:
        """Number of processes that share the rows of a call."""
        return count_shards(self.backend)

    # -- TrainingBackend

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Submit a pass without gradient."""
        return self._submit("forward", lambda: self.backend.forward(batch, output_fn, with_entropy=with_entropy))

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """Submit a pass that adds to the gradient."""
        return self._submit("forward_backward", lambda: self.backend.forward_backward(batch, loss_fn, with_entropy=with_entropy))

    def optim_step(self) -> Future[dict[str, float]]:
        """Submit an update."""
        return self._submit("optim_step", self.backend.optim_step)

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """Submit a snapshot of the weights."""
        return self._submit("get_weights", self.backend.get_weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """Submit a replacement of the weights."""
        return self._submit("load_weights", lambda: self.backend.load_weights(weights))

    # -- methods of features

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Submit a pass of the model below the adapters."""
        backend = require_backend_feature(self.backend, BackendFeature.ADAPTERS, "Pipeline.forward_base")
        return self._submit("forward_base", lambda: backend.forward_base(batch, output_fn, with_entropy=with_entropy))

    def check_balance(self) -> None:
        """Run check_balance of the backend at once."""
        require_backend_feature(self.backend, BackendFeature.EXPERTS, "Pipeline.check_balance").check_balance()

    def check_replay(self) -> None:
        """Run check_replay of the backend at once."""
        require_backend_feature(self.backend, BackendFeature.EXPERTS, "Pipeline.check_replay").check_replay()

    def count_experts(self, batch: TrainBatch) -> Future[None]:
        """Submit a pass that counts the load of the experts."""
        backend = require_backend_feature(self.backend, BackendFeature.EXPERTS, "Pipeline.count_experts")
        return self._submit("count_experts", lambda: backend.count_experts(batch))

    def take_recorded(self) -> Future[tuple[RecordedTokens, ...]]:
        """Submit a request for what was kept of recorded rows, which waits for earlier jobs."""
        backend = require_backend_feature(self.backend, BackendFeature.RECORDS, "Pipeline.take_recorded")
        return self._submit("take_recorded", backend.take_recorded)

    def save_checkpoint(self, directory: Path | str) -> Future[None]:
        """Submit the writing of all state."""
        backend = self._require_checkpoints("save_checkpoint")
        return self._submit("save_checkpoint", lambda: backend.save_checkpoint(Path(directory)))

    def stage_checkpoint(self, directory: Path | str) -> Future[Callable[[], None]]:
        """Submit the copying of all state."""
        backend = require_backend_feature(self.backend, BackendFeature.STAGED_CHECKPOINTS, "Pipeline.stage_checkpoint")
        return self._submit("stage_checkpoint", lambda: backend.stage_checkpoint(Path(directory)))

    def load_checkpoint(self, directory: Path | str) -> Future[None]:
        """Submit the restoring of all state."""
        backend = self._require_checkpoints("load_checkpoint")
        return self._submit("load_checkpoint", lambda: backend.load_checkpoint(Path(directory)))

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> Future[None]:
        """Submit the writing of the weights alone."""
        backend = self._require_checkpoints("export_weights")
        return self._submit("export_weights", lambda: backend.export_weights(Path(directory), dtype=dtype))

    def view_weights(self) -> Future[Mapping[str, Tensor]]:
        """Submit a request for the weights that are trained, which wait for earlier jobs."""
        backend = require_backend_feature(self.backend, BackendFeature.WEIGHT_VIEWS, "Pipeline.view_weights")
        return self._submit("view_weights", backend.view_weights)

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """Submit a request for names, dtypes and shapes of the weights."""
        return self._submit("describe_weights", self._require_stream("describe_weights").describe_weights)

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """Submit a copy of the weights with these names."""
        backend = self._require_stream("gather_weights")
        return self._submit("gather_weights", lambda: backend.gather_weights(names, keep_device=keep_device))

    def _require_checkpoints(self, operation: str) -> CheckpointingBackend:
        return require_backend_feature(self.backend, BackendFeature.CHECKPOINTS, f"Pipeline.{operation}")

    def _require_stream(self, operation: str) -> StreamsWeights:
        return require_backend_feature(self.backend, BackendFeature.WEIGHT_STREAM, f"Pipeline.{operation}")

    # -- jobs

    def _submit(self, operation: str, job: Callable[[], Future[T]]) -> TrainFuture[T]:
        assert self._open, f"{operation} was submitted after the block of its pipeline: submit inside `async with open_pipeline(...)`"
        future: TrainFuture[T] = TrainFuture(operation)
        # keep finished jobs only if nobody has seen their error
        self._futures = [f for f in self._futures if not f.done() or (f.error is not None and not f.was_awaited)]
        self._futures.append(future)
        self._send.send_nowait((job, future))
        return future

    async def run_jobs(self) -> None:
        """Run submitted jobs until close(), as a task of open_pipeline's nursery."""
        async for job, future in self._receive:
            try:
                inner = await trio.to_thread.run_sync(job)
                value = inner.outcome if isinstance(inner, ImmediateTrainFuture) else await inner.result()
            except Exception as error:  # every error belongs to the future; raise_lost_errors raises unseen ones
                future.set_error(error)
            else:
                future.set_result(value)

    def close(self) -> None:
        """Accept no more jobs; run_jobs returns after the submitted ones."""
        self._open = False
        self._send.close()

    def drop_jobs(self) -> None:
        """Fail every job that has not run, so that its waiters return."""
        self._open = False
        for future in self._futures:
            if not future.done():
                future.set_error(BackendError(f"{future.operation} was dropped because its pipeline ended with an exception"))

    def raise_lost_errors(self) -> None:
        """Raise the errors that nobody awaited."""
        lost = [f.error for f in self._futures if f.error is not None and not f.was_awaited]
        if len(lost) == 1:
            raise lost[0]
        if lost:
            raise BaseExceptionGroup("training jobs failed and nobody awaited them", lost)


@asynccontextmanager
async def open_pipeline(backend: TrainingBackend) -> AsyncGenerator[Pipeline]:
    """Run a backend's jobs in one worker thread, in the order of submission, so that training and the event loop overlap.

    The end of the block waits for submitted jobs. Awaiting a job's future raises its error; errors that nobody awaited are raised at the
    end of the block (several as a group). If the block itself raises, jobs that have not begun are dropped. The backend stays usable.

    Yields: a TrainingBackend with the features of `backend`.
    """
    pipeline = Pipeline(backend)
    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pipeline.run_jobs)
                try:
                    yield pipeline
                except BaseException:
                    nursery.cancel_scope.cancel()
                    raise
                finally:
                    pipeline.close()
    except BaseException:
        pipeline.drop_jobs()
        raise
    pipeline.raise_lost_errors()

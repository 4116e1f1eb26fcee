"""Handles to training jobs, and the pipeline that runs them in order beside the event loop.

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
    CheckpointingBackend,
    DescribesOutputs,
    Future,
    OutputFn,
    ShardsRows,
    StreamsWeights,
    TrainingBackend,
    TrainsAdapters,
)
from rollouts.backends.token_spec import DescribesTokens, TokenSpec
from rollouts.errors import BackendError, raise_single_errors
from rollouts.types import LossFn, TrainBatch
from rollouts.weight_plan import WeightSpec

T = TypeVar("T")


class TrainFuture(Generic[T]):
    """The result of a submitted job, or its error. None is a valid result. Any number of tasks may wait; waiting can be cancelled."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.was_awaited = False  # whether somebody has seen the outcome, so that an error is not lost
        self._finished = trio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def set_result(self, value: T) -> None:
        """Finish with a value. A future is finished once."""
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
        """The exception that the job ended with, if it has ended with one."""
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
        return cast("T", self._value)


class ImmediateTrainFuture(Generic[T]):
    """The result of a job that ran while it was submitted."""

    def __init__(self, value: T, operation: str = "") -> None:
        self.operation = operation
        self.value = value

    def done(self) -> bool:
        """True."""
        return True

    async def result(self) -> T:
        """The value, after a checkpoint: other tasks get their turn."""
        await trio.lowlevel.checkpoint()
        return self.value


class Pipeline:
    """A TrainingBackend whose jobs run one after another in a worker thread. Made by open_pipeline."""

    def __init__(self, backend: TrainingBackend) -> None:
        self.backend = backend
        self._futures: list[TrainFuture[Any]] = []
        self._open = True
        self._send, self._receive = trio.open_memory_channel[tuple[Callable[[], Future[Any]], TrainFuture[Any]]](math.inf)

    @property
    def token_spec(self) -> TokenSpec | None:
        """See DescribesTokens; read at once, since it never changes."""
        return self.backend.token_spec if isinstance(self.backend, DescribesTokens) else None

    @property
    def computes(self) -> frozenset[str] | None:
        """See DescribesOutputs."""
        return self.backend.computes if isinstance(self.backend, DescribesOutputs) else None

    @property
    def num_shards(self) -> int:
        """See ShardsRows."""
        return self.backend.num_shards if isinstance(self.backend, ShardsRows) else 1

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """See TrainingBackend."""
        return self._submit("forward", lambda: self.backend.forward(batch, output_fn, with_entropy=with_entropy))

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """See TrainingBackend."""
        return self._submit("forward_backward", lambda: self.backend.forward_backward(batch, loss_fn, with_entropy=with_entropy))

    def optim_step(self) -> Future[dict[str, float]]:
        """See TrainingBackend."""
        return self._submit("optim_step", self.backend.optim_step)

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """See TrainingBackend."""
        return self._submit("get_weights", self.backend.get_weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """See TrainingBackend."""
        return self._submit("load_weights", lambda: self.backend.load_weights(weights))

    @property
    def trains_adapters(self) -> bool:
        """See TrainsAdapters."""
        return isinstance(self.backend, TrainsAdapters) and self.backend.trains_adapters

    def forward_base(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """See TrainsAdapters."""
        backend = self.backend
        assert isinstance(backend, TrainsAdapters), f"{type(backend).__name__} trains no adapters"
        return self._submit("forward_base", lambda: backend.forward_base(batch, output_fn, with_entropy=with_entropy))

    def _submit(self, operation: str, job: Callable[[], Future[T]]) -> TrainFuture[T]:
        assert self._open, f"{operation} was submitted after the block of its pipeline: submit inside `async with open_pipeline(...)`"
        future: TrainFuture[T] = TrainFuture(operation)
        # of finished jobs only those whose error nobody has seen are kept
        self._futures = [f for f in self._futures if not f.done() or (f.error is not None and not f.was_awaited)]
        self._futures.append(future)
        self._send.send_nowait((job, future))
        return future

    async def run_jobs(self) -> None:
        """Run what is submitted until close(). One task of open_pipeline's nursery."""
        async for job, future in self._receive:
            try:
                inner = await trio.to_thread.run_sync(job)
                value = await inner.result()
            except Exception as error:  # every error belongs to the future; nothing is swallowed, see raise_lost_errors
                future.set_error(error)
            else:
                future.set_result(value)

    def close(self) -> None:
        """Accept no more jobs; run_jobs ends after those submitted."""
        self._open = False
        self._send.close()

    def drop_jobs(self) -> None:
        """Give every job that has not run an error instead, so that nobody waits for it in vain."""
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


class CheckpointingPipeline(Pipeline):
    """A Pipeline over a backend that can save and restore."""

    def __init__(self, backend: TrainingBackend, saver: CheckpointingBackend) -> None:
        super().__init__(backend)
        self._saver = saver

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        return self._submit("save_checkpoint", lambda: self._saver.save_checkpoint(directory))

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        return self._submit("load_checkpoint", lambda: self._saver.load_checkpoint(directory))

    def export_weights(self, directory: Path) -> Future[None]:
        """See CheckpointingBackend."""
        return self._submit("export_weights", lambda: self._saver.export_weights(directory))


class StreamingPipeline(CheckpointingPipeline):
    """A CheckpointingPipeline over a backend that also hands its weights over a few at a time."""

    def __init__(self, backend: TrainingBackend, saver: CheckpointingBackend, stream: StreamsWeights) -> None:
        super().__init__(backend, saver)
        self._stream = stream

    def describe_weights(self) -> Future[tuple[WeightSpec, ...]]:
        """See StreamsWeights."""
        return self._submit("describe_weights", self._stream.describe_weights)

    def gather_weights(self, names: Sequence[str], *, keep_device: bool = False) -> Future[Mapping[str, Tensor]]:
        """See StreamsWeights."""
        return self._submit("gather_weights", lambda: self._stream.gather_weights(names, keep_device=keep_device))


def _create_pipeline(backend: TrainingBackend) -> Pipeline:
    """With what the backend can do."""
    if not isinstance(backend, CheckpointingBackend):
        return Pipeline(backend)
    if isinstance(backend, StreamsWeights):
        return StreamingPipeline(backend, backend, backend)
    return CheckpointingPipeline(backend, backend)


@asynccontextmanager
async def open_pipeline(backend: TrainingBackend) -> AsyncGenerator[Pipeline]:
    """Run a backend's jobs in one worker thread, in the order of submission, so that training and the event loop overlap.

    The block waits for submitted jobs when it ends. A job's error goes to whoever awaits its future; one that nobody awaited is raised
    here (several as a group). If the block itself raises, jobs that have not begun are dropped. The backend stays usable afterwards.

    Yields: a TrainingBackend, a CheckpointingBackend if `backend` is one, and then StreamsWeights if it is that, too.
    """
    pipeline = _create_pipeline(backend)
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

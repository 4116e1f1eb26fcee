"""FakeBackend, a training backend that trains nothing, and FakeWeightChannel between it and an engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import trio
from torch import Tensor

from rollouts.backends.protocol import BackendFeature, Future, OutputFn
from rollouts.batches import find_context_starts
from rollouts.engines.protocol import ReadBucket
from rollouts.errors import CheckpointError, EngineError, RolloutsError
from rollouts.testing.engines import Call, FakeEngine
from rollouts.types import LossFn, TokenOutputs, TrainBatch
from rollouts.weight_specs import WeightSpec, cast_bucket, plan_weights


class FakeWeightChannel:
    """A WeightChannel that reads every bucket and hands all of them to fake engines at its end."""

    def __init__(self, engines: Sequence[FakeEngine], *, bucket_bytes: int = 2**20, fails_at: int | None = None) -> None:
        """
        Args:
            engines: receivers of the weights.
            bucket_bytes: see plan_weights.
            fails_at: index of the bucket to refuse with an EngineError; None = none.
        """
        self.buckets: list[tuple[str, ...]] = []  # names in each bucket read, over all transfers
        self.wants_device = False
        self._engines, self._bucket_bytes, self._fails_at = engines, bucket_bytes, fails_at

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """Read, then update each engine."""
        weights: dict[str, Tensor] = {}
        for bucket in plan_weights(specs, self._bucket_bytes).buckets:
            if bucket.index == self._fails_at:
                raise EngineError(f"bucket {bucket.index} was refused")
            weights.update(cast_bucket(bucket, await read(bucket)))
            self.buckets.append(bucket.names)
        return [await engine.update_weights(weights, weight_version) for engine in self._engines]


T = TypeVar("T")


class _TimedFuture(Generic[T]):
    """Result or error, available at once (ready_at None) or from a moment of trio's time on."""

    def __init__(self, ready_at: float | None, value: T, error: Exception | None) -> None:
        self._ready_at, self._value, self._error = ready_at, value, error

    async def result(self) -> T:
        if self._ready_at is not None:
            await trio.sleep_until(self._ready_at)
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return self._ready_at is None or trio.current_time() >= self._ready_at


_STATE_FILE = "fake_backend.json"


class FakeBackend:
    """A TrainingBackend without a model, with checkpoints.

    Its policy gives every token the log-prob -1 / (1 + number of optimizer steps), so that losses change. Loss functions are called on it,
    without gradient: a batch that a loss cannot process fails here as in training. Jobs take effect when they are submitted; their results
    are available after seconds_per_job, one job after another.
    """

    features = frozenset({BackendFeature.CHECKPOINTS})

    def __init__(
        self,
        *,
        seconds_per_job: float = 0.0,
        error_for: Callable[[str, int], Exception | None] | None = None,
        lr: float = 1e-3,
        name: str = "backend",
        calls: MutableSequence[Call] | None = None,
    ) -> None:
        """
        Args:
            seconds_per_job: seconds of trio's time; 0 = results are available at once, and done() needs no event loop.
            error_for: (method, number of earlier calls of it) -> exception for this job's future to raise; None = none.
            lr: learning rate that optim_step reports.
            name: name in `calls`.
            calls: sequence to append to, such as deque(maxlen=100) for a long run; default a new list of all.
        """
        self.name = name
        self.calls: MutableSequence[Call] = [] if calls is None else calls
        self.num_updates = 0
        self._seconds_per_job = seconds_per_job
        self._error_for = error_for
        self._lr = lr
        self._free_at = 0.0  # time at which the last submitted job ends
        self._counts: Counter[str] = Counter()

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """Return output_fn of the fake policy's outputs."""
        return self._submit(
            "forward", {"rows": batch.num_rows, "with_entropy": with_entropy}, lambda: output_fn(self._outputs(batch, with_entropy))
        )

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """Return loss and metrics of loss_fn on the fake policy's outputs."""

        def evaluate() -> dict[str, float]:
            with torch.no_grad():
                output = loss_fn(self._outputs(batch, with_entropy), batch)
            metrics = {key: float(value) for key, value in output.metrics.items()}
            return {"loss": float(output.loss), "num_tokens": float((batch.loss_mask > 0).sum()), **metrics}

        return self._submit("forward_backward", {"rows": batch.num_rows, "with_entropy": with_entropy}, evaluate)

    def optim_step(self) -> Future[dict[str, float]]:
        """Count an update."""

        def update() -> dict[str, float]:
            self.num_updates += 1
            return {"grad_norm": 1.0 / self.num_updates, "lr": self._lr}

        return self._submit("optim_step", {}, update)

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """Return the only weight: {"num_updates": [1]}."""
        return self._submit("get_weights", {}, lambda: {"num_updates": torch.tensor([float(self.num_updates)])})

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """Load the result of get_weights."""
        assert set(weights) == {"num_updates"}, f"weights have names {sorted(weights)}, expected those of get_weights: ['num_updates']"
        return self._submit("load_weights", {}, lambda: self._set_updates(int(weights["num_updates"].item())))

    def save_checkpoint(self, directory: Path | str) -> Future[None]:
        """Write the number of updates."""
        return self._submit("save_checkpoint", {"directory": Path(directory)}, lambda: self._write(Path(directory)))

    def load_checkpoint(self, directory: Path | str) -> Future[None]:
        """Read the number of updates. Raises CheckpointError, through the future, if the directory holds none."""

        def load() -> None:
            path = Path(directory) / _STATE_FILE
            if not path.exists():
                raise CheckpointError(f"{directory} has no {_STATE_FILE}: it is not a checkpoint of a FakeBackend")
            self._set_updates(json.loads(path.read_text())["num_updates"])

        return self._submit("load_checkpoint", {"directory": Path(directory)}, load)

    def export_weights(self, directory: Path | str, *, dtype: str | None = None) -> Future[None]:
        """Write the number of updates."""
        return self._submit("export_weights", {"directory": Path(directory), "dtype": dtype}, lambda: self._write(Path(directory)))

    def _submit(self, method: str, arguments: Mapping[str, Any], job: Callable[[], T]) -> Future[T]:
        self.calls.append(Call(self.name, method, arguments))
        error = None if self._error_for is None else self._error_for(method, self._counts[method])
        self._counts[method] += 1
        value: Any = None
        if error is None:
            try:
                value = job()
            except (RolloutsError, AssertionError) as raised:
                error = raised
        ready_at = None
        if self._seconds_per_job > 0:
            ready_at = self._free_at = max(self._free_at, trio.current_time()) + self._seconds_per_job
        return _TimedFuture(ready_at, value, error)

    def _outputs(self, batch: TrainBatch, with_entropy: bool) -> TokenOutputs:
        columns = torch.arange(batch.tokens.shape[1])
        first = (columns == 0).expand_as(batch.tokens) if batch.context_ids is None else find_context_starts(batch.context_ids)
        real = (~first & (columns < batch.lengths[:, None])).float()  # [B, T]; no prediction for the first token of a context
        return TokenOutputs(log_probs=-real / (1 + self.num_updates), entropy=real / (1 + self.num_updates) if with_entropy else None)

    def _set_updates(self, num_updates: int) -> None:
        self.num_updates = num_updates

    def _write(self, directory: Path) -> None:
        (directory / _STATE_FILE).write_text(json.dumps({"num_updates": self.num_updates}))

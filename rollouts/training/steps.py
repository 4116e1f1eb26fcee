"""Steps of a training loop: one optimizer step, a forward pass over a batch of any size, a checkpoint of the run.

All jobs are submitted before any is awaited, so a pipelined backend goes from job to job without waiting for the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import trio
from torch import Tensor

from rollouts.algorithms.losses import merge_metrics
from rollouts.algorithms.preferences import order_pairs, split_pairs
from rollouts.backends.futures import TrainFuture
from rollouts.backends.protocol import (
    BackendFeature,
    CheckpointingBackend,
    Future,
    OutputFn,
    RoutesExperts,
    TrainingBackend,
    count_shards,
    get_backend_features,
    require_backend_feature,
)
from rollouts.batches import find_shared_prompts, plan_sharded_microbatches, plan_shared_microbatches, select_rows
from rollouts.errors import BackendError, CheckpointError, raise_single_errors
from rollouts.training.saving.checkpoints import list_checkpoints, run_shielded, stage_checkpoint
from rollouts.training.saving.run_state import RunState
from rollouts.types import LossFn, TrainBatch

Metrics: TypeAlias = dict[str, float]
EvaluateFn: TypeAlias = Callable[[], Awaitable[Mapping[str, float]]]
"""Measures the current model, for example evaluate_prompts on held-out prompts; its keys are logged unchanged."""


def measure_throughput(metrics: Metrics, num_tokens: int) -> None:
    """Add tokens_per_s, the tokens of a step's rows, prompts included, for each second of its step_s, unless that is 0."""
    if metrics.get("step_s", 0.0) > 0:
        metrics["tokens_per_s"] = num_tokens / metrics["step_s"]


class Abandonment:
    """Request, made by another task, to give up what loses the step under way, or its evaluation, and nothing else: never an update."""

    def __init__(self) -> None:
        self.is_requested = False
        self._guards: list[AbandonedWork] = []
        self._tell: Callable[[str], None] = lambda work: None

    def request(self, tell: Callable[[str], None] | None = None) -> None:
        """Cancel the guarded work, and all that comes.

        Args:
            tell: called with the name of each work that is given up, once it has ended; not for work that ends by itself.
        """
        self.is_requested = True
        if tell is not None:
            self._tell = tell
        for guard in tuple(self._guards):
            guard.cancel()

    @contextmanager
    def guard(self, work: str, take_state: Callable[[], Mapping[str, Any]] = dict[str, Any]) -> Generator[AbandonedWork]:
        """Guard the block: a request cancels it.

        Args:
            work: name of what the block does, for messages.
            take_state: called before the block is cancelled; its result is the state to go on from.
        """
        scope = trio.CancelScope()
        guarded = AbandonedWork(scope, take_state)
        with scope:
            self._guards.append(guarded)
            if self.is_requested:
                guarded.cancel()
            try:
                yield guarded
            finally:
                self._guards.remove(guarded)
        if guarded.is_abandoned:
            self._tell(work)


class AbandonedWork:
    """Work in a block that may be given up."""

    def __init__(self, scope: trio.CancelScope, take_state: Callable[[], Mapping[str, Any]]) -> None:
        self._scope, self._take_state = scope, take_state
        self.state: Mapping[str, Any] | None = None  # result of take_state, once the block is cancelled

    @property
    def is_abandoned(self) -> bool:
        """Whether the block was cancelled before its end."""
        return self._scope.cancelled_caught

    def cancel(self) -> None:
        """Take the state, and cancel the block."""
        if self.state is None:
            self.state = self._take_state()
        self._scope.cancel()


@dataclass(frozen=True)
class PendingOptimizerStep:
    """Submitted jobs of one optimizer step."""

    parts: tuple[Future[dict[str, float]], ...]
    update: Future[dict[str, float]]
    counts: tuple[Future[None], ...] = ()  # passes before the others, which count the load of the experts

    async def result(self) -> Metrics:
        """Return the metrics of the whole step: loss (a sum over micro-batches), num_tokens, the loss's means, and those of the update."""
        for count in self.counts:
            await count.result()
        try:
            updated = await self.update.result()  # first, since it reads the metrics of all parts at once
        except Exception:
            for part in self.parts:
                if isinstance(part, TrainFuture) and part.error is not None:  # the reason why there was nothing to update by
                    await part.result()
            raise
        return merge_step_metrics([await part.result() for part in self.parts]) | updated


def submit_optimizer_step(
    backend: TrainingBackend,
    batch: TrainBatch,
    loss: LossFn,
    *,
    weigh: Callable[[TrainBatch], Tensor],
    max_tokens_per_microbatch: int,
    with_entropy: bool = False,
    router_balance_coef: float = 0.0,
) -> PendingOptimizerStep:
    """Submit the forward_backward calls of a batch, split into micro-batches, and the update that follows them.

    The loss weights are computed on the whole batch before it is split, so the gradient does not depend on the split. Rows without a
    trained token have no gradient and are then left out.

    Args:
        batch: the rows of one optimizer step, with advantages if the loss reads them.
        loss: (TokenOutputs, TrainBatch) -> LossOutput.
        weigh: TrainBatch -> loss_weights [B, T].
        max_tokens_per_microbatch: most real tokens of one process in a forward_backward; a longer row has a micro-batch of its own.
        router_balance_coef: coefficient of the load-balancing loss of a mixture of experts, see expert_load.py. Its factors are counted
            over the whole step: with several micro-batches or processes by a further forward pass of each, without gradient.

    Raises: ConfigError for a router_balance_coef that the backend cannot apply.
    """
    batch = select_trained_rows(replace(batch, loss_weights=weigh(batch)))
    micro = _split_step(backend, batch, max_tokens_per_microbatch)
    counts: tuple[Future[None], ...] = ()
    if router_balance_coef:
        balancing = require_balance(backend)
        micro = [replace(part, router_balance=torch.full_like(part.rewards, router_balance_coef)) for part in micro]
        if len(micro) > 1 or count_shards(backend) > 1:
            counts = tuple(balancing.count_experts(part) for part in micro)
    parts = tuple(backend.forward_backward(part, loss, with_entropy=with_entropy) for part in micro)
    return PendingOptimizerStep(parts=parts, update=backend.optim_step(), counts=counts)


def _split_step(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> list[TrainBatch]:
    """Split the trained rows of a step into the batches of its calls; of a batch with pair_ids each holds whole pairs, side by side."""
    if batch.pair_ids is not None:
        return split_pairs(select_rows(batch, order_pairs(batch)), max_tokens=max_tokens, num_shards=count_shards(backend))
    plan = [
        [rows[i] for i in part]
        for rows in split_by_gradient(backend, batch)
        for part in plan_backend_microbatches(backend, select_rows(batch, rows), max_tokens)
    ]
    return [select_rows(batch, rows) for rows in plan]


def require_balance(backend: TrainingBackend) -> RoutesExperts:
    """Return the backend as one that balances experts. Raises ConfigError, with the reason, if it or its model cannot."""
    advice = "Set it to 0, or train with the PyTorch, functional or FSDP backend."
    balancing = require_backend_feature(backend, BackendFeature.EXPERTS, "router_balance_coef", instead=advice)
    balancing.check_balance()
    return balancing


def require_replay(backend: TrainingBackend) -> None:
    """Raise ConfigError, with the reason, unless the backend can replay recorded experts."""
    advice = "Set it to False, or train with the PyTorch, functional or FSDP backend."
    require_backend_feature(backend, BackendFeature.EXPERTS, "router_replay", instead=advice).check_replay()


def plan_backend_microbatches(backend: TrainingBackend, batch: TrainBatch, max_tokens: int) -> list[list[int]]:
    """Plan the rows of each call, so that no process of the backend has more than max_tokens at once.

    A prompt that rows share counts once, if the backend computes it once.
    """
    lengths, num_shards = batch.lengths.tolist(), count_shards(backend)
    shared = find_shared_prompts(batch) if _skips_redundant(backend) else None
    if shared is not None and num_shards == 1:
        return plan_shared_microbatches(lengths, shared, max_tokens=max_tokens)
    return plan_sharded_microbatches(lengths, max_tokens=max_tokens, num_shards=num_shards)


def split_by_gradient(backend: TrainingBackend, batch: TrainBatch) -> list[list[int]]:
    """Split the rows of a step in those with an advantage, and behind them those with none, as in a group of equal rewards.

    A backend passes on no gradient that is zero (BackendFeature.REDUNDANCY), which it can only see for a call as a whole. Whether these
    rows have a gradient is the loss's affair: a KL term gives them one.

    Returns: positions of rows, ascending; one list if the batch does not allow it (TrainBatch.skip_redundant) or all rows are of one kind.
    """
    rows = range(batch.num_rows)
    if batch.advantages is None or batch.router_balance is not None or not batch.skip_redundant or not _skips_redundant(backend):
        return [list(rows)]
    has_advantage = ((batch.advantages != 0) & (batch.loss_mask > 0)).any(1).tolist()
    parts = [[row for row in rows if has_advantage[row]], [row for row in rows if not has_advantage[row]]]
    return [part for part in parts if part]


def _skips_redundant(backend: TrainingBackend) -> bool:
    return BackendFeature.REDUNDANCY in get_backend_features(backend)


def find_trained_rows(batch: TrainBatch) -> list[int]:
    """Find the positions of the rows with a gradient: trainable, with a token of loss_mask > 0."""
    on = (batch.loss_mask > 0).any(1) & batch.trainable
    return [row for row, is_trained in enumerate(on.tolist()) if is_trained]


def select_trained_rows(batch: TrainBatch) -> TrainBatch:
    """Select the rows with a gradient; return the batch unchanged if none or all rows have one."""
    rows = find_trained_rows(batch)
    return batch if len(rows) in (0, batch.num_rows) else select_rows(batch, rows)


def merge_step_metrics(parts: Sequence[Mapping[str, float]]) -> Metrics:
    """Merge the metrics of one step's forward_backward calls: losses and token counts add, means are weighted by tokens."""
    assert parts, "an optimizer step needs at least one forward_backward result"
    means = [({k: v for k, v in part.items() if k not in ("loss", "num_tokens")}, int(part["num_tokens"])) for part in parts]
    totals = {key: sum(part[key] for part in parts) for key in ("loss", "num_tokens")}
    return totals | merge_metrics(means)


def mean_step_metrics(steps: Sequence[Mapping[str, float]]) -> Metrics:
    """Average the metrics of several optimizer steps: token-weighted means; num_tokens and num_bad_... add; lr is the last one's."""
    assert steps, "expected the metrics of at least one optimizer step"
    counted = sorted({name for step in steps for name in step if name.startswith("num_bad_")})
    bad = {name: sum(step.get(name, 0.0) for step in steps) for name in counted}
    skip = ("num_tokens", "lr", *bad)
    # a skipped update counts as one step; without tokens it would have no weight in any mean
    means = [({k: v for k, v in step.items() if k not in skip}, max(1, int(step["num_tokens"]))) for step in steps]
    sums = {"num_tokens": sum(s["num_tokens"] for s in steps)} | bad
    return merge_metrics(means) | sums | {k: v for k, v in steps[-1].items() if k == "lr"}


@dataclass(frozen=True, eq=False)
class PendingForward:
    """Submitted forward pass over a batch."""

    batch: TrainBatch
    parts: tuple[tuple[int, ...], ...]  # rows of each micro-batch
    futures: tuple[Future[Tensor], ...]  # one a micro-batch

    async def result(self) -> Tensor:
        """Return [B, T] in the row order of the batch, or [B, T, ...] as output_fn; 0 on pads and in untrained rows."""
        out = torch.zeros(self.batch.tokens.shape, dtype=torch.float32)
        for rows, future in zip(self.parts, self.futures, strict=True):
            part = await future.result()  # [rows, T of the micro-batch <= T, ...]
            if part.dim() > out.dim():
                out = torch.zeros((*out.shape, *part.shape[2:]), dtype=torch.float32)
            out[torch.tensor(rows), : part.shape[1]] = part
        return out


def submit_forward(
    backend: TrainingBackend, batch: TrainBatch, output_fn: OutputFn, *, max_tokens_per_microbatch: int, with_entropy: bool = False
) -> PendingForward:
    """Submit backend.forward over a batch of any size, by micro-batches. Rows without a trained token are not computed."""
    trained = find_trained_rows(batch)
    plan = plan_backend_microbatches(backend, select_rows(batch, trained), max_tokens_per_microbatch) if trained else []
    parts = tuple(tuple(trained[i] for i in part) for part in plan)
    futures = tuple(backend.forward(select_rows(batch, rows), output_fn, with_entropy=with_entropy) for rows in parts)
    return PendingForward(batch, parts, futures)


def require_checkpointing(backend: TrainingBackend) -> CheckpointingBackend:
    """Return the backend as a CheckpointingBackend. Raises ConfigError if it is none, before anything is trained."""
    advice = "Add its methods to the backend, or pass checkpoint_dir=None."
    return require_backend_feature(backend, BackendFeature.CHECKPOINTS, "checkpoint_dir", instead=advice)


async def stage_backend(backend: CheckpointingBackend, directory: Path) -> Callable[[], None]:
    """Take the state of a backend; return the function that writes it into an existing directory, to be called once, in any thread.

    A backend without BackendFeature.STAGED_CHECKPOINTS has written everything before this returns.
    """
    if BackendFeature.STAGED_CHECKPOINTS in get_backend_features(backend):
        staging = require_backend_feature(backend, BackendFeature.STAGED_CHECKPOINTS, "a checkpoint beside training")
        return await staging.stage_checkpoint(directory).result()
    await backend.save_checkpoint(directory).result()
    return lambda: None


class RunCheckpoints:
    """Checkpoints of a run, of which one at a time is written beside the training that follows it. Made by open_checkpoints."""

    def __init__(self, backend: TrainingBackend, directory: Path, keep_last_n: int, nursery: trio.Nursery) -> None:
        self._backend, self._directory, self._keep_last_n, self._nursery = require_checkpointing(backend), directory, keep_last_n, nursery
        self._ended = trio.Event()
        self._ended.set()
        self._error: Exception | None = None
        self._path: Path | None = None

    async def save(
        self,
        state: RunState,
        metrics: Mapping[str, float],
        *,
        protected: Collection[Path] = (),
        stage_more: Callable[[Path], Awaitable[Callable[[], None]]] | None = None,
    ) -> None:
        """Take the state for an exact continuation, and begin to write it to step_NNNN. Waits for the previous checkpoint.

        Args:
            state: state of the run after the last finished step; what it holds is read now.
            metrics: metrics of that step. If one of its updates was skipped, which may be the first of many, no checkpoint
                is deleted.
            protected: further checkpoints to keep.
            stage_more: takes the state of further files; as stage_backend.

        Raises: CheckpointError of this checkpoint or the previous one; older checkpoints are untouched then.
        """
        await self.wait()
        step = state.step

        async def stage(directory: Path) -> Callable[[], None]:
            write = await stage_backend(self._backend, directory)
            write_more = None if stage_more is None else await stage_more(directory)

            def write_all() -> None:
                write()
                if write_more is not None:
                    write_more()

            return write_all

        with _note_directory(step, self._directory):
            complete = await stage_checkpoint(
                self._directory,
                step,
                stage=stage,
                run_state=state.to_dict(),
                keep_last_n=self._keep_last_n,
                protected=(*protected, *_protect_while_skipping(self._directory, metrics)),
            )
        self._ended = trio.Event()
        self._nursery.start_soon(self._write, step, complete)

    async def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete; return its path, None before the first. Raises its error, once."""
        await self._ended.wait()
        self.check()
        return self._path

    async def list_complete(self) -> list[Path]:
        """Wait for the checkpoint that is being written, also if canceled, and list the complete ones, the oldest first."""
        with trio.CancelScope(shield=True):
            await self._ended.wait()
        return list_checkpoints(self._directory)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def set_error(self, error: Exception) -> None:
        """Keep the error of a write for the next check() or wait()."""
        self._error = error

    async def _write(self, step: int, complete: Callable[[], Path]) -> None:
        try:
            with _note_directory(step, self._directory):
                self._path = await run_shielded(complete)  # begun, it is completed whatever ends the run
        except Exception as error:  # it is raised where the run looks, so that the step under way ends first
            self.set_error(error)
        finally:
            self._ended.set()


@asynccontextmanager
async def open_checkpoints(
    backend: TrainingBackend, directory: Path | str | None, keep_last_n: int
) -> AsyncGenerator[RunCheckpoints | None]:
    """Write the checkpoints of a run beside its training; the end of the block waits for the last one, however the block ends.

    Yields: None without a directory.
    Raises: ConfigError for a backend that cannot save; at the end of the block, also of a canceled one, the error of the last checkpoint.
        It is a note on the error that ended the block, if one did.
    """
    if directory is None:
        yield None
        return
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            checkpoints = RunCheckpoints(backend, Path(directory), keep_last_n, nursery)
            try:
                yield checkpoints
            except BaseException as ended:
                try:
                    with trio.CancelScope(shield=True):
                        await checkpoints.wait()
                except Exception as error:
                    if isinstance(ended, trio.Cancelled):  # trio drops it, and would drop its notes
                        raise error from ended
                    ended.add_note(f"beside it, a checkpoint could not be written: {error}")
                raise
            await checkpoints.wait()


def _protect_while_skipping(checkpoint_dir: Path, metrics: Mapping[str, float]) -> tuple[Path, ...]:
    skipped = any(value > 0 for name, value in metrics.items() if name.rpartition("/")[2] == "update_skipped")
    return tuple(list_checkpoints(checkpoint_dir)) if skipped else ()


@asynccontextmanager
async def note_checkpoint(step: int, checkpoints: RunCheckpoints | None) -> AsyncGenerator[None]:
    """Note on a training failure in the block its step, counted from 1, and the checkpoint from which the run can continue.

    The checkpoint that is being written counts, so it is waited for.
    """
    try:
        yield
    except (BackendError, CheckpointError) as error:
        if isinstance(error, BackendError):
            error.step = step
        found = [] if checkpoints is None else await checkpoints.list_complete()
        error.add_note(_advise_where_to_go_on(step, found))
        raise


@contextmanager
def _note_directory(step: int, directory: Path) -> Generator[None]:
    """Note on a failure to write a checkpoint the step and the checkpoint from which the run can continue."""
    try:
        yield
    except (BackendError, CheckpointError) as error:
        error.add_note(_advise_where_to_go_on(step, list_checkpoints(directory)))
        raise


def _advise_where_to_go_on(step: int, checkpoints: Sequence[Path]) -> str:
    if not checkpoints:
        return f"in step {step}; there is no checkpoint before it"
    before = f"; if it fails there, too, move that directory away, and {checkpoints[-2].name} is next" if checkpoints[1:] else ""
    return (
        f"in step {step}; the last checkpoint, of finite weights, is {checkpoints[-1]}: --resume goes on from there{before}. With other "
        "settings, such as a lower learning rate, begin from its weights: --model.path"
    )


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Whether an action due every `every` finished steps is due after `step` of them; 0 = only after the last."""
    return step == num_steps or (every > 0 and step % every == 0)


def is_checkpoint_due(step: int, every: int, num_steps: int, metrics: Mapping[str, float], *, stopping: bool) -> bool:
    """Whether a checkpoint is written after `step` finished steps: after the last, and if it is due and the weights have changed.

    If all updates of a step were skipped, the previous checkpoint has the same weights. None is written then, so that a run that ends
    after many skipped updates continues from before the first.

    Args:
        metrics: metrics of the last of these steps.
        stopping: whether the run ends here.
    """
    has_changed = metrics.get("update_skipped", 0.0) < 1.0
    return stopping or step == num_steps or (has_changed and is_due(step, every, num_steps))

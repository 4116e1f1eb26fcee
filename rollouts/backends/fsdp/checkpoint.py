"""Checkpoints of sharded models: every rank writes and reads its part, and any number of ranks can load them.

    step_0060/              the model directory (weights/export.py)
              sharded/      optimizer state, by torch.distributed.checkpoint
                            trainer.pt     schedule, counters, the optimizer's settings
                            rng_00000.pt   random state of each rank

Optimizer state is kept by the names of parameters. A plain model in one process reads and writes the same files. The index of
torch.distributed.checkpoint (.metadata) is a pickle: load checkpoints only from sources whose programs you would run.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import trio
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.storage import WriteResult

from rollouts.backends.lora.files import Adapters, SavedAdapters, check_has_no_adapters
from rollouts.backends.optim.state import OptimizerState, plan_state, read_optimizer, write_optimizer
from rollouts.backends.optim.updates import Scheduler, UpdateCounts, read_counts
from rollouts.backends.pytorch.files import SHARDED_DIRECTORY, TRAINER_FILE, name_tensors, restore_random_state, take_random_state
from rollouts.backends.ranks.distributed import Ranks, explain_failures, gather_values
from rollouts.backends.weights.export import MAX_FILE_BYTES, Piece, agree, alone, call_agreed, collect_pieces, export_pieces, export_sharded
from rollouts.backends.weights.fill import check_shapes_fit, fill_weights, open_weights
from rollouts.checks import find_non_finite
from rollouts.errors import CheckpointError
from rollouts.models.weights import check_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_COMMON_FILE = "trainer.pt"
_FORMAT = 1
_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Progress:
    """Progress of a trainer: its state besides weights, optimizer and schedule."""

    counts: UpdateCounts
    weight_version: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's part of a checkpoint."""

    pieces: list[Piece]  # pieces of the weights
    tensors: dict[str, Tensor]  # optimizer state, by parameter/key
    common: dict[str, Any]  # state that is the same on every rank
    rng: dict[str, Tensor | None]


@dataclass(frozen=True, eq=False)
class _Found:
    """A checkpoint as one rank restores it, without weights."""

    adapters: SavedAdapters | None
    common: Mapping[str, Any]  # state that is the same on every rank
    state: OptimizerState  # tensors of common["tensors"] are still to be read into it
    rng: Mapping[str, Tensor | None]


def save_sharded(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    progress: Progress,
    directory: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: Ranks | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint. All ranks call it, and return when all of it is written.

    Args:
        directory: existing directory on a file system that all ranks share.
        ranks: None = this process alone.

    Raises: CheckpointError on all ranks if one of them cannot write.
    """
    ranks = ranks or alone()
    snapshot = take_snapshot(model, optimizer, scheduler, progress, ranks=ranks)
    write_snapshot(snapshot, model, directory, tokenizer=tokenizer, ranks=ranks, max_file_bytes=max_file_bytes)


def take_snapshot(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    progress: Progress,
    *,
    ranks: Ranks,
    copied: bool = False,
) -> Snapshot:
    """Collect this rank's part of a checkpoint. All ranks call it if the model has adapters, which are merged.

    Args:
        copied: copy everything to host memory, so that training can continue before it is written.

    Raises: CheckpointError on all ranks if parameters, adapters or the optimizer's state are not finite on one.
    """
    state = read_optimizer(model, optimizer)
    bad = find_non_finite([*model.named_parameters(), *name_tensors(state.values)])
    problem = None if bad is None else CheckpointError(f"{bad} is not finite: a checkpoint never holds a NaN. Older ones are as they were")
    agree(ranks, problem, "looking for weights that are not finite")
    tensors = {name: x for name, x in _flatten(state) if isinstance(x, Tensor)}
    others = {name: {key: x for key, x in values.items() if not isinstance(x, Tensor)} for name, values in state.values.items()}
    common = {
        "format": _FORMAT,
        "num_ranks": ranks.world_size,
        "optimizer": type(optimizer).__name__,
        "groups": state.groups,
        "tensors": {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()},
        "others": others,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        **asdict(progress.counts),
        "weight_version": progress.weight_version,
    }
    if copied:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        tensors = cast("dict[str, Tensor]", stager.stage(tensors))
        stager.close()
    return Snapshot(collect_pieces(model, ranks, copied=copied), tensors, common, take_random_state(ranks.device))


def write_snapshot(
    snapshot: Snapshot,
    model: PreTrainedModel,
    directory: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    ranks: Ranks,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a snapshot of take_snapshot; only the model's configuration is read. All ranks call it.

    Args:
        ranks: ranks with a group of their own if training continues meanwhile.

    Raises: CheckpointError on all ranks if one of them cannot write.
    """
    export_pieces(snapshot.pieces, model, directory, tokenizer, ranks=ranks, max_file_bytes=max_file_bytes)
    target = directory / SHARDED_DIRECTORY

    def write() -> None:
        target.mkdir(exist_ok=True)
        torch.save(snapshot.rng, target / _rng_file(ranks.rank))
        if ranks.rank == 0:
            torch.save(snapshot.common, target / _COMMON_FILE)

    call_agreed(ranks, f"writing the trainer's state to {target}", write, OSError, RuntimeError)  # torch.save raises either
    with explain_failures(ranks, f"writing optimizer state to {target}"):
        _save_tensors(snapshot.tensors, target, ranks)


def load_sharded(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    directory: Path,
    *,
    ranks: Ranks | None = None,
    adapters: Adapters | None = None,
) -> Progress:
    """Restore a checkpoint that save_sharded wrote on any number of ranks, or one of PyTorchTrainingBackend.

    Random state: each rank gets the state of the rank with its number. If there are more ranks now, each additional rank is seeded by rank
    0's state and its own number; after a checkpoint of one process, all ranks but rank 0 are. Only dropout depends on it.

    Args:
        model: sharded in any way, or not at all.
        optimizer: optimizer of the model's present parameters.
        ranks: None = this process alone.
        adapters: adapters of the model, if it has any. Their checkpoints hold them, see lora/files.py, and also the merged weights.

    Raises: CheckpointError, on all ranks alike and before anything is changed, if the directory is damaged or does not fit.
    """
    ranks = ranks or alone()
    if adapters is not None:
        adapters.fingerprint()  # ranks exchange messages for it: before one rank alone can fail
    examine = partial(_examine, model, optimizer, directory, ranks.rank, adapters)
    found = call_agreed(ranks, f"looking at the checkpoint {directory}", examine, CheckpointError)
    source = directory / SHARDED_DIRECTORY
    targets = {name: x for name, x in _flatten(found.state) if name in found.common["tensors"]}
    if targets:  # each rank alone: the reads follow from the index and its own shards
        read = partial(_read_tensors, targets, source)
        call_agreed(ranks, f"reading optimizer state from {source}", read, CheckpointError)

    def restore() -> None:
        fill_base = partial(_fill_base, model, ranks)
        try:
            if adapters is None or found.adapters is None:
                fill_base(directory)
            else:
                adapters.restore(found.adapters, fill_base)
            write_optimizer(model, optimizer, found.state)
            if scheduler is not None and found.common["scheduler"] is not None:
                scheduler.load_state_dict(found.common["scheduler"])
        except _READ_ERRORS as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{directory} cannot be restored into this {type(optimizer).__name__}: {error}") from error

    call_agreed(ranks, f"restoring the checkpoint {directory}", restore, CheckpointError)
    restore_random_state(found.rng, ranks.device)
    optimizer.zero_grad(set_to_none=True)
    return Progress(read_counts(found.common), int(found.common["weight_version"]))


def _examine(model: PreTrainedModel, optimizer: torch.optim.Optimizer, directory: Path, rank: int, adapters: Adapters | None) -> _Found:
    """Read and check what a rank restores, besides weights and tensors of optimizer state. Raises CheckpointError; changes nothing."""
    check_architecture(model, directory)
    with open_weights(model, directory) as files:
        check_shapes_fit(model, files.shapes, str(directory))
    saved: SavedAdapters | None = None
    if adapters is None:
        check_has_no_adapters(directory)
    else:
        saved = adapters.read(directory)
    common = _read_common(directory)
    return _Found(saved, common, plan_state(model, optimizer, common, directory), _read_rng(directory, common, rank))


def _flatten(state: OptimizerState) -> Iterator[tuple[str, Any]]:
    """Iterate over the values of optimizer state, by parameter/key."""
    return ((f"{name}/{key}", x) for name, values in state.values.items() for key, x in values.items())


def save_adapters(adapters: Adapters, model: PreTrainedModel, directory: Path, *, ranks: Ranks | None = None) -> None:
    """Write the adapters into a checkpoint, beside the files of save_sharded. All ranks call it.

    Raises: CheckpointError on all ranks if rank 0 cannot write.
    """
    ranks = ranks or alone()
    save = partial(adapters.save, directory, lambda base: _export_base(model, base, ranks), writes=ranks.rank == 0)
    call_agreed(ranks, f"writing adapters to {directory}", save, OSError, SafetensorError)


def _export_base(model: PreTrainedModel, directory: Path, ranks: Ranks) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    export_sharded(model, directory, ranks=ranks, base_alone=True)


def _fill_base(model: PreTrainedModel, ranks: Ranks, directory: Path) -> None:
    with open_weights(model, directory) as files:
        fill_weights(model, files, ranks.device, str(directory))


def _read_common(directory: Path) -> dict[str, Any]:
    """Read the state that all ranks share, from a checkpoint of either kind. Raises CheckpointError."""
    path = directory / SHARDED_DIRECTORY / _COMMON_FILE
    single = directory / TRAINER_FILE
    if not path.is_file() and not single.is_file():
        raise CheckpointError(
            f"{directory} has neither {SHARDED_DIRECTORY}/{_COMMON_FILE} nor {TRAINER_FILE}: it is a model, not a checkpoint; load it as "
            "--model.path"
        )
    if not path.is_file():
        return _read_single(single)
    try:
        common = cast("dict[str, Any]", torch.load(path, weights_only=True, map_location="cpu"))
        found = int(common["format"])
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if found != _FORMAT:
        raise CheckpointError(f"{path} has format {found}, this version reads format {_FORMAT}: go on with the version that wrote it")
    return common


def _read_single(path: Path) -> dict[str, Any]:
    """Read the state file of a one-process backend into the format of this module; tensors stay in the file until they are accessed."""
    try:
        state = cast("dict[str, Any]", torch.load(path, weights_only=True, map_location="cpu", mmap=True))
        kind = str(state.get("kind", "pytorch"))
        if kind != "pytorch":
            raise CheckpointError(
                f"{path} is of the backend {kind!r}, whose optimizer state is in another form: go on with --backend.kind {kind}, or begin "
                "from the weights alone with --model.path"
            )
        return {name: state[name] for name in ("scheduler", "num_updates", "num_skipped_in_a_row", "weight_version")} | {
            "usual_norm": state.get("usual_norm", 0.0),  # checkpoints of earlier versions have none
            "num_ranks": 1,
            "tensors": {},
            "whole": state["optimizer"],
            "rng": {"cpu": state["rng"], "cuda": state["cuda_rng"]},
        }
    except _READ_ERRORS as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _read_rng(directory: Path, common: Mapping[str, Any], rank: int) -> dict[str, Tensor | None]:
    """Read the random state of a rank, see load_sharded."""
    own = rank < int(common["num_ranks"])
    if "rng" in common:
        state = cast("dict[str, Tensor | None]", common["rng"])
    else:
        path = directory / SHARDED_DIRECTORY / _rng_file(rank if own else 0)
        try:
            state = cast("dict[str, Tensor | None]", torch.load(path, weights_only=True, map_location="cpu"))
            state = {"cpu": state["cpu"], "cuda": state["cuda"]}
        except _READ_ERRORS as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error
    if own:
        return state
    generator = torch.Generator()
    generator.set_state(cast("Tensor", state["cpu"]))
    generator.manual_seed(int(torch.randint(0, 2**62, (rank + 1,), generator=generator)[rank]))
    return {"cpu": generator.get_state(), "cuda": None}


def _save_tensors(tensors: dict[str, Tensor], target: Path, ranks: Ranks) -> None:
    """Save as torch.distributed.checkpoint does, in the same files. All ranks call it.

    The library's own exchanges send pickles over connections without passwords; here plans and results are plain values, and every rank
    computes the common plan from all of them.

    Raises: CheckpointError on all ranks if one of them cannot write.
    """
    leads = ranks.rank == 0
    planner, writer = DefaultSavePlanner(), FileSystemWriter(target)
    planner.set_up_planner(tensors, storage_meta=writer.storage_meta(), is_coordinator=leads)
    writer.set_up_storage_writer(leads, rank=ranks.rank, use_collectives=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    told = gather_values(ranks, [_describe_item(item) for item in local.items], operation="planning a checkpoint")
    plans, metadata = planner.create_global_plan(
        [SavePlan([_make_item(*item) for item in items], planner_data={name: (name,) for name, *_ in items}) for items in told]
    )
    problem: Exception | None = None
    results: list[tuple[Any, ...]] = []
    try:
        writes = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank]), planner)
        writes.wait()
        results = [_describe_result(result) for result in writes.value()]
    except (OSError, RuntimeError) as error:
        problem = error
    agree(ranks, problem, f"writing optimizer state to {target}")
    all_results = gather_values(ranks, results, operation="gathering what was written of a checkpoint")
    try:
        if leads:
            writer.finish(metadata, [[_make_result(*result) for result in part] for part in all_results])
    except (OSError, RuntimeError) as error:
        problem = error
    agree(ranks, problem, f"writing the index of {target}")


def _describe_item(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    offset = None if item.index.offset is None else tuple(item.index.offset)
    chunk = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return item.index.fqn, offset, item.index.index, item.type.name, *chunk, data.properties.dtype, tuple(data.size)


def _make_item(
    name: str,
    offset: tuple[int, ...] | None,
    index: int | None,
    kind: str,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    whole: tuple[int, ...],
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(whole))
    return WriteItem(_make_index(name, offset, index), WriteItemType[kind], tensor_data=data)


def _make_index(name: str, offset: tuple[int, ...] | None, index: int | None) -> MetadataIndex:
    return MetadataIndex(name, None if offset is None else torch.Size(offset), index)


def _describe_result(result: WriteResult) -> tuple[Any, ...]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else tuple(index.offset)
    return index.fqn, offset, index.index, result.size_in_bytes, stored.relative_path, stored.offset, stored.length


def _make_result(
    name: str, offset: tuple[int, ...] | None, index: int | None, num_bytes: int, path: str, begin: int, length: int
) -> WriteResult:
    return WriteResult(_make_index(name, offset, index), num_bytes, _StorageInfo(path, begin, length))


def _read_tensors(targets: dict[str, Any], source: Path) -> None:
    """Read optimizer state into the targets. Raises CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            load_dcp(targets, checkpoint_id=source, no_dist=True)
    except CheckpointException as error:  # derives from BaseException
        failures = cast("dict[int, tuple[BaseException, Any]]", error.failures)
        causes = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(failures.items()))
        raise CheckpointError(f"{source} cannot be read: {causes}") from error


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.pt"


class WriteFuture:
    """Future of a write that may still run, returned by an asynchronous save_checkpoint."""

    def __init__(self, job: Future[None], operation: str) -> None:
        self.operation = operation
        self._job = job

    def done(self) -> bool:
        """Whether result() returns or raises at once."""
        return self._job.done()

    def wait(self) -> None:
        """Block until everything is written on all ranks; raise the error of any of them."""
        self._job.result()

    async def result(self) -> None:
        """Call wait() from a task. Waiting can be cancelled; the write continues."""
        await trio.to_thread.run_sync(self.wait, abandon_on_cancel=True)


class AsyncWriter:
    """Run one write at a time in a thread, on every rank. Its exchanges have a process group of their own, apart from training."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: Ranks | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._current: WriteFuture | None = None

    def start(self, write: Callable[[Ranks], None], operation: str) -> WriteFuture:
        """Wait for the previous write, then begin this one. All ranks call it.

        Args:
            write: called with the ranks to exchange messages with, over gloo.

        Raises: the error of the previous write.
        """
        self.wait()
        if self._own is None:
            self._own = _separate(self._ranks)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._current = WriteFuture(self._thread.submit(write, self._own), operation)
        return self._current

    def wait(self) -> None:
        """Wait for the running write, if any, and raise its error, once."""
        current, self._current = self._current, None
        if current is not None:
            current.wait()

    def settle(self) -> None:
        """Wait for the running write, if any, whose error is told by its future alone."""
        with suppress(CheckpointError):
            self.wait()

    def close(self) -> None:
        """Call wait() and end the thread. The process group is kept for the next start(): destroying it would need all ranks."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None


def _separate(ranks: Ranks) -> Ranks:
    """Return the same ranks with a new group for host memory; all ranks call it."""
    group = None
    if ranks.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=ranks.timeout_s))
    return replace(ranks, group=group, device=torch.device("cpu"))

"""Checkpoints of sharded models: every rank writes and reads its part, and any number of ranks can go on from them.

    step_0060/              the model directory (weight_export)
              sharded/      optimizer state, by torch.distributed.checkpoint
                            trainer.pt     schedule, counters, the optimizer's settings
                            rng_00000.pt   random state of each rank

Optimizer state is kept by the names of parameters. A plain model in one process reads and writes the same files. The index of
torch.distributed.checkpoint (.metadata) is a pickle: load checkpoints only from where you would run programs from.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from rollouts.backends.adapter_files import Adapters, SavedAdapters, check_has_no_adapters
from rollouts.backends.distributed import Ranks, explain_failures
from rollouts.backends.optimizer_state import OptimizerState, plan_state, read_optimizer, write_optimizer
from rollouts.backends.trainer_files import SHARDED_DIRECTORY, TRAINER_FILE
from rollouts.backends.updates import Scheduler, UpdateCounts
from rollouts.backends.weight_export import MAX_FILE_BYTES, Piece, agree, alone, collect_pieces, export_pieces, export_sharded
from rollouts.backends.weight_fill import check_shapes_fit, fill_weights
from rollouts.backends.weight_sources import FileWeights
from rollouts.backends.weight_stream import check_architecture
from rollouts.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_COMMON_FILE = "trainer.pt"
_FORMAT = 1
_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Progress:
    """Where a trainer is, besides its weights, optimizer and schedule."""

    counts: UpdateCounts
    weight_version: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's part of everything that a checkpoint holds."""

    pieces: list[Piece]  # of the weights
    tensors: dict[str, Tensor]  # of the optimizer, as parameter/key
    common: dict[str, Any]  # the same on every rank
    rng: dict[str, Tensor | None]


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
        directory: exists, on a file system that all ranks share.
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
    """What this rank will write. All ranks call it where the model has adapters, which are merged.

    Args:
        copied: copy everything to host memory, so that training can go on before it is written.
    """
    state = read_optimizer(model, optimizer)
    tensors = {f"{name}/{key}": x for name, values in state.values.items() for key, x in values.items() if isinstance(x, Tensor)}
    others = {name: {key: x for key, x in values.items() if not isinstance(x, Tensor)} for name, values in state.values.items()}
    common = {
        "format": _FORMAT,
        "num_ranks": ranks.world_size,
        "optimizer": type(optimizer).__name__,
        "groups": state.groups,
        "tensors": {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()},
        "others": others,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "num_updates": progress.counts.num_updates,
        "num_skipped_in_a_row": progress.counts.num_skipped_in_a_row,
        "weight_version": progress.weight_version,
    }
    cuda = torch.cuda.get_rng_state(ranks.device) if ranks.device.type == "cuda" else None
    if copied:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        tensors = cast("dict[str, Tensor]", stager.stage(tensors))
        stager.close()
    return Snapshot(collect_pieces(model, ranks, copied=copied), tensors, common, {"cpu": torch.get_rng_state(), "cuda": cuda})


def write_snapshot(
    snapshot: Snapshot,
    model: PreTrainedModel,
    directory: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    ranks: Ranks,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write what take_snapshot took; of the model only the configuration is read. All ranks call it.

    Args:
        ranks: with a group of their own where the ranks train meanwhile.

    Raises: CheckpointError on all ranks if one of them cannot write.
    """
    export_pieces(snapshot.pieces, model, directory, tokenizer, ranks=ranks, max_file_bytes=max_file_bytes)
    target = directory / SHARDED_DIRECTORY
    problem: Exception | None = None
    try:
        target.mkdir(exist_ok=True)
        torch.save(snapshot.rng, target / _rng_file(ranks.rank))
        if ranks.rank == 0:
            torch.save(snapshot.common, target / _COMMON_FILE)
    except (OSError, RuntimeError) as error:  # torch.save raises either
        problem = error
    agree(ranks, problem, f"writing the trainer's state to {target}")
    with explain_failures(ranks, f"writing optimizer state to {target}"), _explain_dcp(f"{target} cannot be written"):
        save_dcp(snapshot.tensors, checkpoint_id=target, process_group=ranks.group, no_dist=ranks.world_size == 1)


def load_sharded(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
    directory: Path,
    *,
    ranks: Ranks | None = None,
    adapters: Adapters | None = None,
) -> Progress:
    """Restore a checkpoint of save_sharded, whatever the number of ranks that wrote it, or one of PyTorchTrainingBackend.

    Random state: a rank gets that of the rank of the same number. If there are more ranks now, each further one is seeded by rank 0's state
    and its own number; after a checkpoint of one process all are, except for rank 0. It matters for dropout alone.

    Args:
        model: sharded in any way, or not at all.
        optimizer: of the model's present parameters.
        ranks: None = this process alone.
        adapters: of the model, if it has any. Their checkpoints hold them, see adapter_files, and merged weights besides.

    Raises: CheckpointError, on all ranks alike and before anything is changed, if the directory is damaged or does not fit.
    """
    ranks = ranks or alone()
    problem: CheckpointError | None = None
    common: dict[str, Any] = {}
    state = OptimizerState([], {})
    saved: SavedAdapters | None = None
    if adapters is not None:
        adapters.fingerprint()  # ranks exchange messages for it: before anything can go wrong on one of them alone
    try:
        check_architecture(model, directory)
        with FileWeights(directory) as files:
            check_shapes_fit(model, files.shapes, str(directory))
        if adapters is None:
            check_has_no_adapters(directory)
        else:
            saved = adapters.read(directory)
        common = _read_common(directory)
        state = plan_state(model, optimizer, common, directory)
        rng = _read_rng(directory, common, ranks.rank)
    except CheckpointError as error:
        problem, rng = error, {}
    agree(ranks, problem, f"looking at the checkpoint {directory}")
    targets = {
        f"{name}/{key}": x for name, values in state.values.items() for key, x in values.items() if f"{name}/{key}" in common["tensors"]
    }
    if targets:
        source = directory / SHARDED_DIRECTORY
        with explain_failures(ranks, f"reading optimizer state from {source}"), _explain_dcp(f"{source} cannot be read"):
            load_dcp(targets, checkpoint_id=source, process_group=ranks.group, no_dist=ranks.world_size == 1)
    try:
        fill_base = partial(_fill_base, model, ranks)
        if adapters is None or saved is None:
            fill_base(directory)
        else:
            adapters.restore(saved, fill_base)
        write_optimizer(model, optimizer, state)
        if scheduler is not None and common["scheduler"] is not None:
            scheduler.load_state_dict(common["scheduler"])
    except CheckpointError as error:
        problem = error
    except _READ_ERRORS as error:
        problem = CheckpointError(f"{directory} cannot be restored into this {type(optimizer).__name__}: {error}")
    agree(ranks, problem, f"restoring the checkpoint {directory}")
    torch.set_rng_state(cast("Tensor", rng["cpu"]))
    if rng["cuda"] is not None and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"], ranks.device)
    optimizer.zero_grad(set_to_none=True)
    counts = UpdateCounts(int(common["num_updates"]), int(common["num_skipped_in_a_row"]))
    return Progress(counts, int(common["weight_version"]))


def save_adapters(adapters: Adapters, model: PreTrainedModel, directory: Path, *, ranks: Ranks | None = None) -> None:
    """Write the adapters into a checkpoint, beside what save_sharded writes. All ranks call it.

    Raises: CheckpointError on all ranks if rank 0 cannot write.
    """
    ranks = ranks or alone()
    problem: Exception | None = None
    try:
        adapters.save(directory, lambda base: _export_base(model, base, ranks), writes=ranks.rank == 0)
    except (OSError, SafetensorError) as error:
        problem = error
    agree(ranks, problem, f"writing adapters to {directory}")


def _export_base(model: PreTrainedModel, directory: Path, ranks: Ranks) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    export_sharded(model, directory, ranks=ranks, base_alone=True)


def _fill_base(model: PreTrainedModel, ranks: Ranks, directory: Path) -> None:
    with FileWeights(directory) as files:
        fill_weights(model, files, ranks.device, str(directory))


def _read_common(directory: Path) -> dict[str, Any]:
    """What is the same on every rank, of a checkpoint of either kind. Raises CheckpointError."""
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
    """The state file of a backend of one process in the form of ours; its tensors stay in the file until they are looked at."""
    try:
        state = cast("dict[str, Any]", torch.load(path, weights_only=True, map_location="cpu", mmap=True))
        kind = str(state.get("kind", "pytorch"))
        if kind != "pytorch":
            raise CheckpointError(
                f"{path} is of the backend {kind!r}, whose optimizer state is in another form: go on with --backend.kind {kind}, or begin "
                "from the weights alone with --model.path"
            )
        return {name: state[name] for name in ("scheduler", "num_updates", "num_skipped_in_a_row", "weight_version")} | {
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
    """Random state for a rank, see load_sharded."""
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


@contextmanager
def _explain_dcp(what: str) -> Generator[None]:
    """Raise what torch.distributed.checkpoint raises, on all ranks alike, as a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what was asked for
            yield
    except CheckpointException as error:  # derives from BaseException
        failures = cast("dict[int, tuple[BaseException, Any]]", error.failures)
        causes = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(failures.items()))
        raise CheckpointError(f"{what}: {causes}") from error


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.pt"

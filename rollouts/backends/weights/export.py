"""Write a model directory from a sharded model: no rank ever holds more than a few whole tensors, and each rank writes other files.

The bytes of each tensor go piece by piece to the rank that writes its file, and from there to their place in the file. Files get their
names when all of them are complete, the index last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.backends.ranks.distributed import Ranks, explain_failures, gather_values
from rollouts.backends.weights.fill import Part, local_part
from rollouts.errors import CheckpointError
from rollouts.models.weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    adapted_weights,
    as_unsharded,
    base_weights,
    converts_weights,
    first_names,
    whole_weight,
)
from rollouts.weight_specs import WeightSpec, cast_specs, describe_tensor, describe_weights, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


T = TypeVar("T")

MAX_FILE_BYTES = 4 << 30
_PARTIAL = ".partial"  # suffix of incomplete files, so that nothing loads them as weights
_DTYPE_NAMES = (
    ("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16"), ("float64", "F64"), ("int64", "I64"), ("int32", "I32"),
    ("int16", "I16"), ("int8", "I8"), ("uint8", "U8"), ("bool", "BOOL"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Piece:
    """This process's part of one weight."""

    spec: WeightSpec  # spec of the whole weight
    part: Part
    values: Tensor


@dataclass(frozen=True)
class WeightFile:
    """One file of an export: its tensors and their offsets."""

    name: str
    specs: tuple[WeightSpec, ...]
    header: bytes
    offsets: tuple[int, ...]  # offset of each tensor, bytes from the beginning

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.offsets[-1] + self.specs[-1].num_bytes


def export_sharded(
    model: PreTrainedModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    ranks: Ranks | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    base_alone: bool = False,
    dtype: str | None = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer in the layout that from_pretrained and inference servers open.

    All ranks call it, and return when everything is written.

    Args:
        directory: existing directory on a file system that all ranks share. Existing weights are replaced.
        ranks: None = this process alone.
        max_file_bytes: bytes of one file, unless a single tensor is larger. One file is model.safetensors; several are listed by an index.
        base_alone: export the weights below a model's adapters; otherwise the merged weights.
        dtype: dtype of the floating-point tensors; None = as they are.

    Raises: CheckpointError on all ranks if one of them cannot write.
    """
    ranks = ranks or alone()
    pieces = collect_pieces(model, ranks, base_alone=base_alone)
    if dtype is not None:
        pieces = [_cast_piece(piece, dtype) for piece in pieces]
    export_pieces(pieces, model, directory, tokenizer, ranks=ranks, max_file_bytes=max_file_bytes)


def alone() -> Ranks:
    """Return ranks of one process, without others."""
    return Ranks(rank=0, world_size=1, device=torch.device("cpu"), timeout_s=float("inf"))


def collect_pieces(model: PreTrainedModel, ranks: Ranks, *, copied: bool = False, base_alone: bool = False) -> list[Piece]:
    """Collect this process's part of each weight; tied ones once, under the name that transformers writes.

    Moves nothing unless adapters are merged: then one rank keeps each merged layer whole, and all ranks must call it. A model whose files
    have other names than its memory, see converts_weights, is collected whole on rank 0.

    Args:
        copied: copy the values to host memory, so that later updates do not change them.
        base_alone: see export_sharded.
    """
    own, layers = _written_once(model), {} if base_alone else adapted_weights(model)
    if converts_weights(model):
        return _collect_converted(model, own, layers, ranks)
    pieces: list[Piece] = []
    for i, (name, value) in enumerate(own.items()):
        part, local = local_part(value), value.detach()
        if name in layers:
            keeps = i % ranks.world_size == ranks.rank
            part = tuple(slice(0, size if keeps else 0) for size in value.shape)
            local = whole_weight(value, layers[name])[part].clone()
        else:
            local = local.to_local() if isinstance(local, DTensor) else local
            local = local.to("cpu", copy=True) if copied else local
        pieces.append(Piece(describe_tensor(name, value), part, local))
    return pieces


def _written_once(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights by name, tied ones once: under the first name that transformers does not take from another one on opening.

    In files that had the other name, as of CamemBERT's embeddings that of its head, the part below the head alone could not be opened.
    """
    weights, taken = base_weights(model, keep_vars=True), getattr(model, "all_tied_weights_keys", None) or {}
    first = first_names({name: weights[name] for name in sorted(weights, key=lambda name: name in taken)})
    return {name: value for name, value in weights.items() if first[name] == name}


def _collect_converted(model: PreTrainedModel, own: Mapping[str, Tensor], layers: Mapping[str, Any], ranks: Ranks) -> list[Piece]:
    """Collect all weights on rank 0, under the names and in the shapes of files."""
    whole: dict[str, Tensor] = {}
    for name, value in own.items():
        tensor = whole_weight(value, layers.get(name))
        if ranks.rank == 0:
            whole[name] = tensor
    found: dict[str, Tensor] = {}
    if ranks.rank == 0:
        from transformers.core_model_loading import revert_weight_conversion

        found = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(as_unsharded(model), whole).items()}
    sizes = [(spec.name, spec.dtype, list(spec.shape)) for spec in describe_weights(found)]
    pieces: list[Piece] = []
    for name, dtype, shape in gather_values(ranks, sizes, operation="naming the weights of an export")[0]:
        kept = found.get(name, torch.empty([0] * len(shape), dtype=torch_dtype(dtype)))
        part = tuple(slice(0, size if ranks.rank == 0 else 0) for size in shape)
        pieces.append(Piece(WeightSpec(name, dtype, tuple(shape)), part, kept))
    return pieces


def _cast_piece(piece: Piece, dtype: str) -> Piece:
    """Return a piece in another dtype, unless its numbers are integers."""
    (spec,) = cast_specs([piece.spec], dtype)
    return replace(piece, spec=spec, values=piece.values.to(torch_dtype(spec.dtype)))


def export_pieces(
    pieces: Sequence[Piece],
    model: PreTrainedModel,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    ranks: Ranks,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Run export_sharded on pieces that were collected earlier; only the model's configuration is read."""
    files = plan_files([piece.spec for piece in pieces], max_file_bytes)
    _write_files(files, pieces, directory, ranks)
    problem: Exception | None = None
    if ranks.rank == 0:
        try:
            _write_config(model, directory, tokenizer)
            _publish(files, directory)
        except Exception as error:  # any error: the other ranks wait for rank 0
            error.add_note(f"while finishing the export to {directory}")
            problem = error
    agree(ranks, problem, f"finishing the export to {directory}")


def plan_files(specs: Sequence[WeightSpec], max_file_bytes: int) -> list[WeightFile]:
    """Distribute tensors, in their order, over files of at most max_file_bytes of values; a larger tensor has a file of its own."""
    assert max_file_bytes >= 1, f"max_file_bytes is {max_file_bytes}, expected at least 1"
    groups: list[list[WeightSpec]] = []
    size = 0
    for spec in specs:
        if not groups or size + spec.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    names = [WEIGHTS_FILE] if len(groups) == 1 else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [_plan_file(name, group) for name, group in zip(names, groups, strict=True)]


def _plan_file(name: str, specs: Sequence[WeightSpec]) -> WeightFile:
    """Lay out a file, wide types first, so that every tensor is aligned to its element size."""
    ordered = sorted(specs, key=lambda spec: -getattr(torch, spec.dtype).itemsize)
    dtype_names = dict(_DTYPE_NAMES)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends: list[int] = [0]
    for spec in ordered:
        ends.append(ends[-1] + spec.num_bytes)
        entries[spec.name] = {"dtype": dtype_names[spec.dtype], "shape": list(spec.shape), "data_offsets": ends[-2:]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return WeightFile(name, tuple(ordered), header, tuple(len(header) + end for end in ends[:-1]))


def _write_files(files: Sequence[WeightFile], pieces: Sequence[Piece], directory: Path, ranks: Ranks) -> None:
    """Write file k on rank k modulo the number of ranks, all at the same time, as complete files under temporary names."""
    own = {piece.spec.name: piece for piece in pieces}
    holders = gather_values(ranks, {name: piece.part for name, piece in own.items()}, operation="planning an export")
    with FileWriter(directory, [file for k, file in enumerate(files) if k % ranks.world_size == ranks.rank]) as writer:
        with explain_failures(ranks, f"exporting weights to {directory}"):
            for k, spec, offset in _take_turns(files, ranks.world_size):
                parts = [holder[spec.name] for holder in holders]
                whole = _collect_tensor(own[spec.name], parts, k % ranks.world_size, ranks)
                if whole is not None:
                    writer.write(files[k].name, offset, whole)
        writer.finish()
        agree(ranks, writer.error, f"exporting weights to {directory}")
        writer.keep()


def _take_turns(files: Sequence[WeightFile], num_writers: int) -> Iterator[tuple[int, WeightSpec, int]]:
    """Iterate over (file, tensor, offset) so that consecutive tensors belong to files of different ranks."""
    for begin in range(0, len(files), num_writers):
        numbered = enumerate(files[begin : begin + num_writers], begin)
        columns = [[(k, spec, offset) for spec, offset in zip(file.specs, file.offsets, strict=True)] for k, file in numbered]
        for row in zip_longest(*columns):
            yield from (entry for entry in row if entry is not None)


def _collect_tensor(piece: Piece, parts: Sequence[Part], writer: int, ranks: Ranks) -> Tensor | None:
    """Collect the whole tensor on the rank that writes it; None on the others. The writer uses its own parts first, else one rank's.

    Args:
        parts: the part of each rank.
    """
    senders: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in (writer, *range(len(parts))):
        bounds = tuple((piece.start, piece.stop) for piece in parts[rank])
        if all(start < stop for start, stop in bounds):
            senders.setdefault(bounds, rank)
    if ranks.rank != writer:
        if ranks.rank in senders.values():
            dist.send(piece.values.to("cpu").contiguous(), group=ranks.group, group_dst=writer)
        return None
    if list(senders.values()) == [writer]:
        return piece.values.to("cpu")
    whole = torch.empty(piece.spec.shape, dtype=piece.values.dtype)
    for rank in senders.values():
        target = whole[parts[rank]]
        if rank == writer:
            target.copy_(piece.values)
            continue
        received = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        dist.recv(received, group=ranks.group, group_src=rank)
        if received is not target:
            target.copy_(received)
    return whole


class FileWriter:
    """Writes tensors to their places in files, in a thread, while the next tensor is collected. A context manager.

    Errors are kept in `error`: the other ranks continue to send, so the receiver of their messages must not stop.
    """

    def __init__(self, directory: Path, files: Sequence[WeightFile]) -> None:
        self.error: Exception | None = None
        self._directory = directory
        self._files = {file.name: file for file in files}
        self._descriptors: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._complete = False

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *unused: object) -> None:
        self._thread.shutdown()
        for name, descriptor in self._descriptors.items():
            os.close(descriptor)
            if not self._complete:
                (self._directory / (name + _PARTIAL)).unlink(missing_ok=True)

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Begin to write; waits for the previous tensor, so that at most two are held."""
        self.finish()
        if self.error is None:
            self._pending = self._thread.submit(self._write, name, offset, values)

    def keep(self) -> None:
        """Keep the files at the end of the block; otherwise they are removed."""
        self._complete = True

    def finish(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                self.error = error

    def _write(self, name: str, offset: int, values: Tensor) -> None:
        if name not in self._descriptors:
            descriptor = os.open(self._directory / (name + _PARTIAL), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._descriptors[name] = descriptor
            os.chmod(self._directory / (name + _PARTIAL), 0o644)  # regardless of the umask: a server may run as another user
            _write_at(descriptor, 0, memoryview(self._files[name].header))
        if values.numel():
            flat = values.detach().contiguous().flatten().view(torch.uint8)
            _write_at(self._descriptors[name], offset, memoryview(cast("Any", flat.numpy())))


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data[: 1 << 30], offset)  # the system writes at most 2 GiB at a time
        data, offset = data[written:], offset + written


def _write_config(model: PreTrainedModel, directory: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write config.json, generation_config.json and the files of the tokenizer, as save_pretrained does."""
    kind = type(model).__name__.removeprefix("FSDP")
    config = cast("Any", model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [kind]
    config.save_pretrained(directory)
    if model.can_generate():
        # unchanged: save_pretrained refuses inconsistent settings, which published models have and from_pretrained accepts
        cast("Any", model.generation_config).to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _publish(files: Sequence[WeightFile], directory: Path) -> None:
    """Rename complete files to their names. A concurrent reader finds the old model, or missing files, but never a mixture.

    A single file replaces a single file atomically. With several files, all old ones are removed first: they have the same names.
    """
    names = {file.name for file in files}
    missing = [file.name for file in files if _size_of(directory / (file.name + _PARTIAL)) != file.num_bytes]
    if missing:
        raise CheckpointError(f"{directory} lacks {missing[:3]}, which other ranks have written: use a directory that all machines share")
    with suppress(FileNotFoundError):
        (directory / INDEX_FILE).unlink()
    for old in directory.glob("model*.safetensors"):
        if len(files) > 1 or old.name not in names:
            old.unlink()
    for name in names:
        os.replace(directory / (name + _PARTIAL), directory / name)
    if len(files) > 1:
        weight_map = {spec.name: file.name for file in files for spec in file.specs}
        total = sum(spec.num_bytes for file in files for spec in file.specs)
        partial = directory / (INDEX_FILE + _PARTIAL)
        partial.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
        os.replace(partial, directory / INDEX_FILE)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def call_agreed(ranks: Ranks, operation: str, call: Callable[[], T], *errors: type[Exception]) -> T:
    """Call a function on every rank and wait for all of them; if one raised one of these errors, all raise as agree does."""
    problem: Exception | None = None
    result: T | None = None
    try:
        result = call()
    except errors as error:
        problem = error
    agree(ranks, problem, operation)
    return cast("T", result)


def agree(ranks: Ranks, problem: Exception | None, operation: str) -> None:
    """Wait for all ranks; if one has a problem, all raise it.

    Raises: CheckpointError with the messages, each prefixed by its rank if there are several ranks.
    """
    problems = gather_values(ranks, None if problem is None else str(problem), operation=operation)
    found = [(rank, text) for rank, text in enumerate(problems) if text is not None]
    if not found:
        return
    if isinstance(problem, CheckpointError) and len(found) == ranks.world_size and len({text for _, text in found}) == 1:
        raise problem
    if ranks.world_size == 1:
        raise CheckpointError(f"{operation} failed: {found[0][1]}") from problem
    raise CheckpointError(f"{operation} failed: " + "; ".join(f"rank {rank}: {text}" for rank, text in found)) from problem

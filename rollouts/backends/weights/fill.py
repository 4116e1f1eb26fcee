"""Fill the weights of a sharded model from files; every rank reads only the slices that it needs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollouts.errors import CheckpointError
from rollouts.models.weights import (
    INDEX_FILE,
    base_weights,
    check_finite_weights,
    check_weights_fit,
    converts_weights,
    explain_damage,
    find_class,
    find_weight_files,
    first_names,
    load_converted,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Shape: TypeAlias = tuple[int, ...]
"""Shape of a whole tensor."""

Part = tuple[slice, ...]
"""Part of a tensor: one slice with both ends for each dimension; () for a tensor without dimensions."""


class WeightSource(Protocol):
    """Named tensors that can be read in parts."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor by name."""
        ...

    def read(self, name: str, part: Part) -> Tensor:
        """Read a part of a tensor."""
        ...


class FileWeights:
    """Weights of a model directory, read from its safetensors files. A context manager: the files are open inside it."""

    def __init__(self, directory: Path) -> None:
        """
        Raises: CheckpointError if the directory has no weights, a file is missing or damaged, two files hold the same tensor, or an export
        replaces them meanwhile.
        """
        self.directory = directory
        self.bytes_read = 0  # bytes of tensors read by this process
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # open file by tensor name
        self._shapes: dict[str, Shape] = {}
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        return self._shapes

    def read(self, name: str, part: Part) -> Tensor:
        """See WeightSource. Reads only the bytes of this part."""
        try:
            if not part:
                value = cast("Tensor", self._files[name].get_tensor(name))
            elif any(piece.stop <= piece.start for piece in part):
                return torch.empty([max(0, piece.stop - piece.start) for piece in part])
            else:
                value = cast("Tensor", self._files[name].get_slice(name)[part])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} in {self.directory} cannot be read: {error}") from error
        self.bytes_read += value.numel() * value.element_size()
        return value

    def _open(self) -> None:
        before = _identify_files(self.directory)
        for path in find_weight_files(self.directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                names = cast("list[str]", list(file.keys()))
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            except (SafetensorError, OSError) as error:
                raise CheckpointError(explain_damage(path, error)) from error
            twice = sorted(set(names) & set(self._files))
            if twice:
                raise CheckpointError(f"{self.directory} holds {twice[:3]} in several files: remove those that are no part of the model")
            self._files.update(dict.fromkeys(names, file))
            self._shapes.update(shapes)
        if _identify_files(self.directory) != before:
            raise CheckpointError(f"the weights in {self.directory} were replaced while they were opened: load them again")


def _identify_files(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return the index and the weight files by name, with file attributes that change when one is replaced."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in (directory / INDEX_FILE, *directory.glob("model*.safetensors")):
        with suppress(FileNotFoundError):  # removed since it was listed
            facts = path.stat()
            found[path.name] = facts.st_ino, facts.st_mtime_ns, facts.st_size
    return found


class MemoryWeights:
    """Tensors in memory as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.bytes_read = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, part: Part) -> Tensor:
        """See WeightSource."""
        return self._tensors[name][part] if part else self._tensors[name]


@contextmanager
def open_weights(model: PreTrainedModel, directory: Path, kind: Any = None) -> Generator[FileWeights | MemoryWeights]:
    """Open the weights of a directory for a model, under the names that they have in memory.

    Where transformers converts the names or shapes, this process loads them whole; otherwise it reads the parts that are asked for.

    Args:
        kind: class of the directory's model; None = that of the model.

    Raises: CheckpointError as FileWeights and load_converted.
    """
    with FileWeights(directory) as files:
        if files.shapes.keys() <= base_weights(model).keys() or not converts_weights(model):
            yield files
            return
    yield MemoryWeights(load_converted(find_class(model) if kind is None else kind, directory))


class ChosenWeights:
    """Tensors of another source under other names, and given tensors."""

    def __init__(self, source: WeightSource, names: Mapping[str, str], given: Mapping[str, Tensor]) -> None:
        """
        Args:
            names: name in the source by name here; other tensors are left out.
            given: tensors that take precedence over the source's.
        """
        self._source = source
        self._names = {name: other for name, other in names.items() if name not in given}
        self._given = given

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """See WeightSource."""
        given = {name: tuple(value.shape) for name, value in self._given.items()}
        return {name: self._source.shapes[other] for name, other in self._names.items()} | given

    def read(self, name: str, part: Part) -> Tensor:
        """See WeightSource."""
        return self._source.read(self._names[name], part) if name in self._names else self._given[name][part]


def fill_weights(model: torch.nn.Module, source: WeightSource, device: str | torch.device, what: str) -> None:
    """Fill each weight of a model from a source; parameters on meta become new ones on the device.

    Args:
        what: description of the source, for errors.

    Raises: CheckpointError if names or shapes do not fit, before anything is changed; or for a non-finite weight, found during reading.
    """
    check_shapes_fit(model, source.shapes, what)
    own = base_weights(model, keep_vars=True)
    tied = first_names(own)
    given: dict[str, str] = {}  # name in the source by the first name of a weight
    for name in source.shapes:
        given.setdefault(tied[name], name)
    made: dict[int, torch.nn.Parameter] = {}
    with torch.no_grad():
        for name, other in given.items():
            value = own[name]
            piece = source.read(other, local_part(value))
            check_finite_weights([(other, piece)], what)
            if value.is_meta:
                made[id(value)] = _make_parameter(value, piece, torch.device(device))
            else:
                local = value.detach()
                (local.to_local() if isinstance(local, DTensor) else local).copy_(piece)
    _replace_parameters(model, made)


def check_shapes_fit(model: torch.nn.Module, shapes: Mapping[str, Shape], what: str) -> None:
    """Run check_weights_fit on whole tensors of these shapes."""
    check_weights_fit(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, what)


def _make_parameter(old: Tensor, piece: Tensor, device: torch.device) -> torch.nn.Parameter:
    """Make a parameter with values from one on meta; for a DTensor, the piece is this rank's shard."""
    value = torch.empty_like(old.detach(), device=device)
    (value.to_local() if isinstance(value, DTensor) else value).copy_(piece)
    return torch.nn.Parameter(value, requires_grad=old.requires_grad)


def _replace_parameters(model: torch.nn.Module, made: Mapping[int, torch.nn.Parameter]) -> None:
    """Replace the old parameters everywhere by new ones, so that tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                setattr(module, name, made[id(parameter)])


def local_part(value: Tensor) -> tuple[slice, ...]:
    """Return this process's part of the whole tensor: all of it, unless it is a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = tuple(value.shape), (0,) * value.dim()
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))

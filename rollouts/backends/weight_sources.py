"""Where the weights of a sharded model come from: files, of which every rank reads the slices that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.backends.weight_stream import Shape
from rollouts.errors import CheckpointError
from rollouts.model_weights import INDEX_FILE, find_weight_files

Part = tuple[slice, ...]
"""A part of a tensor, one slice with both ends for each dimension; () for a tensor without dimensions."""


class WeightSource(Protocol):
    """Named tensors that can be read in parts."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor by name."""
        ...

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor."""
        ...


class FileWeights:
    """The weights of a model directory, read from its safetensors files. A context manager: the files are open inside of it."""

    def __init__(self, directory: Path) -> None:
        """
        Raises: CheckpointError if the directory has no weights, a file is missing or damaged, two hold the same tensor, or an export
        replaces them meanwhile.
        """
        self.directory = directory
        self.bytes_read = 0  # of tensors, by this process
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # by the name of a tensor
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
        """See WeightSource. Only the bytes of this part are read."""
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
                raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error
            twice = sorted(set(names) & set(self._files))
            if twice:
                raise CheckpointError(f"{self.directory} holds {twice[:3]} in several files: remove those that are no part of the model")
            self._files.update(dict.fromkeys(names, file))
            self._shapes.update(shapes)
        if _identify_files(self.directory) != before:
            raise CheckpointError(f"the weights in {self.directory} were replaced while they were opened: load them again")


def _identify_files(directory: Path) -> dict[str, tuple[int, int, int]]:
    """The index and the files of weights by name, with what changes when one of them is replaced."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in (directory / INDEX_FILE, *directory.glob("model*.safetensors")):
        with suppress(FileNotFoundError):  # or removed since it was listed
            facts = path.stat()
            found[path.name] = facts.st_ino, facts.st_mtime_ns, facts.st_size
    return found


class ChosenWeights:
    """Tensors of another source under other names, and some that are given."""

    def __init__(self, source: WeightSource, names: Mapping[str, str], given: Mapping[str, Tensor]) -> None:
        """
        Args:
            names: the name in the source, by the name here; what is not in it is left out.
            given: go before those of the source.
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

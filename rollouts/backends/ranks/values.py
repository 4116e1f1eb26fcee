"""Serialization of values between the processes of a run: plain values, tensors, and names of functions. No pickle.

A JSON header describes the value; the elements of tensors follow in their memory layout. Reading runs and imports nothing, unless the
reader allows names: then a function, a class or a frozen dataclass is `module:qualified.name`, looked up as `import` does, and only the
reader calls it. Names go from rank 0, which leads, to the other ranks; their answers have none.
"""

from __future__ import annotations

import functools
import importlib
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rollouts.checks import parse_json

_HEAD = struct.Struct("!Q")
_PLAIN = (type(None), bool, int, float, str)


class NotPlainError(TypeError):
    """A value that cannot be sent."""


class DamagedError(ValueError):
    """Bytes were not made by dump_value, or name an object that the reader does not allow or have."""


def dump_value(value: object, *, names: bool = False) -> bytes:
    """Serialize a value to bytes.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, slice, Path, a dtype or device of torch, a tensor.
        names: whether to allow, by name, functions and classes at the top of a module, functools.partial of them, members of enums and
            frozen dataclasses.

    Raises: NotPlainError for anything else.
    """
    parts: list[bytes] = []
    head = json.dumps(_Writer(parts, names).encode(value), separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(head)), head, *parts))


def load_value(data: bytes, *, names: bool = False) -> Any:
    """Read a value of dump_value; its tensors are on the CPU and belong to the caller.

    Args:
        names: whether to allow names of functions, classes and dataclasses and import their modules: only for trusted senders.

    Raises: DamagedError.
    """
    try:
        (length,) = _HEAD.unpack_from(data)
        tree = parse_json(data[_HEAD.size : _HEAD.size + length].decode())
        return _Reader(memoryview(data)[_HEAD.size + length :], names).decode(tree)
    except DamagedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, struct.error) as error:
        raise DamagedError(f"these bytes are no value of another rank: {type(error).__name__}: {error}") from error


class _Writer:
    """Builds the header, and collects the elements that follow it."""

    def __init__(self, parts: list[bytes], names: bool) -> None:
        self._parts, self._names = parts, names

    def encode(self, value: Any) -> Any:
        """Return a value's part of the header."""
        kind = cast("type[Any]", type(value))
        if kind in _PLAIN:
            return value
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *map(self.encode, value)]
        if kind is dict:
            return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
        if kind is bytes:
            self._parts.append(value)
            return ["bytes", len(value)]
        if kind is slice:
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if isinstance(value, Path):
            return ["path", str(value)]
        if kind is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(value)]
        if kind in (Tensor, torch.nn.Parameter):
            return self._encode_tensor(value)
        return self._encode_named(value, kind)

    def _encode_tensor(self, x: Tensor) -> Any:
        if x.layout != torch.strided or x.is_quantized:
            raise NotPlainError(f"a tensor with the layout {x.layout} cannot be sent: make it dense")
        raw = x.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy().tobytes()
        self._parts.append(raw)
        return ["tensor", str(x.dtype).removeprefix("torch."), list(x.shape), len(raw)]

    def _encode_named(self, value: Any, kind: type[Any]) -> Any:
        if not self._names:
            raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is no plain value and no tensor")
        if kind is functools.partial:
            return ["partial", *map(self.encode, (value.func, value.args, value.keywords))]
        if isinstance(value, Enum):
            return ["enum", name_of(kind), value.name]
        if not is_dataclass(value) or isinstance(value, type):
            return ["name", name_of(value)]
        name = name_of(kind)
        if not kind.__dataclass_params__.frozen or not all(f.init for f in fields(kind)):
            raise NotPlainError(
                f"a {name} is no plain value: only frozen dataclasses are sent, all of whose fields their constructor takes"
            )
        return ["dataclass", name, self.encode({f.name: getattr(value, f.name) for f in fields(kind)})]


def name_of(value: object) -> str:
    """Return `module:qualified.name` of a function or class at the top of a module. Raises NotPlainError for any other object."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualified, str) and isinstance(value, Callable):
        name = f"{module}:{qualified}"
        try:
            if _find(name) is value:
                return name
        except (ImportError, AttributeError, ValueError):
            pass
        raise NotPlainError(f"{name} is not found under this name")
    raise NotPlainError(f"a {type(value).__module__}.{type(value).__qualname__} is no plain value, tensor or name of a function")


def _find(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in qualified.split("."):
        found = getattr(found, attribute)
    return found


class _Reader:
    """Reads the elements that follow the header, in the order in which they were written."""

    def __init__(self, rest: memoryview, names: bool) -> None:
        self._rest, self._names = rest, names

    def decode(self, tree: Any) -> Any:
        """Return the value of a part of the header."""
        if type(tree) in _PLAIN:
            return tree
        kind, *items = tree
        if kind in ("list", "tuple", "set", "frozenset"):
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make([self.decode(item) for item in items])
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in items}
        if kind == "bytes":
            return bytes(self._take(items[0]))
        if kind == "slice":
            return slice(*(self.decode(item) for item in items))
        if kind == "path":
            return Path(items[0])
        if kind == "dtype":
            return self._dtype(items[0])
        if kind == "device":
            return torch.device(items[0])
        if kind == "tensor":
            return self._tensor(*items)
        if kind not in ("name", "partial", "enum", "dataclass"):
            raise DamagedError(f"{kind!r} is no kind of value")
        return self._decode_named(kind, items)

    def _decode_named(self, kind: str, items: list[Any]) -> Any:
        if not self._names:
            raise DamagedError(f"a {kind} came where plain values and tensors are read")
        if kind == "partial":
            function, arguments, keywords = (self.decode(item) for item in items)
            return functools.partial(function, *arguments, **keywords)
        try:
            found = _find(items[0])
        except (ImportError, AttributeError) as error:
            raise DamagedError(f"{items[0]} is not found on this rank: {error}") from error
        if kind == "enum":
            return found[items[1]]
        if kind == "name":
            return found
        if not (isinstance(found, type) and is_dataclass(found)):
            raise DamagedError(f"{items[0]} is no dataclass")
        return found(**self.decode(items[1]))

    def _take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._rest):
            raise DamagedError(f"{count} bytes are announced, {len(self._rest)} are left")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _dtype(self, name: str) -> torch.dtype:
        found = getattr(torch, name)
        if not isinstance(found, torch.dtype):
            raise DamagedError(f"{name} is no dtype")
        return found

    def _tensor(self, dtype_name: str, shape: list[int], count: int) -> Tensor:
        dtype = self._dtype(dtype_name)
        raw = bytearray(self._take(count))  # owned by the tensor from here on
        if not raw:
            return torch.empty(0, dtype=dtype).reshape(shape)  # fails for a shape with elements
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)

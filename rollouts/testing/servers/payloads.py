"""Parts of request and response bodies that all routes of both servers share, as pure functions."""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollouts.testing.servers.http import Response
from rollouts.testing.servers.models import Draw, LoadError, Ranked
from rollouts.testing.servers.scheduler import Sequence_


class Tokenizer(Protocol):
    """The part of a tokenizer that a fake server needs."""

    def encode(self, text: str) -> list[int]:
        """Text -> ids."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Ids -> text."""
        ...


class Refused(Exception):
    """Raised to refuse a request. Holds the error response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.body.decode())
        self.response = response


def order_top(draw: Draw, count: int) -> list[Ranked]:
    """Return the sampled token, then the most probable others, cut to `count`, at least 1."""
    entries = [draw.chosen, *(r for r in draw.top if r.token != draw.chosen.token)]
    return entries if count < 0 else entries[: max(count, 1)]


def decode_output(sequence: Sequence_, tokenizer: Tokenizer) -> str:
    """Return the text without its stop token, or up to the stop string."""
    tokens = list(sequence.tokens)
    if sequence.finish == "stop" and not isinstance(sequence.matched, str):
        tokens = tokens[:-1]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.partition(sequence.matched)[0] if isinstance(sequence.matched, str) else text


def find_stop(sequence: Sequence_, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> str | None:
    """Return the first stop string of a request that its text has."""
    assert tokenizer is not None, "a stop string was accepted without a tokenizer"
    text = tokenizer.decode(list(sequence.tokens), skip_special_tokens=skip_special_tokens)
    return next((stop for stop in sequence.sampling.stop if stop in text), None)


_ALLOWED = frozenset({
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
})  # fmt: skip


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of a tensor")


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def is_base64(text: str) -> bool:
    """Whether a text is valid base64."""
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def read_named_tensors(text: str) -> dict[str, Tensor]:
    """Decode base64 of a pickled list of (name, tensor) to tensors. Raises LoadError."""
    try:
        pairs = _TensorUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except (pickle.UnpicklingError, binascii.Error, EOFError, ValueError, RuntimeError, AttributeError) as error:
        raise LoadError("damaged", f"the payload is no pickle of named tensors: {error}") from error
    is_list = isinstance(pairs, list)
    if not is_list or not all(
        isinstance(p, tuple) and len(cast("Any", p)) == 2 and isinstance(p[1], Tensor) for p in cast("list[Any]", pairs)
    ):
        raise LoadError("damaged", f"the payload is a {type(pairs).__name__}, expected a list of (name, tensor)")
    return dict(cast("list[tuple[str, Tensor]]", pairs))


def read_buffers(text: str) -> dict[str, bytes]:
    """Decode base64 of a pickled {name of a GPU: (bytes,)} to bytes by GPU. Raises LoadError."""
    try:
        found = _TensorUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        return {str(name): bytes(arguments[0]) for name, arguments in found.items()}
    except (pickle.UnpicklingError, binascii.Error, EOFError, ValueError, AttributeError, TypeError, IndexError) as error:
        raise LoadError("damaged", f"the payload is no pickle of buffers: {error}") from error

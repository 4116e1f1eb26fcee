"""Messages of the client that are Protocol Buffers: passes of training in, their outputs and samples out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollouts.errors import DataError
from rollouts.tinker.wire.protobuf import Value, read_fields, read_varints, write_bytes, write_double, write_int
from rollouts.types import Completion

Array: TypeAlias = "NDArray[np.int64] | NDArray[np.float32]"

PROTOBUF = "application/x-protobuf"
"""Content type of these messages."""

_FLOAT32, _INT64 = 1, 2
_MOST_DIMENSIONS = 8  # an array with more is not read
_DTYPES: Mapping[int, str] = MappingProxyType({_FLOAT32: "<f4", _INT64: "<i8"})


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence of a request, with what its loss reads."""

    tokens: NDArray[np.int64]  # [N] input of the model
    inputs: Mapping[str, Array]  # arrays by the name in loss_fn_inputs, in the shapes that were sent


@dataclass(frozen=True, kw_only=True, eq=False)
class PassRequest:
    """A request for a forward pass, or for one with its gradient."""

    model_id: str = ""
    seq_id: int = 0
    data: tuple[Datum, ...] = ()
    loss_fn: str = ""
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])
    forward_only: bool = False
    problem: str | None = None  # reason for which data cannot be read, and is not whole


def read_pass_request(body: bytes) -> PassRequest:
    """Read a ForwardBackwardRequest. Raises DataError for what is none; what cannot be read behind its number is its problem."""
    texts: dict[int, str] = {1: "", 4: ""}
    seq_id, forward_only = 0, False
    data: list[Datum] = []
    problem: str | None = None
    old: dict[str, float | str] = {}
    new: dict[str, float | str] = {}
    try:
        for number, value in read_fields(memoryview(body)):
            if number in (1, 4):
                texts[number] = _text(value, f"field {number} of the request")
            elif number == 2:
                seq_id = _int(value, "seq_id")
            elif number == 3:
                place = f"data[{len(data)}]"
                try:
                    data.append(_read_datum(_message(value, place), place))
                except DataError as error:  # the rest of the request is read all the same
                    problem = problem or str(error)
            elif number == 5:
                name, found = _read_entry(_message(value, "loss_fn_config"), "loss_fn_config")
                old[name] = found if isinstance(found, float) else 0.0
            elif number == 6:
                forward_only = bool(value)
            elif number == 7:
                name, found = _read_entry(_message(value, "loss_fn_config"), "loss_fn_config")
                new[name] = _read_setting(_message(found, "loss_fn_config"))
    except DataError as error:
        if not texts[1] or not seq_id:
            raise
        problem = problem or str(error)  # its number stands before its data, and later requests wait for it
    return PassRequest(
        model_id=texts[1],
        seq_id=seq_id,
        data=tuple(data),
        loss_fn=texts[4],
        loss_fn_config=new or old,
        forward_only=forward_only,
        problem=problem,
    )


def write_pass_output(log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Write a ForwardBackwardOutput: the log-probs of the targets of each datum, and sums over all of them."""
    ends = np.cumsum([0, *(4 * len(one) for one in log_probs)], dtype="<i8")
    values = np.concatenate([np.zeros(0, dtype="<f4"), *log_probs]).astype("<f4")
    tensor = write_bytes(1, values.tobytes()) + write_bytes(2, ends.tobytes()) + write_int(3, _FLOAT32)
    columns = write_bytes(2, write_bytes(1, b"logprobs") + write_bytes(2, tensor))
    record = write_bytes(1, b"ArrayRecord") + columns + write_int(3, len(log_probs))
    sums = [write_bytes(3, write_bytes(1, name.encode()) + write_double(2, value)) for name, value in metrics.items()]
    return b"".join([write_bytes(1, b"ArrayRecord"), write_bytes(2, record), *sums])


def write_samples(completions: Sequence[Completion], prompt_log_probs: NDArray[np.float32] | None) -> bytes:
    """Write a SampleResponse.

    Args:
        prompt_log_probs: # [tokens of the prompt], NaN where there is none; None = not asked for.
    """
    parts: list[bytes] = []
    for completion in completions:
        tokens = np.asarray(completion.output_tokens, dtype="<i4").tobytes()
        log_probs = np.asarray(completion.output_log_probs, dtype="<f4").tobytes()
        reason = write_int(1, 0 if completion.finish_reason == "stop" else 1)
        parts.append(write_bytes(1, reason + write_bytes(2, tokens) + write_bytes(3, log_probs)))
    if prompt_log_probs is not None:
        parts.append(write_bytes(2, prompt_log_probs.astype("<f4").tobytes()))
    return b"".join(parts)


def _read_datum(data: memoryview, place: str) -> Datum:
    chunks: list[NDArray[np.int64]] = []
    inputs: dict[str, Array] = {}
    for number, value in read_fields(data):
        if number == 1:
            chunks.append(_read_chunk(_message(value, place), place))
        elif number == 2:
            name, found = _read_entry(_message(value, place), place)
            where = f"{place}.loss_fn_inputs[{name!r}]"
            inputs[name] = _read_tensor(_message(found, where), where)
    return Datum(np.concatenate([np.zeros(0, dtype=np.int64), *chunks]), inputs)


def _read_chunk(data: memoryview, place: str) -> NDArray[np.int64]:
    """Return the tokens of a piece of the input. Raises DataError for pictures and sound."""
    for number, value in read_fields(data):
        if number != 1:
            raise DataError(f"{place}.model_input has {'a picture' if number == 2 else 'sound'}: this server takes tokens alone")
        for inner, tokens in read_fields(_message(value, place)):
            if inner == 1:
                return _numbers(_message(tokens, place), "<i4", f"{place}.model_input").astype(np.int64)
    return np.zeros(0, dtype=np.int64)


def _read_tensor(data: memoryview, place: str) -> Array:
    dense: memoryview | None = None
    dtype, shape = 0, tuple[int, ...]()
    for number, value in read_fields(data):
        if number == 1:
            dense = _message(value, place)
        elif number == 2:
            raise DataError(f"{place} is sparse, of two dimensions: this server takes one target for each position, so send it dense, [N]")
        elif number == 3:
            dtype = _int(value, place)
        elif number == 4:
            packed = None if isinstance(value, int) else _message(value, place)
            if len(shape) >= _MOST_DIMENSIONS or (packed is not None and len(packed) > 10 * _MOST_DIMENSIONS):
                raise DataError(f"{place} has more than {_MOST_DIMENSIONS} dimensions, expected 1")
            shape = (*shape, value) if isinstance(value, int) else (*shape, *read_varints(_message(value, place)))
    if dtype not in _DTYPES:
        raise DataError(f"{place} has the dtype number {dtype}, expected 1 (float32) or 2 (int64)")
    values = _numbers(dense or memoryview(b""), _DTYPES[dtype], place)
    if shape and (math.prod(shape) != len(values) or max(shape) > max(1, len(values))):
        raise DataError(f"{place} has {len(values)} numbers for the shape {list(shape)}")
    return values.reshape(shape) if shape else values


def _read_setting(data: memoryview) -> float | str:
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, float):
            return value
        if number == 2:
            return _text(value, "loss_fn_config")
    return 0.0


def _read_entry(data: memoryview, place: str) -> tuple[str, Value]:
    """Return key and value of an entry of a map."""
    name, found = "", memoryview(b"")
    for number, value in read_fields(data):
        if number == 1:
            name = _text(value, place)
        elif number == 2:
            found = value
    return name, found


def _numbers(data: memoryview, dtype: str, place: str) -> Array:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise DataError(f"{place} has {len(data)} bytes, expected a multiple of {size}")
    values: Array = np.frombuffer(data, dtype=dtype)
    return values


def _message(value: Value, place: str) -> memoryview:
    if not isinstance(value, memoryview):
        raise DataError(f"{place} has a number where bytes are expected: this is another version of the client's messages")
    return value


def _int(value: Value, place: str) -> int:
    if not isinstance(value, int):
        raise DataError(f"{place} is no integer: this is another version of the client's messages")
    return value


def _text(value: Value, place: str) -> str:
    try:
        return bytes(_message(value, place)).decode()
    except UnicodeDecodeError:
        raise DataError(f"{place} is no text in UTF-8") from None

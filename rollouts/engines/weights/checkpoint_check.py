"""Checks that a directory holds all of a model's weights, by the headers and sizes of its files alone.

A server that is told to load a bad checkpoint dies, or reports success: truncated files and wrong shapes kill it, missing tensors keep
their old values. So a checkpoint is compared with a reference before any server is told of it. No tensor is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rollouts.checks import parse_json
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.errors import CheckpointError
from rollouts.weight_specs import WeightSpec

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of change in ns of each file of weights in a directory."""

HEAD = "lm_head.weight"
"""The output head, which checkpoints of models with tied embeddings leave out."""

_INDEX = "model.safetensors.index.json"
_MAXHEADER = 100_000_000  # bytes; the limit of the safetensors format
_DTYPE_BYTES = (
    ("BOOL", 1), ("U8", 1), ("I8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("U16", 2), ("I16", 2), ("F16", 2), ("BF16", 2),
    ("U32", 4), ("I32", 4), ("F32", 4), ("U64", 8), ("I64", 8), ("F64", 8), ("C64", 8),
)  # fmt: skip
_TORCH_DTYPES = (
    ("torch.bool", "BOOL"), ("torch.uint8", "U8"), ("torch.int8", "I8"), ("torch.float8_e4m3fn", "F8_E4M3"),
    ("torch.float8_e5m2", "F8_E5M2"), ("torch.int16", "I16"), ("torch.float16", "F16"), ("torch.bfloat16", "BF16"), ("torch.int32", "I32"),
    ("torch.float32", "F32"), ("torch.int64", "I64"), ("torch.float64", "F64"),
)  # fmt: skip
_CASTABLE = ("F16", "BF16", "F32", "F64")
_NAMED = 3  # maximum number of wrong tensors in an error


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of a checkpoint, without its values."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: "F32", "BF16"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class CheckpointLayout:
    """Contents of a directory of weights."""

    path: Path
    tensors: Mapping[str, TensorLayout]  # by parameter name
    files: tuple[str, ...]  # names of the files that hold the tensors
    is_tied: bool  # whether the output head may be left out, because it is the embedding
    fingerprint: Fingerprint


def read_checkpoint_layout(path: Path) -> CheckpointLayout:
    """Return names, shapes and dtypes of all tensors in a directory of safetensors files.

    Raises: CheckpointError if it has no weights, a file is incomplete or damaged, or the index does not agree with the files.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory. Export the weights there first")
    fingerprint = read_fingerprint(path)
    index = _read_json(path / _INDEX) if (path / _INDEX).exists() else None
    tensors: dict[str, TensorLayout] = {}
    places: dict[str, str] = {}
    files = _find_files(path, index)
    for file in files:
        for name, layout in _read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path} holds {name} twice, in {places[name]} and {file.name}, and servers read every safetensors file: remove those "
                    "that are no part of the model"
                )
            tensors[name], places[name] = layout, file.name
    if index is not None and places != index["weight_map"]:
        wrong = [name for name in sorted({*places, *index["weight_map"]}) if places.get(name) != index["weight_map"].get(name)]
        raise CheckpointError(f"{path / _INDEX} places {_name_first(wrong)} elsewhere than the files do: export the weights again")
    return CheckpointLayout(path, tensors, tuple(file.name for file in files), HEAD not in tensors or _says_tied(path), fingerprint)


def check_checkpoint(path: Path, reference: CheckpointLayout | None, *, allow_cast: bool = False) -> CheckpointLayout:
    """Return the layout of a directory, after checking that a server of `reference` can load its weights.

    Args:
        reference: layout of the served model; None = check only the consistency of the directory.
        allow_cast: whether floating-point tensors may have another precision than the reference's. The server casts them, and its
            log-probs are then those of the cast weights.

    Raises: CheckpointError, naming the first wrong tensors.
    """
    found = read_checkpoint_layout(path)
    _check_layout(found.tensors, reference, allow_cast, str(path))
    return found


def check_tensors(specs: Sequence[WeightSpec], reference: CheckpointLayout | None, *, allow_cast: bool = False) -> None:
    """Check weights in memory, as check_checkpoint."""
    names = {torch.removeprefix("torch."): name for torch, name in _TORCH_DTYPES}
    found = {spec.name: TensorLayout(spec.shape, names.get(spec.dtype, spec.dtype)) for spec in specs}
    _check_layout(found, reference, allow_cast, "the set of weights")


def expect_dtype(layout: CheckpointLayout, dtype: str) -> CheckpointLayout:
    """Return the layout of weights for a server of this dtype: the precision of most of the tensors is replaced.

    Args:
        dtype: dtype as torch names it, for instance "float32". A dtype that is no floating-point type of checkpoints changes nothing.
    """
    wanted = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}.get(dtype)
    counts = Counter(tensor.dtype for tensor in layout.tensors.values() if tensor.dtype in _CASTABLE)
    if wanted is None or not counts:
        return layout
    main = counts.most_common(1)[0][0]
    return replace(
        layout,
        tensors={name: replace(tensor, dtype=wanted) if tensor.dtype == main else tensor for name, tensor in layout.tensors.items()},
    )


def read_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a directory, which shows whether files of weights were replaced since; () without any."""
    stats = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def read_weight_version(path: Path) -> int | None:
    """Return the version in a directory's WEIGHT_VERSION_FILE; None without one. Raises CheckpointError if it cannot be read."""
    file = path / WEIGHT_VERSION_FILE
    if not file.exists():
        return None
    content = _read_json(file)
    version = content.get("weight_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise CheckpointError(f'{file} holds {content!r}, expected {{"weight_version": int}}: export the weights again')
    return version


def read_reference(model_path: Path) -> CheckpointLayout | None:
    """Return the layout of a model directory; None if it cannot be read from here, or is in another format than safetensors."""
    try:
        return read_checkpoint_layout(model_path)
    except CheckpointError:
        return None


def read_vocab_size(model_path: Path) -> int | None:
    """Return the rows of a model's embedding, by its directory's config.json; None if that cannot be read from here."""
    return _read_size(model_path, ("vocab_size",))


def read_experts_per_token(model_path: Path) -> int | None:
    """Return the experts of a token in each router, by a directory's config.json; None if that does not say so, or cannot be read."""
    return _read_size(model_path, ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"))


def _read_size(model_path: Path, names: Sequence[str]) -> int | None:
    """Return the first of these numbers in a directory's config.json, of the whole model or its text part."""
    try:
        config = _read_json(model_path / "config.json")
    except CheckpointError:
        return None
    sources = (config, config.get("text_config")) if isinstance(config, dict) else ()
    sizes = [source.get(name) for source in sources if isinstance(source, dict) for name in names]
    return next((size for size in sizes if isinstance(size, int)), None)


def _check_layout(found: Mapping[str, TensorLayout], reference: CheckpointLayout | None, allow_cast: bool, source: str) -> None:
    if reference is None:
        return
    faults = _compare(found, reference, allow_cast)
    if faults:
        raise CheckpointError(
            f"{source} does not hold the weights of the model that is served, {reference.path}: {'; '.join(faults)}. Export all weights of "
            "the same architecture under the names and in the precision of that directory"
        )


def read_eos_token_ids(model_path: Path) -> frozenset[int]:
    """Return a model's end-of-text ids, by its directory's generation_config.json and config.json; empty if those cannot be read."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            config = _read_json(model_path / name)
        except CheckpointError:
            continue
        ids = config.get("eos_token_id") if isinstance(config, dict) else None
        found.update([ids] if isinstance(ids, int) else [i for i in ids or () if isinstance(i, int)])
    return frozenset(found)


def _compare(found: Mapping[str, TensorLayout], reference: CheckpointLayout, allow_cast: bool) -> list[str]:
    expected = dict(reference.tensors)
    if reference.is_tied:
        embedding = next((layout for name, layout in expected.items() if name.endswith("embed_tokens.weight")), None)
        head = expected.pop(HEAD, embedding)
        if head is not None and HEAD in found:
            expected[HEAD] = head
    shared = [name for name in expected if name in found]
    wrong_shapes = [name for name in shared if found[name].shape != expected[name].shape]
    wrong_dtypes = [
        name for name in shared if name not in wrong_shapes and not _is_same_dtype(found[name].dtype, expected[name].dtype, allow_cast)
    ]
    faults = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected],
        "wrong shapes": [f"{name} is {found[name]}, expected {expected[name]}" for name in wrong_shapes],
        "wrong dtypes": [f"{name} is {found[name]}, expected {expected[name]}" for name in wrong_dtypes],
    }
    return [f"{kind}: {_name_first(names)}" for kind, names in faults.items() if names]


def _is_same_dtype(found: str, expected: str, allow_cast: bool) -> bool:
    return found == expected or (allow_cast and found in _CASTABLE and expected in _CASTABLE)


def _name_first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _find_files(path: Path, index: Any) -> list[Path]:
    """Return the files that a server reads: those of the index, else all."""
    present = sorted(path.glob("*.safetensors"))
    if index is None:
        if not present:
            raise CheckpointError(f"{path} has no safetensors file: it is not a model directory, or its weights are in another format")
        return present
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path / _INDEX} has no weight_map of names to files: export the weights again")
    files = [path / name for name in sorted(set(cast("dict[str, str]", weight_map).values()))]
    missing = [file.name for file in files if file not in present]
    if missing:
        raise CheckpointError(f"{path} lacks {_name_first(missing)} of its index: the export is not complete, or files were removed")
    whole = path / "model.safetensors"
    if whole in present and whole not in files:
        raise CheckpointError(f"{path} has a model.safetensors besides the files of its index: two exports are mixed there, remove one")
    return files


def _read_header(file: Path) -> dict[str, TensorLayout]:
    """Return the tensors of one file. Raises CheckpointError unless their data fill it from the header to its end."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            content = opened.read(length) if 2 <= length <= min(_MAXHEADER, size - 8) else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not content:
        raise CheckpointError(f"{file} with its {size} bytes is not a complete safetensors file: it was cut off, or is another format")
    try:
        header = parse_json(content)
        entries = {name: value for name, value in header.items() if name != "__metadata__"}
        tensors = {name: TensorLayout(tuple(map(int, value["shape"])), str(value["dtype"])) for name, value in entries.items()}
        offsets = {name: (int(value["data_offsets"][0]), int(value["data_offsets"][1])) for name, value in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged header ({error!r}): export the weights again") from error
    end = 0
    item_bytes = dict(_DTYPE_BYTES)
    for name, (start, stop) in sorted(offsets.items(), key=lambda item: item[1]):
        item = item_bytes.get(tensors[name].dtype)
        expected = stop - start if item is None else item * math.prod(tensors[name].shape)
        if start != end or stop - start != expected:
            raise CheckpointError(f"{file} has a damaged header: {name}, {tensors[name]}, has the bytes {start} to {stop}")
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(f"{file} has {size} bytes, but its header promises {8 + length + end}: it was cut off or is being written")
    return tensors


def _says_tied(path: Path) -> bool:
    config = _read_json(path / "config.json") if (path / "config.json").exists() else {}
    return isinstance(config, dict) and config.get("tie_word_embeddings") is True


def _read_json(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}): export the weights again") from error

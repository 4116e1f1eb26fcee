"""Conversion of a trained model to a plain Hugging Face directory: one file or several, another dtype, adapters merged.

Tensors are read and written under the names that they have in files, one file of weights in memory at a time, so language models, critics
and reward models of any family are converted alike.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from integration.parts.adapters import ADAPTER_CONFIG, find_base, merge_adapters
from integration.parts.rewards import find_reward_model
from integration.run.directory import find_result
from integration.settings.command_line import RUN_FILE, find_run
from rollouts.backends.lora.files import BASE_FILE
from rollouts.backends.weights.fill import FileWeights
from rollouts.config_files import read_json
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.loading import check_model_directory, load_hf_model, load_tokenizer, parse_dtype
from rollouts.models.weights import INDEX_FILE, WEIGHTS_FILE, check_finite_weights
from rollouts.output_files import explain_writes
from rollouts.training.saving.checkpoints import MANIFEST_FILE, RUN_STATE_FILE, verify_checkpoint

_OWN = (MANIFEST_FILE, RUN_STATE_FILE, WEIGHT_VERSION_FILE)
"""Files of a checkpoint that are no part of a model."""
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


@dataclass(frozen=True)
class Source:
    """The model to convert."""

    directory: Path  # its files
    run: Path | None = None  # directory of the run that it is of


def find_source(path: Path) -> Source:
    """Return the model of a path: of a run the best checkpoint, if it kept one, or the newest; a checkpoint; a model directory; adapters.

    Raises: ConfigError for a path without a model; CheckpointError for a damaged checkpoint.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: give a run, a checkpoint (step_NNNN) or a model directory")
    if (path / RUN_FILE).is_file():
        return Source(find_result(path) or check_model_directory(find_reward_model(path)), path)
    if (path / MANIFEST_FILE).is_file():
        verify_checkpoint(path)
        return Source(path, find_run(path))
    if (path / ADAPTER_CONFIG).is_file():
        return Source(path)
    return Source(check_model_directory(path))


def convert(
    source: Source, target: Path, *, dtype: str | None, max_file_bytes: int, base: str | None = None, tokenizer: str | None = None
) -> int:
    """Write the model as a plain Hugging Face directory, whole or not at all. Returns the number of weights (tensors).

    Args:
        target: a new or an empty directory.
        dtype: dtype of the floating-point weights; None = as they are.
        max_file_bytes: bytes of one file of weights, unless a single tensor is larger.
        base: directory of the model below adapters; None = the one that their adapter_config.json names.
        tokenizer: directory of the tokenizer; None = that of the source.

    Raises: ConfigError for a target that holds something, a missing base of adapters, or a source that cannot be read; CheckpointError for
        weights that are not finite; OutputError if the disk refuses it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} holds something already: give another target, or remove it")
    partial = target.with_name(f".{target.name}.partial")
    with explain_writes(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with explain_writes(target):
            plain = (
                _merge(source.directory, base, partial / "merged") if (source.directory / ADAPTER_CONFIG).is_file() else source.directory
            )
            count = _write_weights(plain, partial, dtype, max_file_bytes)
            _copy_description(plain, partial, dtype)
            if tokenizer is not None:
                load_tokenizer(tokenizer).save_pretrained(partial)
            shutil.rmtree(partial / "merged", ignore_errors=True)
            if target.exists():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _merge(adapters: Path, base: str | None, target: Path) -> Path:
    """Merge adapters of peft into the model that they were trained on, float32."""
    whole = adapters.parent if (adapters / BASE_FILE).is_file() and (adapters.parent / "config.json").is_file() else None
    given = find_base(adapters, "give --base DIR" + (f", or convert {whole}, which is the merged model" if whole is not None else ""), base)
    merge_adapters(load_hf_model(given), adapters).save_pretrained(target)
    load_tokenizer(given).save_pretrained(target)
    return target


def _write_weights(source: Path, target: Path, dtype: str | None, max_file_bytes: int) -> int:
    """Write the weights in one file, or in several with an index. Returns their number."""
    wanted = None if dtype is None else parse_dtype(dtype)
    files: list[dict[str, Tensor]] = []
    names: list[list[str]] = []
    room = 0
    for name, value in _read(source):
        value = value.to(wanted) if wanted is not None and value.is_floating_point() else value
        check_finite_weights([(name, value)], str(source) if wanted is None else f"{source} in {dtype}")
        size = value.numel() * value.element_size()
        if not files or room < size:
            if files:
                _write_part(files[-1], target, len(files))
                files[-1] = {}
            files.append({})
            names.append([])
            room = max_file_bytes
        files[-1][name] = value
        names[-1].append(name)
        room -= size
    _write_part(files[-1], target, len(files))
    return _name_parts(target, names)


def _write_part(tensors: Mapping[str, Tensor], target: Path, number: int) -> None:
    path = target / f"part-{number:05d}.safetensors"
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})
    os.chmod(path, 0o644)


def _name_parts(target: Path, names: Sequence[Sequence[str]]) -> int:
    """Give the files their usual names, and write the index of several. Returns the number of tensors."""
    total = len(names)
    if total == 1:
        (target / "part-00001.safetensors").rename(target / WEIGHTS_FILE)
        return len(names[0])
    weight_map: dict[str, str] = {}
    size = 0
    for number, part in enumerate(names, 1):
        path = (target / f"part-{number:05d}.safetensors").rename(target / f"model-{number:05d}-of-{total:05d}.safetensors")
        size += path.stat().st_size
        weight_map |= dict.fromkeys(part, path.name)
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n")
    return len(weight_map)


def _read(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model directory by name, in the order of their names."""
    if list(source.glob("*.safetensors")):
        try:
            with FileWeights(source) as files:
                for name in sorted(files.shapes):
                    yield name, files.read(name, tuple(slice(0, size) for size in files.shapes[name]))
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return
    for path in sorted(source.glob("pytorch_model*.bin")) or sorted(source.glob("*.bin")):
        try:
            tensors = cast("dict[str, Tensor]", torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
        seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()  # begun anew: the next file may be mapped to the same addresses
        for name, value in sorted(tensors.items()):
            place = (value.data_ptr(), value.shape, value.stride())
            if place not in seen:  # tied weights once
                yield name, value
            seen.add(place)


def _copy_description(source: Path, target: Path, dtype: str | None) -> None:
    """Copy configuration, tokenizer and template; the dtype of the configuration becomes that of the weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name not in (*_OWN, INDEX_FILE, "pytorch_model.bin.index.json"):
            shutil.copyfile(path, target / path.name)
    if dtype is not None:
        config = read_json(target / "config.json")
        config.pop("torch_dtype", None)
        config["dtype"] = str(parse_dtype(dtype)).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

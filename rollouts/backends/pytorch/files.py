"""Files of a backend's checkpoint: a model directory, and beside it one file with the other state of the trainer."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from rollouts.backends.weights.export import Piece, alone, export_pieces
from rollouts.checks import find_non_finite
from rollouts.errors import CheckpointError
from rollouts.models.loading import parse_dtype
from rollouts.models.weights import adapted_weights, base_weights, first_names, has_adapters, stream_weights, weight_below

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TRAINER_FILE = "trainer_state.pt"
SHARDED_DIRECTORY = "sharded"
"""Subdirectory of the state of backends with several processes, see fsdp/checkpoint.py."""
OPTIMIZER = "optimizer_class"
"""Key of the name of the optimizer's class; older files lack it."""
_KIND = "kind"


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    *,
    base_alone: bool = False,
    dtype: str | None = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer in the layout that from_pretrained and inference servers open.

    Args:
        base_alone: export the weights below a model's adapters; otherwise the merged weights.
        dtype: dtype of the floating-point tensors; None = as they are.
    """
    check_written(model.state_dict().items(), directory)
    weights = None  # the model's own
    if has_adapters(model):
        layers = adapted_weights(model)
        below = {name: weight_below(value, layers.get(name)) for name, value in base_weights(model).items()} if base_alone else None
        weights = _merged_weights(model) if below is None else below
    if dtype is not None:
        weights = cast_weights(model.state_dict(keep_vars=True) if weights is None else weights, dtype)
    cast("Any", model).save_pretrained(directory, state_dict=weights)
    finish_export(tokenizer, directory)


def cast_weights(weights: Mapping[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    """Return weights with their floating-point tensors in another dtype, tied ones as one tensor; None = as they are."""
    found: dict[int, Tensor] = {}
    wanted = None if dtype is None else parse_dtype(dtype)
    for value in weights.values():
        found.setdefault(id(value), value if wanted is None or not value.is_floating_point() else value.detach().to(wanted))
    return {name: found[id(value)] for name, value in weights.items()}


def check_written(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Raise CheckpointError for tensors with a NaN or an infinity: no checkpoint or export has one, and earlier files stay intact."""
    bad = find_non_finite(tensors)
    if bad is not None:
        raise CheckpointError(
            f"{bad} is not finite, so nothing is written to {directory}: a checkpoint never holds a NaN. Older ones are as they were; "
            "go on from the newest with a lower learning rate, or in float32"
        )


def _merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Merge weights into a state dict of the plain model: tied weights are one tensor.

    save_pretrained writes it once, under the name that export_sharded chooses, too.
    """
    first = first_names(base_weights(model, keep_vars=True))
    weights: dict[str, Tensor] = {}
    for name, value in stream_weights(model):
        weights[name] = weights.get(first[name], value)
    return weights


def finish_export(tokenizer: PreTrainedTokenizerBase | None, directory: Path) -> None:
    """Write the tokenizer beside the weights, and make the files readable for all users."""
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    for path in directory.glob("*.safetensors"):
        os.chmod(path, 0o644)  # written 0600; a server may run as another user


def write_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    pieces: Sequence[Piece],
    kind: str,
    state: Mapping[str, Any],
) -> None:
    """Write the model directory, which is made, and the state of the trainer. Only the configuration is read from the model.

    Args:
        pieces: whole weights, of collect_pieces.
        kind, state: see write_trainer_state.

    Raises: CheckpointError for a tensor that is not finite.
    """
    check_written(((piece.spec.name, piece.values) for piece in pieces), directory)
    directory.mkdir(parents=True, exist_ok=True)
    export_pieces(pieces, model, directory, tokenizer, ranks=alone())
    write_trainer_state(directory, kind, state)


def copy_to_host(value: Any) -> Any:
    """Copy nested mappings and sequences, and the tensors in them to host memory, so that later updates do not change the copy."""
    if is_quantized(value):  # cannot be cloned
        parts, rest = value.__tensor_flatten__()
        return type(value).__tensor_unflatten__({part: copy_to_host(getattr(value, part)) for part in parts}, rest, None, None)
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" else value.detach().to("cpu")
    if isinstance(value, Mapping):
        return {key: copy_to_host(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        copies = [copy_to_host(item) for item in cast("Sequence[Any]", value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    return value


def is_quantized(value: Any) -> TypeGuard[Any]:
    """Whether a value is a tensor made of others, as Adam's moments of 8 bits are; a DTensor is none."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local")


def write_trainer_state(directory: Path, kind: str, state: Mapping[str, Any]) -> None:
    """Write tensors and numbers.

    Args:
        kind: kind of the backend; no other kind reads the file.

    Raises: CheckpointError for a tensor that is not finite.
    """
    check_written(name_tensors(state), directory)
    torch.save({**state, _KIND: kind}, directory / TRAINER_FILE)


def name_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in nested mappings and sequences, by path, as in optimizer.state.0.exp_avg; of quantized ones the parts."""
    if is_quantized(value):
        for part in value.__tensor_flatten__()[0]:
            yield from name_tensors(getattr(value, part), f"{name}.{part}")
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        found = cast("Any", value)
        for key, inner in found.items() if isinstance(found, Mapping) else enumerate(found):
            yield from name_tensors(inner, f"{name}.{key}" if name else str(key))


def read_trainer_state(directory: Path, kind: str) -> dict[str, Any]:
    """Read the file of write_trainer_state to the CPU. Raises CheckpointError if it is missing, damaged or of another kind of backend."""
    path = directory / TRAINER_FILE
    if not path.is_file() and (directory / SHARDED_DIRECTORY).is_dir():
        raise CheckpointError(
            f"{directory} is of the backend 'fsdp', not {kind!r}: go on with --backend.kind fsdp or pytorch, or begin from the weights "
            "alone with --model.path"
        )
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {TRAINER_FILE}: it is a model, not a checkpoint of this backend; load it as --model.path"
        )
    try:
        state = cast("dict[str, Any]", torch.load(path, weights_only=True, map_location="cpu"))
    except pickle.UnpicklingError as error:
        hint = "its optimizer has moments of 8 bits: go on with --rl.optimizer.moments 8bit (of SFT: --sft.optimizer.moments)"
        raise CheckpointError(f"{path} cannot be read: {hint if 'torchao' in str(error) else error}") from error
    except (RuntimeError, ValueError, KeyError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    found = state.get(_KIND, "pytorch")
    if found != kind:
        raise CheckpointError(
            f"{path} is of the backend {found!r}, not {kind!r}: go on with --backend.kind {found}, or begin from the weights alone with "
            "--model.path"
        )
    return state


def take_random_state(device: torch.device) -> dict[str, Tensor | None]:
    """Return the state of torch's global random generators: "cpu", and "cuda" if that is the device."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def restore_random_state(state: Mapping[str, Tensor | None], device: torch.device) -> None:
    """Restore a state of take_random_state; that of a GPU only on one."""
    torch.set_rng_state(cast("Tensor", state["cpu"]))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def check_optimizer_fits(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError unless an optimizer can load the state of a one-process backend.

    Args:
        optimizer: optimizer of unsharded parameters; not changed.
        state: result of read_trainer_state.
        path: path of the file, for the message.
    """
    try:
        groups, values = state["optimizer"]["param_groups"], state["optimizer"]["state"]
        missing = {"scheduler", "rng", "cuda_rng", "num_updates", "num_skipped_in_a_row", "weight_version"} - state.keys()
        saved = [list(group["params"]) for group in groups]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be restored into this optimizer: it has no {error}") from error
    ours = type(optimizer).__name__
    theirs = state.get(OPTIMIZER, ours)
    if theirs != ours:
        raise CheckpointError(
            f"{path} has the state of {theirs}, but the optimizer is {ours}: resume with the moments that the run was started with "
            "(--sft.optimizer.moments, --rl.optimizer.moments, --critic.optimizer.moments)"
        )
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}: it is of another version of this library, or damaged")
    own = [cast("list[Tensor]", group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in saved] != [len(group) for group in own]:
        raise CheckpointError(
            f"{path} cannot be restored into this optimizer: it has groups of {[len(group) for group in saved]} parameters, expected "
            f"{[len(group) for group in own]}"
        )
    for number, parameter in ((n, p) for g, group in zip(saved, own, strict=True) for n, p in zip(g, group, strict=True)):
        shapes = {key: tuple(x.shape) for key, x in values.get(number, {}).items() if isinstance(x, Tensor) and x.dim()}
        wrong = [key for key, shape in shapes.items() if shape != tuple(parameter.shape)]
        if wrong:
            raise CheckpointError(
                f"{path} cannot be restored into this optimizer: {wrong[0]} of its parameter {number} is {shapes[wrong[0]]}, expected "
                f"{tuple(parameter.shape)}"
            )

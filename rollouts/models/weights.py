"""Weights of a Hugging Face model as a mapping of tensors: read from a directory, checked against a model, copied into it, read out of it.

Shared by training backends and the in-process engine. A bad set of weights is refused before anything is overwritten. Weights that are read
out are whole, also those of a sharded model, and have the adapters of the model, if any, merged into them: W + scale * B A.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollouts.checks import find_non_finite, parse_json
from rollouts.errors import CheckpointError
from rollouts.models.four_bit import FourBitLinear
from rollouts.weight_specs import WeightSpec, describe_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_NAME = "default"
"""Peft's name of the model's one adapter."""

_PART = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model directory: those of its index, else the only one, else all numbered parts.

    Raises: CheckpointError if there are none, if a file of the index is missing, or, without an index, a numbered part.
    """
    index = directory / INDEX_FILE
    if index.exists():
        try:
            weight_map = cast("dict[str, str]", parse_json(index.read_text())["weight_map"])
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} has no weight_map of names to files ({error!r}): export the weights again") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks {missing[:3]} of its index: the export is not complete, or files were removed")
        return [directory / name for name in names]
    single = directory / WEIGHTS_FILE
    found = [single] if single.is_file() else sorted(directory.glob("model*.safetensors"))
    if not found:
        raise CheckpointError(f"{directory} has no model.safetensors: it is not a model directory, or its weights are in another format")
    numbers = [(int(part[1]), int(part[2])) for path in found if (part := _PART.fullmatch(path.name))]
    expected = sorted((k, count) for count in {count for _, count in numbers} for k in range(1, count + 1))
    if sorted(numbers) != expected or len({count for _, count in numbers}) > 1:
        raise CheckpointError(
            f"{directory} has no {INDEX_FILE}, and its parts are not one model: found {[path.name for path in found][:6]}. An export was "
            "interrupted, or files were removed: export the weights again"
        )
    return found


def explain_damage(path: Path, error: Exception) -> str:
    """Return what is wrong with a safetensors file that cannot be opened, and what to do."""
    try:
        with path.open("rb") as file:
            pointer = file.read(24) == b"version https://git-lfs."
    except OSError as refused:
        return f"{path} cannot be read ({refused.strerror or refused}): give this user the right to, or copy, download or export it again"
    if pointer:
        return f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull` where it was cloned"
    return f"{path} is not a complete safetensors file: {error}. Copy, download or export it again"


def read_weights(directory: Path, model: PreTrainedModel | None = None) -> dict[str, Tensor]:
    """Read all tensors from the files of find_weight_files.

    Args:
        model: model that they are meant for, whose names they get, see converts_weights; None = the names in the files.

    Raises: CheckpointError as find_weight_files, or if a file is damaged.
    """
    weights: dict[str, Tensor] = {}
    for path in find_weight_files(directory):
        try:
            weights.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(explain_damage(path, error)) from error
    if model is not None and not weights.keys() <= base_weights(model).keys() and converts_weights(model):
        return load_converted(find_class(model), directory)
    return weights


def converts_weights(model: PreTrainedModel) -> bool:
    """Whether transformers gives this model's weights other names or shapes in files than in memory.

    In memory the experts of a layer are one tensor, for example, and in files each has its own.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(as_unsharded(model), add_legacy=False))


def as_unsharded(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose class is transformers' own: the model itself, or for one that FSDP has sharded another on meta."""
    kind = find_class(model)
    if kind is type(model):
        return model
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(model.config))


def find_class(model: PreTrainedModel) -> Any:
    """Return transformers' class of a model, also of one that FSDP has sharded, whose own class is derived from it."""
    return next(kind for kind in type(model).__mro__ if all(base.__name__ != "FSDPModule" for base in kind.__mro__))


def load_converted(kind: Any, directory: Path) -> dict[str, Tensor]:
    """Load the weights of a directory under the names that they have in memory, float32, by transformers.

    Args:
        kind: class with from_pretrained.

    Raises: CheckpointError if they are not all of such a model's.
    """
    try:
        loaded, found = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory} cannot be loaded as {kind.__name__}: {error}") from error
    faults = {name: sorted(map(str, found[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(faults.values()):
        missing, unknown, wrong = (names[:5] for names in faults.values())
        raise CheckpointError(
            f"{directory} does not fit {kind.__name__}: missing {missing}, unknown {unknown}, wrong shapes {wrong}. Use weights of the "
            "same architecture."
        )
    return dict(loaded.state_dict())


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether the model has peft adapters; its parameters then have other names than those of the plain model."""
    return bool(getattr(model, "peft_config", None))


def base_weights(model: torch.nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the state dict under the plain model's names; of a model with adapters the weights below them, without the adapters.

    Args:
        keep_vars: return the parameters themselves; tied ones are one object.
    """
    state = cast("dict[str, Tensor]", cast("Any", model).state_dict(keep_vars=keep_vars))
    if not has_adapters(model):
        return state
    return {plain_name(name): value for name, value in state.items() if not is_adapter_name(name)}


def is_adapter_name(name: str) -> bool:
    """Whether a parameter of a model with adapters is part of one."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Return the plain model's name of a parameter below an adapter."""
    return name.replace(".base_layer.", ".")


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over (name in the plain model, layer of peft) of each layer with an adapter; nothing if has_adapters is False."""
    if has_adapters(model):
        for name, module in model.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                yield plain_name(name), module


def adapted_weights(model: torch.nn.Module) -> dict[str, Any]:
    """Return peft's layer by the name of its weight in the plain model, for each layer with an adapter."""
    return {f"{name}.weight": layer for name, layer in adapted_layers(model)}


def adapter_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the parameters A [rank, in] and B [out, rank] of a layer."""
    return layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight


def weight_below(value: Tensor, adapted_layer: Any | None) -> Tensor:
    """Return a weight, without the adapter of its layer, if any; one in 4 bits is read out in bfloat16."""
    base = None if adapted_layer is None else adapted_layer.base_layer
    return base.read_weight() if isinstance(base, FourBitLinear) else value


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A, computed in float32, in the dtype of W. weight: # [out, in]; a: # [rank, in]; b: # [out, rank]."""
    return (weight.float() + (b.float() @ a.float()) * scale).to(weight.dtype)


def first_names(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name of state_dict(keep_vars=True) to the first name of the same tensor; tied weights are one object there."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in weights.items()}


def check_architecture(model: PreTrainedModel, directory: Path) -> None:
    """Raise CheckpointError if the directory's config.json is missing or describes a model with other sizes."""
    try:
        found = cast("dict[str, Any]", parse_json((directory / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} has no readable config.json: it is not a model directory ({error})") from error
    expected = model.config.to_dict()
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    differing = [f"{n} is {found[n]!r}, expected {expected[n]!r}" for n in names if n in found and found[n] != expected.get(n)]
    if differing:
        raise CheckpointError(
            f"{directory} is a checkpoint of another architecture: {'; '.join(differing)}. Go on with the model of the run that wrote it"
        )


def check_weights_fit(model: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError unless the weights are finite and have the model's names and shapes; tied ones may appear once."""
    own = base_weights(model, keep_vars=True)
    first_name: dict[int, str] = {}
    tied = {name: first_name.setdefault(id(value), name) for name, value in own.items()}
    given = {tied[name] for name in weights if name in tied}
    missing = sorted(name for name in own if name not in weights and tied[name] not in given)
    unknown = sorted(set(weights) - set(own))
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if missing or unknown or wrong:
        raise CheckpointError(
            f"{source} does not fit this {type(model).__name__}: missing {missing[:5]}, unknown {unknown[:5]}, wrong shapes {wrong[:5]}. "
            "Use weights of the same architecture."
        )
    finite: frozenset[object] = weights.finite if isinstance(weights, CheckedWeights) else frozenset()
    distinct: dict[object, tuple[str, Tensor]] = {}  # tied weights once, under their first name
    for name, value in weights.items():
        distinct.setdefault(_place(value), (name, value))
    check_finite_weights((item for item in distinct.values() if not finite or _identify(item[1]) not in finite), source)


class CheckedWeights(dict[str, Tensor]):
    """Weights by name, of which check_weights_fit need not read again the tensors that were read since they last changed.

    Torch counts the writes to a tensor, except for those through Tensor.data and of fused optimizers; one that was written to since then is
    read again.
    """

    def __init__(self, weights: Mapping[str, Tensor], finite: frozenset[object]) -> None:
        """
        Args:
            finite: identify_tensors of tensors that were found finite.
        """
        super().__init__(weights)
        self.finite = finite


def identify_tensors(tensors: Iterable[Tensor]) -> frozenset[object]:
    """Return the places of unsharded tensors with the number of writes to each: values that the next write to a tensor changes."""
    return frozenset(_identify(tensor) for tensor in tensors if not hasattr(tensor, "to_local"))


def _identify(tensor: Tensor) -> object:
    return object() if tensor.is_inference() else (*_place(tensor), tensor._version)  # writes to an inference tensor are not counted


def check_finite_weights(weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Raise CheckpointError for weights with a NaN or an infinity, naming the first such tensor.

    Args:
        source: origin of the weights, for the message.
    """
    bad = find_non_finite(weights)
    if bad is not None:
        raise CheckpointError(
            f"{source} has a NaN weight (or an infinite one): {bad}. Nothing can be trained or sampled from it: use an earlier checkpoint, "
            "or the model that it was made from"
        )


def copy_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrite the model's weights with ones that check_weights_fit has accepted; adapters stay as they are."""
    own, layers = base_weights(model), adapted_weights(model)
    copied: set[tuple[object, object]] = set()  # tied weights are copied once
    with torch.no_grad():
        for name, value in weights.items():
            base = layers[name].base_layer if name in layers else None
            if isinstance(base, FourBitLinear):
                base.write_weight(value)
            elif (pair := (_place(own[name]), _place(value))) not in copied:
                own[name].copy_(value)
                copied.add(pair)


def _place(value: Tensor) -> tuple[object, ...]:
    """Return what two tensors that exist have in common only if they are the same numbers in the same memory."""
    return value.device, value.data_ptr(), value.dtype, value.shape, value.stride()


def describe_model_weights(model: PreTrainedModel) -> tuple[WeightSpec, ...]:
    """Return name, dtype and whole shape of each weight in the order of the state dict; tied ones once, by first name. Moves nothing."""
    own = base_weights(model, keep_vars=True)
    seen: set[int] = set()
    first = [(name, value) for name, value in own.items() if id(value) not in seen and not seen.add(id(value))]
    return tuple(describe_tensor(name, value) for name, value in first)


def stream_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Iterate over (name, tensor) of each weight in the order of the state dict, tied ones under each of their names, adapters merged.

    At most one whole tensor exists at a time, besides tensors that the caller keeps. Weights of a sharded model are gathered from all
    ranks, so all ranks must iterate together.

    Yields: copies on the CPU.
    """
    layers = adapted_weights(model)
    for name, value in base_weights(model).items():
        yield name, whole_weight(value, layers.get(name))


def view_model_weights(model: PreTrainedModel, finite: frozenset[object] = frozenset()) -> CheckedWeights:
    """Return the weights of an unsharded model in the order of the state dict, tied ones under each of their names; a layer with an adapter
    has a merged copy, on its device.

    Args:
        finite: see CheckedWeights.
    """
    layers = adapted_weights(model)
    views = {
        name: whole_weight(value, layers[name], keep_device=True) if name in layers else value.detach()
        for name, value in base_weights(model).items()
    }
    return CheckedWeights(views, finite)


def gather_model_weights(model: PreTrainedModel, names: Sequence[str], *, keep_device: bool = False) -> dict[str, Tensor]:
    """Return whole copies of the weights with these names, in this order. All ranks of a sharded model call it with the same names.

    Args:
        keep_device: leave the copies on the model's device instead of the CPU.
    """
    own, layers = base_weights(model), adapted_weights(model)
    unknown = [name for name in names if name not in own]
    assert not unknown, f"the model has no weights {unknown[:3]}"
    return {name: whole_weight(own[name], layers.get(name), keep_device=keep_device) for name in names}


def merge_adapters(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the weights of a model with its adapters merged, on the CPU; None if it has no adapters."""
    return dict(stream_weights(model)) if has_adapters(model) else None


def whole_weight(value: Tensor, adapted_layer: Any | None, *, keep_device: bool = False) -> Tensor:
    """Return whole_tensor of a weight, with the adapter of its layer, if any, merged into it in float32."""
    whole = whole_tensor(weight_below(value, adapted_layer), keep_device=keep_device)
    if adapted_layer is None:
        return whole
    a, b = (whole_tensor(part, keep_device=keep_device) for part in adapter_of(adapted_layer))
    return merge_weight(whole, a, b, adapted_layer.scaling[ADAPTER_NAME])


def whole_tensor(value: Tensor, *, keep_device: bool = False) -> Tensor:
    """Copy a tensor to the CPU, or on its own device; a DTensor is gathered, so all ranks must call it together."""
    value = value.detach()
    full = getattr(value, "full_tensor", None)
    if full is None:
        return value.clone() if keep_device else value.to("cpu", copy=True)
    whole = cast("Tensor", full())
    whole = whole.clone() if _shares_memory(whole, value) else whole
    return whole if keep_device else whole.to("cpu")


def _shares_memory(whole: Tensor, value: Any) -> bool:
    """Whether gathering returned the shard itself, as it does if one rank has the whole tensor."""
    return whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()

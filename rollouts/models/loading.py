"""Loading of Hugging Face models, tokenizers and dtypes from a directory, with errors that say what is wrong with it.

A model whose own code computes some rows in a way of its own, or not at all, is mended or refused (mend_own_code).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from rollouts.checks import parse_json
from rollouts.errors import ConfigError, DataError
from rollouts.models.forward.output_layers import get_decoder
from rollouts.models.hub import is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype of a name: float32 (fp32), bfloat16 (bf16), float16 (fp16), with or without "torch.". Raises ConfigError."""
    if isinstance(name, torch.dtype):
        return name
    known = {
        "float32": torch.float32,
        "fp32": torch.float32,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "float16": torch.float16,
        "fp16": torch.float16,
    }
    dtype = known.get(name.lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"unknown dtype {name!r}: known are {', '.join(known)}")
    return dtype


def parse_device(name: str) -> torch.device:
    """Return the device of a name: cpu, cuda, cuda:N, mps, or auto (cuda where torch sees a GPU, else cpu). Raises ConfigError."""
    name = find_device_name(name)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda, cuda:N, mps or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA GPU: use cpu, or install a CUDA build of torch")
    if device.type == "cuda" and 0 < (count := torch.cuda.device_count()) <= (device.index or 0):
        raise ConfigError(f"device is {name!r}, but torch sees {count} CUDA GPUs: use one of cuda:0 to cuda:{count - 1}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no Apple GPU: use cpu")
    return device


def find_device_name(name: str) -> str:
    """Replace auto by cuda where torch sees a CUDA GPU, else by cpu; other names stay, whether or not there is such a device."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def find_compute_dtype(device: str) -> str:
    """Return the dtype of matrix products that fits a device: bfloat16 on a CUDA GPU that has it, else float32.

    Args:
        device: cpu, cuda, cuda:N, mps or auto. A CUDA GPU that torch does not see counts as one with bfloat16.
    """
    kind, _, index = find_device_name(device).partition(":")
    if kind != "cuda":
        return "float32"
    if torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count():
        return "bfloat16" if torch.cuda.get_device_capability(int(index or 0)) >= (8, 0) else "float32"  # Ampere is the first
    return "bfloat16"


def check_model_directory(path: str | Path, *, weights: bool = True) -> Path:
    """Return the path if it is a Hugging Face model directory. Raises ConfigError saying what is missing.

    Args:
        weights: whether it must have weights.
    """
    directory = Path(path)
    if not directory.is_dir():
        of_hub = (
            f"that of a model of the hub is rollouts.models.hub.find_hub_model({str(path)!r}).directory"
            if is_hub_name(str(path))
            else "a model of the hub has the form ORG/NAME, such as Qwen/Qwen3-0.6B"
        )
        raise ConfigError(f"{directory} is not a directory: pass that of a Hugging Face model, with config.json and weights; {of_hub}")
    if not (directory / "config.json").is_file():
        inside = sorted(p.name for p in directory.iterdir())[:8]
        raise ConfigError(f"{directory} is not a model directory: it has no config.json (it holds {inside}){_advise_no_config(directory)}")
    if weights and not list(directory.glob("*.safetensors")) and not list(directory.glob("*.bin")):
        raise ConfigError(f"{directory} has no weights: expected model.safetensors, or shards with an index{_advise_no_weights(directory)}")
    return directory


_COPY = "copy or download the whole directory of the model again, config.json, weights and tokenizer"


def _advise_no_config(directory: Path) -> str:
    """Return advice for a directory without config.json."""
    if (directory / "adapter_config.json").is_file():
        return ". It holds LoRA adapters alone: give the model that they were trained on, or merge them into it (peft's merge_and_unload)"
    found = _find_checkpoint(directory)
    return f". {_name_newest(found)}" if found else f": {_COPY}"


def _advise_no_weights(directory: Path) -> str:
    """Return advice for a directory without weights."""
    found = _find_checkpoint(directory)
    if found:  # the checkpoints of a run are the models
        return f". {_name_newest(found)}"
    if list(directory.glob("*.gguf")):
        return ". GGUF, which it has, is for llama.cpp alone: take the safetensors from which it was made"
    if list(directory.glob("*.index.json")):
        return f". The files of its index are not there: {_COPY}"
    return f": {_COPY}"


def _name_newest(found: Path) -> str:
    return f"It is the directory of a run: its newest model is {found}"


def _find_checkpoint(directory: Path) -> Path | None:
    of_stages = (sorted(directory.glob(f"{stage}/checkpoints/step_*")) for stage in ("rl", "dpo", "sft"))  # the last stage first
    return next((found[-1] for found in of_stages if found), None)


def read_model_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """Read the configuration of a model directory. Nothing is downloaded."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)


def is_of_kind(config: Any, kind: str) -> bool:
    """Whether a configuration names an architecture of a kind, for example "ForTokenClassification"."""
    return any(name.endswith(kind) for name in cast("list[str]", getattr(config, "architectures", None) or []))


def load_hf_model(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model from a directory. Nothing is downloaded.

    Args:
        dtype: dtype of the parameters; training keeps float32 masters, so leave it for a trained model.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Raises: ConfigError if the directory is not a complete model.
    """
    from transformers import AutoModelForCausalLM

    directory = check_model_directory(path)
    with explain_loading(directory, "causal language model"):
        model, info = cast("Any", AutoModelForCausalLM).from_pretrained(
            directory, dtype=parse_dtype(dtype), local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    if missing := sorted(map(str, info["missing_keys"])):  # transformers gives them random values
        head = model.get_output_embeddings()
        is_head = head is not None and all(model.get_parameter(name) is head.weight for name in missing)
        raise ConfigError(
            f"{directory} lacks {len(missing)} weights of a {type(model).__name__} ({', '.join(missing[:3])}): it is not a complete "
            "language model, or its config.json is of another one"
            + (". If its head is its embedding, config.json must say so by tie_word_embeddings true" if is_head else "")
        )
    return cast("PreTrainedModel", cast("torch.nn.Module", model).to(device))


@contextmanager
def explain_loading(directory: Path, kind: str) -> Generator[None]:
    """Raise the errors of loading a model directory as ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"{directory} cannot be loaded as a {kind}: {explain_remote_code(error)}") from error
    except SafetensorError as error:  # derives from Exception only
        raise ConfigError(f"the weights in {directory} are damaged: {error}. Copy or download them again") from error


def explain_remote_code(error: Exception) -> str:
    """Return what an error of transformers says; for a model with Python files of its own, the setting that runs them."""
    told = str(error).partition("\n\n")[0]
    if "trust_remote_code" not in told:
        without_guess = told.partition(" This could be because")[0]  # in place of which a caller gives advice
        return " ".join(without_guess.split()).rstrip(".")
    return (
        "its architecture is defined by Python files of its own, which run only if you trust them: add --model.trust-remote-code "
        "(trust_remote_code=True), or use a model that transformers knows"
    )


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory. Nothing is downloaded. Raises DataError if there is none."""
    from transformers import AutoTokenizer

    directory = check_model_directory(path, weights=False)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in files):  # some versions of transformers then return an empty one
        found = _find_checkpoint(directory)
        advice = f". {_name_newest(found)}" if found else ": copy the files of the model's tokenizer there"
        raise DataError(f"{directory} has no tokenizer (none of {', '.join(files)}){advice}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{directory} has no tokenizer that can be loaded: {error}. Copy or download {' and '.join(_list_tokenizer(directory))} again"
        ) from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def _list_tokenizer(directory: Path) -> list[str]:
    """List the files of a tokenizer that are no JSON; all of its files if each is."""
    files = [path for path in sorted(directory.glob("*token*.json")) if path.is_file()]
    return [path.name for path in files if not _is_json(path)] or [path.name for path in files]


def _is_json(path: Path) -> bool:
    try:
        parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def open_model(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Callable[[str | Path], PreTrainedModel] = load_hf_model,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer from a directory, keeping a given tokenizer; return a given model as it is."""
    if not isinstance(model, str | Path):
        return model, tokenizer
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    return load(model), tokenizer


def mend_own_code(model: PreTrainedModel) -> None:
    """Let a model compute what its own code cannot, in place; repeating it is harmless. To be called before the first pass.

    The recurrence of xLSTM mixes float32 with the dtype of half-precision weights, and fails in rows of a chunk or more. It is computed
    in float32 there, and its result is rounded to the dtype of the weights.

    Raises: ConfigError for a model whose results depend on the length of a row, on its pad tokens, or on random numbers.
    """
    decoder: Any = get_decoder(model)
    kind = type(model).__name__
    if getattr(decoder, "attention_type", None) == "block_sparse":  # BigBird's decoder leaves it behind in its first short row
        raise ConfigError(
            f"{kind} attends to random blocks of tokens, also later ones, in long rows (attention_type = 'block_sparse' in its "
            "config.json): set attention_type to 'original_full' there"
        )
    if "lengths" in inspect.signature(decoder.forward).parameters:  # XLM, Flaubert
        raise ConfigError(
            f"{kind} takes each pad token of a row (pad_token_id = {model.config.pad_token_id}) for one that its end lacks, so a token "
            "that was sampled changes what is read after it. Use another model"
        )
    if hasattr(model.config, "lsh_attn_chunk_length"):
        raise ConfigError(
            f"{kind} is Reformer: it fills rows up to the sizes of its chunks, and attends to tokens that random hashes choose, so a "
            "row has no log-probs that could be computed twice. Use another model"
        )
    for module in cast("torch.nn.Module", model).modules():
        if type(module).__name__ == "xLSTMBackend":  # transformers' own; the package xlstm has kernels that need no help
            for name in ("_inference_fn", "_train_fn"):
                kernel: Any = getattr(module, name)
                if getattr(kernel, "func", None) is not _compute_widened:
                    setattr(module, name, partial(_compute_widened, kernel))


def _compute_widened(kernel: Callable[..., Any], *, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
    """Call a kernel of xLSTM, in float32 if its inputs are in half precision and autocast does not choose the dtypes of its products."""
    dtype = query.dtype
    if dtype == torch.float32 or torch.is_autocast_enabled(query.device.type):
        return kernel(query=query, key=key, value=value, **more)
    more = {name: x.float() if isinstance(x, Tensor) else x for name, x in more.items()}
    found = kernel(query=query.float(), key=key.float(), value=value.float(), **more)
    return (found[0].to(dtype), *found[1:]) if isinstance(found, tuple) else found.to(dtype)

"""From paths and numbers to a backend: tier-1 parts that stand alone, and one-liners made of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from safetensors import SafetensorError

from rollouts.backends.distributed import count_launched
from rollouts.backends.lora import LoRAConfig, add_adapters
from rollouts.backends.optimizers import AdamW, AdamWArguments, ScheduledAdamWArguments, create_idle_optimizer, create_rule, takes
from rollouts.backends.optimizers import create_adamw_optimizer as create_adamw_optimizer
from rollouts.backends.outputs import ComputeOutputs, compute_log_probs, compute_values, get_value_head
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.backends.schedules import create_scheduler as create_scheduler
from rollouts.backends.schedules import create_warmup_cosine_scheduler as create_warmup_cosine_scheduler
from rollouts.backends.schedules import warmup_constant as warmup_constant
from rollouts.backends.schedules import warmup_cosine as warmup_cosine
from rollouts.backends.schedules import warmup_linear as warmup_linear
from rollouts.backends.schedules import warmup_stable_decay as warmup_stable_decay
from rollouts.backends.weight_stream import stream_weights
from rollouts.config import Schedule
from rollouts.errors import ConfigError, DataError
from rollouts.losses import sft_loss
from rollouts.model_weights import has_adapters
from rollouts.packing import get_decoder
from rollouts.types import LossFn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """A dtype from its name: float32 (fp32), bfloat16 (bf16), float16 (fp16), with or without "torch."."""
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
    """A device from its name: cpu, cuda, cuda:N, mps, or auto (the first of cuda, mps, cpu that is there)."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: use cpu, cuda, cuda:N, mps or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no CUDA GPU: use cpu, or install a CUDA build of torch")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device is {name!r}, but torch sees no Apple GPU: use cpu")
    return device


def check_model_directory(path: str | Path) -> Path:
    """The path, if it is a Hugging Face model directory. Raises ConfigError saying what is missing."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory: pass the path of a Hugging Face model (a directory with config.json and weights)"
        )
    if not (directory / "config.json").is_file():
        inside = sorted(p.name for p in directory.iterdir())[:8]
        raise ConfigError(f"{directory} is not a model directory: it has no config.json (it holds {inside})")
    if not list(directory.glob("*.safetensors")) and not list(directory.glob("*.bin")):
        raise ConfigError(f"{directory} has no weights: expected model.safetensors, or shards with an index")
    return directory


def load_hf_model(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model from a directory. Nothing is downloaded.

    Args:
        dtype: of the parameters; training keeps float32 masters, so leave it for a model that is trained.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Raises: ConfigError if the directory is not a complete model.
    """
    from transformers import AutoModelForCausalLM

    directory = check_model_directory(path)
    with explain_loading(directory, "causal language model"):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=parse_dtype(dtype), local_files_only=True, trust_remote_code=trust_remote_code
        )
    return cast("PreTrainedModel", cast("torch.nn.Module", model).to(device))


def load_critic_model(
    path: str | Path, *, seed: int = 0, head_std: float | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a saved critic, a reward model as one, or the backbone of a causal language model with a fresh head. Nothing is downloaded.

    Args:
        path: a directory of one of these kinds. The values of a reward model are its scores of what there is so far (Ouyang et al. 2022
            begin so).
        seed, head_std: of a fresh head, see init_value_head.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Returns: a token-classification model with one label, float32, on the CPU, without dropout in its head.
    Raises: ConfigError if the directory is not a complete model, or transformers has no token-classification model for it.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    directory = check_model_directory(path)
    with explain_loading(directory, "critic (a token-classification model with one label)"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
        kinds = cast("list[str]", getattr(config, "architectures", None) or [])
        if any(kind.endswith("ForSequenceClassification") for kind in kinds):
            scorer = AutoModelForSequenceClassification.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
            )
            critic = create_critic_model(cast("PreTrainedModel", scorer), seed=seed)
            with torch.no_grad():
                get_value_head(critic).weight.copy_(get_value_head(cast("PreTrainedModel", scorer)).weight)
            return critic
        if not any(kind.endswith("ForTokenClassification") for kind in kinds):
            model = load_hf_model(directory, trust_remote_code=trust_remote_code)
            return create_critic_model(model, seed=seed, head_std=head_std)
        loaded, info = AutoModelForTokenClassification.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    missing = sorted(cast("dict[str, Any]", info)["missing_keys"])
    if missing:
        raise ConfigError(f"{directory} lacks the weights {missing[:5]}: it is not a complete critic")
    model = cast("PreTrainedModel", loaded)
    get_value_head(model)
    return model


@contextmanager
def explain_loading(directory: Path, kind: str) -> Generator[None]:
    """Raise what loading a model directory raises as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{directory} cannot be loaded as a {kind}: {error}") from error
    except SafetensorError as error:  # derives from Exception only
        raise ConfigError(f"the weights in {directory} are damaged: {error}") from error


def create_critic_model(model: PreTrainedModel, *, seed: int = 0, head_std: float | None = None) -> PreTrainedModel:
    """A critic whose backbone is a copy of a causal language model's, with a fresh value head; shares no weight with `model`.

    Args:
        seed, head_std: of the head, see init_value_head.

    Raises: ConfigError if transformers has no token-classification model for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    return create_model_with_head(AutoModelForTokenClassification, model, {"classifier_dropout": 0.0}, seed=seed, head_std=head_std)


def create_model_with_head(
    kind: Any, model: PreTrainedModel, settings: Mapping[str, Any], *, seed: int, head_std: float | None
) -> PreTrainedModel:
    """A model with one label whose backbone is a copy of a causal language model's, adapters merged, and whose head is fresh.

    Args:
        kind: of transformers, AutoModelForTokenClassification or AutoModelForSequenceClassification.
        settings: of its configuration, beside those that it has in common with `model`.
        seed, head_std: of the head, see init_value_head.

    Raises: ConfigError if transformers has no model of this kind for this architecture.
    """
    config = copy.deepcopy(model.config)
    for name, value in {"num_labels": 1, **settings}.items():
        setattr(config, name, value)
    try:
        with torch.random.fork_rng(devices=[]):
            made = cast("PreTrainedModel", kind.from_config(config))
    except ValueError as error:
        raise ConfigError(f"transformers has no {kind.__name__} for {type(model).__name__}: {error}") from error
    prefix = f"{model.base_model_prefix}."
    merged = {name.removeprefix(prefix): value for name, value in stream_weights(model)} if has_adapters(model) else None
    names = get_decoder(made).state_dict().keys()
    weights = get_decoder(model).state_dict() if merged is None else {name: merged[name] for name in names}
    get_decoder(made).load_state_dict(weights)
    init_value_head(made, seed=seed, std=head_std)
    return made


def init_value_head(model: PreTrainedModel, *, seed: int, std: float | None = None) -> None:
    """Draw the weights of the value head from N(0, std^2) by the seed alone; the bias is 0.

    Args:
        std: None = 1 / (H + 1) for H hidden units, so that first values are near 0 (Stiennon et al. 2020 use 1 / sqrt(H + 1) for a
            reward model, OpenRLHF 1 / (H + 1) for a critic).
    """
    head = get_value_head(model)
    std = 1 / (head.in_features + 1) if std is None else std
    with torch.no_grad():
        drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        head.weight.copy_(drawn * std)
        if getattr(head, "bias", None) is not None:
            head.bias.zero_()


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory. Nothing is downloaded. Raises DataError if there is none."""
    from transformers import AutoTokenizer

    directory = check_model_directory(path)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in files):  # some versions of transformers make up an empty one then
        raise DataError(f"{directory} has no tokenizer (none of {', '.join(files)}): copy the files of the model's tokenizer there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{directory} has no tokenizer that can be loaded: {error}") from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def create_cross_entropy_loss() -> LossFn:
    """The SFT loss: cross entropy of the tokens with loss_weights > 0."""
    return sft_loss


def open_model(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Callable[[str | Path], PreTrainedModel] = load_hf_model,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and, unless one is given, the tokenizer of a directory; a model as it is."""
    if not isinstance(model, str | Path):
        return model, tokenizer
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    return load(model), tokenizer


@takes(AdamWArguments)
def create_pytorch_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: LoRAConfig | None = None,
    **adamw: Unpack[AdamWArguments],
) -> PyTorchTrainingBackend:
    """A backend with AdamW at a constant learning rate.

    Args:
        model: a model, or the path of a Hugging Face directory (its tokenizer is loaded, too, unless one is given).
        lora: train adapters on the frozen model instead of its weights; the model is given them in place.
        lr and the others of AdamW: see optimizers.AdamWArguments.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer)
    return assemble_backend(model, rule, device, compute_dtype, tokenizer, lora=lora, scheduled=False)


@takes(AdamWArguments)
def create_backend_with_scheduler(
    model: str | Path | PreTrainedModel,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    schedule: Schedule = "cosine",
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    lora: LoRAConfig | None = None,
    **adamw: Unpack[AdamWArguments],
) -> PyTorchTrainingBackend:
    """create_pytorch_backend with a learning-rate schedule over total_steps optimizer steps."""
    rule = create_rule(schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=min_lr_ratio, **adamw)
    model, tokenizer = open_model(model, tokenizer)
    return assemble_backend(model, rule, device, compute_dtype, tokenizer, lora=lora)


@takes(ScheduledAdamWArguments)
def create_critic_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> PyTorchTrainingBackend:
    """A backend whose model has a value head, for the critic= of run_rl_training.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a saved critic (as it is), or such a model. A
            language model is copied, so that the policy may be made from the same object.
        seed, head_std: of a fresh head, see init_value_head.
        tokenizer: None with a directory = the one in it.
        lr and the others of AdamW and its schedule: see optimizers.ScheduledAdamWArguments; steps are those of the critic.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer, partial(load_critic_model, seed=seed, head_std=head_std))
    if model.get_output_embeddings() is not None:
        model = create_critic_model(model, seed=seed, head_std=head_std)
    return assemble_backend(model, rule, device, compute_dtype, tokenizer, compute_outputs=compute_values)


def create_reference_backend(
    model: str | Path | PreTrainedModel,
    *,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PyTorchTrainingBackend:
    """A backend that only computes log-probs, for the reference= of run_rl_training: no gradients, no optimizer state.

    Args:
        model: a directory (its tokenizer is loaded, too, unless one is given) or a model, which is frozen: pass a copy of a policy.
    """
    model, tokenizer = open_model(model, tokenizer)
    model = cast("PreTrainedModel", cast("torch.nn.Module", model).to(device).requires_grad_(False))
    optimizer = create_idle_optimizer(cast("torch.nn.Module", model))
    return PyTorchTrainingBackend(model, optimizer, device=device, compute_dtype=parse_dtype(compute_dtype), tokenizer=tokenizer)


def assemble_backend(
    model: PreTrainedModel,
    rule: AdamW,
    device: str | torch.device,
    compute_dtype: str | torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    compute_outputs: ComputeOutputs = compute_log_probs,
    lora: LoRAConfig | None = None,
    scheduled: bool = True,
) -> PyTorchTrainingBackend:
    """A backend that trains a model, or adapters on it, by a rule.

    Args:
        scheduled: False = the optimizer's learning rate is left alone.

    Warns where a launcher has started several processes, which would each train a model of their own.
    """
    if (launched := count_launched()) > 1:
        warnings.warn(
            f"WORLD_SIZE is {launched}: a launcher has started so many processes, and this backend trains the whole model in each of them "
            "without the others. create_fsdp_backend and its companions train one model over all; or start one process",
            stacklevel=4,
        )
    if lora is not None:
        add_adapters(model, lora)
    module = cast("torch.nn.Module", model).to(device)  # before the optimizer takes its parameters
    optimizer = rule.create_optimizer(module)
    return PyTorchTrainingBackend(
        model,
        optimizer,
        scheduler=rule.create_scheduler(optimizer) if scheduled else None,
        device=device,
        compute_dtype=parse_dtype(compute_dtype),
        max_grad_norm=rule.max_grad_norm,
        tokenizer=tokenizer,
        compute_outputs=compute_outputs,
        lora=lora,
    )

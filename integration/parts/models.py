"""The models of a run: the policy and, for algorithms that need them, a frozen reference (a KL term) and a critic (values).

Reference and critic are created only if the algorithm requires them. Unless the configuration names another model, both start as the policy
at the start of the RL stage: the last weights of SFT, or those of model.path. So a resumed run has the same reference throughout. A policy
with adapters is its own reference, without them: after an SFT stage the adapters are new ones on the merged SFT model.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from integration.settings.config import Config, context_tokens, create_model_config, find_kernels
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections import BackendSection
from rollouts.backends.factory import create_backend_with_scheduler, create_critic_backend, create_reference_backend
from rollouts.backends.fsdp.load import load_hf_model_on_meta
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora.adapters import copy_without_adapters
from rollouts.backends.lora.reference import create_lora_reference
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.config import OptimizerConfig
from rollouts.data.model_limits import check_tokenizer, read_config_limits
from rollouts.errors import ConfigError
from rollouts.models.heads import load_critic_model
from rollouts.models.loading import (
    check_model_directory,
    explain_remote_code,
    find_device_name,
    load_hf_model,
    load_tokenizer,
    parse_device,
)
from rollouts.models.prepare import recompute_activations
from rollouts.models.tokens import TokenSpec, describe_tokenizer, explain_token_differences
from rollouts.models.weights import converts_weights
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnyConfig = TypeVar("AnyConfig", Config, RewardModelConfig)


@dataclass(frozen=True)
class Companions:
    """Backends besides the policy's; None if the algorithm needs none."""

    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    reference_is_base: bool = False  # the reference is the policy without its adapters, and needs no backend


def create_model(config: Config, source: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Create a directory's model and tokenizer, or the built-in ones with random weights from the seed."""
    section = config.model
    path = find_directory(config, source)
    if path is not None:
        model = load_hf_model(path, device=parse_device(section.device), trust_remote_code=section.trust_remote_code)
        return model, load_tokenizer(path, trust_remote_code=section.trust_remote_code)
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(create_model_config(section, context_tokens(config)))
    return model.to(parse_device(section.device)), create_char_tokenizer(section.vocab_size)  # type: ignore[arg-type]


def create_tokenizer(config: Config, source: Path | None = None) -> PreTrainedTokenizerBase:
    """Create only the tokenizer of create_model."""
    path = find_directory(config, source)
    if path is None:
        return create_char_tokenizer(config.model.vocab_size)
    return load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)


def read_model_config(config: Config, path: Path | None = None) -> Any:
    """Read the Hugging Face configuration of a model directory or of the built-in model, without weights."""
    from transformers import AutoConfig

    path = find_directory(config, path)
    if path is None:
        return create_model_config(config.model, context_tokens(config))
    directory = check_model_directory(path, weights=False)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{directory} has no readable model configuration: {explain_remote_code(error)}") from error


def create_backend(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, optimizer: OptimizerConfig, total_steps: int
) -> TrainingBackend:
    """Create the policy's backend of kind config.backend.kind in one process."""
    arguments: dict[str, Any] = {"total_steps": total_steps, **vars(optimizer)}
    arguments |= {"compute_dtype": config.backend.precision(config.model.device), "tokenizer": tokenizer}
    if config.backend.kind == "jax":
        from rollouts.backends.jax.backend import create_jax_backend  # takes half a second, and JAX

        return create_jax_backend(model, **arguments)
    device = parse_device(config.model.device)
    if config.backend.kind == "torch_func":
        return create_torch_func_backend(model, device=device, seed=config.seed, **arguments)
    if config.backend.gradient_checkpointing:
        recompute_activations(model)
    set_master_dtype(config.backend, model)
    arguments |= {"kernels": config.kernels, "lora": config.lora.create(config.seed)}
    return create_backend_with_scheduler(model, device=device, **arguments)


def set_master_dtype(section: BackendSection, model: PreTrainedModel) -> None:
    """Convert the weights of a model that will be trained to the configured dtype, in place."""
    cast("torch.nn.Module", model).to(getattr(torch, section.master_dtype))


def fix_hardware(config: AnyConfig) -> AnyConfig:
    """Replace auto, in model.device, model.kernels and backend.compute_dtype, by the choices for this machine: a resumed run must have the
    same.
    """
    kernels = find_kernels(config.model, deterministic=isinstance(config, Config) and config.deterministic)
    model, backend = replace(config.model, kernels=kernels), config.backend
    fixed = replace(backend, compute_dtype=cast("Any", backend.precision(model.device)))
    return replace(config, model=replace(model, device=find_device_name(model.device)), backend=fixed)


def describe_hardware(config: Config | RewardModelConfig) -> str:
    """Return the line that names the device of training and the dtype of its matrix products."""
    device = parse_device(config.model.device)
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"training on {find_device_name(config.model.device)}{name} in {config.backend.precision(config.model.device)}"


def check_optimizers(section: BackendSection, optimizers: Mapping[str, OptimizerConfig], *, precision: str, adapters: bool = False) -> None:
    """Raise ConfigError if the backend has not the moments or the trained weights that are asked for.

    Args:
        optimizers: those of the run, by their section.
        precision: dtype of matrix products.
        adapters: whether adapters are trained.
    """
    quantized = [name for name, optimizer in optimizers.items() if optimizer.moments != "float32"]
    if quantized and section.kind != "pytorch":
        raise ConfigError(
            f"{quantized[0]}.optimizer.moments is '8bit' with backend.kind {section.kind!r}, which keeps Adam's moments in float32: leave "
            f"--{quantized[0]}.optimizer.moments out, or train with --backend.kind pytorch"
        )
    if quantized and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{quantized[0]}.optimizer.moments is '8bit', which needs the package torchao: pip install 'rollouts-rl[low-memory]'"
        )
    if section.master_dtype == "float32":
        return
    if adapters:
        raise ConfigError("backend.master_dtype is 'bfloat16' with lora.rank, but adapters are small: take --lora.base-dtype bfloat16")
    if precision == "float32":
        raise ConfigError(
            "backend.master_dtype is 'bfloat16', but matrix products are in float32: add --backend.compute-dtype bfloat16, or leave "
            "--backend.master-dtype out"
        )
    exact = [name for name in optimizers if name not in quantized]
    if exact:
        raise ConfigError(
            f"backend.master_dtype is 'bfloat16', but {exact[0]}.optimizer.moments is 'float32', whose updates would be lost in rounding: "
            f"add --{exact[0]}.optimizer.moments 8bit, which rounds stochastically"
        )


def check_backend(config: Config, mode: str = "sft+rl") -> None:
    """Raise ConfigError if the backend cannot train the configured model in a mode. Loads no weights."""
    kind, path = config.backend.kind, config.model.path
    if config.lora.rank and kind in ("torch_func", "jax"):
        raise ConfigError(f"lora.rank is {config.lora.rank} with backend.kind {kind!r}: adapters are trained with 'pytorch' and 'fsdp'")
    if config.lora.base_dtype == "nf4":
        if kind == "fsdp":
            raise ConfigError(
                "lora.base_dtype is 'nf4' with backend.kind 'fsdp', which does not shard weights in 4 bits: take --lora.base-dtype "
                "bfloat16, or train on one GPU with --backend.kind pytorch"
            )
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError("lora.base_dtype is 'nf4', which needs the package bitsandbytes: pip install 'rollouts-rl[low-memory]'")
    if config.backend.precision(config.model.device) == "float32":
        why = "but matrix products are in float32: add --backend.compute-dtype bfloat16, or leave"
        if config.lora.base_dtype != "float32":
            raise ConfigError(f"lora.base_dtype is {config.lora.base_dtype!r}, {why} --lora.base-dtype out")
        if config.reference.dtype != "float32":
            raise ConfigError(f"reference.dtype is {config.reference.dtype!r}, {why} --reference.dtype out")
    used = {name: section.optimizer for name, section in (("sft", config.sft), ("rl", config.rl)) if name in mode}
    asks = config.backend.master_dtype != "float32" or config.critic.optimizer.moments != "float32"
    if "rl" in mode and asks and "values" in config.algorithm.requires:
        used["critic"] = config.critic.optimizer
    check_optimizers(config.backend, used, precision=config.backend.precision(config.model.device), adapters=config.lora.rank > 0)
    if kind == "jax":
        from rollouts.backends.jax.backend import require_jax
        from rollouts.backends.jax.model import read_decoder_config

        require_jax()
        if path is not None:
            read_decoder_config(load_hf_model_on_meta(path, trust_remote_code=config.model.trust_remote_code))


def settle_weight_sync(config: Config) -> Config:
    """Choose the disk for new weights of a model whose files have other names than its memory, since servers know those. Loads no weights.

    Raises: ConfigError for another transport that the user chose.
    """
    how, path = config.engine.weight_sync, config.model.path
    if not config.engine.is_server or how == "disk" or path is None:
        return config
    model = load_hf_model_on_meta(path, trust_remote_code=config.model.trust_remote_code)
    if not converts_weights(model):
        return config
    if how != "auto":
        raise ConfigError(
            f"engine.weight_sync is {how!r}, but weights of a model of type {model.config.model_type!r} have other names and shapes in "
            "memory than in files, which are those that servers know: use disk"
        )
    return replace(config, engine=replace(config.engine, weight_sync="disk"))


def check_limits(config: Config, mode: str) -> None:
    """Raise ConfigError if the tokenizer does not match the model, or the token budget exceeds its context. Loads no weights."""
    model = read_model_config(config)
    limits = read_config_limits(model)
    if config.model.path is not None:
        check_tokenizer(create_tokenizer(config), limits.num_embeddings, config.model.path)
    budget, context = config.generation.max_tokens, limits.context_length
    if "rl" in mode and budget is not None and context is not None and budget >= context:
        raise ConfigError(
            f"generation.max_tokens is {budget}, but the model's context has {context} tokens, with the prompt: give a smaller "
            "--generation.max-tokens, or a model with a longer context (--model.max-length of the built-in one)"
        )


def check_dropout(config: Config, mode: str) -> None:
    """Raise ConfigError if adapters have dropout but no stage of the mode trains with it."""
    sections = {"sft": config.sft, "rl": config.rl}
    stages = {name: section.dropout for name, section in sections.items() if name in mode}
    if config.lora.dropout and not any(stages.values()):
        why = ": RL has none by default, because it makes policy ratios noisy" if "rl" in stages else ""
        raise ConfigError(
            f"lora.dropout is {config.lora.dropout}, but no stage of mode {mode!r} trains with dropout{why}. Leave --lora.dropout out, or "
            f"add {' or '.join(f'--{name}.dropout' for name in stages)}"
        )


def create_companions(
    config: Config, algorithm: Algorithm, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, critic_steps: int
) -> Companions:
    """Create the backends that the algorithm requires besides the policy's.

    Args:
        policy: the policy at the start of the RL stage; copied.
        tokenizer: the policy's tokenizer; check_companions verifies that the other models use the same tokens.
        critic_steps: optimizer steps of the critic in the whole stage.
    """
    device, dtype = parse_device(config.model.device), config.backend.precision(config.model.device)
    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    is_base = "ref_log_probs" in algorithm.requires and config.lora.rank > 0 and config.reference.path is None
    if "ref_log_probs" in algorithm.requires and not is_base:
        path = config.reference.path
        model = copy_without_adapters(policy) if path is None else load_hf_model(path, trust_remote_code=config.model.trust_remote_code)
        own = config.reference.dtype
        kernels = config.kernels
        reference = create_reference_backend(model, device=device, compute_dtype=dtype, kernels=kernels, dtype=own, tokenizer=tokenizer)
    if "values" in algorithm.requires:
        path = config.critic.path
        load = partial(load_critic_model, seed=config.seed, trust_remote_code=config.model.trust_remote_code)
        origin = policy if path is None else load(path)
        set_master_dtype(config.backend, origin)
        critic = create_critic_backend(
            origin,
            seed=config.seed,
            total_steps=critic_steps,
            device=device,
            compute_dtype=dtype,
            kernels=config.kernels,
            tokenizer=tokenizer,
            **vars(config.critic.optimizer),
        )
        if config.backend.gradient_checkpointing:
            recompute_activations(critic.model)
    return Companions(reference, critic, reference_is_base=is_base)


@asynccontextmanager
async def open_companions(companions: Companions, policy: TrainingBackend) -> AsyncGenerator[Companions]:
    """Open the backends, each in its own worker thread, for the length of the block.

    Args:
        policy: the policy's pipeline, which also computes for a reference without a backend.
    """
    async with AsyncExitStack() as stack:
        reference, critic = [
            None if backend is None else await stack.enter_async_context(open_pipeline(backend))
            for backend in (companions.reference, companions.critic)
        ]
        yield Companions(create_lora_reference(policy) if companions.reference_is_base else reference, critic)


def check_companions(config: Config, source: Path | None = None) -> None:
    """Raise ConfigError if the tokens of the configured reference or critic differ from the policy's. Loads no weights.

    Args:
        source: the policy's directory if it is not that of config.model.
    """
    for name, path in (("reference", config.reference.path), ("critic", config.critic.path)):
        if path is None:
            continue
        differences = explain_token_differences(_read_tokens(config, source), _read_tokens(config, Path(path)))
        if differences:
            raise ConfigError(
                f"{name}.path is {path}, whose tokens are not the policy's: {'; '.join(differences)}. "
                f"Give the policy's own model or one of its family, or leave --{name}.path out"
            )


def _read_tokens(config: Config, path: Path | None) -> TokenSpec:
    """Return the tokens of a model directory or of the built-in model, from configuration and tokenizer."""
    directory = find_directory(config, path)
    if directory is None:
        tokenizer = create_char_tokenizer(config.model.vocab_size)
    else:
        tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    with warnings.catch_warnings(action="ignore"):  # the stages warn about the policy
        ensure_pad_token(tokenizer)  # SFT checkpoints have a pad token, their original model may not
    return describe_tokenizer(tokenizer, int(read_model_config(config, path).get_text_config().vocab_size))


def find_directory(config: Config, path: Path | None) -> Path | None:
    """Return the given directory, or that of config.model; None for the built-in model."""
    return Path(config.model.path) if path is None and config.model.path is not None else path

"""The models of a run: the policy, and what some algorithms need beside it: a frozen reference (a KL term) and a critic (values).

Neither of the latter is made unless the algorithm requires what it computes. Both begin as the policy is when the RL stage begins, with the
last weights of SFT or those of model.path, unless the configuration names another model; so the reference of a run that was interrupted
and resumed is the same throughout. A policy that trains adapters is this reference itself, without them: after an SFT stage these are new
ones on the merged SFT model.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from integration.config import Config, context_tokens, create_model_config
from rollouts.backends.factory import (
    check_model_directory,
    create_backend_with_scheduler,
    create_critic_backend,
    create_reference_backend,
    load_critic_model,
    load_hf_model,
    load_tokenizer,
    parse_device,
)
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora import copy_without_adapters
from rollouts.backends.lora_reference import create_lora_reference
from rollouts.backends.protocol import TrainingBackend
from rollouts.backends.sharded_weights import load_hf_model_on_meta
from rollouts.backends.token_spec import TokenSpec, describe_tokenizer, explain_token_differences
from rollouts.backends.torch_func import create_torch_func_backend
from rollouts.char_tokenizer import create_char_tokenizer
from rollouts.chat import ensure_pad_token
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Companions:
    """Backends beside the policy; None where the algorithm has no use for one."""

    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    reference_is_base: bool = False  # the model below the policy's adapters is the reference: it needs no backend of its own


def create_model(config: Config, source: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a directory with its tokenizer, or the built-in one from random weights (a function of the seed)."""
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
    """The tokenizer that create_model gives beside the model, alone."""
    path = find_directory(config, source)
    if path is None:
        return create_char_tokenizer(config.model.vocab_size)
    return load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)


def read_model_config(config: Config, path: Path | None = None) -> Any:
    """The Hugging Face configuration of a model directory, or of the built-in model, without its weights."""
    from transformers import AutoConfig

    path = find_directory(config, path)
    if path is None:
        return create_model_config(config.model, context_tokens(config))
    directory = check_model_directory(path)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} has no model configuration that can be read: {error}") from error


def create_backend(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, optimizer: OptimizerConfig, total_steps: int
) -> TrainingBackend:
    """The policy's backend in one process, of the kind config.backend.kind."""
    arguments: dict[str, Any] = {"total_steps": total_steps, **vars(optimizer)}
    arguments |= {"compute_dtype": config.backend.compute_dtype, "tokenizer": tokenizer}
    if config.backend.kind == "jax":
        from rollouts.backends.jax_backend import create_jax_backend  # takes half a second, and JAX

        return create_jax_backend(model, **arguments)
    device = parse_device(config.model.device)
    if config.backend.kind == "torch_func":
        return create_torch_func_backend(model, device=device, seed=config.seed, **arguments)
    return create_backend_with_scheduler(model, device=device, lora=config.lora.create(config.seed), **arguments)


def check_backend(config: Config) -> None:
    """Raise ConfigError if the backend cannot train what config names. Loads no weights."""
    kind, path = config.backend.kind, config.model.path
    if config.lora.rank and kind in ("torch_func", "jax"):
        raise ConfigError(f"lora.rank is {config.lora.rank} with backend.kind {kind!r}: adapters are trained with 'pytorch' and 'fsdp'")
    if kind == "jax":
        from rollouts.backends.jax_backend import require_jax
        from rollouts.backends.jax_model import read_decoder_config

        require_jax()
        if path is not None:
            read_decoder_config(load_hf_model_on_meta(path, trust_remote_code=config.model.trust_remote_code))


def create_companions(
    config: Config, algorithm: Algorithm, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, critic_steps: int
) -> Companions:
    """What the algorithm requires, and nothing else.

    Args:
        policy: as it is when the RL stage begins; copied.
        tokenizer: the policy's. check_companions sees to it that the models named by config read the same tokens.
        critic_steps: optimizer steps of the critic in the whole stage.
    """
    device, dtype = parse_device(config.model.device), config.backend.compute_dtype
    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    is_base = "ref_log_probs" in algorithm.requires and config.lora.rank > 0 and config.reference.path is None
    if "ref_log_probs" in algorithm.requires and not is_base:
        path = config.reference.path
        model = copy_without_adapters(policy) if path is None else load_hf_model(path, trust_remote_code=config.model.trust_remote_code)
        reference = create_reference_backend(model, device=device, compute_dtype=dtype, tokenizer=tokenizer)
    if "values" in algorithm.requires:
        path = config.critic.path
        load = partial(load_critic_model, seed=config.seed, trust_remote_code=config.model.trust_remote_code)
        critic = create_critic_backend(
            policy if path is None else load(path),
            seed=config.seed,
            total_steps=critic_steps,
            device=device,
            compute_dtype=dtype,
            tokenizer=tokenizer,
            **vars(config.critic.optimizer),
        )
    return Companions(reference, critic, reference_is_base=is_base)


@asynccontextmanager
async def open_companions(companions: Companions, policy: TrainingBackend) -> AsyncGenerator[Companions]:
    """The backends, each in a worker thread of its own for the length of the block.

    Args:
        policy: in its own, which also computes what a reference without a backend does.
    """
    async with AsyncExitStack() as stack:
        reference, critic = [
            None if backend is None else await stack.enter_async_context(open_pipeline(backend))
            for backend in (companions.reference, companions.critic)
        ]
        yield Companions(create_lora_reference(policy) if companions.reference_is_base else reference, critic)


def check_companions(config: Config, source: Path | None = None) -> None:
    """Raise ConfigError if the reference or the critic that config names does not read the policy's tokens. Loads no weights.

    Args:
        source: the policy's directory, where it is not that of config.model.
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
    """The tokens of a model directory or of the built-in model, from its configuration and its tokenizer."""
    directory = find_directory(config, path)
    if directory is None:
        tokenizer = create_char_tokenizer(config.model.vocab_size)
    else:
        tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    with warnings.catch_warnings(action="ignore"):  # the stages say it of the policy
        ensure_pad_token(tokenizer)  # which a checkpoint of SFT has, and the model that it came from may not have
    return describe_tokenizer(tokenizer, int(read_model_config(config, path).get_text_config().vocab_size))


def find_directory(config: Config, path: Path | None) -> Path | None:
    """A directory that is given, or that of config.model; None for the built-in model."""
    return Path(config.model.path) if path is None and config.model.path is not None else path

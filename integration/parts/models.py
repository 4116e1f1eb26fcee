"""The models of a run: the policy and, for algorithms that need them, a frozen reference (a KL term), a critic (values) and teachers.

Reference and critic are created only if the algorithm requires them. Unless the configuration names another model, both start as the policy
at the start of the RL stage: the last weights of SFT, or those of model.path. So a resumed run has the same reference throughout. A policy
with adapters is its own reference, without them: after an SFT stage the adapters are new ones on the merged SFT model.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from integration.parts.model_settings import find_directory
from integration.settings.config import Config, find_kernels
from integration.settings.made.budgets import context_tokens
from integration.settings.made.library import count_tops, create_model_config, find_teacher_models
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections.backend import BackendSection
from rollouts.backends.factory import create_backend_with_scheduler, create_critic_backend, create_reference_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora.adapters import copy_without_adapters
from rollouts.backends.lora.reference import create_lora_reference
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.models.heads import load_critic_model
from rollouts.models.loading import (
    find_device_name,
    load_hf_model,
    load_tokenizer,
    parse_device,
)
from rollouts.models.prepare import recompute_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnyConfig = TypeVar("AnyConfig", Config, RewardModelConfig)


@dataclass(frozen=True)
class Companions:
    """Backends besides the policy's; None if the algorithm needs none."""

    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    teachers: Mapping[str, TrainingBackend] = field(default_factory=dict[str, TrainingBackend])  # by name; "" = the only one
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


def create_backend(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, optimizer: OptimizerConfig, total_steps: int
) -> TrainingBackend:
    """Create the policy's backend of kind config.backend.kind in one process."""
    arguments: dict[str, Any] = {"total_steps": total_steps, "bad_numbers": config.on_bad, **vars(optimizer)}
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


def create_companions(
    config: Config, requires: Collection[str], policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, critic_steps: int
) -> Companions:
    """Create the backends that fill required columns besides the policy's.

    Args:
        requires: columns, such as Algorithm.requires: ref_log_probs needs a reference, values a critic, teacher_log_probs a teacher.
        policy: the policy at the start of the stage; copied.
        tokenizer: the policy's tokenizer; check_companions verifies that the other models use the same tokens.
        critic_steps: optimizer steps of the critic in the whole stage.
    """
    device, dtype = parse_device(config.model.device), config.backend.precision(config.model.device)
    reference: TrainingBackend | None = None
    critic: TrainingBackend | None = None
    is_base = "ref_log_probs" in requires and config.lora.rank > 0 and config.reference.path is None
    if "ref_log_probs" in requires and not is_base:
        path = config.reference.path
        model = copy_without_adapters(policy) if path is None else load_hf_model(path, trust_remote_code=config.model.trust_remote_code)
        own = config.reference.dtype
        kernels = config.kernels
        reference = create_reference_backend(model, device=device, compute_dtype=dtype, kernels=kernels, dtype=own, tokenizer=tokenizer)
    if "values" in requires:
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
            bad_numbers=config.on_bad,
            **vars(config.critic.optimizer),
        )
        if config.backend.gradient_checkpointing:
            recompute_activations(critic.model)
    teachers: dict[str, TrainingBackend] = {}
    for name, path in find_teacher_models(config, requires).items():
        model = load_hf_model(path, trust_remote_code=config.model.trust_remote_code)
        teachers[name] = create_reference_backend(
            model,
            device=device,
            compute_dtype=dtype,
            kernels=config.kernels,
            dtype=config.teacher.dtype,
            tokenizer=load_tokenizer(path, trust_remote_code=config.model.trust_remote_code),
            num_tops=count_tops(config, requires),
            tops_vocab_size=policy.config.get_text_config().vocab_size,
        )
    return Companions(reference, critic, teachers, reference_is_base=is_base)


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
        teachers = {name: await stack.enter_async_context(open_pipeline(backend)) for name, backend in companions.teachers.items()}
        yield Companions(create_lora_reference(policy) if companions.reference_is_base else reference, critic, teachers)

"""Models of a run: the policy, the reference of a KL term, the critic, and low-rank adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from integration.settings.sections.descriptions import describe_section
from rollouts.backends.lora.config import ALL_LINEAR, BaseDtype, LoRAConfig
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.config import OptimizerConfig, check_count, check_positive, check_setting
from rollouts.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model to train or evaluate: a Hugging Face directory, or the small built-in model with random weights."""

    # Hugging Face model directory, or the name of a model on the hub, ORG/NAME, such as Qwen/Qwen3-0.6B; None = the built-in model
    path: str | None = None
    revision: str | None = None  # branch, tag or commit of a model on the hub; None = main. A run records the commit and resumes with it
    device: str = "auto"  # torch device: cpu, cuda, cuda:N, mps, or auto = cuda where torch sees a GPU, else cpu
    # kernels of linear layers on a CPU, in training by one process and in the embedded engine: torch (its own), onednn (in float32 about
    # twice as fast on AMD processors with AVX-512, other last bits), or packed (in the engine, oneDNN's for a second copy of weights of
    # 2^19 numbers or more: up to a fifth faster on Intel's); auto = the faster one with AVX-512, else torch; a resumed run keeps its choice
    kernels: Literal["auto", "torch", "onednn", "packed"] = "auto"
    trust_remote_code: bool = False  # run Python files of the model directory; only for directories you trust
    vocab_size: int = 64  # vocabulary size of the built-in model, a Qwen3 architecture over characters
    hidden_size: int = 128  # hidden size of the built-in model
    intermediate_size: int = 384  # MLP size of the built-in model
    num_layers: int = 4  # decoder layers of the built-in model
    num_heads: int = 4  # attention heads of the built-in model
    num_kv_heads: int = 2  # key-value heads of the built-in model
    max_length: int | None = None  # context of the built-in model in tokens; None = 128, or the length of the task's episodes

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_positive(self, *sizes)
        most = 3 + len(ALPHABET)
        known = self.path is not None or 4 <= self.vocab_size <= most
        check_setting(known, "model.vocab_size", self.vocab_size, f"4 to {most}, as the built-in model reads single characters")
        check_setting(self.max_length is None or self.max_length >= 1, "model.max_length", self.max_length, "at least 1, or None")
        if self.revision is not None and self.path is None:
            raise ConfigError(f"model.revision is {self.revision!r}, but there is no --model.path ORG/NAME that it would be of: give one")
        known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None  # its presence is checked when a run starts
        check_setting(known, "model.device", self.device, "cpu, cuda, cuda:N, mps or auto")
        check_setting(
            self.hidden_size % self.num_heads == 0, "model.hidden_size", self.hidden_size, f"a multiple of {self.num_heads} heads"
        )
        check_setting(
            self.num_heads % self.num_kv_heads == 0, "model.num_heads", self.num_heads, f"a multiple of {self.num_kv_heads} kv heads"
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The frozen reference model; loaded only if the algorithm has a KL term."""

    path: str | None = None  # Hugging Face model directory, or ORG/NAME on the hub; None = the policy at the start of RL
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the reference's weights; bfloat16 needs --backend.compute-dtype bfloat16


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The value model; created only if the algorithm requires values (ppo)."""

    path: str | None = None  # directory of a saved critic or a language model; None = the policy at the start of RL
    warmup_steps: int = 0  # initial RL steps that train only the critic
    value_clip: float | None = 0.2  # maximum change of values since collection, in reward units; None = no clipping
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3), metadata=describe_section(OptimizerConfig))

    def __post_init__(self) -> None:
        check_count(self, "warmup_steps")


OWN_MODEL_CRITIC = CriticSection(optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.0))
"""Defaults of a critic of the user's own model, with the learning rate of verl's critics."""


@dataclass(frozen=True, kw_only=True)
class LoRASection:
    """Low-rank adapters, trained instead of the policy's weights in every stage; see LoRAConfig."""

    rank: int = 0  # rank of the adapters; 0 = no adapters, all weights are trained
    alpha: float | None = None  # adapters are scaled by alpha / rank; None = 2 * rank
    dropout: float = 0.0  # dropout of an adapter's input, in training only
    target_modules: tuple[str, ...] = (ALL_LINEAR,)  # layers with adapters, such as q_proj v_proj; all-linear = all but the output layer
    use_rslora: bool = False  # scale adapters by alpha / sqrt(rank)
    # dtype of the frozen weights; bfloat16 takes half the memory, nf4 4.5 bits for each weight with an adapter (package bitsandbytes); both
    # need --backend.compute-dtype bfloat16
    base_dtype: BaseDtype = "float32"
    save_base: bool = False  # include the frozen base weights in each checkpoint

    def __post_init__(self) -> None:
        check_count(self, "rank")
        if self.rank:
            self.create(0)
        else:
            changed = [name for name, value in vars(self).items() if value != getattr(type(self), name)]
            if changed:
                raise ConfigError(
                    f"lora.{changed[0]} is {getattr(self, changed[0])!r}, but lora.rank is 0, so there are no adapters: give "
                    "--lora.rank, for example 16"
                )

    def create(self, seed: int) -> LoRAConfig | None:
        """Return the adapters' configuration for a backend, None without adapters. seed: the run's seed."""
        return LoRAConfig(**vars(self), seed=seed) if self.rank else None

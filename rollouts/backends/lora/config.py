"""Configuration of LoRA adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rollouts.config import check_count, check_not_negative, check_positive, check_setting

ALL_LINEAR = "all-linear"
BaseDtype = Literal["float32", "bfloat16", "nf4"]


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Configuration of a model's adapters. Biases, norms and embeddings are never trained beside them."""

    rank: int = 16  # rank of B A; more than a layer's smaller size adds nothing and warns, see explain_wasted_rank
    alpha: float | None = None  # B A is scaled by alpha / rank; None = 2 * rank: scale 2 (with use_rslora 2 * sqrt(rank))
    dropout: float = 0.0  # dropout of an adapter's input, in training only
    target_modules: tuple[str, ...] = (ALL_LINEAR,)  # suffixes of names, as ("q_proj", "v_proj"); all-linear = all but the output layer
    use_rslora: bool = False  # scale by alpha / sqrt(rank) instead (Kalajdzievski 2023)
    # dtype of the frozen weights: bfloat16 = half the memory; nf4 = 4.5 bits for each weight that has an adapter, bfloat16 for the others
    # (QLoRA; package bitsandbytes); both for passes in bfloat16
    base_dtype: BaseDtype = "float32"
    seed: int = 0  # seed of A; B begins as 0
    save_base: bool = False  # write the frozen weights into each checkpoint, too, so that it needs no other directory

    def __post_init__(self) -> None:
        check_positive(self, "rank")
        check_count(self, "seed")
        check_not_negative(self, "dropout")
        check_setting(self.dropout < 1, "LoRAConfig.dropout", self.dropout, "less than 1")
        check_setting(self.alpha is None or self.alpha > 0, "LoRAConfig.alpha", self.alpha, "more than 0, or None for 2 * rank")
        good = self.base_dtype in get_args(BaseDtype)
        check_setting(good, "LoRAConfig.base_dtype", self.base_dtype, "float32, bfloat16 or nf4")
        named = len(self.target_modules) > 0 and not any(len(name) == 1 for name in self.target_modules)  # a str is letters
        check_setting(named, "LoRAConfig.target_modules", self.target_modules, 'a tuple of names, as ("q_proj", "v_proj")')

    @property
    def resolved_alpha(self) -> float:
        """Alpha, or its default; a whole number as an int, which some readers of adapter_config.json require."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return int(alpha) if alpha == int(alpha) else alpha

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.resolved_alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

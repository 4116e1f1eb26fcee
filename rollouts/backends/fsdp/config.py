"""Configuration of a model's sharding over processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rollouts.errors import ConfigError

ShardingStrategy: TypeAlias = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
MixedPrecision: TypeAlias = Literal["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Settings of FSDPTrainingBackend. None of them changes the results, up to rounding."""

    # full_shard = parameters are gathered for a layer's forward pass and again for its backward pass; shard_grad_op = they stay gathered in
    # between: less communication, more memory; hybrid_shard = copies of ranks_per_replica ranks each, for example one copy per node;
    # no_shard = every rank holds everything, only gradients are exchanged
    sharding_strategy: ShardingStrategy = "full_shard"
    # dtype in which layers are gathered and multiplied; master weights and gradient sums stay float32; None = float32
    mixed_precision: MixedPrecision | None = None
    cpu_offload: bool = False  # keep parameters, gradients and optimizer state in host memory, and update there; for GPUs
    auto_wrap_min_params: int = 0  # gather consecutive layers together until they have this many parameters; 0 = layer by layer
    gradient_checkpointing: bool = False  # recompute activations inside a layer in the backward pass
    clip_grad: float | None = None  # norm to which a larger gradient is scaled down; None = max_grad_norm of the optimizer
    ranks_per_replica: int | None = None  # ranks that share one copy of the model; a divisor of the number of ranks; for hybrid_shard

    def __post_init__(self) -> None:
        if self.sharding_strategy not in get_args(ShardingStrategy):
            raise ConfigError(f"sharding_strategy is {self.sharding_strategy!r}: known are {', '.join(get_args(ShardingStrategy))}")
        if self.mixed_precision not in (None, *get_args(MixedPrecision)):
            raise ConfigError(f"mixed_precision is {self.mixed_precision!r}: use None (float32) or bfloat16")
        if self.auto_wrap_min_params < 0:
            raise ConfigError(f"auto_wrap_min_params is {self.auto_wrap_min_params}, expected at least 0")
        if self.clip_grad is not None and not (self.clip_grad > 0 and not math.isnan(self.clip_grad)):
            raise ConfigError(f"clip_grad is {self.clip_grad}, expected more than 0 (inf = no clipping), or None for the backend's own")
        hybrid = self.sharding_strategy == "hybrid_shard"
        if hybrid and self.ranks_per_replica is None:
            raise ConfigError(
                "hybrid_shard needs ranks_per_replica: how many ranks share one copy of the model, for example those of a node"
            )
        if not hybrid and self.ranks_per_replica is not None:
            raise ConfigError(f"ranks_per_replica is {self.ranks_per_replica}, which only hybrid_shard reads, not {self.sharding_strategy}")

    def find_mesh_shape(self, world_size: int) -> tuple[int, ...]:
        """Return (ranks) to shard over, or (copies, ranks of each). Raises ConfigError if the ranks do not divide so."""
        if self.sharding_strategy == "no_shard":
            return (world_size, 1)
        if self.ranks_per_replica is None:
            return (world_size,)
        if self.ranks_per_replica < 1 or world_size % self.ranks_per_replica:
            raise ConfigError(
                f"ranks_per_replica is {self.ranks_per_replica}, expected a divisor of the {world_size} ranks: every copy needs as many"
            )
        return (world_size // self.ranks_per_replica, self.ranks_per_replica)

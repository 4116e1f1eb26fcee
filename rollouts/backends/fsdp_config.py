"""How a model is spread over processes, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rollouts.errors import ConfigError

ShardingStrategy: TypeAlias = Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]
MixedPrecision: TypeAlias = Literal["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Settings of FSDPTrainingBackend. None of them changes what is computed, up to rounding."""

    sharding_strategy: ShardingStrategy = "full_shard"
    # full_shard: parameters are gathered for a layer's forward pass and again for its backward pass. shard_grad_op: they stay gathered in
    # between, which is less communication and more memory. hybrid_shard: copies of ranks_per_replica ranks each, for example one a node.
    # no_shard: every rank holds everything and gradients alone are exchanged
    mixed_precision: MixedPrecision | None = None  # layers are gathered and multiplied in bfloat16; masters and sums of gradients: float32
    cpu_offload: bool = False  # parameters, gradients and optimizer state live in host memory, the update runs there; for GPUs
    auto_wrap_min_params: int = 0  # layers in a row are gathered together until they have so many parameters; 0 = layer by layer
    gradient_checkpointing: bool = False  # activations inside of a layer are computed again in the backward pass
    clip_grad: float | None = None  # the whole gradient is scaled down to this norm; None = the backend's max_grad_norm
    ranks_per_replica: int | None = None  # ranks that share one copy of the model; for hybrid_shard, a divisor of the number of ranks

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
        """(ranks), over which everything is sharded, or (copies, ranks of each). Raises ConfigError if the ranks cannot be dealt so."""
        if self.sharding_strategy == "no_shard":
            return (world_size, 1)
        if self.ranks_per_replica is None:
            return (world_size,)
        if self.ranks_per_replica < 1 or world_size % self.ranks_per_replica:
            raise ConfigError(
                f"ranks_per_replica is {self.ranks_per_replica}, expected a divisor of the {world_size} ranks: every copy needs as many"
            )
        return (world_size // self.ranks_per_replica, self.ranks_per_replica)

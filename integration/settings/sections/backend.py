"""The training backend, and the hardware that a dry run assumes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from integration.settings.sections.descriptions import describe_section
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.config import check_positive, check_setting
from rollouts.config_files import suggest
from rollouts.errors import ConfigError

BACKEND_KINDS = ("pytorch", "fsdp", "torch_func", "jax")


@dataclass(frozen=True, kw_only=True)
class BackendSection:
    """The training backend."""

    # pytorch = one process, one device; fsdp = several processes, each with a shard of the model; torch_func, jax = one process, functional
    # training state
    kind: str = "pytorch"
    # processes of fsdp; None = those torchrun started, else one per GPU that no launched server needs, or 1
    num_processes: int | None = None
    timeout_s: float = 600.0  # seconds to wait for one collective operation of fsdp
    fsdp: FSDPConfig = field(
        default_factory=FSDPConfig, metadata=describe_section("sharding of the model over processes (backend.kind fsdp)")
    )
    # dtype of matrix products, float32 or bfloat16; weights and log-probs stay float32; auto = bfloat16 on a CUDA GPU that has it, else
    # float32
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # dtype of the trained weights; bfloat16 takes half the memory, needs --backend.compute-dtype bfloat16 and optimizers with moments of 8
    # bits, which round stochastically
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    # keep the inputs of layers alone and recompute activations in the backward pass: less memory, and a third more time
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.kind not in BACKEND_KINDS:
            raise ConfigError(f"unknown backend.kind {self.kind!r}: {suggest(self.kind, BACKEND_KINDS)}")
        count = self.num_processes
        check_setting(count is None or count >= 1, "backend.num_processes", count, "at least 1, or None")
        check_setting(self.timeout_s > 0, "backend.timeout_s", self.timeout_s, "more than 0")
        good = self.kind != "jax" or self.compute_dtype != "bfloat16"
        check_setting(good, "backend.compute_dtype", self.compute_dtype, "float32 with backend.kind 'jax'")
        check_setting(
            self.master_dtype == "float32" or self.kind == "pytorch",
            "backend.master_dtype",
            self.master_dtype,
            f"float32 with backend.kind {self.kind!r}: only 'pytorch' rounds stochastically",
        )
        check_setting(
            not self.gradient_checkpointing or self.kind in ("pytorch", "fsdp"),
            "backend.gradient_checkpointing",
            True,
            f"False with backend.kind {self.kind!r}, whose functions cannot keep a layer's input alone: use 'pytorch' or 'fsdp'",
        )
        if self.kind != "fsdp":
            others = {"num_processes": (self.num_processes, None)}
            others |= {f"fsdp.{f.name}": (getattr(self.fsdp, f.name), f.default) for f in fields(FSDPConfig)}
            for name, (value, default) in others.items():
                expected = f"nothing with backend.kind {self.kind!r}: add --backend.kind fsdp"
                check_setting(value == default, f"backend.{name}", value, expected)

    @property
    def recomputes_activations(self) -> bool:
        """Whether activations are recomputed in the backward pass, by either option."""
        return self.gradient_checkpointing or self.fsdp.gradient_checkpointing

    def precision(self, device: str) -> str:
        """Return the dtype of matrix products of a model on `device`: cpu, cuda, cuda:N, mps, auto."""
        if self.compute_dtype != "auto":
            return self.compute_dtype
        if self.kind == "jax":
            return "float32"
        from rollouts.models.loading import find_compute_dtype

        return find_compute_dtype(device)


@dataclass(frozen=True, kw_only=True)
class HardwareSection:
    """The hardware that --dry-run assumes; a run ignores it."""

    memory_gib: float | None = None  # GiB of memory of a GPU, or of the machine if the model is on the CPU; None = detected
    ranks_per_node: int = 8  # processes per node
    node_gb_per_s: float = 200.0  # GB/s a process receives within its node; default: half of NVLink 4's 450 GB/s per direction
    network_gb_per_s: float = 25.0  # GB/s a process receives from other nodes; default: half of 400 Gbit/s per GPU

    def __post_init__(self) -> None:
        check_positive(self, "ranks_per_node")
        for name in ("memory_gib", "node_gb_per_s", "network_gb_per_s"):
            value = getattr(self, name)
            check_setting(value is None or value > 0, f"hardware.{name}", value, "more than 0")

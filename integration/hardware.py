"""The section of the settings that says what a run would be on: for --dry-run alone."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.config import check_positive, check_setting


@dataclass(frozen=True, kw_only=True)
class HardwareSection:
    """What --dry-run reckons with; a run reads nothing of it."""

    memory_gib: float | None = None  # of a GPU, or of the machine where the model is on its CPU; None = what is found here
    ranks_per_node: int = 8
    node_gb_per_s: float = 200.0  # that each process receives from others of its node: half of NVLink 4's 450 GB/s in one direction
    network_gb_per_s: float = 25.0  # that each process receives from other nodes: half of 400 Gbit/s for each GPU

    def __post_init__(self) -> None:
        check_positive(self, "ranks_per_node")
        for name in ("memory_gib", "node_gb_per_s", "network_gb_per_s"):
            value = getattr(self, name)
            check_setting(value is None or value > 0, f"hardware.{name}", value, "more than 0")

"""Prompts, and executors of asynchronous rollouts, for tests."""

from __future__ import annotations

from typing import Any

from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer


def make_buffer(num_prompts: int = 7) -> DataBuffer:
    """Return the prompts "0=", "1=", ... with their number as the ground truth."""
    return DataBuffer([{"prompt": f"{i}=", "ground_truth": str(i)} for i in range(num_prompts)], seed=3)


def make_executor(generate_fn: Any, asynchronous: AsyncConfig | None = None, *, batch_size: int = 2, **changes: Any) -> WorkflowExecutor:
    """Return an executor over make_buffer().

    Args:
        changes: further arguments of create_workflow_executor, and settings of RolloutConfig.
    """
    names = ("engines", "version", "batches_per_version", "data_parallel_size", "queue", "cache", "strategy")
    parts = {name: changes.pop(name) for name in names if name in changes}
    config = RolloutConfig(batch_size=batch_size, generate_fn=generate_fn, grace_s=changes.pop("grace_s", 1.0), **changes)
    return create_workflow_executor(make_buffer(), config, asynchronous or AsyncConfig(), **parts)

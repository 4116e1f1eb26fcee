"""Parts of a WorkflowExecutor, replaceable one by one, and their composition."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from rollouts.asynchronous.capacity import (
    CapacityModifier,
    FilteredSamplesCapacityModifier,
    RolloutCounts,
    StalenessLimits,
    StalenessManager,
    divide_limits,
)
from rollouts.asynchronous.config import AsyncConfig, check_async_config
from rollouts.asynchronous.finished import SegmentWisePPOStrategy, StalenessControlStrategy, StandardPPOStrategy
from rollouts.asynchronous.queue import LocalRolloutCache, LocalRolloutQueue, RolloutCache, RolloutQueue
from rollouts.asynchronous.state import RolloutRules
from rollouts.config import RolloutConfig, take_apart
from rollouts.data.prompts import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError


class ExecutorOptions(TypedDict, total=False):
    """Optional keyword arguments of WorkflowExecutor and create_workflow_executor."""

    engines: Sequence[InferenceEngine]  # used by generate_fn, and told to abort when rollouts must stop; see make_request_id
    queue: RolloutQueue | None  # None = create_queue
    cache: RolloutCache | None  # None = create_cache
    manager: StalenessManager | None  # None = create_staleness_manager, without modifiers
    strategy: StalenessControlStrategy | None  # None = create_staleness_strategy
    version: int  # weight version that the engines hold; default 0
    batches_per_version: int  # batches trained on between two weight syncs; default 1
    # number of trainers that share config's batch, each with its own executor, default 1; limits and batches of this executor are
    # max(1, n // data_parallel_size)
    data_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class ExecutorParts:
    """Parts of an executor that fit together."""

    data_buffer: DataBuffer
    config: RolloutConfig
    rules: RolloutRules
    engines: tuple[InferenceEngine, ...]
    queue: RolloutQueue
    cache: RolloutCache
    manager: StalenessManager
    strategy: StalenessControlStrategy
    batch_size: int  # groups in a batch of this executor
    batches_per_version: int  # batches trained on between two weight syncs


def check_parts(
    asynchronous: AsyncConfig, engines: Sequence[InferenceEngine], queue: RolloutQueue, *, batch_size: int, groups_per_version: int
) -> None:
    """Raise ConfigError for parts that cannot work together; log a warning for a queue that is certain to overflow.

    Args:
        batch_size: groups that this trainer trains on in one step.
        groups_per_version: groups that this trainer trains on under one weight version.
    """
    if queue.maxsize < batch_size:
        raise ConfigError(
            f"the rollout queue holds {queue.maxsize} groups, but a batch has {batch_size}: increase queue_size to at least that"
        )
    if asynchronous.interrupts and not engines:
        raise ConfigError(
            "rollouts are to be interrupted at weight syncs (in_flight='interrupt', or enable_segment_wise_ppo), but the executor was "
            "given no engines that it could tell: pass engines=, the ones that generate_fn uses"
        )
    most = (asynchronous.max_staleness + 1) * groups_per_version - batch_size  # groups that may finish during one step of the trainer
    if asynchronous.when_queue_full == "raise" and queue.maxsize < most:
        logging.getLogger(__name__).warning(
            "the rollout queue holds %d groups, but up to %d may finish while the trainer works, which would end the run: increase "
            "queue_size to at least that, leave it out, or set when_queue_full='wait'",
            queue.maxsize,
            most,
        )


def share_batch_size(config: RolloutConfig, data_parallel_size: int) -> int:
    """Return the groups in a batch of one of data_parallel_size trainers: max(1, batch_size // data_parallel_size).

    Raises: ConfigError for a number of trainers below 1.
    """
    if data_parallel_size < 1:
        raise ConfigError(f"data_parallel_size is {data_parallel_size}, expected at least 1")
    return max(1, config.batch_size // data_parallel_size)


def create_staleness_manager(
    config: RolloutConfig, asynchronous: AsyncConfig, batches_per_version: int = 1, data_parallel_size: int = 1
) -> StalenessManager:
    """Create the manager for one of data_parallel_size trainers, without modifiers.

    Raises: ConfigError for a number below 1.
    """
    if batches_per_version < 1:
        raise ConfigError(f"batches_per_version is {batches_per_version}, expected at least 1")
    batch_size = share_batch_size(config, data_parallel_size) * batches_per_version
    limits = StalenessLimits(
        max_concurrent=asynchronous.concurrent_groups(config.batch_size * batches_per_version),
        batch_size=batch_size,
        max_staleness=asynchronous.max_staleness,
    )
    return StalenessManager(divide_limits(limits, data_parallel_size).max_concurrent, batch_size, asynchronous.max_staleness)


def create_queue(asynchronous: AsyncConfig, groups_per_version: int, data_parallel_size: int = 1) -> RolloutQueue:
    """Create a queue of max(1, AsyncConfig.queue_size // data_parallel_size), by default for as many groups as may wait.

    Args:
        groups_per_version: groups that this trainer trains on under one weight version.
    """
    if asynchronous.queue_size is None:
        return LocalRolloutQueue(asynchronous.queue_groups(groups_per_version))
    return LocalRolloutQueue(max(1, asynchronous.queue_size // data_parallel_size))


def create_cache() -> RolloutCache:
    """Create an empty cache."""
    return LocalRolloutCache()


def create_staleness_strategy(asynchronous: AsyncConfig) -> StalenessControlStrategy:
    """Create the segment-wise or the standard strategy, depending on enable_segment_wise_ppo."""
    return SegmentWisePPOStrategy(asynchronous.max_staleness) if asynchronous.segment_wise else StandardPPOStrategy()


def create_filtered_capacity_modifier() -> FilteredSamplesCapacityModifier:
    """Create the modifier that returns the capacity of dropped groups."""
    return FilteredSamplesCapacityModifier()


def register_capacity_modifiers(manager: StalenessManager, *modifiers: CapacityModifier) -> None:
    """Add the deltas of these modifiers to the manager's capacity."""
    for modifier in modifiers:
        manager.register_capacity_modifier(modifier)


def create_parts(
    data_buffer: DataBuffer, config: RolloutConfig, asynchronous: AsyncConfig, **options: Unpack[ExecutorOptions]
) -> ExecutorParts:
    """Compose the parts of an executor; missing parts are created by the functions above.

    Raises: ConfigError if generate_fn is missing, limits contradict each other, or rollouts are to be interrupted without engines.
    """
    unknown = sorted(set(options) - set(ExecutorOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown arguments {unknown} of an executor; known are {sorted(ExecutorOptions.__annotations__)}")
    config = take_apart(config)
    if config.generate_fn is None:
        raise ConfigError("RolloutConfig.generate_fn is None: set it, for example to create_generate_fn(engines, tokenizer, params)")
    check_async_config(asynchronous, config)
    engines, num_trainers = tuple(options.get("engines", ())), options.get("data_parallel_size", 1)
    batch_size, batches_per_version = share_batch_size(config, num_trainers), options.get("batches_per_version", 1)
    manager = options.get("manager") or create_staleness_manager(config, asynchronous, batches_per_version, num_trainers)
    version = options.get("version", 0)
    if version > 0 and manager.get_stats() == RolloutCounts():
        manager.on_version_recovered(version)
    queue, cache = options.get("queue"), options.get("cache")
    if queue is None:  # an empty queue may be false
        queue = create_queue(asynchronous, manager.limits.batch_size, num_trainers)
    check_parts(asynchronous, engines, queue, batch_size=batch_size, groups_per_version=manager.limits.batch_size)
    on_demand = asynchronous.max_staleness == 0 and batches_per_version > 1
    return ExecutorParts(
        data_buffer=data_buffer,
        config=config,
        rules=RolloutRules(asynchronous=asynchronous, max_refused=config.max_filter_attempts * batch_size, on_demand=on_demand),
        engines=engines,
        queue=queue,
        cache=create_cache() if cache is None else cache,
        manager=manager,
        strategy=options.get("strategy") or create_staleness_strategy(asynchronous),
        batch_size=batch_size,
        batches_per_version=batches_per_version,
    )

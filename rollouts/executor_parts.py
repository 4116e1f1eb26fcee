"""What a WorkflowExecutor is made of, for those who replace one part of it, and how the parts are put together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollouts.async_config import AsyncConfig
from rollouts.config import RolloutConfig
from rollouts.data_buffer import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError
from rollouts.finished_rollouts import FinishedRollouts
from rollouts.prompt_schedule import PromptSchedule
from rollouts.rollout_book import RolloutBook
from rollouts.rollout_queue import LocalRolloutCache, LocalRolloutQueue, RolloutCache, RolloutQueue
from rollouts.staleness import RolloutCounts, StalenessLimits, divide_limits
from rollouts.staleness_control import (
    CapacityModifier,
    FilteredSamplesCapacityModifier,
    SegmentWisePPOStrategy,
    StalenessControlStrategy,
    StalenessManager,
    StandardPPOStrategy,
)


def check_parts(
    asynchronous: AsyncConfig, engines: Sequence[InferenceEngine], queue: RolloutQueue, *, batch_size: int, groups_per_version: int
) -> None:
    """Raise ConfigError for parts that cannot work together; log a warning for a queue that is sure to overflow.

    Args:
        batch_size, groups_per_version: that this trainer trains on, in one step and under one weight version.
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
    most = (asynchronous.max_staleness + 1) * groups_per_version - batch_size  # that may be finished while the trainer works
    if asynchronous.when_queue_full == "raise" and queue.maxsize < most:
        logging.getLogger(__name__).warning(
            "the rollout queue holds %d groups, but up to %d may finish while the trainer works, which would end the run: increase "
            "queue_size to at least that, leave it out, or set when_queue_full='wait'",
            queue.maxsize,
            most,
        )


def share_batch_size(config: RolloutConfig, data_parallel_size: int) -> int:
    """Groups in a batch of one of data_parallel_size trainers: max(1, batch_size // data_parallel_size).

    Raises: ConfigError for a number of trainers below 1.
    """
    if data_parallel_size < 1:
        raise ConfigError(f"data_parallel_size is {data_parallel_size}, expected at least 1")
    return max(1, config.batch_size // data_parallel_size)


def create_staleness_manager(
    config: RolloutConfig, asynchronous: AsyncConfig, batches_per_version: int = 1, data_parallel_size: int = 1
) -> StalenessManager:
    """The manager for one of data_parallel_size trainers, without modifiers.

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
    """A queue of max(1, AsyncConfig.queue_size // data_parallel_size), by default for as many groups as may wait.

    Args:
        groups_per_version: that this trainer trains on under one weight version.
    """
    if asynchronous.queue_size is None:
        return LocalRolloutQueue(asynchronous.queue_groups(groups_per_version))
    return LocalRolloutQueue(max(1, asynchronous.queue_size // data_parallel_size))


def create_cache() -> RolloutCache:
    """An empty cache."""
    return LocalRolloutCache()


def create_staleness_strategy(asynchronous: AsyncConfig) -> StalenessControlStrategy:
    """Segment-wise or standard, as the switch says."""
    return SegmentWisePPOStrategy(asynchronous.max_staleness) if asynchronous.segment_wise else StandardPPOStrategy()


def create_filtered_capacity_modifier() -> FilteredSamplesCapacityModifier:
    """What gives back the room of dropped groups."""
    return FilteredSamplesCapacityModifier()


def register_capacity_modifiers(manager: StalenessManager, *modifiers: CapacityModifier) -> None:
    """Let the modifiers' deltas count."""
    for modifier in modifiers:
        manager.register_capacity_modifier(modifier)


def create_rollout_book(
    data_buffer: DataBuffer,
    config: RolloutConfig,
    asynchronous: AsyncConfig,
    engines: Sequence[InferenceEngine],
    *,
    queue: RolloutQueue | None,
    cache: RolloutCache | None,
    manager: StalenessManager | None,
    strategy: StalenessControlStrategy | None,
    version: int,
    batches_per_version: int,
    data_parallel_size: int,
) -> RolloutBook:
    """All that an executor holds, of parts that fit together. None: what the functions above make, a manager without modifiers.

    Raises: ConfigError for a number below 1, and for parts that cannot work together.
    """
    batch_size = share_batch_size(config, data_parallel_size)
    if manager is None:
        manager = create_staleness_manager(config, asynchronous, batches_per_version, data_parallel_size)
    if version > 0 and manager.get_stats() == RolloutCounts():
        manager.on_version_recovered(version)
    if queue is None:
        queue = create_queue(asynchronous, manager.limits.batch_size, data_parallel_size)
    check_parts(asynchronous, engines, queue, batch_size=batch_size, groups_per_version=manager.limits.batch_size)
    finished = FinishedRollouts(
        queue,
        create_cache() if cache is None else cache,
        create_staleness_strategy(asynchronous) if strategy is None else strategy,
        max_staleness=asynchronous.max_staleness,
        in_order=asynchronous.order == "submitted" or asynchronous.max_staleness == 0,
        waits=asynchronous.when_queue_full == "wait",
    )
    return RolloutBook(
        config,
        asynchronous,
        PromptSchedule(data_buffer),
        finished,
        manager,
        version=version,
        max_refused=config.max_filter_attempts * batch_size,
        starts_what_is_wanted=asynchronous.max_staleness == 0 and batches_per_version > 1,
    )

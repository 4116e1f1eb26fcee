"""Batches of sync functions, without an event loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from rollouts.checks import describe_function, is_async_function
from rollouts.config import RolloutConfig, take_apart
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import convert_to_batch, passes_filter
from rollouts.errors import ConfigError, GenerationError
from rollouts.generation.contract import check_generated_group, is_finished, note_prompt
from rollouts.generation.manager import AsyncRolloutManager, create_starvation_error
from rollouts.rewards.evaluate import score_now
from rollouts.types import Group, RolloutBatch, Status


def generate_rollout_batch(data_buffer: DataBuffer, config: RolloutConfig, **generate_kwargs: Any) -> RolloutBatch:
    """Return the next batch of generate_rollout_batches."""
    return next(generate_rollout_batches(data_buffer, config, **generate_kwargs))


def generate_rollout_batches(data_buffer: DataBuffer, config: RolloutConfig, **generate_kwargs: Any) -> Iterator[RolloutBatch]:
    """Generate batches without end and without an event loop, for a sync generate_fn. Same buffer position and config: same batches.

    Prompts are taken and generated one after another until config.batch_size groups have passed the filter, so there is nothing to
    over-sample. Rewards are called directly: the first failure is raised, and there is no timeout.

    Args:
        config: generate_fn and reward_fn must be sync.
        generate_kwargs: further arguments of generate_fn.

    Returns: an infinite iterator; each batch has exactly config.batch_size groups.
    Raises: ConfigError at once if a function is missing or async; GenerationError if the filter passes too little.
    """
    config = take_apart(config)
    if config.generate_fn is None:
        raise ConfigError("RolloutConfig.generate_fn is None: set the function that generates a group, generate_fn(prompt, n)")
    for name, function in (("generate_fn", config.generate_fn), ("reward_fn", config.reward_fn), ("filter_fn", config.filter_fn)):
        if function is not None and is_async_function(function):
            raise ConfigError(f"{name} {describe_function(function)} is async: use AsyncRolloutManager, or pass a plain function")
    return _iterate_batches(data_buffer, config, partial(config.generate_fn, **generate_kwargs))


def _iterate_batches(data_buffer: DataBuffer, config: RolloutConfig, generate: Callable[..., Any]) -> Iterator[RolloutBatch]:
    n, name = config.n_samples_per_prompt, describe_function(generate)
    while True:
        kept: list[Group] = []
        rejected: list[Group] = []
        num_dropped = num_rounds = 0
        while len(kept) < config.batch_size:
            if num_rounds == config.max_filter_attempts:
                raise create_starvation_error(config, len(kept), rejected, num_dropped=num_dropped, num_rounds=num_rounds)
            num_rounds += 1
            for prompt in data_buffer.get_prompts(config.batch_size - len(kept)):
                with note_prompt(prompt):
                    group = check_generated_group(generate(prompt, n), prompt, n, name, num_baseline=config.n_baseline_samples)
                    if not is_finished(group):
                        raise GenerationError(
                            f"{name} returned an unfinished group, although nothing stopped it: see the status of its samples"
                        )
                    if any(sample.status is Status.FAILED for sample in group):
                        num_dropped += 1
                        continue
                    scored = group if config.reward_fn is None else score_now(group, config.reward_fn)
                    passes = passes_filter(scored, config.filter_fn)
                (kept if passes else rejected).append(scored)
        counts = {"num_groups_generated": len(kept) + len(rejected) + num_dropped, "num_groups_filtered": len(rejected)}
        yield convert_to_batch((sample for group in kept for sample in group), {**counts, "num_groups_dropped": num_dropped})


class RolloutManager:
    """Batches by `for batch in manager`, without an event loop. Deprecated: `generate_rollout_batches` iterates over sync functions, and
    AsyncRolloutManager can do everything else.

    Each batch is one generate_batch of an AsyncRolloutManager, in a trio.run of its own. So generate_fn may be sync or async, but must hold
    nothing that lives in one run: no connections of an engine with an address, which are opened in the run that asks.
    """

    def __init__(self, data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any) -> None:
        """
        Args:
            data_buffer: source of prompts.
            config: with generate_fn set.
            rollout_kwargs: further arguments of generate_fn.

        Raises: ConfigError if generate_fn is missing.
        """
        warnings.warn(
            "RolloutManager is deprecated: use AsyncRolloutManager, or generate_rollout_batches for sync functions",
            DeprecationWarning,
            stacklevel=2,
        )
        config = take_apart(config)
        if config.generate_fn is not None and rollout_kwargs:
            config = replace(config, generate_fn=partial(config.generate_fn, **rollout_kwargs))
        self._manager = AsyncRolloutManager(data_buffer, config)

    def __iter__(self) -> RolloutManager:
        return self

    def __next__(self) -> RolloutBatch:
        """Return the next batch of an endless stream.

        Raises: the errors of AsyncRolloutManager.generate_batch; RuntimeError inside of trio, where generate_batch is to be awaited.
        """
        return trio.run(self._manager.generate_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of AsyncRolloutManager.state_dict; both managers can load it."""
        return self._manager.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of state_dict; raises as AsyncRolloutManager.load_state_dict."""
        self._manager.load_state_dict(state)

"""Benchmark the executor of asynchronous rollouts: groups per second with an instant engine, and memory of queued samples.

    python -m benchmarks.async_executor [--groups 20000] [--repeats 3] [--queued 100000] [--output FILE.json]

Groups have one sample of 8 tokens, so only the overhead per rollout counts. Contenders, in the same run: AsyncRolloutManager, which
generates one batch after another; the executor with and without a reward function; the executor with a fixed order.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial

import trio

from benchmarks.measure import compare, memory_mb, print_table, write_json
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.types import Group, Prompt, Sample, Status

BATCH_SIZE = 256
ZEROS, ONES = (0.0,) * 4, (1.0,) * 4


class InstantEngine:
    """An engine that answers a prompt at once with n samples of 8 tokens of its weight version."""

    def __init__(self) -> None:
        self.versions = (-1,) * 4 + (0,) * 4

    def set_version(self, version: int) -> None:
        """Set the version of the next tokens."""
        self.versions = (-1,) * 4 + (version,) * 4

    async def __call__(self, prompt: Prompt, n: int) -> Group:
        await trio.lowlevel.checkpoint()
        sample = Sample(
            prompt=prompt.content,
            tokens=tuple(range(8)),
            loss_mask=ZEROS + ONES,
            rollout_log_probs=ZEROS + ONES,
            weight_versions=self.versions,
            response="none",
            status=Status.COMPLETED,
        )
        return (sample,) * n


async def reward_one(sample: Sample) -> float:
    """Return reward 1."""
    return 1.0


def create_buffer() -> DataBuffer:
    """Create a buffer of 1,000 prompts."""
    return DataBuffer([f"prompt {i}" for i in range(1000)])


def create_config(engine: InstantEngine, batch_size: int = BATCH_SIZE, *, scored: bool = True) -> RolloutConfig:
    """Create the configuration of groups of one sample."""
    return RolloutConfig(batch_size=batch_size, generate_fn=engine, reward_fn=reward_one if scored else None)


def run_manager(num_groups: int, *, scored: bool) -> int:
    """Generate groups with AsyncRolloutManager."""

    async def main() -> int:
        manager = AsyncRolloutManager(create_buffer(), create_config(InstantEngine(), scored=scored))
        return sum([len((await manager.generate_batch()).samples) for _ in range(num_groups // BATCH_SIZE)])

    return trio.run(main)


def run_executor(num_groups: int, *, scored: bool, asynchronous: AsyncConfig) -> int:
    """Generate groups with the executor; the version rises with each batch."""

    async def main() -> int:
        count, engine = 0, InstantEngine()
        async with create_workflow_executor(create_buffer(), create_config(engine, scored=scored), asynchronous) as executor:
            for version in range(num_groups // BATCH_SIZE):
                count += len((await executor.generate_batch()).samples)
                engine.set_version(version + 1)
                executor.set_version(version + 1)
        return count

    return trio.run(main)


def measure_queue(num_samples: int) -> dict[str, float]:
    """Return the memory of finished groups that wait to be collected, and their rate."""

    async def main() -> dict[str, float]:
        config = create_config(InstantEngine(), num_samples // 2)
        before, started = memory_mb("VmRSS"), time.process_time()
        async with create_workflow_executor(create_buffer(), config, AsyncConfig(max_staleness=1, max_concurrent_rollouts=256)) as executor:
            while executor.get_stats().accepted < num_samples // 2 * 2:
                await trio.sleep(0.01)
            cpu_s = time.process_time() - started
            gc.collect()
            used = memory_mb("VmRSS") - before
        return {"MB": used, "bytes_per_sample": used * 2**20 / num_samples, "units_per_cpu_s": num_samples / cpu_s}

    return trio.run(main)


def main() -> None:
    """Run all contenders and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    num_groups: int = arguments.groups
    contenders: dict[str, Callable[[], int]] = {
        "AsyncRolloutManager": partial(run_manager, num_groups, scored=True),
        "executor": partial(run_executor, num_groups, scored=True, asynchronous=AsyncConfig(max_staleness=1)),
        "executor, in order": partial(run_executor, num_groups, scored=True, asynchronous=AsyncConfig(max_staleness=1, order="submitted")),
        "executor, no rewards": partial(run_executor, num_groups, scored=False, asynchronous=AsyncConfig(max_staleness=1)),
        "AsyncRolloutManager, no rewards": partial(run_manager, num_groups, scored=False),
    }
    rates = compare(contenders, arguments.repeats)
    print_table(f"groups of one sample, an engine that answers at once ({num_groups} groups)", rates)
    memory = {f"{arguments.queued} queued samples": measure_queue(arguments.queued)}
    print_table("memory", memory)
    write_json(arguments.output, {"rates": rates, "memory": memory})


if __name__ == "__main__":
    main()

"""Benchmark the work beside models: orchestration of rollouts, plans of micro-batches, and collation, and how each grows.

    python -m benchmarks.orchestration [--groups 1000] [--repeats 5] [--largest 64000] [--output FILE.json]

Orchestration: groups of 8 samples of an engine that answers at once, by AsyncRolloutManager and by the executor, against asyncio.gather
of the same functions: tokenize, derive the seed, make the sample of the completion, decode, reward; all in the settings of the interpreter
that the command's job has. In flight: processor time per group of
one sample while so many groups wait for their engine, on a virtual clock. Plans and collation: processor time at four sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
import trio.testing

from benchmarks.async_executor import reward_one
from benchmarks.measure import compare, print_table, write_json
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.batches import plan_microbatches, plan_sharded_microbatches
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.config import RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample, convert_to_batch, create_pending_group
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn, make_request_id
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

GROUP_SIZE = 8
OUTPUT = tuple(range(5, 13))
PROMPTS = [f"s{i:04d}=" for i in range(1000)]
TOKENIZER = create_char_tokenizer()
PARAMS = SamplingParams(max_tokens=len(OUTPUT))


def complete(prompt_tokens: Sequence[int], request_id: str | None) -> Completion:
    """Return a completion of 8 tokens."""
    return Completion(
        request_id=request_id or "",
        input_tokens=tuple(prompt_tokens),
        output_tokens=OUTPUT,
        output_log_probs=(-0.5,) * len(OUTPUT),
        output_versions=(0,) * len(OUTPUT),
        finish_reason="stop",
    )


class InstantEngine:
    """An engine that answers at once."""

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Return a completion of 8 tokens."""
        await trio.lowlevel.checkpoint()
        return complete(prompt_tokens, request_id)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Do nothing."""

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> dict[str, Any]:
        """Do nothing."""
        return {}

    async def get_weight_version(self) -> int:
        """Return version 0."""
        return 0


def create_config(num_groups: int) -> RolloutConfig:
    """Create the configuration of one batch of groups of 8."""
    generate_fn = create_generate_fn([InstantEngine()], TOKENIZER, PARAMS)
    return RolloutConfig(batch_size=num_groups, n_samples_per_prompt=GROUP_SIZE, generate_fn=generate_fn, reward_fn=reward_one)


def run_gather(num_groups: int) -> int:
    """Generate a batch with asyncio.gather."""

    async def generate_sample(index: int, k: int, pending: Sample, prompt_tokens: Sequence[int]) -> Sample:
        params = PARAMS.new(seed=derive_seed(0, index, k, 0))
        await asyncio.sleep(0)  # an engine would be asked here, with these parameters
        completion = complete(prompt_tokens, make_request_id(index, k))
        assert params.seed is not None
        text = str(TOKENIZER.decode(list(completion.output_tokens), skip_special_tokens=True))
        sample = completion_to_sample(pending, prompt_tokens, completion, text)
        return replace(sample, reward=await reward_one(sample))

    async def generate_group(index: int) -> Group:
        prompt = Prompt(content=PROMPTS[index % len(PROMPTS)], index=index)
        tokens, pending = tokenize_prompt(TOKENIZER, prompt.content), create_pending_group(prompt, GROUP_SIZE)
        return tuple(await asyncio.gather(*[generate_sample(index, k, pending[k], tokens) for k in range(GROUP_SIZE)]))

    async def main() -> int:
        groups = await asyncio.gather(*[generate_group(index) for index in range(num_groups)])
        return len(convert_to_batch(sample for group in groups for sample in group).samples)

    return asyncio.run(main())


def run_manager(num_groups: int) -> int:
    """Generate a batch with AsyncRolloutManager."""

    async def main() -> int:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), create_config(num_groups))
        return len((await manager.generate_batch()).samples)

    return trio.run(main)


def run_executor(num_groups: int) -> int:
    """Generate a batch with the executor, which generates no other one."""

    async def main() -> int:
        asynchronous = AsyncConfig(max_staleness=0)
        async with create_workflow_executor(DataBuffer(PROMPTS), create_config(num_groups), asynchronous) as executor:
            return len((await executor.generate_batch()).samples)

    return trio.run(main)


class WaitingGenerateFn:
    """A generate function whose groups take 1 to 2 seconds."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def __call__(self, prompt: Prompt, n: int) -> Group:
        self.num_calls += 1
        await trio.sleep(1 + self.num_calls * 7919 % 1000 / 1000)
        mask, versions = (1.0,) * len(OUTPUT), (0,) * len(OUTPUT)
        sample = Sample(prompt=prompt.content, tokens=OUTPUT, loss_mask=mask, weight_versions=versions, status=Status.COMPLETED)
        return (sample,) * n


def measure_in_flight(num_in_flight: int, num_groups: int) -> dict[str, float]:
    """Return processor microseconds per group of a bare nursery and of the executor, with so many groups in flight."""

    async def run_nursery() -> int:
        generate_fn = WaitingGenerateFn()

        async def generate() -> None:
            for number in range(num_groups // num_in_flight):
                await generate_fn(Prompt(content=PROMPTS[number % len(PROMPTS)]), 1)

        async with trio.open_nursery() as nursery:
            for _ in range(num_in_flight):
                nursery.start_soon(generate)
        return generate_fn.num_calls

    async def run_executor(*, in_order: bool) -> int:
        batch_size = min(num_in_flight, 1000)
        config = RolloutConfig(batch_size=batch_size, generate_fn=WaitingGenerateFn(), reward_fn=reward_one)
        staleness = 3 * num_in_flight // batch_size + num_groups // batch_size
        order = "submitted" if in_order else "finished"
        asynchronous = AsyncConfig(max_staleness=staleness, max_concurrent_rollouts=num_in_flight, order=order)
        async with create_workflow_executor(DataBuffer(PROMPTS), config, asynchronous) as executor:
            for _ in range(num_groups // batch_size):
                await executor.generate_batch()
            return executor.get_stats().accepted

    contenders = {
        "nursery": run_nursery,
        "executor": partial(run_executor, in_order=False),
        "in_order": partial(run_executor, in_order=True),
    }
    row: dict[str, float] = {}
    for name, work in contenders.items():
        gc.collect()
        started = time.process_time()
        num_done = trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))
        row[name] = (time.process_time() - started) / num_done * 1e6
    return row


def create_sample(index: int, length: int) -> Sample:
    """Create a scored sample with all columns of a rollout."""
    mask = (0.0,) * (length // 5) + (1.0,) * (length - length // 5)
    log_probs, versions = (-0.5,) * length, (1,) * length
    return Sample(
        tokens=tuple(range(3, 3 + length)), loss_mask=mask, rollout_log_probs=log_probs, weight_versions=versions, reward=float(index % 2),
        status=Status.COMPLETED, index=index, group_index=index // GROUP_SIZE,
    )  # fmt: skip


def measure_cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the median of processor milliseconds of a call."""
    times: list[float] = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times) * 1e3


def measure_rows(num_rows: int, repeats: int) -> dict[str, float]:
    """Return processor milliseconds of plans and of the collation of so many rows."""
    random = torch.randn(num_rows, generator=torch.Generator().manual_seed(0))
    lengths = (5 + 0.8 * random).exp().int().clamp(20, 2048).tolist()
    near = [1200 + 7 * row % 800 for row in range(num_rows)]
    samples = [create_sample(row, 100) for row in range(num_rows // 8)]
    return {
        "plan_16384": measure_cpu_ms(lambda: plan_microbatches(lengths, max_tokens=16384), repeats),
        "plan_2048": measure_cpu_ms(lambda: plan_microbatches(lengths, max_tokens=2048), repeats),
        "plan_4_ranks": measure_cpu_ms(lambda: plan_sharded_microbatches(near, max_tokens=2048, num_shards=4), repeats),
        "collate_eighth": measure_cpu_ms(lambda: collate_samples(samples), repeats),
    }


def measure_long_row(repeats: int) -> dict[str, float]:
    """Return processor milliseconds of the collation of 500 rows of 100 tokens, alone and beside one of 8,192."""
    samples = [create_sample(row, 100) for row in range(500)]
    beside = [*samples, create_sample(500, 8192)]
    return {
        "alone": measure_cpu_ms(lambda: collate_samples(samples), repeats),
        "beside_8192": measure_cpu_ms(lambda: collate_samples(beside), repeats),
    }


def main() -> None:
    """Run all parts and print tables."""
    from integration.run.job import favor_computation  # takes a second to import, and rows of benchmarks.run import this file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest", type=int, default=64_000)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_groups: int = arguments.groups
    repeats: int = arguments.repeats
    largest: int = arguments.largest
    contenders: dict[str, Callable[[], int]] = {
        "asyncio.gather": partial(run_gather, num_groups),
        "AsyncRolloutManager": partial(run_manager, num_groups),
        "executor": partial(run_executor, num_groups),
    }
    with favor_computation():
        rates = compare(contenders, repeats)
    print_table(f"{num_groups} groups of {GROUP_SIZE} samples, an engine that answers at once (units are samples)", rates)
    most = 10 * num_groups
    in_flight = {f"{number:,} in flight": measure_in_flight(number, most) for number in (most // 100, most // 10, most // 3, most)}
    print_table(f"processor microseconds per group, {most:,} groups", in_flight)
    rows = {f"{number:,} rows": measure_rows(number, repeats) for number in (largest // 64, largest // 16, largest // 4, largest)}
    print_table("processor milliseconds; collation of an eighth of the rows", rows)
    long_row = {"500 rows of 100 tokens": measure_long_row(repeats)}
    print_table("processor milliseconds of a collation", long_row)
    write_json(arguments.output, {"rates": rates, "in_flight": in_flight, "rows": rows, "long_row": long_row})


if __name__ == "__main__":
    main()

"""Benchmark generation: tokens per second of the embedded engine and of model.generate on the same prompts with ragged ends.

    python -m benchmarks.generate_throughput [--size S|M|L] [--prompts 64] [--samples 8] [--repeats 3] [--threads 1] [--output FILE.json]

Each sample has its own length, as responses have; model.generate runs until the longest of a batch is done. The engine takes turns with
kernels of torch and, where they are there, of oneDNN, in float32 and in bfloat16; the command's choice for this machine is printed.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
import trio

from benchmarks.measure import MODEL_SIZES, compare, create_model, print_table, write_json
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.models.linear import choose_kernels, has_fast_bfloat16, has_onednn
from rollouts.types import SamplingParams

LONGEST = 128


def create_requests(size: str, prompts: int, samples: int) -> tuple[list[list[int]], list[int]]:
    """Create prompts of log-normal length (8 to 64 tokens), and a length (4 to 128) for each of their samples."""
    generator = np.random.default_rng(0)
    prompt_lengths = np.clip(generator.lognormal(3.3, 0.4, prompts).astype(int), 8, 64)
    lengths = np.clip(generator.lognormal(3.5, 0.6, prompts * samples).astype(int), 4, LONGEST)
    vocabulary = MODEL_SIZES[size]["vocab_size"]
    return [generator.integers(3, vocabulary, n).tolist() for n in prompt_lengths], lengths.tolist()


def run_generate(model, prompts: list[list[int]], lengths: list[int], samples: int) -> int:
    """Run model.generate on left-padded prompts, each row stopped at its length."""
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    width = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(samples)]
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    limits = torch.tensor(lengths)

    class StopAtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids.shape[1] - width) >= limits

    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=LONGEST, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        stop = StoppingCriteriaList([StopAtLength()])
        model.generate(input_ids=tokens, attention_mask=real, generation_config=config, stopping_criteria=stop)
    return sum(lengths)


async def run_engine(engine: InProcessEngine, prompts: list[list[int]], lengths: list[int], samples: int) -> int:
    """Run all requests concurrently on the engine."""
    counts: list[int] = []

    async def one(i: int) -> None:
        completion = await engine.generate(prompts[i // samples], SamplingParams(max_tokens=lengths[i], seed=i), request_id=f"{i:06d}")
        counts.append(completion.output_len)

    async with trio.open_nursery() as nursery:
        for i in range(len(lengths)):
            nursery.start_soon(one, i)
    assert sum(counts) == sum(lengths), f"generated {sum(counts)} tokens, expected {sum(lengths)}"
    return sum(counts)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(MODEL_SIZES), default="S")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prompts, lengths = create_requests(arguments.size, arguments.prompts, arguments.samples)
    print(f"size {arguments.size}: {len(prompts)} prompts x {arguments.samples} samples, {sum(lengths)} tokens, longest {max(lengths)}")
    plain = create_model(arguments.size).eval()
    plain.generation_config.eos_token_id = plain.config.eos_token_id = None
    options = {"eos_token_ids": (), "max_slots": len(lengths)}
    engines = {"rollouts, torch": InProcessEngine(create_model(arguments.size), **options)}
    if has_onednn():
        engines["rollouts, onednn"] = InProcessEngine(create_model(arguments.size), kernels="onednn", **options)
    if has_fast_bfloat16():
        half = create_model(arguments.size).to(torch.bfloat16)
        engines["rollouts, onednn, bfloat16"] = InProcessEngine(half, kernels="onednn", **options)
    contenders = {"model.generate": partial(run_generate, plain, prompts, lengths, arguments.samples)}
    contenders |= {name: partial(trio.run, run_engine, e, prompts, lengths, arguments.samples) for name, e in engines.items()}
    print(f"kernels of the command on this machine: {choose_kernels('cpu')}")
    table = compare(contenders, arguments.repeats)
    print_table("tokens per second", table)
    write_json(arguments.output, {"size": arguments.size, "tokens": sum(lengths), "table": table})


if __name__ == "__main__":
    main()

"""Benchmark conversations on the embedded engine: processor seconds of each turn, with and without keys and values kept between turns.

    python -m benchmarks.turns [--size S|M] [--conversations 16] [--turns 16] [--answer 20] [--observation 20] [--repeats 3] [--threads 1]
        [--output FILE.json]

Conversations run side by side. The prompt of a turn is the prompt before it, its answer and an observation.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import trio

from benchmarks.measure import MODEL_SIZES, create_model, print_table, write_json
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.types import SamplingParams


async def play(engine: InProcessEngine, settings: argparse.Namespace) -> list[float]:
    """Play conversations turn by turn. Returns the processor seconds of each turn."""
    generator = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return generator.integers(3, MODEL_SIZES[settings.size]["vocab_size"], count).tolist()

    contexts = [draw(settings.observation) for _ in range(settings.conversations)]
    seconds: list[float] = []

    async def answer(i: int, turn: int) -> None:
        params = SamplingParams(max_tokens=settings.answer, seed=1000 * i + turn)
        completion = await engine.generate(contexts[i], params, request_id=f"{i:04d}-{turn:04d}")
        contexts[i] += completion.output_tokens

    for turn in range(settings.turns):
        begun = time.process_time()
        async with trio.open_nursery() as nursery:
            for i in range(settings.conversations):
                nursery.start_soon(answer, i, turn)
        seconds.append(time.process_time() - begun)
        for context in contexts:
            context += draw(settings.observation)
    return seconds


async def measure(settings: argparse.Namespace, kept_tokens: int, weights: dict[str, torch.Tensor]) -> list[float]:
    """Play conversations on an engine that has kept nothing."""
    model = create_model(settings.size)
    model.load_state_dict(weights)
    async with InProcessEngine(model, eos_token_ids=(), prefix_cache_tokens=kept_tokens) as engine:
        return await play(engine, settings)


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(MODEL_SIZES), default="S")
    for name, default in (("conversations", 16), ("turns", 16), ("answer", 20), ("observation", 20), ("repeats", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    weights = create_model(settings.size).state_dict()
    found: dict[int, list[list[float]]] = {0: [], 65_536: []}
    for _ in range(settings.repeats):
        for kept_tokens, runs in found.items():
            runs.append(trio.run(measure, settings, kept_tokens, weights))
    anew, kept = ([statistics.median(turn) for turn in zip(*runs, strict=True)] for runs in found.values())
    turns = np.arange(1, settings.turns + 1)
    table = {f"turn {turn}": {"anew s": anew[turn - 1], "kept s": kept[turn - 1]} for turn in turns}
    table["all turns"] = {"anew s": sum(anew), "kept s": sum(kept)}
    table["more each turn"] = {"anew s": float(np.polyfit(turns, anew, 1)[0]), "kept s": float(np.polyfit(turns, kept, 1)[0])}
    print_table(f"size {settings.size}, {settings.conversations} conversations", table)
    write_json(settings.output, {"settings": vars(settings), "rows": table})


if __name__ == "__main__":
    main()

"""Benchmark decode steps of the embedded engine over sequences of different lengths.

    python -m benchmarks.ragged_slots [--hidden 256] [--layers 4] [--slots 64] [--repeats 7] [--threads 1] [--output FILE.json]

Each batch is compared with one of equal lengths that has as many tokens in its caches. Processor time, medians of alternating steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.measure import print_table, write_json
from rollouts.engines.inprocess.slots import SlotModel, plan_runs
from rollouts.testing import create_tiny_model


def draw_batches(slots: int) -> dict[str, list[int]]:
    """Return lengths in tokens of the sequences of each batch."""
    normal = torch.randn(slots, generator=torch.Generator().manual_seed(0))
    spread = [int(length) for length in (0.8 * normal + 5.3).exp().clamp(20, 4000)]
    return {
        "one of 4,000 among short ones of 100": [100] * (slots // 2) + [4000] + [100] * (slots - slots // 2 - 1),
        "lognormal lengths": spread,
        "lognormal lengths, sorted": sorted(spread),
    }


def time_steps(engine: SlotModel, batches: list[list[int]], repeats: int) -> list[float]:
    """Return the median processor seconds of a decode step for each batch of lengths."""
    seconds: list[list[float]] = [[] for _ in batches]
    for _ in range(repeats + 1):
        for found, lengths in zip(seconds, batches, strict=True):
            begun = time.process_time()
            engine.decode(torch.full((len(lengths),), 5), [length - 1 for length in lengths])
            found.append(time.process_time() - begun)
    return [statistics.median(found[1:]) for found in seconds]  # the first allocates


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    model = create_tiny_model(vocab_size=1000, hidden_size=settings.hidden, num_layers=settings.layers, head_dim=64)
    engine = SlotModel(model, max_slots=settings.slots, name="engine")
    table: dict[str, dict[str, float]] = {}
    for name, lengths in draw_batches(settings.slots).items():
        mean = round(statistics.mean(lengths))
        ragged, equal = time_steps(engine, [lengths, [mean] * len(lengths)], settings.repeats)
        table[name] = {"ms": 1000 * ragged, "equal ms": 1000 * equal, "ratio": ragged / equal, "calls": len(plan_runs(lengths, "cpu"))}
    print_table(f"a step of {settings.slots} sequences", table)
    write_json(settings.output, {"settings": vars(settings), "rows": table})


if __name__ == "__main__":
    main()

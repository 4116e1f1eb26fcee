"""Draw how the cost of training and generation grows, on log-log axes with fitted slopes.

    python -m benchmarks.scaling [--repeats 2] [--folder docs] [--only PANEL ...]

--only keeps the other panels that the folder has.

Processor seconds on one thread, the least of some repeats, at four sizes each, with a model of size S; ranks of FSDP with one of 8 M
parameters. Writes performance-scaling.png and performance-scaling.json into the folder. A slope of 1 is cost in proportion; 0 is cost that
does not depend on the size.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio

from benchmarks.fsdp import run_ranks
from benchmarks.measure import MODEL_SIZES, create_model, write_json
from benchmarks.orchestration import measure_in_flight
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.training.steps import submit_optimizer_step
from rollouts.types import Sample, SamplingParams

FIGURE, FIGURES = "performance-scaling.png", "performance-scaling.json"


@dataclass(frozen=True)
class Panel:
    """A measurement at several sizes."""

    title: str
    x_label: str
    sizes: tuple[int, ...]
    measure: Callable[[int, int], float]  # (size, repeats) -> processor milliseconds, or microseconds of a unit
    y_label: str = "ms of a step"


def least_ms(work: Callable[[], Any], repeats: int) -> float:
    """Return the least processor milliseconds of a call after a first one."""
    work()
    found: list[float] = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return 1e3 * min(found)


def time_step(lengths: Sequence[int], vocabulary: int, repeats: int) -> float:
    """Return processor milliseconds of an SFT step over rows of these lengths, in micro-batches of 16,384 tokens."""
    model = create_model("S", vocab_size=vocabulary)
    backend, generator = create_pytorch_backend(model, lr=1e-4), np.random.default_rng(0)
    batch = collate_samples(
        [
            Sample(tokens=tuple(generator.integers(3, vocabulary, n).tolist()), loss_mask=(0.0, *(1.0,) * (n - 1)), index=i)
            for i, n in enumerate(lengths)
        ]
    )

    async def step() -> None:
        await submit_optimizer_step(backend, batch, sft_loss, weigh=token_mean, max_tokens_per_microbatch=16_384).result()

    return least_ms(partial(trio.run, step), repeats)


def step_of_tokens(tokens: int, repeats: int) -> float:
    """Measure a step over rows of 64 tokens."""
    return time_step([64] * (tokens // 64), 128, repeats)


def step_of_rows(rows: int, repeats: int) -> float:
    """Measure a step over 4,096 tokens in so many rows."""
    return time_step([4096 // rows] * rows, 128, repeats)


def step_of_vocabulary(vocabulary: int, repeats: int) -> float:
    """Measure a step over 1,024 tokens with so many entries of the vocabulary."""
    return time_step([64] * 16, vocabulary, repeats)


def step_of_lengths(distinct: int, repeats: int) -> float:
    """Measure a step over 128 rows of so many distinct lengths around 96."""
    return time_step([96 - distinct // 2 + i % distinct for i in range(128)], 128, repeats)


def run_requests(engine: InProcessEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Return processor seconds of a request for each prompt, all at once."""

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=num_tokens, seed=i)
                nursery.start_soon(partial(engine.generate, prompt, params, request_id=f"{i:06d}"))

    started = time.process_time()
    trio.run(run)
    return time.process_time() - started


def create_prompts(number: int, length: int) -> list[list[int]]:
    """Create random prompts."""
    return np.random.default_rng(0).integers(3, 128, (number, length)).tolist()


def decode_of_slots(slots: int, repeats: int) -> float:
    """Measure microseconds of a sampled token with so many sequences at once, prefill of 16 tokens included."""
    engine, prompts = InProcessEngine(create_model("S"), eos_token_ids=(), max_slots=slots), create_prompts(slots, 16)
    run_requests(engine, prompts, 8)
    return min(run_requests(engine, prompts, 32) for _ in range(repeats)) / (32 * slots) * 1e6


def decode_of_context(context: int, repeats: int) -> float:
    """Measure microseconds of a sampled token of 8 sequences behind so many tokens, whose keys and values are kept."""
    engine = InProcessEngine(create_model("S", max_position_embeddings=8192), eos_token_ids=(), max_slots=8)
    prompts = create_prompts(8, context)
    run_requests(engine, prompts, 1)
    one = min(run_requests(engine, prompts, 1) for _ in range(repeats))
    return max(1e-9, min(run_requests(engine, prompts, 33) for _ in range(repeats)) - one) / (32 * 8) * 1e6


def prefill_of_context(context: int, repeats: int) -> float:
    """Measure milliseconds of the prefill of a prompt."""
    engine = InProcessEngine(create_model("S", max_position_embeddings=8192), eos_token_ids=(), max_slots=8)
    generator = np.random.default_rng(1)
    return min(run_requests(engine, generator.integers(3, 128, (1, context)).tolist(), 1) for _ in range(repeats + 1)) * 1e3


def turns_of_episode(turns: int, repeats: int) -> float:
    """Measure milliseconds of an episode that sends its whole conversation each turn: 32 tokens observed and 32 sampled a turn."""
    engine = InProcessEngine(create_model("S", max_position_embeddings=8192), eos_token_ids=(), max_slots=8)
    found: list[float] = []
    for repeat in range(repeats + 1):
        tokens = np.random.default_rng(repeat).integers(3, 128, 64 * turns).tolist()
        found.append(sum(run_requests(engine, [tokens[: 64 * turn + 32]], 32) for turn in range(turns)))
    return 1e3 * min(found)


def step_of_ranks(ranks: int, repeats: int) -> float:
    """Measure the milliseconds of all ranks together for a step over 32 rows of 128 tokens, fully sharded: collectives and copies are the
    growth. Processor time does not include waiting for a core, so there may be fewer cores than ranks."""
    return 1e3 * min(run_ranks("small", ranks, 32, repeats)["times"]["CPU of all"])


def orchestrate_in_flight(number: int, repeats: int) -> float:
    """Measure microseconds of a group in the executor while so many wait for their engine."""
    return min(measure_in_flight(number, 3 * number)["executor"] for _ in range(max(1, repeats - 1)))


PANELS = {
    "tokens": Panel("step over tokens", "tokens in rows of 64", (1024, 4096, 16384, 32768), step_of_tokens),
    "rows": Panel("step over rows", "rows of 4,096 tokens in all", (16, 64, 256, 1024), step_of_rows),
    "vocabulary": Panel("step over vocabulary", "entries, 1,024 tokens", (1024, 4096, 16384, 65536), step_of_vocabulary),
    "lengths": Panel("step over distinct lengths", "lengths of 128 rows of 96", (1, 8, 32, 128), step_of_lengths),
    "slots": Panel("decoding over slots", "sequences at once", (8, 32, 128, 512), decode_of_slots, "µs of a token"),
    "context": Panel("decoding over context", "tokens before", (128, 512, 2048, 4096), decode_of_context, "µs of a token"),
    "prefill": Panel("prefill over context", "tokens of a prompt", (128, 512, 2048, 4096), prefill_of_context, "ms of a prompt"),
    "turns": Panel("episode over turns", "turns of 64 tokens", (2, 4, 8, 16), turns_of_episode, "ms of an episode"),
    "ranks": Panel("step over ranks, 8 M parameters", "ranks of FSDP, 4,096 tokens in all", (1, 2, 4, 8), step_of_ranks, "ms of all ranks"),
    "in flight": Panel("executor over groups in flight", "groups", (100, 300, 1000, 3000), orchestrate_in_flight, "µs of a group"),
}


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the least-squares slope of log y over log x."""
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw all panels with their slopes. Needs matplotlib."""
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    figure = Figure(figsize=(4 * columns, 3 * math.ceil(len(found) / columns)), layout="constrained")
    for place, (name, panel) in enumerate(found.items(), 1):
        axes = figure.add_subplot(math.ceil(len(found) / columns), columns, place)
        axes.loglog(panel["sizes"], panel["costs"], "o-")
        axes.set_xticks(panel["sizes"], [f"{size:,}" for size in panel["sizes"]])
        axes.minorticks_off()
        axes.set_ylim(min(panel["costs"]) / 2, 2 * max(panel["costs"]))
        axes.set_title(f"{PANELS[name].title}: slope {panel['slope']:.2f}", fontsize=10)
        axes.set_xlabel(PANELS[name].x_label)
        axes.set_ylabel(PANELS[name].y_label)
        axes.grid(visible=True, which="major", alpha=0.3)
    figure.savefig(path, dpi=90)


def read_panels(path: Path) -> dict[str, dict[str, Any]]:
    """Return the panels that an earlier run has stored; none if there is no file."""
    return json.loads(path.read_text())["panels"] if path.exists() else {}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--only", nargs="+", choices=list(PANELS), default=list(PANELS))
    parser.add_argument("--smallest", type=int, default=0, help=argparse.SUPPRESS)  # measure only so many of the smallest sizes
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = read_panels(arguments.folder / FIGURES) if arguments.only != list(PANELS) else {}
    for name in arguments.only:
        panel = PANELS[name]
        sizes = panel.sizes[: arguments.smallest or None]
        costs = [panel.measure(size, arguments.repeats) for size in sizes]
        found[name] = {"sizes": sizes, "costs": costs, "slope": fit_slope(sizes, costs)}
        told = ", ".join(f"{size:,}: {cost:.4g}" for size, cost in zip(sizes, costs, strict=True))
        print(f"{panel.title}, {panel.y_label}: {told}; slope {found[name]['slope']:.2f}", flush=True)
    found = {name: found[name] for name in PANELS if name in found}
    draw(found, arguments.folder / FIGURE)
    write_json(str(arguments.folder / FIGURES), {"model": MODEL_SIZES["S"], "panels": found})


if __name__ == "__main__":
    main()

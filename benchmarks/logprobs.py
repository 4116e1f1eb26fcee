"""Benchmark log-probs over a large vocabulary: peak memory and time, forward and backward, of four ways to compute the same numbers.

    python -m benchmarks.logprobs [--tokens 4096] [--vocabularies 32000 150000] [--hidden 256] [--chunk-size C] [--repeats 3]
        [--threads 1] [--output FILE.json]

log_softmax + gather is the formula; gather - logsumexp keeps the logits but not their log-softmax in the forward pass; chunked_log_probs
takes hidden states and the output layer and never keeps [tokens, vocabulary] numbers; foreseen, it has the gradient of the loss in the
forward pass, as training has it for each loss of single tokens. Products with the output layer are included. Each is
measured in a process of its own, for its own peak. The last table varies the number of tokens for the chunked form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import memory_mb, print_table, write_json
from rollouts.algorithms.logprobs import Foresight, chunked_log_probs, gather_log_probs

LogProbs = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


def log_softmax_and_gather(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """Compute all logits, then all log-probs: the formula."""
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]


def gather_minus_logsumexp(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """Compute all logits, without a second tensor of their size in the forward pass."""
    return gather_log_probs(hidden @ weight.t(), targets)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """Compute logits of chunk_size tokens at a time, and again in the backward pass."""
    return chunked_log_probs(hidden, weight, targets, chunk_size=chunk_size)[0]


def chunked_foreseen(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None) -> Tensor:
    """Compute logits of chunk_size tokens at a time, once, and their gradients with them."""
    return chunked_log_probs(hidden, weight, targets, chunk_size=chunk_size, foresight=Foresight(torch.ones_like))[0]


CONTENDERS: dict[str, LogProbs] = {
    "log_softmax + gather": log_softmax_and_gather,
    "gather - logsumexp": gather_minus_logsumexp,
    "chunked_log_probs": chunked,
    "chunked_log_probs, foreseen": chunked_foreseen,
}


def measure(name: str, tokens: int, vocabulary: int, width: int, chunk_size: int | None, repeats: int) -> dict[str, float]:
    """Return median seconds and extra megabytes at the peak of a forward and a backward pass in this process."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)  # training keeps these anyway
    torch.randn(512, 512) @ torch.randn(512, 512)  # libraries allocate memory at their first product
    before = memory_mb("VmRSS")
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        CONTENDERS[name](hidden, weight, targets, chunk_size).sum().backward()
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        "seconds": statistics.median(wall for wall, _ in seconds),
        "cpu_seconds": statistics.median(cpu for _, cpu in seconds),
        "peak_extra_mb": memory_mb("VmHWM") - before,
    }


def measure_in_process_of_its_own(*arguments: str) -> dict[str, float]:
    """Run one measurement of this file in a process of its own, and parse its output."""
    command = [sys.executable, "-m", "benchmarks.logprobs", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def compare(settings: argparse.Namespace, tokens: int, vocabulary: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Return a row for each contender, with ratios to the first one."""
    table: dict[str, dict[str, float]] = {}
    for name in names:
        options = {"--tokens": tokens, "--vocabularies": vocabulary, "--hidden": settings.hidden,
                   "--repeats": settings.repeats, "--threads": settings.threads, "--one": name}  # fmt: skip
        if settings.chunk_size is not None:
            options["--chunk-size"] = settings.chunk_size
        table[name] = measure_in_process_of_its_own(*[str(part) for pair in options.items() for part in pair])
    base = table[names[0]]
    for row in table.values():
        row["ratio_s"] = row["seconds"] / base["seconds"]
        row["ratio_cpu"] = row["cpu_seconds"] / base["cpu_seconds"]
        row["ratio_mb"] = row["peak_extra_mb"] / base["peak_extra_mb"]
    return table


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 150000])
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--chunk-size", type=int, help="tokens of a chunk; default: choose_chunk_size, as in training")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output")
    parser.add_argument("--one", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    if settings.one:
        vocabulary = settings.vocabularies[0]
        print(json.dumps(measure(settings.one, settings.tokens, vocabulary, settings.hidden, settings.chunk_size, settings.repeats)))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for vocabulary in settings.vocabularies:
        title = f"{settings.tokens:,} tokens x {vocabulary:,}"
        results[title] = compare(settings, settings.tokens, vocabulary, list(CONTENDERS))
        print_table(title, results[title])
    first, ours = settings.vocabularies[0], list(CONTENDERS)[-1]
    growth: dict[str, dict[str, float]] = {}
    for tokens in (settings.tokens // 2, settings.tokens, 2 * settings.tokens):
        row = compare(settings, tokens, first, [ours])[ours]
        growth[f"{tokens:,} tokens"] = {name: value for name, value in row.items() if not name.startswith("ratio")}
    print_table(f"{ours}, vocabulary {first:,}", growth)
    write_json(settings.output, {"settings": vars(settings), "comparisons": results, "growth": growth})


if __name__ == "__main__":
    main()

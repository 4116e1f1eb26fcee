"""Benchmark training: tokens per second and peak memory against a plain padded Hugging Face loop on the same model and ragged rows.

The backend takes turns with kernels of torch and, where they are there, of oneDNN; the command's choice for this machine is printed.
A second table compares a micro-batch of 32 rows of one length with 32 rows of distinct lengths that have as many tokens. A third compares
groups of 8 whose shared prompt is computed once with the same rows by themselves, over lengths of prompts and responses.

    python -m benchmarks.train_throughput [--size S|M|L] [--rows 64] [--repeats 5] [--threads 1] [--output FILE.json]

Padding does not count as tokens. Memory is measured in a process of its own for each contender.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.measure import MODEL_SIZES, compare, create_model, memory_mb, print_table, write_json
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.models.forward.packing import pack_batch
from rollouts.models.linear import Kernels, choose_kernels, has_onednn
from rollouts.types import Sample, TrainBatch

RAGGED = np.clip(np.random.default_rng(0).lognormal(4.2, 0.8, 64).astype(int), 4, 400)
"""Log-normal lengths of rows, as responses have: mean about 90 tokens, at most 400."""

DISTINCT = np.random.default_rng(0).permutation(np.delete(np.arange(110, 143), 16))
"""32 distinct lengths of rows with a mean of 126 tokens."""


SHAPES = ((4, 16), (16, 128), (32, 128), (64, 128), (128, 128), (128, 64), (256, 64))
"""Tokens of the prompt, and mean tokens of the responses, of groups of 8."""


def create_groups(size: str, num_prompt: int, num_response: int, *, num_groups: int = 4) -> TrainBatch:
    """Create groups of 8 rows of random tokens behind a shared prompt; responses have half to one and a half times the mean length."""
    generator = np.random.default_rng(0)
    samples: list[Sample] = []
    for group in range(num_groups):
        prompt = generator.integers(3, MODEL_SIZES[size]["vocab_size"], num_prompt).tolist()
        for length in generator.integers(num_response // 2, num_response * 3 // 2, 8):
            tokens = (*prompt, *generator.integers(3, MODEL_SIZES[size]["vocab_size"], length).tolist())
            mask = (0.0,) * num_prompt + (1.0,) * int(length)
            samples.append(Sample(tokens=tokens, loss_mask=mask, index=len(samples), group_index=group))
    batch = collate_samples(samples)
    return replace(batch, loss_weights=token_mean(batch), dropout=False)


def compare_shared(size: str, repeats: int) -> dict[str, dict[str, float]]:
    """Compare a forward and backward pass of rows by themselves with one that computes shared prompts once, for each of SHAPES."""
    table: dict[str, dict[str, float]] = {}
    for num_prompt, num_response in SHAPES:
        batch = create_groups(size, num_prompt, num_response)
        shared = replace(batch, skip_redundant=True)
        found = compare({"rows": passes(size, batch), "shared": passes(size, shared)}, repeats)
        computed = pack_batch(shared, torch.device("cpu"), share=True).tokens.numel() / int(batch.lengths.sum())
        table[f"{num_prompt}:{num_response}"] = {"tokens_computed": computed, "ratio_cpu": found["shared"]["ratio_cpu"]}
    return table


def create_rows(size: str, lengths: np.ndarray) -> TrainBatch:
    """Create rows of random tokens, all of them trained but the first."""
    generator = np.random.default_rng(0)
    vocabulary = MODEL_SIZES[size]["vocab_size"]
    samples = [
        Sample(tokens=tuple(generator.integers(3, vocabulary, n).tolist()), loss_mask=(0.0, *(1.0,) * (int(n) - 1)), index=i)
        for i, n in enumerate(lengths)
    ]
    batch = collate_samples(samples)
    return replace(batch, loss_weights=token_mean(batch))


def padded_loop(size: str, batch: TrainBatch) -> Callable[[], int]:
    """Make a step as in a plain loop: padded batch, attention mask, full logits, cross entropy."""
    model = create_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    labels = torch.where(batch.loss_mask > 0, batch.tokens, -100)

    def step() -> int:
        loss = model(input_ids=batch.tokens, attention_mask=real, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return int(real.sum())

    return step


def packed_backend(size: str, batch: TrainBatch, kernels: Kernels) -> Callable[[], int]:
    """Make the same step with the PyTorch backend."""
    backend = create_pytorch_backend(create_model(size), lr=1e-4, kernels=kernels)

    def step() -> int:
        backend.forward_backward(batch, sft_loss)
        backend.optim_step()
        return int(batch.lengths.sum())

    return step


def passes(size: str, batch: TrainBatch) -> Callable[[], int]:
    """Make a forward and backward pass over one micro-batch."""
    backend = create_pytorch_backend(create_model(size), lr=1e-4, kernels=choose_kernels("cpu"))

    def step() -> int:
        backend.forward_backward(batch, sft_loss)
        return int(batch.lengths.sum())

    return step


CONTENDERS: dict[str, Callable[[str, TrainBatch], Callable[[], int]]] = {
    "padded Hugging Face loop": padded_loop,
    "rollouts, torch": partial(packed_backend, kernels="torch"),
}
if has_onednn():
    CONTENDERS["rollouts, onednn"] = partial(packed_backend, kernels="onednn")


def measure_in_process_of_its_own(*arguments: str) -> float:
    """Run one measurement of this file in a process of its own, and parse its output."""
    command = [sys.executable, "-m", "benchmarks.train_throughput", *arguments]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]))


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(MODEL_SIZES), default="S")
    parser.add_argument("--rows", type=int, default=len(RAGGED), help="rows of the batch, at most 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    batch = create_rows(arguments.size, RAGGED[: arguments.rows])
    if arguments.memory_of:
        before = memory_mb("VmRSS")
        step = CONTENDERS[arguments.memory_of](arguments.size, batch)
        for _ in range(2):
            step()
        print(memory_mb("VmHWM") - before)
        return
    pads = 1 - float(batch.lengths.sum()) / batch.tokens.numel()
    print(f"size {arguments.size}: {batch.num_rows} rows, {int(batch.lengths.sum())} tokens, {pads:.0%} of a padded batch is pads")
    print(f"kernels of the command on this machine: {choose_kernels('cpu')}")
    speed = compare({name: create(arguments.size, batch) for name, create in CONTENDERS.items()}, arguments.repeats)
    print_table("tokens per second", speed)
    equal = create_rows(arguments.size, np.full(len(DISTINCT), DISTINCT.sum() // len(DISTINCT)))
    distinct = create_rows(arguments.size, DISTINCT)
    contenders = {"32 rows of one length": passes(arguments.size, equal), "32 distinct lengths": passes(arguments.size, distinct)}
    lengths = compare(contenders, arguments.repeats)
    print_table(f"tokens per second of a forward and backward pass, {int(distinct.lengths.sum())} tokens", lengths)
    shared = compare_shared(arguments.size, arguments.repeats)
    print_table(
        "groups of 8, prompt:response: share of tokens computed, and speed of a forward and backward pass to that of single rows", shared
    )
    names = ["--size", arguments.size, "--rows", str(arguments.rows), "--threads", str(arguments.threads), "--memory-of"]
    memory = {name: {"peak_extra_mb": measure_in_process_of_its_own(*names, name)} for name in CONTENDERS}
    print_table("memory of two steps", memory)
    write_json(arguments.output, {"size": arguments.size, "speed": speed, "lengths": lengths, "shared": shared, "memory": memory})


if __name__ == "__main__":
    main()

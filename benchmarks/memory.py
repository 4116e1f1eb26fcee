"""Benchmark the peak memory of a training step, next to the estimate of `--dry-run`.

    nice python -m benchmarks.memory [--sizes small medium large] [--tokens 512] [--repeats 3] [--device cpu|cuda] [--output FILE.json]
                                     [--beside MALLOC_MMAP_THRESHOLD_=131072]

Each measurement is a process of its own (two for FSDP on two ranks), in which a backend makes six optimizer steps of two micro-batches, as
the heap of a CPU process grows for some steps. --beside also measures with these environment variables, in turns. On a CPU the peak is that
of resident memory (VmHWM, reset when the model is created), including the process without a model; on a GPU it is the peak of torch's
allocator, without context and libraries (about 0.5 GiB).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import memory_mb, print_table, write_json
from integration.dry_run.memory import PROCESS_BYTES, Training, heap_bytes, sharded_training, training_parts
from integration.dry_run.sizes import read_sizes
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.types import Sample, TrainBatch

SIZES: dict[str, dict[str, Any]] = {  # 10, 60 and 250 million parameters
    "small": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64},
    "medium": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 13, "num_attention_heads": 8,
               "num_key_value_heads": 4, "head_dim": 64},
    "large": {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 64},
}  # fmt: skip
MIB = 2**20
ROW_TOKENS = 128
STEPS, MICRO_BATCHES = 6, 2


def create_config(size: str) -> Any:
    """Create a Qwen3 configuration."""
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES[size], max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)


def create_batch(size: str, tokens: int, seed: int) -> TrainBatch:
    """Create rows of 128 random tokens, with `tokens` tokens in total."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, SIZES[size]["vocab_size"], (max(tokens // ROW_TOKENS, 1), ROW_TOKENS), generator=generator).tolist()
    batch = collate_samples([Sample(tokens=tuple(row), loss_mask=(0.0, *(1.0,) * (len(row) - 1)), index=i) for i, row in enumerate(rows)])
    return replace(batch, loss_weights=token_mean(batch))


def write_model(size: str, directory: str) -> None:
    """Write a model directory with random weights."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(create_config(size)).save_pretrained(directory)


def create_backend(directory: str, device: str) -> Any:
    """Create the backend of this process: FSDP, whose ranks read their own slices, or the PyTorch backend."""
    tokenizer = create_char_tokenizer(64)  # required, but unused here
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from rollouts.backends.fsdp.factory import create_fsdp_backend

        return create_fsdp_backend(directory, lr=1e-4, device=device, tokenizer=tokenizer)
    return create_pytorch_backend(directory, lr=1e-4, device=device, tokenizer=tokenizer)


def measure_here(size: str, tokens: int, device: str, directory: str) -> dict[str, float]:
    """Make the steps in this process.

    Returns: peak bytes, resident bytes before the model was created, and CPU seconds per step without the first.
    """
    before = memory_mb("VmRSS") * MIB
    backend = create_backend(directory, device)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    batches = [create_batch(size, tokens * num_ranks, seed) for seed in range(MICRO_BATCHES)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident memory
    seconds: list[float] = []
    for _ in range(STEPS):
        start = time.process_time()
        for batch in batches:
            backend.forward_backward(batch, sft_loss)
        backend.optim_step()
        seconds.append(time.process_time() - start)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else memory_mb("VmHWM") * MIB
    return {"peak": float(peak), "before": before, "cpu_s": statistics.median(seconds[1:])}


def estimate(size: str, tokens: int, num_ranks: int, device: str, *, heap_has_gaps: bool = True) -> int:
    """Return the estimate of --dry-run for the same step, in bytes per process."""
    training = sharded_training(tokens, num_ranks, FSDPConfig()) if num_ranks > 1 else Training(tokens=tokens)
    parts = training_parts(read_sizes(create_config(size)), training)
    tensors = sum(part.size for part in parts)
    if device != "cpu":
        return tensors
    return tensors + PROCESS_BYTES + (heap_bytes(read_sizes(create_config(size)), training, parts) if heap_has_gaps else 0)


def measure_in_processes_of_their_own(
    size: str, tokens: int, num_ranks: int, device: str, directory: str, variables: Mapping[str, str]
) -> dict[str, float]:
    """Measure in processes of their own with extra environment variables. Returns the result of the rank with the higher peak."""
    arguments = ["benchmarks.memory", "--child", size, "--model", directory, "--tokens", str(tokens), "--device", device]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    command = [sys.executable, *launcher, "-m", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return max(read_results(done.stdout), key=lambda result: result["peak"])


def read_results(text: str) -> list[dict[str, float]]:
    """Parse the output of the processes; two may share a line."""
    return [json.loads(found) for found in re.findall(r"\{.*?\}", text)]


def summarize(results: list[dict[str, float]], plain: list[dict[str, float]], expected: int) -> dict[str, float]:
    """Return a row of the table.

    Args:
        plain: the measurement of the same turn without extra environment variables.
        expected: estimated bytes.
    """
    peaks = [result["peak"] for result in results]
    peak = statistics.median(peaks)
    return {
        "measured MiB": peak / MIB,
        "lowest": min(peaks) / MIB,
        "highest": max(peaks) / MIB,
        "estimate": expected / MIB,
        "est./measured": expected / peak,
        "CPU s a step": statistics.median(result["cpu_s"] for result in results),
        "CPU ratio": statistics.median(result["cpu_s"] / other["cpu_s"] for result, other in zip(results, plain, strict=True)),
    }


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-batch of one process")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--beside", metavar="NAME=VALUE", help="measure with this in the environment, too")
    parser.add_argument("--output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure_here(arguments.child, arguments.tokens, arguments.device, arguments.model)), flush=True)
        return
    settings: dict[str, dict[str, str]] = {"": {}}
    if arguments.beside:
        name, _, value = arguments.beside.partition("=")
        settings[f", {name}"] = {name: value}
    table: dict[str, dict[str, float]] = {}
    for size in arguments.sizes:
        for num_ranks in arguments.ranks:
            options = (size, arguments.tokens, num_ranks, arguments.device)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
            with tempfile.TemporaryDirectory() as directory:
                write_model(size, directory)
                for _ in range(arguments.repeats):
                    for name, variables in settings.items():
                        found[name].append(measure_in_processes_of_their_own(*options, directory, variables))
            for name, results in found.items():
                expected = estimate(*options, heap_has_gaps=not settings[name])
                table[f"{size}, {num_ranks} rank{'s' * (num_ranks > 1)}{name}"] = summarize(results, found[""], expected)
            print_table("", table)
    write_json(arguments.output, {"tokens": arguments.tokens, "device": arguments.device, "memory": table})


if __name__ == "__main__":
    main()

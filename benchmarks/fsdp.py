"""Benchmark FSDP on two ranks of one machine against one process with the same rows: time of a step, share of communication, memory.

    OMP_NUM_THREADS=1 nice python -m benchmarks.fsdp [--ranks 2] [--size small] [--rows 32] [--repeats 7] [--output FILE.json]

Starts torchrun itself. In turns, rank 0 makes a step alone while the others wait, then all ranks make the same step together. Collectives
of FSDP block on a CPU, so their time is measured around each call; it includes waiting for late ranks, which grows with other load on the
cores. The rest is computation, including copies to and from shards. Assumes one core and one thread per rank; with fewer cores the figures
are meaningless.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import print_table, write_json
from benchmarks.memory import ROW_TOKENS, SIZES, create_batch, create_config
from integration.dry_run.memory import sharded_training
from integration.dry_run.sizes import read_sizes
from integration.dry_run.traffic import Links, pass_traffic
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.types import TrainBatch

COLLECTIVES: dict[str, tuple[int, str, int]] = {  # position and name of the argument with the whole tensor; times it is sent
    "all_gather_single": (0, "output_tensor", 1),
    "all_gather_into_tensor": (0, "output_tensor", 1),  # name before torch 2.13
    "reduce_scatter_single": (1, "input", 1),
    "reduce_scatter_tensor": (1, "input", 1),
    "all_reduce": (0, "tensor", 2),
}
"""Collectives that FSDP calls."""


class Meter:
    """Meter of seconds in collectives and bytes received by them since the last reset."""

    def __init__(self) -> None:
        self.seconds, self.received = 0.0, 0.0
        self._inside = False  # nested collectives count once
        for name, argument in COLLECTIVES.items():
            if hasattr(dist, name):
                setattr(dist, name, self._timed(getattr(dist, name), *argument))

    def reset(self) -> None:
        """Reset to 0."""
        self.seconds, self.received = 0.0, 0.0

    def _timed(self, collective: Callable[..., Any], position: int, keyword: str, times: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return collective(*args, **kwargs)
            whole = args[position] if len(args) > position else kwargs[keyword]
            self._inside, begin = True, time.perf_counter()
            work = collective(*args, **kwargs)
            if work is not None:
                work.wait()
            self._inside = False
            self.seconds += time.perf_counter() - begin
            self.received += times * whole.nbytes * (dist.get_world_size() - 1) / dist.get_world_size()
            return work

        return call


def create_model(size: str) -> Any:
    """Create a model with random weights, equal on each rank."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(create_config(size))


def make_step(backend: Any, batch: TrainBatch) -> None:
    """Make one forward and backward pass and one update."""
    backend.forward_backward(batch, sft_loss)
    backend.optim_step()


def count_state_bytes(backend: Any) -> int:
    """Return the bytes of parameters, gradients before an update, and moments on this rank."""
    parameters = [p.to_local() if hasattr(p, "to_local") else p for p in backend.model.parameters()]
    moments = [value for state in backend.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in moments]
    return 2 * sum(p.nbytes for p in parameters) + sum(value.nbytes for value in local if value.dim())


def measure_here(size: str, rows: int, repeats: int) -> dict[str, Any] | None:
    """Measure on every rank; rank 0 returns the results."""
    together = FSDPTrainingBackend(create_model(size), partial(create_adamw_optimizer, lr=1e-4))
    rank, meter = dist.get_rank(), Meter()
    alone = None
    if rank == 0:
        model = create_model(size)
        alone = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-4))
    batch = create_batch(size, rows * ROW_TOKENS, 0)
    times: dict[str, list[float]] = {"alone": [], "together": [], "collectives": [], "CPU alone": [], "CPU of all": []}
    for repeat in range(-1, repeats):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        if alone is not None:
            make_step(alone, batch)
        single, single_cpu = time.perf_counter() - begin, time.process_time() - cpu
        dist.barrier()
        meter.reset()
        begin, cpu = time.perf_counter(), time.process_time()
        make_step(together, batch)
        wall, used = time.perf_counter() - begin, time.process_time() - cpu
        spent: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(spent, used)
        if repeat >= 0:
            found = (single, wall, meter.seconds, single_cpu, sum(spent))
            for name, value in zip(times, found, strict=True):
                times[name].append(value)
    states = count_state_bytes(together), 0 if alone is None else count_state_bytes(alone)
    received = meter.received
    dist.barrier()
    dist.destroy_process_group()
    return {"times": times, "received": received, "states": states} if rank == 0 else None


def summarize(found: dict[str, Any], size: str, rows: int, num_ranks: int) -> dict[str, dict[str, float]]:
    """Return medians, minima and maxima over repeats; ratios are within a repeat."""
    times = found["times"]
    steps = list(zip(*times.values(), strict=True))
    sizes = read_sizes(create_config(size))
    expected = sum(t.size for t in pass_traffic(sizes, sharded_training(rows * ROW_TOKENS, num_ranks, FSDPConfig()), Links()))
    rows_of: dict[str, list[float]] = {
        "one process, s": times["alone"],
        f"{num_ranks} ranks, s": times["together"],
        "of it in collectives, s": times["collectives"],
        "speed-up": [alone / together for alone, together, *_ in steps],
        "time beyond 1 / ranks": [together * num_ranks / alone - 1 for alone, together, *_ in steps],
        "of it communication": [collectives * num_ranks / alone for alone, _, collectives, *_ in steps],
        "of it computation": [(together - collectives) * num_ranks / alone - 1 for alone, together, collectives, *_ in steps],
        "CPU seconds of all / one process": [of_all / alone for *_, alone, of_all in steps],
        "MiB received by a rank": [found["received"] / 2**20],
        "MiB by the formula": [expected / 2**20],
        "states of a rank / one process": [found["states"][0] / found["states"][1]],
    }
    return {name: {"median": statistics.median(v), "lowest": min(v), "highest": max(v)} for name, v in rows_of.items()}


def run_ranks(size: str, num_ranks: int, rows: int, repeats: int) -> dict[str, Any]:
    """Measure in a process for each rank, with one thread each. Returns the results of rank 0; exits if a rank fails."""
    options = ["--size", size, "--rows", str(rows), "--repeats", str(repeats)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launcher, "-m", "benchmarks.fsdp", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def main() -> None:
    """Parse arguments, start the ranks, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of the whole batch, 128 tokens each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        found = measure_here(arguments.size, arguments.rows, arguments.repeats)
        if found is not None:
            print(json.dumps(found), flush=True)
        return
    found = run_ranks(arguments.size, arguments.ranks, arguments.rows, arguments.repeats)
    table = summarize(found, arguments.size, arguments.rows, arguments.ranks)
    print_table(f"{arguments.size}: {arguments.rows} rows of {ROW_TOKENS} tokens, {arguments.repeats} repeats", table)
    write_json(arguments.output, {"size": arguments.size, "rows": arguments.rows, "fsdp": table, "raw": found})


if __name__ == "__main__":
    main()

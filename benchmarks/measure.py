"""Side-by-side measurement: contenders take turns in one process; medians over repeats of CPU and wall seconds."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

MODEL_SIZES: dict[str, dict[str, int]] = {
    "S": {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32},
    "M": {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
          "num_key_value_heads": 2, "head_dim": 64},
    "L": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2688, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_key_value_heads": 4, "head_dim": 64},
}  # fmt: skip
"""Qwen3 models of 0.8, 11 and 118 million parameters, by name."""


def create_model(size: str, seed: int = 0, **changes: int) -> Any:
    """Create a Qwen3 model of a size, with some numbers changed, and random weights in float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {**MODEL_SIZES[size], "max_position_embeddings": 1024, **changes}
    config = Qwen3Config(**shape, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)
    return Qwen3ForCausalLM(config)


def name_processor() -> str:
    """Return the name of the processor; its architecture where the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    named = next((line for line in lines if line.startswith("model name")), "")
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Describe the machine and versions of a measurement."""
    return {
        "processor": name_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def compare(
    contenders: Mapping[str, Callable[[], int]],
    repeats: int,
    clocks: Mapping[str, Callable[[], float]] | None = None,
    warm_ups: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, dict[str, float]]:
    """Run contenders in turn, `repeats` times after one warm-up.

    Args:
        contenders: functions that do their work and return the number of units done.
        clocks: processor seconds of contenders that work in another process, or only a part of whose work counts; the others have
            those of this process.
        warm_ups: for contenders whose work takes long, what they do in the warm-up instead: less of the same.

    Returns: medians of units_per_s and units_per_cpu_s of each, and both relative to the first contender.
    """
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for repeat in range(-1, repeats):
        for name, work in contenders.items():
            if repeat < 0:
                (warm_ups or {}).get(name, work)()
                continue
            clock = (clocks or {}).get(name, time.process_time)
            wall, cpu = time.perf_counter(), clock()
            units = work()
            wall, cpu = time.perf_counter() - wall, clock() - cpu
            rates[name].append((units / wall, units / cpu))
    table: dict[str, dict[str, float]] = {}
    for name, pairs in rates.items():
        table[name] = {"units_per_s": statistics.median(w for w, _ in pairs), "units_per_cpu_s": statistics.median(c for _, c in pairs)}
    base = table[next(iter(table))]
    for row in table.values():
        row["ratio"] = row["units_per_s"] / base["units_per_s"]
        row["ratio_cpu"] = row["units_per_cpu_s"] / base["units_per_cpu_s"]
    return table


def processor_seconds(pid: int) -> float:
    """Return user and system seconds of a process with all its threads. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(name: str) -> float:
    """Return the resident memory of this process in MB: "VmRSS" = current, "VmHWM" = peak. Linux only.

    The maximum of getrusage includes the parent's memory before exec.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def print_table(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table with a row for each contender."""
    columns = list(next(iter(table.values())))
    print(title)
    print(f"  {'':<28}" + "".join(f"{column:>18}" for column in columns))
    for name, row in table.items():
        print(f"  {name:<28}" + "".join(f"{row[column]:>18,.2f}" for column in columns))


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """Write a result and its machine as JSON, if a path is given."""
    if path is not None:
        Path(path).write_text(json.dumps({"machine": describe_machine(), **result}, indent=2) + "\n")

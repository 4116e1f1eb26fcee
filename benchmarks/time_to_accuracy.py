"""Benchmark the seconds from start to 90 % held-out accuracy of the default job, for several seeds.

    python -m benchmarks.time_to_accuracy [--task sort] [--seeds 0 1 2] [--threshold 0.9] [--output FILE.json] [-- OPTIONS]
    TRL_PYTHON=~/envs/trl/bin/python python -m benchmarks.time_to_accuracy --against trl [...] [-- OPTIONS]

Each run is the README's command, with the options if any, in a process of its own; imports, evaluation and checkpoints count. With
--against trl, the RL stage alone is compared with TRL's trainer, in processor seconds without evaluations: see benchmarks/against_trl.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import print_table, write_json


def run_job(arguments: argparse.Namespace, seed: int, directory: Path) -> dict[str, float]:
    """Run the job; watch its metrics file for the first RL evaluation at or above the threshold."""
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "integration.train",
        "--mode",
        "sft+rl",
        "--seed",
        str(seed),
        "--output-dir",
        str(directory),
        "--quiet",
        "--task",
        arguments.task,
        *arguments.settings,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics, reached = directory / "metrics.jsonl", float("nan")
    while process.poll() is None:
        if reached != reached and metrics.exists():
            lines = [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]
            if any(line["stage"] == "rl" and line.get("eval_accuracy", 0.0) >= arguments.threshold for line in lines):
                reached = time.perf_counter() - start
        time.sleep(0.05)
    total = time.perf_counter() - start
    summary = json.loads((directory / "summary.json").read_text())
    return {
        "after_sft": summary["accuracy_after_sft"],
        "after_rl": summary["accuracy_after_rl"],
        "seconds_to_threshold": reached,
        "seconds_sft": summary["seconds_sft"],
        "seconds_rl": summary["seconds_rl"],
        "seconds_in_all": total,
    }


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="sort")
    parser.add_argument("--against", choices=["trl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--output")
    parser.add_argument("settings", nargs="*", help="further options of integration.train, after --")
    arguments = parser.parse_args()
    if arguments.against == "trl":
        from benchmarks.against_trl import compare_with_trl

        result = compare_with_trl(["--task", arguments.task, *arguments.settings], arguments.seeds, arguments.threshold)
        write_json(arguments.output, {"task": arguments.task, "settings": arguments.settings, "threshold": arguments.threshold, **result})
        return
    table: dict[str, dict[str, float]] = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            table[f"seed {seed}"] = run_job(arguments, seed, Path(directory) / "run")
        print_table(f"task {arguments.task}, threshold {arguments.threshold}", table)
    write_json(arguments.output, {"threshold": arguments.threshold, "table": table})


if __name__ == "__main__":
    main()

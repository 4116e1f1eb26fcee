"""Benchmark every preset on the default task: mean reward and held-out accuracy over the RL stage, for several seeds.

    python -m benchmarks.algorithms [--seeds 0 1 2] [--algorithms grpo 'decoupled(dapo())' ...] [--jobs 2] [--output FILE.json]
                                    [--picture FILE.png] [--set rl.num_steps=12 ...]

SFT runs once per seed; each algorithm then trains from its last checkpoint with the settings and RL steps of the default job. Times are
relative to the default job's algorithm, grpo(), on the same seeds, which always runs. `--jobs` runs go on at the same time, one thread
each. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import describe_machine, print_table, write_json

ALGORITHMS = (
    "grpo()", "dr_grpo()", "dapo()", "gspo()", "gmpo()", "cispo()", "sapo()", "dppo()", "dppo_kl()", "rloo()", "reinforce()", "remax()",
    "opo()", "gpg()", "reinforce_plus_plus()", "reinforce_plus_plus_baseline()", "ppo()", "grpo(kl_coef=0.04)", "decoupled(dapo())",
    "truncated(grpo())", "recomputed(ppo())",
)  # fmt: skip
DEFAULT = "grpo()"  # the algorithm of the default job


def run_training(arguments: Sequence[str], directory: Path) -> float:
    """Run the main job in a process of its own with one thread. Returns its seconds."""
    command = [sys.executable, "-m", "integration.train", "--output-dir", str(directory), "--quiet", "--num-threads", "1", *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def read_rl_lines(directory: Path) -> list[dict[str, Any]]:
    """Read the RL lines of a run's metrics."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "rl"]


def train_contenders(
    contenders: Mapping[str, Callable[[], Mapping[str, Any]]], seed: int, num_jobs: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train contenders by name, several at a time, and return their runs in order. A failed run is reported and left out, so that the
    results of the others are kept."""
    with ThreadPoolExecutor(num_jobs) as pool:
        jobs = {name: pool.submit(train) for name, train in contenders.items()}
        for name, job in jobs.items():
            try:
                run = dict(job.result())
            except RuntimeError as error:
                print(f"seed {seed}  {name:34s} FAILED: {error}", flush=True)
                continue
            accuracy = run["accuracy"]
            print(f"seed {seed}  {name:34s} {accuracy[0]:.3f} -> {accuracy[-1]:.3f}, {run['seconds']:.0f} s", flush=True)
            yield name, run


def train_algorithm(algorithm: str, seed: int, model: Path, directory: Path, more: Sequence[str]) -> dict[str, Any]:
    """Run RL from an SFT checkpoint. Returns the curves and the seconds."""
    arguments = ["--mode", "rl", "--model.path", str(model), "--seed", str(seed), "--rl.algorithm", algorithm]
    seconds = run_training([*arguments, *more], directory)
    lines = read_rl_lines(directory)
    return {
        "seed": seed,
        "seconds": seconds,
        "accuracy": [line["eval_accuracy"] for line in lines if "eval_accuracy" in line],
        "reward": [line["reward_mean"] for line in lines if "reward_mean" in line],
    }


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return means over seeds of each algorithm's first and last values, the worst seed's last, and time relative to DEFAULT.

    Args:
        runs: at least one per algorithm. The time is NaN if DEFAULT has no run of the same seeds.
    """
    table: dict[str, dict[str, float]] = {}
    reference = {run["seed"]: run["seconds"] for run in runs.get(DEFAULT, ())}
    for algorithm, of_seeds in runs.items():
        shared = [run for run in of_seeds if run["seed"] in reference]
        ratio = sum(run["seconds"] for run in shared) / sum(reference[run["seed"]] for run in shared) if shared else math.nan
        table[algorithm] = {
            "seeds": len(of_seeds),
            "accuracy_before": statistics.mean(run["accuracy"][0] for run in of_seeds),
            "accuracy_after": statistics.mean(run["accuracy"][-1] for run in of_seeds),
            "worst_seed": min(run["accuracy"][-1] for run in of_seeds),
            "reward_first": statistics.mean(run["reward"][0] for run in of_seeds),
            "reward_last": statistics.mean(run["reward"][-1] for run in of_seeds),
            "seconds_rl": statistics.mean(run["seconds"] for run in of_seeds),
            "time_ratio": ratio,
        }
    return table


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw one small panel per algorithm: held-out accuracy (solid) and mean reward (dotted) of each seed over RL steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 6
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(2.3 * columns, 1.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, (algorithm, of_seeds) in zip(axes, runs.items(), strict=False):
        for number, run in enumerate(of_seeds):
            axis.plot(range(len(run["accuracy"])), run["accuracy"], color=f"C{number}", linewidth=1.4)
            axis.plot(range(1, len(run["reward"]) + 1), run["reward"], color=f"C{number}", linewidth=1, linestyle=":")
        axis.set_title(algorithm, fontsize=8)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    for axis in axes[len(runs) :]:
        axis.set_visible(False)
    figure.supxlabel("RL step", fontsize=9)
    figure.supylabel("held-out accuracy (solid), mean reward (dotted)", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Parse arguments, train, print, draw, write. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every run, name=value")
    parser.add_argument("--output")
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    more = [part for setting in arguments.set for part in (f"--{setting.split('=', 1)[0]}", setting.split("=", 1)[1])]
    runs: dict[str, list[dict[str, Any]]] = {algorithm: [] for algorithm in dict.fromkeys((DEFAULT, *arguments.algorithms))}
    seconds_sft: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            base = Path(scratch) / f"seed-{seed}"
            seconds_sft.append(run_training(["--mode", "sft", "--seed", str(seed)], base / "sft-run"))
            model = max((base / "sft-run" / "sft" / "checkpoints").glob("step_*"))
            contenders = {
                algorithm: partial(train_algorithm, algorithm, seed, model, base / f"run-{number}", more)
                for number, algorithm in enumerate(runs)
            }
            for algorithm, run in train_contenders(contenders, seed, arguments.jobs):
                runs[algorithm].append(run)
            write_json(arguments.output, {"machine": describe_machine(), "seconds_sft": seconds_sft, "runs": runs})
    num_failed = len(runs) * len(arguments.seeds) - sum(map(len, runs.values()))
    print(f"{num_failed} of {len(runs) * len(arguments.seeds)} runs failed")
    runs = {algorithm: of_seeds for algorithm, of_seeds in runs.items() if of_seeds}
    if not runs:
        return 1
    table = summarize(runs)
    print_table(f"default task, seeds {arguments.seeds}, SFT {statistics.mean(seconds_sft):.0f} s each", table)
    if arguments.picture:
        draw(runs, Path(arguments.picture))
    write_json(arguments.output, {"machine": describe_machine(), "seconds_sft": seconds_sft, "table": table, "runs": runs})
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark learning from stale rollouts: the asynchronous default task for several bounds on staleness, with and without corrections.

    python -m benchmarks.async_learning [--staleness 0 1 2 4 8] [--seeds 0 1 2] [--steps 24] [--corrections none decoupled segment-wise]
                                        [--jobs 1] [--set rl.num_minibatches=2 ...] [--output FILE.json] [--picture FILE.png]

SFT runs once per seed; each contender then trains from its last checkpoint. Corrections, around --algorithm (default grpo()):

    none           ratios to the log-probs of the sampling engine
    decoupled      ratios to the policy before the update, weighted by it / engine
    segment-wise   as decoupled, with a weight per token from the policy one version after its own (--enable-segment-wise-ppo)

max_staleness only bounds the staleness of tokens; the table shows the actual one. `--jobs` runs go on at the same time, one thread each;
the exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.algorithms import read_rl_lines, run_training, train_contenders
from benchmarks.measure import print_table, write_json

CORRECTIONS = ("none", "decoupled", "segment-wise")
CURVES = {"accuracy": "eval_accuracy", "reward": "reward_mean", "staleness": "staleness_mean", "ratio_kl": "mismatch_kl"}


def create_arguments(correction: str, algorithm: str, staleness: int) -> list[str]:
    """Return the flags of a contender."""
    flags = ["--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness", str(staleness)]
    if correction == "none":
        return [*flags, "--rl.algorithm", algorithm]
    if correction == "decoupled":
        return [*flags, "--rl.algorithm", f"decoupled({algorithm})"]
    return [*flags, "--rl.algorithm", algorithm, "--enable-segment-wise-ppo"]


def read_curves(directory: Path) -> dict[str, list[float]]:
    """Read the curves of a run, one value per RL step; accuracy also has one for the evaluation before the first step."""
    lines = read_rl_lines(directory)
    return {name: [line[key] for line in lines if key in line] for name, key in CURVES.items()}


def train(arguments: argparse.Namespace, correction: str, staleness: int, seed: int, model: Path, directory: Path) -> dict[str, Any]:
    """Train a contender."""
    more = [part for setting in arguments.set for part in (f"--{setting.split('=', 1)[0]}", setting.split("=", 1)[1])]
    flags = ["--mode", "rl", "--model.path", str(model), "--seed", str(seed), "--rl.num-steps", str(arguments.steps)]
    seconds = run_training([*flags, *create_arguments(correction, arguments.algorithm, staleness), *more], directory)
    return {"seed": seed, "seconds": seconds, **read_curves(directory)}


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return means over seeds: accuracy before and after, the worst seed's, mean reward of all steps (area under its curve), staleness."""
    return {
        name: {
            "seeds": len(of_seeds),
            "accuracy_before": statistics.mean(run["accuracy"][0] for run in of_seeds),
            "accuracy_after": statistics.mean(run["accuracy"][-1] for run in of_seeds),
            "worst_seed": min(run["accuracy"][-1] for run in of_seeds),
            "reward_all": statistics.mean(statistics.mean(run["reward"]) for run in of_seeds),
            "staleness": statistics.mean(statistics.mean(run["staleness"]) for run in of_seeds if run["staleness"]),
        }
        for name, of_seeds in runs.items()
        if of_seeds
    }


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], staleness: Sequence[int], corrections: Sequence[str], path: Path) -> None:
    """Draw one panel per bound: mean reward over steps, a thin line per seed and a thick one for their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(staleness), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(staleness), sharey=True, squeeze=False)[0]
    for axis, bound in zip(axes, staleness, strict=True):
        for number, correction in enumerate(corrections):
            curves = [run["reward"] for run in runs[name_contender(correction, bound)]]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=f"C{number}", linewidth=0.6, alpha=0.5)
            if curves:
                shortest = min(map(len, curves))
                mean = [statistics.mean(curve[step] for curve in curves) for step in range(shortest)]
                axis.plot(range(1, shortest + 1), mean, color=f"C{number}", linewidth=1.8, label=correction)
        axis.set_title(f"max_staleness {bound}", fontsize=10)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("RL step", fontsize=9)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean reward of the rollouts", fontsize=9)
    axes[0].legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def name_contender(correction: str, staleness: int) -> str:
    """Return a contender's name in tables."""
    return f"{correction}, max_staleness {staleness}"


def main() -> int:
    """Parse arguments, train, print, draw, write. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--algorithm", default="grpo()")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every run, name=value")
    parser.add_argument("--set-sft", nargs="*", default=[], help="further settings of the SFT runs, name=value")
    parser.add_argument("--output")
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    contenders = [(correction, staleness) for staleness in arguments.staleness for correction in arguments.corrections]
    runs: dict[str, list[dict[str, Any]]] = {name_contender(*contender): [] for contender in contenders}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            base = Path(scratch) / f"seed-{seed}"
            sft = [part for setting in arguments.set_sft for part in (f"--{setting.split('=', 1)[0]}", setting.split("=", 1)[1])]
            run_training(["--mode", "sft", "--seed", str(seed), *sft], base / "sft-run")
            model = max((base / "sft-run" / "sft" / "checkpoints").glob("step_*"))
            jobs = {
                name_contender(*contender): partial(train, arguments, *contender, seed, model, base / f"run-{number}")
                for number, contender in enumerate(contenders)
            }
            for name, run in train_contenders(jobs, seed, arguments.jobs):
                runs[name].append(run)
                write_json(arguments.output, {"runs": runs})
    num_failed = len(contenders) * len(arguments.seeds) - sum(map(len, runs.values()))
    print(f"{num_failed} of {len(contenders) * len(arguments.seeds)} runs failed")
    table = summarize(runs)
    if not table:
        return 1
    print_table(f"default task, seeds {arguments.seeds}, {arguments.steps} RL steps", table)
    if arguments.picture:
        draw(runs, arguments.staleness, arguments.corrections, Path(arguments.picture))
    write_json(arguments.output, {"settings": vars(arguments), "table": table, "runs": runs})
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())

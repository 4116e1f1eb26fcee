"""Generate the figure and the table of docs/reward-models.md.

    python tools/docs/generate_reward_models.py RUNS [--seeds 0 1 2]

The directory RUNS contains `rm` (python -m integration.train_reward_model) and, for each seed, `model-SEED` (integration.train with
--reward.model RUNS/rm) and `rule-SEED` (without); missing runs are made. The picture goes to docs/, the table into the page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollouts.training.metrics import read_metrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "reward-models.md", DOCS / "reward-models.png"
KINDS = {"model": "reward model", "rule": "rule"}
MARKS = ("<!-- table -->", "<!-- end of the table -->")


def make_run(module: str, directory: Path, *flags: str) -> None:
    """Run a command in a process of its own, unless its run exists and has ended."""
    if not (directory / "summary.json").exists():
        command = [sys.executable, "-m", f"integration.{module}", "--output-dir", str(directory), "--num-threads", "1", "--quiet", *flags]
        subprocess.run(command, cwd=DOCS.parent, check=True, stdout=subprocess.DEVNULL)


def read_rl(directory: Path) -> list[dict[str, Any]]:
    """Read the lines of RL, with SFT's last line as step 0."""
    lines = read_metrics(directory / "metrics.jsonl")
    start = [line for line in lines if line["stage"] == "sft" and "eval_accuracy" in line][-1]
    return [start | {"step": 0}, *(line for line in lines if line["stage"] == "rl" and line["step"] > 0)]


def draw(runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    """Draw the reward of each run, and the accuracy by the rule of both kinds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4))
    colors = {"model": "tab:orange", "rule": "tab:blue"}
    for axis, kind in zip(axes[:2], KINDS, strict=True):
        for lines in runs[kind]:
            axis.plot([line["step"] for line in lines[1:]], [line["reward_mean"] for line in lines[1:]], color=colors[kind])
        axis.set(title=f"reward: {'score of the model' if kind == 'model' else 'right or wrong'}", xlabel="step of RL")
    for kind, name in KINDS.items():
        for number, lines in enumerate(runs[kind]):
            for key, style, how in (("eval_accuracy", "-", "greedy"), ("eval_accuracy_sampled", "--", "sampled")):
                label = f"{name}, {how}" if number == 0 else None
                axes[2].plot([line["step"] for line in lines], [line[key] for line in lines], style, color=colors[kind], label=label)
    axes[2].set(title="held-out accuracy by the rule", xlabel="step of RL", ylim=(0.3, 1))
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=90)


def write_table(summary: dict[str, Any], runs: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Return the results of the runs as a Markdown table."""
    num_runs = len(runs["model"])
    rows = [f"Held-out pairs that the model ranks right: **{summary['accuracy']:.1%}** of 512, after {summary['steps']} steps.", ""]
    rows += [
        "| trained on | accuracy before RL | after 12 steps | sampled, before | after | runs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, name in KINDS.items():
        keys = [(key, place) for key in ("eval_accuracy", "eval_accuracy_sampled") for place in (0, -1)]
        cells = [statistics.mean(lines[place][key] for lines in runs[kind]) for key, place in keys]
        rows.append(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + f" | {num_runs} |")
    return "\n".join(rows)


def main() -> None:
    """Make missing runs, then draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    folder: Path = arguments.runs.resolve()
    make_run("train_reward_model", folder / "rm")
    for seed in arguments.seeds:
        make_run("train", folder / f"model-{seed}", "--seed", str(seed), "--reward.model", str(folder / "rm"))
        make_run("train", folder / f"rule-{seed}", "--seed", str(seed))
    runs = {kind: [read_rl(folder / f"{kind}-{seed}") for seed in arguments.seeds] for kind in KINDS}
    draw(runs)
    table = write_table(json.loads((folder / "rm" / "summary.json").read_text()), runs)
    text = PAGE.read_text()
    pattern = re.escape(MARKS[0]) + r".*?" + re.escape(MARKS[1])
    PAGE.write_text(re.sub(pattern, lambda _: f"{MARKS[0]}\n{table}\n{MARKS[1]}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main()

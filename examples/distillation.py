"""Distil a teacher on the default task, beside GRPO from the same start: accuracies by step, and the signal of each token as a picture.

    python examples/distillation.py --output-dir runs/distillation

The teacher is the demo's own model behind SFT and RL, the student the same model behind SFT alone. `opd` trains the student on the
teacher's log-probs of the tokens that the student sampled, GRPO on the reward of its answers; each from three seeds. A run whose directory
is complete is not run again. About fifteen minutes on an idle CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollouts.data.trajectories import read_records

BAR = 0.9  # accuracy whose step is told
TEACHER = "teacher"


def train(directory: Path, arguments: Sequence[str]) -> None:
    """Run the command in a directory of its own, unless it is complete there."""
    if (directory / "summary.json").exists():
        return
    command = [sys.executable, "-m", "integration.train", *arguments, "--output-dir", str(directory), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def find_last(stage: Path) -> Path:
    """Return the last checkpoint of a stage."""
    return max((stage / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def run_all(output_dir: Path, seeds: int, num_steps: int, size: Sequence[str] = ()) -> None:
    """Train the teacher, then from its SFT checkpoint opd and GRPO, each with 512 answers a step and with 64.

    Args:
        size: further arguments of every run.
    """
    train(output_dir / TEACHER, ["--mode", "sft+rl", *size])
    student, teacher = find_last(output_dir / TEACHER / "sft"), find_last(output_dir / TEACHER / "rl")
    start = ["--mode", "rl", "--model.path", str(student), "--rl.num-steps", str(num_steps)]
    taught = [*start, "--algorithm", "opd", "--teacher.path", str(teacher)]
    for seed in map(str, range(seeds)):
        train(output_dir / f"opd{seed}", [*taught, "--seed", seed, *size])
        train(output_dir / f"single{seed}", [*taught, "--rl.samples-per-prompt", "1", "--seed", seed, *size])
        train(output_dir / f"grpo{seed}", [*start, "--seed", seed, *size])
        train(output_dir / f"small{seed}", [*start, "--rl.prompts-per-step", "8", "--seed", seed, *size])


def read_accuracies(output_dir: Path, name: str) -> list[list[float]]:
    """Return the held-out accuracy before and after each step, of each seed."""
    found: list[list[float]] = []
    for path in sorted(output_dir.glob(f"{name}[0-9]*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([line["eval_accuracy"] for line in lines if "eval_accuracy" in line])
    return found


def find_step(accuracies: Sequence[float]) -> int | None:
    """Return the first step with an accuracy of BAR."""
    return next((step for step, accuracy in enumerate(accuracies) if accuracy >= BAR), None)


def tell(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return a table: for each method its accuracies by seed, and the steps to BAR."""
    lines: list[str] = []
    for label, seeds in curves.items():
        for seed, accuracies in enumerate(seeds):
            steps = find_step(accuracies)
            shown = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
            lines.append(f"{label}, seed {seed}: {shown}; {BAR} after {'no step' if steps is None else f'step {steps}'}")
    return "\n".join(lines)


def find_signal(run: Path) -> tuple[str, list[float]]:
    """Return the longest wrong answer that was recorded in the first step, as text, and the advantage of each of its tokens."""
    records = [record for path in sorted((run / "rl" / "trajectories").glob("*.jsonl")) for record in read_records(path)]
    wrong = [record for record in records if record.sample.reward == 0.0 and record.estimate is not None] or records
    record = max(wrong, key=lambda one: sum(one.sample.loss_mask))
    assert record.estimate is not None and record.estimate.advantages is not None, f"{run} recorded no advantages"
    signal = [a for a, mask in zip(record.estimate.advantages, record.sample.loss_mask, strict=True) if mask > 0]
    return f"{record.sample.prompt}{record.sample.response}", signal


def draw(curves: Mapping[str, Sequence[Sequence[float]]], signals: Mapping[str, tuple[str, list[float]]], path: Path) -> None:
    """Draw the signals of an answer's tokens, and the accuracies by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 1 + len(signals), figsize=(11, 3.2), layout="constrained")
    for axis, (label, (text, signal)) in zip(axes, signals.items(), strict=False):
        response = [*text.partition("=")[2], "end"][: len(signal)]
        axis.bar(range(len(signal)), signal, color=["tab:green" if value > 0 else "tab:red" for value in signal])
        axis.set_xticks(range(len(signal)), response + [""] * (len(signal) - len(response)))
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(f"{label}: {text}", fontsize=9)
        axis.set_ylabel("advantage of the token")
    for label, color in zip(curves, ("tab:blue", "tab:orange", "tab:cyan", "tab:brown"), strict=False):
        for seed, accuracies in enumerate(curves[label]):
            axes[-1].plot(accuracies, color=color, label=label if seed == 0 else None)
    axes[-1].axhline(BAR, color="gray", linestyle=":")
    axes[-1].set_xlabel("step")
    axes[-1].set_ylabel("held-out accuracy")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=6)
    arguments, size = parser.parse_known_args(argv)
    run_all(arguments.output_dir, arguments.seeds, arguments.num_steps, size)
    names = {"opd": "opd", "GRPO": "grpo", "opd, 64 answers a step": "single", "GRPO, 64 answers a step": "small"}
    curves = {label: read_accuracies(arguments.output_dir, name) for label, name in names.items()}
    print(tell(curves))
    signals = {label: find_signal(arguments.output_dir / f"{names[label]}0") for label in ("opd", "GRPO")}
    picture = arguments.output_dir / "distillation.png"
    draw(curves, signals, picture)
    print(f"picture: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

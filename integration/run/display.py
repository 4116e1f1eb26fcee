"""Progress of a run, as a MetricsLogger: one live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from rollouts.errors import make_safe, redact
from rollouts.training.metrics import Value

GRADED = "eval_graded_fraction"
"""Name of a metric: the fraction of held-out rewards that are neither 0 nor 1. In a line that has it, eval_accuracy is a mean reward."""

NAMES = {"sft": "SFT", "rl": "RL ", "dpo": "DPO", "reward_model": "pairs"}
PLAIN_EVERY_S = 5.0


def name_measure(*lines: Mapping[str, object]) -> str:
    """Return the name of the held-out measure: "accuracy" if all rewards are 0 or 1, else "reward".

    Args:
        lines: lines of metrics.
    """
    return "reward" if any(line.get(GRADED) for line in lines) else "accuracy"


def describe_step(metrics: Mapping[str, Value]) -> str:
    """Return the few numbers of a line of metrics that people watch."""
    parts: list[str] = []
    for key, label, form in (
        ("loss", "loss", ".4f"),
        ("reward_mean", "reward", ".3f"),
        ("eval_pair_accuracy", "held-out pairs right", ".3f"),
        ("score_accuracy", "pairs ranked right", ".3f"),
        ("eval_accuracy", f"held-out {name_measure(metrics)}", ".3f")
        if "eval_accuracy" in metrics
        else ("eval_loss", "held-out loss", ".4f"),
        ("staleness_mean", "versions behind", ".2f"),
        ("lr", "lr", ".1e"),
        ("step_s", "s/step", ".2f"),
    ):
        value = metrics.get(key)
        if isinstance(value, int | float):
            parts.append(f"{label} {value:{form}}")
    return "  ".join(parts)


class Progress:
    """Display of each step. On a terminal the line stays in place, with evaluations printed above it. In a pipe it prints a line for each
    evaluation and at most one every few seconds otherwise, without control codes."""

    def __init__(self, total_steps: Mapping[str, int], *, stream: TextIO, clock: Callable[[], float], quiet: bool = False) -> None:
        """
        Args:
            total_steps: number of steps of each stage.
            quiet: show nothing.
        """
        self._totals = dict(total_steps)
        self._clock = clock
        self._quiet = quiet
        # the kind of stream decides, not variables such as FORCE_COLOR: a log file never gets control codes
        self._console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=stream.isatty())
        self._live: RichProgress | None = None
        self._tasks: dict[str, int] = {}
        self._last_line = -PLAIN_EVERY_S

    def say(self, text: str) -> None:
        """Print a line, above the live line if there is one."""
        if not self._quiet:
            self._console.print(make_safe(redact(text)), markup=False)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Show the metrics of a step."""
        if self._quiet:
            return
        stage = str(metrics.get("stage", ""))
        total = self._totals.get(stage, step)
        text = f"{NAMES.get(stage, stage)} {step:>4}/{total}  {describe_step(metrics)}"
        evaluated = "eval_accuracy" in metrics or "eval_loss" in metrics
        if self._console.is_terminal:
            self._show_live(stage, step, total, describe_step(metrics))
            if evaluated:
                self.say(text)
        elif evaluated or step == total or self._clock() - self._last_line >= PLAIN_EVERY_S:
            self._last_line = self._clock()
            self.say(text)

    def _show_live(self, stage: str, step: int, total: int, text: str) -> None:
        if self._live is None:
            columns = (
                "{task.description}",
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._live = RichProgress(*columns, console=self._console, transient=True, get_time=self._clock)
            self._live.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._live.add_task(NAMES.get(stage, stage), total=total, text="")
        self._live.update(self._tasks[stage], completed=step, text=text)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._tasks.clear()

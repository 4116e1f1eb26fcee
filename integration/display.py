"""Progress while a run goes on: one live line on a terminal, plain lines in a pipe. It is a MetricsLogger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from rollouts.metrics import Value

NAMES = {"sft": "SFT", "rl": "RL ", "reward_model": "pairs"}
PLAIN_EVERY_S = 5.0


def describe_step(metrics: Mapping[str, Value]) -> str:
    """The few numbers of a line that people watch."""
    parts: list[str] = []
    for key, label, form in (
        ("loss", "loss", ".4f"),
        ("reward_mean", "reward", ".3f"),
        ("score_accuracy", "pairs ranked right", ".3f"),
        ("eval_accuracy", "held-out accuracy", ".3f"),
        ("staleness_mean", "versions behind", ".2f"),
        ("lr", "lr", ".1e"),
        ("step_s", "s/step", ".2f"),
    ):
        value = metrics.get(key)
        if isinstance(value, int | float):
            parts.append(f"{label} {value:{form}}")
    return "  ".join(parts)


class Progress:
    """Shows each step. On a terminal the line stays in place and evaluations are printed above it; in a pipe a line is printed for each
    evaluation and at most one every few seconds besides, without control codes."""

    def __init__(self, total_steps: Mapping[str, int], *, stream: TextIO, clock: Callable[[], float], quiet: bool = False) -> None:
        """
        Args:
            total_steps: of each stage.
            quiet: show nothing.
        """
        self._totals = dict(total_steps)
        self._clock = clock
        self._quiet = quiet
        # what the stream is decides, not variables such as FORCE_COLOR: a log file never gets control codes
        self._console = Console(file=stream, highlight=False, soft_wrap=True, force_terminal=stream.isatty())
        self._live: RichProgress | None = None
        self._tasks: dict[str, int] = {}
        self._last_line = -PLAIN_EVERY_S

    def say(self, text: str) -> None:
        """A line for people, above the live line where there is one."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Show a step."""
        if self._quiet:
            return
        stage = str(metrics.get("stage", ""))
        total = self._totals.get(stage, step)
        text = f"{NAMES.get(stage, stage)} {step:>4}/{total}  {describe_step(metrics)}"
        evaluated = "eval_accuracy" in metrics
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
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._tasks.clear()

"""A profile of some steps of each stage: a trace in Chrome's format, and a table of where the time of a step went.

    python -m integration.train --profile.steps 3

writes profile/<stage>/trace.json, for chrome://tracing or ui.perfetto.dev, and profile/<stage>/table.txt into the run directory.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from rollouts.checks import parse_json
from rollouts.output_files import explain_writes, replace_file

if TYPE_CHECKING:
    from integration.settings.sections.records import ProfileSection

PHASES = ("generate_s", "trainer_wait_s", "train_s", "evaluate_wait_s", "checkpoint_s", "sync_s", "evaluate_s")
"""Durations of a metrics line in the order in which a step spends them; step_s is their sum without evaluate_s."""

CALLS = ("forward", "forward_backward", "optim_step", "get_weights", "stage_checkpoint", "save_checkpoint")
"""Calls of a backend that are spans of the trace, in the thread that computes."""

NUM_OPERATORS = 20
TRACE_FILE, TABLE_FILE = "trace.json", "table.txt"


@dataclass(frozen=True)
class Span:
    """A named interval of a thread, in nanoseconds since the epoch."""

    name: str
    thread: str
    start_ns: int
    end_ns: int

    def event(self, base_ns: int) -> dict[str, Any]:
        """Return the span as a complete event of a trace whose times count from base_ns."""
        start, length = (self.start_ns - base_ns) / 1e3, (self.end_ns - self.start_ns) / 1e3
        return {"ph": "X", "cat": "rollouts", "name": self.name, "pid": "rollouts", "tid": self.thread, "ts": start, "dur": length}


def phase_spans(metrics: Mapping[str, Any], end_ns: int) -> list[Span]:
    """Return the phases of a step whose metrics were logged at end_ns: one after another, the last one ends then."""
    phases = [(name, float(metrics[name])) for name in PHASES if name in metrics]
    if not any(name != "evaluate_s" for name, _ in phases) and "step_s" in metrics:  # a step of SFT has one phase
        phases.insert(0, ("train_s", float(metrics["step_s"])))
    spans: list[Span] = []
    for name, seconds in reversed(phases):
        start_ns = end_ns - round(seconds * 1e9)
        spans.append(Span(name.removesuffix("_s"), "steps", start_ns, end_ns))
        end_ns = start_ns
    return spans[::-1]


class RunProfile:
    """A logger that profiles some steps of each stage of a run: those between two lines of metrics."""

    def __init__(self, settings: ProfileSection, directory: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._settings, self._directory, self._clock_ns = settings, directory, clock_ns
        self._stage, self._num_lines = "", 0
        self._spans: list[Span] = []
        self._lines: list[Mapping[str, Any]] = []
        self._profiler: profile | None = None

    def watch(self, backend: Any, label: str) -> None:
        """Record the calls of a backend of this run from now on."""
        for name in CALLS if self._settings.steps else ():
            if hasattr(backend, name):
                setattr(backend, name, self._timed(getattr(backend, name), f"{label}: {name}"))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = self._clock_ns()
            try:
                return call(*args, **kwargs)
            finally:
                if self._profiler is not None:
                    self._spans.append(Span(name, "calls of backends", started, self._clock_ns()))

        return run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Count the step; begin after the steps to skip, and write after the last one to profile."""
        if step == 0 or not self._settings.steps:
            return
        if metrics.get("stage") != self._stage:
            self.finish()
            self._stage, self._num_lines = str(metrics.get("stage")), 0
        self._num_lines += 1
        if self._profiler is not None:
            self._lines.append(metrics)
            self._spans += phase_spans(metrics, self._clock_ns())
            if len(self._lines) == self._settings.steps:
                self.finish()
        elif self._num_lines == self._settings.skip:
            self._begin()

    def _begin(self) -> None:
        """Record operators of all threads."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._spans, self._lines = [], []
        self._profiler = profile(activities=activities, experimental_config=all_threads)
        self._profiler.__enter__()

    def finish(self) -> None:
        """End the profile, if it is on, and write it. Raises OutputError."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.__exit__(None, None, None)
        if not self._lines:
            return
        folder = self._directory / "profile" / self._stage
        with explain_writes(folder):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / TRACE_FILE))
            trace = parse_json((folder / TRACE_FILE).read_text())
        base_ns = int(trace.get("baseTimeNanoseconds", 0))
        trace["traceEvents"] += [span.event(base_ns) for span in self._spans]
        replace_file(folder / TRACE_FILE, json.dumps(trace))
        operators = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_OPERATORS)
        replace_file(folder / TABLE_FILE, describe_steps(self._lines, self._spans) + "\n" + operators + "\n")


def describe_steps(lines: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> str:
    """Return a table of the phases of the steps and of the calls within them: seconds a step, and share of the step."""
    total = sum(float(line["step_s"]) + float(line.get("evaluate_s", 0.0)) for line in lines)
    seconds: dict[tuple[bool, str], float] = {}
    for span in spans:
        key = (span.thread != "steps", span.name)
        seconds[key] = seconds.get(key, 0.0) + (span.end_ns - span.start_ns) / 1e9
    rows = [f"{len(lines)} steps of {total / len(lines):.4f} s, profiled: the profiler itself takes time for each operator", ""]
    rows += [f"  {'phase, or call within one':<44}{'s a step':>12}{'share':>9}"]
    for (is_call, name), spent in sorted(seconds.items(), key=lambda item: (item[0][0], -item[1])):
        rows.append(f"  {'  ' * is_call + name:<44}{spent / len(lines):>12.4f}{spent / total:>9.1%}")
    return "\n".join(rows) + "\n"

"""The results of a simulated run: figures and the limiting stage, as text and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from integration.simulate.engine import SimulatedFleet
from integration.simulate.trainer import SimulatedBackend
from rollouts.types import RolloutBatch

_BUSY = 0.9  # busy fraction from which a stage counts as the limit of a run
_FULL = 0.95  # fraction of busy slots from which engines count as full


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of a run at a moment of virtual time."""

    time_s: float
    busy_slots: float  # fraction of all slots
    running: int  # groups under generation
    trainer_busy: bool
    paused: bool  # engines pause for a weight sync


@dataclass(frozen=True, kw_only=True)
class Step:
    """A batch given to the trainer."""

    time_s: float
    num_groups: int
    num_tokens: float
    ages: Mapping[int, float]  # staleness in weight versions -> tokens


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of a run, over all its virtual time."""

    virtual_s: float
    num_steps: int
    samples_per_s: float  # trained responses per second
    tokens_per_s: float  # trained tokens per second
    generated_tokens_per_s: float
    bound_samples_per_s: float  # throughput of the slower stage alone, weight syncs included: full slots, or a trainer that never waits
    bound_fraction: float  # samples_per_s / bound_samples_per_s
    engine_utilization: float  # fraction of slot time
    trainer_utilization: float  # fraction of time
    sync_fraction: float  # fraction of time that engines pause for new weights
    staleness_mean: float  # mean staleness of trained tokens, in weight versions
    staleness_max: int  # maximum staleness of trained tokens, in weight versions
    staleness: Mapping[str, float]  # staleness in weight versions -> fraction of trained tokens
    wasted_fraction: float  # fraction of generated tokens never trained on: too old, failed, refused, or started over
    length_mean: float  # mean tokens of trained responses
    length_bias: float  # relative difference of length_mean from the mean of started responses; below 0 = long responses are lost
    num_groups_begun_anew: int  # groups that started over
    num_failures: int  # failed groups
    limits: Mapping[str, float]  # cause of empty slots -> fraction of moments; "engines" = no empty slots
    limited_by: str
    moments: Sequence[Moment] = field(default=(), repr=False)
    steps: Sequence[Step] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values, without moments and steps; None for undefined figures of a run without steps."""
        figures = {name: value for name, value in asdict(self).items() if name not in ("moments", "steps")}
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in figures.items()}


class Recorder:
    """Recorder of moments and steps during a run."""

    def __init__(self, fleet: SimulatedFleet, backend: SimulatedBackend, *, every_s: float, max_running: int, is_async: bool) -> None:
        """
        Args:
            every_s: virtual seconds between two moments.
            max_running: maximum concurrent groups.
            is_async: whether generation runs during training.
        """
        self.moments: list[Moment] = []
        self.steps: list[Step] = []
        self._fleet, self._backend = fleet, backend
        self._every_s, self._max_running, self._is_async = every_s, max_running, is_async
        self._limits: Counter[str] = Counter()

    async def run(self) -> None:
        """Record a moment at even intervals until cancelled."""
        num_slots = self._fleet.section.engines * self._fleet.section.slots
        while True:
            await trio.sleep(self._every_s)
            await self._fleet.settle()
            moment = Moment(
                time_s=trio.current_time(),
                busy_slots=self._fleet.count_busy_slots() / num_slots,
                running=self._fleet.num_running,
                trainer_busy=self._backend.idle_since > trio.current_time(),
                paused=self._fleet.is_paused,
            )
            self.moments.append(moment)
            self._limits[self._find_limit(moment)] += 1

    def _find_limit(self, moment: Moment) -> str:
        if moment.paused:
            return "weight sync"
        if moment.busy_slots >= _FULL:
            return "engines"
        if not self._is_async:
            return "engines wait for the trainer" if moment.trainer_busy else "stragglers of the batch"
        return "max_concurrent_rollouts" if moment.running >= self._max_running else "max_staleness"

    def take(self, number: int, rollouts: RolloutBatch) -> None:
        """Record the rollouts of step `number`, before they are trained on."""
        ages: dict[int, float] = {}
        for sample in rollouts.samples:
            for version, num_tokens in zip(sample.weight_versions or (), sample.loss_mask, strict=True):
                if num_tokens > 0:
                    age = self._fleet.version - version
                    ages[age] = ages.get(age, 0.0) + num_tokens
            self._fleet.forget(sample.group_index)
        total = sum(ages.values())
        self.steps.append(
            Step(time_s=trio.current_time(), num_groups=len(rollouts.samples), num_tokens=total, ages=dict(sorted(ages.items())))
        )

    def report(self, *, samples_per_prompt: int, bound_samples_per_s: float, oldest_kept: int) -> Report:
        """Return the figures so far.

        Args:
            oldest_kept: oldest weight version of tokens that are still trained on.
        """
        fleet, now = self._fleet, trio.current_time()
        section = fleet.section
        ages: dict[int, float] = {}
        for step in self.steps:
            for age, num_tokens in step.ages.items():
                ages[age] = ages.get(age, 0.0) + num_tokens
        trained = sum(ages.values())
        num_samples = samples_per_prompt * sum(step.num_groups for step in self.steps)
        generated = fleet.active_seconds() * section.token_rate
        kept = trained + fleet.count_resident_tokens(oldest_kept)
        engines = fleet.active_seconds() / (now * section.engines * section.slots)
        trainer = (self._backend.busy_s - max(0.0, self._backend.idle_since - now)) / now
        length_mean = trained / num_samples if num_samples else math.nan
        limits = {name: number / len(self.moments) for name, number in self._limits.most_common()}
        return Report(
            virtual_s=now,
            num_steps=len(self.steps),
            samples_per_s=num_samples / now,
            tokens_per_s=trained / now,
            generated_tokens_per_s=generated / now,
            bound_samples_per_s=bound_samples_per_s,
            bound_fraction=num_samples / now / bound_samples_per_s,
            engine_utilization=engines,
            trainer_utilization=trainer,
            sync_fraction=fleet.paused_s / now,
            staleness_mean=sum(age * tokens for age, tokens in ages.items()) / trained if trained else math.nan,
            staleness_max=max(ages, default=0),
            staleness={str(age): tokens / trained for age, tokens in sorted(ages.items())},
            wasted_fraction=max(0.0, 1 - kept / generated) if generated else 0.0,
            length_mean=length_mean,
            length_bias=length_mean / fleet.mean_length_begun - 1,
            num_groups_begun_anew=fleet.num_begun_anew,
            num_failures=fleet.num_failures,
            limits=limits,
            limited_by=_name_limit(trainer, engines, limits),
            moments=tuple(self.moments),
            steps=tuple(self.steps),
        )


def _name_limit(trainer: float, engines: float, limits: Mapping[str, float]) -> str:
    if trainer >= _BUSY:
        return "trainer"
    if engines >= _BUSY:
        return "engines"
    return next(iter(limits), "nothing was measured")


def describe_report(report: Report, title: str) -> str:
    """Return the printed report."""
    ages = "  ".join(f"{age}: {fraction:.1%}" for age, fraction in report.staleness.items())
    limits = ", ".join(f"{name} {fraction:.0%}" for name, fraction in report.limits.items())
    rows = {
        "steps": f"{report.num_steps:,} in {report.virtual_s / 3600:.2f} virtual hours",
        "throughput": f"{report.samples_per_s:,.2f} samples/s, {report.tokens_per_s:,.0f} tokens/s trained on",
        "of the bound": f"{report.bound_fraction:.3f} of {report.bound_samples_per_s:,.2f} samples/s, the slower stage by itself",
        "engines busy": f"{report.engine_utilization:.1%} of the slots; {report.sync_fraction:.1%} of the time stood still for weights",
        "trainer busy": f"{report.trainer_utilization:.1%}",
        "staleness": f"mean {report.staleness_mean:.2f}, max {report.staleness_max} versions ({ages})",
        "wasted": f"{report.wasted_fraction:.1%} of generated tokens; {report.num_groups_begun_anew:,} groups begun anew, "
        f"{report.num_failures:,} failures",
        "length": f"mean {report.length_mean:,.0f} tokens, {report.length_bias:+.1%} against what was begun",
        "limited by": f"{report.limited_by} (moments: {limits})",
    }
    return "\n".join([title, *(f"  {name:<14} {text}" for name, text in rows.items())])


def draw_report(report: Report, path: Path, title: str) -> bool:
    """Draw slots and trainer over time, staleness of each batch, and overall staleness. Returns False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    busy, batches, ages = figure.subplots(1, 3, width_ratios=(2, 1.4, 1))
    hours = [moment.time_s / 3600 for moment in report.moments]
    busy.plot(hours, [moment.busy_slots for moment in report.moments], color="tab:blue", linewidth=1, label="slots busy")
    busy.axhline(report.engine_utilization, color="tab:blue", linestyle="--", linewidth=1)
    busy.axhline(report.trainer_utilization, color="tab:orange", linestyle="--", linewidth=1, label="trainer busy, mean")
    busy.set_ylim(0, 1.05)
    busy.set_xlabel("virtual hours")
    busy.set_title(f"{report.samples_per_s:,.1f} samples/s, limited by {report.limited_by}", fontsize=10)
    busy.legend(loc="lower right", fontsize=8)
    times = [step.time_s / 3600 for step in report.steps]
    means = [sum(age * tokens for age, tokens in step.ages.items()) / max(step.num_tokens, 1.0) for step in report.steps]
    batches.plot(times, means, color="tab:green", linewidth=1, label="mean")
    batches.plot(times, [max(step.ages, default=0) for step in report.steps], color="0.6", linewidth=1, label="oldest token")
    batches.set_xlabel("virtual hours")
    batches.set_title("staleness of each batch, versions", fontsize=10)
    batches.legend(fontsize=8)
    ages.bar(list(report.staleness), list(report.staleness.values()), color="tab:green")
    ages.set_xlabel("versions behind")
    ages.set_title("trained tokens", fontsize=10)
    for axis in (busy, batches, ages):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    return True

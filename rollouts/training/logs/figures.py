"""Figures of runs, from the lines of metrics.jsonl: for curves.png and for notebooks. Need matplotlib (the extra `plots`).

from rollouts import draw_run, read_metrics

draw_run(read_metrics(Path("runs/a/metrics.jsonl")))      # in a notebook the figure is shown
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollouts.errors import ConfigError

Line = Mapping[str, Any]
Point = tuple[float, float]

_BLUE, _ORANGE = "tab:blue", "tab:orange"
_MOST_COLUMNS = 3
_STAGES: Mapping[str, str] = MappingProxyType({"sft": "SFT", "rl": "RL", "dpo": "preferences", "reward_model": "reward model"})


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve of a panel."""

    label: str
    points: Sequence[Point]  # (step, value), finite
    color: str
    style: str = "-"


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One set of axes: curves over the steps of a stage, or of both stages one after the other."""

    title: str
    y: str
    curves: Sequence[Curve]
    x: str = "step"
    is_share: bool = False  # values are shares: the axis is [0, 1]
    ends: tuple[int, int] | None = None  # last steps of two stages that share the axis


def draw_run(lines: Sequence[Line]) -> Any:
    """Draw the curves of a run of any kind: SFT, RL, both, asynchronous RL, a reward model, or evaluations alone.

    Args:
        lines: lines of metrics; those of several stages have the key stage. Values that are no finite numbers leave a gap.

    Returns: a matplotlib Figure with a panel for each quantity that the lines have: losses, accuracy or reward on held-out problems, reward
        of rollouts, entropy, lengths, KL, staleness. With nothing to draw, one panel says so.
    Raises: ConfigError without matplotlib.
    """
    panels = [panel for panel in _choose_panels(lines) if any(curve.points for curve in panel.curves)]
    columns = min(_MOST_COLUMNS, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = _create_figure(figsize=(4.4 * columns, 3.9 * rows))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if not panels:
        axes[0].text(0.5, 0.5, "the run has logged nothing to draw yet", ha="center", va="center", color="0.4")
    return figure


def draw_comparison(runs: Mapping[str, Sequence[Line]], key: str, stage: str | None = None) -> Any:
    """Draw one metric of several runs.

    Args:
        runs: lines of metrics of each run, by the name for its legend.
        key: name of the metric, for example reward_mean or eval_loss.
        stage: sft, rl or reward_model; None = lines of all stages.

    Returns: a matplotlib Figure.
    Raises: ConfigError without matplotlib, or if no run has such a metric.
    """
    curves = [
        Curve(label=name, points=_find_points([line for line in lines if stage in (None, line.get("stage"))], key), color=f"C{i % 10}")
        for i, (name, lines) in enumerate(runs.items())
    ]
    if not any(curve.points for curve in curves):
        known = sorted({name for lines in runs.values() for line in lines for name, value in line.items() if _is_number(value)})
        raise ConfigError(f"no run has a number named {key!r} in stage {stage or 'any'}; there are {', '.join(known) or 'none'}")
    figure = _create_figure(figsize=(6.4, 4.4))
    _draw_panel(figure.subplots(), _Panel(title=key, y=key, curves=curves))
    return figure


def _create_figure(*, figsize: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("pictures need the package matplotlib: pip install 'rollouts-rl[plots]'") from error
    figure = Figure(figsize=figsize, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _choose_panels(lines: Sequence[Line]) -> list[_Panel]:
    stages = {name: [line for line in lines if _find_stage(line) == name] for name in _STAGES}
    sft, rl, pairs, preferences = stages["sft"], stages["rl"], stages["reward_model"], stages["dpo"]
    panels = [
        _Panel(title="SFT loss", y="nats per token", x="SFT step", curves=_losses(sft)),
        _Panel(title="loss of preferences", y="mean over pairs", x="step", curves=_losses(preferences)),
        _Panel(
            title="pairs with the larger reward for the chosen answer",
            y="fraction",
            is_share=True,
            curves=[
                Curve(label="training", points=_find_points(preferences, "reward_accuracy"), color=_BLUE),
                Curve(label="held out", points=_find_points(preferences, "eval_pair_accuracy"), color=_ORANGE, style="--"),
            ],
        ),
        _Panel(title="loss of the reward model", y="nats per pair", curves=_losses(pairs)),
        _Panel(
            title="pairs ranked right",
            y="fraction",
            is_share=True,
            curves=[
                Curve(label="training", points=_find_points(pairs, "score_accuracy"), color=_BLUE),
                Curve(label="held out", points=_find_points(pairs, "eval_accuracy"), color=_ORANGE, style="--"),
            ],
        ),
        _create_heldout_panel(sft, rl),
        _Panel(title="mean reward of rollouts", y="reward", x="RL step", curves=_curves(rl, reward_mean="", shaped_reward_mean="shaped")),
    ]
    spread = _curves(rl, entropy="")
    panels.append(_Panel(title="entropy of the policy", y="nats per token", x="RL step", curves=spread))
    lengths = _curves(rl, response_length_mean="mean", response_length_max="longest")
    panels.append(_Panel(title="length of responses", y="tokens", x="RL step", curves=lengths))
    kls = _curves(rl, mismatch_kl="to the rollouts", reference_kl="to the reference")
    panels.append(_Panel(title="KL of the policy", y="nats per token", x="RL step", curves=kls))
    if any(_is_number(line.get("staleness_max")) and line["staleness_max"] > 0 for line in rl):
        stale = _curves(rl, staleness_mean="mean", staleness_max="oldest token")
        panels.append(_Panel(title="age of rollouts", y="weight versions", x="RL step", curves=stale))
    return panels


def _find_stage(line: Line) -> str:
    """Return the stage of a line; without one, guessed from its metrics."""
    named = line.get("stage")
    if named in _STAGES:
        return str(named)
    return "rl" if "reward_mean" in line else "reward_model" if "score_accuracy" in line else "sft"


def _losses(lines: Sequence[Line]) -> list[Curve]:
    return [
        Curve(label="training", points=_find_points(lines, "loss"), color=_BLUE),
        Curve(label="held out", points=_find_points(lines, "eval_loss"), color=_ORANGE, style="--"),
    ]


def _curves(lines: Sequence[Line], **labels: str) -> list[Curve]:
    looks = ((_ORANGE, "-"), (_BLUE, "--"))
    named = zip(labels.items(), looks, strict=False)
    return [Curve(label=label, points=_find_points(lines, key), color=color, style=style) for (key, label), (color, style) in named]


def _create_heldout_panel(sft: Sequence[Line], rl: Sequence[Line]) -> _Panel:
    """Draw both stages on one axis. SFT takes many small steps and RL few large ones: each gets half of the width."""
    graded = any(_is_number(line.get("eval_graded_fraction")) and line["eval_graded_fraction"] > 0 for line in (*sft, *rl))
    end_of_sft, end_of_rl = (max((int(line["step"]) for line in lines), default=0) for lines in (sft, rl))
    scale = end_of_sft / max(1, end_of_rl) if end_of_sft and end_of_rl else 1.0
    curves: list[Curve] = []
    for key, label, style in (("eval_accuracy", "greedy", "-"), ("eval_accuracy_sampled", "sampled", "--")):
        first = _find_points(sft, key)
        second = [(end_of_sft + step * scale, value) for step, value in _find_points(rl, key)]
        if first and second:
            second = [first[-1], *second]
        curves += [
            Curve(label=f"SFT, {label}", points=first, color=_BLUE, style=style),
            Curve(label=f"RL, {label}", points=second, color=_ORANGE, style=style),
        ]
    title, y = ("mean reward on held-out problems", "reward") if graded else ("accuracy on held-out problems", "fraction right")
    return _Panel(title=title, y=y, curves=curves, is_share=not graded, ends=(end_of_sft, end_of_rl))


def _find_points(lines: Iterable[Line], key: str) -> list[Point]:
    return [(float(line["step"]), float(line[key])) for line in lines if _is_number(line.get(key))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _draw_panel(axis: Any, panel: _Panel) -> None:
    drawn = [curve for curve in panel.curves if curve.points]
    for curve in drawn:
        few = len(curve.points) <= 40
        axis.plot(
            *zip(*curve.points, strict=True),
            curve.style,
            color=curve.color,
            linewidth=1.5,
            marker="o" if few else None,
            markersize=3,
            label=curve.label or None,
        )
    labels = [curve.label for curve in drawn if curve.label]
    if labels:  # above the axes, so that it hides no curve at any level
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(labels), 2), fontsize=8, frameon=False, borderaxespad=0.2)
    pad = 6 + 13 * math.ceil(len(labels) / 2)
    axis.set_title(panel.title, fontsize=11, pad=pad)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.grid(True, color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.03, y=0.08)
    axis.ticklabel_format(axis="y", useOffset=False)
    if panel.is_share and all(0 <= y <= 1 for curve in drawn for _, y in curve.points):
        axis.set_ylim(-0.02, 1.02)
    if panel.ends is None:
        axis.xaxis.get_major_locator().set_params(integer=True)  # steps are whole numbers
    else:
        _label_stages(axis, *panel.ends)


def _label_stages(axis: Any, sft_steps: int, rl_steps: int) -> None:
    """Set ticks that count the steps of each stage."""
    scale = sft_steps / max(1, rl_steps) if sft_steps and rl_steps else 1.0
    ticks: list[tuple[float, str]] = []
    if sft_steps:
        ticks += [(0, "0"), (sft_steps / 2, str(sft_steps // 2)), (sft_steps, f"SFT {sft_steps}")]
    if rl_steps:
        if sft_steps:
            axis.axvline(sft_steps, color="0.6", linewidth=1)
        else:
            ticks.append((0, "0"))
        middle = rl_steps // 2
        ticks += [(sft_steps + middle * scale, str(middle))] if middle else []
        ticks.append((sft_steps + rl_steps * scale, f"RL {rl_steps}"))
    axis.set_xticks([position for position, _ in ticks], [label for _, label in ticks])

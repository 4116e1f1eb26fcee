"""Generate the figures and tables of docs/scaling.md with integration.simulate.

    python tools/docs/generate_scaling.py [engines staleness partial] [--hours 2] [--jobs 2]

Each run is `python -m integration.simulate` with the flags that a table shows. Pictures go to docs/, tables in Markdown to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))

from integration.simulate.run import simulate
from integration.simulate.settings import Simulation
from rollouts.errors import RolloutsError

DOCS = Path(__file__).parents[2] / "docs"
Figures = Mapping[str, Any]

COMMON = "--mean-tokens 2000"  # flags of all runs, which a run's own flags override
ENGINES = (2, 4, 6, 8, 12, 16)
LOOPS = {"synchronous": "--synchronous", "max_staleness 1": "--max-staleness 1", "max_staleness 4": "--max-staleness 4"}
STALENESS = (0, 1, 2, 4, 8)
TAILS = {"lognormal 0.8": "--sigma 0.8", "lognormal 0.3": "--sigma 0.3"}
ORDERS = {"finished": "--order finished", "submitted": "--order submitted"}
LENGTHS = (500, 2000, 8000)
IN_FLIGHT = {
    "synchronous": "--synchronous",
    "synchronous, 1.5 x, anew": "--synchronous --over-sampling-factor 1.5 --no-keep-partial",
    "synchronous, 1.5 x, partial": "--synchronous --over-sampling-factor 1.5",
    "interrupt, anew": "--max-staleness 4 --in-flight interrupt --no-keep-partial",
    "interrupt, partial": "--max-staleness 4 --in-flight interrupt",
    "continue": "--max-staleness 4",
    "continue, KV cache kept": "--max-staleness 4 --kv-cache keep",
}


def run(flags: str) -> Figures | str:
    """Return the figures of a run, or the reason of its end."""
    try:
        return simulate(tyro.cli(Simulation, args=f"{COMMON} {flags}".split())).to_dict()
    except RolloutsError as error:
        return str(error)


def name_runs() -> dict[str, dict[tuple[str, ...], str]]:
    """Return the flags of each run, by figure and position."""
    return {
        "engines": {
            (loop, str(engines)): f"--engines {engines} --batch-size 64 {flags}" for loop, flags in LOOPS.items() for engines in ENGINES
        },
        "staleness": {
            (tail, order, str(bound)): f"--max-staleness {bound} {of_order} {of_tail}"
            for tail, of_tail in TAILS.items()
            for order, of_order in ORDERS.items()
            for bound in STALENESS
        },
        "partial": {
            (how, str(length)): f"--batch-size 64 --mean-tokens {length} --max-tokens {16 * length} {flags}"
            for how, flags in IN_FLIGHT.items()
            for length in LENGTHS
        },
    }


def print_rows(runs: Mapping[tuple[str, ...], Figures | str], flags: Mapping[tuple[str, ...], str]) -> None:
    """Print a Markdown table with a row for each run."""
    print("| flags | samples/s | of the bound | slots busy | trainer busy | staleness | wasted | length bias | limited by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for place, figures in runs.items():
        if isinstance(figures, str):
            print(f"| `{flags[place]}` | ends: {figures} |")
            continue
        cells = [
            f"{figures['samples_per_s']:.2f}",
            f"{figures['bound_fraction']:.2f}",
            f"{figures['engine_utilization']:.0%}",
            f"{figures['trainer_utilization']:.0%}",
            f"{figures['staleness_mean']:.2f}",
            f"{figures['wasted_fraction']:.1%}",
            f"{figures['length_bias']:+.1%}",
            figures["limited_by"],
        ]
        print(f"| `{flags[place]}` | {' | '.join(cells)} |")
    print(flush=True)


def select(runs: Mapping[tuple[str, ...], Figures | str], first: tuple[str, ...], key: str) -> list[float]:
    """Return the values of a curve; NaN for runs that ended early."""
    found = [figures for place, figures in runs.items() if place[: len(first)] == first]
    return [float("nan") if isinstance(figures, str) else figures[key] for figures in found]


def draw_engines(axes: Any, runs: Mapping[tuple[str, ...], Figures | str]) -> None:
    """Draw throughput over the number of engines."""
    throughput, busy, trainer = axes
    for loop in LOOPS:
        throughput.plot(ENGINES, select(runs, (loop,), "samples_per_s"), marker="o", markersize=3, label=loop)
        busy.plot(ENGINES, select(runs, (loop,), "engine_utilization"), marker="o", markersize=3)
        trainer.plot(ENGINES, select(runs, (loop,), "trainer_utilization"), marker="o", markersize=3)
    bound = select(runs, (next(iter(LOOPS)),), "bound_samples_per_s")
    throughput.plot(ENGINES, bound, color="0.6", linestyle="--", label="the slower stage by itself")
    for axis, title in zip(axes, ("samples per second", "slots busy", "trainer busy"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("engines for one trainer")


def draw_staleness(axes: Any, runs: Mapping[tuple[str, ...], Figures | str]) -> None:
    """Draw throughput and costs over the bound on staleness."""
    keys = {
        "bound_fraction": "of the slower stage by itself",
        "wasted_fraction": "generated for nothing",
        "staleness_mean": "mean staleness",
    }
    for number, tail in enumerate(TAILS):
        for order, style in zip(ORDERS, ("-", ":"), strict=True):
            for axis, key in zip(axes, keys, strict=True):
                values = select(runs, (tail, order), key)
                axis.plot(STALENESS, values, style, color=f"C{number}", marker="o", markersize=3, label=f"{tail}, {order}")
    for axis, title in zip(axes, keys.values(), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("max_staleness")


def draw_partial(axes: Any, runs: Mapping[tuple[str, ...], Figures | str]) -> None:
    """Draw the effect of keeping unfinished responses, over their length."""
    keys = {"bound_fraction": "of the slower stage by itself", "wasted_fraction": "generated for nothing", "length_bias": "length bias"}
    for how in IN_FLIGHT:
        for axis, key in zip(axes, keys, strict=True):
            axis.plot(LENGTHS, select(runs, (how,), key), marker="o", markersize=3, label=how)
    for axis, title in zip(axes, keys.values(), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log")
        axis.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
        axis.minorticks_off()
        axis.set_xlabel("mean tokens of a response")


DRAW: Mapping[str, Callable[[Any, Any], None]] = {"engines": draw_engines, "staleness": draw_staleness, "partial": draw_partial}


def draw(name: str, runs: Mapping[tuple[str, ...], Figures | str]) -> None:
    """Write docs/scaling-NAME.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    DRAW[name](axes, runs)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(DOCS / f"scaling-{name}.png", dpi=100)


def main() -> None:
    """Parse arguments, simulate, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(DRAW), help="of the figures")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for name in arguments.names:
            flags = name_runs()[name]
            results = pool.map(run, [f"{of_run} --hours {arguments.hours:g}" for of_run in flags.values()])
            runs = dict(zip(flags, results, strict=True))
            draw(name, runs)
            print(f"{name}, --hours {arguments.hours:g}\n")
            print_rows(runs, flags)


if __name__ == "__main__":
    main()

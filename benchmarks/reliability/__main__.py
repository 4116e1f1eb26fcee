"""Try every promise of docs/reliability.md, each experiment in a process of its own.

    python -m benchmarks.reliability --short|--full [--only E4 ...] [--seed N] [--json FILE] [--share X]

Prints one JSON object an experiment: `experiment`, `promise`, `bar`, `size`, `measured`, `control` (the naive variant, its figures, and
whether it misses the bar, as it must) and `met`, which is true if the bar is met and the naive variant misses it. `met` is null where an
experiment was `skipped`, which says what it needs, or ended in an `error`. --short takes some minutes of one core; --full writes the rows
of its experiments into the table of the page, too. Exit status: 1 if a bar is missed or an experiment ended in an error; those of time and
memory do not count in a short run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.reliability.experiment import Amount, Experiment, Skipped
from benchmarks.reliability.page import PAGE, write_rows
from benchmarks.reliability.table import EXPERIMENTS

LIMIT_S = {"short": 300, "full": 7200}


def measure_here(experiment: Experiment, amount: Amount) -> dict[str, Any]:
    """Try an experiment in this process. Returns the fields of its outcome, or the reason to skip it."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # planted faults are reported, each in a warning
    try:
        return asdict(experiment.attempt(amount))
    except Skipped as reason:
        return {"skipped": str(reason)}
    finally:
        logging.disable(logging.NOTSET)


def measure_in_process_of_its_own(experiment: Experiment, work: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Try an experiment in a new process, which is killed with all of its own where it takes too long."""
    command = [sys.executable, "-m", "benchmarks.reliability", f"--{work}", "--seed", str(arguments.seed), "--share", str(arguments.share)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    command += ["--measure", experiment.name, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        out, error = process.communicate(timeout=LIMIT_S[work])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"took more than {LIMIT_S[work]} s"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        if process.returncode == 0:
            return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        pass
    print(error, file=sys.stderr)
    return {"error": (error.strip().splitlines() or [f"ended with status {process.returncode}"])[-1]}


def spent_by_children() -> float:
    """Return the processor seconds of all ended processes of experiments."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(work: str, chosen: Sequence[Experiment], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Try experiments in turn, and print each when it is done."""
    found: list[dict[str, Any]] = []
    for turn, experiment in enumerate(chosen, 1):
        print(f"{turn}/{len(chosen)} {experiment.name}: {experiment.promise}", file=sys.stderr, flush=True)
        started, spent = time.monotonic(), spent_by_children()
        found.append(experiment.describe(measure_in_process_of_its_own(experiment, work, arguments)))
        wall, processor = time.monotonic() - started, spent_by_children() - spent
        print(f"  {wall:.0f} s, {processor:.0f} s of processors", file=sys.stderr, flush=True)
        print(json.dumps(found[-1]), flush=True)
    return found


def is_failure(result: Mapping[str, Any], work: str) -> bool:
    """Whether a result makes the exit status 1."""
    experiment = next(one for one in EXPERIMENTS if one.name == result["experiment"])
    return "error" in result or (result["met"] is False and not (work == "short" and experiment.measures_time))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments."""
    names = [experiment.name for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    amount = parser.add_mutually_exclusive_group(required=True)
    for name, told in (("short", "some of each, some minutes in all"), ("full", "all of each, and write the page")):
        amount.add_argument(f"--{name}", dest="work", action="store_const", const=name, help=told)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help=f"experiments: {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")
    parser.add_argument(
        "--share", type=float, default=1.0, metavar="X", help="fraction of the counts of a full run, in (0, 1] (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the objects as a list")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not 0 < arguments.share <= 1:
        parser.error(f"--share is {arguments.share}, expected a fraction above 0 and at most 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments. Returns the exit status."""
    arguments = parse_arguments(argv)
    if arguments.measure is not None:
        name, folder = arguments.measure
        experiment = next(one for one in EXPERIMENTS if one.name == name)
        amount = Amount(arguments.work == "full", arguments.seed, Path(folder), arguments.share)
        print(json.dumps(measure_here(experiment, amount)))
        return 0
    chosen = [experiment for experiment in EXPERIMENTS if experiment.name in arguments.only]
    found = run(arguments.work, chosen, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.work == "full":
        write_rows(PAGE, found)
        print(f"wrote {PAGE}", file=sys.stderr)
    return int(any(is_failure(result, arguments.work) for result in found))


if __name__ == "__main__":
    sys.exit(main())

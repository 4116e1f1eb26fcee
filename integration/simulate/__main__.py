"""Simulate hours of a training run in seconds: the real executor and loops over engines and a trainer that only take virtual time.

    python -m integration.simulate [--engines 8] [--slots 64] [--hours 1] [--train-s 30] [--mean-tokens 8000] [--max-staleness 2] ...
                                   [--synchronous] [--json] [--picture FILE.png]

Prints throughput, utilization of engines and trainer, staleness of trained tokens, wasted tokens, and the limit of the run.
Time is trio's MockClock. Equal settings give equal figures: simultaneous events are ordered by prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import run_command
from integration.settings.command_line import answer_help, name_as_typed, parse_flags
from integration.settings.help_text import Screen
from integration.simulate.settings import Simulation
from rollouts.errors import ConfigError, make_safe

PROGRAM = "python -m integration.simulate"
SCREEN = Screen(
    text="""\
usage: python -m integration.simulate [OPTIONS]

Simulate hours of a training run in seconds: the loops and queues of a run, over engines and a trainer that only take virtual time.

  --engines N                   inference engines (default: 8)
  --slots N                     concurrent sequences of an engine (default: 64)
  --token-rate X                tokens per second of each sequence (default: 50)
  --sync-s X                    seconds that engines pause for a weight sync (default: 2)
  --mean-tokens X               mean tokens of a response (default: 8000)
  --file FILE                   measured lengths, one per line, or samples of a run (rl/trajectories/*.jsonl)
  --batch-size N                groups of a step (default: as many as fill the slots of all engines)
  --samples-per-prompt N        responses of a group (default: 8)
  --train-s X                   seconds of a training step (default: 30)
  --max-staleness N             weight versions that a trained token may be behind (default: 1)
  --synchronous                 generate, train, generate, ...: no training beside generation
  --over-sampling-factor X      with --synchronous: groups in flight per group wanted (default: 1)
  --refused-fraction X          fraction of finished groups that a filter refuses (default: 0)
  --hours X                     hours of virtual time (default: 1)
  --seed N                      seed of lengths, failures and rewards (default: 0)
  --json                        print the figures as JSON
  --picture FILE.png            a picture of the run

sections of options, each with `--help SECTION`; all options with --help-all:
{sections}

examples:
  python -m integration.simulate --engines 8 --slots 64 --mean-tokens 2000 --hours 2 --max-staleness 2 --picture run.png
  python -m integration.simulate --file runs/mine/rl/trajectories/step_0100.jsonl --token-rate 60 --train-s 45
""",
    settings=Simulation,
    flat=True,
)


_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Simulate hours of a training run in seconds."""

    simulation: Annotated[Simulation, tyro.conf.arg(name="")] = field(default_factory=Simulation)
    json: bool = False
    """print the figures as JSON"""
    picture: str | None = None
    """PNG file for a picture of the run; None = no picture"""


def parse_arguments(argv: Sequence[str]) -> _Arguments:
    """Parse the arguments of the command. Raises ConfigError for refused settings, SystemExit for unknown flags and for --help."""
    return parse_flags(answer_help(argv, _Arguments, PROGRAM, SCREEN), _Arguments, PROGRAM)


def _check_picture(path: Path) -> None:
    """Raise ConfigError if a picture cannot be written there."""
    if path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--picture is {str(path)!r}, expected a file that ends with {' or '.join(_PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--picture is {str(path)!r}, but there is no folder {path.parent}: make it first")


def run(arguments: _Arguments) -> int:
    """Simulate a run and print its figures. Returns the exit status."""
    from integration.simulate.report import describe_report, draw_report  # imports torch, which the help does not need
    from integration.simulate.run import describe_simulation, simulate

    simulation = arguments.simulation
    if arguments.picture is not None:  # told before the simulation
        _check_picture(Path(arguments.picture))
    start = time.perf_counter()
    report = simulate(simulation)
    seconds = time.perf_counter() - start
    title = describe_simulation(simulation)
    with ignore_closed_stdout():
        if arguments.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print(make_safe(describe_report(report, f"{title}\n  simulated in {seconds:.1f} s")))
    if arguments.picture is not None and not draw_report(report, Path(arguments.picture), title):
        raise ConfigError("--picture needs matplotlib: pip install 'rollouts-rl[plots]'")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = sys.argv[1:] if argv is None else argv
    return run_command(partial(parse_arguments, given), run, name_settings=partial(name_as_typed, given, Simulation(), flat=True))


if __name__ == "__main__":
    sys.exit(main())

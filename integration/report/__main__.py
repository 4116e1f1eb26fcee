"""Write a report of one or several runs: one HTML file that needs no network.

    rollouts report RUN [RUN ...] [--output FILE] [--max-tokens N]
    rollouts report RUN --serve [--port N]

python -m integration.report is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import make_stderr_safe
from integration.settings.command_line import parse_flags
from integration.settings.help_text import name_as_started
from rollouts.errors import ConfigError, DataError, OutputError, make_safe, redact
from rollouts.output_files import replace_file

PROGRAM = "python -m integration.report"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a report of runs: curves, rollouts with their tokens, settings and warnings, in one HTML file that needs no network."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]
    """directories of runs; several are compared, and the report stands in the first"""
    output: Path | None = None
    """HTML file to write; None = report.html in the directory of the first run"""
    max_tokens: int = 1_000_000
    """maximum number of tokens of rollouts in the file, about 10 bytes each; of more, whole groups of each step are chosen; 0 = all"""
    serve: bool = False
    """serve the report on 127.0.0.1 and keep it up to date while the runs go on, until Ctrl-C; no file is written"""
    port: int = 0
    """port of the server with --serve; 0 = any free one"""


def report(arguments: Arguments) -> str:
    """Write the report, or serve it until Ctrl-C. Returns the line to print.

    Raises: ConfigError for a path that is no run; DataError for a damaged file; OutputError if the file cannot be written.
    """
    if not arguments.paths:
        raise ConfigError(f"no run is named: give the directory of a run, for example {name_as_started(PROGRAM)} runs/mine")
    if arguments.max_tokens < 0:
        raise ConfigError(f"--max-tokens is {arguments.max_tokens}, expected at least 1, or 0 for all")
    if arguments.serve and arguments.output is not None:
        raise ConfigError("--serve writes no file: leave --output out, or --serve")
    if not 0 <= arguments.port < 2**16:
        raise ConfigError(f"--port is {arguments.port}, expected 0 to 65535")
    if arguments.port and not arguments.serve:
        raise ConfigError(f"--port {arguments.port} is read only with --serve: add it, or leave --port out")
    import trio

    from integration.report.page import read_report, render  # imports torch, which the help does not need
    from integration.report.serve import FollowedReport, serve

    make = partial(read_report, arguments.paths, max_tokens=arguments.max_tokens)
    if arguments.serve:
        make()  # errors of the runs are shown here, not in a browser
        followed = FollowedReport(arguments.paths, lambda: render(make(), live=True))
        try:
            trio.run(serve, followed.respond, arguments.port, partial(print, flush=True))
        except BaseExceptionGroup as group:
            if group.subgroup(KeyboardInterrupt) is None:
                raise
            raise KeyboardInterrupt from group
        return ""
    made = make()
    path = arguments.paths[0] / "report.html" if arguments.output is None else arguments.output
    text = render(made)
    replace_file(path, text)
    shown, total = sum(c.num_shown for c in made.chosen), sum(c.num_total for c in made.chosen)
    some = f"{shown:,} rollouts" if shown == total else f"{shown:,} of {total:,} rollouts (--max-tokens 0 takes all)"
    return f"{path}: {some}, {len(text) / 1e6:.1f} MB; open it in a browser"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 if a report cannot be made."""
    make_stderr_safe()
    arguments = parse_flags(sys.argv[1:] if argv is None else argv, Arguments, PROGRAM)
    with ignore_closed_stdout():
        try:
            line = report(arguments)
        except KeyboardInterrupt:
            return 0  # the usual end of --serve
        except (ConfigError, DataError, OutputError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if line:
            print(make_safe(redact(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

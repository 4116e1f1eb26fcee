"""Examine a run before it starts: the same options as the run, and a table of what is right, doubtful or wrong.

    rollouts doctor [options of rollouts train] [--rows N] [--resume-timeout-s S] [--table-json]

python -m integration.doctor is the same. Exit status: 0 without a failed check, 1 with one, 2 for options that cannot be used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from integration.doctor.findings import Finding, tabulate
from integration.settings.closed_stdout import ignore_closed_stdout
from integration.settings.command_line import CommandLine, name_as_typed, parse_command_line
from integration.settings.config import Config
from rollouts.errors import ConfigError, RolloutsError, make_safe, redact

HELP = """usage: rollouts doctor [options of rollouts train] [--rows N] [--resume-timeout-s S] [--table-json]

Examine a run before it starts, with the options that it will have: tokenizer, chat template, loss masks, end of answers,
reward, log-probs of trainer, engine and transformers, weight sync, splits, resuming, memory and speed. Nothing is written
but temporary files.

  --rows N               rows of data and prompts to try (default 8)
  --resume-timeout-s S   seconds for each of three short runs that show that a killed run goes on with the same numbers; 0 leaves it out
                         (default 300)
  --table-json           print the findings as JSON instead of a table
  --help                 this help; `rollouts train --help` has the options of a run

exit status: 0 = no check failed, 1 = a check failed, 2 = the options cannot be used"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The doctor's own options."""

    rows: int = 8
    resume_timeout_s: float = 300.0
    table_json: bool = False


def split_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split the doctor's own options from those of the run. Raises ConfigError for a value that is no number."""
    rows, timeout_s, table_json = Options.rows, Options.resume_timeout_s, False
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, _, inline = argument.partition("=")
        if name == "--table-json":
            table_json = True
        elif name in ("--rows", "--resume-timeout-s"):
            value = inline or next(arguments, "")
            try:
                number = float(value)
            except ValueError as error:
                raise ConfigError(f"{name} is {value!r}, expected a number") from error
            if name == "--rows" and (number < 1 or number != int(number)):
                raise ConfigError(f"{name} is {value}, expected a whole number of at least 1")
            if number < 0:
                raise ConfigError(f"{name} is {value}, expected at least 0 seconds")
            rows, timeout_s = (int(number), timeout_s) if name == "--rows" else (rows, number)
        else:
            rest.append(argument)
    return Options(rows=rows, resume_timeout_s=timeout_s, table_json=table_json), rest


def run(options: Options, command: CommandLine, argv: Sequence[str]) -> list[Finding]:
    """Run all checks. argv: the options of the run, for the processes of the check of resuming."""
    from integration.doctor.examine import examine  # imports torch, which the help does not need
    from integration.doctor.findings import skip
    from integration.doctor.resume import check_resume

    if command.resume or command.dry_run:
        raise ConfigError("the doctor examines a run that is to start: leave --resume and --dry-run out")
    say = partial(print, file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="rollouts-doctor-") as directory:
        findings = trio.run(partial(examine, command, num_rows=options.rows, directory=Path(directory), say=say))
    if options.resume_timeout_s == 0:
        return [*findings, skip("resume", "left out by --resume-timeout-s 0")]
    say("resuming: three short runs")
    own = [a for i, a in enumerate(argv) if a != "--mode" and (i == 0 or argv[i - 1] != "--mode") and not a.startswith("--mode=")]
    return [*findings, check_resume(own, command.mode, timeout_s=options.resume_timeout_s)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    with ignore_closed_stdout():
        if given in (["--help"], ["-h"]):
            print(HELP)
            raise SystemExit(0)
        try:
            options, rest = split_options(given)
            findings = run(options, parse_command_line(rest), rest)
        except RolloutsError as error:
            print(f"error: {make_safe(redact(name_as_typed(given, Config(), str(error))))}", file=sys.stderr)
            return 2
        text = json.dumps([finding.to_dict() for finding in findings], indent=2) if options.table_json else tabulate(findings)
        print(make_safe(redact(text)))
    return int(any(finding.status == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

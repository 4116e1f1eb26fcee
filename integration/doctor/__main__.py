"""Examine a run before it starts: the same options as the run, and a table of what is right, doubtful or wrong.

    rollouts doctor [options of rollouts train] [--rows N] [--resume-timeout-s S] [--json]
    rollouts doctor train-reward-model [options of rollouts train-reward-model] [--rows N] [--resume-timeout-s S] [--json]

python -m integration.doctor is the same.
Exit status: 0 without a failed check, 1 with one or if a check cannot be made, 2 for options that cannot be used.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import trio

from integration.closed_stdout import ignore_closed_stdout
from integration.doctor.findings import Finding, tabulate
from integration.run.exit_status import run_command
from integration.settings.command_line import CommandLine, name_as_typed, parse_command_line
from integration.settings.config import Config
from integration.settings.help_text import name_as_started
from integration.settings.reward_model import RewardModelConfig
from integration.train_reward_model import Arguments as RewardModelArguments
from integration.train_reward_model import parse as parse_reward_model
from rollouts.errors import ConfigError, make_safe, redact

_SCORES = "train-reward-model"  # first argument for the training of a reward model

HELP = """usage: python -m integration.doctor [options of python -m integration.train] [--rows N] [--resume-timeout-s S] [--json]
       python -m integration.doctor train-reward-model [options of python -m integration.train_reward_model] [...]

Examine a run before it starts, with the options that it will have: tokenizer, chat template, loss masks, end of answers,
reward, log-probs of trainer, engine and transformers, weight sync, critic, teacher, splits, resuming, memory and speed; of a
reward model its tokenizer, chat template, scored tokens, pairs, scores, gradient, splits, resuming and speed. Only temporary
files are written.

  --rows N               rows of data and prompts to try (default: 8)
  --resume-timeout-s S   maximum seconds of each of three short runs, which show that a killed run goes on with the same numbers;
                         0 = leave this check out (default: 300)
  --json                 print the findings as JSON instead of a table
  --help                 print this help; `python -m integration.train --help` has the options of a run, --help-all all of them

exit status: 0 = no check failed, 1 = a check failed or could not be made, 2 = the options cannot be used"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The doctor's own options."""

    rows: int = 8
    resume_timeout_s: float = 300.0
    as_json: bool = False


def split_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Split the doctor's own options from those of the run. Raises ConfigError for a value that is no number."""
    rows, timeout_s, as_json = Options.rows, Options.resume_timeout_s, False
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, _, inline = argument.partition("=")
        if name == "--json":
            as_json = True
        elif name in ("--rows", "--resume-timeout-s"):
            value = inline or next(arguments, "")
            try:
                number = float(value)
            except ValueError as error:
                raise ConfigError(f"{name} is {value!r}, expected a number") from error
            if name == "--rows" and not (number >= 1 and number.is_integer()):
                raise ConfigError(f"{name} is {value}, expected a whole number of at least 1")
            if not 0 <= number < math.inf:
                raise ConfigError(f"{name} is {value}, expected at least 0 seconds")
            rows, timeout_s = (int(number), timeout_s) if name == "--rows" else (rows, number)
        else:
            rest.append(argument)
    return Options(rows=rows, resume_timeout_s=timeout_s, as_json=as_json), rest


def skip_resume(options: Options, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that takes the place of the check of resuming; None = the check is to be made."""
    from integration.doctor.findings import skip  # imports torch, which the help does not need
    from integration.doctor.texts import REFUSED, REFUSED_MODEL

    if options.resume_timeout_s == 0:
        return skip("resume", "left out by --resume-timeout-s 0")
    for check in (REFUSED, REFUSED_MODEL):
        if any(finding.check == check for finding in findings):
            return skip("resume", f"the run would refuse the {check}")
    return None


def run(options: Options, command: CommandLine, argv: Sequence[str]) -> list[Finding]:
    """Run all checks. argv: the options of the run, for the processes of the check of resuming."""
    from integration.doctor.examine import examine  # imports torch, which the help does not need
    from integration.doctor.resume import check_resume

    if command.resume or command.dry_run:
        raise ConfigError("the doctor examines a run that is to start: leave --resume and --dry-run out")
    say = partial(print, file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="rollouts-doctor-") as directory:
        findings = trio.run(partial(examine, command, num_rows=options.rows, directory=Path(directory), say=say))
    if skipped := skip_resume(options, findings):
        return [*findings, skipped]
    say("resuming: three short runs")
    own = [a for i, a in enumerate(argv) if a != "--mode" and (i == 0 or argv[i - 1] != "--mode") and not a.startswith("--mode=")]
    return [*findings, check_resume(own, command.mode, timeout_s=options.resume_timeout_s)]


def run_on_scores(options: Options, command: RewardModelArguments, argv: Sequence[str]) -> list[Finding]:
    """Run all checks of the training of a reward model. argv: its options, for the processes of the check of resuming."""
    from integration.doctor.resume import REWARD_MODEL, check_resume
    from integration.doctor.reward_model import examine_reward_model  # imports torch, which the help does not need

    if command.resume:
        raise ConfigError("the doctor examines a run that is to start: leave --resume out")
    say = partial(print, file=sys.stderr, flush=True)
    findings = trio.run(partial(examine_reward_model, command.config, num_rows=options.rows, say=say))
    if skipped := skip_resume(options, findings):
        return [*findings, skipped]
    say("resuming: three short runs")
    return [*findings, check_resume(argv, REWARD_MODEL, timeout_s=options.resume_timeout_s)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given in (["--help"], ["-h"], ["--help-all"]):
        with ignore_closed_stdout():
            print(name_as_started(HELP))
        raise SystemExit(0)
    config = RewardModelConfig() if _SCORES in given else Config()
    return run_command(partial(_parse, given), _examine, _goes_online, partial(name_as_typed, given, config))


Parsed: TypeAlias = "tuple[Options, CommandLine | RewardModelArguments, list[str]]"


def _parse(given: Sequence[str]) -> Parsed:
    options, rest = split_options(given)
    if rest[:1] == [_SCORES]:
        return options, parse_reward_model(rest[1:]), rest[1:]
    return options, parse_command_line(rest), rest


def _goes_online(parsed: Parsed) -> bool:
    from integration.parts.hub_models import names_hub

    return names_hub(parsed[1].config)


def _examine(parsed: Parsed) -> int:
    options, command, rest = parsed
    findings = run(options, command, rest) if isinstance(command, CommandLine) else run_on_scores(options, command, rest)
    text = json.dumps([finding.to_dict() for finding in findings], indent=2) if options.as_json else tabulate(findings)
    with ignore_closed_stdout():
        print(make_safe(redact(text)))
    return int(any(finding.status == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

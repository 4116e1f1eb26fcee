"""Check a run directory without changing it: settings, metrics, ledger, trajectories, checkpoints, and where the run could go on.

    rollouts verify RUN [--json]

python -m integration.verify is the same. Exit status: 0 without a failed check, 1 with one, 2 for a path that is no run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import make_stderr_safe
from integration.settings.help_text import name_as_started
from rollouts.errors import ConfigError, RolloutsError, make_safe, redact

PROGRAM = "python -m integration.verify"
HELP = f"""usage: {PROGRAM} RUN [--json]

Check the directory of a run and change nothing in it; the run may have ended, been killed, or still go on. Checked are the settings,
the lines of metrics and of the ledger, the trajectories, every checkpoint with its checksums and tensors, crash bundles, files that a kill
left behind, and the step from which --resume would go on.

  RUN       directory of a run, the --output-dir of python -m integration.train
  --json    print the findings as JSON instead of a table
  --help    print this help

exit status: 0 = no check failed, 1 = a check failed, 2 = the path is no run, or the options cannot be used"""


def parse(argv: Sequence[str]) -> tuple[Path, bool]:
    """Return the directory, and whether to print JSON. Raises ConfigError for anything else on the command line."""
    paths = [argument for argument in argv if not argument.startswith("-")]
    program = name_as_started(PROGRAM)
    unknown = [argument for argument in argv if argument.startswith("-") and argument != "--json"]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}: {program} has --json and --help")
    if len(paths) != 1:
        raise ConfigError(f"found {len(paths)} directories, expected one: {program} RUN, for example {program} runs/mine")
    return Path(paths[0]), "--json" in argv


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h", "--help-all"} & set(given):
        with ignore_closed_stdout():
            print(name_as_started(HELP))
        raise SystemExit(0)
    make_stderr_safe()
    try:
        path, as_json = parse(given)
        from integration.verify.check_run import check_run  # imports torch, which the help does not need

        checked = check_run(path)
    except (RolloutsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with ignore_closed_stdout():
        print(make_safe(redact(json.dumps(checked.to_dict(), indent=2) if as_json else checked.describe())))
    return int(checked.has_failed)


if __name__ == "__main__":
    sys.exit(main())

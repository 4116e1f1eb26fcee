"""The command `rollouts`: its first word names one of the programs of integration/.

rollouts train|train-reward-model|view|simulate [ARGUMENTS]
rollouts --help | --version
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType

from integration.settings.closed_stdout import ignore_closed_stdout
from rollouts.config_files import suggest

DISTRIBUTION = "rollouts-rl"
PROGRAMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("integration.train", "train a language model: SFT, RL, or one after the other"),
        "train-reward-model": ("integration.train_reward_model", "train a reward model on pairs of answers"),
        "view": ("integration.view.__main__", "show the rollouts of a run in the terminal"),
        "simulate": ("integration.simulate.__main__", "simulate hours of a run on many engines in seconds"),
    }
)
"""Module and description of each program, by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names. Returns its exit status; 2 for an unknown name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else "--help"
    if name in PROGRAMS:
        status: int = importlib.import_module(PROGRAMS[name][0]).main(arguments[1:])
        return status
    with ignore_closed_stdout():
        if name in ("--help", "-h"):
            print(describe_programs())
            return 0
        if name == "--version":
            print(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
            return 0
    print(f"error: unknown command {name!r}: {suggest(name, PROGRAMS)}; `rollouts --help` describes them", file=sys.stderr)
    return 2


def describe_programs() -> str:
    """Return the help of the command: a line for each program."""
    width = max(map(len, PROGRAMS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in PROGRAMS.items()]
    end = "`rollouts NAME --help` describes its options. The first run: rollouts train --mode sft+rl"
    return "\n".join(["usage: rollouts NAME [OPTIONS]", "", *lines, "", end])


if __name__ == "__main__":
    sys.exit(main())

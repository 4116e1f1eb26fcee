"""The command `rollouts`: its first word names one of the programs of integration/.

rollouts NAME [ARGUMENTS]        one of PROGRAMS
rollouts completion bash|zsh|fish
rollouts --help | --version
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

from integration.closed_stdout import ignore_closed_stdout
from rollouts.config_files import suggest

DISTRIBUTION = "rollouts-rl"


@dataclass(frozen=True)
class Program:
    """A program of the command: its module has `main(argv) -> exit status`, and answers --help."""

    text: str  # description in the help of the command
    module: str  # module with `main`


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "train": Program("train a language model: SFT, RL, preferences, or one after the other", "integration.train"),
        "train-reward-model": Program("train a reward model on pairs of answers", "integration.train_reward_model"),
        "view": Program("show the rollouts of a run in the terminal", "integration.view.__main__"),
        "reward": Program("try a reward function on rows of data: scores, reasons and the time it takes", "integration.reward"),
        "simulate": Program("simulate hours of a run on many engines in seconds", "integration.simulate.__main__"),
        "convert": Program("convert a trained model to a plain Hugging Face directory", "integration.convert.__main__"),
        "completion": Program("print the completion of this command for bash, zsh or fish", "integration.completion"),
        "eval": Program("evaluate models and checkpoints on tasks: accuracy, pass@k, maj@k, comparisons", "integration.eval.__main__"),
        "gateway": Program("serve a model behind the APIs of OpenAI and Anthropic, for programs that speak them", "integration.gateway"),
        "tinker": Program("serve a model to the tinker client, to be trained and sampled on this machine", "integration.tinker"),
        "report": Program("write a page with the curves and the rollouts of runs, or serve it", "integration.report.__main__"),
        "doctor": Program("check a model, its tokenizer, data, reward and engine before a run", "integration.doctor.__main__"),
        "verify": Program("check a run directory: metrics, ledger, checkpoints, and where it can go on", "integration.verify.__main__"),
    }
)
"""The programs by name, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names. Returns its exit status; 2 for an unknown name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else "--help"
    program = PROGRAMS.get(name)
    if program is not None:
        status: int = importlib.import_module(program.module).main(arguments[1:])
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
    programs = [f"  {name:<{width}}  {program.text}" for name, program in PROGRAMS.items()]
    end = "`rollouts NAME --help` describes its options. The first run: rollouts train --mode sft+rl"
    return "\n".join(["usage: rollouts NAME [OPTIONS]", "", *programs, "", end])


if __name__ == "__main__":
    sys.exit(main())

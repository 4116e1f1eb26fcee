"""Train a reward model on pairs of answers: `python -m integration.train_reward_model --output-dir rm`.

Then `python -m integration.train --mode rl --reward.model rm` takes its scores in place of the rule.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from integration.run.exit_status import run_command
from integration.run.signal_watch import Patience
from integration.settings.command_line import answer_help, name_as_typed, parse_flags, read_base, read_named, write_out_short
from integration.settings.help_text import Screen
from integration.settings.reward_model import RewardModelConfig
from integration.settings.task_defaults import create_reward_model_default
from rollouts.config import check_setting

PROGRAM = "python -m integration.train_reward_model"
SCREEN = Screen(
    text="""\
usage: python -m integration.train_reward_model [OPTIONS] [--section.field VALUE ...]

Train a reward model on pairs of answers; `python -m integration.train --reward.model DIR` then takes its scores as rewards.

  --data.path FILE              rows with chosen and rejected, or with labelled answers (default: pairs generated from --task)
  --data.eval-path FILE         held-out pairs (default: a tenth of --data.path, at most --data.num-heldout)
  --data.columns NEW=COLUMN     columns to read under another name: chosen=better,rejected=worse
  --data.skip-bad-rows          skip and count unreadable rows (default: end the run)
  --task sort|sort-long         built-in task to generate pairs from (default: sort)
  --model.path DIR|ORG/NAME     a language model, or a reward model to train further (default: a small built-in model)
  --training.num-steps N        optimizer steps (default: 400)
  --training.batch-size N       pairs per optimizer step (default: 64)
  --training.optimizer.lr X     peak learning rate (default: 1e-5; 0.002 for the built-in model)
  --training.best METRIC        eval_accuracy, eval_loss or eval_margin: its best checkpoint is kept and becomes the result (default:
                                the last weights)
  --config FILE                 settings from a .toml, .json or .py file; flags override them
  --output-dir DIR              directory of the run (default: a new runs/<time>-reward-model)
  --resume                      go on with the interrupted run in --output-dir; with --accept-changed-data also if its rows have changed
  --loggers LOGGER ...          further loggers, such as "wandb(project='mine')"
  --seed N                      seed of weights, pairs and their order (default: 0)
  --num-threads N               CPU threads of torch (default: torch's)
  --quiet                       print only the summary
  --grace-s S                   seconds after Ctrl-C: an evaluation may take half of them to end, an update all (default: 30)

sections of settings, each with `--help SECTION`; all settings with --help-all:
{sections}

examples:
  python -m integration.train_reward_model --output-dir runs/rm                                # pairs of the built-in task
  python -m integration.train_reward_model --model.path DIR --data.path pairs.jsonl
""",
    settings=RewardModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a reward model on preference pairs."""

    config: Annotated[RewardModelConfig, tyro.conf.arg(name="")]
    resume: bool = False
    """resume the interrupted run in --output-dir"""
    accept_changed_data: bool = False
    """with --resume: go on although files of the training data have changed since the checkpoint; without it that is an error"""
    quiet: bool = False
    """print only the summary"""
    grace_s: float | None = 30.0
    """seconds from Ctrl-C to the end, besides the writing of checkpoints; evaluations may take half; None = the step's end is awaited"""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """file of settings: FILE.py (which defines `config`), FILE.toml or FILE.json"""


def parse(argv: Sequence[str]) -> Arguments:
    """Parse the command line. Raises ConfigError; SystemExit for the help and for unknown options."""
    argv = write_out_short(answer_help(argv, lambda: Arguments(config=RewardModelConfig()), PROGRAM, SCREEN), ["log"])
    model_path = read_named(argv)("model.path")
    default = create_reward_model_default(None if model_path is None else str(model_path))
    arguments = parse_flags(argv, Arguments(config=read_base(argv, default)), PROGRAM)
    grace_s = arguments.grace_s
    check_setting(grace_s is None or 0 < grace_s < math.inf, "--grace-s", grace_s, "a number of seconds above 0")
    return arguments


def run(command: Arguments) -> int:
    """Execute a command line. Returns the exit status."""
    from integration.run import reward_model  # imports torch, which the help does not need

    return reward_model.run(
        command.config,
        resume=command.resume,
        quiet=command.quiet,
        accepts_changed_data=command.accept_changed_data,
        patience=Patience(grace_s=command.grace_s),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = sys.argv[1:] if argv is None else argv
    return run_command(partial(parse, given), run, _goes_online, partial(name_as_typed, given, RewardModelConfig()))


def _goes_online(command: Arguments) -> bool:
    from integration.parts.hub_models import names_hub

    return names_hub(command.config)


if __name__ == "__main__":
    sys.exit(main())

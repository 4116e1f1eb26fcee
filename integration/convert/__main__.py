"""Convert a trained model to a plain Hugging Face directory: `rollouts convert RUN|CHECKPOINT|MODEL TARGET`.

    rollouts convert runs/1 my-model --dtype bfloat16
    rollouts convert runs/1/rl/checkpoints/step_0020 my-model --push-to-hub me/my-model

A checkpoint holds the merged model of a run with adapters, in as many files as its ranks wrote. The target has one file of weights, or
several of --max-file-gib, and a model card.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from integration.run.exit_status import run_command
from integration.settings.command_line import parse_flags
from rollouts.config import check_setting
from rollouts.errors import ConfigError, make_safe, redact

PROGRAM = "python -m integration.convert"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Convert a trained model to a plain Hugging Face directory, with adapters merged into its weights.

    Language models, critics and reward models are converted alike. `rollouts train --model.path` takes the result as it is.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")]
    """run (its best checkpoint, if it kept one, else its newest), checkpoint step_NNNN, model directory, or directory of peft's adapters"""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """directory to write; it must be new or empty"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights; None = as they are"""
    max_file_gib: float | None = None
    """maximum size of a file of weights, in GiB; None = one file, whatever its size"""
    base: str | None = None
    """directory of the model that the adapters were trained on; None = the one that adapter_config.json names"""
    tokenizer: str | None = None
    """model directory to copy the tokenizer from; None = the source"""
    push_to_hub: str | None = None
    """name on the Hugging Face hub, ORG/NAME, to publish the result under; a new model there is private; None = not published"""

    def __post_init__(self) -> None:
        limit = self.max_file_gib
        check_setting(limit is None or 0 < limit < math.inf, "--max-file-gib", limit, "a number above 0, or None")


def run(arguments: Arguments) -> int:
    """Execute a command line. Returns the exit status."""
    from integration.convert.export import export  # imports torch, which the help does not need

    limit = sys.maxsize if arguments.max_file_gib is None else int(arguments.max_file_gib * 2**30)
    if arguments.target.resolve() == arguments.source.resolve():
        raise ConfigError(f"source and target are both {arguments.source}: give another target")
    told = export(
        arguments.source,
        arguments.target,
        push_to_hub=arguments.push_to_hub,
        dtype=arguments.dtype,
        max_file_bytes=limit,
        base=arguments.base,
        tokenizer=arguments.tokenizer,
    )
    print(make_safe(redact(told)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = sys.argv[1:] if argv is None else argv

    def parse() -> Arguments:
        return parse_flags(given, Arguments, PROGRAM)

    return run_command(parse, run, lambda arguments: arguments.push_to_hub is not None)


if __name__ == "__main__":
    sys.exit(main())

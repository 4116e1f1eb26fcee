"""Show the rollouts of a run: prompts, responses, and the training data of each token.

    python -m integration.view RUN|FILE [--step N] [--group N] [--sample N] [--min-reward X] [--max-reward X] [--limit N]
                               [--color advantage|log-prob|mask|none] [--tokens] [--list] [--tokenizer DIR] [--svg FILE]

RUN is the directory of a run, FILE one of its rl/trajectories/step_NNNN.jsonl, an examples.jsonl, or a file of rollouts.data.trajectories.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import tyro
from rich.console import Console
from rich.text import Text

from integration.settings.closed_stdout import ignore_closed_stdout
from integration.view.source import Choice, choose_file, describe_steps, find_decoder, find_step_files, read_file
from integration.view.text import prepare, show_records, summarize
from integration.view.tokens import ColorBy, choose_palette
from rollouts.errors import ConfigError, DataError, make_safe

_SVG_COLUMNS = 132


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show the rollouts of a run: prompts, responses, and the training data of each token.

    Colours appear only on a terminal without NO_COLOR; --tokens prints the same as numbers.
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FILE")]
    """directory of a run, one of its rl/trajectories/step_NNNN.jsonl, an examples.jsonl, or a file of steps"""
    step: int | None = None
    """training step of a run; None = the newest"""
    group: int | None = None
    """show only samples of this group, whose prompt is the same; None = all groups"""
    sample: int | None = None
    """show only the sample of this index; None = all samples"""
    min_reward: float | None = None
    """show only samples with at least this reward; None = no minimum"""
    max_reward: float | None = None
    """show only samples with at most this reward; None = no maximum"""
    limit: int = 10
    """maximum number of samples to show; 0 = all"""
    color: ColorBy = "auto"
    """quantity shown as the colour of a token: its advantage, its log-prob when sampled, or its loss mask; auto = the first available"""
    tokens: bool = False
    """print a table of each sample's tokens: id, text, mask, weight version, log-prob, advantage, return, value"""
    list: bool = False
    """print only one line per step of a run"""
    tokenizer: Path | None = None
    """model directory whose tokenizer decodes the tokens; None = the run's tokenizer"""
    svg: Path | None = None
    """file for an SVG picture instead of text; None = text"""


def view(arguments: Arguments, *, colors: bool) -> list[Text]:
    """Return the lines to show. colors: whether the output has colours.

    Raises: ConfigError or DataError for a path that does not exist, has no rollouts or is damaged.
    """
    if arguments.limit < 0:
        raise ConfigError(f"--limit is {arguments.limit}, expected at least 1, or 0 for all")
    if arguments.list:
        return list_steps(arguments.path)
    path = choose_file(arguments.path, arguments.step)
    records = read_file(path)
    choice = Choice(group=arguments.group, sample=arguments.sample, min_reward=arguments.min_reward, max_reward=arguments.max_reward)
    chosen = [record for record in records if choice.takes(record)]
    lines = [Text(f"{path}: ", style="bold").append(Text(summarize(records), style="not bold"))]
    if arguments.path.is_dir():
        lines.append(Text(f"this run has {describe_steps([*find_step_files(arguments.path)])}; --step chooses one, --list tells of all"))
    if not chosen:
        return [*lines, Text(f"none of them is chosen by {choice}" if records else "nothing was written to it")]
    decode = find_decoder(path, arguments.tokenizer)
    limit = arguments.limit or len(chosen)
    shown = [prepare(record, decode) for record in chosen[:limit]]
    if decode is None and any(one.tokens or any(one.of_steps) for one in shown):
        lines.append(Text("tokens are shown by their ids: the file is in no run that has a tokenizer; --tokenizer DIR names one"))
    tokens = [token for one in shown for part in (one.tokens, *one.of_steps) for token in part]
    palette = choose_palette(arguments.color, tokens)
    if palette.by == "advantage" and all(token.advantage is None for token in tokens):
        lines.append(Text("the file has no advantages: they are known of rollouts that were trained on"))
    elif colors and palette.by != "none" and tokens:
        lines.append(palette.legend())
    lines += show_records(shown, palette, with_tokens=arguments.tokens)
    if len(chosen) > limit:
        lines += [Text(), Text(f"{len(chosen) - limit} more; --limit 0 shows all")]
    return lines


def list_steps(path: Path) -> list[Text]:
    """Return one line per trajectory file of a run."""
    choose_file(path, None)
    files = find_step_files(path) if path.is_dir() else {}
    if not files:
        raise ConfigError(f"--list lists the steps of a run, but {path} is one file: leave it out")
    return [Text(f"step {step}: {summarize(read_file(file))}") for step, file in files.items()]


def write_lines(lines: Sequence[Text], stream: TextIO, *, colors: bool) -> None:
    """Write lines without wrapping them. colors: use the terminal's colours, if it has any."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # go on if the terminal cannot show a character
    console = Console(file=stream, highlight=False, soft_wrap=True) if colors else None
    if console is None or console.color_system is None:
        stream.writelines(f"{line.plain.rstrip()}\n" for line in lines)
    else:
        for line in lines:
            console.print(line)
    stream.flush()


def write_picture(lines: Sequence[Text], path: Path, title: str) -> None:
    """Write lines as an SVG picture of a terminal."""
    console = Console(
        file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", width=_SVG_COLUMNS, highlight=False, no_color=False
    )
    for line in lines:
        console.print(line)
    svg = console.export_svg(title=title)
    path.write_text(
        re.sub(r"@font-face \{[^}]*\}\s*", "", svg), encoding="utf-8"
    )  # without web fonts, so that viewing the picture downloads nothing


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the arguments of the command. Raises SystemExit for unknown flags and for --help."""
    with ignore_closed_stdout():
        return tyro.cli(Arguments, prog="python -m integration.view", args=argv)
    raise SystemExit(0)  # the reader of the help closed stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 if there is nothing to show."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_arguments(given)
    try:
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = view(arguments, colors=colors or arguments.svg is not None)
        if arguments.svg is not None:
            write_picture(lines, arguments.svg, f"python -m integration.view {' '.join(given)}")
        else:
            with ignore_closed_stdout():
                write_lines(lines, sys.stdout, colors=colors)
    except (ConfigError, DataError, OSError) as error:
        print(f"error: {make_safe(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Show the rollouts of a run: prompts, responses, and the training data of each token.

    python -m integration.view RUN|FILE [--step N] [--group N] [--sample N] [--min-reward X] [--max-reward X] [--search TEXT] [--limit N]
                               [--side-by-side] [--color NAME] [--tokens] [--list] [--tokenizer DIR] [--svg FILE]

RUN is the directory of a run, FILE one of its rl/trajectories/step_NNNN.jsonl, an examples.jsonl, or a file of rollouts.data.trajectories.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import make_stderr_safe
from integration.settings.command_line import parse_flags
from integration.view.arguments import Arguments
from rollouts.errors import ConfigError, DataError

if TYPE_CHECKING:
    from integration.view.source import Choice
    from rollouts.data.records import TrajectoryRecord

_SVG_COLUMNS = 132


def view(arguments: Arguments, *, colors: bool, width: int = _SVG_COLUMNS) -> list[Text]:
    """Return the lines to show.

    Args:
        colors: whether the output has colours.
        width: cells of a line for columns side by side.

    Raises: ConfigError or DataError for a path that does not exist, has no rollouts or is damaged.
    """
    from integration.view.columns import show_side_by_side
    from integration.view.gradient import find_key, split_groups
    from integration.view.source import Choice, choose_file, describe_steps, find_decoder, find_step_files, iterate_file
    from integration.view.text import prepare, show_group, show_prompt, show_records, split_shown, summarize
    from integration.view.tokens import COLOR_FIELDS, choose_palette

    if arguments.limit < 0:
        raise ConfigError(f"--limit is {arguments.limit}, expected at least 1, or 0 for all")
    if arguments.side_by_side and arguments.tokens:
        raise ConfigError("--tokens prints tables, which do not fit side by side: leave out --tokens or --side-by-side")
    if arguments.list:
        return list_steps(arguments.path)
    path = choose_file(arguments.path, arguments.step)
    choice = Choice(**{field.name: getattr(arguments, field.name) for field in fields(Choice)})
    places: list[tuple[int, int]] = []  # group and number of each chosen sample, in the order of the file
    lines = [Text(f"{path}: ", style="bold").append(Text(summarize(note_chosen(path, choice, places)), style="not bold"))]
    if arguments.path.is_dir():
        lines.append(Text(f"this run has {describe_steps([*find_step_files(arguments.path)])}; --step chooses one, --list tells of all"))
    if not places:
        return [*lines, Text("nothing was written to it" if str(choice) == "" else f"none of them is chosen by {choice}")]
    decode = find_decoder(path, arguments.tokenizer)
    limit = arguments.limit or len(places)
    if arguments.side_by_side:
        places.sort()
        while limit < len(places) and places[limit][0] == places[limit - 1][0]:
            limit += 1  # whole groups
    records = [*iterate_file(path, {group for group, _ in places[:limit]})]
    chosen = [record for record in records if choice.takes(record)]
    if arguments.side_by_side:
        chosen = [record for group in split_groups(chosen) for record in group]
    shown = [prepare(record, decode) for record in chosen[:limit]]
    if decode is None and any(one.tokens or any(one.of_steps) for one in shown):
        lines.append(Text("tokens are shown by their ids: the file is in no run that has a tokenizer; --tokenizer DIR names one"))
    tokens = [token for one in shown for part in (one.tokens, *one.of_steps) for token in part]
    palette = choose_palette(arguments.color, tokens)
    column = COLOR_FIELDS.get(palette.by)
    if column is not None and all(getattr(token, column) is None for token in tokens):
        name = "advantages: they" if column == "advantage" else f"numbers for --color {palette.by}: such"
        lines.append(Text(f"the file has no {name} are known of rollouts that were trained on, where the step had them"))
    elif colors and palette.by != "none" and tokens:
        lines.append(palette.legend())
    reasons = explain_groups(records, path)
    if arguments.side_by_side:
        for members in split_shown(shown):
            lines += show_group(members, reasons.get(find_key(members[0].record.sample), ()))
            lines += [*show_prompt(members[0]), *show_side_by_side(members, palette, width=width)]
    else:
        lines += show_records(shown, palette, reasons, with_tokens=arguments.tokens)
    if len(places) > limit:
        lines += [Text(), Text(f"{len(places) - limit} more; --limit 0 shows all")]
    return lines


def note_chosen(path: Path, choice: Choice, places: list[tuple[int, int]]) -> Iterator[TrajectoryRecord]:
    """Yield the records of a file, one at a time, and append the group and the number of each chosen one to places."""
    from integration.view.source import iterate_file

    for record in iterate_file(path):
        if choice.takes(record):
            places.append((record.sample.group_index, record.sample.index))
        yield record


def explain_groups(records: Sequence[TrajectoryRecord], path: Path) -> dict[tuple[int, str], tuple[str, ...]]:
    """Return why each group with estimates has a gradient or none, by gradient.find_key."""
    from integration.view.gradient import explain_gradient, find_key, split_groups
    from integration.view.source import find_masking

    masks, groups = find_masking(path), split_groups(records)
    known = (group for group in groups if any(record.estimate is not None for record in group))
    return {find_key(group[0].sample): explain_gradient(group, mask_truncated=masks) for group in known}


def list_steps(path: Path) -> list[Text]:
    """Return one line per trajectory file of a run."""
    from integration.view.source import choose_file, find_step_files, iterate_file
    from integration.view.text import summarize

    choose_file(path, None)
    files = find_step_files(path) if path.is_dir() else {}
    if not files:
        raise ConfigError(f"--list lists the steps of a run, but {path} is one file: leave it out")
    return [Text(f"step {step}: {summarize(iterate_file(file))}") for step, file in files.items()]


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 2 if there is nothing to show."""
    make_stderr_safe()
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_flags(given, Arguments, "python -m integration.view")
    try:
        colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        width = _SVG_COLUMNS if arguments.svg is not None else shutil.get_terminal_size().columns
        lines = view(arguments, colors=colors or arguments.svg is not None, width=width)
        if arguments.svg is not None:
            write_picture(lines, arguments.svg, f"python -m integration.view {' '.join(given)}")
        else:
            with ignore_closed_stdout():
                write_lines(lines, sys.stdout, colors=colors)
    except (ConfigError, DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

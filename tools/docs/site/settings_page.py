"""The page of all settings, from what the command says of itself in --help-all."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from integration.settings.command_line import parse_command_line
from integration.settings.option_effects import list_options, spell_option
from integration.settings.task_defaults import create_default_config

HEAD = """# Settings

Every option of `rollouts train` (`python -m integration.train`), as `--help-all` prints it: this page is made from the code. In a file
for `--config`, a section of this page is a table: `--rl.optimizer.lr 1e-5` is `lr = 1e-5` below `[rl.optimizer]`. `--dry-run` shows what a
run would use. Lengths are in tokens, times in seconds and sizes in bytes, unless the text says otherwise.

The default is that of the built-in model and task. Where a model of your own (`--model.path`) has another, that stands below it
([reasons](first-run.md#a-model-of-your-own)).
"""


@dataclass(frozen=True)
class Option:
    """An option as the help prints it."""

    names: tuple[str, ...]  # "--rl.mask-truncated", "--rl.no-mask-truncated"
    values: str  # "INT", "{auto,torch}"; empty for a switch
    text: str
    default: str


def read_help() -> str:
    """Return the output of --help-all without frames."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse_command_line(["--help-all"])
    return printed.getvalue()


def split_sections(text: str) -> Iterator[tuple[str, str, list[Option]]]:
    """Yield name, description and options of each section of the help; the options that are in none come first, without a name."""
    _, *parts = re.split(r"^ ((?:\S+ )?options) *$", text, flags=re.MULTILINE)
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        lines = [line.strip() for line in body.splitlines()]
        lines = [line for line in lines if line.strip("- ")]
        start = next(k for k, line in enumerate(lines) if line.startswith("-"))
        yield title.removesuffix("options").strip(), " ".join(lines[:start]), list(_read_options(lines[start:]))


def _read_options(lines: list[str]) -> Iterator[Option]:
    while lines:
        end = next((k for k, line in enumerate(lines) if k and re.match(r"--?[a-z]", line)), len(lines))
        head, *text = lines[:end]
        lines = lines[end:]
        names = tuple(re.findall(r"(?:^|, )(--?[a-z][\w.-]*)", head))
        values = head.rpartition(names[-1])[2].strip()
        found = re.fullmatch(r"(.*?) ?\(default: (.*)\)", " ".join(text))
        yield Option(names, values.removeprefix("{None}|"), found[1] if found else " ".join(text), found[2] if found else "")


def write_settings_page() -> str:
    """Return the page in Markdown."""
    own = find_own_defaults()
    lines = [HEAD]
    for name, about, options in split_sections(read_help()):
        lines.append(f"\n## {name or 'The whole run'}\n")
        if about:
            lines.append(f"{about[:1].upper()}{about[1:].rstrip('.')}.\n")
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for option in options:
            names = "<br>".join(f"`{spelled}`" for spelled in option.names)
            values = f" `{_escape(option.values)}`" if option.values else ""
            default = f"`{_escape(option.default)}`" if option.default else ""
            if option.names[0] in own:
                default += f"<br>own model: `{_escape(own[option.names[0]])}`"
            lines.append(f"| {names}{values} | {default} | {_escape(option.text)} |")
    return "\n".join(lines) + "\n"


def find_own_defaults() -> Mapping[str, str]:
    """Return the defaults that a model of the user's own changes, by option."""
    built_in: dict[str, Any] = dict(list_options(create_default_config(None)))
    own = dict(list_options(create_default_config(None, model_path="a directory that is not there")))
    return {spell_option(name): str(value) for name, value in own.items() if value != built_in[name]}


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")

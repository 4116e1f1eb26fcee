"""The help of a command with many settings: one screen, one section of settings, or all of them."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from integration.settings.config import Config
from rollouts.config_files import suggest
from rollouts.errors import ConfigError

_TRAINING = """\
usage: python -m integration.train [OPTIONS] [--section.field VALUE ...]

Train a language model by supervised fine-tuning, reinforcement learning, preferences, or one after the other.

  --mode sft|rl|sft+rl|dpo|sft+dpo  stages to run; dpo is training on preferences (default: sft+rl)
  --task NAME                   sort, sort-long, gsm8k, jsonl; of several turns: grid_world, calculator, environment (default: sort)
  --model.path DIR|ORG/NAME     model directory, or a model of the Hugging Face hub (default: a small built-in model)
  --data.path FILE              rows of your own
  --reward.function FILE.py:f   reward of your own
  --environment FILE.py:NAME    environment of your own
  --algorithm EXPRESSION        grpo, 'dapo(clip_high=0.28)', ppo, ...
  --config FILE                 settings from a .toml, .json or .py file; flags override them
  --output-dir DIR              directory of the run (default: a new runs/<time>-<task>)
  --resume                      go on with the interrupted run in --output-dir; --accept-changed-data, also with other rows than it had
  --dry-run [--json]            print what would be run, with memory and time, and exit
  --explain KEY ...             print what settings do here, their values, defaults and consequences, and exit
  --seed N                      seed of weights, data and samples (default: 0)
  --deterministic               the same bits on any processor: kernels of torch, and not the fastest ones
  --loggers LOGGER ...          further loggers, such as "wandb(project='mine')"; --logger-timeout-s, after which one is given up
  --skip-bad-rows, --num-threads N  skip and count unreadable rows; CPU threads of torch
  --enable-segment-wise-ppo     a proximal policy for each token of asynchronous rollouts
  --push-to-hub ORG/NAME        publish the trained model on the Hugging Face hub, with a card of its settings and results
  --log-level LEVEL, --quiet    messages on stderr; only the summary
  --grace-s S                   after Ctrl-C: rollouts and evaluations have S/2 seconds to end, updates S seconds (default: 30)
  --stall-s S                   print the stacks of all tasks and threads after S seconds without the end of a step (default: never)
  --replay BUNDLE               execute again the step of a crash bundle (--crash-bundles), which a run leaves that a bad number ended

sections of settings, each with `--help SECTION`; all settings with --help-all:
{sections}

examples:
  python -m integration.train                                  # the built-in task: from random weights to 0.99 in a minute
  python -m integration.train --mode sft --task jsonl --model.path DIR --data.path rows.jsonl
  python -m integration.train --mode rl --task jsonl --model.path DIR --data.path rows.jsonl --reward.function mine.py:reward
"""


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The short help of a command, and the sections of its settings."""

    text: str  # {sections} stands for a line about each section
    settings: type  # dataclass whose dataclass fields are the sections
    left_out: tuple[str, ...] = ()  # sections that the command does not read
    flat: bool = False  # options have no section in front, as in --slots


TRAINING = Screen(text=_TRAINING, settings=Config)
"""The help of `rollouts train`."""


def name_as_started(text: str) -> str:
    """Return a text with `rollouts NAME` for `python -m integration.NAME` in a process that was started as the command `rollouts`."""
    if Path(sys.argv[0]).stem != "rollouts":
        return text
    return re.sub(r"python -m integration\.(\w+)", lambda found: f"rollouts {found[1].replace('_', '-')}", text)


def show_help(argv: Sequence[str], print_all: Callable[[], object], screen: Screen = TRAINING) -> str | None:
    """Return the help that --help or --help SECTION ask for, or --help-all of a command that leaves settings out; None for other arguments.

    Args:
        print_all: prints the help of all options to stdout.

    Raises: ConfigError for an unknown section.
    """
    place = next((k for k, argument in enumerate(argv) if argument in ("--help", "-h")), None)
    if place is None:
        return _drop_left_out(print_all, screen) if "--help-all" in argv and screen.left_out else None
    names = list_sections(screen)
    if place + 1 < len(argv) and not argv[place + 1].startswith("-"):
        printed = io.StringIO()  # a stream without an encoding: tyro draws no frames
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            print_all()
        return (_cut_options if screen.flat else _cut_section)(printed.getvalue(), argv[place + 1], screen)
    width = max(map(len, names))
    return screen.text.format(sections="\n".join(f"  {name:<{width}}  {text}" for name, text in names.items())).rstrip()


def _drop_left_out(print_all: Callable[[], object], screen: Screen) -> str:
    """Return the help of all options without those that the command does not read, with frames where stdout takes them."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding=getattr(sys.stdout, "encoding", None) or "utf-8", errors="replace")
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        print_all()
    printed.seek(0)
    flags = {"--" + name.replace("_", "-") for name in screen.left_out}
    kept: list[str] = []
    for part in re.split(r"^(?=(?:╭─)? (?:\S+ )?options)", printed.read(), flags=re.MULTILINE):
        heading = re.match(r"(?:╭─)? (\S+) options", part)
        if heading is None:  # options without a section
            blocks = re.split(r"^(?=(?:│ |  )--|╰)", part, flags=re.MULTILINE)
            kept += [block for block in blocks if re.split(r"[\s,]", block.lstrip("│ "), maxsplit=1)[0] not in flags]
        elif heading[1].replace("-", "_").partition(".")[0] not in screen.left_out:
            kept.append(part)
    return "".join(kept).rstrip()


def find_help(text: str, option: str) -> str:
    """Return the help of one option, in one line, from the help of all options; "" for one without help."""
    form = r"(?:,\s+--\S+)?[^\n]*?(?: {2,}|\n)"  # its other name, and the form of its values
    found = re.search(rf"^ *{re.escape(option)}(?=[ ,]){form}(.*?)(?=^ *--|^ \S+ options|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    words = " ".join(found[1].split()) if found else ""
    return re.sub(r" \(default: .*\)$| \(repeatable\)$", "", words).strip()


def list_sections(screen: Screen = TRAINING) -> dict[str, str]:
    """Return the first sentence about each section of settings, by name."""
    found: dict[str, str] = {}
    for field in fields(screen.settings):
        value: Any = field.default_factory() if callable(field.default_factory) else field.default
        if is_dataclass(value) and field.name not in screen.left_out:
            text = " ".join((inspect.getdoc(type(value)) or "").split())
            found[field.name] = re.split(r"(?<=[a-z0-9)])[.:;](?: |$)", text)[0]
    return found


def _cut_section(text: str, section: str, screen: Screen) -> str:
    """Return a section, and those inside it, from the help of all options. Raises ConfigError for an unknown one."""
    _, *parts = re.split(r"^ (\S+) options *$", text, flags=re.MULTILINE)
    named_parts = zip((name.replace("-", "_") for name in parts[::2]), parts[1::2], strict=True)
    bodies = {name: body for name, body in named_parts if name.partition(".")[0] in list_sections(screen)}
    section = section.replace("-", "_")
    named = {name: body for name, body in bodies.items() if name == section or name.startswith(section + ".")}
    if not named:
        raise ConfigError(f"--help knows no section {section!r}: {suggest(section, bodies)}")
    lines = "\n".join(f"{name}\n{body.strip()}" for name, body in named.items()).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip(" -"))


def _cut_options(text: str, section: str, screen: Screen) -> str:
    """Return the options of a section from a help that lists them without sections. Raises ConfigError for an unknown section."""
    names = list_sections(screen)
    if section not in names:
        raise ConfigError(f"--help knows no section {section!r}: {suggest(section, names)}")
    kind: Any = next(field.default_factory for field in fields(screen.settings) if field.name == section)
    own = {"--" + field.name.replace("_", "-") for field in fields(kind())}
    blocks = re.split(r"^(?= *--)", text, flags=re.MULTILINE)
    chosen = [block.rstrip() for block in blocks if re.split(r"[\s,]", block.strip(), maxsplit=1)[0] in own]
    return "\n".join([section, *chosen])

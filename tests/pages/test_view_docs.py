"""docs/viewing.md: its code runs, its commands are understood, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import tyro
from page_blocks import check_snippets, list_snippets

from integration.settings.command_line import parse_command_line
from integration.view.__main__ import Arguments
from rollouts.types import Sample

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "viewing.md"


def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


def test_the_condition_of_the_page_finds_long_answers_that_were_right():
    names: dict[str, Any] = {}
    exec(list_snippets(PAGE)[0][0], names)
    assert names["is_odd"](Sample(reward=1.0, response="x" * 200)) and not names["is_odd"](Sample(reward=1.0))


def test_commands_of_the_page_and_of_all_commands_are_understood():
    lines = [line.partition("  #")[0] for line in (PAGE.read_text() + (ROOT / "docs" / "commands.md").read_text()).splitlines()]
    views = [shlex.split(line)[3:] for line in lines if line.startswith("python -m integration.view ")]
    runs = [shlex.split(line)[3:] for line in lines if re.match("python -m integration.train .*--(trajectories|log-level)", line)]
    assert len(views) >= 6 and len(runs) >= 4
    for arguments in views:
        assert tyro.cli(Arguments, args=arguments).path.parts[0] == "runs"
    for arguments in runs:
        parse_command_line(arguments)


def test_links_of_the_page_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

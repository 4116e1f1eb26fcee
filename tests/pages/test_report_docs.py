"""docs/report.md: its commands are understood, and its links and pictures exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import tyro

from integration.report.__main__ import Arguments

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_commands_of_the_page_are_understood():
    commands = [line.partition("  #")[0] for line in PAGE.read_text().splitlines() if line.startswith("rollouts report ")]
    assert len(commands) == 3
    for command in commands:
        assert tyro.cli(Arguments, args=shlex.split(command)[2:]).paths[0] == Path("runs/mine")


def test_links_and_pictures_of_the_page_exist():
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

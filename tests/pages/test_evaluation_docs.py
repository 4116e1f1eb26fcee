"""docs/evaluation.md: its code runs, its commands are understood, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from page_blocks import check_snippets

from integration.eval import __main__ as program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evaluation.md"


def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


def find_commands() -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in PAGE.read_text().splitlines()]
    return [line for line in lines if line.startswith("rollouts eval ")]


@pytest.mark.parametrize("line", find_commands())
def test_commands_of_the_page_are_understood(line: str):
    command = program.parse(shlex.split(line)[2:])
    assert command.models and not any(model.startswith("-") for model in command.models)


def test_the_page_has_commands():
    assert len(find_commands()) >= 5


def test_links_of_the_page_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

"""docs/asynchronous.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from page_blocks import check_snippets

from integration.train import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "asynchronous.md"


def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


def test_commands_of_the_page_are_understood(capsys: pytest.CaptureFixture[str]):
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("python -m integration.train ") and "--resume" not in line]
    assert len(lines) >= 3
    for line in lines:
        assert main([*shlex.split(line)[3:], "--dry-run"]) == 0, line
        assert "weight versions behind" in capsys.readouterr().out, line


def test_links_and_files_exist():
    text = PAGE.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / target).exists(), target
    for path in re.findall(r"`((?:tests|benchmarks|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings

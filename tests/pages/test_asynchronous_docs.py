"""docs/asynchronous.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from doc_pages import check_code

from integration.train import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "asynchronous.md"


def test_the_code_of_the_page_runs(tmp_path: Path):
    assert check_code(PAGE, tmp_path) > 0


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

"""docs/asynchronous.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from integration.train import main

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "asynchronous.md"


def test_the_code_of_the_page_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "test_page.py"
    file.write_text("\n\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-n0", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    expected = sum(len(re.findall(r"^(?:async )?def test_", block, re.MULTILINE)) for block in blocks)
    assert expected > 0
    assert f"{expected} passed" in result.stdout, result.stdout[-500:]


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

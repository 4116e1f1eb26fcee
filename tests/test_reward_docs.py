"""docs/authoring_rewards.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import rollouts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "authoring_rewards.md"


def test_the_code_of_the_page_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "test_page.py"
    file.write_text("\n\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-n0", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    expected = sum(len(re.findall(r"^(?:async )?def test_", block, re.MULTILINE)) for block in blocks)
    assert expected > 10
    assert f"{expected} passed" in result.stdout, result.stdout[-500:]


def test_names_of_the_page_exist():
    text = PAGE.read_text()
    for module, name in re.findall(r"rollouts\.rewards\.(\w+):(\w+)", text):
        assert hasattr(__import__(f"rollouts.rewards.{module}", fromlist=[name]), name), name
    for name in re.findall(r"`((?:create_|[A-Z]\w+Reward)\w*)[(`]", text):
        assert name in rollouts.__all__, name
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / target).exists(), target

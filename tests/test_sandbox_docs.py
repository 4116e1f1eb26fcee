"""docs/sandbox.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rollouts.errors import SandboxError
from rollouts.sandbox.limits import SandboxFailure, SandboxLimits
from rollouts.sandbox.run import find_confinement

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "sandbox.md"


def test_the_code_of_the_page_runs(tmp_path: Path):
    try:
        find_confinement()
    except SandboxError as error:
        pytest.skip(str(error)[:200])
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "test_page.py"
    file.write_text("\n\n".join(blocks))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-n0", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "3 passed" in result.stdout, result.stdout[-500:]


def test_what_the_page_names_exists():
    text = PAGE.read_text()
    for limit in fields(SandboxLimits):
        assert f"| `{limit.name}" in text, limit.name
    for failure in SandboxFailure:
        assert f"`{failure.name}`" in text, failure.name
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for name in re.findall(r"^from rollouts import (.+)$", text, re.MULTILINE):
        import rollouts

        assert set(name.split(", ")) <= set(rollouts.__all__)

"""Pages of docs/ whose Python blocks, one after the other, are a file of tests."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run

ROOT = Path(__file__).parents[2]

CODE = """
import os, sys

import pytest

os.chdir(sys.argv[1])
sys.exit(pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", "-n0", sys.argv[2]]))
"""


def read_blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def check_code(page: Path, folder: Path) -> int:
    """Run a page's tests in a process of their own; all must pass. Returns how many there are."""
    blocks = read_blocks(page)
    file = folder / "test_page.py"
    file.write_text("\n\n".join(blocks))
    status, out, error = run(CODE, ROOT, file, folder=folder / "process")
    assert status == 0, out[-3000:] + error[-1000:]
    expected = sum(len(re.findall(r"^(?:async )?def test_", block, re.MULTILINE)) for block in blocks)
    assert f"{expected} passed" in out, out[-500:]
    return expected

"""docs/backends.md: the backend written there passes the contract, and what the page says of the package is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import run
from page_blocks import ROOT, read_blocks

from rollouts.backends.jax import backend as torchax_backend

CODE = """
import os, sys

import pytest

os.chdir(sys.argv[1])
sys.exit(pytest.main(["-c", "pyproject.toml", "-p", "no:cacheprovider", "-n0", sys.argv[2]]))
"""
PAGE = ROOT / "docs" / "backends.md"
BLOCKS = [text for language, text in read_blocks(PAGE) if language == "python"]
CONTRACT = ROOT / "tests" / "backends" / "test_backend_contract.py"


@pytest.mark.slow
def test_the_backend_of_the_page_passes_the_contract(tmp_path: Path):
    assert len(BLOCKS) == 3
    file = tmp_path / "test_my_backend.py"
    file.write_text("\n\n".join(BLOCKS))
    status, out, error = run(CODE, ROOT, file, folder=tmp_path / "process")
    assert status == 0, out[-3000:] + error[-1000:]
    (passed,) = re.findall(r"(\d+) passed", out)
    functions = re.findall(r"^async def test_", CONTRACT.read_text(), re.MULTILINE)
    assert int(passed) >= len(functions) + 4 and "skipped" not in out, out[-500:]


def test_the_backend_of_the_page_is_short():
    (code,) = re.findall(r"^class MyBackend:\n.*?(?=\Z)", BLOCKS[0], re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 32


def test_the_page_tells_of_torchax_what_the_refusal_tells():
    text = " ".join(PAGE.read_text().replace("`", "").split())
    assert torchax_backend.TRIED in text and torchax_backend.FOUND in text


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (ROOT / "docs" / target).exists(), f"backends.md links to {target}"

"""docs/sandbox.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import needs
import pytest
from page_blocks import check_snippets

from rollouts.sandbox.limits import SandboxFailure, SandboxLimits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sandbox.md"


@pytest.mark.slow
@needs.sandbox()
def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


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

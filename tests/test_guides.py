"""Guides whose code is a test file: each runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import run

from rollouts.errors import SandboxError
from rollouts.sandbox.run import find_confinement

ROOT = Path(__file__).parent.parent
GUIDES = ("agents.md", "algorithms.md", "fleets.md", "lora.md", "weight-sync.md")


def has_sandbox() -> bool:
    """Whether programs can be confined here."""
    try:
        find_confinement()
    except SandboxError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_a_guide_runs(name: str, tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.DOTALL | re.MULTILINE)
    left_out = "that_runs_programs" if not has_sandbox() else "no_such_name"
    names = [found for block in blocks for found in re.findall(r"^(?:async )?def (test_\w+)", block, re.MULTILINE)]
    expected = sum(left_out not in found for found in names)
    assert expected > 0, f"{name} tests nothing"
    file = tmp_path / f"test_{Path(name).stem}.py"
    file.write_text("\n\n".join(blocks))
    code = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ("-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-k", f"not {left_out}")
    status, out, error = run(code, *options, file, folder=tmp_path / "run")
    assert status == 0, out[-3000:] + error[-1000:]
    assert f"{expected} passed" in out, out[-500:]


@pytest.mark.parametrize("name", (*GUIDES, "agents-runs.md", "gigpo.md"))
def test_links_of_a_guide_lead_somewhere(name: str):
    text = (ROOT / "docs" / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), f"{name} links to {target}"

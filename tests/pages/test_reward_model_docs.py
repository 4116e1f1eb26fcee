"""docs/reward-models.md: its code runs, its rows are pairs, and what it links to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forked import run

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import prepare_preference_pair

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reward-models.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path: Path):
    file = tmp_path / "test_page.py"
    file.write_text("\n\n".join(blocks("python")))
    code = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    status, out, error = run(code, "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", file, folder=tmp_path / "run")
    assert status == 0, out[-3000:] + error[-1000:]
    assert "5 passed" in out, out[-500:]


def test_the_rows_of_the_page_are_pairs():
    rows = [json.loads(line) for line in "".join(blocks("json")).splitlines()]
    assert len(rows) == 2
    for row in rows:
        prepare_preference_pair(create_char_tokenizer(99), row)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

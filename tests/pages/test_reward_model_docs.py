"""docs/reward-models.md: its code runs, its rows are pairs, and what it links to exists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from page_blocks import check_snippets

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import prepare_preference_pair

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reward-models.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    printed = check_snippets(PAGE, tmp_path, measured=("held-out pairs", "loss:"))
    (right,) = re.findall(r"^held-out pairs ranked right: (\S+)$", printed, re.MULTILINE)
    ((first, last),) = re.findall(r"^loss: (\S+) -> (\S+)$", printed, re.MULTILINE)
    assert float(right) > 0.9
    assert abs(float(first) - math.log(2)) < 1e-4, "policy and reference agree at first: every pair is a coin's toss"
    assert float(last) < 0.9 * float(first)


def test_the_rows_of_the_page_are_pairs():
    rows = [json.loads(line) for line in "".join(blocks("json")).splitlines()]
    assert len(rows) == 2
    for row in rows:
        prepare_preference_pair(create_char_tokenizer(99), row)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

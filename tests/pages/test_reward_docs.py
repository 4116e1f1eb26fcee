"""docs/authoring_rewards.md: its code runs, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_blocks import check_snippets

import rollouts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "authoring_rewards.md"


@pytest.mark.slow
def test_the_code_of_the_page_prints_what_it_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


def test_names_of_the_page_exist():
    text = PAGE.read_text()
    for module, name in re.findall(r"rollouts\.rewards\.(\w+):(\w+)", text):
        assert hasattr(__import__(f"rollouts.rewards.{module}", fromlist=[name]), name), name
    for name in re.findall(r"`((?:create_|[A-Z]\w+Reward)\w*)[(`]", text):
        assert name in rollouts.__all__, name
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / target).exists(), target

"""docs/distributed.md: its two programs run on two processes and print the same numbers; its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from page_blocks import read_blocks
from rank_processes import start_ranks

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_both_programs_of_the_page_run_on_two_processes_with_the_same_numbers(tmp_path: Path):
    printed = []
    for number, block in enumerate(text for language, text in read_blocks(PAGE) if language == "python"):
        children = start_ranks(block, 2, folder=tmp_path / str(number))
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
        assert children[1].out == ""
        printed.append(re.findall(r"loss (\S+), norm (\S+)", children[0].out))
    assert len(printed) == 2
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target

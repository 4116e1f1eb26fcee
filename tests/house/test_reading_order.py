"""docs/architecture.md leads through the house: its links, its picture, its reading order, and the files that one GRPO step runs."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest
from forked import run
from house.packages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
SCRIPT = ROOT / "tools" / "docs" / "count_step.py"
QUESTIONS = {  # a stranger's question -> the file that answers it, by the first table of the page
    "GRPO's loss": "rollouts/algorithms/losses.py",
    "too old": "rollouts/asynchronous",
    "new weights": "rollouts/engines/vllm",
    "checkpoint": "rollouts/training/saving/checkpoints.py",
    "`Sample` holds": "rollouts/types.py",
    "environment": "rollouts/environments",
}


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(ROOT / "tools" / "docs" / "generate_architecture.py"))


def without_counts(text: str) -> str:
    return re.sub(r"\| \**\d+\** \|$", "|", text, flags=re.MULTILINE)


def test_the_picture_and_the_tables_are_those_of_the_imports(generator):
    page = PAGE.read_text()
    assert without_counts(page) == without_counts(generator["write_page"](page)), "run python tools/docs/generate_architecture.py"


def test_the_reading_order_says_how_much_there_is_to_read(generator):
    found = re.findall(r"\| (\d+) \|$", generator["read_part"](PAGE.read_text(), "stops"), re.MULTILINE)
    counts = [generator["count_lines"](stop) for stop in generator["READING_ORDER"]]
    assert len(found) == len(counts)
    for stop, said, count in zip(generator["READING_ORDER"], map(int, found), counts, strict=True):
        assert abs(said - count) <= 10 + count // 5, f"{stop.path}: run python tools/docs/generate_architecture.py"
    assert sum(counts) <= 2850, "a reading order is short"


def test_every_link_leads_somewhere_and_to_the_names_beside_it():
    for line in PAGE.read_text().splitlines():
        targets = [(PAGE.parent / target) for target in re.findall(r"\]\((?!https?:)([^)#]+)", line)]
        assert all(target.exists() for target in targets), line
        files = [target for target in targets if target.suffix == ".py"]
        if line.startswith("|") and "`" in line and files and "rollouts/" in line:
            names = {getattr(node, "name", "") for file in files for node in ast.walk(ast.parse(file.read_text()))}
            asked = re.findall(r"`(\w+)`(?=[^|]* in \[|,|:| \|)", line.split("|", 2)[2])
            assert set(asked) <= names, f"{sorted(set(asked) - names)} are not there: {line}"


def test_a_stranger_finds_the_rooms_from_the_readme_by_one_page():
    assert "(docs/architecture.md" in (ROOT / "README.md").read_text()
    rows = [line for line in PAGE.read_text().partition("## Packages")[0].splitlines() if line.startswith("| ")]
    for question, place in QUESTIONS.items():
        (row,) = [row for row in rows if question in row.split("|")[1]]
        links = re.findall(r"\]\(\.\./([^)#]+)", row)
        assert any(link.startswith(place) for link in links), row
        assert all((ROOT / link).exists() for link in links), row


@pytest.mark.slow
def test_one_step_runs_functions_of_the_files_that_the_page_names(generator, tmp_path: Path):
    code = f"import json, runpy; print(json.dumps(list(runpy.run_path({str(SCRIPT)!r})['trace_step']())))"
    status, out, error = run(code, folder=tmp_path)
    assert status == 0, error[-2000:]
    files = set(json.loads(out.splitlines()[-1]))
    stops = {stop.path for stop in generator["READING_ORDER"]}
    assert files == generator["read_step"](PAGE.read_text()) | (files & stops), "run python tools/docs/generate_architecture.py"
    unread = [stop for stop in stops - files if stop.startswith("rollouts/") and not stop.endswith(("protocol.py", "presets.py"))]
    assert not unread, "the reading order leads past the step"

"""Guides whose code is a script: it prints what they show, and their links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from page_blocks import check_snippets, is_shown

import integration
import rollouts

ROOT = Path(__file__).parents[2]
SECTIONS = {"engines.md": "Texts for prompts"}  # of pages that are run in part
GUIDES = ("agents.md", "algorithms.md", "fleets.md", "gateway.md", "gigpo.md", "lora.md", "tinker.md", "weight-sync.md", *SECTIONS)
MEASURED = ("mean reward:", "loss:")  # lines whose numbers may be others on other machines
LEARN = {"agents.md": 1, "algorithms.md": 3}  # runs of the page, each of which prints "mean reward: A -> B"
OF_TESTS = {"testing.md", "write-your-own.md"}  # pages about tests of one's own code


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_a_guide_prints_what_it_shows(name: str, tmp_path: Path):
    (has_no_sandbox,) = needs.sandbox().args
    left_out = "run_confined" if has_no_sandbox else None
    printed = check_snippets(ROOT / "docs" / name, tmp_path, MEASURED, SECTIONS.get(name, ""), left_out)
    rewards = re.findall(r"^mean reward: (\S+) -> (\S+)$", printed, re.MULTILINE)
    assert len(rewards) == LEARN.get(name, 0)
    assert all(float(last) > float(first) + 0.03 for first, last in rewards), f"{name}: nothing is learned, {rewards}"


def test_no_guide_shows_tests():
    for page in (ROOT / "docs").rglob("*.md"):
        assert "def test_" not in page.read_text() or page.name in OF_TESTS, f"{page.name} shows tests, and not what a user writes"


def test_what_a_page_does_not_show_is_seen():
    assert is_shown("a 1.5\n...\nb ... c\n", "a 1.5\nx\ny\nb 2 c\n")
    assert is_shown("loss: 4.1 -> 1.8\n", "loss: 3.9 -> 2.0\n", ("loss",))
    assert not is_shown("loss: 4.1 -> 1.8\n", "loss: 3.9 -> 2.0\n")
    assert not is_shown("a\n", "a\nb\n") and not is_shown("a\n", "") and not is_shown("", "a\n")


@pytest.mark.parametrize("name", (*GUIDES, "agents-runs.md"))
def test_links_of_a_guide_lead_somewhere(name: str):
    text = (ROOT / "docs" / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), f"{name} links to {target}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_OTHERS = {"coming-from.md", "coming-from-trl.md", "coming-from-verl.md", "parity.md"}  # pages whose names are those of other projects
OF_METRICS = {"metrics.md"}  # tests/pages/test_metrics_page.py
NOT_OURS = {"load_inplace", "io_uring"}  # of vLLM and of Linux


def read_sources(*folders: str) -> str:
    """The Python code of some folders; of the packages that is what is imported."""
    imported = {"rollouts": Path(rollouts.__file__).parent, "integration": Path(integration.__file__).parent}
    return "\n".join(path.read_text() for name in folders for path in sorted(imported.get(name, ROOT / name).rglob("*.py")))


def find_names(page: Path) -> Iterator[tuple[str, str]]:
    """Each lower-case name with an underscore in backquotes, and its paragraph; `<k>` and what stands before a slash are left out."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=- )", text):
        for name in re.findall(r"`((?:[a-z]\w*/)*[a-z][a-z0-9]*_[a-z0-9_]*(?:<\w+>)?)`", paragraph):
            yield name.split("/")[-1], paragraph


def test_every_metric_that_a_page_names_is_logged():
    """Names beside the word metric are keys somewhere in the code that runs, or functions; begun ones are those of f-strings."""
    code = read_sources("rollouts", "integration")
    keys = {word for text in re.findall(r"[\"']([\w/ ]+)[\"']", code) for word in re.split("[ /]", text)}
    keys |= set(re.findall(r"\b\w+(?==)|(?<=def )\w+|(?<=class )\w+", code)) | set(re.findall(r"^ +(\w+): ", code, re.MULTILINE))
    begun = {prefix for prefix in re.findall(r"f[\"'](\w+_)\{", code) if len(prefix) > 5}
    modules = {path.stem for path in (ROOT / "rollouts").rglob("*.py")}
    checked, wrong = 0, []
    for page in PAGES:
        for name, paragraph in find_names(page):
            if page.name in OF_OTHERS | OF_METRICS or not re.search(r"metric|watch|logged", paragraph):
                continue
            checked += 1
            known = name.partition("<")[0] in begun if "<" in name else name in keys | modules or any(name.startswith(p) for p in begun)
            if not known:
                wrong.append(f"{page.name}: {name}")
    assert checked > 100
    assert not wrong, f"nobody logs {wrong}"


def test_every_name_that_a_page_quotes_exists():
    known = set(re.findall(r"\w+", read_sources("rollouts", "integration", "benchmarks", "examples", "tests", "tools")))
    begun = re.findall(r"(?<!\w)(\w+_)\{", read_sources("rollouts", "integration"))
    places = {path.name for folder in ("tests", "tools") for path in (ROOT / folder).iterdir()} | NOT_OURS
    wrong = [
        f"{page.name}: {name}"
        for page in PAGES
        if page.name not in OF_OTHERS | OF_METRICS
        for name, _ in find_names(page)
        if name not in known | places and not any(name.startswith(prefix) for prefix in begun if len(prefix) > 5)
    ]
    assert not wrong, f"nothing has the name {wrong}"

"""Guides whose code is a test file: each runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from forked import run

import integration
import rollouts

ROOT = Path(__file__).parents[2]
RUN_IN_PART = ("engines.md",)  # the blocks with tests alone
GUIDES = ("agents.md", "algorithms.md", "fleets.md", "gigpo.md", "lora.md", "weight-sync.md", *RUN_IN_PART)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_a_guide_runs(name: str, tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if name not in RUN_IN_PART or "def test_" in block]
    (has_no_sandbox,) = needs.sandbox().args
    left_out = "that_runs_programs" if has_no_sandbox else "no_such_name"
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


@pytest.mark.parametrize("name", (*GUIDES, "agents-runs.md"))
def test_links_of_a_guide_lead_somewhere(name: str):
    text = (ROOT / "docs" / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), f"{name} links to {target}"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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

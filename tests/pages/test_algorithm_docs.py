"""docs/algorithms and docs/parity.md say what the code says, and the code of write-your-own.md runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from forked import run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(ROOT / "tools" / "docs" / "generate_algorithms.py"))


def test_every_preset_has_an_oracle_and_a_page(generator):
    presets = set(generator["find_presets"]())
    assert presets == {name for name in generator["parse_file"](ROOT / generator["ORACLES"])[1] if name in presets}, "write its oracle"
    assert {path.stem for path in (DOCS / "algorithms").glob("*.md")} == presets | {"README", "write-your-own"}


def test_pages_are_up_to_date(generator):
    stale = [path.name for path in generator["find_stale"](generator["write_all"]())]
    assert not stale, f"run python tools/docs/generate_algorithms.py: {stale}"


def test_every_hyper_parameter_has_a_meaning(generator):
    for name, preset in generator["find_presets"]().items():
        description = generator["describe"](preset)
        assert description.when, f"{name} does not say when to use it"
        parameters = generator["inspect"].signature(preset).parameters
        missing = [key for key in parameters if not generator["meaning_of"](key, description)]
        assert not missing, f"{name} does not say what {missing} mean"
        assert set(description.arguments) <= set(parameters), (
            f"{name} describes {set(description.arguments) - set(parameters)}, which it lacks"
        )


def test_links_between_pages_lead_somewhere():
    for page in (DOCS / "algorithms").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.slow
def test_the_code_of_write_your_own_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "algorithms" / "write-your-own.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    file = tmp_path / "test_write_your_own.py"
    file.write_text("\n\n".join(blocks))
    code = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    status, out, error = run(code, "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", file, folder=tmp_path / "run")
    assert status == 0, out[-3000:] + error[-1000:]
    assert "20 passed" in out, out[-500:]


@pytest.mark.slow
def test_the_table_of_parity_is_up_to_date():
    page = runpy.run_path(str(ROOT / "tools" / "docs" / "generate_parity.py"))["write_page"]()
    assert (DOCS / "parity.md").read_text() == page, "run python tools/docs/generate_parity.py"

"""The documentation as a site: it builds without network and warnings, loads nothing from other hosts, and has every setting and name."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.settings.config import Config
from integration.settings.option_effects import list_options, spell_option

ROOT = Path(__file__).parents[2]
SITE_TOOLS = ROOT / "tools" / "docs" / "site"


@pytest.fixture(scope="module")
def tools() -> Iterator[None]:
    """The modules of the hooks can be imported."""
    sys.path.insert(0, str(SITE_TOOLS))
    yield
    sys.path.remove(str(SITE_TOOLS))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: a broken link or anchor, or a page without a place, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_page_loads_anything_from_another_host(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text()
        found = re.findall(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"?((?:https?:)?//[^\"> ]+)", text)
        found += re.findall(r"<link(?![^>]*rel=\"?canonical)[^>]*\bhref=\"?((?:https?:)?//[^\"> ]+)", text)
        assert not found, f"{page.relative_to(site)} loads {found}"
        assert "class=mermaid" not in text and 'class="mermaid"' not in text, f"{page.relative_to(site)} needs Mermaid from another host"
    for sheet in (site / "assets").rglob("*.css"):
        assert not re.search(r"url\(\"?(https?:)?//|@import", sheet.read_text()), sheet.name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_setting_stands_on_the_page_of_settings_with_its_help_and_default(site: Path):
    page = (site / "settings.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    names = dict(list_options(Config()))
    assert len(names) > 100
    for name in names:
        spelled = spell_option(name)
        assert f"<code>{spelled}</code>" in page, f"{spelled} is not on the page"
    assert "own model: 1e-06" in text and "rollout batches to train on" in text


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_public_name_and_every_page_can_be_searched_for(site: Path):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"] for entry in index}
    names = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    anchors = {place.rpartition(".")[2] for place in places if "#" in place}
    assert set(names) <= anchors, f"without a place in the API: {sorted(set(names) - anchors)[:5]}"
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert built in places, f"{built} cannot be found"


def test_every_page_has_a_place_in_the_navigation():
    """The build fails for a page without one; this says so in no time."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    places = re.findall(r"(?:: |- )([\w/.-]+)$", nav, re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    left_out = {page for page in pages if not any(page == place or (place.endswith("/") and page.startswith(place)) for place in places)}
    assert not left_out, f"give {sorted(left_out)} a place in mkdocs.yml"
    assert len(places) == len(set(places)), "a page has two places"


def test_a_link_into_the_source_tree_opens_the_page_of_the_file(tools: None):
    from source_pages import DOCS, rewrite_links

    text = "[a](../rollouts/types.py) [b](lora.md#x) [c](../rollouts/data) [d](https://example.org/x.py)\n```\n[e](../README.md)\n```\n"
    rewritten, found = rewrite_links(text, DOCS / "page.md", "page.md")
    assert rewritten == text.replace("../rollouts/types.py", "source/rollouts/types.py.md").replace(
        "../rollouts/data", "source/rollouts/data/index.md"
    )
    assert {path.name for path in found} == {"types.py", "data"}
    below, _ = rewrite_links("[a](../../CONTRIBUTING.md)", DOCS / "algorithms" / "page.md", "algorithms/page.md")
    assert below == "[a](../project/contributing.md)"
    assert rewrite_links("[a](../nowhere.py)", DOCS / "page.md", "page.md")[0] == "[a](../nowhere.py)", "the build tells it"


def test_a_link_with_the_name_of_a_page_as_its_text_gets_the_title_of_that_page(tools: None):
    from source_pages import DOCS, name_links

    text = "see [lora.md](lora.md#settings), [this](lora.md) and [nowhere.md](nowhere.md)"
    title = (DOCS / "lora.md").read_text().split("\n")[0].removeprefix("# ")
    assert name_links(text, DOCS / "page.md") == text.replace("[lora.md]", f"[{title}]")


def test_formulas_become_mathml_and_code_and_shell_variables_stay(tools: None):
    from formulas import write_formulas

    text = write_formulas("$$\na_b \\le c\n$$\nis $x_1$ in `$y$`:\n```\n$URL and $z$\n```\n")
    assert text.count("<math") == 2 and "`$y$`" in text and "$URL and $z$" in text and "<msub>" in text
    assert write_formulas("run $URL and $HOME") == "run $URL and $HOME"


def test_a_flowchart_becomes_a_picture_with_its_boxes_and_arrows(tools: None):
    from package_picture import draw_packages

    text = draw_packages('```mermaid\nflowchart BT\n  a["the first"]\n  b --> a\n  c --> b\n  c --> a\n```\nrest\n')
    assert text.count("<line") == 3 and "the first" in text and text.endswith("rest\n") and "mermaid" not in text


def test_a_docstring_reads_the_same_as_markdown(tools: None):
    from docstrings import to_markdown

    text = to_markdown("r * kl at mask < 1.\n\nArgs:\n    log_probs: # [B, T] a * b.\n\nReturns: `x * y`.\n")
    assert text == "r \\* kl at mask \\< 1.\n\nArgs:\n    log_probs: [B, T] a \\* b.\n\n\n**Returns:** `x * y`.\n"

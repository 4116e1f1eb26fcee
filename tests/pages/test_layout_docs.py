"""docs/layouts.md and docs/troubleshooting.md say what the code says."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def read_messages(source: str) -> list[str]:
    """The texts of a file, those in pieces put together, with … for what is filled in."""
    texts: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def find_quotes() -> list[str]:
    """The messages that the page quotes, with their … ."""
    quotes = re.findall(r"^\*\*`([^`]+)`\*\*", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quotes) > 20
    return quotes


def find_missing(quotes: list[str], sources: dict[Path, str]) -> list[str]:
    """The quotes that no message of these files has."""
    texts = "\n".join(text for source in sources.values() for text in read_messages(source))
    return [quote for quote in quotes if quote.strip("… ") not in texts]


def test_every_message_that_is_quoted_is_one_of_the_librarys():
    sources = {path: path.read_text() for package in ("rollouts", "integration") for path in (ROOT / package).rglob("*.py")}
    quotes = find_quotes()
    beginnings = [max(quote.split("…"), key=len).strip()[:16] for quote in quotes]
    likely = {path: text for path, text in sources.items() if any(beginning in text for beginning in beginnings)}
    missing = find_missing(quotes, likely)
    missing = missing and find_missing(missing, sources)  # a message may be broken in its first words
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ["layouts.md", "troubleshooting.md"])
def test_links_and_settings_exist(name: str):
    text = (DOCS / name).read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (DOCS / target).exists(), f"{name} links to {target}"
    from integration.settings.config import Config
    from rollouts.config_files import to_dict

    def flatten(values: dict, prefix: str = "--") -> set[str]:
        out: set[str] = set()
        for key, value in values.items():
            flag = prefix + key.replace("_", "-")
            out |= flatten(value, flag + ".") if isinstance(value, dict) else {flag}
        return out

    known = flatten(to_dict(Config()))
    for flag in re.findall(r"--(?:backend|engine|rl|hardware|lora|reward|generation|checkpoint)\.[a-z.-]+[a-z]", text):
        assert flag in known, f"{name}: {flag}"


@pytest.mark.slow
def test_the_tables_of_layouts_are_those_of_the_formulae(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("generate_layouts", ROOT / "tools" / "docs" / "generate_layouts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate_layouts", module)  # dataclasses look for their module there
    spec.loader.exec_module(module)
    text = (DOCS / "layouts.md").read_text()
    tables = module.create_tables()
    assert module.fill_page(text, tables) == text, "run python tools/docs/generate_layouts.py"
    most = [line.split("|")[6].strip() for line in tables["layouts"][2:]]
    assert len(most) == len(module.LAYOUTS) and "0" not in most, "a layout does not fit"


def test_readers_of_scaling_find_the_layouts_at_once():
    first = (DOCS / "scaling.md").read_text().split("\n## ")[0]
    assert "](layouts.md)" in first and "](troubleshooting.md)" in first

"""Pages of the site for files outside docs/: a link into the source tree opens the file as a page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PROJECT_PAGES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "README.md": "project/readme.md",
}
"""Pages of files at the top that are Markdown themselves, by file."""
LANGUAGES = {".py": "python", ".pyi": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".txt": "text", ".yml": "yaml"}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
FENCE = re.compile(r"^(`{3,}).*?^\1 *$", re.DOTALL | re.MULTILINE)


def rewrite_links(text: str, source: Path, page: str) -> tuple[str, set[Path]]:
    """Replace links to files outside docs/ by links to their pages.

    Args:
        text: Markdown.
        source: file that has the text, to which its links are relative.
        page: place of the text in the site, such as "algorithms/grpo.md".

    Returns: the text, and the files and directories outside docs/ that it links to. A link that leads nowhere stays as it is: the build
    tells it.
    """
    found: set[Path] = set()

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / link[1]))
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        if target.is_relative_to(DOCS):
            place = target.relative_to(DOCS).as_posix()
        else:
            place = find_page(target)
            found.add(target)
        return os.path.relpath(place, PurePosixPath(page).parent) + (link[2] or "")

    parts, end = [], 0
    for fence in FENCE.finditer(text):  # what stands in a block of code is no link
        parts += [LINK.sub(rewrite, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewrite, text[end:])]), found


def name_links(text: str, source: Path) -> str:
    """Replace the text of a link that is the name of a page, such as [lora.md](lora.md), by the title of that page."""

    def name(link: re.Match[str]) -> str:
        target = source.parent / link[1]
        title = re.search(r"^# (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE) if target.is_file() else None
        return f"[{title[1]}]({link[1]}{link[2] or ''})" if title else link[0]

    return re.sub(r"\[(?:docs/)?[\w/-]+\.md\]\(([\w./-]+\.md)(#[^)]*)?\)", name, text)


def find_page(path: Path) -> str:
    """Return the place in the site of a file or directory outside docs/."""
    name = path.relative_to(ROOT).as_posix()
    return PROJECT_PAGES.get(name, f"source/{name}/index.md" if path.is_dir() else f"source/{name}.md")


def write_source_page(path: Path) -> str:
    """Return a page in Markdown: a file's text, a notebook's cells, or a directory's list of files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        children = [f"{child.name}{'/' * child.is_dir()}" for child in list_directory(path)]
        return _head(name) + "\n".join(f"- [{child}]({child})" for child in children) + "\n"
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return _head(name) + "\n\n".join(_write_cell(cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]) + "\n"
    return _head(name) + _fence(path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text"), numbered=True)


def list_directory(path: Path) -> list[Path]:
    """Return the files and packages of a directory that a reader opens, by name."""
    return [
        child
        for child in sorted(path.iterdir())
        if not child.name.startswith((".", "__pycache__")) and (child.is_dir() or child.suffix in {*LANGUAGES, ".ipynb"})
    ]


def _head(name: str) -> str:
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"


def _write_cell(cell: dict[str, object]) -> str:
    text = "".join(cell["source"])  # type: ignore[arg-type]
    return text if cell["cell_type"] == "markdown" else _fence(text, "python")


def _fence(text: str, language: str, *, numbered: bool = False) -> str:
    ticks = max([*(len(run) for run in re.findall(r"`{3,}", text)), 2]) + 1
    return f"{'`' * ticks}{{.{language}{' linenums=1' if numbered else ''}}}\n{text.rstrip()}\n{'`' * ticks}\n"

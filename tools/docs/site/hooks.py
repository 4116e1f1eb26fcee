"""Hooks of mkdocs: pages made from the code, and links into the source tree that work in the site as on a code host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from api_pages import write_api_pages
from formulas import write_formulas
from mkdocs.structure.files import File, Files
from package_picture import draw_packages
from settings_page import write_settings_page
from source_pages import DOCS, PROJECT_PAGES, ROOT, find_page, list_directory, name_links, rewrite_links, write_source_page


def on_config(config: Any) -> Any:
    """Put the pages of a folder in the place of its name in the navigation, such as `algorithms/`."""
    pages = [*write_api_pages(), *(path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md")))]

    def expand(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: expand(value) for title, value in item.items()}
        if isinstance(item, list):
            return [expand(value) for value in item]
        first = {f"{item}index.md", f"{item}README.md"}
        return sorted((page for page in pages if page.startswith(item)), key=lambda page: page not in first) if item.endswith("/") else item

    config.nav = expand(config.nav)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages, and a page for each file and directory outside docs/ that a page links to."""
    generated = {"settings.md": write_settings_page(), **write_api_pages()}
    wanted = {ROOT / name for name in PROJECT_PAGES if (ROOT / name).exists()}
    for page in DOCS.rglob("*.md"):
        wanted |= rewrite_links(page.read_text(encoding="utf-8"), page, page.relative_to(DOCS).as_posix())[1]
    done: set[Path] = set()
    while wanted:  # a page of a directory links to further files
        path = wanted.pop()
        done.add(path)
        if path.is_dir():
            wanted |= set(list_directory(path)) - done
        text, found = rewrite_links(write_source_page(path), path / "_" if path.is_dir() else path, find_page(path))
        wanted |= found - done
        generated[find_page(path)] = text
    for name, text in generated.items():
        file = File.generated(config, name, content=text)
        if name.startswith(("source/", "project/readme")):
            file.inclusion = file.inclusion.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page in docs/, and draw formulas and the picture of the packages."""
    name = page.file.src_uri
    if (DOCS / name).exists():
        markdown, _ = rewrite_links(name_links(markdown, DOCS / name), DOCS / name, name)
    return draw_packages(write_formulas(markdown))

"""Pages of the public names, package by package, from their docstrings by mkdocstrings."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from generate_reference import LIBRARY, ROOT, first_line, read_stub

HEAD = """# API

Signatures and docstrings of all public names, package by package. Each is imported from its package or from `rollouts`.
[Public names](../reference.md) has them on one page, one line a name.

"""


def write_api_pages() -> Mapping[str, str]:
    """Return the pages by their places in the site: a page a package, and a list of them."""
    packages: dict[str, list[str]] = defaultdict(list)
    for found in read_stub(LIBRARY / "__init__.pyi"):
        module = ".".join(found.path.relative_to(ROOT).with_suffix("").parts)
        packages[found.package].append(f"{module}.{found.name}")
    pages, lines = {}, [HEAD]
    for package, names in packages.items():
        place = LIBRARY.joinpath(*package.split(".")[1:])
        title = first_line(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
        pages[f"api/{package}.md"] = f"# {package}\n\n{title}\n\n" + "\n".join(f"::: {name}\n" for name in names)
        lines.append(f"- [`{package}`]({package}.md): {title}")
    return {**pages, "api/index.md": "\n".join(lines) + "\n"}

"""docs/reference.md: every public name with the first line of its docstring and its place, as the stubs of the packages list them.

python tools/docs/generate_reference.py            write the page
python tools/docs/generate_reference.py --check    exit 1 where it is not up to date
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "rollouts"
PAGE = ROOT / "docs" / "reference.md"
COMMAND = "python tools/docs/generate_reference.py"

HEAD = f"""# Reference

All public names. Each is imported from its package or from `rollouts`: `from rollouts.algorithms import grpo` and
`from rollouts import grpo` give the same object, and neither loads anything but the module that has it. Other functions are
imported from their modules; they may change without notice.

This page is written by `{COMMAND}` from the lists beside each package's `__init__.py`.
"""


@dataclass(frozen=True)
class PublicName:
    """A name as a stub lists it."""

    name: str
    package: str  # "rollouts.algorithms", or a module at the root of the library: "rollouts.types"
    path: Path  # file that defines it


@cache
def parse(path: Path) -> ast.Module:
    """Read a file once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def find_file(folder: Path, module: str) -> Path:
    """Return the file of a module, or the stub of a package."""
    place = folder.joinpath(*module.split("."))
    return place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.pyi"


def read_stub(stub: Path) -> Iterator[PublicName]:
    """Yield the public names of a package in the order of its stub, those of `from .package import *` included."""
    package = ".".join(stub.parent.relative_to(ROOT).parts)
    for node in parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1 and node.module, f"{stub}:{node.lineno} does not import from a module of its own package"
            path = find_file(stub.parent, node.module)
            if node.names[0].name == "*":
                yield from read_stub(path)
                continue
            place = f"{package}.{node.module}" if stub.parent == LIBRARY else package
            for alias in node.names:
                assert alias.asname == alias.name, f"{stub}:{node.lineno} does not offer {alias.name}: write `{alias.name} as {alias.name}`"
                yield PublicName(alias.name, place, path)


def find_definition(path: Path, name: str) -> ast.stmt:
    """Return the statement that gives a name its value."""
    for node in parse(path).body:
        names = {getattr(node, "name", None), getattr(getattr(node, "target", None), "id", None)}
        names |= {getattr(target, "id", None) for target in getattr(node, "targets", [])}
        if name in names:
            return node
    raise AssertionError(f"{path.relative_to(ROOT)} does not define {name}")


def describe(path: Path, name: str) -> str:
    """Return the first paragraph of a docstring, that below a value included."""
    node = find_definition(path, name)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    body = parse(path).body
    after = body[body.index(node) + 1 :][:1]
    return next((str(n.value.value) for n in after if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)), "")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(parse(path)) or "").split("\n")[0]


def write_page() -> str:
    """Return the text of the page."""
    lines, package = [HEAD], ""
    for found in read_stub(LIBRARY / "__init__.pyi"):
        if found.package != package:
            package = found.package
            place = LIBRARY.joinpath(*package.split(".")[1:])
            title = first_line(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
            lines.append(f"\n## `{package}`\n\n{title}\n\n| name | | place |\n|---|---|---|")
        place = found.path.relative_to(ROOT).as_posix()
        text = describe(found.path, found.name).replace("|", r"\|")
        lines.append(f"| `{found.name}` | {text} | [{place.removeprefix('rollouts/')}](../{place}) |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is not up to date")
    page = write_page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

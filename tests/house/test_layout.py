"""The rooms of the house: which there are, which may import which, how many files they hold and how these are called."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from house.packages import FACADES, LIBRARY, LOOPS, ORDER, PACKAGES, ROOT, WORDS, find_room, list_imports, parse, walk

FILES = sorted(LIBRARY.rglob("*.py"))
ALL_FILES = [*FILES, *sorted((ROOT / "integration").rglob("*.py"))]

MAX_FILES = 12  # of Python in a folder, besides __init__.py
MORE_FILES = {  # folder -> how many it may hold
    "rollouts": len(WORDS) + len(LOOPS) + 1,  # and _lazy.py
    "rollouts/algorithms": 19,  # a family of formulas each, flat as the papers are
    "integration/run": 13,  # a file for each stage of a run, and what they share
}

NAMED_LIKE_THEIR_FOLDER = {"rollouts/engines/fleet/fleet.py"}  # the class that the other files of the folder are parts of

ORCHESTRATION = {"generation", "agents", "gateway", "training", "asynchronous", *LOOPS}  # work with any engine and any backend
MAY_BE_KNOWN = {
    "rollouts.engines.protocol",
    "rollouts.backends.protocol",
    "rollouts.backends.futures",
}


def tell(wrong: list[str]) -> None:
    """Fail with all that is wrong at once."""
    assert not wrong, "\n" + "\n".join(wrong)


def list_own_imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """Place, whole name and room of each module of the library that a file imports."""
    for line, module in list_imports(path):
        if module.startswith("rollouts."):
            yield f"{path.relative_to(ROOT)}:{line}", module, module.split(".")[1]


def test_every_room_stands_in_the_order_once():
    rooms = {find_room(path) for path in FILES} - {"__init__", "_lazy"}
    assert rooms == set(ORDER) and len(ORDER) == len(rooms), "say in tests/house/packages.py where it stands"
    assert all((LIBRARY / package / "__init__.py").exists() for package in (*PACKAGES, *FACADES))


def test_a_module_imports_only_what_stands_before_it():
    wrong: list[str] = []
    for path in FILES:
        own = find_room(path)
        for place, module, other in list_own_imports(path) if own != "__init__" else ():
            if other == own or "_lazy" in (own, other):
                continue
            if ORDER.index(other) > ORDER.index(own):
                wrong.append(f"{place} imports {module}, which stands after {own}")
            if {own, other} == {"engines", "backends"}:
                wrong.append(f"{place} imports {module}: engines and backends do not know each other")
            if own in ORCHESTRATION and other in {"engines", "backends"} and module not in MAY_BE_KNOWN:
                wrong.append(f"{place} imports {module}: only protocols of {other} are known here")
    tell(wrong)


def test_files_of_a_package_do_not_import_in_a_circle():
    arrows: dict[str, set[str]] = {}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES if path.name != "__init__.py"}
    for module, path in modules.items():
        arrows[module] = {name for node in parse(path).body if isinstance(node, ast.ImportFrom) and (name := node.module or "") in modules}
    while free := {module for module, others in arrows.items() if not others}:
        arrows = {module: others - free for module, others in arrows.items() if module not in free}
    assert not arrows, f"a circle, or what imports it: {sorted(arrows)}"


def test_the_library_does_not_know_its_applications():
    applications = {"integration", "tests", "benchmarks", "examples", "tools"}
    found = [(path, line, module) for path in FILES for line, module in list_imports(path)]
    tell([f"{path.relative_to(ROOT)}:{line}" for path, line, module in found if module.split(".")[0] in applications])


def test_imports_name_the_whole_module():
    found = [(path, line, module) for path in ALL_FILES for line, module in list_imports(path)]
    tell([f"{path.relative_to(ROOT)}:{line} imports relatively" for path, line, module in found if module.startswith(".")])


def test_a_folder_holds_at_most_a_dozen_files():
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in ALL_FILES if path.name != "__init__.py")
    tell([f"{folder} holds {n} files" for folder, n in counts.items() if n > MORE_FILES.get(folder, MAX_FILES)])
    assert all(counts[folder] > MAX_FILES for folder in MORE_FILES), "no exception that is not needed"


def test_the_name_of_a_file_does_not_repeat_that_of_its_folder():
    repeating = [path.relative_to(ROOT).as_posix() for path in ALL_FILES if f"{path.stem}_".startswith(f"{path.parent.name}_")]
    tell([path for path in repeating if path not in NAMED_LIKE_THEIR_FOLDER])


def test_a_name_is_imported_from_where_it_is_defined():
    """`import x as x` offers a name from a second place."""
    nodes = ((path, node) for path in ALL_FILES if path.name != "__init__.py" for node in walk(path))
    found = [(path, alias) for path, node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    tell([f"{path.relative_to(ROOT)}:{alias.lineno} {alias.name}" for path, alias in found if alias.asname == alias.name])

"""`metadata` is the user's: the library reads the keys of METADATA_KEYS, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rollouts.types import METADATA_KEYS

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for path in (*sorted((ROOT / "rollouts").rglob("*.py")), *sorted((ROOT / "integration").rglob("*.py")))
    if "simulate" not in path.parts  # a user of the library: its generate function keeps its own values in the metadata of its samples
]


def is_metadata(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "metadata") or (isinstance(node, ast.Name) and node.id == "metadata")


def find_keys(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Yield line and key of each look into a mapping called metadata, and of each entry that is written into one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_metadata(node.value):
            yield node.lineno, node.slice
        elif isinstance(node, ast.Compare) and is_metadata(node.comparators[0]) and isinstance(node.ops[0], ast.In | ast.NotIn):
            yield node.lineno, node.left
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and is_metadata(function.value) and function.attr in ("get", "pop", "setdefault"):
                yield node.lineno, node.args[0]
            if getattr(function, "id", "") != "save_file":  # of safetensors, whose metadata is the file's
                written = [sub for k in node.keywords if k.arg == "metadata" for sub in ast.walk(k.value) if isinstance(sub, ast.Dict)]
                yield from ((node.lineno, key) for entries in written for key in entries.keys if key is not None)


def test_the_library_reads_and_writes_declared_keys_of_metadata_only():
    wrong: list[str] = []
    found: set[str] = set()
    for path in FILES:
        for line, key in find_keys(ast.parse(path.read_text())):
            name = key.value if isinstance(key, ast.Constant) else None
            found.add(str(name))
            if name not in METADATA_KEYS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: metadata[{ast.unparse(key)}]")
    assert not wrong, "make a field of it, or declare the key in types.METADATA_KEYS:\n" + "\n".join(wrong)
    assert found == set(METADATA_KEYS), f"declared, and never read: {set(METADATA_KEYS) - found}"


def test_no_module_reads_its_own_source_when_it_is_imported():
    for path in FILES:
        for statement in ast.parse(path.read_text()).body:
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                called = [ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)]
                reads = [name for name in called if name.rpartition(".")[2] in ("getsource", "open", "read_text", "read_bytes")]
                assert not reads, f"{path.relative_to(ROOT)}:{statement.lineno} calls {reads[0]} when it is imported"

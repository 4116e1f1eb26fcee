"""Separation of tests from the program: the program's names in a test, and tests that cannot be separated, from the text alone.

The program's definitions do not matter: a program that defines `set` or `math` must not decide what these are in a test.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib.util
import math
import symtable
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_KNOWN: Final = MappingProxyType({
    **{name: f"math:{name}" for name in dir(math) if not name.startswith("_")},
    **{name: f"collections:{name}" for name in collections.__all__},
    **{name: f"datetime:{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")},
    **{name: f"typing:{name}" for name in ("Any", "Dict", "List", "Optional", "Set", "Tuple", "Union", "Callable", "Iterable")},
    "Fraction": "fractions:Fraction", "Decimal": "decimal:Decimal", "reduce": "functools:reduce", "deepcopy": "copy:deepcopy",
    "TestCase": "unittest:TestCase", "approx": "pytest:approx", "np": "numpy", "numpy": "numpy", "pytest": "pytest",
})  # fmt: skip
"""Import places of names that tests use without an import, because their original programs had them."""

_OF_TESTS: Final = frozenset({
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "frozenset", "int", "isinstance", "len", "list", "map", "max",
    "min", "print", "range", "repr", "round", "set", "sorted", "str", "tuple", "type", "zip", "callable",
})  # fmt: skip
_NEED_ITS_PROCESS: Final = frozenset({
    "stdout", "stdin", "stderr", "redirect_stdout", "redirect_stderr", "patch", "mock", "monkeypatch", "capsys", "getsource",
    "signature", "getfullargspec",
})  # fmt: skip
_EXPECTING = ("assertRaises", "assertRaisesRegex", "raises")


@dataclass(frozen=True)
class Separation:
    """The program's names in tests."""

    names: tuple[str, ...]
    exceptions: tuple[str, ...]  # the names among these that are caught or expected to be raised
    ambient: tuple[tuple[str, str], ...]  # (name, module or module:name) of other names that the tests do not import


def find_obstacle(source: str) -> str | None:
    """Return the reason in a test's text why it cannot run apart from the program; None if there is none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith):
            return "it waits for coroutines of the program"
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        used = {getattr(node, "attr", None), getattr(node, "id", None), *imported}
        if found := sorted(name for name in used & _NEED_ITS_PROCESS if name is not None):
            return f"it looks into the process of the program ({found[0]}); test what is printed with {{'stdin': ..., 'stdout': ...}}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or "."] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in modules:
                if not _is_installed(name.split(".")[0]):
                    return f"it imports {name!r}, which is not installed; the names of the program are there without an import"
    return None


def separate(sources: Sequence[str], entry_points: Iterable[str] = ()) -> Separation | str:
    """Return the program's names among those that tests use and do not define, or the reason why they cannot be told.

    Builtins, modules of Python and the like are Python's, unless one is an entry point or the only function called: in
    `assert sum(10, 15) == 6` alone the program defines `sum`.

    Args:
        sources: source texts of all tests that run together, setup included.
        entry_points: names that the program is known to define.
    """
    text = "\n".join(sources)
    tree, free = ast.parse(text), _free_names(text)
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)} & free
    modules = (free & sys.stdlib_module_names) - calls
    ambient = {name for name in free if name in _KNOWN or name in modules}
    names = (free - ambient - set(dir(builtins))) | (free & set(entry_points))
    if not names:
        candidates = (calls & ambient) | {name for name in calls if hasattr(builtins, name) and name not in _OF_TESTS}
        names = candidates or {name for name in calls if hasattr(builtins, name)}
        if len(names) > 1:
            return f"which of {', '.join(sorted(names))} is the program's cannot be told: name it in metadata['entry_point']"
    if not names:
        return "it uses no name of the program"
    for node in ast.walk(tree):
        inherits = isinstance(node, ast.ClassDef) and [*node.bases, *node.decorator_list]
        if any(isinstance(base, ast.Name) and base.id in names for base in inherits or ()):
            return "it derives a class from one of the program"
    found = tuple(sorted((name, _KNOWN.get(name, name)) for name in ambient - names))
    return Separation(tuple(sorted(names)), tuple(sorted(names & _expected_exceptions(tree))), found)


def _free_names(text: str) -> set[str]:
    """Return the names that a text reads, at its top level or as globals of its functions, and does not assign."""
    top = symtable.symtable(text, "test", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and (table is top or symbol.is_global())}
    return {name for name in read - own if not (name.startswith("__") and name.endswith("__"))}


def _expected_exceptions(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        kinds: list[ast.expr | None] = []
        if isinstance(node, ast.ExceptHandler):
            kinds = [node.type]
        elif isinstance(node, ast.Call) and node.args and getattr(node.func, "attr", getattr(node.func, "id", "")) in _EXPECTING:
            kinds = [node.args[0]]
        for kind in kinds:
            inner = kind.elts if isinstance(kind, ast.Tuple) else [kind]
            found |= {one.id for one in inner if isinstance(one, ast.Name)}
    return found


def _is_installed(module: str) -> bool:
    if module in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

"""Mistakes of single operators, made by rule in the pure packages: of each, a test of the package must fail.

    python tests/support/operators.py                        the sample that `pytest -m mutations` makes
    python tests/support/operators.py --sample 500 --seed 1  another one
    python tests/support/operators.py gae "<="               all whose name contains one of these texts

A change is a swapped comparison, + for - or * for /, `and` for `or`, a `not` or a sign left out, a number one larger, a flag turned, an
argument given by name left out, a result left out, an error not raised, or a call left out whose result nobody reads. The file
equivalent_mutants.txt names changes that no test can see, with the reason. Tests that name the changed function run first, so that most
runs are short.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations import DEFAULT, FAILED, PASSED, ROOT, import_heavy_modules, run_tests

TESTS = {  # packages, and files and directories of tests that belong to each
    "algorithms": ("algorithms", "test_parity.py"),
    "chat": ("chat",),
    "data": ("data", "words/test_batching.py"),
}
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
SWAPS: dict[type, type] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])} | {ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One changed expression or statement of one file."""

    file: str  # below rollouts/
    name: str  # file: function: `before` -> `after`, and a number where the same change is made several times
    line: int
    source: str  # the whole file with the change in it

    def __str__(self) -> str:
        return self.name


def iterate_mutants(file: str, text: str) -> Iterator[Mutant]:
    """Each mutant of one file, in the order of its lines."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[str] = Counter()
    for where, node, after in _iterate_changes(ast.parse(text), ""):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(data[begin:end].decode().split())
        name = f"{file}: {where or 'module'}: `{before}` -> `{after}`"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"
        yield Mutant(file, name, node.lineno, (data[:begin] + after.encode() + data[end:]).decode())


def _iterate_changes(node: ast.AST, where: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(function, node, its new text) of each change below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}" if where else node.name
    if isinstance(node, ast.expr | ast.stmt):
        yield from ((where, node, after) for after in _changes_of(node))
    for child in _children(node):
        yield from _iterate_changes(child, where)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are executed: no annotation, decorator, docstring, message of an error, or format string."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None)
            yield from node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from () if node.value is None else (node.value,)
        case ast.Assert():
            yield node.test
        case ast.Raise() | ast.JoinedStr() | ast.keyword("device" | "strict"):
            pass
        case _:
            yield from ast.iter_child_nodes(node)


def _changes_of(node: ast.expr | ast.stmt) -> Iterator[str]:
    """New texts of one node, its children left as they are."""
    match node:
        case ast.Compare(left, [operator, *others], comparators) if type(operator) in SWAPS:
            yield f"({ast.unparse(ast.Compare(left, [SWAPS[type(operator)](), *others], comparators))})"
        case ast.BinOp(left, operator, right) if type(operator) in SWAPS:
            yield f"({ast.unparse(ast.BinOp(left, SWAPS[type(operator)](), right))})"
        case ast.BoolOp(operator, values):
            yield f"({ast.unparse(ast.BoolOp(SWAPS[type(operator)](), values))})"
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield repr(value + 1)
        case ast.Call(function, arguments, keywords):
            for keyword in keywords:
                if keyword.arg not in (None, "device", "strict"):  # the tests have one device; zip(strict=True) is an assertion
                    yield ast.unparse(ast.Call(function, arguments, [other for other in keywords if other is not keyword]))
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield "return None"
        case ast.Raise() | ast.Expr(ast.Call()):
            yield "pass"
        case _:
            pass


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them by a hash of their names, so that a change of one function leaves the choice among the others as it was."""
    chosen = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())[:count]
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line))


@functools.cache
def _read_tests(package: str) -> dict[str, str]:
    """The texts of a package's test files, by their paths below tests/."""
    folder = ROOT / "tests"
    files = [found for name in TESTS[package] for found in sorted((folder / name).glob("test_*.py")) or [folder / name]]
    texts = {str(file.relative_to(folder)): file.read_text() for file in files}
    if "test_parity.py" in texts:
        texts["test_parity.py"] = "".join(file.read_text() for file in (folder / "parity").glob("*.py"))
    return texts


def order_tests(mutant: Mutant) -> list[list[str]]:
    """The test files of the mutant's package, one a batch: first those that name its function most often, then that of its module."""
    function = re.compile(rf"\b{mutant.name.split(': ')[1].split('.')[-1]}\b")
    texts = _read_tests(mutant.file.split("/")[0])
    own = f"test_{Path(mutant.file).stem}.py"
    return [[test] for test in sorted(texts, key=lambda test: (-len(function.findall(texts[test])), Path(test).name != own, test))]


def iterate_all(packages: Sequence[str]) -> Iterator[Mutant]:
    """Each mutant of these packages."""
    for package in packages:
        for path in sorted((ROOT / "rollouts" / package).glob("*.py")):
            yield from iterate_mutants(f"{package}/{path.name}", path.read_text())


def read_equivalent() -> dict[str, str]:
    """The reason why no test can see a change, by the name of the mutant: lines of equivalent_mutants.txt, each `name | reason`."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason for name, _, reason in (line.rpartition(" | ") for line in lines)}


def main(arguments: Sequence[str]) -> int:
    """Print a line a mutant as it goes. Return 0 if every one was caught or is named as equivalent, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--packages", nargs="+", default=["algorithms"], choices=TESTS)
    parser.add_argument("--sample", type=int, help="number of mutants; default: 100, or all with texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="name them and run nothing")
    options = parser.parse_args(arguments)
    equivalent = read_equivalent()
    found = list(iterate_all(options.packages))
    stale = {name for name in equivalent if name.split("/")[0] in options.packages} - {mutant.name for mutant in found}
    assert not stale, f"{EQUIVALENT.name} names changes that cannot be made any more: {sorted(stale)}"
    found = [mutant for mutant in found if mutant.name not in equivalent]
    chosen = [m for m in found if not options.texts or any(text in m.name for text in options.texts)]
    assert chosen, f"no mutant's name contains any of {options.texts}"
    chosen = draw(chosen, options.sample or (len(chosen) if options.texts else 100), options.seed)
    if options.list:
        print(*chosen, f"{len(chosen)} of {len(found)}, {len(equivalent)} equivalent ones left out", sep="\n")
        return 0
    import_heavy_modules()
    missed = 0
    for number, mutant in enumerate(chosen, 1):
        start = time.monotonic()
        code, output = run_tests(order_tests(mutant), {mutant.file: mutant.source}, DEFAULT)
        missed += code == PASSED
        verdict = "MISSED" if code == PASSED else "caught"
        print(f"[{number:3}/{len(chosen)}] {verdict:8} {time.monotonic() - start:5.1f} s  line {mutant.line}  {mutant}", flush=True)
        if code not in (PASSED, FAILED) and "rror" not in output:
            print(f"pytest's exit code is {code}:\n{output}")
    print(f"{len(chosen) - missed} of {len(chosen)} mutants caught; {len(found)} are possible, {len(equivalent)} are named as equivalent")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

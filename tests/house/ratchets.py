"""Counts of what the house has too much of, by file: they may only shrink.

`python tests/house/ratchets.py --update` writes smaller counts into ratchets.json; it refuses to write a larger sum.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_suffix(".json")
FOLDERS = ("rollouts", "integration")

MAX_LINES = 60  # of code in a function: no docstring, no comment, no blank line
MAX_PARAMETERS = 8  # of a function, without self and cls; constructors of engines and backends may have more
RELATIVE_WORDS = "Of That Those What Who Which Where How When Why"  # a sentence that begins with one of them has lost its noun
_DOCSTRING = re.compile(rf"(?:{RELATIVE_WORDS.replace(' ', '|')})\b")
_COMMENT = re.compile(rf"#:?\s*(?:{RELATIVE_WORDS.replace(' ', '|')})\b", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Count = Callable[[Path, str, ast.Module], int]
Counts = Mapping[str, Mapping[str, int]]  # rule -> file -> number


def list_functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method of a file, nested ones as well."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def count_lines_of_code(function: Function, lines: list[str]) -> int:
    """Lines from `def` to the end that are neither blank nor a comment nor part of a docstring."""
    left = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    for node in ast.walk(function):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            left -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(1 for number in left if (text := lines[number - 1].strip()) and not text.startswith("#"))


def count_long_functions(path: Path, text: str, tree: ast.Module) -> int:
    """Functions with more than MAX_LINES lines of code."""
    lines = text.splitlines()
    return sum(
        1
        for node in list_functions(tree)
        if (node.end_lineno or 0) - node.lineno >= MAX_LINES and count_lines_of_code(node, lines) > MAX_LINES
    )


def count_wide_functions(path: Path, text: str, tree: ast.Module) -> int:
    """Functions with more than MAX_PARAMETERS parameters."""
    constructs = {"engines", "backends"} & set(path.parts)
    wide = 0
    for node in list_functions(tree):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        names += [a.arg for a in (node.args.vararg, node.args.kwarg) if a]
        number = len(names) - (names[:1] in (["self"], ["cls"]))
        wide += number > MAX_PARAMETERS and not (constructs and node.name == "__init__")
    return wide


def count_docstrings(path: Path, text: str, tree: ast.Module) -> int:
    """Docstrings of modules, classes, functions and methods that begin with a relative word."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef | ast.Module))
    return sum(1 for node in nodes if _DOCSTRING.match(ast.get_docstring(node) or ""))


def count_comments(path: Path, text: str, tree: ast.Module) -> int:
    """Comments that begin with a relative word; the later lines of a comment of several lines are not counted."""
    if not _COMMENT.search(text):
        return 0
    found, last = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            begins = not (token.start[0] == last + 1 and token.line.lstrip().startswith("#"))
            found += begins and _COMMENT.match(token.string) is not None
            last = token.start[0]
    return found


RULES: Mapping[str, Count] = {
    f"functions of more than {MAX_LINES} lines of code": count_long_functions,
    f"functions of more than {MAX_PARAMETERS} parameters": count_wide_functions,
    "docstrings that begin with a relative word": count_docstrings,
    "comments that begin with a relative word": count_comments,
}


def measure(parse: Callable[[Path], ast.Module] | None = None) -> dict[str, dict[str, int]]:
    """Count all rules in all files; a file without any is not listed.

    Args:
        parse: reads a file, for callers that have read it before.
    """
    counts: dict[str, dict[str, int]] = {rule: {} for rule in RULES}
    for path in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = parse(path) if parse else ast.parse(text)
        name = path.relative_to(ROOT)
        for rule, count in RULES.items():
            if number := count(name, text, tree):
                counts[rule][name.as_posix()] = number
    return counts


def find_differences(recorded: Counts, counted: Counts) -> list[str]:
    """One line for each file whose count is not the recorded one."""
    lines: list[str] = []
    for rule in RULES:
        before, now = recorded.get(rule, {}), counted[rule]
        for file in sorted({*before, *now}):
            old, new = before.get(file, 0), now.get(file, 0)
            if new > old:
                lines.append(f"{file}: {new} {rule}, at most {old} are allowed")
            elif new < old:
                lines.append(f"{file}: {new} {rule}, {old} are recorded: run python tests/house/ratchets.py --update")
    return lines


def update() -> bool:
    """Write the counts of now; return False and write nothing where a sum has grown."""
    recorded: Counts | None = json.loads(DATA.read_text()) if DATA.exists() else None
    counted = measure()
    if recorded is not None and any(sum(counted[rule].values()) > sum(recorded.get(rule, {}).values()) for rule in RULES):
        return False
    DATA.write_text(json.dumps(counted, indent=1) + "\n")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the counts of now, where no sum has grown")
    wanted: bool = parser.parse_args().update
    recorded: Counts = json.loads(DATA.read_text()) if DATA.exists() else {}
    counted = measure()
    for rule in RULES:
        before, now = sum(recorded.get(rule, {}).values()), sum(counted[rule].values())
        sys.stdout.write(f"{rule}: {before} recorded, {now} now\n")
    sys.stdout.writelines(f"{line}\n" for line in find_differences(recorded, counted))
    if wanted and not update():
        sys.exit("they may only shrink: nothing is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

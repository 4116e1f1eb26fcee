"""The order of the house: a module imports only what stands before it. The table in docs/architecture.md is written from this."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "rollouts"

WORDS = (
    "errors", "features", "output_files", "checks", "seeds", "outcomes", "types", "steps", "weight_specs", "batches", "user_code",
    "config_files", "config",
)  # fmt: skip
PACKAGES = (
    "algorithms", "chat", "sandbox", "environments", "data", "models", "backends", "engines", "rewards", "generation", "agents",
    "gateway", "training", "asynchronous", "tinker", "testing",
)  # fmt: skip
LOOPS = ("supervised_loop", "sft_loop", "rl_loop", "async_rl_loop", "reward_model_loop", "preference_loop")
FACADES = ("trainer",)  # over everything, chosen by strings; its names are its own, not those of `rollouts`
ORDER = (*WORDS, *PACKAGES[:-1], *LOOPS, *FACADES, PACKAGES[-1])  # `testing` is for tests: nothing else imports it


@cache
def parse(path: Path) -> ast.Module:
    """Read a file once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def walk(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, listed once."""
    return tuple(ast.walk(parse(path)))


@cache
def list_imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and whole name of each module that a file imports, at any place; `from package import module` gives the package."""
    found: list[tuple[int, str]] = []
    for node in walk(path):
        if isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "." * node.level + (node.module or "")))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return tuple(found)


def find_room(path: Path) -> str:
    """Return the package that a file of the library is in, or the module that it is."""
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")

"""The start of a command: what it imports before it answers, and the first line of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.expressions.algorithm import parse_algorithm
from integration.expressions.filters import parse_filter
from integration.settings.sections import RLSection

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "transformers", "numpy", "scipy", "safetensors", "httpx", "trio")

SHOW_IMPORTS = f"""
import sys
from integration.train import main
try:
    main(sys.argv[1:])
finally:
    print("imported:", *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def list_heavy_imports(*arguments: str) -> list[str]:
    """Return the heavy packages that a process of the command has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW_IMPORTS, *arguments], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("imported:")]
    assert len(lines) == 1, done.stderr
    return lines[0].split()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--rl.stpes", "3"),
        ("--rl.num-steps", "many"),
        ("--rl.num-minibatches", "7"),
        ("--task", "grid_world", "--rl.stpes", "3"),
    ],
    ids=" ".join,
)
def test_help_and_mistakes_in_options_import_nothing_heavy(arguments: tuple[str, ...]):
    assert list_heavy_imports(*arguments) == []


def test_a_run_says_at_once_that_it_loads_torch_and_a_quiet_one_says_nothing(tmp_path: Path):
    settings = ("--task", "jsonl", "--data.path", str(tmp_path / "none.jsonl"), "--model.path", str(tmp_path))
    for quiet, told in ((), True), (("--quiet",), False):
        done = subprocess.run(
            [sys.executable, "-m", "integration.train", *settings, *quiet], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("loading torch and transformers\n") is told


def test_the_default_expressions_which_no_section_checks_are_valid():
    section = RLSection()
    assert parse_algorithm(section.algorithm).name == section.algorithm
    assert parse_filter(section.filter) is None

"""The start of a command: what it imports before it answers, and the first line of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.command import PROGRAMS
from integration.expressions.algorithm import parse_algorithm
from integration.expressions.filters import parse_filter
from integration.settings.sections.stages import RLSection

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


SHOW_SEARCHES = """
import inspect
from integration.settings.command_line import parse_command_line
search = inspect.getsource
inspect.getsource = lambda thing: print(thing) or search(thing)
parse_command_line(["--rl.num-steps", "7"])
"""


def test_options_are_parsed_without_a_search_for_help_texts_in_the_source():
    done = subprocess.run([sys.executable, "-c", SHOW_SEARCHES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "", "sections whose field has no metadata with a help, see describe_section"


PROCESS = f"""
import sys
from integration.command import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
imported = [name for name in {HEAVY[:5]!r} if name in sys.modules]
print("end:", status, len(sys.modules), *imported, file=sys.stderr)
"""
MAX_LINES, MAX_WIDTH = 55, 150
MAX_MODULES = 500  # those with 380 take half a second of an idle processor; torch alone has 1,100
READY = [name for name, program in PROGRAMS.items() if program.module is not None]


def start_program(*arguments: str) -> tuple[int, int, list[str], str, str]:
    """Return (exit status, number of modules imported, heavy packages imported, stdout, stderr) of a new process of `rollouts`."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *arguments], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    told, _, end = done.stderr.rstrip().rpartition("end: ")
    assert end, done.stderr
    status, modules, *imported = end.split()
    return int(status), int(modules), imported, done.stdout, told


@pytest.mark.parametrize("name", READY)
def test_the_help_of_each_program_is_one_screen_and_imports_little(name: str):
    status, modules, imported, out, told = start_program(name, "--help")
    assert (status, imported, told) == (0, [], "")
    assert modules < MAX_MODULES
    lines = out.splitlines()
    assert 5 < len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_WIDTH


@pytest.mark.parametrize("name", READY)
def test_a_misspelt_option_of_each_program_is_answered_before_much_is_imported(name: str):
    before = {"eval": ["model"], "report": ["run"], "view": ["run"], "convert": ["run", "target"], "reward": ["a.py:f", "--data", "rows"]}
    status, modules, imported, out, told = start_program(name, *before.get(name, []), "--hellp")
    assert (status, imported, out) == (2, [], "")
    assert modules < MAX_MODULES and "--hel" in told


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

"""The tests see the mistakes of mutations.py, and those that operators.py makes by rule."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutations
import operators
import pytest

TESTS = Path(mutations.__file__).parents[1]


def run(file: str, *arguments: str) -> None:
    """Run a file in a process that has not imported the packages. Its output is shown as it comes with -s."""
    command = [sys.executable, file, *arguments]
    assert subprocess.run(command, cwd=mutations.ROOT, check=False).returncode == 0, f"{command} says what was missed"


def test_each_mutation_still_fits_its_file_and_its_tests_exist():
    read = functools.cache(Path.read_text)
    wrong: list[str] = []
    for mutation in mutations.MUTATIONS:
        try:
            compile(mutations.mutated(read(mutations.ROOT / "rollouts" / mutation.file), mutation), mutation.file, "exec")
            assert mutation.tests, f"{mutation}: no test is named"
            for test in mutation.tests:
                file, _, name = test.partition("::")
                assert f"def {name.split('[')[0]}(" in read(TESTS / file), f"{mutation}: {test} does not exist"
        except (AssertionError, SyntaxError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_the_table_has_each_mutation_once_and_all_files():
    names = Counter(str(mutation) for mutation in mutations.MUTATIONS)
    changes = Counter((mutation.file, mutation.old, mutation.new) for mutation in mutations.MUTATIONS)
    assert not [name for name, count in (names | changes).items() if count > 1]
    assert len(names) >= 30


@pytest.mark.slow
def test_a_few_mutations_are_caught():
    run(mutations.__file__, "--fast")


@pytest.mark.mutations
@pytest.mark.timeout(3600)
def test_all_mutations_are_caught():
    run(mutations.__file__)


def test_operators_are_changed_one_at_a_time_in_what_is_executed():
    source = '''
def clip(x: float, low: float = 0.5, *, hard: bool = False) -> float:
    """Return 1 + 1."""
    assert x >= 0 and not hard, f"x is {x + 1}"
    if x < low:
        raise ValueError("1 - 1")
    check(x, strict=True, exact=True, device=x + 1)
    return min(x, -low)
'''
    found = {mutant.name.removeprefix("m.py: clip: "): mutant for mutant in operators.iterate_mutants("m.py", source)}
    call = "check(x, strict=True, exact=True, device=x + 1)"
    assert set(found) == {
        "`0.5` -> `1.5`", "`False` -> `True`", "`x >= 0 and not hard` -> `(x >= 0 or not hard)`", "`x >= 0` -> `(x > 0)`", "`0` -> `1`",
        "`not hard` -> `(hard)`", "`x < low` -> `(x <= low)`", '`raise ValueError("1 - 1")` -> `pass`', f"`{call}` -> `pass`",
        f"`{call}` -> `check(x, strict=True, device=x + 1)`", "`True` -> `False`", "`return min(x, -low)` -> `return None`",
        "`-low` -> `(low)`",
    }  # fmt: skip
    assert found["`-low` -> `(low)`"].source == source.replace("-low", "(low)")
    for mutant in found.values():
        compile(mutant.source, mutant.file, "exec")


def test_a_sample_of_operators_changes_little_when_the_code_does():
    source = "def f(x):\n    return x + 1 if x < 2 else x * 3\n"
    before, after = (list(operators.iterate_mutants("m.py", text)) for text in (source, "def g(x):\n    return x - 1\n" + source))
    names = {mutant.name for mutant in operators.draw(before, 3, seed=0)}
    kept = {mutant.name for mutant in operators.draw([mutant for mutant in after if ": f: " in mutant.name], 3, seed=0)}
    assert len(names) == 3 and kept == names


@pytest.mark.mutations
@pytest.mark.timeout(7200)
def test_a_sample_of_all_operators_is_seen():
    run(operators.__file__)

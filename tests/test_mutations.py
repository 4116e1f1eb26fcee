"""The tests see the mistakes of mutations.py."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutations
import pytest

TESTS = Path(mutations.__file__).parent


def run(*arguments: str) -> None:
    """`python tests/mutations.py`: a process that has not imported the package. What it prints is shown as it comes with -s."""
    command = [sys.executable, mutations.__file__, *arguments]
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
    run("--fast")


@pytest.mark.mutations
@pytest.mark.timeout(3600)
def test_all_mutations_are_caught():
    run()

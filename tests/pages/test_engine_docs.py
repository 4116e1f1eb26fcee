"""docs/engines.md: each trap of the servers has tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "engines.md"


def test_the_tests_of_the_traps_exist():
    _, _, table = DOCUMENT.read_text().partition("## Traps")
    rows = [row for row in table.partition("\n## ")[0].splitlines() if row.startswith("| ") and not row.startswith("| **")]
    assert len(rows) > 40
    for row in rows[1:]:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert tests, f"no test is named for {row}"
        for file, name in tests:
            (path,) = TESTS.rglob(file)
            assert f"def {name}(" in path.read_text(), f"{file} has no {name}"

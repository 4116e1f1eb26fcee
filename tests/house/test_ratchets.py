"""Counts that may only shrink: long functions, wide ones, docstrings and comments without their noun."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from house import ratchets
from house.packages import parse

SOURCE = '''
"""What a module is."""
# how it is done
# when it is not
x = 1  # Of no use
y = 2  # the coefficient of the penalty


class A:
    """Whether it holds."""

    def f(self, a, b, c, d, e, f, g, *, h, i):
        """Those that are wide."""
        return a

    def g(self, a, b, c, d, e, f, g, h):
        """Return what is narrow."""
'''


def test_no_count_grows_and_none_shrinks_unseen():
    recorded = json.loads(ratchets.DATA.read_text())
    differences = ratchets.find_differences(recorded, ratchets.measure(parse))
    assert not differences, "\n" + "\n".join(differences)


def test_each_rule_counts_what_it_is_about():
    tree, place = ast.parse(SOURCE), Path("rollouts/data/x.py")
    assert ratchets.count_docstrings(place, SOURCE, tree) == 2
    assert ratchets.count_comments(place, SOURCE, tree) == 2
    assert ratchets.count_wide_functions(place, SOURCE, tree) == 1
    constructor = SOURCE.replace("def f(", "def __init__(")
    assert ratchets.count_wide_functions(Path("rollouts/engines/x.py"), constructor, ast.parse(constructor)) == 0
    assert ratchets.count_wide_functions(place, constructor, ast.parse(constructor)) == 1


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings():
    def count(number: int) -> int:
        lines = [line for i in range(number) for line in (f"    x = {i}", "", "    # why")]
        text = "\n".join(["def f():", '    """Long', "", '    story."""', *lines])
        return ratchets.count_long_functions(Path("rollouts/x.py"), text, ast.parse(text))

    assert (count(ratchets.MAX_LINES - 1), count(ratchets.MAX_LINES)) == (0, 1)


def test_a_difference_in_either_direction_is_told():
    rule = next(iter(ratchets.RULES))
    empty = {name: {} for name in ratchets.RULES}
    (more,) = ratchets.find_differences({rule: {"a.py": 1}}, empty | {rule: {"a.py": 2}})
    assert "a.py: 2" in more and "at most 1" in more
    (fewer,) = ratchets.find_differences({rule: {"a.py": 1}}, empty)
    assert "--update" in fewer


def test_an_update_writes_smaller_counts_and_refuses_larger_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(ratchets, "ROOT", tmp_path)
    monkeypatch.setattr(ratchets, "DATA", data := tmp_path / "ratchets.json")
    (tmp_path / "rollouts").mkdir()
    (file := tmp_path / "rollouts" / "a.py").write_text('"""Of a file."""\n\n\ndef f():\n    """That is one."""\n')
    (rule,) = [name for name in ratchets.RULES if name.startswith("docstrings")]
    assert ratchets.update() and json.loads(data.read_text())[rule] == {"rollouts/a.py": 2}
    file.write_text('"""A file."""\n\n\ndef f():\n    """That is one."""\n')
    assert ratchets.update() and json.loads(data.read_text())[rule] == {"rollouts/a.py": 1}
    file.write_text('"""Of a file."""\n\n\ndef f():\n    """That is one."""\n')
    assert not ratchets.update() and json.loads(data.read_text())[rule] == {"rollouts/a.py": 1}

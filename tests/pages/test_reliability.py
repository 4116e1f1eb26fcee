"""benchmarks.reliability: what it prints, what it writes into the page, and that a naive variant which passes makes an experiment fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import __main__ as reliability
from benchmarks.reliability.experiment import Amount, Experiment, Outcome, Skipped
from benchmarks.reliability.page import BEGIN, END, PAGE, update_table
from benchmarks.reliability.table import EXPERIMENTS

FIELDS = {"experiment", "promise", "bar", "size", "measured", "control", "met"}


def create_experiment(outcome: Outcome | Exception) -> Experiment:
    def attempt(amount: Amount) -> Outcome:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Experiment(name="E1", promise="p", bar="b", naive="n", attempt=attempt)


@pytest.mark.parametrize(("holds", "fails", "met"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_bar_is_met_only_if_the_naive_variant_misses_it(holds: bool, fails: bool, met: bool, tmp_path: Path):
    outcome = Outcome(size="3", measured={"lost": 0}, holds=holds, control={"lost": 2}, control_fails=fails)
    experiment = create_experiment(outcome)
    result = experiment.describe(reliability.measure_here(experiment, Amount(False, 0, tmp_path)))
    assert set(result) == FIELDS
    assert result["met"] is met and result["control"] == {"variant": "n", "measured": {"lost": 2}, "fails": fails}
    assert reliability.is_failure(result, "short") is not met


def test_an_experiment_that_cannot_be_run_says_so_and_is_no_failure(tmp_path: Path):
    experiment = create_experiment(Skipped("needs a small disk"))
    result = experiment.describe(reliability.measure_here(experiment, Amount(False, 0, tmp_path)))
    assert (result["met"], result["skipped"]) == (None, "needs a small disk")
    assert not reliability.is_failure(result, "short")
    assert reliability.is_failure(experiment.describe({"error": "died"}), "short")


def test_counts_are_shares_of_a_full_run_and_never_below_those_of_a_short_one(tmp_path: Path):
    assert Amount(False, 0, tmp_path).count(3, 100) == 3
    assert [Amount(True, 0, tmp_path, share).count(3, 100) for share in (1.0, 0.5, 0.01)] == [100, 50, 3]
    assert Amount(True, 7, tmp_path).draw.random() == Amount(False, 7, tmp_path).draw.random()


def test_a_run_replaces_its_own_rows_of_the_table_in_the_order_of_their_numbers():
    def result(name: str, **changes: Any) -> dict[str, Any]:
        control = {"variant": "naive", "measured": {"lost": 2}, "fails": True}
        told = {"experiment": name, "promise": "p", "bar": "b", "size": "3 | 4", "measured": {"lost": 0}, "control": control, "met": True}
        return told | changes

    page = f"text\n{BEGIN}\n|a|\n|-|\n{END}\nmore\n"
    once = update_table(page, [result("E10"), result("E2", met=None, skipped="needs a disk")])
    again = update_table(once, [result("E10", met=False), result("E1")])
    lines = again.splitlines()
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("text", BEGIN, END, "more")
    assert [line.split("|")[1].strip() for line in lines[4:-2]] == ["E1", "E2", "E10"]
    assert "3 \\| 4" in lines[4] and "naive: lost: 2" in lines[4] and lines[4].endswith("| yes |")
    assert "needs a disk" in lines[5] and lines[6].endswith("| **no** |")


def test_the_page_has_a_row_for_each_experiment_and_the_promise_of_the_code():
    text = PAGE.read_text()
    table = text.split(BEGIN)[1].split(END)[0]
    rows = {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}
    assert list(rows) == [experiment.name for experiment in EXPERIMENTS]
    for experiment in EXPERIMENTS:
        assert experiment.promise in rows[experiment.name] and experiment.bar in rows[experiment.name]


@pytest.mark.slow
def test_a_short_run_prints_an_object_for_each_experiment_and_leaves_the_page_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before, stored = PAGE.read_text(), tmp_path / "found.json"
    assert reliability.main(["--short", "--only", "E3", "E13", "--seed", "3", "--json", str(stored)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == json.loads(stored.read_text())
    assert [(result["experiment"], result["met"], set(result)) for result in printed] == [("E3", True, FIELDS), ("E13", True, FIELDS)]
    assert PAGE.read_text() == before


def test_a_share_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        reliability.main(["--full", "--share", "0"])
    assert "--share is 0.0, expected a fraction" in capsys.readouterr().err

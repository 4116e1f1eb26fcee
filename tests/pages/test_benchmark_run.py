"""benchmarks.run: every row end to end with little work, and what becomes of rows that fail or have a stored run to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run, scaling

FIELDS = {"row", "size", "alternative", "ratio", "target", "met", "unit", "better"}


@pytest.mark.slow
def test_every_row_gives_an_object_and_a_stored_run_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored = tmp_path / "stored.json"
    assert run.main(["--tiny", "--json", str(stored)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == json.loads(stored.read_text())["rows"]
    assert {row["row"] for row in printed} == {row.row for _, table in run.TABLE for row in table}
    for row in printed:
        assert FIELDS <= set(row) <= FIELDS | {"skipped"}
        if "skipped" in row:
            assert (row["ratio"], row["met"]) == (None, None) and row["skipped"]
        else:
            assert row["ratio"] > 0 and row["met"] == (
                row["ratio"] >= row["target"] if row["better"] == "higher" else row["ratio"] <= row["target"]
            )
    assert run.main(["--tiny", "--only", "orchestrate-manager", "--compare", str(stored)]) == 0
    (again,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    before = next(row["ratio"] for row in printed if row["row"] == "orchestrate-manager")
    assert again["before"] == before and again["change"] == pytest.approx(again["ratio"] / before, abs=1e-3)


def test_a_row_that_fails_is_reported_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def measure(number: int, row: run.Row, work_name: str) -> dict[str, Any]:
        return {"error": "out of memory"} if row.row == "generate" else {"figures": {row.figure: 2.0}}

    monkeypatch.setattr(run, "measure_in_process_of_its_own", measure)
    assert run.main(["--quick", "--only", "generate", "weight-update", "http"]) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["row"], row["size"], row["ratio"], row["met"], row.get("error")) for row in printed]
    failed = [("generate", size, None, None, "out of memory") for size in ("S", "M", "S", "M")]
    assert found == [*failed, ("http", "1,000 in flight", 2.0, True, None), ("weight-update", "L", 2.0, False, None)]


def test_a_measurement_that_raises_ends_in_the_error_of_its_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    assert run.measure_in_process_of_its_own(0, run.TABLE[0][1][0], "tiny") == {"error": "ended with status 1"}


def test_a_row_whose_library_is_missing_is_skipped_with_the_reason():
    row = run.Row(row="x", size="S", alternative="y", target=1, needs="no_such_library")
    outcome = run.measure_in_process_of_its_own(0, row, "tiny")
    assert outcome == {"skipped": "no_such_library is not installed: pip install no_such_library"}
    assert row.describe(outcome) | outcome == row.describe(outcome)


def test_quick_measures_two_sizes_and_full_all_rows():
    quick = [row for _, table in run.plan("quick", []) for row in table]
    full = [row for _, table in run.plan("full", []) for row in table]
    assert {row.size for row in quick if row.row == "sft"} == {"S", "M"}
    assert full == [row for _, table in run.TABLE for row in table]


def test_a_file_that_is_no_stored_run_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(SystemExit, match="not a file that --json wrote"):
        run.main(["--quick", "--compare", str(path)])


def test_the_slope_of_a_power_is_its_exponent():
    sizes = [100, 300, 1000, 3000]
    assert scaling.fit_slope(sizes, [7.0 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert scaling.fit_slope(sizes, [4.0] * 4) == pytest.approx(0.0)


def test_every_panel_has_at_least_four_sizes():
    assert all(len(panel.sizes) >= 4 for panel in scaling.PANELS.values())


@pytest.mark.slow
def test_panels_are_measured_and_drawn(tmp_path: Path):
    names = ["rows", "slots", "context", "turns"]
    scaling.main(["--repeats", "1", "--smallest", "2", "--folder", str(tmp_path), "--only", *names])
    panels = json.loads((tmp_path / scaling.FIGURES).read_text())["panels"]
    assert list(panels) == names
    assert all(len(panel["costs"]) == 2 and min(panel["costs"]) > 0 for panel in panels.values())
    assert (tmp_path / scaling.FIGURE).read_bytes().startswith(b"\x89PNG")

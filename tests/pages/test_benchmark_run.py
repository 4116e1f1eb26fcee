"""benchmarks.run: every row end to end with little work, and what becomes of rows that fail or have a stored run to compare with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_commands import find_python

from benchmarks import run, scaling
from benchmarks.measure import compare

FIELDS = {"row", "size", "alternative", "ratio", "target", "met", "unit", "better"}


@pytest.mark.long
def test_every_row_gives_an_object_and_a_stored_run_is_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", find_python())
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


def test_a_row_whose_environment_is_not_named_is_skipped_without_a_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(run.sys, "executable", "/bin/false")
    (row, *_) = [row for _, table in run.TABLE for row in table if row.python == "VLLM_PYTHON"]
    outcome = run.measure_in_process_of_its_own(1, row, "tiny")
    assert outcome["skipped"].startswith("VLLM_PYTHON names no Python") and outcome["skipped"].endswith("install_vllm_cpu.sh makes one")


def test_a_ratio_is_judged_as_it_is_printed():
    row = run.Row(row="x", size="S", alternative="y", target=0.5, better="lower")
    found = row.describe({"figures": {"ratio": 0.50004}})
    assert (found["ratio"], found["met"]) == (0.5, True)
    assert row.describe({"figures": {"ratio": 0.50006}})["met"] is False


def test_quick_measures_two_sizes_and_full_all_rows():
    quick = [row for _, table in run.plan("quick", []) for row in table]
    full = [row for _, table in run.plan("full", []) for row in table]
    assert {row.size for row in quick if row.row == "sft"} == {"S", "M"}
    assert full == [row for _, table in run.TABLE for row in table]


STORED = {"row": "http", "size": "1,000 in flight", "alternative": "aiohttp", "ratio": 1.6, "target": 1.2, "met": True}


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"rows": [1]}', '{"rows": [{"row": "http"}]}', json.dumps({"rows": [STORED | {"ratio": "x"}]})]
)
def test_a_file_that_is_no_stored_run_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match="not a file that --json wrote"):
        run.main(["--quick", "--compare", str(path)])


def measure_two(number: int, row: run.Row, work_name: str) -> dict[str, Any]:
    return {"figures": {row.figure: 2.0}}


def test_ratios_to_a_stored_run_are_printed_and_what_differs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "measure_in_process_of_its_own", measure_two)
    stored, path = tmp_path / "stored.json", tmp_path / "again.json"
    zero = {"row": "weight-update", "size": "L", "alternative": "bare copy", "ratio": 0.0, "target": 1.3, "met": True}
    stored.write_text(json.dumps({"machine": {**run.describe_machine(), "processor": "abacus"}, "work": "full", "rows": [STORED, zero]}))
    rows = ["http", "weight-update", "orchestrate-manager"]
    assert run.main(["--quick", "--only", *rows, "--compare", str(stored), "--json", str(path)]) == 0
    told = capsys.readouterr()
    found = {row["row"]: (row["before"], row["change"]) for row in map(json.loads, told.out.splitlines())}
    assert found == {"http": (1.6, 1.25), "weight-update": (0.0, None), "orchestrate-manager": (None, None)}
    assert "processor was abacus and is" in told.err and "the stored run is of --full, this one of --quick" in told.err
    assert run.main(["--quick", "--only", "http", "--compare", str(path)]) == 0  # a run that was compared is a baseline, too
    told = capsys.readouterr()
    assert json.loads(told.out)["before"] == 2.0 and "--compare" not in told.err


def test_rows_are_stored_one_by_one_and_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail_later(number: int, row: run.Row, work_name: str) -> dict[str, Any]:
        if row.row == "weight-update":
            raise KeyboardInterrupt
        return {"figures": {row.figure: 2.0}}

    monkeypatch.setattr(run, "measure_in_process_of_its_own", fail_later)
    path = tmp_path / "stored.json"
    with pytest.raises(KeyboardInterrupt):
        run.main(["--quick", "--only", "http", "weight-update", "--json", str(path)])
    assert [row["row"] for row in run.read_baseline(path)["rows"]] == ["http"]
    with pytest.raises(SystemExit, match=r"--json: .* cannot be written"):
        run.main(["--quick", "--only", "weight-update", "--json", str(tmp_path / "no" / "folder.json")])


def test_contenders_warm_up_with_less_work_which_does_not_count():
    done: list[str] = []

    def work(name: str) -> int:
        done.append(name)
        return 1

    contenders = {"one": lambda: work("one"), "two": lambda: work("two")}
    compare(contenders, 2, warm_ups={"one": lambda: work("a little")}, clocks=dict.fromkeys(contenders, lambda: float(len(done))))
    assert done == ["a little", "two", "one", "two", "one", "two"]


def test_the_slope_of_a_power_is_its_exponent():
    sizes = [100, 300, 1000, 3000]
    assert scaling.fit_slope(sizes, [7.0 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert scaling.fit_slope(sizes, [4.0] * 4) == pytest.approx(0.0)


def test_every_panel_has_at_least_four_sizes():
    assert all(len(panel.sizes) >= 4 for panel in scaling.PANELS.values())


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_panels_are_measured_and_drawn(tmp_path: Path):
    names = ["rows", "slots", "context", "turns"]
    scaling.main(["--repeats", "1", "--smallest", "2", "--folder", str(tmp_path), "--only", *names])
    panels = json.loads((tmp_path / scaling.FIGURES).read_text())["panels"]
    assert list(panels) == names
    assert all(len(panel["costs"]) == 2 and min(panel["costs"]) > 0 for panel in panels.values())
    assert (tmp_path / scaling.FIGURE).read_bytes().startswith(b"\x89PNG")
    scaling.main(["--repeats", "1", "--smallest", "3", "--folder", str(tmp_path), "--only", "rows"])
    after = json.loads((tmp_path / scaling.FIGURES).read_text())["panels"]
    assert list(after) == names
    assert len(after.pop("rows")["costs"]) == 3
    assert after.items() <= panels.items()  # the others are kept

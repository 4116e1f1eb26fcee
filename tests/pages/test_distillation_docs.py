"""docs/distillation.md: its code and its commands print what it shows, and its example runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, check_snippets, find_missing, list_commands, run_command
from warm_commands import find_python

PAGE = ROOT / "docs" / "distillation.md"


def test_the_code_prints_what_the_page_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_print_what_the_page_shows(tmp_path: Path):
    (command,) = list_commands(PAGE)
    printed = run_command(command.script, tmp_path)
    assert not find_missing(command.printed or "", printed), printed[-2000:]
    after = float(printed.rpartition("accuracy went from ")[2].split(" to ")[1].split()[0].rstrip("."))
    assert after >= 0.95


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_the_example_runs_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", find_python())
    example = runpy.run_path(str(ROOT / "examples" / "distillation.py"))
    size = "--sft.num-steps 2 --rl.prompts-per-step 8 --evaluation.num-prompts 4 --trajectories.every 1"
    arguments = ["--output-dir", str(tmp_path), "--seeds", "1", "--num-steps", "1", *size.split()]
    assert example["main"](arguments) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == [
        "opd, seed 0", "GRPO, seed 0", "opd, 64 answers a step, seed 0", "GRPO, 64 answers a step, seed 0", "picture",
    ]  # fmt: skip
    assert 1000 < (tmp_path / "distillation.png").stat().st_size < 150_000
    before = (tmp_path / "opd0" / "metrics.jsonl").stat().st_mtime_ns
    assert example["main"](arguments) == 0
    assert (tmp_path / "opd0" / "metrics.jsonl").stat().st_mtime_ns == before


def test_the_table_of_the_example_tells_the_step():
    example = runpy.run_path(str(ROOT / "examples" / "distillation.py"))
    told = example["tell"]({"opd": [[0.4, 0.85, 0.95]], "GRPO": [[0.4, 0.5]]})
    assert told == "opd, seed 0: 0.400 0.850 0.950; 0.9 after step 2\nGRPO, seed 0: 0.400 0.500; 0.9 after no step"

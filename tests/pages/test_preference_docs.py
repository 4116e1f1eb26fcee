"""docs/preferences.md: its commands and its code print what it shows, and its table names every loss."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from page_blocks import ROOT, check_snippets, find_missing, list_commands, run_command, write_files

from integration.settings.sections.preference import PreferenceLoss

PAGE = ROOT / "docs" / "preferences.md"


def test_the_code_prints_what_the_page_shows(tmp_path: Path):
    check_snippets(PAGE, tmp_path)


def test_the_table_names_every_loss():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(get_args(PreferenceLoss))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_print_what_the_page_shows(tmp_path: Path):
    start = ROOT / "docs" / "your-model-and-data.md"
    write_files(start, tmp_path)
    run_command("python make_model.py", tmp_path)
    assert write_files(PAGE, tmp_path) == ["make_pairs.py"]
    for command in list_commands(PAGE):
        printed = run_command(command.script, tmp_path)
        missing = find_missing(command.printed or "", printed)
        assert not missing, f"{command.script}did not print {missing}, but\n{printed}"
    summary = json.loads((tmp_path / "runs" / "preferences" / "summary.json").read_text())
    assert summary["accuracy_after_dpo"] > summary["accuracy_after_sft"] + 0.15

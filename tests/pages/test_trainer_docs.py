"""docs/trainer.md, whose blocks are one script, and the quick start in examples/."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from forked import run

from rollouts.trainer import InferenceConfig, ModelConfig, TrainingConfig
from rollouts.trainer.config import Estimator

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "trainer.md").read_text()


@pytest.mark.slow
def test_the_blocks_of_the_page_are_a_script_that_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    here = f"import os\nos.chdir({str(tmp_path)!r})\n"
    status, out, error = run(here + "\n\n".join(blocks), folder=tmp_path / "run")
    assert status == 0, error[-3000:]
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:6]] == [[str(k // 3), str(k + 1)] for k in range(6)]
    assert (tmp_path / "saved" / "step_0007").is_dir()
    assert (tmp_path / "checkpoints" / "step_0001").is_dir()
    assert any(line.startswith("system: be brief.") for line in lines)


def test_every_estimator_stands_in_the_table_and_links_lead_somewhere():
    table = TEXT.split("## Estimators")[1].split("The loss is")[0]
    named = {name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named - {"adv_estimator"} == set(get_args(Estimator))
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target


def test_settings_that_the_page_names_exist():
    known = {field.name for section in (ModelConfig, InferenceConfig, TrainingConfig) for field in fields(section)}
    for name in (
        "clip_ratio",
        "kl_coef",
        "kl_loss_coef",
        "entropy_coef",
        "max_tokens_per_microbatch",
        "max_steps",
        "ppo_epochs",
        "multi_turn",
    ):
        assert name in known and f"`{name}" in TEXT.replace("(", "`").replace("* ", "`"), name


def test_the_quick_start_trains(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(ROOT / "examples" / "trainer_quick_start.py"))
    history = example["main"](num_epochs=2, num_iters_per_epoch=2)
    assert [line["iteration"] for line in history] == [1, 2, 3, 4]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[:2]] == [["iteration", "2"], ["iteration", "4"]]
    assert printed[2].startswith("greedy answers: 0=")
    assert printed[3].startswith("step_0004 holds ")


@pytest.mark.long
def test_the_quick_start_learns():
    history = runpy.run_path(str(ROOT / "examples" / "trainer_quick_start.py"))["main"]()
    assert sum(line["reward_mean"] for line in history[:5]) / 5 < 0.1
    assert sum(line["reward_mean"] for line in history[-5:]) / 5 > 0.95

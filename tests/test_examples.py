"""The notebooks, executed from top to bottom in a real kernel, and the scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_the_notebooks_run():
    """One after the other in one kernel, which takes seconds to start, and forgets all names in between."""
    notebooks = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    for notebook in notebooks:
        notebook.cells[[cell.cell_type for cell in notebook.cells].index("code")].source += "\n%reset -f"
    whole = notebooks[0]
    whole.cells = [cell for notebook in notebooks for cell in notebook.cells]
    nbclient.NotebookClient(whole, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert all(cell.get("execution_count") for cell in whole.cells if cell.cell_type == "code")


def test_there_are_notebooks_of_both_tiers():
    assert {path.stem for path in NOTEBOOKS} >= {"grpo_step_by_hand", "sft_then_rl"}


async def test_the_text_game_is_played_and_trained_on(capsys: pytest.CaptureFixture[str]):
    game = runpy.run_path(str(ROOT / "examples" / "text_game.py"))
    baseline, best, rewards, greedy = await game["main"](num_steps=2)
    assert baseline == pytest.approx(1 - (6 / 7) ** 3, abs=0.05)
    assert best == 1.0
    assert len(rewards) == 2
    assert 0.0 <= greedy <= 1.0
    assert "guessing at random 0.3" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_model_of_random_weights_learns_the_text_game():
    game = runpy.run_path(str(ROOT / "examples" / "text_game.py"))
    baseline, best, rewards, greedy = await game["main"]()
    assert sum(rewards[-10:]) / 10 > baseline + 0.2
    assert greedy > baseline
    assert greedy <= best

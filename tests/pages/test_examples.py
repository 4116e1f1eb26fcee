"""The notebooks, executed from top to bottom in a real kernel, and the scripts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import nbclient
import nbformat
import needs
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
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


def test_gigpo_goes_from_the_episode_to_the_gradient(capsys: pytest.CaptureFixture[str]):
    example = runpy.run_path(str(ROOT / "examples" / "gigpo_grid_world.py"))
    small = (
        "--num-training-iterations 1 --num-imitation-steps 2 --num-demonstrations 4 --groups-per-iteration 2 --episodes-per-batch-group 3"
    )
    assert example["main"]([*small.split(), "--max-episode-steps", "4", "--grid-size", "3", "--anchors", "text"]) == 0
    stages = capsys.readouterr().out.splitlines()
    names = ["rollouts", "reward", "align", "advantages", "update", "iteration", "success"]
    assert [line.split()[0] for line in stages] == names
    assert "2 groups x 3 episodes" in stages[0]
    num_steps = int(stages[0].split()[-2])
    assert 6 <= num_steps <= 24
    assert f"tokens (6, {stages[4].split('(6, ')[1].split(')')[0]})" in stages[4]
    assert f"{num_steps} trained" in stages[4]


@pytest.mark.usefixtures("matplotlib")
def test_what_a_comparison_tells(tmp_path: Path):
    example = runpy.run_path(str(ROOT / "examples" / "gigpo_grid_world.py"))
    settings = example["Settings"](groups_per_iteration=2, episodes_per_batch_group=3)
    quick = [{"success": 1.0, "extra_steps": extra} for extra in (3.0, 1.0, 0.5)]
    slow = [{"success": 0.5, "extra_steps": 5.0}] * 3
    assert example["smooth"](quick, "extra_steps") == [2.0, 0.75]
    assert example["find_learned"](quick, settings) == 3 * 2 * 3
    assert example["find_learned"](slow, settings) is None
    curves = {"GiGPO": [quick], "GRPO": [slow]}
    assert "18; end: success 1.00, extra_steps 0.75" in example["tell"](curves, settings)
    assert "never; end: success 0.50" in example["tell"](curves, settings)
    example["draw"](curves, settings, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_model_of_random_weights_learns_the_text_game():
    game = runpy.run_path(str(ROOT / "examples" / "text_game.py"))
    baseline, best, rewards, greedy = await game["main"]()
    assert sum(rewards[-10:]) / 10 > baseline + 0.2
    assert greedy > baseline
    assert greedy <= best


@needs.OPENAI
def test_an_agent_of_the_openai_client_is_trained_as_it_is(tmp_path: Path):
    example = runpy.run_path(str(ROOT / "examples" / "openai_agent.py"))
    sizes = (
        "--sft.num-steps 2 --sft.batch-size 4 --rl.num-steps 2 --rl.prompts-per-step 2 --rl.samples-per-prompt 4 --evaluation.num-prompts 4"
    )
    small = "--evaluation.num-prompts 4 --model.hidden-size 32 --model.num-layers 1 --quiet"
    assert example["main"]([*sizes.split(), *small.split(), "--output-dir", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_mean"] for line in lines if "reward_mean" in line] == pytest.approx([0.0] * 2, abs=0.5)
    assert all("num_agents_failed" in line for line in lines if "reward_mean" in line)


async def test_two_roles_play_matches_and_are_trained_on(capsys: pytest.CaptureFixture[str]):
    await runpy.run_path(str(ROOT / "examples" / "two_roles.py"))["run"](num_steps=1, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" trained for")[0] for line in lines] == ["listener", "speaker"]
    assert "right answers: 0.28 -> " in lines[0]

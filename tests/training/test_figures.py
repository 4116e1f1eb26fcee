"""Pictures of runs: readable at any level, without empty panels, for runs of every kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollouts.errors import ConfigError
from rollouts.training.logs.figures import draw_comparison, draw_run
from rollouts.training.metrics import JSONLLogger

pytestmark = pytest.mark.usefixtures("matplotlib")
ROOT = Path(__file__).parents[2]
HELD_OUT = {"eval_accuracy": 0.01, "eval_accuracy_sampled": 0.0}
SFT = [{"stage": "sft", "step": s, "loss": 4.0 / (s + 1), **(HELD_OUT if s % 5 == 0 else {})} for s in range(21)]
ROLLOUTS = {"reward_mean": -1.0, "eval_accuracy": 0.0, "response_length_mean": 5.0, "staleness_max": 0.0}
RL = [{"stage": "rl", "step": s, "entropy": 1.0 / s, **ROLLOUTS} for s in range(1, 6)]
SCORES = {"loss": 0.7, "score_accuracy": 0.5, "eval_loss": 0.69, "eval_accuracy": 0.5}
PAIRS = [{"stage": "reward_model", "step": s, **SCORES} for s in range(1, 4)]


def titles(figure: Any) -> list[str]:
    return [axis.get_title() for axis in figure.axes if axis.axison]


def test_each_kind_of_run_has_its_panels_and_no_empty_one():
    assert titles(draw_run(SFT)) == ["SFT loss", "accuracy on held-out problems"]
    rl = ["accuracy on held-out problems", "mean reward of rollouts", "entropy of the policy", "length of responses"]
    assert titles(draw_run(RL)) == rl
    assert titles(draw_run([*SFT, *RL])) == ["SFT loss", *rl]
    assert titles(draw_run([line | {"staleness_max": 2.0} for line in RL])) == [*rl, "age of rollouts"]
    assert titles(draw_run(PAIRS)) == ["loss of the reward model", "pairs ranked right"]
    assert titles(draw_run([{"step": 1, "reward_mean": 0.5}])) == ["mean reward of rollouts"]  # a run without names of stages
    assert titles(draw_run([line for line in SFT if line["step"] == 0])) == ["SFT loss", "accuracy on held-out problems"]
    for axis in draw_run([*SFT, *RL]).axes:
        assert axis.get_lines() or not axis.axison


def test_a_legend_hides_no_curve_at_any_level():
    for level in (0.0, 0.5, 1.0):
        lines: list[dict[str, Any]] = [{"stage": "rl", "step": s, "eval_accuracy": level, "eval_accuracy_sampled": level} for s in range(9)]
        figure = draw_run([*SFT, *lines])
        figure.canvas.draw()
        axis = next(axis for axis in figure.axes if "held-out" in axis.get_title())
        box, inside, title = axis.get_legend().get_window_extent(), axis.get_window_extent(), axis.title.get_window_extent()
        assert box.y0 >= inside.y1 - 1, "the legend is above the axes"
        assert title.y0 >= box.y1 - 1, "and below the title"
        assert {text.get_text() for text in axis.get_legend().get_texts()} == {"SFT, greedy", "SFT, sampled", "RL, greedy", "RL, sampled"}


@pytest.mark.parametrize("value", [-1.0, -0.3, 0.0, 1.0, 250.0])
def test_the_axis_fits_the_rewards(value: float):
    lines = [{"stage": "rl", "step": s, "reward_mean": value, "eval_accuracy": value, "eval_graded_fraction": 1.0} for s in range(1, 4)]
    for axis in draw_run(lines).axes:
        if axis.axison:
            low, high = axis.get_ylim()
            assert low < value < high, axis.get_title()


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path: Path):
    lines = [*SFT, {"stage": "sft", "step": 30, "loss": "NaN"}, {"stage": "sft", "step": 31, "loss": float("inf")}]
    (curve,) = next(axis for axis in draw_run(lines).axes if axis.get_title() == "SFT loss").get_lines()
    assert max(curve.get_xdata()) == 20


def test_a_run_without_lines_says_so(tmp_path: Path):
    figure = draw_run([])
    assert "nothing to draw" in figure.axes[0].texts[0].get_text()
    figure.savefig(tmp_path / "empty.png")


def test_a_comparison_has_a_curve_for_each_run_and_names_what_there_is():
    figure = draw_comparison({"a": RL, "b": [line | {"reward_mean": 1.0} for line in RL]}, "reward_mean", "rl")
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"no run has a number named 'reward'.*reward_mean"):
        draw_comparison({"a": RL}, "reward")


def test_the_function_of_the_first_runs_page_draws(tmp_path: Path):
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "first-run.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, "first-run.md", "exec"), names)
    for name in ("a", "b"):
        logger = JSONLLogger(tmp_path / name / "metrics.jsonl")
        for line in RL:
            logger.log({key: value for key, value in line.items() if key != "step"}, int(line["step"]))
    figures = names["draw_two_runs"](tmp_path / "a", tmp_path / "b")
    assert all(figure.axes for figure in figures)

"""The summary of a run."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from integration.expressions.algorithm import create_algorithm, parse_algorithm
from integration.run.summary import draw_curves, summarize_run, tell_story
from integration.settings.config import Config
from integration.settings.sections.stages import RLSection
from rollouts.asynchronous.config import AsyncConfig
from rollouts.data.trajectories import write_samples
from rollouts.types import Sample

pytestmark = pytest.mark.usefixtures("matplotlib")


def sft_line(step: int, **metrics: float) -> dict[str, Any]:
    return {"stage": "sft", "step": step, **metrics}


def rl_line(step: int, **metrics: float) -> dict[str, Any]:
    return {"stage": "rl", "step": step, **metrics}


LINES = [
    sft_line(0, eval_accuracy=0.01, eval_accuracy_sampled=0.0),
    sft_line(1, loss=4.0),
    sft_line(2, loss=3.0, eval_accuracy=0.3),
    sft_line(3, loss=2.0, eval_accuracy=0.45, eval_accuracy_sampled=0.4),
    rl_line(1, loss=0.1, reward_mean=0.4, eval_accuracy=0.8),
    rl_line(2, loss=0.1, reward_mean=0.8, eval_accuracy=0.97, eval_accuracy_sampled=0.9),
    rl_line(3, loss=0.1, reward_mean=0.9),
]


def write_examples(output_dir: Path, stage: str, responses: list[tuple[str, float]]) -> None:
    samples = [
        Sample(prompt="s21=", tokens=(1,), loss_mask=(1.0,), response=text, reward=reward, metadata={"ground_truth": "12"})
        for text, reward in responses
    ]
    (output_dir / stage).mkdir()
    write_samples(output_dir / stage / "examples.jsonl", samples)


def test_the_numbers_are_those_of_the_last_evaluation_of_each_stage():
    config = Config(seed=4, rl=RLSection(prompts_per_step=6, samples_per_prompt=2, algorithm="dapo(clip_high=0.3)"))
    summary = summarize_run(LINES, {"mode": "sft+rl", "seconds_sft": 20.0, "seconds_rl": 5.0}, config)
    assert summary["accuracy_before"] == 0.01
    assert summary["accuracy_after_sft"] == 0.45
    assert summary["accuracy_after_rl"] == 0.97
    assert (summary["seconds_sft"], summary["seconds_rl"], summary["seed"]) == (20.0, 5.0, 4)
    assert summary["samples"] == 3 * 6 * 2
    assert summary["algorithm"] == "dapo(clip_high=0.3)"


def test_a_stage_that_did_not_run_is_none():
    summary = summarize_run([line for line in LINES if line["stage"] == "sft"], {"mode": "sft", "seconds_sft": 1.0}, Config())
    assert (summary["accuracy_after_rl"], summary["seconds_rl"], summary["samples"], summary["algorithm"]) == (None, None, 0, None)
    alone = [rl_line(0, eval_accuracy=0.2), *[line for line in LINES if line["stage"] == "rl"]]
    summary = summarize_run(alone, {"mode": "rl"}, Config())
    assert (summary["accuracy_before"], summary["accuracy_after_sft"], summary["accuracy_after_rl"]) == (0.2, None, 0.97)
    empty = summarize_run([], {}, Config())
    assert empty["accuracy_before"] is None and empty["accuracy_after_rl"] is None


def story_of(before: float | None, after_sft: float | None, after_rl: float | None, tmp_path: Path, task: str = "sort") -> str:
    summary = {
        "task": task, "seed": 0, "accuracy_before": before, "accuracy_after_sft": after_sft, "accuracy_after_rl": after_rl,
        "seconds_sft": 20.0, "seconds_rl": 5.0, "samples": 5120,
    }  # fmt: skip
    return tell_story(summary, tmp_path, Config(task=task))


def test_the_story_shows_accuracies_and_the_same_problem_after_each_stage(tmp_path: Path):
    write_examples(tmp_path, "sft", [("21", 0.0), ("12", 1.0)])
    write_examples(tmp_path, "rl", [("12", 1.0), ("12", 1.0)])
    text = story_of(0.01, 0.45, 0.97, tmp_path)
    assert all(number in text for number in ("0.010", "0.450", "0.970", "20 s", "5 s"))
    rows = [line.split() for line in text.splitlines()]
    header = next(row for row in rows if row[:1] == ["problem"])
    first = next(row for row in rows if row[:1] == ["s21="])
    assert header == ["problem", "after", "SFT", "after", "RL", "right"]
    assert first == ["s21=", "21", "-", "12", "+", "12"]
    assert "wrong way round" in text and "5,120 rewarded answers told it" in text and "with grpo, accuracy went from 0.45 to 0.97" in text


def test_the_sentences_are_true_of_the_numbers(tmp_path: Path):
    assert "did not raise accuracy" in story_of(0.01, 0.6, 0.5, tmp_path).split("RL:")[1]
    assert "told it which" in story_of(0.01, 0.6, 0.9, tmp_path).split("RL:")[1]
    assert "180 steps did not raise accuracy (from 0.20 to 0.10)" in story_of(0.2, 0.1, None, tmp_path)
    assert "wrong way round" not in story_of(0.0, 0.9, None, tmp_path), "a model at 0.9 has not learned both directions"
    assert "wrong way round" not in story_of(0.0, 0.5, 0.9, tmp_path, task="sort-long"), "all its demonstrations are right"


def test_a_resumed_run_does_not_say_that_it_learned(tmp_path: Path):
    """The summary has no accuracy from before the stage, so it reports no gain to 0.00."""
    for text in (story_of(None, None, 0.0, tmp_path), story_of(None, 0.0, None, tmp_path)):
        assert "accuracy is 0.00 now" in text and "learned" not in text and "told it" not in text


def test_a_story_of_one_stage_leaves_the_other_out(tmp_path: Path):
    text = story_of(0.2, None, 0.9, tmp_path)
    assert "SFT" not in text and "from 0.20 to 0.90" in text
    assert "RL" not in story_of(0.2, 0.4, None, tmp_path)


def test_a_run_without_held_out_problems_says_so(tmp_path: Path):
    text = story_of(None, None, None, tmp_path)
    assert "not measured: there were no held-out problems" in text
    assert "SFT:" not in text and "RL:" not in text


def test_conversations_alone_have_a_held_out_loss_and_no_accuracy(tmp_path: Path):
    lines = [sft_line(0, eval_loss=6.976), sft_line(1, loss=3.0), sft_line(2, loss=2.0, eval_loss=1.0953)]
    summary = summarize_run(lines, {"mode": "sft", "seconds_sft": 6.4}, Config())
    assert (summary["held_out_loss_before"], summary["held_out_loss_after_sft"], summary["accuracy_after_sft"]) == (6.976, 1.0953, None)
    text = tell_story(summary, tmp_path, Config())
    assert "before training   6.9760" in text and "after SFT         1.0953   (6 s)" in text and "not measured" not in text
    resumed = tell_story(summary | {"held_out_loss_before": None}, tmp_path, Config())
    assert "before training" not in resumed and "1.0953" in resumed
    assert "after SFT" in tell_story(summary | {"held_out_loss_after_sft": "NaN"}, tmp_path, Config())  # as metrics.jsonl spells it


@pytest.mark.parametrize("stages", [("sft", "rl"), ("sft",), ("rl",), ()])
def test_curves_are_drawn_whichever_stages_ran(stages: tuple[str, ...], tmp_path: Path):
    path = tmp_path / "curves.png"
    assert draw_curves([line for line in LINES if line["stage"] in stages], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_not_a_number_does_not_spoil_the_picture(tmp_path: Path):
    assert draw_curves([*LINES, {"stage": "sft", "step": 4, "loss": "NaN"}], tmp_path / "curves.png")


# -- rewards that are no accuracy

REWARDED = [
    sft_line(0, eval_accuracy=-1.0, eval_accuracy_sampled=-1.0, eval_graded_fraction=1.0),
    sft_line(1, loss=4.0),
    sft_line(3, loss=2.0, eval_accuracy=-0.25, eval_accuracy_sampled=-0.4, eval_graded_fraction=0.6),
    rl_line(1, loss=0.1, reward_mean=-0.3, eval_accuracy=0.1, eval_accuracy_sampled=0.0, eval_graded_fraction=0.5),
    rl_line(3, loss=0.1, reward_mean=0.9, eval_accuracy=1.0, eval_accuracy_sampled=1.0),  # by then all of them are 1
]


def test_a_reward_is_called_a_reward_in_the_summary_and_the_story(tmp_path: Path):
    summary = summarize_run(REWARDED, {"mode": "sft+rl", "seconds_sft": 20.0, "seconds_rl": 5.0}, Config())
    assert summary["measure"] == "reward"
    assert [summary[f"reward_{name}"] for name in ("before", "after_sft", "after_rl")] == [-1.0, -0.25, 1.0]
    assert (summary["reward_sampled_after_sft"], summary["reward_sampled_after_rl"]) == (-0.4, 1.0)
    assert {value for key, value in summary.items() if key.startswith("accuracy")} == {None}
    write_examples(tmp_path, "sft", [("21", -1.0), ("12", 0.5)])
    write_examples(tmp_path, "rl", [("22", -1.0), ("12", 1.0)])
    story = tell_story(summary, tmp_path, Config())
    assert "mean reward of greedy answers on held-out problems" in story
    rows = [line.split() for line in story.splitlines()]
    assert ["after", "SFT", "-0.250", "(20", "s)"] in rows and ["before", "training", "-1.000"] in rows
    assert [row for row in rows if row[:1] == ["s21="]] == [["s21=", "21", "-1", "22", "-1", "12"], ["s21=", "12", "0.5", "12", "1", "12"]]
    assert "the mean reward went from -1.00 to -0.25" in story and "with grpo, the mean reward went from -0.25 to 1.00" in story
    assert "accuracy" not in story and "#" not in story
    worse = tell_story(summary | {"reward_after_rl": -0.5, "reward_after_sft": -1.0}, tmp_path, Config())
    assert worse.count("did not raise the mean reward") == 1 and "accuracy" not in worse


def test_an_accuracy_stays_one(tmp_path: Path):
    summary = summarize_run(LINES, {}, Config())
    assert summary["measure"] == "accuracy" and not any(key.startswith("reward") for key in summary)


def test_the_curve_of_a_reward_is_inside_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    draw_curves(REWARDED, tmp_path / "curves.png")
    draw_curves(LINES, tmp_path / "curves.png")
    rewarded, right = (next(axis for axis in figure.axes if "held-out" in axis.get_title()) for figure in figures)
    low, high = rewarded.get_ylim()
    points = [y for line in rewarded.get_lines()[:4] for y in line.get_ydata()]
    assert min(points) == -1.0 and low < -1.0 and high > 1.0
    assert (rewarded.get_title(), rewarded.get_ylabel()) == ("mean reward on held-out problems", "reward")
    assert (right.get_title(), right.get_ylim()) == ("accuracy on held-out problems", (-0.02, 1.02))


def test_the_algorithm_is_the_one_that_ran(tmp_path: Path):
    asynchronous = AsyncConfig(enabled=True)
    switched = Config(enable_segment_wise_ppo=True, rl=RLSection(algorithm="dapo(clip_high=0.3)", asynchronous=asynchronous))
    summary = summarize_run(LINES, {}, switched)
    assert summary["algorithm"] == "decoupled(dapo(clip_high=0.3), segment_wise=True, missed_as_proximal=False)"
    assert f"with {summary['algorithm']}, accuracy went" in tell_story(summary | {"seconds_sft": None}, tmp_path, switched)
    assert create_algorithm(parse_algorithm(summary["algorithm"]), 64).requires == switched.algorithm.requires
    inner = RLSection(algorithm="decoupled( dapo, cap=2.0, )", asynchronous=replace(asynchronous, missed_segment="proximal"))
    summary = summarize_run(LINES, {}, Config(enable_segment_wise_ppo=True, rl=inner))
    assert summary["algorithm"] == "decoupled(dapo, cap=2.0, segment_wise=True, missed_as_proximal=True)"


def test_without_matplotlib_there_is_no_picture_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name=name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert not draw_curves(LINES, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_gain_in_sampled_accuracy_alone_is_told(tmp_path: Path):
    lines = [
        sft_line(2, eval_accuracy=1.0, eval_accuracy_sampled=0.7),
        rl_line(1, eval_accuracy=1.0, eval_accuracy_sampled=0.95),
    ]
    story = tell_story(summarize_run(lines, {}, Config()), tmp_path, Config())
    assert "sampled accuracy went from 0.70 to 0.95, and greedy accuracy stayed at 1.00" in story


@pytest.mark.parametrize(
    ("margin", "told"), [(0.25, ": 1.00, by 0.25 on average."), ("Infinity", ", by inf on average."), (None, ": 1.00.")]
)
def test_a_margin_of_pairs_may_be_infinite_or_unknown(margin: float | str | None, told: str, tmp_path: Path):
    pairs = {"loss": "kto", "accuracy_before": None, "accuracy_after": 1.0, "margin_after": margin, "trained_on": 8}
    text = tell_story({**summarize_run(LINES, {"mode": "sft+rl"}, Config()), "pairs": pairs}, tmp_path, Config())
    assert next(line for line in text.splitlines() if line.startswith("DPO: ")).endswith(told)

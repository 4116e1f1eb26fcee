"""Progress on a terminal and in a pipe."""

from __future__ import annotations

import io
from typing import Any

import pytest

from integration.run.display import GRADED, PLAIN_EVERY_S, Progress, describe_step


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def show(stream: io.StringIO, lines: list[tuple[dict[str, Any], int]], seconds_per_step: float = 1.0, **options: Any) -> str:
    clock = Clock()
    progress = Progress({"sft": 10, "rl": 4}, stream=stream, clock=clock, **options)
    for metrics, step in lines:
        clock.now += seconds_per_step
        progress.log(metrics, step)
    progress.finish()
    return stream.getvalue()


def sft_lines(count: int = 10) -> list[tuple[dict[str, Any], int]]:
    return [({"stage": "sft", "loss": 1.0 / step, "lr": 1e-3}, step) for step in range(1, count + 1)]


def test_a_line_has_the_numbers_that_people_watch():
    text = describe_step({"stage": "rl", "loss": 0.5, "reward_mean": 0.25, "eval_accuracy": 0.75, "lr": 1e-4, "step_s": 1.5, "kl": 3.0})
    assert text == "loss 0.5000  reward 0.250  held-out accuracy 0.750  lr 1.0e-04  s/step 1.50"
    assert describe_step({"stage": "sft", "loss": "NaN"}) == ""


def test_a_pipe_gets_plain_lines_now_and_then_and_the_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    text = show(io.StringIO(), sft_lines())
    assert text.isprintable() or all(character == "\n" for character in text if not character.isprintable())
    steps = [line.split()[1] for line in text.splitlines()]
    assert steps == ["1/10", "6/10", "10/10"], f"one line in {PLAIN_EVERY_S} s, and the last"


def test_each_evaluation_is_shown_in_a_pipe():
    lines = sft_lines(4)
    lines[1][0]["eval_accuracy"] = 0.5
    text = show(io.StringIO(), lines, seconds_per_step=0.1)
    assert [line.split()[1] for line in text.splitlines()] == ["1/10", "2/10"]
    assert "held-out accuracy 0.500" in text


def test_a_terminal_gets_a_live_line_for_each_stage_and_evaluations_above_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    rl: list[tuple[dict[str, Any], int]] = [({"stage": "rl", "reward_mean": 0.5, "eval_accuracy": 0.25}, 1)]
    text = show(Terminal(), sft_lines(3) + rl)
    assert "\x1b[" in text and "3/10" in text
    assert "RL     1/4  reward 0.500  held-out accuracy 0.250" in text
    assert "\x1b[?25h" in text, "the cursor is given back"


def test_what_is_said_is_printed_as_it_is():
    stream = io.StringIO()
    Progress({}, stream=stream, clock=Clock()).say("[bold] is not markup " + "and nothing is wrapped " * 10)
    assert stream.getvalue() == "[bold] is not markup " + "and nothing is wrapped " * 10 + "\n"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_shows_nothing(stream: io.StringIO):
    assert show(stream, sft_lines(), quiet=True) == ""


def test_finishing_without_a_step_or_twice_does_no_harm():
    progress = Progress({"sft": 1}, stream=Terminal(), clock=Clock())
    progress.finish()
    progress.log({"stage": "sft", "loss": 1.0}, 1)
    progress.finish()
    progress.finish()


def test_a_mean_reward_is_not_called_accuracy():
    assert "held-out accuracy 0.500" in describe_step({"eval_accuracy": 0.5})
    assert describe_step({"stage": "sft", "eval_loss": 0.5}).count("held-out loss") == 1
    assert "held-out reward -0.500" in describe_step({"eval_accuracy": -0.5, GRADED: 1.0})

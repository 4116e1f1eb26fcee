"""The aligner: every step output becomes the base reward of exactly its step, or is reported."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import StepOutput
from rollouts.rewards.results import EvaluateResult, align_rewards_with_step_data, number_step
from rollouts.steps import StepData, Steps
from rollouts.types import Message

USER, ASSISTANT = Message(role="user", content="u"), Message(role="assistant", content="a")


def make_steps(n: int, *, num_examples: int = 0, with_history: bool = True) -> Steps:
    """An episode, its prompt holding num_examples messages of the assistant."""
    before = (USER, ASSISTANT) * num_examples
    return tuple(
        StepData(
            system_step_index=k,
            resulting_messages_history=(*before, *(USER, ASSISTANT) * (k + 1), USER) if with_history else (),
            step_info={"name": f"step {k}"},
        )
        for k in range(n)
    )


def result_of(*outputs: tuple[int | str, float]) -> EvaluateResult:
    return EvaluateResult(1.0, step_outputs=tuple(StepOutput(index, reward) for index, reward in outputs))


def base_rewards(steps: Steps) -> list[float | None]:
    return [step.base_reward for step in steps]


def test_numbers_are_places_among_the_assistants_messages():
    steps = make_steps(3)
    alignment = align_rewards_with_step_data(result_of((0, 0.25), (2, -1.0)), steps)
    assert base_rewards(alignment.steps) == [0.25, None, -1.0] and alignment.unmatched == ()
    assert base_rewards(steps) == [None] * 3
    assert alignment.raise_unmatched() is alignment
    with_examples = make_steps(3, num_examples=2)
    assert [number_step(step) for step in with_examples] == [2, 3, 4]
    assert base_rewards(align_rewards_with_step_data(result_of((2, 0.5)), with_examples).steps) == [0.5, None, None]
    assert base_rewards(align_rewards_with_step_data(result_of((1, 0.5)), make_steps(2, with_history=False)).steps) == [None, 0.5]


def test_names_are_looked_up():
    assert base_rewards(align_rewards_with_step_data(result_of(("step 1", 0.5)), make_steps(2)).steps) == [None, 0.5]
    own = align_rewards_with_step_data(result_of(("0", 0.5)), make_steps(2), name_of=lambda step: str(step.system_step_index))
    assert base_rewards(own.steps) == [0.5, None]
    same = align_rewards_with_step_data(result_of(("x", 0.5)), make_steps(2), name_of=lambda step: "x")
    assert base_rewards(same.steps) == [None, None] and same.unmatched[0].reason == "step_index 'x' is the name of 2 steps"


@pytest.mark.parametrize("index", [-1, 2, "nowhere", 10**9])
def test_what_cannot_be_mapped_is_reported(index):
    alignment = align_rewards_with_step_data(result_of((0, 0.5), (index, 1.0)), make_steps(2))
    assert base_rewards(alignment.steps) == [0.5, None]
    (unmatched,) = alignment.unmatched
    assert unmatched.output is not None and unmatched.output.step_index == index and "unknown; there are" in unmatched.reason
    with pytest.raises(RewardError, match="1 step outputs are the reward of no step: episode 0: step_index"):
        alignment.raise_unmatched()


def test_a_step_that_two_outputs_are_about_gets_neither():
    alignment = align_rewards_with_step_data(result_of((0, 0.5), ("step 0", 1.0), (1, 2.0)), make_steps(2))
    assert base_rewards(alignment.steps) == [None, 2.0] and len(alignment.unmatched) == 2


def test_a_result_without_a_score_gives_nothing_and_is_reported():
    invalid = replace(result_of((0, 0.5)), error="the judge is down")
    alignment = align_rewards_with_step_data([invalid, result_of((0, 0.5))], [make_steps(1), make_steps(1)], "batch")
    assert [base_rewards(steps) for steps in alignment.steps] == [[None], [0.5]]
    (unmatched,) = alignment.unmatched
    assert (unmatched.episode, unmatched.output) == (0, None) and "the judge is down" in unmatched.reason


def test_rewards_that_steps_have_stay_where_nothing_is_said():
    steps = tuple(replace(step, base_reward=7.0) for step in make_steps(2))
    assert base_rewards(align_rewards_with_step_data(result_of((1, 0.0)), steps).steps) == [7.0, 0.0]
    for outputs in (None, (), []):  # the whole is all that is judged, and nobody judges steps now
        assert base_rewards(align_rewards_with_step_data(EvaluateResult(1.0, step_outputs=outputs), steps).steps) == [None, None]


def test_another_number_of_results_is_an_error():
    with pytest.raises(RewardError, match="2 evaluation results for 1 episodes"):
        align_rewards_with_step_data([EvaluateResult(1.0)] * 2, [make_steps(1)], "batch")
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        align_rewards_with_step_data([], [], "bach")
    with pytest.raises(RewardError, match=r"0.5 \(float\) is not an EvaluateResult"):
        align_rewards_with_step_data(0.5, make_steps(1))  # type: ignore[arg-type]


def test_inputs_and_outputs_are_logged_at_debug_only(caplog):
    with caplog.at_level(logging.INFO, logger="rollouts"):
        align_rewards_with_step_data(result_of((0, 0.5)), make_steps(1))
    assert caplog.text == ""
    with caplog.at_level(logging.DEBUG, logger="rollouts"):
        align_rewards_with_step_data(result_of((0, 0.5), (9, 1.0)), make_steps(1))
    lines = [record.getMessage() for record in caplog.records]
    assert any("alignment in: EvaluateResult" in line and "base_reward=0.5" in line for line in lines)
    assert "alignment in: episode 0 has base rewards {0: None} by step index" in lines
    assert "alignment out: episode 0 has base rewards {0: 0.5} by step index" in lines
    assert any("alignment out: UnmatchedStep" in line and "step_index 9 is unknown" in line for line in lines)


@given(
    num_steps=st.integers(0, 6),
    num_examples=st.integers(0, 2),
    outputs=st.lists(st.tuples(st.integers(-2, 9) | st.sampled_from(["step 0", "step 3", "other"]), st.floats(-10, 10)), max_size=8),
)
def test_every_output_is_applied_once_or_reported_once(num_steps, num_examples, outputs):
    steps = make_steps(num_steps, num_examples=num_examples)
    result = result_of(*outputs)
    alignment = align_rewards_with_step_data(result, steps)
    applied = [step for step in alignment.steps if step.base_reward is not None]
    assert len(applied) + len(alignment.unmatched) == len(outputs)
    reported = [id(step.output) for step in alignment.unmatched]
    assert len(set(reported)) == len(reported)
    for output in result.step_outputs or ():
        if id(output) not in reported:
            names = [s for s in alignment.steps if output.step_index in (number_step(s), s.step_info["name"])]
            assert [step.base_reward for step in names] == [output.base_reward]
    assert [replace(step, base_reward=None) for step in alignment.steps] == list(steps)

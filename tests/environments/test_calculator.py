"""The calculator: arithmetic that is never code, problems with a truth, and demonstrations."""

from __future__ import annotations

import random

import pytest

from rollouts import EnvironmentConfig, Prompt, reset_environment, step_environment
from rollouts.chat.char_tokenizer import ALPHABET
from rollouts.environments.games.calculator import (
    calculate,
    create_calculator_environment,
    create_calculator_problems,
    demonstrate_calculator,
)
from rollouts.errors import DataError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"), ("1+2*3", "7"), ("(1+2)*3", "9"), ("84/7", "12"), ("1/3", "0.3333333333"), ("7//2", "3"), ("-7%3", "2"),
        ("2**10", "1024"), (" 3 - -4 ", "7"), ("1.5+1.5", "3"), ("0.1+0.2", "0.3"), ("2**-1", "0.5"), ("--5", "5"),
    ],
)  # fmt: skip
def test_arithmetic(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not arithmetic"), ("1+", "not arithmetic"), ("import os", "not arithmetic"), ("__import__('os')", "not arithmetic"),
        ("abs(1)", "not arithmetic"), ("1(2)", "not arithmetic"), ("(1)(2)", "not arithmetic"), ("007", "not arithmetic"),
        ("9**9**9", "too large"), ("10**31", "too large"), ("9" * 40, "too large"), ("1" * 201, "too long"), ("(-8)**0.5", "too large"),
        ("(" * 99 + "1" + ")" * 99, None), ("(" * 150, "not arithmetic"), ("1,2", "not arithmetic"), ("()", "not arithmetic"),
        ("-" * 199 + "1", None), ("1.1**99", None), ("0.0**-1", ZeroDivisionError), ("1e9", "not arithmetic"),
        ("99999999.5**99", "too large"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_in_few_words(expression: str, message: str | type[Exception] | None):
    if message is None:
        assert calculate(expression)
    elif isinstance(message, str):
        with pytest.raises(ValueError, match=f"^{message}$"):
            calculate(expression)
    else:
        with pytest.raises(message):
            calculate(expression)


def test_a_calculator_of_single_operations():
    assert calculate("-3*4", max_operations=1) == "-12"
    with pytest.raises(ValueError, match=r"^at most 1 operation$"):
        calculate("1+2+3", max_operations=1)


def test_problems_are_different_and_have_their_truth():
    problems = create_calculator_problems(0, 500)
    assert len({problem.content for problem in problems}) == 500
    assert problems == create_calculator_problems(0, 500)
    assert problems != create_calculator_problems(1, 500)
    for problem in problems:
        expression = problem.metadata["expression"]
        assert problem.content == f"{expression}="
        assert problem.metadata["ground_truth"] == str(eval(expression))
        assert set(expression) <= set(ALPHABET[:61])
    with pytest.raises(DataError, match="1000 different problems asked for, found 300"):
        create_calculator_problems(0, 1000, max_digits=1, max_operations=1)


async def play(problem: Prompt, actions: tuple[str, ...], max_operations: int | None = 1) -> tuple[float, list[str]]:
    environment = create_calculator_environment(max_operations=max_operations)
    assert await reset_environment(environment, EnvironmentConfig(parameters=problem.metadata)) == ""
    results: list[str] = []
    for action in actions:
        step = await step_environment(environment, action)
        if step.done:
            return step.reward, results
        results += [message.content for message in step.observation]
    raise AssertionError("no answer")


async def test_experts_solve_every_problem_with_single_operations():
    generator = random.Random(0)
    for problem in create_calculator_problems(3, 200, max_operations=3):
        actions = demonstrate_calculator(problem, generator)
        reward, results = await play(problem, actions)
        assert reward == 1.0
        assert len(results) == len(actions) - 1 == sum(character in "+-*" for character in problem.metadata["expression"])


async def test_a_share_of_demonstrations_is_wrong():
    generator = random.Random(0)
    rewards = [
        (await play(problem, demonstrate_calculator(problem, generator, wrong_share=0.5)))[0]
        for problem in create_calculator_problems(3, 400)
    ]
    assert 0.45 < sum(rewards) / 400 < 0.6


async def test_errors_are_observations_and_an_answer_without_a_call_is_graded():
    problem = create_calculator_problems(0, 1)[0]
    reward, results = await play(problem, ("calc(1/0)", "calc(1+1+1)", "calc(os)", "calc(2", f" {problem.metadata['ground_truth']}\n"))
    assert reward == 1.0
    assert results == ["error: division by zero", "error: at most 1 operation", "error: not arithmetic", "error: calc( without )"]
    assert (await play(problem, ("12345678",)))[0] == 0.0
    assert (await play(problem, ("",)))[0] == 0.0
    assert set("".join(results)) <= set(ALPHABET[:61])

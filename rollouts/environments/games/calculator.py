"""Arithmetic as a tool, and problems that need it. Expressions are parsed by ast and computed node by node; nothing is run as code."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from rollouts.environments.tools.calls import create_compact_parser
from rollouts.environments.tools.environment import ToolEnvironment
from rollouts.environments.tools.tool import Tool, create_tool
from rollouts.errors import DataError, ToolArgumentError
from rollouts.types import Prompt

Number: TypeAlias = "int | float"

MAX_CHARACTERS = 200
LARGEST = 10**30

_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
    }
)


def calculate(expression: str, *, max_operations: int | None = None) -> str:
    """Return the value of an arithmetic expression: numbers, + - * / // % ** and parentheses.

    Args:
        expression: at most MAX_CHARACTERS long; no intermediate number may exceed LARGEST.
        max_operations: most binary operators; None = no limit. 1 demands one call per step of a problem.

    Returns: an integer if it is one ("12", also for 84/7), otherwise ten significant digits.
    Raises: ValueError saying in few words what is wrong, because a model reads them; ZeroDivisionError.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError("too long")
    if not re.fullmatch(r"[0-9+\-*/%(). ]+", expression):
        raise ValueError("not arithmetic")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not arithmetic") from None
    count = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
    if max_operations is not None and count > max_operations:
        raise ValueError(f"at most {max_operations} operation{'s' * (max_operations > 1)}")
    value = _compute(tree.body)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _compute(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _compute(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 100 or (left < 0 and right != int(right))):
            raise ValueError("too large")
        try:
            value = _OPERATIONS[type(node.op)](left, right)
        except OverflowError:
            value = math.inf
    else:
        raise ValueError("not arithmetic")
    if not abs(value) <= LARGEST:
        raise ValueError("too large")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def create_calculator_tool(*, name: str = "calc", max_operations: int | None = None) -> Tool:
    """Create a tool of `calculate` with the one argument e."""
    function: Callable[..., str] = partial(_calculate, max_operations=max_operations)
    return create_tool(function, name=name, description="Compute an arithmetic expression, such as 12*7.", in_thread=False)


def _calculate(e: str, *, max_operations: int | None) -> str:
    try:
        return calculate(e, max_operations=max_operations)
    except (ValueError, ZeroDivisionError) as error:
        raise ToolArgumentError(str(error)) from None


def create_calculator_environment(*, max_operations: int | None = None) -> ToolEnvironment:
    """Create an environment with the call calc(12*7); the first text without one is the answer: 1 if it is the ground truth, else 0.

    The calls are this short for models with one token per character; a large model is better served by Hermes' form:
    ToolEnvironment([create_calculator_tool()], grade=grade_answer).
    """
    tool = create_calculator_tool(max_operations=max_operations)
    return ToolEnvironment([tool], grade=grade_answer, parser=create_compact_parser([tool]))


def grade_answer(answer: str, parameters: Any) -> float:
    """Return 1.0 if an answer is the ground truth, as text without white space around it, else 0.0."""
    return float(answer.strip() == str(parameters["ground_truth"]))


def create_calculator_problems(
    seed: int, num: int, *, max_digits: int = 2, min_operations: int = 1, max_operations: int = 2
) -> tuple[Prompt, ...]:
    """Create different problems such as "37*12+5=" with an integer ground truth, in an order that is a function of the seed.

    Args:
        max_digits: digits of each number.
        min_operations, max_operations: operators in a problem, + - and *.

    Returns: prompts whose metadata has expression and ground_truth.
    Raises: DataError if there are too few such problems.
    """
    generator = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(100 * num + 1000):
        if len(found) == num:
            break
        count = generator.randint(min_operations, max_operations)
        numbers = [str(generator.randrange(10 ** generator.randint(1, max_digits))) for _ in range(count + 1)]
        found.setdefault(numbers[0] + "".join(generator.choice("+-*") + number for number in numbers[1:]))
    if len(found) < num:
        raise DataError(f"{num} different problems asked for, found {len(found)}: ask for fewer, or raise max_digits or max_operations")
    return tuple(
        Prompt(content=f"{expression}=", index=i, metadata={"expression": expression, "ground_truth": calculate(expression)})
        for i, expression in enumerate(found)
    )


def demonstrate_calculator(prompt: Prompt, generator: random.Random, *, wrong_share: float = 0.0, name: str = "calc") -> tuple[str, ...]:
    """Return an expert's texts, turn by turn: one call per operation in the order of computation, then the answer.

    Args:
        wrong_share: probability that the demonstration goes wrong on purpose: it guesses an answer without a call, or calls the tool
            with a wrong digit and trusts the result.
    """
    expression: str = prompt.metadata["expression"]
    if generator.random() < wrong_share:
        if generator.random() < 0.5:
            return (str(generator.randrange(100)),)
        place = generator.choice([i for i, character in enumerate(expression) if character.isdigit()])
        others = [digit for digit in "123456789" if digit != expression[place]]
        expression = expression[:place] + generator.choice(others) + expression[place + 1 :]
    numbers, signs = re.findall(r"\d+", expression), re.findall(r"[+\-*]", expression)
    actions: list[str] = []
    while signs:
        k = signs.index("*") if "*" in signs else 0
        operation = numbers[k] + signs.pop(k) + numbers[k + 1]
        actions.append(f"{name}({operation})")
        numbers[k : k + 2] = [calculate(operation)]
    return (*actions, numbers[0])

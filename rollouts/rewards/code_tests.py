"""Programs that a model wrote, rewarded for the tests that they pass. They run in a sandbox; what is right stays outside of it.

    async with CodeReward().open_reward() as reward_fn: ...        # or --reward.function rollouts.rewards.code_tests:code_reward

metadata["tests"] of a prompt is a list of tests, in any of these forms:

    "assert add(2, 3) == 5"                        the left side is evaluated in the sandbox, its value compared out here
    {"call": "add(2, 3)", "expected": 5}           the same; expected is JSON, where tuples are lists
    {"stdin": "2 3", "stdout": "5"}                the whole program is run; white space at the ends of lines does not count

A program never sees what is expected of it, so it cannot print, return or exit its way to a reward: it has to compute. Only an assert of
another form ("assert is_even(2)", "assert abs(f(2) - 0.5) < 1e-6") is decided where the program runs, which could cheat in it: a program
with `bool = lambda x: True` passes it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import trio

from rollouts.errors import RewardError
from rollouts.rewards.calls import RewardFn, UnopenedReward
from rollouts.rewards.literals import write_literal
from rollouts.rewards.results import EvaluateResult, MetricResult
from rollouts.samples import describe_sample, show_value
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.sandbox.reward_code import execute_code, open_code_pool
from rollouts.sandbox.run import find_confinement, run_confined
from rollouts.types import Sample

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_WRITE_LITERAL = inspect.getsource(write_literal).replace(": Any", "")  # a program may have its own Any

_HARNESS = f"""
{_WRITE_LITERAL}

def _values_of_expressions(expressions, most_text):
    values = []
    for expression in expressions:
        try:
            values.append({{"value": write_literal(eval(expression, globals()))[:most_text]}})
        except Exception as error:
            values.append({{"error": (type(error).__name__ + ": " + str(error))[:500]}})
    return values
"""


@dataclass(frozen=True)
class CodeTest:
    """One test: an expression and its value, or the input and output of the whole program."""

    expression: str | None = None
    expected: Any = None
    stdin: str | None = None
    stdout: str = ""
    is_identical: bool = False  # the test says `is`: 1 is not True there


@dataclass(frozen=True, kw_only=True)
class CodeReward(UnopenedReward):
    """The tests that the program in a response passes (a calls.RewardSource). The metric tests_passed is their fraction.

    The program is the last ``` block of the response, or all of it where there is none.
    """

    fraction: bool = False  # reward = the fraction of tests that pass; False: 1 if all pass, else 0
    num_workers: int = 2  # programs at the same time
    limits: SandboxLimits = field(default_factory=lambda: SandboxLimits(wall_s=10.0, cpu_s=5.0))  # of one program, or one call of it
    confinement: Confinement | None = None  # None = the strongest that works here

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """The reward function, while its workers run. Raises SandboxError if no sandbox works here."""
        confinement = self.confinement or find_confinement()
        async with open_code_pool(num_workers=self.num_workers, limits=self.limits, confinement=confinement) as pool:
            yield _CodeTests(self, pool, confinement, trio.CapacityLimiter(self.num_workers))


code_reward = CodeReward()


@dataclass(frozen=True)
class _CodeTests:
    """What CodeReward opens."""

    settings: CodeReward
    pool: SandboxPool
    confinement: Confinement
    limiter: trio.CapacityLimiter
    reward_name: str = "CodeReward"
    has_own_deadline: bool = True  # limits of the pool and of each program

    async def __call__(self, sample: Sample) -> EvaluateResult:
        tests = parse_tests(sample.metadata.get("tests"), describe_sample(sample), most_text=self.settings.limits.output_bytes)
        program = extract_program(sample.response)
        problems = await self._test_expressions(program, [test for test in tests if test.stdin is None])
        for test in tests:
            if test.stdin is not None:
                problems.append(await self._test_program(program, test))
        passed = sum(problem is None for problem in problems) / len(problems)
        reason = next((problem for problem in problems if problem is not None), "all tests pass")
        score = passed if self.settings.fraction else float(passed == 1.0)
        return EvaluateResult(score, reason=reason, metrics={"tests_passed": MetricResult(passed)})

    async def _test_expressions(self, program: str, tests: Sequence[CodeTest]) -> list[str | None]:
        """What is wrong in each test; None = it passes. Each test gets a process of its own where they are counted one by one."""
        if not self.settings.fraction:
            return await self._call_program(program, tests) if tests else []
        return [problem for test in tests for problem in await self._call_program(program, [test])]

    async def _call_program(self, program: str, tests: Sequence[CodeTest]) -> list[str | None]:
        arguments = {"expressions": [test.expression for test in tests], "most_text": self.settings.limits.output_bytes}
        result = await execute_code(program + _HARNESS, "_values_of_expressions", arguments, pool=self.pool)
        if not result.ok:
            return [f"the program failed: {result.error}"] * len(tests)
        values: Any = result.value
        if not isinstance(values, list) or len(cast("list[Any]", values)) != len(tests):
            return ["the program came in the way of its tests"] * len(tests)
        return [compare_value(test, value) for test, value in zip(tests, cast("list[Any]", values), strict=True)]

    async def _test_program(self, program: str, test: CodeTest) -> str | None:
        async with self.limiter:
            stdin = (test.stdin or "").encode()
            result = await run_confined(program, stdin=stdin, limits=self.settings.limits, confinement=self.confinement, packages=True)
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip()[-200:]
            return f"for the input {test.stdin!r:.100} the program failed ({result.failure}): {said}"
        found = result.stdout.decode(errors="replace")
        if _lines(found) == _lines(test.stdout):
            return None
        return f"for the input {test.stdin!r:.100} the program printed {found!r:.100}, expected {test.stdout!r:.100}"


def extract_program(response: str) -> str:
    """The last ``` block of a text; without one, the text itself."""
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(tests: Any, where: str, *, most_text: int | None = None) -> list[CodeTest]:
    """metadata["tests"] as tests.

    Args:
        most_text: characters of JSON that the values of all expressions together may have, since longer ones do not leave the sandbox.

    Raises: RewardError if it is no list of tests, or an empty one, or more is expected than can leave the sandbox.
    """
    if not isinstance(tests, (list, tuple)) or not tests:
        raise RewardError(f"metadata['tests'] of {where} is {show_value(tests)}, expected a list of at least one test")
    parsed = [_parse_test(test, where) for test in cast("Sequence[Any]", tests)]
    size = sum(len(json.dumps({"value": write_literal(test.expected)})) + 2 for test in parsed if test.stdin is None)
    if most_text is not None and size + 2 > most_text:
        raise RewardError(
            f"the tests of {where} expect values of {size} characters, more than the {most_text} that a sandbox gives back: "
            "raise limits.output_bytes of the CodeReward, or test smaller values"
        )
    return parsed


def _parse_test(test: Any, where: str) -> CodeTest:
    if isinstance(test, str):
        return _parse_assert(test, where)
    if isinstance(test, Mapping):
        entries = cast("Mapping[str, Any]", test)
        if set(entries) == {"call", "expected"} and isinstance(entries["call"], str):
            return CodeTest(expression=entries["call"], expected=_as_json(entries["expected"]))
        if set(entries) == {"stdin", "stdout"} and isinstance(entries["stdin"], str) and isinstance(entries["stdout"], str):
            return CodeTest(stdin=entries["stdin"], stdout=entries["stdout"])
    raise RewardError(
        f"a test of {where} is {show_value(test)}, expected 'assert ...', "
        f"{{'call': ..., 'expected': ...}} or {{'stdin': ..., 'stdout': ...}}"
    )


def _parse_assert(test: str, where: str) -> CodeTest:
    try:
        body = ast.parse(test.strip()).body
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"the test {test!r:.200} of {where} is no Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise RewardError(f"the test {test!r:.200} of {where} is not one assert")
    condition = body[0].test
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], ast.Eq | ast.Is):
        try:
            expected = _as_json(ast.literal_eval(condition.comparators[0]))
            is_identical = isinstance(condition.ops[0], ast.Is)
            return CodeTest(expression=ast.unparse(condition.left), expected=expected, is_identical=is_identical)
        except (ValueError, TypeError):  # the right side is no literal
            pass
    return CodeTest(expression=f"bool({ast.unparse(condition)})", expected=True)


def compare_value(test: CodeTest, answer: Any) -> str | None:
    """What is wrong about the value of a test's expression, as the sandbox told it; None = nothing is."""
    text = cast("Mapping[str, Any]", answer).get("value") if isinstance(answer, Mapping) else None
    if not isinstance(text, str):
        error = cast("Mapping[str, Any]", answer).get("error") if isinstance(answer, Mapping) else answer
        return f"{test.expression} failed: {error!s:.500}"
    try:
        found = _as_json(ast.literal_eval(text)) if len(text) <= 8 * len(write_literal(test.expected)) + 10_000 else ...
        equal = bool(found == test.expected) and (not test.is_identical or type(found) is type(test.expected))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # not a literal, or one made to harm
        equal = False
    return None if equal else f"{test.expression} is {text:.100}, expected {show_value(test.expected, 100)}"


def _as_json(value: Any) -> Any:
    """Tuples as lists, at any depth; everything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

"""Rewards of programs that a model wrote, for the tests that they pass. Expected values stay in processes without a program.

    async with CodeReward().open_reward() as reward_fn: ...        # or --reward.function rollouts.rewards.code.unit_tests:code_reward

metadata["tests"] of a prompt is a list of tests, in any of these forms:

    "assert add(2, 3) == 5"                        one or more statements, at least one of which is an assertion
    {"call": "add(2, 3)", "expected": 5}           an expression and its value; expected is JSON, where tuples are lists
    {"code": "def check(candidate): ...", "entry_point": "add"}      functions of tests; check is called with the one of that name
    {"stdin": "2 3", "stdout": "5"}                the whole program is run; white space at the ends of lines does not count

metadata["test_setup"], a text, comes before all tests (imports, helpers); metadata["entry_point"] is a name that the program defines.

A program never sees an expected value, so it cannot print, return or exit its way to a reward: it has to compute. Tests run in a process
of their own (judge.py). Its requests for the program's names go to the program's process (program.py), which answers with plain data: no
object with an `__eq__` of its own and no changed `math` is there when a test decides. Expected literals do not even get that far.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import trio

from rollouts.checks import show_value
from rollouts.config_files import suggest
from rollouts.data.samples import describe_sample
from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import MetricResult
from rollouts.rewards.code.separation import Separation, find_obstacle, separate
from rollouts.rewards.evaluate import RewardFn, UnopenedReward
from rollouts.rewards.results import EvaluateResult
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.sandbox.run import find_confinement, run_confined
from rollouts.types import Prompt, Sample


def write_literal(value: Any, hashable: bool = False) -> str:
    """Return a value as a literal for ast.literal_eval, or its repr if there is none.

    Values of subclasses, such as a Counter or an IntEnum, are written as those of the base type, which they equal; a frozenset as a set,
    numpy's scalars as Python's, tuples as lists (but not inside of sets and keys), very large integers in hexadecimal. The function uses
    nothing but builtins, and these by their module.

    Args:
        hashable: the value is inside of a set or a key.
    """
    import builtins as b

    def write_all(values: Any, inner: bool) -> str:
        return ", ".join([write_literal(item, inner) for item in values])

    if b.type(value).__module__ == "numpy" and b.getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or b.isinstance(value, b.bool):
        return b.repr(value)
    if b.isinstance(value, b.int):
        number = b.int.__int__(value)
        return b.hex(number) if b.int.bit_length(number) > 10_000 else b.repr(number)
    if b.isinstance(value, b.float):
        return b.repr(b.float.__float__(value))
    if b.isinstance(value, b.str):
        return b.repr(b.str.__str__(value))
    if b.isinstance(value, b.dict):
        return "{" + ", ".join([write_literal(key, True) + ": " + write_literal(item) for key, item in b.dict.items(value)]) + "}"
    if b.isinstance(value, (b.set, b.frozenset)):
        return "{" + write_all(value, True) + "}" if b.len(value) else "set()"
    if b.isinstance(value, b.list) or (b.isinstance(value, b.tuple) and not hashable):
        return "[" + write_all(value, False) + "]"
    if b.isinstance(value, b.tuple):
        return "(" + write_all(value, True) + ("," if b.len(value) == 1 else "") + ")"
    return b.repr(value)


LOGGER = logging.getLogger(__name__)

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)  # all languages: the end of one block is not the beginning of the next
_LANGUAGES = frozenset({"", "python", "python3", "py"})
_JUDGE, _PROGRAM = "rollouts.rewards.code.judge:judge_tests", "rollouts.rewards.code.program:answer_requests"
MOST_OPENINGS = 10_000  # requests remembered, by tests
MOST_PASSES = 64  # runs of the tests, each with more answers of the program than the one before
ENCODED = 4  # characters of JSON per character of a literal

Inseparable = Literal["refuse", "leave_out"]


@dataclass(frozen=True)
class CodeTest:
    """One test: an expression and its value, statements, or the input and output of the whole program."""

    expression: str | None = None
    source: str | None = None  # statements that pass if they raise nothing
    expected: Any = None
    stdin: str | None = None
    stdout: str = ""
    is_identical: bool = False  # the test says `is`, so that 1 is not True


@dataclass(frozen=True)
class TestPlan:
    """Tests of a prompt, ready to run."""

    tests: tuple[CodeTest, ...]
    setup: str = ""
    separation: Separation | None = None  # None = no test uses a name of the program
    obstacles: tuple[str, ...] = ()  # reasons of the tests that were left out because they cannot run apart from the program

    __test__ = False  # pytest must not collect it


@dataclass(frozen=True, kw_only=True)
class CodeReward(UnopenedReward):
    """Reward for the tests that a response's program passes (a evaluate.RewardSource). The metric tests_passed is their fraction.

    The program is the last ``` block of the response, or all of it without one. The metric tests_undecided is the fraction of tests that
    did not pass because they ask an object of the program for a verdict; tests_left_out is the fraction that `inseparable` left out.
    """

    fraction: bool = False  # reward = fraction of tests that pass; False: 1 if all pass, else 0
    num_workers: int = 2  # programs at the same time
    limits: SandboxLimits = field(default_factory=lambda: SandboxLimits(wall_s=10.0, cpu_s=5.0))  # for a program, or one call of it
    confinement: Confinement | None = None  # None = the strongest that works here
    inseparable: Inseparable = "refuse"  # a test that cannot run apart from the program is an error of its row, or left out and counted

    def __post_init__(self) -> None:
        if self.inseparable not in get_args(Inseparable):
            raise ConfigError(f"CodeReward.inseparable is {self.inseparable!r}: {suggest(str(self.inseparable), get_args(Inseparable))}")

    def check_prompts(self, prompts: Sequence[Prompt], sources: Sequence[str]) -> None:
        """Read all tests before a run; log one warning about those that are left out.

        Args:
            sources: origin of each prompt: "file, line n".

        Raises: RewardError with the first row with unusable tests, and the number of such rows.
        """
        left_out: list[tuple[str, str]] = []
        refused: list[str] = []
        for prompt, source in zip(prompts, sources, strict=True):
            try:
                plan = self.plan_tests(prompt.metadata, source)
            except RewardError as error:
                refused.append(str(error))
            else:
                left_out += [(source, obstacle) for obstacle in plan.obstacles]
        if refused:
            raise RewardError(f"{len(refused)} of {len(prompts)} rows have tests that cannot be used, the first: {refused[0]}")
        if left_out:
            count = len({source for source, _ in left_out})
            LOGGER.warning(
                "%d tests of %d rows (of %d) cannot be run apart from the program and are left out, the first: %s: %s",
                len(left_out), count, len(prompts), *left_out[0],
            )  # fmt: skip

    def plan_tests(self, metadata: Mapping[str, Any], where: str) -> TestPlan:
        """Call plan_tests with these settings."""
        return plan_tests(metadata, where, most_text=self.limits.output_bytes, leave_out=self.inseparable == "leave_out")

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """Start the workers and yield the reward function. Raises SandboxError if no sandbox works here."""
        confinement = self.confinement or find_confinement()
        limits = replace(self.limits, output_bytes=ENCODED * self.limits.output_bytes)
        programs = SandboxPool(_PROGRAM, num_workers=self.num_workers, limits=limits, confinement=confinement)
        judges = SandboxPool(_JUDGE, num_workers=self.num_workers, limits=limits, confinement=confinement)
        async with programs, judges:
            yield _CodeTests(self, programs, judges, confinement, trio.CapacityLimiter(self.num_workers))


code_reward = CodeReward()


@dataclass(frozen=True)
class Verdict:
    """Result of a test."""

    problem: str | None  # None = it passes
    undecided: bool = False  # the test asks an object of the program for a verdict


@dataclass(frozen=True)
class _CodeTests:
    """Reward function that CodeReward opens."""

    settings: CodeReward
    programs: SandboxPool
    judges: SandboxPool
    confinement: Confinement
    limiter: trio.CapacityLimiter
    openings: dict[str, Any] = field(default_factory=dict[str, Any])  # first requests of judges by tests, for the next sample of a group
    reward_name: str = "CodeReward"
    has_own_deadline: bool = True  # the limits of the pools and of each program

    async def __call__(self, sample: Sample) -> EvaluateResult:
        plan = self.settings.plan_tests(sample.metadata, describe_sample(sample))
        program = extract_program(sample.response)
        verdicts = await self._judge(program, plan, [test for test in plan.tests if test.stdin is None])
        for test in plan.tests:
            if test.stdin is not None:
                verdicts.append(Verdict(await self._test_program(program, test)))
        passed, undecided = (
            sum(flags) / len(verdicts) for flags in zip(*((v.problem is None, v.undecided) for v in verdicts), strict=True)
        )
        reason = next((verdict.problem for verdict in verdicts if verdict.problem is not None), "all tests pass")
        metrics = {"tests_passed": MetricResult(passed), "tests_undecided": MetricResult(undecided)}
        if self.settings.inseparable == "leave_out":
            metrics["tests_left_out"] = MetricResult(len(plan.obstacles) / (len(plan.obstacles) + len(plan.tests)))
        return EvaluateResult(passed if self.settings.fraction else float(passed == 1.0), reason=reason, metrics=metrics)

    async def _judge(self, program: str, plan: TestPlan, tests: Sequence[CodeTest]) -> list[Verdict]:
        """Return a verdict on each test. With `fraction` each test gets processes of its own."""
        if not tests:
            return []
        if self.settings.fraction and len(tests) > 1:
            return [verdict for test in tests for verdict in await self._judge(program, plan, [test])]
        separation = plan.separation or Separation((), (), ())
        asked = {
            "setup": plan.setup,
            "tests": [{"expression": test.expression} if test.source is None else {"source": test.source} for test in tests],
            "names": separation.names,
            "exceptions": separation.exceptions,
            "ambient": dict(separation.ambient),
            "most_text": self.settings.limits.output_bytes,
        }
        key = json.dumps(asked)
        requests, answers = self.openings.get(key, []), []
        for _ in range(MOST_PASSES):
            if requests:
                result = await self.programs.call({"code": program, "requests": requests})
                if not result.ok:
                    return [Verdict(f"the program failed: {result.error}")] * len(tests)
                answers = parse_answers(result.value, len(requests))
                if answers is None:
                    return [Verdict("the program came in the way of its tests")] * len(tests)
            result = await self.judges.call({**asked, "requests": requests, "answers": answers})
            if not result.ok:
                return [Verdict(f"the tests failed: {result.error}")] * len(tests)
            if "outcomes" in result.value:
                return [judge_outcome(test, outcome) for test, outcome in zip(tests, result.value["outcomes"], strict=True)]
            if not requests and len(self.openings) < MOST_OPENINGS:
                self.openings[key] = result.value["requests"]
            requests = result.value["requests"]
        return [Verdict(f"the tests still have open requests after {MOST_PASSES} rounds with the program")] * len(tests)

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
    """Return the last ``` block of Python, or without a language, of a text; the text itself without one."""
    blocks = [inside for language, inside in _FENCED.findall(response) if language.strip().lower() in _LANGUAGES]
    return blocks[-1] if blocks else response


def plan_tests(metadata: Mapping[str, Any], where: str, *, most_text: int | None = None, leave_out: bool = False) -> TestPlan:
    """Return the tests in a prompt's metadata, with the program's names in them.

    Args:
        most_text: most characters of JSON of all expressions' values together, since longer ones do not leave the sandbox.
        leave_out: leave out tests that cannot run apart from the program, unless all are; False: they are an error.

    Raises: RewardError if there is no list of tests, an empty one, an unusable test, or more is expected than can leave the sandbox.
    """
    setup, entry_point = metadata.get("test_setup", ""), metadata.get("entry_point")
    if not isinstance(setup, str) or not isinstance(entry_point, str | None):
        raise RewardError(f"metadata['test_setup'] and ['entry_point'] of {where} are {show_value((setup, entry_point))}, expected texts")
    setup_obstacle = _find_obstacle(setup, where)
    parsed = parse_tests(metadata.get("tests"), where, most_text=most_text)
    kept: list[CodeTest] = []
    obstacles: list[str] = []
    for test in parsed:
        text = test.source or test.expression
        obstacle = None if text is None else setup_obstacle or _find_obstacle(text, where)
        if obstacle is None:
            kept.append(test)
        else:
            obstacles.append(f"{show_value(text, 200)}: {obstacle}")
    texts = [text for test in kept if (text := test.source or test.expression) is not None]
    names = [entry_point] if entry_point is not None else []
    names += [test["entry_point"] for test in metadata["tests"] if isinstance(test, Mapping) and "entry_point" in test]
    found = separate([setup, *texts], names) if texts else None
    if isinstance(found, str):
        obstacles += [f"{show_value(text, 200)}: {found}" for text in texts]
        kept, found = [test for test in kept if test.stdin is not None], None
    if obstacles and not (leave_out and kept):
        advice = "or CodeReward(inseparable='leave_out')" if kept else "it has no other test"
        raise RewardError(f"a test of {where} cannot be run apart from the program: {obstacles[0]} (write another test, {advice})")
    return TestPlan(tuple(kept), setup, found, tuple(obstacles))


def _find_obstacle(text: str, where: str) -> str | None:
    try:
        return find_obstacle(text.strip())
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"the test {text!r:.200} of {where} is not valid Python: {error}") from error


def parse_tests(tests: Any, where: str, *, most_text: int | None = None) -> list[CodeTest]:
    """Parse metadata["tests"]. Arguments and errors as for plan_tests."""
    if not isinstance(tests, (list, tuple)) or not tests:
        raise RewardError(f"metadata['tests'] of {where} is {show_value(tests)}, expected a list of at least one test")
    parsed = [_parse_test(test, where) for test in cast("Sequence[Any]", tests)]
    size = sum(len(json.dumps({"value": write_literal(test.expected)})) + 2 for test in parsed if test.expression)
    if most_text is not None and size + 2 > most_text:
        raise RewardError(
            f"the tests of {where} expect values of {size} characters, more than the {most_text} that a sandbox gives back: "
            "raise limits.output_bytes of the CodeReward, or test smaller values"
        )
    return parsed


def _parse_test(test: Any, where: str) -> CodeTest:
    if isinstance(test, str):
        return _parse_statements(test, where)
    if isinstance(test, Mapping):
        entries = cast("Mapping[str, Any]", test)
        if set(entries) == {"call", "expected"} and isinstance(entries["call"], str):
            return CodeTest(expression=entries["call"], expected=_as_json(entries["expected"]))
        if "code" in entries and set(entries) <= {"code", "entry_point"} and all(isinstance(text, str) for text in entries.values()):
            call = f"\ncheck({entries['entry_point']})" if "entry_point" in entries else ""
            return _parse_statements(entries["code"] + call, where)
        if set(entries) == {"stdin", "stdout"} and isinstance(entries["stdin"], str) and isinstance(entries["stdout"], str):
            return CodeTest(stdin=entries["stdin"], stdout=entries["stdout"])
    raise RewardError(
        f"a test of {where} is {show_value(test)}, expected 'assert ...', "
        f"{{'call': ..., 'expected': ...}}, {{'code': ..., 'entry_point': ...}} or {{'stdin': ..., 'stdout': ...}}"
    )


def _parse_statements(test: str, where: str) -> CodeTest:
    try:
        body = ast.parse(test.strip()).body
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"the test {test!r:.200} of {where} is not valid Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        if not any(isinstance(node, ast.Assert | ast.Raise | ast.ClassDef) for statement in body for node in ast.walk(statement)):
            raise RewardError(f"the test {test!r:.200} of {where} asserts nothing")
        return CodeTest(source=test.strip())
    condition = body[0].test
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], ast.Eq | ast.Is):
        try:
            expected = _as_json(ast.literal_eval(condition.comparators[0]))
            is_identical = isinstance(condition.ops[0], ast.Is)
            return CodeTest(expression=ast.unparse(condition.left), expected=expected, is_identical=is_identical)
        except (ValueError, TypeError):  # the right side is not a literal
            pass
    return CodeTest(expression=f"bool({ast.unparse(condition)})", expected=True)


def parse_answers(value: Any, count: int) -> list[Any] | None:
    """Check an untrusted process's answers to `count` requests; None if they are not one valid answer for each."""
    if not isinstance(value, list) or len(cast("list[Any]", value)) != count:
        return None
    answers = cast("list[Any]", value)
    good = all(isinstance(answer, dict) and ("value" in answer or _is_error(answer.get("error"))) for answer in answers)
    return answers if good else None


def _is_error(error: Any) -> bool:
    if not isinstance(error, dict):
        return False
    kinds, text = cast("dict[str, Any]", error).get("kinds"), cast("dict[str, Any]", error).get("text")
    return isinstance(text, str) and isinstance(kinds, list) and all(isinstance(kind, str) for kind in cast("list[Any]", kinds))


def judge_outcome(test: CodeTest, outcome: Mapping[str, Any]) -> Verdict:
    """Compare a judge's outcome of a test with the expected one."""
    if test.source is None:
        return Verdict(compare_value(test, outcome), bool(outcome.get("undecided")))
    return Verdict(f"{outcome['error']} (in {test.source!r:.200})" if "error" in outcome else None, bool(outcome.get("undecided")))


def compare_value(test: CodeTest, answer: Any) -> str | None:
    """Describe the fault in the value of a test's expression, as the sandbox reported it; None = it has none."""
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
    """Convert tuples to lists, at any depth; keep everything else."""
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    filled = [i for i, line in enumerate(lines) if line]
    return lines[filled[0] : filled[-1] + 1] if filled else []

"""Rewards that run in a sandbox: mathematics, code with tests, untrusted reward code. Real processes, so few and short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from code_programs import CHEATING_PROGRAMS, SETUP, SHAPES

from rollouts.config import RewardConfig, RolloutConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.code.math_answers import MathReward, math_reward
from rollouts.rewards.code.sandboxed import SandboxedReward, parse_json_result
from rollouts.rewards.code.separation import Separation, separate
from rollouts.rewards.code.unit_tests import CodeReward, CodeTest, code_reward, compare_value, extract_program, parse_tests, plan_tests
from rollouts.rewards.composite import create_composite_reward
from rollouts.rewards.evaluate import RewardSource, score_group, score_now
from rollouts.rewards.reward_functions import load_reward
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.reward_code import execute_user_reward_code, open_code_pool
from rollouts.training.summaries import summarize_rewards
from rollouts.types import Group, Prompt, Sample, Status

UNHURRIED = RewardConfig(timeout_s=0.001)  # waiting for a worker counts against no deadline: the sandbox has its own
ZERO = RewardConfig(timeout_s=0.001, on_error="zero")
QUICK = SandboxLimits(wall_s=30.0, cpu_s=1.0)


def sample(response: str, **metadata: Any) -> Sample:
    return Sample(prompt="q", response=response, status=Status.COMPLETED, metadata=metadata)


def rewards(group: Group | None) -> list[float | None]:
    assert group is not None
    return [s.reward for s in group]


MATHEMATICS = [
    ("1/2", r"so $\frac{1}{2}$", 1.0),
    (r"\frac{1}{2}", r"it is \boxed{0.5}", 1.0),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
    (r"\{1,2\}", r"$\{2,1\}$", 1.0),
    ("(1,2)", "$(2,1)$", 0.0),
    ("1,000", "1000", 1.0),
    ("x^2-1", "$(x-1)(x+1)$", 1.0),
    (r"\boxed{42}", "first 41, then 42", 1.0),
    (-2, "$x=-2$", 1.0),
    ("5", "I do not know", 0.0),
]


async def test_mathematical_answers_are_compared_as_mathematics():
    async with MathReward(num_workers=1, limits=SandboxLimits(wall_s=30.0, cpu_s=1.0)).open_reward() as reward_fn:
        group = tuple(sample(response, ground_truth=truth) for truth, response, _ in MATHEMATICS)
        scored = await score_group(group, reward_fn, UNHURRIED)
        assert rewards(scored) == [expected for _, _, expected in MATHEMATICS] and scored is not None
        assert scored[0].reward_details.reason == r"found \frac{1}{2}, expected 1/2"
        summary = summarize_rewards(scored)
        assert summary["reward/answer_found"] == 0.9 and summary["reward/answer_compared"] == 1.0
        # an answer that would keep the comparison busy for ever is wrong, and the next comparison has a worker
        bomb, right = (
            await score_group((sample("$9^{9^{9^{9}}}$", ground_truth="1"), sample("7", ground_truth="7")), reward_fn, UNHURRIED) or ()
        )
        assert (bomb.reward, right.reward) == (0.0, 1.0)
        assert bomb.reward_details.metrics["answer_compared"].score == 0.0
        assert bomb.reward_details.reason.startswith("the answer could not be compared: ")
        with pytest.raises(RewardError, match="no answer can be read in the ground truth"):
            await score_group((sample("7", ground_truth=""),), reward_fn, UNHURRIED)


def test_what_is_not_open_is_no_reward_function():
    for source in (math_reward, code_reward, SandboxedReward("mine.py:reward")):
        assert isinstance(source, RewardSource)
        with pytest.raises(ConfigError, match=r"must be opened first: `async with source.open_reward\(\)"):
            score_now((sample("7"),), source)
        with pytest.raises(ConfigError, match="must be opened first"):
            source(sample("7"))
        with pytest.raises(ConfigError, match=r"RolloutConfig.reward_fn is a \w+Reward: `async with source.open_reward"):
            RolloutConfig(batch_size=1, reward_fn=source)
    assert load_reward("rollouts.rewards.code.math_answers:math_reward") is math_reward


PROGRAM = (
    "Here it is:\n```python\ndef add(a, b):\n    return a + b\n\n"
    "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n```\n"
)
TESTS = ["assert add(2, 3) == 5", {"call": "add((1,), (2,))", "expected": [1, 2]}, "assert add(1, 1) > 1"]
CHEATS = {
    "equal to everything": "class E:\n    __eq__ = lambda s, o: True\n    __repr__ = lambda s: 'E()'\nadd = lambda a, b: E()",
    "early success": "import os\nprint('all tests pass')\nos._exit(0)",
    "a fake result": "import builtins\nbuiltins.repr = lambda value: '5'\nadd = lambda a, b: None",
    "another harness": "def _values_of_expressions(expressions): return [{'value': '5'}] * 9\nadd = lambda a, b: 1",
    "no Python": "def add(a, b) return",
    "loops": "while True: pass",
}


async def test_programs_are_paid_for_the_tests_that_they_pass():
    names = list(CHEATS)
    half = sample("def add(a, b):\n    return 5", tests=TESTS)
    async with CodeReward(limits=QUICK).open_reward() as reward_fn:
        group = (sample(PROGRAM, tests=TESTS), half, *(sample(CHEATS[name], tests=TESTS) for name in names))
        scored = await score_group(group, reward_fn, UNHURRIED)
        assert rewards(scored) == [1.0, 0.0, *(0.0 for _ in names)] and scored is not None
        assert scored[0].reward_details.reason == "all tests pass"
        assert scored[1].reward_details.reason == "add((1,), (2,)) is 5, expected [1, 2]"
        assert scored[1].reward_details.metrics["tests_passed"].score == pytest.approx(2 / 3)
        assert scored[2 + names.index("loops")].reward_details.reason.startswith("the program failed: ")
        assert "SyntaxError" in scored[2 + names.index("no Python")].reward_details.reason
        with_input = [{"stdin": "2 3\n", "stdout": "5"}, {"stdin": "2 x", "stdout": "5"}]
        (both,) = await score_group((sample(PROGRAM, tests=with_input),), reward_fn, UNHURRIED) or ()
        assert both.reward == 0.0 and "ValueError" in both.reward_details.reason
        assert both.reward_details.metrics["tests_passed"].score == 0.5
        with pytest.raises(RewardError, match=r"metadata\['tests'\] of sample 0 .* is None"):
            await score_group((sample(PROGRAM),), reward_fn, UNHURRIED)
    async with CodeReward(fraction=True, num_workers=1, limits=QUICK).open_reward() as reward_fn:
        slow = "def add(a, b):\n    while a == 2: pass\n    return 2"
        assert rewards(await score_group((half, sample(slow, tests=TESTS)), reward_fn, UNHURRIED)) == pytest.approx([2 / 3, 1 / 3])


RIGHT_PROGRAMS = {
    "Counter": ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    "defaultdict": (
        "from collections import defaultdict\ndef f(x):\n    d = defaultdict(list)\n    d[1].append((x,))\n    return d",
        "assert f(2) == {1: [(2,)]}",
    ),
    "frozenset": ("def f(x): return frozenset(x)", "assert f([1, 2]) == {1, 2}"),
    "empty set": ("def f(x): return set(x)", {"call": "sorted(f([]))", "expected": []}),
    "namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(x): return [P(x, x)]",
        "assert f(1) == [(1, 1)]",
    ),
    "subclasses": ("class I(int):\n    __repr__ = lambda s: 'I'\ndef f(x): return {I(x): I(x)}", "assert f(2) == {2: 2}"),
    "True for 1": ("def f(x): return [x > 0, True]", "assert f(1) == [1, 1]"),
    "1 for True": ("def f(x): return 1", "assert f(1) == True"),
    "scalars of numpy": ("import numpy as np\ndef f(x): return [np.float64(x), np.int64(x)]", "assert f(2) == [2.0, 2]"),
    "a long list": ("def f(x): return list(range(x))", f"assert f(4000) == {list(range(4000))}"),
    "a long number": ("def f(x): return 10**x", {"call": "f(5000)", "expected": 10**5000}),
}


async def test_right_programs_pass_whatever_type_their_values_have():
    async with CodeReward(limits=QUICK).open_reward() as reward_fn:
        group = tuple(sample(program, tests=[test]) for program, test in RIGHT_PROGRAMS.values())
        scored = await score_group(group, reward_fn, UNHURRIED)
        found = dict(zip(RIGHT_PROGRAMS, scored or (), strict=True))
        assert {name: s.reward_details.reason for name, s in found.items() if s.reward != 1.0} == {}
        is_one = ["assert f(1) is True"]
        wrong = [sample(f"def f(x): return {value}", tests=is_one) for value in ("1", "True")]
        assert rewards(await score_group(tuple(wrong), reward_fn, UNHURRIED)) == [0.0, 1.0]


THIRD = "def third(x): return x / 3"


async def run_tests(program: str, tests: list[Any], reward_fn: Any, **metadata: Any) -> Sample:
    (scored,) = await score_group((sample(program, tests=tests, **metadata),), reward_fn, UNHURRIED) or ()
    return scored


OBSTACLES = {
    "x = 1\nassert x": "uses no name of the program",
    "assert sum(len([1])) == set(pow(1, 2))": "which of pow, sum is the program's cannot be told",
    "class A(Base):\n    pass\nassert A()": "derives a class from one of the program",
    "import solution_that_is_not_there\nassert f()": "imports 'solution_that_is_not_there', which is not installed",
    "import sys, io\nsys.stdout = io.StringIO()\nassert f()": r"looks into the process of the program \(stdout\)",
    "from unittest.mock import patch\nwith patch('builtins.input'): assert f()": r"\(patch\)",
    "async def test(): assert await f()": "waits for coroutines",
}


def test_tests_that_cannot_be_run_apart_from_the_program_are_refused_or_left_out(caplog: pytest.LogCaptureFixture):
    good = "assert f(2) == 4"
    for bad, message in OBSTACLES.items():
        with pytest.raises(RewardError, match=rf"a test of row 1 cannot be run apart from the program: .*{message}"):
            plan_tests({"tests": [bad]}, "row 1")
        with pytest.raises(RewardError, match="has no other test"):
            plan_tests({"tests": [bad]}, "row 1", leave_out=True)
    bad = list(OBSTACLES)[-1]
    plan = plan_tests({"tests": [good, bad]}, "row 1", leave_out=True)
    assert plan.tests == (CodeTest(expression="f(2)", expected=4),) and len(plan.obstacles) == 1
    rows = [{"tests": [good]}, {"tests": [good, bad, bad]}, {"tests": [good, bad]}]
    prompts, sources = [Prompt(content="q", metadata=row) for row in rows], [f"mine.jsonl, line {n}" for n in (1, 3, 4)]
    with pytest.raises(RewardError, match=r"2 of 3 rows have tests that cannot be used, the first: a test of mine.jsonl, line 3 cannot"):
        CodeReward().check_prompts(prompts, sources)
    CodeReward(inseparable="leave_out").check_prompts(prompts, sources)
    (warning,) = caplog.messages
    assert warning.startswith(
        "3 tests of 2 rows (of 3) cannot be run apart from the program and are left out, the first: mine.jsonl, line 3"
    )
    with pytest.raises(ConfigError, match=r"CodeReward\.inseparable is 'drop'"):
        CodeReward(inseparable="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sources,names",
    [
        (["assert f(2) == g(3)"], ("f", "g")),
        (["assert gcd(10, 4) == 2"], ("gcd",)),
        (["assert isclose(f(2), sqrt(2))"], ("f",)),
        (["import math", "assert math.isclose(area(2), math.pi)"], ("area",)),
        (["assert pow(2, 3) == 8 and isinstance(pow(2, 3), int)"], ("pow",)),
        (["assert list(calendar(2)) == [2]"], ("calendar",)),
        (["def near(a, b): return abs(a - b) < eps", "eps = 1", "assert near(f(1), 2)"], ("f",)),
        (["assert [g(y) for y in range(3) if (z := h(y))]"], ("g", "h")),
    ],
)
def test_names_of_the_program_are_those_that_neither_tests_nor_python_define(sources: list[str], names: tuple[str, ...]):
    found = separate(sources)
    assert isinstance(found, Separation) and found.names == names


async def test_what_objects_of_the_program_would_have_to_decide_is_counted():
    async with CodeReward(fraction=True, limits=QUICK).open_reward() as reward_fn:
        program = "class E:\n    __bool__ = __eq__ = __lt__ = lambda *a: True\ndef f(x): return E() if x else 1"
        tests = ["assert f(1)", "assert f(0)", "assert f(1) < 2", "assert f(1) == 1"]
        scored = await run_tests(program, tests, reward_fn)
        metrics = scored.reward_details.metrics
        assert (scored.reward, metrics["tests_undecided"].score) == (0.25, 0.5)
        assert "an object of the program" in scored.reward_details.reason
    leaves_out = CodeReward(inseparable="leave_out", limits=QUICK, num_workers=1)
    async with leaves_out.open_reward() as reward_fn:
        scored = await run_tests("def f(x): return 4", ["assert f(2) == 4", list(OBSTACLES)[-1]], reward_fn)
        assert (scored.reward, scored.reward_details.metrics["tests_left_out"].score) == (1.0, 0.5)


async def test_a_program_does_not_end_loops_of_a_test():
    tests = ["assert all(map(lambda n: f(n) == n + 1, range(3)))", "for n in map(f, range(3)):\n    assert n > 0"]
    async with CodeReward(fraction=True, limits=QUICK, num_workers=1).open_reward() as reward_fn:
        assert (await run_tests("def f(x): return x + 1", tests, reward_fn)).reward == 1.0
        assert (await run_tests("def f(x): raise StopIteration", tests, reward_fn)).reward == 0.0


async def test_a_test_that_asks_for_ever_and_one_that_never_ends_are_failures():
    async with CodeReward(limits=SandboxLimits(wall_s=10.0, cpu_s=1.0), num_workers=1).open_reward() as reward_fn:
        for program, tests, said in (
            ("def f(x): return x + 1", ["x = 0\nwhile f(x): x = f(x)\nassert x"], "the tests ask for more than 2000 values"),
            ("def f(x): return x", ["assert f(1)\nwhile True: pass"], "the tests failed: used more than 1.0 s"),
            ("import random\ndef f(): return random.SystemRandom().random()", ["assert 0 <= f() < 1 and f() != f()"], "all tests pass"),
        ):
            assert said in (await run_tests(program, tests, reward_fn)).reward_details.reason


async def test_right_programs_pass_tests_of_every_shape():
    failed: dict[str, str] = {}
    async with CodeReward(limits=QUICK).open_reward() as reward_fn:
        for shape, (program, tests) in SHAPES.items():
            scored = await run_tests(program, tests, reward_fn)
            if scored.reward != 1.0:
                failed[shape] = scored.reward_details.reason
        assert failed == {}
        with_setup = ["assert near(third(3), 1)", "assert Counter([third(3)]) == Counter([1.0]) and math.floor(third(4)) == 1"]
        assert (await run_tests(THIRD, with_setup, reward_fn, test_setup=SETUP)).reward == 1.0
        named = ["assert set(sorted([3, 1])) == {1, 3} and sorted([1]) == {1}"]
        assert (await run_tests("def sorted(x): return set(x)", named, reward_fn, entry_point="sorted")).reward == 1.0


FOUND_BY_AUDIT = ("truth", "sets", "the literal first", "isclose without its import", "tolerance")


@pytest.mark.parametrize("shapes", [FOUND_BY_AUDIT, pytest.param(tuple(SHAPES), marks=pytest.mark.slow)], ids=["few", "all"])
async def test_cheating_programs_pass_tests_of_no_shape(shapes: tuple[str, ...]):
    limits = SandboxLimits(wall_s=30.0, cpu_s=1.0)
    gained: list[tuple[str, str]] = []
    async with CodeReward(limits=limits).open_reward() as reward_fn:

        async def attack(shape: str, cheat: str) -> None:
            _, tests = SHAPES[shape]
            names = plan_tests({"tests": tests}, "x").separation
            assert names is not None
            program = CHEATING_PROGRAMS[cheat]
            program += "".join(f"try: {name} = stand_in\nexcept NameError: pass\n" for name in names.names)
            if (await run_tests(program, tests, reward_fn)).reward != 0.0:
                gained.append((shape, cheat))

        async with trio.open_nursery() as nursery:
            for shape in shapes:
                for cheat in CHEATING_PROGRAMS:
                    nursery.start_soon(attack, shape, cheat)
    assert gained == []


def test_tests_and_programs_are_read():
    assert parse_tests(TESTS, "x") == [
        CodeTest(expression="add(2, 3)", expected=5),
        CodeTest(expression="add((1,), (2,))", expected=[1, 2]),
        CodeTest(expression="bool(add(1, 1) > 1)", expected=True),
    ]
    assert parse_tests(["assert f() is None", "assert f() == g()"], "x") == [
        CodeTest(expression="f()", expected=None, is_identical=True),
        CodeTest(expression="bool(f() == g())", expected=True),
    ]
    for bad in (
        None,
        [],
        "assert f()",
        [5],
        ["f()"],
        ["assert"],
        [{"call": "f()"}],
        [{"stdin": 1, "stdout": ""}],
        [{"code": "assert f()", "other": ""}],
    ):
        with pytest.raises(RewardError, match=r"of x is|of x"):
            parse_tests(bad, "x")
    several = parse_tests(["x = f(1)\nassert x", {"code": "def check(c): assert c(1)", "entry_point": "f"}], "x")
    assert several == [CodeTest(source="x = f(1)\nassert x"), CodeTest(source="def check(c): assert c(1)\ncheck(f)")]
    assert extract_program("a\n```py\nfirst\n```\n```\nsecond\n```") == "second\n" and extract_program("x = 1") == "x = 1"
    one = CodeTest(expression="f()", expected=1)
    assert compare_value(one, {"value": "1"}) is None and compare_value(one, {"value": "True"}) is None
    assert parse_tests(["assert f() is True"], "x") == [CodeTest(expression="f()", expected=True, is_identical=True)]
    identical = CodeTest(expression="f()", expected=True, is_identical=True)
    assert compare_value(identical, {"value": "True"}) is None and compare_value(identical, {"value": "1"}) is not None
    for large in ("assert f() == '" + "a" * 300 + "'", {"call": "f()", "expected": list(range(100))}):
        assert parse_tests([large], "x")
        with pytest.raises(RewardError, match=r"expect values of \d+ characters, more than the 250"):
            parse_tests([large], "x", most_text=250)
    for bad in ({"value": "[" * 5000}, {"value": "9" * 9999}, {"value": 1}, {"error": "E"}, None, [], {"value": "f()"}):
        assert compare_value(one, bad) is not None


UNTRUSTED = """
import os, socket
def reward(messages, ground_truth):
    answer = messages[-1]["content"]
    if answer == "loop":
        while True: pass
    if answer == "raise":
        raise ValueError("no")
    if answer == "steal":
        return {"score": 0.0, "reason": str(dict(os.environ))}
    if answer == "text":
        return "1.0"
    if answer == "nan":
        return float("nan")
    return {"score": float(answer == ground_truth), "metrics": {"length": {"score": len(answer)}}}
"""


async def test_untrusted_reward_code_fails_its_sample_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_SECRET", "hunter2")
    file = tmp_path / "theirs.py"
    file.write_text(UNTRUSTED)
    answers = ["4", "loop", "raise", "text", "nan", "steal", "5"]
    group = tuple(sample(answer, ground_truth="4", unused=1) for answer in answers)
    async with SandboxedReward(f"{file}:reward", limits=QUICK).open_reward() as reward_fn:
        scored = await score_group(group, reward_fn, ZERO)
        assert rewards(scored) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] and scored is not None
        errors = [(s.reward_details and s.reward_details.error) or "" for s in scored]
        assert [bool(error) for error in errors] == [False, True, True, True, True, False, False]
        assert "reward gave no result for sample 0" in errors[1] and "ValueError: no" in errors[2] and "'1.0' (str)" in errors[3]
        assert "hunter2" not in scored[5].reward_details.reason
        assert summarize_rewards(scored) == {"reward/length": 1.0, "num_rewards_zeroed": 4.0}
        with pytest.raises(RewardError, match="ValueError: no"):
            await score_group(group[2:3], reward_fn, UNHURRIED)


async def test_files_that_are_no_reward_are_refused_when_the_reward_is_opened(tmp_path: Path):
    file = tmp_path / "theirs.py"
    for code, message in (
        ("def f(:", r"theirs.py is not valid Python: .*theirs.py, line 1"),
        ("def g(messages): pass", r"defines no function 'f', but g"),
        ("async def f(messages): pass", "is async"),
        ("from rollouts import reward_function\n@reward_function\nasync def f(messages): pass", "is async"),
        ("def f(sample): pass", "has no parameter `messages`"),
        ("def f(completions, **kwargs): pass", r"takes completions, as functions of TRL .* leave --reward.sandboxed out"),
        ("def f(data_source, solution_str, ground_truth, extra_info=None): pass", r"takes solution_str, as functions of TRL and verl do"),
        ("x = [][0]\ndef f(messages): pass", r"IndexError: list index out of range\n  File .*theirs.py\", line 1"),
    ):
        file.write_text(code)
        with pytest.raises(ConfigError, match=message):
            async with SandboxedReward(f"{file}:f", num_workers=1).open_reward():
                pass
    assert parse_json_result({"score": 0.5, "step_outputs": [{"step_index": 0, "base_reward": 1}]}, "f").step_outputs is not None
    for bad in ("1", None, True, [1.0], {"reward": 1.0}):
        with pytest.raises(RewardError):
            parse_json_result(bad, "f")


WITH_TYPES = """
import json
from rollouts import EvaluateResult, Message, MetricResult, StepOutput, reward_function as is_reward

def plain(messages, ground_truth):
    return EvaluateResult(float(messages[-1]["content"] == ground_truth), reason="plain")

@is_reward
def one(messages, ground_truth):
    assert isinstance(messages[-1], Message)
    right = float(messages[-1].content == ground_truth)
    return EvaluateResult(right, metrics={"form": MetricResult(0.5)}, step_outputs=[StepOutput(0, right)])

@is_reward(mode="batch")
def shortest(conversations, ground_truth, **rest):
    lengths = [len(messages[-1].content) for messages in conversations]
    if max(lengths) > 5: raise IndexError("too long")
    if max(lengths) == 5: return [EvaluateResult(1.0)]
    values = [EvaluateResult(float(n == min(lengths)), reason=truth + str(sorted(rest))) for n, truth in zip(lengths, ground_truth)]
    return [1.0 if messages[-1].content != "nan" else float("nan") for messages in conversations] if 3 in lengths else values

@is_reward
def fails(messages):
    return [][0]

@is_reward
def fails_below(messages):
    return json.loads("{")
"""


async def test_reward_files_in_a_sandbox_have_the_types_and_judge_groups(tmp_path: Path):
    file = tmp_path / "theirs.py"
    file.write_text(WITH_TYPES)

    async def judge(name: str, *answers: str) -> list[Sample]:
        group = tuple(sample(answer, ground_truth="4", other=1) for answer in answers)
        async with SandboxedReward(f"{file}:{name}", num_workers=1, limits=QUICK).open_reward() as reward_fn:
            return list(await score_group(group, reward_fn, ZERO) or ())

    assert rewards(tuple(await judge("plain", "4", "5"))) == [1.0, 0.0]
    right, wrong = await judge("one", "4", "5")
    assert (right.reward, wrong.reward) == (1.0, 0.0) and right.reward_details.steps[0].base_reward == 1.0
    assert right.reward_details.metrics["form"].score == 0.5
    short, long = await judge("shortest", "4", "44")
    assert (short.reward, long.reward, long.reward_details.reason) == (1.0, 0.0, "4['other']")
    bad, good = await judge("shortest", "nan", "4")
    assert (bad.reward, good.reward) == (0.0, 1.0) and "finite number" in bad.reward_details.error
    few = await judge("shortest", "55555", "4")
    assert all("1 results for 2" in s.reward_details.error for s in few)
    failed = await judge("shortest", "666666", "4")
    assert all("IndexError: too long" in s.reward_details.error and 'theirs.py", line 17' in s.reward_details.error for s in failed)
    with_pool = await execute_user_reward_code(WITH_TYPES, [{"role": "user", "content": "4"}], "4", function="one")
    assert with_pool.value["score"] == 1.0


async def test_types_of_rewards_need_neither_torch_nor_any_package():
    code = "import sys\nfrom rollouts import EvaluateResult, Sample, StepData, reward_function\n"
    code += "def f(messages): return [name for name in ('torch', 'trio', 'numpy') if name in sys.modules]"
    async with open_code_pool(limits=QUICK, packages=False) as pool:
        assert (await execute_user_reward_code(code, [], function="f", pool=pool)).unwrap() == []


@pytest.mark.parametrize("sandboxed", [False, True])
async def test_an_error_in_a_reward_keeps_its_file_and_line(tmp_path: Path, sandboxed: bool):
    file = tmp_path / "theirs.py"
    file.write_text(WITH_TYPES)
    for name, line, kind in (("fails", 24, "IndexError"), ("fails_below", 28, "JSONDecodeError"), ("shortest", 17, "IndexError")):
        group = (sample("666666", ground_truth="4"),)
        with pytest.raises(RewardError, match=kind) as caught:
            if sandboxed:
                async with SandboxedReward(f"{file}:{name}", num_workers=1, limits=QUICK).open_reward() as reward_fn:
                    await score_group(group, reward_fn, UNHURRIED)
            else:
                await score_group(group, load_reward(f"{file}:{name}"), RewardConfig())
        assert str(file) in str(caught.value) and (f"line {line}" if sandboxed else f":{line}") in str(caught.value)
    if not sandboxed:
        composite = create_composite_reward({"part": (load_reward(f"{file}:fails"), 1.0)})
        with pytest.raises(RewardError, match=rf"^component part: reward function fails raised IndexError for .*\({file}:24\)$"):
            await score_group((sample("4"),), composite, RewardConfig())


@pytest.mark.parametrize("reference", ["rollouts.rewards.answers:exact_match", "no.py:f", "nothing"])
async def test_a_sandboxed_function_is_one_of_a_file(reference):
    with pytest.raises(ConfigError):
        async with SandboxedReward(reference).open_reward():
            pass


def test_blocks_of_other_languages_are_no_programs():
    text = "```bash\npip install x\n```\nNow:\n```python\nx = 1\n```\nIt prints:\n```text\n1\n```"
    assert extract_program(text) == "x = 1\n" == extract_program("```Python\nx = 1\n```")


async def test_the_indentation_of_the_first_line_counts():
    tests = [{"stdin": "", "stdout": "  *\n ***\n"}]
    async with CodeReward(limits=QUICK).open_reward() as reward_fn:
        group = (sample("print('*\\n ***')", tests=tests), sample("print('\\n  * \\n ***')", tests=tests))
        assert rewards(await score_group(group, reward_fn, UNHURRIED)) == [0.0, 1.0]

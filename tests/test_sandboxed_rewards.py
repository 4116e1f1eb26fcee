"""Rewards that run in a sandbox: mathematics, code with tests, untrusted reward code. Real processes, so few and short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts.config import RewardConfig, RolloutConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.calls import RewardSource
from rollouts.rewards.code_tests import CodeReward, CodeTest, code_reward, compare_value, extract_program, parse_tests
from rollouts.rewards.evaluate import score_group, score_now, summarize_rewards
from rollouts.rewards.math_answers import MathReward, math_reward
from rollouts.rewards.reward_functions import load_reward
from rollouts.rewards.sandboxed import SandboxedReward, parse_json_result, read_parameters
from rollouts.sandbox.limits import SandboxLimits
from rollouts.types import Group, Sample, Status

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
    pytest.importorskip("math_verify")
    async with MathReward(num_workers=1, limits=SandboxLimits(wall_s=30.0, cpu_s=1.0)).open_reward() as reward_fn:
        group = tuple(sample(response, ground_truth=truth) for truth, response, _ in MATHEMATICS)
        scored = await score_group(group, reward_fn, UNHURRIED)
        assert rewards(scored) == [expected for _, _, expected in MATHEMATICS] and scored is not None
        assert scored[0].metadata["reward_reason"] == r"found \frac{1}{2}, expected 1/2"
        summary = summarize_rewards(scored)
        assert summary["reward/answer_found"] == 0.9 and summary["reward/answer_compared"] == 1.0
        # an answer that would keep the comparison busy for ever is wrong, and the next comparison has a worker
        bomb, right = (
            await score_group((sample("$9^{9^{9^{9}}}$", ground_truth="1"), sample("7", ground_truth="7")), reward_fn, UNHURRIED) or ()
        )
        assert (bomb.reward, right.reward) == (0.0, 1.0)
        assert bomb.metadata["reward_metrics"]["answer_compared"]["score"] == 0.0
        assert bomb.metadata["reward_reason"].startswith("the answer could not be compared: ")
        with pytest.raises(RewardError, match="no answer can be read in the ground truth"):
            await score_group((sample("7", ground_truth=""),), reward_fn, UNHURRIED)


def test_what_is_not_open_is_no_reward_function():
    for source in (math_reward, code_reward, SandboxedReward("mine.py:reward")):
        assert isinstance(source, RewardSource)
        with pytest.raises(ConfigError, match=r"is to be opened first: `async with source.open_reward\(\)"):
            score_now((sample("7"),), source)
        with pytest.raises(ConfigError, match="is to be opened first"):
            source(sample("7"))
        with pytest.raises(ConfigError, match=r"RolloutConfig.reward_fn is a \w+Reward: `async with source.open_reward"):
            RolloutConfig(batch_size=1, reward_fn=source)
    assert load_reward("rollouts.rewards.math_answers:math_reward") is math_reward


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
        assert scored[0].metadata["reward_reason"] == "all tests pass"
        assert scored[1].metadata["reward_reason"] == "add((1,), (2,)) is 5, expected [1, 2]"
        assert scored[1].metadata["reward_metrics"]["tests_passed"]["score"] == pytest.approx(2 / 3)
        assert scored[2 + names.index("loops")].metadata["reward_reason"].startswith("the program failed: ")
        assert "SyntaxError" in scored[2 + names.index("no Python")].metadata["reward_reason"]
        with_input = [{"stdin": "2 3\n", "stdout": "5"}, {"stdin": "2 x", "stdout": "5"}]
        (both,) = await score_group((sample(PROGRAM, tests=with_input),), reward_fn, UNHURRIED) or ()
        assert both.reward == 0.0 and "ValueError" in both.metadata["reward_reason"]
        assert both.metadata["reward_metrics"]["tests_passed"]["score"] == 0.5
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
        assert {name: s.metadata["reward_reason"] for name, s in found.items() if s.reward != 1.0} == {}
        is_one = ["assert f(1) is True"]
        wrong = [sample(f"def f(x): return {value}", tests=is_one) for value in ("1", "True")]
        assert rewards(await score_group(tuple(wrong), reward_fn, UNHURRIED)) == [0.0, 1.0]


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
    for bad in (None, [], "assert f()", [5], ["f()"], ["assert"], [{"call": "f()"}], [{"stdin": 1, "stdout": ""}], ["x = 1\nassert x"]):
        with pytest.raises(RewardError, match=r"of x is|of x"):
            parse_tests(bad, "x")
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
        errors = [s.metadata.get("reward_error", "") for s in scored]
        assert [bool(error) for error in errors] == [False, True, True, True, True, False, False]
        assert "reward gave no result for sample 0" in errors[1] and "ValueError: no" in errors[2] and "'1.0' (str)" in errors[3]
        assert "hunter2" not in scored[5].metadata["reward_reason"]
        assert summarize_rewards(scored) == {"reward/length": 1.0, "num_rewards_zeroed": 4.0}
        with pytest.raises(RewardError, match="ValueError: no"):
            await score_group(group[2:3], reward_fn, UNHURRIED)


def test_untrusted_code_is_read_and_not_executed(tmp_path: Path):
    assert read_parameters("def f(messages, *, a=1, **k): 1/0\n1/0", "f", "x.py") == (frozenset({"messages", "a"}), True)
    for code, message in (
        ("def f(:", "is no Python"),
        ("def g(messages): pass", r"defines no function 'f' \(found g\)"),
        ("async def f(messages): pass", "is async"),
        ("def f(sample): pass", "has no parameter `messages`"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_parameters(code, "f", "x.py")
    assert parse_json_result({"score": 0.5, "step_outputs": [{"step_index": 0, "base_reward": 1}]}, "f").step_outputs is not None
    for bad in ("1", None, True, [1.0], {"reward": 1.0}):
        with pytest.raises(RewardError):
            parse_json_result(bad, "f")


@pytest.mark.parametrize("reference", ["rollouts.rewards.answers:exact_match", "no.py:f", "nothing"])
async def test_a_sandboxed_function_is_one_of_a_file(reference):
    with pytest.raises(ConfigError):
        async with SandboxedReward(reference).open_reward():
            pass

"""Answer extraction by table, rewards that compare, functions found by name."""

from __future__ import annotations

import json
from typing import Any

import needs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.answers import (
    exact_match,
    extract_gsm8k_answer,
    gsm8k_reward,
    load_function,
    normalize_number,
)
from rollouts.types import Sample, Status


def make_answer(response: str, truth: Any, status: Status = Status.COMPLETED) -> Sample:
    return Sample(response=response, status=status, metadata={"ground_truth": truth})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("42", "42"), (" 42. ", "42"), ("$1,234.50", "1234.5"), ("-7", "-7"), ("-$7", "-7"), ("$ 5", "5"), ("+3", "3"), ("007", "7"),
     ("-0.0", "0"), (".5", "0.5"), ("5.", "5"), ("1,000,000", "1000000"), ("50%", "50"), ("\N{MINUS SIGN}3", "-3"), ("3 000", "3000"),
     ("", None), ("-", None), ("four", None), ("1.2.3", None), ("4x", None), ("1e5", None), ("\N{ARABIC-INDIC DIGIT FOUR}", None)],
)  # fmt: skip
def test_numbers_have_one_form(text, expected):
    assert normalize_number(text) == expected


@given(st.integers(-(10**9), 10**9), st.integers(0, 99), st.booleans())
def test_every_way_of_writing_a_number_is_the_same_number(whole, cents, dollar):
    written = f"{whole:,}.{cents:02d}"
    plain = f"{whole}.{cents:02d}".rstrip("0").rstrip(".")
    sign = "$" if dollar else ""
    assert normalize_number(sign + written) == plain
    assert extract_gsm8k_answer(f"so 3 x 4 = 12\n#### {sign}{written}") == plain
    assert extract_gsm8k_answer(f"First 12, then it is {sign}{written}.") == plain


@pytest.mark.parametrize(
    ("text", "expected", "strict"),
    [("5 + 3 = 8\n#### 8", "8", "8"), ("#### 1,234", "1234", "1234"), ("#### $18.00", "18", "18"), ("#### -5", "-5", "-5"),
     ("####42", "42", "42"),
     ("#### 42.", "42", "42"), ("#### 0.50", "0.5", "0.5"), ("#### 7\nwrong\n#### 9", "9", "9"), ("#### 42 apples in 3 boxes", "42", "42"),
     ("#### The answer is 42", "42", "42"), ("#### none", None, None), ("#### ", None, None), ("", None, None), ("no number", None, None),
     ("It is 12, or 13.", "13", None), ("He pays $1,200.", "1200", None), ("9-4", "4", None), ("10 - 3", "3", None),
     ("from 8 to -2", "-2", None),
     ("f(x)-1", "1", None), ("x = \N{MINUS SIGN}6", "-6", None), ("is .25", "0.25", None), ("1,2,3", "3", None), ("$-5", "-5", None),
     ("3.0", "3", None),
     ("50%", "50", None), ("12345,678", "678", None), ("v2.5", "2.5", None)],
)  # fmt: skip
def test_gsm8k_answers(text, expected, strict):
    assert extract_gsm8k_answer(text) == expected
    assert extract_gsm8k_answer(text, strict=True) == strict


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [("#### 8", "8", 1.0), ("so #### 8.0", "5 + 3 = 8\n#### 8", 1.0), ("I get $1,000.", 1000, 1.0), ("#### 9", "8", 0.0), ("", "8", 0.0),
     ("#### none, though 8", "8", 1.0), ("eight", "8", 0.0), ("#### -8", "8", 0.0), ("#### 88", "8", 0.0)],
)  # fmt: skip
def test_gsm8k_reward(response, truth, reward):
    assert gsm8k_reward(make_answer(response, truth)) == reward


@pytest.mark.more
@needs.GSM8K
def test_gsm8k_reference_answers_are_all_found():
    path = needs.get_gsm8k() / "test.jsonl"
    answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    for answer in answers:
        number = extract_gsm8k_answer(answer, strict=True)
        assert number is not None and float(number) == float(answer.rpartition("####")[2].replace(",", ""))
        assert gsm8k_reward(make_answer(answer, answer)) == 1.0


@pytest.mark.parametrize("metadata", [{}, {"answer": "8"}])
@pytest.mark.parametrize("reward_fn", [gsm8k_reward, exact_match])
def test_a_missing_ground_truth_is_an_error_not_a_zero(reward_fn, metadata):
    with pytest.raises(RewardError, match=r"sample 5 has no metadata\['ground_truth'\]"):
        reward_fn(Sample(index=5, response="8", metadata=metadata))


def test_a_ground_truth_without_a_number_is_an_error_not_a_zero():
    with pytest.raises(RewardError, match="has no number: 'many'"):
        gsm8k_reward(make_answer("8", "many"))


@pytest.mark.parametrize(
    ("response", "truth", "status", "reward"),
    [("0347", "0347", Status.COMPLETED, 1.0), (" 0347\n", "0347", Status.COMPLETED, 1.0), ("347", "0347", Status.COMPLETED, 0.0),
     ("0347", "0347", Status.TRUNCATED, 0.0), ("7", 7, Status.COMPLETED, 1.0), ("", "0", Status.COMPLETED, 0.0),
     ("A", "a", Status.COMPLETED, 0.0)],
)  # fmt: skip
def test_exact_match(response, truth, status, reward):
    assert exact_match(make_answer(response, truth, status)) == reward


def test_functions_are_loaded_from_modules_and_files(tmp_path):
    assert load_function("rollouts.rewards.answers:gsm8k_reward") is gsm8k_reward
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass(frozen=True)\nclass Scale:\n    by: float = 2.0\n\ndef reward(sample):\n    return Scale().by * sample.index\n"
    )
    assert load_function(f"{path}:reward")(Sample(index=3)) == 6.0
    path.write_text("def reward(sample):\n    return 0.5\n")
    assert load_function(f"{path}:reward")(Sample()) == 0.5


@pytest.mark.parametrize(
    ("reference", "message"),
    [("gsm8k_reward", "does not name a function: write"), ("a.b:", "does not name"), (":f", "does not name"),
     ("no_such_module_x:f", "cannot import 'no_such_module_x'"), ("rollouts.no_such:f", "cannot import"), (".relative:f", "cannot import"),
     ("rollouts.rewards.answers:gsm8k_rewards", "has no function 'gsm8k_rewards': did you mean 'gsm8k_reward'"),
     ("rollouts.rewards.answers:_NUMBER", "'_NUMBER' in rollouts.rewards.answers is re.compile"),
     ("missing/file.py:f", "there is no file")],
)  # fmt: skip
def test_functions_that_are_not_there_are_named(reference, message):
    with pytest.raises(ConfigError, match=message):
        load_function(reference)


@pytest.mark.parametrize("text", ["def f(:", "import no_such_module_x", "1 / 0", "undefined"])
def test_files_that_cannot_be_imported_are_named(tmp_path, text):
    (tmp_path / "bad.py").write_text(text + "\n")
    with pytest.raises(ConfigError, match=r"bad\.py cannot be imported: \w+Error: "):
        load_function(f"{tmp_path / 'bad.py'}:f")
